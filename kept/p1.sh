mkdir -p ~/.cupy/kernel_cache; for f in lab/kc*.tar.xz; do tar xf $f -C ~/.cupy/kernel_cache; done; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; }
timeout 150 python -m pytest -m gpu -q --tb=short -n 16 -p no:cacheprovider --dist=worksteal tests/test_forward_gpu.py tests/test_forward_sm90.py tests/test_backward_gpu.py tests/test_fuzz.py tests/test_neighbours.py tests/test_whole_batch.py tests/test_split_k.py 2>&1 | grep -v SKIPPED | tail -12 | cut -c1-300; say tests
R="(2048,2047,2047),(777,1111,2222),(5000,999,1001),(100,201,301),(4096,1001,1000),(1000,4097,4099),(64,1023,1025),(20000,999,1001),(300,511,1023),(4096,4095,4097)"
A="(128,1024,512),(4096,1024,1024),(256,256,256),(8,4096,11008),(1024,8192,8192)"
timeout 120 python lab/vs.py lab/other "[$R,$A]" bfloat16 6
timeout 60 python lab/vs.py lab/other "[$R]" float32 5; say vs
timeout 200 python lab/sweepy.py 170 > $OUT/sweepy.jsonl 2> $OUT/sweepy.err; wc -l $OUT/sweepy.jsonl; tail -2 $OUT/sweepy.err; say sweep
s() { t=$1; shift; (timeout -s KILL 75 compute-sanitizer --tool $t --print-limit 2 python tools/sanitize.py "$@" 2>&1 | tail -2 | cut -c1-160 | sed "s/^/$t $*: /") & }
for w in gemm inference whole recompute; do s memcheck sm90 bfloat16 $w; done; s memcheck sm90 limbs inference; s memcheck sm90 limbs training 128x2; s memcheck sm90 bfloat16 training 256x2
s racecheck sm90 bfloat16 gemm 256x2; s racecheck sm90 bfloat16 whole 256x8; s racecheck sm90 limbs training 128x1; s synccheck sm90 bfloat16 whole; s racecheck sm90 tf32 gemm 128x1; wait; say sanitizers
