mkdir -p ~/.cupy/kernel_cache; tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md 2>/dev/null; }
bash lab/suite.sh 16 260 --dist=worksteal > $OUT/suite.txt 2>&1; tail -45 $OUT/suite.txt | cut -c1-200; say suite
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.5 --settle 0.2"
b() { n=$1; l=$2; shift 2; e=$(( $(date +%s) - T0 )); [ $e -gt $l ] && { echo "skip $n"; return; }; timeout -s INT 110 python -m gsbn bench "$@" $F --publish . --publish-as $n > $OUT/$n.log 2>&1; say $n; tail -1 $OUT/$n.log | cut -c1-120; }
b few 470 --preset few --dtype float32 --dtype bfloat16
b many 485 --preset many --dtype float32 --dtype bfloat16
b few_step 460 --preset few --direction step --dtype float32 --dtype bfloat16
b many_step 470 --preset many --direction step --dtype float32 --dtype bfloat16
