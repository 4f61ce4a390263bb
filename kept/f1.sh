mkdir -p ~/.cupy/kernel_cache; tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; }
timeout 100 python -m pytest -m gpu -q --tb=short -n 16 -p no:cacheprovider --dist=worksteal tests/test_forward_sm90.py tests/test_forward_gpu.py tests/test_group.py tests/test_fuzz.py 2>&1 | grep -v SKIPPED | grep -aE "FAILED|ERROR|passed|failed|^E " | sort | uniq -c | tail -12 | cut -c1-300; say tests
timeout 130 python lab/sweepf.py 110 > $OUT/f.jsonl 2> $OUT/f.err; wc -l $OUT/f.jsonl; tail -1 $OUT/f.err; say folded
timeout 150 python lab/sweepm.py 140 > $OUT/m.jsonl 2> $OUT/m.err; wc -l $OUT/m.jsonl; tail -1 $OUT/m.err; say more
s() { t=$1; shift; (timeout -s KILL 60 compute-sanitizer --tool $t --print-limit 2 python tools/sanitize.py "$@" 2>&1 | tail -2 | cut -c1-160 | sed "s/^/$t $*: /") & }
s memcheck sm90 bfloat16 training; s memcheck sm90 limbs training; s memcheck sm90 float16 training keeps; s racecheck sm90 bfloat16 training 256x1; s synccheck sm90 tf32 training; s memcheck sm90 bfloat16 training ranks; wait; say sanitizers
