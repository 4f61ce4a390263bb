"""What every bench is told, and what every report of one has: settings, results by case, and where it was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

NOTHING = "–"  # a table's cell without a value


@dataclass(frozen=True)
class Settings:
    """How long to measure a case.

    Attributes
    ----------
    rounds : int
        Rounds in which every candidate has one trial.
    seconds : float
        No new round begins after so many seconds, but 7 are run at least.
    settle : float
        Rounds that do not count come first, until the GPU's clocks have settled or so many seconds are over.
    trial_ms : float
        A trial is as many calls, one after another, as fill so many milliseconds.
    calls : int, optional
        So many calls a trial instead; 1 times every call with a cold L2 cache.
    graph : bool
        Whether calls are captured in CUDA graphs where that is possible.
    seed : int
        Of the random operands.

    >>> Settings(rounds=20, seconds=1.0)
    """

    rounds: int = 120
    seconds: float = 5.0
    settle: float = 2.0
    trial_ms: float = 4.0
    calls: int | None = None
    graph: bool = True
    seed: int = 0


C = TypeVar("C")
R = TypeVar("R")


def now() -> str:
    """The date and time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class AnyReport(Generic[C, R]):
    """What the report of any bench has: results R of cases C. A bench's own is a dataclass of at least these fields.

    A result has a ``case``, a ``candidate``, a ``failure`` and whether it was ``timed``.
    """

    PRESET: ClassVar[str]  # its name in what is saved
    environment: dict[str, Any]  # of ``gsbn.bench.machine``
    settings: Settings
    results: Sequence[Any]
    interrupted: bool
    date: str

    @property
    def on_gpu(self) -> bool:
        """Whether it was measured on a GPU, which PyTorch may not see."""
        return bool(self.environment["gpus"]) and getattr(self, "device", "cuda") == "cuda"

    @property
    def measured(self) -> bool:
        """Whether anything was timed."""
        return any(result.timed for result in self.results)

    def by_case(self) -> dict[C, dict[str, R]]:
        """Results by case, then by candidate, in the order in which they were run."""
        table: dict[C, dict[str, R]] = {}
        for result in self.results:
            table.setdefault(result.case, {})[result.candidate] = result
        return table

    def content(self) -> dict[str, Any]:
        """All of it as JSON's types."""
        return {"schema": 1, "preset": self.PRESET, **asdict(self)}  # type: ignore[call-overload]

    def to_json(self) -> str:
        """``content()`` as text."""
        return json.dumps(self.content(), indent=1) + "\n"

    def save_json(self, file: str | Path) -> None:
        """Write ``to_json()`` into a file."""
        Path(file).write_text(self.to_json(), encoding="utf-8")
