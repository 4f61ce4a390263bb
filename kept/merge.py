import json,sys
p='docs/results/sweep.jsonl'
lines=[json.loads(l) for l in open(p)]
new={(tuple(d['shape']),d['dtype'],d['mode']):d['us'] for d in map(json.loads,open(sys.argv[1]))}
out=[]
for d in lines:
    key=(tuple(d['shape']),d['dtype'],d['mode'])
    if key in new:
        u=new[key]; f=sorted(u[n]/d['us'][n] for n in u if n in d['us'])
        f=f[len(f)//2] if f else 1.0
        # times of another run: brought to the measured one's by the choices that both have
        for n,t in u.items():
            d['us'][n]=round(t/f,2) if n not in d['us'] else d['us'][n]
    out.append(json.dumps(d,separators=(',',':'))+'\n')
open(p,'w').writelines(out)
