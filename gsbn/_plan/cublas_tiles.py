"""Predicts how long cuBLAS takes for a 16-bit product of the backward, beside forward_sm90's tiles.

`cost.product_us` is for all dtypes, layouts and forwards. It knows no tiles, so it errs more.
"""

from __future__ import annotations

import itertools
import math

from .cost import smooth_max
from .h100 import BANDWIDTH
from .problem import ITEMSIZE, Matmul, ceil_div

# The model: cuBLAS takes the best of these tiles, with k divided among so many CTAs; its real tiles are not known. The
# numbers were fitted to docs/results/products_h100.jsonl: 580 products, which they predict with an error of 13 %.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)
CALL_US, SPLIT_US, STEP_US = 2.28, 3.12, 0.131  # per call, added if k is divided, and the least time of 64 of k
MMA_US, LOAD_US = 0.00183, 0.122  # per 64 of k and 128 elements of the tile; per 64 of k and 128 rows of its operands
Y_RATE, PARTIALS_RATE, OPERAND_RATE = 2.41, 0.792, 3.14  # MB/us
OFF_SECTORS = 1.11  # factor, if rows do not start on 32 bytes


def cublas_tiles_us(p: Matmul) -> float:
    """Return the time in us of cuBLAS for c (m, n) = a (m, k) b (k, n) in 16 bits.

    Rows of b and c are contiguous and start on 16 bytes, as do those of a, or its columns.
    """
    size, steps = ITEMSIZE[p.dtype], ceil_div(p.k, 64)
    best = math.inf
    for (rows, columns), split in itertools.product(TILES, SPLITS):
        if split > 1 and steps < 4 * split:
            continue
        waves = ceil_div(ceil_div(p.m, rows) * ceil_div(p.n, columns) * split, p.device.sms)
        pace = MMA_US * rows * columns / 128, STEP_US, LOAD_US * (rows + columns) / 128
        us = waves * ceil_div(steps, split) * smooth_max(pace, 4)
        if split > 1:
            us += SPLIT_US + 4e-6 * split * p.m * p.n / PARTIALS_RATE
        best = min(best, us)
    us = CALL_US + best + 1e-6 * size * p.m * p.n / Y_RATE
    read = CALL_US + 1e-6 * size * (p.m + p.n) * p.k / (OPERAND_RATE * p.device.bandwidth / BANDWIDTH)
    us = smooth_max((us, read), 4)
    on_sectors = all(pitch * size % 32 == 0 for pitch in (p.n, max(p.x.strides)))
    return us if on_sectors else OFF_SECTORS * us
