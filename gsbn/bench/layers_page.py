"""What ``gsbn bench`` shows and publishes of one layer: tables for a terminal and for a page, bars and a roofline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import front_page, page
from .candidate import NAMES
from .case import Case
from .clock import Measurement
from .layers import Report, Result, fastest
from .page import SERIES, SHORT, Column, markdown_table, milliseconds, of, shown
from .report import NOTHING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

KIND_COLOURS = {
    "float32": "#2f4b7c", "tf32": "#d18f2c", "bfloat16": "#d1495b", "float16": "#3b8a6e", "float64": "#6b5b95",
}  # fmt: skip
Results = dict[str, Result]


# ---- on a terminal -------------------------------------------------------------------------------------------------


def print_report(console: Console, report: Report) -> None:
    """A table for each case, why some candidates have no times, and what the columns mean."""
    from rich.text import Text

    found = page.failures(report, NAMES)
    for case, results in report.by_case().items():
        reasons = {r.failure for r in results.values()}
        if any(r.timed for r in results.values()):
            _print_case(console, case, results, report)
            continue
        console.print(
            Text(f"{case.title}: nothing was timed{f': {reasons.pop()}' if len(reasons) == 1 else '.'}", style="red")
        )
        if not reasons:  # it has been said
            found = {said: rest for said, cases in found.items() if (rest := [c for c in cases if c != case.title])}
    page.print_failures(console, report, found)
    if report.measured:
        console.print(Text(_legend(report), style="dim"))


def _print_case(console: Console, case: Case, results: Results, report: Report) -> None:
    ours, floor, gpu = results.get("gsbn"), report.rates.floor(case), report.on_gpu
    columns = [
        Column("", lambda r: NAMES[r.candidate]),
        Column("device µs" if gpu else "µs", lambda r: _number(r.seconds * 1e6)),
        Column("95%", lambda r: interval(r.device)),
        Column("timed by", lambda r: r.method, left=True, brief=False),
        Column("path", lambda r: r.path, left=True, brief=False),
        Column("host µs", lambda r: _number(r.host.median * 1e6) if r.host else NOTHING),
        Column("MB", lambda r: NOTHING if r.extra_bytes is None else _mb(r.extra_bytes)),
        Column("TFLOP/s", lambda r: _number(case.flops / r.seconds / 1e12)),
        Column("GB/s", lambda r: _number(case.least_bytes / r.seconds / 1e9), brief=False),
        Column("floor", lambda r: f"{floor / r.seconds:.0%}"),
        Column("gsbn ×", lambda r: f"{r.seconds / ours.seconds:.2f}" if ours and ours.timed and r is not ours else ""),
    ]
    columns = [column for column in columns if column.brief or console.width >= 100]
    rows = [(r,) for r in results.values() if r.timed]
    page.print_rows(console, case.title, columns, rows, lambda r: "bold" if r is ours else "")


def _legend(report: Report) -> str:
    gpu = report.on_gpu
    third = "; float32 at least a third of float16" if gpu else ""
    matrix = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in report.rates.matrix.items())
    return (
        f"{'device µs: time on the GPU' if gpu else 'µs: wall-clock time'}, the median of trials. 95%: half of the "
        "interval that holds the true median with 95 % confidence, or the interval itself where that is more than a "
        "tenth (the machine was busy: try more --seconds). floor: share of the larger of FLOPs over the matrix rate "
        f"(TFLOP/s: {matrix or 'not measured'}{third}) and least bytes over the copy rate "
        f"({report.rates.copy / 1e9:.4g} GB/s), measured in this run. gsbn ×: how many times as long as gsbn."
        + (" MB: peak beyond operands and result." if gpu else "")
    )


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


# ---- on a page -----------------------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """The table of a page, with one line on where it was measured."""

    def times(other: Result | None, ours: Result | None) -> str:
        return f"{other.seconds / ours.seconds:.2f}" if other and ours and other.timed and ours.timed else NOTHING

    def compiled(results: Results) -> Result | None:
        return fastest(results, "compile", "autotune")

    def kind(case: Case, results: Results) -> str:
        return SHORT[case.kind] + ("" if case.training else ", inference") + case.variant

    def of_floor(case: Case, results: Results) -> str:
        ours = results.get("gsbn")
        return f"{report.rates.floor(case) / ours.seconds:.0%}" if ours and ours.timed else NOTHING

    def host(r: Result) -> str:
        return shown(r.host.median * 1e6 if r.host else None, ".0f")

    columns = [
        Column("B, I, O", lambda case, results: ", ".join(map(str, case.shape)), left=True),
        Column("dtype", kind, left=True),
        Column("bare GEMM", lambda case, results: milliseconds(fastest(results, "gemm-"))),
        Column("PyTorch eager", of("pytorch", milliseconds)),
        Column("torch.compile", lambda case, results: milliseconds(compiled(results))),
        Column("JAX", of("jax", milliseconds)),
        Column("**gsbn**", of("gsbn", milliseconds), strong=True),
        Column("× eager", lambda case, results: times(results.get("pytorch"), results.get("gsbn"))),
        Column("× torch.compile", lambda case, results: times(compiled(results), results.get("gsbn"))),
        Column("of the floor", of_floor),
        Column("host µs, PyTorch", of("pytorch", host)),
        Column("host µs, gsbn", of("gsbn", host)),
    ]
    return f"{markdown_table(columns, report.by_case().items())}\n\n{_caption(report)}"


def _caption(report: Report) -> str:
    rates = report.rates
    matrix = ", ".join(f"{SHORT[kind]} {rate / 1e12:.3g}" for kind, rate in rates.matrix.items())
    third = " (float32: at least a third of float16)" if report.on_gpu else ""
    what = "device time in ms, one run, back to back in a CUDA graph where possible"
    return (
        f"Medians of {what if report.on_gpu else 'wall-clock time in ms, one run'}; {page.measured_on(report)} "
        f"Floor: copy rate {rates.copy / 1e12:.3g} TB/s, matrix rates in TFLOP/s {matrix}{third}. "
        f"{page.sources_of(report)}"
    )


def publish(report: Report, root: Path, name: str = "kernelbench") -> list[Path]:
    """Write the table between the markers of this name, figures and picture, and the README's; gives the files."""
    written = page.write(report, root, name, plot, markdown, "Speed beside the peers, and the roofline")
    return [*written, *front_page.publish(root)]


# ---- in a picture --------------------------------------------------------------------------------------------------


def plot(report: Report, file: str | Path) -> None:
    """Bars of the speed relative to PyTorch eager, a panel for each shape, and a roofline; PNG, SVG or PDF."""
    table = report.by_case()
    shapes, kinds = (
        [*dict.fromkeys(found)] for found in zip(*((case.shape, case.kind) for case in table), strict=True)
    )
    what = " and ".join(dict.fromkeys(case.direction + case.variant for case in table))
    title = page.title_of(report, what, "CPU, NumPy path")
    rows, columns = ((len(shapes) + 1) // 2, min(len(shapes), 2) + 1) if len(shapes) <= 6 else (len(kinds), 3)
    size = (14, max(4.6, 2.9 * rows)) if len(shapes) <= 6 else (16, 2.4 + 2 * rows)
    with page.drawing(file, title, *size) as figure:
        grid = figure.add_gridspec(rows, columns)
        if len(shapes) <= 6:
            panels = [figure.add_subplot(grid[i // 2, i % 2]) for i in range(len(shapes))]
            for axes, shape in zip(panels, shapes, strict=True):
                _bars(axes, {case: r for case, r in table.items() if case.shape == shape}, shape)
        else:
            panels = [figure.add_subplot(grid[i, :2]) for i in range(len(kinds))]
            for axes, kind in zip(panels, kinds, strict=True):
                _dots(axes, {case: r for case, r in table.items() if case.kind == kind}, kind, axes is panels[-1])
        _roofline(figure.add_subplot(grid[:, -1]), report)
        handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower left", ncols=len(handles) or 1, frameon=False
        )


def _times(results: Results) -> dict[str, float]:
    """Seconds of each series that was timed."""
    chosen = {name: fastest(results, name) if name == "gemm-" else results.get(name) for name in SERIES}
    return {name: r.seconds for name, r in chosen.items() if r and r.timed}


def _bars(axes: Axes, table: dict[Case, Results], shape: tuple[int, int, int]) -> None:
    groups = [(SHORT[c.kind] + ("" if c.training else "\ninference"), _times(r)) for c, r in table.items()]
    page.bars(axes, groups, SERIES, "pytorch", told="gsbn")
    axes.set_title(f"B, I, O = {', '.join(map(str, shape))}", fontsize=9.5, loc="left")
    found = [item for _, times in groups for item in page.speeds(times, "pytorch").items()]
    forwards = [speed for name, speed in found if name != "gemm-"]
    axes.set_ylim(0, 1.15 * min(max((speed for _, speed in found), default=1), 3 * max(forwards, default=1)))


def _dots(axes: Axes, table: dict[Case, Results], kind: str, last: bool) -> None:
    found = [page.speeds(_times(results), "pytorch") for results in table.values()]
    for name, (label, colour) in SERIES.items():
        if points := [(i, by_name[name]) for i, by_name in enumerate(found) if name in by_name]:
            size = 5 if name == "gsbn" else 3.5
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=label, markersize=size)
    axes.axhline(1, color="#444", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    names = [f"{', '.join(map(str, c.shape))}{'' if c.training else ' inf.'}" if last else "" for c in table]
    axes.set_xticks(range(len(table)), names, rotation=90, fontsize=6.5)
    axes.set_title(SHORT[kind], fontsize=9.5, loc="left")
    axes.set_ylabel("PyTorch eager = 1")
    axes.grid(axis="y", color="#eee")


def _roofline(axes: Axes, report: Report) -> None:
    rates, kinds = report.rates, list(dict.fromkeys(r.case.kind for r in report.results))
    intensity = [c.flops / c.least_bytes for c in report.by_case()] or [1.0]
    low, high = min(intensity) / 3, max(intensity) * 3
    roofs = {kind: rates.matrix[kind] for kind in kinds if kind in rates.matrix}
    slope = [low, min(max(roofs.values(), default=high * rates.copy) / rates.copy, high)]
    axes.plot(slope, [x * rates.copy / 1e12 for x in slope], color="#888", linewidth=1.2)
    written: list[float] = []
    for kind, top in roofs.items():
        axes.plot(
            [max(top / rates.copy, low), high], [top / 1e12] * 2, color=KIND_COLOURS[kind], linewidth=1.2, alpha=0.7
        )
        column = sum(abs(top / other - 1) < 0.15 for other in written)  # beside a label at the same height
        axes.annotate(SHORT[kind], (high, top / 1e12), (-48 * column, 3), textcoords="offset points", ha="right",
                      fontsize=8, color=KIND_COLOURS[kind], path_effects=page.outline())  # fmt: skip
        written.append(top)
    for name, face, label in (("pytorch", "none", "PyTorch eager"), ("gsbn", None, "gsbn")):
        for kind in kinds:
            chosen = [r for r in report.results if r.candidate == name and r.case.kind == kind and r.device]
            at = (
                [r.case.flops / r.case.least_bytes for r in chosen],
                [r.case.flops / r.seconds / 1e12 for r in chosen],
            )
            colour = KIND_COLOURS[kind]
            axes.scatter(*at, s=34, facecolors=face or colour, edgecolors=colour, zorder=3)
        axes.scatter([], [], s=34, facecolors=face or "#444", edgecolors="#444", label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s", xlim=(low, high))
    axes.set_title("Roofline: rates measured in the same run", fontsize=9.5, loc="left")
    axes.grid(which="major", color="#eee", zorder=0)
    axes.legend(loc="lower right", frameon=False)
