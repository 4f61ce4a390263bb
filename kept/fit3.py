import json, sys, math, itertools
sys.path.insert(0,'/tmp/nw'); import importlib.util, numpy as np
spec = importlib.util.spec_from_file_location("sweep", "/tmp/nw/tools/sweep.py"); S = importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
L=[json.loads(l) for l in open('/tmp/nw/docs/results/sweep.jsonl')]
L=[d for d in L if d['dtype']=='float32' and d['shape'][1]>=64 and 'narrow' in d['us']]
print(len(L))
def regret(rates):
    r=[]; e=[]
    for d in L:
        m=S.expected(d,rates); us=d['us']; best=min(us[n] for n in m); r.append(us[min(m,key=m.get)]/best-1); e.append(math.log(m['narrow']/us['narrow']))
    return np.mean(r), np.mean(np.array(r)>.05), np.mean(np.array(r)>.2), np.mean(e), np.std(e)
R=S.H200
print(regret(R))
best=None
for c in (.13,.153,.17,.19):
  for l in (.0004,.0006,.00073,.001):
    for r in (.5,.7,.9,1.09,1.3):
        v=R._replace(narrow_chunk_us={**R.narrow_chunk_us,'limbs':c},narrow_laying_us={**R.narrow_laying_us,'limbs':l},narrow_row_us={**R.narrow_row_us,'limbs':r})
        q=regret(v)
        if best is None or q[0]<best[0][0]: best=(q,c,l,r); print(best)
print('--- r .455')
best=None
for c in (.18,.19,.2,.21,.22):
  for l in (.0004,.0005,.0006,.00073,.0009,.0011):
        v=R._replace(narrow_chunk_us={**R.narrow_chunk_us,'limbs':c},narrow_laying_us={**R.narrow_laying_us,'limbs':l},narrow_row_us={**R.narrow_row_us,'limbs':.455})
        q=regret(v)
        if best is None or q[0]<best[0][0]: best=(q,c,l); print(best); V=v
rows=[]
for d in L:
    m=S.expected(d,V); us=d['us']; b=min(us[n] for n in m); own=min(m,key=m.get); rows.append((us[own]/b-1,d['shape'],d['mode'],own,{n:(us[n],round(m[n],1)) for n in sorted(m,key=us.get)[:2]+['narrow']}))
for r in sorted(rows,key=lambda r:-r[0])[:22]: print(r)
