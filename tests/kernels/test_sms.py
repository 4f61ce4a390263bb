"""The SMs that a call leaves to others stay free, and calls on a stream of a green context use its SMs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.support.gradients import draw_dy
from tests.support.harness import Kind, assert_same_bits, kind_of, without_out
from tests.support.strategies import Case
from tests.support.streams import capture

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from tests.support import vacancy  # noqa: E402  # which wants CuPy, too


@pytest.fixture(scope="module")
def probe() -> vacancy.Probe:
    return vacancy.Probe()


PATHS = vacancy.calls()


# ---- between launches


def assert_seen(expected: Callable[[vacancy.Waited], bool], probe: vacancy.Probe, call: Callable[[], Any]) -> None:
    """Other processes disturb a measurement now and then; what a call does shows in one of five at least."""
    for _ in range(5):
        found = probe.wait(call)
        enough = len(found.waits) >= 16
        if enough and expected(found):
            return
    if found.shared or not enough:
        pytest.skip("other processes have the GPU: run this test alone")
    raise AssertionError(found)


@pytest.mark.parametrize("path", sorted(PATHS.keys() - {vacancy.CUBLAS}))
def test_the_other_sms_stay_free_while_calls_follow_each_other(path: str, probe: vacancy.Probe, hopper: None) -> None:
    """A kernel that needs all of them gets them within a quarter of a call's time: a launch that waited there would
    occupy them for most of it. One time in ten another process may have the GPU."""
    assert_seen(lambda found: bool(np.quantile(found.waits, 0.9) < found.call / 4), probe, PATHS[path](probe.sms))


def test_launches_that_overlap_hold_the_other_sms(probe: vacancy.Probe, hopper: None) -> None:
    """The test above fails if limited calls are launched like others: CTAs of the next launch wait on the SMs. (Where a
    call has several launches of unlike sizes, they hold them for too short a time to be seen.)"""
    with vacancy.overlapping():
        call = PATHS["inference in one launch, bfloat16"](probe.sms)
        assert_seen(lambda found: bool(np.quantile(found.waits, 0.9) > found.call / 2), probe, call)


# ---- green contexts


@pytest.fixture
def green() -> Iterator[tuple[int, int]]:
    """A stream of a green context of some 32 SMs, and how many it has."""
    cu = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings make green contexts")
    if not hasattr(cu, "cuGreenCtxStreamCreate"):
        pytest.skip("these cuda-bindings are older than green contexts")

    def checked(result: Any) -> Any:
        error, *values = result
        assert error == cu.CUresult.CUDA_SUCCESS, error
        return values[0] if len(values) == 1 else values

    cupy.cuda.runtime.free(0)
    everything = checked(cu.cuDeviceGetDevResource(0, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, *_ = checked(cu.cuDevSmResourceSplitByCount(1, everything, 0, 32))
    descriptor = checked(cu.cuDevResourceGenerateDesc(groups[:1], 1))
    context = checked(cu.cuGreenCtxCreate(descriptor, 0, int(cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)))
    stream = checked(cu.cuGreenCtxStreamCreate(context, int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING), 0))
    yield int(stream), int(groups[0].sm.smCount)
    cupy.cuda.runtime.deviceSynchronize()
    checked(cu.cuStreamDestroy(stream))
    checked(cu.cuGreenCtxDestroy(context))


def external(kind: Kind, stream: int) -> tuple[Any, Any]:
    """The stream as an object of the kind's library, and a context in which it is current."""
    if kind.is_torch:
        import torch

        of_torch = torch.cuda.ExternalStream(stream)
        return of_torch, torch.cuda.stream(of_torch)
    of_cupy = cupy.cuda.ExternalStream(stream)
    return of_cupy, of_cupy


@pytest.mark.parametrize("sms", [None, 7, 1000])
@pytest.mark.parametrize("gemm", ["auto", "tiled", "cublas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stream_of_a_green_context_gets_a_plan_for_its_sms(
    gpu_kind: Kind, dtype: str, gemm: Any, sms: int | None, green: tuple[int, int]
) -> None:
    """It has more tiles than SMs, and CTAs of one launch wait for each other: if planned for all SMs, the driver would
    refuse it or it would never end. The bits are those of a call with as many SMs on another stream."""
    stream, held = green
    planned = held if sms is None else min(sms, held)
    if gemm == "cublas" and planned < 16:
        pytest.skip("cuBLAS cannot be held to so few")
    arrays = without_out(Case((2100, 264, 1032), dtype, True, layouts=()).arrays())
    dy = gpu_kind.put(draw_dy(arrays))

    def step(sms: int | None) -> list[Any]:
        native = {name: gpu_kind.put(a) for name, a in arrays.items()}
        y, saved = gsbn.forward(**native, training=True, gemm=gemm, sms=sms, return_saved=True)
        written = [native[name] for name in ("running_mean", "running_var") if name in native]
        return [y, *written, *(a for a in gsbn.backward(dy, saved, sms=sms) if a is not None)]

    want = [gpu_kind.get(a) for a in step(planned)]
    _, current = external(gpu_kind, stream)
    cupy.cuda.runtime.deviceSynchronize()
    with current:
        got = step(sms)
        cupy.cuda.runtime.deviceSynchronize()
    for a, b in zip(got, want, strict=True):
        assert_same_bits(gpu_kind.get(a), b)


def test_a_capture_on_a_stream_of_a_green_context(green: tuple[int, int]) -> None:
    kind, (stream, held) = kind_of("cupy"), green
    arrays = without_out(Case((2100, 264, 1032), "bfloat16", True, layouts=()).arrays())
    x, weight = (kind.put(arrays[name]) for name in ("x", "weight"))
    call = partial(gsbn.forward, x, weight, training=True)
    want = call(sms=held)
    cupy.cuda.runtime.deviceSynchronize()
    of_cupy, current = external(kind, stream)
    with current:
        call()
        of_cupy.synchronize()
        replay, y = capture(kind, of_cupy, call)
        replay()
        of_cupy.synchronize()
    assert_same_bits(kind.get(y), kind.get(want))
