"""What ``gsbn bench --preset models`` shows and publishes: tables for a terminal and for a page, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .clock import Measurement
from .models import NAMES, PEERS, ModelCase, ModelResult, ModelsReport
from .publish import SERIES, caption_of, digits, draw_speeds, table, write
from .tables import share
from .terminal import NOTHING, Row, print_table

COLOURS = {"pytorch": SERIES["pytorch"][1], "compile": SERIES["compile"][1], "gsbn": SERIES["gsbn"][1],
           "gsbn-compile": "#8c2f3d"}  # fmt: skip
WAYS: dict[str, tuple[str, Callable[[ModelResult], Measurement | None]]] = {
    "called": ("as called", lambda result: result.called),
    "graph": ("in a CUDA graph", lambda result: result.graph),
}
Results = dict[str, ModelResult]


def print_report(console: Console, report: ModelsReport) -> None:
    """A table for each way to run a step, one of memory and one of errors; and why something is missing."""
    cases = report.by_case()
    columns = ["", *NAMES.values(), "best peer / gsbn"]
    for way, (title, _) in WAYS.items():
        rows = [Row([case.title, *(_ms(results.get(name), way) for name in NAMES), gain(results, way)])
                for case, results in cases.items()]  # fmt: skip
        clock = "device time" if way == "graph" else "wall clock"
        print_table(console, f"ms a training step, {title} ({clock})", columns, rows)
    rows = [Row([case.title, *(_mib(results.get(name)) for name in NAMES)]) for case, results in cases.items()]
    print_table(console, "Peak MiB of a step, beyond parameters, momenta and input", ["", *NAMES.values()], rows)
    columns = ["", *(f"{name}, {part}" for name in ("PyTorch eager", "gsbn") for part in ("fw", "bw", "SGD"))]
    rows = [Row([case.title, *_phases(results.get("pytorch")), *_phases(results.get("gsbn"))])
            for case, results in cases.items()]  # fmt: skip
    print_table(console, "ms on the device, by part of the step as called", columns, rows)
    rows = [
        Row([case.title, *(_host_us(case, results.get(name)) for name in NAMES)]) for case, results in cases.items()
    ]
    print_table(console, "us that a forward and a backward of a layer cost the host", ["", *NAMES.values()], rows)
    columns = ["", "y, PyTorch eager", "y, gsbn", "gradients, PyTorch eager", "gradients, gsbn", "of what is allowed"]
    rows = [Row([case.title, *_errors(results), _excess(results)]) for case, results in cases.items()]
    print_table(console, "Errors of the first step against float64, norm-wise", columns, rows)
    for text in _failures(report):
        console.print(Text(text, style="red" if "wrong result" in text else "dim"))
    if not report.measured:
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
    of_host = () if brief else ("pytorch", "gsbn")
    columns += [f"host µs a layer, {NAMES[name]}" for name in of_host]
    columns += ["peak MiB, PyTorch eager", "peak MiB, gsbn", "error of what is allowed"]
    for case, results in report.by_case().items():
        cells = [case.layers, str(case.rows), case.kind]
        for way in WAYS:
            cells += [_strong(name, _ms(results.get(name), way)) for name in shown] + [gain(results, way)]
        cells += [_host_us(case, results.get(name)) for name in of_host]
        cells += [_mib(results.get("pytorch")), _mib(results.get("gsbn")), _excess(results)]
        rows.append(cells)
    if brief:  # a reader of the README does not know what is allowed
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table(columns, rows, left=("model, widths", "dtype")) + "\n\n" + _caption(report, brief)


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
    panels = {
        title: {
            f"{case.layers}\n{case.rows} rows, {case.kind}": {
                name: m.median for name, result in results.items() if (m := of(result))
            }
            for case, results in report.by_case().items()
        }
        for title, of in WAYS.values()
        if any(of(result) for result in report.results)
    }
    e = report.environment
    where = e["gpus"][0]["name"] if report.device == "cuda" else "the CPU"
    title = f"gsbn {e['gsbn']}, training steps of whole models, on {where}, {report.date[:10]}"
    draw_speeds(file, title, panels, {name: (NAMES[name], COLOURS[name]) for name in NAMES}, "pytorch")


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


def _host_us(case: ModelCase, result: ModelResult | None) -> str:
    """Of a forward and a backward."""
    if not result or not result.host:
        return NOTHING
    return f"{1e6 * (result.host['forward'] + result.host['backward']) / (len(case.widths) - 1):.0f}"


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
