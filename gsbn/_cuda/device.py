"""Ask for the current GPU, its context and a stream's state, and make a GPU the current one."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from .._values import no_cupy
from . import driver


def gpu_obstacle() -> str:
    """Return why CuPy cannot be used on a GPU here, or an empty string if it can."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "no GPU is visible"
        cupy.cuda.nvrtc.getVersion()
    except ImportError as error:
        return "CuPy is not installed" if error.name == "cupy" else str(error).strip().splitlines()[0]
    except Exception as error:  # CUDARuntimeError and whatever a broken installation raises
        return str(error).strip().splitlines()[0]
    return ""


@cache
def cuda() -> Any:
    """Return the parts of CuPy that a call uses. An import of them in each call would take microseconds."""
    try:
        import cupy
    except ImportError as error:
        raise no_cupy("gsbn: expected CuPy for arrays on a GPU") from error
    from cupy.cuda import driver, runtime
    from cupy_backends.cuda.libs import cublas

    contexts = {"current_context": driver.ctxGetCurrent, "set_context": driver.ctxSetCurrent}
    return SimpleNamespace(cupy=cupy, runtime=runtime, cublas=cublas, **contexts)


def is_capturing(stream: int) -> bool:
    # The legacy default stream cannot be captured, and may not be queried while another thread captures.
    return stream not in (0, 1) and bool(cuda().runtime.streamIsCapturing(stream))


_OWN = 3  # the least handle of a stream that was created; the default streams are 0, 1 and 2


def green_sms(stream: int) -> int | None:
    """Return how many SMs a stream of a green context has, which a call cannot exceed; None for other streams."""
    return None if stream < _OWN else driver.sms_of_stream(stream)


_primary: dict[int, int] = {}  # handles of primary contexts, by device


def is_current(device: int) -> bool:
    """Return whether a device's primary context, in which gsbn's kernels are loaded, is this thread's current one.

    A thread without a context first gets the primary context of its device. The runtime would do this; the driver does
    not.
    """
    found = cuda()
    context = found.current_context()
    if context == 0:
        found.runtime.setDevice(found.runtime.getDevice())
        context = found.current_context()
    return bool(context == _primary.get(device))


@contextlib.contextmanager
def on_device(device: int, stream_of: Callable[[int], int] | None = None) -> Iterator[None]:
    """Make a device's primary context current, and restore the previous context at the end.

    `stream_of` returns the stream on which the caller will launch. A default stream of a green context is refused: in
    the primary context the same handle means another stream, which has neither the SMs nor the order of the first one.
    """
    if is_current(device):
        yield
        return
    found = cuda()
    before = found.current_context()
    if stream_of is not None and found.runtime.getDevice() == device and stream_of(device) < _OWN:
        held = driver.sms_of_stream(0)
        if held is not None:
            raise RuntimeError(
                f"expected a current stream that was created, got the default stream of a green context of {held} SMs: "
                "create one in that context, and make it the current stream"
            )
    found.runtime.setDevice(device)
    _primary[device] = found.current_context()
    try:
        yield
    finally:
        found.set_context(before)


_lent: deque[tuple[Any, Any]] = deque()  # events, and the arrays that are held until each event
_letting_go = threading.Lock()


def hold_until_done(arrays: Any, device: int) -> None:
    """Hold arrays of DLPack producers until CuPy's current stream on the device has finished the work it has now.

    A producer may reuse the memory as soon as nobody holds it. Later calls of this function release the arrays whose
    work has finished. A captured call holds nothing: the caller must keep the arrays that a graph reads.
    """
    import cupy

    with on_device(device):
        stream = cupy.cuda.get_current_stream()
        if is_capturing(stream.ptr):
            return
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
    _lent.append((event, arrays))
    done = []  # released after the lock, because a release runs a producer's code
    with _letting_go:
        while _lent and _lent[0][0].done:
            done.append(_lent.popleft())
