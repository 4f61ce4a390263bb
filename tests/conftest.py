"""The ``gpu`` marker, hypothesis' profile, and the kinds of array that a test runs over."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# So that assertions tell what they compare, as those of tests do.
pytest.register_assert_rewrite("tests.support", "tests.plan.fits", "tests.torch.layers", "tests.fuzz")

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
# Before NumPy is loaded, and for the programs that tests start: BLAS would take all cores, and make whoever runs beside
# it (other workers, the compiler in CI) wait; tests on a GPU took 2.7 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support.harness import CPU_KINDS, GPU_KINDS, Kind, kind_of, no_gpu  # noqa: E402

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes three quarters of a GPU's memory

# Where there are several GPUs, workers of pytest-xdist share them out: each has another one first.
_GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
if _GPUS > 1 and _WORKER:
    _first = int(_WORKER.removeprefix("gw")) % _GPUS
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str((_first + i) % _GPUS) for i in range(_GPUS)))

settings.register_profile(
    "gsbn", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gsbn")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: Ctrl-C is tested, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "gpu: runs kernels; skipped, with the reason, where CuPy finds no CUDA device")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the items live to the end: no collection, such as that of each capture of a graph, need visit them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tests of groups start programs, and take up to two minutes each. They come first, or the other workers of
    # pytest-xdist would wait for them at the end.
    items.sort(key=lambda item: "groups" not in item.path.parts)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (reason := no_gpu()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


_lost: list[str] = []  # the test whose kernel accessed memory out of bounds: CUDA then fails in all of the process


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    if not _lost and call.excinfo is not None and "illegal memory access" in str(call.excinfo.value):
        _lost.append(item.nodeid)
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _lost and item.get_closest_marker("gpu"):
        pytest.fail(f"not run: the GPU is lost since {_lost[0]}", pytrace=False)


@pytest.fixture(params=[*CPU_KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS)])
def kind(request: pytest.FixtureRequest) -> Kind:
    """NumPy and torch arrays on the CPU, CuPy and torch arrays on the GPU."""
    return kind_of(request.param)


@pytest.fixture(params=["torch-cpu", pytest.param("torch-cuda", marks=pytest.mark.gpu)])
def torch_kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request.param)


@pytest.fixture(params=CPU_KINDS)
def cpu_kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request.param)


@pytest.fixture(params=GPU_KINDS)
def gpu_kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Torch's devices by their names."""
    if request.param == "cuda" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    return str(request.param)


@pytest.fixture
def fused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and converted models call gsbn on a CPU too, where PyTorch's own modules are faster: what they do on a GPU
    is seen without one."""
    from gsbn.torch import _modules

    monkeypatch.setattr(_modules, "wins", lambda x, norm: True)


@pytest.fixture
def hopper() -> None:
    """A GPU that forward_sm90 runs on."""
    import cupy

    from gsbn._cuda import kernels as _kernels

    device = _kernels.gpu(cupy.cuda.Device().id)
    if device.capability != (9, 0) or not device.sm90a:
        pytest.skip("needs a GPU of compute capability 9.0 and NVRTC 12.9")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile with nothing compiled before."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
