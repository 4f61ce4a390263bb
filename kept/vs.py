# vs.py OTHER shapes dtypes [rounds]: warm in a graph of 20 calls, and cold: forward, saving, backward
import sys, statistics, importlib.util, torch
sys.path.insert(0, "tools"); sys.path.insert(0, ".")
import versus as V
import gsbn as this
other = V.load(sys.argv[1], "gsbn_other")
torch.cuda.set_stream(torch.cuda.Stream())
rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 12
scratch = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
def graph(call, n=20):
    for _ in range(2): call()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=torch.cuda.current_stream()):
        for _ in range(n): call()
    return g
def warm(calls):
    gs = [graph(c) for c in calls]; t = [[] for _ in gs]
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds + 2):
        for i in sorted(range(len(gs)), reverse=turn % 2 == 1):
            a.record(); gs[i].replay(); b.record(); b.synchronize(); t[i].append(1e3 * a.elapsed_time(b) / 20)
    return [statistics.median(v[2:]) for v in t]
for dn in sys.argv[3].split(","):
    dt, prec = V.DTYPES[dn]
    for m, k, n in eval(sys.argv[2]):
        torch.manual_seed(0)
        x, dy = (torch.randn(m, c, device="cuda").to(dt) for c in (k, n))
        w, s = (torch.randn(n, k, device="cuda") / k**0.5).to(dt), torch.rand(n, device="cuda") + 0.5
        both = [V.calls_of(p, x, w, s, dy, prec) for p in (other, this)]
        cells = []
        for pair in zip(*both, strict=True):
            for o, h in (warm(pair), V.on_the_device(pair, rounds, scratch)):
                cells.append(f"{o:7.1f} {h:7.1f} {100*(h/o-1):+5.1f}%")
        print(f"{(m,k,n)} {dn:<9}", " | ".join(cells), flush=True)
