import sys, json, math, importlib.util, collections
tree, ratef = sys.argv[1:3]
sys.path.insert(0, tree)
spec = importlib.util.spec_from_file_location("sweep", tree + "/tools/sweep.py"); S = importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
from gsbn._plan.rates import Rates
r = eval(open(ratef).read())
V = [json.loads(l) for l in open("/tmp/V.jsonl")] + ([json.loads(l) for l in open("/tmp/S.jsonl")] if len(sys.argv) > 3 else [])
out = []
cls = collections.Counter(); tot = collections.Counter()
for l in V:
    m = S.expected(l, r); us = l["us"]; best = min((us[k], k) for k in m); own = min(m, key=m.get)
    x = us[own] / best[0] - 1
    kind = lambda n: "narrow" if n == "narrow" else "cublas" if n == "cublas" else "whole" if "whole" in n else "twice" if "twice" in n else "split" if n.split()[0].count("x") == 2 else "tile"
    tot[l["dtype"], l["mode"]] += 1
    if x > .05: out.append((round(x, 3), l["shape"], l["dtype"], l["mode"], "own", own, us[own], round(m[own], 1), "best", best[1], best[0], round(m[best[1]], 1))); cls[l["dtype"], l["mode"], kind(own), kind(best[1])] += 1
print(sum(1 for o in out), len(V))
for k, v in cls.most_common(25): print(v, "of", tot[k[:2]], k)
for o in sorted(out, reverse=True, key=lambda o: o[0])[:40]: print(*o)
