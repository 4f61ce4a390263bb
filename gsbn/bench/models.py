"""Whole models in PyTorch: stacks of Linear, BatchNorm1d and ReLU, as they are and converted by ``gsbn.torch.convert``.

What is timed is a training step: forward, backward from a given gradient of y, and SGD with momentum. *As called* is
the wall clock over many steps, host included, from an idle device to an idle device. *In a graph* is the time of a
replay of the step in a CUDA graph, where the host has no part. All candidates of a case run in one process, in
turns. Without a GPU smaller models run on the CPU, which has no graph and no compiler.

The first step's y and gradients stand beside those of the same model in float64, norm-wise. ``excess`` is the error of
gsbn's y over what the accuracy rule allows: 1.05 times PyTorch's, and a quarter of the dtype's eps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from . import libraries, page
from .bounds import ROUNDOFF
from .candidate import NAMES as LAYERS
from .candidate import Unavailable
from .clock import Measurement, between_events
from .machine import environment
from .page import SERIES, Column, markdown_table, of, share, shown
from .report import NOTHING, AnyReport, Settings, now
from .trainee import Trainee, truth_of
from .turns import CaseRun, Entry, Progress, run_all

if TYPE_CHECKING:
    from rich.console import Console

NAMES = {name: LAYERS[name] for name in ("pytorch", "compile", "gsbn")} | {"gsbn-compile": "gsbn, compiled"}
PEERS = ("pytorch", "compile")
ON_A_CPU = ("pytorch", "gsbn")
KINDS = ("bfloat16", "float32")
TRIAL = 0.1  # seconds that a trial takes, of several steps
COLOURS = {"pytorch": SERIES["pytorch"][1], "compile": SERIES["compile"][1], "gsbn": SERIES["gsbn"][1],
           "gsbn-compile": "#8c2f3d"}  # fmt: skip
WAYS = {"called": "as called", "graph": "in a CUDA graph"}  # fields of ModelResult
BOTH = ("pytorch", "gsbn")
Widths = tuple[int, ...]
MODELS: list[tuple[Widths, int]] = [
    ((2048, 8192, 8192, 8192), 2048),
    ((2048, 8192, 8192, 8192), 256),
    ((2048, 2048, 2048, 2048), 512),
    ((64, 64, 128, 1024), 65536),
    ((512,) * 9, 8192),
]
REDUCED: list[tuple[Widths, int]] = [((128, 256, 256, 256), 128), ((64, 64, 128, 256), 1024), ((64,) * 9, 512)]


@dataclass(frozen=True)
class ModelCase:
    """A stack of layers without bias, the number of rows, and the dtype: bfloat16 is autocast over float32."""

    widths: Widths
    rows: int
    kind: str

    @property
    def layers(self) -> str:
        """The widths in few characters: equal layers are counted."""
        first, *rest = self.widths
        if len(rest) > 3 and len(set(self.widths)) == 1:
            return f"{len(rest)} × {first}"
        return "→".join(map(str, self.widths))

    @property
    def title(self) -> str:
        return f"{self.layers}, {self.rows} rows, {self.kind}"


def cases(kinds: Sequence[str] = KINDS, gpu: bool = True) -> list[ModelCase]:
    """Every model of the table in these dtypes; without a GPU, smaller ones."""
    return [ModelCase(widths, rows, kind) for widths, rows in (MODELS if gpu else REDUCED) for kind in kinds]


@dataclass
class ModelResult:
    """One candidate on one case; times in seconds a step. ``failure`` says why there are none."""

    case: ModelCase
    candidate: str
    called: Measurement | None = None
    graph: Measurement | None = None
    phases: dict[str, float] = field(default_factory=dict)  # device time of forward, backward and optimiser
    peak_bytes: int | None = None  # that one step allocates beyond parameters, momenta and input
    errors: dict[str, float] = field(default_factory=dict)  # of y and of the gradients, against float64
    excess: float | None = None  # that of y over what the accuracy rule allows
    graph_failure: str = ""
    failure: str = ""
    host: dict[str, float] = field(default_factory=dict)  # what the parts of `phases` cost the host

    @property
    def timed(self) -> bool:
        return self.called is not None


@dataclass(frozen=True)
class ModelsReport(AnyReport[ModelCase, ModelResult]):
    """Everything one run measured, with what it was measured on."""

    PRESET: ClassVar[str] = "models"
    environment: dict[str, Any]
    settings: Settings
    device: str  # cuda or cpu
    results: list[ModelResult]
    interrupted: bool = False
    date: str = field(default_factory=now)


def run(
    cases: Sequence[ModelCase],
    candidates: Sequence[str],
    settings: Settings,
    progress: Progress = lambda done, total, doing: None,
) -> ModelsReport:
    """Measure these candidates on every case; one that fails has a ``failure``, and does not stop the others."""
    device = "cuda" if libraries.has_gpus() else "cpu"
    results, interrupted = run_all(cases, lambda case: _ModelRun(case, candidates, device, settings), progress)
    return ModelsReport(environment(), settings, device, results, interrupted)


class _ModelRun(CaseRun):
    result = ModelResult

    def __init__(self, case: ModelCase, names: Sequence[str], device: str, settings: Settings) -> None:
        super().__init__([Entry(name, case) for name in names], NAMES, "highest", settings)
        self.case, self.device = case, device

    @functools.cached_property
    def plain(self) -> tuple[Any, Any, Any, list[Any]]:
        """The model as it is, x, dy, and what the first step gives in float64."""
        torch, widths, rows = libraries.load(["pytorch"])["torch"], self.case.widths, self.case.rows
        if torch is None:
            raise Unavailable("torch is not installed")
        if self.device == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(self.settings.seed)
        layers: list[Any] = []
        for inputs, features in itertools.pairwise(widths):
            layers += [torch.nn.Linear(inputs, features, bias=False), torch.nn.BatchNorm1d(features), torch.nn.ReLU()]
        plain = torch.nn.Sequential(*layers).to(self.device)
        x = torch.randn(rows, widths[0]).to(self.device)
        # A bfloat16's numbers, so that all candidates get the same; as small as the gradient of a mean over the rows.
        dy = (torch.randn(rows, widths[-1]) / rows).bfloat16().float().to(self.device)
        return plain, x, dy, truth_of(plain, x, dy)

    def check(self, entry: Entry) -> None:
        plain, x, dy, truth = self.plain
        entry.candidate = Trainee(entry.name, self.case.kind, plain, x, dy)
        entry.facts["errors"] = entry.candidate.first_step(truth)

    def checked(self) -> None:
        """Tell gsbn's error of y over what the accuracy rule allows beside PyTorch eager's.

        Not of the gradients: they jump where an element of y is next to relu's zero, and one such element, of which
        chance decides, is more than all roundings. The tests hold each call's gradients to the y that it gave.
        """
        self.__dict__.pop("plain", None)
        errors = {entry.name: entry.facts["errors"]["y"] for entry in self.live()}
        for entry in self.live():
            if entry.name.startswith("gsbn") and "pytorch" in errors:
                allowed = 1.05 * errors["pytorch"] + 2 * ROUNDOFF[self.case.kind] / 4
                entry.facts["excess"] = errors[entry.name] / allowed

    def prepare(self, entry: Entry) -> None:
        trainee, facts = entry.candidate, entry.facts
        for _ in range(3):
            entry.once = trainee.wall(1)
        calls = self.settings.calls or max(3, min(200, round(TRIAL / entry.once)))
        entry.trials["called"] = lambda: trainee.wall(calls)
        if self.device == "cuda":
            facts["peak_bytes"] = trainee.memory()
            facts["phases"], facts["host"] = trainee.phases(entry.once)
            if self.settings.graph:
                replay, facts["graph_failure"] = trainee.capture()
                if replay:
                    entry.trials["graph"] = lambda: between_events(trainee.torch, replay, calls)


# ---- what is shown and published -----------------------------------------------------------------------------------


def print_report(console: Console, report: ModelsReport) -> None:
    """A table for each way to run a step; those of memory, parts, host cost and errors; and what failed."""

    def phase(part: str) -> Callable[[ModelResult], str]:
        return lambda result: shown(result.phases[part] * 1e3 if result.phases else None)

    def error(what: str) -> Callable[[ModelResult], str]:
        return lambda result: shown(result.errors.get(what), ".1e")

    case = Column("", lambda case, results: case.title)
    clocks = {"called": "wall clock", "graph": "device time"}
    tables = {
        f"ms a training step, {WAYS[way]} ({clocks[way]})": [*_each("{}", _ms(way)), _gain("best peer / gsbn", way)]
        for way in WAYS
    }
    tables["Peak MiB of a step, beyond parameters, momenta and input"] = _each("{}", _mib)
    tables["ms on the device, by part of the step as called"] = [
        Column(f"{NAMES[name]}, {short}", of(name, phase(part)))
        for name in BOTH
        for part, short in (("forward", "fw"), ("backward", "bw"), ("optimiser", "SGD"))
    ]
    tables["us that a forward and a backward of a layer cost the host"] = _each("{}", _host_us)
    tables["Errors of the first step against float64, norm-wise"] = [
        *_each("y, {}", error("y"), BOTH),
        *_each("gradients, {}", error("gradients"), BOTH),
        Column("of what is allowed", of("gsbn", _excess)),
    ]
    for title, columns in tables.items():
        page.print_rows(console, title, [case, *columns], report.by_case().items())
    page.print_failures(console, report, page.failures(report, NAMES))


def markdown(report: ModelsReport) -> str:
    """The table of a page, with a line on where it was measured."""
    columns = [
        Column("model, widths", lambda case, results: case.layers, left=True),
        Column("rows", lambda case, results: str(case.rows)),
        Column("dtype", lambda case, results: case.kind, left=True),
    ]
    for way, title in WAYS.items():
        for name, text in (NAMES | {"gsbn": "**gsbn**"}).items():
            columns.append(Column(f"{text}, {title}", of(name, _ms(way)), strong=name == "gsbn"))
        columns.append(_gain(f"best peer / gsbn, {title}", way))
    columns += _each("host µs a layer, {}", _host_us, BOTH)
    columns += _each("peak MiB, {}", _mib, BOTH)
    columns.append(Column("error of what is allowed", of("gsbn", _excess)))
    return f"{markdown_table(columns, report.by_case().items())}\n\n{_caption(report)}"


def _caption(report: ModelsReport) -> str:
    graph = "a replay of a CUDA graph by CUDA events, and as called by the wall clock, host included"
    return (
        f"Medians in ms of a training step (forward, backward, SGD with momentum), one run, candidates in turns; "
        f"{graph if report.on_gpu else 'by the wall clock, on the CPU'}. bfloat16 is torch.autocast over "
        f"float32 parameters. {page.measured_on(report)} {page.sources_of(report)}"
    )


def publish(report: ModelsReport, root: Path, name: str) -> list[Path]:
    """Write the tables between the markers of this name, and figures and picture; gives the files."""
    return page.write(report, root, name, plot, markdown, "A training step beside the peers")


def plot(report: ModelsReport, file: str | Path) -> None:
    """Bars of the speed relative to PyTorch eager, a panel for each way to run a step; PNG, SVG or PDF."""
    panels = {}
    for way, title in WAYS.items():
        if any(getattr(result, way) for result in report.results):
            panels[title] = [
                (f"{case.layers}\n{case.rows} rows, {case.kind}",
                 {name: m.median for name, result in results.items() if (m := getattr(result, way))})
                for case, results in report.by_case().items()
            ]  # fmt: skip
    title = page.title_of(report, "training steps of whole models")
    page.plot_speeds(file, title, panels, {name: (NAMES[name], COLOURS[name]) for name in NAMES}, "pytorch")


def _each(heading: str, cell: Callable[[ModelResult], str], names: Iterable[str] = tuple(NAMES)) -> list[Column]:
    """A column of every candidate, whose name goes into the heading."""
    return [Column(heading.format(NAMES[name]), of(name, cell)) for name in names]


def _gain(heading: str, way: str) -> Column:
    """The time of the best peer over gsbn's: above 1, gsbn is faster."""

    def cell(case: ModelCase, results: dict[str, ModelResult]) -> str:
        times = {name: m.median for name, result in results.items() if (m := getattr(result, way))}
        peers = [times[name] for name in PEERS if name in times]
        return f"{min(peers) / times['gsbn']:.2f}" if peers and "gsbn" in times else NOTHING

    return Column(heading, cell)


def _ms(way: str) -> Callable[[ModelResult], str]:
    return lambda result: shown(m.median * 1e3 if (m := getattr(result, way)) else None)


def _phase(part: str) -> Callable[[ModelResult], str]:
    return lambda result: shown(result.phases[part] * 1e3 if result.phases else None)


def _error(what: str) -> Callable[[ModelResult], str]:
    return lambda result: shown(result.errors.get(what), ".1e")


def _mib(result: ModelResult) -> str:
    return shown(None if result.peak_bytes is None else result.peak_bytes / 2**20, ".0f")


def _host_us(result: ModelResult) -> str:
    """Of a forward and a backward."""
    layers = len(result.case.widths) - 1
    return shown(1e6 * (result.host["forward"] + result.host["backward"]) / layers if result.host else None, ".0f")


def _excess(result: ModelResult) -> str:
    return NOTHING if result.excess is None else share(result.excess)
