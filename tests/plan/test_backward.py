"""Plans of a backward: every shape, layout and set of gradients has one that fits together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsbn._plan import C_TYPE, ITEMSIZE, SM90_BLOCK_N, Device, Limits, Matmul, Matrix, OneLaunch
from gsbn._plan.backward_passes import FUSED_CTAS, FUSED_ROWS, SUMS_CTAS
from gsbn._plan.backward_products import plan_product
from gsbn._plan.gemm import CUBLAS_SMS, FEW_TERMS, MAX_TERMS
from gsbn._plan.limbs import split_grid
from gsbn._plan.sm90_variants import LIMBS_RS_TILES
from gsbn._plan.variants import split_limbs, split_rows_at_once
from tests.plan.fits import (
    ARGUMENTS,
    FIELDS,
    H200,
    assert_copied_or_given,
    assert_dg_is_read_before_limbs_lie_there,
    assert_dual_gemm_fits,
    assert_limb_gemm_fits,
    assert_limbs_fit,
    assert_reduction_fits,
    assert_skinny_product_fits,
    assert_sm90_product_fits,
    assert_tall_product_fits,
    contiguous,
    known,
    largest_grid,
    problems,
    saved_dtype,
    sizes,
)
from tests.plan.seen import assert_steps_fit, backward_plan, plan


@given(rows=st.tuples(sizes(), st.integers(0, 300)), k=st.integers(1, 2**20) | st.sampled_from([64, 65, 8192, 8193]))
def test_split_limbs_takes_as_many_rows_as_it_holds(rows: tuple[int, int], k: int) -> None:
    """One CTA for each 8192 elements of x or the weight: no CTA takes a second item if all can be resident."""
    kernel, at_once = split_limbs(k), split_rows_at_once(k)
    width = int(dict(kernel.defines)["WIDTH"])
    assert kernel in known("sm_90a")
    assert at_once * width == 8192 and (k <= width < 2 * k or width in (64, 8192))
    assert split_grid(rows, k, H200) == sum(-(-count // at_once) for count in rows)


@given(
    p=problems(),
    training=st.booleans(),
    needs=st.sets(st.sampled_from(FIELDS)),
    gemm=st.sampled_from(["auto", "cublas", "tiled", "sm90"]),
    precision=st.sampled_from(["highest", "high"]),
    of_x=st.sampled_from([None, True, False]),
    by_skinny=st.sampled_from([None, True, False]),
    by_tall=st.sampled_from([None, True, False]),
    by_dual=st.sampled_from([None, True, False]),
)
def test_a_backward_fits(
    p: Matmul,
    training: bool,
    needs: set[str],
    gemm: str,
    precision: str,
    of_x: bool | None,
    by_skinny: bool | None,
    by_tall: bool | None,
    by_dual: bool | None,
) -> None:
    p = p._replace(limits=Limits(limbs_rs=of_x, skinny=by_skinny, tall=by_tall, dual=by_dual))
    options: dict[str, Any] = {"training": training, "needs": tuple(sorted(needs))}
    options["precision"] = precision
    has_bfloat16 = p.device.capability >= (8, 0) or p.dtype != "bfloat16"
    too_few_sms = p.device.limited and p.device.sms < CUBLAS_SMS
    if gemm == "cublas" and (too_few_sms or not has_bfloat16) and needs & {"x", "weight"}:
        with pytest.raises(ValueError, match=r"^gemm: expected .+, got 'cublas'"):
            backward_plan(p, gemm=gemm, **options)
        return
    decided, size = backward_plan(p, gemm=gemm, **options), ITEMSIZE[p.dtype]

    assert_steps_fit(decided.program, ARGUMENTS, known(), largest_grid(p.device))

    # no needless work
    assert decided.dg == bool(needs & {"x", "weight"})
    skinny, dg, sums = decided.skinny, decided.dg_launch, decided.sums_launch
    dg_at = decided.place("partials" if skinny is not None else "dg")
    if decided.dual is not None:
        assert {"x", "weight"} <= needs and gemm == "auto" and decided.x is decided.weight is skinny is None
        assert_dual_gemm_fits(p, decided.dual)
    elif skinny is None:
        assert (decided.x is None, decided.weight is None) == ("x" not in needs, "weight" not in needs)
    else:
        assert "weight" in needs and decided.x is decided.weight is None
        sizes = dict(skinny.kernel.defines)
        sharing = int(sizes.get("CLUSTER", 1))
        number, rest = divmod(skinny.ctas, sharing)
        assert (number - 1) * skinny.rows < p.m <= number * skinny.rows and rest == 0
        assert number <= p.device.clusters(sharing) and skinny.ctas <= p.device.sms
        assert int(sizes["FEATURES"]) >= skinny.features >= p.n / sharing and int(sizes["INPUTS"]) >= p.k
        assert sharing == 1 or skinny.features * size % 16 == 0
        assert dg_at is not None and dg_at + skinny.partials.nbytes <= decided.workspace
        assert_reduction_fits(skinny.partials, p.n, p.k, p.device)
    alone = needs <= {"bias"} if training else needs <= {"x", "weight"}
    assert decided.sums != alone
    if sums is not None and not needs & {"scale", "gamma"}:
        assert (sums.passed["d"] != "absent") == (decided.dg and training)

    # grids and workspace
    fields = decided.fields
    assert not fields or (decided.pitch >= p.n and decided.pitch * size % 16 == 0)
    if dg is not None and dg.kernel.name == "backward_dg" and decided.dg:
        assert dg.grid * fields["dg_rows"] >= p.m or p.device.limited
    assert 2 * (16 // size) * decided.row_threads <= 256  # Totals in kernels/common/cluster_columns.cuh
    if decided.fused:
        assert sums is not None and not decided.ld_transposed
        assert p.m <= FUSED_ROWS and sums.grid <= FUSED_CTAS * p.device.sms
        assert decided.splits == 0
        assert sums.grid * 16 * decided.row_threads >= p.n * size or p.device.limited
    elif sums is not None:
        sharing = int(dict(sums.kernel.defines).get("CLUSTER", 1))
        rows = fields["sums_rows"] * sharing
        assert (decided.splits - 1) * rows < p.m <= decided.splits * rows
        assert sums.grid % (decided.splits * sharing) == 0 or (sharing == 1 and p.device.limited)
        assert sharing == 1 or sums.grid // sharing <= SUMS_CTAS * p.device.clusters(sharing)
        assert dg_at is None or decided.splits * 2 * p.n * 8 <= dg_at
    else:
        assert decided.splits == 0
    end, transposed_at = 0 if dg_at is None else dg_at, None
    if decided.ld_transposed and dg is not None:
        transposed_at = decided.place("transposed")
        assert transposed_at is not None
        assert decided.ld_transposed >= p.m and (p.dtype, precision) == ("float32", "high")
    if skinny is None and decided.dg:
        end += p.m * decided.pitch * size
        assert transposed_at is None or end <= transposed_at
    elif skinny is not None:
        end += skinny.partials.nbytes
    if transposed_at is not None:
        end = transposed_at + p.n * decided.ld_transposed * size
    assert end <= decided.workspace
    if sums is not None:
        assert dict(sums.kernel.defines)["D_TYPE"] == C_TYPE[saved_dtype(p, training=training)]
    if fields and fields["vector_dy"]:
        assert decided.dy.strides[1] == 1 and decided.dy.strides[0] * size % 16 == 0

    lent = {"dg": 4 * p.m * decided.pitch} | ({"dweight": 4 * p.n * p.k} if decided.weight is not None else {})
    assert_limbs_fit(decided.limbs, p.device, end if decided.limbs.of else 0, lent)
    assert decided.limbs.end <= decided.workspace
    assert_dg_is_read_before_limbs_lie_there(decided)

    # the products: shapes that chain, and strides that the GEMM takes
    for product, shape in ((decided.x, (p.m, p.k, p.n)), (decided.weight, (p.n, p.k, p.m))):
        if product is None:
            continue
        q = product.p
        if q.y.own:  # sizes in whole words of 16 bytes: what lies beyond a matrix must be allocated
            word = 16 // size
            assert (q.m - shape[0], q.n - shape[1]) in itertools.product(range(word), repeat=2) and q.k == shape[2]
            assert q.m == shape[0] or (decided.dg and q.m <= max(q.x.strides) == decided.pitch)
            assert q.n == shape[1] or (q.w.own and q.n <= max(q.w.strides))
            assert q.n * size % 16 == 0 and q.y.strides == (q.n, 1)
            shape = (q.m, q.n, q.k)
        assert (q.m, q.n, q.k) == shape
        b = p.w if product is decided.x else p.x
        assert_copied_or_given(b.T, q.w, q.n, q.k, size)
        assert q.y == Matrix((q.n, 1), True, q.y.own)  # its rows may start anywhere
        if product.of_limbs:
            assert product.gemm == "sm90"
            assert_limb_gemm_fits(q, product.one, decided.limbs, "dg", "weight" if product is decided.x else "x")
            continue
        if product.one is not None:
            assert product.gemm == "sm90"
            assert_sm90_product_fits(q, product.one)
            continue
        assert product.gemm == ("tiled" if product.kernel is not None or product.tall is not None else "cublas")
        if product.tall is not None:
            assert product is decided.weight and gemm != "cublas"
            assert_tall_product_fits(q, product.tall)
            continue
        if product.kernel is not None:
            assert product.kernel in known()
            if product.rows:
                assert_skinny_product_fits(q, product)
                continue
            assert q.w.strides[0] == 1 and q.x.strides in ((decided.pitch, 1), (1, decided.pitch))
        else:
            for matrix, rows in ((q.x, q.m), (q.w, q.n)):
                row, column = matrix.strides
                assert (column == 1 and row >= q.k) or (row == 1 and column >= rows)


@pytest.mark.parametrize(
    ("shape", "cluster"),
    [
        ((65536, 256, 512), 2),
        ((500000, 128, 304), 2),
        ((1000000, 32, 32), 2),
        ((200704, 384, 768), 2),
        ((65536, 256, 128), 8),  # one block of columns and fewer rows: few splits are merged
        ((30000, 256, 1024), 1),  # eight blocks fill the GPU without clusters
    ],
)
def test_clusters_share_the_sums_of_few_blocks_of_columns(shape: tuple[int, int, int], cluster: int) -> None:
    B, I, O = shape
    asked = {"training": True, "needs": ("x", "weight", "gamma")}
    sums = backward_plan(contiguous(B, O, I, "bfloat16"), **asked).sums_launch
    assert sums is not None
    assert int(dict(sums.kernel.defines).get("CLUSTER", 1)) == cluster


@pytest.mark.parametrize(
    ("shape", "auto"),
    [
        ((802816, 128, 128), True),
        ((65536, 256, 512), True),
        ((380000, 768, 512), True),
        ((131071, 97, 201), True),
        ((3000, 64, 128), False),  # cuBLAS takes less time than two launches
        ((16384, 4096, 4096), False),  # more blocks than SMs
    ],
)
def test_tall_product_computes_dw_of_many_rows(shape: tuple[int, int, int], auto: bool) -> None:
    """Only for float32 at "highest", and contiguous rows; no launch makes limbs of x for it."""
    B, I, O = shape
    p = contiguous(B, O, I, "float32")._replace(limits=Limits(skinny=False))
    can = -(-I // 128) * -(-O // 128) <= 132

    def by_tall(p: Matmul = p, **options: Any) -> bool:
        decided = backward_plan(p, **{"training": True, "needs": ("weight", "gamma"), **options})
        assert decided.weight is not None
        if found := decided.weight.tall is not None:
            assert_tall_product_fits(decided.weight.p, decided.weight.tall)
            assert not decided.weight.of_limbs and not decided.limbs.of
        return found

    asked, refused = (p._replace(limits=p.limits._replace(tall=of)) for of in (True, False))
    assert by_tall() == by_tall(training=False) == auto and not by_tall(refused)
    assert by_tall(asked) == by_tall(asked, gemm="sm90") == by_tall(gemm="tiled") == can
    for options in ({"gemm": "cublas"}, {"precision": "high"}):
        assert not by_tall(asked, **options)
    assert not by_tall(asked._replace(dtype="float64")) and not by_tall(asked._replace(dtype="bfloat16"))
    assert not by_tall(asked._replace(device=Device((8, 0), 108)))
    assert not by_tall(asked._replace(x=Matrix((1, B), True)))


def test_sm90_computes_dw_of_many_rows_by_tall_product_though_cublas_is_faster() -> None:
    p = contiguous(100000, 8, 16, "float32")._replace(limits=Limits(skinny=False))
    for gemm, path in (("auto", "cublas"), ("sm90", "tiled")):
        weight = backward_plan(p, training=True, needs=("weight",), gemm=gemm).weight
        assert weight is not None and weight.gemm == path and (weight.tall is not None) == (gemm == "sm90")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("features", [32, 128, 512])
def test_skinny_backward_sums_few_enough_rows_in_the_tensor_core(dtype: str, features: int) -> None:
    """A team accumulates dw in the tensor core over all of its rows: at most MAX_TERMS of them."""
    rows = 600 * MAX_TERMS[dtype]
    p = contiguous(rows, features, 32, dtype)._replace(y=Matrix((features, 1), True))
    plan = backward_plan(p, training=True, needs=("x", "weight"))
    assert plan.skinny is not None
    teams = plan.skinny.block // (256 if plan.skinny.features > 128 else 128)
    assert plan.skinny.rows <= teams * MAX_TERMS[dtype]
    together = plan.skinny.ctas * plan.skinny.rows
    assert together >= rows
    held = p._replace(device=p.device.at_most(100))  # a second wave might take other SMs
    assert backward_plan(held, training=True, needs=("x", "weight")).skinny is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_product_of_few_terms_is_written_row_by_row(dtype: str) -> None:
    """Clusters compute all columns of some rows of dw before the next rows."""
    for B in (64, FEW_TERMS, FEW_TERMS + 8):
        decided = backward_plan(contiguous(B, 8192, 8192, dtype), training=True, needs=("weight",), gemm="sm90").weight
        assert decided is not None and decided.one is not None
        columns = -(-8192 // (SM90_BLOCK_N * decided.one.cluster))
        assert (decided.one.order.panel == columns) == (B <= FEW_TERMS)


@pytest.mark.parametrize(
    ("shape", "dtype", "skinny"),
    [
        # us of skinny_backward, and of four launches
        ((1000000, 32, 32), "float32", True),  # 281 and 510
        ((20000, 64, 64), "float32", False),  # 45.5 and 42.0
        ((5000, 128, 128), "bfloat16", True),  # 25.2 and 27.1
        ((24575, 128, 256), "bfloat16", False),  # 38.4 and 37.7 of 24000 rows
        ((100000, 128, 136), "bfloat16", True),
        ((100000, 64, 1024), "float16", True),
        ((50000, 64, 640), "float16", False),  # 152 and 139
        ((50000, 64, 768), "float16", True),  # 155 and 161
        ((100000, 64, 1032), "float16", False),
        ((100000, 72, 264), "float16", False),
        ((100000, 32, 72), "float32", False),
        ((2000, 32, 32), "float16", False),
        ((5000, 36, 32), "float16", False),  # rows of x do not start on 16 bytes
        ((5000, 32, 32), "float64", False),
    ],
)
def test_skinny_backward_is_chosen_where_it_was_measured_faster(
    shape: tuple[int, int, int], dtype: str, skinny: bool
) -> None:
    B, I, O = shape
    p = contiguous(B, O, I, dtype)
    for needs in (FIELDS, ("weight",), ("x",)):
        decided = backward_plan(p, training=True, needs=needs)
        assert (decided.skinny is not None) == (skinny and "weight" in needs)
        some = backward_plan(p, training=True, needs=FIELDS)
        if decided.sums:
            assert (decided.splits, decided.row_threads) == (some.splits, some.row_threads)
    assert backward_plan(p, training=False, needs=FIELDS).skinny is None
    assert (backward_plan(p, training=True, needs=FIELDS, in_place=True).skinny is not None) == skinny
    assert backward_plan(p, training=True, needs=FIELDS, gemm="cublas").skinny is None


@pytest.mark.parametrize(
    ("shape", "auto", "can"),
    [
        ((802816, 128, 128), True, True),
        ((131071, 96, 200), True, True),
        ((70001, 97, 201), True, True),  # rows of dg are padded
        ((65536, 256, 512), True, True),
        ((8192, 256, 256), False, True),  # limbs_rs is faster, as the weight has few rows
        ((5000, 96, 96), False, True),  # cuBLAS in IEEE arithmetic is faster
        ((2048, 500, 64), False, True),
        ((50000, 64, 1024), True, True),  # the weight's limbs take two turns
        ((16384, 32, 8192), True, True),
        ((4096, 64, 4096), False, True),  # cuBLAS splits k
        ((100000, 128, 63), False, False),  # too few terms
        ((2047, 128, 128), False, False),
    ],
)
def test_skinny_product_computes_dx_of_many_short_rows(shape: tuple[int, int, int], auto: bool, can: bool) -> None:
    """Only for float32 at "highest", with any `needs`, wherever dg lies. No launch makes limbs of dg for it."""
    B, I, O = shape
    p = contiguous(B, O, I, "float32")

    def by_skinny(p: Matmul = p, **options: Any) -> bool:
        options = {"training": True, "needs": ("x", "weight", "gamma"), **options}
        decided = backward_plan(p, **options)
        assert decided.x is not None
        assert decided.weight is None or decided.weight.rows == 0
        if found := decided.x.rows > 0:
            assert_skinny_product_fits(decided.x.p, decided.x)
            assert all(split.k_major is None for split in decided.limbs.of) and not decided.weight_first
        return found

    asked, refused = (p._replace(limits=Limits(skinny=of)) for of in (True, False))
    for options in ({}, {"needs": ("x",)}, {"in_place": True}, {"training": False}, {"norm": False}):
        at = p._replace(y=Matrix((-(-O // 4) * 4, 1), True)) if "norm" in options else p
        assert by_skinny(at, **options) == auto
        assert by_skinny(at._replace(limits=asked.limits), **options) == can
    assert by_skinny(gemm="tiled") == can
    assert not by_skinny(refused) and not by_skinny(refused, gemm="tiled")
    for options in ({"gemm": "cublas"}, {"precision": "high"}):
        assert not by_skinny(asked, **options)
    for other in ("float64", "bfloat16"):
        assert not by_skinny(asked._replace(dtype=other), needs=("x",))
    assert not by_skinny(asked._replace(device=Device((8, 0), 108)))
    if can:  # a column-major weight whose columns start on 16 bytes is not copied
        column_major = backward_plan(asked._replace(w=Matrix((1, -(-O // 4) * 4), True)), training=True, needs=("x",)).x
        copied = backward_plan(asked, training=True, needs=("x",)).x
        assert (
            column_major is not None and copied is not None and (column_major.p.w.own, copied.p.w.own) == (False, True)
        )


@pytest.mark.parametrize(
    ("shape", "dx", "dw"),
    [
        ((128, 8192, 8192), "limbs_rs", "limbs"),
        ((32, 8192, 2048), "limbs_rs", None),  # cuBLAS computes sums over 32 rows
        ((64, 16384, 1024), "limbs_rs", "limbs"),
        ((16384, 4096, 4096), "limbs", "limbs"),
        ((1, 4096, 4096), None, None),
    ],
)
def test_dx_of_few_rows_makes_limbs_of_the_weight_in_registers(
    shape: tuple[int, int, int], dx: str | None, dw: str | None
) -> None:
    B, I, O = shape
    decided = backward_plan(contiguous(B, O, I, "float32"), training=True, needs=("x", "weight"))
    for product, name, want in ((decided.x, "weight", dx), (decided.weight, "x", dw)):
        assert product is not None
        assert (None if product.one is None else product.one.element) == want
        assert (name in {split.name for split in decided.limbs.of}) == (want == "limbs")
    alone = backward_plan(contiguous(B, O, I, "float32"), training=True, needs=("x",))
    if dx == "limbs_rs":  # no maxima, and limbs of dg's rows alone
        assert [(split.name, split.mn_major) for split in alone.limbs.of] == [("dg", None)]
        assert alone.limbs.maxima_bytes == 0 and alone.workspace < 16 * B * O + 2**20


@pytest.mark.parametrize("needs", [("x", "weight", "gamma"), ("gamma",)])
@pytest.mark.parametrize(
    ("shape", "transposes"),
    [
        ((128, 512, 1024), False),
        ((512, 1024, 1024), False),
        ((128, 4096, 4096), False),
        ((256, 4096, 4096), True),
        ((1024, 1024, 1024), True),
        ((4096, 96, 96), True),
    ],
)
def test_tf32_transposes_dg_where_the_product_is_large(
    shape: tuple[int, int, int], transposes: bool, needs: tuple[str, ...]
) -> None:
    """So measured on an H200. Where it does not, one launch makes dg and all sums; whichever gradients are wanted."""
    found = backward_plan(contiguous(*shape, "float32"), training=True, needs=needs, precision="high")
    assert (found.ld_transposed > 0) == (transposes and "weight" in needs)
    launches = [launch.kernel.name for launch in found.program.launches()]
    assert ("backward_fused" in launches) == (not transposes)


@pytest.mark.parametrize(
    ("shape", "dx", "dw"),
    [
        ((1024, 1100, 1100), "sm90", "sm90"),
        ((20000, 300, 600), "sm90", "padded"),
        ((20000, 301, 603), "sm90", "padded"),
        ((8192, 100, 100), "sm90", "cublas"),  # few tiles: cuBLAS splits dw's k, and is no slower
        ((64, 4100, 4100), "cublas", "sm90"),
        ((4096, 1024, 1024), "cublas", "cublas"),
    ],
)
def test_products_of_rows_that_end_off_16_bytes(shape: tuple[int, int, int], dx: str, dw: str) -> None:
    """As measured on an H200, or H100 (docs/history/backward.md)."""
    B, I, O = shape
    decided = backward_plan(contiguous(B, O, I, "bfloat16"), training=True, needs=("x", "weight"))
    assert decided.x is not None and decided.weight is not None
    assert ["padded" if product.p.y.own else product.gemm for product in (decided.x, decided.weight)] == [dx, dw]


@pytest.mark.parametrize("b", [Matrix((8192, 1), True), Matrix((1, 8192), True)], ids=["K-major", "MN-major"])
def test_a_product_of_few_rows_makes_the_limbs_of_b_in_registers(b: Matrix) -> None:
    program = plan_product(contiguous(128, 8192, 8192, "float32")._replace(w=b), "highest", "auto")
    assert any(("ELEMENT", "ELEMENT_LIMBS_RS") in launch.kernel.defines for launch in program.launches())


def test_limbs_rs_of_dx_can_be_forced_or_forbidden() -> None:
    p = contiguous(100, 4104, 520, "float32")

    def one_of(p: Matmul, **limits: Any) -> OneLaunch:
        found = backward_plan(p._replace(limits=Limits(**limits)), training=True, needs=("x",), gemm="sm90").x
        assert found is not None and found.one is not None
        return found.one

    assert one_of(p, limbs_rs=False).element == "limbs"
    for tile in LIMBS_RS_TILES:
        one = one_of(p, limbs_rs=True, sm90=tile[: 2 + (tile[2] > 1)])
        assert (one.element, (one.block_m, one.cluster, one.split)) == ("limbs_rs", tile)
    for w, want in (
        (p.w._replace(aligned=False), "limbs"),
        (Matrix((521, 1), True), "limbs"),
        (Matrix((1, 4104), True), "limbs_rs"),  # K-major for dx
        (Matrix((1, 4105), True), "limbs"),
        (Matrix((524, 1), True), "limbs_rs"),
        (Matrix((1040, 2), True), "limbs_rs"),  # it is copied
    ):
        assert one_of(p._replace(w=w), limbs_rs=True).element == want


@pytest.mark.parametrize("saved", [True, False])
def test_limbs_are_refused_for_sizes_beyond_32_bits(saved: bool) -> None:
    p = contiguous(2, 8, 2**30 + 8, "float32")
    assert plan(p, training=True, saved=saved).gemm == "cublas"
    with pytest.raises(ValueError, match=r"gemm: .*TMA"):
        plan(p, training=True, gemm="sm90", saved=saved)
