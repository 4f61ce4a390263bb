"""How numbers of a group's ranks reach each other's GPUs: through peer memory, else through NCCL."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._check import VECTORS
from ._device import cuda, on_device
from ._driver import beside_captures
from ._group import Group

__all__ = ["Exchange", "exchange_of", "features_of", "forward_words", "letters", "posts_at", "signature"]

_MAILBOX = 64 << 20  # bytes, of all slots and ranks: at 8 ranks 131,000 features
_FEATURES = 1 << 16, 1 << 20  # that it has room for: of more than 16 ranks it is larger, 4 MiB a rank
_LETTER = 16
_LONGEST = 1e9  # seconds, whose nanoseconds fit into 64 bits
_INFO = struct.Struct("16s 16s q q ? 64s")  # of a rank: host, process, mailbox, device, what others open
_NCCL_FLOAT64 = 8
_STATUS = {  # STATUS_ of kernels/common/ranks.cuh
    1: "a rank did not come within {timeout:g} s",
    2: "a rank makes another call: of other features, dtype or options, or a forward where this one makes a backward",
    3: "Expected more than 1 value per channel when training, got one row on all ranks together",
}


def letters(features: int) -> int:
    """How many numbers a rank posts."""
    return 2 + 2 * features


def posts_at(start: int, features: int, exchange: Exchange | None) -> tuple[int, int, int]:
    """In a call's workspace, from an offset on: what this rank posts, what NCCL gathers, and the end."""
    nbytes = 8 * letters(features) + -8 * letters(features) % 256
    start += -start % 256
    return start, start + nbytes, start + nbytes * (1 if exchange is None or exchange.waits else 1 + exchange.size)


def forward_words(
    arrays: Mapping[str, Any],
    features: int,
    inputs: int,
    dtype: str,
    momentum: Any,
    eps: Any,
    activation: Any,
    number: Any,
) -> str:
    """What must be alike in the forwards of all ranks, for an error to show; `number` is a scale that is no array."""
    given = ", ".join(name for name in VECTORS if arrays[name] is not None)
    average = "cumulative" if momentum is None else float(momentum)
    scale = "" if number == 1 else f", scale {float(number)}"
    options = f"eps {float(eps)}, momentum {average}, activation {activation}{scale}"
    return f"forward of {features} features, {dtype}; {inputs} input features, {options}; with {given or 'no vectors'}"


def signature(what: str) -> int:
    """A number for a call, exact in float64."""
    import hashlib  # which `import gsbn` need not load

    return int.from_bytes(hashlib.sha256(what.encode()).digest()[:6], "little")


def features_of(ranks: int) -> int:
    """How many features a mailbox has room for."""
    least, most = _FEATURES
    return min(max((_MAILBOX // (2 * ranks * _LETTER) - 2) // 2, least), most)


def exchange_of(group: Group, device: int, capturing: bool) -> Exchange:
    """The group's, made by its first call on a GPU: that is collective, and waits."""
    found = group.on_device
    if found is None:
        if capturing:
            raise RuntimeError("group: expected a first call before a capture, got none: it sets up the group")
        with on_device(device):
            found = group.on_device = Exchange(group, device)
    elif found.device != device:
        raise ValueError(f"x: expected the group's device cuda:{found.device}, got cuda:{device}")
    return found  # type: ignore[no-any-return]


class Exchange:
    """What a group has on its GPU; `address` is that of struct Ranks (kernels/common/ranks.cuh).

    `waits`: kernels of ours wait for letters in peer memory; else `gather` is to be called between two.
    """

    def __init__(self, group: Group, device: int) -> None:
        self._group, self.device, self.size = group, device, group.size
        self._mapped: list[int] = []
        self._comm: Any = None
        self._own_comm = False
        group.agree(f"first call on a GPU, peer_memory={group.peer_memory}")
        runtime = cuda().runtime
        self.features = features_of(group.size)
        nbytes = 2 * group.size * letters(self.features) * _LETTER
        self._mailbox = runtime.malloc(nbytes) if group.peer_memory else 0  # of no pool: others open it as it is
        boxes = self._open(nbytes) if group.peer_memory else None
        ready = all(flag == b"\1" for flag in group.gather_bytes(b"\1" if boxes is not None else b"\0"))
        self.waits = ready and boxes is not None
        if not self.waits:
            self._unmap()
            group.gather_bytes(b"u")
            self._free()
            self._join()
        self._status = cuda().cupy.cuda.alloc_pinned_memory(8)
        ctypes.memset(self._status.ptr, 0, 8)
        nanoseconds = int(min(group.timeout, _LONGEST) * 1e9)
        given = group.rank, group.size, letters(self.features), nanoseconds, self._status.ptr
        counts = 0, 0, 0  # call, leaving, broken
        self._ranks = cuda().cupy.asarray(np.array([*given, *counts, *(boxes or ())], np.uint64))
        self.address: int = self._ranks.data.ptr
        self._event = cuda().cupy.cuda.Event(disable_timing=True)  # after the last call
        self._stream: int | None = None
        self._watch = None if self.waits else _Watch(group.timeout, self._comm)
        cuda().cupy.cuda.get_current_stream().synchronize()  # before a call on another stream reads what was copied
        group.at_close(self._close)

    def _open(self, nbytes: int) -> list[int] | None:
        """The addresses of all mailboxes; None where one is out of reach. Collective."""
        group, runtime = self._group, cuda().runtime
        stream = cuda().cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(self._mailbox, 0, nbytes, stream.ptr)  # no call has the number 0
        stream.synchronize()
        try:
            handle, offered = runtime.ipcGetMemHandle(self._mailbox), True
        except runtime.CUDARuntimeError:
            handle, offered = b"", False
        info = _INFO.pack(_host(), _process(), self._mailbox, self.device, offered, handle)
        infos = [_INFO.unpack(row) for row in group.gather_bytes(info)]
        boxes = []
        for rank, (host, process, mailbox, device, offers, handle) in enumerate(infos):
            try:
                if rank == group.rank:
                    boxes.append(self._mailbox)
                elif host != _host():
                    return None
                elif process == _process():  # its threads share addresses
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
        """A communicator of NCCL's: the user's if the group was made of one. Collective."""
        from cupy.cuda import nccl  # which CuPy itself does not import

        group = self._group
        self._comm = group.nccl
        if self._comm is not None:
            return
        available = bool(getattr(nccl, "available", False))
        number = nccl.get_unique_id() if available and group.rank == 0 else bytes(128)
        rows = group.gather_bytes(bytes([available]) + number)
        if not all(row[0] for row in rows):
            raise RuntimeError(
                "group: expected NCCL in CuPy on every rank, since not every GPU reaches every other's memory: "
                "pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever CUDA CuPy has"
            )
        self._comm = nccl.NcclCommunicator(group.size, rows[0][1:], group.rank)
        self._own_comm = True

    # ---- a call

    def begin(self, stream: int, capturing: bool) -> None:
        """Before a call's launches: after those of the last call, if that was on another stream."""
        if self._stream not in (None, stream) and not capturing:
            cuda().runtime.streamWaitEvent(stream, self._event.ptr)

    def end(self, stream: int, capturing: bool) -> None:
        """After a call's launches."""
        if not capturing:
            cuda().runtime.eventRecord(self._event.ptr, stream)
            self._stream = stream
            if self._watch is not None:
                self._watch.add(stream)

    def gather(self, count: int, operands: tuple[int, int], stream: int) -> None:
        """Launch: `count` doubles of every rank, in rank order, from the first address to the second."""
        posted, gathered = operands
        self._comm.allGather(posted, gathered, count, _NCCL_FLOAT64, stream)

    def obstacle(self) -> str:
        """What has gone wrong in a call so far; empty if nothing has."""
        status = ctypes.c_longlong.from_address(self._status.ptr).value
        if self._watch is not None and self._watch.late:
            status = 1  # of what NCCL has left undone, anything may follow
        return _STATUS[status].format(timeout=self._group.timeout) if status else ""

    # ---- the end

    def _unmap(self) -> None:
        for address in self._mapped:
            cuda().runtime.ipcCloseMemHandle(address)
        self._mapped = []

    def _free(self) -> None:
        """Once no other process has it mapped."""
        if self._mailbox:
            cuda().runtime.free(self._mailbox)
        self._mailbox = 0

    def _close(self, together: bool) -> None:
        """`together`: all ranks close now. Else others may still write to the mailbox, and it stays."""
        if self._watch is not None:
            self._watch.end()
        with on_device(self.device):
            if together:
                cuda().runtime.deviceSynchronize()
                try:
                    self._group.gather_bytes(b"close")
                    self._unmap()
                    self._group.gather_bytes(b"unmap")
                    self._free()
                except RuntimeError:  # a rank does not come: it may still write
                    together = False
            if self._own_comm and not (self._watch is not None and self._watch.late):
                (self._comm.destroy if together else self._comm.abort)()  # what destroys waits for the others


class _Watch:
    """A thread that aborts NCCL where a call does not end: NCCL itself would wait for ever."""

    def __init__(self, timeout: float, comm: Any) -> None:
        self._timeout, self._comm, self.late = timeout, comm, False
        self._calls: deque[tuple[float, Any]] = deque()
        # Events to record again: destroying one waits while another thread waits for the GPU.
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
        with beside_captures():  # it asks for events
            while not self._ended.wait(min(1.0, self._timeout / 4)):
                while self._calls and self._calls[0][1].done:
                    self._events.append(self._calls.popleft()[1])
                if self._calls and time.monotonic() > self._calls[0][0]:
                    self.late = True
                    self._comm.abort()
                    return


def _host() -> bytes:
    """What two processes have in common that may open each other's memory."""
    import hashlib  # as above

    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_bytes() if boot.exists() else b""
    return hashlib.sha256(name + platform.node().encode()).digest()[:16]


_TOKEN = os.urandom(8)


def _process() -> bytes:
    """What no other process has: a number alone may be another's, too, in another container; a fork has this token."""
    return _TOKEN + os.getpid().to_bytes(8, "little")


def _reach(device: int) -> None:
    runtime = cuda().runtime
    try:
        runtime.deviceEnablePeerAccess(device)
    except runtime.CUDARuntimeError as error:
        if error.status != _ALREADY:
            raise


_ALREADY = 704  # cudaErrorPeerAccessAlreadyEnabled
