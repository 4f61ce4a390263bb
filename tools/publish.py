"""Write measured figures into the pages of this checkout. Nothing is measured here: `make bench` does both.

python tools/publish.py many few                # of docs/results/NAME.json, which gsbn bench --json wrote
python tools/publish.py --text compare < FILE   # what another program printed here, now

The tables and the picture of a report go between the markers of its name in docs/results.md. The README's table has six
lines of several reports, and is written anew with each.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gsbn.bench import layers_page, models, ranks
from gsbn.bench.case import DTYPES, Case
from gsbn.bench.layers_page import compiled, layer_columns
from gsbn.bench.machine import environment
from gsbn.bench.page import Column, error_of, markdown_table, measured_on, milliseconds, of, sources_of, speedup
from gsbn.bench.picture import draw
from gsbn.bench.report import Report, Settings

ROOT = Path(__file__).resolve().parents[1]
VIEWS = {"layers": layers_page.VIEW, "models": models.VIEW, "ranks": ranks.VIEW}  # by bench
BRIEF = "brief"  # the table of the README


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


def brief(reports):
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
    measured = {}
    for layer, report in dict.fromkeys((line.layer, line.report) for line in LINES):
        measured.setdefault(f"{measured_on(reports[report])} {sources_of(reports[report])}", []).append(layer)
    if len(measured) == 1:
        return f"{table}\n\nMeasured {next(iter(measured))}"
    return "\n".join([f"{table}\n", *(f"{', '.join(layers)}: {where}" for where, layers in measured.items())])


def reports_of(root, names):
    """The reports of a checkout that have these names and were published."""
    files = {name: root / "docs" / "results" / f"{name}.json" for name in dict.fromkeys(names)}
    return {name: Report.load(file) for name, file in files.items() if file.is_file()}


def publish_brief(root):
    """Write the table into the README of a checkout; gives the file, or nothing where it cannot have one: the README
    has no markers, or a report is not there."""
    readme, wanted = root / "README.md", {line.report for line in LINES}
    has_one = readme.is_file() and f"results:{BRIEF} -->" in readme.read_text(encoding="utf-8")
    reports = reports_of(root, wanted) if has_one else {}
    if set(reports) != wanted:
        return []
    head, tail = split(readme, BRIEF)
    readme.write_text(f"{head}\n{brief(reports)}\n{tail}", encoding="utf-8")
    return [readme]


def publish(root, name):
    """Publish docs/results/NAME.json of a checkout; gives the files that were written. ValueError if it has no GPU's
    figures of all cases, or if there is no place for the tables."""
    page, saved = root / "docs" / "results.md", root / "docs" / "results" / f"{name}.json"
    head, tail = split(page, name)
    report = Report.load(saved)
    if report.interrupted or not (report.on_gpu and report.measured):
        raise ValueError(f"{saved}: expected all of a GPU's figures")
    view, image = VIEWS[report.bench], saved.with_suffix(".png")
    draw(report, view, image)
    text = f"{view.markdown(report)}\n\n![{view.picture}](results/{name}.png)"
    page.write_text(f"{head}\n{text}\n\nWith intervals: [{name}.json](results/{name}.json).\n{tail}", encoding="utf-8")
    return [page, image, *publish_brief(root)]


def publish_text(text, root, name):
    """Put what a program printed, and where it did, between the markers of this name in docs/results.md."""
    head, tail = split(page := root / "docs" / "results.md", name)
    here = Report("", environment(), Settings(), ())
    text = text.strip("\n")
    where = f"Measured {measured_on(here)} {sources_of(here)}"
    page.write_text(f"{head}\n```\n{text}\n```\n\n{where}\n{tail}", encoding="utf-8")


def split(file, name):
    """A page up to the first marker of a table, and from the second on; ValueError if one is missing."""
    begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not (0 <= text.find(begin) < text.find(end)):
        raise ValueError(f"{file}: expected a file with the lines {begin} and {end}")
    return text[: text.find(begin) + len(begin)], text[text.find(end) :]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--text", metavar="NAME", help="publish standard input")
    args = parser.parse_args()
    try:
        for name in args.names:
            print("Wrote", *publish(ROOT, name))
        if args.text:
            publish_text(sys.stdin.read(), ROOT, args.text)
    except ValueError as error:
        return str(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
