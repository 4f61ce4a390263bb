"""Is gsbn right on this very machine? Every dtype, precision and input family against float64, PyTorch beside it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._typing import Activation
from . import libraries, peers
from .bounds import FAMILIES, GRADIENTS, Judgement, Truth, draw_dy, expected, make_operands
from .candidate import WITHOUT_BACKWARD, Unavailable
from .case import DTYPES, Case
from .machine import has_gpu
from .turns import Progress, line_of

SHAPE = (257, 384, 131)  # ragged in every direction; at most 576 inputs, see DERIVATION
DERIVATION = (
    "The bound, element by element: |Δg| ≤ (6 √I + I/4 on tensor cores) 2⁻²⁴ sqrt(g² + Σ(x w)²), 2⁻⁵³ for float64; "
    "TF32 adds 2⁻⁹ |g| + 6·2⁻¹⁰ sqrt(Σ(x w)²). Carried through mean, variance and scale without linearising, plus one "
    "rounding of the result. It holds for any order of summation; the docstring of gsbn.bench.bounds derives it, and "
    "goes on to the gradients. With an activation these are held to the truth for the signs of the y beside them."
)


@dataclass(frozen=True)
class Check:
    """One candidate on one input. It is gsbn (perhaps with one of its GEMMs named), pytorch, or sgemm: the y that
    follows from a library's float32 GEMM if nothing else is rounded. Only gsbn is held to the bound."""

    kind: str  # a key of gsbn.bench.DTYPES
    family: str  # a key of gsbn.bench.bounds.FAMILIES
    training: bool
    candidate: str
    # y, running_mean and running_var, and gradients by the fields of gsbn.Gradients, against truth and bound
    judged: dict[str, Judgement] = field(default_factory=dict)
    failure: str = ""

    @property
    def share(self) -> float:
        """The largest part of its bound that any element of any result uses."""
        return max((judgement.share for judgement in self.judged.values()), default=float("inf"))

    @property
    def passed(self) -> bool:
        return not self.candidate.startswith("gsbn") or self.share <= 1

    def row(self) -> dict[str, Any]:
        """The fields, ``share`` and ``passed`` as JSON's types: None for what is not finite."""
        return dict(_finite(dataclasses.asdict(self) | {"share": self.share, "passed": self.passed}))


def skipped(kinds: Iterable[str] = tuple(DTYPES)) -> dict[str, str]:
    """Why some of these kinds cannot be checked here, and why PyTorch does not stand beside gsbn, by name."""
    reasons = {}
    for kind in kinds:
        try:
            libraries.as_dtype(DTYPES[kind][0])
        except ImportError as error:
            reasons[kind] = str(error)
        if kind == "tf32" and not has_gpu():
            reasons[kind] = "a CPU computes no TF32"
    if libraries.load(["pytorch"])["torch"] is None:
        reasons["pytorch"] = "torch is not installed"
    return reasons


def check(
    kinds: Iterable[str] = tuple(DTYPES),
    families: Iterable[str] = tuple(FAMILIES),
    shape: tuple[int, int, int] = SHAPE,
    seed: int = 0,
    progress: Progress = lambda done, total, text: None,
    activation: Activation | None = None,
    scale: bool = True,
) -> list[Check]:
    """Training and inference of every kind (a key of ``DTYPES``) and family (of ``FAMILIES``), less ``skipped``; with
    this activation, and with a scale or without."""
    gpu, kinds = has_gpu(), list(kinds)
    left_out = skipped(kinds)
    names = ["gsbn", "pytorch"] + (["gsbn-cublas", "gsbn-tiled", "gsbn-sm90"] if gpu else [])
    names = [name for name in names if name not in left_out]
    todo = list(itertools.product([kind for kind in kinds if kind not in left_out], families, (True, False)))
    checks: list[Check] = []
    for done, (kind, family, training) in enumerate(todo):
        progress(done, len(todo), f"{kind}, {family}, {'training' if training else 'inference'}")
        case = Case(*shape, *DTYPES[kind], training, activation=activation, scale=scale)
        checks += _check(case, family, names, gpu, seed)
    return checks


def _check(case: Case, family: str, names: list[str], gpu: bool, seed: int) -> list[Check]:
    xp: Any = np
    if gpu:
        import cupy as xp  # type: ignore[no-redef]
    on_host = make_operands(np, *case.shape, case.dtype, family, seed, case.scale)
    operands = on_host.map(xp.asarray)
    truth = Truth(np, case, on_host, libraries.on_host(draw_dy(xp, operands)))
    backward = dataclasses.replace(case, direction="backward")
    checks = []

    def judge(name: str, of: Case) -> dict[str, Judgement]:
        return truth.judge(
            {key: libraries.on_host(a) for key, a in peers.make(name, of, operands, xp).outputs().items()}
        )

    with libraries.float32_precision(case.precision), libraries.no_grad():
        for name in names:
            try:
                judged = judge(name, case)
                if name not in WITHOUT_BACKWARD:
                    found = judge(name, backward)
                    judged |= {key: found[key] for key in GRADIENTS if key in found}
                    judged["y"] = max(judged["y"], found["y"], key=lambda judgement: judgement.share)
                checks.append(Check(case.kind, family, case.training, name, judged))
            except Unavailable:
                continue
            except Exception as error:  # one candidate's failure is a row of the table
                checks.append(Check(case.kind, family, case.training, name, failure=line_of(error)))
        if case.kind == "float32":
            g = libraries.on_host(peers.make("gemm-cupy" if gpu else "gemm-numpy", case, operands, xp).outputs()["g"])
            y_of_g = expected(np, on_host, case.precision, case.training, g, case.activation)["y"].value
            checks.append(Check(case.kind, family, case.training, "sgemm", {"y": truth.forward["y"].judge(y_of_g, np)}))
    return checks


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
