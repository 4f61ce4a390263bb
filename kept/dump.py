import sys; sys.path.insert(0,'.')
from gsbn import _kernels as K
name, defs = sys.argv[1], dict(a.split('=') for a in sys.argv[2:-1])
for k in K.all_kernels():
    if k.name==name and dict(k.defines)==defs:
        open(sys.argv[-1],'wb').write(K._compile(k,'sm_90a') if True else b''); print(k); break
