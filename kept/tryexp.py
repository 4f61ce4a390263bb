import sys,importlib.util,json
sys.path.insert(0,'.')
spec=importlib.util.spec_from_file_location("sweep","tools/sweep.py"); S=importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
import gsbn._plan.cost as C
src=open('gsbn/_plan/cost.py').read()
lines=[json.loads(l) for l in open('docs/results/sweep.jsonl')]
named=set(S.NAMED)
def ev(r):
    n=0;w=0;bad=[]
    for l in lines:
        us=l['us']; m=S.expected(l,r)
        if not m: continue
        own=min(m,key=m.get); t=us[own]/min(us[k] for k in m)-1; n+=t>.05; w+=t
        if tuple(l['shape']) in named and t>.05: bad.append((l['shape'],l['dtype'],l['mode'][:3],own,round(t,2)))
    return n,round(w/len(lines),4),len(bad),[b for b in bad if b[0] in ([64,8192,8192],[8,4096,11008],[32,2048,8192],[256,2048,8192],[64,16384,1024])]
for full in (100,128,90):
  for e in (0,.05,.1,.15,.25):
    s=src.replace("pace.append(cold * operands / rates.copy_rate / (waves * steps))",f"pace.append(cold * operands / rates.copy_rate / (waves * steps) * max(1.0, {full} / ctas) ** {e})")
    ns=vars(C); exec(compile(s.replace("from .","from gsbn._plan."),'c','exec'),ns)
    import gsbn._plan.gemm as G; G.one_launch_us=ns['one_launch_us']
    print(full,e,ev(S.H200))
