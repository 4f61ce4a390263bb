import sys, statistics, importlib, torch
sys.path.insert(0, "tools"); sys.path.insert(0, ".")
import versus as V
P = {v: "gsbn_" + v for v in "ABCD"}
for v in P: V.load("lab/ab/" + v, P[v])
F = {v: importlib.import_module(P[v] + "._forward") for v in P}
L = {v: importlib.import_module(P[v] + "._plan").Limits for v in P}
torch.cuda.set_stream(torch.cuda.Stream())
scratch = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
def graph(call, n=20):
    for _ in range(2): call()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=torch.cuda.current_stream()):
        for _ in range(n): call()
    return g
def warm(calls, rounds=15):
    gs = [graph(c) for c in calls]; t = [[] for _ in gs]
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds + 2):
        for i in sorted(range(len(gs)), reverse=turn % 2 == 1):
            a.record(); gs[i].replay(); b.record(); b.synchronize(); t[i].append(1e3 * a.elapsed_time(b) / 20)
    return [statistics.median(v[2:]) for v in t]
with torch.no_grad():
  for m, k, n, training, tile in [(256,256,256,False,(32,1)),(256,256,256,False,(64,1)),(512,512,128,False,(32,1)),(128,1024,512,False,(16,1,2)),(128,1024,512,False,(32,1)),(32,2048,8192,False,(16,1,2)),(256,256,256,True,(64,4)),(128,1024,512,True,(32,4)),(512,512,128,True,(64,8)),(32,2048,8192,True,(16,1,2)),(8,4096,11008,True,(32,1))]:
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda").bfloat16(); w = (torch.randn(n, k, device="cuda") / k**.5).bfloat16()
    s, ga, be, bi = ((torch.rand(n, device="cuda") + .5).bfloat16() for _ in range(4))
    rm, rv = torch.zeros(n, device="cuda"), torch.ones(n, device="cuda")
    for saved in ((False, True) if training and m > 16 else (False,)):
        calls, ref = [], None
        for v in P:
            lim = L[v](sm90=tile, whole=training, split=len(tile) > 2)
            calls.append(lambda F=F[v], lim=lim: F.forward_within(lim, x, w, s, bias=bi, gamma=ga, beta=be, running_mean=rm, running_var=rv, training=training, gemm="sm90", return_saved=saved))
            y = calls[-1](); y = y[0] if saved else y
            if ref is None: ref = y.clone()
            elif not training and not torch.equal(y, ref): print("DIFFERS", v)
        print((m, k, n), "training" if training else "inference", "saved" * saved, tile, "A B C D", " ".join(f"{a:.2f}|{b:.1f}" for a, b in zip(warm(calls), V.on_the_device(calls, 9, scratch))), flush=True)
