# fb.py shapes dtypes modes: every choice of a forward of few rows, in a graph, beside cuBLAS + one launch and the bare GEMM
import sys, statistics, math, torch
sys.path.insert(0, ".")
import gsbn
from gsbn._forward import forward_within
from gsbn._plan import Limits
import gsbn._plan as P
from gsbn._plan.gemm import candidates
dev = "cuda"; flush = torch.empty(1 << 26, dtype=torch.float32, device=dev); s = torch.cuda.Stream()
def graph(f):
    with torch.cuda.stream(s):
        f(); f(); s.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s): f()
    return g
def timeit(runs, reps=15):
    ev = lambda: torch.cuda.Event(enable_timing=True); t = {k: [] for k in runs}
    for r in range(reps):
        for k in (runs if r % 2 else reversed(list(runs))):
            with torch.cuda.stream(s):
                flush.zero_(); a, b = ev(), ev(); a.record(s); runs[k].replay(); b.record(s)
            b.synchronize(); t[k].append(a.elapsed_time(b) * 1e3)
    return {k: statistics.median(v) for k, v in t.items()}
DT = {"bf16": torch.bfloat16, "f16": torch.float16}
shapes = eval(sys.argv[1]); names = sys.argv[2].split(","); modes = sys.argv[3].split(",")
dv = P.Device((9, 0), 132, pairs=66, fours=30, eights=15)
for m, k, n in shapes:
    for name in names:
        for mode in modes:
            dt = DT[name]; dn = str(dt)[6:]
            torch.manual_seed(m)
            x = torch.randn(m, k, device=dev).to(dt); w = (torch.randn(n, k, device=dev) / math.sqrt(k)).to(dt)
            g = torch.rand(n, device=dev) + .5; rm = torch.zeros(n, device=dev); rv = torch.ones(n, device=dev); y = torch.empty(m, n, device=dev, dtype=dt)
            o = dict(gamma=g, running_mean=rm, running_var=rv, training=mode == "training", out=y)
            at = [P.Matrix((c, 1), True) for c in (k, k, n)]
            p = P.Matmul(m, n, k, dn, dv, *at)
            ways = {"auto": (Limits(), "auto"), "cublas": (Limits(), "cublas"), "cublas2": (Limits(fused=False), "cublas")}
            for t in candidates(p, mode, dn):
                ways[t.mode[:2] + "x".join(map(str, t.shape))] = (Limits(sm90=t.shape, split=t.split > 1, whole=t.mode == "whole", recompute=t.mode == "recompute"), "sm90")
            runs = {"gemm": graph(lambda: torch.matmul(x, w.T, out=y))}
            with torch.no_grad():
                for nm, (lim, gemm) in ways.items():
                    f = lambda lim=lim, gemm=gemm: forward_within(lim, x, w, **o, gemm=gemm)
                    try: f(); runs[nm] = graph(f)
                    except Exception as e: print(nm, str(e)[:60])
            t = timeit(runs)
            print((m, k, n), name, mode, "floor", round((m*k+n*k+m*n)*2/4.3e6, 1), {a: round(b, 1) for a, b in sorted(t.items(), key=lambda z: z[1])}, flush=True)
