"""dw in float32 if dg and x have many rows: tall_product, which makes their limbs itself, and its expected time."""

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
LEAST_ROWS = 2048  # with fewer, the partial products have as many bytes as dg and x


class Tall(NamedTuple):
    """tall_product, whose CTAs compute partial products, and the launch that adds them up."""

    kernel: Kernel
    ctas: int
    rows: int  # of each CTA but the last of a block
    whole_words: bool  # both operands are read 16 bytes at a time
    parts: SplitKReduction
    us: float


def tall(p: Matmul, precision: str) -> Tall | None:
    """The two launches for a product of two MN-major operands, if they can serve."""
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
