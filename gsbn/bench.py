"""Measure ``gsbn.forward`` beside every peer that is installed, in one process, checked before it is timed.

>>> from gsbn import bench
>>> report = bench.run(bench.cases([(1024, 8192, 8192)], ["bfloat16", "tf32"]))
>>> report.save_json("today.json")

Without a GPU the NumPy path runs against PyTorch on the CPU. How the clock works is told in ``gsbn._timing``, what the
peers are in ``gsbn._peers``, and which error is allowed in ``gsbn._accuracy``.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gsbn import _peers
from gsbn._accuracy import Operands, expected, make_operands
from gsbn._peers import Candidate, Unavailable
from gsbn._system import environment, has_gpu
from gsbn._timing import Clock, GpuClock, Measurement, median_interval

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
    """One forward: x (batch, in_features), weight (out_features, in_features), every vector and statistic given."""

    batch: int
    in_features: int
    out_features: int
    dtype: str = "float32"
    precision: str = "highest"
    training: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.in_features, self.out_features

    @property
    def kind(self) -> str:
        """The dtype as a reader names it: a key of ``DTYPES``."""
        return "tf32" if self.dtype == "float32" and self.precision == "high" else self.dtype

    @property
    def title(self) -> str:
        return f"{self.shape} {self.kind} {'training' if self.training else 'inference'}"

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.in_features * self.out_features

    @property
    def least_bytes(self) -> int:
        """x, weight, vectors and running statistics read once; y, and in training the statistics, written once."""
        b, i, o = self.shape
        return (b * i + o * i + b * o + (8 if self.training else 6) * o) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Settings:
    """``rounds`` of interleaved trials (at least 7, however long), no new round after ``seconds`` a case. A trial is
    ``calls`` calls back to back, or as many as fill ``trial_ms``. ``graph=False`` captures nothing."""

    rounds: int = 40
    seconds: float = 10.0
    trial_ms: float = 4.0
    calls: int | None = None
    graph: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Rates:
    """The ceilings measured in this process: bytes/s (read + written) of a large copy, FLOP/s of a large GEMM by kind.

    For float32 at ``highest`` the matrix rate is the larger of the IEEE GEMM's and a third of float16's, since three
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
    method: str = ""  # graph, queue or wall: see gsbn._timing
    calls: int = 0
    device: Measurement | None = None
    host: Measurement | None = None
    extra_bytes: int | None = None  # peak beyond the operands and the result; None if unknown
    error: float | None = None  # norm-wise, against float64
    failure: str = ""

    @property
    def is_gemm(self) -> bool:
        return self.candidate.startswith("gemm-")


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
            peers = {name: r.device.median for name, r in results.items() if r.device and not r.is_gemm}
            if (gemm := fastest(results, "gemm-")) and gemm.device:
                peers["bare gemm"] = gemm.device.median
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
                row |= {f"times {name}": t / seconds if seconds else None for name, t in peers.items()}
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
) -> list[Case]:
    """Every combination of shapes ``(B, I, O)``, or a preset's name, with dtypes (keys of ``DTYPES``) and modes."""
    chosen = PRESETS[shapes] if isinstance(shapes, str) else list(shapes)
    modes = list(training)
    return [Case(*shape, *DTYPES[name], mode) for shape in chosen for name in dtypes for mode in modes]


def run(
    cases: Sequence[Case],
    candidates: Sequence[str] | None = None,
    settings: Settings = Settings(),
    progress: Callable[[float, int, str], None] = lambda done, total, doing: None,
) -> Report:
    """Measure the candidates (names from ``gsbn._peers.NAMES``; default all) on every case. ``progress`` hears how
    many of the cases are done, as a fraction, and what is being done.

    A candidate that is not installed, cannot serve a case, or computes it wrongly has a ``failure`` in place of times;
    nothing is raised for it. KeyboardInterrupt ends the run and returns what is done, ``interrupted`` set: of the case
    in hand, the rounds that every candidate has completed.
    """
    gpu = has_gpu()
    chosen = list(candidates or _peers.names(gpu))
    if unknown := sorted(set(chosen) - set(_peers.NAMES)):
        raise ValueError(f"candidates: expected names among {', '.join(_peers.NAMES)}; got {', '.join(unknown)}")
    progress(0, len(cases), "loading libraries")
    _peers.load(chosen)
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

                with _peers.float32_precision(case.precision):
                    _run_case(clock, case, chosen, settings, results, step)
        except KeyboardInterrupt:
            interrupted = True
    return Report(environment(), settings, rates, tuple(results), interrupted)


def measure_rates(clock: Clock, kinds: set[str]) -> Rates:
    """The copy rate and each kind's matrix rate (a key of ``DTYPES``), on random data, by the clock's own trials."""
    gpu, xp = isinstance(clock, GpuClock), clock.xp
    source = xp.random.RandomState(0).uniform(size=(2**27 if gpu else 2**24))  # 1 GiB, or 128 MiB
    target = xp.empty_like(source)
    copy = Candidate("copy", xp.__name__, lambda: xp.copyto(target, source), lambda: (target, None, None))
    copy_rate = 2 * source.nbytes / _best(clock, copy)
    matrix: dict[str, float] = {}
    for kind in sorted(kinds | ({"float16"} if gpu and "float32" in kinds else set())):
        for n in (4096, 8192) if gpu else (1024,):
            case = Case(n, n, n, *DTYPES[kind])
            for name in ("gemm-torch", "gemm-cupy" if gpu else "gemm-numpy"):
                try:
                    with _peers.float32_precision(case.precision):
                        candidate = _peers.make(name, case, make_operands(xp, n, n, n, case.dtype), xp)
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


@dataclass
class _Runner:
    """A candidate that passed its check, with its samples so far."""

    candidate: Candidate
    error: float
    trial: Callable[[], float] = lambda: 0.0
    method: str = ""
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    extra_bytes: int | None = None


def _run_case(
    clock: Clock, case: Case, names: list[str], settings: Settings, results: list[Result],
    progress: Callable[[float, str], None],
) -> None:  # fmt: skip
    """Make and check every candidate, then time them round by round; append to ``results`` whatever happens."""
    xp, runners, calls = clock.xp, [], 0
    try:
        operands = make_operands(xp, *case.shape, case.dtype, seed=settings.seed)
        runners = _checked(clock, case, names, operands, results, lambda done, text: progress(done / 2, text))
        calls, runners = _prepared(clock, case, runners, settings, results)
        started = time.perf_counter()
        gc_was_on = gc.isenabled()
        gc.disable()  # a collection in a trial would be charged to whoever runs it
        try:
            for turn in range(settings.rounds):
                if turn >= 7 and time.perf_counter() - started > settings.seconds:
                    break
                progress(0.5 + turn / settings.rounds / 2, f"round {turn + 1}")
                first = turn % max(len(runners), 1)
                for runner in runners[first:] + runners[:first]:  # nobody always follows the same neighbour
                    seconds, host = runner.trial(), clock.host(runner.candidate)
                    runner.device.append(seconds)
                    runner.host.extend([] if host is None else [host])
        finally:
            if gc_was_on:
                gc.enable()
    except (ImportError, MemoryError, RuntimeError) as error:  # no bfloat16, or too large for this machine
        results.extend(Result(case, name, failure=_first_line(error)) for name in names)
        runners = []
    finally:
        complete = min((len(r.device) for r in runners), default=0)
        for r in runners if complete else []:
            name = r.candidate.name
            results.append(
                Result(
                    case, name, r.candidate.path, r.method, calls, median_interval(r.device[:complete]),
                    median_interval(r.host[:complete]) if r.host else None, r.extra_bytes, r.error,
                )
            )  # fmt: skip


def _checked(
    clock: Clock, case: Case, names: list[str], operands: Operands, results: list[Result],
    progress: Callable[[float, str], None],
) -> list[_Runner]:  # fmt: skip
    """The candidates that are available and right; the others go to ``results`` with a reason."""
    xp, runners = clock.xp, []
    truth = expected(xp, operands, case.precision, case.training)
    for index, name in enumerate(names):
        progress(index / len(names), f"checking {_peers.NAMES[name]}")
        try:
            candidate = _peers.make(name, case, operands, xp)
            keys = ("g", "", "") if candidate.is_gemm else ("y", "running_mean", "running_var")
            got = dict(zip(keys, candidate.outputs(), strict=True))
            judged = {key: truth[key].judge(value, xp) for key, value in got.items() if key in truth}
            error = judged["g" if candidate.is_gemm else "y"].norm_error
            if name.startswith("gsbn") and (bad := [key for key, judgement in judged.items() if not judgement.passed]):
                raise Unavailable(f"wrong result: {bad[0]} uses {judged[bad[0]].share:.3g} of its bound")
            if not error <= PEER_TOLERANCE[case.kind]:
                raise Unavailable(f"wrong result: norm-wise error {error:.2g} over {PEER_TOLERANCE[case.kind]:.2g}")
            runners.append(_Runner(candidate, error))
        except Exception as failure:  # a peer may fail in any way; it must not take the others with it
            results.append(Result(case, name, failure=_first_line(failure)))
    return runners


def _prepared(
    clock: Clock, case: Case, runners: list[_Runner], settings: Settings, results: list[Result]
) -> tuple[int, list[_Runner]]:
    """Choose the calls of a trial, the same for all, make every trial and run it once; measure memory."""
    if clock.xp.__name__ == "cupy":
        clock.xp.get_default_memory_pool().free_all_blocks()  # before any graph lives in the pool
    calls = settings.calls or 1
    if settings.calls is None and runners:
        once = statistics.median(clock.trial(runner.candidate, 1)[0]() for runner in runners for _ in range(2))
        calls = max(1, min(100, round(settings.trial_ms / 1e3 / once)))
    ready = []
    for runner in runners:
        try:
            size = case.batch * case.out_features * ITEMSIZE[case.dtype]
            peak = clock.extra_memory(runner.candidate)
            runner.extra_bytes = None if peak is None else max(0, peak - size)
            runner.trial, runner.method = clock.trial(runner.candidate, calls)
            runner.trial()
            ready.append(runner)
        except Exception as failure:
            results.append(Result(case, runner.candidate.name, failure=_first_line(failure)))
    return calls, ready


def _columns(name: str, m: Measurement | None) -> dict[str, float | None]:
    """A measurement in microseconds, as flat columns."""
    values = (m.median * 1e6, m.low * 1e6, m.high * 1e6) if m else (None, None, None)
    return dict(zip((f"{name}_us", f"{name}_low_us", f"{name}_high_us"), values, strict=True))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
