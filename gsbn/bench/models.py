"""Whole models in PyTorch: stacks of Linear or 1×1 convolution, BatchNorm and ReLU, as they are and converted by
``gsbn.torch.convert``; and published ones with a ``forward`` of their own (`_heads`), by ``trace=True`` and by options
for ``torch.compile``.

What is timed is a training step: forward, backward from a given gradient of y, and SGD with momentum. *As called* is
the wall clock over many steps, host included, from an idle device to an idle device. *In a graph* is the time of a
replay of the step in a CUDA graph, where the host has no part. All candidates of a case run in one process, in
turns. Without a GPU smaller models run on the CPU, which has no graph and no compiler.

The first step's y and gradients stand beside those of the same model in float64, norm-wise. ``excess`` is the error of
gsbn's y over what the accuracy rule allows: 1.05 times PyTorch's, and a quarter of the dtype's eps.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._timing import between_events
from . import libraries, page
from .bounds import ROUNDOFF
from .candidate import NAMES as LAYERS
from .candidate import Unavailable
from .case import ModelCase
from .layers_page import SERIES
from .machine import environment
from .page import Column, Groups, View, error_of, markdown_table, of, share, shown, time_of
from .report import NOTHING, Report, Result, Settings
from .trainee import Trainee, outputs_of, truth_of
from .turns import CaseRun, Entry, Progress, run_all

NAMES = {name: LAYERS[name] for name in ("pytorch", "compile", "gsbn")} | {"gsbn-compile": "gsbn, compiled"}
PEERS = ("pytorch", "compile")
ON_A_CPU = ("pytorch", "gsbn")
KINDS = ("bfloat16", "float32")
TRIAL = 0.1  # seconds that a trial takes, of several steps
WAYS = {"called": "as called", "graph": "in a CUDA graph"}  # of the times of a result
BOTH = ("pytorch", "gsbn")
Widths = tuple[int, ...]
MODELS: list[tuple[Widths, int]] = [
    ((2048, 8192, 8192, 8192), 2048),
    ((2048, 8192, 8192, 8192), 256),
    ((2048, 2048, 2048, 2048), 512),
    ((64, 64, 128, 1024), 65536),
    ((512,) * 9, 8192),
]
# At the sizes of their papers and examples; of ogbn-arxiv, all nodes that are trained on
HEADS: list[tuple[str, Widths, int]] = [
    ("GraphMLP", (128, 256, 256, 40), 90941),
    ("FCLayers", (2000, 128, 128), 128),
    ("PointClassifier", (1024, 512, 256, 40), 24),
    ("Critic", (17, 6, 2048, 2048), 512),
    ("SimSiam", (2048, 2048, 2048, 512), 512),
    ("BarlowTwins", (2048, 8192, 8192), 2048),
]
# 1×1 convolutions, as in PointNet, PointNet++, DGCNN and MobileNet: widths, samples, and (L,) or (H, W)
CONVOLUTIONS: list[tuple[Widths, int, Widths]] = [
    ((64, 64, 128, 1024), 32, (4096,)),
    ((512, 512, 512), 16, (512,)),
    ((64, 64, 128), 8, (1024, 32)),
    ((128, 128, 256), 16, (1024, 20)),
    ((64, 256, 64), 32, (56, 56)),
    ((256, 512, 256), 64, (14, 14)),
]
REDUCED: list[tuple[Widths, int]] = [((128, 256, 256, 256), 128), ((64, 64, 128, 256), 1024), ((64,) * 9, 512)]


def cases(kinds: Sequence[str] = KINDS, gpu: bool = True) -> list[ModelCase]:
    """Every model of the table in these dtypes; without a GPU, smaller ones."""
    stacks = [ModelCase(widths, rows, kind) for widths, rows in (MODELS if gpu else REDUCED) for kind in kinds]
    small = [] if gpu else [(head, tuple(min(width, 64) for width in widths), 96) for head, widths, _ in HEADS]
    return stacks + [ModelCase(widths, rows, kind, head) for head, widths, rows in small or HEADS for kind in kinds]


def convolutions(kinds: Sequence[str] = KINDS, gpu: bool = True) -> list[ModelCase]:
    """Stacks of 1×1 convolutions, contiguous and with channels last; without a GPU, smaller ones."""
    found = []
    for widths, samples, spatial in CONVOLUTIONS:
        if not gpu:
            widths, samples, spatial = tuple(width // 8 for width in widths), 2, tuple(min(n, 16) for n in spatial)
        rows = samples * math.prod(spatial)
        found += [ModelCase(widths, rows, kind, "", spatial, last) for kind in kinds for last in (False, True)]
    return found


def run(
    cases: Sequence[ModelCase],
    candidates: Sequence[str],
    settings: Settings,
    progress: Progress = lambda done, total, doing: None,
) -> Report:
    """Measure these candidates on every case; one that fails has a ``failure``, and does not stop the others."""
    device = "cuda" if libraries.has_gpus() else "cpu"
    results, interrupted = run_all(cases, lambda case: _ModelRun(case, candidates, device, settings), progress)
    return Report("models", environment(), settings, results, device, interrupted=interrupted)


class _ModelRun(CaseRun):
    def __init__(self, case: ModelCase, names: Sequence[str], device: str, settings: Settings) -> None:
        super().__init__([Entry(name, case) for name in names], NAMES, "highest", settings)
        self.case, self.device = case, device

    @functools.cached_property
    def plain(self) -> tuple[Any, Any, Any, list[Any]]:
        """The model as it is, its inputs, the gradients of its outputs, and what the first step gives in float64."""
        torch = libraries.load(["pytorch"])["torch"]
        if torch is None:
            raise Unavailable("torch is not installed")
        if self.device == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(self.settings.seed)
        if self.case.head:
            from . import _heads

            plain = getattr(_heads, self.case.head)(*self.case.widths).without_dropout()
            inputs = plain.batch(self.case.rows, self.settings.seed)
        else:
            plain, inputs = self._stack(torch)
        plain, inputs = plain.to(self.device), tuple(each.to(self.device) for each in inputs)
        # A bfloat16's numbers, so that all candidates get the same; as small as the gradient of a mean over the rows.
        shapes = [y.shape for y in outputs_of(copy.deepcopy(plain)(*inputs))]
        dys = [(torch.randn(shape) / self.case.rows).bfloat16().float().to(self.device) for shape in shapes]
        return plain, inputs, dys, truth_of(plain, inputs, dys)

    def _stack(self, torch: Any) -> tuple[Any, Any]:
        """A stack of layers, and its inputs."""
        nn, widths, spatial = torch.nn, self.case.widths, self.case.spatial
        linear, norm = nn.Linear, nn.BatchNorm1d
        if spatial:
            norm = nn.BatchNorm1d if len(spatial) == 1 else nn.BatchNorm2d
            linear = functools.partial(nn.Conv1d if len(spatial) == 1 else nn.Conv2d, kernel_size=1)
        layers: list[Any] = []
        for a, b in itertools.pairwise(widths):
            layers += [linear(a, b, bias=False), norm(b), nn.ReLU()]
        x = torch.randn(self.case.rows // math.prod(spatial), widths[0], *spatial)
        if self.case.channels_last:
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        return nn.Sequential(*layers), (x,)

    def check(self, entry: Entry) -> None:
        plain, inputs, dys, truth = self.plain
        entry.candidate = Trainee(entry.name, self.case.kind, plain, inputs, dys)
        entry.facts["error"], entry.facts["error_of_gradients"] = entry.candidate.first_step(truth)

    def checked(self) -> None:
        """Tell gsbn's error of y over what the accuracy rule allows beside PyTorch eager's.

        Not of the gradients: they jump where an element of y is next to relu's zero, and one such element, of which
        chance decides, is more than all roundings. The tests hold each call's gradients to the y that it gave.
        """
        self.__dict__.pop("plain", None)
        errors = {entry.name: entry.facts["error"] for entry in self.live()}
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
            facts["host_us_a_layer"] = trainee.host(entry.once) * 1e6 / trainee.layers
            replay, facts["graph_failure"] = trainee.capture()
            if replay:
                entry.trials["graph"] = lambda: between_events(trainee.torch, replay, calls)


# ---- what is shown and published -----------------------------------------------------------------------------------


def _mib(result: Result) -> str:
    return shown(result.facts["peak_bytes"] / 2**20 if "peak_bytes" in result.facts else None, ".0f")


def _host(result: Result) -> str:
    return shown(result.facts.get("host_us_a_layer"), ".0f")


def _excess(result: Result) -> str:
    return share(result.facts["excess"]) if "excess" in result.facts else NOTHING


def _gain(way: str) -> Column:
    """The time of the best peer over gsbn's: above 1, gsbn is faster."""

    def cell(case: ModelCase, results: Mapping[str, Result]) -> str:
        times = {name: seconds for name, result in results.items() if (seconds := result.median(way))}
        peers = [times[name] for name in PEERS if name in times]
        return f"{min(peers) / times['gsbn']:.2f}" if peers and "gsbn" in times else NOTHING

    return Column(f"best peer / gsbn, {WAYS[way]}", cell)


def _markdown(report: Report) -> str:
    columns = [
        Column("model, widths", lambda case, results: case.layers, left=True),
        Column("rows", lambda case, results: str(case.rows)),
        Column("dtype", lambda case, results: case.kind, left=True),
    ]
    for way, title in WAYS.items():
        for name, text in (NAMES | {"gsbn": "**gsbn**"}).items():
            columns.append(Column(f"{text}, {title}", of(name, time_of(way, 1e-3)), strong=name == "gsbn"))
        columns.append(_gain(way))
    columns += [Column(f"host µs a layer, {NAMES[name]}", of(name, _host)) for name in BOTH]
    columns += [Column(f"peak MiB, {NAMES[name]}", of(name, _mib)) for name in BOTH]
    columns.append(Column("error of what is allowed", of("gsbn", _excess)))
    graph = "a replay of a CUDA graph by CUDA events, and as called by the wall clock, host included"
    caption = (
        "Medians in ms of a training step (forward, backward, SGD with momentum), one run, candidates in turns; "
        f"{graph if report.on_gpu else 'by the wall clock, on the CPU'}. bfloat16 is torch.autocast over "
        f"float32 parameters. {page.measured_on(report)} {page.sources_of(report)}"
    )
    return f"{markdown_table(columns, report.by_case().items())}\n\n{caption}"


def _legend(report: Report) -> str:
    graph = " in a graph: device time of a replay in a CUDA graph. MiB: peak of a step, beyond parameters, momenta and "
    graph += "input. host µs: what a forward and a backward of a layer cost the host."
    return (
        "ms as called: wall clock of a training step, a median of trials; of a peer that of its best turn."
        f"{graph if report.on_gpu else ''} error y, error dw: of the first step's y and gradients against float64, "
        "norm-wise. allowed: the error of y over what the accuracy rule allows. gsbn ×: how many times as long as gsbn."
    )


def _panels(report: Report) -> Mapping[str, Groups]:
    """A panel for each way to run a step."""
    panels = {}
    for way, title in WAYS.items():
        if any(way in result.times for result in report.results):
            panels[title] = [
                (f"{case.layers}\n{case.rows} rows, {case.kind}",
                 {name: seconds for name, result in results.items() if (seconds := result.median(way))})
                for case, results in report.by_case().items()
            ]  # fmt: skip
    return panels


def _columns(report: Report) -> list[Column]:
    return [
        Column("ms as called", time_of("called", 1e-3)),
        Column("in a graph", time_of("graph", 1e-3)),
        Column("error y", error_of),
        Column("error dw", lambda result: shown(result.facts["error_of_gradients"], ".1e")),
        Column("allowed", _excess),
        Column("host µs", _host),
        Column("MiB", _mib),
    ]


VIEW = View(
    names=NAMES,
    columns=_columns,
    legend=_legend,
    markdown=_markdown,
    panels=_panels,
    series={name: (NAMES[name], SERIES[name][1]) for name in NAMES if name in SERIES}
    | {"gsbn-compile": (NAMES["gsbn-compile"], "#8c2f3d")},
    units=("pytorch",),
    subject=lambda report: "training steps of whole models",
    picture="A training step beside the peers",
)
