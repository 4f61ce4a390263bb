import os; os.environ["WAYS"] = "{'one': Limits(), 'parts': Limits(gpu=None)}"
import gsbn._plan.narrow as N, sys, runpy
import gsbn._plan.backward as B
real = B.narrow_backward
def patched(p, dy, activation):
    if p.limits.fused is False and p.dtype == "float32" and min(p.n, p.k) > 32: return None
    return real(p, dy, activation)
B.narrow_backward = patched
os.environ["WAYS"] = "{'one': Limits(narrow=None), 'parts': Limits(fused=False)}"
sys.argv = ["fdw.py", "[(1000000,64,64),(1000000,48,40),(500000,64,33),(200000,64,64),(100000,64,64),(150000,40,64),(400000,36,64)]", "7"]
runpy.run_path("lab/fdw.py", run_name="__main__")
