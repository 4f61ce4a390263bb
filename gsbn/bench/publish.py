"""A report in a checkout: its tables in ``docs/results.md``, figures and picture in ``docs/results``.

python -m gsbn.bench.publish NAME < FILE     # in a checkout: what another program printed, in place of a table
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import front_page
from .machine import environment
from .page import View, measured_on, sources_of, split
from .picture import draw
from .report import Report, Settings


def page_of(root: Path, name: str) -> Path:
    """The page of a checkout that has the table of this name; ValueError if a marker is missing."""
    split(page := root / "docs" / "results.md", name)
    return page


def publish(report: Report, view: View, root: Path, name: str) -> list[Path]:
    """Publish a report in a checkout; gives the files that were written.

    The tables and the picture go between the markers of this name in ``docs/results.md``, figures and picture into
    ``docs/results``, and the README's table is written anew.
    """
    found = page_of(root, name)
    folder = root / "docs" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    report.save_json(figures := folder / f"{name}.json")
    draw(report, view, image := folder / f"{name}.png")
    text = f"{view.markdown(report)}\n\n![{view.picture}](results/{name}.png)"
    head, tail = split(found, name)
    found.write_text(f"{head}\n{text}\n\nWith intervals: [{name}.json](results/{name}.json).\n{tail}", encoding="utf-8")
    return [found, figures, image, *front_page.publish(root)]


def publish_text(text: str, root: Path, name: str) -> None:
    """Put what a program printed, and where it did, between the markers of this name in ``docs/results.md``."""
    head, tail = split(found := page_of(root, name), name)
    here = Report("", environment(), Settings(), ())
    text = text.strip("\n")
    where = f"Measured {measured_on(here)} {sources_of(here)}"
    found.write_text(f"{head}\n```\n{text}\n```\n\n{where}\n{tail}", encoding="utf-8")


if __name__ == "__main__":
    publish_text(sys.stdin.read(), Path(), sys.argv[1])
