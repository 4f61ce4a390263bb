"""What a run measured: results, and the tables of numbers that follow from them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .candidate import is_gemm
from .case import Case
from .clock import Measurement
from .rates import Rates

SCHEMA = 2


@dataclass(frozen=True)
class Settings:
    """How long to measure a case: ``rounds`` of interleaved trials; after ``seconds`` no new one, but at least 7.

    Before them, rounds are run that do not count, until the card's clocks have settled or ``settle`` seconds are over.
    A trial is ``calls`` calls back to back, or as many as fill ``trial_ms``. ``graph=False`` captures nothing.
    """

    rounds: int = 120
    seconds: float = 5.0
    settle: float = 2.0
    trial_ms: float = 4.0
    calls: int | None = None
    graph: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """One candidate on one case; times in seconds. ``failure`` says why there are none."""

    case: Case
    candidate: str
    path: str = ""  # which GEMM gsbn took
    method: str = ""  # graph, queue or wall: see gsbn.bench.clock
    calls: int = 0
    device: Measurement | None = None  # the GPU's time; on the CPU, the wall clock's
    host: Measurement | None = None
    extra_bytes: int | None = None  # peak beyond the operands and the result; None if unknown
    error: float | None = None  # norm-wise, against float64: gsbn.bench.bounds.Judgement
    failure: str = ""

    @property
    def seconds(self) -> float:
        """The median of the time; infinite if there is none."""
        return self.device.median if self.device else math.inf


def now() -> str:
    """The date and time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Report:
    """Everything one run measured, with what it was measured on."""

    environment: dict[str, Any]
    settings: Settings
    rates: Rates
    results: tuple[Result, ...]
    interrupted: bool = False
    date: str = field(default_factory=now)

    def by_case(self) -> dict[Case, dict[str, Result]]:
        """Results by case, then by candidate, in the order they were run."""
        table: dict[Case, dict[str, Result]] = {}
        for result in self.results:
            table.setdefault(result.case, {})[result.candidate] = result
        return table

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary for each result. ``time_us`` is the GPU's time, on the CPU the wall clock's.
        ``times <peer>`` is the peer's time over this candidate's: where it is above 1, this one is faster. ``bare
        gemm`` is the fastest of the bare GEMMs."""
        rows = []
        for case, results in self.by_case().items():
            others = {name: r.seconds for name, r in results.items() if r.device and not is_gemm(name)}
            if gemm := fastest(results, "gemm-"):
                others["bare gemm"] = gemm.seconds
            floor = self.rates.floor(case)
            for r in results.values():
                row = dataclasses.asdict(case) | {"candidate": r.candidate, "path": r.path, "method": r.method}
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

    def to_json(self) -> str:
        """Environment, settings, rates and ``rows()``."""
        content = {name: getattr(self, name) for name in ("date", "interrupted", "environment")}
        content |= {name: dataclasses.asdict(getattr(self, name)) for name in ("settings", "rates")}
        content = {"schema": SCHEMA} | content | {"results": self.rows()}
        return json.dumps(content, indent=1) + "\n"

    def to_csv(self) -> str:
        """``rows()`` under one header line, which has the columns of all rows."""
        rows, stream = self.rows(), io.StringIO()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return stream.getvalue()

    def save_json(self, file: str | Path) -> None:
        """Write ``to_json()`` into a file."""
        Path(file).write_text(self.to_json(), encoding="utf-8")

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
