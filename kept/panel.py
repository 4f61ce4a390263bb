# dw.py: a backward that makes dweight alone: by cuBLAS, and by forward_sm90 with each tile; us in a graph of 10 | cold
import sys, statistics, torch
sys.path.insert(0, "tools"); sys.path.insert(0, ".")
import versus as V
import gsbn
from gsbn._forward import forward_within
from gsbn._backward import backward_within
from gsbn._plan import Limits
torch.cuda.set_stream(torch.cuda.Stream())
scratch = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
def graph(call, n=10):
    for _ in range(2): call()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=torch.cuda.current_stream()):
        for _ in range(n): call()
    return g
def warm(calls, rounds=8):
    gs = [graph(c) for c in calls]; t = [[] for _ in gs]
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds + 2):
        for i in sorted(range(len(gs)), reverse=turn % 2 == 1):
            a.record(); gs[i].replay(); b.record(); b.synchronize(); t[i].append(1e3 * a.elapsed_time(b) / 10)
    return [statistics.median(v[2:]) for v in t]
import gsbn._plan.gemm as G, gsbn._backward as BW, gsbn._plan.backward as PB, gc
def clear(): BW._calls.clear()
with torch.no_grad():
  for m, k, n in eval(sys.argv[1]):
    torch.manual_seed(0)
    x, dy = (torch.randn(m, c, device="cuda").bfloat16() for c in (k, n)); w = (torch.randn(n, k, device="cuda") / k**.5).bfloat16(); s = torch.rand(n, device="cuda") + .5
    _, saved = forward_within(Limits(), x, w, s, training=True, gemm="auto", return_saved=True)
    cells = []
    for tile in ((256, 2), (128, 2), (256, 1), (128, 1)):
        for panel in (1, 2, 4, 8, 16, 64):
            clear(); G._panel = lambda p, mode, element, panel=panel: panel
            sv = saved._replace(gemm="sm90"); lim = Limits(sm90=tile)
            call = lambda: backward_within(lim, dy, sv, needs=("weight",))
            import gsbn._plan as PP
            call(); torch.cuda.synchronize()
            t, c = warm([call], 6)[0], V.on_the_device([call], 7, scratch)[0]
            cells.append(f"{tile[0]}x{tile[1]}/{panel} {t:.1f}|{c:.1f}")
    print((m, k, n), " ".join(cells), flush=True)
