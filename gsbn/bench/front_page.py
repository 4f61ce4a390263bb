"""The README's table: six lines of the reports in ``docs/results``, written anew whenever one of them is published.

python -m gsbn.bench.front_page .     # in a checkout: without measuring anything
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .case import DTYPES, Case
from .layers import Report, Result, fastest
from .page import SHORT, Column, markdown_table, measured_on, milliseconds, of, split
from .report import NOTHING

NAME = "brief"  # of the markers in the README


class Line(NamedTuple):
    """A line of the table: what it is called, the report that has its case, and the case."""

    layer: str
    report: str  # a file of docs/results, without .json
    case: Case


def _line(layer: str, report: str, shape: tuple[int, int, int], kind: str) -> Line:
    return Line(layer, report, Case(*shape, *DTYPES[kind]))


LINES = (
    _line("KernelBench 33", "kernelbench", (1024, 8192, 8192), "float32"),
    _line("KernelBench 33", "kernelbench", (1024, 8192, 8192), "bfloat16"),
    _line("KernelBench 39", "kernelbench", (16384, 4096, 4096), "float32"),
    _line("KernelBench 39", "kernelbench", (16384, 4096, 4096), "bfloat16"),
    _line("tall", "many", (802816, 128, 128), "float32"),
    _line("small", "kernelbench", (128, 1024, 512), "float32"),
)


def markdown(reports: Mapping[str, Report]) -> str:
    """The table, and when and where its lines were measured; of the reports by their names."""
    rows = [(line, reports[line.report].by_case().get(line.case, {})) for line in LINES]
    text = markdown_table(_columns(), rows)
    return f"{text}\n\n{_stamp({line.layer: measured_on(reports[line.report]) for line in LINES})}"


def _columns() -> list[Column]:
    def compiled(results: Mapping[str, Result]) -> Result | None:
        return fastest(dict(results), "compile", "autotune")

    def times(peer: Result | None, results: Mapping[str, Result]) -> str:
        ours = results.get("gsbn")
        return f"{peer.seconds / ours.seconds:.2f}" if peer and ours and peer.timed and ours.timed else NOTHING

    return [
        Column("layer", lambda line, results: line.layer, left=True),
        Column("B, I, O", lambda line, results: ", ".join(map(str, line.case.shape)), left=True),
        Column("dtype", lambda line, results: SHORT[line.case.kind], left=True),
        Column("PyTorch eager, ms", of("pytorch", milliseconds)),
        Column("torch.compile, ms", lambda line, results: milliseconds(compiled(results))),
        Column("**gsbn**, ms", of("gsbn", milliseconds), strong=True),
        Column("× eager", lambda line, results: times(results.get("pytorch"), results)),
        Column("× torch.compile", lambda line, results: times(compiled(results), results)),
        Column("error, eager", of("pytorch", _error)),
        Column("error, gsbn", of("gsbn", _error)),
    ]


def _error(result: Result) -> str:
    return NOTHING if result.error is None else f"{result.error:.1e}".replace("e-0", "e-")


def _stamp(measured: Mapping[str, str]) -> str:
    """When and where the lines were measured: once if it is the same for all."""
    layers: dict[str, list[str]] = {}
    for layer, where in measured.items():
        layers.setdefault(where, []).append(layer)
    if len(layers) == 1:
        return f"Measured {next(iter(layers))}"
    return "\n".join(f"{', '.join(names)}: {where}" for where, names in layers.items())


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


def main(*arguments: Any) -> int:
    found = publish(Path(*arguments or ".").resolve())
    print(f"Wrote {found[0]}" if found else "README.md has no markers, or docs/results no reports")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
