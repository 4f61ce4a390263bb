"""What calls with batch renormalisation launch, on a fake GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import gsbn
from gsbn._cuda import kernels as _kernels
from gsbn._plan import Matmul, Matrix, declared
from gsbn._plan.backward import Vectors
from tests.plan.seen import RANKS, backward_plan, plan
from tests.support import fake_gpu

LIMITS = ((3.0, 5.0), (3.0, 5.0, 100), "array")
KNOWN = {(kernel.name, kernel.defines): kernel for kernel in _kernels.all_kernels()}
BACKWARDS = ("backward_dg", "backward_fused", "skinny_backward")


def renorms(launch: fake_gpu.Launch) -> bool:
    return ("RENORM", "1") in launch.defines


@pytest.mark.parametrize("device", [fake_gpu.HOPPER, fake_gpu.AMPERE], ids=["Hopper", "Ampere"])
def test_variants_exist_and_take_what_they_are_passed(device: Any) -> None:
    """In every call one variant makes y's constants, and reads the limits; the backward's stores gamma's gradient."""
    seen = set()
    for seed in range(600):
        call = fake_gpu.draw(seed)
        if not call.options["training"] or call.arrays["running_mean"] is None:
            continue
        renorm: Any = LIMITS[seed % 3]
        if len(renorm) == 3 and call.arrays["num_batches_tracked"] is None:
            renorm = renorm[:2]
        limits = fake_gpu.Array((2,), "float32") if renorm == "array" else None
        call.options["renorm"] = renorm if limits is None else limits
        with fake_gpu.gpu(device) as (_, log):
            if call.make() is not None:
                continue
        for launch in log:
            assert launch.name == "cuBLAS" or (launch.name, launch.defines) in KNOWN, launch
        made = [launch for launch in log if renorms(launch)]
        seen |= {launch.name for launch in made}
        forwards = [launch for launch in made if launch.name not in BACKWARDS]
        assert len(forwards) == 1, [launch.name for launch in log]
        assert forwards[0].words[-1] == (0 if limits is None else limits.pointer)
        kernel = KNOWN[forwards[0].name, forwards[0].defines]
        record = declared.record_dtype(kernel)
        assert record.names is not None
        assert {"renorm", "warmup", "r_max", "d_max"} <= set(record.names)
        if len(renorm) == 3 and forwards[0].name == "forward_sm90":
            assert forwards[0].cooperative and dict(forwards[0].defines)["MODE"] != "MODE_CLUSTER_BATCH"
        assert not (len(renorm) == 3 and forwards[0].name == "normalize_fused")
        for launch in log:  # no other launch stores what depends on the correction
            trains = dict(launch.defines).get("TRAINING") == "true"
            assert renorms(launch) or not (launch.name in BACKWARDS and trains), launch
    hopper = {"forward_sm90"} if device == fake_gpu.HOPPER else set()
    assert seen == {"merge_statistics", "normalize_fused", "backward_dg", "backward_fused"} | hopper


@pytest.mark.parametrize(("saves", "want"), [(True, "forward_sm90"), (False, "normalize_fused")])
def test_one_launch_on_hopper_if_there_is_a_backward(saves: bool, want: str) -> None:
    shapes = {"x": (256, 2048), "weight": (2048, 2048), "running_mean": (2048,), "running_var": (2048,)}
    arrays = {name: fake_gpu.Array(shape, "bfloat16") for name, shape in shapes.items()}
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        gsbn.forward(**arrays, training=True, renorm=(3.0, 5.0), return_saved=saves)
    assert [launch.name for launch in log][-1] == want
    assert renorms(log[-1])
    assert len(log) == (1 if saves else 2)


def test_inference_launches_what_it_launched() -> None:
    shapes = {"x": (256, 64), "weight": (96, 64), "running_mean": (96,), "running_var": (96,)}
    logs = []
    for options in ({}, {"renorm": (3.0, 5.0)}):
        fake_gpu.Array._free = itertools.count(1 << 32, 1 << 32)
        arrays = {name: fake_gpu.Array(shape, "bfloat16") for name, shape in shapes.items()}
        with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
            gsbn.forward(**arrays, **options)
        logs.append(log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("ranks", [None, "inside", "between"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(8, 64, 40), (300, 2048, 1024), (20000, 32, 64), (5000, 520, 264)])
def test_programs_of_ranks(shape: tuple[int, int, int], dtype: str, ranks: str | None) -> None:
    """Each launch is passed what its kernel declares, in this order; a group's backward has the variants, too."""
    (m, k, n), given = shape, {"renorm": 0, "warmup": 0, "r_max": 3.0, "d_max": 5.0}
    x, w, y = (Matrix((columns, 1), True) for columns in (k, k, n))
    p = Matmul(m, n, k, dtype, fake_gpu.HOPPER, x, w, y)
    of_vectors = Vectors({"gamma": "float32", "beta": "float32"})
    programs = [plan(p, training=True, saved=True, renorm=given, ranks=ranks).program]
    asked = {"training": True, "needs": ("x", "weight", "gamma", "beta"), "vectors": of_vectors, "renorm": True}
    programs += [backward_plan(p, **asked, ranks=RANKS[ranks]).program]
    for program in programs:
        variants = 0
        for launch in program.launches():
            assert (launch.kernel.name, launch.kernel.defines) in KNOWN, launch.kernel
            assert KNOWN[launch.kernel.name, launch.kernel.defines] == launch.kernel  # its shared memory, too
            assert tuple(launch.passed) == declared.parameters(launch.kernel)[1]
            variants += ("RENORM", "1") in launch.kernel.defines
        assert variants >= 1
