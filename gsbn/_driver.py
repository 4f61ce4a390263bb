"""The CUDA driver's own entry points, for what CuPy does not wrap."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

__all__ = ["check", "driver"]


@cache
def driver() -> ctypes.CDLL:
    """libcuda; OSError where there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def check(result: int, doing: str) -> None:
    """Raise RuntimeError with the driver's name for an error, and what was being done."""
    if result != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()} while {doing}")
