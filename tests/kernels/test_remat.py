"""Backwards that compute g again, because the forward stored no deviations: skinny_sums and skinny_backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gsbn
from gsbn._forward import forward_within
from gsbn._plan import Limits
from tests.support.gradients import (
    FAMILIES,
    assert_as_accurate_as_autograd,
    before_relu,
    draw_dy,
    gradient_bounds,
    step,
    truth_of,
)
from tests.support.harness import assert_same_bits, kind_of, without_out
from tests.support.strategies import Case
from tests.support.tolerance import assert_within, norm_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")

REMAT = Limits(remat=True)
SHAPES = [  # features of one CTA, of two warpgroups, and of clusters of two and four; odd numbers of rows
    *((17000, 8, 40), (40001, 64, 24), (70001, 32, 128), (30000, 128, 120), (33001, 128, 72)),
    *((20003, 96, 256), (20001, 64, 200), (9001, 24, 520), (9001, 64, 300), (4500, 64, 1000)),
    *((9003, 128, 512), (4501, 120, 900)),
]


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape: tuple[int, int, int], dtype: str, activation: str | None) -> None:
    """Within the bounds of a forward that rounds no deviation, and bit by bit the same again. With relu dy passes where
    y is above zero, in every element."""
    arrays = Case(shape, dtype, True).arrays()
    dy = draw_dy(arrays)
    options: dict[str, Any] = {"training": True, "activation": activation}
    run = partial(step, kind_of("cupy"), arrays, forward_limits=REMAT, limits=REMAT, **options)
    y, got = run(dy)
    for name, again in run(dy)[1].items():
        if again is not None:
            assert_same_bits(again, got[name])
    if activation == "silu":  # stored deviations, dg and the result are rounded: half an eps each, in either backward
        _, stored = step(kind_of("cupy"), arrays, dy, forward_limits=Limits(remat=False), **options)
        for name, gradient in got.items():
            if gradient is not None and gradient.any():
                most = 6e4 if dtype == "float16" else np.inf  # beyond it float16 may overflow in one of them alone
                near = (np.clip(a.astype("f8"), -most, most) for a in (gradient, stored[name]))
                assert norm_error(*near) <= 3 * float(ml_dtypes.finfo(dtype).eps), name
        return
    dy = dy if activation is None else before_relu(dy, y)
    truth = truth_of(arrays, dy, training=True)
    limits = gradient_bounds(arrays, dy, truth, deferred=False, **options)
    for name, gradient in got.items():
        if gradient is not None:
            assert_within(gradient, getattr(truth, name), limits[name], name)


def test_no_deviations_are_stored() -> None:
    for shape in SHAPES:
        arrays = {name: cupy.asarray(a) for name, a in without_out(Case(shape, "bfloat16", True).arrays()).items()}
        _, saved = forward_within(REMAT, **arrays, training=True, return_saved=True)
        assert saved.deviations.shape == (shape[0], 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_is_as_accurate_as_autograd(name: str, dtype: str) -> None:
    assert_as_accurate_as_autograd(name, (20000, 96, 200), dtype, training=True, forward_limits=REMAT)


@pytest.mark.parametrize("needs", [("weight",), ("x",), ("x", "weight"), ("weight", "gamma"), ("scale", "beta")])
@pytest.mark.parametrize("features", [56, 200, 600])
def test_what_is_needed_has_the_same_bits(features: int, needs: tuple[str, ...]) -> None:
    for dtype in ("float16", "bfloat16"):
        arrays = Case((20001, 40, features), dtype, True).arrays()
        run = partial(step, kind_of("cupy"), arrays, draw_dy(arrays), forward_limits=REMAT, training=True)
        whole, part = run()[1], run(needs=needs)[1]
        for name in needs:
            assert_same_bits(part[name], whole[name])


def test_absent_rows_of_a_feature_with_a_large_mean() -> None:
    """Of a last tile with few rows: their deviations are the mean, of which dg would overflow float16."""
    rng = np.random.default_rng(0)
    rows, inputs, features = 20001, 8, 64
    x = rng.standard_normal((rows, inputs)) * 0.03 + 40
    arrays = {"x": cupy.asarray(x.astype("f2")), "weight": cupy.full((features, inputs), 0.3, "f2")}
    y, saved = forward_within(REMAT, **arrays, training=True, return_saved=True)
    assert saved.deviations.shape == (rows, 0)
    for gradient in gsbn.backward(10 * y, saved, needs=("x", "weight", "gamma"))[:2]:
        assert cupy.isfinite(gradient).all()


@pytest.mark.parametrize("strides", [(0, 0), (2, 0), (0, 2), (-144, 2)])
def test_a_broadcast_or_reversed_dy(strides: tuple[int, int]) -> None:
    arrays = {name: cupy.asarray(a) for name, a in without_out(Case((20001, 40, 72), "float16", True).arrays()).items()}
    y, saved = forward_within(REMAT, **arrays, training=True, return_saved=True)
    dy = y[::-1] if strides[0] < 0 else cupy.lib.stride_tricks.as_strided(y.ravel().copy(), y.shape, strides)
    assert dy.strides == strides
    for got, want in zip(gsbn.backward(dy, saved), gsbn.backward(cupy.ascontiguousarray(dy), saved), strict=True):
        if want is not None:
            assert_same_bits(got.get(), want.get())


@pytest.mark.parametrize("layout", ["F", "strided", "negative", "unaligned", "padded"])
def test_any_dy(layout: str) -> None:
    arrays = Case((20001, 40, 72), "bfloat16", True).arrays()
    dy = draw_dy(arrays)
    run = partial(step, kind_of("cupy"), arrays, dy, forward_limits=REMAT, training=True)
    expected, got = run()[1], run({"dy": layout})[1]
    for name, gradient in expected.items():
        if gradient is not None:
            assert_same_bits(got[name], gradient)


def test_few_sms() -> None:
    """Other CTAs add up other rows: at most a rounding in 16 bits, and of the sums, differs."""
    case = Case((20001, 40, 600), "bfloat16", True)
    arrays = {name: cupy.asarray(a) for name, a in without_out(case.arrays()).items()}
    y, saved = forward_within(REMAT, **arrays, training=True, return_saved=True)
    for many, few in zip(gsbn.backward(y, saved), gsbn.backward(y, saved, sms=40), strict=True):
        if many is not None and many.any():
            assert norm_error(few.get(), many.get()) <= float(ml_dtypes.finfo("bfloat16").eps)
    with pytest.raises(ValueError, match=r"^sms: expected at least 5 for 20001 rows and 600 features"):
        gsbn.backward(y, saved, sms=3)
