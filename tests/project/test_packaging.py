"""The wheel, the sdist, an installed wheel and an editable install are complete."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gsbn
from tests.support import ROOT

KERNELS = sorted(path.relative_to(ROOT / "kernels").as_posix() for path in (ROOT / "kernels").rglob("*.cu*"))

if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("needs the source tree", allow_module_level=True)


def python(code: str, *paths: Path, cwd: Path) -> list[str]:
    """The lines that `code` prints in a fresh interpreter, with `paths` before everything else."""
    search = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel): the wheel is built from the sdist, which shows that the sdist is complete."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the wheel, and nothing else."""
    pytest.importorskip("pip")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    done = subprocess.run([*command, str(built[1])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_there_are_kernels() -> None:
    assert "common/common.cuh" in KERNELS
    assert len(KERNELS) >= 4


def test_wheel_holds_the_package_and_nothing_beside_it(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
        for name in KERNELS:
            assert wheel.read(f"gsbn/kernels/{name}") == (ROOT / "kernels" / name).read_bytes()
    assert "gsbn/py.typed" in names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gsbn").rglob("*.py")}
    assert modules <= set(names)
    assert {name.split("/")[0] for name in names} == {"gsbn", f"gsbn-{gsbn.__version__}.dist-info"}


def test_sdist_holds_what_a_checkout_holds(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"kernels/{name}" for name in KERNELS} <= names
    for folder in ("gsbn", "tests", "examples"):
        assert {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")} <= names
    wanted = {
        "pyproject.toml",
        "Makefile",
        "tools/cuda_extra.py",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "gsbn/py.typed",
    }
    assert wanted <= names


def test_metadata(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        metadata = wheel.read(f"gsbn-{gsbn.__version__}.dist-info/METADATA").decode()
    requires = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    assert [line for line in requires if "extra ==" not in line] == ["numpy>=2.0"], "numpy is the only hard dependency"
    assert {"typer", "rich", "matplotlib", "ml-dtypes"} == {
        re.split(r"[^\w-]", line)[0] for line in requires if "extra == 'cli'" in line
    }
    for extra, cupy in (("cuda12", "cupy-cuda12x[ctk]"), ("cuda13", "cupy-cuda13x[ctk]")):
        mine = [line for line in requires if re.search(rf"extra == ['\"]{extra}['\"]", line)]
        assert any(line.startswith(cupy) for line in mine)
        assert len([line for line in mine if line.startswith("cupy")]) == 1, "two CuPy wheels break each other"


def test_the_description_has_no_link_that_leads_nowhere(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        metadata = wheel.read(f"gsbn-{gsbn.__version__}.dist-info/METADATA").decode()
    description = metadata.partition("\n\n")[2]
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", description) == []
    assert "make demo" in description and "Start (`docs/guide/start.md`)" in description
    code = "from describe_wheel import described; print(described('[a](b.md#c), ![p](q.svg)', 'https://e.org/x'))"
    assert python(code, ROOT / "tools", cwd=ROOT) == ["[a](https://e.org/x/b.md#c), ![p](https://e.org/x/q.svg)"]


def test_the_command_is_there(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        entry = wheel.read(f"gsbn-{gsbn.__version__}.dist-info/entry_points.txt").decode()
    module, function = re.search(r"^gsbn = (\S+):(\S+)$", entry, re.M).groups()
    assert callable(getattr(importlib.import_module(module), function))


def test_installed_wheel_finds_its_kernels_and_works(installed: Path) -> None:
    code = """
import sys
sys.modules["cupy"] = sys.modules["torch"] = sys.modules["ml_dtypes"] = None  # none of them is installed
import numpy as np, gsbn
from gsbn._plan import declared as _declared
y = gsbn.forward(np.eye(4, 3), np.eye(2, 3), np.ones(2), training=True)
print(gsbn.__file__, _declared.KERNEL_DIR, gsbn.__version__, y.shape, sep="\\n")
"""
    module, kernels, version, shape = python(code, installed, cwd=installed)
    assert Path(module) == installed / "gsbn" / "__init__.py"
    assert Path(kernels) == installed / "gsbn" / "kernels"
    assert sorted(path.relative_to(kernels).as_posix() for path in Path(kernels).rglob("*.cu*")) == KERNELS
    assert (version, shape) == (gsbn.__version__, "(4, 2)")


def test_editable_install_reads_the_repository(tmp_path: Path) -> None:
    hatchling = pytest.importorskip("hatchling.build")
    wheel = python(
        f"from hatchling.build import build_editable as build; print(build({str(tmp_path)!r}))",
        Path(hatchling.__file__).parents[1],
        cwd=ROOT,
    )[-1]
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert not (tmp_path / "site" / "gsbn").exists(), "a copy of the kernels would go stale"
    code = f"""
import site
site.addsitedir({str(tmp_path / "site")!r})
import gsbn
from gsbn._plan import declared as _declared
print(gsbn.__file__, _declared.KERNEL_DIR, sep="\\n")
"""
    module, kernels = python(code, cwd=tmp_path)
    assert Path(module) == ROOT / "gsbn" / "__init__.py"
    assert Path(kernels) == ROOT / "kernels"


def test_the_version_has_one_home() -> None:
    literal = re.compile(rf"(?<![\d.]){re.escape(gsbn.__version__)}(?![\d.])")
    files = [ROOT / "pyproject.toml", *(ROOT / "gsbn").rglob("*.py")]
    assert [path.name for path in files if literal.search(path.read_text())] == ["__init__.py"]
    assert re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == gsbn.__version__


@pytest.mark.parametrize(
    ("version", "expected"),
    [(0, ""), (12020, "cuda12"), (12090, "cuda12"), (13000, "cuda13"), (13020, "cuda13"), (14000, "cuda13")],
)
def test_the_extra_follows_the_driver(version: int, expected: str) -> None:
    code = f"from cuda_extra import extra; print(extra({version}))"
    assert python(code, ROOT / "tools", cwd=ROOT) == [expected]
