"""The command line from end to end: what it prints, saves and returns, and its errors if something is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from gsbn import bench
from gsbn._cuda import device as _device
from gsbn.bench import cli, machine
from tests.support import ROOT

QUICK = [
    "bench",
    "--shape",
    "24,20,12",
    "--dtype",
    "float32",
    "--seconds",
    "0.1",
    "--settle",
    "0",
    "--turns",
    "1",
    "--calls",
    "1",
]


@pytest.fixture(autouse=True)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed machine: no GPU, and a console of 80 columns."""
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
    told = json.loads(run("info", "--json", "-").stdout)
    assert set(told["paths"]) == set(bench.DTYPES)
    assert told["paths"]["float32"]["gemm"] == "numpy"
    assert set(told["digest"]) == {"gsbn", "kernels"}
    assert all(problem["what"] and problem["fix"] for problem in told["missing"])


@pytest.mark.parametrize(
    ("obstacle", "driver", "wheels", "what", "fix"),
    [
        ("no GPU", 0, [], "no NVIDIA driver", "install its driver"),
        ("CuPy is not installed", 12080, [], "CuPy is not installed", "pip install what cuda12 names"),
        ("CuPy is not installed", 13000, [], "CuPy is not installed", "pip install what cuda13 names"),
        (
            "libnvrtc.so.12",
            13000,
            ["cupy-cuda12x"],
            "libnvrtc.so.12",
            "-y cupy-cuda12x && pip install what cuda13 names",
        ),
        ("no GPU is visible", 13000, ["cupy-cuda13x"], "no GPU is visible", "nvidia-smi"),
        (
            "broken",
            12080,
            ["cupy-cuda12x", "cupy-cuda13x"],
            "two CuPy wheels",
            "cupy-cuda13x && pip install what cuda12 names",
        ),
    ],
)
def test_the_remedy_fits_the_trouble(
    monkeypatch: pytest.MonkeyPatch, obstacle: str, driver: int, wheels: list[str], what: str, fix: str
) -> None:
    monkeypatch.setattr(_device, "gpu_obstacle", lambda: obstacle)
    monkeypatch.setattr(machine, "cuda_driver", lambda: driver)
    monkeypatch.setattr(machine, "packages", lambda: {"cupy": wheels})
    monkeypatch.setattr(machine, "version", lambda package: "1")
    monkeypatch.setattr(machine, "pip_install", lambda extra: f"pip install what {extra} names")
    ((told, remedy),) = machine.missing()
    assert what in told
    assert fix in remedy


def test_bench_knows_an_activation_and_a_layer_without_scale() -> None:
    result = run(*QUICK, "--only", "gsbn", "--activation", "relu", "--no-scale", "--direction", "step")
    assert "(24, 20, 12) float32 training, relu, no scale, step" in result.stdout


def test_the_models_are_smaller_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(cli.models, "REDUCED", [((12, 16, 8), 24)])
    quick = ["bench", "--preset", "models", "--rounds", "1", "--seconds", "0.1", "--settle", "0", "--calls", "1"]
    saved = tmp_path / "m.json"
    result = run(*quick, "--dtype", "float32", "--json", str(saved))
    assert "smaller models, on the CPU." in result.stderr
    assert "12→16→8, 24 rows, float32" in result.stdout
    for absent in ("device", "graph", "MiB", "torch.compile"):
        assert absent not in result.stdout
    assert {row["candidate"] for row in json.loads(saved.read_text())["results"]} == {"pytorch", "gsbn"}


@pytest.mark.parametrize("command", [["info"], ["check", "--dtype", "float32", "--shape", "8,8,8"],
                                     [*QUICK, "--only", "gsbn"]])  # fmt: skip
def test_json_is_one_option_everywhere(command: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "r.json"
    assert "float32" in run(*command, "--json", str(saved)).stdout, "tables beside the file"
    direct = json.loads(run(*command, "--json", "-").stdout)
    assert direct.keys() == json.loads(saved.read_text()).keys()


def test_the_version() -> None:
    import gsbn

    assert run("--version").stdout == f"gsbn {gsbn.__version__}\n"


def test_a_shape_for_which_there_is_no_memory() -> None:
    assert "not enough memory" in run("check", "--shape", "1000000000,1000000,8", status=1).stderr
    timed = run("bench", "--shape", "1000000000,1000000,8", "--dtype", "float32", "--only", "gsbn", "--settle", "0")
    assert "nothing was timed" in timed.stdout and "gsbn: Unable to allocate" in " ".join(timed.stdout.split())


def test_shapes_of_a_preset_and_shapes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def measured(todo: Any, *rest: Any) -> bench.Report:
        seen.append([case.shape for case in todo])
        return bench.Report("layers", machine.environment(), bench.Settings(), (), "cpu", bench.Rates(1, {}))

    monkeypatch.setattr(cli.layers, "run", measured)
    small, kind = bench.PRESETS["small"], ["--dtype", "float32", "--dtype", "float32"]
    run("bench", *kind, "--preset", "small", "--shape", "24,20,12", "--shape", ",".join(map(str, small[0])))
    run("bench", *kind, "--shape", "24x20x12")
    result = run("bench", *kind)
    assert seen == [[*small, (24, 20, 12)], [(24, 20, 12)], small], "each once"
    assert "Nothing was measured." in result.stdout


def test_a_cpu_has_no_device_time() -> None:
    result = run(*QUICK, "--only", "gsbn,gemm-numpy")
    assert "wall-clock time" in result.stdout
    assert "gsbn ×: how many times as long as gsbn" in " ".join(result.stdout.split())
    for absent in ("device", "host µs", "MB", "GPU"):
        assert absent not in result.stdout


def test_where_nothing_was_timed_there_is_a_sentence_and_no_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gsbn

    honest = gsbn.forward
    monkeypatch.setattr(gsbn, "forward", lambda *args, **options: honest(*args, **options) * 1.01)
    picture = tmp_path / "p.png"
    result = run(*QUICK, "--only", "gsbn", "--plot", str(picture))
    assert "(24, 20, 12) float32 training: nothing was timed.\ngsbn: wrong result" in result.stdout
    assert "──" not in result.stdout
    assert "nothing was timed" in result.stderr
    assert not picture.exists()
    result = run(*QUICK, "--only", "gsbn,addmm")
    assert "training: nothing was timed.\n" in result.stdout
    assert "gsbn: wrong result" in result.stdout
    assert "addmm, folded: folded weights" in result.stdout


def test_bench_saves_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    files = {name: tmp_path / f"r.{name}" for name in ("json", "png")}
    options = ["--json", str(files["json"]), "--plot", str(files["png"])]
    result = run(*QUICK, "--mode", "both", "--only", "gsbn,gemm-numpy", *options)
    assert "No GPU" in result.stderr
    assert "(24, 20, 12) float32 training" in result.stdout
    assert "(24, 20, 12) float32 inference" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    saved = json.loads(files["json"].read_text())
    assert [row["training"] for row in saved["results"]] == [True, True, False, False]
    pixels = image.imread(files["png"])
    assert 0.001 < (pixels[..., :3] < 0.9).any(-1).mean() < 0.6


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    @contextmanager
    def bar(*args: Any, **options: Any) -> Any:
        yield lambda done, total, doing: os.kill(os.getpid(), signal.SIGINT) if done > 1.5 else None

    monkeypatch.setattr(cli, "_bar", bar)
    saved = tmp_path / "r.json"
    result = run(*QUICK, "--mode", "both", "--only", "gsbn", "--json", str(saved), status=130)
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
        *((["check", "--seed", seed], "--seed") for seed in ("-1", str(2**32), "1.5", "9" * 400)),
        *((["bench", "--seconds", s], "--seconds") for s in ("-1", "soon")),
        (["bench", "--settle", "-1"], "--settle"),
        (["bench", "--turns", "0"], "--turns"),
        *((["bench", "--rounds", n], "--rounds") for n in ("-1", "0", "1e3")),
        *((["bench", "--calls", n], "--calls") for n in ("-1", "0")),
        *(
            ([command, "--shape", shape], "--shape")
            for command in ("info", "check", "bench")
            for shape in ("", "8", "8,8,8,8", "-4,8,8", "4,0,8", "1e3,8,8", "nan,8,8", f"{2**31},8,8", "9" * 5000)
        ),
        (["bench", "--only", "gsbn", "--skip", "gsbn"], "--skip"),
        (["bench", "--skip", "nobody"], "--skip"),
        (["bench", "--only", "nobody"], "--only"),
        (["bench", "--activation", "tanh"], "tanh"),
        (["check", "--activation", "tanh"], "tanh"),
        (["bench", "--preset", "models", "--shape", "8,8,8"], "--shape"),
        (["bench", "--preset", "convolutions", "--mode", "inference"], "--mode"),
        (["bench", "--preset", "models", "--no-scale"], "--no-scale"),
        (["bench", "--preset", "models", "--dtype", "float16"], "bfloat16 or float32"),
        (["bench", "--preset", "models", "--only", "jax"], "--only"),
        (["check", "--json"], "expected a file, or - for stdout: --json -"),
        (["bench", "--json", "--shape", "8,8,8"], "--json -"),
        (["bench", "--mode", "trained"], "trained"),
        (["bench", "--direction", "sideways"], "sideways"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_mistake_gets_a_sentence(arguments: list[str], said: str) -> None:
    result = run(*arguments, status=2)
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_the_largest_sizes_and_seeds_are_taken() -> None:
    assert str(2**31 - 1) in run("info", "--shape", f"{2**31 - 1},8192,{2**31 - 1}").stdout
    run("check", "--dtype", "float32", "--family", "normal", "--shape", "2,1,1", "--seed", str(2**32 - 1))


@pytest.mark.parametrize("command", [["info"], ["check"], [*QUICK, "--only", "gsbn"]])
def test_what_cannot_be_written_is_said_before_anything_runs(command: list[str], tmp_path: Path) -> None:
    missing, folder = (
        " ".join(run(*command, "--json", str(path), status=2).stderr.replace("│", " ").split())  # wherever it wraps
        for path in (tmp_path / "none" / "r.json", tmp_path)
    )
    assert "--json" in missing and "no such folder" in missing
    assert "expected a file" in folder


def test_what_cannot_be_drawn_is_said_before_anything_runs(tmp_path: Path) -> None:
    assert "--plot" in run(*QUICK, "--plot", str(tmp_path / "p.txt"), status=2).stderr


def test_warmup_for_no_gpu() -> None:
    assert "expected a compute capability" in run("warmup", "--arch", "hopper", status=1).stderr


def test_warmup_without_a_gpu_says_why() -> None:
    assert "no GPU to compile kernels for" in run("warmup", status=1).stderr


def test_a_missing_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    said = run(*QUICK, "--plot", str(tmp_path / "p.png"), status=1).stderr.strip().splitlines()
    assert said[-1] == f"gsbn: plots need matplotlib: {machine.pip_install('cli')}"


def test_the_remedy_names_packages_that_an_index_has(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["numpy>=2.0", "ml-dtypes>=0.5; extra == 'cuda12'", 'cupy-cuda12x[ctk]>=14.2; extra == "cuda12"',
                "rich>=13; extra == 'cli'", "rich>=13; extra == 'client'", "typer>=0.15 ; extra == 'cli'"]  # fmt: skip
    monkeypatch.setattr(machine.metadata, "requires", lambda name: requires)
    assert machine.pip_install("cuda12") == 'pip install "ml-dtypes>=0.5" "cupy-cuda12x[ctk]>=14.2"'
    assert machine.pip_install("cli") == 'pip install "rich>=13" "typer>=0.15"'


def test_sources_that_are_not_installed_are_to_be_installed_from_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise machine.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "requires", requires)
    assert machine.pip_install("cli") == f'pip install -e "{ROOT}[cli]"'


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_one_line(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from gsbn.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip() == f"gsbn: the command line needs {package}: {machine.pip_install('cli')}"
    assert done.stdout == ""


def test_python_m_gsbn() -> None:
    command = [sys.executable, "-m", "gsbn", "info", "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gsbn"]


def test_cases_are_spread_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many processes as asked for, or for 0 as there are GPUs; here they compute on the CPU."""
    assert "--gpus: expected 2 GPUs; CuPy sees 0 here" in run(*QUICK, "--gpus", "2", status=1).output
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    two = machine.environment() | {"gpus": [{"name": "fake"}] * 2}
    asked = []

    def count(*rest: Any) -> bench.Report:
        asked.append(rest[-1])
        return honest(*rest)

    honest = cli.spread.run
    monkeypatch.setattr(machine, "environment", lambda: two)
    monkeypatch.setattr(cli.spread, "run", count)
    more = ["--shape", "16,8,4", "--only", "gsbn", "--json", "-"]
    for gpus in ("2", "0"):
        told = json.loads(run(*QUICK, *more, "--gpus", gpus).stdout)
        assert [row["batch"] for row in told["results"]] == [24, 16] and not any(r["failure"] for r in told["results"])
    assert asked == [2, 2]
    assert "ranks take no such option" in run("bench", "--ranks", "2", "--gpus", "2", status=2).output


@pytest.mark.gpu
def test_info_on_the_gpu_names_it_and_its_paths() -> None:
    told = json.loads(run("info", "--json", "-").stdout)
    assert told["gpus"]
    assert all(told["paths"][kind]["gemm"] not in ("numpy", "–") for kind in told["paths"])


def test_an_option_whose_metavar_is_its_name_is_named() -> None:
    """typer 0.27 takes the metavar for the name otherwise: the option was --SECONDS there."""
    from typer.main import get_command

    for command in get_command(cli.app).commands.values():  # type: ignore[attr-defined]
        for parameter in command.params:
            assert all(name == name.lower() for name in parameter.opts)
    for made in cli.app.registered_commands:
        hints = typing.get_type_hints(made.callback, include_extras=True)
        for parameter, hint in hints.items():
            for option in getattr(hint, "__metadata__", ()):
                if (option.metavar or "").lower() == parameter:
                    # typer keeps the first name that is given in Annotated as the default
                    assert isinstance(option.default, str), parameter
