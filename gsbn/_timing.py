"""How calls are timed beside each other. PyTorch is an argument where it is needed, so that this imports without it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_ROUNDS = 7  # the fewest samples whose median has an interval


@dataclass(frozen=True)
class Measurement:
    """The median of some samples and an interval that holds the true median with probability ``confidence``."""

    median: float
    low: float
    high: float
    samples: int
    confidence: float


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Measurement:
    """The median of some samples, and an interval of two of them that holds the true median.

    >>> from gsbn._timing import median_interval
    >>> median_interval([3.0, 1.0, 2.0])
    Measurement(median=2.0, low=1.0, high=3.0, samples=3, confidence=0.75)

    Of ``n`` independent samples ``X₁ ≤ … ≤ Xₙ`` the number below the true median is binomial (n, ½), whatever their
    distribution, so ``P(X_k ≤ median ≤ X_{n+1−k}) = 1 − 2 P(Bin(n, ½) < k)``. ``k`` is the largest that keeps at least
    ``confidence``. Fewer than six samples cannot reach 0.95: the interval is then their range, and the returned
    ``confidence`` is that of the range (0 for a single sample). ValueError where there is no sample.
    """
    if not samples:
        raise ValueError("samples: expected at least one, got none")
    ordered, n = sorted(samples), len(samples)
    k, below = 1, 1  # below / 2ⁿ = P(Bin(n, ½) < k)
    while 2 * (below + math.comb(n, k)) <= (1 - confidence) * 2**n:
        below += math.comb(n, k)
        k += 1
    return Measurement(statistics.median(ordered), ordered[k - 1], ordered[n - k], n, 1 - 2 * below / 2**n)


def wall_clock(call: Callable[[], Any], calls: int, wait: Callable[[], Any]) -> float:
    """Seconds a call by the wall clock, of so many one after another, from an idle device to an idle device."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


def between_events(torch: Any, call: Callable[[], Any], calls: int) -> float:
    """Seconds a call between two CUDA events on PyTorch's current stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3 / calls


def warm_up(torch: Any, call: Callable[[], Any], stream: Any) -> None:
    """Three calls on a stream beside PyTorch's current one, as they have to come before a capture."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)


def torch_graph(torch: Any, call: Callable[[], Any], calls: int = 1, stream: Any = None) -> Callable[[], None]:
    """A replay of a CUDA graph of so many calls; raises what keeps them from being captured.

    A capture that fails leaves its stream as PyTorch's current one, and its generator of random numbers unusable. So
    the current stream is set again, and the capture draws from a copy of the generator's state.
    """
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    finally:
        generator.graphsafe_set_state(state)
    replay: Callable[[], None] = graph.replay
    return replay


def peak_bytes(torch: Any, call: Callable[[], Any]) -> int:
    """The peak of what PyTorch's allocator holds on the current GPU during a call, over what it held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def balanced_order(n: int, turn: int) -> list[int]:
    """The order of ``n`` candidates in round ``turn``: a row of a Williams design.

    Over ``n`` rounds (``2 n`` for an odd ``n``) every candidate takes every place, and follows every other one, equally
    often. This matters because a trial starts with the temperature, power and clocks that the one before it has left.
    """
    zigzag = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]  # 0, -1, 1, -2, 2, … modulo n
    order = [(i + turn) % n for i in zigzag]
    return order[::-1] if n % 2 and turn // n % 2 else order


def in_turns(trials: Sequence[Callable[[], float]], seconds: float) -> list[list[float]]:
    """What each trial gives in each round. No round begins after so many seconds, but seven are run at least.

    A round has each trial once. The first one does not count: in it the clocks settle.
    """
    if not trials:
        return []
    samples: list[list[float]] = [[] for _ in trials]
    begun, turn = time.perf_counter(), 0
    while turn <= LEAST_ROUNDS or time.perf_counter() - begun < seconds:
        for index in balanced_order(len(trials), turn):
            samples[index].append(trials[index]())
        turn += 1
    return [of_one[1:] for of_one in samples]
