"""Several ranks that share a batch: what ``group=`` costs beside no synchronisation and beside PyTorch's SyncBatchNorm.

The layer is Linear without bias, scale and BatchNorm1d in training. Its forward is timed, and its forward with the
backward; every rank has the same number of rows. ``run`` starts a process for each rank (``gsbn.bench.rank``). Each has
a GPU of its own and talks over NCCL, or all are on the CPU and talk over gloo. A process runs all candidates, in turns.

A trial begins when all ranks have reached a barrier. *As called* is the time between two CUDA events around calls that
the host makes one after another; *in a graph* is the time of a replay of a CUDA graph of ten calls. One call, or
replay, comes before and is not timed: it absorbs the ranks' different starts, and warms the caches as a loop does. The
ranks wait for each other, so a call takes as long as on the slowest rank: the largest of their medians.

GPUs differ a little in speed, and a rank that waits for a slower one loses time, however it waits. The candidate
``gsbn-reduce`` shows how much: gsbn without a group, but with an ``all_reduce`` of one float after the forward and
another after the backward.

Before anything is timed, the candidates that share statistics are checked against float64 of the whole batch, and the
running statistics of a group must have the same bits on all ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import gsbn

from . import libraries, page
from .case import Case
from .case import cases as cases_of
from .clock import Measurement
from .machine import environment
from .page import SERIES, SHORT, Column, markdown_table, of, shown
from .report import NOTHING, AnyReport, Settings, now
from .turns import Progress

if TYPE_CHECKING:
    from rich.console import Console

NAMES = {
    "gemm": "bare GEMM",
    "pytorch": "PyTorch eager, local",
    "pytorch-sync": "PyTorch eager, SyncBatchNorm",
    "gsbn": "gsbn, local",
    "gsbn-reduce": "gsbn, local, and an all_reduce",
    "gsbn-peer": "gsbn, group",
    "gsbn-nccl": "gsbn, group over NCCL",
    "gsbn-gloo": "gsbn, group over gloo",
}
ON_GPUS = tuple(name for name in NAMES if name != "gsbn-gloo")
ON_A_CPU = ("gemm", "pytorch", "gsbn", "gsbn-reduce", "gsbn-gloo")  # SyncBatchNorm refuses CPU tensors
GROUPS = ("gsbn-peer", "gsbn-nccl", "gsbn-gloo")  # the first that is there is what a user gets
DIRECTIONS = ("forward", "step")
SHAPES = [(1024, 8192, 8192), (16384, 4096, 4096), (4096, 1024, 1024), (1024, 2048, 8192)]
REDUCED = [(64, 96, 48), (256, 32, 64)]
WAYS = ("called", "graph")  # fields of RanksResult
COLOURS = {"gemm": SERIES["gemm-"][1], "pytorch": SERIES["pytorch"][1], "pytorch-sync": SERIES["compile"][1],
           "gsbn": "#e8a2aa", "gsbn-reduce": "#b3767f", "gsbn-peer": SERIES["gsbn"][1], "gsbn-nccl": "#8c2f3d",
           "gsbn-gloo": "#8c2f3d"}  # fmt: skip
TITLES = {"forward": "Forward in training", "step": "Training step (forward and backward)"}
PATIENCE = 300.0  # seconds without a word from rank 0: kernels may have to be compiled
WORKER = [sys.executable, "-m", "gsbn.bench.rank"]


class Task(NamedTuple):
    """What a rank is told to do, in JSON's types."""

    rank: int
    size: int
    port: int  # where the ranks meet
    device: str
    candidates: Sequence[str]
    cases: Sequence[dict[str, Any]]
    settings: dict[str, Any]


@dataclass
class RanksResult:
    """One candidate on one case. ``failure`` says why there are no times, ``graph_failure`` why no graph has any."""

    case: Case
    candidate: str
    calls: int = 0  # of a trial as called
    called: list[Measurement] = field(default_factory=list)  # of each rank, in seconds a call
    graph: list[Measurement] = field(default_factory=list)
    error: float | None = None  # of y, norm-wise, against float64 of the whole batch; the largest of the ranks
    graph_failure: str = ""
    failure: str = ""

    @property
    def timed(self) -> bool:
        return bool(self.called)

    def seconds(self, way: str) -> float | None:
        """A call's time, ``called`` or in a ``graph``: that of the slowest rank."""
        return max((rank.median for rank in getattr(self, way)), default=None)


@dataclass(frozen=True)
class RanksReport(AnyReport[Case, RanksResult]):
    """Everything one run measured, with what it was measured on. ``failure`` says why it ended early."""

    PRESET: ClassVar[str] = "ranks"
    environment: dict[str, Any]
    settings: Settings
    device: str  # cuda or cpu
    ranks: int
    results: list[RanksResult]
    interrupted: bool = False
    failure: str = ""
    date: str = field(default_factory=now)

    def of(self, direction: str) -> dict[Case, dict[str, RanksResult]]:
        """``by_case``, less the other direction."""
        return {case: results for case, results in self.by_case().items() if case.direction == direction}

    def content(self) -> dict[str, Any]:
        """Everything, and the times of the tables in microseconds."""
        content = super().content()
        for row, result in zip(content["results"], self.results, strict=True):
            times = {way: result.seconds(way) for way in WAYS}
            row.update({f"{way}_us": None if time is None else time * 1e6 for way, time in times.items()})
        return content


def cases(
    shapes: Sequence[tuple[int, int, int]] = (),
    kinds: Sequence[str] = (),
    directions: Sequence[str] = (),
    gpu: bool = True,
) -> list[Case]:
    """Shapes (rows a rank, I, O) in these dtypes and directions; for what is empty, the table's, or smaller ones."""
    chosen, ways = list(shapes) or (SHAPES if gpu else REDUCED), list(directions) or DIRECTIONS
    found = cases_of(chosen, kinds or ["bfloat16" if gpu else "float32"], directions=ways)
    if gpu and not shapes and not kinds:
        found += cases_of(SHAPES[:1], ["float32"], directions=ways)
    return list(dict.fromkeys(found))


def device_for(ranks: int) -> str:
    """Where so many ranks run, cuda or cpu; RuntimeError where they cannot."""
    torch = libraries.load(["pytorch"])["torch"]
    if torch is None or not torch.distributed.is_available():
        raise RuntimeError("ranks talk through torch.distributed, which is not installed: pip install torch")
    if not libraries.has_gpus():
        return "cpu"
    if (gpus := torch.cuda.device_count()) < ranks:
        raise RuntimeError(f"expected a GPU for each of {ranks} ranks; PyTorch sees {gpus} here")
    return "cuda"


def run(
    ranks: int,
    cases: Sequence[Case],
    candidates: Sequence[str],
    settings: Settings,
    progress: Progress = lambda done, total, doing: None,
) -> RanksReport:
    """Measure these candidates on every case, on ranks that are started for it and have ended when this returns.

    One that fails has a ``failure``, and does not stop the others; where a rank dies or hangs, the report has one.
    """
    device, results = device_for(ranks), list[RanksResult]()
    interrupted, failure = False, ""
    try:
        with _words(ranks, device, cases, candidates, settings) as words:
            for word in words:
                if "doing" in word:
                    progress(word["done"], len(cases), word["doing"])
                else:
                    results += [_result(cases, **found) for found in word["results"]]
    except KeyboardInterrupt:
        interrupted = True
    except _Lost as lost:
        failure = str(lost)
    return RanksReport(environment(), settings, device, ranks, results, interrupted, failure)


class _Lost(Exception):
    """A rank died, or all are silent."""


def _result(cases: Sequence[Case], case: int, called: Any, graph: Any, **rest: Any) -> RanksResult:
    called, graph = ([Measurement(**rank) for rank in of_ranks] for of_ranks in (called, graph))
    return RanksResult(cases[case], called=called, graph=graph, **rest)


@contextmanager
def _words(
    ranks: int, device: str, cases: Sequence[Case], candidates: Sequence[str], settings: Settings
) -> Iterator[Iterator[dict[str, Any]]]:
    """Start the ranks, and give what rank 0 says. Afterwards they have ended in any case."""
    # The store is here and not in a rank, so that its port is the system's choice and no rank's end takes it away.
    store = libraries.load(["pytorch"])["torch"].distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    path = [str(Path(gsbn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    if device == "cpu":  # they share the cores
        surroundings.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    told = [asdict(case) for case in cases]
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            for rank in range(ranks):
                task = Task(rank, ranks, store.port, device, candidates, told, asdict(settings))
                with open(folder / str(rank), "wb") as output:
                    processes.append(
                        subprocess.Popen([*WORKER, json.dumps(task)], stdin=subprocess.DEVNULL, stdout=output,
                                         stderr=subprocess.STDOUT, env=surroundings)
                    )  # fmt: skip
            yield _listen(store, processes, folder)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _listen(store: Any, processes: list[subprocess.Popen[bytes]], folder: Path) -> Iterator[dict[str, Any]]:
    """What rank 0 says, until all have ended well. If one has not, raises _Lost with what it printed."""
    heard, count = time.monotonic(), 0
    while True:
        codes = [process.poll() for process in processes]  # before the last words, which are then not missed
        while store.check([f"said/{count}"]):
            yield json.loads(store.get(f"said/{count}"))
            heard, count = time.monotonic(), count + 1
        if bad := [rank for rank, code in enumerate(codes) if code]:
            ends = [f"rank {rank} ended with {codes[rank]}, after it printed:\n{_tail(folder / str(rank))}"
                    for rank in bad]  # fmt: skip
            raise _Lost("\n".join(ends))
        if not any(code is None for code in codes):
            return
        if time.monotonic() - heard > PATIENCE:
            left = [rank for rank, code in enumerate(codes) if code is None]
            printed = [f"rank {rank} printed:\n{_tail(folder / str(rank))}" for rank in left]
            raise _Lost("\n".join([f"nothing was heard of the ranks for {PATIENCE:g} s", *printed]))
        time.sleep(0.1)


def _tail(file: Path, lines: int = 20) -> str:
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    return "\n".join(text.splitlines()[-lines:]) or "nothing"


# ---- what is shown and published -----------------------------------------------------------------------------------


def print_report(console: Console, report: RanksReport) -> None:
    """A table for each direction, and why something is missing."""
    case = Column("", lambda case, results: f"{_shape(case)} {SHORT[case.kind]}")
    for direction in DIRECTIONS:
        title = f"{TITLES[direction]}, µs on {report.ranks} ranks; B is of each"
        page.print_rows(console, title, [case, *_columns()], report.of(direction).items())
    page.print_failures(console, report, page.failures(report, NAMES))


def group_of(results: dict[str, RanksResult]) -> RanksResult | None:
    """The group that a user gets: over peer memory, where that was timed."""
    return next((results[name] for name in GROUPS if name in results and results[name].timed), None)


def gain(case: Case, results: dict[str, RanksResult]) -> str:
    """SyncBatchNorm's time over that of gsbn with a group, both as called: above 1, gsbn is faster."""
    ours, theirs = group_of(results), results.get("pytorch-sync")
    if ours is None or theirs is None or not theirs.timed:
        return NOTHING
    return f"{(theirs.seconds('called') or 0) / (ours.seconds('called') or 1):.2f}"


def cost(case: Case, results: dict[str, RanksResult]) -> str:
    """Microseconds that a group adds to gsbn without one, in a graph."""
    ours, local = group_of(results), results.get("gsbn")
    with_group, without = (result.seconds("graph") if result else None for result in (ours, local))
    return NOTHING if with_group is None or without is None else f"{(with_group - without) * 1e6:.1f}"


def _columns() -> list[Column]:
    """Times of every candidate as called, then in a graph, and after each what a group is worth."""

    def times(way: str, suffix: str) -> list[Column]:
        def us(result: RanksResult) -> str:
            return shown(seconds * 1e6 if (seconds := result.seconds(way)) else None)

        columns = []
        for name, title in NAMES.items():
            heading, ours = title + suffix, name == GROUPS[0]
            shown_so = f"**{heading}**" if ours else heading
            columns.append(Column(shown_so, of(name, us), strong=ours))
        return columns

    columns = [*times("called", ""), Column("SyncBatchNorm / gsbn group", gain)]
    return [*columns, *times("graph", ", in a graph"), Column("gsbn group − local, in a graph", cost)]


def markdown(report: RanksReport) -> str:
    """The tables of a page, with a line on where they were measured."""
    columns = [
        Column("B, I, O", lambda case, results: _shape(case), left=True),
        Column("dtype", lambda case, results: SHORT[case.kind], left=True),
        *_columns(),
    ]
    parts = []
    for direction in DIRECTIONS:
        if rows := report.of(direction):
            parts += [f"{TITLES[direction]}, µs:", markdown_table(columns, rows.items())]
    what = "Of each rank the median, of these the largest; one run, candidates in turns."
    where = f"{report.ranks} ranks{', a GPU each' if report.on_gpu else ''}; {page.measured_on(report)}"
    return "\n\n".join([*parts, f"{what} {where} {page.sources_of(report)}"])


def publish(report: RanksReport, root: Path, name: str) -> list[Path]:
    """Write the tables between the markers of this name, and figures and picture; gives the files."""
    picture = "Statistics over several ranks, beside SyncBatchNorm"
    return page.write(report, root, name, plot, markdown, picture, "Of each rank, with intervals")


def plot(report: RanksReport, file: str | Path) -> None:
    """Bars of the speed relative to SyncBatchNorm's, as called, a panel for each direction; PNG, SVG or PDF."""
    timed = {result.candidate for result in report.results if result.timed}
    series = {name: (NAMES[name], COLOURS[name]) for name in NAMES if name in timed}
    unit = next(name for name in ("pytorch-sync", "pytorch", *series) if name in series)
    panels = {}
    for direction in DIRECTIONS:
        groups = [
            (f"{_shape(case)}\n{SHORT[case.kind]}",
             {name: time for name, result in results.items() if (time := result.seconds("called"))})
            for case, results in report.of(direction).items()
        ]  # fmt: skip
        if any(times for _, times in groups):
            panels[f"{TITLES[direction]}, as called"] = groups
    page.plot_speeds(file, page.title_of(report, f"{report.ranks} ranks that share a batch"), panels, series, unit)


def _shape(case: Case) -> str:
    return ", ".join(map(str, case.shape))
