"""The skinny kernels: every width, partial tiles of rows and columns, any saved results, any number of rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import reference
from gsbn._forward import forward_within
from gsbn._plan import Limits
from gsbn._plan.skinny import LEAST_FORWARD_TERMS
from tests.support.accuracy import FAMILIES, assert_as_accurate_as_torch, norm_error
from tests.support.gradients import assert_made_of_limbs, before_relu, draw_dy, dx_of, gradient_bounds, step, truth_of
from tests.support.harness import DTYPES, LAYOUTS, assert_same_bits, forward, kind_of, without_out
from tests.support.strategies import Case
from tests.support.tolerance import TF32, assert_outcome_within, assert_within, bounds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")

ELEMENTS = [("float16", "high"), ("bfloat16", "high"), ("float32", "high"), ("float32", "highest")]
SKINNY = Limits(skinny=True)


def assert_right(case: Case, precision: str, layouts: dict[str, str] | None = None, **more: Any) -> None:
    """Within the bounds, and bit by bit the same again."""
    arrays, options = case.arrays(), {**case.options, "precision": precision, **more}
    got, again = (forward(kind_of("cupy"), arrays, layouts, limits=SKINNY, **options) for _ in range(2))
    for a, b in zip(got, again, strict=True):
        if a is not None:
            assert_same_bits(np.atleast_1d(a), np.atleast_1d(b))
    truth = reference.forward(**without_out(arrays), **case.options)
    operand = TF32 if (case.dtype, precision) == ("float32", "high") else 0.0
    limbs = (case.dtype, precision) == ("float32", "highest") and case.shape[1] >= LEAST_FORWARD_TERMS
    assert_outcome_within(got, truth, bounds(arrays, truth, **case.options, operand=operand, limbs=limbs))


def test_the_expected_kernels_run() -> None:
    arrays = {name: cupy.asarray(a) for name, a in Case((5000, 32, 32), "float32", True).arrays().items()}
    told = forward_within(SKINNY, **arrays, training=True)
    assert told.shape == (5000, 32)
    for training, kernels in (
        (True, ("skinny_stats", "merge_statistics", "skinny_normalize")),
        (False, ("skinny_normalize",)),
    ):
        assert gsbn.describe(**arrays, training=training, gemm="tiled").kernels == kernels


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize(
    "widths",
    [
        *((8, 8), (32, 32), (24, 40), (64, 64), (56, 100), (63, 127), (31, 33), (16, 1), (1, 500)),
        *((128, 96), (72, 300), (67, 129), (256, 128), (250, 190), (512, 64), (384, 70), (1024, 32), (999, 17)),
    ],
)
def test_any_width(widths: tuple[int, int], dtype: str, precision: str, training: bool) -> None:
    """Rows end within a tile; a warp has none, one or several tiles."""
    most = 1024 if (dtype, precision) == ("float32", "highest") else 128 // DTYPES[dtype].itemsize
    if widths[0] > max(most, 64):
        pytest.skip("rows are too long")
    for rows in (2049, 70001 if widths[0] <= 128 else 20001):
        assert_right(Case((rows, min(widths[0], most), widths[1]), dtype, training), precision)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "weight", "out", "scale"])
def test_any_layout(name: str, layout: str) -> None:
    for training in (True, False):
        assert_right(Case((3001, 40, 72), "bfloat16", training), "high", {name: layout})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("features", [15, 35, 66, 131, 321])
def test_rows_of_y_may_start_anywhere(features: int, dtype: str, precision: str, training: bool) -> None:
    """Words of memory then have elements of two lanes. The bits are those of rows that start on 16 bytes."""
    case = Case((2499, 24, features), dtype, training, activation="relu")
    arrays, options = case.arrays(), {**case.options, "precision": precision}
    wanted, *others = (
        forward(kind_of("cupy"), arrays, {"out": layout}, limits=SKINNY, **options).y
        for layout in ("padded", "C", "unaligned")
    )
    for y in others:
        assert_same_bits(y, wanted)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("sms", [None, 7])
def test_options(sms: int | None, momentum: float | None) -> None:
    for given in ((), ("running", "num_batches_tracked"), ("bias", "gamma", "out")):
        if momentum is None and "num_batches_tracked" not in given:
            continue
        for activation in (None, "relu"):
            case = Case((9000, 32, 48), "float32", True, momentum=momentum, given=given, activation=activation)
            assert_right(case, "highest", sms=sms)


OF_BACKWARD = [  # skinny_backward: rows on 16 bytes of up to 64 elements, or 128 in 16 bits; else skinny_product for dx
    *((2049, 8, 40), (2500, 32, 32), (3001, 64, 24), (9000, 24, 64), (70001, 33, 63), (40000, 64, 64)),
    *((3000, 24, 100), (70001, 128, 56), (5000, 96, 128), (40000, 128, 128), (3000, 200, 80)),
    *((2101, 7, 1100), (3001, 100, 700)),  # skinny_product takes rows in two turns
    # more features, in 16 bits: two warpgroups per tile, and from 257 features on clusters of 2 and 4
    *((2049, 8, 136), (9000, 64, 200), (40001, 96, 256), (5000, 64, 264), (33001, 24, 520), (16500, 64, 1024)),
]


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", OF_BACKWARD)
def test_backward(shape: tuple[int, int, int], dtype: str, precision: str, activation: str | None) -> None:
    arrays = Case(shape, dtype, True).arrays()
    dy = draw_dy(arrays)
    options = {"training": True, "activation": activation}
    run = partial(step, kind_of("cupy"), arrays, precision=precision, forward_limits=SKINNY, limits=SKINNY, **options)
    y, got = run(dy)
    for name, again in run(dy)[1].items():
        if again is not None:
            assert_same_bits(again, got[name])
    dy = dy if activation is None else before_relu(dy, y)
    truth = truth_of(arrays, dy, training=True)
    operand = TF32 if (dtype, precision) == ("float32", "high") else 0.0
    limits = gradient_bounds(arrays, dy, truth, operand=operand, deferred=True, **options)
    for name, gradient in got.items():
        if gradient is not None:
            assert_within(gradient, getattr(truth, name), limits[name], name)


@pytest.mark.parametrize("needs", [("weight",), ("x", "weight"), ("weight", "gamma"), ("x",), ("scale", "beta")])
@pytest.mark.parametrize("sms", [None, 7])
@pytest.mark.parametrize("features", [56, 200, 600])
def test_backward_of_what_is_needed(features: int, needs: tuple[str, ...], sms: int | None) -> None:
    """Bit by bit as with all gradients, except dx alone, which another kernel computes."""
    for dtype in DTYPES:
        arrays = Case((9001, 40, features), dtype, True).arrays()
        dy = draw_dy(arrays)
        run = partial(step, kind_of("cupy"), arrays, dy, limits=SKINNY, training=True, sms=sms)
        whole, part = run()[1], run(needs=needs)[1]
        for name in needs:
            if name != "x" or "weight" in needs:
                assert_same_bits(part[name], whole[name])


@pytest.mark.parametrize("span", [0, 16])
@pytest.mark.parametrize("layout", ["C", "F", "padded"])
@pytest.mark.parametrize(
    "shape",  # rows of dg, columns of dx, features (over which dx sums)
    [
        *((2048, 128, 128), (2049, 36, 64), (3001, 33, 65), (70001, 96, 200), (5000, 130, 100), (2500, 500, 256)),
        *((20001, 32, 1024), (9000, 7, 999), (4000, 64, 512), (9001, 61, 510), (140000, 128, 72), (2100, 1, 64)),
    ],
)
def test_dx_by_one_launch(shape: tuple[int, int, int], layout: str, span: int) -> None:
    """With a weight that is copied, or that is K-major for dx; NaN follows the features of each row of dg."""
    rows, columns, features = shape
    rng = cupy.random.default_rng(span)

    def matrix(*size: int) -> Any:
        return cupy.ldexp(rng.uniform(-2, 2, size), rng.integers(-span, 1, size).astype("i4")).astype("f4")

    dg, weight = matrix(rows, features), matrix(features, columns + (layout == "padded"))[:, :columns]
    weight = cupy.asfortranarray(weight) if layout == "F" else weight
    got, again = (dx_of(cupy, dg, weight, SKINNY, "auto") for _ in range(2))
    assert_same_bits(got.get(), again.get())
    assert_made_of_limbs(cupy, got, dg, weight)


def test_powers_of_two_change_no_digit_of_dx() -> None:
    """Rows of dg and columns of the weight that differ by 2**±60."""
    rng = cupy.random.default_rng(0)
    dg, weight = rng.standard_normal((2100, 130)).astype("f4"), rng.standard_normal((130, 72)).astype("f4")
    p, q = (rng.integers(-60, 61, size).astype("i4") for size in ((2100, 1), (1, 72)))
    plain = dx_of(cupy, dg, weight, SKINNY, "auto").astype("f8")
    got = dx_of(cupy, cupy.ldexp(dg, p), cupy.ldexp(weight, q), SKINNY, "auto")
    want = cupy.ldexp(plain, p + q)
    normal = (cupy.abs(want) >= 2.0**-126) & (cupy.abs(want) < 2.0**127)
    assert bool((got == want)[normal].all())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sms", [None, 7])
def test_dx_has_the_same_bits_with_other_gradients(sms: int | None, training: bool) -> None:
    """And dx is right for all layouts of dy and the weight."""
    arrays = Case((9001, 96, 136), "float32", training).arrays()
    dy = draw_dy(arrays)
    run = partial(step, kind_of("cupy"), arrays, dy, limits=SKINNY, training=training, sms=sms)
    assert_same_bits(run(needs=("x",))[1]["x"], run()[1]["x"])
    truth = truth_of(arrays, dy, training=training)
    limit = gradient_bounds(arrays, dy, truth, training=training)["x"]
    for layout in LAYOUTS:
        assert_within(run({"dy": layout, "weight": layout})[1]["x"], truth.x, limit, "x")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", [(8192, 32, 64), (65536, 48, 40), (8192, 64, 64), (4096, 300, 64), (8192, 128, 200)])
def test_as_accurate_as_torch(name: str, shape: tuple[int, int, int], dtype: str) -> None:
    if dtype != "float32" and shape[1] > 64:
        pytest.skip("rows are too long")
    assert_as_accurate_as_torch(kind_of("torch-cuda"), name, shape, dtype, limits=SKINNY)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_constant_feature_is_beta_and_a_far_first_row_costs_nothing(dtype: str) -> None:
    case = Case((50000, 32, 32), dtype, True, offset=100.0)
    arrays = case.arrays()
    arrays["weight"][:8] = 0
    arrays["weight"][:8, 0] = 1
    arrays["x"][:, 0] = 1000
    arrays["x"][0, 1:] *= 100
    arrays["bias"] *= 0
    got = forward(kind_of("cupy"), arrays, limits=SKINNY, training=True)
    assert_same_bits(got.y[:, :8], np.tile(reference.round_to(arrays["beta"][:8], got.y.dtype), (50000, 1)))
    truth = reference.forward(**without_out(arrays), training=True)
    assert_outcome_within(got, truth, bounds(arrays, truth, training=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(5000, 100, 40), (4096, 1000, 20), (6000, 101, 70), (70000, 24, 200)])
def test_a_large_mean_costs_no_digits(shape: tuple[int, int, int], training: bool) -> None:
    """The centres of x's columns are subtracted before the product, so its error is that of a product of deviations.

    By limbs that is at most 2⁻²¹ of |x - c||w|ᵀ, and 2⁻²³ of g norm-wise; y is rounded once. Without centres it was
    2⁻²³ of a g that is 10³ to 10⁴ times as large.
    """
    case = Case(shape, "float32", training)
    arrays = case.arrays()
    rng = np.random.default_rng(0)
    arrays["x"] += rng.choice([-1e4, 1e3, 3e3, 1e4], shape[1]).astype("f4")
    if not training:
        told = reference.forward(**without_out(arrays), training=True, momentum=1.0)
        arrays |= {"running_mean": told.running_mean.astype("f4"), "running_var": told.running_var.astype("f4")}
    got = forward(kind_of("cupy"), arrays, limits=SKINNY, training=training)
    truth = reference.forward(**without_out(arrays), training=training)
    assert norm_error(got.y, truth.y) < 2.0**-21
    if training:
        assert norm_error(got.running_var, truth.running_var) < 2.0**-21
