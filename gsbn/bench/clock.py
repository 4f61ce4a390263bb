"""How long a call takes: the statistics, a clock for a GPU and one for the CPU.

A *trial* is the time of a number of calls of one candidate, back to back, divided by that number. Before each trial the
L2 cache is flushed, so that no candidate finds another's operands there. Within a trial the cache is as warm as the
calls before left it, as in a training loop. With ``calls=1`` every call is cold.

On a GPU a trial lies between two CUDA events. If the candidate can be captured, the calls are one CUDA graph
(``"graph"``). If not, they are enqueued while the GPU is still busy with the flush (``"queue"``). Such a trial counts
only if the GPU had not reached its first call when its last one was enqueued: then the device did not wait for the
host. JAX runs on streams of its own, so the wall clock times it, from an idle device to the end of the last call
(``"wall"``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from .._timing import torch_graph
from .candidate import Candidate
from .libraries import no_grad, torch_with_gpu

Trial = Callable[[], float]  # runs one trial, returns seconds per call


class Clock:
    """The wall clock, for a CPU: host and device are the same, and no cache is flushed. ``GpuClock`` overrides it."""

    xp: Any = np  # the module of the arrays, numpy or cupy

    def active(self) -> Any:
        """Context in which candidates are made and called."""
        return no_grad()

    def trial(self, candidate: Candidate, calls: int) -> tuple[Trial, str]:
        """A trial of ``calls`` calls, and the method that times it: graph, queue or wall."""
        return lambda: self._wall(candidate, calls), "wall"

    def host(self, candidate: Candidate) -> float | None:
        """Seconds until a call on an idle device returns to the host, which does not wait for it; None on a CPU."""
        return None

    def extra_memory(self, candidate: Candidate) -> int | None:
        """Peak of the bytes that one warm call allocates, its result included; None if unknown."""
        return None

    @staticmethod
    def _wall(candidate: Candidate, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = candidate.call()
        candidate.wait(result)
        return (time.perf_counter() - start) / calls


class GpuClock(Clock):
    """CUDA events on one stream that CuPy and PyTorch share."""

    MAX_FLUSHES = 512

    def __init__(self) -> None:
        import cupy

        self.xp: Any = cupy
        self.stream: Any = cupy.cuda.Stream(non_blocking=True)
        l2 = cupy.cuda.Device().attributes["L2CacheSize"]
        self._scratch = cupy.empty(max(4 * l2, 64 << 20), cupy.uint8)

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.stream)
            if (torch := torch_with_gpu()) is not None:
                stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr)))
            stack.enter_context(no_grad())
            yield
            self.stream.synchronize()

    def trial(self, candidate: Candidate, calls: int) -> tuple[Trial, str]:
        if candidate.library == "jax":
            return lambda: self._cold_wall(candidate, calls), "wall"

        def enqueue() -> None:
            for _ in range(calls):
                candidate.call()

        replay = self._capture(candidate, enqueue) if candidate.capturable else None
        flushes = 1

        def run() -> float:
            nonlocal flushes
            while True:
                seconds, kept_full = self._between_events(replay or enqueue, flushes)
                if kept_full:
                    return seconds / calls
                if flushes >= self.MAX_FLUSHES:
                    raise RuntimeError("the host could not keep the queue full; try fewer calls a trial")
                flushes *= 2

        return run, "graph" if replay else "queue"

    def host(self, candidate: Candidate) -> float | None:
        candidate.call()  # the other candidates have left nothing of this one in the CPU's caches
        self._idle(candidate)
        start = time.perf_counter()
        result = candidate.call()
        seconds = time.perf_counter() - start
        del result
        return seconds

    def extra_memory(self, candidate: Candidate) -> int | None:
        if candidate.library == "jax":
            return None  # XLA's allocator keeps one peak for the whole process
        torch, hook = torch_with_gpu(), _peak_hook()
        self._idle(candidate)
        before = 0
        if torch is not None:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with hook:
            result = candidate.call()
            self.stream.synchronize()
            del result
        return int(hook.peak + (torch.cuda.max_memory_allocated() - before if torch is not None else 0))

    def _between_events(self, enqueue: Callable[[], None], flushes: int) -> tuple[float, bool]:
        """Seconds on the device, and whether all was enqueued before the device reached the first call."""
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        for value in range(flushes):
            self._scratch.data.memset_async(value, self._scratch.nbytes, self.stream)
        start.record(self.stream)
        enqueue()
        kept_full = not start.done
        stop.record(self.stream)
        stop.synchronize()
        return self.xp.cuda.get_elapsed_time(start, stop) * 1e-3, kept_full

    def _cold_wall(self, candidate: Candidate, calls: int) -> float:
        self._idle(candidate)
        self._scratch.data.memset_async(0, self._scratch.nbytes, self.stream)
        self.stream.synchronize()
        return self._wall(candidate, calls)

    def _idle(self, candidate: Candidate) -> None:
        if candidate.library == "jax":
            candidate.wait(candidate.call())
        self.stream.synchronize()

    def _capture(self, candidate: Candidate, enqueue: Callable[[], None]) -> Callable[[], None] | None:
        """The calls as a graph, ready to launch, or None where the path refuses."""
        self.stream.synchronize()
        try:
            if candidate.library == "torch":
                torch = torch_with_gpu()
                replay = torch_graph(torch, enqueue, stream=torch.cuda.current_stream())
            else:
                graph = self._capture_cupy(enqueue)

                def replay() -> None:
                    graph.launch(self.stream)

            replay()
            self.stream.synchronize()
            return replay
        except Exception:  # what refuses to be captured is timed in the queue, and its method says so
            self.stream.synchronize()
            return None

    def _capture_cupy(self, enqueue: Callable[[], None]) -> Any:
        self.stream.begin_capture()
        try:
            enqueue()
        except BaseException:
            with suppress(Exception):  # the capture is broken; the error that is raised says why
                self.stream.end_capture()
            raise
        return self.stream.end_capture()


def _peak_hook() -> Any:
    """A CuPy memory hook that keeps the peak of the bytes taken from CuPy's pool while it is active."""
    import cupy

    class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "gsbn peak"
        used = peak = 0

        def malloc_postprocess(self, **event: Any) -> None:
            self.used += event["mem_size"]
            self.peak = max(self.peak, self.used)

        def free_postprocess(self, **event: Any) -> None:
            self.used -= event["mem_size"]

    return Peak()
