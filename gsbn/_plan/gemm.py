"""Plans a product of two matrices: which kernels can compute it, and the launch of forward_sm90."""

from __future__ import annotations

from typing import NamedTuple

from .copies import adjacent, copy_along, in_rows, on_words
from .cost import copies_us, product_us
from .declared import reciprocal
from .limbs import limb_pitch, split_grid
from .problem import FEW_ROWS, INT32_MAX, ITEMSIZE, Device, Matmul, ceil_div, round_up
from .sm90_tiles import PLAIN, OfCall, candidates, cheapest_tile, mn_major_operands, panel_of, saves_float64
from .sm90_variants import (
    SM90_BLOCK_N,
    by_limbs,
    element_for,
    forward_sm90,
    renormalising,
    saving_float64,
    sharers,
    statistics_words,
)
from .sources import Kernel
from .variants import FEW_FEATURES, TILES, gemm_tiled, split_limbs

CUBLAS_SMS = 16  # the least SM target given to cuBLAS; with a target of 1 it ended the process (a division by zero)
# With up to so many terms in a sum, a product takes about as long as writing its result. Tiles then go row by row, and
# forward_sm90 computes dw, since cuBLAS would clear memory first.
FEW_TERMS = 512
# forward_sm90 serves up to so many terms. It adds all of them in the tensor core, which truncates to float32. The error
# grows with their number. With more terms, it would exceed a quarter of the dtype's eps (in TF32: cuBLAS' error).
MAX_TERMS = {"float16": 2**15, "bfloat16": 2**18, "tf32": 2**15}
NOT_HOPPER, TOO_LARGE = "it needs a GPU of compute capability 9.0 and NVRTC 12.9", "TMA takes smaller sizes"
LEAST_TERMS = 64  # "auto" takes limbs from so many terms on: the errors of fewer do not average out in a variance


class LimbsOfRows(NamedTuple):
    """float32 operands as two float16 limbs, made by split_limbs. Offsets in the workspace are in bytes."""

    kernel: Kernel
    grid: int
    pitch: int  # pitch of rows, in float32 elements
    x: int
    w: int
    x_exponents: int
    w_exponents: int


class TileOrder(NamedTuple):
    """How the clusters of forward_sm90 share its tiles. The kernel's struct has these fields and explains them."""

    panel: int
    grouped: int
    of_panel: int
    of_columns: int
    of_rest: int
    in_panels: int = 0
    parts_in_panels: int = 0
    parts_alone: int = 0
    tiles_of_part: int = 0
    longer_parts: int = 0

    @classmethod
    def of(cls, rows: int, columns: int, panel: int, *, training: bool = False) -> TileOrder:
        """Return an order without parts. `rows` is the number of rows of tiles; tiles that share k count once.

        In mode "training", the columns after the whole panels come one after the other.
        """
        panel = min(panel, columns)
        grouped = (columns - 1) // panel * panel
        divisors = rows * panel, panel, rows if training else columns - grouped
        return cls(panel, grouped, *map(reciprocal, divisors))

    def in_parts(self, parts: int, rows: int) -> TileOrder:
        """Return this order with `parts` clusters in each column, for mode "recompute"."""
        return self._replace(parts_alone=parts, tiles_of_part=rows // parts, longer_parts=rows % parts)


class OneLaunch(NamedTuple):
    """A launch of forward_sm90, for the whole forward or its GEMM alone. Offsets and sizes are in bytes."""

    kernel: Kernel
    cooperative: bool  # its CTAs wait for each other, so all must be resident
    element: str
    limbs: LimbsOfRows | None
    block_m: int
    cluster: int  # CTAs that share a tile of x
    cluster_m: int  # CTAs that share a tile of the weight
    clusters: int
    split: int  # CTAs that share k
    order: TileOrder
    merged: int
    epoch: int
    workspace: int
    wide: bool = False  # y is float32 although x has 16 bits
    defers: bool = False  # some tiles have a deferred epilogue: they wait in y, in words of 16 bytes

    @property
    def ctas(self) -> int:
        return self.clusters * self.cluster * self.cluster_m * self.split


def one_launch(p: Matmul, mode: str, precision: str, call: OfCall = PLAIN, *, wide: bool = False) -> OneLaunch:
    """Return the launch of forward_sm90 in this mode, with the tile of least cost.

    `wide`: a product of 16-bit operands is written in float32. The launch is cooperative if CTAs wait for each other.
    They do if a feature has several tiles, or if all CTAs read the count of batches, which one of them raises.
    """
    m, n, k = p.m, p.n, p.k
    prepared, saves, reads_count, ranks, renorm = call
    tile = cheapest_tile(p, mode, element_for(p.dtype, precision), call)
    _, block_m, cluster, clusters, mode, split, element, cluster_m = tile
    kernel = forward_sm90(
        element, mode, block_m, cluster, saves, *mn_major_operands(p, mode, element), wide, ranks, split, cluster_m
    )
    kernel = saving_float64(kernel) if saves_float64(p, call) else kernel
    cluster, cluster_m = sharers(mode, cluster, cluster_m)
    ctas = clusters * cluster * cluster_m * split
    rows, blocks, columns = ceil_div(m, block_m), ceil_div(n, SM90_BLOCK_N), ceil_div(n, SM90_BLOCK_N * cluster)
    by_rows = mode == "recompute" or (mode == "gemm" and mostly_writes(p))
    panel = columns if by_rows else panel_of(p, mode, element)
    defers = mode == "training" and split == 1 and rows * columns > clusters
    order = TileOrder.of(ceil_div(rows, split * cluster_m), columns, panel, training=mode == "training")
    in_panels, in_parts = order.grouped * cluster, [rows, rows]
    if defers:  # a CTA stays in one column of a panel if the panel's width divides the number of clusters
        in_parts = [min(rows, clusters // width) if clusters % width == 0 else rows for width in (panel, 1)]
    if mode == "recompute":
        order = order.in_parts(clusters // columns, rows)
    else:
        order = order._replace(in_panels=in_panels, parts_in_panels=in_parts[0], parts_alone=in_parts[1])
    merged = epoch = workspace = 0
    if mode not in ("gemm", "cluster_batch"):  # these need no words in the workspace
        words = (order.parts_alone if mode == "recompute" else rows) * blocks
        words += in_panels * in_parts[0] + (blocks - in_panels) * in_parts[1] if defers else 0
        merged, epoch = statistics_words(words, blocks, saves=saves)
        workspace = epoch + round_up(8 * (1 + ctas), 256)
    made = None
    if by_limbs(element) and mode != "gemm":  # for "gemm", limbs.py lays out the limbs
        of_w = 0 if prepared or element == "limbs_rs" else n
        made = limbs_of_rows(m, of_w, k, workspace, p.device)
        workspace = made.w_exponents + 4 * of_w
    return OneLaunch(
        kernel=renormalising(kernel) if renorm else kernel,
        cooperative=mode in ("training", "recompute") and (rows > 1 or reads_count),
        element=element,
        limbs=made,
        block_m=block_m,
        cluster=cluster,
        cluster_m=cluster_m,
        clusters=clusters,
        split=split,
        order=order,
        merged=merged,
        epoch=epoch,
        workspace=workspace,
        wide=wide,
        defers=defers,
    )


def mostly_writes(p: Matmul) -> bool:
    return p.k <= FEW_TERMS


def limbs_of_rows(m: int, n: int, k: int, start: int, device: Device) -> LimbsOfRows:
    """Return the layout of limbs of m rows of x and n rows of the weight, from offset `start` on. m or n may be 0."""
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
    """Return how many CTAs a kernel has that waits for other ranks. At least half of the SMs stay free."""
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
    """Return whether forward_sm90 takes operands of this dtype as limbs."""
    return element_for(dtype, precision) == "limbs" and device.hopper


def sm90_obstacle(p: Matmul, precision: str, training: bool, call: OfCall = PLAIN) -> str | None:
    """Return why forward_sm90 cannot serve a call, or None if it can."""
    m, n, k, dtype, device, x, w, y, _ = p
    if not device.hopper:
        return NOT_HOPPER
    if dtype == "float64":
        return "it has no float64"
    size, element = ITEMSIZE[dtype], element_for(dtype, precision)
    if max(m, n, k) > INT32_MAX // 2 or max(x.strides[0], w.strides[0], y.strides[0]) * size >= 2**40:
        return TOO_LARGE
    if call.saves and not training:
        # Tensor cores truncate, so g's errors have one sign, and add up in the backward's sums over g.
        return "it keeps nothing for a backward with frozen statistics (return_saved=True)"
    if element != "limbs" and k > MAX_TERMS[element]:
        return f"beyond {MAX_TERMS[element]} input features its sums lose digits"
    if saves_float64(p, call) and not candidates(p, "training", element, call):
        return f"for such a call it keeps no float64 deviations, which up to {FEW_ROWS} rows need (return_saved=True)"
    return None


def for_sm90(p: Matmul, element: str) -> Matmul:
    """Return p with copies of the operands whose layout forward_sm90 cannot take. Limbs can be made of any rows."""
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
    """Return p with copies of operands that cuBLAS cannot take, or, if faster, of all that do not start on 16 bytes."""
    k, size, sides = p.k, ITEMSIZE[p.dtype], ((p.x, p.m), (p.w, p.n))
    copies = [copy_along(at, rows, k, size) for at, rows in sides]
    takes = [adjacent(at, k) or adjacent(at.T, rows) for at, rows in sides]
    likes = [on_words(at, k, size) or on_words(at.T, rows, size) for at, rows in sides]
    must, best = (p._replace(x=p.x if x else copies[0], w=p.w if w else copies[1]) for x, w in (takes, likes))
    if p.dtype == "float64":
        return must
    return min(must, best, key=lambda q: product_us(q, element) + copies_us(q))


def tiled(p: Matmul, product: str, *, wide: bool = False) -> tuple[Kernel, int, int]:
    """Return gemm_tiled with the largest tile that gives every SM at least one tile, else the smallest.

    Also returns its grid and block. `wide`: the result is float32.
    """
    choices = TILES["double" if p.dtype == "float64" else "float"]
    if p.limits.tiled in choices:
        choices = (p.limits.tiled,)
    elif p.dtype == "float64":
        choices = choices[-1:] if p.n <= FEW_FEATURES else choices[:-1]
    for tile in choices:
        block_m, block_n, thread_m, thread_n = tile
        grid = ceil_div(p.m, block_m) * ceil_div(p.n, block_n)
        if grid >= p.device.sms:
            break
    return (
        gemm_tiled(p.dtype, tile, product, wide=wide),
        p.device.grid(grid),
        (block_m // thread_m) * (block_n // thread_n),
    )
