"""One layer: gsbn's forward, backward or step beside every peer that is installed, in one process."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence

from .._plan import ITEMSIZE
from . import bounds, libraries, peers
from .candidate import NAMES, is_emulated, names
from .case import Case
from .clock import Clock, GpuClock
from .machine import environment, has_gpu
from .rates import measure_rates
from .report import Rates, Report, Result, Settings
from .turns import CaseRun, Entry, Progress, run_all


def run(
    cases: Sequence[Case],
    candidates: Sequence[str] | None = None,
    settings: Settings = Settings(),  # noqa: B008, it is frozen
    progress: Progress = lambda done, total, doing: None,
) -> Report:
    """Check the candidates on every case, and time those that pass.

    Parameters
    ----------
    cases : sequence of Case
        Such as `cases` gives.
    candidates : sequence of str, optional
        Among the keys of ``gsbn.bench.candidate.NAMES``; all that make sense on this machine if absent.
    settings : Settings
        How long to measure.
    progress : callable
        Called with how many cases are done, which may be a fraction, how many there are, and what is being done.

    Returns
    -------
    Report
        A candidate that is not installed, cannot serve a case or computes it wrongly has a ``failure`` in place of
        times. After KeyboardInterrupt it is of what was done, with ``interrupted`` set.

    Raises
    ------
    ValueError
        For a candidate of another name.

    >>> report = run(cases([(1024, 8192, 8192)], ["bfloat16"]), ["gsbn", "pytorch"])
    >>> {result.candidate: result.seconds for result in report.results}
    """
    gpu = has_gpu()
    chosen = list(candidates or names(gpu))
    if unknown := sorted(set(chosen) - set(NAMES)):
        raise ValueError(f"candidates: expected names among {', '.join(NAMES)}; got {', '.join(unknown)}")
    progress(0, len(cases), "loading libraries")
    libraries.load(chosen)
    clock = GpuClock() if gpu else Clock()
    rates, interrupted = Rates(1.0, {}), True
    results: tuple[Result, ...] = ()
    with clock.active():
        try:
            progress(0, len(cases), "measuring the machine's own rates")
            rates = measure_rates(clock, {case.kind for case in cases})
            results, interrupted = run_all(cases, lambda case: _LayerRun(case, chosen, clock, settings), progress)
        except KeyboardInterrupt:  # before any case
            pass
    device = "cuda" if gpu else "cpu"
    return Report("layers", environment(), settings, results, device, rates, interrupted=interrupted)


class _LayerRun(CaseRun):
    def __init__(self, case: Case, names: Sequence[str], clock: Clock, settings: Settings) -> None:
        super().__init__([Entry(name, case) for name in names], NAMES, case.precision, settings)
        self.case, self.clock = case, clock

    @functools.cached_property
    def truth(self) -> bounds.Truth:
        case, xp = self.case, self.clock.xp
        operands = bounds.make_operands(xp, *case.shape, case.dtype, seed=self.settings.seed, with_scale=case.scale)
        return bounds.Truth(xp, case, operands, None if case.direction == "forward" else bounds.draw_dy(xp, operands))

    def check(self, entry: Entry) -> None:
        truth, begun = self.truth, time.perf_counter()
        entry.candidate = peers.make(entry.name, self.case, truth.operands, self.clock.xp)
        outputs = entry.candidate.outputs()
        entry.facts["first_s"] = time.perf_counter() - begun
        judged = truth.judge(outputs)
        # What claims float32 by other products may fall back to TF32: its error tells, beside its time.
        kind = "tf32" if is_emulated(entry.name) else self.case.kind
        error = bounds.demand(judged, kind, held=entry.name.startswith("gsbn"))
        entry.facts.update(path=entry.candidate.path, error=error)

    def checked(self) -> None:
        """Call all once: how many calls a trial has is the same for all candidates."""
        self.__dict__.pop("truth", None)
        if self.clock.xp.__name__ == "cupy":
            self.clock.xp.get_default_memory_pool().free_all_blocks()  # before any graph lives in the pool
        for entry in self.live():
            self.attempt(entry, self._call_once)
        once = [entry.once for entry in self.live()] or [1.0]
        fill = max(1, min(100, round(self.settings.trial_ms / 1e3 / statistics.median(once))))
        self.calls = self.settings.calls or fill

    def _call_once(self, entry: Entry) -> None:
        trial, _ = self.clock.trial(entry.candidate, 1)
        entry.once = min(trial(), trial())

    def prepare(self, entry: Entry) -> None:
        b, i, o = self.case.shape
        result = (b * o if self.case.direction == "forward" else b * i + o * i) * ITEMSIZE[self.case.dtype]
        peak = self.clock.extra_memory(entry.candidate)
        trial, method = self.clock.trial(entry.candidate, self.calls)
        entry.facts.update(calls=self.calls, method=method, extra_bytes=None if peak is None else max(0, peak - result))
        entry.trials["time"] = trial
        entry.trials["host"] = functools.partial(self.clock.host, entry.candidate)
        trial()
