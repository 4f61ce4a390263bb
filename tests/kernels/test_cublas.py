"""cuBLAS serves like gsbn's kernels: in captures, from any thread and stream, with the same bits each time."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn._cuda import cublas as _cublas
from gsbn._plan import Device, Matmul, Matrix
from tests.support import fake_gpu
from tests.support.gradients import draw_dy
from tests.support.harness import DTYPES, Kind, assert_same_bits, kind_of, without_out
from tests.support.strategies import Case
from tests.support.streams import capture, new_stream

# Rows, input and output features. In each one product (g, dx, dweight) has long sums: cuBLAS splits k, using scratch
SHAPES = [(64, 8192, 96), (64, 96, 8192), (9000, 64, 96), (300, 257, 131)]


def test_the_workspace_of_a_product_is_lent_by_the_call() -> None:
    """It is the end of the call's scratch memory, and all products use it in turn."""
    x, weight = fake_gpu.Array((3000, 1024), "float64"), fake_gpu.Array((1000, 1024), "float64")
    with fake_gpu.gpu(fake_gpu.HOPPER) as (kind, log):
        y, saved = gsbn.forward(x, weight, training=True, return_saved=True)
        forward, made = len(log), len(kind.made)
        gsbn.backward(y, saved)
    for launches, arrays in ((log[:forward], kind.made[:made]), (log[forward:], kind.made[made:])):
        scratch = arrays[-1]
        lent = {launch.words[-2] for launch in launches if launch.name == "cuBLAS"}
        words = [word for launch in launches for word in launch.words if isinstance(word, int)]
        assert lent == {scratch.pointer + scratch.shape[0] - 1000}
        assert max(word for word in words if word >> 32 == scratch.pointer >> 32) in lent


class Step:
    """A forward and a backward by cuBLAS, and their results."""

    def __init__(self, kind: Kind, shape: tuple[int, int, int], dtype: str, *, training: bool = True) -> None:
        arrays = without_out(Case(shape, dtype, training).arrays())
        self._kind, self._native = kind, {name: kind.put(a) for name, a in arrays.items()}
        self._dy, self._training = kind.put(draw_dy(arrays)), training

    def __call__(self) -> list[Any]:
        y, saved = gsbn.forward(**self._native, training=self._training, gemm="cublas", return_saved=True)
        return [y, *(gradient for gradient in gsbn.backward(self._dy, saved) if gradient is not None)]

    def read(self, made: list[Any]) -> list[np.ndarray]:
        return [self._kind.get(array) for array in made]


def assert_all_the_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replay_has_the_bits_of_a_call(
    gpu_kind: Kind, shape: tuple[int, int, int], dtype: str, training: bool
) -> None:
    """Whatever products run on other streams, and whoever now owns the call's former scratch memory."""
    step, other = (Step(gpu_kind, s, dtype, training=training) for s in (shape, (4000, 72, 96)))
    with new_stream(gpu_kind) as stream:
        step()
        want = step.read(step())
        replay, made = capture(gpu_kind, stream, step)
        gc.collect()
        for _ in range(3):
            with new_stream(gpu_kind) as other_stream:
                for _ in range(4):
                    other()
                churn = [gpu_kind.put(np.full(1 << size, 7, np.uint8)) for size in range(9, 23)]
                for array in made:
                    array[...] = gpu_kind.put(np.full_like(gpu_kind.get(array), np.nan))
                other_stream.synchronize()
            replay()
            stream.synchronize()
            assert_all_the_same(step.read(made), want)
            assert all((gpu_kind.get(a) == 7).all() for a in churn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_concurrent_graphs(gpu_kind: Kind, dtype: str) -> None:
    steps = [Step(gpu_kind, shape, dtype) for shape in (SHAPES[0], SHAPES[2])]
    with new_stream(gpu_kind) as one, new_stream(gpu_kind) as two:
        pass
    graphs, wants = [], []
    for step, stream in zip(steps, (one, two), strict=True):
        with stream_of(gpu_kind, stream):
            step()
            wants.append(step.read(step()))
            graphs.append(capture(gpu_kind, stream, step))
    for _ in range(20):
        for (replay, _), stream in zip(graphs, (one, two), strict=True):
            with stream_of(gpu_kind, stream):
                replay()
    one.synchronize(), two.synchronize()
    for step, (_, made), want in zip(steps, graphs, wants, strict=True):
        assert_all_the_same(step.read(made), want)


def stream_of(kind: Kind, stream: Any) -> Any:
    if kind.is_torch:
        import torch

        return torch.cuda.stream(stream)
    return stream


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_streams_of_their_own(gpu_kind: Kind, dtype: str) -> None:
    """New threads with a stream each: their products do not affect each other."""
    steps = [Step(gpu_kind, shape, dtype) for shape in SHAPES]
    wants = [step.read(step()) for step in steps]
    failures: list[BaseException] = []

    def run(step: Step, want: list[np.ndarray]) -> None:
        try:
            with new_stream(gpu_kind) as stream:
                for _ in range(10):
                    made = step()
                stream.synchronize()
                assert_all_the_same(step.read(made), want)
        except BaseException as error:
            failures.append(error)

    for _ in range(3):
        threads = [threading.Thread(target=run, args=pair) for pair in zip(steps, wants, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.gpu
def test_streams_leave_nothing_behind() -> None:
    """cuBLAS allocates nothing for a stream: a hundred streams take no more GPU memory than the first."""
    import cupy

    step = Step(kind_of("cupy"), SHAPES[0], "bfloat16")

    def taken() -> int:
        free = []
        for _ in range(100):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                step()
                stream.synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
            free.append(cupy.cuda.runtime.memGetInfo()[0])
        return free[0] - free[-1]

    # other processes also allocate on this GPU, but what a stream leaves would show every time
    assert any(taken() <= 4 << 20 for _ in range(10))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["in the capture", "in another thread"])
def test_a_new_handle_spoils_no_capture(gpu_kind: Kind, where: str) -> None:
    """cuBLAS is initialised, and a new product prepared, while a stream is captured in its library's default mode."""
    row, device = Matrix((120, 1), True), Device((9, 0), 132)
    p = Matmul(310, 250, 120, "float32", device, row, row, Matrix((252, 1), True))
    prepared: list[_cublas.CublasGemm] = []

    def prepare() -> None:
        prepared.append(_cublas.CublasGemm(p, "highest", 0, wide=True))

    def call() -> list[Any]:
        _cublas._handle.cache_clear()
        if where == "in the capture":
            prepare()
        else:
            thread = threading.Thread(target=prepare)
            thread.start()
            thread.join()
        return step()

    step = Step(gpu_kind, SHAPES[-1], "float32")
    with new_stream(gpu_kind) as stream:
        want = step.read(step())
        replay, made = capture(gpu_kind, stream, call)
        replay()
        stream.synchronize()
        assert_all_the_same(step.read(made), want)
    assert len(prepared) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parts_of_a_split_sum_are_added_in_float32(dtype: str) -> None:
    """dweight of many rows in 16 bits: all partial sums are integers that float32 can represent, and 16 bits cannot."""
    import cupy

    rows, I, O = 32768, 64, 96
    t = DTYPES[dtype]
    x = cupy.ones((rows, I), t)
    weight, scale = cupy.ones((O, I), t), cupy.ones(O, np.float32)
    # here dg = dy, in inference: 2 in the first half of the rows, -2 in the second, and 1 in the last row
    dy = cupy.full((rows, O), 2, t)
    dy[rows // 2 :] = -2
    dy[-1] = 1
    statistics = {"running_mean": cupy.zeros(O, np.float32), "running_var": cupy.ones(O, np.float32)}
    _, saved = gsbn.forward(x, weight, scale, **statistics, eps=0.0, gemm="cublas", return_saved=True)
    of_weight = gsbn.backward(dy, saved, needs=("weight",)).weight
    assert (of_weight == 3).all()
