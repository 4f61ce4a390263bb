"""Clusters whose CTAs share tiles of both operands, or k: in inference, and in the products of a backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gsbn import reference
from gsbn._arrays.kinds import kind_of as library_of
from gsbn._backward import How, run
from gsbn._plan import Limits
from gsbn._plan.sm90_variants import GEMM_TILES, SHARING_TILES
from tests.support.harness import DTYPES, assert_same_bits, forward, kind_of, without_out
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


def integers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Any:
    return cupy.array(rng.integers(-3, 4, shape).astype(DTYPES[dtype]))


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
def test_products_of_small_integers_are_exact(shape: tuple[int, int, int], tile: tuple[int, ...], dtype: str) -> None:
    """dx in 16 bits; dweight in float32, which holds the sums, and in 16 bits."""
    rows, inputs, features = shape
    rng = np.random.default_rng(rows)
    x, weight, dg = (integers(rng, s, dtype) for s in ((rows, inputs), (features, inputs), (rows, features)))
    host = [cupy.asnumpy(a).astype(np.float32) for a in (x, weight, dg)]
    dx, dweight = host[2] @ host[1], host[2].T @ host[0]  # integers below 2^24
    how = How(True, "highest", "sm90", (None,) * 4, None, None, None, ("x", "weight"), norm=False)
    for wide in (True, False):
        found, _ = run(library_of(x), (dg, x, weight, None, None, None), how._replace(wide=wide), limits=Limits(tile))
        got = [cupy.asnumpy(gradient) for gradient in found[:2]]
        np.testing.assert_array_equal(got[0], dx.astype(got[0].dtype))
        np.testing.assert_array_equal(got[1], dweight.astype(got[1].dtype))
