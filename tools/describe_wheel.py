"""The description that a wheel carries: the README with links that lead somewhere from there.

Hatchling runs it (`tool.hatch.metadata.hooks.custom` of pyproject.toml). A wheel holds no other page. So a link to a
file becomes one to the repository, if `project.urls` names it as Source, and else the path in the source tree, as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def described(text: str, source: str = "") -> str:
    """The README with its relative links replaced; `source` is the address that a file's path is appended to."""

    def replaced(match: re.Match[str]) -> str:
        picture, said, path = match.groups()
        if source:
            return f"{picture}[{said}]({source.rstrip('/')}/{path})"
        file = path.partition("#")[0]
        return "" if picture else said if said.strip("`") == file else f"{said} (`{file}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)", replaced, text)


class DescribeWheel(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": described(text, source)}
