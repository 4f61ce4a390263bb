"""The README's table: six lines of the reports in ``docs/results``, written anew whenever one of them is published.

python -m gsbn.bench.front_page .     # in a checkout: without measuring anything
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .case import DTYPES, Case
from .layers_page import compiled, layer_columns
from .page import Column, error_of, markdown_table, measured_on, milliseconds, of, sources_of, speedup, split
from .report import Report

NAME = "brief"  # of the markers in the README


class Line(NamedTuple):
    """A line of the table: what it is called, the report that has its case (a file of docs/results), and the case."""

    layer: str
    report: str
    case: Case


LINES = tuple(
    Line(layer, report, Case(*shape, *DTYPES[kind]))
    for layer, report, shape, kind in (
        ("KernelBench 33", "kernelbench", (1024, 8192, 8192), "float32"),
        ("KernelBench 33", "kernelbench", (1024, 8192, 8192), "bfloat16"),
        ("KernelBench 39", "kernelbench", (16384, 4096, 4096), "float32"),
        ("KernelBench 39", "kernelbench", (16384, 4096, 4096), "bfloat16"),
        ("tall", "many", (802816, 128, 128), "float32"),
        ("small", "kernelbench", (128, 1024, 512), "float32"),
    )
)


def markdown(reports: Mapping[str, Report]) -> str:
    """The table, and when, where and of which sources its lines were measured; of the reports by their names."""
    names = {line.case: line.layer for line in LINES}
    columns = [
        Column("layer", lambda case, results: names[case], left=True),
        *layer_columns(),
        Column("PyTorch eager, ms", of("pytorch", milliseconds)),
        Column("torch.compile, ms", lambda case, results: milliseconds(compiled(results))),
        Column("**gsbn**, ms", of("gsbn", milliseconds), strong=True),
        Column("× eager", lambda case, results: speedup(results.get("pytorch"), results.get("gsbn"))),
        Column("× torch.compile", lambda case, results: speedup(compiled(results), results.get("gsbn"))),
        Column("error, eager", of("pytorch", error_of)),
        Column("error, gsbn", of("gsbn", error_of)),
    ]
    table = markdown_table(columns, [(line.case, reports[line.report].by_case().get(line.case, {})) for line in LINES])
    measured: dict[str, list[str]] = {}
    for layer, report in dict.fromkeys((line.layer, line.report) for line in LINES):
        measured.setdefault(f"{measured_on(reports[report])} {sources_of(reports[report])}", []).append(layer)
    if len(measured) == 1:
        return f"{table}\n\nMeasured {next(iter(measured))}"
    return "\n".join([f"{table}\n", *(f"{', '.join(layers)}: {where}" for where, layers in measured.items())])


def reports_of(root: Path, names: Iterable[str]) -> dict[str, Report]:
    """The reports of a checkout that have these names and were published."""
    files = {name: root / "docs" / "results" / f"{name}.json" for name in dict.fromkeys(names)}
    return {name: Report.load(file) for name, file in files.items() if file.is_file()}


def publish(root: Path) -> list[Path]:
    """Write the table into the README of a checkout; gives the file, or nothing where it cannot have one: the README
    has no markers, or a report is not there."""
    readme, wanted = root / "README.md", {line.report for line in LINES}
    has_one = readme.is_file() and f"results:{NAME} -->" in readme.read_text(encoding="utf-8")
    reports = reports_of(root, wanted) if has_one else {}
    if set(reports) != wanted:
        return []
    head, tail = split(readme, NAME)
    readme.write_text(f"{head}\n{markdown(reports)}\n{tail}", encoding="utf-8")
    return [readme]


if __name__ == "__main__":
    written: list[Path] = publish(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
    sys.exit(None if written else "README.md has no markers, or docs/results no reports")
