"""One rank of ``gsbn.bench.ranks``, which starts ``work`` in a process for each.

All ranks must decide alike, or one would wait for a call that the others never make. So times and errors of all ranks
are gathered before anything depends on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import gsbn

from .._ranks.exchange import exchange_of
from .._timing import between_events, torch_graph, wall_clock, warm_up
from . import bounds, libraries, peers
from .candidate import Candidate
from .case import Case
from .report import Settings
from .turns import CaseRun, Entry, line_of

TIMEOUT = 120.0  # seconds that a rank waits for another: one may compile what the other has in its cache
CAPTURED = 10  # calls of a graph
NAMES = {
    "gemm": "bare GEMM",
    "pytorch": "PyTorch eager, local",
    "pytorch-sync": "PyTorch eager, SyncBatchNorm",
    "gsbn": "gsbn, local",
    "gsbn-reduce": "gsbn, local, and an all_reduce",
    "gsbn-peer": "gsbn, group",
    "gsbn-nccl": "gsbn, group over NCCL",
    "gsbn-gloo": "gsbn, group over gloo",
}
NOT_CAPTURED = ("pytorch", "pytorch-sync")


class Task(NamedTuple):
    """The work of the ranks."""

    size: int
    store: str  # the file through which they meet
    device: str
    candidates: Sequence[str]
    cases: Sequence[Case]
    settings: Settings


class World:
    """This rank among the others: torch.distributed, gsbn's groups over it, and clocks that begin together."""

    def __init__(self, rank: int, task: Task, words: Any) -> None:
        torch: Any = libraries.load(["pytorch"])["torch"]
        self.torch: Any = torch
        self.rank: int = rank
        self.size: int = task.size
        self.on_gpu: bool = task.device == "cuda"
        self.device: Any = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        self._queue = words
        options: dict[str, Any] = {}
        if self.on_gpu:
            import cupy

            cupy.cuda.Device(rank).use()
            torch.cuda.set_device(rank)
            options["device_id"] = self.device
            self.xp: Any = cupy
            self.side: Any = torch.cuda.Stream()
        else:
            import numpy

            self.xp = numpy
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // task.size))  # the ranks share the cores
        torch.distributed.init_process_group(
            "nccl" if self.on_gpu else "gloo", f"file://{task.store}", timedelta(seconds=TIMEOUT), task.size, rank,
            **options,
        )  # fmt: skip
        self._one = torch.zeros(1, device=self.device)
        ways = {"gsbn-peer": True, "gsbn-nccl": False} if self.on_gpu else {"gsbn-gloo": False}
        self.groups: dict[str, gsbn.Group] = {
            name: gsbn.group(torch.distributed.group.WORLD, timeout=TIMEOUT, peer_memory=peer)
            for name, peer in ways.items()
            if name in task.candidates
        }

    def say(self, word: Any) -> None:
        """Send this to the process that started the ranks, if this is rank 0."""
        if self.rank == 0:
            self._queue.put(word)

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value."""
        found = [None] * self.size
        self.torch.distributed.all_gather_object(found, value)
        return found

    def now(self) -> float:
        """Rank 0's time, so that all stop together."""
        return float(self.gathered(time.perf_counter())[0])

    def barrier(self) -> None:
        self.torch.distributed.barrier()
        self.synchronize()

    def synchronize(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def trial(self, call: Callable[[], Any], calls: int) -> float:
        """Seconds a call on the slowest rank; the first call is not timed."""
        self.barrier()
        call()
        on_gpu, synchronize = self.on_gpu, self.synchronize
        seconds = between_events(self.torch, call, calls) if on_gpu else wall_clock(call, calls, synchronize)
        return float(max(self.gathered(seconds)))

    def capture(self, call: Callable[[], Any]) -> Callable[[], None]:
        """A replay of a CUDA graph of several calls."""
        try:
            return torch_graph(self.torch, call, CAPTURED, self.side)
        except Exception:
            with contextlib.suppress(Exception):
                self.synchronize()
            raise

    def all_reduce(self) -> None:
        """All-reduce one float, only for the time that this takes."""
        self.torch.distributed.all_reduce(self._one)

    def free(self) -> None:
        """Free the memory that CuPy or PyTorch caches, which the other may need."""
        gc.collect()
        if self.on_gpu:
            self.synchronize()
            self.xp.get_default_memory_pool().free_all_blocks()
            self.torch.cuda.empty_cache()

    def close(self) -> None:
        for group in self.groups.values():
            group.close()
        self.barrier()
        self.torch.distributed.destroy_process_group()


class Layer:
    """A layer and this rank's rows, with the truth of all ranks' rows; and how each candidate computes it."""

    def __init__(self, world: World, case: Case, with_gradients: bool, seed: int) -> None:
        self.world: World = world
        xp = world.xp
        whole = bounds.make_operands(xp, world.size * case.batch, *case.shape[1:], case.dtype, seed=seed)
        whole = dataclasses.replace(whole, affine=whole.affine | {"bias": xp.zeros_like(whole.affine["bias"])})
        dy, mine = bounds.draw_dy(xp, whole), slice(world.rank * case.batch, (world.rank + 1) * case.batch)
        truth = bounds.expected(xp, whole, case.precision, training=True)
        if with_gradients:
            truth["x"] = bounds.expected_gradients(xp, whole, dy, case.precision, training=True)["x"]
        for name in truth.keys() & {"y", "x"}:
            truth[name] = bounds.Expected(truth[name].value[mine].copy(), truth[name].bound[mine].copy())
        del truth["g"]
        self.truth: dict[str, bounds.Expected] = truth
        # As with mixed precision: matrices in the case's dtype, vectors in float32 at least; and no bias.
        vector = xp.float64 if case.dtype == "float64" else xp.float32
        scale, mean, var, gamma, beta = (
            a.astype(vector)
            for a in (whole.scale, whole.running_mean, whole.running_var, whole.affine["gamma"], whole.affine["beta"])
        )
        affine = {"gamma": gamma, "beta": beta}
        self.operands: bounds.Operands = bounds.Operands(whole.x[mine].copy(), whole.weight, scale, affine, mean, var)
        self.dy: Any = dy[mine].copy()

    def make(self, name: str, case: Case) -> Candidate:
        """The candidate of this name."""
        world, operands = self.world, self.operands
        if name == "gemm":
            return self._gemm(case)
        if name.startswith("pytorch"):
            norm = "SyncBatchNorm" if name == "pytorch-sync" else "BatchNorm1d"
            return peers.module(name, case, operands, world.xp, self.dy, norm)
        then = world.all_reduce if name == "gsbn-reduce" else None
        return peers.own("gsbn-torch", case, operands, world.xp, self.dy, world.groups.get(name), then)

    def judge(self, results: dict[str, Any]) -> dict[str, bounds.Judgement]:
        """Results by name against float64 of the whole batch."""
        return bounds.judge(results, self.truth, self.world.xp)

    def _gemm(self, case: Case) -> Candidate:
        library = libraries.Torch(self.world.xp)
        x, weight, dy = map(library.take, (self.operands.x, self.operands.weight, self.dy))

        def forward() -> Any:
            return x @ weight.T

        def step() -> Any:
            return x @ weight.T, dy @ weight, dy.T @ x

        return Candidate("gemm", "torch", step if case.direction == "step" else forward, dict)


class RankRun(CaseRun):
    """All candidates on one shape and dtype, in one direction or in both."""

    def __init__(self, world: World, task: Task, cases: list[Case]) -> None:
        self.world: World = world
        self.cases: list[Case] = cases
        self.done: int = task.cases.index(cases[0])
        self.plain: Case = dataclasses.replace(cases[0], direction="forward")
        entries = [Entry(name, case) for case in cases for name in task.candidates]
        super().__init__(entries, NAMES, self.plain.precision, task.settings)
        self.say(0, "operands and truth")
        with_gradients = any(case.direction == "step" for case in cases)
        self.layer: Layer = Layer(world, self.plain, with_gradients, self.settings.seed)

    def say(self, done: float, what: str) -> None:
        """Report progress."""
        self.world.say((self.done + done * len(self.cases), f"{self.plain.title}: {what}"))

    def now(self) -> float:
        return self.world.now()

    def attempt(self, entry: Entry, step: Callable[[Entry], None]) -> None:
        """Run a step. A check that fails on one rank fails on all, and the other entries go on. In other steps the
        ranks wait for each other, so an error ends the run."""
        if step == self.check:
            entry.failure = self._together(lambda: step(entry))
        else:
            step(entry)

    def _together(self, step: Callable[[], Any]) -> str:
        """Run a step; returns why it failed on any rank, or an empty string."""
        failure = ""
        try:
            step()
        except Exception as error:
            failure = line_of(error)
        return "; ".join(dict.fromkeys(filter(None, self.world.gathered(failure))))

    def check(self, entry: Entry) -> None:
        """Judge the first call if it shares statistics: gsbn by its bound, PyTorch as a peer."""
        candidate, group = self.layer.make(entry.name, entry.case), self.world.groups.get(entry.name)
        entry.candidate = candidate
        if group is None and entry.name != "pytorch-sync":
            candidate.call()
            return
        results = candidate.outputs()
        judged = self.layer.judge(results)
        if entry.name == "gsbn-peer" and group is not None and not exchange_of(group, self.world.rank, False).waits:
            raise RuntimeError("the GPUs do not reach each other's memory")
        bounds.demand(judged, self.plain.kind, held=group is not None)
        shared = () if group is None else ("running_mean", "running_var")  # PyTorch's step gives none
        running = [libraries.on_host(results[name]).tobytes() for name in shared]
        entry.facts.update(error=judged["y"].relative_error, statistics=b"".join(running))

    def checked(self) -> None:
        """Compare what the ranks have found, and free what the checks needed."""
        for entry in self.live():
            if "error" in entry.facts:
                mine = (entry.facts["error"], hashlib.sha256(entry.facts.pop("statistics")).hexdigest())
                errors, statistics = zip(*self.world.gathered(mine), strict=True)
                entry.facts["error"] = max(errors)
                if len(set(statistics)) > 1:
                    entry.failure = "wrong result: the ranks have different running statistics"
        self.layer.truth.clear()
        self.world.free()

    def prepare(self, entry: Entry) -> None:
        world, call = self.world, entry.candidate.call
        entry.once = min(world.trial(call, 1) for _ in range(3))
        calls = self.settings.calls or max(5, min(50, round(self.settings.trial_ms * 1e-3 / entry.once)))
        entry.facts["calls"] = calls
        entry.trials["called"] = lambda: world.trial(call, calls)
        if world.on_gpu and entry.name not in NOT_CAPTURED:
            warm_up(world.torch, call, world.side)
            world.synchronize()
            world.barrier()
            replays: list[Callable[[], None]] = []
            entry.facts["graph_failure"] = self._together(lambda: replays.append(world.capture(call)))
            if not entry.facts["graph_failure"]:
                entry.trials["graph"] = lambda: world.trial(replays[0], 1) / CAPTURED

    def finish(self) -> None:
        """Check the groups for errors of replays, which raise none; then send the results."""
        for entry in self.live():
            if (group := self.world.groups.get(entry.name)) is not None:
                entry.failure = self._together(group.check)
        self.world.say(self.results())


def work(rank: int, task: Task, words: Any) -> None:
    """Run the task; rank 0 puts its progress and results into the queue ``words``."""
    world = World(rank, task, words)
    with libraries.no_grad():
        for _, alike in itertools.groupby(task.cases, key=lambda case: dataclasses.replace(case, direction="forward")):
            turn = RankRun(world, task, list(alike))
            turn.run(turn.say)
            turn.finish()
            del turn
            world.free()
    world.close()
