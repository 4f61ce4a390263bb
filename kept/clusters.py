# clusters.py: passes of the backward by two launches, by backward_fused, and by clusters of 2, 4, 8: us, cold, dweight not made
import sys, statistics, torch
sys.path.insert(0, "."); sys.path.insert(0, "tools")
import versus as V
import gsbn
from gsbn._backward import backward_within
from gsbn._plan import Limits
torch.cuda.set_stream(torch.cuda.Stream())
scratch = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
needs = ("x", "scale")
WAYS = {"two": dict(fused=False, cluster=1), "1": dict(fused=True, cluster=1), "2": dict(fused=True, cluster=2), "4": dict(fused=True, cluster=4), "8": dict(fused=True, cluster=8), "auto": {}}
import gsbn._plan.backward as B
from gsbn._plan.variants import CLUSTERS_OF_COLUMNS
ran = []
real = B.backward_plan
for dn, ms in (("bfloat16", (64, 128, 256, 512, 1024, 2048, 4096, 8192)), ("float32", (64, 256, 512, 1024, 2048, 4096, 8192))):
    dt, prec = V.DTYPES[dn]
    for m in ms:
        for n in (128, 256, 512, 1024, 2048, 4096, 8192):
            if m * n > (1 << 25): continue
            torch.manual_seed(0)
            x, dy = (torch.randn(m, c, device="cuda").to(dt) for c in (64, n))
            w, s = (torch.randn(n, 64, device="cuda") / 8).to(dt), torch.rand(n, device="cuda") + 0.5
            rm, rv = torch.zeros(n, device="cuda"), torch.ones(n, device="cuda")
            _, saved = gsbn.forward(x, w, s, running_mean=rm, running_var=rv, training=True, return_saved=True, precision=prec)
            calls, names, outs = [], [], []
            for name, of in WAYS.items():
                if name == "1" and m > 1024 or name in "248" and (m + int(name) - 1) // int(name) > 1024: continue
                lim = Limits(**of)
                calls.append(lambda lim=lim: backward_within(lim, dy, saved, needs=needs)); names.append(name)
                try: outs.append(calls[-1]())
                except Exception as e: print(m, n, name, repr(e)[:200]); calls.pop(); names.pop()
            for name, o in zip(names, outs):
                for f in ("x", "scale"):
                    a, b = getattr(o, f).double(), getattr(outs[0], f).double()
                    e = float(((a - b).abs().max()) / b.abs().max())
                    if not e < 2e-2: print("WRONG", m, n, dn, name, f, e)
            t = V.on_the_device(calls, 11, scratch)
            print(dn, m, n, " ".join(f"{a}:{v:.1f}" for a, v in zip(names, t)), flush=True)
