"""The command line in terminals of 60, 80 and 120 columns: no line is longer, and no word is broken."""

from __future__ import annotations

import functools
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
WIDTHS = pytest.mark.parametrize("width", [60, 80, 120])


@functools.cache
def printed(width: int, *command: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "examples")))
    environment = {**os.environ, "COLUMNS": str(width), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-m", "gsbn", *command], env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  →")]  # commands, to be copied
    assert max(map(len, lines)) <= width
    return done.stdout


def parts(text: str) -> set[str]:
    """Its words, those with hyphens in parts: a line of a table may end with a hyphen."""
    return set(re.split(rf"[\s│─{cli.HYPHEN}-]+", text))


@WIDTHS
def test_what_there_is(width: int) -> None:
    """With no command: each is told in a sentence or more, and none of them is cut off."""
    found = printed(width, "--help")
    assert "..." not in found.replace("[ARGS]...", "")
    for command in COMMANDS.values():
        assert parts((command.help or "").partition(". ")[0].rstrip(".")) <= parts(found.replace(".", " "))


@WIDTHS
@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, width: int) -> None:
    text, command = printed(width, name, "--help"), COMMANDS[name]
    assert "<bool>" not in text and not re.search(r"\w-\n", text)
    found = parts(text)
    assert parts(command.help or "") <= found
    for option in command.params:
        assert option.hidden or parts(option.help or "") <= found
        assert option.hidden or parts(max(option.opts, key=len)) <= found


@WIDTHS
def test_tables(width: int) -> None:
    """Words in the tables are whole at every width: all that stand at 120 columns are there."""
    quick = ["--shape", "24,20,12", "--dtype", "float32", "--seconds", "0.1", "--settle", "0", "--turns", "1"]
    assert "float32" in printed(width, "bench", *quick, "--only", "gsbn,gemm-numpy")
    one = ["check", "--shape", "24,20,12", "--dtype", "float32"]
    for command in (["info"], one, [*one, "--verbose"]):
        assert parts(printed(width, *command)) - parts(printed(120, *command)) == set()


@WIDTHS
def test_a_model(width: int) -> None:
    pytest.importorskip("torch")
    model = ["bench", "--model", "compare_models:simsiam", "--skip", "compile", "--seconds", "0.01"]
    assert "training step, as called" in printed(width, *model)
