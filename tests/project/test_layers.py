"""Imports go down: a module of gsbn imports only from lower floors, anywhere in its file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gsbn

PACKAGE = Path(gsbn.__file__).parent
FLOORS = (  # lowest first; a package without named modules stands for all of them
    {"gsbn._operands", "gsbn._plan", "gsbn._rounding", "gsbn._timing", "gsbn._typing", "gsbn._values"},
    {"gsbn._activations", "gsbn._arrays", "gsbn._cuda", "gsbn._gradients", "gsbn._prepared", "gsbn._renorm"},
    {"gsbn._ranks", "gsbn._warm_up", "gsbn.reference"},
    {"gsbn._cpu", "gsbn._host", "gsbn._saved"},
    {"gsbn._backward", "gsbn._fold", "gsbn._forward", "gsbn._matmul", "gsbn._prepare"},
    {"gsbn.torch"},
    {"gsbn"},
    {"gsbn.bench"},
    {"gsbn.__main__"},
)
FLOOR_OF = {name: height for height, floor in enumerate(FLOORS) for name in floor}
# For type checkers alone: at run time gsbn.__getattr__ imports it on first use.
UPWARDS = {("gsbn", "gsbn.bench")}


def sources(package: Path) -> dict[str, Path]:
    """The modules of a package by their dotted names."""
    names = {file: file.relative_to(package.parent).with_suffix("").parts for file in package.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): file for file, parts in names.items()}


def imports(name: str, file: Path, known: dict[str, Path]) -> set[str]:
    """The known modules that a module imports, including inside functions and for type checkers."""
    found: set[str] = set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            found |= {at if (at := f"{source}.{alias.name}") in known else source for alias in node.names}
    return {module for module in found if module in known} - {name}


def floor(name: str) -> tuple[str, int]:
    """The entry of FLOORS that a module falls under, and its height."""
    entry = name
    while entry and entry not in FLOOR_OF:
        entry = entry.rpartition(".")[0]
    whole = entry == name or not any(other.startswith(f"{entry}.") for other in FLOOR_OF)
    assert entry and whole, f"{name} has no floor: give it one in {Path(__file__).name}"
    return entry, FLOOR_OF[entry]


MODULES = sources(PACKAGE)
IMPORTS = {name: imports(name, file, MODULES) for name, file in MODULES.items()}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name: str) -> None:
    entry, height = floor(name)
    for module in IMPORTS[name]:
        other, below = floor(module)
        assert below < height or other == entry or (name, module) in UPWARDS, f"{name} imports {module}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_private_names_stay_in_their_module(name: str) -> None:
    """A name with a leading underscore is used only in its own module; names of private modules may be imported."""
    nodes = list(ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))))
    ours = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.level or node.module == "gsbn")]
    imported = {alias.name for node in ours for alias in node.names}
    modules = {module.rpartition(".")[2] for module in MODULES}
    taken = {found for found in imported if found.startswith("_") and found not in modules}
    taken |= {
        f"{node.value.id}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported & modules
        if node.attr.startswith("_") and not node.attr.startswith("__")
    }
    assert not taken


def test_every_floor_is_of_a_module_that_exists() -> None:
    assert set(FLOOR_OF) <= set(MODULES)


def test_there_is_no_circle() -> None:
    """Not even between modules of a package that has one entry in FLOORS."""
    left = {name: {module for module in found if (name, module) not in UPWARDS} for name, found in IMPORTS.items()}
    while ready := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in ready}
    assert not left, f"in circles, or above one: {', '.join(sorted(left))}"


def test_what_counts_as_an_import(tmp_path: Path) -> None:
    """Test `imports` on a package with each kind of import."""
    package = tmp_path / "gsbn"
    (package / "bench").mkdir(parents=True)
    texts = {
        "__init__": "if TYPE_CHECKING:\n    from . import bench",
        "_a": "import numpy, gsbn._b",
        "_b": "def f():\n    from gsbn import _a, forward",
        "bench/__init__": "from .x import run",
        "bench/x": "from .. import _a\nfrom .._b import name\nfrom ..bench import y",
        "bench/y": "import gsbn\nfrom . import x as z",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    known = sources(package)
    assert {name: imports(name, file, known) for name, file in known.items()} == {
        "gsbn": {"gsbn.bench"},
        "gsbn._a": {"gsbn._b"},
        "gsbn._b": {"gsbn._a", "gsbn"},
        "gsbn.bench": {"gsbn.bench.x"},
        "gsbn.bench.x": {"gsbn._a", "gsbn._b", "gsbn.bench.y"},
        "gsbn.bench.y": {"gsbn", "gsbn.bench.x"},
    }
