"""dw in float32 where dg and x are tall, of many rows: the launch that makes their limbs, and what it takes."""

from __future__ import annotations

from typing import NamedTuple

from .cost import tall_us
from .gemm import takes_limbs
from .kernel import Kernel
from .problem import INT32_MAX, Matmul, ceil_div, round_up
from .sources import Constants
from .split_k import SplitKReduction, split_k_reduction
from .variants import TALL_SIDE, tall_product

CHUNK = Constants("tall_product.cu", {})["CHUNK"]  # rows that a CTA takes at a time
LEAST_ROWS = 2048  # with fewer, dg and x are no more bytes than the parts of their product


class Tall(NamedTuple):
    """tall_product, whose CTAs make parts of the product, and what adds them up."""

    kernel: Kernel
    ctas: int
    rows: int  # of each but the last of a block
    whole_words: bool  # both operands are read by 16 bytes
    parts: SplitKReduction
    us: float


def tall(p: Matmul, precision: str) -> Tall | None:
    """The two launches for a product of two MN-major operands, where they can make it."""
    mn_major = p.x.strides[0] == 1 and p.w.strides[0] == 1
    if not mn_major or not takes_limbs(p.dtype, precision, p.device) or p.limits.tall is False:
        return None
    high, wide = ceil_div(p.m, TALL_SIDE), ceil_div(p.n, TALL_SIDE)
    if not LEAST_ROWS <= p.k <= INT32_MAX or high * wide > p.device.sms:
        return None
    splits = min(p.device.sms // (high * wide), ceil_div(p.k, 8 * CHUNK))
    rows = round_up(ceil_div(p.k, splits), CHUNK)
    splits = ceil_div(p.k, rows)
    whole_words = all(at.aligned and at.strides[1] % 4 == 0 for at in (p.x, p.w))
    parts = split_k_reduction(splits, high * TALL_SIDE, wide * TALL_SIDE, p.device)
    us = tall_us(p, rows // CHUNK, parts.nbytes, whole_words=whole_words)
    return Tall(tall_product(), high * wide * splits, rows, whole_words, parts, us)
