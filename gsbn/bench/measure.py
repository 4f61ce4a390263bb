"""Make the candidates of every case, check their results, and only then time them, one beside the other."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._plan import ITEMSIZE
from . import bounds, libraries, peers
from .candidate import NAMES, Candidate, is_gemm, names
from .case import Case
from .clock import Clock, GpuClock, balanced_order, median_interval, take_turns
from .machine import environment, has_gpu
from .rates import Rates, measure_rates
from .report import Report, Result, Settings

# Peers are held to their own rounding, norm-wise on standard normal data; gsbn is held to its derived bound.
PEER_TOLERANCE = {"float32": 2e-5, "tf32": 1e-2, "bfloat16": 5e-2, "float16": 1e-2, "float64": 1e-12}


def run(
    cases: Sequence[Case],
    candidates: Sequence[str] | None = None,
    settings: Settings = Settings(),  # noqa: B008, it is frozen
    progress: Callable[[float, int, str], None] = lambda done, total, doing: None,
) -> Report:
    """Measure the candidates on every case; they are named as in ``gsbn.bench.candidate.NAMES``, and default to all.

    ``progress`` is called with how many cases are done, which may be a fraction, how many there are, and what is being
    done.

    A candidate that is not installed, cannot serve a case, or computes it wrongly has a ``failure`` in place of times;
    nothing is raised for it. KeyboardInterrupt ends the run, which then returns what is done, with ``interrupted`` set;
    of the case in hand these are the rounds that every candidate has completed.
    """
    gpu = has_gpu()
    chosen = list(candidates or names(gpu))
    if unknown := sorted(set(chosen) - set(NAMES)):
        raise ValueError(f"candidates: expected names among {', '.join(NAMES)}; got {', '.join(unknown)}")
    progress(0, len(cases), "loading libraries")
    libraries.load(chosen)
    clock = GpuClock(settings.graph) if gpu else Clock()
    results: list[Result] = []
    rates, interrupted = Rates(1.0, {}), False
    with clock.active():
        try:
            progress(0, len(cases), "measuring the machine's own rates")
            rates = measure_rates(clock, {case.kind for case in cases})
            for index, case in enumerate(cases):

                def step(done: float, text: str, index: int = index, case: Case = case) -> None:
                    progress(index + done, len(cases), f"{case.title}: {text}")

                case_run = _CaseRun(clock, case, chosen, settings)
                try:
                    with libraries.float32_precision(case.precision):
                        case_run.run(step)
                finally:
                    results += case_run.results()
        except KeyboardInterrupt:
            interrupted = True
    return Report(environment(), settings, rates, tuple(results), interrupted)


@dataclass(eq=False)
class _Entry:
    """A candidate on one case, and what is known of it so far; after a ``failure`` it is not called any more."""

    name: str
    failure: str = ""
    candidate: Candidate = field(init=False)
    error: float | None = None
    trial: Callable[[], float] = field(init=False)
    once: float = 0.0
    method: str = ""
    extra_bytes: int | None = None
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class _CaseRun:
    """Make, check, prepare and time every candidate on one case. ``results()`` is good at any moment."""

    def __init__(self, clock: Clock, case: Case, names: Sequence[str], settings: Settings) -> None:
        self.clock, self.case, self.settings, self.calls = clock, case, settings, settings.calls or 1
        self.entries = [_Entry(name) for name in names]

    def run(self, progress: Callable[[float, str], None]) -> None:
        """``progress`` is called with the fraction done, and with what is being done."""
        libraries.forget_compiled()
        gc.collect()  # a module's class is a cycle that holds the last case's operands
        self._check(lambda done, name: progress(done / 2, f"checking {NAMES[name]}"))
        if self.clock.xp.__name__ == "cupy":
            self.clock.xp.get_default_memory_pool().free_all_blocks()  # before any graph lives in the pool
        self._each(self._try)
        if self.settings.calls is None and (once := [entry.once for entry in self._live()]):
            self.calls = max(1, min(100, round(self.settings.trial_ms / 1e3 / statistics.median(once))))
        self._each(self._prepare)
        take_turns(self.settings, self._round, self._forget, progress)

    def results(self) -> list[Result]:
        """What is known of each candidate: a failure, or the rounds that all have completed."""
        complete = min((len(entry.device) for entry in self._live()), default=0)
        return [
            Result(
                self.case, e.name, e.candidate.path, e.method, self.calls, median_interval(e.device[:complete]),
                median_interval(e.host[:complete]) if e.host else None, e.extra_bytes, e.error,
            )
            if not e.failure else Result(self.case, e.name, failure=e.failure)
            for e in self.entries if e.failure or complete
        ]  # fmt: skip

    def _live(self) -> list[_Entry]:
        return [entry for entry in self.entries if not entry.failure]

    def _forget(self) -> None:
        for entry in self.entries:
            entry.device.clear()
            entry.host.clear()

    def _round(self, turn: int) -> float:
        """A trial of every candidate; the sum of their times, each divided by that candidate's first time."""
        live = self._live()
        self._each(self._sample, balanced_order(len(live), turn))
        return sum(entry.device[-1] / entry.once for entry in self._live())

    def _each(self, step: Callable[[_Entry], None], order: Sequence[int] | None = None) -> None:
        live = self._live()
        for entry in live if order is None else [live[i] for i in order]:
            try:
                step(entry)
            except Exception as failure:  # a peer may fail in any way; it must not take the others with it
                entry.failure = (str(failure).strip() or type(failure).__name__).splitlines()[0]

    def _check(self, progress: Callable[[float, str], None]) -> None:
        """Make every candidate and hold its first result to float64: gsbn to its bound, a peer to its tolerance."""
        case, xp, is_forward = self.case, self.clock.xp, self.case.direction == "forward"
        precision, training = case.precision, case.training

        @functools.cache
        def drawn() -> tuple[bounds.Operands, dict[str, bounds.Expected]]:
            operands = bounds.make_operands(xp, *case.shape, case.dtype, seed=self.settings.seed, with_scale=case.scale)
            return operands, bounds.expected(xp, operands, precision, training, activation=case.activation)

        @functools.cache
        def truth_without() -> dict[str, bounds.Expected]:
            operands = drawn()[0]
            return bounds.expected_gradients(xp, operands, bounds.draw_dy(xp, operands), precision, training)

        def true_gradients(y: Any) -> dict[str, bounds.Expected]:
            """Those that belong to the y that a candidate returned."""
            operands = drawn()[0]
            if case.activation is None:
                return truth_without()
            dy = bounds.draw_dy(xp, operands)
            return bounds.expected_gradients(xp, operands, dy, precision, training, case.activation, y)

        def check(entry: _Entry) -> None:
            progress(self.entries.index(entry) / len(self.entries), entry.name)
            operands, truth = drawn()
            entry.candidate = peers.make(entry.name, case, operands, xp)
            keys: tuple[str, ...] = (*bounds.GRADIENTS, "y")
            if is_forward:
                keys = ("g", "", "") if is_gemm(entry.name) else ("y", "running_mean", "running_var")
            got = dict(zip(keys, entry.candidate.outputs(), strict=True))
            if not is_forward:
                truth = true_gradients(got["y"]) | {"y": truth["y"]}
            judged = {key: truth[key].judge(value, xp) for key, value in got.items() if key in truth}
            # Autograd's gradient of the scale is noise in float32: the matrices tell whether a peer is right.
            entry.error = max(judged[key].relative_error for key in keys[: 1 if is_forward else 2])
            if entry.name.startswith("gsbn") and (bad := [key for key, j in judged.items() if not j.passed]):
                raise ValueError(f"wrong result: {bad[0]} uses {judged[bad[0]].share:.3g} of its bound")
            if not entry.error <= (limit := PEER_TOLERANCE[case.kind]):
                raise ValueError(f"wrong result: norm-wise error {entry.error:.2g} over {limit:.2g}")

        self._each(check)

    def _try(self, entry: _Entry) -> None:
        trial, _ = self.clock.trial(entry.candidate, 1)
        entry.once = min(trial(), trial())

    def _prepare(self, entry: _Entry) -> None:
        b, i, o = self.case.shape
        result = (b * o if self.case.direction == "forward" else b * i + o * i) * ITEMSIZE[self.case.dtype]
        peak = self.clock.extra_memory(entry.candidate)
        entry.extra_bytes = None if peak is None else max(0, peak - result)
        entry.trial, entry.method = self.clock.trial(entry.candidate, self.calls)
        entry.trial()

    def _sample(self, entry: _Entry) -> None:
        seconds, host = entry.trial(), self.clock.host(entry.candidate)
        entry.device.append(seconds)
        entry.host.extend([] if host is None else [host])
