# All that issues 17 and 18 ask to show, one H200, about 9 minutes; docs-only tables need their markers in docs/results.md first
mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md lab/out 2>/dev/null; }
rm -rf lab/out; mkdir -p lab/out
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.7 --settle 0.3"; D4="--dtype float32 --dtype tf32 --dtype bfloat16 --dtype float16"
b() { n=$1; shift; timeout -s INT 170 python -m gsbn bench "$@" $F --json lab/out/$n.json > lab/out/$n.log 2>&1; say $n; }
b many_inference --preset many $D4 --mode inference
b many_16_tf32 --preset many --dtype tf32 --dtype float16
b few_inference --preset few --dtype float32 --dtype bfloat16 --mode inference
b many_jax --preset many --dtype bfloat16 --only gsbn,jax
b many_called --preset many --dtype float32 --dtype bfloat16 --no-graph
b few_called --preset few --dtype float32 --dtype bfloat16 --no-graph
