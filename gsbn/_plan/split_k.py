"""Plans products whose sums CTAs share: the reduction of partial products, and tall_product for dw in float32.

tall_product is for dg and x of many rows, and makes their limbs itself.
"""

from __future__ import annotations

from typing import NamedTuple

from .copies import start_on_words
from .cost import tall_us
from .gemm import takes_limbs
from .problem import INT32_MAX, Device, Matmul, ceil_div, round_up
from .sources import Constants, Kernel
from .variants import TALL_SIDE, THREADS, reduce_split_k, tall_product

SHARE = 8  # the most threads that add up one element
RESIDENT = 2  # CTAs of reduce_split_k on an SM
BLOCK_K = Constants("tall_product.cu", {})["BLOCK_K"]  # rows that a CTA takes at a time
TALL_LEAST_ROWS = 2048  # with fewer, the partial products have as many bytes as dg and x


class SplitKReduction(NamedTuple):
    """The launch that adds up `number` float32 matrices. Sizes are in elements."""

    kernel: Kernel
    grid: int
    number: int
    size: int  # size of each matrix
    pitch: int  # pitch of its rows
    share: int  # threads per element

    @property
    def nbytes(self) -> int:
        return 4 * self.number * self.size


def split_k_reduction(number: int, rows: int, pitch: int, device: Device) -> SplitKReduction:
    """Return the reduction of `number` partial products of `rows` rows each.

    Threads share elements as long as all CTAs are resident at once. More sharing would only leave each thread fewer
    loads in flight.
    """
    share, ctas = 1, ceil_div(rows * pitch // 4, THREADS)
    while 2 * share <= min(SHARE, number) and 2 * share * ctas <= RESIDENT * device.sms:
        share *= 2
    grid = device.grid(ceil_div(rows * pitch // 4 * share, THREADS))
    return SplitKReduction(reduce_split_k(), grid, number, rows * pitch, pitch, share)


class Tall(NamedTuple):
    """tall_product, whose CTAs compute partial products, and the launch that adds them up."""

    kernel: Kernel
    ctas: int
    rows: int  # rows of each CTA except the last of a block
    whole_words: bool  # both operands are read 16 bytes at a time
    partials: SplitKReduction
    us: float


def tall(p: Matmul, precision: str) -> Tall | None:
    """Return the two launches for a product of two MN-major operands, or None if they cannot serve."""
    mn_major = p.x.strides[0] == 1 and p.w.strides[0] == 1
    if not mn_major or not takes_limbs(p.dtype, precision, p.device) or p.limits.tall is False:
        return None
    high, wide = ceil_div(p.m, TALL_SIDE), ceil_div(p.n, TALL_SIDE)
    if not TALL_LEAST_ROWS <= p.k <= INT32_MAX or high * wide > p.device.sms:
        return None
    splits = min(p.device.sms // (high * wide), ceil_div(p.k, 8 * BLOCK_K))
    rows = round_up(ceil_div(p.k, splits), BLOCK_K)
    splits = ceil_div(p.k, rows)
    whole_words = all(start_on_words(at, 4, axis=1) for at in (p.x, p.w))
    partials = split_k_reduction(splits, high * TALL_SIDE, wide * TALL_SIDE, p.device)
    us = tall_us(p, rows // BLOCK_K, partials.nbytes, whole_words=whole_words)
    return Tall(tall_product(), high * wide * splits, rows, whole_words, partials, us)
