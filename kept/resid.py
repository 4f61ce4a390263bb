import sys,importlib.util,json,math,collections,statistics
sys.path.insert(0,'.')
spec=importlib.util.spec_from_file_location("sweep","tools/sweep.py"); S=importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
from gsbn._plan.rates import Rates
r=eval(open(sys.argv[1]).read()) if len(sys.argv)>1 else S.H200
lines=[json.loads(l) for l in open('docs/results/sweep.jsonl')]
res=collections.defaultdict(list)
for l in lines:
    us=l['us']; e=S.expected(l,r)
    if not e: continue
    best=min(us[n] for n in e)
    for n,t in e.items():
        if us[n]<1.3*best: res[(l['mode'],l['dtype'],n)].append(math.log(t/us[n]))
for k,v in sorted(res.items()):
    if len(v)>=6: print(k,len(v),round(statistics.mean(v),3),round(statistics.pstdev(v),3))
