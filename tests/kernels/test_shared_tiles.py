"""Clusters whose CTAs share tiles of both operands, or k: in inference, and in the products of a backward."""

from __future__ import annotations

import pytest

from gsbn import reference
from gsbn._plan import Limits
from gsbn._plan.sm90_variants import GEMM_TILES, SHARING_TILES
from tests.support.harness import assert_same_bits, forward, kind_of, without_out
from tests.support.integers import assert_products_are_exact
from tests.support.strategies import Case
from tests.support.tolerance import assert_outcome_within, bounds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", SHARING_TILES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (3, 1032, 8),  # all CTAs but one, or those that share its k, have neither rows nor features of their own
        (1700, 1000, 1300),  # rows of x that do not start on 32 bytes; the last clusters have some tiles only
        (20000, 136, 520),  # CTAs have several tiles
        (1200, 200, 133),  # rows of y that start anywhere
    ],
)
def test_clusters_that_share_both_operands(
    shape: tuple[int, int, int], tile: tuple[int, ...], dtype: str, activation: str | None
) -> None:
    arrays = Case(shape, dtype, False, offset=3.0).arrays()
    options = {"training": False, "gemm": "sm90", "activation": activation, "limits": Limits(sm90=tile)}
    got = forward(kind_of("cupy"), arrays, **options)
    truth = reference.forward(**without_out(arrays), training=False, activation=activation)
    assert_outcome_within(got, truth, bounds(arrays, truth, training=False))
    busy = cupy.ones(1 << 24)
    for _ in range(5):
        with cupy.cuda.Stream(non_blocking=True):
            cupy.sqrt(busy, out=busy)
        assert_same_bits(forward(kind_of("cupy"), arrays, **options).y, got.y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", {*GEMM_TILES[False], *GEMM_TILES[True]} | {(64, 2)}, ids=str)
@pytest.mark.parametrize(
    "shape",  # rows, input features, features
    [
        (200, 264, 4104),  # few tiles and a long k in dx
        (2056, 8, 3000),  # all CTAs but one have no columns of their own, or no rows of dw
        (3000, 1096, 1032),  # rows that do not start on 32 bytes; the last clusters have some tiles only
        (4160, 520, 200),  # a step of k that is not full: 200 features, and 4160 rows divided by eight
        (20000, 264, 1000),  # CTAs have several tiles of dx
    ],
)
def test_products_of_a_backward_are_exact(shape: tuple[int, int, int], tile: tuple[int, ...], dtype: str) -> None:
    """Of small integers: dx in 16 bits, and dweight in float32, which holds the sums, and in 16 bits."""
    for wide in (True, False):
        assert_products_are_exact(shape, dtype, "sm90", wide=wide, limits=Limits(tile))
