"""Define groups of ranks that share a batch, and exchange the ranks' numbers on the host."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from .._values import flag, shown, timeout_seconds

_NCCL_UINT8 = 1
_HEADER = 256  # bytes; a header has the call of a rank, as text for error messages


class Engine(Protocol):
    """The part of the user's communication library that gsbn uses on the host; every method is collective."""

    rank: int
    size: int
    on_host: bool  # whether it can send host memory without a GPU

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        """Return the bytes of every rank in rank order; all ranks must pass equally many bytes.

        Raises RuntimeError or TimeoutError after the timeout.
        """
        ...

    def close(self) -> None:
        return  # most engines have nothing to free


class Group:
    """Ranks that share a batch. Each rank is a process or a thread. See `gsbn.group`, which makes a group.

    Attributes
    ----------
    rank, size : int
        The number of this rank, and the number of ranks.
    timeout : float
        The longest time that a call waits for the other ranks, in seconds.
    """

    rank: int
    size: int
    timeout: float

    def __init__(self, engine: Engine, timeout: float, peer_memory: bool) -> None:
        self._engine, self.timeout, self._peer_memory = engine, timeout, peer_memory
        self.rank, self.size = engine.rank, engine.size
        self._name, self._calls = "", 0  # the name is the same on all ranks, and unique for each group
        self._obstacle = ""  # why the group cannot be used any more
        self._exchange: Any = None  # the Exchange, made by the first call on a GPU
        self._closers: list[Callable[[bool], None]] = []  # for `close`; told whether all ranks close the group now

    def check(self) -> None:
        """Raise RuntimeError if the group is closed, a rank is missing, or the ranks make different calls.

        Every call with the group starts with this check. The replay of a CUDA graph does not: call `check` after the
        replay has ended.
        """
        if not self._obstacle and self._exchange is not None:
            self._obstacle = self._exchange.obstacle()
        if self._obstacle:
            raise RuntimeError(f"group: {self._obstacle}; it cannot be used any more")

    def close(self) -> None:
        """Free the memory of the group. The communicator stays open.

        This is collective: every rank calls it after its last call with the group.

        Raises
        ------
        RuntimeError
            The last calls with the group have failed, and their results are wrong.
        """
        failed = self._close(together=not self._obstacle)
        if failed:
            raise RuntimeError(f"group: {failed}; what its last calls gave is worthless")

    def _close(self, together: bool) -> str:
        """Close the group. Return the error of the last calls if it was not raised yet, else an empty string."""
        while self._closers:
            self._closers.pop()(together)
        known = self._obstacle or self._exchange is None
        failed = "" if known else self._exchange.obstacle()
        self._obstacle = self._obstacle or failed or "it is closed"
        self._engine.close()
        return failed

    def __enter__(self) -> Group:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
        else:
            leave(self)

    def __reduce__(self) -> Any:
        raise TypeError("group: expected to stay in its process, got pickled or copied")

    def __repr__(self) -> str:
        state = f", {self._obstacle}" if self._obstacle else ""
        return f"gsbn.Group(rank={self.rank}, size={self.size}, timeout={self.timeout:g}{state})"


def leave(group: Group) -> None:
    """Close the group on this rank alone. Memory that other ranks may still write to is not freed."""
    group._close(together=False)


def check_host(group: Group) -> None:
    """Raise ValueError if the group cannot send host memory."""
    if not group._engine.on_host:
        raise ValueError(
            "group: expected one of a communicator that reaches the host's memory (gloo, MPI) for arrays on the "
            "CPU, got NCCL's"
        )


def meet(group: Group) -> None:
    """Wait until all ranks have made the group, and name it, so that it never matches calls of another group."""
    agree(group, "gsbn.group")
    group._name = gather_bytes(group, os.urandom(4))[0].hex()


def gather_bytes(group: Group, data: bytes, timeout: float | None = None) -> list[bytes]:
    """Return the bytes of every rank in rank order; all ranks must pass equally many bytes."""
    group.check()
    try:
        return group._engine.gather(data, group.timeout if timeout is None else timeout)
    except BaseException as error:  # after an interrupt, too: the others may have these bytes or not
        reason = str(error) or type(error).__name__
        group._obstacle = f"rank {group.rank} of {group.size}, waiting for the others ({group.timeout:g} s): {reason}"
        if not isinstance(error, Exception):
            raise
        raise RuntimeError(f"group: {group._obstacle}") from error


def gather(group: Group, call: str, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the numbers of every rank on the host, as float64 of shape (size, numbers) in rank order.

    Raises RuntimeError unless all ranks make the same `call`.
    """
    start = time.monotonic()
    group._calls += 1
    agree(group, f"call {group._calls} of group {group._name}: {call}")
    left = group.timeout - (time.monotonic() - start)
    rows = gather_bytes(group, np.ascontiguousarray(numbers, np.float64).tobytes(), left)
    return np.stack([np.frombuffer(row) for row in rows])


def agree(group: Group, call: str) -> None:
    """Raise RuntimeError unless all ranks make the same call.

    The text of the call is padded, because engines need bytes of equal length.
    """
    header = call.encode()[:_HEADER].ljust(_HEADER)
    for rank, other in enumerate(gather_bytes(group, header)):
        if other != header:
            theirs, ours = (text.decode(errors="replace").rstrip() for text in (other, header))
            group._obstacle = f"rank {rank} makes {theirs!r}, and rank {group.rank} makes {ours!r}"
            raise RuntimeError(f"group: {group._obstacle}")


def group(comm: Any, *, timeout: float = 300.0, peer_memory: bool = True) -> Group:
    """Make a group of ranks. ``gsbn.forward(..., training=True, group=...)`` uses the statistics of all their rows.

    This is collective: every rank of the communicator calls it once. The result is a context manager; its `close` frees
    its memory.

    Parameters
    ----------
    comm
        An existing communicator: a ``torch.distributed`` ProcessGroup (of any backend), an mpi4py communicator, a
        ``cupy.cuda.nccl.NcclCommunicator`` or a backend of ``cupyx.distributed``. The last two support only arrays on a
        GPU; gloo and MPI also support arrays on the CPU.
    timeout : float
        The longest time that a call waits for the other ranks, in seconds. If a rank has died or makes another call,
        the other ranks raise an error within this time: on the CPU in the call itself, on a GPU in the next call. The
        time includes the compilation of kernels on another rank, so a few seconds are too short.
    peer_memory : bool
        Whether GPUs may write to each other's memory (see Notes).

    Returns
    -------
    Group

    Raises
    ------
    TypeError
        `comm` is none of these communicators, or `peer_memory` is not a bool.
    ValueError
        `timeout` is not above 0, or this process is not a member of the communicator.
    RuntimeError
        A rank does not make this call before the timeout.

    Notes
    -----
    On a GPU the first call with the group chooses how statistics are exchanged: by writing to the memory of the other
    GPUs if every rank can map the memory of every other rank, else through NCCL. As with any collective, all ranks must
    make their calls in the same order, and a rank must use one stream at a time. `docs/guide/groups.md` says more.

    Examples
    --------
    >>> from mpi4py import MPI  # doctest: +SKIP
    >>> with gsbn.group(MPI.COMM_WORLD) as ranks:  # doctest: +SKIP
    ...     y = gsbn.forward(x, weight, training=True, group=ranks)
    """
    seconds = timeout_seconds(timeout)
    flag("peer_memory", peer_memory)
    engine = _torch(comm) or _mpi(comm) or _nccl(comm)
    if engine is None:
        raise TypeError(
            "comm: expected a torch.distributed ProcessGroup, an mpi4py communicator, a cupy NcclCommunicator or a "
            f"cupyx.distributed backend, got {shown(comm)}"
        )
    made = Group(engine, seconds, peer_memory)
    try:
        meet(made)
    except BaseException:
        made.close()
        raise
    return made


class _Torch(Engine):
    """The engine of a torch ProcessGroup."""

    def __init__(self, torch: Any, comm: Any) -> None:
        self._torch, self._of = torch, weakref.ref(comm)  # weak: torch owns it, and destroying it joins threads
        self.rank, self.size = torch.distributed.get_rank(comm), torch.distributed.get_world_size(comm)
        self.on_host = "cpu:" in torch.distributed.get_backend_config(comm)
        # The device that NCCL uses: a ProcessGroup may use one that is never made the current device
        bound = getattr(comm, "bound_device_id", None)
        self._device = "cpu" if self.on_host else bound or f"cuda:{torch.cuda.current_device()}"
        if self.rank < 0:
            raise ValueError("comm: expected a ProcessGroup that this process is a member of")

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        torch, comm = self._torch, self._of()
        if comm is None:
            raise RuntimeError("its ProcessGroup was destroyed")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        all_ = [torch.empty_like(mine) for _ in range(self.size)]
        work = torch.distributed.all_gather(all_, mine, group=comm, async_op=True)
        if self.on_host:
            # For torch 0 ms means no limit, and 292 years overflow in nanoseconds.
            work.wait(timedelta(seconds=min(max(timeout, 0.001), 1e9)))
        else:
            _until(work.is_completed, timeout)
        return [row.cpu().numpy().tobytes() for row in all_]


def _torch(comm: Any) -> Engine | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    if comm is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("comm: expected a ProcessGroup that this process is a member of")
    return _Torch(torch, comm) if isinstance(comm, torch.distributed.ProcessGroup) else None


class _Mpi(Engine):
    """The engine of an mpi4py communicator; it uses a copy, so that gsbn's messages never match the user's."""

    on_host = True

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._copy: Any = None
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        if self._copy is None:  # not in __init__, and not by Dup, which would wait without a limit
            copy, request = self._comm.Idup()
            self._wait(request, timeout)
            self._copy = copy
        all_ = bytearray(len(data) * self.size)
        self._wait(self._copy.Iallgather(bytearray(data), all_), timeout)
        return [bytes(all_[i : i + len(data)]) for i in range(0, len(all_), len(data))]

    def _wait(self, request: Any, timeout: float) -> None:
        try:
            _until(request.Test, timeout)
        except BaseException:
            _UNFINISHED.append(request)
            self._copy = None  # the copy cannot be freed while a message is under way
            raise

    def close(self) -> None:
        if self._copy is not None and not self._mpi.Is_finalized():
            self._copy.Free()
            self._copy = None


_UNFINISHED: list[Any] = []  # abandoned requests, with the memory that MPI may still write to


def _mpi(comm: Any) -> Engine | None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        return None
    if comm == mpi.COMM_NULL:
        raise ValueError("comm: expected a communicator that this process is a member of")
    return _Mpi(mpi, comm) if isinstance(comm, mpi.Intracomm) else None


class _Nccl(Engine):
    """The engine of a CuPy NCCL communicator, which sends only GPU memory."""

    on_host = False

    def __init__(self, comm: Any, rank: int, size: int) -> None:
        self.comm, self.rank, self.size = comm, rank, size

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        import cupy

        mine = cupy.asarray(np.frombuffer(data, np.uint8))
        all_ = cupy.empty((self.size, len(data)), np.uint8)
        stream, done = cupy.cuda.get_current_stream(), cupy.cuda.Event(disable_timing=True)
        self.comm.allGather(mine.data.ptr, all_.data.ptr, len(data), _NCCL_UINT8, stream.ptr)
        done.record(stream)
        _until(lambda: done.done, timeout)
        return [row.tobytes() for row in all_.get()]


def _nccl(comm: Any) -> Engine | None:
    nccl = sys.modules.get("cupy.cuda.nccl")
    if nccl is None or not nccl.available:
        return None
    backends = sys.modules.get("cupyx.distributed")
    if backends is not None and isinstance(comm, backends.NCCLBackend):
        comm = comm._comm  # there is no public access to its communicator
    if not isinstance(comm, nccl.NcclCommunicator):
        return None
    return _Nccl(comm, comm.rank_id(), comm.size())


def _until(done: Callable[[], bool], timeout: float) -> None:
    """Wait until `done` returns True. Raise TimeoutError after the timeout.

    Do not sleep in the first millisecond, since most answers take microseconds.
    """
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            raise TimeoutError("they did not come")
        time.sleep(0.0001 if waited > 0.001 else 0)  # sleep(0) lets a rank on the same core run
