import sys, statistics, torch
sys.path.insert(0, "tools"); sys.path.insert(0, ".")
import versus as V
import gsbn
from gsbn._forward import forward_within
from gsbn._plan import Limits
torch.cuda.set_stream(torch.cuda.Stream())
scratch = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
for m,k,n in [(380000,768,512),(200704,384,768),(65536,1024,1024)]:
    x, w, s = torch.randn(m,k,device="cuda").bfloat16(), (torch.randn(n,k,device="cuda")/k**.5).bfloat16(), torch.rand(n,device="cuda")+.5
    for saves in (False, True):
        names, calls = ["auto"], [lambda: gsbn.forward(x,w,s,training=True,return_saved=saves)]
        for rec in (True, False):
            for tile in ((256,1),(256,2),(128,1),(128,2)):
                for gemm in ("sm90",):
                    lim = Limits(recompute=rec, sm90=tile)
                    f = lambda lim=lim, gemm=gemm: forward_within(lim, x, w, s, training=True, gemm=gemm, return_saved=saves)
                    try: f(); names.append(f"rec{int(rec)} {tile}"); calls.append(f)
                    except Exception as e: print(tile, rec, str(e)[:80])
        f = lambda: gsbn.forward(x,w,s,training=True,gemm="cublas",return_saved=saves); f(); names.append("cublas"); calls.append(f)
        t = V.on_the_device(calls, 6, scratch)
        print((m,k,n), "saving" if saves else "", *[f"{a}: {b:.0f}" for a,b in zip(names,t)], flush=True)
