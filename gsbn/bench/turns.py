"""One case: every candidate is checked, those that pass are prepared, and then they are timed in turns.

A bench derives from ``CaseRun`` and adds only what differs: how a candidate is checked, and how it is prepared and
timed. A candidate that fails is not called any more; the others go on.

Some peers are as fast as luck has it: with other addresses the same calls take twice as long. So all candidates are
prepared and timed several times. A peer's time is that of its best turn, gsbn's is the median over all turns.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._timing import LEAST_ROUNDS, Measurement, balanced_order, median_interval
from . import libraries
from .report import Result, Settings

Progress = Callable[[float, int, str], None]  # how many cases are done, of how many, and what is being done


@dataclass(eq=False)
class Entry:
    """A candidate on one case, and what is known of it so far."""

    name: str
    case: Any
    failure: str = ""  # after one it is not called any more
    candidate: Any = None
    once: float = 1.0  # seconds of one call, before the turns
    facts: dict[str, Any] = field(default_factory=dict)  # of its result
    # By what is timed: what runs a trial and gives seconds a call, or None where it cannot be known.
    trials: dict[str, Callable[[], float | None]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)  # what the trials of this turn gave
    turns: list[dict[str, list[float]]] = field(default_factory=list)  # ``times`` of every turn

    def begin_turn(self) -> None:
        """Forget how trials were run, and begin new times."""
        self.trials, self.times = {}, {}
        self.turns.append(self.times)

    def sample(self) -> None:
        """Run every trial once."""
        found = {way: trial() for way, trial in self.trials.items()}
        for way, seconds in found.items():
            if seconds is not None:
                self.times.setdefault(way, []).append(seconds)

    def result(self) -> Result:
        """What is known now: the failure, or the times."""
        if self.failure:
            return Result(self.case, self.name, failure=self.failure)
        ways = dict.fromkeys(way for times in self.turns for way in times)
        turns = {way: [times[way] for times in self.turns if way in times] for way in ways}
        judge = over_all if self.name.startswith("gsbn") else best
        return Result(self.case, self.name, {way: judge(samples) for way, samples in turns.items()}, self.facts)


def best(turns: Iterable[Sequence[float]]) -> Measurement:
    """The smallest of the medians of several turns."""
    return min(map(median_interval, turns), key=lambda found: found.median)


def over_all(turns: Iterable[Sequence[float]]) -> Measurement:
    """The median over all turns."""
    return median_interval([*itertools.chain(*turns)])


class CaseRun:
    """All candidates on one case."""

    def __init__(self, entries: Iterable[Entry], titles: Mapping[str, str], precision: str, settings: Settings) -> None:
        self.entries: list[Entry] = list(entries)
        self.titles: Mapping[str, str] = titles  # the candidates' names as people read them
        self.precision: str = precision  # of PyTorch's and CuPy's float32 products
        self.settings: Settings = settings

    def check(self, entry: Entry) -> None:
        """Make the candidate, hold its first result to the truth, and raise what is wrong."""
        raise NotImplementedError

    def checked(self) -> None:
        """Called after the last check."""

    def prepare(self, entry: Entry) -> None:
        """Fill ``once`` and ``trials``."""
        raise NotImplementedError

    def now(self) -> float:
        """Seconds of the clock that ends the rounds."""
        return time.perf_counter()

    def run(self, progress: Callable[[float, str], None]) -> None:
        """Check, prepare and time all; ``progress`` is called with the fraction done, and with what is being done."""
        libraries.forget_compiled()
        gc.collect()  # a module's class is a cycle that holds the last case's operands
        with libraries.float32_precision(self.precision):
            for index, entry in enumerate(self.entries):
                progress(index / len(self.entries) / 2, f"checking {self.titles[entry.name]}")
                self.attempt(entry, self.check)
            self.checked()
            for turn in range(self.settings.turns):
                for entry in self.live():
                    entry.begin_turn()
                    self.attempt(entry, self.prepare)
                if self.live():
                    self._take_turn(turn, progress)

    def results(self) -> list[Result]:
        """The results so far: failures, and those that have times."""
        return [entry.result() for entry in self.entries if entry.failure or any(entry.turns)]

    def live(self) -> list[Entry]:
        """The entries without a failure."""
        return [entry for entry in self.entries if not entry.failure]

    def attempt(self, entry: Entry, step: Callable[[Entry], None]) -> None:
        """Run a step of an entry. If it raises anything, this entry has failed, and the others go on."""
        try:
            step(entry)
        except Exception as error:
            entry.failure = line_of(error)

    def round(self, number: int) -> float:
        """Run a trial of every candidate. Returns the sum of their times, each relative to its first call."""
        live = self.live()
        for index in balanced_order(len(live), number):
            self.attempt(live[index], Entry.sample)
        return sum(next(iter(entry.times.values()))[-1] / entry.once for entry in self.live())

    def forget(self) -> None:
        """Drop the times of this turn so far, which were taken while the clocks settled."""
        for entry in self.entries:
            entry.times.clear()

    def _take_turn(self, turn: int, progress: Callable[[float, str], None]) -> None:
        """Run rounds until the clocks settle, or one where an earlier turn has settled them; then those that count."""
        settings = self.settings
        gc_was_on = gc.isenabled()
        gc.disable()  # else the candidate that runs during a collection would pay for it
        try:
            if turn:
                self.round(0)
            else:
                progress(0.5, "until the clocks settle")
                numbers = itertools.count()
                settle(lambda: self.round(next(numbers)), settings.settle, now=self.now)
            self.forget()
            started, past = self.now(), turn * settings.rounds
            for number in range(settings.rounds):
                if number >= LEAST_ROUNDS and self.now() - started > settings.seconds / settings.turns:
                    break
                done = (past + number) / (settings.turns * settings.rounds)
                progress(0.5 + done / 2, f"turn {turn + 1}, round {number + 1}")
                self.round(number)
        finally:
            if gc_was_on:
                gc.enable()


def run_all(
    cases: Sequence[Any], start: Callable[[Any], CaseRun], progress: Progress
) -> tuple[tuple[Result, ...], bool]:
    """The results of all cases, each run by what ``start`` gives for it, and whether Ctrl-C ended that early."""
    results: list[Result] = []
    try:
        for index, case in enumerate(cases):

            def step(done: float, text: str, index: int = index, case: Any = case) -> None:
                progress(index + done, len(cases), f"{case.title}: {text}")

            case_run = start(case)
            try:
                case_run.run(step)
            finally:
                results += case_run.results()
    except KeyboardInterrupt:
        return tuple(results), True
    return tuple(results), False


def line_of(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def settle(work: Callable[[], float], longest: float, now: Callable[[], float] = time.perf_counter) -> bool:
    """Repeat ``work`` until its speed holds still, for ``longest`` seconds at most; whether it did.

    ``work`` returns what it measured. The medians of three successive windows must lie within 0.5 % of one another; a
    window lasts 0.25 seconds and three calls at least. A steady drift by more than half of that in each window is
    therefore seen.
    """
    begun = now()
    medians: list[float] = []
    while now() - begun < longest:
        samples: list[float] = []
        opened = now()
        while (len(samples) < 3 or now() - opened < 0.25) and now() - begun < longest:
            samples.append(work())
        medians.append(statistics.median(samples))
        last = medians[-3:]
        if len(last) == len(samples[:3]) == 3 and max(last) - min(last) <= 0.005 * min(last):
            return True
    return False
