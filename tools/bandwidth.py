"""Bandwidth of the kernels beside the GEMMs and beside a device copy in the same run: python tools/bandwidth.py [B O]

Bytes are the fewest possible, each operand once. Medians of 30, each on a cold L2 and with the queue kept full; the
copy is of 1 GiB, so that it pays no launch worth counting, and the kernels do.
"""

import statistics
import sys
from pathlib import Path

import cupy as cp
import ml_dtypes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gsbn
from gsbn import _backward, _forward


def median_us(run, before=lambda: None, rounds=30):
    scratch = cp.empty(1 << 28, cp.uint8)
    samples = []
    for turn in range(-3, rounds):
        before()
        for value in range(4):  # evicts L2 and keeps the GPU busy while the host enqueues
            scratch.data.memset_async(value, scratch.nbytes)
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if turn >= 0:
            samples.append(1e3 * cp.cuda.get_elapsed_time(start, stop))
    return statistics.median(samples)


def kernels(rows, features, dtype):
    """The launches of a step but for its GEMMs, (name, run, bytes, what resets its tickets), and what they use."""
    x, weight = cp.random.standard_normal((rows, 8)).astype(dtype), cp.ones((features, 8), dtype)
    vectors = {name: cp.ones(features, "f4") for name in ("bias", "gamma", "beta", "running_mean", "running_var")}
    scale, dy = cp.ones(features, "f4"), cp.random.standard_normal((rows, features), dtype="f4").astype(dtype)
    launches, words, keep = {}, {}, []

    class Recorder:
        """Stands in for a launcher, and remembers with what it was called."""

        def __init__(self, name, launch):
            self.name, self.launch = name, launch

        def __call__(self, *arguments):
            launches[self.name] = lambda: self.launch(*arguments)
            words[self.name] = arguments[3]
            self.launch(*arguments)

    _forward._calls.clear()
    _backward._calls.clear()
    for turn in range(2):  # the first makes the calls, the second is recorded, with all that it allocates kept
        if turn:
            (call,), (back,) = _forward._calls.values(), _backward._calls.values()
            for owner, names in ((call, ("affine", "normalize")), (back, ("sums", "dg"))):
                for name in names:
                    setattr(owner, f"launch_{name}", Recorder(name, getattr(owner, f"launch_{name}")))
        pool = cp.cuda.MemoryPool()  # whose blocks nobody else takes
        with cp.cuda.using_allocator(pool.malloc):
            y, saved = gsbn.forward(x, weight, scale, **vectors, training=True, gemm="cublas", return_saved=True)
            gradients = gsbn.backward(dy, saved)
        keep.append((pool, y, saved, gradients, call if turn else None, back if turn else None, x, weight, dy))
    elements, size = rows * features, x.itemsize
    moved = {"affine": 4, "normalize": 4 + 2 * size, "sums": 2 * size, "dg": 3 * size}
    names = {"affine": "scale_stats", "normalize": "normalize", "sums": "backward_sums", "dg": "backward_dg"}

    def reset():
        cp.cuda.runtime.memset(words["affine"][1] + call.plan.tickets, 0, call.plan.tickets_bytes)

    before = {"affine": reset}
    found = [(names[key], launches[key], moved[key] * elements, before.get(key, lambda: None)) for key in moved]
    return found, keep


def main():
    rows, features = map(int, sys.argv[1:3] or (16384, 4096))
    source, target = cp.ones(1 << 30, cp.uint8), cp.empty(1 << 30, cp.uint8)
    copy = 2 * source.nbytes / median_us(lambda: target.data.copy_from_device_async(source.data, source.nbytes))
    print(f"copy                    {1e-6 * copy:6.2f} TB/s")
    for dtype in ("float32", ml_dtypes.bfloat16):
        launches, keep = kernels(rows, features, dtype)
        for name, run, nbytes, before in launches:
            us = median_us(run, before)
            label = f"{name} {cp.dtype(dtype).name}"
            print(f"{label:<24}{1e-6 * nbytes / us:6.2f} TB/s  {us:7.1f} us  {nbytes / us / copy:5.0%} of the copy")
        del launches, keep


if __name__ == "__main__":
    main()
