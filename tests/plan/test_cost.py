"""The cost model: the planner chooses what was measured fastest, or loses little."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import pytest

from gsbn._cuda.kernels import _bandwidth
from gsbn._plan import Device, Matmul, Matrix
from gsbn._plan.backward_products import choose_product
from gsbn._plan.h100 import rates_on
from gsbn._plan.h200 import H200 as RATES
from tests.plan.fits import A100, H200, OLD_NVRTC, SHARES, contiguous, is_recompute
from tests.plan.seen import backward_plan, plan
from tests.support import ROOT


def test_a_share_of_the_gpu() -> None:
    """Each SM that another call holds may break a pair; without pairs there are no clusters."""
    assert (H200.at_most(None), H200.at_most(132), H200.at_most(10**30)) == (H200,) * 3
    assert [H200.at_most(n).clusters(2) for n in (131, 120, 67, 66, 2)] == [65, 54, 1, 0, 0]
    assert [H200.at_most(n).clusters(4) for n in (131, 120, 99)] == [32, 21, 0]
    assert Device((9, 0), 132, eights=14).at_most(130).clusters(8) == 12
    assert Device((9, 0), 132, pairs=60).at_most(130).clusters(2) == 58
    assert [H200.at_most(120).clusters(size) for size in (1, 2, 4, 8, 16)] == [120, 54, 21, 4, 0]
    assert H200.clusters(16) == 8 and Device((9, 0), 132, sixteens=7).at_most(131).clusters(16) == 6
    assert [Device((9, 0), 20, eights=1).clusters(size) for size in (4, 8, 16)] == [5, 1, 0]
    assert [Device((9, 0), 15, pairs=0).clusters(size) for size in (4, 8)] == [0, 0]
    for device in SHARES[:3]:
        one = plan(contiguous(16384, 4096, 4096, device=device), training=True, gemm="sm90").one
        assert one is not None and (one.cluster == 1 or device.clusters(2) > 0)


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "options", "want"),
    [
        ((1024, 8192, 8192), "bfloat16", H200, {}, "sm90"),
        ((16384, 4096, 4096), "float16", H200, {}, "sm90"),
        ((16384, 4096, 4096), "float32", H200, {"precision": "high"}, "sm90"),
        ((16384, 4096, 4096), "float32", H200, {}, "sm90"),
        ((1000, 1000, 777), "float32", H200, {}, "sm90"),  # limbs have their own pitch
        ((16384, 4096, 4096), "float32", A100, {}, "cublas"),
        ((1000, 1001, 777), "float32", H200, {}, "sm90"),  # its bare GEMM, and the portable passes
        ((1000, 4096, 32), "float32", H200, {}, "cublas"),  # IEEE is more accurate
        ((1000000, 32, 32), "float32", H200, {}, "tiled"),  # 148 against 241 us: skinny, in IEEE arithmetic
        ((1000000, 32, 32), "bfloat16", H200, {}, "tiled"),  # 59 against 122 us
        ((1000000, 32, 32), "bfloat16", A100, {}, "cublas"),
        ((100000, 64, 64), "float32", H200, {}, "tiled"),  # 49 against 62 us: skinny, by limbs
        ((16384, 4096, 4096), "float64", H200, {}, "cublas"),
        ((1024, 8192, 8191), "bfloat16", H200, {}, "sm90"),  # with copies whose rows start on 16 bytes
        ((1024, 8191, 8192), "bfloat16", H200, {}, "sm90"),
        ((1024, 8192, 8192), "bfloat16", A100, {}, "cublas"),
        ((1024, 8192, 8192), "bfloat16", OLD_NVRTC, {}, "cublas"),
        ((128, 8192, 8192), "bfloat16", H200, {}, "sm90"),  # 39 against 50 us: cluster_batch
        ((512, 1024, 16384), "bfloat16", H200._replace(eights=15), {}, "cublas"),  # 44 against 52 us
        ((65536, 128, 64), "bfloat16", H200, {}, "sm90"),  # 22 against 36 us: clusters of one CTA
        ((32, 32, 16384), "bfloat16", H200, {}, "cublas"),  # 15 against 49 us: cuBLAS splits k
    ],
)
def test_auto_chooses_what_was_measured_fastest(
    shape: tuple[int, int, int], dtype: str, device: Device, options: dict[str, Any], want: str
) -> None:
    assert plan(contiguous(*shape, dtype, device), training=True, **options).gemm == want


@pytest.mark.parametrize(
    ("shape", "options", "dx", "dw"),
    [  # us of cuBLAS and of forward_sm90, for dx, and for dw
        ((1024, 8192, 8192), {}, "sm90", "sm90"),  # 174 and 174, 199 and 190
        ((16384, 4096, 4096), {}, "sm90", "sm90"),  # 861 and 833, 818 and 811
        ((3072, 5120, 5120), {}, "cublas", "cublas"),  # 221 and 231, 236 and 256: a wave is half empty
        ((4096, 1024, 1024), {}, "cublas", "cublas"),  # 20.0 and 20.8: one wave; 17.7 and 19.2: cuBLAS splits k
        ((32768, 1024, 1024), {}, "sm90", "cublas"),  # 122 and 121; 99 and 142
        ((128, 1024, 512), {}, "sm90", "sm90"),  # 6.5 and 7.1, 6.8 and 7.6: the host takes 8 to call cuBLAS
        ((256, 2048, 2048), {}, "cublas", "sm90"),  # 10.6 and 13.1; with the preceding passes 11.3 and 11.1
        ((128, 1024, 512), {"gemm": "sm90"}, "sm90", "sm90"),
        ((128, 1020, 512), {"gemm": "sm90"}, "sm90", "sm90"),  # rows of dx do not start on 16 bytes: it is copied
        ((1024, 8192, 8192), {"gemm": "cublas"}, "cublas", "cublas"),
        ((1024, 8192, 8192), {"gemm": "tiled"}, "tiled", "tiled"),
    ],
)
def test_a_backward_chooses_what_was_measured_fastest(
    shape: tuple[int, int, int], options: dict[str, Any], dx: str, dw: str
) -> None:
    B, I, O = shape
    decided = backward_plan(contiguous(B, O, I, "bfloat16"), training=True, needs=("x", "weight"), **options)
    assert decided.x is not None and decided.weight is not None
    assert (decided.x.gemm, decided.weight.gemm) == (dx, dw)


@pytest.mark.parametrize(
    ("shape", "want"),
    [  # us of a backward in a graph, with two products and with one launch for both
        ((8, 4096, 11008), True),  # 66.8 and 57.1
        ((128, 8192, 8192), True),  # 93.5 and 91.7
        ((64, 16384, 1024), True),  # 32.6 and 23.5
        ((32, 1024, 1024), True),  # 13.1 and 7.3
        ((100, 2056, 2000), True),  # 21.5 and 17.1
        ((128, 1024, 512), False),  # 9.1 and 11.4
        ((64, 256, 8192), False),  # 16.8 and 19.5
        ((120, 512, 30000), False),  # 45.0 and 64.0
        ((129, 2048, 2048), False),  # more rows than it takes
    ],
)
def test_one_launch_for_both_products_of_few_rows(shape: tuple[int, int, int], want: bool) -> None:
    B, I, O = shape
    for dtype, needs in (("bfloat16", ("x", "weight")), ("float16", ("x", "weight", "gamma"))):
        decided = backward_plan(contiguous(B, O, I, dtype), training=True, needs=needs)
        assert (decided.dual is not None) == want
    assert backward_plan(contiguous(B, O, I, "bfloat16"), training=True, needs=("x",)).dual is None
    assert backward_plan(contiguous(B, O, I, "float32"), training=True, needs=("x", "weight")).dual is None


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "want"),
    [  # us of recompute, and of tiles with a deferred epilogue
        ((524288, 128, 128), "bfloat16", {}, True),  # 110 and 164
        ((802816, 128, 128), "bfloat16", {}, True),  # 166 and 245
        ((802816, 128, 128), "float32", {"precision": "high"}, True),  # 316 and 445
        ((131071, 96, 200), "float16", {}, True),  # 53 and 87 in bfloat16
        ((50000, 64, 1024), "bfloat16", {"saved": True}, True),
        ((50000, 64, 1024), "float32", {}, True),  # 199 and 391
        ((65536, 256, 512), "bfloat16", {}, True),  # 65 and 84
        ((65536, 256, 512), "bfloat16", {"training": False}, False),
        ((65536, 256, 512), "bfloat16", {"ranks": "inside"}, False),
        ((380000, 768, 512), "bfloat16", {}, False),  # 851 and 707, in a row of calls
        ((380000, 768, 512), "bfloat16", {"saved": True}, False),  # 911 and 840
        ((380000, 768, 512), "float32", {"precision": "high"}, False),  # 1686 and 1466
        ((380000, 768, 512), "float32", {}, False),  # 3443 and 2813
        ((65536, 1024, 1024), "bfloat16", {}, False),
        ((16384, 4096, 4096), "bfloat16", {}, False),
        ((1024, 8192, 8192), "bfloat16", {}, False),
    ],
)
def test_recompute_is_chosen_where_it_was_measured_faster(
    shape: tuple[int, int, int], dtype: str, options: dict[str, Any], want: bool
) -> None:
    m, k, n = shape
    one = plan(contiguous(m, n, k, dtype), gemm="sm90", **{"training": True, **options}).one
    assert one is not None and is_recompute(one) == want


@pytest.mark.parametrize(
    ("shape", "recomputes", "cluster"),
    [  # us on an H100 of a bfloat16 forward that saves: recompute and deferred tiles, each of the faster cluster
        ((12544, 256, 512), True, 2),  # 23.6 and 26.4
        ((20000, 384, 512), True, 2),  # 39.4 and 50.6
        ((10000, 512, 1024), True, 2),  # 44.7 and 50.4
        ((24000, 256, 768), True, 2),  # 54 and 78
        ((30000, 128, 512), True, 2),  # 42.6 and 57.5
        ((9000, 320, 640), True, 2),  # 26.5 and 31.4
        ((40000, 256, 256), True, 2),  # 35.2 and 46.5
        ((14000, 1024, 512), False, 2),  # 48.7 and 45.1; 49.3 without pairs
        ((8192, 512, 512), False, 2),  # 18.1 and 18.1; 19.3 without pairs
        ((16384, 256, 256), False, 2),  # 17.5 and 17.7; 18.4 without pairs
    ],
)
def test_slower_memory_makes_g_twice_more_often(shape: tuple[int, int, int], recomputes: bool, cluster: int) -> None:
    """An H100's memory has 0.68 of an H200's bandwidth."""
    m, k, n = shape
    one = plan(contiguous(m, n, k, "bfloat16", device=H200._replace(bandwidth=0.68)), training=True, saved=True).one
    assert one is not None and is_recompute(one) == recomputes and one.cluster == cluster
    assert rates_on(H200, "training") is RATES
    assert rates_on(H200._replace(bandwidth=0.5), "training").copy_rate == RATES.copy_rate / 2


def test_the_bandwidth_of_memory() -> None:
    """In kHz and bits: an H200, an H100, an A100; one that tells nothing."""
    for clock, width, want in [(3_201_000, 6144, 1.0), (2_619_000, 5120, 0.68), (1_593_000, 5120, 0.41)]:
        assert _bandwidth({"MemoryClockRate": clock, "GlobalMemoryBusWidth": width}) == want
    assert _bandwidth({}) == 1.0


def sweep() -> Any:
    """The tool that measures the planner's choices."""
    spec = importlib.util.spec_from_file_location("sweep", ROOT / "tools" / "sweep.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def judged(file: str, bandwidth: float = 1.0) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The problems of a sweep, and what the planner loses on each."""
    lines = sweep().judged(ROOT / "docs" / "results" / file, bandwidth)
    return lines, np.array([line["regret"] for line in lines])


def test_slower_memory_counts_among_tiles_of_inference() -> None:
    """docs/results/sweep_h100.jsonl has 199 random shapes of multiples of 8, in bfloat16."""
    lines, regret = judged("sweep_h100.jsonl", 0.68)
    _, as_on_h200 = judged("sweep_h100.jsonl")
    assert len(lines) == 199 and regret.mean() < 0.025 < 0.05 < as_on_h200.mean()
    assert (regret <= 0.05).mean() > 0.82 and (regret <= 0.1).mean() > 0.92


def results(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "docs" / "results" / file).read_text().splitlines()]


def test_passes_of_a_backward_choose_what_was_fast() -> None:
    """docs/results/training_h200.jsonl has bfloat16 backwards of 213 shapes with both ways of dividing dy."""
    regret = []
    for line in results("training_h200.jsonl"):
        B, I, O = line["shape"]
        passes = backward_plan(contiguous(B, O, I, "bfloat16"), training=True, needs=("x", "weight"))
        if us := line["backward"]:
            sums = passes.sums_launch
            assert sums is not None
            cluster = dict(sums.kernel.defines).get("CLUSTER", "1")
            regret.append(us[cluster if passes.fused else "two launches"] / min(us.values()) - 1)
    assert len(regret) > 200 and np.mean(regret) < 0.01 and max(regret) < 0.12


def test_products_of_a_backward_choose_what_was_fast() -> None:
    """docs/results/products_h100.jsonl has dx and dw of 290 shapes of multiples of 8, in bfloat16."""
    device = Device((9, 0), 132, pairs=66, fours=30, eights=15, sixteens=7, bandwidth=0.68)
    name_of, of_cublas, regret = sweep().name_of, [], []
    for line in results("products_h100.jsonl"):
        B, I, O = line["shape"]
        m, n, k = (B, I, O) if line["product"] == "dx" else (O, I, B)
        a = Matrix((k, 1) if line["product"] == "dx" else (1, m), True)
        p = Matmul(m, n, k, "bfloat16", device, a, Matrix((1, n), True), Matrix((n, 1), True))
        one, us = choose_product(line["product"], p, "highest", "auto").one, line["us"]
        taken = us["cublas" if one is None else name_of(one, "gemm")]
        of_cublas.append(taken / us["cublas"])
        regret.append(taken / min(us.values()) - 1)
    assert len(regret) == 580 and np.mean(regret) < 0.06
    assert np.exp(np.log(of_cublas).mean()) < 0.945 and (np.array(of_cublas) > 1.05).mean() < 0.065


def test_regret_is_small_on_the_measured_sweep() -> None:
    """docs/results/sweep.jsonl has the times of all choices on an H200: 615 shapes, three dtypes, both modes."""
    lines, regret = judged("sweep.jsonl")
    assert len(lines) == 1765
    assert (regret <= 0.05).mean() > 0.91 and regret.mean() < 0.015
    assert (regret <= 0.2).mean() > 0.985
    slow = [(line["dtype"], line["shape"][1:]) for line in lines if line["regret"] > 0.52]
    assert slow == [("bfloat16", [8, 80])]  # rows of 16 bytes in mode "recompute"
    assert len([line for line in lines if line["of peer"] > 1]) <= 7
    # These are TF32 with long sums: PyTorch's call makes cuBLAS choose a better kernel.
    slower = [line for line in lines if line["of peer"] > 1.1]
    assert all(line["dtype"] == "tf32" and line["shape"][1] > 16000 for line in slower)
