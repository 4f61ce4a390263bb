# On one H200, of this tree with the kept commits; lab/old is main without them (gsbn kernels tools). About 8 minutes
mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; }
timeout -s INT 240 python -m pytest -m gpu -q --tb=short -n 16 --dist=worksteal -p no:cacheprovider tests/test_backward_gpu.py tests/test_whole_batch.py tests/test_split_k.py tests/test_activation.py tests/test_torch.py tests/test_narrow.py > $OUT/t.log 2>&1; say tests
grep -aE "passed|failed" $OUT/t.log | tail -1; grep -aE "^FAILED|^E  " $OUT/t.log | sort | uniq -c | sort -rn | cut -c1-220 | head -25
timeout -s KILL 100 python lab/vs.py lab/old "[(8192,512,512),(4096,1024,1024),(2048,2048,2048),(512,2048,2048),(1024,1024,1024),(256,2048,8192),(256,256,256),(512,512,128),(3000,300,300),(5000,999,1001),(777,1111,2222)]" bfloat16,float32 12 > $OUT/vs.txt 2>&1; say vs; cat $OUT/vs.txt
timeout -s KILL 60 python lab/stream.py > $OUT/stream.txt 2>&1; say stream; cat $OUT/stream.txt
for t in memcheck racecheck synccheck; do (timeout -s KILL 60 compute-sanitizer --tool $t python tools/sanitize.py backward bfloat16 2>&1 | tail -2 | sed "s/^/$t backward: /") & done
(timeout -s KILL 60 compute-sanitizer --tool memcheck --print-limit 3 python tools/sanitize.py sm90 bfloat16 whole 256x1 2>&1 | tail -2 | sed "s/^/memcheck whole 256x1: /") & wait; say sanitizers
