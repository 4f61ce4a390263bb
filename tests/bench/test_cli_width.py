"""The command line in terminals of 60, 80 and 120 columns: no line is longer, and no word of the help is broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.main import get_command

from gsbn.bench import cli
from tests.support import ROOT

COMMANDS = get_command(cli.app).commands  # type: ignore[attr-defined]


def printed(width: int, *command: str) -> str:
    environment = {**os.environ, "COLUMNS": str(width), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "gsbn", *command], env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  →")]  # commands, to be copied
    assert max(map(len, lines)) <= width
    return done.stdout


def parts(text: str) -> set[str]:
    """Its words, those with hyphens in parts: a line may end with a hyphen."""
    return set(re.split(r"[\s│-]+", text))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, width: int) -> None:
    found = parts(printed(width, name, "--help"))
    for option in COMMANDS[name].params:
        assert option.hidden or parts(option.help or "") <= found


@pytest.mark.parametrize("width", [60, 80, 120])
def test_results(width: int) -> None:
    printed(width, "info")
    quick = ["--shape", "24,20,12", "--dtype", "float32", "--seconds", "0.1", "--settle", "0", "--turns", "1"]
    assert "float32" in printed(width, "bench", *quick, "--only", "gsbn,gemm-numpy")
