"""The CUDA driver's own entry points, for what CuPy does not wrap."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

__all__ = ["OVERLAPPING", "LaunchConfig", "check", "driver", "launch_kernel_ex", "resident_clusters"]


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


class LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int * 17))


# PROGRAMMATIC_STREAM_SERIALIZATION: the kernel waits for the one ahead by itself. The value starts at 8 bytes.
OVERLAPPING = _LaunchAttribute(6, (0, 1))


@cache
def launch_kernel_ex() -> Callable[[int, int, int, None], int]:
    """cuLaunchKernelEx(the address of a LaunchConfig, the function, the address of its parameters' addresses, None)."""
    function = driver().cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


def resident_clusters(function: int, threads: int, cluster: int, shared: int) -> int:
    """How many clusters of a kernel the current context can hold at once; its cluster size is compiled into it."""
    found, config = ctypes.c_int(), LaunchConfig(cluster, 1, 1, threads, 1, 1, shared)
    result = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config))
    check(result, f"asking how many clusters of {cluster} CTAs fit")
    return found.value
