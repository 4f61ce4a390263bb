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
TILES = [(256, 2), (256, 1), (128, 2), (128, 1), (64, 2), (64, 1)]
with torch.no_grad():
  for m, k, n in eval(sys.argv[1]):
    torch.manual_seed(0)
    x, dy = (torch.randn(m, c, device="cuda").bfloat16() for c in (k, n)); w = (torch.randn(n, k, device="cuda") / k**.5).bfloat16(); s = torch.rand(n, device="cuda") + .5
    for needs in (("weight",), ("x",), ("scale",)):
        calls, names, truth = [], [], None
        for gemm in ("cublas", "auto", "sm90"):
            for tile in (TILES if gemm == "sm90" and needs != ("scale",) else [None]):
                lim = Limits(sm90=tile) if tile else Limits()
                _, saved = forward_within(Limits(), x, w, s, training=True, gemm="auto", return_saved=True); saved = saved._replace(gemm=gemm)
                call = lambda lim=lim, saved=saved: backward_within(lim, dy, saved, needs=needs)
                try: got = getattr(call(), needs[0]); torch.cuda.synchronize()
                except Exception as e: print(gemm, tile, repr(e)[:120]); continue
                if got is not None:
                    if truth is None: truth = got.clone()
                    e = float((got.float() - truth.float()).abs().max() / truth.float().abs().max())
                    if not e < 2e-2: print("WRONG", gemm, tile, e)
                calls.append(call); names.append(gemm + ("x".join(map(str, tile)) if tile else ""))
        w_, c_ = warm(calls), V.on_the_device(calls, 9, scratch)
        print((m, k, n), needs[0], f"write {n*k*2e-6/4.3:.1f}", " ".join(f"{a} {b:.1f}|{c:.1f}" for a, b, c in zip(names, w_, c_)), flush=True)
