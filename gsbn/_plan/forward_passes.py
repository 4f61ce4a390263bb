"""Decides how the passes of a forward after its GEMM divide g among CTAs."""

from __future__ import annotations

from typing import NamedTuple

from .gemm import waiting_grid
from .problem import SPLITS, Device, Matmul, ceil_div, row_threads_for, split_rows
from .skinny import Skinny
from .sources import Constants
from .variants import THREADS

# CTAs per SM, and rows that a thread holds at once
STATS_CTAS, STATS_GROUP = 2, Constants("scale_stats.cu", {})["GROUP"]
NORMALIZE_CTAS, NORMALIZE_GROUP = 4, Constants("normalize.cu", {})["UNROLL"]


class Division(NamedTuple):
    """How the work of the passes after the GEMM is divided among CTAs."""

    splits: int  # CTAs that share the rows of a block of features to compute statistics
    stats_grid: int
    merge_grid: int
    normalize_grid: int
    fields: dict[str, int]


def divide(p: Matmul, skinny: Skinny | None, columns: int, one_pass: bool) -> Division:
    """Divide the work of the passes. A thread has `columns` columns.

    `one_pass`: a CTA has all rows of its features, and needs no statistics of other CTAs.
    """
    device = p.device
    blocks, row_threads = _one_pass_threads(p.m, p.n, columns, device) if one_pass else row_threads_for(p.n, columns)
    rows = THREADS // row_threads  # rows that a CTA takes at once
    splits, stats_rows = split_rows(p.m, blocks, min(device.ctas(STATS_CTAS), SPLITS * blocks), STATS_GROUP * rows)
    row_blocks, normalize_rows = split_rows(p.m, blocks, device.ctas(NORMALIZE_CTAS), NORMALIZE_GROUP * rows)
    if one_pass:
        splits, row_blocks, normalize_rows = 1, 1, p.m
    stats_grid, normalize_grid = device.grid(blocks * splits), device.grid(blocks * row_blocks)
    if skinny is not None:
        splits, stats_rows, stats_grid, normalize_grid = skinny.splits, skinny.rows, skinny.grid, skinny.grid
    merge_columns, merge_grid = _merge(p.n, splits, device)
    fields = {"row_threads": row_threads, "stats_rows": stats_rows, "normalize_rows": normalize_rows}
    fields |= {"splits": splits, "merge_columns": merge_columns}
    return Division(splits, stats_grid, merge_grid, normalize_grid, fields)


def _merge(n: int, splits: int, device: Device) -> tuple[int, int]:
    """Return how many columns an item of merge_statistics has, and how many CTAs the kernel has.

    An item has few columns, so that many threads share a column and no thread has more than 8 splits. But half of the
    SMs stay free, since the CTAs may wait for other ranks.
    """

    def fits(columns: int) -> bool:
        items = ceil_div(n, columns)
        return 2 * columns * splits > 8 * THREADS and items == waiting_grid(items, device)

    columns = 8
    while columns < THREADS and not fits(columns):
        columns *= 2
    return columns, waiting_grid(ceil_div(n, columns), device)


def _one_pass_threads(m: int, n: int, columns: int, device: Device) -> tuple[int, int]:
    """Return how many blocks of columns there are, and row_threads, if a CTA has all rows and a thread at most 16.

    It takes the most row_threads that keep all SMs busy, at least 2 (32 bytes of a row).
    """
    row_threads, most = 2, min(16, STATS_GROUP * THREADS // m)
    while 2 * row_threads <= most and ceil_div(n, 2 * row_threads * columns) >= device.sms:
        row_threads *= 2
    return ceil_div(n, row_threads * columns), row_threads
