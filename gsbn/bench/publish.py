"""What a report becomes on paper: the plot, the tables between markers in README and docs, and ``docs/results/``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .case import DTYPES, Case
from .machine import source_digests
from .report import Report, Result, fastest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patheffects import AbstractPathEffect

SHORT = {kind: kind.replace("tf32", "TF32") for kind in DTYPES}
SERIES = {  # what the bars show, in this order: candidate, or a prefix whose fastest stands for all; colour
    "gemm-": ("bare GEMM", "#c9ced6"),
    "pytorch": ("PyTorch eager", "#8d99ae"),
    "compile": ("torch.compile", "#5b7db1"),
    "autotune": ("max-autotune", "#2f4b7c"),
    "jax": ("JAX", "#8bb174"),
    "gsbn": ("gsbn", "#d1495b"),
}
KIND_COLOURS = {
    "float32": "#2f4b7c", "tf32": "#d18f2c", "bfloat16": "#d1495b", "float16": "#3b8a6e", "float64": "#6b5b95",
}  # fmt: skip


def split(file: Path, name: str) -> tuple[str, str]:
    """A page up to the first marker of a table, and from the second on; ValueError if one is missing."""
    begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not (0 <= text.find(begin) < text.find(end)):
        raise ValueError(f"{file}: expected a file with the lines {begin} and {end}")
    return text[: text.find(begin) + len(begin)], text[text.find(end) :]


def pages(root: Path, name: str) -> list[Path]:
    """The pages of a checkout that have a table of this name: ``docs/results.md``, and the README if it has one, too;
    ValueError if a marker is missing."""
    results, readme = root / "docs" / "results.md", root / "README.md"
    has_one = readme.is_file() and f"results:{name} -->" in readme.read_text(encoding="utf-8")
    found = [results, readme] if has_one else [results]
    for page in found:
        split(page, name)
    return found


def publish(report: Report, root: Path, name: str = "kernelbench") -> list[Path]:
    """Write the report's table between the markers of this name in ``root/README.md`` if it has them, with all of its
    columns in ``root/docs/results.md``, and the figures and a picture into ``root/docs/results``; gives the files."""
    full = (
        f"{markdown(report)}\n\n![Speed beside the peers, and the roofline](results/{name}.png)\n\n"
        f"With intervals: [{name}.json](results/{name}.json)."
    )
    return write(root, name, report.to_json(), lambda file: plot(report, file), markdown(report, brief=True), full)


def write(root: Path, name: str, saved: str, draw: Callable[[Path], None], brief: str, full: str) -> list[Path]:
    """The brief text between the markers of this name in the README, if it has them, and the full one in the docs; JSON
    and picture."""
    found = pages(root, name)
    folder = root / "docs" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    figures, picture = folder / f"{name}.json", folder / f"{name}.png"
    figures.write_text(saved, encoding="utf-8")
    draw(picture)
    for page, table in zip(found, (full, brief), strict=False):  # the README comes second, or not at all
        head, tail = split(page, name)
        page.write_text(f"{head}\n{table}\n{tail}", encoding="utf-8")
    return [*found, figures, picture]


def changed_since(results: Path) -> list[str]:
    """Which of ``gsbn`` and ``kernels`` are no longer the sources that a saved report was measured on."""
    measured = json.loads(results.read_text(encoding="utf-8"))["environment"]["digest"]
    return [folder for folder, digest in source_digests().items() if measured.get(folder) != digest]


def markdown(report: Report, *, brief: bool = False) -> str:
    """The results table, medians of device time in ms, with one line on where it was measured; `brief` leaves out the
    peers that compute something else, the floor and the host."""
    columns = ["B, I, O", "dtype", "bare GEMM", "PyTorch eager", "torch.compile", "JAX", "**gsbn**", "× eager"]
    columns += ["× torch.compile", "of the floor", "host µs, PyTorch", "host µs, gsbn"]
    left_out = {"bare GEMM", "JAX", "of the floor", "host µs, PyTorch", "host µs, gsbn"} if brief else set()
    if not any(r.host for r in report.results):
        left_out |= {"host µs, PyTorch", "host µs, gsbn"}
    rows = []
    for case, results in report.by_case().items():
        gsbn, torch, compiled = results.get("gsbn"), results.get("pytorch"), fastest(results, "compile", "autotune")
        mode = ("" if case.training else ", inference") + case.variant
        timed = gsbn if gsbn and gsbn.device else None
        cells = [", ".join(map(str, case.shape)), SHORT[case.kind] + mode, _ms(fastest(results, "gemm-")), _ms(torch)]
        cells += [_ms(compiled), _ms(results.get("jax")), f"**{_ms(gsbn)}**"]
        for other in (torch, compiled):
            cells += [f"{other.seconds / timed.seconds:.2f}" if timed and other and other.device else "–"]
        cells += [f"{report.rates.floor(case) / timed.seconds:.0%}" if timed else "–"]
        cells += [f"{r.host.median * 1e6:.0f}" if r and r.host else "–" for r in (torch, gsbn)]
        rows.append([cell for name, cell in zip(columns, cells, strict=True) if name not in left_out])
    shown = [name for name in columns if name not in left_out]
    return table(shown, rows, left=("B, I, O", "dtype")) + "\n\n" + _caption(report, brief)


def caption_of(date: str, e: dict[str, Any]) -> str:
    """When and where something was measured, and with which versions; ``e`` is ``machine.environment()``."""
    gpu = e["gpus"][0]["name"] if e["gpus"] else f"no GPU: {e['cpu']}"
    versions = ", ".join(
        f"{name} {v}" for name, v in e["libraries"].items() if v and name in ("cupy", "torch", "jax", "numpy")
    )
    driver = f", driver {e['driver']}, CUDA {e.get('cuda_runtime')}" if e["driver"] else ""
    return f"{date[:10]}, {gpu}{driver}, gsbn {e['gsbn']}, {versions}."


def _caption(report: Report, brief: bool) -> str:
    e, rates = report.environment, report.rates
    matrix = ", ".join(f"{SHORT[kind]} {rate / 1e12:.3g}" for kind, rate in rates.matrix.items())
    third = " (float32: at least a third of float16)" if e["gpus"] else ""
    what = "device time in ms, one run, back to back in a CUDA graph where possible"
    where = caption_of(report.date, e)
    if brief:
        return where
    return (
        f"Medians of {what if e['gpus'] else 'wall-clock time in ms, one run'}; {where} "
        f"Floor: copy rate {rates.copy / 1e12:.3g} TB/s, matrix rates in TFLOP/s {matrix}{third}. "
        f"Sources: gsbn/ `{e['digest']['gsbn']}`, kernels/ `{e['digest']['kernels']}`."
    )


def plot(report: Report, file: str | Path) -> None:
    """Bars of the speed relative to PyTorch eager, a panel for each shape, and a roofline; PNG, SVG or PDF."""
    from matplotlib import rc_context

    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        _figure(report).savefig(file, dpi=130)


def _figure(report: Report) -> Figure:
    from matplotlib.figure import Figure

    table = report.by_case()
    shapes = list(dict.fromkeys(case.shape for case in table))
    if len(shapes) <= 6:
        rows = (len(shapes) + 1) // 2 if len(shapes) > 1 else 1
        figure = Figure(figsize=(14, max(4.6, 2.9 * rows)), layout="constrained")
        grid = figure.add_gridspec(rows, 3 if len(shapes) > 1 else 2)
        panels = [figure.add_subplot(grid[i // 2, i % 2]) for i in range(len(shapes))]
        for axes, shape in zip(panels, shapes, strict=True):
            _bars(axes, {case: r for case, r in table.items() if case.shape == shape}, shape)
        roof = figure.add_subplot(grid[:, -1])
    else:
        kinds = list(dict.fromkeys(case.kind for case in table))
        figure = Figure(figsize=(16, 2.4 + 2 * len(kinds)), layout="constrained")
        grid = figure.add_gridspec(len(kinds), 3)
        panels = [figure.add_subplot(grid[i, :2]) for i in range(len(kinds))]
        for axes, kind in zip(panels, kinds, strict=True):
            _dots(axes, {case: r for case, r in table.items() if case.kind == kind}, kind, axes is panels[-1])
        roof = figure.add_subplot(grid[:, 2])
    _roofline(roof, report)
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=len(handles) or 1, frameon=False)
    e = report.environment
    where = e["gpus"][0]["name"] if e["gpus"] else "CPU, NumPy path"
    what = " and ".join(dict.fromkeys(case.direction + case.variant for case in table))
    figure.suptitle(f"gsbn {e['gsbn']}, {what}, on {where}, {report.date[:10]}", fontsize=12, x=0.01, ha="left")
    return figure


def _speeds(results: dict[str, Result]) -> dict[str, tuple[float, Result]]:
    """The speed and the result of each series; 1 is PyTorch eager, or the slowest series if that is missing."""
    shown = {key: fastest(results, key) if key == "gemm-" else results.get(key) for key in SERIES}
    timed = {key: r for key, r in shown.items() if r is not None and r.device is not None}
    if not timed:
        return {}
    unit = timed["pytorch"].seconds if "pytorch" in timed else max(r.seconds for r in timed.values())
    return {key: (unit / r.seconds, r) for key, r in timed.items()}


def _bars(axes: Axes, table: dict[Case, dict[str, Result]], shape: tuple[int, int, int]) -> None:
    present = [key for key in SERIES if any(key in _speeds(results) for results in table.values())]
    width = 0.82 / max(len(present), 1)
    for i, key in enumerate(present):
        label, colour = SERIES[key]
        speeds = [_speeds(results).get(key, (0.0, None)) for results in table.values()]
        at = [n + (i - (len(present) - 1) / 2) * width for n in range(len(table))]
        axes.bar(at, [s for s, _ in speeds], width * 0.92, color=colour, label=label)
        for x, (speed, result) in zip(at, speeds, strict=True):
            if result is not None and key == "gsbn":
                axes.annotate(_time(result.seconds), (x, speed), (0, 2), textcoords="offset points", ha="center",
                              fontsize=7.5, color=colour, fontweight="bold", path_effects=_outline())  # fmt: skip
    axes.axhline(1, color="#444", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xticks(range(len(table)), [SHORT[c.kind] + ("" if c.training else "\ninference") for c in table])
    axes.tick_params(axis="x", length=0)
    axes.set_title(f"B, I, O = {', '.join(map(str, shape))}", fontsize=9.5, loc="left")
    axes.set_ylabel("speed, PyTorch eager = 1")
    bars = [(key, s) for results in table.values() for key, (s, _) in _speeds(results).items()]
    forwards = [s for key, s in bars if key != "gemm-"]
    axes.set_ylim(0, 1.15 * min(max((s for _, s in bars), default=1), 3 * max(forwards, default=1)))


def _outline() -> list[AbstractPathEffect]:
    """White around letters, so that they can be read across bars and lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2, foreground="white")]


def _dots(axes: Axes, table: dict[Case, dict[str, Result]], kind: str, last: bool) -> None:
    for key, (label, colour) in SERIES.items():
        points = [(i, s[key][0]) for i, results in enumerate(table.values()) if key in (s := _speeds(results))]
        if points:
            axes.plot(
                *zip(*points, strict=True), "o", color=colour, label=label, markersize=5 if key == "gsbn" else 3.5
            )
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
                      fontsize=8, color=KIND_COLOURS[kind], path_effects=_outline())  # fmt: skip
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


def table(columns: list[str], rows: list[list[str]], left: tuple[str, ...]) -> str:
    """A table of Markdown without the columns that have no value; those named in ``left`` are flush left."""
    keep = [i for i in range(len(columns)) if any(row[i].strip("*") != "–" for row in rows)]
    lines = ["| " + " | ".join(columns[i] for i in keep) + " |"]
    lines += ["| " + " | ".join("---" if columns[i] in left else "---:" for i in keep) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row[i] for i in keep) + " |" for row in rows])


def draw_speeds(
    file: str | Path,
    title: str,
    panels: dict[str, dict[str, dict[str, float]]],
    series: dict[str, tuple[str, str]],
    unit: str,
) -> None:
    """Bars of speeds. A panel has, for each label below it, the seconds of each series; that of ``unit`` has speed 1.

    ``series`` has the name and the colour of each.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(14, 3.4 * max(len(panels), 1)), layout="constrained")
        for index, (name, groups) in enumerate(panels.items()):
            axes = figure.add_subplot(len(panels), 1, index + 1)
            axes.set_title(name, fontsize=9.5, loc="left")
            _speed_bars(axes, groups, series, unit)
        if panels:
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        figure.savefig(file, dpi=130)


def _speed_bars(axes: Axes, groups: dict[str, dict[str, float]], series: dict[str, tuple[str, str]], unit: str) -> None:
    width = 0.82 / len(series)
    for i, (key, (label, colour)) in enumerate(series.items()):
        ones = [times.get(unit, max(times.values(), default=0.0)) for times in groups.values()]
        speeds = [one / times[key] if key in times else 0.0 for one, times in zip(ones, groups.values(), strict=True)]
        at = [n + (i - (len(series) - 1) / 2) * width for n in range(len(groups))]
        if any(speeds):
            axes.bar(at, speeds, width * 0.92, color=colour, label=label)
    axes.axhline(1, color="#444", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(f"speed, {series[unit][0]} = 1")


def _ms(result: Result | None) -> str:
    return digits(result.seconds * 1e3) if result and result.device else "–"


def _time(seconds: float) -> str:
    return f"{digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{digits(seconds * 1e6)} µs"


def digits(value: float) -> str:
    """Three significant digits, trailing zeros kept."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 <= value < 1e3 else f"{value:.0f}"
