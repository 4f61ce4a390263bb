"""Plans calls of many short rows, which write neither g nor dg to memory (kernels/skinny.cu, skinny_backward.cu)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from .copies import in_rows, on_words, whole_words
from .cost import copies_us, skinny_us
from .gemm import LEAST_TERMS, MAX_TERMS
from .h200 import H200
from .h200_products import PRODUCTS
from .problem import INT32_MAX, ITEMSIZE, Matmul, ceil_div, round_up
from .rates import Rates
from .sm90_variants import element_for
from .sources import Kernel, with_activation, with_renorm
from .split_k import SplitKReduction, split_k_reduction
from .variants import (
    SKINNY_CHUNKS,
    SKINNY_SUMS_CLUSTER,
    remat_sizes,
    skinny,
    skinny_backward_kernel,
    skinny_backward_sizes,
    skinny_features,
    skinny_product,
    skinny_sizes,
    skinny_sums,
    skinny_threads,
)

SKINNY_LEAST_ROWS = 2048  # with fewer, computing g twice does not pay
# The least rows for skinny_backward in float32 with more than 32 features and input features. With fewer rows, the
# separate kernels are faster.
LEAST_FLOAT32_ROWS = 4 * 10**5
LEAST_FORWARD_TERMS = 24  # as LEAST_TERMS, for forwards, which subtract the centres of x
REMAT_LEAST_FEATURES = 33  # with fewer, half of the smallest kernels that compute g again is empty
# The most features of a CTA of skinny_sums: it then has three teams or more, and one adds while another multiplies.
SUMS_FEATURES = 128
# The least rows in 16 bits with more than 128 features, by the room for features and input features. Clusters are
# faster only if at least three quarters of the room for features are filled.
LEAST_WIDE_ROWS = {(256, 64): 8192, (512, 64): 16384, (1024, 64): 16384}
LEAST_WIDE_ROWS |= {(256, 128): 24576, (512, 128): 24576, (1024, 128): 24576}
LEAST_REMAT_ROWS = LEAST_WIDE_ROWS | {(512, 64): 8192, (1024, 64): 4096}  # the same, if it may compute g again


class Skinny(NamedTuple):
    """The two launches of a forward, or the launch that computes g alone."""

    stats: Kernel
    normalize: Kernel
    splits: int  # CTAs that share the rows of a block of features
    rows: int  # rows of each split except the last
    blocks: int  # blocks of features
    threads: int  # threads of a CTA
    us: float
    product: Kernel | None  # computes g alone; for limbs only

    @property
    def grid(self) -> int:
        return self.splits * self.blocks


def serves_skinny(p: Matmul, precision: str, training: bool, saved: bool) -> bool:
    """Return whether these kernels can serve a call.

    The call needs enough rows, few input features, and no more features than the SMs can share. The kernels save
    nothing for a backward with frozen statistics.
    """
    if not p.device.hopper or p.dtype == "float64" or (saved and not training):
        return False
    element = _element(p, precision)
    most = max(_most_inputs(p.dtype, element, features) for features in _sizes(p, element))
    return p.k <= most and _has_room(p, _features(p, element))


def _has_room(p: Matmul, features: int) -> bool:
    """Return whether there are enough rows, and an SM for each block of so many features."""
    return SKINNY_LEAST_ROWS <= p.m <= INT32_MAX and ceil_div(p.n, features) <= p.device.sms


def _element(p: Matmul, precision: str) -> str:
    """Return how the kernels multiply. In float32, they use limbs if that is accurate, else IEEE arithmetic."""
    element = element_for(p.dtype, precision)
    return "float32" if element == "limbs" and p.k < LEAST_FORWARD_TERMS else element


def _most_inputs(dtype: str, element: str, features: int) -> int:
    """Return the most input features with which a CTA can have so many features."""
    chunks = SKINNY_CHUNKS[element][-1]
    if element == "limbs":
        return skinny_sizes(element, features, chunks)["K_AT_ONCE"]
    return 64 * chunks // ITEMSIZE[dtype]


def _sizes(p: Matmul, element: str) -> list[int]:
    """Return the numbers of features that a CTA may have.

    The smallest number serves only if one CTA has all features. Every CTA loads and converts all its rows, so more CTAs
    would repeat that.
    """
    few, *more = skinny_features(element)
    return [few, *more] if p.n <= few else more


def _features(p: Matmul, element: str) -> int:
    """Return the features of a CTA: the least size that holds all, else the size that leaves fewest places empty.

    If no size leaves room for whole rows of the weight, it is the least size, which leaves room for most of a row.
    """
    sizes = [size for size in _sizes(p, element) if p.k <= _most_inputs(p.dtype, element, size)]
    sizes = sizes or _sizes(p, element)[:1]
    several = min(sizes, key=lambda size: (round_up(p.n, size), -size))
    return next((size for size in sizes if p.n <= size), several)


def for_skinny(p: Matmul) -> Matmul:
    """Return p with copies of operands whose rows do not start on 16 bytes.

    The kernels cannot take such an x, and they take such a weight only slowly.
    """
    x, w = (at if on_words(at, p.k, ITEMSIZE[p.dtype]) else in_rows(p.k, ITEMSIZE[p.dtype]) for at in (p.x, p.w))
    return p._replace(x=x, w=w)


def skinny_forward(p: Matmul, precision: str, *, training: bool, saves: bool, rates: Rates = H200) -> Skinny:
    """Return the two launches for a call, and their time, including copies."""
    element = _element(p, precision)
    features = _features(p, element)
    largest = SKINNY_CHUNKS[element][-1]  # with limbs, a row may have several times as many
    chunks = next((most for most in SKINNY_CHUNKS[element] if p.k * ITEMSIZE[p.dtype] <= 64 * most), largest)
    sizes = skinny_sizes(element, features, chunks)
    threads, tile, block = sizes["CTA"], sizes["TILE_ROWS"], sizes["BLOCK_ROWS"]
    blocks = ceil_div(p.n, features)
    splits = min(p.device.sms // blocks, ceil_div(p.m, block))
    rows = round_up(ceil_div(p.m, splits), tile)
    splits = ceil_div(p.m, rows)
    taken = for_skinny(p)
    at_once = splits * block
    whole_tiles = blocks == 1 and element in ("bfloat16", "float16") and p.y.strides == (p.n, 1)
    us = skinny_us(
        taken, element, features * blocks, chunks, at_once, ceil_div(p.k, _most_inputs(p.dtype, element, features)),
        training=training, saves=saves, whole_tiles=whole_tiles, rates=rates,
    )  # fmt: skip
    us += copies_us(taken, rates=rates)
    any_rows = not whole_words(p.y, p.n, ITEMSIZE[p.dtype])
    product = skinny_product(features, chunks, any_rows) if element == "limbs" else None
    kernels = skinny(element, features, chunks, saves=saves, any_rows=any_rows)
    return Skinny(*kernels, splits, rows, blocks, threads, us, product)


def skinny_product_for(p: Matmul, precision: str) -> Skinny | None:
    """Return the launch that computes g alone, by limbs, or None if it cannot serve.

    It takes x without a copy, and the weight as in `for_skinny`.
    """
    limbs = p.device.hopper and _element(p, precision) == "limbs" and p.k >= LEAST_TERMS
    if not limbs or not on_words(p.x, p.k, ITEMSIZE[p.dtype]) or not _has_room(p, _features(p, "limbs")):
        return None
    return skinny_forward(p, precision, training=False, saves=False, rates=PRODUCTS)


class Sums(NamedTuple):
    """A launch of skinny_sums."""

    kernel: Kernel
    ctas: int
    splits: int
    rows: int  # rows of each CTA except the last
    features: int  # the most features of a CTA
    tile: int  # rows of a tile
    block: int


class SkinnyBackward(NamedTuple):
    """skinny_backward, which computes dg and both products in one launch, and the launch that adds up dw."""

    kernel: Kernel
    ctas: int
    rows: int  # rows of each CTA, or of each cluster, except the last
    features: int  # the most features of a CTA
    tile: int  # rows of a tile
    block: int
    partials: SplitKReduction  # the launch that adds up dw


@lru_cache(maxsize=4096)  # a layer asks at every call
def serves_skinny_backward(dtype: str, m: int, n: int, k: int, *, asked: bool = False, remat: bool = False) -> bool:
    """Return whether skinny_backward has room for n features and k input features, and is fastest on m rows.

    `remat`: it may compute g again. If `asked` for, it need not be fastest. The layout of the operands is not
    considered.
    """
    size = _with_room(skinny_backward_sizes(dtype) + (remat_sizes(dtype) if remat else []), n, k)
    return size is not None and m >= (SKINNY_LEAST_ROWS if asked else _least_rows(dtype, n, k, size, remat))


def _with_room(sizes: list[tuple[int, int, int]], n: int, k: int) -> tuple[int, int, int] | None:
    """Return the first of these sizes (`skinny_backward_sizes`) with room for n features and k input features."""
    return next((size for size in sizes if n <= size[0] * size[2] and k <= size[1]), None)


def _least_rows(dtype: str, n: int, k: int, size: tuple[int, int, int], remat: bool) -> float:
    """Return the least rows with which skinny_backward of this size is fastest; infinity if it never is."""
    features, inputs, cluster = size
    if dtype == "float32":
        return LEAST_FLOAT32_ROWS if min(n, k) > 32 else SKINNY_LEAST_ROWS
    if cluster > 1 and 4 * n < 3 * features * cluster:
        return math.inf
    return (LEAST_REMAT_ROWS if remat else LEAST_WIDE_ROWS).get((features * cluster, inputs), SKINNY_LEAST_ROWS)


def rematerializes(p: Matmul) -> bool:
    """Return whether the backward of a forward on p shall compute g again, so that the forward stores no deviations.

    It reads x twice in place of the deviations, which are written once and read twice.
    """
    m, n, k, dtype, device, x, w, _, limits = p
    free = limits.remat is None and limits.skinny is None
    if not (limits.remat or (free and not device.limited)) or not device.hopper or m > INT32_MAX:
        return False
    size = _with_room(remat_sizes(dtype), n, k)
    if size is None or not device.clusters(size[2]) or n > SUMS_FEATURES * device.sms:
        return False
    if not on_words(x, k, ITEMSIZE[dtype]) or w.strides[1] != 1:
        return False
    if limits.remat:
        return True
    return n >= REMAT_LEAST_FEATURES and k <= 2 * n and serves_skinny_backward(dtype, m, n, k, remat=True)


def skinny_backward(p: Matmul, activation: Any, renorm: bool) -> SkinnyBackward | None:
    """Return the launch of skinny_backward, or None if it cannot serve or is not fastest.

    `p` is that of `plan_backward`; its y may be a copy.
    """
    m, n, k, dtype, device, x, w, dy, limits = p
    size = ITEMSIZE[dtype]
    allowed = device.hopper and limits.skinny is not False and m <= INT32_MAX
    rows_on_words = on_words(x, k, size) and on_words(dy, n, size) and w.strides[1] == 1
    found = _with_room(skinny_backward_sizes(dtype), n, k)
    if not allowed or not rows_on_words or not found:
        return None
    if not serves_skinny_backward(dtype, m, n, k, asked=bool(limits.skinny)):
        return None
    features, inputs, cluster = found
    together = device.clusters(cluster)  # CTAs, or clusters, at once, with an SM for each CTA
    kernel = with_renorm(skinny_backward_kernel(dtype, features, inputs, cluster), renorm)
    if not together or (math.ceil(m / together) > _most_rows(dtype, kernel) and device.limited):
        return None
    return _skinny_backward(p, found, together, kernel, activation)


def remat_backward(p: Matmul, activation: Any) -> tuple[SkinnyBackward, Sums]:
    """Return the launches of a backward that computes g again. The operands have rows on 16 bytes.

    Raises a ValueError that names `sms` if the CTAs cannot all run at once.
    """
    m, n, k, dtype, device, *_ = p
    found = _with_room(remat_sizes(dtype), n, k)
    assert found is not None
    features, inputs, cluster = found
    of_sums = min(features, SUMS_FEATURES)
    blocks = ceil_div(n, of_sums)
    # Clusters of a call that may take few SMs may have to wait for SMs that lie together.
    together = device.sms // cluster if device.limited else device.clusters(cluster)
    backward = skinny_backward_kernel(dtype, features, inputs, cluster, remat=True)
    least = max(cluster * ceil_div(m, int(_most_rows(dtype, backward))), blocks)  # SMs for all CTAs at once
    if device.limited and device.sms < least:
        raise ValueError(
            f"sms: expected at least {least} for {m} rows and {n} features, as this forward kept no deviations, got "
            f"{device.sms}; give the forward the same `sms`"
        )
    sharing = SKINNY_SUMS_CLUSTER if device.clusters(SKINNY_SUMS_CLUSTER) >= blocks else 1
    kernel = skinny_sums(dtype, of_sums, inputs, sharing)
    teams, threads, tile = skinny_threads(kernel)
    splits = max(1, min(device.clusters(sharing) // blocks, ceil_div(m, sharing * teams * tile)))
    rows = round_up(ceil_div(m, splits * sharing), tile)
    splits = ceil_div(m, rows * sharing)
    own = round_up(ceil_div(n, blocks), 16 // ITEMSIZE[dtype])
    sums = Sums(with_activation(kernel, activation), splits * sharing * blocks, splits, rows, own, tile, threads)
    return _skinny_backward(p, found, together, backward, activation), sums


def _most_rows(dtype: str, kernel: Kernel) -> float:
    """Return the most rows of a CTA: a team adds up dw in the tensor core alone, and more rows take several waves."""
    teams, _, _ = skinny_threads(kernel)
    return teams * MAX_TERMS.get(dtype, math.inf)


def _own_features(dtype: str, n: int, size: tuple[int, int, int]) -> int:
    features, _, cluster = size
    return features if cluster == 1 else round_up(ceil_div(n, cluster), 16 // ITEMSIZE[dtype])


def _skinny_backward(
    p: Matmul, found: tuple[int, int, int], together: int, kernel: Kernel, activation: Any
) -> SkinnyBackward:
    """Return the launch for CTAs, or clusters, of the size `found`, of which `together` run at once.

    `kernel` is the variant without the activation.
    """
    m, n, dtype, device = p.m, p.n, p.dtype, p.device
    _, inputs, cluster = found
    _, threads, tile = skinny_threads(kernel)
    own = _own_features(dtype, n, found)
    rows = round_up(ceil_div(m, together), tile)
    rows = int(min(rows, _most_rows(dtype, kernel)))
    number = ceil_div(m, rows)
    return SkinnyBackward(
        kernel=with_activation(kernel, activation),
        ctas=number * cluster,
        rows=rows,
        features=own,
        tile=tile,
        block=threads,
        partials=split_k_reduction(number, cluster * own, inputs, device),
    )
