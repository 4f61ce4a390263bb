mkdir -p ~/.cupy/kernel_cache; tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md 2>/dev/null; }
mkdir -p lab/out
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.7 --settle 0.3"
b() { n=$1; shift; timeout -s INT 100 python -m gsbn bench "$@" > lab/out/$n.log 2>&1; say $n; tail -1 lab/out/$n.log | cut -c1-160; }
b many --preset many --dtype float32 --dtype bfloat16 $F --publish . --publish-as many
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.5 --settle 0.2"
b many_step --preset many --direction step --dtype float32 --dtype bfloat16 $F --publish . --publish-as many_step
