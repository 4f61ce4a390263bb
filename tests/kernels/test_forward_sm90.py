"""forward_sm90: many tiles per CTA, deferred tiles, concurrent graphs, and what it refuses."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import _plan, reference
from gsbn._cuda import driver as _driver
from gsbn._cuda import kernels as _kernels
from gsbn._forward import forward_within
from gsbn._host.call import bare_gemm
from gsbn._plan import Limits, sm90_variants
from gsbn._plan.sm90_variants import (
    BLOCKS_M,
    CLUSTERS,
    LIMBS_RS_TILES,
    SHARING_TILES,
    SPLIT_K_TILES,
    SPLIT_K_TILES_BY_MODE,
)
from gsbn._plan.sm90_variants import ELEMENTS as ELEMENTS_OF_KERNEL
from tests.support.accuracy import FAMILIES, assert_as_accurate_as_torch, assert_right_and_repeated
from tests.support.forwards import recompute_on_few_sms
from tests.support.gradients import backward, draw_dy, gradient_bounds, truth_of
from tests.support.harness import DTYPES, GPU_KINDS, assert_same_bits, forward, kind_of, without_out
from tests.support.strategies import Case
from tests.support.tolerance import TF32, assert_outcome_within, assert_within, bounds, roundoff

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")


SM90 = {"gemm": "sm90", "precision": "high"}
ELEMENTS = [("float16", "high"), ("bfloat16", "high"), ("float32", "high"), ("float32", "highest")]
SHAPES = [
    (2, 8, 8),
    (300, 72, 520),
    (4100, 264, 104),
    (129, 1032, 1000),
    (600, 4104, 264),  # k is long enough for split-k
    (9000, 64, 2104),  # CTAs have several tiles, and defer all but the last
]


@pytest.fixture(params=[None, *itertools.product(BLOCKS_M, CLUSTERS)], ids=str)
def tile(request: pytest.FixtureRequest) -> Any:
    """None, which leaves the choice to the planner, and each tile that serves all shapes."""
    return request.param


DEFERRED = {"recompute": False, "cluster_batch": False, "split": False, "limbs_rs": False}
CHOICES = [Limits(), *(Limits(sm90=tile, **DEFERRED) for tile in itertools.product(BLOCKS_M, CLUSTERS))]
CHOICES += [Limits(sm90=(256, cluster), recompute=True) for cluster in CLUSTERS]
CHOICES += [
    Limits(sm90=tile, split=True, cluster_batch=False, limbs_rs=False) for tile in SPLIT_K_TILES_BY_MODE["training"]
]
OF_X = {"recompute": False, "cluster_batch": False, "limbs_rs": True}
CHOICES += [Limits(sm90=tile[: 2 + (tile[2] > 1)], split=tile[2] > 1, **OF_X) for tile in LIMBS_RS_TILES]
CHOICES += [Limits(sm90=tile, cluster_batch=True) for tile in ((32, 4), (64, 4), (64, 8), (128, 2), (128, 8), (256, 1))]
CHOICES += [Limits(sm90=(m, 1, split), split=True, cluster_batch=True, limbs_rs=False) for m, split in SPLIT_K_TILES]


def name_of(limits: Limits) -> str:
    how = {" recompute": limits.recompute, " cluster_batch": limits.cluster_batch, " limbs_rs": limits.limbs_rs}
    return str(limits.sm90) + "".join(word for word, yes in how.items() if yes)


@pytest.fixture(params=CHOICES, ids=name_of)
def within(request: pytest.FixtureRequest) -> Any:
    """The planner's choice, each tile that serves all shapes, and the modes "recompute" and "cluster_batch"."""
    return request.param


def skip_what_others_do(within: Limits, shape: tuple[int, int, int], precision: str) -> None:
    if within.limbs_rs and precision != "highest":
        pytest.skip("there are no limbs")
    if within.recompute and shape != SHAPES[-1]:
        pytest.skip("no CTA has a second tile")
    if within.split and shape[1] < 4096:
        pytest.skip("k is too short to be shared")
    if within.cluster_batch and within.sm90 and shape[0] > math.prod(within.sm90):
        pytest.skip("no cluster has so many rows")
    if precision == "highest" and within.sm90 and within.sm90[0] == 256 and not within.recompute:
        pytest.skip("limbs have no tile of 256 rows")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_is_right(
    shape: tuple[int, int, int], dtype: str, precision: str, training: bool, within: Limits
) -> None:
    limbs = (dtype, precision) == ("float32", "highest")
    skip_what_others_do(within, shape, precision)
    if (within.recompute or within.cluster_batch) and not training:
        pytest.skip("it is a way to train")
    arrays = Case(shape, dtype, training).arrays()
    options = {"training": training, "gemm": "sm90", "precision": precision}
    got = forward(kind_of("cupy"), arrays, limits=within, **options)
    truth = reference.forward(**without_out(arrays), training=training)
    operand = TF32 if dtype == "float32" else 0.0
    limit = bounds(arrays, truth, training=training, operand=operand, deferred=dtype != "float32", limbs=limbs)
    assert_outcome_within(got, truth, limit)


@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", [(300, 72, 520), (600, 4104, 264), (9000, 64, 2104)])
def test_a_feature_that_is_constant_is_beta(
    shape: tuple[int, int, int], dtype: str, precision: str, within: Limits
) -> None:
    """However large it is: an error of its mean would be divided by sqrt(eps)."""
    skip_what_others_do(within, shape, precision)
    arrays = Case(shape, dtype, True, layouts=()).arrays()
    arrays["x"][:] = 99 * arrays["x"][0]
    got = forward(kind_of("cupy"), arrays, limits=within, training=True, gemm="sm90", precision=precision)
    beta = reference.round_to(arrays["beta"], DTYPES[dtype]).astype("f8")
    np.testing.assert_array_equal(got.y.astype("f8"), np.broadcast_to(beta, got.y.shape))


def test_constants_of_tiles_whose_features_alternate() -> None:
    """61 clusters take three columns of tiles row by row: a CTA's next tile has other features, or none."""
    arrays = Case((9000, 64, 600), "bfloat16", False).arrays()
    got = forward(kind_of("cupy"), arrays, limits=Limits(sm90=(64, 2)), training=False, **SM90)
    truth = reference.forward(**without_out(arrays), training=False)
    assert_outcome_within(got, truth, bounds(arrays, truth, training=False))


@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_saves_what_a_backward_needs(
    shape: tuple[int, int, int], dtype: str, precision: str, within: Limits
) -> None:
    """y, which another test compares with its truth, is a d + offset of the saved d, a and offset, up to y's dtype."""
    skip_what_others_do(within, shape, precision)
    if shape[0] <= _plan.FEW_ROWS and dtype != "float32":
        pytest.skip("deviations of so few rows are saved in float64")
    arrays = {name: cupy.asarray(a) for name, a in without_out(Case(shape, dtype, True).arrays()).items()}
    alone = {name: a.copy() for name, a in arrays.items()}
    options = {"training": True, "gemm": "sm90", "precision": precision}
    within = within._replace(remat=False)
    y, saved = forward_within(within, **arrays, **options, return_saved=True)
    forward_within(within, **alone, **options)
    for name, a in arrays.items():  # the running statistics, and what must not be written
        assert_same_bits(a.get(), alone[name].get())

    def of(name: str, default: float) -> Any:
        return arrays[name].astype("f8") if name in arrays else cupy.full(shape[2], default)

    wide = y.astype("f8")
    a, of_scale, of_gamma, rate, unit = saved.vectors[:5]
    offset = saved.vectors[8]
    d = saved.deviations[:, : shape[2]].astype("f8") * unit
    short = roundoff(DTYPES[dtype])
    # y and d each come from a deferred deviation or from g, with one more rounding, and float32 arithmetic between
    error = abs(a) * (short * (4 * abs(d) + 2 * abs(d).max(0)) + 2.0**-24 * unit) + short * abs(wide)
    error += 8 * 2.0**-24 * (abs(a * d) + abs(offset)) + 2.0**-24
    assert (abs(a * d + offset - wide) <= error).all()
    assert (abs(a * d.mean(0) + offset - of("beta", 0)) <= error.max(0)).all()
    s, gamma, r = of("scale", 1), of("gamma", 1), 1 / cupy.sqrt(of("scale", 1) ** 2 * d.var(0) + 1e-5)
    close = 1e-5 if dtype == "float32" else 8 * short  # relative to the spread of what was rounded
    assert (cupy.frexp(unit)[0] == 0.5).all()
    for got, want in (
        (a, gamma * s * r),
        (of_scale, gamma * 1e-5 * r**3 * unit),
        (of_gamma, s * r * unit),
        (rate, (s * r * unit) ** 2),
    ):
        assert (abs(got - want) <= 4 * close * abs(want)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_saved_deviations(shape: tuple[int, int, int], dtype: str) -> None:
    if shape[0] <= _plan.FEW_ROWS and dtype != "float32":
        pytest.skip("deviations of so few rows are saved in float64")
    arrays = without_out(Case(shape, dtype, True).arrays())
    dy = draw_dy(arrays)
    got = backward(kind_of("cupy"), arrays, dy, training=True, **SM90)
    truth = truth_of(arrays, dy, training=True)
    operand = TF32 if dtype == "float32" else 0.0
    limits = gradient_bounds(arrays, dy, truth, training=True, operand=operand, deferred=True)
    for name, gradient in got.items():
        if gradient is not None:
            assert_within(gradient, getattr(truth, name), limits[name], name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mn_major", [(False, False), (False, True), (True, True)], ids=str)  # x, weight
@pytest.mark.parametrize("shape", [(1, 8, 1), (33, 16, 33), (257, 136, 72), (2049, 520, 130), (1000, 1000, 777)])
def test_products_of_integers_are_exact(
    shape: tuple[int, int, int], mn_major: tuple[bool, bool], dtype: str, tile: Any
) -> None:
    """Mode "gemm", as the backward uses it: operands K-major or MN-major, with NaN after each row."""
    if mn_major[0] and tile and tile[0] // tile[1] < sm90_variants.COLUMN:
        pytest.skip("a CTA loads whole columns of x")
    (m, n, k), t, device = shape, DTYPES[dtype], cupy.cuda.Device().id
    rng = np.random.default_rng(0)

    def padded(a: np.ndarray) -> Any:
        rows = np.full((a.shape[0], -(-a.shape[1] // 8) * 8 + 8), np.nan, t)
        rows[:, : a.shape[1]] = a
        return cupy.asarray(rows)

    x, w = (rng.integers(-3, 4, (rows, k)).astype(t) for rows in (m, n))
    a, b = (padded(o.T if turned else o) for o, turned in zip((x, w), mn_major, strict=True))
    c = padded(np.full((m, n), np.nan, t))
    at = [_plan.Matrix((o.shape[1], 1), True) for o in (a, b, c)]
    x_at, w_at = (where.T if turned else where for where, turned in zip(at, mn_major, strict=False))
    p = _plan.Matmul(m, n, k, dtype, _kernels.gpu(device), x_at, w_at, at[2], Limits(sm90=tile))
    multiply = bare_gemm(p, _plan.one_launch(p, "gemm", "highest"), device)
    multiply((a.data.ptr, b.data.ptr, c.data.ptr), cupy.cuda.get_current_stream().ptr)
    got = cupy.asnumpy(c)
    np.testing.assert_array_equal(got[:, :n], reference.round_to(x.astype("f8") @ w.astype("f8").T, t))
    assert np.isnan(got[:, n:].astype("f4")).all()


@pytest.mark.parametrize("layout", ["C", "F", "strided", "unaligned", "padded"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", [(300, 71, 521), (129, 1033, 1001), (2500, 99, 101)])
def test_rows_off_16_bytes(
    shape: tuple[int, int, int], dtype: str, precision: str, training: bool, layout: str
) -> None:
    """Operands and y are copied; memory between and around the rows of y stays unchanged, call after call."""
    arrays, limbs = Case(shape, dtype, training).arrays(), (dtype, precision) == ("float32", "highest")
    layouts = dict.fromkeys(("x", "weight", "out"), layout)
    options = {"training": training, "gemm": "sm90", "precision": precision}
    got = forward(kind_of("cupy"), arrays, layouts, **options)
    truth = reference.forward(**without_out(arrays), training=training)
    operand = TF32 if dtype == "float32" else 0.0
    limit = bounds(arrays, truth, training=training, operand=operand, deferred=dtype != "float32", limbs=limbs)
    assert_outcome_within(got, truth, limit)
    assert_same_bits(forward(kind_of("cupy"), arrays, layouts, **options).y, got.y)


@pytest.mark.parametrize("gemm", ["auto", "sm90"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(300, 71, 521), (129, 1033, 1001)])
def test_gradients_of_rows_off_16_bytes(shape: tuple[int, int, int], dtype: str, gemm: str) -> None:
    arrays = without_out(Case(shape, dtype, True).arrays())
    dy = draw_dy(arrays)
    got = backward(kind_of("cupy"), arrays, dy, training=True, gemm=gemm, precision="high")
    truth = truth_of(arrays, dy, training=True)
    operand = TF32 if dtype == "float32" else 0.0
    limits = gradient_bounds(arrays, dy, truth, training=True, operand=operand, deferred=True)
    for name, gradient in got.items():
        if gradient is not None:
            assert_within(gradient, getattr(truth, name), limits[name], name)


@pytest.mark.parametrize("name", GPU_KINDS)
def test_contiguous_rows_off_16_bytes_are_copied(name: str) -> None:
    arrays = Case((300, 72, 520), "bfloat16", True, layouts=()).arrays()
    layouts = dict.fromkeys(("x", "weight"), "unaligned")
    got = forward(kind_of(name), arrays, layouts, training=True, **SM90)
    truth = reference.forward(**without_out(arrays), training=True)
    assert_outcome_within(got, truth, bounds(arrays, truth, training=True, deferred=True))


@pytest.mark.parametrize("block_m", sorted({*BLOCKS_M, *(tile[0] for tile in SPLIT_K_TILES + SHARING_TILES)}))
@pytest.mark.parametrize("element", ELEMENTS_OF_KERNEL)
def test_the_context_holds_what_the_planner_counts_on(element: str, block_m: int) -> None:
    device = cupy.cuda.Device().id
    for kernel in _kernels.all_kernels("sm_90a"):
        defines = dict(kernel.defines)
        chosen = str(ELEMENTS_OF_KERNEL[element]), str(block_m)
        if kernel.name == "forward_sm90" and (defines["ELEMENT"], defines["BLOCK_M"]) == chosen:
            size, function = (
                int(defines["CLUSTER"]) * int(defines["SPLIT_K"]) * int(defines["CLUSTER_M"]),
                _kernels.launcher(kernel, device).pointer,
            )
            resident = _driver.resident_clusters(function, _plan.SM90_THREADS, size, kernel.shared)
            gpu = _kernels.gpu(device)
            assert resident == (gpu.ctas(2) if defines["OCCUPANCY"] == "2" else gpu.clusters(size))


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_deferred_tiles_neither_overflow_nor_vanish(dtype: str, magnitude: float) -> None:
    """For g of any size. A float16 deviation without a unit would overflow above 65504, and lose digits below 6e-5."""
    rng, t, (B, I, O) = np.random.default_rng(0), DTYPES[dtype], (9000, 256, 2048)
    root = np.sqrt(magnitude)
    x = reference.round_to(rng.standard_normal((B, I)) * root, t)
    weight = reference.round_to(rng.standard_normal((O, I)) * root / 16, t)
    arrays = {"x": x, "weight": weight, "scale": np.full(O, 1 / magnitude, np.float32)}
    got = forward(kind_of("cupy"), arrays, limits=Limits(**DEFERRED), training=True, **SM90)
    truth = reference.forward(**arrays, training=True)
    assert_within(got.y, truth.y, bounds(arrays, truth, training=True, deferred=True).y)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize(
    "shape",
    [
        (2817, 40, 8),  # the last tile has one row; half of each CTA has no features
        (2100, 72, 520),  # one or two CTAs per feature, and one CTA of a pair without features
        (8001, 264, 200),  # more steps of k than stages
    ],
)
def test_recompute(
    shape: tuple[int, int, int], dtype: str, precision: str, cluster: int, activation: str | None
) -> None:
    limits = recompute_on_few_sms(dtype, precision, cluster)
    assert_right_and_repeated(Case(shape, dtype, True).arrays(), dtype, precision, limits, activation)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_is_as_accurate_as_torch(name: str, dtype: str) -> None:
    limits = recompute_on_few_sms(dtype, "highest", 2)
    assert_as_accurate_as_torch(kind_of("torch-cuda"), name, (1024, 1024, 512), dtype, gemm="sm90", limits=limits)


@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
def test_the_same_bits_under_load(dtype: str, precision: str) -> None:
    arrays = {n: cupy.asarray(a) for n, a in Case((5000, 520, 1032), dtype, True, layouts=()).arrays().items()}
    fresh = {n: arrays.pop(n) for n in ("running_mean", "running_var", "num_batches_tracked")}
    x = cupy.random.standard_normal((2048, 2048), dtype="f4")
    other_stream = cupy.cuda.Stream(non_blocking=True)
    results = []
    for _ in range(50):
        with other_stream:
            x @ x
        state = {n: a.copy() for n, a in fresh.items()}
        arrays["out"].fill(cupy.nan)
        gsbn.forward(**arrays, **state, training=True, gemm="sm90", precision=precision)
        results.append([arrays["out"].get(), *(a.get() for a in state.values())])
    other_stream.synchronize()
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(np.atleast_1d(b), np.atleast_1d(a))


@pytest.mark.parametrize("momentum", [-0.5, 0.1, None])
def test_a_padded_y_keeps_its_padding_and_any_momentum_counts(momentum: float | None) -> None:
    """60 features in rows of 64, with deferred tiles: no path, also with "auto", may change columns 60 to 63."""
    arrays = Case((9000, 64, 60), "float16", True, layouts=()).arrays()
    native = {n: cupy.asarray(a) for n, a in arrays.items()}
    rows = cupy.full((9000, 64), 7, cupy.float16)
    native["out"] = rows[:, :60]
    gsbn.forward(**native, training=True, momentum=momentum)
    truth = reference.forward(**without_out(arrays), training=True, momentum=momentum)
    limit = bounds(arrays, truth, training=True, momentum=momentum, deferred=True)
    assert (rows[:, 60:] == 7).all()
    assert_within(rows[:, :60].get(), truth.y, limit.y, "y")
    assert limit.running_mean is not None
    assert_within(native["running_mean"].get(), truth.running_mean, limit.running_mean, "running_mean")


def occupy_half() -> Any:
    """A kernel that occupies half of the SMs, with all their shared memory, for about a millisecond."""
    code = 'extern "C" __global__ void hold(long long t) { long long s = clock64(); while (clock64() - s < t) ; }'
    kernel = cupy.RawKernel(code, "hold")
    kernel.max_dynamic_shared_size_bytes = 200 << 10
    sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
    return lambda: kernel((sms // 2,), (128,), (np.int64(2_000_000),), shared_mem=200 << 10)


@pytest.mark.timeout(60)
def test_two_graphs_at_once_with_eager_calls_and_a_busy_gpu() -> None:
    """Each grid needs every SM: a cooperative launch starts no CTA before there is room for all."""
    hold, shape = occupy_half(), (4096, 256, 2048)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    names = ("running_mean", "running_var", "num_batches_tracked")
    problems, graphs = [], []
    for seed in range(3):
        arrays = Case(shape, "bfloat16", True, layouts=(), seed=seed).arrays()
        problems.append((arrays, {n: cupy.asarray(a) for n, a in arrays.items()}))
    with streams[0]:
        for _, native in problems[:2]:
            gsbn.forward(**native, training=True, **SM90)
            streams[0].begin_capture()
            gsbn.forward(**native, training=True, **SM90)
            graphs.append(streams[0].end_capture())
    cupy.cuda.Device().synchronize()
    rounds = 20
    for _ in range(rounds):
        with streams[3]:
            hold()
        graphs[0].launch(streams[0])
        graphs[1].launch(streams[1])
        with streams[2]:
            gsbn.forward(**problems[2][1], training=True, **SM90)
    cupy.cuda.Device().synchronize()
    for (arrays, native), calls in zip(problems, (rounds + 1, rounds + 1, rounds), strict=True):
        assert native["num_batches_tracked"].get() == arrays["num_batches_tracked"] + calls
        truth = reference.forward(**without_out(arrays), training=True)
        assert_within(native["out"].get(), truth.y, bounds(arrays, truth, training=True, deferred=True).y)
        assert set(names) <= set(native)


def test_ten_thousand_replays_advance_the_statistics() -> None:
    arrays = Case((256, 64, 256), "float16", True, layouts=()).arrays()
    native = {n: cupy.asarray(a) for n, a in arrays.items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gsbn.forward(**native, training=True, **SM90)
        stream.begin_capture()
        gsbn.forward(**native, training=True, **SM90)
        graph = stream.end_capture()
        for _ in range(10_000):
            graph.launch(stream)
        stream.synchronize()
    truth = reference.forward(**without_out(arrays), training=True)
    assert native["num_batches_tracked"].get() == arrays["num_batches_tracked"] + 10_001
    assert_within(native["out"].get(), truth.y, bounds(arrays, truth, training=True, deferred=True).y)


def test_threads_share_the_tensor_maps() -> None:
    arrays = Case((512, 128, 384), "bfloat16", True, layouts=()).arrays()
    truth = reference.forward(**without_out(arrays), training=True)
    limit = bounds(arrays, truth, training=True, deferred=True).y
    wrong: list[BaseException] = []

    def run() -> None:
        try:
            native = {n: cupy.asarray(a) for n, a in arrays.items()}
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(20):
                    gsbn.forward(**native, training=True, **SM90)
                stream.synchronize()
            assert_within(native["out"].get(), truth.y, limit)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "why"),
    [
        ((64, 64, 64), "float64", {}, "float64"),
        ((64, 1 << 16, 64), "float16", {}, "lose digits"),
    ],
)
def test_refuses_what_it_cannot_serve(
    shape: tuple[int, int, int], dtype: str, options: dict[str, Any], why: str
) -> None:
    arrays = Case(shape, dtype, True, layouts=()).arrays()
    native = {n: cupy.asarray(a) for n, a in arrays.items()}
    native.pop("out", None)
    with pytest.raises(ValueError, match=rf"gemm: .*{why}"):
        gsbn.forward(**native, training=True, **{**SM90, **options})
