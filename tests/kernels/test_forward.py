"""The kernels: the properties of api/test_forward.py, and what only a GPU has: streams, graphs, precision, size."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import gsbn
from gsbn import _kernels, reference
from gsbn._plan import Limits
from gsbn._plan.forward import ONE_PASS_ROWS
from gsbn._plan.gemm import MAX_TERMS
from tests.support.accuracy import FAMILIES, assert_as_accurate_as_torch
from tests.support.harness import (
    ANY,
    DTYPES,
    GPU_KINDS,
    STATISTICS,
    Kind,
    Producer,
    assert_same_bits,
    forward,
    kind_of,
    place,
    without_out,
)
from tests.support.strategies import ACTIVATIONS, SCALES, Case, cases
from tests.support.tolerance import FLUSHED, TF32, assert_outcome_within, assert_within, bounds, norm_error, roundoff

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

GEMMS = ["auto", "cublas", "tiled"]
CASE = Case((200, 72, 136), "float32", training=True)


def truth_and_bounds(
    arrays: dict[str, np.ndarray], operand: float = 0.0, **options: Any
) -> tuple[reference.Forward, Any]:
    wide = np.longdouble if arrays["x"].dtype == np.float64 else np.float64
    truth = reference.forward(**without_out(arrays), **options, dtype=wide)
    return truth, bounds(arrays, truth, operand=operand, **options)


# ---- right on everything


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", GPU_KINDS)
@given(case=cases(limit=400, scales=tuple(SCALES), activations=ACTIVATIONS))
@settings(max_examples=60)
def test_stays_within_the_bounds(name: str, gemm: str, case: Case) -> None:
    arrays = case.arrays()
    got = forward(kind_of(name), arrays, dict(case.layouts), gemm=gemm, **case.options)
    assert_outcome_within(got, *truth_and_bounds(arrays, **case.options))


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3000, 64, 40), (130, 2050, 70), (70, 33, 2100)])
def test_long_sides(shape: tuple[int, int, int], dtype: str, training: bool, gemm: str) -> None:
    arrays = Case(shape, dtype, training).arrays()
    got = forward(kind_of("cupy"), arrays, gemm=gemm, training=training)
    assert_outcome_within(got, *truth_and_bounds(arrays, training=training))


@pytest.mark.parametrize("layout", ["C", "F"])
@pytest.mark.parametrize("fused", [False, True], ids=["two passes", "fused"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 7, 16, 33, 128, 511, ONE_PASS_ROWS])
@pytest.mark.parametrize("features", [1, 6, 72, 1029, 2200])
def test_all_rows_of_a_feature_in_one_cta(features: int, rows: int, dtype: str, fused: bool, layout: str) -> None:
    """What follows a GEMM in training, in one launch or in two: as many threads along a row as there may be."""
    arrays = Case((rows, 24, features), dtype, True, offset=10.0).arrays()
    got = forward(kind_of("cupy"), arrays, {"out": layout}, gemm="tiled", training=True, limits=Limits(fused=fused))
    assert_outcome_within(got, *truth_and_bounds(arrays, training=True))


@contextlib.contextmanager
def refused_by_sm90(gemm: str) -> Iterator[None]:
    """Skip what this path says that it cannot serve."""
    try:
        yield
    except ValueError as error:
        if gemm != "sm90" or not str(error).startswith("gemm:"):
            raise
        pytest.skip(str(error))


SHAPES = [(2, 2, 1), (64, 40, 64), (128, 257, 131), (62, 8, 1000), (1024, 96, 72), (4096, 6, 40), (4, 6, 300_001)]


@pytest.mark.parametrize("gemm", [*GEMMS, "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), *SHAPES])
def test_inference_on_small_integers_is_exact(shape: tuple[int, int, int], dtype: str, gemm: str) -> None:
    """Every intermediate result is exact in any order, so that y is the truth, rounded once."""
    B, I, O = shape
    rng, t = np.random.default_rng(0), DTYPES[dtype]
    arrays = {
        "x": rng.integers(-4, 5, (B, I)).astype(t),
        "weight": rng.integers(-4, 5, (O, I)).astype(t),
        "scale": rng.choice([-2, -1, 0, 0.5, 1], O).astype(t),
        "bias": rng.integers(-8, 9, O).astype(t),
        "gamma": rng.choice([-4, 2, 4], O).astype(t),
        "beta": rng.integers(-8, 9, O).astype(t),
        "running_mean": rng.integers(-8, 9, O).astype(t),
        "running_var": rng.choice([3, 15, 63], O).astype(t),  # and eps = 1: r is 1/2, 1/4 or 1/8
        "out": np.full((B, O), np.nan, t),
    }
    with refused_by_sm90(gemm):
        got = forward(kind_of("cupy"), arrays, gemm=gemm, eps=1.0)
    want = reference.forward(**without_out(arrays), eps=1.0)
    np.testing.assert_array_equal(got.y, reference.round_to(want.y, t))  # as values: the sign of a zero is free


def exact_training(shape: tuple[int, int, int], dtype: str) -> dict[str, np.ndarray]:
    """A training problem whose every intermediate result is exact in any order, for eps = 12.

    g_ij = c_j ± q_j with as many pluses as minuses: m = c and v = q². With s q = ±2, s² v + eps = 4 + 12 and r = 1/4.
    The signs alternate, so that every tile of an even number of rows has these statistics too. The other columns of x
    are random, in pairs that the weight cancels.
    """
    B, I, O = shape
    rng, t = np.random.default_rng(0), DTYPES[dtype]
    x, weight = np.zeros((B, I)), np.zeros((O, I))
    x[:, 0], x[:, 1] = 1, np.resize([1, -1], B)
    scale = rng.choice([-2, -1, -0.5, 0.5, 1, 2], O)
    weight[:, 0], weight[:, 1] = rng.integers(-4, 5, O), 2 / scale
    pairs = (I - 2) // 2
    x[:, 2 : 2 + pairs] = x[:, I - pairs :] = rng.integers(-4, 5, (B, pairs))
    weight[:, 2 : 2 + pairs] = rng.integers(-4, 5, (O, pairs))
    weight[:, I - pairs :] = -weight[:, 2 : 2 + pairs]
    order = rng.permutation(I)
    arrays = {
        "x": x[:, order],
        "weight": weight[:, order],
        "scale": scale,
        "bias": rng.integers(-4, 5, O),
        "gamma": rng.choice([-4, -2, 2, 4], O),
        "beta": rng.integers(-8, 9, O),
        "running_mean": rng.integers(-4, 5, O),
        "running_var": rng.integers(1, 9, O),
        "out": np.full((B, O), np.nan),
    }
    return {name: a.astype(t) for name, a in arrays.items()}


@pytest.mark.parametrize(
    ("gemm", "limits"), [*((gemm, ANY) for gemm in [*GEMMS, "sm90"]), ("tiled", Limits(fused=False))]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_training_on_small_integers_is_exact(
    shape: tuple[int, int, int], dtype: str, gemm: str, limits: Limits
) -> None:
    arrays = exact_training(shape, dtype)
    options = {"training": True, "eps": 12.0, "momentum": 0.5}
    with refused_by_sm90(gemm):
        got = forward(kind_of("cupy"), arrays, gemm=gemm, limits=limits, **options)
    truth, limit = truth_and_bounds(arrays, **options)
    np.testing.assert_array_equal(got.y, reference.round_to(truth.y, DTYPES[dtype]))
    np.testing.assert_array_equal(got.running_mean, reference.round_to(truth.running_mean, DTYPES[dtype]))
    assert_within(got.running_var, truth.running_var, limit.running_var)  # B / (B − 1) is not exact


@pytest.mark.parametrize("gemm", GEMMS)
def test_half_inputs_whose_gemm_overflows_half(gpu_kind: Kind, gemm: str) -> None:
    x = np.resize(np.array([200, -200, 100, 60], np.float16)[:, None], (4, 512))
    arrays = {"x": x, "weight": np.full((3, 512), 100, np.float16), "scale": np.ones(3, np.float16)}
    got = forward(gpu_kind, arrays, training=True, gemm=gemm)  # g reaches 1e7; y is ordinary
    assert_outcome_within(got, *truth_and_bounds(arrays, training=True))


RAGGED = [(519, 520), (519, 528), (1695, 1696), (517, 520), (518, 520), (8, 24)]  # columns of y, and of its rows


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gemm", [*GEMMS, "sm90"])
@pytest.mark.parametrize(
    ("dtype", "features", "pitch"),
    [("float32", *ragged) for ragged in RAGGED]
    + [(dtype, *ragged) for dtype in ("float16", "bfloat16", "float64") for ragged in (RAGGED[1], RAGGED[-1])],
)
def test_what_lies_right_of_out_is_not_touched(
    dtype: str, features: int, pitch: int, gemm: str, training: bool
) -> None:
    """Rows of y that start on 16 bytes and end within 16: their last store may not take the next columns along."""
    arrays = Case((300, 72, features), dtype, training, layouts=()).arrays()
    native = {name: cupy.asarray(a) for name, a in arrays.items()}
    buffer = cupy.full((300, pitch), 7, native["x"].dtype)
    native["out"] = buffer[:, :features]
    with refused_by_sm90(gemm):
        gsbn.forward(**native, training=training, gemm=gemm)
    truth, limit = truth_and_bounds(arrays, training=training)
    limit = bounds(arrays, truth, training=training, parked=True, limbs=dtype == "float32")
    assert_within(cupy.asnumpy(native["out"]), truth.y, limit.y, "y")
    assert (buffer[:, features:] == 7).all()


@pytest.mark.parametrize("positive", [False, True], ids=["normal", "positive"])
@pytest.mark.parametrize("factor", [1, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sums_are_as_accurate_as_torchs(dtype: str, factor: int, positive: bool) -> None:
    """The contract's rule where tensor cores have cut off most, in y, dx (a sum over O) and dweight (over B)."""
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

    # Frozen statistics with a = 1: dg is dy, so that the products alone are judged.
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gemm", GEMMS)
def test_nan_and_infinity_stay_in_their_feature(gemm: str, training: bool, bad: float) -> None:
    arrays = replace(CASE, training=training).arrays()
    clean = forward(kind_of("cupy"), arrays, training=training, gemm=gemm)
    arrays["weight"][1, 2] = bad
    got = forward(kind_of("cupy"), arrays, training=training, gemm=gemm)
    assert not np.isfinite(got.y[:, 1]).any()
    for ours, theirs in zip(got[:3], clean[:3], strict=True):
        assert_same_bits(np.delete(ours, 1, axis=-1), np.delete(theirs, 1, axis=-1))


@pytest.mark.parametrize("name", GPU_KINDS)
@given(case=cases(limit=200, training=False))
@settings(max_examples=40)
def test_fold(name: str, case: Case) -> None:
    kind = kind_of(name)
    arrays = {n: a for n, a in without_out(case.arrays()).items() if n not in ("x", "num_batches_tracked")}
    placed = {n: place(kind, a, dict(case.layouts).get(n, "C")) for n, a in arrays.items()}
    w, b = gsbn.fold(**{n: p.view for n, p in placed.items()}, eps=case.eps)

    want_w, want_b = reference.fold(**arrays, eps=case.eps, dtype=np.longdouble)
    dtype, wide = arrays["weight"].dtype, {n: np.asarray(a, np.float64) for n, a in arrays.items()}
    # float64 arithmetic, at most eight roundings, on terms that cancel in b; then one rounding; subnormals may go
    terms = np.abs(wide["scale"] * wide.get("bias", 0)) + np.abs(wide["running_mean"])
    gamma_r = np.abs(wide.get("gamma", 1)) / np.sqrt(wide["running_var"] + case.eps)
    flushed = FLUSHED if dtype.itemsize < 8 else 0
    for got, want, size in (
        (w, want_w, np.abs(want_w)),
        (b, want_b, gamma_r * terms + np.abs(wide.get("beta", 0))),
    ):
        assert type(got) is type(placed["weight"].view)
        limit = roundoff(dtype) * np.abs(want) + 8 * 2.0**-53 * size + flushed
        limit += 2.0**-25 * (dtype == np.float16)  # half its smallest subnormal number
        assert_within(kind.get(got), want, np.asarray(limit, np.float64))
    assert not any(p.disturbed(kind) for p in placed.values())


def test_another_producer_gets_cupy_back() -> None:
    arrays = CASE.arrays()
    del arrays["out"]
    native = {name: cupy.asarray(a) for name, a in arrays.items()}
    y = gsbn.forward(**{name: Producer(a) for name, a in native.items()}, training=True)
    assert type(y) is cupy.ndarray
    got = {name: cupy.asnumpy(native[name]) for name in STATISTICS}
    truth, limit = truth_and_bounds(arrays, training=True)
    assert_within(cupy.asnumpy(y), truth.y, limit.y)
    for name in ("running_mean", "running_var"):
        assert_within(got[name], getattr(truth, name), getattr(limit, name))
    assert got["num_batches_tracked"] == truth.num_batches_tracked


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
    """CuPy compiles with -ftz=true, which would read it as zero."""
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
def test_a_running_mean_outlives_a_scale_that_is_flushed(gemm: str, activation: str | None) -> None:
    """gamma r s may be below float32's normal numbers where -gamma r running_mean, which it multiplies, is not."""
    if gemm == "sm90" and _kernels.gpu(cupy.cuda.Device().id).capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    rng, (B, I, O) = np.random.default_rng(0), (256, 64, 256)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, I), (O, I)))
    gamma = np.where(np.arange(O) % 3 == 0, 0, 1e-10).astype(np.float32)
    arrays = {"x": x, "weight": w, "scale": np.full(O, 1e-30, np.float32), "gamma": gamma}
    arrays |= {"running_mean": np.full(O, -1e5, np.float32), "running_var": np.ones(O, np.float32)}
    got = forward(kind_of("cupy"), arrays, eps=0.0, gemm=gemm, activation=activation)
    np.testing.assert_allclose(got.y, np.broadcast_to(gamma * np.float32(1e5), (B, O)), rtol=2.0**-22)


# ---- precision


def gemm_error(gemm: str, precision: str) -> tuple[float, float, float]:
    """Norm-wise error of a float32 GEMM, and what it may be in IEEE arithmetic and in TF32.

    In inference with neutral vectors y is g but for one rounding, and its K is short: IEEE and TF32 lie far apart.
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
def test_the_state_of_cublas_is_neither_obeyed_nor_changed(gemm: str) -> None:
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


def test_the_environment_is_not_obeyed() -> None:
    script = (
        "from tests.kernels.test_forward import GEMMS, gemm_error\n"
        "for gemm in GEMMS:\n"
        "    error, ieee, _ = gemm_error(gemm, 'highest')\n"
        "    assert error <= ieee, (gemm, error, ieee)\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "CUPY_TF32": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# ---- the same bits


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(dtype: str, training: bool) -> None:
    arrays = Case((1500, 200, 300), dtype, training).arrays()
    first, *others = (forward(kind_of("cupy"), arrays, gemm="tiled", training=training) for _ in range(10))
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert_same_bits(a, b)


# ---- streams


@contextlib.contextmanager
def new_stream(kind: Kind) -> Iterator[Any]:
    """A stream of the kind's library, current, that waits for no other."""
    if kind.is_torch:
        import torch

        stream = torch.cuda.Stream()
        current = torch.cuda.stream(stream)
    else:
        stream = current = cupy.cuda.Stream(non_blocking=True)
    try:
        with current:
            yield stream
    finally:  # also after an error: what it had to do writes into memory that is about to be free
        stream.synchronize()


def occupy(kind: Kind, stream: Any, cycles: int = 400_000_000) -> None:
    """Keep the stream busy for about a fifth of a second."""
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) ; }', "spin"
    )
    with cupy.cuda.Stream.from_external(stream) if kind.is_torch else contextlib.nullcontext():
        spin((1,), (1,), (np.int64(cycles),))


def is_idle(stream: Any) -> bool:
    return bool(stream.done if isinstance(stream, cupy.cuda.Stream) else stream.query())


@pytest.mark.parametrize("gemm", GEMMS)
def test_runs_in_the_order_of_its_stream_and_returns_at_once(gpu_kind: Kind, gemm: str) -> None:
    arrays = CASE.arrays()
    native = {name: gpu_kind.put(a) for name, a in arrays.items()}
    x = gpu_kind.put(arrays["x"])
    with new_stream(gpu_kind) as stream:
        for _ in range(2):  # the first call may compile and allocate, and wait for that
            for name in STATISTICS:
                native[name][...] = gpu_kind.put(arrays[name])
            native["x"][...] = np.nan
            stream.synchronize()
            occupy(gpu_kind, stream)
            native["x"][...] = x
            gsbn.forward(**native, training=True, gemm=gemm)
            waited = is_idle(stream)
            native["x"][...] = np.nan
    assert not waited
    truth, limit = truth_and_bounds(arrays, training=True)
    assert_within(gpu_kind.get(native["out"]), truth.y, limit.y)
    assert_within(gpu_kind.get(native["running_var"]), truth.running_var, limit.running_var)


@pytest.mark.parametrize("gemm", ["auto", "tiled"])
def test_threads_and_streams_at_once(gpu_kind: Kind, gemm: str) -> None:
    """Each of four threads trains on its own stream, with its own shape, as if it were alone."""
    problems = [Case((900 + 100 * i, 64, 200 + 50 * i), "float32", training=True, seed=i).arrays() for i in range(4)]

    def train(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with new_stream(gpu_kind):
            native = {name: gpu_kind.put(a) for name, a in arrays.items()}
            for _ in range(30):
                gsbn.forward(**native, training=True, gemm=gemm)
        return {name: gpu_kind.get(a) for name, a in native.items()}

    alone = [train(arrays) for arrays in problems]
    together: list[Any] = [None] * len(problems)

    def run(i: int) -> None:
        together[i] = train(problems[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for arrays, one, other in zip(problems, alone, together, strict=True):
        assert other["num_batches_tracked"] == arrays["num_batches_tracked"] + 30
        if gemm == "tiled":
            for name in arrays:
                assert_same_bits(one[name], other[name])
        truth, limit = truth_and_bounds(arrays, training=True)
        assert_within(other["out"], truth.y, limit.y)  # y does not depend on the running statistics


@pytest.mark.parametrize("gemm", GEMMS)
def test_threads_on_one_stream(gpu_kind: Kind, gemm: str) -> None:
    """What calls keep for the next one, four threads share: plan, launchers, scratch memory."""
    problems = [Case((300, 64, 200), "float32", training=True, seed=i).arrays() for i in range(4)]
    native = [{name: gpu_kind.put(a) for name, a in arrays.items()} for arrays in problems]
    wrong: list[BaseException] = []
    together = threading.Barrier(len(problems))

    def train(i: int) -> None:
        try:
            together.wait()
            for _ in range(50):
                _, saved = gsbn.forward(**native[i], training=True, gemm=gemm, return_saved=True)
                gsbn.backward(native[i]["out"], saved)
            arrays = problems[i]
            truth, limit = truth_and_bounds(arrays, training=True)
            assert_within(gpu_kind.get(native[i]["out"]), truth.y, limit.y)
            _, saved = gsbn.forward(**native[i], training=True, gemm=gemm, return_saved=True)
            ones = gpu_kind.put(np.ones_like(arrays["out"]))
            np.testing.assert_allclose(gpu_kind.get(gsbn.backward(ones, saved).beta), len(arrays["x"]), rtol=1e-6)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


# ---- one call after another


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_tensor_that_was_changed_in_place_is_taken_as_it_is(gemm: str) -> None:
    """Whatever was found out about the arguments of a call serves the next one only where it still holds."""
    import torch

    kind = kind_of("torch-cuda")
    arrays = without_out(Case((96, 64, 96), "bfloat16", training=True, layouts=()).arrays())
    native = {name: kind.put(a) for name, a in arrays.items()}
    x, weight, gamma, beta, mean = (native[name] for name in ("x", "weight", "gamma", "beta", "running_mean"))

    def check() -> None:
        now = {name: kind.get(a) for name, a in native.items()}
        y = gsbn.forward(**native, training=True, gemm=gemm)
        truth, limit = truth_and_bounds(now, training=True)
        assert_within(kind.get(y), truth.y, bounds(now, truth, training=True, parked=True).y)
        assert_within(kind.get(mean), truth.running_mean, limit.running_mean)

    def noise(*shape: int) -> Any:
        return torch.randn(shape, device="cuda")

    for change in (
        lambda: x.resize_(40, 64),
        lambda: x.set_(noise(200, 64).bfloat16()),
        lambda: x.set_(noise(64, 200).bfloat16().t()),
        lambda: weight.set_(noise(96 * 64 + 1).bfloat16()[1:].view(96, 64)),  # off 16 bytes
        lambda: gamma.set_(noise(2 * 96).to(gamma.dtype)[::2]),
        lambda: setattr(beta, "data", noise(96).to(torch.float32 if beta.dtype != torch.float32 else x.dtype)),
        lambda: mean.set_(noise(96)),
    ):
        check()
        change()
        check()

    weight.requires_grad_()
    with pytest.raises(RuntimeError, match=r"^weight: requires grad"):
        gsbn.forward(**native, training=True, gemm=gemm)
    with torch.no_grad():
        check()
    weight.requires_grad_(False)
    check()
    with pytest.raises(ValueError, match=r"^beta: .* negated"):
        gsbn.forward(**{**native, "beta": torch._neg_view(beta)}, training=True, gemm=gemm)
    apart = mean.clone()
    mean.set_(native["running_var"])
    with pytest.raises(ValueError, match=r"^(running_mean|running_var): "):
        gsbn.forward(**native, training=True, gemm=gemm)
    mean.set_(apart)
    check()


# ---- CUDA graphs


def capture(kind: Kind, stream: Any, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A function that replays ``call`` on ``stream``, and what the captured call returned."""
    gc.disable()  # what other tests left may hold CuPy's graphs, and to destroy one breaks a capture
    try:
        if kind.is_torch:
            import torch

            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                result = call()
            return graph.replay, result
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
        return lambda: graph.launch(stream), result
    finally:
        gc.enable()


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_replay_is_a_call(gpu_kind: Kind, dtype: str, momentum: float | None, gemm: str) -> None:
    """New inputs, outputs and statistics pass through the captured addresses; the count and its readers advance."""
    case = replace(CASE, dtype=dtype, momentum=momentum)
    arrays = case.arrays()
    del arrays["out"]
    native = {name: gpu_kind.put(a) for name, a in arrays.items()}
    with new_stream(gpu_kind) as stream:
        gsbn.forward(**native, gemm=gemm, **case.options)
        replay, y = capture(gpu_kind, stream, lambda: gsbn.forward(**native, gemm=gemm, **case.options))
        for name in STATISTICS:  # the warm-up counted once, the capture not at all
            native[name][...] = gpu_kind.put(arrays[name])
        for seed in (1, 2, 3):
            arrays["x"] = replace(case, seed=seed).arrays()["x"]
            native["x"][...] = gpu_kind.put(arrays["x"])
            replay()
            stream.synchronize()
            truth, limit = truth_and_bounds(arrays, **case.options)
            assert_within(gpu_kind.get(y), truth.y, limit.y, "y")
            for name in ("running_mean", "running_var"):
                assert_within(gpu_kind.get(native[name]), getattr(truth, name), getattr(limit, name), name)
            assert gpu_kind.get(native["num_batches_tracked"]) == truth.num_batches_tracked
            arrays.update({name: gpu_kind.get(native[name]) for name in STATISTICS})


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("keep", [True, False])
def test_what_a_captured_call_allocated_lives_as_long_as_the_graph(gpu_kind: Kind, keep: bool, gemm: str) -> None:
    """What is allocated after the capture is not what the graph writes to: not even y, if the caller lets it go."""
    case = replace(CASE, dtype="float16", layouts=())
    arrays = case.arrays()
    del arrays["out"]
    native = {name: gpu_kind.put(a) for name, a in arrays.items()}
    native["x"] = gpu_kind.put(arrays["x"].T).T  # strides that a GEMM may copy
    with new_stream(gpu_kind) as stream:
        gsbn.forward(**native, gemm=gemm, training=True)
        replay, y = capture(gpu_kind, stream, lambda: gsbn.forward(**native, gemm=gemm, training=True))
        if not keep:
            y = None
        churn = [gpu_kind.put(np.full(1 << size, 7, np.uint8)) for size in range(9, 21) for _ in range(8)]
        replay()
        stream.synchronize()
        if keep:
            truth, limit = truth_and_bounds(arrays, training=True)
            assert_within(gpu_kind.get(y), truth.y, limit.y)
        assert all((gpu_kind.get(a) == 7).all() for a in churn)


# ---- size


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("training", [True, False])
def test_at_most_one_temporary_of_the_size_of_y(dtype: str, training: bool) -> None:
    B, I, O = 8192, 32, 4096
    arrays = without_out(Case((B, I, O), dtype, training).arrays())
    native = {name: cupy.asarray(a) for name, a in arrays.items()}
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        y = gsbn.forward(**native, training=training)
        one_more = B * O * 4
        assert pool.total_bytes() < y.nbytes + one_more + one_more // 2  # less than a second; the half is for vectors


def needs_memory(gigabytes: int) -> None:
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, found {free / 2**30:.1f}")


@pytest.mark.parametrize("gemm", ["auto", "tiled"])
@pytest.mark.parametrize("shape", [(275_200, 8, 16_392), (137_600, 32_776, 8)], ids=["y", "x"])
def test_more_than_2_31_elements(shape: tuple[int, int, int], gemm: str) -> None:
    """The exact training problem with 2.1 · 2³¹ elements in y or in x, every element of y compared.

    More than twice, so that of two blocks of rows, however large, the second begins beyond.
    """
    needs_memory(40)
    B, I, O = shape
    small = exact_training((16, 4, O), "float16")
    x, weight = cupy.zeros((B, I), np.float16), cupy.zeros((O, I), np.float16)
    for source, target in enumerate((0, 1, I // 2, I - 1)):
        x.reshape(-1, 16, I)[:, :, target] = cupy.asarray(small["x"][:, source])
        weight[:, target] = cupy.asarray(small["weight"][:, source])
    vectors = {n: cupy.asarray(a) for n, a in small.items() if n not in ("x", "weight", "out")}
    y = gsbn.forward(x, weight, **vectors, training=True, eps=12.0, gemm=gemm)
    truth = reference.forward(**without_out(small), training=True, eps=12.0)
    want = cupy.asarray(reference.round_to(truth.y, np.float16))
    assert y.shape == (B, O)
    for start in range(0, B, 16_384):
        part = y[start : start + 16_384]
        assert bool((part.reshape(-1, 16, O) == want).all()), f"rows from {start}"
    del x, weight, y, part
    cupy.get_default_memory_pool().free_all_blocks()
