import json,sys
p='docs/results/sweep.jsonl'
NEW=("32x1","32x1 whole")
new={(tuple(d['shape']),d['dtype'],d['mode']):d['us'] for d in map(json.loads,open(sys.argv[1]))}
out=[]
for d in map(json.loads,open(p)):
    key=(tuple(d['shape']),d['dtype'],d['mode'])
    if key in new:
        u=new[key]; f=sorted(u[n]/d['us'][n] for n in u if n in d['us'] and n not in NEW and n!='eager'); f=f[len(f)//2]
        for n in NEW:
            if n in u and n in d['us'] and (n!='32x1' or d['mode']=='inference'):
                t=round(u[n]/f,2); b=min((v,k) for k,v in d['us'].items() if k not in('eager',n)); 
                print(key,n,'was',d['us'][n],'is',t,'best other',b); d['us'][n]=t
    out.append(json.dumps(d,separators=(',',':'))+'\n')
open(p,'w').writelines(out)
