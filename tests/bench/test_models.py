"""gsbn bench --preset models: the table of whole models, on the CPU and with synthetic figures; and failures."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gsbn._timing import median_interval
from gsbn.bench import machine, models, page, trainee
from gsbn.bench.case import ModelCase
from gsbn.bench.report import Report, Result, Settings
from tests.support.reports import publish

torch = pytest.importorskip("torch")
gsbn_torch = pytest.importorskip("gsbn.torch")

QUICK = Settings(turns=1, rounds=7, seconds=0.1, settle=0, calls=1)
TINY = ModelCase((12, 16, 8), 24, "float32")


def test_the_models_of_the_table() -> None:
    chosen = models.cases()
    assert [(case.layers, case.rows) for case in chosen[::2]] == [
        ("2048→8192→8192→8192", 2048),
        ("2048→8192→8192→8192", 256),
        ("2048→2048→2048→2048", 512),
        ("64→64→128→1024", 65536),
        ("8 × 512", 8192),
        ("GraphMLP 128, 256, 256, 40", 90941),
        ("FCLayers 2000, 128, 128", 128),
        ("PointClassifier 1024, 512, 256, 40", 24),
        ("Critic 17, 6, 2048, 2048", 512),
        ("SimSiam 2048, 2048, 2048, 512", 512),
        ("BarlowTwins 2048, 8192, 8192", 2048),
    ]
    assert {case.kind for case in chosen} == {"bfloat16", "float32"}
    assert all(case.rows * max(case.widths) <= 1 << 20 for case in models.cases(gpu=False)), (
        "a CPU has to wait for them"
    )


def test_the_convolutions_of_the_table() -> None:
    chosen = models.convolutions(("bfloat16",))
    assert [(case.layers, case.rows) for case in chosen[:4:2]] == [
        ("64→64→128→1024 at 4096", 131072),
        ("512→512→512 at 512", 8192),
    ]
    assert chosen[-1].layers == "256→512→256 at 14 × 14, channels last" and not chosen[-2].channels_last


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("spatial", [(16,), (4, 5)])
def test_convolutions_on_the_cpu(spatial: tuple[int, ...], last: bool) -> None:
    case = ModelCase((12, 16, 8), 2 * math.prod(spatial), "float32", "", spatial, last)
    run = models._ModelRun(case, models.ON_A_CPU, "cpu", QUICK)
    plain, (x,), *_ = run.plain
    assert x.shape == (2, 12, *spatial) and (x.stride(1) == 1) == last
    assert isinstance(plain[0], torch.nn.Conv1d if len(spatial) == 1 else torch.nn.Conv2d) and len(plain) == 6
    for result in models.run([case], models.ON_A_CPU, QUICK).by_case()[case].values():
        assert result.times and result.facts["error"] < 1e-5


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", models.KINDS)
def test_a_run_on_the_cpu(kind: str) -> None:
    case = dataclasses.replace(TINY, kind=kind)
    report = models.run([case], models.ON_A_CPU, QUICK)
    assert report.device == "cpu" and not report.interrupted
    for result in report.by_case()[case].values():
        assert result.failure == "" and {way: time.samples for way, time in result.times.items()} == {"called": 7}
        assert not {"peak_bytes", "host_us_a_layer"} & set(result.facts), "a CPU has no device time"
        errors = result.facts["error"], result.facts["error_of_gradients"]
        assert max(errors) < (1e-5 if kind == "float32" else 0.3)
    text = models.VIEW.markdown(report)
    assert "by the wall clock, on the CPU" in text
    assert "graph" not in text and "MiB" not in text
    saved = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert saved["bench"] == "models" and len(saved["results"]) == 2


@pytest.mark.usefixtures("cpu", "fresh_dynamo")
@pytest.mark.parametrize("case", [case for case in models.cases(("float32",), gpu=False) if case.head])
def test_heads_on_the_cpu(case: ModelCase) -> None:
    """On a CPU gsbn leaves them to PyTorch, but converts and compiles them."""
    results = models.run([case], ("pytorch", "gsbn"), QUICK).by_case()[case]
    assert results["pytorch"].times and results["pytorch"].facts["error"] < 1e-4
    if case.head == "FCLayers":
        assert "not all of the model was converted, but nothing" in results["gsbn"].failure  # only torch.compile can
    else:
        assert results["gsbn"].facts["error"] < 1e-4 and results["gsbn"].times


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = report_of_a_gpu()
    report.save_json(tmp_path / "r.json")
    again = Report.load(tmp_path / "r.json")
    assert models.VIEW.markdown(again) == models.VIEW.markdown(report)
    older = {name: value for name, value in report.results[0].row().items() if name not in ("spatial", "channels_last")}
    assert Result.of_row(older).case == report.results[0].case


@pytest.mark.usefixtures("cpu")
def test_what_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(gsbn_torch, "convert", fails)
    results = models.run([TINY], models.ON_A_CPU, QUICK).by_case()[TINY]
    assert results["gsbn"].failure == "no such thing" and not results["gsbn"].times
    assert results["pytorch"].times
    monkeypatch.setattr(gsbn_torch, "convert", lambda model, **_: SimpleNamespace(replaced=(("0", "1", "2"),)))
    (result,) = models.run([TINY], ["gsbn"], QUICK).results
    assert "not all of the model was converted" in result.failure
    monkeypatch.setattr(models, "truth_of", fails)
    assert {r.failure for r in models.run([TINY], models.ON_A_CPU, QUICK).results} == {"no such thing"}


@pytest.mark.usefixtures("cpu")
def test_a_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = trainee.Trainee.outcome
    monkeypatch.setattr(trainee.Trainee, "outcome", lambda self: [-a for a in honest(self)])
    (result,) = models.run([TINY], ["pytorch"], QUICK).results
    assert "wrong result" in result.failure


@pytest.mark.usefixtures("cpu")
def test_an_interruption_keeps_what_is_done() -> None:
    def interrupt(done: float, total: float, doing: str) -> None:
        if done > 1.2:
            raise KeyboardInterrupt

    report = models.run([TINY, dataclasses.replace(TINY, rows=30)], ["pytorch", "gsbn"], QUICK, interrupt)
    assert report.interrupted
    assert [(r.case.rows, r.candidate) for r in report.results] == [(24, "pytorch"), (24, "gsbn")]


def report_of_a_gpu() -> Report:
    """A report with plausible figures of a GPU; one graph and one candidate are missing."""
    noise, results = random.Random(0), []
    relative = {"pytorch": 1.8, "compile": 1.5, "gsbn": 1.2, "gsbn-compile": 1.1}
    for case in models.cases():
        for name, times in relative.items():
            m = median_interval([1e-3 * times * (1 + noise.gauss(0, 0.01)) for _ in range(20)])
            facts = {"peak_bytes": 3 << 20, "host_us_a_layer": 67.0, "excess": 0.9}
            facts |= {"error": 1e-3, "error_of_gradients": 2e-3}
            results.append(Result(case, name, {"called": m, "graph": m}, facts))
    results[-1] = Result(results[-1].case, "gsbn-compile", failure="it broke")
    del results[-2].times["graph"]
    results[-2].facts["graph_failure"] = "refused"
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "sms": 132, "memory_gib": 139.8, "l2_mib": 60.0}
    environment = machine.environment() | {"gpus": [gpu], "driver": "580.1", "cuda_runtime": "13.0"}
    return Report("models", environment, Settings(), tuple(results))


def test_what_is_published(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    results = tmp_path / "docs" / "results.md"
    results.write_text("before\n<!-- results:models -->\nold\n<!-- /results:models -->\nafter\n")
    publish(report_of_a_gpu(), tmp_path, "models")
    text = results.read_text()
    assert text.startswith("before\n<!-- results:models -->\n| model, widths") and text.endswith("after\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {18} and len(rows) == 2 + 22
    assert rows[0][7] == "best peer / gsbn, as called"
    assert all(1.2 < float(row[7]) < 1.3 for row in rows[2:]), "torch.compile's time over gsbn's, 1.5 / 1.2"
    assert rows[-1].count("–") >= 1, "what is missing is a dash"
    assert "NVIDIA H200, driver 580.1" in text
    of_host = rows[0].index("host µs a layer, gsbn")
    assert {row[of_host] for row in rows[2:-2]} == {"67"}
    for name in ("models.json", "models.png"):
        assert (tmp_path / "docs" / "results" / name).stat().st_size > 1000


def test_what_a_terminal_shows() -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    page.show(console, report_of_a_gpu(), models.VIEW)
    text = console.export_text()
    for part in ("2048→8192→8192→8192, 256 rows, bfloat16", "ms as called", "in a graph", "MiB", "error y", "90%"):
        assert part in text
    assert "gsbn, compiled: it broke (in BarlowTwins 2048, 8192, 8192, 2048 rows, float32)" in " ".join(text.split())
    assert "gsbn: no graph: refused (in BarlowTwins 2048" in " ".join(text.split())


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", models.KINDS)
def test_a_run_on_the_gpu(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    case = ModelCase((512, 1024, 1024, 1024), 512, kind)
    report = models.run([case], ("pytorch", "gsbn"), dataclasses.replace(QUICK, calls=5))
    results = report.by_case()[case]
    for result in results.values():
        assert (result.failure, result.facts["graph_failure"]) == ("", "")
        assert 0 < result.times["graph"].median < 2 * result.times["called"].median
        assert result.facts["peak_bytes"] > 4 * 512 * 1024 and result.facts["host_us_a_layer"] > 0
    assert results["gsbn"].facts["excess"] <= 1
