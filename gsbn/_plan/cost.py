"""The cost model predicts the time that a path takes, in us, so that the planner can choose among paths."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .copies import on_words, word
from .h200 import H200
from .h200_products import PRODUCTS
from .limbs import limb_pitch
from .problem import ITEMSIZE, Matmul, ceil_div, round_up
from .rates import Rates
from .sm90_variants import SM90_BLOCK_N, by_limbs, largest_block, occupancy, sharers, stages

IEEE_TILE = 32  # rows and features of cuBLAS' float32 tiles, in effect: a tile takes as long if it is not full
IEEE_SPLIT = 2048  # the least rows of a sum over rows of which cuBLAS adds up parts


def smooth_max(times: Iterable[float], power: int) -> float:
    """Return nearly the largest of these times, and more if several are nearly as large."""
    return float(sum(us**power for us in times) ** (1 / power))


def one_launch_us(
    p: Matmul,
    mode: str,
    element: str,
    block_m: int,
    cluster: int,
    waves: int,
    clusters: int,
    *,
    saves: bool,
    split: int = 1,
    cluster_m: int = 1,
    rates: Rates = H200,
) -> float:
    """Return the time of forward_sm90: the fixed costs of a call, and `waves` of tiles with a mainloop and an epilogue.

    A step of the mainloop takes as long as the slowest of these (`pace`): the tensor cores; a fixed cost; the loads of
    all CTAs through L2, plus the loads from memory if the operands do not fit in L2; the latency of a stage divided by
    the pipeline's stages; one CTA's TMA; reading all operands from memory once. In training, a short tile waits for the
    statistics of other tiles. With split-k, each of the `split` CTAs of a cluster multiplies the rows of `split` tiles,
    and the CTAs exchange sums.
    """
    m, n, k, dtype, *_ = p
    x_sharers, w_sharers = sharers(mode, cluster, cluster_m)
    of_cluster = cluster * cluster_m * split
    rows, ctas, product_m = ceil_div(m, block_m * w_sharers), clusters * of_cluster, split * block_m
    limbs = 2 if by_limbs(element) else 1
    size = 2 if by_limbs(element) else ITEMSIZE[dtype]  # bytes of an operand's element
    width = min(n, SM90_BLOCK_N)  # features of a tile
    # of x and w: the MB that a CTA loads in a step, the bytes from row to row, and the factor on their time from L2
    loads = [limbs * rows * 128e-6 for rows in (product_m / x_sharers, width / w_sharers)]
    pitches = [max(at.strides) * size for at in (p.x, p.w)]
    off_line = [rates.off_line if limbs == 1 and pitch % 128 else 1.0 for pitch in pitches]
    groups = ceil_div(rows, split)  # groups of `split` tiles
    distinct = min(groups, clusters) * product_m * w_sharers + max(1.0, clusters / groups) * x_sharers * width
    distinct *= limbs * split * 128e-6
    operands = 1e-6 * limbs * (m + n) * k * size
    cold = min(1.0, max(0.0, operands / rates.l2_mb - 1))  # the part of the operands that does not stay in L2
    feed = ctas * sum(mb * factor for mb, factor in zip(loads, off_line, strict=True)) / rates.l2_rate
    feed += cold * distinct * max(off_line) / rates.memory_rate
    products = 3 if by_limbs(element) else 1
    pace = [products * rates.mma_us * product_m, rates.step_us, feed]
    if element == "limbs_rs":
        pace[0] += rates.limbs_of_w_us  # the consumer makes limbs, then multiplies
    if mode == "gemm" and limbs == 1:  # a step is written to shared memory once, and x is read by both warpgroups
        pace.append(rates.shared_us * (SM90_BLOCK_N + block_m + SM90_BLOCK_N + 2 * block_m))
    steps = ceil_div(ceil_div(k * size, 128), split)
    asking = min(ctas, p.device.sms) / p.device.sms
    latency = cold * rates.memory_us + (1 - cold) * rates.l2_us * asking**rates.crowd
    latency += rates.sharing_us * (cluster * cluster_m - 1)
    two = occupancy(element, mode, block_m, of_cluster) == 2
    # If the GPU has room for as many clusters again, the next launch begins while this one runs.
    overlaps = 2 * clusters <= (p.device.ctas(2) if two else p.device.clusters(of_cluster))
    in_flight = stages(element, mode, block_m, of_cluster, split)
    if two and overlaps and mode == "inference" and cold < 0.5 and not (p.x.own or p.w.own):
        in_flight *= 2  # an SM has a CTA of each; both pipelines fill at once, but not in training or from memory
    pace.append(latency / in_flight)
    pace.append(
        sum(mb / rates.tma_rate[limbs == 2 or pitch % 32 == 0] for mb, pitch in zip(loads, pitches, strict=True))
    )
    pace.append(cold * operands / rates.copy_rate / (waves * steps))
    step = smooth_max(pace, 6)
    y = m * n / waves * ITEMSIZE[dtype] * 1e-6 * _off_line(p, rates)
    stored = y * (1 + saves) / rates.y_rate[mode]  # deviations are stored like y
    of_rows = block_m * ITEMSIZE[dtype] * rates.row_us[mode]
    tile = steps * step + rates.tile_us[mode] + of_rows + stored
    largest = ITEMSIZE[dtype] == 2 and block_m == largest_block(element)
    if mode == "training" and largest and cluster == split == 1 and n > SM90_BLOCK_N:
        tile *= rates.alone[mode]  # a CTA of a pair loads half of a tile of x
    if waves > 1 and block_m & (block_m - 1):
        tile *= rates.short_passes
    if split > 1:
        sent = 4e-6 * (split - 1) / split * product_m * SM90_BLOCK_N  # float32 sums that each CTA receives
        tile += rates.exchange_us + sent / rates.exchange_rate
    # what the last tile's epilogue waits for, and the time of each tile before it
    warps = ceil_div(min(n, SM90_BLOCK_N), 32)  # warps, each with 32 features
    if mode == "training":
        merge = rates.merge_us.get(rows, rates.trip_us)
        before_epilogue = (warps - 1) / 3 * merge if rows == 1 else merge if warps > 1 or rows > 3 else 0.0
        next_tile = max(tile + y / rates.deferred_rate, rates.deferred_us)
    else:
        before_epilogue = rates.constants_us * ceil_div(warps, 3) if mode == "inference" else 0.0
        absent = (1 - _narrow_factor(p, rates)) * of_rows  # of features that the tile does not have
        next_tile = max(tile - stored - absent, stored)  # storing y overlaps with the next tile
    us: float = rates.call_us[mode] + tile + (waves - 1) * next_tile + before_epilogue
    if of_cluster > 1:
        us += rates.cluster_us[of_cluster]
    return us - rates.early_us if overlaps else us


def _off_line(p: Matmul, rates: Rates) -> float:
    """Return the factor on the time to store y. If rows do not start on 128 bytes, or not on 16, stores are smaller."""
    pitch = p.y.strides[0] * ITEMSIZE[p.dtype]
    return rates.off_line_y ** ((pitch % 128 > 0) + (pitch % 16 > 0))


def _fits_lines(pitch: int) -> bool:
    """Return whether rows with this pitch in bytes are whole lines of the cache, or halves or quarters of one."""
    return pitch % 128 == 0 or pitch in (32, 64)


def _narrow_factor(p: Matmul, rates: Rates) -> float:
    """Return the factor on the time of an epilogue if a CTA has many tiles, and p too few features to fill them.

    It is 1 if rows of x do not fit lines of the cache: loading them then takes longer than a short epilogue.
    """
    width = min(p.n, SM90_BLOCK_N) / SM90_BLOCK_N
    return rates.narrow + (1 - rates.narrow) * width if _fits_lines(p.x.strides[0] * ITEMSIZE[p.dtype]) else 1.0


def recompute_us(p: Matmul, element: str, cluster: int, waves: int, *, saves: bool, rates: Rates = H200) -> float:
    """Return the time of training by forward_sm90 in mode "recompute".

    The kernel computes `waves` waves of tiles for their statistics, and all waves except the last again for y. A tile
    takes the time of its steps and epilogue, or the time to move its bytes if that is longer.
    """
    m, n, k, dtype, *_ = p
    # a CTA of a pair loads half of a tile of x
    alone = rates.alone["recompute"] if cluster == 1 and n > SM90_BLOCK_N else 1.0
    steps = ceil_div(k * ITEMSIZE[dtype], 256 if element == "limbs" else 128)
    product = steps * rates.again_step_us[element] * alone
    x, y = (m * row * ITEMSIZE[dtype] * 1e-6 / waves / rates.copy_rate for row in (k, n * (1 + saves)))
    y *= _off_line(p, rates)
    narrow = _narrow_factor(p, rates)
    first, again = (
        max(product + narrow * rates.tile_statistics_us, x),
        max(product + narrow * rates.tile_us["recompute"], x + y),
    )
    us = waves * first + (waves - 1) * again + y
    # this mode does twice the arithmetic of other modes
    held = 4 * m * n * k / rates.held_flops * alone if ITEMSIZE[dtype] == 2 else 0.0
    return rates.call_us["recompute"] + max(us, held)


def spared_us(p: Matmul, *, rates: Rates = H200) -> float:
    """Return the time that a backward of p is shorter if it computes g again.

    It then does not read the deviations, which it otherwise reads twice, but reads x once more.
    """
    return rates.remat_us + p.m * (2 * p.n - p.k) * ITEMSIZE[p.dtype] * 1e-6 / rates.copy_rate


def skinny_us(
    p: Matmul,
    element: str,
    features: int,
    chunks: int,
    at_once: int,
    turns: int,
    *,
    training: bool,
    saves: bool,
    whole_tiles: bool,
    rates: Rates = H200,
) -> float:
    """Return the time of a forward by the skinny kernels.

    They bring the weight to shared memory, and then move bytes or multiply, whichever takes longer. At a time, all SMs
    together take `at_once` rows, `features` features, and `chunks` chunks of 64 bytes of a row. Places that stay empty
    take the same time. Rows that do not fit lines of the cache are stored more slowly, but not those of y if it is
    stored in `whole_tiles`. If a row is taken in several `turns`, y is written in each, and read in all but the first.
    """
    m, n, k, size = p.m, p.n, p.k, ITEMSIZE[p.dtype]
    x, y = m * k * size * 1e-6 / rates.skinny_rate, m * n * size * 1e-6 / rates.skinny_rate
    off_line = 1.0 if _fits_lines(p.y.strides[0] * size) else rates.off_line_y
    y *= (1.0 if whole_tiles else off_line) + saves * off_line  # deviations are stored row by row
    y *= 2 * turns - 1
    rows = (m + round_up(m, at_once)) / 2e6
    taken = round_up(ceil_div(k * size, 64), chunks)
    product = rows * features * (taken * rates.skinny_chunk_us[element] + turns * rates.skinny_row_us)
    product *= 132 / p.device.sms
    off_words = not on_words(p.y, n, size)
    stores = turns * m * n * 1e-6 * rates.skinny_off_words_us * 132 / p.device.sms if off_words else 0.0
    weight = k * min(features, 64) * rates.skinny_weight_us[element]
    us = rates.skinny_call_us[training] + weight + max(x + y, product + stores)
    return us + weight + max(x, product) if training else us


def tall_us(p: Matmul, k_tiles: int, partials: int, *, whole_words: bool, rates: Rates = PRODUCTS) -> float:
    """Return the time of tall_product: for a CTA's k_tiles or for all bytes, plus the time for partial products."""
    us = max(k_tiles * rates.tall_chunk_us[whole_words], (p.m + p.n) * p.k * 4e-6 / rates.skinny_rate)
    return rates.tall_call_us + us + 1e-6 * partials / rates.partials_rate


def split_us(p: Matmul, element: str, *, prepared: bool, rates: Rates = H200) -> float:
    """Return the time to make limbs before the launch of forward_sm90.

    MN-major operands take two more launches, and are read twice.
    """
    if not by_limbs(element):
        return 0.0
    sides = [(p.x, p.m)] if prepared or element == "limbs_rs" else [(p.x, p.m), (p.w, p.n)]
    rows, mn_major = sum(count for _, count in sides), sum(count for at, count in sides if at.strides[1] != 1)
    us = rates.limb_us + rows * 4e-6 * (p.k + limb_pitch(p.k)) / rates.limb_rate
    return us + (2 * rates.limb_us + mn_major * 4e-6 * p.k / rates.limb_rate if mn_major else 0.0)


def cublas_us(p: Matmul, element: str, after: str, *, saves: bool, rates: Rates = H200) -> float:
    """Return the time of a forward by cuBLAS: of its product, and of the passes over g after it (`after_product`)."""
    m, n, k, dtype, *_ = p
    us = passes_us(p, after, saves=saves, rates=rates) + (rates.ieee_call_us if element == "limbs" else 0.0)
    us += product_us(p, element, rates=rates)
    return us + (m + n) * k * ITEMSIZE[dtype] * 1e-6 / rates.operand_rate[element == "limbs"]


def passes_us(p: Matmul, after: str, *, saves: bool, rates: Rates = H200) -> float:
    """Return the time of the passes over g, and the fixed cost of all launches of the forward."""
    size, g = ITEMSIZE[p.dtype] * (1 + saves), 4e-6 * p.m * p.n
    cold = g > 0.8 * rates.l2_mb
    us = rates.cublas_call_us[after] + g * (4 + size) / 4 / rates.y_cublas_rate[cold]
    return us + (g / rates.g_rate[cold] if after == "statistics" else 0.0)


def product_us(p: Matmul, element: str, *, to_y: bool = False, rates: Rates = H200) -> float:
    """Return the time of cuBLAS' kernels for a product. They write `to_y`, or to rows that start on 16 bytes.

    Kernels for rows that start or end on fewer bytes are slower.
    """
    size, flops = ITEMSIZE[p.dtype], rates.cublas_flops[element] * p.device.sms / 132
    if element == "limbs":  # IEEE arithmetic: alignment makes no difference
        return 2 * round_up(p.m, IEEE_TILE) * round_up(p.n, IEEE_TILE) * p.k / flops
    few_tiles = p.k * size / 128 * rates.cublas_step_us  # what a long k takes at least
    us = math.hypot(2 * p.m * p.n * p.k / flops, few_tiles)
    least = word_of(p, to_y=to_y)
    if least == 16:
        return us
    # The added time is less with few tiles, where cuBLAS splits k, and with a short k, which soon ends.
    part = min(1.0, p.k * size / 512, ceil_div(p.m, 128) * ceil_div(p.n, 128) / 8)
    return us * rates.cublas_off_words[least] + rates.cublas_off_words_us * part


def word_of(p: Matmul, *, to_y: bool = False) -> int:
    """Return the bytes, up to 16, on which all rows of operands and result start and end.

    The start of the result's rows counts only if the product is written `to_y`.
    """
    size = ITEMSIZE[p.dtype]
    ends = [size * (p.k if p.x.strides[1] == 1 else p.m), size * (p.k if p.w.strides[1] == 1 else p.n), size * p.n]
    return min(16, *(end & -end for end in ends), *(word(at, size) for at in (p.x, p.w, p.y)[: 2 + to_y]))


def copies_us(p: Matmul, *, rates: Rates = H200) -> float:
    """Return the time of copies: one launch before the product for x and weight, and one after it for y."""
    m, n, k = p.m, p.n, p.k
    before, after = k * (m * p.x.own + n * p.w.own), m * n * p.y.own
    return sum(copy_us(elements * ITEMSIZE[p.dtype], rates=rates) for elements in (before, after) if elements)


def copy_us(nbytes: int, *, rates: Rates = H200) -> float:
    return rates.copy_us + 2e-6 * nbytes / rates.copy_rate


def ieee_us(p: Matmul, rates: Rates) -> float:
    """Return the time of a float32 product by cuBLAS in IEEE arithmetic."""
    moved = ((p.m + p.n) * p.k + p.m * p.n) * 4e-6 / rates.operand_rate[True]
    splits = p.x.strides[0] == 1 and p.k >= IEEE_SPLIT
    call = rates.ieee_call_us + (rates.ieee_split_us if splits else 0.0)
    return product_us(p, "limbs", rates=rates) + moved + call
