"""Terminal output: tables of any width with complete numbers, and text in any encoding."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

from gsbn import bench
from gsbn._timing import Measurement
from gsbn.bench import bounds, layers_page, machine, page, selfcheck, tables, terminal
from tests.support import ROOT

NUMBER = re.compile(r"\d[\d.,–]*(?:e[+-]?\d+)?[%×*]?")


def printed(width: int, show: object, *arguments: object) -> str:
    """The output of a function on a console with `width` columns; no line is longer."""
    stream = io.StringIO()
    show(Console(file=stream, width=width), *arguments)
    text = stream.getvalue()
    assert max(map(len, text.splitlines()), default=0) <= width
    assert "…" not in text
    return text


def numbers(text: str) -> Counter[str]:
    return Counter(NUMBER.findall(text))


@functools.cache
def checks() -> list[selfcheck.Check]:
    """Plausible checks: every family, relative and absolute errors, within and out of bound."""
    found = []
    for i, family in enumerate(bounds.FAMILIES):
        good = bounds.Judgement(2.5e-8 * (i + 1), True, 1.0, 0.07 * (i + 1))
        absolute = dataclasses.replace(good, relative=False, share=1e-9)
        bad = dataclasses.replace(good, norm_error=4.3e2, relative=False, share=10.0 ** (i * 2))
        judged = {"y": good, "running_mean": good, "running_var": absolute}
        judged |= dict(zip(bounds.GRADIENTS, (good, absolute, good, absolute, good, good), strict=True))
        found.append(selfcheck.Check("float32", family, True, "gsbn", judged))
        found.append(selfcheck.Check("float32", family, False, "gsbn", {"y": good}))
        found.append(selfcheck.Check("float32", family, True, "pytorch", dict.fromkeys(judged, bad)))
    return found


@functools.cache
def report() -> bench.Report:
    """A plausible report of a GPU, with a candidate that fails."""
    case, results = bench.Case(16384, 4096, 4096), []
    for i, name in enumerate(("gsbn", "gsbn-prepared", "pytorch", "compile")):
        m = Measurement(1.234e-3 * (i + 1), 1.2e-3 * (i + 1), 1.3e-3 * (i + 1) ** 2, 40, 0.95)
        facts = {"path": "sm90", "method": "graph", "calls": 10, "extra_bytes": 123456789 * i, "error": 1e-7}
        results.append(bench.Result(case, name, {"time": m, "host": m}, facts))
    results.append(bench.Result(case, "jax", failure="jax is not installed"))
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "sms": 132, "memory_gib": 139.8, "l2_mib": 60.0}
    environment = machine.environment() | {"gpus": [gpu], "cuda_runtime": "13.0", "nvrtc": "13.0"}
    rates = bench.Rates(4.27e12, {"float32": 263e12})
    return bench.Report("layers", environment, bench.Settings(), tuple(results), rates=rates)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_check_shows_the_same_numbers_at_any_width(width: int) -> None:
    text, wide = (printed(w, tables.print_checks, checks(), {"tf32": "no"}) for w in (width, 300))
    assert numbers(text.split("In each cell")[0]) >= numbers(wide.split("In each cell")[0])
    for whole in ("2.5e-08", "4.3e+02*", "1e14×", "56%"):
        assert whole in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_check_shows_what_is_nearest_to_its_bound(width: int) -> None:
    text = printed(width, tables.print_nearest, checks(), {"tf32": "no"}, ", relu")
    assert re.findall(r"(\d+)%", text) == ["56", "56", "49", "49", "42"]
    assert "tf32: skipped, because no" in text and "PyTorch" not in text and "constant" in text
    assert text.startswith("gsbn against float64, relu, nearest")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_bench_shows_the_same_numbers_at_any_width(width: int) -> None:
    text, wide = (printed(w, page.show, report(), layers_page.VIEW).split("JAX")[0] for w in (width, 300))
    assert numbers(text) == numbers(wide)
    assert "4800–20800" in text and "1.0e-7" in text and "gsbn ×" in text


def test_at_80_columns_a_case_is_one_table() -> None:
    text = printed(80, page.show, report(), layers_page.VIEW)
    assert text.count("torch.compile") == 1 and "MB" in text.splitlines()[1]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_info_fits(width: int) -> None:
    paths = dict.fromkeys(bench.DTYPES, ("sm90", "one launch, in tiles of 128×192, on 132 SMs"))
    text = printed(width, tables.print_machine, report().environment, "Path at (B, I, O) = (1, 2, 3)", paths)
    for whole in ("139.8", "13.0", "128×192", machine.environment()["python"]):
        assert whole in text


def test_a_remedy_is_one_line_at_any_width() -> None:
    stream = io.StringIO()
    tables.print_missing(Console(file=stream, width=40), [("no plots [really]", "pip install " + "matplotlib " * 9)])
    assert stream.getvalue().splitlines()[0] == "no plots [really]"
    assert "pip install " + "matplotlib " * 9 in stream.getvalue()


def test_a_table_without_a_value_is_not_printed() -> None:
    rows = [["gsbn", "–", "", "1.5"], ["jax", "–", "", "–"]]
    text = printed(40, terminal.print_table, "Title", ["", "none", "blank", "some"], rows)
    assert "none" not in text and "blank" not in text and "some" in text
    assert printed(40, terminal.print_table, "Title", ["", "none", "blank"], [row[:3] for row in rows]) == ""


@pytest.mark.parametrize(
    ("low", "median", "high", "confidence", "shown"),
    [
        (0.998, 1.0, 1.004, 0.95, "± 0.3%"),
        (0.9, 1.0, 1.1, 0.96, "± 10.0%"),
        (0.6, 1.0, 21.0, 0.95, "600–21000"),  # "± 1020%" says nothing
        (1.0, 1.0, 1.0, 0.0, "–"),  # a single trial has no interval
    ],
)
def test_an_interval_is_told_so_that_it_can_be_believed(
    low: float, median: float, high: float, confidence: float, shown: str
) -> None:
    assert layers_page.interval(Measurement(median * 1e-3, low * 1e-3, high * 1e-3, 20, confidence)) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "0%"), (1e-9, "0%"), (0.169, "17%"), (0.999, "100%"), (1.0, "100%"), (1.0001, "101%"),
     (9.98, "998%"), (12.1, "13×"), (999.0, "999×"), (1e3, "1e3×"), (4e12, "4e12×"),
     (float("inf"), "fail"), (float("nan"), "fail")],
)  # fmt: skip
def test_a_share_beyond_the_bound_never_reads_as_within(share: float, shown: str) -> None:
    assert tables.share(share) == shown


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_every_command_writes_to_a_pipe_of_any_encoding(encoding: str) -> None:
    code = """
import sys
from gsbn._cuda import device as _device
from gsbn.__main__ import main
_device.gpu_obstacle = lambda: "no GPU is visible"
sys.modules["torch"] = sys.modules["jax"] = None
for command in sys.argv[1:]:
    sys.argv = ["gsbn", *command.split()]
    try:
        main()
    except SystemExit as status:
        print(f"status {status.code}")
"""
    quick = "--dtype float32 --shape 12,12,12"
    commands = [
        "--help",
        "bench --help",
        "info",
        f"check --verbose {quick}",
        "check --shape ☃",
        f"check {quick} --json -",
    ]
    commands += [f"bench {quick} --seconds 0.01 --settle 0 --calls 1"]
    environment = os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "80"}
    run = subprocess.run(
        [sys.executable, "-c", code, *commands], cwd=ROOT, env=environment, capture_output=True, timeout=300
    )
    out, errors = run.stdout.decode(encoding), run.stderr.decode(encoding)
    assert run.returncode == 0, errors
    assert "Traceback" not in errors
    assert re.findall(r"^status (\d)", out, re.M) == ["0", "0", "0", "0", "2", "0", "0"]
    assert "The bound, element by element" in out
    assert "--shape" in errors


@pytest.mark.parametrize("command", ["", "info", "check", "bench", "warmup"])
def test_help_at_80_columns_breaks_no_word(command: str) -> None:
    def words(width: int) -> set[str]:
        environment = os.environ | {"COLUMNS": str(width), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
        line = [sys.executable, "-m", "gsbn", *command.split(), "--help"]
        run = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=120)
        return set(re.sub(r"[│╭╮╰╯─]", " ", run.stdout.decode()).split())

    assert words(80) == words(300)


def test_no_color_leaves_no_escape_codes() -> None:
    commands = ["--help", "info", "info --help", "check --dtype float32 --shape 12,12,12", "check --json", "warmup"]
    environment = os.environ | {"FORCE_COLOR": "1", "PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": ""}
    for no_color in ("1", ""):
        coloured = 0
        for command in commands:
            line = [sys.executable, "-m", "gsbn", *command.split()]
            run = subprocess.run(line, cwd=ROOT, env=environment | {"NO_COLOR": no_color}, capture_output=True)
            coloured += b"\x1b" in run.stdout + run.stderr
        assert coloured == 0 if no_color else coloured > 0
