"""Streams and CUDA graphs of CuPy and of PyTorch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.support.harness import Kind

# ---- streams


@contextlib.contextmanager
def new_stream(kind: Kind) -> Iterator[Any]:
    """A new current stream of the kind's library, which waits for no other."""
    if kind.is_torch:
        import torch

        stream = torch.cuda.Stream()
        current = torch.cuda.stream(stream)
    else:
        import cupy

        stream = current = cupy.cuda.Stream(non_blocking=True)
    try:
        with current:
            yield stream
    finally:  # also after an error: its work writes to memory that is freed next
        stream.synchronize()


def occupy(kind: Kind, stream: Any, cycles: int = 400_000_000) -> None:
    """Keep the stream busy for about a fifth of a second."""
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) ; }', "spin"
    )
    with cupy.cuda.Stream.from_external(stream) if kind.is_torch else contextlib.nullcontext():
        spin((1,), (1,), (np.int64(cycles),))


def is_idle(stream: Any) -> bool:
    import cupy

    return bool(stream.done if isinstance(stream, cupy.cuda.Stream) else stream.query())


# ---- CUDA graphs


def capture(kind: Kind, stream: Any, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A function that replays ``call`` on ``stream``, and what the captured call returned."""
    gc.disable()  # garbage of other tests may hold CuPy's graphs, and destroying one breaks a capture
    try:
        if kind.is_torch:
            import torch

            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                result = call()
            return graph.replay, result
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
        return lambda: graph.launch(stream), result
    finally:
        gc.enable()


@contextlib.contextmanager
def call_and_replay(kind: Kind, call: Callable[[], Any]) -> Iterator[tuple[Any, Any]]:
    """What ``call`` returns on a new stream, and what it returned in a capture, after one replay.

    In a context, because the memory of the second is freed with the graph.
    """
    with new_stream(kind) as stream:
        want = call()
        replay, made = capture(kind, stream, call)
        replay()
        stream.synchronize()
        yield want, made
