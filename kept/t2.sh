mkdir -p ~/.cupy/kernel_cache; tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md lab/out 2>/dev/null; }
rm -rf lab/out; mkdir -p lab/out
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.7 --settle 0.3"; D4="--dtype float32 --dtype tf32 --dtype bfloat16 --dtype float16"
b() { n=$1; shift; timeout -s INT 170 python -m gsbn bench "$@" > lab/out/$n.log 2>&1; say $n; tail -1 lab/out/$n.log | cut -c1-160; }
b models --preset models --publish . --publish-as models
b many --preset many --dtype float32 --dtype bfloat16 $F --publish . --publish-as many
b many_step --preset many --direction step --dtype float32 --dtype bfloat16 $F --publish . --publish-as many_step
b kernelbench --preset kernelbench $D4 $F --publish . --publish-as kernelbench
b step --preset kernelbench --direction step --dtype float32 --dtype bfloat16 $F --publish . --publish-as step
b few_inference --preset few --dtype float32 --dtype bfloat16 --dtype float16 --mode inference $F --json lab/out/few_inference.json
b few_called --preset few --dtype float32 --dtype bfloat16 --no-graph $F --json lab/out/few_called.json
