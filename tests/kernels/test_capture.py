"""CUDA graphs: a replay is like a call, and captured memory lives as long as its graph."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.support.accuracy import family
from tests.support.forwards import CASE, GEMMS, truth_and_bounds
from tests.support.gradients import draw_dy
from tests.support.harness import STATISTICS, Kind, kind_of, without_out
from tests.support.strategies import Case
from tests.support.streams import capture, new_stream
from tests.support.tolerance import assert_within, bounds

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


# ---- replays


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_replay_is_a_call(gpu_kind: Kind, dtype: str, momentum: float | None, gemm: str) -> None:
    """A replay uses new inputs and statistics at the captured addresses, and advances the count of batches."""
    case = replace(CASE, dtype=dtype, momentum=momentum)
    arrays = case.arrays()
    del arrays["out"]
    native = {name: gpu_kind.put(a) for name, a in arrays.items()}
    with new_stream(gpu_kind) as stream:
        gsbn.forward(**native, gemm=gemm, **case.options)
        replay, y = capture(gpu_kind, stream, lambda: gsbn.forward(**native, gemm=gemm, **case.options))
        for name in STATISTICS:  # the warm-up counts once, the capture does not count
            native[name][...] = gpu_kind.put(arrays[name])
        for seed in (1, 2, 3):
            arrays["x"] = replace(case, seed=seed).arrays()["x"]
            native["x"][...] = gpu_kind.put(arrays["x"])
            replay()
            stream.synchronize()
            truth, limit = truth_and_bounds(arrays, **case.options)
            assert_within(gpu_kind.get(y), truth.y, limit.y, "y")
            for name in ("running_mean", "running_var"):
                assert_within(gpu_kind.get(native[name]), getattr(truth, name), getattr(limit, name), name)
            assert gpu_kind.get(native["num_batches_tracked"]) == truth.num_batches_tracked
            arrays.update({name: gpu_kind.get(native[name]) for name in STATISTICS})


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("keep", [True, False])
def test_what_a_captured_call_allocated_lives_as_long_as_the_graph(gpu_kind: Kind, keep: bool, gemm: str) -> None:
    """No later allocation gets memory to which the graph writes, not even y's if the caller releases y."""
    case = replace(CASE, dtype="float16", layouts=())
    arrays = case.arrays()
    del arrays["out"]
    native = {name: gpu_kind.put(a) for name, a in arrays.items()}
    native["x"] = gpu_kind.put(arrays["x"].T).T  # a GEMM may copy it
    with new_stream(gpu_kind) as stream:
        gsbn.forward(**native, gemm=gemm, training=True)
        replay, y = capture(gpu_kind, stream, lambda: gsbn.forward(**native, gemm=gemm, training=True))
        if not keep:
            y = None
        churn = [gpu_kind.put(np.full(1 << size, 7, np.uint8)) for size in range(9, 21) for _ in range(8)]
        replay()
        stream.synchronize()
        if keep:
            truth, limit = truth_and_bounds(arrays, training=True)
            assert_within(gpu_kind.get(y), truth.y, limit.y)
        assert all((gpu_kind.get(a) == 7).all() for a in churn)


# ---- graphs that come and go


def chain(call: Callable[[Any], Any], x: Any, links: int = 20) -> Any:
    for _ in range(links):
        x = call(x)
    return x


def test_captured_memory_is_about_torchs_and_ends_with_the_graph() -> None:
    """In 20 chained forwards a freed temporary is reused by the next one, as in PyTorch."""
    import torch

    arrays = {
        name: kind_of("torch-cuda").put(a) for name, a in family("normal", 0, (8192, 2048, 2048), "bfloat16").items()
    }
    x = arrays.pop("x")

    def eager(x: Any) -> Any:
        z = torch.nn.functional.linear(x, arrays["weight"], arrays["bias"]) * arrays["scale"]
        statistics = arrays["running_mean"], arrays["running_var"]
        return torch.nn.functional.batch_norm(z, *statistics, arrays["gamma"], arrays["beta"], training=True)

    def ours(x: Any) -> Any:
        return gsbn.forward(x, **arrays, training=True)

    def settled() -> int:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved())

    taken, left = [], []
    for call in (eager, ours):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            chain(call, x)
            before = settled()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = chain(call, x)
            taken.append(settled() - before)
            graph.replay()
            assert torch.isfinite(y).all()
            del graph, y
            left.append(settled() - before)
    print(f"captured: torch {taken[0] >> 20} MiB, gsbn {taken[1] >> 20} MiB; left {left[1] >> 20} MiB")
    assert taken[1] <= 1.2 * taken[0]
    assert left[1] == 0  # torch's forwards leave cuBLAS' workspace


@pytest.mark.parametrize("gemm", ["auto", "cublas", "tiled"])
def test_what_cupy_captured_ends_with_the_graph(gemm: str) -> None:
    """Without a later call of gsbn, and without a later capture."""
    arrays = without_out(Case((2000, 64, 512), "float16", True, layouts=()).arrays())
    native = {name: cupy.asarray(a) for name, a in arrays.items()}
    dy = cupy.asarray(draw_dy(arrays))
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)

    def step() -> None:
        _, saved = gsbn.forward(**native, training=True, gemm=gemm, return_saved=True)
        gsbn.backward(dy, saved)

    with cupy.cuda.using_allocator(pool.malloc), stream:
        step()
        stream.synchronize()
        before = pool.used_bytes()
        for _ in range(3):
            stream.begin_capture()
            for _ in range(4):
                step()
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            held = pool.used_bytes()
            assert held - before >= 4 * 2000 * 512 * 2  # y alone: the graph writes it although nobody holds it
            del graph
            deadline = time.monotonic() + 5
            while pool.used_bytes() > before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert pool.used_bytes() == before


@pytest.mark.parametrize("library", ["torch in CuPy's capture", "CuPy in torch's capture"])
def test_a_graph_of_the_other_library_keeps_its_memory(library: str) -> None:
    """An allocator does not know of the other library's capture, so the graph must hold what the call allocated."""
    import torch

    arrays = without_out(Case((600, 64, 264), "float16", True, layouts=()).arrays())
    in_torch = library.startswith("torch")
    kind, other = (kind_of(name) for name in (("torch-cuda", "cupy") if in_torch else ("cupy", "torch-cuda")))
    native = {name: kind.put(a) for name, a in arrays.items()}
    out = kind.put(np.zeros((600, 264), np.float16))
    side = torch.cuda.Stream()
    same = cupy.cuda.Stream.from_external(side)

    def call() -> None:
        with torch.cuda.stream(side), same:
            out[...] = gsbn.forward(**native, training=True, gemm="tiled")

    call()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), same:
        replay, _ = capture(other, same if other.name == "cupy" else side, call)
    churn = [kind.put(np.full(1 << size, 7, np.uint8)) for size in range(9, 21) for _ in range(8)]
    out[...] = 0
    torch.cuda.synchronize()
    replay()
    torch.cuda.synchronize()
    truth, _ = truth_and_bounds(arrays, training=True)
    assert_within(kind.get(out), truth.y, bounds(arrays, truth, training=True).y)
    assert all((kind.get(a) == 7).all() for a in churn)
