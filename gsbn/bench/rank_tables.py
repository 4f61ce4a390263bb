"""What ``gsbn bench --ranks`` shows and publishes: tables for a terminal and for a page, and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .case import Case
from .publish import SERIES, SHORT, caption_of, digits, draw_speeds, table, write
from .ranks import DIRECTIONS, GROUPS, NAMES, RanksReport, RanksResult
from .terminal import NOTHING, Row, print_table

COLOURS = {"gemm": SERIES["gemm-"][1], "pytorch": SERIES["pytorch"][1], "pytorch-sync": SERIES["compile"][1],
           "gsbn": "#e8a2aa", "gsbn-reduce": "#b3767f", "gsbn-peer": SERIES["gsbn"][1], "gsbn-nccl": "#8c2f3d",
           "gsbn-gloo": "#8c2f3d"}  # fmt: skip
TITLES = {"forward": "Forward in training", "step": "Training step (forward and backward)"}
WAYS = {"called": "", "graph": ", in a graph"}
BRIEF: dict[str, tuple[str, ...]] = {
    "called": ("pytorch-sync", "gsbn-peer"),
    "graph": ("gsbn", "gsbn-reduce", "gsbn-peer"),
}
Results = dict[str, RanksResult]


def print_report(console: Console, report: RanksReport) -> None:
    """A table for each direction, and why something is missing."""
    for direction in DIRECTIONS:
        columns, rows = _cells(report, direction)
        lines = [Row([f"{shape} {kind}", *(cell.strip("*") for cell in cells)]) for shape, kind, *cells in rows]
        title = f"{TITLES[direction]}, µs on {report.ranks} ranks; B is of each"
        print_table(console, title, ["", *(name.strip("*") for name in columns[2:])], lines)
    for text in _failures(report):
        console.print(Text(text, style="red" if "wrong result" in text else "dim"))
    if not report.measured:
        console.print(Text("Nothing was measured.", style="red"))


def group_of(results: Results) -> RanksResult | None:
    """The group that a user gets: over peer memory, where that was timed."""
    return next((results[name] for name in GROUPS if name in results and results[name].called), None)


def gain(results: Results) -> str:
    """SyncBatchNorm's time over that of gsbn with a group, both as called: above 1, gsbn is faster."""
    ours, theirs = group_of(results), results.get("pytorch-sync")
    if ours is None or theirs is None or not theirs.called:
        return NOTHING
    return f"{(theirs.seconds('called') or 0) / (ours.seconds('called') or 1):.2f}"


def cost(results: Results) -> str:
    """Microseconds that a group adds to gsbn without one, in a graph."""
    ours, local = group_of(results), results.get("gsbn")
    with_group, without = (result.seconds("graph") if result else None for result in (ours, local))
    return NOTHING if with_group is None or without is None else f"{(with_group - without) * 1e6:.1f}"


def _cells(report: RanksReport, direction: str, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """The columns of a direction's table, and a row for each case; ``brief`` leaves out what few readers want."""
    shown = {way: [name for name in NAMES if not brief or name in BRIEF[way]] for way in WAYS}
    columns = ["B, I, O", "dtype"]
    for way, suffix in WAYS.items():
        columns += [_strong(name, NAMES[name] + suffix) for name in shown[way]]
        columns += ["SyncBatchNorm / gsbn group" if way == "called" else "gsbn group − local, in a graph"]
    rows = []
    for case, results in report.by_case(direction).items():
        row = [", ".join(map(str, case.shape)), SHORT[case.kind]]
        for way in WAYS:
            row += [_strong(name, _us(results.get(name), way)) for name in shown[way]]
            row += [gain(results) if way == "called" else cost(results)]
        rows.append(row)
    return columns, rows


def markdown(report: RanksReport, *, brief: bool = False) -> str:
    """The tables of the page, with a line on where they were measured."""
    parts = []
    for direction in DIRECTIONS:
        columns, rows = _cells(report, direction, brief)
        if rows:
            parts += [f"{TITLES[direction]}, µs:", table(columns, rows, left=("B, I, O", "dtype"))]
    return "\n\n".join([*parts, _caption(report, brief)])


def _caption(report: RanksReport, brief: bool) -> str:
    where, digest = caption_of(report.date, report.environment), report.environment["digest"]
    where = f"{report.ranks} ranks{', a GPU each' if report.device == 'cuda' else ''}; {where}"
    if brief:
        return where
    return (
        f"Of each rank the median, of these the largest; one run, candidates in turns. {where} "
        f"Sources: gsbn/ `{digest['gsbn']}`, kernels/ `{digest['kernels']}`."
    )


def publish(report: RanksReport, root: Path, name: str) -> list[Path]:
    """Write the tables between the markers of this name, and the figures and the picture into ``docs/results``."""
    picture = f"![Statistics over several ranks, beside SyncBatchNorm](results/{name}.png)"
    full = f"{markdown(report)}\n\n{picture}\n\nOf each rank, with intervals: [{name}.json](results/{name}.json)."
    return write(root, name, to_json(report), lambda file: plot(report, file), markdown(report, brief=True), full)


def to_json(report: RanksReport) -> str:
    """Everything that the report holds, and the times of the tables in microseconds."""
    content = asdict(report)
    for row, result in zip(content["results"], report.results, strict=True):
        times = {way: result.seconds(way) for way in WAYS}
        row.update({f"{way}_us": None if time is None else time * 1e6 for way, time in times.items()})
    return json.dumps({"schema": 1, "preset": "ranks"} | content, indent=1) + "\n"


def plot(report: RanksReport, file: str | Path) -> None:
    """Bars of the speed relative to SyncBatchNorm's, as called, a panel for each direction; PNG, SVG or PDF."""
    timed = {result.candidate for result in report.results if result.called}
    shown = {name: (NAMES[name], COLOURS[name]) for name in NAMES if name in timed}
    unit = next(name for name in ("pytorch-sync", "pytorch", *shown) if name in shown)

    def times(results: Results) -> dict[str, float]:
        return {name: time for name, result in results.items() if (time := result.seconds("called"))}

    def label(case: Case) -> str:
        return f"{', '.join(map(str, case.shape))}\n{SHORT[case.kind]}"

    panels = {
        f"{TITLES[direction]}, as called": {label(case): times(results) for case, results in found.items()}
        for direction in DIRECTIONS
        if any(map(times, (found := report.by_case(direction)).values()))
    }
    e = report.environment
    where = e["gpus"][0]["name"] if report.device == "cuda" else "the CPU"
    title = f"gsbn {e['gsbn']}, {report.ranks} ranks that share a batch, on {where}, {report.date[:10]}"
    draw_speeds(file, title, panels, shown, unit)


def _failures(report: RanksReport) -> list[str]:
    """Each with the cases that it happened in."""
    where: dict[str, list[str]] = {}
    for result in report.results:
        for said in (result.failure, result.graph_failure and f"no graph: {result.graph_failure}"):
            if said:
                where.setdefault(f"{NAMES[result.candidate]}: {said}", []).append(result.case.title)
    return [f"{said} (in {'; '.join(titles)})" for said, titles in where.items()]


def _us(result: RanksResult | None, way: str) -> str:
    seconds = result.seconds(way) if result else None
    return NOTHING if seconds is None else digits(seconds * 1e6)


def _strong(name: str, text: str) -> str:
    return f"**{text}**" if name == GROUPS[0] else text
