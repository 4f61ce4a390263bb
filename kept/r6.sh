mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md lab/out 2>/dev/null; }
rm -rf lab/out; mkdir -p lab/out
timeout -s INT 150 python -m pytest -m gpu -q --tb=short -n 16 --dist=worksteal -p no:cacheprovider tests/test_narrow.py tests/test_backward_gpu.py > $OUT/t.log 2>&1; say tests; grep -aE "passed|failed" $OUT/t.log | tail -1; grep -aE "^FAILED|^E  " $OUT/t.log | sort | uniq -c | sort -rn | cut -c1-200 | head -20
(timeout -s KILL 60 compute-sanitizer --tool memcheck python tools/sanitize.py sm90 bfloat16 whole 2>&1 | tail -2 | sed 's/^/memcheck whole: /') & 
(timeout -s KILL 60 compute-sanitizer --tool racecheck python tools/sanitize.py sm90 bfloat16 whole 2>&1 | tail -2 | sed 's/^/racecheck whole: /') &
(timeout -s KILL 60 compute-sanitizer --tool memcheck python tools/sanitize.py backward bfloat16 2>&1 | tail -2 | sed 's/^/memcheck backward: /') &
(timeout -s KILL 60 compute-sanitizer --tool racecheck python tools/sanitize.py tiled bfloat16 2>&1 | tail -2 | sed 's/^/racecheck tiled: /') &
(timeout -s KILL 60 compute-sanitizer --tool racecheck python tools/sanitize.py backward bfloat16 2>&1 | tail -2 | sed 's/^/racecheck backward: /') & wait; say sanitizers
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.7 --settle 0.3"
timeout -s INT 110 python -m gsbn bench --preset few --dtype float32 --dtype bfloat16 $F --publish . --publish-as few > lab/out/few.log 2>&1; say few
timeout -s INT 120 python -m gsbn bench --preset few --direction step --dtype float32 --dtype bfloat16 $F --publish . --publish-as few_step > lab/out/few_step.log 2>&1; say few_step
tail -3 lab/out/*.log | cut -c1-200
