# fdx.py "[(m, k, n), ...]" [reps]: dx of a float32 backward, training: right (all ways), and us in a CUDA graph, L2 flushed
# m rows, k input features (columns of dx), n output features (what dx sums over). From the root, PYTHONPATH=.
import math
import statistics
import sys

import torch

import gsbn
from gsbn import _kernels
from gsbn import _plan as P
from gsbn._backward import How, backward_within, run
from gsbn._interop import kind_of
from gsbn._plan import Limits
from gsbn._plan.gemm import candidates

dev = "cuda"
flush = torch.empty(1 << 26, device=dev)
stream = torch.cuda.Stream()


def graph(f):
    with torch.cuda.stream(stream):
        f(), f()
        stream.synchronize()
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, stream=stream):
            f()
    return made


def times(runs, reps):
    found = {name: [] for name in runs}
    for turn in range(reps):
        for name in runs if turn % 2 else reversed(list(runs)):
            with torch.cuda.stream(stream):
                flush.zero_()
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(stream), runs[name].replay(), b.record(stream)
            b.synchronize()
            found[name].append(a.elapsed_time(b) * 1e3)
    return {name: statistics.median(us) for name, us in found.items()}


def norm(error, truth):
    return float(error.norm() / truth.norm())


reps = int(sys.argv[2]) if len(sys.argv) > 2 else 9
for m, k, n in eval(sys.argv[1]):
    torch.manual_seed(m + k + n)
    x, w, dy = torch.randn(m, k, device=dev), torch.randn(n, k, device=dev) / math.sqrt(k), torch.randn(m, n, device=dev)
    w64 = w.double()
    d = x.double() @ w64.T
    d -= d.mean(0)
    r = 1 / torch.sqrt((d * d).mean(0) + 1e-5)
    dg = r * (dy - dy.double().mean(0) - d * r**2 * (dy * d).mean(0))
    truth, cancels = dg @ w64, m <= 2  # of two rows dg is nothing but roundings
    del d, dg
    _, saved = gsbn.forward(x, w, training=True, return_saved=True)
    p = P.Matmul(m, n, k, "float32", _kernels.gpu(0), *(P.Matrix((c, 1), True) for c in (k, k, n)))
    of_dx = p._replace(n=k, k=n, x=p.y, w=p.w.T, y=p.x)
    ways = {"cublas": (Limits(), "cublas"), "both": (Limits(limbs_of_x=False), "sm90"), "auto": (Limits(), "auto")}
    for t in sorted(candidates(of_dx, "gemm", "limbs")):
        if t.element == "limbs_of_x":
            ways["x".join(map(str, t.shape)) + f"({t.us:.0f})"] = Limits(sm90=t.shape, limbs_of_x=True), "sm90"
    # the product alone, of a dg that is given: its worst element, in units of the bound of docs/float32.md
    a, b = dy.abs().double(), w64.abs()
    bound = (2.0**-21 + 3 * min(n, 32) * 2.0**-23 + -(-n // 32) * 2.0**-24) * (a @ b)
    bound += n * 2.0**-38 * a.amax(1)[:, None] * b.amax(0)
    product = dy.double() @ w64
    runs, wrong = {}, {}
    with torch.no_grad():
        for name, (limits, gemm) in ways.items():
            how = How(True, "highest", gemm, (None,) * 4, None, None, None, ("x",), None, limits, norm=False)
            given = torch.empty(m, -(-n // 4) * 4, device=dev)[:, :n].copy_(dy)
            dx = run(kind_of(given), (given, None, w, None, None), how)[1][0].double()
            error = (dx - product).abs()
            worst = float((error / bound).max())
            of_all = norm(backward_within(limits, dy, saved._replace(gemm=gemm), needs=("x",)).x.double() - truth, truth)
            bad = not worst <= 1 or (not cancels and not of_all < 3e-6)
            wrong[name] = ("WRONG " if bad else "") + f"{worst:.2f} {norm(error, product):.1e} {of_all:.1e}"
            chosen = saved._replace(gemm=gemm)
            runs[name] = graph(lambda limits=limits, chosen=chosen: backward_within(limits, dy, chosen, needs=("x",)))
        for name in ("cublas", "both", "auto"):
            (limits, gemm), both = ways[name], ("x", "weight")
            chosen = saved._replace(gemm=gemm)
            runs[name + "+dw"] = graph(lambda limits=limits, chosen=chosen: backward_within(limits, dy, chosen, needs=both))
    us = times(runs, reps)
    plan = P.backward_plan(p, training=True, needs=("x", "weight"))
    taken = [
        q if q is None or q.one is None else f"{q.one.element} {q.one.block_m}x{q.one.cluster}x{q.one.split}"
        for q in (plan.x, plan.weight)
    ]
    taken = ["none" if q is None else q if isinstance(q, str) else q.gemm for q in taken]
    print((m, k, n), "floor", round((m * k + n * k + m * n) * 4 / 4.3e6, 1), "dx, dw by", *taken, flush=True)
    print("   us", {name: round(t, 1) for name, t in us.items()}, flush=True)
    print("   worst/bound, norm error of the product, and of dx:", wrong, flush=True)
    del runs
