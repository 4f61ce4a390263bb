"""The backward's kernels: within derived bounds for all inputs, and at least as accurate as PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gsbn
from gsbn import reference
from gsbn._plan import Limits
from gsbn._plan.backward_passes import FUSED_ROWS
from gsbn._plan.variants import COLUMN_CLUSTERS
from tests.support.accuracy import SEEDS, family
from tests.support.forwards import exact_training, refused_by_sm90
from tests.support.gradients import (
    FAMILIES,
    NAMES,
    assert_as_accurate_as_autograd,
    backward,
    before_relu,
    draw_dy,
    gradient_bounds,
    step,
    torch_gradients,
    truth_of,
)
from tests.support.harness import DTYPES, GPU_KINDS, LAYOUTS, Kind, assert_same_bits, kind_of, without_out
from tests.support.strategies import ACTIVATIONS, RENORMS, SCALES, Case, cases
from tests.support.streams import capture, new_stream
from tests.support.tolerance import TF32, assert_within, norm_error

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

GEMMS = ["auto", "cublas", "tiled"]
CASE = Case((200, 72, 136), "float32", training=True)
DRAWN = cases(limit=400, scales=tuple(SCALES), activations=ACTIVATIONS, renorms=RENORMS)


def assert_right(
    kind: Kind,
    arrays: dict[str, np.ndarray],
    dy: np.ndarray,
    layouts: dict[str, str] | None = None,
    operand: float = 0.0,
    *,
    training: bool,
    eps: float = 1e-5,
    activation: str | None = None,
    renorm: Any = None,
    **options: Any,
) -> None:
    form: dict[str, Any] = {"training": training, "eps": eps, "activation": activation, "renorm": renorm}
    y, got = step(kind, arrays, dy, layouts, **form, **options)
    dy = dy if activation is None else before_relu(dy, y)
    truth = truth_of(arrays, dy, training=training, eps=eps, renorm=renorm)
    deferred = options.get("gemm", "auto") in ("auto", "sm90")
    limits = gradient_bounds(arrays, dy, truth, operand=operand, deferred=deferred, **form)
    for name, gradient in got.items():
        if gradient is not None:
            assert_within(gradient, getattr(truth, name), limits[name], name)
    if training and got["bias"] is not None:
        assert not got["bias"].any()


# ---- right for all inputs


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", GPU_KINDS)
@given(case=DRAWN, layout=st.sampled_from(LAYOUTS))
@settings(max_examples=40)
def test_stays_within_the_bounds(name: str, gemm: str, case: Case, layout: str) -> None:
    arrays = case.arrays()
    layouts = {**dict(case.layouts), "dy": layout}
    assert_right(kind_of(name), arrays, draw_dy(arrays), layouts, gemm=gemm, **case.options)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [False, True], ids=["two passes", "fused"])
@pytest.mark.parametrize("shape", [(3000, 64, 40), (130, 2050, 70), (70, 33, 2100), (2, 1, 1), (1200, 264, 520)])
def test_long_sides(shape: tuple[int, int, int], fused: bool, dtype: str, training: bool, gemm: str) -> None:
    if fused and shape[0] > FUSED_ROWS:
        pytest.skip("too many rows for one CTA")
    arrays, limits = Case(shape, dtype, training).arrays(), Limits(fused=fused)
    assert_right(kind_of("cupy"), arrays, draw_dy(arrays), gemm=gemm, training=training, limits=limits)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cluster", COLUMN_CLUSTERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
# in the first shape some CTAs have no row; columns that do not fill a block; the most rows that fit
@pytest.mark.parametrize("shape", [(19, 8, 40), (300, 72, 520), (1001, 24, 2047), (8192, 8, 136)])
def test_ctas_share_columns(shape: tuple[int, int, int], dtype: str, cluster: int) -> None:
    """Whichever CTA of a cluster is first: call after call, while another kernel occupies part of the GPU."""
    if shape[0] > FUSED_ROWS * cluster:
        pytest.skip("too many rows for such a cluster")
    arrays, limits = Case(shape, dtype, True).arrays(), Limits(fused=True, cluster=cluster)
    dy = draw_dy(arrays)
    assert_right(kind_of("cupy"), arrays, dy, gemm="cublas", training=True, limits=limits)
    options = {"gemm": "cublas", "training": True, "limits": limits}
    _, first = step(kind_of("cupy"), arrays, dy, **options)
    busy = cupy.ones(1 << 24)
    for _ in range(10):
        with cupy.cuda.Stream(non_blocking=True):
            cupy.sqrt(busy, out=busy)
        _, again = step(kind_of("cupy"), arrays, dy, **options)
        for name, gradient in first.items():
            assert_same_bits(again[name], gradient)


@pytest.mark.parametrize("name", GPU_KINDS)
@given(case=cases(limit=400, dtypes=("float16", "bfloat16")), layout=st.sampled_from(LAYOUTS), whole=st.booleans())
@settings(max_examples=60)
def test_sm90_stays_within_the_bounds(name: str, case: Case, layout: str, whole: bool) -> None:
    """gemm="sm90", with operands in any layout."""
    B, I, O = case.shape
    case = replace(case, shape=(B, -(-I // 8) * 8 if whole else I, O))
    arrays = case.arrays()
    layouts = {**dict(case.layouts), "dy": layout}
    assert_right(kind_of(name), arrays, draw_dy(arrays), layouts, products="sm90", **case.options)


def test_tf32() -> None:
    arrays = Case((520, 264, 136), "float32", True).arrays()
    assert_right(kind_of("cupy"), arrays, draw_dy(arrays), operand=TF32, training=True, precision="high")


def test_dy_may_be_one_number(gpu_kind: Kind) -> None:
    """y.sum().backward() gives a dy with strides of 0."""
    arrays = {name: gpu_kind.put(a) for name, a in without_out(replace(CASE, training=False).arrays()).items()}
    _, saved = gsbn.forward(**arrays, return_saved=True)
    one = gpu_kind.put(np.ones((1, 1), np.float32))
    dy = one.expand(200, 136) if gpu_kind.is_torch else cupy.broadcast_to(one, (200, 136))
    got = gsbn.backward(dy, saved, needs=("beta", "x"))
    assert (gpu_kind.get(got.beta) == 200).all()
    same = gsbn.backward(gpu_kind.put(np.ones((200, 136), np.float32)), saved)
    assert_same_bits(gpu_kind.get(got.x), gpu_kind.get(same.x))


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e6])  # with less, dg overflows float16: a is 1 / magnitude
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_deviations_neither_overflow_nor_vanish(dtype: str, magnitude: float) -> None:
    """For g of any size. A float16 deviation without a unit would overflow above 65504, and lose digits below 6e-5."""
    rng, t, (B, I, O) = np.random.default_rng(0), DTYPES[dtype], (900, 256, 264)
    root = np.sqrt(magnitude)
    x = reference.round_to(rng.standard_normal((B, I)) * root, t)
    weight = reference.round_to(rng.standard_normal((O, I)) * root / 16, t)
    arrays = {"x": x, "weight": weight, "scale": np.full(O, 1 / magnitude, np.float32)}
    assert_right(kind_of("cupy"), arrays, draw_dy(arrays), training=True)


@pytest.mark.parametrize("training", [True, False])
def test_nan_stays_in_its_feature(training: bool) -> None:
    arrays = replace(CASE, training=training).arrays()
    dy = draw_dy(arrays)
    clean = backward(kind_of("cupy"), arrays, dy, training=training)
    dy[3, 1] = np.nan
    got = backward(kind_of("cupy"), arrays, dy, training=training)
    for name in ("weight", *NAMES[3:]):
        assert np.isnan(got[name][1]).any()
        assert_same_bits(np.delete(got[name], 1, axis=0), np.delete(clean[name], 1, axis=0))


def exact_problem(shape: tuple[int, int, int], dtype: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """`exact_training` for gradients: with B a multiple of 4 every intermediate result is exact, for eps = 12.

    d_ij = ±q_j, the signs alternating from row to row, and dy = α + β sign + c e, with e = 1, 1, -1, -1, ... orthogonal
    to 1 and to the signs. So S = B α and D = B β q, and with s² q² r² = 1/4 dg = a (3/4 β sign + c e).
    """
    B, _, O = shape
    arrays, rng = without_out(exact_training(shape, dtype)), np.random.default_rng(1)
    sign, e = np.resize([1, -1], B)[:, None], np.resize([1, 1, -1, -1], B)[:, None]
    alpha, beta, c = (rng.integers(-2, 3, O) for _ in range(3))
    return arrays, (alpha + 4 * beta * sign + c * e).astype(DTYPES[dtype])


@pytest.mark.parametrize("gemm", [*GEMMS, "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 8, 8), (64, 40, 64), (16, 264, 1000), (1024, 96, 72), (2048, 6, 40)])
def test_gradients_of_small_integers_are_exact(shape: tuple[int, int, int], dtype: str, gemm: str) -> None:
    arrays, dy = exact_problem(shape, dtype)
    with refused_by_sm90(gemm):
        got = backward(kind_of("cupy"), arrays, dy, training=True, eps=12.0, gemm=gemm)
    truth = truth_of(arrays, dy, training=True, eps=12.0)
    for name, gradient in got.items():
        want = reference.round_to(getattr(truth, name), arrays[name].dtype)
        np.testing.assert_array_equal(gradient, want, name)  # as values: a zero may have either sign


# ---- as accurate as PyTorch


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("features", [1, 5])
@pytest.mark.parametrize("rows", [2, 3, 4, 6, 8, 12, 16, 17, 24])
def test_few_rows_are_as_accurate_as_autograd(rows: int, features: int, dtype: str) -> None:
    """Of two rows normalisation leaves almost nothing of dy, of three one dimension: dx and dw cancel almost wholly."""
    kind, shape = kind_of("torch-cuda"), (rows, 512, features)
    problems = [family("normal", seed, shape, dtype) for seed in SEEDS]
    of_dy = [draw_dy(arrays, seed) for seed, arrays in enumerate(problems)]
    truths = [truth_of(arrays, dy, training=True) for arrays, dy in zip(problems, of_dy, strict=True)]
    theirs = [torch_gradients(kind, arrays, dy) for arrays, dy in zip(problems, of_dy, strict=True)]
    ours = [backward(kind, arrays, dy, training=True) for arrays, dy in zip(problems, of_dy, strict=True)]
    for field in ("x", "weight"):
        truth = np.stack([getattr(t, field) for t in truths])
        mine, its = np.stack([o[field] for o in ours]), np.stack([t[field] for t in theirs])
        eps = float(ml_dtypes.finfo(mine.dtype).eps)
        error, its_error = norm_error(mine, truth), norm_error(its, truth)
        assert error <= 1.05 * its_error + eps / 4, f"{field}: {error} for torch's {its_error}"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_is_as_accurate_as_autograd(name: str, dtype: str, training: bool) -> None:
    shape = (256, 128, 64) if dtype == "float64" else (1024, 1024, 512)
    assert_as_accurate_as_autograd(name, shape, dtype, training=training)


def test_the_gradient_of_the_scale_is_a_hundred_times_closer() -> None:
    """For standard normal data with s² v >= 1 autograd's float32 sum cancels to noise, the closed form does not."""
    rng, (B, I, O) = np.random.default_rng(0), (1024, 1024, 512)
    kind = kind_of("torch-cuda")
    arrays = {"x": rng.standard_normal((B, I)), "weight": rng.standard_normal((O, I)), "scale": rng.uniform(1, 2, O)}
    arrays |= {"bias": rng.standard_normal(O), "gamma": rng.uniform(0.5, 2, O), "beta": rng.standard_normal(O)}
    arrays = {name: a.astype(np.float32) for name, a in arrays.items()}
    dy = draw_dy(arrays)
    truth = truth_of(arrays, dy, training=True).scale
    theirs = norm_error(torch_gradients(kind, arrays, dy)["scale"], truth)
    got = backward(kind, arrays, dy, training=True)["scale"]
    assert got is not None
    ours = norm_error(got, truth)
    print(f"norm-wise error of dscale: {ours:.2g} for autograd's {theirs:.2g}")
    assert 100 * ours <= theirs


# ---- the same bits, `needs`, memory


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gemm", ["auto", "tiled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(dtype: str, gemm: str, training: bool) -> None:
    arrays = Case((1500, 200, 300), dtype, training).arrays()
    dy = draw_dy(arrays)
    first, *others = (backward(kind_of("cupy"), arrays, dy, gemm=gemm, training=training) for _ in range(10))
    for other in others:
        for name in NAMES:
            assert_same_bits(other[name], first[name])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("needs", [(), ("x",), ("weight",), ("bias",), ("scale",), ("gamma",), ("beta", "x")])
def test_needs_do_not_change_other_gradients(needs: tuple[str, ...], training: bool) -> None:
    arrays = Case((1500, 200, 300), "float16", training).arrays()
    dy = draw_dy(arrays)
    everything = backward(kind_of("cupy"), arrays, dy, gemm="tiled", training=training)
    got = backward(kind_of("cupy"), arrays, dy, needs=needs, gemm="tiled", training=training)
    for name in needs:
        assert_same_bits(got[name], everything[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_temporary_beyond_dg(dtype: str) -> None:
    B, I, O = 8192, 32, 4096
    arrays = without_out(Case((B, I, O), dtype, True).arrays())
    native = {name: cupy.asarray(a) for name, a in arrays.items()}
    dy = cupy.asarray(draw_dy(arrays))
    _, saved = gsbn.forward(**native, training=True, return_saved=True)
    assert saved.deviations.nbytes == dy.nbytes
    assert saved.vectors.size <= 9 * O
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        got = gsbn.backward(dy, saved)
        made = sum(a.nbytes for a in got if a is not None)
        assert pool.total_bytes() < made + dy.nbytes * 1.5  # there is no second one; the half is for vectors


# ---- kernels that overlap

LATE = """
extern "C" __global__ void late(const char* from, char* to, long long bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");  // what comes after may begin now
#endif
    const long long until = clock64() + 200000;
    while (clock64() < until) {}
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < bytes; i += 8 * 256) to[i] = from[i];
}
"""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gemm", ["auto", "tiled", "cublas"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_waits_for_a_kernel_that_lets_it_begin_early(dtype: str, gemm: str, training: bool) -> None:
    """The kernel ahead lets the next one begin early. x, the weight and dy are NaN until it writes them at its end."""
    arrays = without_out(Case((600, 136, 264), dtype, training).arrays())
    native = {name: cupy.asarray(a) for name, a in arrays.items()}
    frozen = {name: native[name] for name in ("scale", "running_mean", "running_var", "bias", "gamma", "beta")}
    dy, late = cupy.asarray(draw_dy(arrays)), cupy.RawKernel(LATE, "late")

    def ahead(array: Any, act: Callable[[], Any]) -> Any:
        source = array.copy()
        array.view("u1").fill(255)
        late((8,), (256,), (source, array, array.nbytes))
        return act()

    def forward(**options: Any) -> Callable[[], Any]:
        """A call with its own copies of the statistics, made before it."""
        own = {name: a.copy() for name, a in native.items() if name not in ("x", "weight")}
        operands = {"x": native["x"], "weight": native["weight"]}
        return lambda: gsbn.forward(**operands, **own, training=training, gemm=gemm, **options)

    def folded() -> Any:
        return gsbn.fold(native["weight"], **frozen)

    y, (_, saved), folded_once = forward()(), forward(return_saved=True)(), folded()
    gradients = gsbn.backward(dy, saved)
    for _ in range(3):
        assert_same_bits(cupy.asnumpy(ahead(native["x"], forward())), cupy.asnumpy(y))
        for got, wanted in zip(ahead(dy, lambda: gsbn.backward(dy, saved)), gradients, strict=True):
            assert_same_bits(cupy.asnumpy(got), cupy.asnumpy(wanted))
        for got, wanted in zip(ahead(native["weight"], folded), folded_once, strict=True):
            assert_same_bits(cupy.asnumpy(got), cupy.asnumpy(wanted))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("shape", [(64, 64, 16384), (64, 16384, 64), (128, 512, 512)])
def test_dw_overlaps_with_dx_and_later_kernels_see_both(shape: tuple[int, int, int], captured: bool) -> None:
    """dx takes ten times as long as dw in the first shape, and a tenth in the second."""
    arrays = without_out(Case(shape, "bfloat16", True).arrays())
    native = {name: cupy.asarray(a) for name, a in arrays.items()}
    dy = cupy.asarray(draw_dy(arrays))
    _, saved = gsbn.forward(**native, training=True, gemm="sm90", return_saved=True)

    def follow() -> list[Any]:
        """The products, and copies of them by a following kernel; each call has fresh memory."""
        got = gsbn.backward(dy, saved, needs=("x", "weight"))
        return [got.x, got.weight, got.x.copy(), got.weight.copy()]

    apart = [getattr(gsbn.backward(dy, saved, needs=(name,)), name) for name in ("x", "weight")]
    run = follow
    if captured:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            follow()
            stream.begin_capture()
            outputs = follow()
            graph = stream.end_capture()

        def run() -> list[Any]:  # in the graph's own memory
            for output in outputs:
                output.view("u1").fill(255)
            cupy.cuda.get_current_stream().synchronize()
            graph.launch(stream)
            stream.synchronize()
            return outputs

    for _ in range(20):
        poison = cupy.full(1 << 24, 255, "u1")  # the pool returns this memory next
        del poison
        for got, truth in zip(run(), [*apart, *apart], strict=True):
            assert_same_bits(cupy.asnumpy(got), cupy.asnumpy(truth))


# ---- CUDA graphs


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_is_a_step(gpu_kind: Kind, dtype: str, training: bool, gemm: str) -> None:
    case = replace(CASE, dtype=dtype, training=training)
    arrays = without_out(case.arrays())
    dy = draw_dy(arrays)
    native, dy_native = {name: gpu_kind.put(a) for name, a in arrays.items()}, gpu_kind.put(dy)

    def step() -> Any:
        _, saved = gsbn.forward(**native, **case.options, gemm=gemm, return_saved=True)
        return gsbn.backward(dy_native, saved)

    with new_stream(gpu_kind) as stream:
        step()
        replay, got = capture(gpu_kind, stream, step)
        for seed in (1, 2):
            arrays["x"] = replace(case, seed=seed).arrays()["x"]
            native["x"][...] = gpu_kind.put(arrays["x"])
            if not training:
                for name in ("running_mean", "running_var"):
                    arrays[name] = gpu_kind.get(native[name])
            replay()
            stream.synchronize()
            truth = truth_of(arrays, dy, training=training, eps=case.eps)
            limits = gradient_bounds(arrays, dy, truth, training=training, eps=case.eps, deferred=True)
            for name in NAMES:
                assert_within(gpu_kind.get(getattr(got, name)), getattr(truth, name), limits[name], name)
