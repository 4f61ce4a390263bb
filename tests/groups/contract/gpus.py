"""Tests for GPUs: one launch, graphs, and other communication at the same time as a call."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import gsbn
from gsbn._ranks.group import leave
from tests.groups.contract.rank import CASE, SHORT, SLACK, Ranks, call, on_gpus, raises
from tests.groups.contract.whole_batch import assert_whole_batch
from tests.support.harness import DTYPES


@on_gpus
def one_launch(at: Ranks) -> None:
    """On Hopper the shapes use forward_sm90 and all forms of the backward, with one tile and several."""
    for dtype in DTYPES:
        for rows, split in ((600, "even"), (600, "uneven"), (40, "even"), (3000, "uneven"), (300, "none on the first")):
            shape = (rows, 64, 136) if rows > 1000 else (rows, 160, 264)
            case = replace(CASE, shape=shape, dtype=dtype, scale="vector", offset=1.0)
            assert_whole_batch(at, replace(case, activation="relu" if rows == 600 else None), at.deal(rows, split))


def make_step(group: gsbn.Group, x: Any, weight: Any, dy: Any) -> tuple[Callable[[], Any], list[Any]]:
    """A training step on GPU tensors, and the running statistics that it updates."""
    import torch

    state = {"running_mean": torch.zeros(len(weight)).cuda(), "running_var": torch.ones(len(weight)).cuda()}
    state["num_batches_tracked"] = torch.zeros((), dtype=torch.int64).cuda()

    def step() -> Any:
        y, saved = gsbn.forward(x, weight, **state, training=True, return_saved=True, group=group)
        return y, gsbn.backward(dy, saved)

    return step, list(state.values())


@on_gpus
def in_a_graph(at: Ranks) -> None:
    """Replays of a captured step work like calls: they update the running statistics, and ranks stay in step."""
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
        # A graph may use another GEMM: both are within a few roundings of the truth.
        close = 16 * torch.finfo(dtype).eps
        for one, other in zip((*state, y, gradients.x), (*expected, wanted[0], wanted[1].x), strict=True):
            assert (one.double() - other.double()).norm() <= close * other.double().norm()
        assert state[-1].item() == 6
        parts = at.gathered(state[0].cpu().numpy())
        assert all((part == parts[0]).all() for part in parts)
        at.group.check()


@on_gpus
def the_next_call_tells(at: Ranks) -> None:
    """The host does not wait: an error in a call is raised by the next call, on every rank; its y is NaN."""
    if not at.group._exchange or not at.group._exchange.waits:
        call(at)
    if not at.group._exchange.waits:  # NCCL does not define what different sizes do
        return
    y = call(at, features=4 + at.rank)
    at.kind.get(y)
    with raises(RuntimeError, "a rank makes another call", "cannot be used any more"):
        call(at)
    assert np.isnan(at.kind.get(y)).all()


@on_gpus
def equal_bits(at: Ranks) -> None:
    """Calls of random sizes and splits: the running statistics have the same bits on all ranks.

    ``CALLS`` in the environment is their number, in units of 50.
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
    """No deadlock in 2,000 steps during DDP's all-reduces of small buckets and those of a second communicator.

    Rank 0 has loaded its kernels; the others load theirs while its kernel waits for them. The number of rows varies.
    """
    if at.kind.name != "torch-cuda" or not at.group._peer_memory:  # one of the four runs is enough
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
    group = gsbn.group(at.comm, timeout=SHORT, peer_memory=at.group._peer_memory)
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
    leave(group)
