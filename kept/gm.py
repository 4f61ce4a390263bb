import json,sys,math,collections
def table(f,show=True):
    d=json.load(open(f)); out=collections.OrderedDict()
    for r in d['results']:
        if r.get('failure'): continue
        out.setdefault((r['batch'],r['in_features'],r['out_features'],r['dtype'],r['precision']),{})[r['candidate']]=r
    g=collections.defaultdict(list); bad=[]
    for k,c in out.items():
        peers=[c[p]['time_us'] for p in c if p in('pytorch','compile','jax','jax-jit') or p.startswith('compile') or p.startswith('pytorch')]
        if 'gsbn' not in c or not peers: continue
        t=c['gsbn']['time_us']; q=min(peers)/t; g[(k[3],k[4])].append(q)
        if q<1: bad.append((k[:3],k[3],round(q,3),round(t,2)))
        if show: print(k, 'gsbn',round(t,2),c['gsbn']['path'],'best peer/gsbn',round(q,3),'gemm',round(c.get('gemm-torch',{}).get('time_us',0),1),'floor',round(c['gsbn'].get('floor_share') or 0,2), c['gsbn']['method'])
    for k,v in g.items(): print(f,k,len(v),'geomean',round(math.exp(sum(map(math.log,v))/len(v)),3))
    print('slower:',bad)
for f in sys.argv[1:]:
    if f=='-q': continue
    table(f,'-q' not in sys.argv)
