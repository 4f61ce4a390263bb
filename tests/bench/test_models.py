"""gsbn bench --preset models: the table of whole models, on the CPU and with synthetic figures; and failures."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gsbn.bench import machine, models, trainee
from gsbn.bench.clock import median_interval
from gsbn.bench.report import Settings

torch = pytest.importorskip("torch")
gsbn_torch = pytest.importorskip("gsbn.torch")

QUICK = Settings(rounds=7, seconds=0.1, settle=0, calls=1)
TINY = models.ModelCase((12, 16, 8), 24, "float32")


def test_the_models_of_the_table() -> None:
    chosen = models.cases()
    assert [(case.layers, case.rows) for case in chosen[::2]] == [
        ("2048→8192→8192→8192", 2048),
        ("2048→8192→8192→8192", 256),
        ("2048→2048→2048→2048", 512),
        ("64→64→128→1024", 65536),
        ("8 × 512", 8192),
    ]
    assert {case.kind for case in chosen} == {"bfloat16", "float32"}
    assert all(case.rows * max(case.widths) <= 1 << 20 for case in models.cases(gpu=False)), (
        "a CPU has to wait for them"
    )


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", models.KINDS)
def test_a_run_on_the_cpu(kind: str) -> None:
    case = dataclasses.replace(TINY, kind=kind)
    report = models.run([case], models.ON_A_CPU, QUICK)
    assert report.device == "cpu" and not report.interrupted
    for result in report.by_case()[case].values():
        assert result.failure == "" and result.called is not None and result.called.samples == 7
        assert (result.graph, result.peak_bytes, result.phases) == (None, None, {}), "a CPU has no device time"
        assert max(result.errors.values()) < (1e-5 if kind == "float32" else 0.3)
    page = models.markdown(report)
    assert "by the wall clock, on the CPU" in page
    assert "graph" not in page and "MiB" not in page
    saved = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert saved["preset"] == "models" and len(saved["results"]) == 2


@pytest.mark.usefixtures("cpu")
def test_what_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(gsbn_torch, "convert", fails)
    results = models.run([TINY], models.ON_A_CPU, QUICK).by_case()[TINY]
    assert results["gsbn"].failure == "no such thing" and results["gsbn"].called is None
    assert results["pytorch"].called is not None
    monkeypatch.setattr(gsbn_torch, "convert", lambda model: SimpleNamespace(replaced=(("0", "1", "2"),)))
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


def report_of_a_gpu() -> models.ModelsReport:
    """A report with plausible figures of a GPU; one graph and one candidate are missing."""
    noise, results = random.Random(0), []
    relative = {"pytorch": 1.8, "compile": 1.5, "gsbn": 1.2, "gsbn-compile": 1.1}
    for case in models.cases():
        for name, times in relative.items():
            m = median_interval([1e-3 * times * (1 + noise.gauss(0, 0.01)) for _ in range(20)])
            errors = {"y": 1e-3, "gradients": 2e-3}
            phases = dict.fromkeys(("forward", "backward", "optimiser"), 1e-4)
            results.append(models.ModelResult(case, name, m, m, phases, 3 << 20, errors, 0.9, host=phases))
    results[-1] = models.ModelResult(results[-1].case, "gsbn-compile", failure="it broke")
    results[-2].graph, results[-2].graph_failure = None, "refused"
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "sms": 132, "memory_gib": 139.8, "l2_mib": 60.0}
    environment = machine.environment() | {"gpus": [gpu], "driver": "580.1", "cuda_runtime": "13.0"}
    return models.ModelsReport(environment, Settings(), "cuda", results)


def test_what_is_published(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "results.md"
    page.write_text("before\n<!-- results:models -->\nold\n<!-- /results:models -->\nafter\n")
    models.publish(report_of_a_gpu(), tmp_path, "models")
    text = page.read_text()
    assert text.startswith("before\n<!-- results:models -->\n| model, widths") and text.endswith("after\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {18} and len(rows) == 2 + 10
    assert rows[0][7] == "best peer / gsbn, as called"
    assert all(1.2 < float(row[7]) < 1.3 for row in rows[2:]), "torch.compile's time over gsbn's, 1.5 / 1.2"
    assert rows[-1].count("–") >= 1, "what is missing is a dash"
    assert "NVIDIA H200, driver 580.1" in text
    of_host = rows[0].index("host µs a layer, gsbn")
    assert {row[of_host] for row in rows[2:-2]} == {"67"}, "of three layers, 100 us forward and backward each"
    for name in ("models.json", "models.png"):
        assert (tmp_path / "docs" / "results" / name).stat().st_size > 1000


def test_what_a_terminal_shows() -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    models.print_report(console, report_of_a_gpu())
    text = console.export_text()
    parts = (
        "as called (wall clock)",
        "in a CUDA graph (device time)",
        "Peak MiB",
        "against float64",
        "90%",
        "cost the host",
    )
    for part in parts:
        assert part in text
    assert "gsbn, compiled: it broke (in 8 × 512, 8192 rows, float32)" in " ".join(text.split())
    assert "gsbn: no graph: refused (in 8 × 512" in " ".join(text.split())


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", models.KINDS)
def test_a_run_on_the_gpu(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    case = models.ModelCase((512, 1024, 1024, 1024), 512, kind)
    report = models.run([case], ("pytorch", "gsbn"), dataclasses.replace(QUICK, calls=5))
    results = report.by_case()[case]
    for result in results.values():
        assert (result.failure, result.graph_failure) == ("", "")
        assert result.called is not None and result.graph is not None
        assert 0 < result.graph.median < 2 * result.called.median
        assert result.peak_bytes is not None and result.peak_bytes > 4 * 512 * 1024
        for parts in (result.phases, result.host):
            assert set(parts) == {"forward", "backward", "optimiser"} and min(parts.values()) > 0
    excess = results["gsbn"].excess
    assert excess is not None and excess <= 1
