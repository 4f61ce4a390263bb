"""gsbn.bench: statistics on synthetic samples, the bound, a run from end to end, what becomes of it on paper."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import random
import signal
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import _device, bench, reference
from gsbn.bench import bounds, layers, libraries, machine
from gsbn.bench import layers_page as publish
from gsbn.bench.candidate import Candidate
from gsbn.bench.clock import Clock, GpuClock, median_interval
from gsbn.bench.layers import SCHEMA
from gsbn.bench.page import SERIES, changed_since
from gsbn.bench.turns import balanced_order, settle

ROOT = Path(__file__).resolve().parent.parent
QUICK = bench.Settings(rounds=7, seconds=0.1, settle=0, calls=1)
TINY = bench.Case(24, 20, 12)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "gpu_obstacle", lambda: "hidden by the test")


# ---- statistics ----------------------------------------------------------------------------------------------------


def test_median_interval_takes_the_order_statistics_that_the_binomial_asks_for() -> None:
    samples = list(range(1, 41))
    random.Random(0).shuffle(samples)
    m = median_interval(samples)
    assert (m.median, m.low, m.high, m.samples) == (20.5, 14, 27, 40)  # the tables' ranks for n = 40 at 95 %
    assert 0.95 <= m.confidence < 0.97
    assert median_interval([3.0, 1.0, 2.0]).confidence == pytest.approx(0.75)  # 1 - 2 / 2³, and says so
    assert median_interval([7.0]).confidence == 0
    with pytest.raises(ValueError, match="samples"):
        median_interval([])


def test_median_interval_holds_the_median_of_a_skewed_distribution_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for sample in rng.exponential(size=(2000, 25)) ** 3:  # heavy tail, as timings have
        m = median_interval(sample.tolist())
        held += m.low <= np.log(2) ** 3 <= m.high
    assert held / 2000 >= m.confidence - 4 * (0.05 * 0.95 / 2000) ** 0.5


@pytest.mark.parametrize("n", range(1, 10))
def test_everybody_follows_everybody_equally_often(n: int) -> None:
    rounds = [balanced_order(n, turn) for turn in range(2 * n)]
    for places in (rounds, zip(*rounds, strict=True)):  # every round is a permutation; every place is taken by all
        for place in places:
            assert {place.count(i) for i in range(n)} <= {1, 2}
    pairs = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert len(pairs) == n * (n - 1)
    assert set(pairs.values()) <= {2}


class Card:
    """A clock that advances by what is run on it, and a card whose calls slow down as it warms up, with noise."""

    def __init__(self, drift: float, seconds: float, noise: float = 0.0) -> None:
        self.time, self.drift, self.seconds, self.noise = 0.0, drift, seconds, noise
        self.random = random.Random(0)

    def now(self) -> float:
        return self.time

    def work(self) -> float:
        self.time += 0.02
        slowed = 1 + self.drift * (1 - math.exp(-self.time / self.seconds)) if self.seconds else 1.0
        return slowed * (1 + self.random.gauss(0, self.noise))

    def settles(self, longest: float) -> bool:
        return settle(self.work, longest, now=self.now)


def test_settling_waits_for_a_card_that_warms_up() -> None:
    steady, warming, noisy = Card(0, 0), Card(0.05, 0.5), Card(0, 0, noise=0.003)
    assert steady.settles(10) and steady.time == pytest.approx(3 * 0.25, abs=0.1), "three windows"
    assert warming.settles(10) and 1 < warming.time < 3
    assert 0.05 * math.exp(-warming.time / 0.5) < 0.01, "what drift is left is a few times the tolerance at most"
    assert noisy.settles(10), "the median of a window forgives a single call its noise"


def test_settling_gives_up() -> None:
    drifting, wild = Card(1.0, 20.0), Card(0, 0, noise=0.1)
    assert not drifting.settles(2) and 2 <= drifting.time < 2.1
    assert not wild.settles(2) and 2 <= wild.time < 2.1
    idle = Card(0, 0)
    assert not idle.settles(0) and idle.time == 0, "nothing is run where nothing is asked for"
    brief = Card(0, 0)
    assert not brief.settles(0.05) and brief.time < 0.1, "not even a window is finished"


class ScriptedClock(Clock):
    """Seconds from a script; remembers who ran when."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def trial(self, candidate: Any, calls: int) -> tuple[Any, str]:
        seconds = {"gsbn": 2e-3, "pytorch": 4e-3, "gemm-numpy": 1e-3}.get(candidate.name, 1e-2)
        noise = random.Random(candidate.name)

        def run() -> float:
            self.order.append(candidate.name)
            return seconds * (1 + (noise.random() - 0.5) / 50)

        return run, "wall"

    def host(self, candidate: Any) -> float:
        return 40e-6


@pytest.mark.usefixtures("cpu")
def test_a_report_is_the_arithmetic_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    clock = ScriptedClock()
    monkeypatch.setattr(layers, "Clock", lambda: clock)
    settings = dataclasses.replace(QUICK, rounds=40, seconds=60, settle=0.05)
    report = bench.run([TINY], ["gsbn", "pytorch", "gemm-numpy"], settings)
    assert {r.device.samples for r in report.results if r.device} == {40}, "settling does not count"
    assert len(clock.order) > 3 * 60
    rows = {row["candidate"]: row for row in report.rows()}
    assert rows["gsbn"]["time_us"] == pytest.approx(2000, rel=0.01)
    assert rows["gsbn"]["time_low_us"] <= rows["gsbn"]["time_us"] <= rows["gsbn"]["time_high_us"]
    assert rows["gsbn"]["host_us"] == pytest.approx(40)
    assert rows["gsbn"]["times pytorch"] == pytest.approx(2, rel=0.02)
    assert rows["gsbn"]["times bare gemm"] == pytest.approx(0.5, rel=0.02)
    assert rows["gsbn"]["tflops"] == pytest.approx(2 * 24 * 20 * 12 / 2e-3 / 1e12, rel=0.01)
    assert rows["gsbn"]["floor_us"] == pytest.approx(report.rates.floor(TINY) * 1e6)
    rounds = [tuple(clock.order[i - 3 : i or None]) for i in range(-39 * 3, 1, 3)]
    assert {tuple(sorted(order)) for order in rounds} == {("gemm-numpy", "gsbn", "pytorch")}
    assert len(set(rounds)) == 6, "all orders of three"


def test_a_queue_that_ran_dry_does_not_count() -> None:
    """Without a GPU: a clock whose device comes to the trial too early until it is kept busy by four flushes."""

    class Event:
        @property
        def done(self) -> bool:
            return len(flushes) < 4

        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            flushes.clear()

    flushes: list[int] = []
    tries: list[int] = []

    def elapsed(start: Event, stop: Event) -> float:
        tries.append(1)
        return 6.0  # ms

    clock = GpuClock.__new__(GpuClock)
    clock.graph, clock.stream = False, None
    clock.xp = SimpleNamespace(cuda=SimpleNamespace(Event=Event, get_elapsed_time=elapsed))
    data = SimpleNamespace(memset_async=lambda value, size, stream: flushes.append(value))
    clock._scratch = SimpleNamespace(data=data, nbytes=1)
    candidate = Candidate("gsbn", "cupy", lambda: None, dict)
    trial, method = clock.trial(candidate, calls=3)
    assert method == "queue"
    assert trial() == pytest.approx(2e-3)
    assert len(tries) == 3, "1 and 2 flushes were too few"
    assert trial() == pytest.approx(2e-3)
    assert len(tries) == 4, "and 4 are remembered"
    clock.MAX_FLUSHES = 2
    with pytest.raises(RuntimeError, match="queue full"):
        clock.trial(candidate, calls=3)[0]()


def test_the_floor_is_the_larger_of_arithmetic_and_traffic() -> None:
    rates = bench.Rates(copy=4e12, matrix={"bfloat16": 800e12})
    large, thin = bench.Case(4096, 4096, 4096, "bfloat16"), bench.Case(4096, 8, 8, "bfloat16")
    assert rates.floor(large) == large.flops / 800e12
    assert rates.floor(thin) == thin.least_bytes / 4e12
    assert thin.least_bytes == 2 * (4096 * 8 + 8 * 8 + 4096 * 8 + 8 * 8)


def test_presets_and_cases() -> None:
    assert (1024, 8192, 8192) in bench.PRESETS["kernelbench"]
    assert (16384, 4096, 4096) in bench.PRESETS["kernelbench"]
    for axis in range(3):
        assert {1023, 1024, 1025} <= {shape[axis] for shape in bench.PRESETS["sweep"]}
    chosen = bench.cases([(4, 5, 6)], ["tf32", "bfloat16"], [True, False])
    assert len(chosen) == 4
    assert (chosen[0].dtype, chosen[0].precision, chosen[0].kind) == ("float32", "high", "tf32")
    wrong: Any
    for wrong in ({"shapes": "nope"}, {"dtypes": ["f4"]}, {"directions": ["foo"]}):
        with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: expected one of"):
            bench.cases(**wrong)
    (one,) = bench.cases([(4, 5, 6)], ["float16"], activation="relu", scale=False)
    assert one.title == "(4, 5, 6) float16 training, relu, no scale"
    assert one.least_bytes == bench.Case(4, 5, 6, "float16").least_bytes - 6 * 2


# ---- truth and bound -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("activation", "scale"), [(None, True), ("relu", False)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", bounds.FAMILIES)
def test_the_truth_is_the_reference(family: str, training: bool, activation: str | None, scale: bool) -> None:
    o = bounds.make_operands(np, 33, 40, 21, "float32", family, with_scale=scale)
    assert (o.scale is not None) == scale
    got = bounds.expected(np, o, "highest", training, activation=activation)
    statistics = {"running_mean": o.running_mean, "running_var": o.running_var}
    want = reference.forward(o.x, o.weight, o.scale, **o.affine, **statistics, training=training, activation=activation)
    for name in ("y", "running_mean", "running_var") if training else ("y",):
        np.testing.assert_allclose(got[name].value, getattr(want, name), rtol=1e-9, atol=1e-9)


def test_the_bound_admits_float32_and_refuses_tf32() -> None:
    o = bounds.make_operands(np, 257, 384, 131, "float32")
    truth = bounds.expected(np, o, "highest", True)["g"]
    assert truth.judge(o.x @ o.weight.T, np).passed

    def tf32(a: np.ndarray) -> np.ndarray:
        return ((a.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)

    rounded = tf32(o.x) @ tf32(o.weight).T
    assert not truth.judge(rounded, np).passed
    assert bounds.expected(np, o, "high", True)["g"].judge(rounded, np).passed


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 1.0])
def test_one_wrong_element_is_seen(spoil: float) -> None:
    o = bounds.make_operands(np, 16, 8, 4, "float16")
    truth = bounds.expected(np, o, "highest", True)["y"]
    y = truth.value.astype(np.float16)
    assert truth.judge(y, np).passed
    y[3, 2] += np.float16(spoil)
    assert not truth.judge(y, np).passed


@pytest.mark.parametrize(("activation", "scale"), [(None, True), ("relu", True), ("relu", False)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", bounds.FAMILIES)
def test_the_true_gradients_are_the_reference(family: str, training: bool, activation: str | None, scale: bool) -> None:
    """As closely as float64 agrees with float64: to 1e-9 of the largest, and within the bound for float64 operands."""
    o = bounds.make_operands(np, 33, 40, 21, "float64", family, with_scale=scale)
    dy = bounds.draw_dy(np, o)
    same = {**o.affine, "running_mean": o.running_mean, "running_var": o.running_var, "training": training}
    y = reference.forward(o.x, o.weight, o.scale, **same, activation=activation).y
    got = bounds.expected_gradients(np, o, dy, "highest", training, activation, y)
    want = reference.backward(dy, o.x, o.weight, o.scale, **same, activation=activation)._asdict()
    assert set(want) - set(got) == (set() if scale else {"scale"})
    for name, gradient in want.items():
        if name not in got:
            continue
        assert got[name].judge(gradient, np).passed, name
        if family == "normal":
            np.testing.assert_allclose(
                gradient, got[name].value.astype(float), rtol=0, atol=1e-9 * np.abs(gradient).max()
            )


@pytest.mark.parametrize("field", bounds.GRADIENTS)
def test_one_wrong_gradient_is_seen(field: str) -> None:
    o = bounds.make_operands(np, 64, 48, 20, "float32")
    dy = bounds.draw_dy(np, o)
    truth = bounds.expected_gradients(np, o, dy, "highest", True)[field]
    gradient = truth.value.astype(np.float32)
    assert truth.judge(gradient, np).passed
    gradient.flat[7] = gradient.flat[7] * np.float32(1.01) + np.float32(1e-3)
    assert not truth.judge(gradient, np).passed


def test_gradients_of_other_signs_than_ys_are_seen() -> None:
    """Those of one y do not pass for those of another that differs in one sign: a whole element of dy is missing."""
    o = bounds.make_operands(np, 64, 48, 20, "float32")
    dy = bounds.draw_dy(np, o)
    y = bounds.expected(np, o, "highest", True, activation="relu")["y"].value.astype(np.float32)
    other = y.copy()
    row, column = np.argwhere((y > 0) & (np.abs(dy) > 0.5))[0]
    other[row, column] = 0
    one, another = (bounds.expected_gradients(np, o, dy, "highest", True, "relu", at) for at in (y, other))
    for name in ("x", "weight", "beta"):
        gradient = one[name].value.astype(np.float32)
        assert one[name].judge(gradient, np).passed
        assert not another[name].judge(gradient, np).passed, name


def test_an_error_stands_beside_its_bound_and_beside_zero_it_is_absolute() -> None:
    value, bound, error = np.array([[3.0, 4.0]]), np.array([[0.3, 0.4]]), np.array([[0.03, -0.2]])
    judged = bounds.Expected(value, bound).judge(value + error, np)
    assert judged.relative
    assert (judged.max_error, judged.max_bound, judged.share) == pytest.approx((0.2, 0.4, 0.5))
    assert (judged.norm_error, judged.norm_bound) == pytest.approx((np.hypot(0.03, 0.2) / 5, 0.1))
    assert judged.relative_error == judged.norm_error
    judged = bounds.Expected(value / 100, bound).judge(value / 100 + error, np)  # 0.05 is zero within 0.5
    assert not judged.relative
    assert (judged.norm_error, judged.norm_bound, judged.share) == pytest.approx((np.hypot(0.03, 0.2), 0.5, 0.5))
    assert judged.relative_error == pytest.approx(np.hypot(0.03, 0.2) / 0.05)  # what a peer is held to in a bench
    beyond = bounds.Expected(value * 1e5, bound).judge(np.array([[np.inf, np.inf]], np.float16), np)
    assert (beyond.max_bound, beyond.norm_bound, beyond.share) == (0, 0, 0), "what float16 cannot hold is not judged"


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
    report.save_csv(tmp_path / "r.csv")
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
    with (tmp_path / "r.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["candidate"] for row in rows] == [row["candidate"] for row in saved["results"]]


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("direction", ["backward", "step"])
@pytest.mark.parametrize(("activation", "scale"), [(None, True), ("relu", True), ("relu", False), (None, False)])
def test_a_run_of_gradients_on_the_cpu(direction: str, activation: Any, scale: bool) -> None:
    pytest.importorskip("torch")
    cases = bench.cases([(24, 20, 12)], ["float32", "bfloat16"], [True, False], [direction], activation, scale)
    assert all(case.flops == {"backward": 2, "step": 3}[direction] * TINY.flops for case in cases)
    assert all(direction in case.title for case in cases)
    report = bench.run(cases, ["gsbn", "gsbn-torch", "pytorch", "gemm-numpy"], QUICK)
    for results in report.by_case().values():
        assert {name for name, r in results.items() if r.device} == {"gsbn", "gsbn-torch", "pytorch"}
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
    assert result.device is None
    assert "wrong result: y uses" in result.failure


@pytest.mark.usefixtures("cpu")
def test_a_peer_that_is_missing_or_breaks_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "load", lambda names: {"torch": None, "jax": None})
    results = {r.candidate: r for r in bench.run([TINY], ["gsbn", "pytorch", "jax"], QUICK).results}
    assert results["pytorch"].failure == "torch is not installed"
    assert results["jax"].failure == "jax is not installed"
    assert results["gsbn"].device is not None
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
    samples = [(r.case.batch, r.device.samples) for r in report.results if r.device]
    assert samples[:2] == [(24, 7), (24, 7)] or samples[:2] == [(24, 9), (24, 9)]
    assert samples[2:] == [(32, 3), (32, 3)]


def test_global_precision_is_restored() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision()
    with contextlib.suppress(ZeroDivisionError), libraries.float32_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


# ---- on paper ------------------------------------------------------------------------------------------------------


def report_of_a_gpu(preset: str = "kernelbench") -> bench.Report:
    """A report with figures as a GPU might give them."""
    noise, results = random.Random(0), []
    rates = bench.Rates(4.27e12, {"float32": 263e12, "tf32": 400e12, "bfloat16": 790e12, "float16": 780e12})
    relative = {"gsbn": 1.2, "gemm-torch": 1.1, "gemm-lt": 1.05, "pytorch": 1.8, "compile": 1.5, "jax": 1.6}
    for case in bench.cases(preset):
        for name, times in relative.items():
            seconds = times * (rates.floor(case) + 5e-6)
            m = median_interval([seconds * (1 + noise.gauss(0, 0.01)) for _ in range(20)])
            results.append(bench.Result(case, name, "", "graph", 10, m, m, 1 << 20, 1e-7))
        results.append(bench.Result(case, "autotune", failure="refused"))
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "sms": 132, "memory_gib": 139.8, "l2_mib": 60.0}
    environment = machine.environment() | {"gpus": [gpu], "driver": "580.1", "cuda_runtime": "13.0"}
    return bench.Report(environment, bench.Settings(), rates, tuple(results))


MARKED = "before\n<!-- results:rows -->\nold\n<!-- /results:rows -->\nafter\n"


def test_publish_rewrites_only_what_is_between_the_markers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    pages = tmp_path / "README.md", tmp_path / "docs" / "results.md"
    for page in pages:
        page.write_text("<!-- results:others -->\nkept\n<!-- /results:others -->\n" + MARKED)
    for _ in range(2):  # and again, to the same text
        publish.publish(report_of_a_gpu(), tmp_path, "rows")
    brief, full = (page.read_text() for page in pages)
    for text, columns, ours in ((brief, 7, 5), (full, 12, 7)):
        assert text.startswith(
            "<!-- results:others -->\nkept\n<!-- /results:others -->\nbefore\n<!-- results:rows -->\n| B, I"
        )
        assert text.endswith("<!-- /results:rows -->\nafter\n")
        assert "old" not in text
        rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| 1")]
        assert len(rows) == 12
        assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {columns + 1}
        assert all(1.45 < float(row[ours]) < 1.55 for row in rows), "PyTorch's time over gsbn's, 1.8 / 1.2"
        assert "NVIDIA H200, driver 580.1" in text
    assert "rows.png" not in brief and "(results/rows.png)" in full
    assert changed_since(tmp_path / "docs/results/rows.json") == []
    for name in ("rows.json", "rows.png"):
        assert (tmp_path / "docs" / "results" / name).stat().st_size > 1000


def test_a_cpu_has_no_device_time_and_no_graph() -> None:
    report = report_of_a_gpu()
    assert "Medians of device time" in publish.markdown(report)
    on_cpu = dataclasses.replace(report, environment=report.environment | {"gpus": [], "driver": None})
    assert "Medians of wall-clock time" in publish.markdown(on_cpu)
    assert not {"device", "graph"} & set(publish.markdown(on_cpu).replace(",", " ").split())


def test_publish_without_markers_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(MARKED)
    for name in ("kernelbench", "rows"):
        with pytest.raises(ValueError, match=rf"results.md: expected a file with the lines <!-- results:{name} -->"):
            publish.publish(report_of_a_gpu(), tmp_path, name)
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"] and (tmp_path / "README.md").read_text() == MARKED
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text(MARKED)
    (tmp_path / "README.md").write_text(MARKED.replace("<!-- /results:rows -->", ""))
    with pytest.raises(ValueError, match=r"README.md: expected a file with the lines"):
        publish.publish(report_of_a_gpu(), tmp_path, "rows")
    assert (tmp_path / "docs" / "results.md").read_text() == MARKED


def test_a_table_may_be_of_the_docs_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text(MARKED)
    (tmp_path / "README.md").write_text("nothing\n")
    publish.publish(report_of_a_gpu(), tmp_path, "rows")
    assert (tmp_path / "README.md").read_text() == "nothing\n"
    assert "old" not in (tmp_path / "docs" / "results.md").read_text()


@pytest.mark.parametrize("preset", ["kernelbench", "sweep"])
def test_the_plot_shows_the_bars_and_the_roofline(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import colors, image

    publish.plot(report_of_a_gpu(preset), tmp_path / "plot.png")
    pixels = image.imread(tmp_path / "plot.png")[..., :3]
    assert pixels.shape[0] >= 500
    assert pixels.shape[1] >= 1500
    bars, roof = pixels[:, : pixels.shape[1] * 3 // 5], pixels[:, pixels.shape[1] * 2 // 3 :]

    def count(part: np.ndarray, colour: str) -> int:
        return int((np.abs(part - np.array(colors.to_rgb(colour))).max(-1) < 0.02).sum())

    for name in ("gemm-", "pytorch", "compile", "jax", "gsbn"):
        assert count(bars, SERIES[name][1]) > 500, name
    for kind in ("float32", "tf32", "float16"):
        assert count(roof, publish.KIND_COLOURS[kind]) > 50, kind
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


def test_the_published_results_describe_these_sources() -> None:
    """Tells, without failing, that the README's table is older than the code: run `make bench` on a GPU."""
    saved = ROOT / "docs" / "results" / "kernelbench.json"
    if not saved.exists():
        pytest.skip("nothing published yet")
    if changed := changed_since(saved):
        warnings.warn(f"the README's results are older than {' and '.join(changed)}: run `make bench`", stacklevel=1)


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
            assert row["floor_share"] > 0
            if (
                "PYTEST_XDIST_WORKER" not in os.environ
            ):  # neighbours on the GPU slow the rates that the floor is made of
                assert row["floor_share"] < 1.2


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_each_path_is_timed_as_it_can_be(graph: bool) -> None:
    case = bench.Case(512, 256, 384, "float16")
    names = ["gsbn-cublas", "gsbn-tiled", "gsbn-torch", "pytorch", "gemm-torch", "gemm-lt", "gemm-cupy"]
    report = bench.run([case], names, dataclasses.replace(QUICK, calls=20, graph=graph))
    results = {r.candidate: r for r in report.results}
    assert {r.failure for r in results.values() if r.candidate.startswith(("gsbn", "pytorch"))} == {""}
    assert results["gsbn-tiled"].method == ("graph" if graph else "queue")
    assert results["gsbn-cublas"].method == ("graph" if graph else "queue")
    assert results["pytorch"].method == ("graph" if graph else "queue")
    assert results["gsbn-tiled"].path == "tiled"
    assert results["gsbn-cublas"].path == "cublas"
    assert results["gsbn-cublas"].extra_bytes >= 512 * 384 * 4  # g in float32
    assert results["pytorch"].extra_bytes >= 512 * 384 * 2  # z


@pytest.mark.gpu
def test_the_gemm_alone_and_addmm_are_peers() -> None:
    cases = [bench.Case(300, 136, 520, dtype, "high", training=False) for dtype in ("float16", "bfloat16", "float32")]
    report = bench.run(cases, ["gsbn", "gsbn-gemm", "gemm-torch", "addmm"], QUICK)
    hopper = report.environment["gpus"][0]["capability"] == "9.0"
    for row in report.rows():
        if row["candidate"] != "gsbn-gemm" or hopper:
            assert not row["failure"], row
            assert row["method"] == "graph"
            assert row["times addmm"] > 0
            assert "times gsbn-gemm" not in row, "it is no peer"


@pytest.mark.gpu
def test_warm_up_leaves_nothing_to_compile() -> None:
    steps: list[int] = []
    count = gsbn.warm_up(lambda done, total, name: steps.append(done))
    assert count > 0
    assert steps == list(range(count + 1))
