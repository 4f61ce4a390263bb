"""Bandwidth of scale_stats and normalize beside a device copy in the same run: python tools/bandwidth.py [B O]

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
from gsbn import _forward, _plan


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
    """The two launches of one training call, over a g of its own: (run, bytes) of each, and what resets the tickets."""
    x, weight = cp.random.standard_normal((rows, 8)).astype(dtype), cp.ones((features, 8), dtype)
    vectors = {name: cp.ones(features, "f4") for name in ("bias", "gamma", "beta", "running_mean", "running_var")}
    scale = cp.ones(features, "f4")
    _forward._calls.clear()
    y = gsbn.forward(x, weight, scale, **vectors, training=True, gemm="cublas")  # "sm90" has neither kernel
    (call,) = _forward._calls.values()
    plan, values, stream = call.plan, call.values, cp.cuda.get_current_stream().ptr
    g = cp.random.standard_normal((rows, plan.ldg), dtype="f4")
    workspace = cp.empty(plan.workspace + 512, cp.uint8)
    tickets = workspace[plan.tickets : plan.tickets + plan.tickets_bytes]
    b, gamma, beta, mean, var = (a.data.ptr for a in vectors.values())
    addresses = (g.data.ptr, workspace.data.ptr, b, scale.data.ptr, gamma, beta, mean, var, 0)

    def stats():
        call.launch_affine(plan.stats_grid, _plan.THREADS, values, addresses, stream)

    def normalize():
        call.launch_normalize(
            plan.normalize_grid, _plan.THREADS, values, (g.data.ptr, y.data.ptr, workspace.data.ptr, 0), stream
        )

    return (stats, 4 * rows * features), (normalize, (4 + y.itemsize) * rows * features), lambda: tickets.fill(0)


def main():
    rows, features = map(int, sys.argv[1:3] or (16384, 4096))
    source, target = cp.ones(1 << 30, cp.uint8), cp.empty(1 << 30, cp.uint8)
    copy = 2 * source.nbytes / median_us(lambda: target.data.copy_from_device_async(source.data, source.nbytes))
    print(f"copy                  {1e-6 * copy:6.2f} TB/s")
    for dtype in ("float32", ml_dtypes.bfloat16):
        (stats, read), (normalize, moved), reset = kernels(rows, features, dtype)
        for name, run, nbytes in (("scale_stats", stats, read), ("normalize", normalize, moved)):
            us = median_us(run, before=reset)
            label = f"{name} {cp.dtype(dtype).name}"
            print(f"{label:<22}{1e-6 * nbytes / us:6.2f} TB/s  {us:7.1f} us  {nbytes / us / copy:5.0%} of the copy")


if __name__ == "__main__":
    main()
