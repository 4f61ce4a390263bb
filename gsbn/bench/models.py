"""Whole models in PyTorch: stacks of Linear, BatchNorm1d and ReLU, as they are and converted by ``gsbn.torch.convert``.

What is timed is a training step: forward, backward from a given gradient of y, and SGD with momentum. *As called* is
the wall clock over many steps, host included, from an idle device to an idle device. *In a graph* is the time of a
replay of the step in a CUDA graph, where the host has no part. All candidates of a case live in one process and take
turns, as in ``gsbn.bench.measure``. Without a GPU smaller models run on the CPU, which has no graph and no compiler.

The first step's y and gradients stand beside those of the same model in float64, norm-wise. ``excess`` is the error of
gsbn's y over what the accuracy rule allows: 1.05 times PyTorch's, and a quarter of the dtype's eps.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import libraries
from .bounds import ROUNDOFF
from .candidate import NAMES as LAYERS
from .clock import Measurement, balanced_order, median_interval, take_turns
from .machine import environment
from .report import Settings, now
from .trainee import Trainee, line_of, truth_of

NAMES = {name: LAYERS[name] for name in ("pytorch", "compile", "gsbn")} | {"gsbn-compile": "gsbn, compiled"}
PEERS = ("pytorch", "compile")
ON_A_CPU = ("pytorch", "gsbn")
KINDS = ("bfloat16", "float32")
TRIAL = 0.1  # seconds that a trial takes, of several steps
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


@dataclass(frozen=True)
class ModelsReport:
    """Everything one run measured, with what it was measured on."""

    environment: dict[str, Any]
    settings: Settings
    device: str  # cuda or cpu
    results: list[ModelResult]
    interrupted: bool = False
    date: str = field(default_factory=now)

    @property
    def measured(self) -> bool:
        return any(result.called for result in self.results)

    def by_case(self) -> dict[ModelCase, dict[str, ModelResult]]:
        """Results by case, then by candidate, in the order they were run."""
        table: dict[ModelCase, dict[str, ModelResult]] = {}
        for result in self.results:
            table.setdefault(result.case, {})[result.candidate] = result
        return table

    def content(self) -> dict[str, Any]:
        """All of it as JSON's types."""
        return asdict(self)


def run(
    cases: Sequence[ModelCase],
    candidates: Sequence[str],
    settings: Settings,
    progress: Callable[[float, float, str], None] = lambda done, total, doing: None,
) -> ModelsReport:
    """Measure these candidates on every case; one that fails has a ``failure``, and does not stop the others."""
    torch, on_gpu = libraries.load(["pytorch"])["torch"], libraries.has_gpus()
    results: list[ModelResult] = []
    interrupted = False
    try:
        for index, case in enumerate(cases):
            found = [ModelResult(case, name) for name in candidates]
            results += found
            if torch is None:
                for result in found:
                    result.failure = "torch is not installed"
                continue

            def step(done: float, text: str, index: int = index, case: ModelCase = case) -> None:
                progress(index + done, len(cases), f"{case.title}: {text}")

            try:
                with libraries.float32_precision("highest"):
                    _Turn(torch, case, found, settings, on_gpu).run(step)
            except Exception as error:  # such as no memory for the truth: the other cases go on
                for result in found:
                    result.failure = result.failure or line_of(error)
    except KeyboardInterrupt:
        interrupted = True
        results = [result for result in results if result.called or result.failure]
    return ModelsReport(environment(), settings, "cuda" if on_gpu else "cpu", results, interrupted)


class _Turn:
    """All candidates on one case."""

    def __init__(self, torch: Any, case: ModelCase, results: list[ModelResult], settings: Settings, on_gpu: bool):
        self.torch, self.case, self.results, self.settings, self.on_gpu = torch, case, results, settings, on_gpu
        self.trainees: list[tuple[ModelResult, Trainee]] = []

    def run(self, progress: Callable[[float, str], None]) -> None:
        torch, device = self.torch, "cuda" if self.on_gpu else "cpu"
        libraries.forget_compiled()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        torch.manual_seed(self.settings.seed)
        layers: list[Any] = []
        for inputs, features in itertools.pairwise(self.case.widths):
            layers += [torch.nn.Linear(inputs, features, bias=False), torch.nn.BatchNorm1d(features), torch.nn.ReLU()]
        plain = torch.nn.Sequential(*layers).to(device)
        x = torch.randn(self.case.rows, self.case.widths[0]).to(device)
        # A bfloat16's numbers, so that all candidates get the same; as small as the gradient of a mean over the rows.
        dy = (torch.randn(self.case.rows, self.case.widths[-1]) / self.case.rows).bfloat16().float().to(device)
        truth = truth_of(plain, x, dy)
        for index, result in enumerate(self.results):
            progress(index / len(self.results) / 2, f"preparing {NAMES[result.candidate]}")
            with _reported(result):
                trainee = Trainee(torch, result.candidate, self.case.kind, plain, x, dy)
                result.errors = trainee.first_step(truth)
                for _ in range(3):
                    trainee.once = trainee.wall()
                trainee.calls = self.settings.calls or max(3, min(200, round(TRIAL / trainee.once)))
                if self.on_gpu:
                    result.peak_bytes = trainee.memory()
                    result.phases, result.host = trainee.phases()
                    if self.settings.graph:
                        result.graph_failure = trainee.capture()
                self.trainees.append((result, trainee))
        del truth
        _judge(self.case, {result.candidate: result for result in self.results})
        self._take_turns(progress)

    def _take_turns(self, progress: Callable[[float, str], None]) -> None:
        try:
            take_turns(self.settings, self._round, self._forget, progress)
        finally:
            for result, trainee in self._live():
                result.called = median_interval(trainee.called) if trainee.called else None
                result.graph = median_interval(trainee.replayed) if trainee.replayed else None

    def _forget(self) -> None:
        for _, trainee in self.trainees:
            trainee.called.clear()
            trainee.replayed.clear()

    def _live(self) -> list[tuple[ModelResult, Trainee]]:
        return [(result, trainee) for result, trainee in self.trainees if not result.failure]

    def _round(self, turn: int) -> float:
        live = self._live()
        for index in balanced_order(len(live), turn):
            result, trainee = live[index]
            with _reported(result):
                trainee.called.append(trainee.wall())
                if trainee.replay is not None:
                    trainee.replayed.append(trainee.replays())
        return sum(trainee.called[-1] / trainee.once for _, trainee in self._live())


@contextlib.contextmanager
def _reported(result: ModelResult) -> Iterator[None]:
    """A candidate may fail in any way; it must not take the others with it."""
    try:
        yield
    except Exception as error:
        result.failure = line_of(error)


def _judge(case: ModelCase, results: dict[str, ModelResult]) -> None:
    """gsbn's error of y over what the accuracy rule allows beside PyTorch eager's.

    Not of the gradients: they jump where an element of y is next to relu's zero, and one such element, of which chance
    decides, is more than all roundings. The tests hold each call's gradients to the y that it gave.
    """
    eager = results["pytorch"].errors if "pytorch" in results else {}
    for name, result in results.items():
        if name.startswith("gsbn") and eager and result.errors:
            result.excess = result.errors["y"] / (1.05 * eager["y"] + 2 * ROUNDOFF[case.kind] / 4)
