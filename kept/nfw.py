# nfw.py shapes names modes: forward narrow beside the best other, in a graph
import sys, statistics, torch, math, os
sys.path.insert(0, ".")
import cupy as cp, gsbn
import gsbn._kernels
from gsbn._forward import forward_within
from gsbn._plan import Limits
import gsbn._plan.narrow as PN
DT = {"bf16": (torch.bfloat16, "high"), "f16": (torch.float16, "high"), "tf32": (torch.float32, "high"), "f32": (torch.float32, "highest")}
dev = "cuda"
flush = torch.empty(1 << 26, dtype=torch.float32, device=dev)
s = torch.cuda.Stream()
def graph(f):
    with torch.cuda.stream(s):
        f(); f(); s.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s): f()
    return g
def timeit(runs, reps=9):
    ev = lambda: torch.cuda.Event(enable_timing=True)
    t = {k: [] for k in runs}
    for r in range(reps):
        for k in (runs if r % 2 else reversed(list(runs))):
            with torch.cuda.stream(s):
                flush.zero_(); a, b = ev(), ev(); a.record(s); runs[k].replay(); b.record(s)
            b.synchronize(); t[k].append(a.elapsed_time(b) * 1e3)
    return {k: statistics.median(v) for k, v in t.items()}
shapes = eval(sys.argv[1]); names = sys.argv[2].split(","); modes = sys.argv[3].split(",")
own = getattr(PN, "_features", None)
for m, k, n in shapes:
    for name in names:
        dt, prec = DT[name]
        torch.manual_seed(m + n)
        x = torch.randn(m, k, device=dev).to(dt); w = (torch.randn(n, k, device=dev) / math.sqrt(k)).to(dt)
        gamma = torch.rand(n, device=dev) + .5; beta = torch.randn(n, device=dev)
        rm = torch.zeros(n, device=dev); rv = torch.ones(n, device=dev); y = torch.empty(m, n, device=dev, dtype=dt)
        step = max(1, m // 20000); part = x[::step].double() @ w.double().T
        for mode in modes:
            o = dict(gamma=gamma, beta=beta, running_mean=rm, running_var=rv, training=mode != "inference", precision=prec, out=y)
            if mode == "saving": o["return_saved"] = True
            ways = {"else": Limits(narrow=False), "narrow": Limits(narrow=True)}
            if name == "f32" and "FEATS" in os.environ:
                for f in (f for f in eval(os.environ["FEATS"]) if -(-k // 32) * 32 * f * 4 <= 131072): ways[f"n{f}"] = Limits(narrow=True, gpu=gsbn._kernels.gpu(0)._replace(pairs=66 - f // 32))
            runs, errs, keep = {}, {}, []
            with torch.no_grad(), torch.cuda.stream(s):
                for lab, lim in ways.items():
                    if own and lab[1:].isdigit(): PN._features = lambda p, element, f=int(lab[1:]): f
                    f = lambda lim=lim: keep.append(forward_within(lim, x, w, **o, gemm="tiled" if lim.narrow else "auto"))
                    y.fill_(float("nan")); rm.zero_(); rv.fill_(1)
                    try: f()
                    except Exception as e: errs[lab] = str(e)[:80]; continue
                    keep.clear(); s.synchronize()
                    if mode == "inference": ref = part / math.sqrt(1 + 1e-5) * gamma.double() + beta.double(); ev_ = 0
                    else:
                        mu, var = torch.zeros(n, device=dev, dtype=torch.float64), torch.zeros(n, device=dev, dtype=torch.float64)
                        for i in range(0, m, 65536): mu += (x[i:i+65536].double() @ w.double().T).sum(0)
                        mu /= m
                        for i in range(0, m, 65536): var += ((x[i:i+65536].double() @ w.double().T) - mu).square().sum(0)
                        ev_ = float(((rv.double() - .9) * 10 / (var / (m - 1)) - 1).abs().max()); em = float((rm.double() * 10 - mu).abs().max() / (var / m).sqrt().min()); var /= m
                        ref = (part - mu) / torch.sqrt(var + 1e-5) * gamma.double() + beta.double()
                    errs[lab] = "%.1e" % float((y[::step].double() - ref).norm() / ref.norm()) + (" %.1e" % ev_ if ev_ else "")
                    runs[lab] = graph(f)
                    if own: PN._features = own
                t = timeit(runs)
            es = x.element_size()
            print((m, k, n), name, mode, {a: round(b, 1) for a, b in t.items()}, "floor", round((m*k+m*n)*es/4.3e6, 1), errs, flush=True)
            keep.clear(); del runs; cp.get_default_memory_pool().free_all_blocks()
