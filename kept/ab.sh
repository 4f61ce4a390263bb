mkdir -p ~/.cupy/kernel_cache; tar xf lab/kcab.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
timeout -s KILL 60 python lab/ab.py 2>&1 | tail -30
