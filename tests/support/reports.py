"""Reports of gsbn.bench, published in a checkout of their own."""

from __future__ import annotations

from pathlib import Path

from gsbn.bench.report import Report
from tools import publish as tool


def publish(report: Report, root: Path, name: str) -> list[Path]:
    """What `make table-NAME` does with a report: save it, and publish that."""
    saved = root / "docs" / "results" / f"{name}.json"
    saved.parent.mkdir(parents=True, exist_ok=True)
    report.save_json(saved)
    return tool.publish(root, name)  # type: ignore[no-any-return]
