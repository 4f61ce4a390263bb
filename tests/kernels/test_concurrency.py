"""Calls and other work at the same time: new threads, other streams and contexts, kernels that wait, few SMs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn._cuda import kernels as _kernels
from gsbn._plan.gemm import CUBLAS_SMS
from tests.support.forwards import truth_and_bounds
from tests.support.gradients import backward, draw_dy, gradient_bounds, truth_of
from tests.support.harness import DTYPES, GPU_KINDS, Kind, assert_same_bits, forward, kind_of, without_out
from tests.support.strategies import Case
from tests.support.streams import new_stream, occupy
from tests.support.tolerance import assert_outcome_within, assert_within, bounds

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


PATHS = ("auto", "cublas", "tiled", "sm90")
SHAPE = (600, 136, 264)


def needs_hopper(gemm: str = "sm90") -> None:
    device = _kernels.gpu(cupy.cuda.Device().id)
    if gemm == "sm90" and (device.capability != (9, 0) or not device.sm90a):
        pytest.skip("needs a GPU of compute capability 9.0 and NVRTC 12.9")


def in_a_new_thread(act: Callable[[], Any]) -> Any:
    """What `act` returns or raises in a thread that has never called CUDA."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


# ---- new threads


@pytest.mark.parametrize("gemm", PATHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_new_thread_takes_new_arrays(gpu_kind: Kind, dtype: str, gemm: str) -> None:
    """Its first CUDA call is gsbn's; all but the addresses is cached from the main thread."""
    needs_hopper(gemm)
    arrays = without_out(Case(SHAPE, dtype, True, layouts=()).arrays())
    options = {"training": True, "gemm": gemm}

    def put() -> dict[str, Any]:
        return {name: gpu_kind.put(a) for name, a in arrays.items()}

    def step(native: dict[str, Any], dy: Any) -> list[np.ndarray]:
        y, saved = gsbn.forward(**native, **options, return_saved=True)
        prepared = gsbn.prepare(native["weight"])
        again = gsbn.forward(**{**native, "weight": prepared}, **options)
        statistics = (native["running_mean"], native["running_var"])
        w, _ = gsbn.fold(native["weight"], native["scale"], *statistics)
        return [gpu_kind.get(a) for a in (y, again, w, *gsbn.backward(dy, saved))]

    dy = gpu_kind.put(draw_dy(arrays))
    here = step(put(), dy)
    for _ in range(3):
        native, other_dy = put(), gpu_kind.put(draw_dy(arrays))
        for got, want in zip(in_a_new_thread(lambda n=native, d=other_dy: step(n, d)), here, strict=True):
            assert_same_bits(got, want)


# ---- streams that are created and destroyed


@pytest.mark.parametrize("gemm", PATHS)
def test_streams_are_made_and_destroyed(gpu_kind: Kind, gemm: str) -> None:
    """CUDA reuses the handle of a destroyed stream: nothing may be cached by it.

    The stream has finished its work. With pending work, the allocators of CuPy and torch, which go by the handle, would
    give its memory to the next stream too early, with or without gsbn.
    """
    needs_hopper(gemm)
    problems = [Case((300, 64, 200), "float16", True, seed=seed, layouts=()).arrays() for seed in range(4)]
    natives = [{name: gpu_kind.put(a) for name, a in arrays.items()} for arrays in problems]
    limits = [truth_and_bounds(arrays, training=True) for arrays in problems]
    for _ in range(25):
        for native in natives:
            if gpu_kind.is_torch:
                import torch

                stream = torch.cuda.ExternalStream(cupy.cuda.runtime.streamCreateWithFlags(1))
                with torch.cuda.stream(stream):
                    gsbn.forward(**native, training=True, gemm=gemm)
                stream.synchronize()
                cupy.cuda.runtime.streamDestroy(stream.cuda_stream)
            else:
                with cupy.cuda.Stream(non_blocking=True) as stream:  # destroyed with its last reference
                    gsbn.forward(**native, training=True, gemm=gemm)
                stream.synchronize()
                del stream
        for native, arrays, (truth, _) in zip(natives, problems, limits, strict=True):
            limit = bounds(arrays, truth, training=True, deferred=True)
            assert_within(gpu_kind.get(native["out"]), truth.y, limit.y, "y")


# ---- memory of another library


class Lender:
    """Exports an array by DLPack, and does not hold it afterwards."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return vars(self).pop("_array").__dlpack__(**options)


@pytest.mark.gpu
def test_what_is_lent_is_held_until_the_stream_is_done() -> None:
    """A producer may reuse the memory as soon as nobody holds it."""
    import cupy

    kind = kind_of("cupy")
    calls = {
        "forward": lambda x, w, s: gsbn.forward(Lender(x), Lender(w), Lender(s), training=True),
        "fold": lambda x, w, s: gsbn.fold(*map(Lender, (w, s, s.copy(), s.copy()))),
        "prepare": lambda x, w, s: gsbn.prepare(Lender(w)),
    }
    with new_stream(kind) as stream:
        for name, call in calls.items():
            call(*(cupy.ones(shape, "f4") for shape in ((64, 32), (48, 32), 48)))  # compiles
            x, w, s = (cupy.ones(shape, "f4") for shape in ((64, 32), (48, 32), 48))
            stream.synchronize()
            watched = weakref.ref(w)
            occupy(kind, stream)
            call(x, w, s)
            del x, w, s
            assert watched() is not None and not stream.done, name
            stream.synchronize()
            gsbn.prepare(Lender(cupy.ones((4, 4), "f4")))  # the next call releases it
            assert watched() is None


# ---- kernels that wait for gsbn

WAIT = r"""
// Each CTA, which has an SM to itself, waits until *flag is set; after `patience` ns it gives up and says so.
extern "C" __global__ void wait_for(volatile int* flag, int* gave_up, long long patience) {
    if (threadIdx.x != 0) return;
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    while (*flag == 0) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - begun > patience) {
            atomicAdd(gave_up, 1);
            return;
        }
    }
}
"""


PATIENCE = 5_000_000_000  # ns; other processes may share the GPU


class Neighbour:
    """A kernel on a stream of its own that holds some SMs, as a collective does, until a flag is set."""

    def __init__(self, sms: int) -> None:
        device = cupy.cuda.Device()
        self._kernel, self._shared = cupy.RawKernel(WAIT, "wait_for"), device.attributes["MaxSharedMemoryPerBlockOptin"]
        self._kernel.max_dynamic_shared_size_bytes = self._shared
        self._stream, self._sms = cupy.cuda.Stream(non_blocking=True), sms
        self.flag, self._gave_up = cupy.zeros(1, np.int32), cupy.zeros(1, np.int32)

    def gave_up(self, act: Callable[[], Any], kind: Kind, stream: Any) -> int:
        """How many CTAs waited too long for the flag, which is set on `stream` after what `act` launches."""
        self.flag.fill(0)
        self._gave_up.fill(0)
        cupy.cuda.runtime.deviceSynchronize()
        with self._stream:
            self._kernel((self._sms,), (32,), (self.flag, self._gave_up, PATIENCE), shared_mem=self._shared)
        time.sleep(0.01)  # until it runs
        act()
        pointer = stream.cuda_stream if kind.is_torch else stream.ptr
        cupy.cuda.runtime.memsetAsync(self.flag.data.ptr, 1, 4, pointer)
        cupy.cuda.runtime.deviceSynchronize()
        return int(self._gave_up[0])


@pytest.mark.parametrize("gemm", PATHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_kernel_that_waits_for_gsbn(gpu_kind: Kind, dtype: str, gemm: str) -> None:
    """Problem 33 and eight CTAs of another library: with sms=120 no part of a call waits for these."""
    needs_hopper(gemm)
    if gpu_kind.is_torch:
        import torch

        x, dy, weight = (torch.randn(n, 8192, device="cuda").to(getattr(torch, dtype)) for n in (1024, 1024, 8192))
    else:
        x, dy, weight = (cupy.random.standard_normal((n, 8192), "f4").astype(DTYPES[dtype]) for n in (1024, 1024, 8192))
    arrays = {"x": x, "weight": weight, "scale": gpu_kind.put(np.ones(8192, np.float32))}
    neighbour = Neighbour(8)
    with new_stream(gpu_kind) as stream:

        def step(sms: int | None = 120) -> None:
            _, saved = gsbn.forward(**arrays, training=True, gemm=gemm, sms=sms, return_saved=True)
            gsbn.backward(dy, saved, sms=sms)

        step()
        assert neighbour.gave_up(step, gpu_kind, stream) == 0
        if gemm == "cublas":
            step(None)
            assert neighbour.gave_up(lambda: step(None), gpu_kind, stream) == 0


@pytest.mark.parametrize("sms", [1, 40, 67, 131])
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "highest"), ("float32", "high"), ("float32", "highest")])
def test_a_share_of_the_sms_is_enough(dtype: str, precision: str, sms: int) -> None:
    """All other SMs are occupied until the call has ended, and the results are right."""
    needs_hopper()
    kind, options = kind_of("cupy"), {"training": True, "gemm": "sm90", "precision": precision, "sms": sms}
    arrays = without_out(Case((1000, 136, 1032), dtype, True, layouts=()).arrays())
    native = {name: kind.put(a) for name, a in arrays.items()}
    dy = kind.put(draw_dy(arrays))
    total = cupy.cuda.Device().attributes["MultiProcessorCount"]
    with new_stream(kind) as stream:

        def step() -> None:
            _, saved = gsbn.forward(**native, **options, return_saved=True)
            gsbn.backward(dy, saved, sms=sms)

        step()
        assert Neighbour(total - sms).gave_up(step, kind, stream) == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gemm", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "sms"), [((200, 40, 304), 1), ((2100, 72, 136), 70)])
def test_a_limited_grid_does_all_the_work(
    shape: tuple[int, int, int], sms: int, dtype: str, gemm: str, training: bool
) -> None:
    if gemm == "sm90" and (dtype == "float64" or not training):
        pytest.skip("it keeps nothing for this backward")
    if gemm == "cublas" and sms < CUBLAS_SMS:
        pytest.skip("cuBLAS cannot be held to so few")
    needs_hopper(gemm)
    arrays = Case(shape, dtype, training).arrays()
    options = {"training": training, "gemm": gemm, "sms": sms}
    layouts = {"x": "F", "weight": "strided", "dy": "F"}
    deferred = gemm in ("auto", "sm90")
    got = forward(kind_of("cupy"), arrays, layouts, **options)
    truth, _ = truth_and_bounds(arrays, training=training)
    limit = bounds(arrays, truth, training=training, deferred=deferred)
    limbs = bounds(arrays, truth, training=training, limbs=True) if deferred and dtype == "float32" else limit
    assert_outcome_within(
        got, truth, type(limit)(*(a if a is None else np.maximum(a, b) for a, b in zip(limit, limbs, strict=True)))
    )
    dy = draw_dy(arrays)
    of = backward(kind_of("cupy"), arrays, dy, layouts, **options)
    want = truth_of(arrays, dy, training=training)
    limits = gradient_bounds(arrays, dy, want, training=training, deferred=deferred)
    for name, gradient in of.items():
        if gradient is not None:
            assert_within(gradient, getattr(want, name), limits[name], name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_tile_of_rows_waits_for_nobody(dtype: str) -> None:
    """If all rows of a feature lie in one tile, CTAs need not be resident at once.

    20 SMs are left, more than there are GPCs: so two of them are in the same GPC, as a cluster of two CTAs needs.
    """
    needs_hopper()
    kind = kind_of("cupy")
    arrays = without_out(Case((32, 512, 20_000), dtype, True, layouts=()).arrays())
    native = {name: kind.put(a) for name, a in arrays.items()}
    total = cupy.cuda.Device().attributes["MultiProcessorCount"]
    with new_stream(kind) as stream:

        def act() -> Any:
            return gsbn.forward(**native, training=True, gemm="sm90")

        act()
        assert Neighbour(total - 20).gave_up(act, kind, stream) == 0


# ---- contexts, devices and interrupts


@pytest.mark.parametrize("name", GPU_KINDS)
def test_the_current_context_is_left_as_it_was(name: str) -> None:
    """With a current green context gsbn uses the device's primary context and one of its streams, and restores it.

    The default stream is refused: in the primary context it is another stream, which does not wait for this one.
    """
    cu = pytest.importorskip("cuda.bindings.driver")

    def checked(result: Any) -> Any:
        error, *values = result
        assert error == cu.CUresult.CUDA_SUCCESS, error
        return values[0] if len(values) == 1 else values

    kind, arrays = kind_of(name), Case(SHAPE, "bfloat16", True, layouts=()).arrays()
    native = {n: kind.put(a) for n, a in arrays.items()}
    gsbn.forward(**native, training=True)
    everything = checked(cu.cuDeviceGetDevResource(0, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, _, _ = checked(cu.cuDevSmResourceSplitByCount(1, everything, 0, 16))
    descriptor = checked(cu.cuDevResourceGenerateDesc(groups[:1], 1))
    green = checked(cu.cuGreenCtxCreate(descriptor, 0, int(cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)))
    context, before = int(checked(cu.cuCtxFromGreenCtx(green))), cupy.cuda.driver.ctxGetCurrent()
    cupy.cuda.runtime.deviceSynchronize()
    try:
        with new_stream(kind):
            cupy.cuda.driver.ctxSetCurrent(context)
            gsbn.forward(**native, training=True)
            assert cupy.cuda.driver.ctxGetCurrent() == context
            cupy.cuda.driver.ctxSetCurrent(before)
        cupy.cuda.driver.ctxSetCurrent(context)
        with pytest.raises(RuntimeError, match="the default stream of a green context of"):
            gsbn.forward(**native, training=True)
        assert cupy.cuda.driver.ctxGetCurrent() == context
    finally:
        cupy.cuda.driver.ctxSetCurrent(before)
        cupy.cuda.runtime.deviceSynchronize()
        checked(cu.cuGreenCtxDestroy(green))
    truth, _ = truth_and_bounds(arrays, training=True)
    assert_within(kind.get(native["out"]), truth.y, bounds(arrays, truth, training=True, deferred=True).y)


def test_another_current_device_is_left_as_it_was() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    arrays = Case(SHAPE, "bfloat16", True, layouts=()).arrays()
    with cupy.cuda.Device(1):
        native = {name: cupy.asarray(a) for name, a in arrays.items()}
    before = cupy.cuda.driver.ctxGetCurrent()
    y = gsbn.forward(**native, training=True)
    assert cupy.cuda.driver.ctxGetCurrent() == before
    truth, _ = truth_and_bounds(arrays, training=True)
    with cupy.cuda.Device(1):
        assert_within(y.get(), truth.y, bounds(arrays, truth, training=True, deferred=True).y)


@pytest.mark.parametrize("name", GPU_KINDS)
def test_an_interrupted_call_leaves_the_next_one_right(name: str) -> None:
    """KeyboardInterrupt may come between any two lines: no state that outlives the call is left half written."""
    kind = kind_of(name)
    arrays = Case(SHAPE, "bfloat16", True, layouts=()).arrays()
    native = {n: kind.put(a) for n, a in arrays.items()}
    truth, _ = truth_and_bounds(arrays, training=True)
    limit = bounds(arrays, truth, training=True, deferred=True).y
    gsbn.forward(**native, training=True)
    import sys

    for stop in range(1, 120, 3):
        count = 0

        def interrupt(frame: Any, event: str, argument: Any, stop: int = stop) -> Any:
            nonlocal count
            if "gsbn" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            if count == stop:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            gsbn.forward(**native, training=True)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        gsbn.forward(**native, training=True)
        assert_within(kind.get(native["out"]), truth.y, limit, "y")
