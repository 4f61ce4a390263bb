"""Groups: the contract, run by two and three processes over gloo and MPI; and tests in one process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import gsbn
from gsbn._ranks import exchange as _ranks
from gsbn._ranks.group import Group, gather_bytes, meet
from tests.groups.contract.engines import environment, why_not
from tests.groups.contract.rank import APART, LIMIT, ON_GPUS, TOGETHER
from tests.support import ROOT

PROGRAM = [sys.executable, "-m", "tests.groups.contract"]  # from the root of the repository
KINDS = {"gloo": "torch-cpu", "mpi": "numpy"}  # kinds of arrays; engines do not depend on them
OF_GPUS = [  # the part of TOGETHER that applies to GPUs
    "every_dtype", "several_blocks", "every_argument", "other_activations", "a_mean_far_from_zero", "one_row_a_rank",
    "no_row_at_all", "backward_of_some", "batch_renormalisation", "many_short_rows", "many_calls", "a_residual",
    *ON_GPUS,
]  # fmt: skip
OF_THREE = [  # tests that depend on the number of ranks, except those that are slow with few cores
    *[("gloo", name) for name in ("every_dtype", "one_row_a_rank", "another_number_of_features")],
    *[("mpi", name) for name in ("every_dtype", "one_row_a_rank", "another_number_of_features", "many_calls")],
]


class Program(NamedTuple):
    """The processes of one run, and the folder with their output."""

    processes: list[subprocess.Popen[str]]
    folder: TemporaryDirectory[str]

    def results(self) -> dict[str, list[str]]:
        """For each name the error of every rank, empty if there is none; and the printed output under ''."""
        until = time.monotonic() + LIMIT + 60  # the program ends by itself after LIMIT
        printed = [process.communicate(timeout=until - time.monotonic())[0] for process in self.processes]
        found: dict[str, list[str]] = {"": printed}
        for file in sorted(Path(self.folder.name).glob("*.jsonl")):
            for line in file.read_text().splitlines():
                result = json.loads(line)
                found.setdefault(result["name"], []).append(result["fault"])
        self.folder.cleanup()
        return found


def start(engine: str, size: int, *names: str, kind: str = "", more: tuple[str, ...] = ()) -> Program:
    """Start the program of the contract on all ranks."""
    folder = TemporaryDirectory()
    arguments = [engine, "--kind", kind or KINDS[engine], *more, "--out", folder.name, "--names", *names]
    if engine != "mpi":
        arguments += ["--meet", str(Path(folder.name, "meet"))]
        commands = [[*PROGRAM, *arguments]] * size
    else:
        commands = [["mpiexec", "-n", str(size), *PROGRAM, *arguments]]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **({"RANK": str(rank), "WORLD_SIZE": str(size)} if engine != "mpi" else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    return Program(processes, folder)


@cache
def run(engine: str, size: int) -> dict[str, list[str]]:
    names = TOGETHER if size == 2 else [name for of, name in OF_THREE if of == engine]
    return start(engine, size, *names).results()


@pytest.fixture(scope="module", autouse=True)
def apart(request: pytest.FixtureRequest) -> Any:
    """Programs with a missing rank, by engine and name: they mostly wait, so they run while other tests do."""
    wanted = {getattr(item, "originalname", "") for item in request.session.items}
    engines = [engine for engine in ("gloo", "mpi") if not why_not(engine)]
    names = itertools.product(engines, APART) if test_a_rank_that_does_not_come.__name__ in wanted else ()
    programs = {(engine, name): start(engine, 2, name) for engine, name in names}
    yield programs
    for program in programs.values():
        for process in program.processes:
            process.kill()


def assert_right(results: dict[str, list[str]], name: str, size: int) -> None:
    faults = [fault for fault in results.get(name, []) if fault]
    assert not faults, "\n".join(faults)
    assert len(results.get(name, [])) == size, "\n".join(["not every rank came that far:", *results[""]])


def need(engine: str, size: int = 2) -> None:
    if reason := why_not(engine, size):
        pytest.skip(reason)


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks(engine: str, name: str) -> None:
    need(engine)
    assert_right(run(engine, 2), name, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["--peer-memory", "--no-peer-memory"])
@pytest.mark.parametrize("kind", ["torch-cuda", "cupy"])
@pytest.mark.parametrize("size", [2, 4])
def test_gpus(size: int, kind: str, way: str) -> None:
    """The contract with one GPU per rank."""
    need("nccl", size)
    results = start("nccl", size, *OF_GPUS, kind=kind, more=(way,)).results()
    for name in OF_GPUS:
        assert_right(results, name, size)


@pytest.mark.parametrize(("engine", "name"), OF_THREE)
def test_three_ranks(engine: str, name: str) -> None:
    need(engine)
    assert_right(run(engine, 3), name, 3)


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
@pytest.mark.parametrize("name", APART)
def test_a_rank_that_does_not_come(engine: str, name: str, apart: dict[tuple[str, str], Program]) -> None:
    need(engine)
    assert_right(apart[engine, name].results(), name, 2)


# ---- one process


class Alone:
    """An engine with one rank."""

    rank, size, on_host = 0, 1, True

    def __init__(self) -> None:
        self.calls = 0

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        self.calls += 1
        return [data]

    def close(self) -> None:
        pass


@pytest.fixture
def alone() -> Iterator[tuple[Alone, Group]]:
    engine = Alone()
    with Group(engine, 3.0, peer_memory=False) as group:
        meet(group)
        yield engine, group


X, W = np.arange(6, dtype="f4").reshape(3, 2), np.ones((4, 2), "f4")


def test_arrays_on_the_cpu_need_an_engine_that_reaches_them(alone: tuple[Alone, Group]) -> None:
    """The error is raised before anything is written or sent."""
    engine, group = alone
    engine.on_host, before = False, engine.calls
    out = np.full((3, 4), 7, "f4")
    with pytest.raises(ValueError, match="group: expected one of a communicator that reaches the host's memory"):
        gsbn.forward(X, W, training=True, group=group, out=out)
    with pytest.raises(ValueError, match="got NCCL's"):
        gsbn.forward(X[:0], W, training=True, group=group)
    assert (out == 7).all() and engine.calls == before
    engine.on_host = True
    gsbn.forward(X, W, training=True, group=group, out=out)


def test_an_interrupt_ends_a_group(alone: tuple[Alone, Group]) -> None:
    """The other ranks may have received this rank's numbers or not, so the next call could be taken for this one."""
    engine, group = alone

    def interrupted(data: bytes, timeout: float) -> list[bytes]:
        raise KeyboardInterrupt

    engine.gather = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        gsbn.forward(X, W, training=True, group=group)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt; it cannot be used any more"):
        gsbn.forward(X, W, training=True, group=group)


def test_a_call_waits_no_longer_than_the_timeout_in_all(alone: tuple[Alone, Group]) -> None:
    """The timeout is for the whole call, however many messages it sends."""
    engine, group = alone
    left = []

    def slow(data: bytes, timeout: float) -> list[bytes]:
        left.append(timeout)
        time.sleep(0.1)
        return [data]

    engine.gather = slow  # type: ignore[method-assign]
    gsbn.forward(X, W, training=True, group=group)
    assert left[0] == 3 and 2 < left[1] <= 2.9 and len(left) == 2


def test_a_group_says_what_it_is() -> None:
    with Group(Alone(), 3.0, peer_memory=False) as group:
        assert repr(group) == "gsbn.Group(rank=0, size=1, timeout=3)"
        assert {name for name in dir(group) if name[0] != "_"} == {"rank", "size", "timeout", "check", "close"}
    assert repr(group) == "gsbn.Group(rank=0, size=1, timeout=3, it is closed)"


def test_describe_sends_nothing(alone: tuple[Alone, Group]) -> None:
    engine, group = alone
    before = engine.calls
    assert gsbn.describe(X, W, training=True, group=group).path == "numpy"
    assert engine.calls == before


def test_a_call_that_failed_unnoticed_is_told_at_the_end(alone: tuple[Alone, Group]) -> None:
    """As in a replayed graph, after which no call checks."""
    _, group = alone
    group._exchange = SimpleNamespace(obstacle=lambda: "a rank did not come")
    with pytest.raises(RuntimeError, match=r"^group: a rank did not come; what its last calls gave is worthless$"):
        group.close()
    group.close()


class _Runtime:
    """The part of the CUDA runtime that offers and opens a mailbox."""

    CUDARuntimeError = OSError

    def __init__(self) -> None:
        self.opened: list[bytes] = []

    def memsetAsync(self, *_: Any) -> None: ...

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        return b"own".ljust(64)

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        self.opened.append(handle)
        return 0x9000


def test_two_processes_of_one_number_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers on one host may have equal process ids, but do not share addresses."""
    runtime = _Runtime()
    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    library = SimpleNamespace(cuda=SimpleNamespace(Stream=lambda non_blocking: stream))
    monkeypatch.setattr(_ranks, "cuda", lambda: SimpleNamespace(runtime=runtime, cupy=library))

    def gather(_: Any, own: bytes) -> list[bytes]:
        host, process, mailbox, *_ = _ranks._INFO.unpack(own)
        assert process[-8:] == os.getpid().to_bytes(8, "little")
        other = bytes(8) + process[-8:]
        return [own, _ranks._INFO.pack(host, other, mailbox, 0, True, b"other".ljust(64)), own]

    monkeypatch.setattr(_ranks, "gather_bytes", gather)
    exchange = _ranks.Exchange.__new__(_ranks.Exchange)
    exchange._group, exchange.device = SimpleNamespace(rank=0), 0  # type: ignore[assignment]
    exchange._mailbox, exchange._mapped = 0x7000, []
    assert exchange._open(64) == [0x7000, 0x9000, 0x7000]
    assert runtime.opened == [b"other".ljust(64)]


def test_a_mailbox_is_freed_once_nobody_has_it_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """cudaIpcOpenMemHandle: what happens to memory that is freed while another process has it mapped is undefined."""
    mapped: dict[int, set[int]] = {1: {0}, 0: {1}}  # by rank, the ranks that have its mailbox mapped
    freed_early: list[int] = []
    here, meeting = threading.local(), threading.Barrier(2)

    class Runtime:
        CUDARuntimeError = RuntimeError

        def deviceSynchronize(self) -> None:
            pass

        def ipcCloseMemHandle(self, of: int) -> None:
            if here.rank == 1:
                time.sleep(0.1)  # a busy host
            mapped[here.rank].discard(of)

        def free(self, of: int) -> None:
            if any(of - 100 in others for others in mapped.values()):
                freed_early.append(of - 100)

    def gather(_: Any, data: bytes) -> list[bytes]:
        meeting.wait(10)
        return [data, data]

    monkeypatch.setattr(_ranks, "cuda", lambda: SimpleNamespace(runtime=Runtime()))
    monkeypatch.setattr(_ranks, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_ranks, "gather_bytes", gather)

    def close(rank: int) -> None:
        here.rank = rank
        exchange = _ranks.Exchange.__new__(_ranks.Exchange)
        exchange._group, exchange.device = SimpleNamespace(), 0  # type: ignore[assignment]
        exchange._watch, exchange._own_comm = None, False
        exchange._mapped, exchange._mailbox = [1 - rank], 100 + rank
        exchange._close(True)

    threads = [threading.Thread(target=close, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not freed_early and not any(mapped.values())


def test_a_mailbox_has_room_for_wide_layers_of_many_ranks() -> None:
    assert _ranks.features_of(2) == 524_287 and _ranks.features_of(8) == 131_071
    assert all(_ranks.features_of(ranks) >= 2**16 for ranks in (16, 64, 512))


class _NcclCommunicator:
    """A communicator like CuPy's, of two ranks that send the same bytes."""

    def rank_id(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def allGather(self, posted: int, gathered: int, count: int, dtype: int, stream: int) -> None:
        assert (dtype, stream) == (1, 7)  # ncclUint8
        for rank in range(2):
            ctypes.memmove(gathered + rank * count, posted, count)


@pytest.mark.parametrize("backend", [False, True])
def test_a_communicator_of_cupys(backend: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake CuPy on the CPU: a communicator, and the backend of cupyx.distributed that wraps one."""

    class Memory(np.ndarray):
        @property
        def data(self) -> Any:
            return SimpleNamespace(ptr=self.ctypes.data)

        def get(self) -> np.ndarray:
            return np.asarray(self)

    backends = SimpleNamespace(NCCLBackend=type("NCCLBackend", (), {"_comm": _NcclCommunicator()}))
    stream, event = SimpleNamespace(ptr=7), SimpleNamespace(record=lambda stream: None, done=True)
    cuda = SimpleNamespace(get_current_stream=lambda: stream, Event=lambda disable_timing: event)
    cupy = SimpleNamespace(
        asarray=lambda a: a.copy().view(Memory),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Memory),
        cuda=cuda,
    )
    nccl = SimpleNamespace(available=True, NcclCommunicator=_NcclCommunicator)
    for name, module in {"cupy": cupy, "cupy.cuda.nccl": nccl, "cupyx.distributed": backends}.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    comm = backends.NCCLBackend() if backend else _NcclCommunicator()
    with gsbn.group(comm, timeout=3) as group:
        assert (group.rank, group.size) == (1, 2) and isinstance(group._engine.comm, _NcclCommunicator)
        assert gather_bytes(group, b"four") == [b"four"] * 2
        with pytest.raises(ValueError, match="group: expected one of a communicator that reaches the host's memory"):
            gsbn.forward(np.ones((3, 5)), np.ones((4, 5)), training=True, group=group)
