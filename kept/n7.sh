mkdir -p ~/.cupy/kernel_cache; for f in lab/kc.tar.xz lab/kc_main.tar.xz; do tar xf $f -C ~/.cupy/kernel_cache; done; export PYTHONPATH=.
sed 's/for pair in (calls, vec)/for pair in (calls,)/; s/if not big else ()/if True else ()/' lab/sums.py > lab/sums0.py
N="(1000000,32,32),(1000000,16,64),(250000,32,128),(1000000,64,64),(802816,128,128),(300000,64,128),(100000,32,32),(50000,128,128),(10000,32,32)"
W="(131071,96,200),(100000,128,256),(200000,64,256),(50000,64,1024),(100000,64,512),(24576,128,256),(8192,64,256),(65536,32,256),(16384,64,512),(16384,64,1024)"
timeout 100 python lab/sums0.py lab/other "[$W,$N]" bfloat16
timeout 100 python lab/sums0.py lab/other "[(1000000,32,32),(100000,32,32),(8192,512,512)]" float32
