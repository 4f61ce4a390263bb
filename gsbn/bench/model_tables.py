"""What ``gsbn bench --preset models`` shows and publishes: tables for a terminal and for a page, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .clock import Measurement
from .models import NAMES, PEERS, ModelCase, ModelResult, ModelsReport
from .publish import SERIES, caption_of, digits, write
from .tables import share
from .terminal import NOTHING, Row, print_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"pytorch": SERIES["pytorch"][1], "compile": SERIES["compile"][1], "gsbn": SERIES["gsbn"][1],
           "gsbn-compile": "#8c2f3d"}  # fmt: skip
WAYS: dict[str, tuple[str, Callable[[ModelResult], Measurement | None]]] = {
    "called": ("as called", lambda result: result.called),
    "graph": ("in a CUDA graph", lambda result: result.graph),
}
Results = dict[str, ModelResult]


def print_models(console: Console, report: ModelsReport) -> None:
    """A table for each way to run a step, one of memory and one of errors; and why something is missing."""
    table = report.by_case()
    columns = ["", *NAMES.values(), "best peer / gsbn"]
    for way, (title, _) in WAYS.items():
        rows = [Row([case.title, *(_ms(results.get(name), way) for name in NAMES), gain(results, way)])
                for case, results in table.items()]  # fmt: skip
        clock = "device time" if way == "graph" else "wall clock"
        print_table(console, f"ms a training step, {title} ({clock})", columns, rows)
    rows = [Row([case.title, *(_mib(results.get(name)) for name in NAMES)]) for case, results in table.items()]
    print_table(console, "Peak MiB of a step, beyond parameters, momenta and input", ["", *NAMES.values()], rows)
    columns = ["", *(f"{name}, {part}" for name in ("PyTorch eager", "gsbn") for part in ("fw", "bw", "SGD"))]
    rows = [Row([case.title, *_phases(results.get("pytorch")), *_phases(results.get("gsbn"))])
            for case, results in table.items()]  # fmt: skip
    print_table(console, "ms on the device, by part of the step as called", columns, rows)
    columns = ["", "y, PyTorch eager", "y, gsbn", "gradients, PyTorch eager", "gradients, gsbn", "of what is allowed"]
    rows = [Row([case.title, *_errors(results), _excess(results)]) for case, results in table.items()]
    print_table(console, "Errors of the first step against float64, norm-wise", columns, rows)
    for text in _failures(report):
        console.print(Text(text, style="red" if "wrong result" in text else "dim"))
    if not any(result.called for result in report.results):
        console.print(Text("Nothing was measured.", style="red"))


def gain(results: Results, way: str) -> str:
    """The time of the best peer over gsbn's: above 1, gsbn is faster."""
    of = WAYS[way][1]
    peers = [m.median for name in PEERS if name in results and (m := of(results[name]))]
    ours = of(results["gsbn"]) if "gsbn" in results else None
    return f"{min(peers) / ours.median:.2f}" if ours and peers else NOTHING


def markdown(report: ModelsReport, *, brief: bool = False) -> str:
    """The table of the page, with a line on where it was measured; `brief` leaves out what few readers want."""
    shown = [name for name in NAMES if not (brief and name == "gsbn-compile")]
    columns, rows = ["model, widths", "rows", "dtype"], []
    for title, _ in WAYS.values():
        columns += [f"{_strong(name, NAMES[name])}, {title}" for name in shown] + [f"best peer / gsbn, {title}"]
    columns += ["peak MiB, PyTorch eager", "peak MiB, gsbn", "error of what is allowed"]
    for case, results in report.by_case().items():
        cells = [case.layers, str(case.rows), case.kind]
        for way in WAYS:
            cells += [_strong(name, _ms(results.get(name), way)) for name in shown] + [gain(results, way)]
        cells += [_mib(results.get("pytorch")), _mib(results.get("gsbn")), _excess(results)]
        rows.append(cells)
    keep = [i for i in range(len(columns)) if any(row[i].strip("*") != NOTHING for row in rows)]
    keep = [i for i in keep if not (brief and columns[i].startswith("error"))]
    lines = ["| " + " | ".join(columns[i] for i in keep) + " |", "| --- | ---: | --- |" + " ---: |" * (len(keep) - 3)]
    lines += ["| " + " | ".join(row[i] for i in keep) + " |" for row in rows]
    return "\n".join(lines) + "\n\n" + _caption(report, brief)


def _caption(report: ModelsReport, brief: bool) -> str:
    where, digest = caption_of(report.date, report.environment), report.environment["digest"]
    if brief:
        return where
    graph = "a replay of a CUDA graph by CUDA events, and as called by the wall clock, host included"
    return (
        f"Medians in ms of a training step (forward, backward, SGD with momentum), one run, candidates in turns; "
        f"{graph if report.device == 'cuda' else 'by the wall clock, on the CPU'}. bfloat16 is torch.autocast over "
        f"float32 parameters. {where} Sources: gsbn/ `{digest['gsbn']}`, kernels/ `{digest['kernels']}`."
    )


def publish(report: ModelsReport, root: Path, name: str) -> list[Path]:
    """Write the tables between the markers of this name, and the figures and the picture into ``docs/results``."""
    picture = f"![A training step beside the peers](results/{name}.png)"
    return write(root, name, to_json(report), lambda file: plot(report, file), markdown(report, brief=True),
                 f"{markdown(report)}\n\n{picture}\n\nWith intervals: [{name}.json](results/{name}.json).")  # fmt: skip


def to_json(report: ModelsReport) -> str:
    """Everything that the report holds."""
    return json.dumps({"schema": 1, "preset": "models"} | report.content(), indent=1) + "\n"


def plot(report: ModelsReport, file: str | Path) -> None:
    """Bars of the speed relative to PyTorch eager, a panel for each way to run a step; PNG, SVG or PDF."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    table = report.by_case()
    ways = [way for way, (_, of) in WAYS.items() if any(of(result) for result in report.results)]
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(14, 3.4 * max(len(ways), 1)), layout="constrained")
        for index, way in enumerate(ways):
            _bars(figure.add_subplot(len(ways), 1, index + 1), table, way)
        if ways:
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
        e = report.environment
        where = e["gpus"][0]["name"] if report.device == "cuda" else "the CPU"
        title = f"gsbn {e['gsbn']}, training steps of whole models, on {where}, {report.date[:10]}"
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        figure.savefig(file, dpi=130)


def _bars(axes: Axes, table: dict[ModelCase, Results], way: str) -> None:
    title, of = WAYS[way]
    width = 0.82 / len(NAMES)
    for i, name in enumerate(NAMES):
        speeds = []
        for results in table.values():
            times = {key: m.median for key, result in results.items() if (m := of(result))}
            unit = times.get("pytorch", max(times.values(), default=0.0))
            speeds.append(unit / times[name] if name in times else 0.0)
        at = [n + (i - (len(NAMES) - 1) / 2) * width for n in range(len(table))]
        if any(speeds):
            axes.bar(at, speeds, width * 0.92, color=COLOURS[name], label=NAMES[name])
    axes.axhline(1, color="#444", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xticks(range(len(table)), [f"{c.layers}\n{c.rows} rows, {c.kind}" for c in table], fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_ylabel("speed, PyTorch eager = 1")


def _failures(report: ModelsReport) -> list[str]:
    """Each with the models that it happened in, if not in all."""
    where: dict[str, list[str]] = {}
    for result in report.results:
        who = NAMES[result.candidate]
        for said in (result.failure, result.graph_failure and f"no graph: {result.graph_failure}"):
            if said:
                where.setdefault(f"{who}: {said}", []).append(result.case.title)
    everywhere = len(report.by_case())
    return [said if len(titles) == everywhere else f"{said} (in {'; '.join(titles)})" for said, titles in where.items()]


def _ms(result: ModelResult | None, way: str) -> str:
    measured = WAYS[way][1](result) if result else None
    return digits(measured.median * 1e3) if measured else NOTHING


def _mib(result: ModelResult | None) -> str:
    return f"{result.peak_bytes / 2**20:.0f}" if result and result.peak_bytes is not None else NOTHING


def _phases(result: ModelResult | None) -> list[str]:
    return [digits(seconds * 1e3) for seconds in result.phases.values()] if result and result.phases else [NOTHING] * 3


def _errors(results: Results) -> list[str]:
    found = {name: results[name].errors if name in results else {} for name in ("pytorch", "gsbn")}
    return [
        f"{found[name][what]:.1e}" if what in found[name] else NOTHING
        for what in ("y", "gradients")
        for name in ("pytorch", "gsbn")
    ]


def _excess(results: Results) -> str:
    excess = results["gsbn"].excess if "gsbn" in results else None
    return NOTHING if excess is None else share(excess)


def _strong(name: str, text: str) -> str:
    return f"**{text}**" if name == "gsbn" else text
