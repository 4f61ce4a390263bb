"""Tensor maps: what Hopper's copy engine is told of a matrix, encoded by the driver and kept by what they encode."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from . import _plan
from ._driver import check, driver

__all__ = ["Matrices", "map_arguments", "tensor_map", "tensor_maps"]

_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "tf32": 11}  # CUtensorMapDataType
_INTERLEAVE_NONE, _SWIZZLE_128B, _FILL_ZERO = 0, 3, 0
L2_NONE, L2_256B = 0, 3  # CUtensorMapL2promotion


@lru_cache(maxsize=4096)
def tensor_map(
    pointer: int,
    rows: int,
    cols: int,
    pitch: int,
    dtype: str,
    box_rows: int,
    box_cols: int,
    promotion: int,
    box_limbs: int = 0,
) -> tuple[Any, int]:
    """The map of a row-major (rows, cols) matrix with `pitch` bytes from row to row: its owner and its address.

    Boxes of (box_rows, box_cols), box_cols being 128 bytes, swizzled by 128 bytes; what lies outside reads as zero and
    is not written. "tf32" rounds float32 to nearest as it loads. With `box_limbs` rows are those of limbs
    (split_limbs.cu): pieces of 128 bytes are a third dimension, of which a box takes so many. Pointer and pitch are
    multiples of 16 bytes. The key is all that a map encodes, addresses being unique across devices, so that a map never
    goes stale.
    """
    owner = ctypes.create_string_buffer(128 + 63)
    at = (ctypes.addressof(owner) + 63) & ~63  # cuTensorMapEncodeTiled wants 64-byte alignment
    result = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _TYPES[dtype],
        3 if box_limbs else 2,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 3)(box_cols if box_limbs else cols, rows, -(-cols // box_cols) * 2),
        (ctypes.c_uint64 * 2)(pitch, 128),
        (ctypes.c_uint32 * 3)(box_cols, box_rows, box_limbs),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        promotion,
        _FILL_ZERO,
    )
    check(result, f"encoding the tensor map of {(rows, cols)} {dtype} with a pitch of {pitch} bytes")
    return owner, at


class Matrices:
    """What `tensor_map` wants beside a pointer, for each matrix of a call. A key by identity: quicker than by value."""

    def __init__(self, arguments: list[tuple[Any, ...]]) -> None:
        self.arguments = arguments


@lru_cache(maxsize=4096)
def tensor_maps(matrices: Matrices, *pointers: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Their maps, where they lie now: the owners and the addresses."""
    maps = [tensor_map(at, *rest) for at, rest in zip(pointers, matrices.arguments, strict=True)]
    return tuple(owner for owner, _ in maps), tuple(at for _, at in maps)


def map_arguments(one: _plan.OneLaunch, p: _plan.Matmul) -> list[tuple[Any, ...]]:
    """What `tensor_map` wants beside a pointer, for forward_sm90's x, weight and y: boxes of 128 bytes by the rows of a
    transfer, which are rows of k where an operand lies across it. Limbs lie as p's x and w say, in float32's; of an
    operand that CTAs share, a transfer takes one limb, and of x all rows."""
    m, n, k, dtype, _, x, w, y, _ = p
    of_x, of_w = (1, one.cluster) if one.along_rows else (one.cluster, 1)  # that share it
    multiplied = one.block_m * one.split  # rows of x
    if one.element in ("limbs", "limbs_rs"):
        of_limbs = "float16", _plan.SM90_BLOCK_N // of_w, 64, L2_256B, 2 if of_w == 1 else 1
        if one.element == "limbs":
            w_map: tuple[Any, ...] = (n, k, 4 * w.strides[0], *of_limbs)
        elif w.strides[1] == 1:
            w_map = n, k, 4 * w.strides[0], "float32", _plan.SM90_BLOCK_N, 32, L2_256B
        else:
            w_map = k, n, 4 * w.strides[1], "float32", 64, 32, L2_256B
        return [
            (m, k, 4 * x.strides[0], "float16", multiplied, 64, L2_256B, 3 - of_x),
            w_map,
            (m, n, 4 * y.strides[0], "float32", min(one.block_m, 32), 32, L2_NONE),
        ]
    size = _plan.ITEMSIZE[dtype]
    width = 128 // size
    store_rows = min(one.block_m, 32 if size == 4 else 64)
    maps: list[tuple[Any, ...]] = []
    for at, rows, box in ((x, m, multiplied // of_x), (w, n, _plan.SM90_BLOCK_N // of_w)):
        if at.strides[1] == 1:
            maps.append((rows, k, at.strides[0] * size, one.element, box, width, L2_256B))
        else:
            maps.append((k, rows, at.strides[1] * size, one.element, width, _plan.COLUMN, L2_256B))
    if one.wide:
        return [*maps, (m, n, y.strides[0] * 4, "float32", 32, 32, L2_NONE)]
    return [*maps, (m, n, y.strides[0] * size, dtype, store_rows, width, L2_NONE)]
