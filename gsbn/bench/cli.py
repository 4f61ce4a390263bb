"""The command ``gsbn``: a thin face over ``gsbn.bench``, ``gsbn.bench.selfcheck`` and ``gsbn.bench.machine``."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .. import warm_up
from . import machine, measure, selfcheck
from . import publish as paper
from .bounds import FAMILIES
from .candidate import NAMES, names
from .case import DTYPES, GEMMS_BY_DIRECTION, PRESETS, Case, cases
from .report import Report, Result, Settings
from .selfcheck import Check

app: typer.Typer = typer.Typer(
    name="gsbn", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Linear, per-feature scale and BatchNorm1d as CUDA kernels: what this machine has, and how good it is.",
)  # fmt: skip
out: Console = Console()
err: Console = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
_Kind = Enum("_Kind", {name: name for name in DTYPES}, type=str)  # type: ignore[misc]
_Family = Enum("_Family", {name: name for name in FAMILIES}, type=str)  # type: ignore[misc]
_Preset = Enum("_Preset", {name: name for name in PRESETS}, type=str)  # type: ignore[misc]
_Direction = Enum("_Direction", {name: name for name in GEMMS_BY_DIRECTION}, type=str)  # type: ignore[misc]
_Mode = Enum("_Mode", {name: name for name in ("training", "inference", "both")}, type=str)  # type: ignore[misc]


@app.command()
def info(
    as_json: AsJson = False,
    shape: Annotated[str, typer.Option(help="B,I,O that the paths are told for.")] = "1024,8192,8192",
) -> None:
    """What this machine has, which path each dtype takes and why, and what is missing."""
    environment, missing = machine.environment(), machine.missing()
    xp: Any = importlib.import_module("cupy" if environment["gpus"] else "numpy")
    sizes = _shape(shape)
    paths = {kind: dict(zip(("gemm", "why"), _path(Case(*sizes, *DTYPES[kind]), xp), strict=True)) for kind in DTYPES}
    if as_json:
        problems = [{"what": what, "fix": fix} for what, fix in missing]
        print(json.dumps(environment | {"shape": sizes, "paths": paths, "missing": problems}, indent=1))
        return
    libraries = "  ".join(f"{name} {v or '–'}" for name, v in environment["libraries"].items())
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
    table = _table("", "")
    for name, value in (facts | {"Python": environment["python"], "libraries": libraries}).items():
        table.add_row(f"[bold]{name}", value)
    out.print(table)
    table = _table("dtype", "GEMM", "why", title=f"Path at (B, I, O) = {sizes}")
    for kind, row in paths.items():
        table.add_row(kind, row["gemm"], row["why"])
    out.print(table)
    for what, fix in missing:
        out.print(f"[yellow]{what}[/]\n  → ", Text(fix, style="bold"), sep="", highlight=False)
    if not missing:
        out.print("Nothing is missing.", style="green")


@app.command()
def check(
    as_json: AsJson = False,
    dtype: Annotated[list[_Kind] | None, typer.Option(help="Only these.")] = None,
    family: Annotated[list[_Family] | None, typer.Option(help="Only these inputs.")] = None,
    shape: Annotated[str, typer.Option(help="B,I,O.")] = ",".join(map(str, selfcheck.SHAPE)),
    seed: int = 0,
) -> None:
    """Correctness and accuracy on this machine against float64; exit status 1 if gsbn leaves its bound."""
    with _bar("input", quiet=as_json) as step:
        checks = selfcheck.check(
            [k.value for k in dtype or _Kind], [f.value for f in family or _Family], _shape(shape), seed, step
        )
    failed = [c for c in checks if not c.passed]
    if as_json:
        content = {"environment": machine.environment(), "shape": _shape(shape), "passed": not failed}
        print(json.dumps(content | {"checks": [_finite(c.row()) for c in checks]}, indent=1))
    else:
        out.print(_check_table(checks))
        out.print(_gradient_table(checks))
        out.print(selfcheck.DERIVATION, style="dim", highlight=False, markup=False)
        for c in failed:
            what = f"{c.share:.3g} of the bound" if math.isfinite(c.share) else c.failure
            where = f"{c.kind}, {c.family}, {'training' if c.training else 'inference'}, {c.candidate}"
            err.print(Text(f"out of bound: {where}: {what}", style="red"))
        held = sum(c.candidate.startswith("gsbn") for c in checks)
        out.print(f"{held - len(failed)} of {held} within the bound.", style="red" if failed else "green")
    raise typer.Exit(1 if failed or not checks else 0)


@app.command(name="bench")
def bench_command(
    shape: Annotated[list[str] | None, typer.Option(help="B,I,O; may be given again.")] = None,
    preset: Annotated[_Preset | None, typer.Option(help="Shapes; kernelbench, or small without a GPU.")] = None,
    dtype: Annotated[list[_Kind] | None, typer.Option(help="May be given again; all but float64.")] = None,
    mode: Annotated[_Mode, typer.Option()] = "training",  # type: ignore[assignment]
    direction: Annotated[list[_Direction] | None, typer.Option(help="May be given again; forward.")] = None,
    only: Annotated[str, typer.Option(help=f"Candidates, among {', '.join(NAMES)}.")] = "",
    skip: Annotated[str, typer.Option(help="Candidates to leave out, such as autotune.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Trials of each candidate, interleaved.")] = 120,
    seconds: Annotated[float, typer.Option(help="No new round after this long, but 7 at least.")] = 5.0,
    settle: Annotated[float, typer.Option(min=0, help="Seconds at most until the clocks settle.")] = 2.0,
    calls: Annotated[int | None, typer.Option(min=1, help="Calls a trial; 1 times them cold.")] = None,
    graph: Annotated[bool, typer.Option(help="CUDA graphs where a path allows them.")] = True,
    as_json: Annotated[Path | None, typer.Option("--json", help="Save everything here.")] = None,
    as_csv: Annotated[Path | None, typer.Option("--csv", help="Save the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Save bars and a roofline here: PNG, SVG or PDF.")] = None,
    publish: Annotated[Path | None, typer.Option(help="Checkout whose tables to rewrite.", hidden=True)] = None,
    publish_as: Annotated[str, typer.Option(help="The table's name.", hidden=True)] = "kernelbench",
) -> None:
    """Time gsbn beside every peer that is installed; Ctrl-C keeps what is done."""
    gpu = machine.has_gpu()
    if not gpu:
        err.print("No GPU: the NumPy path beside PyTorch on the CPU.", style="yellow")
    if (plot or publish) and importlib.util.find_spec("matplotlib") is None:
        _fail('plots need matplotlib: pip install "gsbn[cli]"')
    for file in (as_json, as_csv, plot):
        if file is not None and not file.parent.is_dir():
            _fail(f"{file}: no such folder")
    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        _fail(f"{plot}: expected a name that ends in .png, .svg or .pdf")
    if publish:
        try:
            for page in ("README.md", "docs/results.md"):
                paper.split(publish / page, publish_as)
        except ValueError as error:
            _fail(str(error))
    usual = preset.value if preset else "kernelbench" if gpu else "small"
    shapes = [_shape(text) for text in shape or []] or PRESETS[usual]
    kinds = [k.value for k in dtype or _Kind if dtype or k.value not in (("float64",) if gpu else ("float64", "tf32"))]
    modes = {"training": [True], "inference": [False], "both": [True, False]}[mode.value]
    left_out = _names(skip)
    chosen = [name for name in _names(only) or names(gpu) if name not in left_out]
    settings = Settings(rounds, seconds, settle, calls=calls, graph=graph)
    with _bar("case") as step:
        todo = cases(shapes, kinds, modes, [d.value for d in direction or []] or ["forward"])
        report = measure.run(todo, chosen, settings, step)
    if report.interrupted:
        err.print("Interrupted: this is what was done.", style="yellow")
    _print_report(report)
    if as_json:
        report.save_json(as_json)
    if as_csv:
        report.save_csv(as_csv)
    if plot:
        paper.plot(report, plot)
    if report.interrupted:
        raise typer.Exit(130)  # and publish nothing
    if publish and not gpu:
        _fail("--publish: expected a GPU: the README's table is of GPU figures")
    if publish:
        out.print("Wrote " + ", ".join(map(str, paper.publish(report, publish, publish_as))))


@app.command()
def warmup(
    arch: Annotated[str | None, typer.Option(help="Compile for this GPU, such as sm_90, and need none.")] = None,
) -> None:
    """Compile every kernel that a GPU can use into the cache, so that no first call pays for it."""
    try:
        with _bar("kernel") as step:
            count = warm_up(step, arch=arch)
    except (RuntimeError, ValueError) as error:
        _fail(str(error))
    out.print(f"{count} kernels are ready.", style="green")


def _print_report(report: Report) -> None:
    failures: dict[str, list[str]] = {}
    for case, results in report.by_case().items():
        out.print(_case_table(case, results, report))
        for r in results.values():
            if r.failure:
                failures.setdefault(f"{NAMES[r.candidate]}: {r.failure}", []).append(case.title)
    for failure, titles in failures.items():
        where = "" if len(titles) == len(report.by_case()) else f" (in {len(titles)} of {len(report.by_case())} cases)"
        out.print(Text(failure + where, style="red" if "wrong result" in failure else "dim"))
    third = "; float32 at least a third of float16" if report.environment["gpus"] else ""
    matrix = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in report.rates.matrix.items())
    out.print(
        "Device time: median of trials, ± half the 95 % order-statistic interval. floor: share of the larger of FLOPs "
        f"over the matrix rate (TFLOP/s: {matrix or 'not measured'}{third}) and least "
        f"bytes over the copy rate ({report.rates.copy / 1e9:.4g} GB/s), measured in this run. MB: peak beyond "
        "operands and result.",
        style="dim", highlight=False,
    )  # fmt: skip


def _case_table(case: Case, results: dict[str, Result], report: Report) -> Table:
    wide = out.width >= 100
    names = ["", "device µs", "±", *(["timed by", "path"] if wide else []), "host µs", "MB", "TFLOP/s"]
    names += [*(["GB/s"] if wide else []), "floor", "gsbn ×"]
    table = _table(*names, title=case.title)
    ours, floor = results.get("gsbn"), report.rates.floor(case)
    for r in results.values():
        if r.device is None:
            continue
        t = r.seconds
        row = [NAMES[r.candidate], _number(t * 1e6), f"{(r.device.high - r.device.low) / 2 / t:.1%}"]
        row += [r.method, r.path] if wide else []
        row += [_number(r.host.median * 1e6) if r.host else "–", "–" if r.extra_bytes is None else _mb(r.extra_bytes)]
        row += [_number(case.flops / t / 1e12), *([_number(case.least_bytes / t / 1e9)] if wide else [])]
        row += [f"{floor / t:.0%}", f"{t / ours.seconds:.2f}" if ours and ours.device and r is not ours else ""]
        table.add_row(*row, style="bold" if r is ours else "")
    return table


Row = dict[tuple[str, bool], Check]  # the checks of one dtype and family: (candidate, training) to check


def _family_table(checks: list[Check], title: str, columns: Sequence[str], cells: Callable[[Row], list[str]]) -> Table:
    table = _table("", *columns, title=title, gap=0)
    groups: dict[tuple[str, str], Row] = {}
    for c in checks:
        groups.setdefault((c.kind, c.family), {})[c.candidate, c.training] = c
    heading = ""
    for (kind, family), row in groups.items():
        if kind != heading:
            table.add_row(f"[bold]{kind}", *[""] * len(columns))
            heading = kind
        table.add_row(family, *cells(row))
    return table


def _check_table(checks: list[Check]) -> Table:
    def cells(row: Row) -> list[str]:
        share = max(c.share for c in row.values() if c.candidate.startswith("gsbn"))
        verdict = f"[{'green' if share <= 1 else 'red'}]" + (f"{share:.0%}" if share < 100 else "out")
        ours, inference = row.get(("gsbn", True)), row.get(("gsbn", False))
        errors = [_error(ours, "y", "max_error"), _error(ours), _error(inference)]
        errors += [_error(ours, "running_mean"), _error(ours, "running_var")]
        return [*errors, *(_error(row.get((name, True))) for name in ("pytorch", "sgemm")), verdict]

    columns = ("y max", "y norm", "infer.", "mean", "var", "PyTorch", "SGEMM", "bound")
    return _family_table(checks, "Errors against float64; norms are relative", columns, cells)


def _gradient_table(checks: list[Check]) -> Table:
    """The gradients of gsbn without the bias', which is exactly zero, and those of autograd where the two differ."""
    shown = [("gsbn", name) for name in ("x", "weight", "scale", "gamma", "beta")]
    shown += [("pytorch", "x"), ("pytorch", "scale")]
    columns = ("dx", "dweight", "dscale", "dgamma", "dbeta", "PyTorch dx", "dscale")

    def cells(row: Row) -> list[str]:
        return [_error(row.get((candidate, True)), name) for candidate, name in shown]

    return _family_table(checks, "Gradients in training: norm-wise errors", columns, cells)


def _error(check: Check | None, of: str = "y", error: str = "norm_error") -> str:
    value = getattr(check and check.judgement(of), error, None)
    return "–" if value is None else f"{value:.1e}" if value else "0"


def _table(*columns: str, title: str = "", gap: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False,
                  show_header=any(columns), collapse_padding=True, padding=(0, gap))  # fmt: skip
    text = ("", "dtype", "GEMM", "why", "timed by", "path")
    for name in columns:
        table.add_column(name, justify="left" if name in text else "right", no_wrap=name != "why" and any(columns))
    return table


@contextmanager
def _bar(unit: str, quiet: bool = False) -> Iterator[Callable[[float, float, str], None]]:
    """A progress bar with the time left, on stderr. It vanishes when done, and is not there if stderr is no terminal.

    It is drawn at each step and never by a thread of its own, which would disturb what is being timed.
    """
    columns = (BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    silent = quiet or not err.is_terminal
    with Progress(*columns, console=err, transient=True, auto_refresh=False, disable=silent) as progress:
        task = progress.add_task(unit)
        yield lambda done, total, text: progress.update(
            task, completed=done, total=total, description=text, refresh=True
        )


def _path(case: Case, xp: Any) -> tuple[str, str]:
    try:
        if case.dtype == "bfloat16" and machine.version("ml_dtypes") is None:
            return "–", "bfloat16 needs ml_dtypes"
        return machine.path(case, "auto", xp)
    except ValueError as error:
        return "–", str(error)


def _shape(text: str) -> tuple[int, int, int]:
    try:
        batch, in_features, out_features = (int(part) for part in text.replace("x", ",").split(","))
        if min(batch - 1, in_features, out_features) < 1:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"expected B,I,O such as 1024,8192,8192, B at least 2; got {text!r}") from None
    return batch, in_features, out_features


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in NAMES:
            raise typer.BadParameter(f"expected names among {', '.join(NAMES)}; got {name!r}")
    return found


def _fail(message: str) -> NoReturn:
    err.print(Text(f"gsbn: {message}"), soft_wrap=True)
    raise typer.Exit(1)


def _finite(value: Any) -> Any:
    """The same with None in place of infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}" if size else "0"
