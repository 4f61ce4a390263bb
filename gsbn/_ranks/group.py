"""Groups: ranks that share a batch. Who they are, and how their numbers reach each other on the host."""

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
_HEADER = 256  # bytes: what a rank calls, in words that an error can show


class Engine(Protocol):
    """The user's own communication, as far as gsbn uses it on the host; every method is collective."""

    rank: int
    size: int
    on_host: bool  # bytes need no GPU

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        """Every rank's bytes, of one length, in rank order; RuntimeError or TimeoutError if that takes longer."""
        ...

    def close(self) -> None: ...


class Group:
    """Ranks that share a batch, one process or thread each; `gsbn.group` makes one, and its docstring tells more.

    Attributes
    ----------
    rank, size : int
        Which of how many.
    timeout : float
        Seconds that a call waits for the others at most.
    """

    rank: int
    size: int
    timeout: float
    peer_memory: bool

    def __init__(self, engine: Engine, timeout: float, peer_memory: bool) -> None:
        self._engine, self.timeout, self.peer_memory = engine, timeout, peer_memory
        self.rank, self.size = engine.rank, engine.size
        self._name, self._calls = "", 0  # the name is the same on all ranks, and another in every group
        self._obstacle = ""  # why it cannot be used any more
        self.on_device: Any = None  # the Exchange, once a call on a GPU has needed one
        self._closers: list[Callable[[bool], None]] = []

    @property
    def nccl(self) -> Any:
        """The communicator of NCCL's that it was made of, if it was."""
        return getattr(self._engine, "comm", None)

    def check(self) -> None:
        """Raise RuntimeError if the group is closed, or has lost a rank or the order of its calls.

        Every call with the group begins with it. A replayed CUDA graph does not: ask after a replay that has ended.
        """
        if not self._obstacle and self.on_device is not None:
            self._obstacle = self.on_device.obstacle()
        if self._obstacle:
            raise RuntimeError(f"group: {self._obstacle}; it cannot be used any more")

    def check_host(self) -> None:
        """Raise ValueError if the group does not reach the host's memory."""
        if not self._engine.on_host:
            raise ValueError(
                "group: expected one of a communicator that reaches the host's memory (gloo, MPI) for arrays on the "
                "CPU, got NCCL's"
            )

    def meet(self) -> None:
        """Wait until all ranks have made the group, and give it a name: another group's calls cannot pass for its."""
        self.agree("gsbn.group")
        self._name = self.gather_bytes(os.urandom(4))[0].hex()

    def gather_bytes(self, data: bytes, timeout: float | None = None) -> list[bytes]:
        """Every rank's bytes, of one length."""
        self.check()
        try:
            return self._engine.gather(data, self.timeout if timeout is None else timeout)
        except BaseException as error:  # of an interrupt, too, nobody knows what the others have seen
            reason = str(error) or type(error).__name__
            self._obstacle = f"rank {self.rank} of {self.size}, waiting for the others ({self.timeout:g} s): {reason}"
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(f"group: {self._obstacle}") from error

    def gather(self, call: str, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Every rank's numbers, float64 (size, numbers) in rank order, on the host.

        All ranks must make the same `call`; RuntimeError where one makes another.
        """
        start = time.monotonic()
        self._calls += 1
        self.agree(f"call {self._calls} of group {self._name}: {call}")
        left = self.timeout - (time.monotonic() - start)
        rows = self.gather_bytes(np.ascontiguousarray(numbers, np.float64).tobytes(), left)
        return np.stack([np.frombuffer(row) for row in rows])

    def agree(self, call: str) -> None:
        """Raise RuntimeError unless all ranks make the same call; of one length, as not every engine tells lengths."""
        header = call.encode()[:_HEADER].ljust(_HEADER)
        for rank, other in enumerate(self.gather_bytes(header)):
            if other != header:
                theirs, ours = (text.decode(errors="replace").rstrip() for text in (other, header))
                self._obstacle = f"rank {rank} makes {theirs!r}, and rank {self.rank} makes {ours!r}"
                raise RuntimeError(f"group: {self._obstacle}")

    def at_close(self, closer: Callable[[bool], None]) -> None:
        """Call it once, when the group is closed, with whether all ranks close it now."""
        self._closers.append(closer)

    def close(self) -> None:
        """Free what the group holds: collective, after its last call. The communicator stays the user's.

        Raises
        ------
        RuntimeError
            If calls of the group have failed since the last one that began: their results are worthless.
        """
        failed = self._close(together=not self._obstacle)
        if failed:
            raise RuntimeError(f"group: {failed}; what its last calls gave is worthless")

    def leave(self) -> None:
        """`close` on this rank alone; what others may still write to stays."""
        self._close(together=False)

    def _close(self, together: bool) -> str:
        """What calls have failed by that nobody was told."""
        while self._closers:
            self._closers.pop()(together)
        known = self._obstacle or self.on_device is None
        failed = "" if known else self.on_device.obstacle()
        self._obstacle = self._obstacle or failed or "it is closed"
        self._engine.close()
        return failed

    def __enter__(self) -> Group:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self.leave()

    def __reduce__(self) -> Any:
        raise TypeError("group: expected to stay in its process, got pickled or copied")

    def __repr__(self) -> str:
        state = f", {self._obstacle}" if self._obstacle else ""
        return f"gsbn.Group(rank={self.rank}, size={self.size}, timeout={self.timeout:g}{state})"


def group(comm: Any, *, timeout: float = 300.0, peer_memory: bool = True) -> Group:
    """Ranks that share a batch: ``gsbn.forward(..., training=True, group=...)`` takes the statistics of all their rows.

    Collective: every rank of the communicator makes one, once. A context manager; `close` frees what it holds.

    Parameters
    ----------
    comm
        The communication that is there already: a ``torch.distributed`` ProcessGroup (of any backend), an mpi4py
        communicator, a ``cupy.cuda.nccl.NcclCommunicator`` or a backend of ``cupyx.distributed``. The last two serve
        arrays on a GPU alone, gloo and MPI both sides.
    timeout : float
        Seconds that a call waits for the other ranks at most. A rank that died, or calls something else, is an error
        on all others within this time: on the CPU of the call itself, on a GPU, where the host never waits, of the
        next call. Compiling kernels on one rank counts, so seconds are too few.
    peer_memory : bool
        Whether GPUs may write into each other's memory (see Notes).

    Returns
    -------
    Group

    Raises
    ------
    TypeError
        A `comm` that is none of these, a `peer_memory` that is no bool.
    ValueError
        A `timeout` that is not above 0, a communicator that this process is not a member of.
    RuntimeError
        A rank that does not come.

    Notes
    -----
    On a GPU the first call with the group sets up, once, how statistics travel: through memory of the other GPUs where
    every rank can map every other's, which CUDA allows processes of one host, over NVLink or PCIe; else through NCCL.
    All ranks' calls must come in one order, as with any collective, on one stream at a time.
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
        made.meet()
    except BaseException:
        made.close()
        raise
    return made


class _Torch:
    """A ProcessGroup of torch's."""

    def __init__(self, torch: Any, comm: Any) -> None:
        self._torch, self._of = torch, weakref.ref(comm)  # torch keeps it until it is destroyed, which joins threads
        self.rank, self.size = torch.distributed.get_rank(comm), torch.distributed.get_world_size(comm)
        self.on_host = "cpu:" in torch.distributed.get_backend_config(comm)
        # of NCCL's messages: a ProcessGroup does with a device that is never made the current one
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
            # 0 ms are no limit to it, and the nanoseconds of 292 years overflow
            work.wait(timedelta(seconds=min(max(timeout, 0.001), 1e9)))
        else:
            _until(work.is_completed, timeout)
        return [row.cpu().numpy().tobytes() for row in all_]

    def close(self) -> None:
        pass


def _torch(comm: Any) -> Engine | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    if comm is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("comm: expected a ProcessGroup that this process is a member of")
    return _Torch(torch, comm) if isinstance(comm, torch.distributed.ProcessGroup) else None


class _Mpi:
    """A communicator of mpi4py's: a copy of it, so that no message of ours meets one of the user's."""

    on_host = True

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._copy: Any = None
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        if self._copy is None:  # here and not before: Dup would wait without a limit
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
            self._copy = None  # with a message under way it cannot be freed
            raise

    def close(self) -> None:
        if self._copy is not None and not self._mpi.Is_finalized():
            self._copy.Free()
            self._copy = None


_UNFINISHED: list[Any] = []  # requests that nobody waits for any more, and the memory to which MPI may still write


def _mpi(comm: Any) -> Engine | None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        return None
    if comm == mpi.COMM_NULL:
        raise ValueError("comm: expected a communicator that this process is a member of")
    return _Mpi(mpi, comm) if isinstance(comm, mpi.Intracomm) else None


class _Nccl:
    """A communicator of CuPy's NCCL, which knows memory of GPUs alone."""

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

    def close(self) -> None:
        pass


def _nccl(comm: Any) -> Engine | None:
    nccl = sys.modules.get("cupy.cuda.nccl")
    if nccl is None or not nccl.available:
        return None
    backends = sys.modules.get("cupyx.distributed")
    if backends is not None and isinstance(comm, backends.NCCLBackend):
        comm = comm._comm  # there is no other way to its communicator
    if not isinstance(comm, nccl.NcclCommunicator):
        return None
    return _Nccl(comm, comm.rank_id(), comm.size())


def _until(done: Callable[[], bool], timeout: float) -> None:
    """Wait: at first without sleeping, for what is near is there in microseconds."""
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            raise TimeoutError("they did not come")
        time.sleep(0.0001 if waited > 0.001 else 0)  # 0 lets another rank run that shares the core
