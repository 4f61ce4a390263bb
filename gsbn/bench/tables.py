"""What ``gsbn info`` and ``gsbn check`` print for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .bounds import GRADIENTS, Judgement
from .candidate import NAMES
from .page import share
from .report import NOTHING
from .selfcheck import DERIVATION, Check
from .terminal import print_facts, print_table

# ---- gsbn info -----------------------------------------------------------------------------------------------------


def print_machine(console: Console, environment: dict[str, Any], title: str, paths: dict[str, tuple[str, str]]) -> None:
    """What ``machine.environment()`` found, and by dtype the GEMM that serves it and why."""
    libraries = "  ".join(f"{name} {version or NOTHING}" for name, version in environment["libraries"].items())
    facts = {"gsbn": f"{environment['gsbn']}, kernels {environment['digest']['kernels']}"}
    for index, gpu in enumerate(environment["gpus"]):
        facts[f"GPU {index}"] = (
            f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['sms']} SMs, {gpu['memory_gib']} GiB"
        )
    facts |= {"CPU": environment["cpu"]}
    if environment["cuda_driver"]:
        facts["driver"] = f"{environment['driver'] or 'of unknown version'}, serves CUDA {environment['cuda_driver']}"
    if environment["gpus"]:
        facts["CUDA"] = f"{environment['cuda_runtime']}, NVRTC {environment['nvrtc']}"
    facts |= {"Python": environment["python"], "libraries": libraries}
    print_facts(console, "", ("", ""), [*facts.items()])
    print_facts(console, title, ("dtype", "GEMM", "why"), [(kind, *path) for kind, path in paths.items()])


def print_missing(console: Console, missing: Iterable[tuple[str, str]]) -> None:
    """What ``machine.missing()`` found. A remedy stays on one line, so that it can be copied."""
    nothing = True
    for what, fix in missing:
        nothing = False
        console.print(Text(what, style="yellow"))
        console.print(Text(f"  → {fix}", style="bold"), soft_wrap=True)
    if nothing:
        console.print(Text("Nothing is missing.", style="green"))


# ---- gsbn check ----------------------------------------------------------------------------------------------------

LEGEND = (
    "In each cell: the norm of the error over the norm of the truth, and the largest share of its bound that an "
    "element uses (100%: all of it). *: the norm of the error itself, where the bound is larger than the truth and a "
    "relative error means nothing. mean, variance: the running statistics. Only gsbn is held to the bound. "
    "SGEMM: y if nothing but the float32 GEMM rounded."
)
NEAREST = 5  # lines without --verbose


def print_nearest(console: Console, checks: Sequence[Check], skipped: dict[str, str], variant: str = "") -> None:
    """The few results of gsbn that are nearest to their bound or beyond it; and what was skipped, and why."""
    ours = sorted((c for c in checks if c.candidate.startswith("gsbn")), key=lambda c: c.share, reverse=True)
    rows = []
    for c in ours[:NEAREST]:
        result = max(c.judged, key=lambda name: c.judged[name].share, default=NOTHING)
        error = _error(c.judged[result]) if c.judged else NOTHING
        cells = [f"{c.kind}, {c.family}", _mode(c), _name(c), result, error, share(c.share)]
        rows.append([Text(cell, style="" if c.passed else "red") for cell in cells])
    columns = ["", "mode", "path", "result", "error", "of its bound"]
    print_table(console, f"gsbn against float64{variant}, nearest to the bound", columns, rows, left=columns[1:4])
    if any(str(row[4]).endswith("*") for row in rows):
        console.print(Text("*: the norm of the error itself, not over the truth's.", style="dim"))
    _print_skipped(console, skipped)


def print_checks(console: Console, checks: Sequence[Check], skipped: dict[str, str], variant: str = "") -> None:
    """A table for each dtype, in which every error stands beside its share of the bound; what was skipped, and why;
    what the bound is. ``variant`` tells in the titles what sets the layer apart, as ``Case.variant``."""
    results = {"y": "y", "running_mean": "mean", "running_var": "variance"} | {name: f"d{name}" for name in GRADIENTS}
    for kind in dict.fromkeys(c.kind for c in checks):
        rows = []
        for c in (c for c in checks if c.kind == kind):
            line = [f"{c.family}, {_mode(c)}, {_name(c)}", *(_beside_its_bound(c.judged.get(name)) for name in results)]
            rows.append([Text(cell, style="" if c.passed else "red") for cell in line])
        print_table(console, f"{kind} against float64{variant}", ["", *results.values()], rows)
    if checks:
        console.print(Text(f"{LEGEND}\n{DERIVATION}", style="dim"))
    _print_skipped(console, skipped)


def _print_skipped(console: Console, skipped: dict[str, str]) -> None:
    for name, why in skipped.items():
        console.print(Text(f"{NAMES.get(name, name)}: skipped, because {why}", style="yellow"), soft_wrap=True)


def _mode(check: Check) -> str:
    return "training" if check.training else "inference"


def _name(check: Check) -> str:
    return NAMES.get(check.candidate, "SGEMM")


def _error(judged: Judgement) -> str:
    error = f"{judged.norm_error:.1e}" if judged.norm_error else "0"
    return error if judged.relative or not judged.norm_error else f"{error}*"


def _beside_its_bound(judged: Judgement | None) -> str:
    return f"{_error(judged)} {share(judged.share):>4}" if judged else NOTHING
