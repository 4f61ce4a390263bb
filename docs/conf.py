"""The site: `make docs` builds it from these pages and from the docstrings, and reaches for no network."""

from importlib.util import find_spec

import gsbn

project, release = "gsbn", gsbn.__version__
copyright = "the gsbn authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_show_sourcelink = False
default_role = "py:obj"  # `forward` in a docstring becomes a link where the API has such a name
autodoc_typehints = "none"  # the sections of a docstring say more than Any
autodoc_preserve_defaults = True  # as the source has them: np.float64
autodoc_mock_imports = [] if find_spec("torch") else ["torch"]  # which gsbn.torch needs
myst_heading_anchors = 3
