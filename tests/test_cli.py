"""The command line from end to end: what it prints, saves and returns, and what it says when something is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from gsbn import _device, bench
from gsbn.bench import bounds, cli, machine, publish, selfcheck

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["bench", "--shape", "24,20,12", "--dtype", "float32", "--seconds", "0.1", "--calls", "1"]


@pytest.fixture(autouse=True)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine for everyone: no GPU, a console of 80 columns."""
    monkeypatch.setattr(cli, "out", Console(width=80))
    monkeypatch.setattr(cli, "err", Console(width=80, stderr=True))
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(_device, "gpu_obstacle", lambda: "no GPU is visible")


def run(*arguments: str, status: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    assert "Traceback" not in result.output
    return result


def test_info_tells_what_there_is_and_what_mends_the_rest() -> None:
    output = run("info").stdout
    assert "float32 BLAS" in output
    assert "→" in output
    assert max(map(len, output.splitlines())) <= 80
    told = json.loads(run("info", "--json").stdout)
    assert set(told["paths"]) == set(bench.DTYPES)
    assert told["paths"]["float32"]["gemm"] == "numpy"
    assert set(told["digest"]) == {"gsbn", "kernels"}
    assert all(problem["what"] and problem["fix"] for problem in told["missing"])


@pytest.mark.parametrize(
    ("obstacle", "driver", "wheels", "what", "fix"),
    [
        ("no GPU", 0, [], "no NVIDIA driver", "install its driver"),
        ("CuPy is not installed", 12080, [], "CuPy is not installed", 'pip install "gsbn[cuda12]"'),
        ("CuPy is not installed", 13000, [], "CuPy is not installed", 'pip install "gsbn[cuda13]"'),
        ("libnvrtc.so.12", 13000, ["cupy-cuda12x"], "libnvrtc.so.12", "pip uninstall -y cupy-cuda12x && pip install"),
        ("no GPU is visible", 13000, ["cupy-cuda13x"], "no GPU is visible", "nvidia-smi"),
        ("broken", 12080, ["cupy-cuda12x", "cupy-cuda13x"], "two CuPy wheels", "-y cupy-cuda12x cupy-cuda13x"),
    ],
)
def test_the_remedy_fits_the_trouble(
    monkeypatch: pytest.MonkeyPatch, obstacle: str, driver: int, wheels: list[str], what: str, fix: str
) -> None:
    monkeypatch.setattr(_device, "gpu_obstacle", lambda: obstacle)
    monkeypatch.setattr(machine, "cuda_driver", lambda: driver)
    monkeypatch.setattr(machine, "packages", lambda: {"cupy": wheels})
    monkeypatch.setattr(machine, "version", lambda package: "1")
    ((told, remedy),) = machine.missing()
    assert what in told
    assert fix in remedy


def test_check_passes_here_and_shows_the_bound() -> None:
    output = run("check", "--dtype", "float32", "--dtype", "bfloat16", "--shape", "40,30,20").stdout
    assert "32 of 32 within the bound" in output
    assert "sqrt(g²" in output
    for family in bounds.FAMILIES:
        assert family in output
    assert max(map(len, output.splitlines())) <= 80
    told = json.loads(run("check", "--json", "--dtype", "float16", "--family", "mean 1e4").stdout)
    assert told["passed"]
    assert {(c["kind"], c["family"]) for c in told["checks"]} == {("float16", "mean 1e4")}
    assert {"max_error", "norm_error", "share"} == set(told["checks"][0]["y"])
    assert {"x", "weight", "bias", "scale", "gamma", "beta"} == set(told["checks"][0]["gradients"])


def test_check_fails_where_gsbn_is_out_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    import gsbn

    honest = gsbn.forward
    monkeypatch.setattr(gsbn, "forward", lambda x, *rest, **options: honest(x * x.dtype.type(1.001), *rest, **options))
    result = run("check", "--dtype", "float32", "--family", "normal", status=1)
    assert "out of bound: float32, normal" in result.output
    told = json.loads(run("check", "--json", "--dtype", "float32", "--family", "normal", status=1).stdout)
    assert not told["passed"]


def test_bench_saves_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    files = {name: tmp_path / f"r.{name}" for name in ("json", "csv", "plot.png")}
    options = ["--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["plot.png"])]
    result = run(*QUICK, "--mode", "both", "--only", "gsbn,gemm-numpy", *options)
    assert "No GPU" in result.stderr
    assert "(24, 20, 12) float32 training" in result.stdout
    assert "(24, 20, 12) float32 inference" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    saved = json.loads(files["json"].read_text())
    assert [row["training"] for row in saved["results"]] == [True, True, False, False]
    assert len(files["csv"].read_text().splitlines()) == 5
    pixels = image.imread(files["plot.png"])
    assert 0.001 < (pixels[..., :3] < 0.9).any(-1).mean() < 0.6


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    @contextmanager
    def bar(*args: Any, **options: Any) -> Any:
        yield lambda done, total, doing: os.kill(os.getpid(), signal.SIGINT) if done > 1.5 else None

    monkeypatch.setattr(cli, "_bar", bar)
    saved, readme = tmp_path / "r.json", tmp_path / "README.md"
    readme.write_text(f"{publish.BEGIN}{publish.END}")
    options = ["--json", str(saved), "--publish", str(tmp_path)]
    result = run(*QUICK, "--mode", "both", "--only", "gsbn", *options, status=130)
    assert readme.read_text() == f"{publish.BEGIN}{publish.END}", "half a table is not published"
    assert "Interrupted" in result.stderr
    content = json.loads(saved.read_text())
    assert content["interrupted"]
    assert content["results"][0]["training"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "--shape", "1024,8192"], "expected B,I,O"),
        (["bench", "--shape", "1,8,8"], "B at least 2"),
        (["bench", "--only", "tensorflow"], "tensorflow"),
        (["bench", "--dtype", "int8"], "int8"),
        (["bench", "--preset", "huge"], "huge"),
        (["check", "--family", "unheard"], "unheard"),
        (["info", "--shape", "a,b,c"], "a,b,c"),
    ],
)
def test_a_mistake_gets_a_sentence(arguments: list[str], said: str) -> None:
    assert said in run(*arguments, status=2).stderr


def test_what_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    assert "no such folder" in run(*QUICK, "--json", str(tmp_path / "none" / "r.json"), status=1).stderr
    assert "ends in .png" in run(*QUICK, "--plot", str(tmp_path / "p.txt"), status=1).stderr
    assert "results:begin" in run(*QUICK, "--only", "gsbn", "--publish", str(tmp_path), status=1).stderr


def test_warmup_without_a_gpu_says_why() -> None:
    assert "no GPU to compile kernels for" in run("warmup", status=1).stderr


def test_a_missing_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    said = run(*QUICK, "--plot", str(tmp_path / "p.png"), status=1).stderr.strip().splitlines()
    assert said[-1] == 'gsbn: plots need matplotlib: pip install "gsbn[cli]"'


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_one_line(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from gsbn.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip() == f'gsbn: the command line needs {package}: pip install "gsbn[cli]"'
    assert done.stdout == ""


def test_python_m_gsbn() -> None:
    command = [sys.executable, "-m", "gsbn", "info", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gsbn"]


@pytest.mark.gpu
def test_check_passes_on_the_gpu() -> None:
    checks = selfcheck.check()
    assert [(c.kind, c.family, c.training, c.candidate, c.share, c.failure) for c in checks if not c.passed] == []
    assert {"gsbn", "gsbn-cublas", "gsbn-tiled"} <= {c.candidate for c in checks}


@pytest.mark.gpu
def test_info_on_the_gpu_names_it_and_its_paths() -> None:
    told = json.loads(run("info", "--json").stdout)
    assert told["gpus"]
    assert all(told["paths"][kind]["gemm"] not in ("numpy", "–") for kind in told["paths"])
