"""``gsbn check``: its verdict, and what it shows."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from gsbn.bench import bounds, selfcheck
from tests.bench.test_cli import QUICK, run
from tests.bench.test_cli import cpu as cpu  # a fixture


def test_check_passes_here_and_shows_the_bound() -> None:
    quick = ["check", "--dtype", "float32", "--dtype", "bfloat16", "--shape", "40,30,20"]
    short = run(*quick).stdout
    assert "32 of 32 within the bound" in short and "--verbose" in short and len(short.splitlines()) <= 14
    output = run(*quick, "--verbose").stdout
    assert "32 of 32 within the bound" in output
    assert "sqrt(g²" in output
    for family in bounds.FAMILIES:
        assert family in output
    assert max(map(len, output.splitlines())) <= 80
    told = json.loads(run("check", "--json", "-", "--dtype", "float16", "--family", "mean 1e4").stdout)
    assert told["passed"]
    assert {(c["kind"], c["family"]) for c in told["checks"]} == {("float16", "mean 1e4")}
    assert told["skipped"].keys() <= {"pytorch"}
    figures = {"norm_error", "relative", "norm", "share"}
    assert figures == set(told["checks"][0]["judged"]["y"])
    statistics = {"y", "running_mean", "running_var"}
    assert statistics | {"x", "weight", "bias", "scale", "gamma", "beta"} == set(told["checks"][0]["judged"])


def test_check_knows_an_activation_and_a_layer_without_scale() -> None:
    quick = ["check", "--dtype", "float32", "--dtype", "bfloat16", "--shape", "40,30,20", "--activation", "relu"]
    assert "gsbn against float64, relu, no scale, nearest" in run(*quick, "--no-scale").stdout
    result = run(*quick, "--no-scale", "--verbose")
    assert "32 of 32 within the bound" in result.stdout
    assert "float32 against float64, relu, no scale" in result.stdout
    assert "dscale" not in result.stdout, "a column without a value"
    told = json.loads(run(*quick, "--family", "normal", "--json", "-").stdout)
    assert (told["activation"], told["scale"], told["passed"]) == ("relu", True, True)
    for name in ("leaky_relu", "silu", "gelu", "gelu_tanh", "elu"):
        assert "32 of 32 within the bound" in run(*quick[:-1], name, "--verbose").stdout
    assert {"scale", "x", "beta"} <= set(told["checks"][0]["judged"])


def test_check_fails_where_gsbn_is_out_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    import gsbn

    honest = gsbn.forward
    monkeypatch.setattr(gsbn, "forward", lambda x, *rest, **options: honest(x * x.dtype.type(1.001), *rest, **options))
    result = run("check", "--dtype", "float32", "--family", "normal", status=1)
    assert "out of bound: float32, normal" in result.output
    told = json.loads(run("check", "--json", "-", "--dtype", "float32", "--family", "normal", status=1).stdout)
    assert not told["passed"]


def test_without_ml_dtypes_its_checks_are_skipped_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    why = "bfloat16 needs ml_dtypes: pip install ml_dtypes"
    quick = ["check", "--family", "normal", "--shape", "12,12,12"]
    result = run(*quick)
    assert f"bfloat16: skipped, because {why}" in result.stdout
    assert "tf32: skipped, because a CPU" in result.stdout
    assert "6 of 6 within the bound" in result.stdout
    assert result.stderr == ""
    told = json.loads(run(*quick, "--json", "-").stdout)
    assert told["passed"]
    assert told["skipped"]["bfloat16"] == why
    assert {c["kind"] for c in told["checks"]} == {"float32", "float16", "float64"}
    assert why in run("info").stdout
    timed = run(*QUICK, "--dtype", "bfloat16", "--only", "gsbn,gemm-numpy")
    assert "(24, 20, 12) bfloat16 training: nothing was timed." in timed.stdout and f"gsbn: {why}" in timed.stdout


def test_a_check_of_nothing_is_no_success() -> None:
    result = run("check", "--dtype", "tf32", status=1)
    assert "tf32: skipped" in result.stdout
    assert "Nothing was checked." in result.stdout
    assert "──" not in result.stdout, "no empty table"
    assert not json.loads(run("check", "--dtype", "tf32", "--json", "-", status=1).stdout)["passed"]


def test_pytorch_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("check", "--dtype", "float16", "--family", "normal", "--shape", "12,12,12")
    assert "PyTorch eager: skipped, because torch is not installed" in result.stdout


def test_an_error_beside_a_truth_of_zero_is_absolute() -> None:
    """If all rows are equal the gradient of the weight is 0: its error relative to the truth's norm was 3e3."""
    command = ["check", "--dtype", "float64", "--family", "constant", "--shape", "33,64,21"]
    (row,) = [c for c in json.loads(run(*command, "--json", "-").stdout)["checks"]
              if c["candidate"] == "gsbn" and c["training"]]  # fmt: skip
    weight, beta = row["judged"]["weight"], row["judged"]["beta"]
    assert (weight["relative"], beta["relative"]) == (False, True)
    assert weight["norm_error"] < 1e-6 and 0 < beta["norm_error"] < 1e-12
    assert max(weight["share"], beta["share"]) <= 1
    verbose = run(*command, "--verbose").stdout
    assert f" {weight['norm_error']:.1e}* " in verbose and f" {beta['norm_error']:.1e} " in verbose


@pytest.mark.gpu
def test_check_passes_on_the_gpu() -> None:
    checks = selfcheck.check()
    assert [(c.kind, c.family, c.training, c.candidate, c.share, c.failure) for c in checks if not c.passed] == []
    assert {"gsbn", "gsbn-cublas", "gsbn-tiled"} <= {c.candidate for c in checks}
