"""Chooses the tile of forward_sm90 among those that it can have for a product."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .copies import on_words, whole_words
from .cost import copy_us, one_launch_us, recompute_us, split_us
from .h100 import rates_on
from .h200 import H200
from .h200_products import PRODUCTS
from .problem import ITEMSIZE, Matmul, ceil_div, deviations_dtype, round_up
from .rates import Rates
from .sm90_variants import (
    BLOCKS_M,
    CLUSTER_BATCH_TILES,
    CLUSTERS,
    COLUMN,
    FEW_ROWS_TILES,
    GEMM_TILES,
    LIMBS_RS_TILES,
    RANKS_CLUSTERS,
    SHARING_TILES,
    SM90_BLOCK_N,
    SPLIT_K_TILES,
    SPLIT_K_TILES_BY_MODE,
    by_limbs,
    largest_block,
    occupancy,
    sharers,
)

# Split-k needs so many steps of 128 bytes of k per CTA: with fewer, the exchange of sums costs more.
SPLIT_K_LEAST_STEPS = 8
PANEL_MB = 40.0  # mode "gemm" takes its tiles in square panels if the operands have more MB than this


class OfCall(NamedTuple):
    """What the launch of forward_sm90 depends on in addition to its product."""

    prepared: bool = False  # the weight's limbs exist
    saves: bool = False  # it also writes the deviations, in y's dtype or in float64 (`saves_float64`)
    reads_count: bool = False  # it reads the number of batches so far
    ranks: bool = False  # ranks share the batch, and their statistics arrive during the launch
    renorm: bool = False  # batch renormalisation


PLAIN = OfCall()


def saves_float64(p: Matmul, call: OfCall) -> bool:
    """Return whether a call in 16 bits saves deviations in float64, because it has few rows."""
    return call.saves and deviations_dtype(p.dtype, p.m, training=True) != p.dtype


class Tile(NamedTuple):
    us: float
    block_m: int
    cluster: int
    clusters: int
    mode: str
    split: int = 1  # CTAs that share k
    element: str = ""  # one of `sm90_variants.ELEMENTS`
    cluster_m: int = 1  # CTAs that share a tile of the weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes[: 4 if self.cluster_m > 1 else 3 if self.split > 1 else 2]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.block_m, self.cluster, self.split, self.cluster_m


def cheapest_tile(p: Matmul, mode: str, element: str, call: OfCall = PLAIN) -> Tile:
    """Return the cheapest tile for forward_sm90. Its time is that on an H200 or, for inference in 16 bits, on p.device.

    Slower memory counts where it was measured: in 16 bits, among tiles of "training" and "recompute" or of "inference".
    """
    found, limits = candidates(p, mode, element, call), p.limits
    for fits in (
        lambda tile: limits.sm90 in (None, tile.shape),
        lambda tile: limits.split in (None, tile.split > 1),
        lambda tile: limits.recompute in (None, tile.mode == "recompute"),
        lambda tile: limits.cluster_batch in (None, tile.mode == "cluster_batch"),
        lambda tile: limits.limbs_rs in (None, tile.element == "limbs_rs"),
    ):
        found = list(filter(fits, found)) or found
    # Of two clusters that have all rows, the one with twice as many CTAs and half the rows per CTA was faster.
    whole = {(tile.mode, tile.element, *tile.shape) for tile in found if tile.mode == "cluster_batch"}
    best = min(t for t in found if (t.mode, t.element, t.block_m // 2, 2 * t.cluster) not in whole)
    alike = [t for t in found if mode == "inference" or (t.mode != "cluster_batch" and t.split == 1)]
    if mode == "gemm" or best not in alike or ITEMSIZE[p.dtype] > 2 or p.device.bandwidth == 1.0:
        return best
    rates = rates_on(p.device, mode)
    again = [(tile_of(p, t.mode, element, *t.sizes, call=call, rates=rates) or t, t) for t in alike]
    there, tile = min(again)
    return there if mode == "inference" else tile


def candidates(p: Matmul, mode: str, element: str, call: OfCall = PLAIN) -> list[Tile]:
    """Return all tiles that forward_sm90 can have, each with its expected time.

    If the weight's limbs are not prepared, "limbs_rs" makes them in registers. Training has two more modes:
    "recompute", and "cluster_batch", where a cluster has all rows. Clusters of "cluster_batch" do not wait for each
    other, so this mode cannot serve if all clusters read the count of batches, which one of them raises. Only this mode
    saves deviations in float64.
    """
    prepared, _, reads_count, ranks, renorm = call
    if mode == "training" and saves_float64(p, call):
        sizes = () if ranks or reads_count or renorm else FEW_ROWS_TILES
        of_few = (tile_of(p, "cluster_batch", element, block_m, 1, split, call=call) for block_m, split in sizes)
        return [tile for tile in of_few if tile is not None]
    clusters = RANKS_CLUSTERS if ranks else CLUSTERS
    tiles: list[tuple[int, ...]] = [(m, cluster, 1) for m, cluster in itertools.product(BLOCKS_M, clusters)]
    tiles += SHARING_TILES if mode == "inference" and ITEMSIZE[p.dtype] == 2 else ()
    tiles += SPLIT_K_TILES_BY_MODE.get(mode, ()) if not ranks else ()
    if _of_backward(p, mode, element):
        tiles += GEMM_TILES[mn_major_operands(p, mode, element)[0]]
    found = [(element, mode, tile) for tile in tiles]
    if mode == "training" and not ranks:
        found += [(element, "recompute", tile) for tile in tiles]
    modes_rs = [mode]
    if mode == "training" and not (ranks or reads_count):
        modes_rs += ["cluster_batch"]
        whole = [(*tile, 1) for tile in CLUSTER_BATCH_TILES] + [(m, 1, split) for m, split in SPLIT_K_TILES]
        found += [(element, "cluster_batch", tile) for tile in whole]
    if element == "limbs" and mode in ("gemm", "inference", "training") and not (prepared or ranks):
        found += [("limbs_rs", mode_rs, tile) for mode_rs in modes_rs for tile in LIMBS_RS_TILES]
    tiles_of = (tile_of(p, mode_, element_, *tile, call=call) for element_, mode_, tile in found)
    return [tile for tile in tiles_of if tile is not None]


def tile_of(
    p: Matmul,
    mode: str,
    element: str,
    block_m: int,
    cluster: int,
    split: int = 1,
    cluster_m: int = 1,
    *,
    call: OfCall = PLAIN,
    rates: Rates | None = None,
) -> Tile | None:
    """Return the tile with its expected time, including limbs, and the clusters of its grid.

    Returns None if forward_sm90 cannot have the tile.
    """
    rates = rates or _rates(p, mode, element)
    if element == "limbs_rs" and not _takes_weight_as_it_lies(p, mode):
        return None
    largest = largest_block(element)
    if block_m > largest or (mode == "recompute" and block_m < largest):
        return None
    if mn_major_operands(p, mode, element)[0] and block_m * split % COLUMN:
        return None
    # The CTAs of a cluster that do not share k have adjacent tiles: below each other, or side by side.
    of_columns, of_rows = sharers(mode, cluster, cluster_m)
    rows, columns = block_m * split * of_rows, SM90_BLOCK_N * of_columns
    tiles = ceil_div(p.m, rows) * ceil_div(p.n, columns)
    ctas = cluster * split * cluster_m
    two = occupancy(element, mode, block_m, ctas) == 2
    at_once = p.device.ctas(2) if two else p.device.clusters(ctas)
    if at_once == 0:
        return None
    if mode == "cluster_batch" and (p.m > rows or tiles > at_once):  # a cluster has one tile, with all rows
        return None
    # With split-k there is one wave, since the pipeline takes no second tile.
    steps = ceil_div(p.k * (2 if by_limbs(element) else ITEMSIZE[p.dtype]), 128)
    if split > 1 and (tiles > at_once or steps < SPLIT_K_LEAST_STEPS * split):
        return None
    # In mode "recompute" a cluster has the same features in all its tiles.
    blocks = ceil_div(p.n, columns) if mode == "recompute" else 1
    if blocks > at_once:
        return None
    waves = ceil_div(tiles // blocks, at_once // blocks)
    # Take the fewest clusters that need no more waves: fewer busy SMs draw less power, and can clock higher.
    clusters = ceil_div(tiles // blocks, waves) * blocks
    if mode == "training" and split == 1 and waves > 1:  # if possible, a cluster stays in one column of a panel
        in_whole_panels = round_up(clusters, panel_of(p, mode, element))
        clusters = in_whole_panels if in_whole_panels <= at_once else clusters
    if mode != "recompute":
        tile = block_m, cluster, waves, clusters
        us = one_launch_us(p, mode, element, *tile, saves=call.saves, split=split, cluster_m=cluster_m, rates=rates)
    elif waves > 1:
        us = recompute_us(p, element, cluster, waves, saves=call.saves, rates=rates)
    else:  # all tiles stay in registers: there is nothing to recompute
        return None
    us += split_us(p, element, prepared=call.prepared, rates=rates)
    if mode == "training" and waves > 1 and not whole_words(p.y, p.n, ITEMSIZE[p.dtype]):
        us += copy_us(p.m * p.n * ITEMSIZE[p.dtype], rates=rates)  # deferred tiles wait in other memory than y
    return Tile(us, block_m, cluster, clusters, mode, split, element, cluster_m)


def _rates(p: Matmul, mode: str, element: str) -> Rates:
    if mode != "gemm":
        return H200  # `cheapest_tile` compares again with those of the device
    return rates_on(p.device, mode) if _of_backward(p, mode, element) else PRODUCTS


def _of_backward(p: Matmul, mode: str, element: str) -> bool:
    """Return whether this is a GEMM in 16 bits whose weight is MN-major, as it is in dx and dw."""
    return ITEMSIZE[p.dtype] == 2 and mn_major_operands(p, mode, element)[1]


def panel_of(p: Matmul, mode: str, element: str) -> int:
    """Return the columns of tiles in a panel, which clusters take together.

    A wider panel reads x less often, but reads more of w.
    """
    if mode == "gemm" and not by_limbs(element):
        return 8 if (p.m + p.n) * p.k * ITEMSIZE[p.dtype] > 1e6 * PANEL_MB else 2
    return 1 if p.m <= 8192 else 2 if mode == "training" and not by_limbs(element) else 4


def mn_major_operands(p: Matmul, mode: str, element: str) -> tuple[bool, bool]:
    """Return whether x, and whether the weight, is MN-major for forward_sm90.

    Operands can be MN-major only in mode "gemm"; limbs never are.
    """
    if mode != "gemm" or element in ("tf32", "limbs"):
        return False, False
    return element != "limbs_rs" and p.x.strides[1] != 1, p.w.strides[1] != 1


def _takes_weight_as_it_lies(p: Matmul, mode: str) -> bool:
    """Return whether "limbs_rs" can take the float32 weight without a copy: K-major, and MN-major in mode "gemm".

    It does not serve dw, whose x is MN-major: there making limbs of long columns costs what it saves.
    """
    if mode != "gemm":
        return on_words(p.w, p.k, 4)
    return p.x.strides[1] == 1 and (on_words(p.w, p.k, 4) or is_mn_major(p))


def is_mn_major(p: Matmul) -> bool:
    """Return whether forward_sm90 can take the weight as an MN-major operand."""
    size = ITEMSIZE[p.dtype]
    return on_words(p.w.T, p.n, size) and p.w.strides[1] * size < 2**40
