"""tall_product, which computes dw of many rows in float32: every size, every layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import gsbn
from gsbn._backward import backward_within
from gsbn._plan import Limits
from tests.support.gradients import (
    FAMILIES,
    assert_as_accurate_as_autograd,
    assert_made_of_limbs,
    before_relu,
    draw_dy,
    dw_of,
    gradient_bounds,
    step,
    truth_of,
)
from tests.support.harness import LAYOUTS, assert_same_bits, kind_of
from tests.support.strategies import Case
from tests.support.tolerance import assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")

TALL = Limits(tall=True)


def assert_dw(dg: Any, x: Any) -> None:
    """Within the bound of limbs, also added 32 rows at a time; and bit by bit the same again."""
    got, again = (dw_of(cupy, dg, x, TALL) for _ in range(2))
    assert_same_bits(got.get(), again.get())
    assert_made_of_limbs(cupy, got, dg.T, x)


def draw(rng: Any, span: int, *shape: int) -> Any:
    """Numbers of either sign whose magnitudes span so many powers of two."""
    return cupy.ldexp(rng.uniform(-2, 2, shape), rng.integers(-span, 1, shape).astype("i4")).astype("f4")


def within(matrix: Any, layout: str) -> Any:
    """The same in longer rows with NaN around it; rows start on 16 bytes or not."""
    rows, columns = matrix.shape
    before, after = {"whole": (0, 0), "padded": (4, 4 + -columns % 4), "odd": (1, 2 + columns % 2)}[layout]
    held = cupy.full((rows, before + columns + after), cupy.nan, "f4")
    held[:, before : before + columns] = matrix
    return held[:, before : before + columns]


@pytest.mark.parametrize("span", [0, 16])
@pytest.mark.parametrize("layout", ["whole", "padded", "odd"])
@pytest.mark.parametrize(
    "shape",  # rows, features, input features
    [
        *((2048, 128, 128), (2049, 129, 64), (3001, 33, 65), (70001, 96, 200), (5000, 1, 100), (2500, 500, 256)),
        *((20001, 1024, 32), (9000, 999, 7), (4000, 512, 1000), (140000, 72, 128), (2100, 260, 1)),
    ],
)
def test_any_size(shape: tuple[int, int, int], layout: str, span: int) -> None:
    rows, features, inputs = shape
    rng = cupy.random.default_rng(span)
    assert_dw(draw(rng, span, rows, features), within(draw(rng, span, rows, inputs), layout))


@pytest.mark.parametrize("power", [40, -40])
def test_rows_that_grow_or_fade(power: int) -> None:
    """By 2**40 from the first to the last: the kernel lowers scales on the way, or the last rows hardly count."""
    rng = cupy.random.default_rng(0)
    powers = (cupy.arange(5000)[:, None] * power // 5000).astype("i4")
    dg, x = (cupy.ldexp(draw(rng, 0, 5000, columns), powers) for columns in (130, 200))
    assert_dw(dg, x)


def test_the_expected_kernels_run() -> None:
    """And they leave dg unchanged for dx."""
    rng = cupy.random.default_rng(0)
    x, weight = draw(rng, 0, 100000, 128), draw(rng, 0, 200, 128)
    _, saved = gsbn.forward(x, weight, training=True, return_saved=True)
    dy = draw(rng, 0, 100000, 200)
    both, alone = (backward_within(TALL, dy, saved, needs=needs) for needs in (("x", "weight"), ("weight",)))
    assert_same_bits(both.weight.get(), alone.weight.get())
    other = backward_within(Limits(tall=False), dy, saved, needs=("x", "weight"))
    assert_same_bits(both.x.get(), other.x.get())
    worst = cupy.linalg.norm((both.weight - other.weight).astype("f8")) / cupy.linalg.norm(other.weight.astype("f8"))
    assert 0 < float(worst) < 1e-5  # the same sums in other arithmetic


def test_powers_of_two_change_no_digit() -> None:
    """Columns of dg and of x that differ by 2**±50."""
    rng = cupy.random.default_rng(0)
    dg, x = rng.standard_normal((3000, 130)).astype("f4"), rng.standard_normal((3000, 72)).astype("f4")
    p, q = (rng.integers(-50, 51, size).astype("i4") for size in (130, 72))
    plain = dw_of(cupy, dg, x, TALL).astype("f8")
    got = dw_of(cupy, cupy.ldexp(dg, p), cupy.ldexp(x, q), TALL)
    want = cupy.ldexp(plain, p[:, None] + q)
    normal = (abs(want) >= 2.0**-126) & (abs(want) < 2.0**127)
    assert bool((got == want)[normal].all())


def test_nan_and_inf_stay_in_their_rows_and_columns() -> None:
    rng = cupy.random.default_rng(0)
    dg, x = rng.standard_normal((5000, 140)).astype("f4"), rng.standard_normal((5000, 130)).astype("f4")
    plain = dw_of(cupy, dg, x, TALL)
    dg[77, 3], x[4999, 129] = cupy.nan, cupy.inf
    got = dw_of(cupy, dg, x, TALL)
    assert not cupy.isfinite(got[3]).any() and not cupy.isfinite(got[:, 129]).any()
    plain[3] = plain[:, 129] = got[3] = got[:, 129] = 0
    assert_same_bits(got.get(), plain.get())


@pytest.mark.parametrize("shape", [(8192, 128, 200), (30000, 70, 64)])
@pytest.mark.parametrize("name", FAMILIES)
def test_as_accurate_as_autograd(name: str, shape: tuple[int, int, int]) -> None:
    assert_as_accurate_as_autograd(name, shape, "float32", training=True, limits=TALL)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sms", [None, 7])
def test_of_a_whole_backward(sms: int | None, training: bool, activation: str | None) -> None:
    """Within the bounds of every path, for all layouts of the operands."""
    arrays = Case((9001, 96, 136), "float32", training).arrays()
    dy = draw_dy(arrays)
    options = {"training": training, "activation": activation}
    run = partial(step, kind_of("cupy"), arrays, dy, limits=TALL, sms=sms, **options)
    before = dy if activation is None else before_relu(dy, run()[0])
    truth = truth_of(arrays, before, training=training)
    limit = gradient_bounds(arrays, before, truth, **options)["weight"]
    for layout in LAYOUTS:
        assert_within(run({"dy": layout, "x": layout})[1]["weight"], truth.weight, limit, "weight")
