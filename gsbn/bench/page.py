"""What a report becomes: tables for a terminal and for a page.

Each bench has a ``View``, and the functions here show its report. A table of a page has a line for each
case; a terminal has a table for each case, with a line for each candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .case import DTYPES
from .report import NOTHING, Report, Result

if TYPE_CHECKING:
    from rich.console import Console

SHORT = {kind: kind.replace("tf32", "TF32") for kind in DTYPES}
Groups = Sequence[tuple[str, Mapping[str, float]]]  # of bars: the label below them, and seconds by series
Series = Mapping[str, tuple[str, str]]  # what bars show, in this order: its name and colour


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    cell: Callable[..., str]  # of a case and its results on a page, of one result on a terminal
    left: bool = False  # flush left
    strong: bool = False  # its cells are bold on a page


class View(NamedTuple):
    """How the reports of a bench are shown."""

    names: Mapping[str, str]  # the candidates, as people read them
    columns: Callable[[Report], Sequence[Column]]  # of a terminal's table: first the time, then all else
    legend: Callable[[Report], str]  # what they mean
    markdown: Callable[[Report], str]  # the tables of a page, with what they are of
    panels: Callable[[Report], Mapping[str, Groups]]  # of the picture, by title
    series: Series
    units: Sequence[str]  # the series whose speed is 1; the first that was timed
    subject: Callable[[Report], str]  # of the picture's title
    picture: str  # what it shows, for those who do not see it


# ---- cells ---------------------------------------------------------------------------------------------------------


def of(name: str, cell: Callable[[Result], str]) -> Callable[..., str]:
    """A page's cell that shows one candidate's result; a dash where there is none."""
    return lambda case, results: cell(results[name]) if name in results else NOTHING


def shown(value: float | None, form: str = "") -> str:
    """A number in this format, or with three significant digits; a dash for None."""
    return NOTHING if value is None else format(value, form) if form else digits(value)


def digits(value: float) -> str:
    """Three significant digits, trailing zeros kept."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 <= value < 1e3 else f"{value:.0f}"


def time_of(way: str, unit: float) -> Callable[[Result], str]:
    """A cell that shows what was timed so, in this unit: 1e-3 for milliseconds."""
    return lambda result: shown(None if (seconds := result.median(way)) is None else seconds / unit)


def milliseconds(result: Result | None) -> str:
    """The time of a result, if there is one."""
    return digits(result.seconds * 1e3) if result and result.times else NOTHING


def error_of(result: Result | None) -> str:
    """The error of a result, if it is known."""
    error = result.facts.get("error") if result else None
    return NOTHING if error is None else f"{error:.1e}".replace("e-0", "e-")


def speedup(peer: Result | None, ours: Result | None) -> str:
    """A peer's time over gsbn's: above 1, gsbn is faster."""
    return f"{peer.seconds / ours.seconds:.2f}" if peer and ours and peer.times and ours.times else NOTHING


def share(value: float) -> str:
    """A share of a bound in few characters: rounded up beyond it, so that only what is within reads as 100%."""
    if not math.isfinite(value):
        return "fail"
    percent = math.ceil(value * 100) if value > 1 else round(value * 100)
    if percent < 1000:
        return f"{percent}%"
    return f"{math.ceil(value)}×" if value <= 999 else f"{value:.0e}×".replace("e+0", "e").replace("e+", "e")


def fastest(results: Mapping[str, Result], names: Iterable[str]) -> Result | None:
    """The fastest of these candidates, if one was timed."""
    timed = [results[name] for name in names if name in results and results[name].times]
    return min(timed, key=lambda result: result.seconds, default=None)


# ---- on a terminal -------------------------------------------------------------------------------------------------


def show(console: Console, report: Report, view: View) -> None:
    """A table for each case, why some candidates have no times, and what the columns mean."""
    from rich.text import Text

    from .terminal import print_table

    table, reasons = report.by_case(), dict[str, list[str]]()
    columns = [*view.columns(report)]
    for case, results in table.items():
        ours, timed = results.get("gsbn"), [result for result in results.values() if result.times]
        beside = Column("gsbn ×", lambda r, ours=ours: "" if r is ours else speedup(r, ours))
        shown = [Column("", lambda r: view.names[r.candidate]), columns[0], beside, *columns[1:]]
        rows = [[column.cell(result) for column in shown] for result in timed]
        print_table(console, case.title, [column.heading for column in shown], rows)
        failed = [result for result in results.values() if result.failure or result.facts.get("graph_failure")]
        if not timed:
            console.print(Text(f"{case.title}: nothing was timed.", style="red"))
        for result in failed:
            said = result.failure or f"no graph: {result.facts['graph_failure']}"
            reasons.setdefault(f"{view.names[result.candidate]}: {said}", []).append(case.title)
    for said, cases in reasons.items():
        few = f" (in {'; '.join(cases)})" if len(cases) < 3 else f" (in {len(cases)} of {len(table)} cases)"
        style = "red" if "wrong result" in said else "dim"
        console.print(Text(said if len(cases) == len(table) else said + few, style=style))
    if not table:
        console.print(Text("Nothing was measured.", style="red"))
    if report.measured:
        console.print(Text(view.legend(report), style="dim"))


# ---- on a page -----------------------------------------------------------------------------------------------------


def markdown_table(columns: Iterable[Column], rows: Iterable[tuple[Any, ...]]) -> str:
    """A table of Markdown, without the columns that have no value."""
    rows, table = list(rows), []
    for column in columns:
        cells = [column.cell(*row) for row in rows]
        if any(cell != NOTHING for cell in cells):
            cells = [f"**{cell}**" if column.strong else cell for cell in cells]
            table.append([column.heading, "---" if column.left else "---:", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*table, strict=True))


def measured_on(report: Report) -> str:
    """When and where it was measured, and with which versions."""
    e = report.environment
    gpu = e["gpus"][0]["name"] if e["gpus"] else f"no GPU: {e['cpu']}"
    versions = [f"{name} {v}" for name, v in e["libraries"].items() if v and name in ("cupy", "torch", "jax", "numpy")]
    driver = f", driver {e['driver']}, CUDA {e.get('cuda_runtime')}" if e["driver"] else ""
    return f"{report.date[:10]}, {gpu}{driver}, gsbn {e['gsbn']}, {', '.join(versions)}."


def sources_of(report: Report) -> str:
    """The digests of the sources that were measured."""
    digest = report.environment["digest"]
    return f"Sources: gsbn/ `{digest['gsbn']}`, kernels/ `{digest['kernels']}`."
