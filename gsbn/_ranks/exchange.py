"""Exchange numbers between the GPUs of a group's ranks, through peer memory if possible, else through NCCL."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from .._cuda.device import cuda, on_device
from .._cuda.driver import beside_captures
from .._plan.problem import letters
from .._plan.sources import Constants
from .group import Group, agree, gather_bytes

_MAILBOX = 128 << 20  # bytes for all slots and ranks: enough for 131,000 features with 8 ranks
_FEATURES = 1 << 16, 1 << 20  # least and most features; above 16 ranks a mailbox grows by 8 MiB per rank
_LETTER = 16
_NUMBERS = 4  # the most numbers of a feature: the sums of a backward in 16 bits
_LONGEST = 1e9  # seconds; in nanoseconds it fits into 64 bits
_INFO = struct.Struct("16s 16s q q ? 64s")  # host, process, mailbox, device, has an IPC handle, IPC handle
_NCCL_FLOAT64 = 8
_STATUS = Constants("common/ranks.cuh", {})
_TIMEOUT, _OTHER_CALL, _ONE_ROW = (_STATUS[f"STATUS_{name}"] for name in ("TIMEOUT", "OTHER_CALL", "ONE_ROW"))
_ERRORS = {
    _TIMEOUT: "a rank did not come within {timeout:g} s",
    _OTHER_CALL: "a rank makes another call: of other features, dtype or options, or a forward where this one makes a "
    "backward",
    _ONE_ROW: "Expected more than 1 value per channel when training, got one row on all ranks together",
}


def signature(what: str) -> int:
    """Return a hash of a call that is exact in float64."""
    import hashlib  # not needed at `import gsbn`

    return int.from_bytes(hashlib.sha256(what.encode()).digest()[:6], "little")


def features_of(ranks: int) -> int:
    """Return the number of features that fit into a mailbox."""
    least, most = _FEATURES
    return min(max((_MAILBOX // (2 * ranks * _LETTER) - 2) // _NUMBERS, least), most)


def exchange_of(group: Group, device: int, capturing: bool) -> Exchange:
    """Return the exchange of a group. The first call on a GPU makes it; this is collective, and waits for all ranks."""
    found = group._exchange
    if found is None:
        if capturing:
            raise RuntimeError("group: expected a first call before a capture, got none: it sets up the group")
        with on_device(device):
            found = group._exchange = Exchange(group, device)
    elif found.device != device:
        raise ValueError(f"x: expected the group's device cuda:{found.device}, got cuda:{device}")
    return found  # type: ignore[no-any-return]


class Exchange:
    """The state of a group on its GPU; `address` is the address of struct Ranks (kernels/common/ranks.cuh).

    `waits` is True if gsbn's kernels wait for letters in peer memory; else `gather` runs between two kernels.
    """

    def __init__(self, group: Group, device: int) -> None:
        self._group, self.device, self.size = group, device, group.size
        self._mapped: list[int] = []
        self._comm: Any = None
        self._own_comm = False
        agree(group, f"first call on a GPU, peer_memory={group._peer_memory}")
        runtime = cuda().runtime
        self.features = features_of(group.size)
        nbytes = 2 * group.size * letters(self.features, _NUMBERS) * _LETTER
        self._mailbox = runtime.malloc(nbytes) if group._peer_memory else 0  # not pooled, since others open all of it
        boxes = self._open(nbytes) if group._peer_memory else None
        ready = all(flag == b"\1" for flag in gather_bytes(group, b"\1" if boxes is not None else b"\0"))
        self.waits = ready and boxes is not None
        if not self.waits:
            self._unmap()
            gather_bytes(group, b"u")
            self._free()
            self._join()
        self._status = cuda().cupy.cuda.alloc_pinned_memory(8)
        ctypes.memset(self._status.ptr, 0, 8)
        nanoseconds = int(min(group.timeout, _LONGEST) * 1e9)
        given = group.rank, group.size, letters(self.features, _NUMBERS), nanoseconds, self._status.ptr
        counts = 0, 0, 0  # call, leaving, broken
        self._ranks = cuda().cupy.asarray(np.array([*given, *counts, *(boxes or ())], np.uint64))
        self.address: int = self._ranks.data.ptr
        self._event = cuda().cupy.cuda.Event(disable_timing=True)  # recorded after the last call
        self._stream: int | None = None
        self._watch = None if self.waits else _Watch(group.timeout, self._comm)
        cuda().cupy.cuda.get_current_stream().synchronize()  # so that calls on other streams see these copies
        group._closers.append(self._close)

    def _open(self, nbytes: int) -> list[int] | None:
        """Return the addresses of all ranks' mailboxes, or None if this GPU cannot access one of them. Collective."""
        group, runtime = self._group, cuda().runtime
        stream = cuda().cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(self._mailbox, 0, nbytes, stream.ptr)  # calls are counted from 1
        stream.synchronize()
        try:
            handle, offered = runtime.ipcGetMemHandle(self._mailbox), True
        except runtime.CUDARuntimeError:
            handle, offered = b"", False
        info = _INFO.pack(_host(), _process(), self._mailbox, self.device, offered, handle)
        infos = [_INFO.unpack(row) for row in gather_bytes(group, info)]
        boxes = []
        for rank, (host, process, mailbox, device, offers, handle) in enumerate(infos):
            try:
                if rank == group.rank:
                    boxes.append(self._mailbox)
                elif host != _host():
                    return None
                elif process == _process():  # threads of one process share addresses
                    if device != self.device:
                        _reach(device)
                    boxes.append(mailbox)
                elif offers:
                    opened = runtime.ipcOpenMemHandle(handle)
                    self._mapped.append(opened)
                    boxes.append(opened)
                else:
                    return None
            except runtime.CUDARuntimeError:
                return None
        return boxes

    def _join(self) -> None:
        """Set the NCCL communicator: the user's if the group was made from one, else a new one. Collective."""
        from cupy.cuda import nccl  # `import cupy` does not import it

        group = self._group
        self._comm = getattr(group._engine, "comm", None)
        if self._comm is not None:
            return
        available = bool(getattr(nccl, "available", False))
        number = nccl.get_unique_id() if available and group.rank == 0 else bytes(128)
        rows = gather_bytes(group, bytes([available]) + number)
        if not all(row[0] for row in rows):
            raise RuntimeError(
                "group: expected NCCL in CuPy on every rank, since not every GPU reaches every other's memory: "
                "pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever CUDA CuPy has"
            )
        self._comm = nccl.NcclCommunicator(group.size, rows[0][1:], group.rank)
        self._own_comm = True

    # ---- a call

    def begin(self, stream: int, capturing: bool) -> None:
        """Prepare for a call's launches: make the stream wait for the previous call, if that was on another stream."""
        if self._stream not in (None, stream) and not capturing:
            cuda().runtime.streamWaitEvent(stream, self._event.ptr)

    def end(self, stream: int, capturing: bool) -> None:
        """Record the end of a call, after its launches."""
        if not capturing:
            cuda().runtime.eventRecord(self._event.ptr, stream)
            self._stream = stream
            if self._watch is not None:
                self._watch.add(stream)

    def gather(self, count: int, operands: tuple[int, int], stream: int) -> None:
        """Launch an all-gather of `count` doubles per rank; `operands` are the addresses to read and to write."""
        posted, gathered = operands
        self._comm.allGather(posted, gathered, count, _NCCL_FLOAT64, stream)

    def obstacle(self) -> str:
        """Return the error of a call so far, or an empty string if there is none."""
        status = ctypes.c_longlong.from_address(self._status.ptr).value
        if self._watch is not None and self._watch.late:
            status = _TIMEOUT  # after an aborted NCCL call any other status may follow from it
        return _ERRORS[status].format(timeout=self._group.timeout) if status else ""

    # ---- the end

    def _unmap(self) -> None:
        for address in self._mapped:
            cuda().runtime.ipcCloseMemHandle(address)
        self._mapped = []

    def _free(self) -> None:
        """Free the mailbox. No other process may still have it mapped."""
        if self._mailbox:
            cuda().runtime.free(self._mailbox)
        self._mailbox = 0

    def _close(self, together: bool) -> None:
        """Free what the exchange holds. `together` says whether all ranks close now.

        If they do not, other ranks may still write to the mailbox, so it is not freed.
        """
        if self._watch is not None:
            self._watch.end()
        with on_device(self.device):
            if together:
                cuda().runtime.deviceSynchronize()
                try:
                    gather_bytes(self._group, b"close")
                    self._unmap()
                    gather_bytes(self._group, b"unmap")
                    self._free()
                except RuntimeError:  # a rank is missing: it may still write
                    together = False
            if self._own_comm and not (self._watch is not None and self._watch.late):
                (self._comm.destroy if together else self._comm.abort)()  # destroy waits for the others


class _Watch:
    """A thread that aborts NCCL if a call does not end. NCCL itself would wait for ever."""

    def __init__(self, timeout: float, comm: Any) -> None:
        self._timeout, self._comm, self.late = timeout, comm, False
        self._calls: deque[tuple[float, Any]] = deque()
        # These events are used again, because destroying an event blocks while another thread waits for the GPU.
        self._events: deque[Any] = deque()
        self._ended = threading.Event()
        self._device = cuda().runtime.getDevice()
        threading.Thread(target=self._run, name="gsbn-nccl", daemon=True).start()

    def add(self, stream: int) -> None:
        event = self._events.popleft() if self._events else cuda().cupy.cuda.Event(disable_timing=True)
        cuda().runtime.eventRecord(event.ptr, stream)
        self._calls.append((time.monotonic() + self._timeout, event))

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        cuda().runtime.setDevice(self._device)
        with beside_captures():  # this thread queries events
            while not self._ended.wait(min(1.0, self._timeout / 4)):
                while self._calls and self._calls[0][1].done:
                    self._events.append(self._calls.popleft()[1])
                if self._calls and time.monotonic() > self._calls[0][0]:
                    self.late = True
                    self._comm.abort()
                    return


def _host() -> bytes:
    """Return a hash of the host. Processes of the same host may open each other's memory."""
    import hashlib  # as above

    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_bytes() if boot.exists() else b""
    return hashlib.sha256(name + platform.node().encode()).digest()[:16]


_TOKEN = os.urandom(8)


def _process() -> bytes:
    """Return bytes that are unique to this process.

    The process id is not unique across containers, and the token is not unique across a fork.
    """
    return _TOKEN + os.getpid().to_bytes(8, "little")


def _reach(device: int) -> None:
    runtime = cuda().runtime
    try:
        runtime.deviceEnablePeerAccess(device)
    except runtime.CUDARuntimeError as error:
        if error.status != _ALREADY:
            raise


_ALREADY = 704  # cudaErrorPeerAccessAlreadyEnabled
