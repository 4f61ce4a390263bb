import sys
sys.path.insert(0,'/work/main')
from gsbn._plan.rates import Rates
r=eval(open(sys.argv[1]).read())
def rd(v):
    if isinstance(v,dict): return {k:rd(x) for k,x in v.items()}
    if isinstance(v,tuple): return tuple(rd(x) for x in v)
    return float(f"{v:.3g}")
p='/work/main/gsbn/_plan/h200.py'; s=open(p).read()
head=s.partition("H200 = ")[0]
vals={n:rd(getattr(r,n)) for n in Rates._fields}
assert vals["held_flops"]==720e6
open(p,'w').write(head+"H200 = Rates(\n"+"".join(f"    {n}={vals[n]!r},\n" for n in Rates._fields)+")\n")
