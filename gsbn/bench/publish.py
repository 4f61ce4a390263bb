"""A report in a checkout: its tables in ``docs/results.md``, figures and picture in ``docs/results``."""

from __future__ import annotations

from pathlib import Path

from . import front_page
from .page import View, split
from .picture import draw
from .report import Report


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
