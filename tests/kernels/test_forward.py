"""The forward's kernels: the properties of api/test_forward.py, and what concerns a GPU alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import gsbn
from gsbn import reference
from gsbn._plan import Limits
from gsbn._plan.forward_path import ONE_PASS_ROWS
from tests.support.forwards import CASE, GEMMS, exact_training, refused_by_sm90, truth_and_bounds
from tests.support.harness import (
    ANY,
    DTYPES,
    GPU_KINDS,
    LAYOUTS,
    STATISTICS,
    Kind,
    Producer,
    assert_same_bits,
    forward,
    kind_of,
    place,
    without_out,
)
from tests.support.strategies import ACTIVATIONS, OPTIONAL, RENORMS, SCALES, VECTORS, Case, cases
from tests.support.tolerance import FLUSHED, assert_outcome_within, assert_within, bounds, roundoff

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


# ---- right for all inputs


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", GPU_KINDS)
@given(case=cases(limit=400, scales=tuple(SCALES), activations=ACTIVATIONS, renorms=RENORMS))
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
    """What follows a GEMM in training, in one launch or in two, with each number of row_threads."""
    arrays = Case((rows, 24, features), dtype, True, offset=10.0).arrays()
    got = forward(kind_of("cupy"), arrays, {"out": layout}, gemm="tiled", training=True, limits=Limits(fused=fused))
    assert_outcome_within(got, *truth_and_bounds(arrays, training=True))


SHAPES = [(2, 2, 1), (64, 40, 64), (128, 257, 131), (62, 8, 1000), (1024, 96, 72), (4096, 6, 40), (4, 6, 300_001)]


@pytest.mark.parametrize("gemm", [*GEMMS, "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), *SHAPES])
def test_inference_on_small_integers_is_exact(shape: tuple[int, int, int], dtype: str, gemm: str) -> None:
    """Every intermediate result is exact in any order, so y is the truth, rounded once."""
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
    np.testing.assert_array_equal(got.y, reference.round_to(want.y, t))  # as values: a zero may have either sign


@pytest.mark.parametrize("present", [OPTIONAL, ("running",)], ids=["all given", "statistics alone"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("narrow", [(), ("gamma", "running"), VECTORS], ids=["wide", "both", "narrow"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_vectors_of_each_type_in_inference(
    dtype: str, narrow: tuple[str, ...], layout: str, present: tuple[str, ...]
) -> None:
    """If all vectors are alike, forward_sm90 has shorter code for them."""
    case = Case((130, 72, 200), dtype, False, given=present, narrow=narrow, scale="vector" if narrow else "none")
    arrays = case.arrays()
    vectors = [name for name, a in arrays.items() if a.shape == (200,)]
    got = forward(kind_of("cupy"), arrays, dict.fromkeys(vectors, layout))
    assert_outcome_within(got, *truth_and_bounds(arrays, training=False))


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
    """Rows of y that start on 16 bytes and end within a word: their last store must not overwrite the next columns."""
    arrays = Case((300, 72, features), dtype, training, layouts=()).arrays()
    native = {name: cupy.asarray(a) for name, a in arrays.items()}
    buffer = cupy.full((300, pitch), 7, native["x"].dtype)
    native["out"] = buffer[:, :features]
    with refused_by_sm90(gemm):
        gsbn.forward(**native, training=training, gemm=gemm)
    truth, limit = truth_and_bounds(arrays, training=training)
    limit = bounds(arrays, truth, training=training, deferred=True, limbs=dtype == "float32")
    assert_within(cupy.asnumpy(native["out"]), truth.y, limit.y, "y")
    assert (buffer[:, features:] == 7).all()


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
    # float64 arithmetic, at most eight roundings, with terms that cancel in b; then one rounding; subnormals may flush
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


# ---- the same bits


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(dtype: str, training: bool) -> None:
    arrays = Case((1500, 200, 300), dtype, training).arrays()
    first, *others = (forward(kind_of("cupy"), arrays, gemm="tiled", training=training) for _ in range(10))
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert_same_bits(a, b)


# ---- consecutive calls


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_tensor_that_was_changed_in_place_is_taken_as_it_is(gemm: str) -> None:
    """What was cached about the arguments of a call must not be used after they change."""
    import torch

    kind = kind_of("torch-cuda")
    arrays = without_out(Case((96, 64, 96), "bfloat16", training=True, layouts=()).arrays())
    native = {name: kind.put(a) for name, a in arrays.items()}
    x, weight, gamma, beta, mean = (native[name] for name in ("x", "weight", "gamma", "beta", "running_mean"))

    def check() -> None:
        now = {name: kind.get(a) for name, a in native.items()}
        y = gsbn.forward(**native, training=True, gemm=gemm)
        truth, limit = truth_and_bounds(now, training=True)
        assert_within(kind.get(y), truth.y, bounds(now, truth, training=True, deferred=True).y)
        assert_within(kind.get(mean), truth.running_mean, limit.running_mean)

    def noise(*shape: int) -> Any:
        return torch.randn(shape, device="cuda")

    for change in (
        lambda: x.resize_(40, 64),
        lambda: x.set_(noise(200, 64).bfloat16()),
        lambda: x.set_(noise(64, 200).bfloat16().t()),
        lambda: weight.set_(noise(96 * 64 + 1).bfloat16()[1:].view(96, 64)),  # does not start on 16 bytes
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
        assert pool.total_bytes() < y.nbytes + one_more + one_more // 2  # not a second one; the half is for vectors


def needs_memory(gigabytes: int) -> None:
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, found {free / 2**30:.1f}")


@pytest.mark.parametrize("gemm", ["auto", "tiled"])
@pytest.mark.parametrize("shape", [(275_200, 8, 16_392), (137_600, 32_776, 8)], ids=["y", "x"])
def test_more_than_2_31_elements(shape: tuple[int, int, int], gemm: str) -> None:
    """The exact training problem with 2.1 · 2³¹ elements in y or in x; all elements of y are compared.

    More than 2 · 2³¹, so that of two blocks of rows, however large, the second starts beyond 2³¹.
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


def test_a_row_of_y_of_more_than_2_31_bytes(hopper: None) -> None:
    """Where float32 rows are off 16 bytes, forward_sm90 stores words; their offsets in a row do not fit 32 bits."""
    needs_memory(56)
    n, at_once = 2**29 + 72, 1 << 24
    weight, mean, var = cupy.zeros((n, 8), "f4"), cupy.zeros(n, "f4"), cupy.full(n, 4, "f4")
    for start in range(0, n, at_once):
        weight[start : start + at_once, 0] = cupy.arange(start, min(start + at_once, n)) % 1021
    x = cupy.zeros((2, 8), "f4")
    x[:, 0] = cupy.asarray([4, 12])
    memory = cupy.full(2 * n + 2, np.nan, "f4")
    y = memory[1:-1].reshape(2, n)
    running = {"running_mean": mean, "running_var": var}
    gsbn.forward(x, weight, **running, training=False, eps=12.0, gemm="sm90", out=y)  # divides by 4
    for start in range(0, n, at_once):
        want = (cupy.arange(start, min(start + at_once, n)) % 1021).astype("f4")
        part = y[:, start : start + at_once]
        assert bool((part[0] == want).all()) and bool((part[1] == 3 * want).all()), f"features from {start}"
    assert bool(cupy.isnan(memory[0])) and bool(cupy.isnan(memory[-1]))
    del weight, mean, var, memory, y, want, part, running
    cupy.get_default_memory_pool().free_all_blocks()
