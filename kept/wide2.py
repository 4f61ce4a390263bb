# wide2.py: forward and backward of a layer under autocast (dweight in float32): dw by cuBLAS, by forward_sm90; us in a graph, and cold
import sys, statistics, torch
sys.path.insert(0, "tools"); sys.path.insert(0, ".")
import versus as V
import gsbn, gsbn.torch, gsbn._backward as BW, gsbn._plan.backward as PB, gsbn._plan.gemm as G
torch.cuda.set_stream(torch.cuda.Stream())
scratch = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
def graph(call, n=6):
    for _ in range(3): call()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=torch.cuda.current_stream()):
        for _ in range(n): call()
    return g
real, few = PB._wants_sm90, G.FEW_TERMS
for m, k, n in [(256,8192,8192),(256,2048,8192),(512,2048,2048),(64,2048,8192),(128,8192,8192),(32,512,512),(200,1000,4000),(512,512,512)]:
    layer = gsbn.torch.LinearBatchNorm1d(k, n, bias=False, activation="relu", device="cuda")
    x = torch.randn(m, k, device="cuda", requires_grad=True); dy = torch.randn(m, n, device="cuda").bfloat16()
    def step():
        with torch.autocast("cuda", torch.bfloat16): y = layer(x)
        return torch.autograd.grad(y, [x, layer.linear.weight], dy)
    cells, gs = [], []
    for name in ("cublas", "narrow panel", "sm90"):
        BW._calls.clear()
        PB._wants_sm90 = (lambda p, *a: False) if name == "cublas" else real
        old = G.writes
        if name == "narrow panel": G.writes = lambda p: False
        for _ in range(2): out = step()
        if name == "cublas": truth = out[1].clone()
        e = float((out[1] - truth).abs().max() / truth.abs().max())
        if not e < 2e-2: print("WRONG", name, e)
        g = graph(step); gs.append(g)
        G.writes = old
    PB._wants_sm90 = real
    t = [[] for _ in gs]
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(10):
        for i in sorted(range(3), reverse=turn % 2 == 1):
            a.record(); gs[i].replay(); b.record(); b.synchronize(); t[i].append(1e3 * a.elapsed_time(b) / 6)
    print((m, k, n), "cublas, sm90 in panels, sm90:", " ".join(f"{statistics.median(v[2:]):.1f}" for v in t), flush=True)
