# trees.py rounds: one forced tile, many trees, training
import sys, statistics, importlib.util, torch, os, glob
sys.path.insert(0, "tools"); sys.path.insert(0, ".")
import versus as V
names = sorted(os.path.basename(t)[2:] for t in glob.glob("lab/tr?"))
mods = [V.load("lab/tr" + n, "gsbn_" + n) for n in names]
import importlib
torch.cuda.set_stream(torch.cuda.Stream())
rounds = int(sys.argv[1])
def graph(call, n):
    for _ in range(2): call()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=torch.cuda.current_stream()):
        for _ in range(n): call()
    return g
CASES = [((14679,200,112),"256x1"),((8192,256,256),"256x1"),((29070,88,88),"256x1"),((10538,848,288),"256x1"),((16384,472,2048),"256x2"),((26313,608,1024),"256x2"),((200704,384,768),"256x2"),((50000,64,1024),"256x1"),
 ((135732,1024,128),"256x1"),((79412,360,200),"256x2"),((4096,2048,1584),"256x2"),((6359,201,1849),"256x1"),((65536,1024,1024),"256x2"),((16384,4096,4096),"256x2"),((4096,1024,1024),"256x2"),((1120,560,144),"64x2"),((2119,848,1160),"256x1"),((300000,384,100),"256x1")]
print("shape tile", names)
for shape, tile in CASES:
    m, k, n = shape; bm, c = map(int, tile.split("x"))
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda").bfloat16(); w = (torch.randn(n, k, device="cuda") / k**.5).bfloat16(); s = torch.rand(n, device="cuda") + .5
    calls, ys = [], []
    for nm, mod in zip(names, mods):
        L = importlib.import_module(f"gsbn_{nm}._plan").Limits; fw = importlib.import_module(f"gsbn_{nm}._forward").forward_within
        y = torch.full((m, n), float("nan"), device="cuda").bfloat16(); ys.append(y)
        lim = L(sm90=(bm, c), recompute=False, whole=False, narrow=False)
        calls.append(lambda lim=lim, y=y, fw=fw: fw(lim, x, w, s, training=True, gemm="sm90", out=y))
    N = 10 if m * n < 5e7 else 2
    gs = [graph(f, N) for f in calls]
    for g in gs: g.replay()
    torch.cuda.synchronize()
    err = max(float((y.float() - ys[0].float()).abs().max()) for y in ys)
    t = [[] for _ in gs]; a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds + 2):
        for i in sorted(range(len(gs)), reverse=turn % 2 == 1):
            a.record(); gs[i].replay(); b.record(); b.synchronize(); t[i].append(1e3 * a.elapsed_time(b) / N)
    print(shape, tile, *(f"{statistics.median(v[2:]):8.2f}" for v in t), f"err {err:.3g}", flush=True)
