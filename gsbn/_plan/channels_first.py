"""Plans calls with channels first, x (N, C, L) and y (N, O, L), by forward_sm90 and channels_backward.

They serve 16-bit calls on Hopper. In a `Matmul`, m is the number of rows, N L. x and y are always contiguous with
channels first, so only the layout of the weight matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import declared
from .backward import Vectors, make_gradients
from .copies import in_rows, on_words
from .gemm import MAX_TERMS, NOT_HOPPER, TOO_LARGE, TileOrder
from .problem import INT32_MAX, ITEMSIZE, SAVED_ROWS, VECTOR_PARAMETERS, VECTORS, Device, Matmul, ceil_div, round_up
from .products import SM90_WORDS, reduce_split_k
from .program import ABSENT, Builder, Program, place
from .sm90_variants import (
    CHANNELS_FIRST_TILES,
    COLUMN,
    SM90_BLOCK_N,
    SM90_THREADS,
    channels_first_sm90,
    k_in_samples_sm90,
    statistics_words,
)
from .sources import Constants, with_activation
from .split_k import split_k_reduction
from .tensor_maps import L2_256B, L2_NONE
from .variants import THREADS, channels_backward, column_sums

LEAST_LENGTH = 64  # the least rows of a sample: tiles of shorter samples would be more than half empty
MOST_ROWS = INT32_MAX // 2  # the last tile may go on beyond them
WORD = 8  # elements in 16 bytes
WORDS_AT_ONCE = Constants("channels_backward.cu", {})["AT_ONCE"] * THREADS  # words in flight in a CTA of channel_sums
ITEMS = 8  # items of work per SM in channel_sums and channel_dg: two or three times what is resident at once
TILE_ELEMENTS = 16384  # the fixed costs of a tile, as the number of elements that a CTA moves in that time


def channels_first_obstacle(dtype: str, n: int, k: int, length: int, device: Device) -> str | None:
    """Return why these kernels cannot serve a layer of k inputs and n features or its backward; None if they can.

    They take any number of samples, up to MOST_ROWS rows.
    """
    if not device.hopper:
        return NOT_HOPPER
    if dtype not in ("float16", "bfloat16"):
        return "it has 16 bits only"
    if length < LEAST_LENGTH or length % WORD:
        return f"TMA takes samples of {WORD}, {2 * WORD}, ... rows, from {LEAST_LENGTH} on"
    if max(length, n, k) > MOST_ROWS or max(n, k) * length * ITEMSIZE[dtype] >= 2**40:
        return TOO_LARGE
    if k > MAX_TERMS[dtype] or n > MAX_TERMS[dtype]:  # dx has sums of n terms
        return f"beyond {MAX_TERMS[dtype]} features its sums lose digits"
    if max(ceil_div(n, SM90_BLOCK_N), ceil_div(k, SM90_BLOCK_N)) > device.sms:
        return "a CTA keeps to one block of features"
    return None


class _Tile(NamedTuple):
    elements: int  # elements that a CTA moves
    block_m: int
    cluster: int
    clusters: int
    columns: int  # columns of tiles, each as wide as a cluster
    tiles: int  # rows of tiles


def _tile(p: Matmul, length: int, mode: str, *, saves: bool = False) -> _Tile:
    """Return the tile whose CTAs move the fewest elements. In mode "recompute" a CTA stays in one block of features."""
    found = []
    asked = [tile for tile in CHANNELS_FIRST_TILES if p.limits.sm90 in (None, tile)] or CHANNELS_FIRST_TILES
    for block_m, cluster in asked:
        at_once = p.device.clusters(cluster)
        columns, tiles = ceil_div(p.n, SM90_BLOCK_N * cluster), p.m // length * ceil_div(length, block_m)
        blocks = columns if mode == "recompute" else 1
        if blocks > at_once:
            continue
        waves = ceil_div(tiles * columns // blocks, at_once // blocks)
        clusters = ceil_div(tiles * columns // blocks, waves) * blocks
        of_tile = block_m * (p.k // cluster + SM90_BLOCK_N * (1 + saves)) + SM90_BLOCK_N * p.k + TILE_ELEMENTS
        found.append(_Tile(waves * of_tile, block_m, cluster, clusters, columns, tiles))
    if not found:
        most = SM90_BLOCK_N * p.device.sms
        raise ValueError(
            f"weight: expected at most {most} features on {p.device.sms} SMs with channels first, got {p.n}"
        )
    return min(found)


def plan_forward_channels_first(
    p: Matmul,
    length: int,
    *,
    training: bool,
    momentum: float | None,
    eps: float,
    saves: bool = False,
    activation: Any = None,
    number: float = 1.0,
    vectors: Mapping[str, int],
    counts: bool = False,
) -> Program:
    """Plan a forward in one launch. `saves` is for training only; the other arguments are those of `plan_forward`."""
    build = Builder(p.device)
    mode = "recompute" if training else "inference"
    tile = _tile(p, length, mode, saves=saves)
    kernel = channels_first_sm90(p.dtype, mode, tile.block_m, tile.cluster, saves)
    w_at, of_w = _weight(build, p)
    y = build.make("y", (p.m, p.n), p.dtype)
    if saves:
        build.make("deviations", (p.m, p.n), p.dtype)
        build.make("vectors", (SAVED_ROWS, p.n), "float64")
    build.copy()

    blocks, words = ceil_div(p.n, SM90_BLOCK_N), {"partial": ABSENT, "merged": ABSENT, "epoch": ABSENT}
    cooperative = training and (tile.tiles > 1 or momentum is None)
    if training:
        merged, epoch = statistics_words(tile.clusters // tile.columns * blocks, blocks, saves=saves)
        build.reserve(epoch + 8 * (1 + tile.clusters * tile.cluster))
        words = {"partial": place(0), "merged": place(merged), "epoch": place(epoch)}
    fields = _fields(p, length, tile) | {"eps": eps, "number": number, **vectors}
    fields |= {"momentum": 0.0 if momentum is None else momentum}
    fields["flags"] = declared.flags(vector_y=True, cumulative=momentum is None, alone=not cooperative)
    maps = [("x", _samples(p, p.k, length)), (of_w, _k_major(p, w_at)), (y, _samples(p, p.n, length, L2_NONE))]
    passed = {"y": y, **words, **{name: name for name in VECTORS}}
    passed |= {"batches": "num_batches_tracked" if training and counts else ABSENT}
    passed |= {"x_exponents": ABSENT, "w_exponents": ABSENT}
    if saves:
        maps.append(("deviations", maps[2][1]))
        passed |= {"deviations": "deviations", "saved": "vectors"}
    kernel = with_activation(kernel, activation)
    grid = tile.clusters * tile.cluster
    build.launch(kernel, grid, fields, passed, SM90_THREADS, maps=tuple(maps), cooperative=cooperative)
    return build.program("sm90", "channels first")


def plan_backward_channels_first(
    p: Matmul,
    length: int,
    *,
    needs: tuple[str, ...],
    dtypes: Mapping[str, str],
    activation: Any = None,
    wide: bool = False,
    in_place: bool = False,
) -> Program:
    """Plan the backward of a forward in training: sums, dg, dx, the partial products of dweight, and their sum.

    `dtypes` has the dtypes of the vectors that were given. The other arguments are those of `backward.Asked`.
    """
    build, size = Builder(p.device), ITEMSIZE[p.dtype]
    m, n, k = p.m, p.n, p.k
    given = [name for name in needs if name in ("x", "weight") or name in dtypes]
    made = make_gradients(build, p, given, Vectors(dtypes), wide=wide)
    products = not {"x", "weight"}.isdisjoint(needs)
    w_at, of_w = _weight(build, p) if "x" in needs else (p.w, "weight")
    build.copy()

    # The workspace holds the sums of each feature over the words of each split, dg, and the partial products.
    of_sums, of_dg = (with_activation(kernel, activation) for kernel in channels_backward(p.dtype))
    words = m // WORD
    rows = ceil_div(words, max(1, min(words // WORDS_AT_ONCE, ITEMS * p.device.sms // n)))
    splits = ceil_div(words, rows)
    dg_at = round_up(column_sums(of_sums)[0] * splits * n * 8, 256)
    partials_at = dg_at if in_place or not products else round_up(dg_at + m * n * size, 256)
    split = _Split.of(p, length)
    partials = split_k_reduction(split.splits, n, round_up(k, 4), p.device)
    build.reserve(partials_at + (partials.nbytes if "weight" in needs else 0))
    dg = ABSENT if not products else "deviations" if in_place else place(dg_at)

    fields: dict[str, Any] = dict.fromkeys(declared.record_dtype(of_sums).names or (), 0)
    fields |= {"m": m, "n": n, "k": k, "ldd": length, "sums_rows": rows, "splits": splits}
    fields |= {"reciprocal": declared.reciprocal(length // WORD)}
    fields |= {f"to_{name}": 8 + declared.kind_code(dtypes[name]) for name in VECTOR_PARAMETERS if made[name] != ABSENT}
    reads = {"dy": "dy", "d": "deviations", "saved": "vectors", "workspace": place(0)}
    build.launch(of_sums, p.device.grid(n * splits), fields, reads)
    to = {f"to_{name}": made[name] for name in VECTOR_PARAMETERS}
    build.launch(of_dg, p.device.grid(n * splits), fields, {**reads, "dg": dg, **to})

    absent = dict.fromkeys(SM90_WORDS, ABSENT)
    if "x" in needs:
        q = p._replace(n=k, k=n)
        tile = _tile(q, length, "gemm")
        kernel = channels_first_sm90(p.dtype, "gemm", tile.block_m, tile.cluster, w_mn_major=True)
        of_weight = n, k, w_at.strides[0] * size, p.dtype, COLUMN, COLUMN, L2_256B
        maps = (dg, _samples(p, n, length)), (of_w, of_weight), (made["x"], _samples(p, k, length, L2_NONE))
        fields = _fields(q, length, tile) | {"flags": declared.flags(vector_y=True)}
        grid = tile.clusters * tile.cluster
        build.launch(kernel, grid, fields, absent | {"y": made["x"]}, SM90_THREADS, maps=maps)
    if "weight" in needs:
        q = p._replace(m=n, n=k, k=split.splits * split.steps * COLUMN)
        kernel = k_in_samples_sm90(p.dtype, split.block_m)
        fields = dict.fromkeys(declared.record_dtype(kernel).names or (), 0)
        fields |= {"m": q.m, "n": q.n, "k": q.k, "y_row": length, "flags": declared.flags(vector_y=True)}
        rows = split.splits * ceil_div(n, split.block_m)
        fields |= TileOrder.of(rows, split.columns, split.columns)._replace(parts_alone=split.splits)._asdict()
        of_partials = n, k, 4 * partials.pitch, "float32", 32, 32, L2_NONE, 0, split.splits
        maps = (dg, _samples(p, n, length, box=split.block_m)), ("x", _samples(p, k, length, box=SM90_BLOCK_N)), (
            place(partials_at), of_partials,
        )  # fmt: skip
        passed = absent | {"y": place(partials_at)}
        build.launch(kernel, split.grid, fields, passed, SM90_THREADS, maps=maps)
        reduce_split_k(build, partials, place(partials_at), made["weight"], (n, k), "float32" if wide else p.dtype)
    return build.program("backward", "channels first")


class _Split(NamedTuple):
    """How CTAs share dweight (n, k): by its tiles, and by steps of COLUMN rows. A step does not cross a sample."""

    block_m: int
    columns: int
    splits: int
    steps: int  # steps of a split; steps beyond the last sample load zeros
    grid: int

    @classmethod
    def of(cls, p: Matmul, length: int) -> _Split:
        block_m = next((m for m in (64, 128) if p.n <= m), 256)
        tiles, columns = ceil_div(p.n, block_m), ceil_div(p.k, SM90_BLOCK_N)
        steps = p.m // length * ceil_div(length, COLUMN)
        of_split = ceil_div(steps, max(1, min(steps, p.device.sms // (tiles * columns))))
        splits = ceil_div(steps, of_split)
        grid = min(splits * tiles * columns, p.device.sms)
        return cls(block_m, columns, splits, of_split, grid)


def _weight(build: Builder, p: Matmul) -> tuple[Any, str]:
    """Return the weight's layout for TMA, and its memory: the argument, or a copy whose rows start on 16 bytes."""
    at = p.w if on_words(p.w, p.k, ITEMSIZE[p.dtype]) else in_rows(p.k, ITEMSIZE[p.dtype])
    return at, build.operand("weight", (p.n, p.k), p.w, at, p.dtype)


def _fields(p: Matmul, length: int, tile: _Tile) -> dict[str, Any]:
    """Return the fields of the struct ForwardSm90Problem for a call with neither vectors nor statistics."""
    names = declared.record_dtype(channels_first_sm90(p.dtype, "gemm", 64, 1)).names or ()
    of_sample = ceil_div(length, tile.block_m)
    order = TileOrder.of(tile.tiles, tile.columns, tile.columns)
    order = order.in_parts(max(1, tile.clusters // tile.columns), tile.tiles)
    fields = {"m": p.m, "n": p.n, "k": p.k, "y_row": length, "tiles": tile.tiles, **order._asdict()}
    fields |= {"tiles_of_sample": of_sample, "of_sample": declared.reciprocal(of_sample)}
    return dict.fromkeys(names, 0) | fields


def _k_major(p: Matmul, at: Any) -> tuple[Any, ...]:
    return p.n, p.k, at.strides[0] * ITEMSIZE[p.dtype], p.dtype, SM90_BLOCK_N, COLUMN, L2_256B


def _samples(p: Matmul, features: int, length: int, promotion: int = L2_256B, *, box: int = COLUMN) -> tuple[Any, ...]:
    """Return what the map of an array (N, features, length) encodes: boxes of `box` features and 128 bytes of rows."""
    pitch = length * ITEMSIZE[p.dtype]
    return features, length, pitch, p.dtype, box, COLUMN, promotion, 0, p.m // length
