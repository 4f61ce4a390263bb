# dw (and dx) of a float32 backward by ways: right, and us in a CUDA graph, L2 flushed
import math, statistics, sys, os, torch
import gsbn
from gsbn._backward import backward_within
from gsbn._plan import Limits
S = eval(sys.argv[1]); reps = int(sys.argv[2]) if len(sys.argv) > 2 else 7
WAYS = eval(os.environ.get("WAYS", "{'else': Limits(narrow=False, tall=False), 'notall': Limits(tall=False), 'auto': Limits(), 'tall': Limits(tall=True), 'nonarrow': Limits(narrow=False)}"))
dev = "cuda"; flush = torch.empty(1 << 26, device=dev); stream = torch.cuda.Stream()
def graph(f):
    with torch.cuda.stream(stream):
        f(), f(); stream.synchronize(); made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, stream=stream): f()
    return made
def times(runs):
    found = {n: [] for n in runs}
    for t in range(reps):
        for n in runs if t % 2 else reversed(list(runs)):
            with torch.cuda.stream(stream):
                flush.zero_(); a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(stream), runs[n].replay(), b.record(stream)
            b.synchronize(); found[n].append(a.elapsed_time(b) * 1e3)
    return {n: round(statistics.median(us), 1) for n, us in found.items()}
norm = lambda e, t: float(torch.linalg.norm(e) / torch.linalg.norm(t))
for m, k, n in S:
    torch.manual_seed(m + k + n)
    x, w, dy = torch.randn(m, k, device=dev), torch.randn(n, k, device=dev) / math.sqrt(k), torch.randn(m, n, device=dev)
    with torch.no_grad():
        _, saved = gsbn.forward(x, w, training=True, return_saved=True)
        got = {of: backward_within(at, dy, saved, needs=("x", "weight")) for of, at in WAYS.items()}
        first = next(iter(WAYS))
        beside = {of: f"{norm(q.x - got[first].x, got[first].x):.0e} {norm(q.weight - got[first].weight, got[first].weight):.0e}" for of, q in got.items() if of != first}
        del got
        torch.cuda.empty_cache()
        runs = {}
        for name, limits in WAYS.items():
            for needs in (("weight",), ("x", "weight"), ("x",)):
                if name in ("tall", "nonarrow") and needs == ("x",): continue
                runs[" ".join(needs) + " " + name] = graph(lambda limits=limits, needs=needs: backward_within(limits, dy, saved, needs=needs))
        us = times(runs)
    print((m, k, n), us, beside, flush=True)
    del runs, saved, x, w, dy
    torch.cuda.empty_cache()
