"""Measure the candidates on every case: made, checked, and only then timed, one beside the other."""

from __future__ import annotations

import csv
import dataclasses
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import gradients, peers
from .bounds import expected, make_operands
from .clock import Clock, GpuClock, Measurement, balanced_order, median_interval, settle
from .machine import environment, has_gpu
from .peers import Candidate, Unavailable

__all__ = ["PRESETS", "Case", "Rates", "Report", "Result", "Settings", "cases", "median_interval", "run"]

SCHEMA = 1
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
DTYPES = {  # as asked for: (dtype of the arrays, precision)
    "float32": ("float32", "highest"),
    "tf32": ("float32", "high"),
    "bfloat16": ("bfloat16", "highest"),
    "float16": ("float16", "highest"),
    "float64": ("float64", "highest"),
}
# Peers are held to their own rounding, norm-wise on standard normal data; gsbn is held to its derived bound.
PEER_TOLERANCE = {"float32": 2e-5, "tf32": 1e-2, "bfloat16": 5e-2, "float16": 1e-2, "float64": 1e-12}


def _sweep() -> list[tuple[int, int, int]]:
    """Each size over powers of two and their ragged neighbours, the other two at 2048."""
    sizes = [p + d for p in (64, 256, 1024, 4096, 16384) for d in (-1, 0, 1)]
    return [(n, 2048, 2048) for n in sizes] + [(2048, n, 2048) for n in sizes] + [(2048, 2048, n) for n in sizes]


PRESETS: dict[str, list[tuple[int, int, int]]] = {
    "kernelbench": [(1024, 8192, 8192), (16384, 4096, 4096), (4096, 1024, 1024), (128, 1024, 512)],
    "small": [(32, 256, 256), (128, 1024, 512), (256, 512, 1024), (1000, 300, 500)],
    "sweep": _sweep(),
}


@dataclass(frozen=True)
class Case:
    """One forward: x (batch, in_features), weight (out_features, in_features), every vector and statistic given.

    ``direction`` "backward" is that of such a forward, all six gradients; "step" is both.
    """

    batch: int
    in_features: int
    out_features: int
    dtype: str = "float32"
    precision: str = "highest"
    training: bool = True
    direction: str = "forward"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.in_features, self.out_features

    @property
    def kind(self) -> str:
        """The dtype as a reader names it: a key of ``DTYPES``."""
        return "tf32" if self.dtype == "float32" and self.precision == "high" else self.dtype

    @property
    def title(self) -> str:
        direction = "" if self.direction == "forward" else f", {self.direction}"
        return f"{self.shape} {self.kind} {'training' if self.training else 'inference'}{direction}"

    @property
    def flops(self) -> int:
        gemms = {"forward": 1, "backward": 2, "step": 3}[self.direction]
        return gemms * 2 * self.batch * self.in_features * self.out_features

    @property
    def least_bytes(self) -> int:
        """x, weight, vectors and running statistics read once; y, and in training the statistics, written once.

        In a backward x, weight, dy and what the forward kept are read, and the gradients written; in a step y is
        written besides and nothing need be kept.
        """
        b, i, o = self.shape
        if self.direction != "forward":
            return (2 * (b * i + o * i) + 2 * b * o + 12 * o) * ITEMSIZE[self.dtype]
        return (b * i + o * i + b * o + (8 if self.training else 6) * o) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Settings:
    """``rounds`` of interleaved trials (at least 7, however long), no new round after ``seconds`` a case; before them,
    rounds that do not count until the card's clocks have settled, for ``settle`` seconds at most. A trial is ``calls``
    calls back to back, or as many as fill ``trial_ms``. ``graph=False`` captures nothing."""

    rounds: int = 120
    seconds: float = 5.0
    settle: float = 2.0
    trial_ms: float = 4.0
    calls: int | None = None
    graph: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Rates:
    """The ceilings measured in this process: bytes/s (read + written) of a large copy, FLOP/s of a large GEMM by kind.

    The copy runs from memory: operands that stay in L2 between the calls of a trial may pass this floor. For float32 at
    ``highest`` the matrix rate is the larger of the IEEE GEMM's and a third of float16's, since three
    half-precision products are the least known to reach float32's accuracy.
    """

    copy: float
    matrix: dict[str, float]

    def floor(self, case: Case) -> float:
        """Seconds that no implementation of this case can beat: the larger of arithmetic and traffic."""
        matrix = self.matrix.get(case.kind)
        return max(case.flops / matrix if matrix else 0.0, case.least_bytes / self.copy)


@dataclass(frozen=True)
class Result:
    """One candidate on one case; times in seconds. ``failure`` says why there are none."""

    case: Case
    candidate: str
    path: str = ""  # which GEMM gsbn took
    method: str = ""  # graph, queue or wall: see gsbn.bench.clock
    calls: int = 0
    device: Measurement | None = None
    host: Measurement | None = None
    extra_bytes: int | None = None  # peak beyond the operands and the result; None if unknown
    error: float | None = None  # norm-wise, against float64
    failure: str = ""

    @property
    def is_gemm(self) -> bool:
        return peers.is_gemm(self.candidate)


@dataclass(frozen=True)
class Report:
    """Everything one run measured, with what it was measured on."""

    environment: dict[str, Any]
    settings: Settings
    rates: Rates
    results: tuple[Result, ...]
    interrupted: bool = False
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def by_case(self) -> dict[Case, dict[str, Result]]:
        """Results by case, then by candidate, in the order they were run."""
        table: dict[Case, dict[str, Result]] = {}
        for result in self.results:
            table.setdefault(result.case, {})[result.candidate] = result
        return table

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a result. ``times <peer>`` is the peer's device time over this candidate's: above 1,
        this one is faster; ``bare gemm`` is the fastest of the bare GEMMs."""
        rows = []
        for case, results in self.by_case().items():
            others = {name: r.device.median for name, r in results.items() if r.device and not r.is_gemm}
            if (gemm := fastest(results, "gemm-")) and gemm.device:
                others["bare gemm"] = gemm.device.median
            floor = self.rates.floor(case)
            for r in results.values():
                row = dataclasses.asdict(case) | {"candidate": r.candidate, "path": r.path, "method": r.method}
                row |= {"calls": r.calls, "failure": r.failure, "error": r.error, "extra_bytes": r.extra_bytes}
                row |= _columns("device", r.device) | _columns("host", r.host)
                seconds = r.device.median if r.device else None
                row["tflops"] = case.flops / seconds / 1e12 if seconds else None
                row["gbytes_per_s"] = case.least_bytes / seconds / 1e9 if seconds else None
                row["floor_us"] = floor * 1e6
                row["floor_share"] = floor / seconds if seconds else None
                row |= {f"times {name}": t / seconds if seconds else None for name, t in others.items()}
                rows.append(row)
        return rows

    def save_json(self, file: str | Path) -> None:
        """Environment, settings, rates and ``rows()``."""
        content = {
            "schema": SCHEMA,
            "date": self.date,
            "interrupted": self.interrupted,
            "environment": self.environment,
            "settings": dataclasses.asdict(self.settings),
            "rates": dataclasses.asdict(self.rates),
            "results": self.rows(),
        }
        Path(file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def save_csv(self, file: str | Path) -> None:
        """``rows()`` with one header line; the columns of all rows together."""
        rows = self.rows()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with Path(file).open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, columns)
            writer.writeheader()
            writer.writerows(rows)


def fastest(results: dict[str, Result], prefix: str) -> Result | None:
    """The fastest timed candidate whose name starts so."""
    timed = [r for r in results.values() if r.device and r.candidate.startswith(prefix)]
    return min(timed, key=lambda r: r.device.median if r.device else 0.0) if timed else None


def cases(
    shapes: str | Iterable[tuple[int, int, int]] = "kernelbench",
    dtypes: Iterable[str] = ("float32", "tf32", "bfloat16", "float16"),
    training: Iterable[bool] = (True,),
    directions: Iterable[str] = ("forward",),
) -> list[Case]:
    """Every combination of shapes ``(B, I, O)``, or a preset's name, with dtypes (keys of ``DTYPES``), modes and
    directions (among "forward", "backward" and "step")."""
    chosen = PRESETS[shapes] if isinstance(shapes, str) else list(shapes)
    rest = list(itertools.product(dtypes, training, directions))
    return [Case(*shape, *DTYPES[name], mode, way) for shape in chosen for name, mode, way in rest]


def run(
    cases: Sequence[Case],
    candidates: Sequence[str] | None = None,
    settings: Settings = Settings(),
    progress: Callable[[float, int, str], None] = lambda done, total, doing: None,
) -> Report:
    """Measure the candidates (names from ``gsbn.bench.peers.NAMES``; default all) on every case. ``progress`` hears how
    many of the cases are done, as a fraction, and what is being done.

    A candidate that is not installed, cannot serve a case, or computes it wrongly has a ``failure`` in place of times;
    nothing is raised for it. KeyboardInterrupt ends the run and returns what is done, ``interrupted`` set: of the case
    in hand, the rounds that every candidate has completed.
    """
    gpu = has_gpu()
    chosen = list(candidates or peers.names(gpu))
    if unknown := sorted(set(chosen) - set(peers.NAMES)):
        raise ValueError(f"candidates: expected names among {', '.join(peers.NAMES)}; got {', '.join(unknown)}")
    progress(0, len(cases), "loading libraries")
    peers.load(chosen)
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
                    with peers.float32_precision(case.precision):
                        case_run.run(step)
                finally:
                    results += case_run.results()
        except KeyboardInterrupt:
            interrupted = True
    return Report(environment(), settings, rates, tuple(results), interrupted)


def measure_rates(clock: Clock, kinds: set[str]) -> Rates:
    """The copy rate and each kind's matrix rate (a key of ``DTYPES``), on random data, by the clock's own trials."""
    gpu, xp = isinstance(clock, GpuClock), clock.xp
    source = xp.random.RandomState(0).uniform(size=(2**27 if gpu else 2**24))  # 1 GiB, or 128 MiB
    target = xp.empty_like(source)

    def duplicate() -> None:
        if gpu:  # the driver's copy: CuPy's elementwise one reaches two thirds of it
            target.data.copy_from_device_async(source.data, source.nbytes)
        else:
            xp.copyto(target, source)

    # In a graph it would be a copy engine's, at two thirds of the rate.
    copy = Candidate("copy", xp.__name__, duplicate, lambda: (target, None, None), capturable=False)
    copy_rate = 2 * source.nbytes / _best(clock, copy)
    matrix: dict[str, float] = {}
    for kind in sorted(kinds | ({"float16"} if gpu and "float32" in kinds else set())):
        for n in (4096, 8192) if gpu else (1024,):
            case = Case(n, n, n, *DTYPES[kind])
            for name in ("gemm-torch", "gemm-cupy" if gpu else "gemm-numpy"):
                try:
                    with peers.float32_precision(case.precision):
                        candidate = peers.make(name, case, make_operands(xp, n, n, n, case.dtype), xp)
                        rate = case.flops / _best(clock, candidate)
                except (Unavailable, ImportError, RuntimeError, TypeError, ValueError):
                    continue
                matrix[kind] = max(rate, matrix.get(kind, 0.0))
    if gpu and "float32" in kinds:
        matrix["float32"] = max(matrix.get("float32", 0.0), matrix.get("float16", 0.0) / 3)
    return Rates(copy_rate, matrix)


def _best(clock: Clock, candidate: Candidate) -> float:
    """Seconds a call: the median of five trials that last about 10 ms each."""
    candidate.call()
    once, _ = clock.trial(candidate, 1)
    trial, _ = clock.trial(candidate, max(1, min(100, int(0.01 / once()))))
    return median_interval([trial() for _ in range(5)]).median


@dataclass(eq=False)
class _Entry:
    """A candidate on the case in hand, and what is known of it so far; a ``failure`` takes it out of the race."""

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
        """``progress`` hears the fraction done, and of what."""
        peers.forget_compiled()
        gc.collect()  # a module's class is a cycle that holds the last case's operands
        self._check(lambda done, name: progress(done / 2, f"checking {peers.NAMES[name]}"))
        if self.clock.xp.__name__ == "cupy":
            self.clock.xp.get_default_memory_pool().free_all_blocks()  # before any graph lives in the pool
        self._each(self._try)
        if self.settings.calls is None and (once := [entry.once for entry in self._live()]):
            self.calls = max(1, min(100, round(self.settings.trial_ms / 1e3 / statistics.median(once))))
        self._each(self._prepare)
        gc_was_on = gc.isenabled()
        gc.disable()  # a collection in a trial would be charged to whoever runs it
        try:
            progress(0.5, "until the clocks settle")
            turns = itertools.count()
            settle(lambda: self._round(next(turns)), longest=self.settings.settle)
            for entry in self.entries:
                entry.device.clear()
                entry.host.clear()
            started = time.perf_counter()
            for turn in range(self.settings.rounds):
                if turn >= 7 and time.perf_counter() - started > self.settings.seconds:
                    break
                progress(0.5 + turn / self.settings.rounds / 2, f"round {turn + 1}")
                self._round(turn)
        finally:
            if gc_was_on:
                gc.enable()

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

    def _round(self, turn: int) -> float:
        """A trial of every candidate; the sum of their times, each in units of its own first."""
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
        case, xp, forward = self.case, self.clock.xp, self.case.direction == "forward"
        data: list[Any] = []

        def draw(entry: _Entry) -> None:
            if not data:
                operands = make_operands(xp, *case.shape, case.dtype, seed=self.settings.seed)
                if forward:
                    data.extend((operands, expected(xp, operands, case.precision, case.training)))
                else:
                    dy = gradients.draw_dy(xp, operands)
                    data.extend((operands, gradients.expected(xp, operands, dy, case.precision, case.training)))

        def check(entry: _Entry) -> None:
            progress(self.entries.index(entry) / len(self.entries), entry.name)
            operands, truth = data
            entry.candidate = peers.make(entry.name, case, operands, xp)
            keys: tuple[str, ...] = gradients.FIELDS
            if forward:
                keys = ("g", "", "") if entry.candidate.is_gemm else ("y", "running_mean", "running_var")
            got = dict(zip(keys, entry.candidate.outputs(), strict=True))
            judged = {key: truth[key].judge(value, xp) for key, value in got.items() if key in truth}
            # Autograd's gradient of the scale is noise in float32: the matrices tell whether a peer is right.
            entry.error = max(judged[key].norm_error for key in keys[: 1 if forward else 2])
            if entry.name.startswith("gsbn") and (bad := [key for key, j in judged.items() if not j.passed]):
                raise ValueError(f"wrong result: {bad[0]} uses {judged[bad[0]].share:.3g} of its bound")
            if not entry.error <= PEER_TOLERANCE[case.kind]:
                raise ValueError(
                    f"wrong result: norm-wise error {entry.error:.2g} over {PEER_TOLERANCE[case.kind]:.2g}"
                )

        self._each(draw)
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


def _columns(name: str, m: Measurement | None) -> dict[str, float | None]:
    """A measurement in microseconds, as flat columns."""
    values = (m.median * 1e6, m.low * 1e6, m.high * 1e6) if m else (None, None, None)
    return dict(zip((f"{name}_us", f"{name}_low_us", f"{name}_high_us"), values, strict=True))
