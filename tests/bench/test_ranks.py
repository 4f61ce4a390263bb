"""gsbn bench --ranks: two processes on the CPU, ranks that fail, and tables of synthetic figures."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from gsbn._cuda import device as _device
from gsbn._timing import median_interval
from gsbn.bench import cli, libraries, machine, page, ranks
from gsbn.bench.report import Report, Result, Settings
from tests.bench import bad_ranks
from tests.support.reports import publish

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

QUICK = Settings(turns=1, rounds=7, seconds=0.1, settle=0, calls=1)
TINY = ranks.cases([(16, 12, 8)], ["float32"])


@pytest.fixture(autouse=True)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "out", Console(width=100))
    monkeypatch.setattr(cli, "err", Console(width=100, stderr=True))
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(_device, "gpu_obstacle", lambda: "hidden by the test")


def command(*arguments: str, status: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    assert "Traceback" not in result.output.partition("after it printed")[0]
    return result


def test_the_cases_of_the_table() -> None:
    chosen = ranks.cases()
    assert len(chosen) == 10 and {case.direction for case in chosen} == {"forward", "step"}
    assert [case.kind for case in chosen] == ["bfloat16"] * 8 + ["float32"] * 2
    assert {case.kind for case in ranks.cases(kinds=["float16"])} == {"float16"}
    assert [case.shape for case in ranks.cases([(8, 4, 2)], directions=["step"])] == [(8, 4, 2)]
    assert all(case.batch <= 256 and case.kind == "float32" for case in ranks.cases(gpu=False))


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    saved, picture = tmp_path / "r.json", tmp_path / "r.svg"
    quick = ["--rounds", "7", "--turns", "1", "--seconds", "0.1", "--settle", "0", "--calls", "1", "--shape", "16,12,8"]
    result = command("--ranks", "2", *quick, "--dtype", "bfloat16", "--json", str(saved), "--plot", str(picture))
    assert "over gloo, on the CPU" in result.stderr
    assert "2 ranks, B rows each" in " ".join(result.stdout.split())
    assert "gsbn, group over gloo" in result.stdout and "in a graph" not in result.stdout
    assert picture.stat().st_size > 1000
    told = json.loads(saved.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (told["bench"], told["ranks"], told["device"]) == ("ranks", 2, "cpu")
    assert len(told["results"]) == 2 * len(ranks.ON_A_CPU)
    for row in told["results"]:
        assert row["failure"] == "" and "graph_us" not in row
        assert 0 < row["called_low_us"] <= row["called_us"] <= row["called_high_us"]
        assert row["candidate"] != "gsbn-gloo" or 0 < row["error"] < 1e-2


def test_what_is_wrong_or_fails_on_one_rank_is_not_timed() -> None:
    report = ranks.run(2, TINY, ["pytorch", "gsbn", "gsbn-gloo"], QUICK, worker=bad_ranks.computes_wrongly)
    assert report.failure == ""
    forward, step = (report.by_case()[case] for case in TINY)
    assert forward["pytorch"].failure == step["pytorch"].failure == "no such thing"
    assert "wrong result: y uses" in forward["gsbn-gloo"].failure and not forward["gsbn-gloo"].times
    assert step["gsbn-gloo"].failure == "wrong result: the ranks have different running statistics"
    assert forward["gsbn"].times and step["gsbn"].times


def test_a_rank_that_dies_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits for it, and is ended; earlier results are printed."""
    monkeypatch.setattr(ranks, "work", bad_ranks.dies_in_the_second_case)
    quick = ["--rounds", "1", "--settle", "0", "--calls", "1", "--dtype", "float32", "--only", "gemm,gsbn"]
    result = command("--ranks", "2", "--shape", "16,12,8", "--shape", "20,12,8", *quick, status=1)
    assert "gsbn: process 1 terminated with exit code 3" in result.stderr
    assert "(16, 12, 8) float32" in result.stdout and "(20, 12, 8)" not in result.stdout


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (bad_ranks.ends, "process 1 terminated with exit code 4"),
        (bad_ranks.raises, "RuntimeError: out of luck"),
        (bad_ranks.sleeps, "nothing was heard of the ranks for 1 s"),
    ],
)
def test_ranks_that_never_begin(monkeypatch: pytest.MonkeyPatch, worker: Callable[..., None], said: str) -> None:
    monkeypatch.setattr(ranks, "PATIENCE", 30.0 if worker is not bad_ranks.sleeps else 1.0)
    report = ranks.run(2, TINY, ["gsbn"], QUICK, worker=worker)
    assert said in report.failure
    assert not report.measured and not report.results


def test_an_interruption_keeps_what_is_done() -> None:
    def interrupt(done: float, total: float, doing: str) -> None:
        if done >= 1:
            raise KeyboardInterrupt

    todo = [TINY[0], dataclasses.replace(TINY[0], batch=20)]
    report = ranks.run(2, todo, ["gemm"], QUICK, interrupt)
    assert report.interrupted and [result.case for result in report.results] == [TINY[0]]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--ranks", "1"], 2, "--ranks"),
        (["--ranks", "2", "--preset", "models"], 2, "--preset"),
        (["--ranks", "2", "--mode", "inference"], 2, "--mode"),
        (["--ranks", "2", "--activation", "relu"], 2, "--activation"),
        (["--ranks", "2", "--direction", "backward"], 2, "expected forward or step"),
        (["--ranks", "2", "--only", "gsbn-peer"], 2, "expected names among gemm"),
        (["--ranks", "2", "--skip", ",".join(ranks.ON_A_CPU)], 2, "leaves no candidate"),
    ],
)
def test_a_mistake_gets_a_sentence(arguments: list[str], status: int, said: str) -> None:
    assert said in " ".join(command(*arguments, status=status).stderr.replace("│", " ").split())


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "has_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    error = command("--ranks", "2", status=1).stderr
    assert error == "gsbn: --ranks: expected a GPU for each of 2 ranks; PyTorch sees 1 here\n"


def report_of_two_gpus() -> Report:
    """A report with plausible figures of two GPUs; some candidates are missing."""
    noise, results = random.Random(0), []
    relative = dict(zip(ranks.ON_GPUS, (1.0, 1.8, 2.4, 1.05, 1.15, 1.2, 1.3), strict=True))
    for case in ranks.cases():
        for name, times in relative.items():
            m = median_interval([1.1e-4 * times * (1 + noise.gauss(0, 1e-3)) for _ in range(20)])
            ways = {"called": m} if name.startswith("pytorch") else {"called": m, "graph": m}
            results.append(Result(case, name, ways, {"calls": 10} | ({"error": 1e-3} if name in ranks.GROUPS else {})))
    results[-2] = Result(results[-2].case, "gsbn-peer", failure="it broke")
    del results[-1].times["graph"]
    results[-1].facts["graph_failure"] = "refused"
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "sms": 132, "memory_gib": 139.8, "l2_mib": 60.0}
    environment = machine.environment() | {"gpus": [gpu, gpu], "driver": "580.1", "cuda_runtime": "13.0"}
    return Report("ranks", environment, Settings(), tuple(results), ranks=2)


def test_what_is_published(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    results = tmp_path / "docs" / "results.md"
    results.write_text("before\n<!-- results:ranks -->\nold\n<!-- /results:ranks -->\nafter\n")
    report = report_of_two_gpus()
    publish(report, tmp_path, "ranks")
    text = results.read_text()
    assert text.startswith("before\n<!-- results:ranks -->\nForward in training, µs:\n\n| B, I, O | dtype |")
    assert "Training step (forward and backward), µs:" in text and text.endswith("after\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {16} and len(rows) == 2 * (2 + 5)
    assert rows[0][9] == "SyncBatchNorm / gsbn group" and rows[0][-1] == "gsbn group − local, in a graph"
    full = [row for row in rows if row[0][0].isdigit()]
    for row in full[:-1]:
        assert float(row[9]) == pytest.approx(2.4 / 1.2, abs=0.02)
        assert float(row[-1]) == pytest.approx(1.1 * 15, abs=0.3)
    assert float(full[-1][9]) == pytest.approx(2.4 / 1.3, abs=0.02), "without peer memory, NCCL"
    assert full[-1][-1] == "–"
    assert "2 ranks, a GPU each; 2" in text and "NVIDIA H200, driver 580.1" in text
    again = Report.load(tmp_path / "docs" / "results" / "ranks.json")
    assert ranks.VIEW.markdown(again) == ranks.VIEW.markdown(report)
    assert (tmp_path / "docs" / "results" / "ranks.png").stat().st_size > 1000


def test_what_a_terminal_shows() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    page.show(console, report_of_two_gpus(), ranks.VIEW)
    text = " ".join(console.export_text().split())
    for part in ("2 ranks, B rows each", "µs as called", "(1024, 8192, 8192) bfloat16 training, step"):
        assert part in text
    assert "gsbn, group: it broke (in (1024, 8192, 8192) float32 training, step)" in text
    assert "gsbn, group over NCCL: no graph: refused (in (1024, 8192, 8192) float32 training, step)" in text


# ---- on GPUs


@pytest.mark.gpu
def test_two_gpus() -> None:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs that this PyTorch sees")
    report = ranks.run(2, ranks.cases([(512, 256, 384)], ["bfloat16"]), ranks.ON_GPUS, QUICK)
    assert (report.failure, report.device) == ("", "cuda")
    for result in report.results:
        assert (result.failure, result.facts.get("graph_failure", "")) == ("", "")
        assert result.times["called"].median > 0
        assert ("graph" in result.times) == (not result.candidate.startswith("pytorch"))
