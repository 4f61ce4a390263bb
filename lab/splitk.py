"""CTAs that share k, once on an H200: timeout 100 env PYTHONPATH=. python splitk.py   (from the branch's root)"""
import statistics
from concurrent.futures import ThreadPoolExecutor

import cupy as cp
import numpy as np

from gsbn import _kernels, _plan
from gsbn._forward import forward_within
from gsbn._plan import Limits
from gsbn._plan.gemm import candidates
from gsbn._plan.variants import SPLITS_OF_K
from gsbn.bench.candidate import Candidate
from gsbn.bench.clock import GpuClock

try:
    import torch
except ImportError:
    torch = None
gpu = _kernels.gpu(0)
print("clusters resident of 1, 2, 4, 8:", [gpu.clusters(s) for s in (1, 2, 4, 8)], flush=True)
DTYPES = {"bfloat16": "high", "float16": "high", "tf32": "high", "limbs": "highest"}
CHECKS = [(2, 4104, 8), (129, 16384, 264), (512, 8200, 136), (333, 4104, 136)]
TIMES = [(512, 16384, 1024), (256, 16384, 2048), (64, 16384, 1024), (256, 16384, 1024), (128, 8192, 8192),
         (64, 8192, 8192), (300, 4096, 520), (128, 4096, 1024), (512, 8192, 2048)]


def call(data, limits, dtype, training, keeps=False, out=None, gemm="sm90", activation=None):
    names = ("bias", "gamma", "beta", "running_mean", "running_var")
    return forward_within(limits, *data[:3], **dict(zip(names, data[3:])), training=training, precision=DTYPES[dtype], gemm=gemm, out=out,
                          return_saved=keeps, activation=activation)


def problem(shape, dtype, limits=Limits()):
    b, i, o = shape
    name = dtype if dtype not in ("tf32", "limbs") else "float32"
    return _plan.Matmul(b, o, i, name, gpu, *(_plan.Matrix((c, 1), True) for c in (i, i, o)), limits)


def takes(shape, dtype, tile, mode="training"):
    return any(t.shape == tile for t in candidates(problem(shape, dtype), mode, dtype))


def operands(shape, dtype):
    b, i, o = shape
    rng = cp.random.default_rng(int(np.random.default_rng().integers(2**31)))
    x, w, s, bias, gamma, beta = (rng.standard_normal(n, dtype="f4") for n in ((b, i), (o, i), o, o, o, o))
    x += 0.5
    w /= i**0.5
    if dtype in ("float16", "bfloat16"):
        import ml_dtypes
        t = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else "f2")
        x, w = x.astype(t), w.astype(t)
    return x, w, s + 2, bias, gamma, beta


with ThreadPoolExecutor(16) as pool:  # the variants that follow, all at once
    modes = [("training", False), ("training", True), ("inference", False)]
    wanted = [_plan.forward_sm90(d, m, t[0], t[1], k, split=t[2]) for d in DTYPES for m, k in modes for t in SPLITS_OF_K]
    for dtype in ("bfloat16", "tf32", "limbs"):
        for shape in TIMES if dtype == "bfloat16" else TIMES[:4]:
            for gemm in ("auto", "sm90"):
                plan = _plan.plan(problem(shape, dtype, Limits(split=False)), training=True, precision=DTYPES[dtype], gemm=gemm)
                one = plan.one
                wanted += [plan.stats_kernel, plan.normalize_kernel, plan.merge_kernel] if one is None else [one.kernel]
                wanted += [one.limbs.kernel] if one is not None and one.limbs is not None else []
    list(pool.map(lambda k: _kernels.compiled(k, (9, 0)), dict.fromkeys(wanted)))
print("compiled", flush=True)

worst, done = {}, 0
for dtype in DTYPES:
    for shape in CHECKS:
        data = operands(shape, dtype)
        x, w, s, bias, gamma, beta = (a.astype("f8") for a in data)
        g = x @ w.T
        for training in (True, False):
            mean = g.mean(0) if training else 0.0
            var = g.var(0) if training else 1.0
            z = s * (g - mean) if training else s * (g + bias)
            truth = gamma * z / cp.sqrt((s * s if training else 1.0) * var + 1e-5) + beta
            state = [] if training else [cp.zeros(shape[2], "f4"), cp.ones(shape[2], "f4")]
            for tile in SPLITS_OF_K:
                if shape[0] == 2 and training or not takes(shape, dtype, tile, "training" if training else "inference"):
                    continue
                for keeps in (False, True) if training else (False,):
                    out = cp.empty((shape[0], shape[2]), data[0].dtype)
                    out.view("u1").fill(255)  # NaN
                    got = call([*data, *state], Limits(sm90=tile, split=True), dtype, training, keeps, out)
                    y = (got[0] if keeps else got).astype("f8")
                    error = float(abs(y - truth).max() / abs(truth).max())
                    key = dtype, tile
                    worst[key] = max(worst.get(key, 0.0), error) if error == error else float("nan")
                    for _ in range(5):
                        again = call([*data, *state], Limits(sm90=tile, split=True), dtype, training, keeps)
                        again = again[0] if keeps else again
                        assert (again.view("u1") == out.view("u1")).all(), ("other bits", dtype, shape, tile)
                    done += 1
for key, error in worst.items():
    limit = {"bfloat16": 1e-2, "float16": 2e-3, "tf32": 2e-3, "limbs": 5e-6}[key[0]]
    print("ok  " if error < limit else "WRONG", *key, f"{error:.1e}")
print(done, "calls checked", flush=True)

clock = GpuClock()
with clock.active():
    for dtype in ("bfloat16", "tf32", "limbs"):
        for shape in TIMES if dtype == "bfloat16" else TIMES[:4]:
            data = operands(shape, dtype)
            out = cp.empty((shape[0], shape[2]), data[0].dtype)
            runs = {"auto": (Limits(split=False), "auto"), "whole k": (Limits(split=False), "sm90")}
            runs |= {"{}x{}x{}".format(*t): (Limits(sm90=t, split=True), "sm90") for t in SPLITS_OF_K
                     if takes(shape, dtype, t)}
            found = {name: Candidate(name, "cupy", lambda l=l, g=g: call(data, l, dtype, True, False, out, g), tuple)
                     for name, (l, g) in runs.items()}
            if torch and dtype == "bfloat16":
                a, b = (torch.from_dlpack(d.view("i2")).view(torch.bfloat16) for d in data[:2])
                found["torch.mm"] = Candidate("torch.mm", "torch", lambda a=a, b=b: torch.mm(a, b.T), tuple)
            for c in found.values():
                c.call()
            trials = {name: clock.trial(c, 4) for name, c in found.items()}
            us = {name: [] for name in trials}
            for turn in range(9):
                for name, (trial, _) in trials.items():
                    us[name].append(1e6 * trial())
            model = {"{}x{}x{}".format(*t.shape) if t.split > 1 else "": t.us
                     for t in candidates(problem(shape, dtype), "training", dtype)}
            print(shape, dtype, ", ".join(f"{name} {statistics.median(v):.1f}" + (f" (model {model[name]:.0f})"
                  if name in model else "") + ("" if trials[name][1] == "graph" else " queue")
                  for name, v in us.items()), flush=True)
