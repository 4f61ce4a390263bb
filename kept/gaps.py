# gaps.py shapes dtype: kernels of a step in a CUDA graph, their start, time and the gap before: us, medians over steps and replays
import sys, math, torch, collections, statistics
sys.path.insert(0, ".")
import gsbn
from torch.profiler import profile, ProfilerActivity
DT = {"bf16": torch.bfloat16, "f32": torch.float32}
dt = DT[sys.argv[2]]
torch.cuda.set_stream(torch.cuda.Stream())
for m, k, n in eval(sys.argv[1]):
    torch.manual_seed(m)
    dev = "cuda"
    x = torch.randn(m, k, device=dev).to(dt); w = (torch.randn(n, k, device=dev) / math.sqrt(k)).to(dt)
    dy = torch.randn(m, n, device=dev).to(dt); sc = (torch.rand(n, device=dev) + .5).to(dt); ga = sc.clone(); be = sc.clone(); b = sc.clone()
    rm = torch.zeros(n, device=dev); rv = torch.ones(n, device=dev)
    def ours():
        with torch.no_grad():
            y, saved = gsbn.forward(x, w, sc, bias=b, gamma=ga, beta=be, running_mean=rm, running_var=rv, training=True, return_saved=True)
            return gsbn.backward(dy, saved)
    ps = [t.clone().requires_grad_() for t in (x, w, b, sc, ga, be)]
    def f(x, w, b, s, ga, be): return torch.nn.functional.batch_norm(torch.nn.functional.linear(x, w, b) * s, rm, rv, ga, be, True, 0.1, 1e-5)
    comp = torch.compile(f)
    def theirs():
        y = comp(*ps); return torch.autograd.grad(y, ps, dy)
    STEPS = 6
    for name, fn in (("gsbn", ours), ("compile", theirs)):
        for _ in range(3): fn()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=torch.cuda.current_stream()):
            for _ in range(STEPS): out = fn()
        a, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        t = []
        for _ in range(12):
            a.record(); g.replay(); e.record(); e.synchronize(); t.append(1e3 * a.elapsed_time(e) / STEPS)
        with profile(activities=[ProfilerActivity.CUDA]) as pr:
            for _ in range(4): g.replay()
            torch.cuda.synchronize()
        ev = sorted((e for e in pr.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
        ev = [e for e in ev if e.time_range.end > e.time_range.start]
        per = len(ev) // (4 * STEPS)
        rows = collections.defaultdict(list)
        for r in range(1, 4 * STEPS):
            if r % STEPS == 0: continue
            for i in range(per):
                j = r * per + i
                rows[i].append((ev[j].time_range.end - ev[j].time_range.start, ev[j].time_range.start - max(q.time_range.end for q in ev[max(0, j - 3):j])))
        print((m, k, n), sys.argv[2], name, "replay us a step", round(statistics.median(t[2:]), 1), "kernels", per, len(ev), flush=True)
        for i in range(per):
            print("   %6.1f gap %5.1f  %s" % (statistics.median(v[0] for v in rows[i]), statistics.median(v[1] for v in rows[i]), ev[per + i].name[:90]), flush=True)
        del g
