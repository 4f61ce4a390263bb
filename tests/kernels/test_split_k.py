"""Split-k in forward_sm90: sums are right and repeat, whichever CTA is first and whatever lies beyond the tiles."""

from __future__ import annotations

import pytest

from gsbn import reference
from gsbn._plan import Limits
from gsbn._plan.sm90_variants import LIMBS_RS_TILES, SPLIT_K_TILES_BY_MODE
from tests.support.harness import assert_same_bits, forward, kind_of, without_out
from tests.support.strategies import Case
from tests.support.tolerance import TF32, assert_outcome_within, bounds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")

ELEMENTS = [("float16", "high"), ("bfloat16", "high"), ("float32", "high"), ("float32", "highest")]


@pytest.mark.parametrize(
    ("dtype", "precision", "of_x", "tile", "training"),
    [
        *(
            (*of, False, tile, mode == "training")
            for of in ELEMENTS
            for mode in SPLIT_K_TILES_BY_MODE
            for tile in SPLIT_K_TILES_BY_MODE[mode]
        ),
        *(
            ("float32", "highest", True, tile, training)
            for tile in LIMBS_RS_TILES
            if tile[2] > 1
            for training in (False, True)
        ),
    ],
)
# in the first shape most CTAs have neither rows nor features of their own
@pytest.mark.parametrize("shape", [(2, 4104, 8), (129, 16384, 264), (512, 8200, 136)])
def test_sums_over_parts_of_k(
    shape: tuple[int, int, int], dtype: str, precision: str, of_x: bool, tile: tuple[int, int, int], training: bool
) -> None:
    """Added in the same order whichever CTA is first: call after call, while another kernel takes part of the GPU."""
    arrays, within = (
        Case(shape, dtype, training).arrays(),
        Limits(sm90=tile, split=True, cluster_batch=False, limbs_rs=of_x),
    )
    options = {"training": training, "gemm": "sm90", "precision": precision}
    got = forward(kind_of("cupy"), arrays, limits=within, **options)
    truth = reference.forward(**without_out(arrays), training=training)
    operand, limbs = TF32 if dtype == "float32" else 0.0, (dtype, precision) == ("float32", "highest")
    limit = bounds(arrays, truth, training=training, operand=operand, deferred=dtype != "float32", limbs=limbs)
    assert_outcome_within(got, truth, limit)
    busy = cupy.ones(1 << 24)
    for _ in range(10):
        with cupy.cuda.Stream(non_blocking=True):
            cupy.sqrt(busy, out=busy)
        assert_same_bits(forward(kind_of("cupy"), arrays, limits=within, **options).y, got.y)
