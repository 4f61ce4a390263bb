# sums.py OTHER shapes dtypes: backward warm in a graph and cold: all, and sums alone
import sys, os; sys.argv += ["6"] if len(sys.argv) < 5 else []
src = open("lab/vs.py").read().split("for dn in sys.argv[3]")[0]
exec(src)
for dn in sys.argv[3].split(","):
    dt, prec = V.DTYPES[dn]
    for m, k, n in eval(sys.argv[2]):
        torch.manual_seed(0)
        x, dy = (torch.randn(m, c, device="cuda").to(dt) for c in (k, n))
        w, s = (torch.randn(n, k, device="cuda") / k**0.5).to(dt), torch.rand(n, device="cuda") + 0.5
        calls, vec = [], []
        for p in (other, this):
            _, saved = p.forward(x, w, s, training=True, precision=prec, return_saved=True)
            calls.append(lambda p=p, saved=saved: p.backward(dy, saved, needs=("x", "weight", "scale")))
            vec.append(lambda p=p, saved=saved: p.backward(dy, saved, needs=("scale",)))
        cells = []
        for pair in (calls, vec):
            big = m * (n + k) > 2e7
            for o, h in ((warm(pair),) if not big else ()) + (V.on_the_device(pair, rounds, scratch),):
                cells.append(f"{o:7.1f} {h:7.1f} {100*(h/o-1):+5.1f}%")
        bytes_ = 2 * m * n * (2 if dt != torch.float32 else 4)
        print(f"{(m,k,n)} {dn:<9}", " | ".join(cells), f"sums' floor {bytes_/4.3e6:.1f}", flush=True)
        del x, dy, w, s, calls, vec, saved
