import sys, importlib.util
sys.path.insert(0, ".")
spec = importlib.util.spec_from_file_location("sweep", "tools/sweep.py"); S = importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
found = [s for s in S.shapes() if s[1] >= 64 and S.narrow_obstacle(S.problem(s, "float32"), "highest", True, False) is None]
def problems(dtypes):
    for s in found:
        for mode in S.MODES: yield s, "float32", mode
S.problems = problems
S.warm_up = lambda: None
if __name__ == "__main__":
    if sys.argv[1] == "count": print(len(found), found[:40])
    else: S.measure(float(sys.argv[1]), int(sys.argv[2]), ["float32"])
