"""The clock and the statistics of gsbn.bench, on synthetic samples."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gsbn import bench
from gsbn._timing import balanced_order, median_interval
from gsbn.bench import layers
from gsbn.bench.candidate import Candidate
from gsbn.bench.clock import Clock, GpuClock
from gsbn.bench.turns import Entry, settle

QUICK = bench.Settings(turns=1, rounds=7, seconds=0.1, settle=0, calls=1)
TINY = bench.Case(24, 20, 12)


def test_median_interval_takes_the_order_statistics_that_the_binomial_asks_for() -> None:
    samples = list(range(1, 41))
    random.Random(0).shuffle(samples)
    m = median_interval(samples)
    assert (m.median, m.low, m.high, m.samples) == (20.5, 14, 27, 40)  # the tables' ranks for n = 40 at 95 %
    assert 0.95 <= m.confidence < 0.97
    assert median_interval([3.0, 1.0, 2.0]).confidence == pytest.approx(0.75)  # 1 - 2 / 2³, and says so
    assert median_interval([7.0]).confidence == 0
    with pytest.raises(ValueError, match="samples"):
        median_interval([])


def test_median_interval_holds_the_median_of_a_skewed_distribution_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for sample in rng.exponential(size=(2000, 25)) ** 3:  # heavy tail, as timings have
        m = median_interval(sample.tolist())
        held += m.low <= np.log(2) ** 3 <= m.high
    assert held / 2000 >= m.confidence - 4 * (0.05 * 0.95 / 2000) ** 0.5


@pytest.mark.parametrize("n", range(1, 10))
def test_everybody_follows_everybody_equally_often(n: int) -> None:
    rounds = [balanced_order(n, turn) for turn in range(2 * n)]
    for places in (rounds, zip(*rounds, strict=True)):  # every round is a permutation; everyone has every place
        for place in places:
            assert {place.count(i) for i in range(n)} <= {1, 2}
    pairs = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert len(pairs) == n * (n - 1)
    assert set(pairs.values()) <= {2}


class Card:
    """A clock that advances by the calls on it, and a GPU whose calls slow down, with noise, as it warms up."""

    def __init__(self, drift: float, seconds: float, noise: float = 0.0) -> None:
        self.time, self.drift, self.seconds, self.noise = 0.0, drift, seconds, noise
        self.random = random.Random(0)

    def now(self) -> float:
        return self.time

    def work(self) -> float:
        self.time += 0.02
        slowed = 1 + self.drift * (1 - math.exp(-self.time / self.seconds)) if self.seconds else 1.0
        return slowed * (1 + self.random.gauss(0, self.noise))

    def settles(self, longest: float) -> bool:
        return settle(self.work, longest, now=self.now)


def test_settling_waits_for_a_card_that_warms_up() -> None:
    steady, warming, noisy = Card(0, 0), Card(0.05, 0.5), Card(0, 0, noise=0.003)
    assert steady.settles(10) and steady.time == pytest.approx(3 * 0.25, abs=0.1), "three windows"
    assert warming.settles(10) and 1 < warming.time < 3
    assert 0.05 * math.exp(-warming.time / 0.5) < 0.01, "what drift is left is a few times the tolerance at most"
    assert noisy.settles(10), "the median of a window forgives a single call its noise"


def test_settling_gives_up() -> None:
    drifting, wild = Card(1.0, 20.0), Card(0, 0, noise=0.1)
    assert not drifting.settles(2) and 2 <= drifting.time < 2.1
    assert not wild.settles(2) and 2 <= wild.time < 2.1
    idle = Card(0, 0)
    assert not idle.settles(0) and idle.time == 0, "nothing is run where nothing is asked for"
    brief = Card(0, 0)
    assert not brief.settles(0.05) and brief.time < 0.1, "not even a window is finished"


class ScriptedClock(Clock):
    """A clock with times from a script, which records the order of calls."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.made: list[str] = []

    def trial(self, candidate: Any, calls: int) -> tuple[Any, str]:
        self.made.append(candidate.name)
        seconds = {"gsbn": 2e-3, "pytorch": 4e-3, "gemm-numpy": 1e-3}.get(candidate.name, 1e-2)
        noise = random.Random(candidate.name)

        def run() -> float:
            self.order.append(candidate.name)
            return seconds * (1 + (noise.random() - 0.5) / 50)

        return run, "wall"

    def host(self, candidate: Any) -> float:
        return 40e-6


@pytest.mark.parametrize(("name", "median", "samples"), [("pytorch", 2.0, 3), ("gsbn", 5.0, 9), ("gsbn-sm90", 5.0, 9)])
def test_a_peer_has_its_best_turn_and_gsbn_all(name: str, median: float, samples: int) -> None:
    entry = Entry(name, TINY)
    for turn in ([4.0, 5.0, 6.0], [1.0, 2.0, 9.0], [7.0, 8.0, 3.0]):
        entry.begin_turn()
        times = iter(turn)
        entry.trials = {"time": lambda times=times: next(times), "host": lambda: None}
        for _ in turn:
            entry.sample()
    (time,) = entry.result().times.values()
    assert (time.median, time.samples) == (median, samples)


@pytest.mark.usefixtures("cpu")
def test_each_turn_prepares_the_candidates_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ScriptedClock()
    monkeypatch.setattr(layers, "Clock", lambda: clock)
    report = bench.run([TINY], ["gsbn", "gemm-numpy"], dataclasses.replace(QUICK, turns=3))
    samples = {r.candidate: r.times["time"].samples for r in report.results}
    assert samples == {"gsbn": 21, "gemm-numpy": 7}
    assert clock.made.count("gsbn") == 1 + 3, "one to learn how long a call takes"


@pytest.mark.usefixtures("cpu")
def test_a_report_is_the_arithmetic_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    clock = ScriptedClock()
    monkeypatch.setattr(layers, "Clock", lambda: clock)
    settings = dataclasses.replace(QUICK, rounds=40, seconds=60, settle=0.05)
    report = bench.run([TINY], ["gsbn", "pytorch", "gemm-numpy"], settings)
    assert {r.times["time"].samples for r in report.results} == {40}, "settling does not count"
    assert len(clock.order) > 3 * 60
    rows = {row["candidate"]: row for row in report.rows()}
    assert rows["gsbn"]["time_us"] == pytest.approx(2000, rel=0.01)
    assert rows["gsbn"]["time_low_us"] <= rows["gsbn"]["time_us"] <= rows["gsbn"]["time_high_us"]
    assert rows["gsbn"]["host_us"] == pytest.approx(40)
    rounds = [tuple(clock.order[i - 3 : i or None]) for i in range(-39 * 3, 1, 3)]
    assert {tuple(sorted(order)) for order in rounds} == {("gemm-numpy", "gsbn", "pytorch")}
    assert len(set(rounds)) == 6, "all orders of three"


def test_a_queue_that_ran_dry_does_not_count() -> None:
    """A fake clock: the device starts the trial too early unless four flushes keep it busy."""

    class Event:
        @property
        def done(self) -> bool:
            return len(flushes) < 4

        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            flushes.clear()

    flushes: list[int] = []
    tries: list[int] = []

    def elapsed(start: Event, stop: Event) -> float:
        tries.append(1)
        return 6.0  # ms

    clock = GpuClock.__new__(GpuClock)
    clock.stream = None
    clock.xp = SimpleNamespace(cuda=SimpleNamespace(Event=Event, get_elapsed_time=elapsed))
    data = SimpleNamespace(memset_async=lambda value, size, stream: flushes.append(value))
    clock._scratch = SimpleNamespace(data=data, nbytes=1)
    candidate = Candidate("gsbn", "cupy", lambda: None, dict, capturable=False)
    trial, method = clock.trial(candidate, calls=3)
    assert method == "queue"
    assert trial() == pytest.approx(2e-3)
    assert len(tries) == 3, "1 and 2 flushes were too few"
    assert trial() == pytest.approx(2e-3)
    assert len(tries) == 4, "and 4 are remembered"
    clock.MAX_FLUSHES = 2
    with pytest.raises(RuntimeError, match="queue full"):
        clock.trial(candidate, calls=3)[0]()
