"""Computes what tensor maps encode, for forward_sm90 and row-major operands: the boxes into which TMA divides them."""

from __future__ import annotations

from typing import Any

from .gemm import OneLaunch
from .problem import ITEMSIZE, Matmul
from .sm90_variants import COLUMN, SM90_BLOCK_N, by_limbs, pass_rows

L2_NONE, L2_128B, L2_256B = 0, 2, 3  # CUtensorMapL2promotion


def row_boxes(rows: int, cols: int, pitch: int, dtype: str, box_rows: int) -> tuple[Any, ...]:
    """Return the arguments of `tensor_map` after the pointer for a row-major operand with a pitch in elements."""
    size = ITEMSIZE["float32" if dtype == "tf32" else dtype]
    # a box's row of 128 bytes that straddles two lines of L2 would ask for 512 bytes
    promotion = L2_128B if pitch * size % 128 else L2_256B
    return rows, cols, pitch * size, dtype, box_rows, 128 // size, promotion


def map_arguments(one: OneLaunch, p: Matmul) -> list[tuple[Any, ...]]:
    """Return the arguments of `tensor_map` after the pointer, for x, weight and y.

    A box is 128 bytes wide and as high as one transfer. If an operand is MN-major, the box's rows run over k; CTAs that
    share it divide its columns, then k (kernels/sm90/operand.cuh). p.x and p.w give the layout of limbs in float32
    elements. If CTAs share an operand, a transfer takes one limb, else both.
    """
    m, n, k, dtype, _, x, w, y, _ = p
    stored = pass_rows(one.kernel)  # rows of y in a box
    multiplied = one.block_m * one.split  # rows of x that a CTA multiplies
    if by_limbs(one.element):
        of_limbs = "float16", SM90_BLOCK_N // one.cluster_m, 64, L2_256B, 2 if one.cluster_m == 1 else 1
        if one.element == "limbs":
            w_map: tuple[Any, ...] = (n, k, 4 * w.strides[0], *of_limbs)
        elif w.strides[1] == 1:
            w_map = n, k, 4 * w.strides[0], "float32", SM90_BLOCK_N, 32, L2_256B
        else:
            w_map = k, n, 4 * w.strides[1], "float32", 64, 32, L2_256B
        return [
            (m, k, 4 * x.strides[0], "float16", multiplied, 64, L2_256B, 3 - one.cluster),
            w_map,
            (m, n, 4 * y.strides[0], "float32", stored, 32, L2_NONE),
        ]
    size = ITEMSIZE[dtype]
    width = 128 // size
    maps: list[tuple[Any, ...]] = []
    for at, rows, tile, parts in ((x, m, multiplied, one.cluster), (w, n, SM90_BLOCK_N, one.cluster_m)):
        if at.strides[1] == 1:
            maps.append(row_boxes(rows, k, at.strides[0], one.element, tile // parts))
        else:
            columns = tile // COLUMN
            by_k = max(1, parts // (columns & -columns))
            maps.append((k, rows, at.strides[1] * size, one.element, width // by_k, COLUMN, L2_256B))
    if one.wide:
        return [*maps, (m, n, y.strides[0] * 4, "float32", stored, 32, L2_NONE)]
    return [*maps, (m, n, y.strides[0] * size, dtype, stored, width, L2_NONE)]
