"""dual_gemm, which computes dx and dw of few rows from one reading of the weight: every variant, every edge."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from gsbn._plan import Limits
from tests.support.gradients import before_relu, draw_dy, gradient_bounds, step, truth_of
from tests.support.harness import assert_same_bits, kind_of, without_out
from tests.support.strategies import Case
from tests.support.tolerance import assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
pytest.importorskip("cupy")

DUAL, APART = Limits(dual=True), Limits(dual=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",  # rows, input features, features: few and many of a variant's rows; tiles and clusters that are not full
    [
        *((2, 8, 1), (17, 128, 64), (32, 136, 130), (5, 1000, 333), (20, 200, 4099), (3, 9000, 70), (31, 4096, 300)),
        *((33, 264, 999), (64, 1024, 128), (40, 2056, 65), (65, 120, 520), (100, 1032, 700), (128, 512, 2048)),
        *((120, 17000, 40), (127, 8, 8), (129, 1000, 600)),  # 17000 columns or 129 rows take two products
    ],
)
def test_any_size(shape: tuple[int, int, int], dtype: str) -> None:
    """Within the bounds of every path, between guard bands, and bit by bit the same again."""
    arrays = Case(shape, dtype, training=True).arrays()
    dy = draw_dy(arrays)
    truth = truth_of(arrays, dy, training=True)
    limit = gradient_bounds(arrays, dy, truth, training=True)
    (_, got), (_, again) = (step(kind_of("cupy"), arrays, dy, training=True, limits=DUAL) for _ in range(2))
    for name, gradient in got.items():
        assert_within(gradient, getattr(truth, name), limit[name], f"d{name}")
        assert_same_bits(gradient, again[name])


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sms", [None, 9])
@pytest.mark.parametrize("rows", [12, 50, 128])
def test_of_a_whole_backward(rows: int, sms: int | None, training: bool, activation: str | None) -> None:
    arrays = Case((rows, 1048, 1100), "bfloat16", training).arrays()
    dy = draw_dy(arrays)
    options = {"training": training, "activation": activation}
    run = partial(step, kind_of("cupy"), arrays, dy, limits=DUAL, sms=sms, **options)
    before = dy if activation is None else before_relu(dy, run()[0])
    truth = truth_of(arrays, before, training=training)
    limit = gradient_bounds(arrays, before, truth, **options)
    for layouts in ({}, {"dy": "strided"}, {"x": "strided", "weight": "strided"}):  # the last takes two products
        for name, gradient in run(layouts)[1].items():
            assert_within(gradient, getattr(truth, name), limit[name], f"d{name}")


def test_nan_and_inf_stay_in_their_rows_and_columns() -> None:
    """A row of dx depends on dg's row; dw's row on dg's column, and its column on x's."""
    arrays = without_out(Case((24, 1024, 640), "bfloat16", training=False).arrays())
    dy = draw_dy(arrays)

    def products() -> tuple[np.ndarray, np.ndarray]:
        _, found = step(kind_of("cupy"), arrays, dy, training=False, limits=DUAL)
        return np.array(found["x"], np.float32), np.array(found["weight"], np.float32)

    plain = products()
    dy[7, 3], arrays["x"][9, 1000] = np.nan, np.inf
    dx, dw = products()
    assert not np.isfinite(dx[7]).any() and not np.isfinite(dw[3]).any() and not np.isfinite(dw[:, 1000]).any()
    for found, whole in zip((dx, dw), plain, strict=True):
        spoiled = ~np.isfinite(found)
        found[spoiled] = whole[spoiled]
        assert_same_bits(found, whole)
    assert np.isfinite(plain[0]).all() and np.isfinite(plain[1]).all()


@pytest.mark.parametrize("shape", [(8, 2048, 2048), (64, 1024, 1024), (100, 2056, 2000)])
def test_auto_takes_it_and_agrees_with_two_products(shape: tuple[int, int, int]) -> None:
    """The same sums in another order: each is rounded to x's dtype once."""
    arrays = Case(shape, "bfloat16", training=True).arrays()
    dy = draw_dy(arrays)
    auto, forced, apart = (
        step(kind_of("cupy"), arrays, dy, training=True, limits=limits)[1] for limits in (Limits(), DUAL, APART)
    )
    for name in ("x", "weight"):
        assert_same_bits(auto[name], forced[name])
        wide = apart[name].astype(np.float64)
        assert abs(auto[name].astype(np.float64) - wide).max() <= 2.0**-7 * abs(wide).max()
