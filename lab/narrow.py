"""split_limbs, one row a warp (narrow_old.cu beside this file) against several: bits, then us; then whole forwards and steps.

From the root of the branch on an H200:  PYTHONPATH=. timeout 100 python narrow.py      (about 40 s with an empty cache)
"""
import statistics, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import cupy as cp, numpy as np
import gsbn
from gsbn import _declared, _kernels, _plan
from gsbn._plan.cost import split_us
from gsbn._plan.gemm import cheapest_tile
from gsbn._plan.variants import normalize, scale_stats
from cuda.pathfinder import find_nvidia_header_directory
from cupy.cuda import nvrtc

T0 = time.time()
H = None if sys.argv[1:] == ["compile"] else _kernels.gpu(0)
WORDS = ("x", "x_limbs", "x_exponents", "w", "w_limbs", "w_exponents")
OLD = Path(__file__).with_name("narrow_old.cu").read_text()
def old_cubin(warps):
    program = nvrtc.createProgram(OLD, "old.cu", (), ())
    include = [f"-I{d}" for d in (_declared.KERNEL_DIR, find_nvidia_header_directory("cudart"))]
    nvrtc.compileProgram(program, ("-std=c++17", "-ftz=true", f"-DROW_WARPS={warps}", *include, "-arch=sm_90a"))
    path = Path(f"/tmp/narrow_old_{warps}.cubin"); path.write_bytes(nvrtc.getCUBIN(program))
    return str(path)
if sys.argv[1:] == ["compile"]: sys.exit(print([old_cubin(w) for w in (1, 8)]))
SHAPES = ((802816, 128, 128), (1000000, 64, 64), (65536, 64, 128), (65536, 64, 64), (131071, 96, 200), (65536, 256, 512), (50000, 64, 1024))
def problem(B, I, O): return _plan.Matmul(B, O, I, "float32", H, *(_plan.Matrix((c, 1), True) for c in (I, I, O)))
kernels = {_plan.split_limbs(k) for k in (64, 128, 256, 512, 1024, 8192)} | {scale_stats("float32"), normalize("float32")}
kernels |= {_plan.plan(problem(*shape), training=True, gemm="sm90").one.kernel for shape in SHAPES}
with ThreadPoolExecutor(16) as pool:
    made = pool.map(lambda k: _kernels.compiled(k, H.capability), kernels)
    old = {w: cp.RawModule(path=old_cubin(w)).get_function("split_limbs") for w in (1, 8)}
    list(made)
print(f"compiled at {time.time() - T0:.0f} s", flush=True)
rng = cp.random.default_rng(time.time_ns() % 2**31)

def launches(x, w, k):
    """What launches the old one and the new one on these, each with outputs of its own, poisoned."""
    pad, (m, n) = -(-k // 64) * 64, (len(x), len(w))
    outs = [[cp.full((r, 2 * pad) if l else r, 99, "f2" if l else "i4") for r in (m, n) for l in (1, 0)] for _ in "on"]
    kernel = _plan.split_limbs(k)
    vector = [a.data.ptr % 16 == 0 and a.strides[0] % 16 == 0 for a in (x, w)]
    rec = _declared.record(kernel, {"m": m, "n": n, "k": k, "ldx": x.strides[0] // 4, "ldw": w.strides[0] // 4,
                                    "flags": _declared.flags(vector_x=vector[0], vector_w=vector[1])})
    def words(o): return (x.data.ptr, o[0].data.ptr, o[1].data.ptr, w.data.ptr, o[2].data.ptr, o[3].data.ptr)
    warps = 8 if k > 1024 else 1
    was = _kernels.Launcher(old[warps].kernel, overlapping=_kernels._overlaps(0))
    new = _kernels.launcher(kernel, 0, WORDS)
    grids = -(-(m + n) // (8 // warps)), _plan.split_grid((m, n), k, H)
    return outs, [lambda s, f=f, g=g, o=o: f(g, 256, (rec.ctypes.data,), words(o), s)
                  for f, g, o in zip((was, new), grids, outs)], rec

bad = checked = 0
for k in (1, 3, 31, 32, 64, 65, 96, 128, 129, 200, 256, 257, 500, 512, 513, 1024, 1025, 4096, 8192, 9001):
    for m, n in ((1, 1), (127, 5), (129, 200), (1000, 33)):
        for pad, off in ((0, 0), (3, 0), (4, 0), (4, 1)):
            def make(rows):
                flat = cp.full(rows * (k + pad) + off, cp.nan, "f4")
                a = flat[off:].reshape(rows, k + pad)[:, :k]
                a[...] = cp.ldexp(rng.standard_normal((rows, k)), (rng.integers(-60, 60, (rows, 1)) + rng.integers(-15, 1, (rows, k))).astype("i4"))
                a[rows // 2] = 0; a[rows // 3, k // 2] = cp.inf; a[0, k // 3] = cp.nan
                return a
            outs, (a, b), _ = launches(make(m), make(n), k)
            a(0); b(0); checked += 1
            same = all(bool((p.view("i2") == q.view("i2")).all()) for p, q in zip(*outs))
            if not same: bad += 1; print("BAD", k, m, n, pad, off)
# against float64: 2^e (hi + lo) is x up to 2^-23 |x| or 2^-39 of the row's largest
x = rng.standard_normal((5003, 100), dtype="f4"); outs, (_, b), _ = launches(x, x[:7], 100); b(0)
l = outs[1][0].reshape(5003, 2, 2, 64).astype("f8").sum(2).reshape(5003, 128)
assert bool((l[:, 100:] == 0).all())
err = cp.abs(cp.ldexp(l[:, :100], outs[1][1][:, None]) - x)
lim = cp.maximum(2.0**-23 * cp.abs(x), 2.0**-39 * cp.abs(x).max(1, keepdims=True))
bad += int((err > lim).sum())
print(f"bits of old and new: {checked} checked, {bad} bad, at {time.time() - T0:.0f} s", flush=True)
if bad: sys.exit(1)

flush, stream = cp.empty(1 << 28, "u1"), cp.cuda.Stream(non_blocking=True)
def graph(run, calls=4):
    with stream:
        run(stream.ptr); stream.synchronize(); stream.begin_capture()
        for _ in range(calls): run(stream.ptr)
        return stream.end_capture(), calls
def timed(graphs, turns=7):
    us = [[] for _ in graphs]
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    for _ in range(turns):
        for i, (g, calls) in enumerate(graphs):
            with stream:
                flush.data.memset_async(1, flush.nbytes, stream)
                start.record(stream); g.launch(stream); stop.record(stream); stop.synchronize()
            us[i].append(cp.cuda.get_elapsed_time(start, stop) * 1e3 / calls)
    return [statistics.median(u) for u in us]
print("split of x and of a weight of 128 rows, us:   old    new   expected   TB/s of new   copy of as many bytes")
for m, k in ((1000000, 32), (1000000, 64), (802816, 128), (131071, 96), (65536, 256), (65536, 512), (65536, 1024),
             (50000, 64), (16384, 4096), (8192, 8192), (512, 512)):
    x, w = rng.standard_normal((m, k), dtype="f4"), rng.standard_normal((128, k), dtype="f4")
    outs, runs, rec = launches(x, w, k)
    pad = -(-k // 64) * 64; mb = (m + 128) * (4 * k + 4 * pad) * 1e-6
    half = int(mb * 5e5) // 8 * 8; src, dst = rng.random(half // 8).view("u1"), cp.empty(half, "u1")
    def copy(s): dst.data.copy_from_device_async(src.data, half, stream)
    t = timed([graph(r) for r in (*runs, copy)])
    print(f"{m:8} x {k:5}: {t[0]:26.1f} {t[1]:7.1f} {3.7 + mb / 3.6:8.1f} {mb / t[1]:12.2f} {t[2]:14.1f}", flush=True)
    del x, outs, runs, src, dst

print(f"forwards in float32, us, at {time.time() - T0:.0f} s:      auto's path    sm90   cublas   expected of sm90")
for B, I, O in SHAPES:
    if time.time() - T0 > 80: break
    x, w, y = rng.standard_normal((B, I), dtype="f4"), rng.standard_normal((O, I), dtype="f4"), cp.empty((B, O), "f4")
    one, path = cp.ones(O, "f4"), gsbn.describe(x, w, training=True).path
    def of(gemm): return lambda s: gsbn.forward(x, w, one, training=True, out=y, gemm=gemm)
    t = timed([graph(of(g), 2) for g in ("sm90", "cublas")], 5)
    p = problem(B, I, O)
    print(f"{(B, I, O)!s:24} {path:10} {t[0]:8.1f} {t[1]:8.1f} {split_us(p, 'limbs', prepared=False) + cheapest_tile(p, 'training', 'limbs').us:8.1f}", flush=True)
print(f"done at {time.time() - T0:.0f} s")
