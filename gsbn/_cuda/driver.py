"""Call the CUDA driver's own entry points, where CuPy does not wrap them."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any


@cache
def driver() -> ctypes.CDLL:
    """Return libcuda. Raise OSError if there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def check(result: int, doing: str) -> None:
    """Raise RuntimeError for an error. The message has the driver's name for it, and says what was being done."""
    if result != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()} while {doing}")


# Makes an argument of a function without `argtypes` from an address or a handle. An argument that many calls share is
# made once. Such a function would cut an int to 32 bits.
pointer: Callable[[int | None], Any] = ctypes.c_void_p.from_param
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread make calls that would invalidate a capture in torch's default mode, by this or another thread."""
    exchange, mode = driver().cuThreadExchangeStreamCaptureMode, ctypes.c_int(_RELAXED)
    check(exchange(ctypes.byref(mode)), "setting a thread's capture mode")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute: the value starts at 8 bytes and takes 64
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))

    def __init__(self, identity: int, value: tuple[int, ...]) -> None:
        super().__init__(identity, 0, value)


_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_...
# programmatic dependent launch: the kernel itself waits for the one ahead
OVERLAPPING = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (1,))


def launch_kernel_ex() -> Callable[[Any, Any, Any, None], int]:
    """Return cuLaunchKernelEx.

    Its arguments are a LaunchConfig, the function, and its parameters' addresses, each as a `pointer`, and None.
    """
    return driver().cuLaunchKernelEx


def resident_clusters(function: int, threads: int, cluster: int, shared: int) -> int:
    """Return how many clusters of `cluster` CTAs of a kernel can be resident in the current context at once."""
    found, size = ctypes.c_int(), _LaunchAttribute(_CLUSTER_DIMENSION, (cluster, 1, 1))
    config = LaunchConfig(cluster, 1, 1, threads, 1, 1, shared, attributes=ctypes.addressof(size), count=1)
    result = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config))
    check(result, f"asking how many clusters of {cluster} CTAs fit")
    return found.value


class _Resource(ctypes.Structure):  # CUdevResource: a type, padding to 96 bytes, then for SMs their number
    _fields_ = (("type", ctypes.c_int), ("padding", ctypes.c_ubyte * 92), ("sms", ctypes.c_uint * 64))


_SM = 1  # CU_DEV_RESOURCE_TYPE_SM


@cache
def _green_context_of() -> Callable[[Any, Any], int] | None:
    """Return cuStreamGetGreenCtx, or None if the driver lacks it.

    Its arguments are a stream, and where it writes the handle of the stream's green context, each as a `pointer`.
    """
    return getattr(driver(), "cuStreamGetGreenCtx", None)


_handles: list[tuple[Any, Any]] = []  # free variables for a handle, and a `pointer` to each; a call takes one


def sms_of_stream(stream: int) -> int | None:
    """Return how many SMs a stream's green context has, or None if the stream has no green context.

    A default stream belongs to the current context. The driver is asked each time, because a new stream may have the
    handle of a stream that was destroyed.
    """
    ask = _green_context_of()
    if ask is None:
        return None
    try:
        room = _handles.pop()
    except IndexError:
        handle = ctypes.c_void_p()
        room = handle, pointer(ctypes.addressof(handle))
    failed, context = ask(pointer(stream), room[1]), room[0].value
    _handles.append(room)
    if failed or not context:
        return None
    found = _Resource()
    result = driver().cuGreenCtxGetDevResource(ctypes.c_void_p(context), ctypes.byref(found), _SM)
    check(result, "asking for the SMs of a green context")
    return int(found.sms[0])
