import sys,importlib.util,collections,re
sys.path.insert(0,'.')
spec=importlib.util.spec_from_file_location("sweep","tools/sweep.py"); S=importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
lines=S.judged('docs/results/sweep.jsonl')
c=collections.Counter()
def kind(n):
    if n in('cublas','narrow','sm90'): return n
    k='split' if re.match(r'\d+x\d+x\d+',n) else 'tile'
    return k+n[len(re.match(r'[\dx]+',n)[0]):]
bad=[l for l in lines if l['regret']>.05]
print(len(bad))
for l in bad: c[(kind(l['own']),'->',kind(l['best']))]+=1
for k,v in c.most_common(): print(v,k)
if len(sys.argv)>1:
    for l in bad:
        t=sorted((t,n) for n,t in l['us'].items() if n!='eager')[:4]
        e=S.expected(l,S.H200)
        print(round(l['regret'],2),l['shape'],l['dtype'],l['mode'],'own',l['own'],l['us'][l['own']],'exp',round(e.get(l["own"],0),1),'|',' '.join(f"{n} {t} ({e.get(n, 0):.1f})" for t,n in t))
