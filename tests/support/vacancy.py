"""Whether the SMs that `sms=` leaves stay free while calls follow each other: how long a kernel waits for them.

    python -m tests.support.vacancy    # from the root of the repository, on a GPU: every path, and its cost

While one stream is full of calls, another stream gets a kernel that has a CTA for each SM that was left. Each CTA
needs a whole SM, and keeps it until all have begun. The time of this kernel, between two events, which need no SM, is
how long a user of these SMs waits.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import cupy
import numpy as np

import gsbn
from gsbn._cuda import kernels as _kernels
from gsbn._host import run as _run

LEFT = 12  # SMs
PROBES = 64
CUBLAS = "cuBLAS and passes, bfloat16"  # cuBLAS takes the number of SMs as a target
OCCUPY = r"""
// Returns when all CTAs of the grid are on SMs at once, or after 20 ms. `begun` counts the CTAs that have begun.
extern "C" __global__ void occupy(unsigned* begun) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    if (threadIdx.x == 0) atomicAdd(begun, 1);
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (*(volatile unsigned*)begun < gridDim.x && now - start < 20000000);
}
"""


class Waited(NamedTuple):
    """In microseconds: a call's time on average and at least, and how long each kernel on the other stream took."""

    call: float
    least: float
    waits: np.ndarray

    @property
    def shared(self) -> bool:
        """Whether other processes had the GPU for much of the time: the calls then seldom follow each other."""
        return self.call > 1.3 * self.least


class Probe:
    """Measures on the current device."""

    def __init__(self) -> None:
        device = cupy.cuda.Device()
        self.sms = device.attributes["MultiProcessorCount"] - LEFT
        self._shared = device.attributes["MaxSharedMemoryPerBlockOptin"]
        self._occupy = cupy.RawKernel(OCCUPY, "occupy")
        self._occupy.max_dynamic_shared_size_bytes = self._shared
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def wait(self, call: Callable[[], Any], seconds: float = 0.06) -> Waited:
        """How long kernels for the SMs left took, while calls followed each other on another stream for so long."""
        call()  # compiles
        events = [cupy.cuda.Event() for _ in range(9)]
        with cupy.cuda.Stream(non_blocking=True):
            for event in events:
                event.record()
                call()
        cupy.cuda.runtime.deviceSynchronize()
        least = min(elapsed(*pair) for pair in itertools.pairwise(events))
        count = 8
        for measured in (False, True):  # first a few calls, whose time determines the number of calls
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begun = cupy.zeros((PROBES, 1), np.uint32)
            probes = []
            cupy.cuda.runtime.deviceSynchronize()
            with cupy.cuda.Stream(non_blocking=True):
                begin.record()
                for _ in range(count):
                    call()
                end.record()
                for i in range(PROBES if measured else 1):
                    asked, done = cupy.cuda.Event(), cupy.cuda.Event()
                    with self._stream:  # the pause lets the host issue all three before the first is due
                        self._stream.launch_host_func(time.sleep, 0.5 * seconds / PROBES)
                        asked.record()
                        self._occupy((LEFT,), (32,), (begun[i],), shared_mem=self._shared)
                        done.record()
                    probes.append((asked, done))
                cupy.cuda.runtime.deviceSynchronize()
            us = elapsed(begin, end) / count
            count = max(8, min(int(seconds * 1e6 / us), 300))
        during = [pair for pair in probes if elapsed(begin, pair[0]) > 0 and elapsed(pair[0], end) > 0]
        return Waited(us, least, np.array([elapsed(*pair) for pair in during]))


def elapsed(first: Any, second: Any) -> float:
    """The microseconds from one event to another."""
    return float(cupy.cuda.get_elapsed_time(first, second)) * 1e3


def calls() -> dict[str, Callable[[int | None], Callable[[], Any]]]:
    """By name: functions that make arrays, and a call with so many SMs, which takes about a millisecond or less."""

    def draw(*shape: int, dtype: str = "float32") -> Any:
        if dtype == "bfloat16":
            from ml_dtypes import bfloat16

            return cupy.random.standard_normal(shape, "f4").astype(bfloat16)
        return cupy.random.standard_normal(shape, "f4").astype(dtype)

    def forward(m: int, n: int, k: int, dtype: str = "float32", *, training: bool = True, gemm: Any = "auto") -> Any:
        def make(sms: int | None) -> Callable[[], Any]:
            x, weight, mean, var = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype), cupy.zeros(n), cupy.ones(n)
            running = {"running_mean": mean.astype("f4"), "running_var": var.astype("f4")}
            return lambda: gsbn.forward(x, weight, training=training, gemm=gemm, sms=sms, **running)

        return make

    def backward(m: int, n: int, k: int, dtype: str, gemm: Any = "sm90") -> Any:
        def make(sms: int | None) -> Callable[[], Any]:
            x, weight = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype)
            y, saved = gsbn.forward(x, weight, training=True, gemm=gemm, return_saved=True)
            return lambda: gsbn.backward(y, saved, sms=sms)

        return make

    return {
        "one launch behind limbs, float32": forward(8192, 4096, 4096, gemm="sm90"),
        "one launch, bfloat16": forward(8192, 4096, 4096, "bfloat16", gemm="sm90"),
        "inference in one launch, bfloat16": forward(8192, 4096, 4096, "bfloat16", training=False, gemm="sm90"),
        "tiled and passes, float32": forward(8192, 2048, 512, gemm="tiled"),
        "skinny, float32": forward(1 << 20, 64, 64),
        "backward, bfloat16": backward(8192, 4096, 4096, "bfloat16"),
        "backward, float32": backward(4096, 4096, 2048, "float32"),
        "backward of skinny rows, float32": backward(1 << 19, 64, 64, "float32", "auto"),
        CUBLAS: forward(8192, 4096, 4096, "bfloat16", gemm="cublas"),
    }


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Let launches of limited calls overlap, as others do."""
    real = _kernels.launcher

    def launcher(*arguments: Any, limited: bool = False, **keywords: Any) -> Any:
        return real(*arguments, **keywords)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_kernels, "launcher", launcher))
        stack.enter_context(mock.patch.object(_run, "_found", {}))
        yield


def main() -> int:
    probe = Probe()
    print(f"{cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}: us of a call, and of waiting for {LEFT} SMs")
    print(f"{'':36}{'call':>8}{'median':>9}{'most':>8}")
    for name, of in calls().items():
        print(name)
        for how, sms, context in (
            (f"sms={probe.sms}", probe.sms, contextlib.nullcontext),
            (f"sms={probe.sms}, launches overlap", probe.sms, overlapping),
            ("all SMs", None, contextlib.nullcontext),
        ):
            with context():
                found = probe.wait(of(sms))
            waits = found.waits
            print(f"    {how:32}{found.call:8.1f}{np.median(waits):9.1f}{waits.max():8.1f}    {len(waits)} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
