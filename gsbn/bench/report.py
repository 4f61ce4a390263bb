"""What every bench is told and gives: settings; results by case, and where they were measured; their JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .._timing import Measurement
from .case import Case, ModelCase

SCHEMA = 3
NOTHING = "–"  # a table's cell without a value
ENDS = {"median": "_us", "low": "_low_us", "high": "_high_us"}  # of the names of a time's columns in a row


@dataclass(frozen=True)
class Settings:
    """How long to measure a case.

    Attributes
    ----------
    turns : int
        How many times all candidates are prepared and timed. A peer's time is that of its best turn; gsbn's is of all.
    rounds : int
        Rounds of a turn. In each every candidate has one trial.
    seconds : float
        The rounds of all turns together end after so many seconds, but a turn has 7 at least, or ``rounds``.
    settle : float
        Rounds that do not count come first, until the GPU's clocks have settled or so many seconds are over.
    trial_ms : float
        A trial is as many calls, one after another, as fill so many milliseconds.
    calls : int, optional
        So many calls a trial instead; 1 times every call with a cold L2 cache.
    seed : int
        Of the random operands.

    >>> Settings(rounds=20, seconds=1.0)
    """

    turns: int = 3
    rounds: int = 40
    seconds: float = 5.0
    settle: float = 2.0
    trial_ms: float = 4.0
    calls: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Rates:
    """The fastest that this machine was measured to be.

    Attributes
    ----------
    copy : float
        Bytes per second of a large copy, those read and those written. It goes through memory: a call whose operands
        are in the L2 cache from the call before may be faster.
    matrix : dict of str to float
        FLOP per second of a large GEMM, by a key of `DTYPES`. For float32 it is the larger of the float32 GEMM's and a
        third of float16's: no way is known to reach float32's accuracy with fewer than three 16-bit products.

    >>> Rates(copy=4e12, matrix={"bfloat16": 8e14}).floor(Case(1024, 8192, 8192, "bfloat16"))
    """

    copy: float
    matrix: dict[str, float]

    def floor(self, case: Case) -> float:
        """Seconds that no implementation of this case can beat: the larger of arithmetic and traffic."""
        matrix = self.matrix.get(case.kind)
        return max(case.flops / matrix if matrix else 0.0, case.least_bytes / self.copy)


@dataclass(frozen=True)
class Result:
    """One candidate on one case.

    Attributes
    ----------
    case : Case
        Or a model's case.
    candidate : str
        A key of ``gsbn.bench.candidate.NAMES``, or of the bench's own names.
    times : dict of str to Measurement
        Seconds a call, by what was timed. Of a layer: ``time`` on the GPU (by the wall clock on the CPU) and ``host``,
        until the call returns. Of a model and of ranks: ``called`` one after another, and in a ``graph``.
    facts : dict of str to any
        What else is known. Of a layer: the ``path`` that gsbn chose; ``error`` against float64, norm of the error over
        norm of the truth; ``method``, how it was timed; ``calls`` of a trial; ``extra_bytes`` beyond operands and
        result; ``first_s``, the seconds to the first result, in which all that needs it is compiled.
    failure : str
        Why there are no times.
    """

    case: Any
    candidate: str
    times: dict[str, Measurement] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def median(self, way: str) -> float | None:
        """The median in seconds of what was timed so, if it was."""
        found = self.times.get(way)
        return found.median if found else None

    @property
    def seconds(self) -> float:
        """The median of the first of ``times``; infinite if there is none."""
        return next((time.median for time in self.times.values()), math.inf)

    def row(self) -> dict[str, Any]:
        """One flat dictionary as JSON's types, times in microseconds."""
        row = asdict(self.case) | {"candidate": self.candidate, "failure": self.failure} | self.facts
        for way, time in self.times.items():
            row |= {f"{way}{end}": getattr(time, name) * 1e6 for name, end in ENDS.items()}
        return row

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Result:
        """The result that ``row()`` is of, but for how many samples its medians are of; an old row may lack fields."""
        row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        kind = ModelCase if "widths" in row else Case
        case = kind(**{each.name: row.pop(each.name) for each in fields(kind) if each.name in row})
        times = {}
        for way in [key[: -len("_low_us")] for key in row if key.endswith("_low_us")]:
            found = {name: row.pop(f"{way}{end}") for name, end in ENDS.items()}
            if found["median"] is not None:
                times[way] = Measurement(**{name: us / 1e6 for name, us in found.items()}, samples=0, confidence=0.95)
        return cls(case, row.pop("candidate"), times, failure=row.pop("failure"), facts=row)


@dataclass(frozen=True)
class Report:
    """Everything one run measured, with what it was measured on."""

    bench: str  # layers, models or ranks
    environment: dict[str, Any]  # of ``gsbn.bench.machine``
    settings: Settings
    results: tuple[Result, ...]
    device: str = "cuda"  # or cpu
    rates: Rates | None = None  # of layers
    ranks: int = 1
    interrupted: bool = False
    failure: str = ""  # why it ended early
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def on_gpu(self) -> bool:
        """Whether it was measured on a GPU."""
        return self.device == "cuda"

    @property
    def measured(self) -> bool:
        """Whether anything was timed."""
        return any(result.times for result in self.results)

    def by_case(self) -> dict[Any, dict[str, Result]]:
        """Results by case, then by candidate, in the order in which they were run."""
        table: dict[Any, dict[str, Result]] = {}
        for result in self.results:
            table.setdefault(result.case, {})[result.candidate] = result
        return table

    def rows(self) -> Iterator[dict[str, Any]]:
        """``Result.row()`` of each."""
        return (result.row() for result in self.results)

    def to_json(self) -> str:
        """All of it as JSON."""
        whole = {"schema": SCHEMA} | {each.name: getattr(self, each.name) for each in fields(self)}
        whole |= {"settings": asdict(self.settings), "rates": asdict(self.rates) if self.rates else None}
        return json.dumps(whole | {"results": list(self.rows())}, indent=1) + "\n"

    def save_json(self, file: str | Path) -> None:
        """Write ``to_json()`` into a file."""
        Path(file).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, file: str | Path) -> Report:
        """A report that ``save_json`` wrote, but for how many samples its medians are of."""
        saved = json.loads(Path(file).read_text(encoding="utf-8"))
        if (schema := saved.pop("schema")) != SCHEMA:
            raise ValueError(f"{file}: expected a report of schema {SCHEMA}, got {schema}")
        saved["results"] = tuple(map(Result.of_row, saved["results"]))
        saved["settings"] = Settings(**saved["settings"])
        saved["rates"] = Rates(**saved["rates"]) if saved["rates"] else None
        return cls(**saved)
