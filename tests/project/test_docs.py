"""README and docs/: their Python runs, their links are valid, and the site builds without a warning."""

from __future__ import annotations

import ast
import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gsbn
from gsbn import bench, reference
from tests.groups.contract.engines import why_not
from tests.support import ROOT

DOCS, EXAMPLES, PACKAGE = ROOT / "docs", ROOT / "examples", Path(gsbn.__file__).parent

if not DOCS.is_dir():
    pytest.skip("needs the source tree", allow_module_level=True)

PAGES = sorted(DOCS.rglob("*.md"))
SITE_TOOLS = ("sphinx", "furo", "myst_parser")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def program(page: Path, *, gpu: bool) -> str:
    """The Python blocks of a page, in order; all other lines are blank, so that line numbers stay the same.

    Without a GPU, blocks that start with "# Needs a GPU" are left out. With one, CuPy replaces NumPy as xp.
    """
    kept, inside = [], False
    lines = page.read_text(encoding="utf-8").splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("```"):
            inside = line == "```python" and (gpu or following != "# Needs a GPU")
            kept.append("")
        else:
            kept.append(line if inside else "")
    text = "\n".join(kept) + "\n"
    return text.replace("import numpy as xp", "import cupy as xp") if gpu else text


RUNNABLE = [page for page in (*PAGES, ROOT / "README.md") if program(page, gpu=True).strip()]


def test_pages_with_python_are_found() -> None:
    assert {page.stem for page in RUNNABLE} >= {"start", "training", "pytorch", "accuracy"}


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
@pytest.mark.parametrize("gpu", [pytest.param(False, id="cpu"), pytest.param(True, id="gpu", marks=pytest.mark.gpu)])
def test_the_python_of_a_page_runs(page: Path, gpu: bool, tmp_path: Path) -> None:
    """Run the page in a new interpreter. Blocks that need a GPU are compiled on every machine."""
    compile(program(page, gpu=True), name_of(page), "exec")
    text = program(page, gpu=gpu)
    if "import torch" in text:
        torch = pytest.importorskip("torch")
        if gpu and not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA device")
    if "from mpi4py" in text and (reason := why_not("mpi")):
        pytest.skip(reason)
    file = tmp_path / f"{page.stem}_page.py"
    file.write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(PACKAGE.parent), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run([sys.executable, file], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def docstring_examples() -> Iterator[Any]:
    """The docstrings of gsbn with examples, as doctests."""
    parser = doctest.DocTestParser()
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                found = parser.get_doctest(text, {}, file.stem, str(file), node.body[0].lineno - 1)
                if found.examples:
                    yield pytest.param(found, id=f"{name_of(file)}:{node.body[0].lineno}")


@pytest.mark.parametrize("found", list(docstring_examples()))
def test_the_examples_in_docstrings(found: doctest.DocTest) -> None:
    for example in found.examples:
        compile(example.source, found.filename or "", "single")
    package = Path(found.filename or "").parent.name
    if package == "torch":
        pytest.importorskip("torch")
    if package != "bench":  # those measure for minutes
        assert doctest.DocTestRunner().run(found).failed == 0


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=name_of)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_public_name_is_on_the_api_page() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    modules = [gsbn, reference, bench, *([gsbn.torch] if find_spec("torch") else [])]
    names = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert sorted(name for name in names if not re.search(rf"{re.escape(name)}\b", text)) == []


@pytest.mark.skipif(not all(map(find_spec, SITE_TOOLS)), reason="needs the tools of pip install '.[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    """Warnings, such as broken links, are errors; and no page loads anything from another site."""
    command = [sys.executable, "-m", "sphinx", "-E", "-W", "-q", str(DOCS), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        html = (tmp_path / page.relative_to(DOCS).with_suffix(".html")).read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^>]*", html) == []
    for style in tmp_path.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")) == [], style
    assert (tmp_path / "_images" / "kernelbench.png").is_file()


def test_the_edit_that_contributing_shows_finds_its_line() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    ((pattern, new, file),) = re.findall(r"^sed -i 's/(.*)/(.*)/' (\S+)$", page, re.MULTILINE)
    changed, count = re.subn(pattern, new, (ROOT / file).read_text("utf-8"), flags=re.MULTILINE)
    assert count == 1 and new in changed
