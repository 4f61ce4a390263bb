"""The contract of groups: functions that every rank runs, and the program of a rank that runs them.

    torchrun --nproc-per-node 2 -m tests.groups.contract gloo --kind torch-cpu    # from the root of the repository
    mpiexec -n 3 python -m tests.groups.contract mpi --names every_dtype
    torchrun --nproc-per-node 2 -m tests.groups.contract nccl --kind cupy --no-peer-memory    # a GPU each

Every rank draws the whole batch from the same seed and computes its rows of it. What it finds is held against the truth
of the whole batch, within the bounds of tolerance.py and gradients.py: those know of no order in which sums are made.
A rank that finds a fault ends at once, and thereby all others.

**A rank's part of a gradient.** D and S of its rows are those of a dy that is zero in all other rows: so are dgamma,
dscale and dbeta, and their bounds. dx is the whole batch's, row by row. dweight is dgᵀ x with the whole batch's dg and
an x that is zero in all other rows: what a second half of x, beside a weight of zeros, would get. The errors in the
bound of the whole batch's are sums over rows, a part's are no larger; its rounding to the weight's dtype adds ū |part|.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import itertools
import json
import os
import pickle
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import reference
from tests.support.families import FAMILIES
from tests.support.gradients import NAMES, before_relu, draw_dy, gradient_bounds, step, truth_of
from tests.support.harness import (
    CPU_KINDS,
    DTYPES,
    GPU_KINDS,
    STATISTICS,
    Kind,
    assert_same_bits,
    forward,
    kind_of,
    without_out,
)
from tests.support.strategies import ACTIVATIONS, SCALES, Case
from tests.support.tolerance import assert_within, bounds, roundoff

SECONDS = 60.0  # that a rank waits for the others
LIMIT = 240.0  # seconds that the program may take: then it says where it stands, and ends
SHORT = 2.0  # the timeout where one is expected
SLACK = 5.0  # and how much later its error may be seen, on a machine that does other things, too
# How the rows are dealt out: weights of the ranks.
SPLITS: dict[str, Callable[[int], list[int]]] = {
    "even": lambda size: [1] * size,
    "uneven": lambda size: [1 << rank for rank in range(size)],
    "none on the first": lambda size: [0] + [1] * (size - 1),
    "none on the last": lambda size: [1] * (size - 1) + [0],
}
CASE = Case((9, 5, 4), "float32", training=True)
LARGE = Case((1500, 37, 520), "float32", training=True, offset=1.0)  # on some rank rows in several blocks


@dataclass(frozen=True)
class Ranks:
    """Where a function of the contract runs: this rank's communicator, group and kind of arrays."""

    engine: str
    comm: Any
    kind: Kind
    group: gsbn.Group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def deal(self, rows: int, split: str) -> list[slice]:
        """Every rank's rows."""
        weights = SPLITS[split](self.size)
        ends = [rows * sum(weights[: rank + 1]) // sum(weights) for rank in range(self.size)]
        return list(itertools.starmap(slice, itertools.pairwise([0, *ends])))

    def gathered(self, a: np.ndarray) -> list[np.ndarray]:
        """Every rank's array of this shape and dtype."""
        return [np.frombuffer(data, a.dtype).reshape(a.shape) for data in self.group.gather_bytes(a.tobytes())]

    def natives(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: self.kind.put(a) for name, a in arrays.items()}


TOGETHER: dict[str, Callable[[Ranks], None]] = {}  # the group, or at least the communicator, can be used afterwards
APART: dict[str, Callable[[Ranks], None]] = {}  # it cannot: each needs a program of its own
ON_GPUS: dict[str, Callable[[Ranks], None]] = {}  # what only GPUs have, each with a group of its own


def together(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    TOGETHER[function.__name__] = function
    return function


def apart(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    APART[function.__name__] = function
    return function


def on_gpus(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    ON_GPUS[function.__name__] = function
    return function


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as found:
        yield
    assert all(word in str(found.value) for word in words), f"{words} are not in: {found.value}"


# ---- right results


def assert_whole_batch(at: Ranks, case: Case, parts: list[slice]) -> None:
    """A forward and a step of every rank's rows against the truth of all.

    The same calls give the same bits, and the same running statistics on all ranks.
    """
    arrays, (B, _, O) = case.arrays(), case.shape
    rows, dy = parts[at.rank], draw_dy(arrays)
    mine = arrays | {name: arrays[name][rows] for name in ("x", "out") if name in arrays}
    options, layouts = {**case.options, "group": at.group}, dict(case.layouts)
    got, again = (forward(at.kind, mine, layouts, **options) for _ in range(2))
    for one, other in zip(got, again, strict=True):
        if one is not None:
            assert_same_bits(one, other)
    (y, gradients), (y_again, gradients_again) = (step(at.kind, mine, dy[rows], layouts, **options) for _ in range(2))
    assert_same_bits(y, y_again)
    for name, gradient in gradients.items():
        if gradient is not None:
            assert_same_bits(gradient, gradients_again[name])

    whole = without_out(arrays)
    wide = np.longdouble if case.dtype == "float64" else np.float64
    truth = reference.forward(**whole, **case.options, dtype=wide)
    bound = bounds(whole, truth, **case.options, parked=DTYPES[case.dtype].itemsize == 2)
    for found in (got.y, y) if len(y) else ():
        assert_within(found, truth.y[rows], bound.y[rows], "y")
    if got.running_mean is not None:
        assert_within(got.running_mean, truth.running_mean, bound.running_mean, "running_mean")
        assert_within(got.running_var, truth.running_var, bound.running_var, "running_var")
    assert got.num_batches_tracked is None or got.num_batches_tracked == truth.num_batches_tracked
    for name in STATISTICS:
        found = getattr(got, name)
        for other in () if found is None else at.gathered(found):
            assert_same_bits(found, other)

    if case.activation is not None:  # where all ranks' y are above zero
        whole_y = np.zeros((B, O), y.dtype)
        whole_y[rows] = y
        dy = before_relu(dy, np.concatenate([a[of] for a, of in zip(at.gathered(whole_y), parts, strict=True)]))
    assert_gradients(at, case, whole, dy, gradients, rows)


def assert_gradients(
    at: Ranks, case: Case, arrays: dict[str, np.ndarray], dy: np.ndarray, got: dict[str, Any], rows: slice
) -> None:
    """The bounds at the head of this module."""
    of_rows = np.zeros_like(dy)
    of_rows[rows] = dy[rows]

    def truth_and_bounds(dy: np.ndarray) -> tuple[gsbn.Gradients, dict[str, np.ndarray]]:
        truth = truth_of(arrays, dy, training=True, eps=case.eps)
        form = {"activation": case.activation, "parked": at.kind.name in GPU_KINDS}  # as forward_sm90 parks
        return truth, gradient_bounds(arrays, dy, truth, training=True, eps=case.eps, **form)

    part, part_bounds = truth_and_bounds(of_rows)
    for name in NAMES[2:]:
        if got[name] is not None:
            assert_within(got[name], np.asarray(getattr(part, name)), part_bounds[name], f"d{name}")
    whole, whole_bounds = truth_and_bounds(dy)
    if len(got["x"]):
        assert_within(got["x"], whole.x[rows], whole_bounds["x"][rows], "dx")
    x_of_rows = np.zeros_like(arrays["x"])
    x_of_rows[rows] = arrays["x"][rows]
    more = {"x": [arrays["x"], x_of_rows], "weight": [arrays["weight"], np.zeros_like(arrays["weight"])]}
    wider = arrays | {name: np.hstack(halves) for name, halves in more.items()}
    dw = truth_of(wider, dy, training=True, eps=case.eps).weight[:, case.shape[1] :]
    assert_within(got["weight"], dw, whole_bounds["weight"] + roundoff(got["weight"].dtype) * np.abs(dw), "dweight")


@together
def every_dtype(at: Ranks) -> None:
    for dtype in DTYPES:
        for split in SPLITS:
            assert_whole_batch(at, replace(CASE, shape=(70, 37, 20), dtype=dtype), at.deal(70, split))


@together
def several_blocks(at: Ranks) -> None:
    for dtype in ("float32", "float16"):
        assert_whole_batch(at, replace(LARGE, dtype=dtype), at.deal(LARGE.shape[0], "uneven"))


@together
def many_short_rows(at: Ranks) -> None:
    """On a GPU that makes g twice, and on the others of which some have too few rows for it."""
    for dtype in ("float32", "bfloat16"):
        for split in ("uneven", "none on the last"):
            assert_whole_batch(at, replace(LARGE, shape=(20000, 24, 40), dtype=dtype), at.deal(20000, split))


@together
def every_argument(at: Ranks) -> None:
    parts = at.deal(9, "uneven")
    for given in ((), ("running",), ("bias", "beta"), CASE.given):
        for scale in SCALES:
            for activation in ACTIVATIONS:
                assert_whole_batch(at, replace(CASE, given=given, scale=scale, activation=activation), parts)
    for split in SPLITS:
        average = replace(CASE, momentum=None, eps=1e-3, activation="relu")
        assert_whole_batch(at, average, at.deal(9, split))
    strided = tuple((name, "strided") for name in ("x", "weight", "out", "running_mean"))
    assert_whole_batch(at, replace(CASE, dtype="bfloat16", narrow=("gamma", "running"), layouts=strided), parts)


@together
def a_mean_far_from_zero(at: Ranks) -> None:
    """E[g²] - E[g]² would be noise; and each rank's own mean is another."""
    for offset in (1e4, -1e4):
        assert_whole_batch(at, replace(CASE, shape=(70, 37, 20), offset=offset), at.deal(70, "uneven"))


@together
def every_family(at: Ranks) -> None:
    """The first row, the one that is unlike the others, lies on one rank; what is in tiles, on all."""
    for family in FAMILIES:
        for dtype in ("float32", "bfloat16"):
            assert_whole_batch(
                at, replace(CASE, shape=(300, 40, 24), dtype=dtype, family=family), at.deal(300, "uneven")
            )


@together
def one_row_a_rank(at: Ranks) -> None:
    for dtype in DTYPES:
        case = replace(CASE, shape=(at.size, 5, 4), dtype=dtype)
        assert_whole_batch(at, case, at.deal(at.size, "even"))


@together
def one_row_in_all(at: Ranks) -> None:
    """An error on all ranks that writes no statistics; the group goes on."""
    arrays = replace(CASE, shape=(1, 5, 4)).arrays()
    rows = at.deal(1, "none on the first")[at.rank]
    native = at.natives(without_out(arrays) | {"x": arrays["x"][rows]})
    with raises(ValueError, "Expected more than 1 value per channel"):
        gsbn.forward(**native, training=True, group=at.group)
    for name in STATISTICS:
        assert_same_bits(at.kind.get(native[name]), arrays[name])
    assert_whole_batch(at, CASE, at.deal(9, "even"))


@together
def no_row_at_all(at: Ranks) -> None:
    """Nothing is computed and nothing is written; gradients of parameters are zero."""
    arrays = without_out(replace(CASE, shape=(0, 5, 4)).arrays())
    native = at.natives(arrays)
    y, saved = gsbn.forward(**native, training=True, group=at.group, return_saved=True)
    assert tuple(y.shape) == (0, 4) and y.dtype == native["x"].dtype
    for name in STATISTICS:
        assert_same_bits(at.kind.get(native[name]), arrays[name])
    found = gsbn.backward(y, saved)
    assert tuple(found.x.shape) == (0, 5)
    for name in NAMES[1:]:
        np.testing.assert_array_equal(at.kind.get(getattr(found, name)), np.zeros_like(arrays[name]))


@together
def backward_of_some(at: Ranks) -> None:
    """Twice from one saved, and each rank needs other gradients: the same bits."""
    arrays, rows = CASE.arrays(), at.deal(9, "uneven")[at.rank]
    native = at.natives(without_out(arrays) | {"x": arrays["x"][rows]})
    _, saved = gsbn.forward(**native, training=True, group=at.group, return_saved=True)
    assert saved.group is at.group
    dy = at.kind.put(draw_dy(arrays)[rows])
    all_of_them = gsbn.backward(dy, saved)
    needs = (("x", "scale"), ("weight",), ())[at.rank % 3]
    some = gsbn.backward(dy, saved, needs=needs)
    for name in NAMES:
        assert (getattr(some, name) is None) == (name not in needs)
        if name in needs:
            assert_same_bits(at.kind.get(getattr(some, name)), at.kind.get(getattr(all_of_them, name)))


@together
def many_calls(at: Ranks) -> None:
    """Of random sizes, dtypes and options, dealt out at random; the same on all ranks, for they draw alike."""
    draw = random.Random(0)
    for _ in range(100):
        B = draw.choice([2, 3, draw.randint(4, 40), draw.randint(4, 90)])
        ends = sorted([0, B, *(draw.randint(0, B) for _ in range(at.size - 1))])
        case = Case(
            (B, draw.randint(1, 20), draw.randint(1, 40)),
            draw.choice(list(DTYPES)),
            training=True,
            seed=draw.randint(0, 99),
            offset=draw.choice([0.0, 1.0, -10.0]),
            momentum=draw.choice([0.1, 0.0, 1.0, None]),
            eps=draw.choice([1e-5, 1e-3]),
            scale=draw.choice(list(SCALES)),
            activation=draw.choice(ACTIVATIONS),
        )
        assert_whole_batch(at, case, list(itertools.starmap(slice, itertools.pairwise(ends))))


# ---- calls that do not fit together


def call(at: Ranks, group: gsbn.Group | None = None, **changes: Any) -> Any:
    """A forward of three rows a rank."""
    arrays = replace(CASE, shape=(3, 5, changes.pop("features", 4)), dtype=changes.pop("dtype", "float32")).arrays()
    native = at.natives({name: arrays[name] for name in ("x", "weight", "running_mean", "running_var")})
    return gsbn.forward(**native, **{"training": True, "group": group or at.group, **changes})


def assert_out_of_use(at: Ranks, group: gsbn.Group, *words: str) -> None:
    """Every further call is an error, at once; the communicator serves another group."""
    start = time.monotonic()
    with raises(RuntimeError, "group: ", "cannot be used any more", *words):
        call(at, group)
    assert time.monotonic() - start < SHORT and all(word in repr(group) for word in words)
    with gsbn.group(at.comm, timeout=SECONDS) as another:
        call(at, another)


@together
def another_number_of_features(at: Ranks) -> None:
    with raises(RuntimeError, "forward of 4 features, float32", "forward of 7 features, float32"):
        call(at, features=7 if at.rank == 1 else 4)
    assert_out_of_use(at, at.group, "7 features")


@together
def another_dtype(at: Ranks) -> None:
    with raises(RuntimeError, "forward of 4 features, float32", "forward of 4 features, float16"):
        call(at, dtype="float16" if at.rank == 0 else "float32")
    assert_out_of_use(at, at.group, "float16")


@together
def another_option(at: Ranks) -> None:
    first, second = ("eps 0.5, ", "eps 1e-05, ") if at.rank == 0 else ("eps 1e-05, ", "eps 0.5, ")
    with raises(RuntimeError, first, second):
        call(at, eps=0.5 if at.rank == 0 else 1e-5)
    assert_out_of_use(at, at.group, "eps 0.5")


@together
def another_layer(at: Ranks) -> None:
    """Of as many features, in another order on one rank."""
    x, weight = np.ones((3, 6), np.float32), np.ones((4, 6), np.float32)
    with raises(RuntimeError, "; 5 input features, ", "; 6 input features, "):
        if at.rank == 0:
            gsbn.forward(**at.natives({"x": x, "weight": weight}), training=True, group=at.group)
        else:
            call(at)
    assert_out_of_use(at, at.group, "6 input features")


@together
def another_count_of_batches(at: Ranks) -> None:
    """On the CPU, where it is read."""
    count = at.natives({"num_batches_tracked": np.array(7 + at.rank)})
    with raises(RuntimeError, "after 7 batches", "after 8 batches"):
        call(at, momentum=None, **count)
    assert_out_of_use(at, at.group, "batches")


@together
def another_order(at: Ranks) -> None:
    y, saved = call(at, return_saved=True)
    with raises(RuntimeError, "forward of 4 features", "backward of 4 features"):
        call(at) if at.rank == 0 else gsbn.backward(y, saved)
    assert_out_of_use(at, at.group, "backward")


@together
def another_number_of_calls(at: Ranks) -> None:
    """A rank that has left out a call is one behind when the next comes; MPI's and gloo's own order is not broken."""
    at.group._calls += at.rank == 1  # as if another engine had lost one
    with raises(RuntimeError, "call 1 of", "call 2 of"):
        call(at)
    assert_out_of_use(at, at.group, "call 2")


@together
def another_group(at: Ranks) -> None:
    """Of the same communicator, at the same call: it is told from this one where one would pass for the other."""
    if at.engine == "mpi":
        return  # each has a communicator of its own: they do not meet, which `comes_late` has
    with gsbn.group(at.comm, timeout=SECONDS) as other, raises(RuntimeError, "call 1 of group"):
        call(at, other if at.rank == 1 else at.group)
    assert_out_of_use(at, other if at.rank == 1 else at.group, "call 1 of group")


@together
def a_group_is_made_elsewhere(at: Ranks) -> None:
    if at.engine == "mpi":
        return  # as above
    with raises(RuntimeError, "gsbn.group", "call 1 of group"):
        if at.rank == 0:
            gsbn.group(at.comm, timeout=SECONDS)
        else:
            call(at)
    with gsbn.group(at.comm, timeout=SECONDS) as another:
        call(at, another)


# ---- arguments


@together
def closed(at: Ranks) -> None:
    at.group.close()
    at.group.close()
    assert_out_of_use(at, at.group, "it is closed")
    with gsbn.group(at.comm, timeout=SECONDS) as group:
        _, saved = call(at, group, return_saved=True)
    with raises(RuntimeError, "it is closed"):
        gsbn.backward(saved.deviations, saved)


@together
def groups_are_freed(at: Ranks) -> None:
    """MPICH has 2048 communicators, and a copy of one is one more."""
    for _ in range(2100 if at.engine == "mpi" else 20):
        gsbn.group(at.comm, timeout=SECONDS).close()


@together
def pickled_and_copied(at: Ranks) -> None:
    _, saved = call(at, return_saved=True)
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with raises(TypeError, "group: expected to stay in its process"):
            make(at.group)
    with raises(TypeError, "group: expected to stay in its process"):
        pickle.dumps(saved)
    assert copy.copy(saved).group is at.group


@together
def wrong_arguments(at: Ranks) -> None:
    """Errors before anything is sent: the group and the communicator stay as they are."""
    for wrong in (None, 3, "gloo", object(), at.group):
        with raises(TypeError, "comm: expected a torch.distributed ProcessGroup"):
            gsbn.group(wrong)
    for seconds in (0, -1.0, float("nan"), float("inf"), "3", None, True):
        with raises(TypeError if isinstance(seconds, (str, bool)) or seconds is None else ValueError, "timeout: "):
            gsbn.group(at.comm, timeout=seconds)
    with raises(TypeError, "peer_memory: expected a bool, got 'no'"):
        gsbn.group(at.comm, peer_memory="no")
    with raises(ValueError, "group: expected None in inference"):
        call(at, training=False)
    with raises(TypeError, "group: expected what gsbn.group(comm) returned"):
        call(at, at.comm)
    alone = of_rank_0(at)
    if at.rank == 0:
        gsbn.group(alone, timeout=SECONDS).close()
    else:
        with raises(ValueError, "comm: expected a", "that this process is a member of"):
            gsbn.group(alone)
    call(at)


def of_rank_0(at: Ranks) -> Any:
    """What the user has in hand for a communicator of rank 0 alone."""
    if at.engine == "mpi":
        from mpi4py import MPI

        return at.comm.Split(MPI.UNDEFINED if at.rank else 0)
    import torch.distributed as dist

    return dist.new_group([0])


@together
def beside_the_users_messages(at: Ranks) -> None:
    """A collective of the user's that is under way on the same communicator of MPI's, and ends after the call."""
    if at.engine != "mpi":
        return  # a ProcessGroup has no copy: its collectives come in one order
    before = at.comm.Ibarrier() if at.rank == 0 else None
    call(at)
    (before or at.comm.Ibarrier()).Wait()


# ---- ranks that do not come


def assert_given_up(at: Ranks, start: float, act: Callable[[], Any]) -> None:
    """An error, and not later than it may be."""
    with raises(RuntimeError, f"group: rank {at.rank} of {at.size}, waiting for the others ("):
        act()
    waited = time.monotonic() - start
    assert waited < SHORT + SLACK, f"an error after {waited} s of {SHORT}"


@apart
def comes_late(at: Ranks) -> None:
    """The others have given up by then, and so must it; and their memory is left alone, to which it writes late."""
    group = gsbn.group(at.comm, timeout=SHORT)
    call(at, group)
    if at.rank == 0:
        time.sleep(1.5 * SHORT)
    assert_given_up(at, time.monotonic(), lambda: call(at, group))
    with raises(RuntimeError, "cannot be used any more"):
        call(at, group)
    group.close()
    if at.rank:
        time.sleep(SHORT)  # its messages arrive meanwhile


@apart
def ends_before_the_call(at: Ranks) -> None:
    group = gsbn.group(at.comm, timeout=SHORT)
    call(at, group)
    if at.rank < at.size - 1:
        assert_given_up(at, time.monotonic(), lambda: call(at, group))


@apart
def makes_no_group(at: Ranks) -> None:
    """gsbn.group itself does not wait longer; not for a time either that is less than engines can count."""
    start = time.monotonic()
    if at.rank == 0:
        with raises(RuntimeError, "waiting for the others (0.0001 s)"):
            gsbn.group(at.comm, timeout=1e-4)
        assert time.monotonic() - start < SLACK
        time.sleep(SHORT)
    else:
        time.sleep(SHORT)  # and then there is nobody
        assert_given_up(at, time.monotonic(), lambda: gsbn.group(at.comm, timeout=SHORT))


# ---- on GPUs


@on_gpus
def one_launch(at: Ranks) -> None:
    """Shapes of forward_sm90 and of the backward's forms, where the GPU is a Hopper; several tiles and one."""
    for dtype in DTYPES:
        for rows, split in ((600, "even"), (600, "uneven"), (40, "even"), (3000, "uneven"), (300, "none on the first")):
            shape = (rows, 64, 136) if rows > 1000 else (rows, 160, 264)
            case = replace(CASE, shape=shape, dtype=dtype, scale="vector", offset=1.0)
            assert_whole_batch(at, replace(case, activation="relu" if rows == 600 else None), at.deal(rows, split))


def make_step(group: gsbn.Group, x: Any, weight: Any, dy: Any) -> tuple[Callable[[], Any], list[Any]]:
    """A step on tensors of a GPU, and the running statistics that it moves."""
    import torch

    state = {"running_mean": torch.zeros(len(weight)).cuda(), "running_var": torch.ones(len(weight)).cuda()}
    state["num_batches_tracked"] = torch.zeros((), dtype=torch.int64).cuda()

    def step() -> Any:
        y, saved = gsbn.forward(x, weight, **state, training=True, return_saved=True, group=group)
        return y, gsbn.backward(dy, saved)

    return step, list(state.values())


@on_gpus
def in_a_graph(at: Ranks) -> None:
    """Replays of a captured step are what calls would be: the running statistics go on, and ranks stay together."""
    import torch

    rng, rows = np.random.default_rng(at.rank), 200 + 56 * at.rank
    shapes = (rows, 64), (128, 64), (rows, 128)
    for dtype in (torch.float32, torch.bfloat16):
        arrays = [torch.from_numpy(rng.normal(size=shape)).cuda().to(dtype) for shape in shapes]
        torch.distributed.broadcast(arrays[1], 0)
        (step, state), (again, expected) = (make_step(at.group, *arrays) for _ in range(2))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y, gradients = step()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        for _ in range(6):
            wanted = again()
        # In a graph another GEMM may serve: both are within a few roundings of the truth.
        close = 16 * torch.finfo(dtype).eps
        for one, other in zip((*state, y, gradients.x), (*expected, wanted[0], wanted[1].x), strict=True):
            assert (one.double() - other.double()).norm() <= close * other.double().norm()
        assert state[-1].item() == 6
        parts = at.gathered(state[0].cpu().numpy())
        assert all((part == parts[0]).all() for part in parts)
        at.group.check()


@on_gpus
def the_next_call_tells(at: Ranks) -> None:
    """The host does not wait: what is wrong in a call is the next one's error, on every rank; its y is NaN."""
    if not at.group.on_device or not at.group.on_device.waits:
        call(at)
    if not at.group.on_device.waits:  # what NCCL does with sizes that differ is its own affair
        return
    y = call(at, features=4 + at.rank)
    at.kind.get(y)
    with raises(RuntimeError, "a rank makes another call", "cannot be used any more"):
        call(at)
    assert np.isnan(at.kind.get(y)).all()


@on_gpus
def equal_bits(at: Ranks) -> None:
    """Calls of random sizes, dealt out at random: the running statistics have the same bits on all ranks.

    ``CALLS`` in the environment says how many, in fifties.
    """
    import torch

    draw = random.Random(1)
    of_rank, of_all = (torch.Generator(device="cuda").manual_seed(seed) for seed in (at.rank, at.size))
    for _ in range(max(1, int(os.environ.get("CALLS", "200")) // 50)):
        seen = []
        for _ in range(50):
            dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
            B = draw.choice([draw.randint(2, 64), draw.randint(64, 3000)])
            I, O = 8 * draw.randint(1, 40), 8 * draw.randint(1, 60)
            ends = sorted([0, B, *(draw.randint(0, B) for _ in range(at.size - 1))])
            x = torch.randn(ends[at.rank + 1] - ends[at.rank], I, device="cuda", generator=of_rank).to(dtype)
            weight = torch.randn(O, I, device="cuda", generator=of_all).to(dtype)
            mean, var = torch.zeros(O, device="cuda"), torch.ones(O, device="cuda")
            y = gsbn.forward(x, weight, running_mean=mean, running_var=var, training=True, group=at.group)
            seen.append(torch.cat([mean, var]))
            assert len(y) == len(x)
        bits = torch.cat(seen).view(torch.int32).cpu().numpy()
        for other in at.gathered(bits):
            np.testing.assert_array_equal(other, bits)


@on_gpus
def beside_other_communication(at: Ranks) -> None:
    """No deadlock: 2,000 steps beside DDP's all-reduces of small buckets and those of a second communicator.

    Rank 0 has had its kernels loaded, the others load theirs beside a kernel that waits for them; the rows vary.
    """
    if at.kind.name != "torch-cuda" or not at.group.peer_memory:  # one of the four runs is enough
        return
    import torch
    import torch.distributed as dist

    from gsbn.torch import LinearBatchNorm1d

    second, first_alone, side = dist.new_group(), dist.new_group([0]), torch.cuda.Stream()
    torch.manual_seed(0)
    layers = [LinearBatchNorm1d(512, 512, process_group=dist.group.WORLD) for _ in range(6)]
    model = torch.nn.Sequential(*layers).cuda()
    if at.rank == 0:
        x, weight, dy = (torch.randn(rows, 512, device="cuda") for rows in (256, 512, 256))
        load, _ = make_step(gsbn.group(first_alone), x, weight, dy)
        load()
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    numbers = [torch.ones(4096 * (i + 1), device="cuda") for i in range(8)]
    draw = torch.Generator(device="cuda").manual_seed(at.rank)
    for i in range(2000):
        rows = 256 if i % 5 else (64, 1000)[(i // 5 + at.rank) % 2]
        x = torch.randn(rows, 512, device="cuda", generator=draw)
        with torch.cuda.stream(side):
            for a in numbers[: 1 + i % 8]:
                dist.all_reduce(a.mul_(0.5), group=second, async_op=True)
        loss = (ddp(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    assert loss.isfinite()
    for tensors in (model.parameters(), model.buffers()):
        mine = torch.cat([t.detach().double().flatten() for t in tensors]).cpu().numpy()
        parts = at.gathered(mine)
        assert all((part == parts[0]).all() for part in parts)


@on_gpus
def comes_late_on_a_gpu(at: Ranks) -> None:
    group = gsbn.group(at.comm, timeout=SHORT, peer_memory=at.group.peer_memory)
    call(at, group)
    at.gathered(np.zeros(1))
    start = time.monotonic()
    if at.rank == 0:
        with raises(RuntimeError, "did not come within"):
            for _ in range(2):
                at.kind.get(call(at, group))
        assert time.monotonic() - start < SHORT + SLACK
    else:
        time.sleep(SHORT + SLACK)
    group.leave()


# ---- the program of a rank, and what its start needs


def why_not(engine: str, size: int = 2) -> str:
    """What the engine lacks here, for so many ranks."""
    if engine == "mpi":
        lacks = [] if find_spec("mpi4py") else ["mpi4py"]
        lacks += [] if shutil.which("mpiexec", path=environment()["PATH"]) else ["mpiexec"]
        return f"needs {' and '.join(lacks)}: pip install mpi4py mpich" if lacks else ""
    if not find_spec("torch"):
        return "needs PyTorch: pip install torch"
    import torch.distributed as dist

    if engine == "nccl":
        torch = sys.modules["torch"]
        enough = torch.cuda.device_count() >= size and dist.is_nccl_available()
        return "" if enough else f"needs {size} GPUs that PyTorch sees"
    return "" if dist.is_available() and dist.is_gloo_available() else "this PyTorch has no gloo"


def environment() -> dict[str, str]:
    """Of processes that share the cores, with the gsbn under test and the mpiexec beside this Python."""
    beside, gsbn_itself = Path(sys.executable).parent, Path(gsbn.__file__).parents[1]
    paths = {"PATH": beside, "PYTHONPATH": gsbn_itself}
    found = {name: os.pathsep.join([str(path), os.environ.get(name, "")]) for name, path in paths.items()}
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    # Open MPI asks whether root, and more ranks than cores, are meant; MPICH does not.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowd = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return {**os.environ, **found, **threads, **root, **crowd}


def start_gloo(meet: str) -> tuple[Any, int, Callable[[], None]]:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    at = {"init_method": f"file://{meet}", "rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", **(at if meet else {}))
    return dist.group.WORLD, rank, dist.destroy_process_group


def start_nccl(meet: str) -> tuple[Any, int, Callable[[], None]]:
    import cupy
    import torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    cupy.cuda.Device(rank).use()
    at = {"init_method": f"file://{meet}"} if meet else {}
    torch.distributed.init_process_group("nccl", rank=rank, world_size=size, **at)
    return torch.distributed.group.WORLD, rank, torch.distributed.destroy_process_group


def start_mpi(meet: str) -> tuple[Any, int, Callable[[], None]]:
    from mpi4py import MPI

    return MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.Finalize


ENGINES = {
    "gloo": start_gloo,
    "mpi": start_mpi,
    "nccl": start_nccl,
}  # the communicator, which rank this is, and how it ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--kind", default="numpy", choices=[*CPU_KINDS, *GPU_KINDS], help="of arrays")
    parser.add_argument("--names", nargs="+", default=list(TOGETHER), choices=[*TOGETHER, *APART, *ON_GPUS])
    parser.add_argument("--peer-memory", default=True, action=argparse.BooleanOptionalAction)
    parser.add_argument("--meet", default="", help="a file that the ranks of gloo meet in, without torchrun")
    parser.add_argument("--out", help="a folder, for a file a rank: a line of JSON for each name, and what failed")
    given = parser.parse_args()

    faulthandler.dump_traceback_later(LIMIT, exit=True)
    comm, rank, end = ENGINES[given.engine](given.meet)
    for name in given.names:
        fault = ""
        try:
            with gsbn.group(comm, timeout=SECONDS, peer_memory=given.peer_memory) as group:
                (TOGETHER | APART | ON_GPUS)[name](Ranks(given.engine, comm, kind_of(given.kind), group))
        except BaseException:
            fault = traceback.format_exc()
        line = json.dumps({"name": name, "fault": fault})
        if given.out:
            with open(Path(given.out, f"{rank}.jsonl"), "a") as file:
                file.write(line + "\n")
        print(f"rank {rank}: {name}: {fault or 'right'}", flush=True)
        if fault:
            os._exit(1)  # the others must not wait
    end()


if __name__ == "__main__":
    main()
