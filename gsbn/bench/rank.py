"""One rank of ``gsbn.bench.ranks``, which starts it as ``python -m gsbn.bench.rank TASK``.

All ranks must take the same decisions, or one would wait for a call that the others never make: what a rank has
measured or met with is gathered before anything depends on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import gsbn

from . import bounds, libraries
from .case import Case
from .clock import balanced_order, median_interval, take_turns
from .measure import PEER_TOLERANCE
from .ranks import NAMES, Task
from .report import Settings
from .trainee import line_of

TIMEOUT = 120.0  # seconds that a rank waits for another: one may compile what the other has in its cache
CAPTURED = 10  # calls of a graph
NOT_CAPTURED = ("pytorch", "pytorch-sync")
Call = Callable[[], tuple[Any, Any]]  # gives y, and the gradient of x or None


class World:
    """This rank among the others: torch.distributed, gsbn's groups over it, and clocks that begin together."""

    torch: Any
    rank: int
    size: int
    on_gpu: bool

    def __init__(self, task: Task) -> None:
        self.torch = torch = libraries.load(["pytorch"])["torch"]
        self.rank, self.size, self.on_gpu = task.rank, task.size, task.device == "cuda"
        self.device: Any = torch.device("cuda", task.rank) if self.on_gpu else torch.device("cpu")
        self._store, self._outlet = (self._meet(task.port) for _ in range(2))
        self._words = 0
        options: dict[str, Any] = {}
        if self.on_gpu:
            import cupy

            cupy.cuda.Device(task.rank).use()
            torch.cuda.set_device(task.rank)
            options["device_id"] = self.device
            self.xp: Any = cupy
            self.side: Any = torch.cuda.Stream()
        else:
            import numpy

            self.xp = numpy
        torch.distributed.init_process_group(
            "nccl" if self.on_gpu else "gloo", store=self._store, rank=task.rank, world_size=task.size,
            timeout=timedelta(seconds=TIMEOUT), **options,
        )  # fmt: skip
        ways = {"gsbn-peer": True, "gsbn-nccl": False} if self.on_gpu else {"gsbn-gloo": False}
        self.groups: dict[str, gsbn.Group] = {
            name: gsbn.group(torch.distributed.group.WORLD, timeout=TIMEOUT, peer_memory=peer)
            for name, peer in ways.items()
            if name in task.candidates
        }

    def _meet(self, port: int) -> Any:
        return self.torch.distributed.TCPStore("127.0.0.1", port, is_master=False)

    def say(self, **word: Any) -> None:
        """To whoever has started the ranks."""
        if self.rank == 0:
            self._outlet.set(f"said/{self._words}", json.dumps(word))
            self._words += 1

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
        """Seconds a call; the first is not timed."""
        self.barrier()
        if not self.on_gpu:
            call()
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begun) / calls
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        self.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3 / calls

    def free(self) -> None:
        """Give back what CuPy or PyTorch keeps and the other may need."""
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

    world: World
    case: Case
    x: Any
    weight: Any
    dy: Any

    def __init__(self, world: World, case: Case, with_gradients: bool, seed: int) -> None:
        self.world, self.case = world, case
        xp, torch = world.xp, world.torch
        self._library = libraries.Torch(xp)
        whole = bounds.make_operands(xp, world.size * case.batch, *case.shape[1:], case.dtype, seed=seed)
        whole = dataclasses.replace(whole, affine=whole.affine | {"bias": xp.zeros_like(whole.affine["bias"])})
        dy, mine = bounds.draw_dy(xp, whole), slice(world.rank * case.batch, (world.rank + 1) * case.batch)
        truth = bounds.expected(xp, whole, case.precision, training=True)
        if with_gradients:
            truth["dx"] = bounds.expected_gradients(xp, whole, dy, case.precision, training=True)["x"]
        for name in truth.keys() & {"y", "dx"}:
            truth[name] = bounds.Expected(truth[name].value[mine].copy(), truth[name].bound[mine].copy())
        self.truth: dict[str, bounds.Expected] = {name: value for name, value in truth.items() if name != "g"}
        # As with mixed precision: matrices in the case's dtype, vectors in float32 at least.
        self._vector = torch.float64 if case.dtype == "float64" else torch.float32
        self.x, self.weight, self.dy = (self._library.take(a).clone() for a in (whole.x[mine], whole.weight, dy[mine]))
        vectors = {"scale": whole.scale, "mean": whole.running_mean, "var": whole.running_var, **whole.affine}
        self._vectors = {name: self._library.take(a).to(self._vector, copy=True) for name, a in vectors.items()}

    def make(self, name: str, is_step: bool) -> tuple[Call, dict[str, Any]]:
        """The candidate, and the running statistics that it updates."""
        if name == "gemm":
            return self._gemm(is_step), {}
        return (self._module if name.startswith("pytorch") else self._gsbn)(name, is_step)

    def judge(self, call: Call, state: dict[str, Any]) -> dict[str, bounds.Judgement]:
        """A first call's results against float64 of the whole batch."""
        y, dx = call()
        got = {"y": y, **{key: a for key, a in state.items() if key in self.truth}} | ({} if dx is None else {"dx": dx})
        return {key: self.truth[key].judge(self._library.give(a), self.world.xp) for key, a in got.items()}

    def _state(self) -> dict[str, Any]:
        count = self.world.torch.zeros((), dtype=self.world.torch.int64, device=self.world.device)
        mean, var = self._vectors["mean"].clone(), self._vectors["var"].clone()
        return {"running_mean": mean, "running_var": var, "num_batches_tracked": count}

    def _gemm(self, is_step: bool) -> Call:
        x, weight, dy = self.x, self.weight, self.dy

        def forward() -> tuple[Any, Any]:
            return x @ weight.T, None

        def step() -> tuple[Any, Any]:
            dy.T @ x
            return x @ weight.T, dy @ weight

        return step if is_step else forward

    def _gsbn(self, name: str, is_step: bool) -> tuple[Call, dict[str, Any]]:
        x, weight, dy, scale, state = self.x, self.weight, self.dy, self._vectors["scale"], self._state()
        options = {"gamma": self._vectors["gamma"], "beta": self._vectors["beta"], "training": True, **state}
        options |= {"precision": self.case.precision, "group": self.world.groups.get(name)}
        all_reduce, one = self.world.torch.distributed.all_reduce, self.world.torch.zeros(1, device=self.world.device)

        def synchronise() -> None:
            if name == "gsbn-reduce":
                all_reduce(one)

        def forward() -> tuple[Any, Any]:
            y = gsbn.forward(x, weight, scale, **options)
            synchronise()
            return y, None

        def step() -> tuple[Any, Any]:
            y, saved = gsbn.forward(x, weight, scale, return_saved=True, **options)
            synchronise()
            gradients = gsbn.backward(dy, saved)
            synchronise()
            return y, gradients.x

        return step if is_step else forward, state

    def _module(self, name: str, is_step: bool) -> tuple[Call, dict[str, Any]]:
        torch, state = self.world.torch, self._state()
        kind = torch.nn.SyncBatchNorm if name == "pytorch-sync" else torch.nn.BatchNorm1d
        norm = kind(self.case.out_features, device=self.world.device, dtype=self._vector)
        norm.load_state_dict({"weight": self._vectors["gamma"], "bias": self._vectors["beta"], **state})
        linear, dy = torch.nn.functional.linear, self.dy
        x, weight, scale = (a.detach() for a in (self.x, self.weight, self._vectors["scale"].to(self.x.dtype)))

        def forward() -> tuple[Any, Any]:
            return norm(linear(x, weight) * scale), None

        def step() -> tuple[Any, Any]:
            with torch.enable_grad():
                y = norm(linear(x, weight) * scale)
                gradients = torch.autograd.grad(y, (x, weight, scale, norm.weight, norm.bias), dy)
            return y.detach(), gradients[0]

        if is_step:
            for leaf in (x, weight, scale):
                leaf.requires_grad_()
        return step if is_step else forward, {key: getattr(norm, key) for key in state}


@dataclass(eq=False)
class Entry:
    """A candidate on one case, and what is known of it so far; after a ``failure`` it is not called any more."""

    case: int
    is_step: bool
    name: str
    call: Call = field(init=False)
    replay: Callable[[], None] | None = None
    calls: int = 1
    once: float = 1.0
    error: float | None = None
    called: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)
    graph_failure: str = ""
    failure: str = ""


class Turn:
    """All candidates on one shape and dtype, in one direction or in both."""

    world: World
    settings: Settings
    total: int
    first: int
    share: int
    title: str
    entries: list[Entry]
    layer: Layer

    def __init__(self, world: World, task: Task, cases: Sequence[tuple[int, Case]]) -> None:
        self.world, self.settings, self.total = world, Settings(**task.settings), len(task.cases)
        self.first, self.share = cases[0][0], len(cases)
        self.title = dataclasses.replace(cases[0][1], direction="forward").title
        self.entries = [Entry(i, case.direction == "step", name) for i, case in cases for name in task.candidates]
        self.say(0, "operands and truth")
        self.layer = Layer(world, cases[0][1], any(entry.is_step for entry in self.entries), self.settings.seed)

    def say(self, done: float, what: str) -> None:
        self.world.say(done=self.first + done * self.share, doing=f"{self.title}: {what}")

    def run(self) -> None:
        for index, entry in enumerate(self.entries):
            self.say(index / len(self.entries) / 2, f"preparing {NAMES[entry.name]}")
            self._check(entry)
            if not entry.failure:
                self._prepare(entry)
        self.layer.truth.clear()
        self.world.free()
        if any(not entry.failure for entry in self.entries):
            take_turns(self.settings, self._round, self._forget, self.say, self.world.now)
        for entry in self.entries:  # a replay raises nothing
            if not entry.failure and (group := self.world.groups.get(entry.name)) is not None:
                _, entry.failure = self._together(group.check)
        self.world.say(results=[self._result(entry) for entry in self.entries])

    def _together(self, step: Callable[[], Any]) -> tuple[list[Any], str]:
        """What a step gives on every rank, and why it failed on one."""
        value, failure = None, ""
        try:
            value = step()
        except Exception as error:  # it must not take the other candidates with it
            failure = line_of(error)
        found = self.world.gathered((value, failure))
        reasons = dict.fromkeys(reason for _, reason in found if reason)
        return [value for value, _ in found], "; ".join(reasons)

    def _check(self, entry: Entry) -> None:
        """Make a candidate, and judge its first call if it shares statistics: gsbn by its bound, PyTorch as a peer."""
        shared, case = entry.name == "pytorch-sync" or entry.name in self.world.groups, self.layer.case

        def check() -> tuple[float | None, str]:
            entry.call, state = self.layer.make(entry.name, entry.is_step)
            if not shared:
                entry.call()
                return None, ""
            judged = self.layer.judge(entry.call, state)
            statistics = b"".join(a.cpu().numpy().tobytes() for a in state.values())
            error = max(judged[key].relative_error for key in ("y", "dx") if key in judged)
            if entry.name in self.world.groups:
                exchange = self.world.groups[entry.name].on_device
                if entry.name == "gsbn-peer" and not exchange.waits:
                    raise RuntimeError("the GPUs do not reach each other's memory")
                if bad := [key for key, judgement in judged.items() if not judgement.passed]:
                    raise ValueError(f"wrong result: {bad[0]} uses {judged[bad[0]].share:.3g} of its bound")
            elif not error <= (limit := PEER_TOLERANCE[case.kind]):
                raise ValueError(f"wrong result: norm-wise error {error:.2g} over {limit:.2g}")
            return judged["y"].relative_error, hashlib.sha256(statistics).hexdigest()

        found, entry.failure = self._together(check)
        if entry.failure or not shared:
            return
        entry.error = max(error for error, _ in found)
        if entry.name in self.world.groups and len({digest for _, digest in found}) > 1:
            entry.failure = "wrong result: the ranks have different running statistics"

    def _prepare(self, entry: Entry) -> None:
        world = self.world
        entry.once = max(world.gathered(min(world.trial(entry.call, 1) for _ in range(3))))
        trial = self.settings.trial_ms * 1e-3
        entry.calls = self.settings.calls or max(5, min(50, round(trial / entry.once)))
        if world.on_gpu and self.settings.graph and entry.name not in NOT_CAPTURED:
            self._capture(entry)

    def _capture(self, entry: Entry) -> None:
        cuda, side = self.world.torch.cuda, self.world.side
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(3):
                entry.call()
        cuda.current_stream().wait_stream(side)
        self.world.synchronize()
        self.world.barrier()
        graph = cuda.CUDAGraph()

        def capture() -> None:
            try:
                with cuda.graph(graph, stream=side):
                    for _ in range(CAPTURED):
                        entry.call()
            except Exception:
                with contextlib.suppress(Exception):
                    cuda.synchronize()
                raise

        _, entry.graph_failure = self._together(capture)
        if not entry.graph_failure:
            entry.replay = graph.replay

    def _forget(self) -> None:
        for entry in self.entries:
            entry.called.clear()
            entry.replayed.clear()

    def _round(self, turn: int) -> float:
        """A trial of every candidate; the sum of their times on rank 0, each divided by that candidate's first time."""
        live = [entry for entry in self.entries if not entry.failure]
        for index in balanced_order(len(live), turn):
            entry = live[index]
            entry.called.append(self.world.trial(entry.call, entry.calls))
            if entry.replay is not None:
                entry.replayed.append(self.world.trial(entry.replay, 1) / CAPTURED)
        return float(self.world.gathered(sum(entry.called[-1] / entry.once for entry in live))[0])

    def _result(self, entry: Entry) -> dict[str, Any]:
        """As ``ranks.RanksResult`` has it, of all ranks."""
        times = ([], []) if entry.failure else (entry.called, entry.replayed)
        mine = [asdict(median_interval(of_way)) if of_way else None for of_way in times]
        called, graph = ([rank for rank in ranks if rank] for ranks in zip(*self.world.gathered(mine), strict=True))
        return {
            "case": entry.case, "candidate": entry.name, "calls": entry.calls, "called": called, "graph": graph,
            "error": entry.error, "graph_failure": entry.graph_failure, "failure": entry.failure,
        }  # fmt: skip


def main(text: str) -> None:
    task = Task(*json.loads(text))
    world = World(task)
    cases = [Case(**fields) for fields in task.cases]
    with libraries.no_grad():
        for plain, alike in itertools.groupby(
            enumerate(cases), key=lambda item: dataclasses.replace(item[1], direction="forward")
        ):
            with libraries.float32_precision(plain.precision):
                Turn(world, task, list(alike)).run()
            world.free()
    world.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # an orderly end would wait for the other ranks
