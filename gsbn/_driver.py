"""The CUDA driver's own entry points, for what CuPy does not wrap."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

__all__ = ["check", "driver", "resident_clusters"]


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


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def resident_clusters(function: int, threads: int, cluster: int, shared: int) -> int:
    """How many clusters of a kernel the current context can hold at once; its cluster size is compiled into it."""
    found, config = ctypes.c_int(), _LaunchConfig(cluster, 1, 1, threads, 1, 1, shared)
    result = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config))
    check(result, f"asking how many clusters of {cluster} CTAs fit")
    return found.value
