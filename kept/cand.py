import sys; sys.path.insert(0,'/work/main')
import importlib.util
spec = importlib.util.spec_from_file_location("sweep", "/work/main/tools/sweep.py"); S = importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
from gsbn import _plan
from gsbn._plan.gemm import *
for s in eval(sys.argv[1]):
    for dt in sys.argv[2].split(","):
        el=_plan.element_for(*S.DTYPES[dt]); p=for_sm90(S.problem(s,dt),el)
        mode=sys.argv[3] if len(sys.argv)>3 else "training"
        print(s,dt,S.planned(s,dt,mode,["x whole","x twice","1x1x1","narrow"]))
        for t in sorted(candidates(p,mode,el))[:6]: print("    ",S.name_of(t,t.mode),round(t.us,2),t.clusters)
        q=S.for_cublas(p,el); print("     cublas",round(S.cublas_us(q,el,mode=="training",keeps=False),2))
