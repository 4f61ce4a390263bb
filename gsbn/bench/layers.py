"""One layer: gsbn's forward, backward or step beside every peer that is installed, in one process."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .._plan import ITEMSIZE
from . import bounds, libraries, peers
from .candidate import NAMES, is_gemm, names
from .case import Case
from .clock import Clock, GpuClock, Measurement
from .machine import environment, has_gpu
from .rates import Rates, measure_rates
from .report import AnyReport, Settings, now
from .turns import CaseRun, Entry, Progress, run_all

SCHEMA = 2


@dataclass(frozen=True)
class Result:
    """One candidate on one case; times in seconds a call."""

    case: Case
    candidate: str
    path: str = ""  # the GEMM that gsbn chose
    method: str = ""  # how it was timed, "graph", "queue" or "wall": see gsbn.bench.clock
    calls: int = 0  # of a trial
    device: Measurement | None = None  # time on the GPU; on the CPU, by the wall clock
    host: Measurement | None = None  # time until the call returns
    extra_bytes: int | None = None  # the most that was allocated beyond operands and result; None if unknown
    error: float | None = None  # against float64: norm of the error over norm of the truth
    failure: str = ""  # why there are no times

    @property
    def timed(self) -> bool:
        """Whether there are times."""
        return self.device is not None

    @property
    def seconds(self) -> float:
        """The median of the time; infinite if there is none."""
        return self.device.median if self.device else math.inf


@dataclass(frozen=True)
class Report(AnyReport[Case, Result]):
    """Everything one run measured, with what it was measured on."""

    environment: dict[str, Any]
    settings: Settings
    rates: Rates
    results: tuple[Result, ...]
    interrupted: bool = False
    date: str = field(default_factory=now)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary for each result, times in microseconds.

        ``time_us`` is the time on the GPU; on the CPU, by the wall clock. ``times <peer>`` is the peer's time over this
        candidate's: above 1, this one is faster. ``bare gemm`` is the fastest of the bare GEMMs.
        """
        rows = []
        for case, results in self.by_case().items():
            others = {name: r.seconds for name, r in results.items() if r.device and not is_gemm(name)}
            if gemm := fastest(results, "gemm-"):
                others["bare gemm"] = gemm.seconds
            floor = self.rates.floor(case)
            for r in results.values():
                row = asdict(case) | {"candidate": r.candidate, "path": r.path, "method": r.method}
                row |= {"calls": r.calls, "failure": r.failure, "error": r.error, "extra_bytes": r.extra_bytes}
                row |= _columns("time", r.device) | _columns("host", r.host)
                seconds = r.seconds if r.device else None
                row["tflops"] = case.flops / seconds / 1e12 if seconds else None
                row["gbytes_per_s"] = case.least_bytes / seconds / 1e9 if seconds else None
                row["floor_us"] = floor * 1e6
                row["floor_share"] = floor / seconds if seconds else None
                row |= {f"times {name}": t / seconds if seconds else None for name, t in others.items()}
                rows.append(row)
        return rows

    def content(self) -> dict[str, Any]:
        """Environment, settings, rates and ``rows()`` as JSON's types."""
        content = {name: getattr(self, name) for name in ("date", "interrupted", "environment")}
        content |= {name: asdict(getattr(self, name)) for name in ("settings", "rates")}
        return {"schema": SCHEMA} | content | {"results": self.rows()}

    @classmethod
    def load(cls, file: str | Path) -> Report:
        """A report that ``save_json`` wrote, but for how many samples its medians are of."""
        saved = json.loads(Path(file).read_text(encoding="utf-8"))
        results = tuple(_result(row) for row in saved["results"])
        settings, rates = Settings(**saved["settings"]), Rates(**saved["rates"])
        return cls(saved["environment"], settings, rates, results, saved["interrupted"], saved["date"])

    def to_csv(self) -> str:
        """``rows()`` under one header line, which has the columns of all rows."""
        rows, stream = self.rows(), io.StringIO()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return stream.getvalue()

    def save_csv(self, file: str | Path) -> None:
        """Write ``to_csv()`` into a file."""
        Path(file).write_text(self.to_csv(), encoding="utf-8")


def fastest(results: dict[str, Result], *prefixes: str) -> Result | None:
    """The fastest timed candidate whose name starts with one of these."""
    timed = [r for r in results.values() if r.device and r.candidate.startswith(prefixes)]
    return min(timed, key=lambda r: r.seconds, default=None)


def _columns(name: str, m: Measurement | None) -> dict[str, float | None]:
    """A measurement in microseconds, a column for each of its figures."""
    values = (m.median * 1e6, m.low * 1e6, m.high * 1e6) if m else (None, None, None)
    return dict(zip((f"{name}_us", f"{name}_low_us", f"{name}_high_us"), values, strict=True))


def _result(row: dict[str, Any]) -> Result:
    """A result from its flat dictionary."""

    def measured(name: str) -> Measurement | None:
        median, low, high = (row[f"{name}{end}"] for end in ("_us", "_low_us", "_high_us"))
        return None if median is None else Measurement(median / 1e6, low / 1e6, high / 1e6, samples=0, confidence=0.95)

    case = Case(**{each.name: row[each.name] for each in fields(Case)})
    told = {name: row[name] for name in ("candidate", "path", "method", "calls", "extra_bytes", "error", "failure")}
    return Result(case, device=measured("time"), host=measured("host"), **told)


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
        times. After KeyboardInterrupt it is of what was done, with ``interrupted`` set; of the case in hand it has the
        rounds that every candidate has completed.

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
    clock = GpuClock(settings.graph) if gpu else Clock()
    with clock.active():
        try:
            progress(0, len(cases), "measuring the machine's own rates")
            rates = measure_rates(clock, {case.kind for case in cases})
        except KeyboardInterrupt:
            return Report(environment(), settings, Rates(1.0, {}), (), True)
        results, interrupted = run_all(cases, lambda case: _LayerRun(case, chosen, clock, settings), progress)
    return Report(environment(), settings, rates, tuple(results), interrupted)


class _LayerRun(CaseRun):
    result = Result

    def __init__(self, case: Case, names: Sequence[str], clock: Clock, settings: Settings) -> None:
        super().__init__([Entry(name, case) for name in names], NAMES, case.precision, settings)
        self.case, self.clock = case, clock

    @functools.cached_property
    def truth(self) -> bounds.Truth:
        case, xp = self.case, self.clock.xp
        operands = bounds.make_operands(xp, *case.shape, case.dtype, seed=self.settings.seed, with_scale=case.scale)
        return bounds.Truth(xp, case, operands, None if case.direction == "forward" else bounds.draw_dy(xp, operands))

    def check(self, entry: Entry) -> None:
        entry.candidate = peers.make(entry.name, self.case, self.truth.operands, self.clock.xp)
        judged = self.truth.judge(entry.candidate.outputs())
        error = bounds.demand(judged, self.case.kind, held=entry.name.startswith("gsbn"))
        entry.facts.update(path=entry.candidate.path, error=error)

    def checked(self) -> None:
        """Call all once: how many calls a trial has is the same for all candidates."""
        self.__dict__.pop("truth", None)
        if self.clock.xp.__name__ == "cupy":
            self.clock.xp.get_default_memory_pool().free_all_blocks()  # before any graph lives in the pool
        self.each(self._call_once)
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
        entry.trials["device"] = trial
        entry.trials["host"] = functools.partial(self.clock.host, entry.candidate)
        trial()
