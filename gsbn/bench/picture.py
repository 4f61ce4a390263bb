"""The picture of a report: bars of the speed relative to a peer's, and for layers a roofline beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .page import SHORT, Groups, Series, View, digits
from .report import Rates, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patheffects import AbstractPathEffect

KIND_COLOURS = {
    "float32": "#2f4b7c", "tf32": "#d18f2c", "bfloat16": "#d1495b", "float16": "#3b8a6e", "float64": "#6b5b95",
}  # fmt: skip
ACROSS = 2  # panels of bars side by side
OURS = "gsbn", "gsbn-matmul"  # candidates whose bars bear their times
# The candidates in the roofline, of which cuBLAS stands in for PyTorch where products alone were timed
REACHED = {"pytorch": "PyTorch eager", "gemm-torch": "cuBLAS", "gsbn": "gsbn", "gsbn-matmul": "gsbn.matmul"}


def draw(report: Report, view: View, file: str | Path) -> None:
    """Draw the view's panels of bars, and the roofline of layers beside them; PNG, SVG or PDF."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = view.panels(report)
    timed = {name for groups in panels.values() for _, times in groups for name in times}
    series = {name: view.series[name] for name in view.series if name in timed}
    unit = next((name for name in view.units if name in timed), "")
    across = min(ACROSS, max(len(panels), 1))
    down = max(-(-len(panels) // across), 1)
    bars = max((len(groups) for groups in panels.values()), default=1) * (len(series) + 1)
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(14, max(4.6, 1.2 + down * (0.8 + 0.1 * bars))), layout="constrained")
        grid = figure.add_gridspec(down, across + (report.rates is not None))
        for index, (name, groups) in enumerate(panels.items()):
            axes = figure.add_subplot(grid[index // across, index % across])
            axes.set_title(name, fontsize=9.5, loc="left")
            _bars(axes, groups, series, unit)
        if panels:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower left", ncols=len(labels) or 1, frameon=False)
        if report.rates is not None:
            _roofline(figure.add_subplot(grid[:, across]), report, report.rates)
        e = report.environment
        where = e["gpus"][0]["name"] if report.on_gpu else "the CPU"
        title = f"gsbn {e['gsbn']}, {view.subject(report)}, on {where}, {report.date[:10]}"
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        figure.savefig(file, dpi=130)


def speeds(times: Mapping[str, float], unit: str) -> dict[str, float]:
    """The speed of each series; 1 is that of ``unit``, or of the slowest where that is missing."""
    one = times.get(unit, max(times.values(), default=0.0))
    return {name: one / seconds for name, seconds in times.items()}


def _bars(axes: Axes, groups: Groups, series: Series, unit: str) -> None:
    """Draw bars of speeds, a group for each label on the left; gsbn's bear their times. What is far beyond the other
    layers, as a bare GEMM may be, is cut."""
    width = 0.82 / max(len(series), 1)
    found = [speeds(times, unit) for _, times in groups]
    for i, (name, (label, colour)) in enumerate(series.items()):
        at = [n + (i - (len(series) - 1) / 2) * width for n in range(len(groups))]
        axes.barh(at, [group.get(name, 0.0) for group in found], width * 0.92, color=colour, label=label)
        for y, speed, (_, times) in zip(at, found, groups, strict=True):
            if name in OURS and name in times:
                ms = times[name] * 1e3
                text = f"{digits(ms)} ms" if ms >= 1 else f"{digits(ms * 1e3)} µs"
                axes.annotate(text, (speed[name], y), (3, 0), textcoords="offset points", va="center", fontsize=6.5,
                              color=colour, fontweight="bold", path_effects=_outline())  # fmt: skip
    highest = max((speed for group in found for name, speed in group.items() if name != "gemm"), default=1.0)
    axes.set(xlim=(0, 1.2 * highest), ylim=(len(groups) - 0.4, -0.6))
    axes.axvline(1, color="#444", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_yticks(range(len(groups)), [label for label, _ in groups], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"speed, {series[unit][0] if unit else 'the slowest'} = 1")


def _roofline(axes: Axes, report: Report, rates: Rates) -> None:
    """Draw what this machine can do at most, and what PyTorch and gsbn reach."""
    kinds = list(dict.fromkeys(case.kind for case in report.by_case()))
    intensity = [case.flops / case.least_bytes for case in report.by_case()] or [1.0]
    low, high = min(intensity) / 3, max(intensity) * 3
    roofs = {kind: rates.matrix[kind] for kind in kinds if kind in rates.matrix}
    slope = [low, min(max(roofs.values(), default=high * rates.copy) / rates.copy, high)]
    axes.plot(slope, [x * rates.copy / 1e12 for x in slope], color="#888", linewidth=1.2)
    written: list[float] = []
    for kind, top in roofs.items():
        flat = [max(top / rates.copy, low), high]
        axes.plot(flat, [top / 1e12] * 2, color=KIND_COLOURS[kind], linewidth=1.2, alpha=0.7)
        column = sum(abs(top / other - 1) < 0.15 for other in written)  # beside a label at the same height
        axes.annotate(SHORT[kind], (high, top / 1e12), (-48 * column, 3), textcoords="offset points", ha="right",
                      fontsize=8, color=KIND_COLOURS[kind], path_effects=_outline())  # fmt: skip
        written.append(top)
    timed = {r.candidate for r in report.results if r.times}
    for name in (n for n in REACHED if n in timed and (n != "gemm-torch" or "pytorch" not in timed)):
        hollow, label = name not in OURS, REACHED[name]
        for kind in kinds:
            chosen = [r for r in report.results if r.candidate == name and r.case.kind == kind and r.times]
            x = [r.case.flops / r.case.least_bytes for r in chosen]
            y = [r.case.flops / r.seconds / 1e12 for r in chosen]
            colour = KIND_COLOURS[kind]
            axes.scatter(x, y, s=34, facecolors="none" if hollow else colour, edgecolors=colour, zorder=3)
        axes.scatter([], [], s=34, facecolors="none" if hollow else "#444", edgecolors="#444", label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s", xlim=(low, high))
    axes.set_title("Roofline: rates measured in the same run", fontsize=9.5, loc="left")
    axes.grid(which="major", color="#eee", zorder=0)
    axes.legend(loc="lower right", frameon=False)


def _outline() -> list[AbstractPathEffect]:
    """White around letters, so that they can be read across bars and lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2, foreground="white")]
