"""What ``gsbn info`` and ``gsbn check`` print for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .bounds import Judgement
from .candidate import NAMES
from .page import share
from .report import NOTHING
from .selfcheck import DERIVATION, Check
from .terminal import Row, print_facts, print_table

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
    print_facts(console, "", ("", ""), facts.items())
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

Group = dict[tuple[str, bool], Check]  # the checks of one dtype and family: (candidate, training) to check
LEGEND = (
    "In each cell: the norm of the error over the norm of the truth, and the largest share of its bound that an "
    "element uses (100%: all of it). *: the norm of the error itself, where the bound is larger than the truth and a "
    "relative error means nothing. inference: y in inference. mean, variance: the running statistics. worst: the "
    "largest share among all results of gsbn, its paths and modes. SGEMM y: y if nothing but the float32 GEMM rounded."
)


NEAREST = 5  # lines without --verbose


def print_nearest(console: Console, checks: Sequence[Check], skipped: dict[str, str], variant: str = "") -> None:
    """The few results of gsbn that are nearest to their bound or beyond it; and what was skipped, and why."""
    ours = sorted((c for c in checks if c.candidate.startswith("gsbn")), key=lambda c: c.share, reverse=True)
    rows = []
    for c in ours[:NEAREST]:
        named = {"y": c.y, "mean": c.running_mean, "variance": c.running_var}
        named |= {f"d{name}": judged for name, judged in c.gradients.items()}
        judged = {name: judged for name, judged in named.items() if judged}
        result = max(judged, key=lambda name: judged[name].share, default=NOTHING)
        error = f"{judged[result].norm_error:.1e}{'' if judged[result].relative else '*'}" if judged else NOTHING
        mode = "training" if c.training else "inference"
        style = "" if c.passed else "red"
        rows.append(Row([f"{c.kind}, {c.family}", mode, NAMES[c.candidate], result, error, share(c.share)], style))
    columns = ["", "mode", "path", "result", "error", "of its bound"]
    print_table(console, f"gsbn against float64{variant}, nearest to the bound", columns, rows, columns[1:4])
    if any(str(row.cells[4]).endswith("*") for row in rows):
        console.print(Text("*: the norm of the error itself, not over the truth's.", style="dim"))
    _print_skipped(console, skipped)


def print_checks(console: Console, checks: Sequence[Check], skipped: dict[str, str], variant: str = "") -> None:
    """Every error beside its share of the bound; what was skipped, and why; what the bound is. ``variant`` tells in
    the titles what sets the layer apart, as ``Case.variant``."""
    groups: dict[tuple[str, str], Group] = {}
    for c in checks:
        groups.setdefault((c.kind, c.family), {})[c.candidate, c.training] = c
    results = {"y": ("gsbn", True, "y"), "inference": ("gsbn", False, "y")}
    results |= {"mean": ("gsbn", True, "running_mean"), "variance": ("gsbn", True, "running_var")}
    gradients = {f"d{name}": ("gsbn", True, name) for name in ("x", "weight", "scale", "gamma", "beta")}
    peers = {"PyTorch y": ("pytorch", True, "y"), "SGEMM y": ("sgemm", True, "y")}
    peers |= {f"PyTorch d{name}": ("pytorch", True, name) for name in ("x", "scale")}
    _print_errors(console, f"gsbn against float64{variant}", groups, results, worst=True)
    _print_errors(console, f"gsbn's gradients in training{variant}", groups, gradients)
    _print_errors(console, f"Others in training{variant}, which are not held to the bound", groups, peers)
    if checks:
        console.print(Text(f"{LEGEND}\n{DERIVATION}", style="dim"))
    _print_skipped(console, skipped)


def _print_skipped(console: Console, skipped: dict[str, str]) -> None:
    for name, why in skipped.items():
        console.print(Text(f"{NAMES.get(name, name)}: skipped, because {why}", style="yellow"), soft_wrap=True)


def _print_errors(
    console: Console,
    title: str,
    groups: dict[tuple[str, str], Group],
    columns: dict[str, tuple[str, bool, str]],
    worst: bool = False,
) -> None:
    """``columns`` tell by their headings which candidate's result is shown, in training or not."""
    rows: list[Row] = []
    kinds: set[str] = set()
    for (kind, family), group in groups.items():
        errors = [_error(group, *which) for which in columns.values()]
        if set(errors) == {NOTHING} and not worst:
            continue
        cells: list[str | Text] = [*errors, *([_worst(group)] if worst else [])]
        rows += [] if kind in kinds else [Row([kind, *[""] * len(cells)], "bold")]
        rows.append(Row([family, *cells]))
        kinds.add(kind)
    print_table(console, title, ["", *columns, *(["worst"] if worst else [])], rows)


def _error(group: Group, candidate: str, training: bool, of: str) -> str:
    check = group.get((candidate, training))
    judged = check.judgement(of) if check else None
    return NOTHING if judged is None else _beside_its_bound(judged)


def _beside_its_bound(judged: Judgement) -> str:
    error, part = f"{judged.norm_error:.1e}" if judged.norm_error else "0", share(judged.share)
    return f"{error} {part:>4}" if judged.relative or not judged.norm_error else f"{error}* {part:>3}"


def _worst(group: Group) -> Text:
    largest = max(c.share for c in group.values() if c.candidate.startswith("gsbn"))
    return Text(share(largest), style="green" if largest <= 1 else "red")
