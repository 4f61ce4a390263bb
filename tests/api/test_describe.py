"""gsbn.describe reports what a call launches, and launches nothing; the log has the same."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.support import fake_gpu
from tests.support.harness import Kind
from tests.support.strategies import Case

ON_A_GPU = {
    "one launch": ("bfloat16", {"training": True}),
    "one launch, kept": ("bfloat16", {"training": True, "return_saved": True}),
    "limbs": ("float32", {"training": True}),
    "a GEMM through limbs": ("float32", {"gemm": "sm90", "n": 255}),
    "cuBLAS": ("float64", {"training": True}),
    "tiled": ("float16", {"training": True, "gemm": "tiled"}),
    "many rows": ("float64", {"training": True, "m": 20000}),
    "copies": ("float32", {"training": True, "gemm": "tiled", "transposed": True}),
    "inference": ("float16", {}),
}


@pytest.mark.parametrize("device", ["Hopper", "Ampere"])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_what_is_described_is_what_is_launched(name: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    dtype, options = ON_A_GPU[name][0], dict(ON_A_GPU[name][1])
    if device == "Ampere" and options.get("gemm") == "sm90":
        pytest.skip("a kernel of Hopper's")
    m, n, k = options.pop("m", 1000), options.pop("n", 256), 136
    transposed = options.pop("transposed", False)
    size = np.dtype(dtype if dtype != "bfloat16" else "float16").itemsize
    x, weight = fake_gpu.Array((m, k), dtype, (size, m * size) if transposed else None), fake_gpu.Array((n, k), dtype)
    vectors = [fake_gpu.Array((n,), "float64" if dtype == "float64" else "float32") for _ in range(3)]
    call = {"scale": vectors[0], "running_mean": vectors[1], "running_var": vectors[2], **options}
    caplog.set_level(logging.DEBUG, logger="gsbn")
    with fake_gpu.gpu({"Hopper": fake_gpu.HOPPER, "Ampere": fake_gpu.AMPERE}[device]) as (_, log):
        told = gsbn.describe(x, weight, **call)
        assert not log and not caplog.records
        gsbn.forward(x, weight, **call)
        gsbn.forward(x, weight, **call)
    launched = [launch.name for launch in log]
    assert list(told.kernels) * 2 == launched
    assert told.path == options.get("gemm", told.path) and told.why
    assert told.scratch >= m * k * size * transposed
    [record] = caplog.records  # the second call uses the cached plan
    assert str(told) in record.getMessage() and f"forward ({m}, {k}) x ({n}, {k}), {dtype}: " in record.getMessage()


def test_a_backward_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    x, weight, scale = (fake_gpu.Array(shape, "float32") for shape in ((3000, 1024), (1024, 1024), (1024,)))
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        y, saved = gsbn.forward(x, weight, scale, training=True, return_saved=True)
        forward = len(log)
        caplog.set_level(logging.DEBUG, logger="gsbn")
        gsbn.backward(y, saved)
    names = ", ".join(launch.name for launch in log[forward:])
    [record] = caplog.records
    assert f"dx by sm90, dweight by sm90): {names}; " in record.getMessage()


def test_on_the_cpu(cpu_kind: Kind) -> None:
    arrays = {name: cpu_kind.put(a) for name, a in Case((6, 5, 4), "float32", training=True).arrays().items()}
    before = {name: cpu_kind.get(a).tobytes() for name, a in arrays.items()}
    told = gsbn.describe(**arrays, training=True)
    assert told == ("numpy", "the arrays are on the CPU", (), 0)
    assert {name: cpu_kind.get(a).tobytes() for name, a in arrays.items()} == before


def test_a_wrong_call_is_refused() -> None:
    arrays: dict[str, Any] = Case((6, 5, 4), "float32", training=True).arrays()
    with pytest.raises(ValueError, match=r"^precision: expected"):
        gsbn.describe(**arrays, precision="medium")
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        gsbn.describe(**arrays, presicion="high")


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", ["auto", "cublas", "tiled"])
def test_on_the_gpu(gpu_kind: Kind, gemm: str) -> None:
    arrays = {name: gpu_kind.put(a) for name, a in Case((60, 64, 72), "float32", training=True).arrays().items()}
    before = {name: gpu_kind.get(a).tobytes() for name, a in arrays.items()}
    told = gsbn.describe(**arrays, training=True, gemm=gemm)
    assert (
        told.kernels
        and told.path in ("sm90", "cublas", "tiled")
        and told.path == (told.path if gemm == "auto" else gemm)
    )
    assert {name: gpu_kind.get(a).tobytes() for name, a in arrays.items()} == before
