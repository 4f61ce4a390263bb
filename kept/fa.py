import sys; sys.argv=[sys.argv[0]]+sys.argv[1:]
sys.path.insert(0, ".")
import torch, statistics, math, gsbn
import gsbn._plan.backward as B
from gsbn._backward import backward_within
import gsbn._backward as GB
from gsbn._plan import Limits
dev="cuda"; flush = torch.empty(1 << 26, dtype=torch.float32, device=dev); s = torch.cuda.Stream()
def graph(f):
    with torch.cuda.stream(s):
        f(); f(); s.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s): f()
    return g
def timeit(runs, reps=11):
    ev = lambda: torch.cuda.Event(enable_timing=True); t = {k: [] for k in runs}
    for r in range(reps):
        for k in (runs if r % 2 else reversed(list(runs))):
            with torch.cuda.stream(s):
                flush.zero_(); a, b = ev(), ev(); a.record(s); runs[k].replay(); b.record(s)
            b.synchronize(); t[k].append(a.elapsed_time(b) * 1e3)
    return {k: statistics.median(v) for k, v in t.items()}
real = B._fused_along
for m, n in [(8,11008),(64,16384),(64,8192),(512,11008),(1000,8192),(1000,16384),(256,16384),(512,2048),(64,1024),(128,512),(1024,1024),(256,4096),(32,8192),(1024,2048)]:
    for dt in (torch.bfloat16, torch.float32):
        k = 64
        x = torch.randn(m, k, device=dev).to(dt); w = (torch.randn(n, k, device=dev) / 8).to(dt); dy = torch.randn(m, n, device=dev).to(dt)
        one = torch.rand(n, device=dev).to(dt) + .5
        runs, keep, ref = {}, [], None
        with torch.no_grad():
            y, saved = gsbn.forward(x, w, one, gamma=one, beta=one, training=True, return_saved=True)
            for name, lim, al in (("two", Limits(fused=False), None), ("a2", Limits(fused=True), 2), ("a4", Limits(fused=True), 4), ("a8", Limits(fused=True), 8)):
                if al: B._fused_along = lambda n, size, r, al=al: al
                # a fresh key: plans are cached by limits
                gpu = GB._kernels.gpu(0)._replace(pairs=66 - (al or 0) )
                lim = lim._replace(gpu=gpu)
                f = lambda lim=lim: keep.append(backward_within(lim, dy, saved, needs=("scale","gamma","beta","x"))) or keep[-1]
                g = f(); torch.cuda.synchronize()
                if ref is None: ref = [a.double() for a in (g.x, g.scale, g.gamma, g.beta)]
                else:
                    for a, b in zip((g.x, g.scale, g.gamma, g.beta), ref):
                        e = float((a.double()-b).norm()/b.norm()); assert e < (1e-2 if dt==torch.bfloat16 else 1e-4), (m, n, dt, name, e)
                runs[name] = graph(f)
        t = timeit(runs)
        print((m, n), str(dt)[6:], {a: round(b, 1) for a, b in t.items()}, flush=True)
