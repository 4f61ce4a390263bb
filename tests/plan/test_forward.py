"""Plans of a forward: every shape has one, and its parts fit together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsbn._plan import INT32_MAX, ITEMSIZE, Device, Limits, Matmul, Matrix, precision_for
from gsbn._plan.gemm import MAX_TERMS
from gsbn._plan.problem import row_threads_for
from gsbn._plan.skinny import skinny_product_for
from gsbn._plan.sm90_tiles import candidates
from tests.plan.fits import FIELDS, assert_fits, contiguous, is_cluster_batch, is_recompute, problems, saved_dtype
from tests.plan.seen import backward_plan, offset_of, plan
from tests.support.harness import DTYPES


@given(p=problems(), training=st.booleans())
def test_auto_serves_every_call(p: Matmul, training: bool) -> None:
    decided = plan(p, training=training)
    assert_fits(p, decided, training=training)
    assert decided.why


@given(p=problems(), training=st.booleans(), gemm=st.sampled_from(["cublas", "tiled"]))
def test_a_requested_path_serves_or_is_refused(p: Matmul, training: bool, gemm: str) -> None:
    if gemm == "cublas" and p.device.capability < (8, 0) and p.dtype == "bfloat16":
        with pytest.raises(ValueError, match=r"^gemm: expected .+, got 'cublas'"):
            plan(p, training=training, gemm=gemm)
    else:
        decided = plan(p, training=training, gemm=gemm)
        assert decided.gemm == gemm
        assert_fits(p, decided, training=training)


@given(p=problems(), training=st.booleans())
def test_saved_deviations_have_rows_on_16_bytes(p: Matmul, training: bool) -> None:
    decided = plan(p, training=training, saved=True)
    assert (decided.gemm == "sm90") == (decided.product is not None or decided.one is not None)
    if decided.one is not None:
        assert training
        assert dict(decided.one.kernel.defines)["SAVE_DEVIATIONS"] == "1"
    assert_fits(p, decided, training=training)
    assert decided.deviations is not None
    (rows, pitch), dtype = decided.deviations.shape, decided.deviations.dtype
    assert rows == p.m and dtype == saved_dtype(p, training=training)
    assert pitch * ITEMSIZE[p.dtype] % 16 == pitch * ITEMSIZE[dtype] % 16 == 0
    assert 0 <= pitch - p.n < 16 // ITEMSIZE[p.dtype]
    if decided.normalize is not None:
        assert decided.normalize.fields["ldg"] == pitch
        assert decided.g in (None, "deviations") or offset_of(str(decided.g)) is not None


@pytest.mark.parametrize(("rows", "cumulative", "want"), [(200, False, False), (200, True, True), (300, False, True)])
def test_a_launch_is_cooperative_where_its_ctas_wait_for_each_other(rows: int, cumulative: bool, want: bool) -> None:
    p = contiguous(rows, 1024, 64)._replace(limits=Limits(cluster_batch=False))
    one = plan(p, training=True, gemm="sm90", cumulative=cumulative).one
    assert one is not None
    assert one.cooperative == (want or one.block_m < rows)
    frozen = plan(contiguous(rows, 1024, 64), training=False, gemm="sm90").one
    assert frozen is not None and not frozen.cooperative


@pytest.mark.parametrize(("dtype", "precision"), [("float16", "highest"), ("bfloat16", "highest"), ("float32", "high")])
def test_sm90_refuses_sums_too_long_for_the_tensor_core(dtype: str, precision: str) -> None:
    limit = MAX_TERMS["tf32" if dtype == "float32" else dtype]
    assert plan(contiguous(64, 64, limit, dtype), training=True, precision=precision, gemm="sm90").one is not None
    p = contiguous(64, 64, limit + 8, dtype)
    assert plan(p, training=True, precision=precision).gemm == "cublas"
    with pytest.raises(ValueError, match=r"gemm: .*lose digits"):
        plan(p, training=True, precision=precision, gemm="sm90")
    if dtype != "float32":
        decided = backward_plan(p._replace(n=limit + 8, k=64, w=Matrix((64, 1), True)), training=True, needs=("x",),
                                gemm="sm90")  # fmt: skip
        assert decided.x is not None and decided.x.gemm == "cublas"


def test_few_inputs_are_multiplied_in_ieee_arithmetic() -> None:
    """For which PyTorch takes no TF32 either; a call without a product has no inputs."""
    assert [precision_for("high", 40, k) for k in (1, 5, 15, 16)] == ["highest"] * 3 + ["high"]
    assert precision_for("high", 40, None) == "high"


def test_short_rows_are_multiplied_by_limbs_where_these_are_accurate() -> None:
    """A forward subtracts the centres of x before, a product alone does not."""
    for k in (8, 23, 24, 63, 64):
        p = contiguous(100000, 128, k, "float32")._replace(limits=Limits(skinny=True))
        kernel = plan(p, training=False).normalize.kernel
        assert dict(kernel.defines)["ELEMENT"] == ("ELEMENT_LIMBS" if k >= 24 else "ELEMENT_FLOAT32")
        assert (skinny_product_for(p, "highest") is not None) == (k >= 64)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(("dtype", "n"), [("float32", 66), ("float32", 68), ("bfloat16", 68), ("bfloat16", 72)])
def test_rows_of_whole_words_have_a_variant_without_code_for_others(dtype: str, n: int, saved: bool) -> None:
    """The other variant takes rows that do not start or end on 16 bytes, and columns that are not adjacent."""
    p = contiguous(100000, n, 32, dtype)._replace(limits=Limits(skinny=True, remat=False))
    whole = n * ITEMSIZE[dtype] % 16 == 0
    layouts = {Matrix((n, 1), True): whole, Matrix((80, 1), True): whole, Matrix((1, 100000), True): False}
    layouts |= {Matrix((n, 1), False): False, Matrix((81, 1), True): False}
    for y, in_words in layouts.items():
        kernel = plan(p._replace(y=y), training=True, saved=saved, gemm="tiled").normalize.kernel
        assert kernel.name == "skinny_normalize" and (("ANY_ROWS", "1") in kernel.defines) == (not in_words)


@pytest.mark.parametrize("shape", [(3, 8192, 1), (64, 4096, 1), (4096, 512, 1)])
def test_one_feature_is_a_matrix_vector_product_of_cublas(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    p = contiguous(m, n, k, "float32")
    assert precision_for("high", n, k) == "highest"
    assert precision_for("high", 2, k) == "high"
    assert plan(p, training=True, precision="highest").gemm == "cublas"
    backward = backward_plan(p, training=True, needs=("x", "weight"), precision="highest")
    assert backward.x is not None
    assert backward.x.gemm == "cublas"
    assert backward.weight is not None
    assert backward.weight.one is None


def test_one_row_is_a_matrix_vector_product_of_cublas() -> None:
    assert plan(contiguous(1, 512, 2048, "float32"), training=False, precision="highest").gemm == "cublas"
    assert plan(contiguous(16, 512, 2048, "float32"), training=False, precision="highest").gemm == "sm90"


@pytest.mark.parametrize(
    ("shape", "tile"), [((495, 320, 1072), (64, 8)), ((512, 2048, 2048), (128, 4)), ((512, 2048, 8192), (256, 2))]
)
def test_a_cluster_has_as_many_ctas_as_fit(shape: tuple[int, int, int], tile: tuple[int, int]) -> None:
    m, k, n = shape
    device = Device((9, 0), 132, pairs=66, fours=30, eights=15, sixteens=7)
    one = plan(contiguous(m, n, k, "bfloat16", device), training=True).one
    assert one is not None and is_cluster_batch(one) and (one.block_m, one.cluster_m) == tile


def test_a_choice_can_be_limited() -> None:
    """Tests, sweeps and benches can force another choice than the cheapest; a limit that leaves none is ignored."""
    p = contiguous(1000, 1032, 136)
    tiles = [(tile.block_m, tile.cluster) for tile in candidates(p, "training", "float16")]
    assert len(tiles) == 8 + 3  # of cluster_batch: 128 by 8, 256 by 4, 256 by 8
    for tile in tiles[:8]:
        one = plan(p._replace(limits=Limits(sm90=tile, recompute=True)), training=True, gemm="sm90").one
        assert one is not None and (one.block_m, one.cluster) == tile and not is_recompute(one)  # no CTA has two tiles
    for tile in tiles[8:]:
        one = plan(p._replace(limits=Limits(sm90=tile, cluster_batch=True)), training=True, gemm="sm90").one
        assert one is not None and (one.block_m, one.cluster_m) == tile and is_cluster_batch(one)
    many = contiguous(100000, 512, 512)
    for tile, again in itertools.product([(256, 1), (256, 2)], (True, False)):
        one = plan(many._replace(limits=Limits(sm90=tile, recompute=again)), training=True, gemm="sm90").one
        assert one is not None and ((one.block_m, one.cluster), is_recompute(one)) == (tile, again)
    limbs = contiguous(1000, 1032, 136, "float32")._replace(limits=Limits(sm90=(256, 2)))
    one = plan(limbs, training=True, gemm="sm90").one
    assert one is not None and one.block_m < 256
    small = plan(p._replace(limits=Limits(tiled=(32, 32, 2, 2))), training=True, gemm="tiled")
    assert dict(small.gemm_tiled.kernel.defines)["BLOCK_M"] == "32"  # type: ignore[union-attr]
    for fused in (True, False):
        limited = p._replace(limits=Limits(fused=fused))
        assert backward_plan(limited, training=True, needs=FIELDS).fused == fused
        assert plan(limited, training=True, gemm="tiled").one_pass == fused


@pytest.mark.parametrize("columns", [2, 4, 8])
def test_row_threads_of_rows_of_any_length(columns: int) -> None:
    """row_threads is a power of two, at most a warp, and less than twice the vectors of a row."""
    for n in range(1, 2000):
        blocks, along = row_threads_for(n, columns)
        assert along in (1, 2, 4, 8, 16, 32) and (blocks - 1) * along * columns < n <= blocks * along * columns
        assert along in (1, 32) or n > along // 2 * columns


@pytest.mark.parametrize("sizes_", [(2**31 + 5, 3, 8), (3, 8, 2**31 + 5), (2**17, 2**15, 8), (2**16, 8, 2**16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_2_31(sizes_: tuple[int, int, int], dtype: str) -> None:
    p = contiguous(*sizes_, dtype)
    decided = plan(p, training=True)
    assert_fits(p, decided, training=True)
    if max(sizes_) > INT32_MAX:
        assert decided.gemm == "tiled"
        with pytest.raises(ValueError, match=r"^gemm: "):
            plan(p, training=True, gemm="cublas")


@pytest.mark.parametrize(
    ("shape", "strides", "want"),
    [
        ((4, 5), (5, 1), (5, 1)),
        ((1, 5), (99, 1), (5, 1)),
        ((4, 1), (7, 99), (7, 1)),
        ((1, 1), (0, 0), (1, 1)),
        ((1, 5), (0, -1), (1, -1)),
    ],
)
def test_strides_of_a_single_row_or_column_mean_nothing(shape: Any, strides: Any, want: Any) -> None:
    assert Matrix.of(shape, strides, aligned=True).strides == want
