"""The output of gsbn.bench: tables between their markers, plots, and the digest of the sources."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest

import gsbn
from gsbn import bench
from gsbn._timing import median_interval
from gsbn.bench import machine
from gsbn.bench.candidate import COMPILED, NAMES
from gsbn.bench.layers_page import EMULATED, SERIES, VIEW
from gsbn.bench.picture import KIND_COLOURS, draw
from tests.support import ROOT
from tests.support.reports import publish
from tools import publish as tool


def changed_since(results: Path) -> list[str]:
    """Which of ``gsbn`` and ``kernels`` are no longer the sources that a saved report was measured on."""
    measured = json.loads(results.read_text())["environment"]["digest"]
    return [folder for folder, digest in machine.source_digests().items() if measured.get(folder) != digest]


def stamps(text: str) -> dict[str, list[str]]:
    """What the tables of a page were measured on, version and digests of the sources: and which they are, each with its
    date."""
    found: dict[str, list[str]] = {}
    for name, table in re.findall(r"<!-- results:(\w+) -->\n(.*?)<!-- /results:\1 -->", text, re.DOTALL):
        key = ", ".join(re.findall(r"gsbn [\d.]+\d|Sources: .*`", table)) or "not measured"
        found.setdefault(key, []).append(" ".join([name, *re.findall(r"\b\d{4}-\d\d-\d\d(?=, )", table)]))
    return found


def report_of_a_gpu(preset: str = "kernelbench") -> bench.Report:
    """A report with plausible figures of a GPU."""
    noise, results = random.Random(0), []
    rates = bench.Rates(4.27e12, {"float32": 263e12, "tf32": 400e12, "bfloat16": 790e12, "float16": 780e12})
    relative = {"gsbn": 1.2, "gemm-torch": 1.1, "gemm-lt": 1.05, "pytorch": 1.8, "compile": 1.5, "jax": 1.6}
    for case in bench.cases(preset):
        for name, times in relative.items():
            seconds = times * (rates.floor(case) + 5e-6)
            m = median_interval([seconds * (1 + noise.gauss(0, 0.01)) for _ in range(20)])
            results.append(bench.Result(case, name, {"time": m, "host": m}, {"error": 1e-7, "calls": 10}))
        results.append(bench.Result(case, "autotune", failure="refused"))
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "sms": 132, "memory_gib": 139.8, "l2_mib": 60.0}
    environment = machine.environment() | {"gpus": [gpu], "driver": "580.1", "cuda_runtime": "13.0"}
    return bench.Report("layers", environment, bench.Settings(), tuple(results), rates=rates)


MARKED = "before\n<!-- results:rows -->\nold\n<!-- /results:rows -->\nafter\n"


def test_publish_rewrites_only_what_is_between_the_markers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "results.md"
    page.write_text("<!-- results:others -->\nkept\n<!-- /results:others -->\n" + MARKED)
    for _ in range(2):  # and again, to the same text
        publish(report_of_a_gpu(), tmp_path, "rows")
    text = page.read_text()
    assert text.startswith(
        "<!-- results:others -->\nkept\n<!-- /results:others -->\nbefore\n<!-- results:rows -->\n| B, I"
    )
    assert text.endswith("<!-- /results:rows -->\nafter\n")
    assert "old" not in text
    table, beside_half = text.split("16-bit operands beside PyTorch's float32")
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| 1")]
    assert len(rows) == 12
    assert {line.count("|") for line in table.splitlines() if line.startswith("|")} == {13}
    halves = [line.split("|")[1:-1] for line in beside_half.splitlines() if line.startswith("| 1")]
    assert len(halves) == 3 and {len(line) for line in halves} == {6}
    for _, _, wide, ratio, half, of_half in halves:
        gained = float(wide.split(",")[0]) / float(half.split(",")[0])  # by the 16 bits alone
        assert float(of_half) == pytest.approx(float(ratio) * gained, rel=0.02)
    assert all(1.45 < float(row[7]) < 1.55 for row in rows), "PyTorch's time over gsbn's, 1.8 / 1.2"
    assert "NVIDIA H200, driver 580.1" in text and "(results/rows.png)" in text
    assert changed_since(tmp_path / "docs/results/rows.json") == []
    for name in ("rows.json", "rows.png"):
        assert (tmp_path / "docs" / "results" / name).stat().st_size > 1000


def test_a_cpu_has_no_device_time_and_no_graph() -> None:
    report = report_of_a_gpu()
    assert "Medians of device time" in VIEW.markdown(report)
    on_cpu = dataclasses.replace(report, device="cpu", environment=report.environment | {"gpus": [], "driver": None})
    assert "Medians of wall-clock time" in VIEW.markdown(on_cpu)
    assert not {"device", "graph"} & set(VIEW.markdown(on_cpu).replace(",", " ").split())


def test_publish_without_markers_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(MARKED)
    for name in ("kernelbench", "rows"):
        with pytest.raises(ValueError, match=rf"results.md: expected a file with the lines <!-- results:{name} -->"):
            publish(report_of_a_gpu(), tmp_path, name)
    assert (tmp_path / "README.md").read_text() == MARKED and not list(tmp_path.rglob("*.png"))
    (tmp_path / "docs" / "results.md").write_text(MARKED.replace("<!-- /results:rows -->", ""))
    with pytest.raises(ValueError, match=r"results.md: expected a file with the lines"):
        publish(report_of_a_gpu(), tmp_path, "rows")


def test_half_a_report_and_a_cpus_are_not_published(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "results.md"
    page.write_text(MARKED)
    for wrong in ({"interrupted": True}, {"device": "cpu"}, {"results": ()}):
        with pytest.raises(ValueError, match=r"rows.json: expected all of a GPU's figures"):
            publish(dataclasses.replace(report_of_a_gpu(), **wrong), tmp_path, "rows")
        assert page.read_text() == MARKED


def test_what_a_program_printed_is_published_with_its_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "results.md"
    page.write_text(MARKED + MARKED.replace("rows", "compare") + MARKED.replace("rows", "later"))
    publish(report_of_a_gpu(), tmp_path, "rows")
    tool.publish_text("\n  ms  speed\n", tmp_path, "compare")
    assert "<!-- results:compare -->\n```\n  ms  speed\n```\n\nMeasured 2" in (text := page.read_text())
    today = report_of_a_gpu().date[:10]
    digest = machine.source_digests()
    key = f"gsbn {gsbn.__version__}, Sources: gsbn/ `{digest['gsbn']}`, kernels/ `{digest['kernels']}`"
    assert stamps(text) == {key: [f"rows {today}", f"compare {today}"], "not measured": ["later"]}
    monkeypatch.setattr(machine, "source_digests", lambda: digest | {"gsbn": "0123"})
    tool.publish_text("new", tmp_path, "compare")
    assert len(stamps(page.read_text())) == 3, "other sources than the first table's"


def test_other_ways_to_float32_have_a_table_of_times_and_errors() -> None:
    report = report_of_a_gpu()
    assert "Other ways" not in VIEW.markdown(report), "nobody timed them"
    case = bench.Case(1024, 8192, 8192)
    m = median_interval([1.73e-3] * 9)
    found = (
        bench.Result(case, "jax-tf32x3", {"time": m}, {"error": 9.6e-6}),
        bench.Result(case, "triton-bf16x6", failure="triton is not installed"),
    )
    report = dataclasses.replace(report, results=(*report.results, *found))
    table = VIEW.markdown(report).partition("Other ways to float32, ms and error against float64:")[2].split("\n\n")[1]
    assert table.splitlines()[0] == "| B, I, O | **gsbn** | PyTorch eager | XLA TF32 X3 |"
    (line,) = table.splitlines()[2:]
    assert line.startswith("| 1024, 8192, 8192 | **") and line.endswith(", 1.0e-7 | 1.73, 9.6e-6 |")


def test_products_alone_have_a_table_of_times_and_errors() -> None:
    report, case = report_of_a_gpu(), bench.Case(1024, 8192, 8192)
    times = {
        "gsbn-matmul": (1e-3, 3e-7),
        "gemm-torch": (3e-3, 1e-6),
        "gemm-lt": (4e-3, 1e-6),
        "gemm-jax-tf32x3": (2e-3, 9e-6),
    }
    found = tuple(
        bench.Result(case, name, {"time": median_interval([t] * 9)}, {"error": error})
        for name, (t, error) in times.items()
    )
    table = VIEW.markdown(dataclasses.replace(report, results=found)).split("\n\n")[0].splitlines()
    assert "Other ways" not in VIEW.markdown(dataclasses.replace(report, results=found))
    assert table[0] == "| M, K, N | dtype | cuBLAS | XLA TF32 X3 | **gsbn.matmul** | × cuBLAS | × XLA |"
    assert table[2].endswith("| 3.00, 1.0e-6 | 2.00, 9.0e-6 | **1.00, 3.0e-7** | 3.00 | 2.00 |")


def test_the_table_of_the_readme_is_of_several_reports(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    page, readme = tmp_path / "docs" / "results.md", tmp_path / "README.md"
    page.write_text(MARKED.replace("rows", "kernelbench") + MARKED.replace("rows", "many"))
    marked = MARKED.replace("rows", "brief")
    readme.write_text(marked)
    publish(report_of_a_gpu(), tmp_path, "kernelbench")
    assert readme.read_text() == marked, "one of its reports is not there yet"
    assert readme in publish(report_of_a_gpu("many"), tmp_path, "many")
    text = readme.read_text()
    assert text.startswith("before\n<!-- results:brief -->\n| layer | B, I, O |") and text.endswith("-->\nafter\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]
    assert [row[0] for row in rows] == ["KernelBench 33"] * 2 + ["KernelBench 39"] * 2 + ["tall", "small"]
    for row in rows:
        assert 1.45 < float(row[6]) < 1.55 and 1.2 < float(row[7]) < 1.3 and row[8:] == ["1.0e-7"] * 2
    assert text.count("NVIDIA H200") == 1 and "Measured 2" in text, "the same day and machine"
    old = json.loads((saved := tmp_path / "docs" / "results" / "many.json").read_text()) | {"date": "2020-01-02T03"}
    saved.write_text(json.dumps(old))
    assert tool.publish_brief(tmp_path) == [readme]
    assert "tall: 2020-01-02, NVIDIA H200" in readme.read_text()
    readme.write_text("nothing\n")
    assert tool.publish_brief(tmp_path) == [] and readme.read_text() == "nothing\n"


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = report_of_a_gpu()
    report.save_json(tmp_path / "r.json")
    again = bench.Report.load(tmp_path / "r.json")
    assert VIEW.markdown(again) == VIEW.markdown(report)
    assert (again.date, again.environment, again.settings) == (report.date, report.environment, report.settings)
    assert [r.failure for r in again.results] == [r.failure for r in report.results]
    (tmp_path / "old.json").write_text('{"schema": 1}')
    with pytest.raises(ValueError, match="schema 3, got 1"):
        bench.Report.load(tmp_path / "old.json")


@pytest.mark.parametrize("preset", ["kernelbench", "sweep"])
def test_the_plot_shows_the_bars_and_the_roofline(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import colors, image

    draw(report_of_a_gpu(preset), VIEW, tmp_path / "plot.png")
    pixels = image.imread(tmp_path / "plot.png")[..., :3]
    assert pixels.shape[0] >= 500
    assert pixels.shape[1] >= 1500
    bars, roof = pixels[:, : pixels.shape[1] * 3 // 5], pixels[:, pixels.shape[1] * 2 // 3 :]

    def count(part: np.ndarray, colour: str) -> int:
        return int((np.abs(part - np.array(colors.to_rgb(colour))).max(-1) < 0.02).sum())

    for name in ("gemm", "pytorch", "compile", "jax", "gsbn"):
        assert count(bars, SERIES[name][1]) > 500, name
    for kind in ("float32", "tf32", "float16"):
        assert count(roof, KIND_COLOURS[kind]) > 50, kind
    assert 0.5 < (pixels > 0.98).all(-1).mean() < 0.98


def test_the_digest_sees_every_source_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench").mkdir()
    monkeypatch.setattr(gsbn, "__file__", str(tmp_path / "__init__.py"))
    seen = set()
    for name, text in (
        ("__init__", ""),
        ("bench/case", "a"),
        ("bench/case", "b"),
        ("bench/__init__", ""),
        ("case", ""),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        seen.add(machine.source_digests()["gsbn"])
    assert len(seen) == 5
    (tmp_path / "case.py").rename(tmp_path / "bench" / "moved.py")
    assert machine.source_digests()["gsbn"] not in seen
    assert machine.source_digests() == machine.source_digests()


PUBLISHED = ROOT / "docs" / "results"
REPORTS = ("kernelbench", "step", "many", "many_step", "few", "few_step", "inference", "models")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the source tree")
def test_the_tables_are_those_of_the_published_reports() -> None:
    pages = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results.md").read_text()
    reports = tool.reports_of(ROOT, REPORTS)
    assert set(reports) == set(REPORTS)
    assert f"<!-- results:brief -->\n{tool.brief(reports)}\n<!-- /results:brief -->" in pages[0]
    for name, report in reports.items():
        assert f"<!-- results:{name} -->\n{tool.VIEWS[report.bench].markdown(report)}\n" in pages[1], name
    assert "results:" not in pages[0].replace("results:brief", ""), "the README has one table"


@pytest.mark.skipif(not PUBLISHED.is_dir() or not shutil.which("make"), reason="needs the source tree and make")
def test_make_bench_asks_for_what_there_is() -> None:
    """Every table that it writes has its place in the page, and every candidate is one."""
    told = subprocess.run(["make", "-n", "bench", "VENV="], cwd=ROOT, capture_output=True, text=True)
    tables = [line for line in told.stdout.replace("\\\n", "").splitlines() if "--gpus 0" in line]
    assert len(tables) == 11
    for line in tables:
        (name,) = re.findall(r"--json docs/results/(\w+).json", line)
        assert tool.split(ROOT / "docs" / "results.md", name)
        wanted = {each for text in re.findall(r"--only (\S+)", line) for each in text.split(",")}
        assert wanted <= set(NAMES)
        if name == "kernelbench":
            assert {*EMULATED, "compile", "jax"} <= wanted
        if name == "autotune":
            assert set(COMPILED) - {"max-autotune"} <= wanted  # its kernels are autotune's
    texts = re.findall(r"publish.py --text (\w+) < build/(\w+).txt", told.stdout)
    assert [name for name, _ in texts] == [name for _, name in texts] == ["evaluator", "compare", "barlow_twins"]
    assert all(tool.split(ROOT / "docs" / "results.md", name) for name, _ in texts)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the source tree")
def test_the_published_results_are_of_one_version() -> None:
    """Tells, without failing, which tables were measured on other sources than the others."""
    if len(found := stamps((PUBLISHED.parent / "results.md").read_text())) > 1:
        said = "; ".join(f"{', '.join(names)} ({sources})" for sources, names in found.items())
        warnings.warn(f"the tables are not of one version: {said}: run `make bench`", stacklevel=1)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the source tree")
@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/guide/groups.md"])
def test_prose_quotes_no_time_that_a_table_has(page: str) -> None:
    """`make bench` rewrites what is between markers, and nothing else."""
    text = re.sub(r"<!-- results:(\w+) -->.*?<!-- /results:\1 -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    assert re.findall(r".*\d ?(?:ms|µs|us)\b.*", text) == []


def test_the_published_results_describe_these_sources() -> None:
    """Warn, without failing, if the README's table is older than the code: run `make bench` on a GPU."""
    saved = ROOT / "docs" / "results" / "kernelbench.json"
    if not saved.exists():
        pytest.skip("nothing published yet")
    if changed := changed_since(saved):
        warnings.warn(f"the README's results are older than {' and '.join(changed)}: run `make bench`", stacklevel=1)
