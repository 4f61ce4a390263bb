"""What "highest" and "high" promise for a GEMM on a GPU, and the accuracy of results compared with PyTorch's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn._cuda import kernels as _kernels
from gsbn._plan.gemm import MAX_TERMS
from tests.support.accuracy import FAMILIES, assert_as_accurate_as_torch
from tests.support.forwards import GEMMS, truth_and_bounds
from tests.support.harness import DTYPES, forward, kind_of
from tests.support.tolerance import TF32, bounds, norm_error

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("positive", [False, True], ids=["normal", "positive"])
@pytest.mark.parametrize("factor", [1, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sums_are_as_accurate_as_torchs(dtype: str, factor: int, positive: bool) -> None:
    """The contract's rule where tensor cores truncate most: in y, dx (a sum over O) and dweight (over B)."""
    import torch

    terms = min(factor * MAX_TERMS[dtype], 2**20)
    t, eps = getattr(torch, dtype), float(np.finfo(np.float32).eps) * 2 ** (13 if dtype == "float16" else 16)
    torch.manual_seed(0)

    def draw(*shape: int) -> Any:
        a = torch.randn(shape, device="cuda")
        return (a.abs() if positive else a).to(t)

    def judge(ours: Any, theirs: Any, truth: Any, what: str) -> None:
        errors = [float(torch.linalg.norm(a.double() - truth) / torch.linalg.norm(truth)) for a in (ours, theirs)]
        assert errors[0] <= 1.05 * errors[1] + eps / 4, f"{what}: {errors[0]} for torch's {errors[1]}"

    one, zero = torch.ones(64, device="cuda", dtype=torch.float32), torch.zeros(64, device="cuda")
    x, weight = draw(64, terms), draw(64, terms) / terms**0.5
    for gemm in ("auto", "sm90") if factor == 1 else ("auto",):
        y = gsbn.forward(x, weight, one, running_mean=zero, running_var=one, eps=0.0, gemm=gemm)
        judge(y, x @ weight.T, x.double() @ weight.double().T, f"y, {gemm}")

    # frozen statistics with a = 1: dg is dy, so the products alone are judged
    for shape, name in (((64, 64, terms), "dx"), ((terms, 64, 64), "dweight")):
        B, I, O = shape
        x, weight, dy = draw(B, I), draw(O, I) / 8, draw(B, O) / terms**0.5
        one, zero = torch.ones(O, device="cuda"), torch.zeros(O, device="cuda")
        _, saved = gsbn.forward(x, weight, one, running_mean=zero, running_var=one, eps=0.0, return_saved=True)
        for gemm in ("auto", "sm90"):
            got = gsbn.backward(dy, saved._replace(gemm=gemm), needs=("x", "weight"))
            ours = got.x if name == "dx" else got.weight
            a, b = (dy, weight) if name == "dx" else (dy.T, x)
            judge(ours, a @ b, a.double() @ b.double(), f"{name}, {gemm}")


@pytest.mark.parametrize("gemm", ["auto", "tiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_is_as_accurate_as_torch(name: str, dtype: str, gemm: str) -> None:
    torch_kind = kind_of("torch-cuda")
    shape = (256, 128, 64) if dtype == "float64" else (1024, 1024, 512)  # the truth of float64 is slow
    assert_as_accurate_as_torch(torch_kind, name, shape, dtype, gemm=gemm)


@pytest.mark.parametrize("name", FAMILIES)
def test_is_as_accurate_as_torch_in_tf32(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch_kind = kind_of("torch-cuda")
    import torch

    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert_as_accurate_as_torch(torch_kind, name, (1024, 1024, 512), "float32", precision="high")


@pytest.mark.parametrize("gemm", ["auto", "cublas", "tiled", "sm90"])
@pytest.mark.parametrize("shape", [(64, 96, 136), (5000, 32, 32)], ids=str)
def test_a_subnormal_scale_has_its_digits(shape: tuple[int, int, int], gemm: str) -> None:
    """With CuPy's -ftz=true it would be read as zero."""
    if gemm == "sm90" and _kernels.gpu(cupy.cuda.Device().id).capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    B, I, O = shape
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, I), np.float32) for n in (B, O))
    scale, gamma = np.full(O, 3e-39, np.float32), np.full(O, 1e12, np.float32)
    state = {"running_mean": np.zeros(O, np.float32), "running_var": np.ones(O, np.float32)}
    on_gpu = {name: cupy.asarray(a) for name, a in {"scale": scale, "gamma": gamma, **state}.items()}
    y = gsbn.forward(cupy.asarray(x), cupy.asarray(weight), **on_gpu, gemm=gemm).get()
    want = x.astype(float) @ weight.T.astype(float) * scale.astype(float) * 1e12 / np.sqrt(1.0 + 1e-5)
    # 23 bits of 3e-39 begin at 2^-127: its last digit is 2^-22 of it, in the input, which `want` shares
    assert np.linalg.norm(y - want) <= 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("gemm", [*GEMMS, "sm90"])
def test_a_running_mean_counts_if_the_slope_is_subnormal(gemm: str, activation: str | None) -> None:
    """gamma r s may be subnormal in float32 although its product with running_mean / s is not."""
    if gemm == "sm90" and _kernels.gpu(cupy.cuda.Device().id).capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    rng, (B, I, O) = np.random.default_rng(0), (256, 64, 256)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, I), (O, I)))
    gamma = np.where(np.arange(O) % 3 == 0, 0, 1e-10).astype(np.float32)
    arrays = {"x": x, "weight": w, "scale": np.full(O, 1e-30, np.float32), "gamma": gamma}
    arrays |= {"running_mean": np.full(O, -1e5, np.float32), "running_var": np.ones(O, np.float32)}
    got = forward(kind_of("cupy"), arrays, eps=0.0, gemm=gemm, activation=activation)
    np.testing.assert_allclose(got.y, np.broadcast_to(gamma * np.float32(1e5), (B, O)), rtol=2.0**-22)


# ---- IEEE and TF32


def gemm_error(gemm: str, precision: str) -> tuple[float, float, float]:
    """Norm-wise error of a float32 GEMM, and the limits for IEEE arithmetic and for TF32.

    In inference with neutral vectors y is g after one rounding. K is short, so IEEE and TF32 differ clearly.
    """
    rng, (B, I, O) = np.random.default_rng(0), (256, 64, 256)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, I), (O, I)))
    zero, one = np.zeros(O, np.float32), np.ones(O, np.float32)
    arrays = {"x": x, "weight": w, "scale": one, "running_mean": zero, "running_var": one}
    got = forward(kind_of("cupy"), arrays, eps=0.0, gemm=gemm, precision=precision)
    truth, ieee = truth_and_bounds(arrays, training=False, eps=0.0)
    tf32 = bounds(arrays, truth, training=False, eps=0.0, operand=TF32)
    size = np.linalg.norm(truth.y)
    return norm_error(got.y, truth.y), float(np.linalg.norm(ieee.y) / size), float(np.linalg.norm(tf32.y) / size)


@pytest.mark.parametrize("gemm", GEMMS)
def test_highest_is_ieee_and_high_is_tf32_at_least(gemm: str) -> None:
    error, ieee, _ = gemm_error(gemm, "highest")
    assert error <= ieee
    error, _, tf32 = gemm_error(gemm, "high")
    assert error <= tf32


def test_high_is_tf32_with_cublas() -> None:
    if int(cupy.cuda.Device().compute_capability) < 80:
        pytest.skip("this GPU has no TF32")
    error, ieee, _ = gemm_error("cublas", "high")
    assert error > ieee


@pytest.mark.parametrize("gemm", GEMMS)
def test_the_state_of_cublas_is_neither_used_nor_changed(gemm: str) -> None:
    from cupy.cuda import cublas

    handle, tf32 = cupy.cuda.device.get_cublas_handle(), 3  # CUBLAS_TF32_TENSOR_OP_MATH, which CuPy does not name
    before = cublas.getMathMode(handle)
    try:
        for mode in (cublas.CUBLAS_DEFAULT_MATH, tf32):
            cublas.setMathMode(handle, mode)
            error, ieee, _ = gemm_error(gemm, "highest")
            assert error <= ieee
            assert cublas.getMathMode(handle) == mode
    finally:
        cublas.setMathMode(handle, before)


def test_the_environment_is_not_used() -> None:
    script = (
        "from tests.kernels.test_precision import GEMMS, gemm_error\n"
        "for gemm in GEMMS:\n"
        "    error, ieee, _ = gemm_error(gemm, 'highest')\n"
        "    assert error <= ieee, (gemm, error, ieee)\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "CUPY_TF32": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
