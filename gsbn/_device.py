"""The current GPU as a call sees it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from . import _driver

__all__ = [
    "check_stream",
    "cuda",
    "gpu_obstacle",
    "hold_until_done",
    "is_capturing",
    "is_current",
    "on_device",
]


def gpu_obstacle() -> str:
    """Why CuPy cannot be used on a GPU here; empty if it can."""
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
    """The parts of CuPy that a call uses: importing them anew each time would cost it microseconds."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "gsbn: expected CuPy for arrays on a GPU, got an environment without it: "
            "pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]', whichever CUDA the driver has"
        ) from error
    from cupy.cuda import driver, runtime
    from cupy_backends.cuda.libs import cublas

    return SimpleNamespace(
        cupy=cupy,
        runtime=runtime,
        current_context=driver.ctxGetCurrent,
        set_context=driver.ctxSetCurrent,
        cublas=cublas,
    )


def is_capturing(stream: int) -> bool:
    # The legacy default stream cannot be captured, and may not be asked while another thread captures.
    return stream not in (0, 1) and bool(cuda().runtime.streamIsCapturing(stream))


def check_stream(stream: int, capturing: bool, sms: int | None) -> None:
    """Raise ValueError for a stream of a green context that has fewer SMs than the call is planned for: CTAs that wait
    for each other would never all be there."""
    if stream < 3 or capturing:  # the default streams are nobody's; and what is captured may be replayed elsewhere
        return
    held = _driver.sms_of_stream(stream)
    if held is not None and (not isinstance(sms, int) or sms > held):
        raise ValueError(f"sms: expected at most {held} on a stream of a green context that has {held} SMs, got {sms}")


_primary: dict[int, int] = {}  # handles of primary contexts, by device


def is_current(device: int) -> bool:
    """Whether a device's primary context, in which gsbn's kernels are loaded, is this thread's current one.

    A thread that has no context gets its device's primary one: the driver, unlike the runtime, does not see to it.
    """
    found = cuda()
    context = found.current_context()
    if context == 0:
        found.runtime.setDevice(found.runtime.getDevice())
        context = found.current_context()
    return bool(context == _primary.get(device))


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make a device's primary context current, and leave what was."""
    if is_current(device):
        yield
        return
    found = cuda()
    before = found.current_context()
    found.runtime.setDevice(device)
    _primary[device] = found.current_context()
    try:
        yield
    finally:
        found.set_context(before)


_lent: deque[tuple[Any, Any]] = deque()  # an event, and what must stay until it has happened
_letting_go = threading.Lock()


def hold_until_done(arrays: Any, device: int) -> None:
    """Hold what DLPack producers have lent until CuPy's current stream on the device has done what it has to do.

    A producer may use the memory for something else as soon as nobody holds it any more; what holds it is let go by the
    next call of this function. A captured call holds nothing: what a graph reads is the caller's to keep.
    """
    import cupy

    with on_device(device):
        stream = cupy.cuda.get_current_stream()
        if is_capturing(stream.ptr):
            return
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
    _lent.append((event, arrays))
    done = []  # let go of without the lock: a producer's code runs then
    with _letting_go:
        while _lent and _lent[0][0].done:
            done.append(_lent.popleft())
