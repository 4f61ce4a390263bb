import sys,importlib.util,json
sys.path.insert(0,'.')
spec=importlib.util.spec_from_file_location("sweep","tools/sweep.py"); S=importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
from gsbn._plan.rates import Rates
r=eval(open(sys.argv[1]).read())
for l in map(json.loads,open('docs/results/sweep.jsonl')):
    if tuple(l['shape']) in [(8,4096,11008),(64,8192,8192),(32,2048,8192),(256,2048,8192),(32,4096,4096),(50,4096,4096)] and l['dtype']=='bfloat16':
        e=S.expected(l,r); t=sorted((v,k) for k,v in l['us'].items() if k in e)[:7]
        print(l['shape'],l['mode'],' '.join(f"{k} {v}({e[k]:.1f})" for v,k in t))
