"""What a report becomes: tables for a terminal and for a page, a picture, and the files of ``docs/results``.

Each bench has a module of four functions: ``print_report(console, report)``, ``markdown(report)``,
``plot(report, file)`` and ``publish(report, root, name)``, which are made of the parts here. The rows of a table are
tuples, such as a case and its results by candidate; a column has a function that makes a cell of such a tuple.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .case import DTYPES
from .machine import source_digests
from .report import NOTHING, AnyReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patheffects import AbstractPathEffect
    from rich.console import Console

SHORT = {kind: kind.replace("tf32", "TF32") for kind in DTYPES}
SERIES = {  # what bars show, in this order: a candidate, or a prefix whose fastest stands for all; its name and colour
    "gemm-": ("bare GEMM", "#c9ced6"),
    "pytorch": ("PyTorch eager", "#8d99ae"),
    "compile": ("torch.compile", "#5b7db1"),
    "autotune": ("max-autotune", "#2f4b7c"),
    "jax": ("JAX", "#8bb174"),
    "gsbn": ("gsbn", "#d1495b"),
}
Times = Mapping[str, float]  # seconds by series
Series = Mapping[str, tuple[str, str]]


# ---- tables --------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    cell: Callable[..., str]  # of a row
    left: bool = False  # flush left
    brief: bool = True  # whether a narrow terminal shows it
    strong: bool = False  # its cells are bold on a page


def of(name: str, cell: Callable[[Any], str]) -> Callable[..., str]:
    """A column's cell that shows one candidate's result; a dash where there is none."""
    return lambda case, results: cell(results[name]) if name in results else NOTHING


def shown(value: float | None, form: str = "") -> str:
    """A number in this format, or with three significant digits; a dash for None."""
    return NOTHING if value is None else format(value, form) if form else digits(value)


def digits(value: float) -> str:
    """Three significant digits, trailing zeros kept."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 <= value < 1e3 else f"{value:.0f}"


def milliseconds(result: Any) -> str:
    """The time of a result, if there is one."""
    return digits(result.seconds * 1e3) if result and result.timed else NOTHING


def share(value: float) -> str:
    """A share of a bound in few characters: rounded up beyond it, so that only what is within reads as 100%."""
    if not math.isfinite(value):
        return "fail"
    percent = math.ceil(value * 100) if value > 1 else round(value * 100)
    if percent < 1000:
        return f"{percent}%"
    return f"{math.ceil(value)}×" if value <= 999 else f"{value:.0e}×".replace("e+0", "e").replace("e+", "e")


def markdown_table(columns: Iterable[Column], rows: Iterable[tuple[Any, ...]]) -> str:
    """A table of Markdown, without the columns that have no value."""
    rows, table = list(rows), []
    for column in columns:
        cells = [column.cell(*row) for row in rows]
        if any(cell != NOTHING for cell in cells):
            cells = [f"**{cell}**" if column.strong else cell for cell in cells]
            table.append([column.heading, "---" if column.left else "---:", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*table, strict=True))


def print_rows(
    console: Console,
    title: str,
    columns: Sequence[Column],
    rows: Iterable[tuple[Any, ...]],
    style: Callable[..., str] = lambda *row: "",
) -> None:
    """Print a table; ``style`` gives that of a row."""
    from .terminal import Row, print_table

    lines = [Row([column.cell(*row) for column in columns], style(*row)) for row in rows]
    print_table(console, title, [c.heading.strip("*") for c in columns], lines, [c.heading for c in columns if c.left])


def failures(report: AnyReport[Any, Any], titles: Mapping[str, str]) -> dict[str, list[str]]:
    """Why there are no times, or no graph, each with the titles of the cases; ``titles`` are the candidates'."""
    found: dict[str, list[str]] = {}
    for result in report.results:
        no_graph = getattr(result, "graph_failure", "")
        for said in (result.failure, no_graph and f"no graph: {no_graph}"):
            if said:
                found.setdefault(f"{titles[result.candidate]}: {said}", []).append(result.case.title)
    return found


def print_failures(console: Console, report: AnyReport[Any, Any], found: Mapping[str, Sequence[str]]) -> None:
    """Print ``failures``, and in which cases they happened if not in all."""
    from rich.text import Text

    count = len(report.by_case())
    for said, cases in found.items():
        few = f" (in {'; '.join(cases)})" if len(cases) < 3 else f" (in {len(cases)} of {count} cases)"
        style = "red" if "wrong result" in said else "dim"
        console.print(Text(said if len(cases) == count else said + few, style=style))
    if not report.results:
        console.print(Text("Nothing was measured.", style="red"))


def measured_on(report: AnyReport[Any, Any]) -> str:
    """When and where it was measured, and with which versions."""
    e = report.environment
    gpu = e["gpus"][0]["name"] if e["gpus"] else f"no GPU: {e['cpu']}"
    versions = [f"{name} {v}" for name, v in e["libraries"].items() if v and name in ("cupy", "torch", "jax", "numpy")]
    driver = f", driver {e['driver']}, CUDA {e.get('cuda_runtime')}" if e["driver"] else ""
    return f"{report.date[:10]}, {gpu}{driver}, gsbn {e['gsbn']}, {', '.join(versions)}."


def title_of(report: AnyReport[Any, Any], what: str, cpu: str = "the CPU") -> str:
    """The title of a picture."""
    e = report.environment
    return f"gsbn {e['gsbn']}, {what}, on {e['gpus'][0]['name'] if report.on_gpu else cpu}, {report.date[:10]}"


def sources_of(report: AnyReport[Any, Any]) -> str:
    """The digests of the sources that were measured."""
    digest = report.environment["digest"]
    return f"Sources: gsbn/ `{digest['gsbn']}`, kernels/ `{digest['kernels']}`."


# ---- files ---------------------------------------------------------------------------------------------------------


def split(file: Path, name: str) -> tuple[str, str]:
    """A page up to the first marker of a table, and from the second on; ValueError if one is missing."""
    begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not (0 <= text.find(begin) < text.find(end)):
        raise ValueError(f"{file}: expected a file with the lines {begin} and {end}")
    return text[: text.find(begin) + len(begin)], text[text.find(end) :]


def page_of(root: Path, name: str) -> Path:
    """The page of a checkout that has the table of this name; ValueError if a marker is missing."""
    split(page := root / "docs" / "results.md", name)
    return page


def write(
    report: AnyReport[Any, Any],
    root: Path,
    name: str,
    plot: Callable[[Any, Path], None],
    markdown: Callable[..., str],
    picture: str,
    intervals: str = "With intervals",
) -> list[Path]:
    """Publish a report in a checkout; gives the files that were written.

    The tables and the picture, which shows ``picture``, go between the markers of this name in ``docs/results.md``;
    figures and picture into ``docs/results``.
    """
    found = page_of(root, name)
    folder = root / "docs" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    report.save_json(figures := folder / f"{name}.json")
    plot(report, image := folder / f"{name}.png")
    text = f"{markdown(report)}\n\n![{picture}](results/{name}.png)\n\n{intervals}: [{name}.json](results/{name}.json)."
    head, tail = split(found, name)
    found.write_text(f"{head}\n{text}\n{tail}", encoding="utf-8")
    return [found, figures, image]


def changed_since(results: Path) -> list[str]:
    """Which of ``gsbn`` and ``kernels`` are no longer the sources that a saved report was measured on."""
    measured = json.loads(results.read_text(encoding="utf-8"))["environment"]["digest"]
    return [folder for folder, digest in source_digests().items() if measured.get(folder) != digest]


def stamps(root: Path) -> dict[str, list[str]]:
    """What the published reports of a checkout were measured on, version and digests of the sources: and which they
    are, each with its date."""
    found: dict[str, list[str]] = {}
    for file in sorted((root / "docs" / "results").glob("*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        environment = report["environment"]
        sources = " ".join(f"{folder}/ {digest}" for folder, digest in sorted(environment["digest"].items()))
        found.setdefault(f"{environment['gsbn']}, {sources}", []).append(f"{file.stem} {report['date'][:10]}")
    return found


# ---- pictures ------------------------------------------------------------------------------------------------------


@contextmanager
def drawing(file: str | Path, title: str, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, saved as PNG, SVG or PDF once it is drawn, with a legend of its bars and dots."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        figure.savefig(file, dpi=130)


def speeds(times: Times, unit: str) -> dict[str, float]:
    """The speed of each series; 1 is that of ``unit``, or of the slowest where that is missing."""
    one = times.get(unit, max(times.values(), default=0.0))
    return {name: one / seconds for name, seconds in times.items()}


def bars(axes: Axes, groups: Sequence[tuple[str, Times]], series: Series, unit: str, told: str | None = None) -> None:
    """Bars of speeds, a group for each label below them. The times of the series ``told`` are written on its bars."""
    present = [name for name in series if any(name in times for _, times in groups)]
    width = 0.82 / max(len(present), 1)
    for i, name in enumerate(present):
        label, colour = series[name]
        at = [n + (i - (len(present) - 1) / 2) * width for n in range(len(groups))]
        heights = [speeds(times, unit).get(name, 0.0) for _, times in groups]
        axes.bar(at, heights, width * 0.92, color=colour, label=label)
        for x, height, (_, times) in zip(at, heights, groups, strict=True):
            if name == told and name in times:
                ms = times[name] * 1e3
                text = f"{digits(ms)} ms" if ms >= 1 else f"{digits(ms * 1e3)} µs"
                axes.annotate(text, (x, height), (0, 2), textcoords="offset points", ha="center", fontsize=7.5,
                              color=colour, fontweight="bold", path_effects=outline())  # fmt: skip
    axes.axhline(1, color="#444", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xticks(range(len(groups)), [label for label, _ in groups])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(f"speed, {series[unit][0]} = 1")


def plot_speeds(
    file: str | Path, title: str, panels: Mapping[str, Sequence[tuple[str, Times]]], series: Series, unit: str
) -> None:
    """A picture of bars: a panel for each title, as ``bars`` takes them."""
    with drawing(file, title, 14, 3.4 * max(len(panels), 1)) as figure:
        for index, (name, groups) in enumerate(panels.items()):
            axes = figure.add_subplot(len(panels), 1, index + 1)
            axes.set_title(name, fontsize=9.5, loc="left")
            bars(axes, groups, series, unit)
            axes.tick_params(axis="x", labelsize=7.5)
        if panels:
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)


def outline() -> list[AbstractPathEffect]:
    """White around letters, so that they can be read across bars and lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2, foreground="white")]
