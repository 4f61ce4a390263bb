# fdxn.py ["[(m, k, n), ...]"] [reps]: dx of a float32 backward by narrow_product, right, and us in a CUDA graph, L2 flushed
# m rows, k input features (columns of dx), n output features (what dx sums over). From the root, PYTHONPATH=.
# "parts" is the backward in two halves: sums and dg, then both products, also where narrow_backward would take it whole.
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
from gsbn._plan.backward import _limbs_us
from gsbn._plan.cost import ieee_us
from gsbn._plan.narrow import product_by_narrow

SHAPES = [(802816, 128, 128), (131071, 96, 200), (1000000, 64, 64), (65536, 256, 512), (100000, 128, 128)]
SHAPES += [(300000, 96, 160), (50000, 64, 1024), (20000, 128, 256)]
import os
PARTS = "PARTS" in os.environ
WAYS = {"else": Limits(narrow=False), "narrow": Limits(narrow=True), "auto": Limits()}
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
            try: b.synchronize()
            except Exception: print("FAILED IN", name, flush=True); raise
            found[name].append(a.elapsed_time(b) * 1e3)
    return {name: statistics.median(us) for name, us in found.items()}


def norm(error, truth):
    return float(torch.linalg.norm(error) / torch.linalg.norm(truth))


def told(product):
    if product is None:
        return "narrow_backward"
    return "narrow_product" if product.rows else product.one.element if product.one else product.gemm


def check(m, k, n, dy, w):
    """The product alone, of a dg that is given: its worst element in units of the bound of docs/float32.md."""
    w64, found = w.double(), {}
    for layout, weight in (("C", w), ("F", w.T.contiguous().T)):
        for name, limits in WAYS.items():
            how = How(True, "highest", "auto", (None,) * 4, None, None, None, ("x",), None, limits, norm=False)
            dxs = []
            for _ in range(2):
                given = torch.full((m, -(-n // 4) * 4), math.nan, device=dev)[:, :n].copy_(dy)
                dxs.append(run(kind_of(given), (given, None, weight, None, None), how)[1][0])
            worst, off, of_truth = 0.0, 0.0, 0.0
            for rows in range(0, m, 1 << 17):  # float64 of all rows at once would take several GB
                here = slice(rows, rows + (1 << 17))
                a, b = dy[here].double(), w64
                bound = (2.0**-21 + 3 * min(n, 32) * 2.0**-23 + -(-n // 32) * 2.0**-24) * (a.abs() @ b.abs())
                bound += n * 2.0**-38 * a.abs().amax(1)[:, None] * b.abs().amax(0)
                truth = a @ b
                error = dxs[0][here].double() - truth
                worst = max(worst, float((error.abs() / bound).nan_to_num(nan=math.inf).max()))
                off, of_truth = off + float((error * error).sum()), of_truth + float((truth * truth).sum())
            same = torch.equal(dxs[0].view(torch.int32), dxs[1].view(torch.int32))
            bad = not worst <= 1 or not same or not math.isfinite(off)
            found[f"{name} {layout}"] = "WRONG " * bad + f"{worst:.2f} {math.sqrt(off / of_truth):.1e}" + " BITS" * (not same)
    return found


reps = int(sys.argv[2]) if len(sys.argv) > 2 else 9
for m, k, n in eval(sys.argv[1]) if len(sys.argv) > 1 else SHAPES:
    torch.manual_seed(m + k + n)
    x, w, dy = torch.randn(m, k, device=dev), torch.randn(n, k, device=dev) / math.sqrt(k), torch.randn(m, n, device=dev)
    p = P.Matmul(m, n, k, "float32", _kernels.gpu(0), *(P.Matrix((c, 1), True) for c in (k, k, n)))
    pitch = -(-n // 4) * 4
    of_dx = p._replace(n=k, k=n, x=P.Matrix((pitch, 1), True), w=p.w.T, y=p.x)
    by_narrow = product_by_narrow(of_dx, "highest")
    model = {"narrow": by_narrow and by_narrow.us, "limbs": _limbs_us(of_dx), "ieee": ieee_us(of_dx)}
    plans = {of: P.backward_plan(p._replace(limits=at), training=True, needs=("x", "weight")) for of, at in WAYS.items()}
    alone = {of: P.backward_plan(p._replace(limits=at), training=True, needs=("x",)) for of, at in WAYS.items()}
    print((m, k, n), "floor", round((m * k + n * k + m * n) * 4 / 4.3e6, 1), "model", model, flush=True)
    print("   dx+dw:", {of: (told(q.x), told(q.weight)) for of, q in plans.items()}, flush=True)
    print("   dx:", {of: told(q.x) for of, q in alone.items()}, flush=True)
    with torch.no_grad():
        print("   worst/bound and norm error of the product:", check(m, k, n, dy, w), flush=True)
        _, saved = gsbn.forward(x, w, training=True, return_saved=True)
        got = {of: backward_within(at, dy, saved, needs=("x", "weight")) for of, at in WAYS.items()}
        for name in ("x", "weight"):  # of the whole: beside what it is without
            want = getattr(got["else"], name)
            beside = {of: f"{norm(getattr(q, name) - want, want):.1e}" for of, q in got.items()}
            print(f"   d{name} beside that of else (expected below 1e-6):", beside, flush=True)
        frozen = dict(running_mean=torch.zeros(n, device=dev), running_var=torch.ones(n, device=dev))
        _, of_frozen = gsbn.forward(x[:4096], w, **frozen, training=False, return_saved=True)
        dxs = [backward_within(at, dy[:4096], of_frozen, needs=("x",)).x for at in WAYS.values()]
        print("   frozen:", [f"{norm(dx - dxs[0], dxs[0]):.1e}" for dx in dxs], flush=True)
        del got, dxs, of_frozen

        runs, kind = {}, kind_of(dy)
        for name, limits in WAYS.items():
            runs["dx " + name] = graph(lambda limits=limits: backward_within(limits, dy, saved, needs=("x",)))
            runs["dx dw " + name] = graph(lambda limits=limits: backward_within(limits, dy, saved, needs=("x", "weight")))
            if not PARTS: continue
            given = torch.empty(m, pitch, device=dev)[:, :n].copy_(dy)
            how = How(*saved[4:8], *saved[9:], ("x",), None, limits, norm=False)
            runs["product " + name] = graph(
                lambda how=how, given=given: run(kind, (given, None, w, None, None), how._replace(norm=False))
            )

            def parts(how=how._replace(needs=("x", "weight"))):
                dg = run(kind, (dy, None, None, *saved[2:4]), how._replace(norm=True, linear=False))[1][-1][:, :n]
                return run(kind, (dg, x, w, None, None), how)

            runs["parts " + name] = graph(parts)
        us = times(runs, reps)
    print("   us", {name: round(t, 1) for name, t in us.items()}, flush=True)
    del runs, saved, x, w, dy
    torch.cuda.empty_cache()
