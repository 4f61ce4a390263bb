"""Run once on an H200, in the repository's root: PYTHONPATH=. timeout 100 python fewrows.py   (expected 40 to 60 s)

First: every new variant that is timed, against float64, poisoned outputs, equal bits; then times in a CUDA graph."""
import itertools, os, statistics, sys, time
from concurrent.futures import ThreadPoolExecutor
import cupy as cp, numpy as np
from gsbn import _kernels, _plan
from gsbn._forward import forward_within
from gsbn._plan import Limits, Matmul, Matrix
from gsbn._plan.gemm import candidates

began = time.monotonic()
gpu = _kernels.gpu(0)
print("clusters of 1, 2, 4, 8 at once:", [gpu.clusters(c) for c in (1, 2, 4, 8)], flush=True)
TILES = list(itertools.product((32, 64, 128, 256), (1, 2, 4, 8)))
OTHERS = [("float16", "high", (32, 8)), ("float16", "high", (256, 2)), ("float32", "high", (64, 4)),
          ("float32", "highest", (32, 4)), ("float32", "highest", (128, 8))]
CHECKS = [("bfloat16", "high", t, False) for t in TILES] + [(*o, False) for o in OTHERS]
CHECKS += [("float16", "high", (256, 2), True), ("float32", "highest", (32, 4), True), ("bfloat16", "high", (256, 8), True)]
TIMED = [("bfloat16", s) for s in ((128, 1024, 512), (64, 2048, 2048), (8, 4096, 11008), (32, 2048, 8192), (64, 8192, 8192),
         (64, 16384, 1024), (128, 8192, 8192), (128, 2048, 4096), (256, 256, 256), (512, 512, 128), (256, 2048, 8192),
         (512, 2048, 8192), (512, 8192, 8192), (512, 16384, 1024), (777, 1112, 2224), (1024, 2048, 2048), (2048, 2048, 2048))]
TIMED += [("float32", s) for s in ((128, 1024, 512), (256, 2048, 8192), (128, 8192, 8192))]


def problem(dtype, shape):
    m, k, n = shape
    return Matmul(m, n, k, dtype, gpu, Matrix((k, 1), True), Matrix((k, 1), True), Matrix((n, 1), True))


def whole_tiles(dtype, shape, most=3):
    element = _plan.element_for(dtype, "highest")
    found = sorted(t for t in candidates(problem(dtype, shape), "training", element) if t.mode == "whole")
    return [(t.block_m, t.cluster) for t in found[:most]]


wanted = {_plan.forward_sm90(_plan.element_for(d, p), "whole", *t, keep) for d, p, t, keep in CHECKS}
wanted |= {_plan.forward_sm90(_plan.element_for(d, "highest"), "whole", *t) for d, s in TIMED for t in whole_tiles(d, s)}
for d, s in TIMED:
    one = _plan.one_launch(problem(d, s)._replace(limits=Limits(whole=False, recompute=False, split=False)), "training", "highest")
    wanted.add(one.kernel)
with ThreadPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(lambda k: _kernels.compiled(k, (9, 0)), wanted))
print(f"{len(wanted)} variants compiled after {time.monotonic() - began:.0f} s", flush=True)
rng = cp.random.default_rng(int(time.time()))


def cast(a, dtype):
    if dtype != "bfloat16":
        return a.astype(dtype)
    import ml_dtypes
    bits = cp.asarray(a, "f4").view("u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2").view(ml_dtypes.bfloat16)


def wide(a):
    return (a.view("u2").astype("u4") << 16).view("f4").astype("f8") if a.dtype.name == "bfloat16" else a.astype("f8")


def draw(dtype, shape):
    m, k, n = shape
    x, w = (cast(rng.standard_normal((r, k), "f4") + 0.1, dtype) for r in (m, n))
    vectors = {name: rng.standard_normal(n, "f4") + 1 for name in ("bias", "scale", "gamma", "beta")}
    return x, w, vectors


def fresh(n):
    return {"running_mean": cp.zeros(n, "f4"), "running_var": cp.ones(n, "f4"), "num_batches_tracked": cp.zeros((), "i8")}


wrong = 0
for dtype, precision, tile, keep in CHECKS:
    for m in sorted({min(max(2, 17 * keep), tile[0] * tile[1]), tile[0] * tile[1] // 2 + 1, tile[0] * tile[1] - 5}):
        k, n = 776, 328
        x, w, v = draw(dtype, (m, k, n))
        outs = []
        for _ in range(4):
            y, state = cp.empty((m, n), x.dtype), fresh(n)
            y.view("u2" if y.itemsize == 2 else "u4").fill(0x7FC0 if dtype == "bfloat16" else 0x7E00 if y.itemsize == 2 else 0x7FC00000)
            got = forward_within(Limits(sm90=tile, whole=True), x, w, **v, **state, training=True, gemm="sm90",
                                 precision=precision, out=y, return_saved=keep)
            outs.append((y, *state.values(), *((got[1].deviations, got[1].vectors[:5]) if keep else ())))
        cp.cuda.Device().synchronize()
        g = wide(x) @ wide(w).T
        mean, var = g.mean(0), g.var(0)
        s, b, ga, be = (v[name].astype("f8") for name in ("scale", "bias", "gamma", "beta"))
        a = ga * s / cp.sqrt(s * s * var + 1e-5)
        truth = a * (g - mean) + be
        rm, rv = 0.1 * s * (mean + b), 0.9 + 0.1 * s * s * var * m / (m - 1)
        err = [float(cp.linalg.norm(wide(o) - t) / cp.linalg.norm(t)) for o, t in zip(outs[0], (truth, rm, rv))]
        if keep:
            d, vec = outs[0][4][:, :n], outs[0][5]
            err.append(float(cp.linalg.norm(wide(d) * vec[4] - (g - mean)) / cp.linalg.norm(g - mean)))
        limit = {"bfloat16": 4e-3, "float16": 1e-3}.get(dtype, 1e-3 if precision == "high" else 2e-6)
        same = all(bool((p.view("u1") == q.view("u1")).all()) for o in outs[1:] for p, q in zip(o, outs[0]) if p.ndim == 2)
        ok = all(e < limit for e in err) and same and int(outs[0][3]) == 1  # NaN fails
        wrong += not ok
        if not ok:
            print("WRONG", dtype, precision, tile, "keep" * keep, m, [f"{e:.1e}" for e in err], "bits", same, int(outs[0][3]), flush=True)
print(f"{len(CHECKS)} variants checked, {wrong} wrong, after {time.monotonic() - began:.0f} s", flush=True)
if wrong:
    sys.exit(1)

flush = cp.empty(1 << 28, "u1")
stream = cp.cuda.Stream(non_blocking=True)


def graph_of(call, calls=4):
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(calls):
            call()
        return stream.end_capture()


def us(graph, calls=4):
    e = [cp.cuda.Event() for _ in range(2)]
    with stream:
        flush.fill(1)
        e[0].record(stream), graph.launch(stream), e[1].record(stream)
        e[1].synchronize()
    return cp.cuda.get_elapsed_time(*e) / calls * 1e3


print("B, I, O: us in a graph, calls of four, L2 flushed; floor = x, w, y once at 4.3 TB/s; (model)")
for dtype, shape in TIMED:
    m, k, n = shape
    x, w, v = draw(dtype, shape)
    y, state = cp.empty((m, n), x.dtype), fresh(n)
    ways = {"parked": (Limits(whole=False, recompute=False, split=False), "sm90"), "cublas": (Limits(), "cublas")}
    ways |= {f"{t[0]}x{t[1]}": (Limits(sm90=t, whole=True), "sm90") for t in whole_tiles(dtype, shape)}
    graphs = {}
    for name, (limits, gemm) in ways.items():
        graphs[name] = graph_of(lambda: forward_within(limits, x, w, **v, **state, training=True, gemm=gemm, out=y))
    times = {name: [] for name in graphs}
    for turn in range(12):
        for name in sorted(graphs, reverse=turn % 2 == 1):
            times[name].append(us(graphs[name]))
    floor = (m * k + n * k + m * n) * x.itemsize / 4.3e6
    print(dtype, shape, f"floor {floor:.1f}", " ".join(f"{name} {statistics.median(t):.1f}" for name, t in times.items()), flush=True)
print(f"done after {time.monotonic() - began:.0f} s")
