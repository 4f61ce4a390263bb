"""What calls with `groups` launch, on a fake GPU."""

from __future__ import annotations

from typing import Any

import pytest

import gsbn
from gsbn._cuda import kernels as _kernels
from gsbn._plan import Limits
from gsbn._plan.problem import ghost_pitch
from tests.support import fake_gpu

KNOWN = {(kernel.name, kernel.defines) for kernel in _kernels.all_kernels()}
KNOWS_GHOSTS = {"normalize", "normalize_fused", "scale_stats", "merge_statistics", "backward_sums", "backward_dg",
                "backward_fused"}  # fmt: skip


def knows_ghosts(launch: fake_gpu.Launch) -> bool:
    return ("GHOST", "1") in launch.defines


def call_of(shape: tuple[int, int, int], dtype: str) -> dict[str, Any]:
    (B, I, O), vectors = shape, ("gamma", "beta", "running_mean", "running_var")
    arrays = {"x": fake_gpu.Array((B, I), dtype), "weight": fake_gpu.Array((O, I), dtype)}
    arrays |= {name: fake_gpu.Array((O,), "float32" if dtype != "float64" else dtype) for name in vectors}
    return {**arrays, "num_batches_tracked": fake_gpu.Array((), "int64"), "training": True}


@pytest.mark.parametrize("device", [fake_gpu.HOPPER, fake_gpu.AMPERE], ids=["Hopper", "Ampere"])
def test_variants_exist_and_every_pass_knows_ghosts(device: Any) -> None:
    """In every call on arrays of any layout; the gradients of vectors are then summed, the statistics tracked."""
    seen = set()
    for seed in range(600):
        call = fake_gpu.draw(seed)
        rows = call.arrays["x"].shape[0]
        divisors = [n for n in range(2, rows) if rows % n == 0]
        if not call.options["training"] or not divisors:
            continue
        call.options["groups"] = divisors[seed % len(divisors)]
        with fake_gpu.gpu(device) as (_, log):
            if call.make() is not None:
                continue
        names = [launch.name for launch in log]
        for launch in log:
            assert launch.name == "cuBLAS" or (launch.name, launch.defines) in KNOWN, launch
        if any(map(knows_ghosts, log)):
            assert all(knows_ghosts(launch) == (launch.name in KNOWS_GHOSTS) for launch in log), names
            assert ("track_ghosts" in names) == (call.arrays["running_mean"] is not None)
        vectors = {"bias", "scale", "gamma", "beta"}.intersection(call.needs)
        given = any(call.arrays[name] is not None for name in vectors)
        sums = given and any(name.startswith("backward_") for name in names)
        assert names.count("sum_ghosts") <= sums
        seen |= {launch.name for launch in filter(knows_ghosts, log)}
    assert seen >= {"normalize_fused", "backward_dg", "backward_sums", "backward_fused"}


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "one_by_one"),
    [
        ((16384, 128, 128), 64, "bfloat16", False),
        ((16384, 512, 512), 128, "float32", False),
        ((4096, 1024, 1024), 4, "bfloat16", False),
        ((65536, 256, 512), 2, "bfloat16", True),
        ((262144, 128, 128), 4, "float32", True),
        ((8192, 2048, 2048), 2, "bfloat16", True),
        ((8192, 2048, 2047), 2, "bfloat16", False),  # rows off 16 bytes
    ],
    ids=str,
)
def test_large_ghost_batches_go_one_by_one(
    shape: tuple[int, int, int], groups: int, dtype: str, one_by_one: bool
) -> None:
    call = call_of(shape, dtype)
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        _, saved = gsbn.forward(**call, groups=groups, return_saved=True)
        forwards = len(log)
        gsbn.backward(fake_gpu.Array((shape[0], shape[2]), dtype), saved)
    assert any(map(knows_ghosts, log[:forwards])) is not one_by_one
    assert forwards % groups == 0 if one_by_one else forwards <= 8
    assert "sum_ghosts" in [launch.name for launch in log[forwards:]]  # the backward is the same for both
    assert saved.vectors.shape == (groups, 9, ghost_pitch(shape[2], dtype))


def test_each_run_has_its_own_rows() -> None:
    """The launches of runs differ by the addresses of x, y, deviations and vectors alone."""
    from gsbn._forward import forward_within

    B, I, O, groups = 4096, 64, 256, 4
    call = call_of((B, I, O), "bfloat16")
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        y, saved = forward_within(
            Limits(by_runs=True), **call, groups=groups, return_saved=True, sms=None, activation="relu"
        )
    assert len(log) == groups
    rows = B // groups
    starts = {call["x"].pointer: 2 * rows * I, y.pointer: 2 * rows * O, saved.deviations.pointer: 2 * rows * O}
    starts |= {saved.vectors.pointer: 8 * 9 * O}
    for i, launch in enumerate(log):
        assert launch._replace(words=(), records=launch.records[:1]) == log[0]._replace(
            words=(), records=log[0].records[:1]
        )
        for word, first in zip(launch.words, log[0].words, strict=True):
            assert word == first + i * starts.get(first, 0)
        for record, first in zip(launch.records[1:], log[0].records[1:], strict=True):  # tensor maps
            pointer = int(first[1:].partition(",")[0])
            assert record == first.replace(str(pointer), str(pointer + i * starts.get(pointer, 0)), 1)
