"""Streams: a call runs in the order of its stream, and concurrently with others."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.support.forwards import CASE, GEMMS, truth_and_bounds
from tests.support.harness import STATISTICS, Kind, assert_same_bits
from tests.support.strategies import Case
from tests.support.streams import is_idle, new_stream, occupy
from tests.support.tolerance import assert_within

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("gemm", GEMMS)
def test_runs_in_the_order_of_its_stream_and_returns_at_once(gpu_kind: Kind, gemm: str) -> None:
    arrays = CASE.arrays()
    native = {name: gpu_kind.put(a) for name, a in arrays.items()}
    x = gpu_kind.put(arrays["x"])
    with new_stream(gpu_kind) as stream:
        for _ in range(2):  # the first call may compile and allocate, which may wait
            for name in STATISTICS:
                native[name][...] = gpu_kind.put(arrays[name])
            native["x"][...] = np.nan
            stream.synchronize()
            occupy(gpu_kind, stream)
            native["x"][...] = x
            gsbn.forward(**native, training=True, gemm=gemm)
            waited = is_idle(stream)
            native["x"][...] = np.nan
    assert not waited
    truth, limit = truth_and_bounds(arrays, training=True)
    assert_within(gpu_kind.get(native["out"]), truth.y, limit.y)
    assert_within(gpu_kind.get(native["running_var"]), truth.running_var, limit.running_var)


@pytest.mark.parametrize("gemm", ["auto", "tiled"])
def test_threads_and_streams_at_once(gpu_kind: Kind, gemm: str) -> None:
    """Four threads train independently, each on its own stream and with its own shape."""
    problems = [Case((900 + 100 * i, 64, 200 + 50 * i), "float32", training=True, seed=i).arrays() for i in range(4)]

    def train(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with new_stream(gpu_kind):
            native = {name: gpu_kind.put(a) for name, a in arrays.items()}
            for _ in range(30):
                gsbn.forward(**native, training=True, gemm=gemm)
        return {name: gpu_kind.get(a) for name, a in native.items()}

    alone = [train(arrays) for arrays in problems]
    together: list[Any] = [None] * len(problems)

    def run(i: int) -> None:
        together[i] = train(problems[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for arrays, one, other in zip(problems, alone, together, strict=True):
        assert other["num_batches_tracked"] == arrays["num_batches_tracked"] + 30
        if gemm == "tiled":
            for name in arrays:
                assert_same_bits(one[name], other[name])
        truth, limit = truth_and_bounds(arrays, training=True)
        assert_within(other["out"], truth.y, limit.y)  # y does not depend on the running statistics


@pytest.mark.parametrize("gemm", GEMMS)
def test_threads_on_one_stream(gpu_kind: Kind, gemm: str) -> None:
    """Four threads share what calls cache: programs, launchers, scratch memory."""
    problems = [Case((300, 64, 200), "float32", training=True, seed=i).arrays() for i in range(4)]
    native = [{name: gpu_kind.put(a) for name, a in arrays.items()} for arrays in problems]
    wrong: list[BaseException] = []
    together = threading.Barrier(len(problems))

    def train(i: int) -> None:
        try:
            together.wait()
            for _ in range(50):
                _, saved = gsbn.forward(**native[i], training=True, gemm=gemm, return_saved=True)
                gsbn.backward(native[i]["out"], saved)
            arrays = problems[i]
            truth, limit = truth_and_bounds(arrays, training=True)
            assert_within(gpu_kind.get(native[i]["out"]), truth.y, limit.y)
            _, saved = gsbn.forward(**native[i], training=True, gemm=gemm, return_saved=True)
            ones = gpu_kind.put(np.ones_like(arrays["out"]))
            np.testing.assert_allclose(gpu_kind.get(gsbn.backward(ones, saved).beta), len(arrays["x"]), rtol=1e-6)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
