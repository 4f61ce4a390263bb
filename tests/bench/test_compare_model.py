"""gsbn bench --model: a function's model, compared by gsbn.torch.compare; and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from gsbn.bench import cli

QUICK = ("--seconds", "0.01", "--skip", "compile")
SOURCE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU()).to("cpu"), torch.randn(20, 6)

def options():
    model, x = make()
    return model, (x,), {"loss": lambda y: y.mean(), "compile": False}

def unknown():
    return (*make(), {"los": 3})

def bad():
    return (*make(), {"precision": "low"})

def nothing():
    return None

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder, with a module of models; the console has 60 columns."""
    (tmp_path / "of_mine.py").write_text(SOURCE)
    (tmp_path / "needs_more.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)
    monkeypatch.setattr(cli, "out", Console(width=60))


def run(*arguments: str, status: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


@pytest.mark.parametrize("name", ["make", "options"])
def test_the_table(name: str) -> None:
    output = run("--model", f"of_mine:{name}", *QUICK).stdout
    assert "replaced 0 + 1 + 2" in output and "training step, as called\n  plain" in output
    assert max(map(len, output.splitlines())) <= 60


def test_json(tmp_path: Path) -> None:
    run("--model", "of_mine:make", "--json", "found.json", *QUICK)
    for text in ((tmp_path / "found.json").read_text(), run("--model", "of_mine:make", "--json", "-", *QUICK).stdout):
        told = json.loads(text)
        assert told["preset"] == "model" and told["model"] == "of_mine:make" and told["environment"]["gsbn"]
        assert [row["variant"] for row in told["rows"]] == ["plain", "gsbn"] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "of_mine"], "expected module:function"),
        (["--model", "of_mine.py:make"], "expected module:function"),
        (["--model", "of_nobody:make"], "of_nobody cannot be imported"),
        (["--model", "needs_more:make"], "no_such_module"),
        (["--model", "of_mine:number"], "no number that can be called"),
        (["--model", "of_mine:nothing"], "to return (model, inputs)"),
        (["--model", "of_mine:unknown"], "unexpected keyword argument 'los'"),
        (["--model", "of_mine:bad"], "precision: expected one of"),
        (["--model", "of_mine:make", "--shape", "8,8,8"], "--model takes no such option"),
        (["--model", "of_mine:make", "--skip", "jax"], "expected names among compile"),
    ],
)
def test_what_is_refused(arguments: list[str], said: str) -> None:
    output = " ".join(run(*arguments, status=2).output.replace("│", " ").split())
    assert said in output
