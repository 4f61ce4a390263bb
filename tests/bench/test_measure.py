"""A run of gsbn.bench from end to end, on the CPU and on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import bench
from gsbn.bench import bounds, libraries, machine, peers
from gsbn.bench.candidate import NAMES, Candidate, is_emulated
from gsbn.bench.report import SCHEMA

QUICK = bench.Settings(turns=1, rounds=7, seconds=0.1, settle=0, calls=1)
TINY = bench.Case(24, 20, 12)


# ---- a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64"])
def test_a_run_on_the_cpu(kind: str, tmp_path: Path) -> None:
    names = ["gsbn", "gsbn-torch", "pytorch", "addmm"]
    plain, relu = (
        bench.cases([(24, 20, 12)], [kind], [True, False], activation=activation, scale=activation is None)
        for activation in (None, "relu")
    )
    report = bench.run([*plain, *relu], names, QUICK)
    report.save_json(tmp_path / "r.json")
    saved = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert saved["schema"] == SCHEMA
    assert not saved["interrupted"]
    assert saved["environment"]["digest"] == machine.source_digests()
    assert set(saved["rates"]) == {"copy", "matrix"}
    timed = [row for row in saved["results"] if not row["failure"]]
    assert {"gsbn"} <= {row["candidate"] for row in timed}
    assert {row["training"] for row in timed if row["candidate"] == "addmm"} in ({False}, set())  # no torch, no addmm
    assert {(row["activation"], row["scale"]) for row in timed} == {(None, True), ("relu", False)}
    for row in timed:
        assert row["time_low_us"] <= row["time_us"] <= row["time_high_us"]
        assert row["error"] < 0.05


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("direction", ["backward", "step"])
@pytest.mark.parametrize(
    ("activation", "scale"),
    [(None, True), ("relu", True), ("relu", False), (None, False), ("gelu", True), ("elu", False)],
)
def test_a_run_of_gradients_on_the_cpu(direction: str, activation: Any, scale: bool) -> None:
    pytest.importorskip("torch")
    cases = bench.cases([(24, 20, 12)], ["float32", "bfloat16"], [True, False], [direction], activation, scale)
    assert all(case.flops == {"backward": 2, "step": 3}[direction] * TINY.flops for case in cases)
    assert all(direction in case.title for case in cases)
    report = bench.run(cases, ["gsbn", "gsbn-torch", "pytorch", "gemm-numpy"], QUICK)
    for results in report.by_case().values():
        assert {name for name, r in results.items() if r.times} == {"gsbn", "gsbn-torch", "pytorch"}
        assert "backward" in results["gemm-numpy"].failure


@pytest.mark.usefixtures("cpu")
def test_a_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = gsbn.backward
    monkeypatch.setattr(gsbn, "backward", lambda *args: (g := honest(*args))._replace(scale=g.scale * np.float32(1.01)))
    (result,) = bench.run([dataclasses.replace(TINY, direction="backward")], ["gsbn"], QUICK).results
    assert "wrong result: scale uses" in result.failure
    blind = dataclasses.replace(TINY, direction="backward", activation="relu")
    monkeypatch.setattr(gsbn, "backward", lambda dy, saved: honest(dy, saved._replace(activation=None)))
    (result,) = bench.run([blind], ["gsbn"], QUICK).results
    assert "wrong result: x uses" in result.failure, "no element was masked"


@pytest.mark.usefixtures("cpu")
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = gsbn.forward
    monkeypatch.setattr(gsbn, "forward", lambda *args, **options: honest(*args, **options) * np.float32(1.0001))
    (result,) = bench.run([TINY], ["gsbn"], QUICK).results
    assert not result.times
    assert "wrong result: y uses" in result.failure


@pytest.mark.usefixtures("cpu")
def test_a_peer_that_is_missing_or_breaks_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "load", lambda names: {"torch": None, "jax": None})
    results = {r.candidate: r for r in bench.run([TINY], ["gsbn", "pytorch", "jax"], QUICK).results}
    assert results["pytorch"].failure == "torch is not installed"
    assert results["jax"].failure == "jax is not installed"
    assert results["gsbn"].times
    with pytest.raises(ValueError, match="nobody"):
        bench.run([TINY], ["nobody"])


@pytest.mark.usefixtures("cpu")
def test_ctrl_c_keeps_what_is_done() -> None:
    def interrupt(done: float, total: int, doing: str) -> None:
        if "round 4" in doing and done > 1:
            os.kill(os.getpid(), signal.SIGINT)

    settings = dataclasses.replace(QUICK, rounds=9)
    report = bench.run([TINY, dataclasses.replace(TINY, batch=32)], ["gsbn", "gemm-numpy"], settings, interrupt)
    assert report.interrupted
    samples = [(r.case.batch, r.times["time"].samples) for r in report.results if r.times]
    assert samples[:2] == [(24, 7), (24, 7)] or samples[:2] == [(24, 9), (24, 9)]
    assert samples[2:] == [(32, 3), (32, 3)]


@pytest.mark.parametrize("frozen", [False, True])
def test_global_precision_is_restored(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ``torch.backends.disable_global_flags`` was called, as by PyTorch's own test suites."""
    torch = pytest.importorskip("torch")
    backends = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(backends, "__allow_nonbracketed_mutation_flag", not frozen)
    assert torch.backends.flags_frozen() == frozen
    before, of_convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with contextlib.suppress(ZeroDivisionError), libraries.float32_precision("high"):
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
        with libraries.float32_precision("highest"):
            assert not torch.backends.cudnn.allow_tf32
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before
    assert torch.backends.cudnn.allow_tf32 == of_convolutions


# ---- other ways to float32 -----------------------------------------------------------------------------------------

EMULATED = [name for name in NAMES if is_emulated(name)]


@pytest.mark.usefixtures("cpu")
def test_what_other_ways_to_float32_need_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "gsbn.bench.triton_gemm", raising=False)
    cases = bench.cases([(24, 20, 12)], ["float32", "bfloat16"], directions=["forward", "step"])
    table = bench.run(cases, EMULATED, QUICK).by_case()
    for case, results in table.items():
        for name in EMULATED:
            missing = f"{'jax' if 'jax' in name else 'triton'} is not installed"
            said = missing if case.direction == "forward" else "it has no backward here"
            assert results[name].failure == ("it is a way to float32 alone" if case.kind == "bfloat16" else said)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("name", "timed"), [("jax-bf16x9", True), ("jax", False)])
def test_a_preset_that_falls_back_to_tf32_is_timed_beside_its_error(
    monkeypatch: pytest.MonkeyPatch, name: str, timed: bool
) -> None:
    def falls_back(name: str, case: bench.Case, operands: bounds.Operands, xp: Any) -> Candidate:
        honest = peers.make("gsbn", case, operands, xp)
        return dataclasses.replace(honest, name=name, outputs=lambda: {"y": honest.call() * np.float32(1 + 3e-4)})

    monkeypatch.setattr(peers.xla, "make", falls_back)
    (result,) = bench.run([TINY], [name], QUICK).results
    assert bool(result.times) == timed
    if timed:
        assert result.facts["error"] == pytest.approx(3e-4, rel=0.01)
    else:
        assert "wrong result: norm-wise error 0.0003" in result.failure


@pytest.mark.usefixtures("cpu")
def test_a_product_alone_is_judged_as_one() -> None:
    (result,) = bench.run([dataclasses.replace(TINY, dtype="float32")], ["gsbn-matmul"], QUICK).results
    assert result.failure == "" and 0 < result.facts["error"] < 1e-6


@pytest.mark.usefixtures("cpu")
def test_a_layer_in_jax_is_right() -> None:
    pytest.importorskip("jax")
    cases = bench.cases([(24, 20, 12)], ["float32"], [True, False])
    for result in bench.run(cases, ["jax", "jax-bf16x6", "gemm-jax-bf16x6", "gsbn-matmul"], QUICK).results:
        assert result.failure == "" and result.facts["error"] < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*EMULATED, "max-autotune"])
def test_other_peers_on_the_gpu(name: str) -> None:
    pytest.importorskip("jax" if "jax" in name else "triton")
    (result,) = bench.run([bench.Case(300, 136, 520)], [name], QUICK).results
    assert result.failure == "" and result.times["time"].median > 0
    assert result.facts["error"] < (1e-3 if "jax" in name else 1e-5), "XLA may take TF32"


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("preset", bench.PRESETS)
def test_presets_run_on_the_gpu(preset: str) -> None:
    shapes = bench.PRESETS[preset][-2:]
    report = bench.run(bench.cases(shapes, ["tf32", "bfloat16"]), ["gsbn", "pytorch", "gemm-torch", "gemm-cupy"], QUICK)
    assert [r.failure for r in report.results if r.candidate == "gsbn" and r.failure] == []
    for row in report.rows():
        if not row["failure"]:
            assert row["host_us"] > 0
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other programs on the GPU lower the measured rates of the floor
        assert report.rates is not None
        assert all(report.rates.floor(r.case) < 1.2 * r.seconds for r in report.results)


@pytest.mark.gpu
def test_each_path_is_timed_as_it_can_be() -> None:
    case = bench.Case(512, 256, 384, "float16")
    names = ["gsbn-cublas", "gsbn-tiled", "gsbn-torch", "pytorch", "gemm-torch", "gemm-lt", "gemm-cupy"]
    report = bench.run([case], names, dataclasses.replace(QUICK, calls=20))
    results = {r.candidate: r for r in report.results}
    assert {r.failure for r in results.values() if r.candidate.startswith(("gsbn", "pytorch"))} == {""}
    assert results["gsbn-tiled"].facts["method"] == "graph"
    assert results["gsbn-cublas"].facts["method"] == "graph"
    assert results["pytorch"].facts["method"] == "graph"
    assert results["gsbn-tiled"].facts["path"] == "tiled"
    assert results["gsbn-cublas"].facts["path"] == "cublas"
    assert results["gsbn-cublas"].facts["extra_bytes"] >= 512 * 384 * 4  # g in float32
    assert results["pytorch"].facts["extra_bytes"] >= 512 * 384 * 2  # z


@pytest.mark.gpu
def test_the_gemm_alone_and_addmm_are_peers() -> None:
    cases = [bench.Case(300, 136, 520, dtype, "high", training=False) for dtype in ("float16", "bfloat16", "float32")]
    report = bench.run(cases, ["gsbn", "gsbn-gemm", "gemm-torch", "addmm"], QUICK)
    hopper = report.environment["gpus"][0]["capability"] == "9.0"
    for row in report.rows():
        if row["candidate"] != "gsbn-gemm" or hopper:
            assert not row["failure"], row
            assert row["method"] == "graph"


@pytest.mark.gpu
def test_warm_up_leaves_nothing_to_compile() -> None:
    steps: list[int] = []
    count = gsbn.warm_up(lambda done, total, name: steps.append(done))
    assert count > 0
    assert steps == list(range(count + 1))
