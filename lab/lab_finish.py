import importlib.util, statistics, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import cupy as cp, numpy as np
import ml_dtypes
HERE = Path(__file__).resolve().parent
OLD = HERE.parent / "finish_old"
t00 = time.time()
def load(folder, name):
    package = Path(folder).resolve() / "gsbn"
    spec = importlib.util.spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
def variant(name, folder=HERE, panel=None, clusters=None, **macros):
    pkg = load(folder, "g_" + name)
    gemm = sys.modules["g_" + name + "._plan.gemm"]
    f0 = gemm.forward_sm90
    def forward_sm90(*a, **k):
        kernel = f0(*a, **k)
        return kernel._replace(defines=(*kernel.defines, *((m, str(v)) for m, v in macros.items())))
    gemm.forward_sm90 = forward_sm90
    if panel is not None:
        gemm._panel = lambda *a: panel
    if clusters is not None:
        t0 = gemm.tile_of
        gemm.tile_of = lambda *a, **k: (lambda t: t and t._replace(clusters=min(clusters, t.clusters*2)))(t0(*a, **k))
    return pkg
def make(shape, dtype):
    B, I, O = shape
    rs = cp.random.RandomState(int(time.time()) % 10000)
    x = (rs.standard_normal((B, I), dtype="f4") + 0.3); w = rs.standard_normal((O, I), dtype="f4") / I**0.5
    scale = rs.random_sample(O).astype("f4") + 0.5
    if dtype == "bfloat16": x, w = cp.asarray(x).astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)
    elif dtype == "float16": x, w = x.astype("f2"), w.astype("f2")
    gamma = rs.random_sample(O).astype("f4") + 0.5; beta = rs.standard_normal(O, dtype="f4")
    return x, w, scale, gamma, beta
def call(pkg, ops, training, precision, out, **o):
    x, w, s, g, b = ops
    n = len(w)
    st = {"running_mean": cp.zeros(n, "f4") + 0.1, "running_var": cp.ones(n, "f4")*1.3, "num_batches_tracked": cp.zeros((), "i8")}
    def f():
        return pkg.forward(x, w, s, gamma=g, beta=b, **st, training=training, precision=precision, out=out, **o)
    return f, st
scratch = cp.empty(1 << 28, cp.uint8)
stream = cp.cuda.Stream(non_blocking=True)
def graph_of(f):
    f(); stream.synchronize()
    stream.begin_capture(); f(); return stream.end_capture()
def bench(shape, dtype, precision, training, pkgs, rounds=13, check=True, nocheck=(), **o):
    ops = make(shape, dtype)
    B, I, O = shape
    outs = {}
    with ThreadPoolExecutor(16) as pool:   # compile in parallel
        def warm(item):
            name, pkg = item
            with cp.cuda.Device(0):
                K = pkg._kernels
                try:
                    m = sys.modules[pkg.__name__ + "._plan"]
                    Mx = m.Matrix
                    p = m.Matmul(B, O, I, dtype, K.gpu(0), Mx((I, 1), True), Mx((I, 1), True), Mx((O, 1), True), m.Limits())
                    plan = m.plan(p, training=training, precision=precision, saved=o.get("return_saved", False), activation=o.get("activation"))
                    if plan.one: K.compiled(plan.one.kernel, (9, 0)); return plan.one.block_m, plan.one.cluster, plan.one.clusters, plan.one.panel
                    return plan.gemm
                except Exception as e: return repr(e)[:300]
        info = dict(zip(pkgs, pool.map(warm, pkgs.items())))
    print(f"== {shape} {dtype} {precision} {'training' if training else 'inference'} {o}  [{time.time()-t00:.0f} s]", flush=True)
    with stream:
        x, w, s, g, b = ops
        want = None
        if check:
            G = x.astype("f8") @ w.astype("f8").T
            S = s.astype("f8")
            if training: mean, var = G.mean(0), G.var(0); want = g * S / cp.sqrt(S*S*var + 1e-5) * (G - mean) + b
            else: want = g / np.sqrt(cp.float32(1.3) + 1e-5) * (S * G - 0.1) + b
            if o.get("activation"): want = cp.maximum(want, 0)
            del G
        graphs, first = {}, None
        for name, pkg in pkgs.items():
            out = cp.empty((B, O), x.dtype); out.view("u1").fill(0xFF)
            f, st = call(pkg, ops, training, precision, out, **o)
            f(); stream.synchronize()
            bits = out.view("u1").copy(); stat = st["running_mean"].copy(), st["running_var"].copy()
            note = ""
            if name not in nocheck:
                err = 0
                if want is not None:
                    e = out.astype("f8") - want; err = float(cp.linalg.norm(e) / cp.linalg.norm(want)); del e
                if first is None: first = bits, stat
                same = bool((bits == first[0]).all()), all(bool((a == c).all()) for a, c in zip(stat, first[1]))
                out.view("u1").fill(0xFF); f(); stream.synchronize()
                note = f"err {err:.2e} bits as old {same} again {bool((out.view('u1') == bits).all())}"
            graphs[name] = graph_of(f), note, f
        del want, bits
        names, times = list(graphs), {n: [] for n in graphs}
        a, z = cp.cuda.Event(), cp.cuda.Event()
        for r in range(rounds + 2):
            for n in (names if r % 2 else names[::-1]):
                scratch.data.memset_async(r, scratch.nbytes, stream)
                a.record(stream); graphs[n][0].launch(stream); z.record(stream); z.synchronize()
                if r > 1: times[n].append(1e3 * cp.cuda.get_elapsed_time(a, z))
        for n in names:
            t = times[n]
            print(f"{n:14s} {statistics.median(t):8.1f} min {min(t):8.1f}  x{statistics.median(t)/statistics.median(times[names[0]]):.3f} {info[n]} {graphs[n][1]}", flush=True)
def trace(pkg, shape, dtype, precision="highest", **o):
    ops = make(shape, dtype)
    with stream:
        out = cp.empty((shape[0], shape[2]), ops[0].dtype)
        f, st = call(pkg, ops, True, precision, out, **o)
        for _ in range(3):
            for key, raw in pkg._kernels._modules.items():
                if any(a == "EXP_TRACE" and b == "1" for a, b in key[1]): cp.ndarray((4096,), cp.uint64, raw.get_global("trace")).fill(0)
            scratch.data.memset_async(1, scratch.nbytes, stream); f(); stream.synchronize()
        for key, raw in pkg._kernels._modules.items():
            if any(a == "EXP_TRACE" and b == "1" for a, b in key[1]):
                at = raw.get_global("trace")
                t = cp.ndarray((512, 8), cp.uint64, at).get().astype("i8")
                q, t = t[256:], t[:256]; q = q[q[:, 3] > 0]; q = q[:, :3] / q[:, 3:4]
                t3 = t; print("  cycles a unit: wait, coefficients, rows:", np.median(q, 0).round(), "units a warp 2", np.median(cp.ndarray((512, 8), cp.uint64, at).get()[256:, 3]))
                t = t[t[:, 0] > 0]; z = t[:, 0].min()
                cols = {"start": t[:,0]-z, "main end": t[:,1]-z, "merge began": t[:,6]-z, "merged": t[:,7]-z, "last done": t[:,3]-z, "end": t[:,5]-z}
                print("trace", pkg.__name__, " ".join(f"{k} {np.median(v)/1e3:.1f} ({v.min()/1e3:.1f}..{v.max()/1e3:.1f})" for k, v in cols.items()),
                      "ticket at main end", np.median(t[:,2]), t[:,2].min(), t[:,2].max(), "at last done", np.median(t[:,4]), flush=True)
