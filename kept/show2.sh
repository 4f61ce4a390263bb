mkdir -p ~/.cupy/kernel_cache; tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md lab/out 2>/dev/null; }
rm -rf lab/out; mkdir -p lab/out
for t in memcheck racecheck synccheck initcheck; do (timeout -s KILL 50 compute-sanitizer --tool $t --print-limit 3 python tools/sanitize.py "narrow" "backward" bfloat16 256x 2>&1 | tail -3 | cut -c1-200 | sed "s/^/$t: /") & done
(timeout -s KILL 50 compute-sanitizer --tool memcheck --print-limit 3 python tools/sanitize.py narrow float32 2>&1 | tail -2 | cut -c1-200 | sed "s/^/memcheck narrow float32: /") & 
(timeout -s KILL 50 compute-sanitizer --tool racecheck --print-limit 3 python tools/sanitize.py narrow bfloat16 64x1 2>&1 | tail -2 | cut -c1-200 | sed "s/^/racecheck narrow bfloat16: /") & wait; say sanitizers
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.7 --settle 0.3"
b() { n=$1; shift; [ $(( $(date +%s) - T0 )) -gt $L ] && { echo "skip $n"; return; }; timeout -s INT 170 python -m gsbn bench "$@" > lab/out/$n.log 2>&1; say $n; tail -1 lab/out/$n.log | cut -c1-160; }
L=600
b many_step --preset many --direction step --dtype float32 --dtype bfloat16 $F --publish . --publish-as many_step
b models --preset models --only pytorch,compile,gsbn --seconds 1 --settle 0.3 --publish . --publish-as models
b few_step --preset few --direction step --dtype float32 --dtype bfloat16 $F --publish . --publish-as few_step
L=480
b step --preset kernelbench --direction step --dtype float32 --dtype bfloat16 $F --publish . --publish-as step
L=470
b many --preset many --dtype float32 --dtype bfloat16 $F --publish . --publish-as many
L=480
b many_16_tf32 --preset many --dtype tf32 --dtype float16 $F --json lab/out/many_16_tf32.json
