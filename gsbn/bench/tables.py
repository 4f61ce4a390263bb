"""What the commands print for people: the tables of ``gsbn info``, ``gsbn check`` and ``gsbn bench``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .bounds import Judgement
from .candidate import NAMES
from .case import Case
from .clock import Measurement
from .report import Report, Result
from .selfcheck import DERIVATION, Check
from .terminal import NOTHING, Row, print_facts, print_table

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


def share(value: float) -> str:
    """A share of a bound in few characters: rounded up beyond it, so that only what is within reads as 100%."""
    if not math.isfinite(value):
        return "fail"
    percent = math.ceil(value * 100) if value > 1 else round(value * 100)
    if percent < 1000:
        return f"{percent}%"
    return f"{math.ceil(value)}×" if value <= 999 else f"{value:.0e}×".replace("e+0", "e").replace("e+", "e")


# ---- gsbn bench ----------------------------------------------------------------------------------------------------


def print_report(console: Console, report: Report) -> None:
    """A table for each case, why some candidates have no times, and what the columns mean."""
    table, failures = report.by_case(), dict[str, list[str]]()
    for case, results in table.items():
        reasons = {r.failure for r in results.values()}
        if any(r.device for r in results.values()):
            _print_case(console, case, results, report)
        else:
            why = f": {reasons.pop()}" if len(reasons) == 1 else "."
            console.print(Text(f"{case.title}: nothing was timed{why}", style="red"))
        for r in results.values():
            if r.failure and reasons:
                failures.setdefault(f"{NAMES[r.candidate]}: {r.failure}", []).append(case.title)
    for failure, titles in failures.items():
        where = "" if len(titles) == len(table) else f" (in {len(titles)} of {len(table)} cases)"
        console.print(Text(failure + where, style="red" if "wrong result" in failure else "dim"))
    if any(r.device for r in report.results):
        console.print(Text(_legend(report), style="dim"))
    elif not table:
        console.print(Text("Nothing was measured.", style="red"))


def _legend(report: Report) -> str:
    gpu = bool(report.environment["gpus"])
    third = "; float32 at least a third of float16" if gpu else ""
    matrix = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in report.rates.matrix.items())
    return (
        f"{'device µs: time on the GPU' if gpu else 'µs: wall-clock time'}, the median of trials. 95%: half of the "
        "interval that holds the true median with 95 % confidence, or the interval itself where that is more than a "
        "tenth (the machine was busy: try more --seconds). floor: share of the larger of FLOPs over the matrix rate "
        f"(TFLOP/s: {matrix or 'not measured'}{third}) and least bytes over the copy rate "
        f"({report.rates.copy / 1e9:.4g} GB/s), measured in this run."
        + (" MB: peak beyond operands and result." if gpu else "")
    )


def _print_case(console: Console, case: Case, results: dict[str, Result], report: Report) -> None:
    wide = console.width >= 100
    columns = ["", "device µs" if report.environment["gpus"] else "µs", "95%", *(["timed by", "path"] if wide else [])]
    columns += ["host µs", "MB", "TFLOP/s", *(["GB/s"] if wide else []), "floor", "gsbn ×"]
    ours, floor = results.get("gsbn"), report.rates.floor(case)
    rows = []
    for r in results.values():
        if r.device is None:
            continue
        t = r.seconds
        row = [NAMES[r.candidate], _number(t * 1e6), interval(r.device)]
        row += [r.method, r.path] if wide else []
        row += [_number(r.host.median * 1e6) if r.host else NOTHING]
        row += [NOTHING if r.extra_bytes is None else _mb(r.extra_bytes)]
        row += [_number(case.flops / t / 1e12), *([_number(case.least_bytes / t / 1e9)] if wide else [])]
        row += [f"{floor / t:.0%}", f"{t / ours.seconds:.2f}" if ours and ours.device and r is not ours else ""]
        rows.append(Row(row, "bold" if r is ours else ""))
    print_table(console, case.title, columns, rows, left=("timed by", "path"))


def interval(m: Measurement) -> str:
    """Half of an interval in percent of the median, or both ends in microseconds where that is more than a tenth."""
    if m.confidence < 0.95:  # of so few trials there is none
        return NOTHING
    half = (m.high - m.low) / 2 / m.median
    return f"± {half:.1%}" if half <= 0.1 else f"{_number(m.low * 1e6)}–{_number(m.high * 1e6)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}" if size else "0"
