import sys,importlib.util,json,time,math,random
sys.path.insert(0,'.')
spec=importlib.util.spec_from_file_location("sweep","tools/sweep.py"); S=importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
lines=[json.loads(l) for l in open('docs/results/sweep.jsonl')]
if len(sys.argv)>3 and sys.argv[3]=='half':
    train=[l for i,l in enumerate(lines) if (l['shape'][0]*7+l['shape'][1]*3+l['shape'][2])%5]
    test=[l for i,l in enumerate(lines) if not (l['shape'][0]*7+l['shape'][1]*3+l['shape'][2])%5]
else: train=test=lines
NAMED=set(S.NAMED)
train=train+[l for l in train if tuple(l['shape']) in NAMED for _ in range(2)]
def stats(ls,r):
    n=0;w=0
    for l in ls:
        us=l['us']; m=S.expected(l,r)
        if not m: continue
        t=us[min(m,key=m.get)]/min(us[k] for k in m)-1; n+=t>.05; w+=t
    return n,len(ls),round(w/len(ls),4)
r=S.H200
if len(sys.argv)>2 and sys.argv[2]!='-': r=eval(open(sys.argv[2]).read(),{'Rates':type(S.H200)})
FROZEN={'cublas_flops','operand_rate','ieee_call_us','cublas_off_words','copy_us','shared_us','parts_rate'}|{k for k in S.H200._asdict() if k.startswith(('narrow','tall'))}
best=S.loss(train,r); print('start',best,stats(train,r),stats(test,r),flush=True)
end=time.time()+float(sys.argv[1]); step=.15
random.seed(int(time.time()) if len(sys.argv)>4 else 1)
while time.time()<end:
    sc=[q for q in S.scalars(r) if q[0] not in FROZEN]; random.shuffle(sc); got=best
    for field,key,value in sc:
        for f in (1+step,1/(1+step)):
            v=getattr(r,field); v=v if key is None else v[key]
            t=S.with_value(r,field,key,float(f"{v*f:.3g}"))
            l=S.loss(train,t)
            if l<best: r,best=t,l; break
        if time.time()>end: break
    print(step,best,stats(train,r),stats(test,r),flush=True)
    if got-best<1e-4: step/=2
    if step<.01: break
open('/tmp/rates_%s.txt'%(sys.argv[3] if len(sys.argv)>3 else 'all'),'w').write(repr(r))
