"""Cases spread over several GPUs: the processes see one each, and their reports become one."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gsbn import bench
from gsbn._timing import median_interval
from gsbn.bench import layers, models, spread
from gsbn.bench.turns import Progress
from tests.support import ROOT

QUICK = bench.Settings(turns=1, rounds=7, seconds=0.1, settle=0, calls=1)
CASES = bench.cases([(24, 20, 12), (16, 8, 4), (8, 8, 8)], ["float32", "float64"])


def fake(cases: Sequence[Any], candidates: Sequence[str], settings: bench.Settings, progress: Progress) -> bench.Report:
    """A report that tells which GPU its process sees, and which cores it has."""
    seen = os.environ["CUDA_VISIBLE_DEVICES"]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    results = []
    for done, case in enumerate(cases):
        progress(done, len(cases), case.title)
        facts = {"gpu": seen, "cores": cores, "process": os.getpid()}
        results.append(bench.Result(case, candidates[0], {"time": median_interval([1e-3] * 7)}, facts))
    rates = bench.Rates(float(seen), {kind: float(seen) for kind in {case.kind for case in cases}})
    return bench.Report("layers", {"gpus": [seen]}, settings, tuple(results), rates=rates, interrupted=seen == "7")


def endless(
    cases: Sequence[Any], candidates: Sequence[str], settings: bench.Settings, progress: Progress
) -> bench.Report:
    """Like `fake` for one case, then busy until Ctrl-C."""
    report = fake(cases[:1], candidates, settings, progress)
    try:
        progress(1, len(cases), "busy")
        time.sleep(60)
    except KeyboardInterrupt:
        return dataclasses.replace(report, interrupted=True)
    return report


def quiet(done: float, total: int, text: str) -> None:
    pass


def test_every_process_has_a_gpu_and_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    report = spread.run(fake, CASES, ["gsbn"], QUICK, quiet, gpus=2)
    assert [result.case for result in report.results] == CASES, "in the order of the cases"
    assert report.environment["gpus"] == ["5", "7"] and report.interrupted
    assert report.rates == bench.Rates(7.0, {"float32": 7.0, "float64": 7.0}), "the highest"
    by_gpu = {gpu: [r for r in report.results if r.facts["gpu"] == gpu] for gpu in ("5", "7")}
    for mine, other in (by_gpu.values(), reversed(by_gpu.values())):
        assert len(mine) == 3 and {r.case.kind for r in mine} == {"float32", "float64"}
        assert len({r.facts["process"] for r in mine}) == 1 and mine[0].facts["process"] != os.getpid()
        if (os.cpu_count() or 1) > 1:
            assert not set(mine[0].facts["cores"]) & set(other[0].facts["cores"])
        assert mine[0].times["time"].samples == 7, "nothing of a measurement is lost"


def test_one_gpu_needs_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    report = spread.run(fake, CASES, ["gsbn"], QUICK, quiet)
    assert {result.facts["process"] for result in report.results} == {os.getpid()}


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("preset", ["kernelbench", "many"])
def test_shares_are_equal(preset: str, gpus: int) -> None:
    cases = bench.cases(preset, ["float32", "bfloat16"])
    parts = spread.shares(cases, gpus)
    assert sorted(map(str, (case for part in parts for case in part))) == sorted(map(str, cases))
    for kind in ("float32", "bfloat16"):
        counts = [sum(case.kind == kind for case in part) for part in parts]
        assert max(counts) - min(counts) <= 1
    assert len(spread.shares(cases[:2], 8)) == 2, "no process without a case"


def test_what_a_process_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,not a number")
    with pytest.raises(ValueError, match="not a number"):
        spread.run(fake, CASES, ["gsbn"], QUICK, quiet, gpus=2)


def ctrl_c(done: float, total: int, text: str) -> None:
    if done == 2:
        os.killpg(0, signal.SIGINT)  # as a terminal sends it: to all processes


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_ctrl_c_keeps_what_every_process_has_done() -> None:
    code = (
        "from tests.bench.test_spread import *\n"
        "report = spread.run(endless, CASES, ['gsbn'], QUICK, ctrl_c, gpus=2)\n"
        "print(len(report.results), report.interrupted)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": "5,7"}, text=True,
        capture_output=True, timeout=50, start_new_session=True,
    )  # fmt: skip
    assert run.stdout == "2 True\n", run.stderr


@pytest.mark.parametrize("of_models", [False, True])
def test_a_bench_on_two(of_models: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPUs hidden both measure on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if of_models:
        pytest.importorskip("torch")
        report = spread.run(models.run, models.cases(gpu=False)[:2], ["pytorch", "gsbn"], QUICK, quiet, gpus=2)
    else:
        report = spread.run(layers.run, CASES[:2], ["gsbn", "gemm-numpy"], QUICK, quiet, gpus=2)
        assert report.rates and set(report.rates.matrix) == {"float32", "float64"}
        assert all(result.facts["first_s"] > 0 for result in report.results)
    assert len(report.results) == 4 and not any(result.failure for result in report.results)
    assert report.device == "cpu" and all(result.times for result in report.results)
