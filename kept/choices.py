import sys; tree=sys.argv[1]; sys.path.insert(0,tree)
import importlib.util
spec = importlib.util.spec_from_file_location("sweep", tree+"/tools/sweep.py"); S = importlib.util.module_from_spec(spec); spec.loader.exec_module(S)
from gsbn import _plan
FEW=[(512,16384,1024),(128,1024,512),(64,16384,1024),(128,8192,8192),(8,4096,11008),(32,2048,8192),(64,8192,8192),(256,2048,8192),(256,256,256),(512,512,128),(777,1111,2222),(2048,2047,2047),(5000,999,1001),(1024,8192,8192)]
MANY=[(65536,1024,1024),(65536,256,512),(380000,768,512),(100000,512,512),(802816,128,128),(200704,384,768),(1000000,32,32),(50000,64,1024),(131071,96,200)]
EXTRA=[(4096,1024,1024),(16384,4096,4096),(2048,2048,8192),(2048,8192,8192),(256,2048,8192),(256,8192,8192),(512,2048,2048),(65536,64,64),(65536,64,128),(65536,128,1024),(8192,512,512)]
K={n:k for k,n in S.KERNEL_MODES.items()}
for s in FEW+MANY+EXTRA:
  for dt in ("bfloat16","float32","tf32"):
    for how in ("training","inference","saved"):
      p=S.problem(s,dt)
      d=_plan.plan(p,training=how!="inference",precision=S.DTYPES[dt][1],saved=how=="saved")
      if d.one is None: n="narrow" if d.narrow else d.gemm
      else: n=S.name_of(d.one,K[int(dict(d.one.kernel.defines)["MODE"])])
      print(s,dt,how,n)
