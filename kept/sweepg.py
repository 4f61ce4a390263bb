# sweepg.py LIMIT: training problems whose tiles fold, again (f5), and those of the sweep's further shapes (m5)
import sys, json, importlib.util
sys.path.insert(0, ".")
spec = importlib.util.spec_from_file_location("sweep", "tools/sweep.py"); S = importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
all_tiles = S.tiles
todo = {}
for f in ("lab/f5.jsonl", "lab/m5.jsonl"):
    for l in map(json.loads, open(f)):
        if l["mode"] != "training": continue
        us = l["us"]; key = (tuple(l["shape"]), l["dtype"], l["mode"])
        best = min(t for n, t in us.items() if n != "eager"); T = all_tiles(*key)
        folds = lambda t: t.mode == "training" and t.split == 1 and -(-key[0][0] // t.block_m) * -(-key[0][2] // (128 * t.cluster)) > t.clusters
        if f.endswith("f5.jsonl"):
            names = [n for n, t in T.items() if (folds(t) and us.get(n, 0) < 2 * best)]
            names += [n for n in sorted((n for n in us if n in T), key=us.get)[:1] if n not in names]
        else:
            names = [n for n, t in T.items() if us.get(n, 0) < 2 * best]
        if names: todo[key] = names
print(len(todo), sum(map(len, todo.values())), file=sys.stderr)
S.problems = lambda dtypes: iter(todo)
S.warm_up = lambda: None
S.tiles = lambda shape, dtype, mode: {n: t for n, t in all_tiles(shape, dtype, mode).items() if n in todo[(tuple(shape), dtype, mode)]}
if len(sys.argv) > 1: S.measure(float(sys.argv[1]), 0, list(S.DTYPES))
