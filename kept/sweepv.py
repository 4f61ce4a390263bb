# sweepv.py LIMIT: all choices of unseen shapes of survey.py's seeds
import sys, json, importlib.util, subprocess
sys.path.insert(0, ".")
spec = importlib.util.spec_from_file_location("sweep", "tools/sweep.py"); S = importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
sh = lambda seed: [tuple(map(int, l.split(","))) for l in subprocess.run([sys.executable, "lab/survey.py", str(seed)], capture_output=True, text=True).stdout.split()]
todo = [(s, "bfloat16", m) for seed in (7, 8) for s in sh(seed) for m in S.MODES] + [(s, "float32", m) for s in sh(7) for m in S.MODES]
print(len(todo), file=sys.stderr)
S.problems = lambda dtypes: iter(todo)
S.warm_up = lambda: None
S.measure(float(sys.argv[1]), 0, list(S.DTYPES))
