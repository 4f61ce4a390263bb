"""Tensor maps: what Hopper's copy engine is told of a matrix, encoded by the driver and kept by what they encode."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from .driver import check, driver

_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "tf32": 11}  # CUtensorMapDataType
_INTERLEAVE_NONE, _SWIZZLE_128B, _FILL_ZERO = 0, 3, 0


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
