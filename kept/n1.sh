# beside lab/other (main without clusters) : kc.tar.xz of both
mkdir -p ~/.cupy/kernel_cache; for f in lab/kc*.tar.xz; do tar xf $f -C ~/.cupy/kernel_cache; done; export PYTHONPATH=.
timeout 120 python -m pytest -m gpu -q --tb=short -x -n 16 -p no:cacheprovider --dist=worksteal tests/test_narrow.py 2>&1 | tail -12
timeout 60 python lab/sums.py lab/other "[(131071,96,200),(50000,64,1024),(802816,128,128),(40000,64,1024),(33000,128,1024),(100000,128,256),(40000,128,256),(100000,64,512),(300000,32,136),(65536,128,1024),(200000,24,264)]" bfloat16
