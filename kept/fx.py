# fx.py shapes: forward in float32 highest, training/inference, few rows: limbs_of_x by each tile, limbs, cublas
import sys, statistics, math, torch
sys.path.insert(0, ".")
import gsbn
from gsbn._forward import forward_within
from gsbn._plan import Limits
import gsbn._plan as P
from gsbn._plan.gemm import candidates
exec(open("lab/nb.py").read().split("shapes = eval")[0].split("DT = ")[0].split("import cupy")[0]) if 0 else None
dev = "cuda"
flush = torch.empty(1 << 26, dtype=torch.float32, device=dev); s = torch.cuda.Stream()
def graph(f):
    with torch.cuda.stream(s):
        f(); f(); s.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s): f()
    return g
def timeit(runs, reps=7):
    ev = lambda: torch.cuda.Event(enable_timing=True); t = {k: [] for k in runs}
    for r in range(reps):
        for k in (runs if r % 2 else reversed(list(runs))):
            with torch.cuda.stream(s):
                flush.zero_(); a, b = ev(), ev(); a.record(s); runs[k].replay(); b.record(s)
            b.synchronize(); t[k].append(a.elapsed_time(b) * 1e3)
    return {k: statistics.median(v) for k, v in t.items()}
shapes = eval(sys.argv[1])
modes = sys.argv[2].split(",") if len(sys.argv) > 2 else ["training"]
dv = P.Device((9, 0), 132, pairs=66, fours=30, eights=15)
for m, k, n in shapes:
    for mode in modes:
        torch.manual_seed(m)
        x = torch.randn(m, k, device=dev); w = torch.randn(n, k, device=dev) / math.sqrt(k)
        g = torch.rand(n, device=dev) + .5; rm = torch.zeros(n, device=dev); rv = torch.ones(n, device=dev); y = torch.empty(m, n, device=dev)
        z = (x.double() @ w.double().T) * g.double()
        if mode == "training": ref = (z - z.mean(0)) / torch.sqrt(z.var(0, unbiased=False) + 1e-5) * g.double()
        else: ref = z / math.sqrt(1 + 1e-5) * g.double()
        runs, err = {}, {}
        o = dict(gamma=g, running_mean=rm, running_var=rv, training=mode == "training", out=y)
        at = [P.Matrix((c, 1), True) for c in (k, k, n)]
        p = P.Matmul(m, n, k, "float32", dv, *at)
        ways = {"cublas": (Limits(), "cublas"), "limbs": (Limits(limbs_of_x=False), "sm90"), "auto": (Limits(), "auto")}
        for t in candidates(p, mode, "limbs"):
            if t.element == "limbs_of_x": ways["x" + "x".join(map(str, t.shape))] = (Limits(sm90=t.shape, limbs_of_x=True), "sm90")
        with torch.no_grad():
            for name, (lim, gemm) in ways.items():
                f = lambda lim=lim, gemm=gemm: forward_within(lim, x, w, g, gemm=gemm, **o)
                y.fill_(float("nan")); rm.zero_(); rv.fill_(1); f(); torch.cuda.synchronize()
                err[name] = float((y.double() - ref).norm() / ref.norm()) if mode == "training" else float((y.double() - ref).norm() / ref.norm())
                runs[name] = graph(f)
        t = timeit(runs)
        print(gsbn.describe(x, w, g, running_mean=rm, running_var=rv, training=mode=='training').kernels if 0 else '', (m, k, n), mode, "floor", round((m*k+n*k+m*n)*4/4.3e6, 1), {a: round(b, 1) for a, b in t.items()}, {a: "%.1e" % e for a, e in err.items()}, flush=True)
        del runs
