"""A product of two matrices: which kernels can make it, and how each would."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .copies import adjacent, copy_along, in_rows, on_words, whole_words
from .cost import copies_us, copy_us, one_launch_us, product_us, recompute_us, split_us
from .h200 import H200
from .h200_products import PRODUCTS
from .kernel import Kernel
from .limbs import limb_pitch, split_grid
from .problem import FEW_ROWS, INT32_MAX, ITEMSIZE, Device, Matmul, ceil_div, deviations_dtype, round_up
from .rates import Rates
from .sm90_variants import (
    BLOCKS_M,
    CLUSTER_BATCH_TILES,
    CLUSTERS,
    COLUMN,
    LIMBS_RS_TILES,
    RANKS_CLUSTERS,
    SM90_BLOCK_N,
    SPLIT_K_TILES,
    SPLIT_K_TILES_BY_MODE,
    by_limbs,
    element_for,
    forward_sm90,
    largest_block,
    occupancy,
)
from .variants import TILES, gemm_tiled, split_limbs

CUBLAS_SMS = 16  # SMs to aim at; with a target of one it was seen to end the process (a division by zero)
LEAST_STEPS = 8  # of k, 128 bytes each, for each CTA that shares it: below, exchanging sums takes longer than it saves
PANEL_MB = 40.0  # of operands, beyond which the GEMM alone takes its tiles in panels as wide as high
# Terms of a sum up to which a product takes about as long as its result is written: then in full rows, and dw by
# forward_sm90, since cuBLAS would clear words before it
FEW_TERMS = 512
# Terms of a sum up to which forward_sm90 adds them in the tensor core alone, which cuts off what float32 cannot hold:
# the error grows with their number, and beyond would pass a quarter of the dtype's eps (TF32: what cuBLAS errs by).
MAX_TERMS = {"float16": 2**15, "bfloat16": 2**18, "tf32": 2**15}

LEAST_TERMS = 64  # from which on limbs are taken by themselves: few errors of theirs do not average out in a variance


class LimbsOfRows(NamedTuple):
    """float32 operands as two float16 limbs, by split_limbs; offsets into the workspace in bytes."""

    kernel: Kernel
    grid: int
    pitch: int  # from row to row, in float32's
    x: int
    w: int
    x_exponents: int
    w_exponents: int


class OneLaunch(NamedTuple):
    """A launch of forward_sm90, the whole forward or its GEMM alone; offsets and sizes in bytes."""

    kernel: Kernel
    cooperative: bool  # its CTAs wait for each other: all must be resident
    element: str
    limbs: LimbsOfRows | None
    block_m: int
    cluster: int
    clusters: int
    split: int  # CTAs that share k
    panel: int
    in_panels: int  # blocks of features whose columns are taken in panels; and in how many parts
    parts_in_panels: int  # the rows of such a block are,
    parts_alone: int  # and those of the others
    merged: int
    epoch: int
    workspace: int
    wide: bool = False  # y is float32 though x has 16 bits
    along_rows: bool = False  # a cluster shares a tile of the weight, not of x
    defers: bool = False  # tiles wait in y, in words of 16 bytes

    @property
    def ctas(self) -> int:
        return self.clusters * self.cluster * self.split


class Tile(NamedTuple):
    us: float
    block_m: int
    cluster: int
    clusters: int
    mode: str
    split: int = 1  # CTAs that share k
    element: str = ""  # one of `sm90_variants.ELEMENTS`

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Limits` names it."""
        return (self.block_m, self.cluster, self.split)[: 2 + (self.split > 1)]


def cheapest_tile(p: Matmul, mode: str, element: str, **of_call: bool) -> Tile:
    """The tile that is cheapest for forward_sm90, and the clusters of its grid; `of_call`: what `candidates` asks."""
    found = candidates(p, mode, element, **of_call)
    limits = p.limits
    for fits in (
        lambda tile: limits.sm90 in (None, tile.shape),
        lambda tile: limits.split in (None, tile.split > 1),
        lambda tile: limits.recompute in (None, tile.mode == "recompute"),
        lambda tile: limits.cluster_batch in (None, tile.mode == "cluster_batch"),
        lambda tile: limits.limbs_rs in (None, tile.element == "limbs_rs"),
    ):
        found = list(filter(fits, found)) or found
    return min(found)


def candidates(
    p: Matmul,
    mode: str,
    element: str,
    *,
    prepared: bool = False,
    saves: bool = False,
    cumulative: bool = False,
    ranks: bool = False,
) -> list[Tile]:
    """All tiles that forward_sm90 can have, each with what it is expected to take.

    Limbs of the weight may be `prepared`; else it can make them itself, in registers. To train, it may make g twice, or
    have all rows in a cluster. Such clusters never meet, as they must for a `cumulative` average: all read the count of
    batches that one raises.
    """
    tiles = [(m, cluster, 1) for m, cluster in itertools.product(BLOCKS_M, RANKS_CLUSTERS if ranks else CLUSTERS)]
    tiles += SPLIT_K_TILES_BY_MODE.get(mode, ()) if not ranks else ()
    found = [(mode, *tile) for tile in tiles]
    if mode == "training" and not ranks:
        found += [("recompute", *tile) for tile in tiles]
    hows = [mode]
    if mode == "training" and not (ranks or cumulative):
        hows += ["cluster_batch"]
        found += [("cluster_batch", *tile, 1) for tile in CLUSTER_BATCH_TILES] + [
            ("cluster_batch", m, 1, split) for m, split in SPLIT_K_TILES
        ]
    ways = [(element, *way) for way in found]
    if element == "limbs" and mode in ("gemm", "inference", "training") and not (prepared or ranks):
        ways += [("limbs_rs", how, *tile) for how in hows for tile in LIMBS_RS_TILES]
    made = (tile_of(p, of, as_, *tile, prepared=prepared, saves=saves, split=split) for as_, of, *tile, split in ways)
    return [tile for tile in made if tile is not None]


def tile_of(
    p: Matmul,
    mode: str,
    element: str,
    block_m: int,
    cluster: int,
    *,
    prepared: bool = False,
    saves: bool = False,
    split: int = 1,
    rates: Rates | None = None,
) -> Tile | None:
    """What forward_sm90 would take with this tile, limbs included, and the clusters of its grid; None where it cannot
    have it."""
    rates = rates or (PRODUCTS if mode == "gemm" else H200)
    if element == "limbs_rs" and not _takes_weight_as_it_lies(p, mode):
        return None
    largest = largest_block(element)
    if block_m > largest or (mode == "recompute" and block_m < largest):
        return None
    if mn_major_operands(p, mode, element)[0] and block_m // cluster < COLUMN:
        return None
    # A cluster's CTAs, but for those that share k, lie below each other or side by side.
    of_rows, of_columns = (cluster, 1) if mode == "cluster_batch" else (1, cluster)
    rows, columns = block_m * split * of_rows, SM90_BLOCK_N * of_columns
    tiles = ceil_div(p.m, rows) * ceil_div(p.n, columns)
    two = occupancy(element, mode, block_m, cluster * split) == 2
    at_once = p.device.ctas(2) if two else p.device.clusters(cluster * split)
    if at_once == 0 or (
        mode == "cluster_batch" and (p.m > rows or tiles > at_once)
    ):  # a cluster has one tile, of all rows
        return None
    # Where CTAs share k a tile is made in a ring that takes nothing more afterwards: there is one wave.
    steps = ceil_div(p.k * (2 if by_limbs(element) else ITEMSIZE[p.dtype]), 128)
    if split > 1 and (tiles > at_once or steps < LEAST_STEPS * split):
        return None
    # Where g is made twice, each cluster keeps to its features.
    apart = ceil_div(p.n, columns) if mode == "recompute" else 1
    if apart > at_once:
        return None
    waves = ceil_div(tiles // apart, at_once // apart)
    # As few clusters as need no more waves: the power that the others would draw goes to these.
    clusters = ceil_div(tiles // apart, waves) * apart
    if mode == "training" and split == 1 and waves > 1:  # each keeps to a column of a panel, if that is to be had
        in_whole_panels = round_up(clusters, _panel(p, mode, element))
        clusters = in_whole_panels if in_whole_panels <= at_once else clusters
    if mode != "recompute":
        us = one_launch_us(p, mode, element, block_m, cluster, waves, clusters, saves=saves, split=split, rates=rates)
    elif waves > 1:
        us = recompute_us(p, element, cluster, waves, saves=saves, rates=rates)
    else:  # all tiles stay in registers: none is made twice
        return None
    us += split_us(p, element, prepared=prepared, rates=rates)
    if mode == "training" and waves > 1 and not whole_words(p.y, p.n, ITEMSIZE[p.dtype]):
        us += copy_us(p.m * p.n * ITEMSIZE[p.dtype], rates=rates)  # tiles are parked elsewhere
    return Tile(us, block_m, cluster, clusters, mode, split, element)


def one_launch(
    p: Matmul,
    mode: str,
    precision: str,
    *,
    prepared: bool = False,
    saves: bool = False,
    cumulative: bool = False,
    wide: bool = False,
    ranks: bool = False,
) -> OneLaunch:
    """The launch of forward_sm90 in this mode, with the tile of least cost; `saves`: g - m for a backward, too; `wide`:
    a product of 16-bit operands in float32; `ranks`: training of a batch that ranks share.

    CTAs wait for each other's statistics where a feature has several tiles, and where `cumulative` makes all of them
    read the count of batches that one raises.
    """
    m, n, k = p.m, p.n, p.k
    of_call = {"prepared": prepared, "saves": saves, "cumulative": cumulative, "ranks": ranks}
    tile = cheapest_tile(p, mode, element_for(p.dtype, precision), **of_call)
    _, block_m, cluster, clusters, mode, split, element = tile
    rows, blocks, columns = ceil_div(m, block_m), ceil_div(n, SM90_BLOCK_N), ceil_div(n, SM90_BLOCK_N * cluster)
    by_rows = mode == "recompute" or (mode == "gemm" and mostly_writes(p))
    panel = columns if by_rows else _panel(p, mode, element)
    defers = mode == "training" and split == 1 and rows * columns > clusters
    in_panels, in_parts = (columns - 1) // panel * panel * cluster, [rows, rows]
    if defers:  # a CTA keeps to a column of a panel where their number divides that of the clusters
        in_parts = [min(rows, clusters // width) if clusters % width == 0 else rows for width in (panel, 1)]
    merged = epoch = workspace = 0
    if mode not in ("gemm", "cluster_batch"):  # which have no words for each other
        words = (clusters // columns if mode == "recompute" else rows) * blocks
        words += in_panels * in_parts[0] + (blocks - in_panels) * in_parts[1] if defers else 0
        merged = words * SM90_BLOCK_N * 16
        epoch = merged + blocks * SM90_BLOCK_N * 16 * (2 if saves else 1)
        workspace = epoch + round_up(8 * (1 + clusters * cluster * split), 256)
    made = None
    if by_limbs(element) and mode != "gemm":  # whose limbs may lie anywhere: see limbs.py
        of_w = 0 if prepared or element == "limbs_rs" else n
        made = limbs_of_rows(m, of_w, k, workspace, p.device)
        workspace = made.w_exponents + 4 * of_w
    return OneLaunch(
        kernel=forward_sm90(
            element, mode, block_m, cluster, saves, *mn_major_operands(p, mode, element), wide, ranks, split
        ),
        cooperative=mode in ("training", "recompute") and (rows > 1 or cumulative),
        element=element,
        limbs=made,
        block_m=block_m,
        cluster=cluster,
        clusters=clusters,
        split=split,
        panel=panel,
        in_panels=in_panels,
        parts_in_panels=in_parts[0],
        parts_alone=in_parts[1],
        merged=merged,
        epoch=epoch,
        workspace=workspace,
        wide=wide,
        along_rows=mode == "cluster_batch",
        defers=defers,
    )


def mostly_writes(p: Matmul) -> bool:
    """Whether a product takes about as long as its result is written."""
    return p.k <= FEW_TERMS


def _panel(p: Matmul, mode: str, element: str) -> int:
    """Columns of blocks of features that clusters take together: x is then streamed less often, but more of w is."""
    if mode == "gemm" and not by_limbs(element):
        return 8 if (p.m + p.n) * p.k * ITEMSIZE[p.dtype] > 1e6 * PANEL_MB else 2
    return 1 if p.m <= 8192 else 2 if mode == "training" and not by_limbs(element) else 4


def mn_major_operands(p: Matmul, mode: str, element: str) -> tuple[bool, bool]:
    """Whether forward_sm90 reads x, and the weight, MN-major: in mode "gemm" alone, and limbs never."""
    if mode != "gemm" or element in ("tf32", "limbs"):
        return False, False
    return element != "limbs_rs" and p.x.strides[1] != 1, p.w.strides[1] != 1


def _takes_weight_as_it_lies(p: Matmul, mode: str) -> bool:
    """Whether forward_sm90 takes the float32 weight itself, with limbs of x: K-major, in "gemm" MN-major alone.

    There x is dx's, rows: the columns that dw takes of dg are long, and cost about what is saved.
    """
    if mode == "gemm":
        return is_mn_major(p) and p.x.strides[1] == 1
    return on_words(p.w, p.k, 4)


def is_mn_major(p: Matmul) -> bool:
    """Whether forward_sm90 takes the weight as an MN-major operand."""
    size = ITEMSIZE[p.dtype]
    return on_words(p.w.T, p.n, size) and p.w.strides[1] * size < 2**40


def limbs_of_rows(m: int, n: int, k: int, start: int, device: Device) -> LimbsOfRows:
    """Limbs of the m rows of x and the n rows of the weight, none of which may be there, from an offset on."""
    pitch = limb_pitch(k)
    w = start + round_up(4 * m * pitch, 256)
    x_exponents = w + round_up(4 * n * pitch, 256)
    return LimbsOfRows(
        kernel=split_limbs(k),
        grid=split_grid((m, n), k, device),
        pitch=pitch,
        x=start,
        w=w,
        x_exponents=x_exponents,
        w_exponents=x_exponents + round_up(4 * m, 256),
    )


def waiting_grid(items: int, device: Device) -> int:
    """CTAs of a kernel that waits for other ranks: half of the SMs stay free at least."""
    return min(items, max(1, device.sms // 2))


def cublas_obstacle(p: Matmul) -> str | None:
    if max(p.m, p.n, p.k, *map(abs, p.x.strides), *map(abs, p.w.strides)) > INT32_MAX:
        return "cuBLAS takes sizes below 2^31"
    if p.dtype == "bfloat16" and p.device.capability < (8, 0):
        return "cuBLAS has no bfloat16 below compute capability 8.0"
    if p.device.limited and p.device.sms < CUBLAS_SMS:
        return f"cuBLAS cannot be held to fewer than {CUBLAS_SMS} SMs"
    return None


def takes_limbs(dtype: str, precision: str, device: Device) -> bool:
    """Whether forward_sm90 takes operands of this dtype as limbs."""
    return element_for(dtype, precision) == "limbs" and device.hopper


def sm90_obstacle(p: Matmul, precision: str, training: bool, saved: bool) -> str | None:
    m, n, k, dtype, device, x, w, y, _ = p
    if not device.hopper:
        return "it needs a GPU of compute capability 9.0 and NVRTC 12.9"
    if dtype == "float64":
        return "it has no float64"
    size, limbs = ITEMSIZE[dtype], element_for(dtype, precision) == "limbs"
    if max(m, n, k) > INT32_MAX // 2 or max(x.strides[0], w.strides[0], y.strides[0]) * size >= 2**40:
        return "the copy engine takes smaller sizes"
    if saved and not training:
        # The sums over g see all of its error that has one sign: what tensor cores cut off.
        return "it keeps nothing for a backward with frozen statistics (return_saved=True)"
    if saved and deviations_dtype(dtype, m, training=True) != dtype:
        return f"it keeps no deviations in float64, as up to {FEW_ROWS} rows need (return_saved=True)"
    if not limbs and k > MAX_TERMS[element_for(dtype, precision)]:
        return f"beyond {MAX_TERMS[element_for(dtype, precision)]} input features its sums lose digits"
    return None


def for_sm90(p: Matmul, element: str) -> Matmul:
    """The same with copies in place of what forward_sm90 cannot take as it lies; limbs are made of any rows."""
    size = ITEMSIZE[p.dtype]
    if element == "limbs":
        p = for_tiled(p)
    else:
        x, w = (at if on_words(at, p.k, size) else in_rows(p.k, size) for at in (p.x, p.w))
        p = p._replace(x=x, w=w)
    return p if adjacent(p.y, p.n) else p._replace(y=in_rows(p.n, size))


def for_tiled(p: Matmul) -> Matmul:
    x, w = (at if at.strides[1] == 1 else in_rows(p.k, ITEMSIZE[p.dtype]) for at in (p.x, p.w))
    return p._replace(x=x, w=w)


def for_cublas(p: Matmul, element: str) -> Matmul:
    """The same with copies in place of operands that cuBLAS cannot take, or of all that it would read off 16 bytes."""
    k, size, sides = p.k, ITEMSIZE[p.dtype], ((p.x, p.m), (p.w, p.n))
    copies = [copy_along(at, rows, k, size) for at, rows in sides]
    takes = [adjacent(at, k) or adjacent(at.T, rows) for at, rows in sides]
    likes = [on_words(at, k, size) or on_words(at.T, rows, size) for at, rows in sides]
    must, best = (p._replace(x=p.x if x else copies[0], w=p.w if w else copies[1]) for x, w in (takes, likes))
    if p.dtype == "float64":
        return must
    return min(must, best, key=lambda q: product_us(q, element) + copies_us(q))


def tiled(p: Matmul, product: str, *, wide: bool = False) -> tuple[Kernel, int, int]:
    """The largest tile that still gives every SM one; failing that, the smallest. `wide`: a float32 result."""
    choices = TILES["double" if p.dtype == "float64" else "float"]
    for tile in (p.limits.tiled,) if p.limits.tiled in choices else choices:
        block_m, block_n, thread_m, thread_n = tile
        grid = ceil_div(p.m, block_m) * ceil_div(p.n, block_n)
        if grid >= p.device.sms:
            break
    return (
        gemm_tiled(p.dtype, tile, product, wide=wide),
        p.device.grid(grid),
        (block_m // thread_m) * (block_n // thread_n),
    )
