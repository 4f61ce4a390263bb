# prof.py shapes dtype: kernels of a step: gsbn's and torch.compile's, us each by the profiler (L2 flushed between)
import sys, math, torch, collections
sys.path.insert(0, ".")
import gsbn
from torch.profiler import profile, ProfilerActivity
dev = "cuda"; flush = torch.empty(1 << 26, dtype=torch.float32, device=dev)
DT = {"bf16": torch.bfloat16, "f32": torch.float32}
dt = DT[sys.argv[2]]
for m, k, n in eval(sys.argv[1]):
    torch.manual_seed(m)
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
    def eager():
        y = f(*ps); return torch.autograd.grad(y, ps, dy)
    for name, fn in (("gsbn", ours), ("compile", theirs)):
        for _ in range(3): fn()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as pr:
            for _ in range(7): flush.zero_(); fn()
            torch.cuda.synchronize()
        t = collections.OrderedDict()
        for e in sorted((e for e in pr.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start):
            if "vectorized_elementwise" in e.name and "FillFunctor" in e.name: continue
            t.setdefault(e.name, []).append(e.device_time if hasattr(e, "device_time") else e.cuda_time)
        print((m, k, n), sys.argv[2], name, "sum", round(sum(sorted(v)[len(v)//2] * len(v) / 7 for v in t.values()), 1), flush=True)
        for kn, v in t.items(): print("    %6.1f x%.0f %s" % (sorted(v)[len(v)//2], len(v) / 7, kn[:110]))
