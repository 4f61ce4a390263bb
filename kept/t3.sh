bash lab/suite.sh 16 400 --dist=worksteal
export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md lab/out 2>/dev/null; }
rm -rf lab/out; mkdir -p lab/out
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.7 --settle 0.3"
b() { n=$1; shift; timeout -s INT 150 python -m gsbn bench "$@" > lab/out/$n.log 2>&1; say $n; tail -1 lab/out/$n.log | cut -c1-160; }
b few --preset few --dtype float32 --dtype bfloat16 $F --publish . --publish-as few
b models --preset models --publish . --publish-as models
b few_inference --preset few --dtype bfloat16 --mode inference $F --json lab/out/few_inference.json
b many --preset many --dtype float32 --dtype bfloat16 $F --publish . --publish-as many
