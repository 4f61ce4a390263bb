import json,sys
def rd(f):
    out={}
    for r in json.load(open(f))['results']:
        if not r.get('failure'): out.setdefault((r['batch'],r['in_features'],r['out_features'],r['dtype']),{})[r['candidate']]=r
    return out
for f in sys.argv[1:]:
    o,n=rd(f'/tmp/old_{f}.json'),rd(f'/tmp/pub/docs/results/{f}.json')
    print(f)
    for k in n:
        a,b=o.get(k,{}),n[k]
        g=lambda d,c: round(d[c]['time_us'],1) if c in d else None
        print("  ",k, "gsbn",g(a,'gsbn'),"->",g(b,'gsbn'),round(b['gsbn']['time_us']/a['gsbn']['time_us'],3) if 'gsbn' in a else "", a.get('gsbn',{}).get('path'),b['gsbn']['path'],"| compile",g(a,'compile'),"->",g(b,'compile'),"| eager",g(a,'pytorch'),"->",g(b,'pytorch'),"| gemm",g(a,'gemm-torch'),g(b,'gemm-torch'))
