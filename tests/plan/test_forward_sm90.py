"""Plans of forward_sm90: what it serves, and how its clusters and tiles are chosen."""

from __future__ import annotations

import ctypes
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsbn._cuda import driver as _driver
from gsbn._plan import ITEMSIZE, SM90_BLOCK_N, Device, Limits, Matmul, Matrix
from gsbn._plan.backward_passes import FUSED_CTAS, FUSED_ROWS
from gsbn._plan.declared import reciprocal
from gsbn._plan.gemm import TileOrder, one_launch
from gsbn._plan.sm90_tiles import OfCall, candidates
from gsbn._plan.sm90_variants import (
    ELEMENTS,
    GEMM_TILES,
    LIMBS_RS_TILES,
    MODES,
    SHARING_TILES,
    SPLIT_K_TILES,
    SPLIT_K_TILES_BY_MODE,
    sizes_of,
)
from tests.plan.fits import (
    FIELDS,
    H200,
    assert_limb_gemm_fits,
    assert_one_launch_fits,
    assert_sm90_product_fits,
    contiguous,
    is_cluster_batch,
    quotient,
)  # fmt: skip
from tests.plan.seen import backward_plan, plan


def test_the_driver_is_asked_how_many_clusters_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def occupancy(found: Any, function: Any, config: Any) -> int:
        c = config._obj
        assert ctypes.sizeof(c) == 56  # of CUlaunchConfig
        attribute = _driver._LaunchAttribute.from_address(c.attributes)
        assert ctypes.sizeof(attribute) == 72  # of CUlaunchAttribute
        asked.append((function.value, c.gx, c.gy, c.gz, c.bx, c.by, c.bz, c.shared, c.count))
        asked.append((attribute.id, *attribute.value[:3]))  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        found._obj.value = 61
        return 0

    monkeypatch.setattr(_driver, "driver", lambda: SimpleNamespace(cuOccupancyMaxActiveClusters=occupancy))
    assert _driver.resident_clusters(2**40, threads=384, cluster=2, shared=1000) == 61
    assert asked == [(2**40, 2, 1, 1, 384, 1, 1, 1000, 1), (4, 2, 1, 1)]


def test_sm90_takes_operands_that_tma_can_load() -> None:
    """Rows that do not start on 16 bytes are copied, unless cuBLAS is as fast without copies; dw reads dg in place."""
    p = contiguous(1024, 8192, 8192)
    p = p._replace(w=p.w._replace(aligned=False))
    asked, auto = (backward_plan(p, training=True, needs=FIELDS, gemm=gemm) for gemm in ("sm90", "auto"))
    assert asked.x is not None and asked.weight is not None and auto.x is not None
    assert (asked.x.gemm, asked.x.p.w.own, asked.weight.p.w.own) == ("sm90", True, False)
    assert (auto.x.gemm, auto.x.p.w.own) == ("sm90", True)
    few = backward_plan(contiguous(64, 4100, 4100), training=True, needs=FIELDS).x
    assert few is not None and not (few.p.w.own or few.p.y.own)
    assert asked.weight.p.x.strides == (1, asked.pitch)
    assert asked.ld_transposed == 0


@given(
    m=st.integers(17, 9000), n=st.integers(1, 9000), dtype=st.sampled_from(["float32", "bfloat16"]), sms=st.booleans()
)
def test_clusters_of_backward_fused_have_all_rows_and_are_resident(m: int, n: int, dtype: str, sms: bool) -> None:
    p = contiguous(m, n, 64, dtype)
    p = p._replace(device=p.device.at_most(100 if sms else None))
    decided = backward_plan(p, training=True, needs=FIELDS)
    sums = decided.sums_launch
    assert sums is not None
    cluster = int(dict(sums.kernel.defines).get("CLUSTER", 1))
    if decided.fused and cluster > 1:
        blocks, rest = divmod(sums.grid, cluster)
        assert rest == 0 and blocks * decided.row_threads * (16 // ITEMSIZE[dtype]) >= n
        assert m <= FUSED_ROWS * cluster and blocks <= FUSED_CTAS * p.device.clusters(cluster)
        assert not sms or sums.grid <= 100
    other = backward_plan(p._replace(limits=Limits(cluster=1)), training=True, needs=FIELDS)
    assert not other.fused or "CLUSTER" not in dict(other.fused_launch.kernel.defines)  # type: ignore[union-attr]
    for needs in (("x",), ("weight", "gamma")):  # gradients must have the same bits
        some = backward_plan(p, training=True, needs=needs)
        assert some.sums_launch is None or (some.sums_launch.kernel, some.row_threads) == (
            sums.kernel,
            decided.row_threads,
        )


@pytest.mark.parametrize("tile", SHARING_TILES, ids=str)
@pytest.mark.parametrize("sms", [132, 60, 8])
def test_clusters_share_both_operands_in_inference(tile: tuple[int, ...], sms: int) -> None:
    device = H200.at_most(sms)
    for shape, dtype in itertools.product([(3, 8, 72), (1700, 1304, 1000), (20000, 520, 136)], ("float16", "bfloat16")):
        p = contiguous(*shape, dtype)._replace(device=device, limits=Limits(sm90=tile))
        one = plan(p, training=False, gemm="sm90").one
        assert one is not None
        chosen = one.block_m, one.cluster, one.split, one.cluster_m
        assert chosen == sizes_of(tile) or device.clusters(math.prod(tile[1:])) == 0 or one.split == 1 < tile[2]
        assert_one_launch_fits(p, one)
    found = candidates(contiguous(1700, 1304, 1000, "float32"), "inference", "tf32")
    assert all(tile.cluster_m == 1 for tile in found)


@pytest.mark.parametrize("sms", [132, 60, 8])
@pytest.mark.parametrize("dw", [False, True])
def test_clusters_share_operands_or_k_in_products_of_a_backward(dw: bool, sms: int) -> None:
    device = H200.at_most(sms)
    for tile, (m, n, k) in itertools.product(GEMM_TILES[dw], [(8, 72, 4104), (1704, 1000, 1304), (264, 520, 4160)]):
        a = Matrix((1, m) if dw else (k, 1), True)
        limits = Limits(sm90=tile)
        p = Matmul(m, n, k, "bfloat16", device, a, Matrix((1, n), True), Matrix((n, 1), True), limits)
        one = one_launch(p, "gemm", "highest")
        chosen = one.block_m, one.cluster, one.split, one.cluster_m
        assert chosen == sizes_of(tile) or device.clusters(math.prod(tile[1:])) == 0 or one.split < tile[2]
        assert_sm90_product_fits(p, one)


def test_split_k_serves_a_long_k_and_few_tiles() -> None:
    few = contiguous(256, 1024, 16384, "bfloat16")
    for mode, tiles in SPLIT_K_TILES_BY_MODE.items():
        found = {tile.shape for tile in candidates(few, mode, "bfloat16") if tile.split > 1}
        assert found == {*tiles, *(tile for tile in SHARING_TILES if mode == "inference" and tile[2] > 1)}
    one = plan(few, training=True, gemm="sm90").one
    assert one is not None and one.split > 2 and (one.ctas, one.cooperative) == (16 * one.split, True)
    of_x = [tile for tile in LIMBS_RS_TILES if tile[2] > 1]
    for element, saved, mode in itertools.product(ELEMENTS, (False, True), SPLIT_K_TILES_BY_MODE):
        training = mode == "training"
        for tile in (of_x if element == "limbs_rs" else SPLIT_K_TILES_BY_MODE[mode]) if training or not saved else ():
            of_float32 = {"tf32": "high", "limbs": "highest", "limbs_rs": "highest"}
            dtype, precision = ("float32", of_float32[element]) if element in of_float32 else (element, "high")
            p = few._replace(dtype=dtype, limits=Limits(sm90=tile, split=True, limbs_rs=element == "limbs_rs"))
            one = plan(p, training=training, precision=precision, gemm="sm90", saved=saved).one
            assert one is not None and (one.block_m, one.cluster, one.split, one.element) == (*tile, element)
            assert_one_launch_fits(p, one)
    fewer = contiguous(50, 1024, 16384, "bfloat16")
    found = candidates(fewer, "training", "bfloat16")
    whole = {tile.shape for tile in found if tile.mode == "cluster_batch" and tile.split > 1}
    assert whole == {(m, 1, split) for m, split in SPLIT_K_TILES if m * split >= 50}
    for m, split in SPLIT_K_TILES:
        p = contiguous(m * split, 1024, 16384, "bfloat16")
        p = p._replace(limits=Limits(sm90=(m, 1, split), split=True, cluster_batch=True))
        one = plan(p, training=True, gemm="sm90").one
        assert one is not None and is_cluster_batch(one) and (one.block_m, one.split) == (m, split)
        assert_one_launch_fits(p, one)
    for p in (
        contiguous(512, 1024, 8 * 64 * 2 - 64),  # k is too short
        contiguous(4096, 4096, 16384),  # tiles fill the GPU without split-k
        few._replace(device=Device((9, 0), 132, pairs=0, fours=0, eights=0)),
    ):
        assert all(tile.split == 1 for mode in MODES for tile in candidates(p, mode, p.dtype))
    assert all(tile.split == 1 for tile in candidates(few, "training", "bfloat16", OfCall(ranks=True)))
    assert plan(few._replace(limits=Limits(split=False)), training=True, gemm="sm90").one.split == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "of_x"),
    [
        ((128, 8192, 8192), True),  # 115 us; 223 with limbs of both operands
        ((8, 4096, 11008), True),  # 71 and 148, cuBLAS 118
        ((32, 2048, 8192), True),  # 37 and 75
        ((1024, 8192, 8192), False),
        ((16384, 4096, 4096), False),
    ],
)
def test_few_rows_make_limbs_of_the_weight_in_registers(
    shape: tuple[int, int, int], of_x: bool, training: bool
) -> None:
    """Not if the weight is prepared or TMA cannot load its rows; there is no such variant for ranks."""
    B, I, O = shape
    p = contiguous(B, O, I, "float32")

    def element(p: Matmul, **options: Any) -> str:
        one = plan(p, training=training, gemm="sm90", **options).one
        assert one is not None and one.limbs is not None
        assert_one_launch_fits(p, one)
        return one.element

    assert element(p) == ("limbs_rs" if of_x else "limbs")
    assert element(p._replace(limits=Limits(limbs_rs=False))) == "limbs"
    assert element(p._replace(w=p.w._replace(aligned=False))) == "limbs"
    assert plan(p, training=training, gemm="sm90", prepared=True).one.element == "limbs"  # type: ignore[union-attr]
    if training:
        assert element(p, ranks="inside") == "limbs"


def test_the_bare_gemm_takes_an_mn_major_weight() -> None:
    """If ranks exchange statistics between launches there is a bare GEMM, which takes an MN-major weight, as for dx."""
    p = contiguous(32, 4102, 2048, "float32")._replace(w=Matrix((1, 4104), True))
    for of_x, want in ((True, ["x"]), (False, ["x", "weight"])):
        decided = plan(p._replace(limits=Limits(limbs_rs=of_x)), training=True, gemm="sm90", ranks="between")
        assert decided.product is not None and [split.name for split in decided.limbs.of] == want
        assert decided.product.element == ("limbs_rs" if of_x else "limbs")
        assert decided.taken is not None
        assert_limb_gemm_fits(decided.taken, decided.product, decided.limbs, "x", "weight")


@pytest.mark.parametrize("element", ["bfloat16", "float32"])
@pytest.mark.parametrize("tile", [(256, 1), (256, 2), (128, 1), (128, 2), (64, 1), (32, 2)])
@pytest.mark.parametrize(
    "shape", [(9000, 2104), (8000, 2104), (135732, 128), (70000, 1001), (65536, 1024), (20000, 384)]
)
def test_a_part_has_all_tiles_of_a_cluster_in_a_column(
    shape: tuple[int, int], tile: tuple[int, int], element: str
) -> None:
    """Tiles in the order of forward_sm90's TileScheduler: those of a merged part follow each other in one column."""
    m, n = shape
    if element == "float32" and tile[0] == 256:
        pytest.skip("limbs have no tile of 256 rows")
    limits = Limits(sm90=tile, recompute=False, cluster_batch=False, split=False, limbs_rs=False)
    one = plan(contiguous(m, n, 512, element)._replace(limits=limits), training=True, gemm="sm90").one
    assert one is not None and one.defers and (one.block_m, one.cluster) == tile
    rows, columns = -(-m // one.block_m), -(-n // (SM90_BLOCK_N * one.cluster))
    grouped = (columns - 1) // one.order.panel * one.order.panel
    order = [
        (row, column)
        for first in range(0, grouped, one.order.panel)
        for row in range(rows)
        for column in range(first, first + one.order.panel)
    ]
    order += [(row, column) for column in range(grouped, columns) for row in range(rows)]
    assert len(order) == rows * columns and one.order.in_panels == grouped * one.cluster
    assert order == [tile_at(one.order, i, rows, columns, training=True) for i in range(len(order))]
    of_parts: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for cluster in range(one.clusters):
        for nth, (row, column) in enumerate(order[cluster :: one.clusters]):
            count = one.order.parts_in_panels if column < grouped else one.order.parts_alone
            if count != rows:
                owner, rows_of_it = of_parts.setdefault((column, row % count), (cluster, []))
                assert owner == cluster and row == row % count + count * len(rows_of_it)
                assert nth == 0 or not rows_of_it or order[cluster :: one.clusters][nth - 1][1] == column
                rows_of_it.append(row)
    assert all(
        rows_of_it[-1] + len({part for c, part in of_parts if c == column}) >= rows
        for (column, _), (_, rows_of_it) in of_parts.items()
    )
    assert of_parts or rows <= one.clusters


def tile_at(order: TileOrder, i: int, height: int, columns: int, *, training: bool) -> tuple[int, int]:
    """As TileScheduler in kernels/sm90/cta.cuh: the row and the column of tile i."""
    if height == 1:
        return 0, i
    first = quotient(i, order.of_panel) * order.panel
    if training and first >= order.grouped:
        column = quotient(i, order.of_rest)
        return i - column * height, column
    i -= first * height
    whole = first < order.grouped
    row = quotient(i, order.of_columns if whole else order.of_rest)
    return row, first + i - row * (order.panel if whole else columns - order.grouped)


@given(st.integers(1, 60), st.integers(1, 30), st.sampled_from([1, 2, 4, 8, 100]), st.booleans())
def test_every_tile_comes_once(height: int, columns: int, panel: int, training: bool) -> None:
    order = TileOrder.of(height, columns, panel, training=training)
    found = [tile_at(order, i, height, columns, training=training) for i in range(height * columns)]
    assert sorted(found) == [(row, column) for row in range(height) for column in range(columns)]
    panels = [column // order.panel for _, column in found]
    assert panels == sorted(panels)  # panel by panel, and a panel row by row
    if not training and height > 1:
        assert found == sorted(found, key=lambda at: (at[1] // order.panel, at))


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_a_reciprocal_divides_exactly(a: int, divisor: int) -> None:
    assert quotient(a, reciprocal(divisor)) == a // divisor
    for near in (a // divisor * divisor, a // divisor * divisor - 1):  # where a quotient that is too large would show
        assert near < 0 or quotient(near, reciprocal(divisor)) == near // divisor


@given(st.integers(1, 5000), st.integers(1, 132))
def test_parts_have_all_tiles(rows: int, parts: int) -> None:
    """As OwnTiles in kernels/sm90/cta.cuh: with rows `parts` apart, and with neighbouring ones."""
    order = TileOrder.of(rows, 1, 1).in_parts(parts, rows)
    counts = [order.tiles_of_part + (part < order.longer_parts) for part in range(parts)]
    assert sorted(row for part, count in enumerate(counts) for row in range(part, part + count * parts, parts)) == list(
        range(rows)
    )
    assert sum(counts) == rows


def test_few_features_take_clusters_of_one() -> None:
    """A second CTA would have no features."""
    few, many = (
        plan(contiguous(100000, 64, 64), training=True, gemm="sm90").one,
        plan(contiguous(4096, 4096, 4096), training=True).one,
    )
    assert few is not None and many is not None
    assert (few.block_m, few.cluster) == (many.block_m, many.cluster - 1) == (256, 1)


RENORM = {"renorm": 0, "warmup": 0, "r_max": 3.0, "d_max": 5.0}


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "want"),
    [
        ((128, 1024, 512), "bfloat16", {}, True),
        ((2, 64, 64), "float16", {"saved": True}, True),
        ((16, 4096, 11008), "bfloat16", {"saved": True}, True),
        ((2, 64, 64), "float16", {"saved": True, "cumulative": True}, False),
        ((2, 64, 64), "float16", {"saved": True, "ranks": "inside"}, False),
        ((2, 64, 64), "float16", {"saved": True, "renorm": RENORM}, False),  # no such variant
        ((512, 2048, 2048), "float16", {"saved": True}, True),
        ((256, 2048, 8192), "float32", {"precision": "high"}, True),
        ((64, 512, 4096), "float32", {"prepared": True}, True),
        ((256, 2048, 8192), "bfloat16", {"training": False}, False),
        ((256, 2048, 8192), "bfloat16", {"cumulative": True}, False),  # the CTA that counts batches waits for others
        ((256, 2048, 8192), "bfloat16", {"ranks": "inside"}, False),
        ((2048, 512, 512), "bfloat16", {}, True),
        ((4097, 512, 512), "bfloat16", {}, False),
        ((1024, 8192, 8192), "bfloat16", {}, False),  # more clusters than are resident at once
    ],
)
def test_cluster_batch_serves_few_rows(
    shape: tuple[int, int, int], dtype: str, options: dict[str, Any], want: bool
) -> None:
    m, k, n = shape
    one = plan(contiguous(m, n, k, dtype), **{"training": True, **options}).one
    assert want == (one is not None and is_cluster_batch(one))


@pytest.mark.parametrize(("n", "sixteens", "want"), [(512, 7, 16), (512, 3, 8), (1024, 7, 8)])
def test_a_cluster_has_16_ctas_where_all_of_them_fit(n: int, sixteens: int, want: int) -> None:
    one = plan(contiguous(2048, n, 512, "bfloat16", H200._replace(sixteens=sixteens)), training=True).one
    assert one is not None and is_cluster_batch(one) and one.cluster_m == want


def test_no_cluster_is_larger_than_its_gpu_holds() -> None:
    for device in (Device((9, 0), 132, pairs=60, fours=0, eights=0), H200.at_most(99), Device((9, 0), 7, pairs=0)):
        p = contiguous(128, 512, 1024, device=device)
        found = [tile for tile in candidates(p, "training", "bfloat16") if tile.mode == "cluster_batch"]
        assert found and all(
            tile.clusters <= (device.ctas(2) if tile.shape == (32, 1) else device.clusters(tile.cluster))
            for tile in found
        )


def test_sm90_defers_tiles_in_whole_words_of_16_bytes() -> None:
    """If a row of y ends within a word, storing the word would overwrite the caller's padding."""
    ends_within = contiguous(50000, 1020, 1024)._replace(y=Matrix((1024, 1), True))
    for p in (ends_within, contiguous(50000, 1001, 1024), ends_within._replace(n=1024)):
        decided = plan(p, training=True, gemm="sm90")
        assert decided.one is not None and decided.one.defers
        assert decided.taken is not None and decided.taken.y == (
            p.y if p.n == 1024 else Matrix((1024, 1), aligned=True, own=True)
        )
        for one in (plan(p, training=False, gemm="sm90"), plan(p._replace(m=1024), training=True, gemm="sm90")):
            assert one.one is not None and not one.one.defers and one.taken.y is p.y  # type: ignore[union-attr]
    turned = Matrix((1, 1024), True)
    assert plan(contiguous(1024, 1024, 1024)._replace(y=turned), training=True, gemm="sm90").taken.y.own  # type: ignore[union-attr]
