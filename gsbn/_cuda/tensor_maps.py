"""Make tensor maps, which describe matrices to Hopper's TMA. The driver encodes them, and a cache keeps them."""

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
    samples: int = 0,
) -> tuple[Any, int]:
    """Return the tensor map of a row-major (rows, cols) matrix with a pitch in bytes: its owner and its address.

    A box is (box_rows, box_cols), where box_cols are 128 bytes, with a swizzle of 128 bytes. Outside of the matrix a
    box reads zeros and writes nothing. With "tf32" a load rounds float32 to nearest. With `box_limbs` the rows are rows
    of limbs (split_limbs.cu): their pieces of 128 bytes are a third dimension, and a box takes `box_limbs` pieces. With
    `samples`, that many such matrices lie one after another and are a third dimension; a box lies in one matrix.
    Pointer and pitch are multiples of 16 bytes. The cache's key has everything that a map encodes, and addresses are
    unique across devices, so a map never becomes invalid.
    """
    depth, below, box = (samples, rows * pitch, 1) if samples else (-(-cols // box_cols) * 2, 128, box_limbs)
    owner = ctypes.create_string_buffer(128 + 63)
    at = (ctypes.addressof(owner) + 63) & ~63  # cuTensorMapEncodeTiled needs 64-byte alignment
    result = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _TYPES[dtype],
        3 if box else 2,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 3)(box_cols if box_limbs else cols, rows, depth),
        (ctypes.c_uint64 * 2)(pitch, below),
        (ctypes.c_uint32 * 3)(box_cols, box_rows, box),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        promotion,
        _FILL_ZERO,
    )
    check(result, f"encoding the tensor map of {(rows, cols)} {dtype} with a pitch of {pitch} bytes")
    return owner, at


class Matrices:
    """The arguments of `tensor_map` after the pointer, for each matrix of a call.

    As the key of a cache, this object is compared by identity, which is faster.
    """

    def __init__(self, arguments: list[tuple[Any, ...]]) -> None:
        self.arguments = arguments


@lru_cache(maxsize=4096)
def tensor_maps(matrices: Matrices, *pointers: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return the tensor maps of matrices at these pointers: their owners and addresses."""
    maps = [tensor_map(at, *rest) for at, rest in zip(pointers, matrices.arguments, strict=True)]
    return tuple(owner for owner, _ in maps), tuple(at for _, at in maps)
