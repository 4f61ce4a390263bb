"""The examples run as they are, and say what they lack."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gsbn
from tests.groups.contract.engines import environment as of_ranks
from tests.groups.contract.engines import why_not
from tests.support import ROOT

EXAMPLES = ROOT / "examples"
GSBN = Path(gsbn.__file__).parents[1]  # the gsbn under test, even if another is installed


def run(*arguments: object, gpu: bool = False, ranks: int = 0) -> str:
    """Run an example in a new interpreter, or in several under MPI, and return its output; `gpu=False` hides GPUs."""
    environment = of_ranks() if ranks else dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(GSBN), os.environ.get("PYTHONPATH", "")])
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [*(("mpiexec", "-n", str(ranks)) if ranks else ()), sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def devices() -> list[Any]:
    return [pytest.param(False, id="cpu"), pytest.param(True, id="gpu", marks=pytest.mark.gpu)]


def need_torch_cuda() -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")


@pytest.mark.parametrize("gpu", devices())
def test_quickstart(gpu: bool) -> None:
    output = run(EXAMPLES / "quickstart.py", "--rounds", 2, gpu=gpu)
    assert f"gsbn {gsbn.__version__}" in output
    for number in (33, 39):
        assert f"KernelBench {number}" in output
    if gpu:
        assert len(re.findall(r"path: .*(?:scale_stats, normalize|forward_sm90)", output)) == 6
    else:
        assert output.startswith("No GPU (") and "A CPU is for tests and examples" in output.splitlines()[0]
        heading = next(line for line in output.splitlines() if "median ms" in line)
        assert heading.index("error against float64") < heading.index("median ms")
        assert "NumPy, one by one" in output


@pytest.mark.parametrize("gpu", devices())
def test_torch_handoff(gpu: bool) -> None:
    pytest.importorskip("torch")
    if gpu:
        need_torch_cuda()
    assert f"gsbn and torch.nn agree on {'cuda' if gpu else 'cpu'}" in run(EXAMPLES / "torch_handoff.py", gpu=gpu)


@pytest.mark.parametrize("gpu", devices())
def test_jax_handoff(gpu: bool) -> None:
    jax = pytest.importorskip("jax")
    if gpu and jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    assert f"gsbn and JAX agree on {'gpu' if gpu else 'cpu'}" in run(EXAMPLES / "jax_handoff.py", gpu=gpu)


@pytest.mark.parametrize("gpu", devices())
def test_mpi_sync(gpu: bool) -> None:
    if reason := why_not("mpi"):
        pytest.skip(reason)
    output = run(EXAMPLES / "mpi_sync.py", gpu=gpu, ranks=2)
    assert f"2 ranks with {'cupy' if gpu else 'numpy'} arrays, and one rank with the whole batch, agree" in output


# ---- a library that is missing

HIDE = """
import runpy, sys
hidden, sys.argv = sys.argv[1], sys.argv[2:]
sys.modules[hidden] = None
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PACKAGES = {"sklearn": "scikit-learn", "cupy": "cupy-cuda12x"}  # module names and package names differ
NEEDS = {
    "kernelbench_time": ("torch",),
    "torch_handoff": ("torch",),
    "published_head": ("torch",),
    "compare_models": ("torch",),
    "barlow_twins_head": ("torch", "sklearn"),
    "torch_autograd": ("torch", "sklearn", "ml_dtypes"),
    "torch_ddp": ("torch",),
    "train_digits": ("sklearn", "rich", "matplotlib"),
    "jax_handoff": ("jax",),
    "mpi_sync": ("mpi4py",),
}
NEEDS_ON_A_GPU = {name: "cupy" for name, needed in NEEDS.items() if "torch" in needed or "jax" in needed}
del NEEDS_ON_A_GPU["barlow_twins_head"]  # plain PyTorch by default


def hide(library: str, example: str, *arguments: object, gpu: bool = False) -> Any:
    """Run an example that cannot import a library, and return how it ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(GSBN), os.environ.get("PYTHONPATH", "")])}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", HIDE, library, EXAMPLES / f"{example}.py", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "library", "gpu"),
    [(name, library, False) for name, needed in NEEDS.items() for library in needed]
    + [pytest.param(*row, True, marks=pytest.mark.gpu) for row in NEEDS_ON_A_GPU.items()],
)
def test_an_example_says_what_it_lacks(name: str, library: str, gpu: bool) -> None:
    """In one line that tells how to install it."""
    for other in NEEDS.get(name, ()):
        if other != library:
            pytest.importorskip(other)
    if gpu and "torch" in NEEDS.get(name, ()):
        need_torch_cuda()
    done = hide(library, name, gpu=gpu)
    assert done.returncode == 1
    package = PACKAGES.get(library, library)
    assert re.fullmatch(rf"{name}: needs .*: pip install .*{package}.*\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("name", "library"), [("quickstart", "cupy"), ("quickstart", "torch"), ("torch_handoff", "cupy")]
)
def test_an_example_does_without(name: str, library: str) -> None:
    if name == "torch_handoff":
        pytest.importorskip("torch")
    done = hide(library, name, *(("--rounds", 1) if name == "quickstart" else ()))
    assert done.returncode == 0, done.stderr


def test_digits_on_a_gpu_without_cupy() -> None:
    for package in ("sklearn", "matplotlib", "rich"):
        pytest.importorskip(package)
    done = hide("cupy", "train_digits", "--device", "gpu")
    assert done.returncode == 1
    assert re.fullmatch(r"train_digits: needs CuPy on a GPU: pip install .*\n", done.stderr), done.stderr


def test_examples_use_public_names() -> None:
    for file in EXAMPLES.glob("*.py"):
        if file.stem != "quickstart":
            assert not re.findall(r"\bgsbn\._|from gsbn import .*\b_\w|from gsbn\._", file.read_text()), file


def test_no_example_writes_where_git_looks() -> None:
    """What an example saves lies in build/, unless it is told another place."""
    for file in EXAMPLES.glob("*.py"):
        text = file.read_text()
        for default in re.findall(r'"--plot".*default=([^,)]+)', text):
            assert re.search(
                rf'^{default} = Path\(__file__\).resolve\(\).parents\[1\] / "build" / ', text, re.MULTILINE
            )
    assert "/build/" in (ROOT / ".gitignore").read_text().splitlines()


# ---- training


@pytest.mark.parametrize("gpu", devices())
def test_torch_autograd(gpu: bool) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    if gpu:
        need_torch_cuda()
    output = run(EXAMPLES / "torch_autograd.py", gpu=gpu)
    assert "replaced 0 + 1 + 2 + 3\nreplaced 4 + 5 + 6 + 7\n" in output
    assert f"{'cuda' if gpu else 'cpu'}: loss" in output
    assert "torch.compile: furthest" in output
    assert ("CUDA graph: loss" in output) == gpu


@pytest.mark.parametrize("gpu", devices())
def test_torch_ddp(gpu: bool) -> None:
    """Ten losses of two ranks are within 1e-10 of those of one process; else the example itself fails."""
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no torch.distributed with gloo")
    if gpu and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs that this PyTorch sees")
    launch = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
    output = run(*launch, EXAMPLES / "torch_ddp.py", "--width", 64, gpu=gpu)
    assert "replaced 0 + 1 + 2\nreplaced 3 + 4 + 5\n" in output
    assert f"{'cuda' if gpu else 'cpu'}, 2 ranks by {'nccl' if gpu else 'gloo'}: 64 rows each" in output
    pairs = re.findall(r"^ +\d+ +(\d\S+) +(\d\S+) ", output, re.MULTILINE)
    assert len(pairs) == 10 and max(abs(float(one) - float(all_)) for one, all_ in pairs) <= 1e-10


def test_torch_ddp_says_how_to_start_it() -> None:
    pytest.importorskip("torch")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment |= {"PYTHONPATH": str(GSBN), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, EXAMPLES / "torch_ddp.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "torchrun --nproc-per-node 2" in done.stderr


@pytest.mark.parametrize("gpu", devices())
def test_train_digits(gpu: bool, tmp_path: Path) -> None:
    for package in ("sklearn", "matplotlib", "rich"):
        pytest.importorskip(package)
    output = run(EXAMPLES / "train_digits.py", "--plot", tmp_path / "curves.png", gpu=gpu)
    assert f"training with {'cupy' if gpu else 'numpy'}" in output
    (reached,) = re.findall(r"test accuracy ([\d.]+)%", output)
    assert float(reached) >= 96
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("gpu", devices())
def test_a_published_head_has_the_same_losses(gpu: bool) -> None:
    """Ten steps in float64 agree with PyTorch to 1e-10."""
    pytest.importorskip("torch")
    if gpu:
        need_torch_cuda()
    output = run(EXAMPLES / "published_head.py", gpu=gpu)
    pairs = re.findall(r"loss (\S+) plain, (\S+) converted", output)
    assert len(pairs) == 10 and len({plain for plain, _ in pairs}) == 10
    assert max(abs(float(plain) - float(converted)) for plain, converted in pairs) <= 1e-10
    replaced = re.findall(r"replaced (.*)", output)
    assert len(replaced) == 4 and sum(" + predictor.2" in line for line in replaced) == 1


@pytest.mark.parametrize("gpu", devices())
def test_compare_models_prints_a_table_for_each(gpu: bool) -> None:
    """In float32 the outputs agree but for rounding; on a CPU they are PyTorch's own."""
    pytest.importorskip("torch")
    if gpu:
        need_torch_cuda()
    output = run(EXAMPLES / "compare_models.py", "--rows", 32, "--seconds", 0.01, "--no-compile", gpu=gpu)
    tables = re.split(r"^\w+, 32 rows, (?:float32|bfloat16)$", output, flags=re.MULTILINE)[1:]
    assert len(tables) == 4 and all(table.count("training step, as called") == 1 for table in tables)
    for table, limit in zip(tables, (1e-5, 0.1) * 2, strict=True):
        found = re.findall(r"^  gsbn +\S+ +\S+ +\S+ +(\S+) +(\S+)$", table, re.MULTILINE)
        assert found and all(float(outputs) <= (limit if gpu else 0) for outputs, _ in found)


@pytest.mark.parametrize("gpu", devices())
def test_barlow_twins(gpu: bool, tmp_path: Path) -> None:
    for package in ("torch", "sklearn"):
        pytest.importorskip(package)
    if gpu:
        need_torch_cuda()
    small = ("--steps", 60, "--rows", 128, "--width", 96)
    output = run(EXAMPLES / "barlow_twins_head.py", "--convert", *small, "--plot", tmp_path / "b.png", gpu=gpu)
    right = [float(share) for share in re.findall(r"([\d.]+)% of neighbours right", output)]
    assert len(right) == 3 and min(right) > 85
    assert f"{'cuda' if gpu else 'cpu'}: one line " in output
    assert "the curves differ by" in output
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
