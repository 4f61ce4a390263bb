"""lm.py TREE out [init] : Gauss-Newton on logs, then coordinate descent on the tool's loss"""
import sys, json, math, importlib.util
import numpy as np
tree, out = sys.argv[1:3]
sys.path.insert(0, tree)
spec = importlib.util.spec_from_file_location("sweep", tree + "/tools/sweep.py"); S = importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
from gsbn._plan.rates import Rates
_t = S.tiles; memo = {}
def tiles(shape, dtype, mode):
    k = (tuple(shape), dtype, mode)
    if k not in memo: memo[k] = _t(shape, dtype, mode)
    return memo[k]
S.tiles = tiles
T = [json.loads(l) for l in open("/tmp/S.jsonl")]; V = [json.loads(l) for l in open("/tmp/V.jsonl")]
if "all" in sys.argv: T = T + V
r = eval(open(sys.argv[3]).read()) if len(sys.argv) > 3 and sys.argv[3] != "-" else S.H200
near = {}
def score(X, rates):
    n = 0; tot = 0
    for l in X:
        m = S.expected(l, rates); us = l["us"]; best = min(us[k] for k in m); q = us[min(m, key=m.get)] / best - 1
        n += q > .05; tot += q
    return f"{1 - n / len(X):.4f} mean {tot / len(X):.4f}"
def resid(rates):
    v = []
    for l in T:
        us, m = l["us"], S.expected(l, rates)
        best = min(us[k] for k in m); w = 1 / math.sqrt(len(m))
        d = {k: math.log(m[k] / us[k]) for k in m if us[k] < 1.6 * best}; mu = 0.85 * sum(d.values()) / len(d)
        v += [w * (d[k] - mu) if k in d else 0.0 for k in sorted(m)]
    return np.array(v)
keys = [(f, k) for f, k, _ in S.scalars(r)]
def get(r, f, k):
    v = getattr(r, f); return v if k is None else v[k]
def put(r, vals):
    for (f, k), v in zip(keys, vals): r = S.with_value(r, f, k, float(v))
    return r
print("train", score(T, r), "| valid", score(V, r), "loss", S.loss(T, r), flush=True)
lam = 0.3
base = resid(r); cost = float(base @ base)
for it in range(7):
    th = np.array([get(r, f, k) for f, k in keys]); J = np.empty((len(base), len(keys)))
    for j, (f, k) in enumerate(keys):
        q = S.with_value(r, f, k, float(th[j] * 1.03)); J[:, j] = (resid(q) - base) / math.log(1.03)
    A, b = J.T @ J, -J.T @ base
    for _ in range(6):
        step = np.clip(np.linalg.solve(A + lam * np.eye(len(keys)), b), -0.5, 0.5)
        q = put(r, th * np.exp(step)); e = resid(q); c = float(e @ e)
        if c < cost: r, base, cost, lam = q, e, c, lam / 3; break
        lam *= 4
    else: break
    print("LM", it, round(cost, 4), "lam", lam, "train", score(T, r), "| valid", score(V, r), "loss", round(S.loss(T, r), 5), flush=True)
    open(out + ".py", "w").write(repr(r))
least = S.loss(T, r)
for turn in range(4):
    for f, k, value in list(S.scalars(r)):
        step = 0.1 / (turn + 1)
        for factor in (1 + step, 1 / (1 + step)):
            trial = S.with_value(r, f, k, float(f"{value * factor:.3g}"))
            if (q := S.loss(T, trial)) < least: r, least = trial, q; break
    print("CD", turn, round(least, 5), "train", score(T, r), "| valid", score(V, r), flush=True)
    open(out + ".py", "w").write(repr(r))
