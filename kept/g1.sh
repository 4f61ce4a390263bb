mkdir -p ~/.cupy/kernel_cache; tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; }
timeout 130 python lab/sweepg.py 110 > $OUT/g.jsonl 2> $OUT/g.err; wc -l $OUT/g.jsonl; tail -1 $OUT/g.err; say sweep
s() { t=$1; shift; (timeout -s KILL 42 compute-sanitizer --tool $t --print-limit 2 python tools/sanitize.py "$@" 2>&1 | tail -2 | cut -c1-160 | sed "s/^/$t $*: /") & }
s memcheck sm90 bfloat16 training 256x2; s memcheck sm90 limbs training 64x1; s memcheck sm90 float16 training 128x2; s racecheck sm90 bfloat16 training 128x1; s synccheck sm90 tf32 training 64x2; s memcheck sm90 bfloat16 training 64x2 ranks; s racecheck sm90 limbs training 32x2; wait; say sanitizers
