import json,sys,collections,math
for f in sys.argv[1:]:
    d=json.load(open(f)); out=collections.OrderedDict()
    for r in d['results']:
        if not r.get('failure'): out.setdefault((r['batch'],r['in_features'],r['out_features'],r['training'],r['direction'],r['dtype'],r.get('precision','')),{})[r['candidate']]=r
    g=collections.defaultdict(list)
    for k,c in out.items():
        if 'gsbn' not in c: print("no gsbn",k); continue
        p={x:c[x]['time_us'] for x in c if x in('pytorch','compile','jax')}; t=c['gsbn']['time_us']; q=min(p.values())/t
        g[k[3:]].append((q,k[:3],round(t,1),c['gsbn']['path'],{a:round(b,1) for a,b in p.items()},c['gsbn']['method']))
    for k,v in g.items():
        print(f,k,len(v),"geomean",round(math.exp(sum(math.log(x[0]) for x in v)/len(v)),3), "slower:",sum(x[0]<1 for x in v))
        for x in sorted(v)[:9]: print("    ",round(x[0],3),*x[1:])
