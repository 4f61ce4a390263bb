"""Several ranks that share a batch: what ``group=`` costs beside no synchronisation and beside PyTorch's SyncBatchNorm.

The layer is Linear without bias, scale and BatchNorm1d in training. Its forward is timed, and its forward with the
backward; every rank has the same number of rows. ``run`` starts a process for each rank (``gsbn.bench.rank``). Each has
a GPU of its own and talks over NCCL, or all are on the CPU and talk over gloo. A process runs all candidates, in turns.

A trial begins when all ranks have reached a barrier. *As called* is the time between two CUDA events around calls that
the host makes one after another; *in a graph* is the time of a replay of a CUDA graph of ten calls. One call, or
replay, comes before and is not timed: it absorbs the ranks' different starts, and warms the caches as a loop does. The
ranks wait for each other, so a trial takes as long as on the slowest rank.

GPUs differ a little in speed, and a rank that waits for a slower one loses time, however it waits. The candidate
``gsbn-reduce`` shows how much: gsbn without a group, but with an ``all_reduce`` of one float after the forward and
another after the backward.

Before anything is timed, the candidates that share statistics are checked against float64 of the whole batch, and the
running statistics of a group must have the same bits on all ranks.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import libraries, page
from .case import Case
from .case import cases as cases_of
from .layers_page import SERIES, layer_columns
from .machine import environment
from .page import SHORT, Column, Groups, View, error_of, markdown_table, of, speedup, time_of
from .rank import NAMES, Task, work
from .report import NOTHING, Report, Result, Settings
from .turns import Progress

ON_GPUS = tuple(name for name in NAMES if name != "gsbn-gloo")
ON_A_CPU = ("gemm", "pytorch", "gsbn", "gsbn-reduce", "gsbn-gloo")  # SyncBatchNorm refuses CPU tensors
GROUPS = ("gsbn-peer", "gsbn-nccl", "gsbn-gloo")  # the first that is there is what a user gets
SHAPES = [(1024, 8192, 8192), (16384, 4096, 4096), (4096, 1024, 1024), (1024, 2048, 8192)]
REDUCED = [(64, 96, 48), (256, 32, 64)]
TITLES = {"forward": "Forward in training", "step": "Training step (forward and backward)"}
DIRECTIONS = tuple(TITLES)
PATIENCE = 300.0  # seconds without a word from rank 0: kernels may have to be compiled


def cases(
    shapes: Sequence[tuple[int, int, int]] = (),
    kinds: Sequence[str] = (),
    directions: Sequence[str] = (),
    gpu: bool = True,
) -> list[Case]:
    """Cases of these shapes (rows a rank, I, O), dtypes and directions. If one is empty, those of the published table
    take its place; on a CPU smaller shapes."""
    chosen, ways = list(shapes) or (SHAPES if gpu else REDUCED), list(directions) or DIRECTIONS
    found = cases_of(chosen, kinds or ["bfloat16" if gpu else "float32"], directions=ways)
    if gpu and not shapes and not kinds:
        found += cases_of(SHAPES[:1], ["float32"], directions=ways)
    return list(dict.fromkeys(found))


def device_for(ranks: int) -> str:
    """The device of so many ranks, cuda or cpu; RuntimeError if they cannot run."""
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
    worker: Callable[..., None] | None = None,
) -> Report:
    """Measure these candidates on every case, on ranks that are started for it and have ended when this returns.

    One that fails has a ``failure``, and does not stop the others; where a rank dies or hangs, the report has one.
    ``worker`` takes the place of ``gsbn.bench.rank.work`` in the processes.
    """
    device, results = device_for(ranks), list[Result]()
    interrupted, failure = False, ""
    with tempfile.TemporaryDirectory() as folder:
        task = Task(ranks, str(Path(folder) / "store"), device, candidates, cases, settings)
        try:
            for word in _words(task, worker or work):
                if isinstance(word, list):
                    results += word
                else:
                    progress(word[0], len(cases), word[1])
        except KeyboardInterrupt:
            interrupted = True
        except Exception as error:  # torch's, of a rank that raised or ended; it has the rank's traceback
            failure = str(error).strip()
    return Report("ranks", environment(), settings, tuple(results), device, None, ranks, interrupted, failure)


def _words(task: Task, worker: Callable[..., None]) -> Iterator[Any]:
    """Start the ranks and yield what rank 0 sends. When this returns or raises, all ranks have ended."""
    torch = libraries.load(["pytorch"])["torch"]
    words: Any = multiprocessing.get_context("spawn").SimpleQueue()
    processes = torch.multiprocessing.start_processes(
        worker, (task, words), task.size, join=False, start_method="spawn"
    )
    heard, ended, error = time.monotonic(), False, None
    try:
        while not ended:
            try:
                ended = processes.join(timeout=0.1)  # raises what a rank died of, and ends the others
            except Exception as died:
                ended, error = True, died
            while not words.empty():
                yield words.get()
                heard = time.monotonic()
            if error:
                raise error
            if time.monotonic() - heard > PATIENCE:
                raise TimeoutError(f"nothing was heard of the ranks for {PATIENCE:g} s")
    finally:
        for process in processes.processes:
            process.kill()
            process.join()


# ---- what is shown and published -----------------------------------------------------------------------------------


def group_of(results: Mapping[str, Result]) -> Result | None:
    """The group that a user gets: over peer memory, where that was timed."""
    return next((results[name] for name in GROUPS if name in results and results[name].times), None)


def gain(case: Case, results: Mapping[str, Result]) -> str:
    """SyncBatchNorm's time over that of gsbn with a group, both as called: above 1, gsbn is faster."""
    return speedup(results.get("pytorch-sync"), group_of(results))


def cost(case: Case, results: Mapping[str, Result]) -> str:
    """Microseconds that a group adds to gsbn without one, in a graph."""
    ours, local = group_of(results), results.get("gsbn")
    with_group, without = (result.median("graph") if result else None for result in (ours, local))
    return NOTHING if with_group is None or without is None else f"{(with_group - without) * 1e6:.1f}"


def _by_direction(report: Report) -> dict[str, dict[Case, dict[str, Result]]]:
    """``by_case`` of each direction that was run."""
    table = report.by_case()
    found = {way: {case: results for case, results in table.items() if case.direction == way} for way in DIRECTIONS}
    return {way: rows for way, rows in found.items() if rows}


def _markdown(report: Report) -> str:
    columns = layer_columns()
    for way, suffix, worth in (
        ("called", "", Column("SyncBatchNorm / gsbn group", gain)),
        ("graph", ", in a graph", Column("gsbn group − local, in a graph", cost)),
    ):
        for name, title in NAMES.items():
            ours, heading = name == GROUPS[0], f"{title}{suffix}"
            columns.append(Column(f"**{heading}**" if ours else heading, of(name, time_of(way, 1e-6)), strong=ours))
        columns.append(worth)
    parts = []
    for direction, rows in _by_direction(report).items():
        parts += [f"{TITLES[direction]}, µs:", markdown_table(columns, rows.items())]
    what = "Medians of trials that take as long as on the slowest rank; one run, candidates in turns."
    where = f"{report.ranks} ranks{', a GPU each' if report.on_gpu else ''}; {page.measured_on(report)}"
    return "\n\n".join([*parts, f"{what} {where} {page.sources_of(report)}"])


def _legend(report: Report) -> str:
    graph = " in a graph: of a replay in a CUDA graph of ten calls." if report.on_gpu else ""
    return (
        f"{report.ranks} ranks, B rows each. µs as called: a call of the slowest rank, a median of trials; of a peer "
        f"that of its best turn.{graph} error: of y, against float64 of the whole batch. gsbn ×: how many times as "
        "long as gsbn without a group."
    )


def _panels(report: Report) -> Mapping[str, Groups]:
    """A panel for each direction, of calls as called."""
    panels = {}
    for direction, rows in _by_direction(report).items():
        panels[f"{TITLES[direction]}, as called"] = [
            (f"{', '.join(map(str, case.shape))}\n{SHORT[case.kind]}",
             {name: result.seconds for name, result in results.items() if result.times})
            for case, results in rows.items()
        ]  # fmt: skip
    return panels


def _columns(report: Report) -> list[Column]:
    return [
        Column("µs as called", time_of("called", 1e-6)),
        Column("in a graph", time_of("graph", 1e-6)),
        Column("error", error_of),
    ]


COLOURS = {
    "gemm": SERIES["gemm"][1], "pytorch": SERIES["pytorch"][1], "pytorch-sync": SERIES["compile"][1], "gsbn": "#e8a2aa",
    "gsbn-reduce": "#b3767f", "gsbn-peer": SERIES["gsbn"][1], "gsbn-nccl": "#8c2f3d", "gsbn-gloo": "#8c2f3d",
}  # fmt: skip
VIEW = View(
    names=NAMES,
    columns=_columns,
    legend=_legend,
    markdown=_markdown,
    panels=_panels,
    series={name: (NAMES[name], COLOURS[name]) for name in NAMES},
    units=("pytorch-sync", "pytorch"),
    subject=lambda report: f"{report.ranks} ranks that share a batch",
    picture="Statistics over several ranks, beside SyncBatchNorm",
)
