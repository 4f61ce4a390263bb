"""The command ``gsbn``: a thin face over ``gsbn.bench``, ``gsbn.bench.selfcheck`` and ``gsbn.bench.machine``."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text
from typer.core import TyperCommand

import gsbn

from .. import warm_up
from .._typing import Activation, ActivationName
from . import (
    compare_model,
    layers,
    layers_page,
    libraries,
    machine,
    models,
    page,
    ranks,
    selfcheck,
    spread,
    tables,
    turns,
)
from .bounds import FAMILIES
from .candidate import NAMES, names
from .case import DTYPES, GEMMS_BY_DIRECTION, PRESETS, Case, ModelCase, cases
from .picture import draw
from .report import NOTHING, Settings

app: typer.Typer = typer.Typer(
    name="gsbn", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich's columns are narrow, and show <bool>
    context_settings={"max_content_width": 120},
    help="Linear, per-feature scale and BatchNorm1d as CUDA kernels: what this machine has, and how good it is.",
)  # fmt: skip
PLAIN = bool(os.environ.get("NO_COLOR"))  # then no escape codes at all: neither bold letters nor a progress bar
out: Console = Console(color_system=None if PLAIN else "auto")
err: Console = Console(color_system=None if PLAIN else "auto", stderr=True)

STDOUT = Path("-")
HYPHEN = "\N{NON-BREAKING HYPHEN}"  # help prints "-" in its place
LARGEST_SIZE, LARGEST_SEED = 2**31 - 1, 2**32 - 1  # an int32's, and NumPy's RandomState's
MODES = {"training": [True], "inference": [False], "both": [True, False]}
OF_MODELS = {"models": models.cases, "convolutions": models.convolutions}  # presets
ACTIVATIONS: tuple[Any, ...] = get_args(ActivationName)
Shape = tuple[int, int, int]


class _Command(TyperCommand):
    """A command that hints at ``-`` if ``--json`` has no file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(this == "--json" and after.startswith("--") for this, after in pairwise([*args, "--"])):
            raise typer.BadParameter("expected a file, or - for stdout: --json -", param_hint="'--json'")
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(HYPHEN, "-")


def _file(file: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything runs."""
    if file is None or file == STDOUT:
        return file
    if file.is_dir():
        raise typer.BadParameter(f"expected a file, got the folder {file}")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"{file}: no such folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise typer.BadParameter(f"{file}: no permission to write it")
    return file


def _picture(file: Path | None) -> Path | None:
    if file and file.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{file}: expected a name that ends in .png, .svg or .pdf")
    return _file(file)


def _list(names: Iterable[str]) -> str:
    """The values of an option."""
    return ", ".join(names)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gsbn {gsbn.__version__}")
        raise typer.Exit


AsJson = Annotated[Path | None, typer.Option("--json", metavar="FILE", callback=_file, help=(
    "Save everything as JSON; - is stdout, without tables."))]  # fmt: skip
OfActivation = Annotated[str, typer.Option("--activation", metavar="NAME", help=f"{_list(ACTIVATIONS)}; else none.")]
OfScale = Annotated[bool, typer.Option("--scale/--no-scale", help="Whether the layer has a scale.")]


def main() -> None:
    """Run the command line. A character that a stream cannot encode is printed as a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what replaces sys.stdout need not be a file
            stream.reconfigure(errors="replace")
    app()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=_Command)
def info(
    as_json: AsJson = None,
    shape: Annotated[str, typer.Option(metavar="B,I,O", help="Sizes whose paths are shown.")] = "1024,8192,8192",
) -> None:
    """What this machine has, and what it lacks. Which path each dtype takes, and why."""
    sizes = _shape(shape)
    environment, missing = machine.environment(), machine.missing()
    xp: Any = importlib.import_module("cupy" if environment["gpus"] else "numpy")
    paths = {kind: _path(Case(*sizes, *DTYPES[kind]), xp) for kind in DTYPES}
    show = _console(as_json)
    tables.print_machine(show, environment, f"Path at (B, I, O) = {sizes}", paths)
    tables.print_missing(show, missing)
    content: dict[str, Any] = {"shape": sizes}
    content |= {"paths": {kind: {"gemm": gemm, "why": why} for kind, (gemm, why) in paths.items()}}
    content |= {"missing": [{"what": what, "fix": fix} for what, fix in missing]}
    _save(as_json, environment | content)


@app.command(cls=_Command)
def check(
    as_json: AsJson = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", metavar="DTYPE", help=(
        f"One of {_list(DTYPES)}; may be repeated. By default all."))] = None,
    family: Annotated[list[str] | None, typer.Option(metavar="NAME", help=(
        f"One input of {_list(FAMILIES)}; may be repeated. By default all."))] = None,
    shape: Annotated[str, typer.Option(metavar="B,I,O", help="Sizes.")] = ",".join(map(str, selfcheck.SHAPE)),
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="Of the random inputs.")] = 0,
    activation: OfActivation = "",
    scale: OfScale = True,
    verbose: Annotated[bool, typer.Option("--verbose", help="Every error, and what the bound is.")] = False,
) -> None:  # fmt: skip
    """Check this machine's results against float64. The verdict, and what is nearest to its bound.

    Exit status 1 if gsbn leaves its bound, or if nothing could be checked.
    """
    sizes, kinds = _shape(shape), _names("--dtype", dtype, DTYPES) or list(DTYPES)
    families = _names("--family", family, FAMILIES) or list(FAMILIES)
    put_through = _activation(activation)
    skipped = selfcheck.skipped(kinds)
    try:
        with _bar("input") as step:
            checks = selfcheck.check(kinds, families, sizes, seed, step, put_through, scale)
    except MemoryError:
        _fail(f"--shape: not enough memory to check {sizes}")
    failed = [c for c in checks if not c.passed]
    passed = bool(checks) and not failed
    show = _console(as_json)
    print_tables = tables.print_checks if verbose else tables.print_nearest
    print_tables(show, checks, skipped, Case(*sizes, activation=put_through, scale=scale).variant)
    for c in failed:
        where = f"{c.kind}, {c.family}, {'training' if c.training else 'inference'}, {c.candidate}"
        what = c.failure or f"{page.share(c.share)} of the bound"
        err.print(Text(f"out of bound: {where}: {what}", style="red"))
    held = sum(c.candidate.startswith("gsbn") for c in checks)
    said = f"{held - len(failed)} of {held} within the bound." if checks else "Nothing was checked."
    show.print(Text(said, style="green" if passed else "red"))
    if checks and not verbose:
        show.print(Text("--verbose shows every error, and what the bound is.", style="dim"))
    content = {"environment": machine.environment(), "shape": sizes, "seed": seed, "passed": passed}
    content |= {"activation": put_through, "scale": scale}
    _save(as_json, content | {"skipped": skipped, "checks": [c.row() for c in checks]})
    raise typer.Exit(0 if passed else 1)


@app.command(name="bench", cls=_Command)
def bench_command(
    shape: Annotated[list[str] | None, typer.Option(metavar="B,I,O", help=(
        "Sizes; may be repeated, and added to --preset."))] = None,
    preset: Annotated[str, typer.Option(metavar="NAME", help=(
        f"{_list(PRESETS)}: named shapes, before those of --shape. "
        "With neither: kernelbench, or small without a GPU. "
        "models, convolutions: training steps of PyTorch models, as they are and converted by gsbn.torch."))] = "",
    of_ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", min=2, max=64, help=(
        "Start N processes, each with a GPU, that share a batch (B rows a rank); compare with "
        "SyncBatchNorm and with no sharing."))] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=0, help=(
        "Spread the cases over N GPUs, with a process for each; 0: over all."))] = 1,
    model: Annotated[str, typer.Option(metavar="NAME", help=(
        "module:function that returns (model, inputs): your PyTorch model instead, plain, compiled and converted by "
        "gsbn.torch."))] = "",
    dtype: Annotated[list[str] | None, typer.Option("--dtype", metavar="DTYPE", help=(
        f"{_list(DTYPES)}; may be repeated. By default all but float64."))] = None,
    mode: Annotated[str, typer.Option(metavar="NAME", help=f"{_list(MODES)}.")] = "training",
    direction: Annotated[list[str] | None, typer.Option(metavar="NAME", help=(
        f"{_list(GEMMS_BY_DIRECTION)}; may be repeated. By default forward."))] = None,
    activation: OfActivation = "",
    scale: OfScale = True,
    only: Annotated[str, typer.Option(metavar="NAMES", help=(
        f"Candidates, among {_list(NAMES)}.".replace("-", HYPHEN)))] = "",
    skip: Annotated[str, typer.Option(metavar="NAMES", help="Candidates to leave out, such as autotune.")] = "",
    repeat: Annotated[int, typer.Option("--turns", metavar="N", min=1, help=(
        "How often all are prepared and timed; a peer's time is that of its best turn."))] = Settings.turns,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help=(
        "Trials of each candidate in a turn, interleaved."))] = Settings.rounds,
    seconds: Annotated[float, typer.Option("--seconds", metavar="SECONDS", min=0, help=(
        f"Start no round after this time, but run at least {turns.LEAST_ROUNDS} a turn."))] = Settings.seconds,
    settle: Annotated[float, typer.Option(metavar="SECONDS", min=0, help=(
        "Wait at most this long until the clocks settle."))] = Settings.settle,
    calls: Annotated[int | None, typer.Option(metavar="N", min=1, help=(
        "Calls a trial; 1: with a cold L2 cache."))] = None,
    as_json: AsJson = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", callback=_picture, help=(
        "Save bars and a roofline: PNG, SVG or PDF."))] = None,
) -> None:  # fmt: skip
    """Time gsbn beside every installed peer. Ctrl-C keeps what is done."""
    if plot and importlib.util.find_spec("matplotlib") is None:
        _fail(f"plots need matplotlib: {machine.pip_install('cli')}")
    kinds, directions = _names("--dtype", dtype, DTYPES), _names("--direction", direction, GEMMS_BY_DIRECTION)
    _names("--preset", [preset], [*PRESETS, *OF_MODELS])
    _names("--mode", [mode], MODES)
    put_through = _activation(activation)
    alone = {"--activation": activation, "--mode": mode != "training", "--no-scale": not scale}
    if model:
        _refuse(alone | {"--shape": shape, "--preset": preset, "--ranks": of_ranks, "--dtype": kinds, "--only": only,
                         "--direction": directions, "--calls": calls, "--plot": plot, "--gpus": gpus != 1},
                "--model takes no such option")  # fmt: skip
        compiled = not _names("--skip", skip.split(","), ["compile"])
        return _bench_model(model, as_json, compile=compiled, seconds=seconds)
    if of_ranks:
        _refuse(alone | {"--preset": preset, "--gpus": gpus != 1}, "ranks take no such option")
        bench = _of_ranks(of_ranks, shape or [], kinds, directions)
    elif preset in OF_MODELS:
        _refuse({"--shape": shape, "--direction": direction} | alone, "the models take no such option")
        bench = _of_models(OF_MODELS[preset], kinds)
    else:
        bench = _of_layers(preset, shape or [], kinds, MODES[mode], directions, put_through, scale)
    wanted, left_out = (
        _names(option, text.split(","), bench.known) for option, text in (("--only", only), ("--skip", skip))
    )
    found = 1 if gpus == 1 else len(machine.environment()["gpus"])
    if gpus > found:
        _fail(f"--gpus: expected {gpus} GPUs; CuPy sees {found} here")
    if not (chosen := [each for each in wanted or bench.usual if each not in left_out]):
        raise typer.BadParameter("leaves no candidate to time", param_hint="'--skip'")
    if bench.notice:
        err.print(Text(bench.notice, style="yellow"))
    with _bar("case") as step:
        settings = Settings(repeat, rounds, seconds, settle, calls=calls)
        report = spread.run(bench.run, bench.todo, chosen, settings, step, gpus or found)
    if report.interrupted:
        err.print(Text("Interrupted: this is what was done.", style="yellow"))
    show = _console(as_json)
    page.show(show, report, bench.view)
    _save(as_json, report.to_json())
    if plot and report.measured:
        draw(report, bench.view, plot)
    elif plot:
        err.print(Text(f"{plot} is not written: nothing was timed.", style="red"))
    if report.failure:
        _fail(report.failure)
    if report.interrupted:
        raise typer.Exit(130)


class _Bench(NamedTuple):
    """What the options ask for: what to run, and how to show its report."""

    view: page.View
    known: Collection[str]  # candidates by name
    usual: Collection[str]  # without --only
    notice: str
    run: spread.Bench
    todo: Sequence[Any]  # the cases


def _bench_model(model: str, as_json: Path | None, **options: Any) -> None:
    try:
        found, content = compare_model.run(model, **options)
    except compare_model.CannotLoad as error:
        raise typer.BadParameter(str(error), param_hint="'--model'") from None
    _console(as_json).print(Text(found.table(out.width)))
    _save(as_json, content)


def _of_layers(
    preset: str, shapes: list[str], kinds: list[str], modes: list[bool], directions: list[str],
    activation: Activation | None, scale: bool,
) -> _Bench:  # fmt: skip
    gpu = machine.has_gpu()
    sizes = (PRESETS[preset] if preset else []) + [_shape(text) for text in shapes]
    kinds = kinds or [kind for kind in DTYPES if kind not in (("float64",) if gpu else ("float64", "tf32"))]
    sizes, directions = sizes or PRESETS["kernelbench" if gpu else "small"], directions or ["forward"]
    todo = list(dict.fromkeys(cases(sizes, kinds, modes, directions, activation, scale)))
    notice = "" if gpu else "No GPU: a CPU is for tests and examples. The NumPy path beside PyTorch:"
    return _Bench(layers_page.VIEW, NAMES, names(gpu), notice, layers.run, todo)


def _of_models(every: Callable[..., list[ModelCase]], kinds: list[str]) -> _Bench:
    if unknown := [kind for kind in kinds if kind not in models.KINDS]:
        said = f"expected {' or '.join(models.KINDS)} for models, got {unknown[0]}"
        raise typer.BadParameter(said, param_hint="'--dtype'")
    gpu = libraries.has_gpus()
    todo, usual = every(kinds or models.KINDS, gpu), models.NAMES if gpu else models.ON_A_CPU
    notice = "" if gpu else "No GPU that PyTorch and CuPy see: smaller models, on the CPU."
    return _Bench(models.VIEW, models.NAMES, usual, notice, models.run, todo)


def _of_ranks(count: int, shapes: list[str], kinds: list[str], directions: list[str]) -> _Bench:
    if "backward" in directions:
        raise typer.BadParameter("expected forward or step for ranks, got backward", param_hint="'--direction'")
    sizes = [_shape(text) for text in shapes]
    try:
        gpu = ranks.device_for(count) == "cuda"
    except RuntimeError as error:
        _fail(f"--ranks: {error}")
    known = ranks.ON_GPUS if gpu else ranks.ON_A_CPU
    notice = "" if gpu else "No GPU that PyTorch and CuPy see: small shapes over gloo, on the CPU."
    todo = ranks.cases(sizes, kinds, directions, gpu)
    return _Bench(ranks.VIEW, known, known, notice, functools.partial(ranks.run, count), todo)


def _refuse(given: dict[str, Any], why: str) -> None:
    """Raise BadParameter for the first of these options that has a value."""
    for option in (option for option, value in given.items() if value):
        raise typer.BadParameter(why, param_hint=f"'{option}'")


@app.command(cls=_Command)
def warmup(
    arch: Annotated[str | None, typer.Option("--arch", metavar="ARCH", help=(
        "Compile for this GPU, such as sm_90, and need none."))] = None,
) -> None:  # fmt: skip
    """Compile all kernels before the first call. Those that a GPU can use go into the cache."""
    try:
        with _bar("kernel") as step:
            count = warm_up(step, arch=arch)
    except (RuntimeError, ValueError) as error:
        _fail(str(error))
    out.print(f"{count} kernels are ready.", style="green")


@contextmanager
def _bar(unit: str) -> Iterator[turns.Progress]:
    """A progress bar with the time left, on stderr. It vanishes when done, and is not there if stderr is no terminal.

    It is drawn at each step and never by a thread of its own, which would disturb what is being timed.
    """
    columns = (BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=err, transient=True, auto_refresh=False, disable=PLAIN or not err.is_terminal
    ) as progress:
        task = progress.add_task(unit)
        yield lambda done, total, text: progress.update(
            task, completed=done, total=total, description=text, refresh=True
        )


def _path(case: Case, xp: Any) -> tuple[str, str]:
    try:
        libraries.as_dtype(case.dtype)
        return machine.path(case, "auto", xp)
    except (ImportError, ValueError) as error:
        return NOTHING, str(error)


def _shape(text: str) -> Shape:
    """What --shape says."""
    try:
        batch, in_features, out_features = sizes = [int(part) for part in text.replace("x", ",").split(",")]
        if min(batch - 1, *sizes) < 1 or max(sizes) > LARGEST_SIZE:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"expected B,I,O such as 1024,8192,8192, B at least 2 and none above {LARGEST_SIZE}; got {text[:80]!a}",
            param_hint="'--shape'",
        ) from None
    return batch, in_features, out_features


def _names(option: str, given: list[str] | None, known: Collection[str]) -> list[str]:
    """What an option was given, each name once; BadParameter for one that is not known."""
    found = list(dict.fromkeys(name.strip() for name in given or [] if name.strip()))
    for name in found:
        if name not in known:
            raise typer.BadParameter(f"expected names among {_list(known)}; got {name!a}", param_hint=f"'{option}'")
    return found


def _activation(name: str) -> Activation | None:
    found: Any = _names("--activation", [name], ACTIVATIONS)
    return found[0] if found else None


def _console(as_json: Path | None) -> Console:
    """Where tables go: nowhere if the JSON goes to stdout."""
    return Console(quiet=True) if as_json == STDOUT else out


def _save(file: Path | None, content: str | dict[str, Any]) -> None:
    """Write JSON, made or still to be made."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    if file == STDOUT:
        sys.stdout.write(text)
    elif file:
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            _fail(f"{file}: {error.strerror}")


def _fail(message: str) -> NoReturn:
    err.print(Text(f"gsbn: {message}"), soft_wrap=True)
    raise typer.Exit(1)
