import sys, statistics, torch, math
sys.path.insert(0, ".")
import cupy as cp, gsbn
from gsbn._forward import forward_within
from gsbn._backward import backward_within
from gsbn._plan import Limits
DT = {"bf16": (torch.bfloat16, "high"), "f16": (torch.float16, "high"), "tf32": (torch.float32, "high"), "f32": (torch.float32, "highest")}
dev = "cuda"
flush = torch.empty(1 << 26, dtype=torch.float32, device=dev)
s = torch.cuda.Stream()
def graph(f):
    with torch.cuda.stream(s):
        f(); f()
        s.synchronize()
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
shapes = eval(sys.argv[1]) if len(sys.argv) > 1 else [(1000000,32,32),(100000,32,32),(300000,64,64),(1000000,16,64),(1000000,64,16),(10000,32,32),(20000,64,64),(4000,16,16),(70001,40,24),(1000000,64,64),(802816,128,128),(131072,128,64),(300000,64,128),(20000,128,128),(20000,40,96),(5000,128,128),(2048,128,64)]
names = sys.argv[2].split(",") if len(sys.argv) > 2 else ["bf16", "f32", "tf32"]
for shape in shapes:
    m, k, n = shape
    for name in names:
        dt, prec = DT[name]
        torch.manual_seed(m + n)
        x = torch.randn(m, k, device=dev).to(dt); w = (torch.randn(n, k, device=dev) / math.sqrt(k)).to(dt)
        dy = torch.randn(m, n, device=dev).to(dt); gamma = torch.rand(n, device=dev).to(dt) + .5; beta = torch.randn(n, device=dev).to(dt)
        sc = torch.rand(n, device=dev).to(dt) + .5
        torch.cuda.synchronize()
        with torch.cuda.stream(s), torch.no_grad():
            y, saved = gsbn.forward(x, w, sc, gamma=gamma, beta=beta, training=True, return_saved=True, precision=prec)
            got, runs, keep = {}, {}, []
            for lab, lim in (("narrow", Limits(narrow=True)), ("before", Limits(narrow=False))):
                f = lambda lim=lim: keep.append(backward_within(lim, dy, saved, needs=("x","weight","scale","gamma","beta"))) or keep[-1]
                got[lab] = f(); keep.clear()
                runs[lab] = graph(f)
            s.synchronize()
        xd, wd, dyd = x.double(), w.double().requires_grad_(), dy.double(); xd.requires_grad_()
        gd = gamma.double().requires_grad_(); sd = sc.double().requires_grad_()
        z = torch.nn.functional.batch_norm((xd @ wd.T) * sd, None, None, gd, beta.double(), True, 0.1, 1e-5)
        z.backward(dyd)
        errs = {}
        for lab, g in got.items():
            errs[lab] = [float((a.double() - b).norm() / b.norm()) for a, b in ((g.x, xd.grad), (g.weight, wd.grad), (g.gamma, gd.grad))]
        if name in ("bf16", "f16"):
            pass
        t = timeit(runs)
        fl = (m * (2 * n + 2 * k) + m * n * 2) * x.element_size() / 4.3e6
        print(shape, name, {k2: round(v, 1) for k2, v in t.items()}, f"{t['before']/t['narrow']:.2f}", "floor", round(fl, 1), {a: ["%.1e" % e for e in b] for a, b in errs.items()}, flush=True)
        del xd, wd, dyd, z, got, runs, keep, saved, y
        torch.cuda.empty_cache(); cp.get_default_memory_pool().free_all_blocks()
