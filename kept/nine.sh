mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md lab/out 2>/dev/null; }
rm -rf lab/out; mkdir -p lab/out
rm -rf /tmp/all; mkdir /tmp/all; cp -r gsbn kernels tools pyproject.toml /tmp/all/
sed -i 's/    if (threadIdx.x % LANES == 0) mbar_arrive(barrier);/    mbar_arrive(barrier);/; s#&sh.full\[i\], COLUMNS / LANES#\&sh.full[i], COLUMNS#; s#&sh.empty\[i\], MULTIPLIERS / LANES#\&sh.empty[i], MULTIPLIERS#' /tmp/all/kernels/tall_product.cu
(cd /tmp/all; PYTHONPATH=. timeout -s KILL 60 compute-sanitizer --tool racecheck python tools/sanitize.py tall 2>&1 | tail -3 | sed 's/^/all arrive: /') &
for w in elected arrivals; do (timeout -s KILL 40 compute-sanitizer --tool racecheck python tools/sanitizer_limits.py $w 2>&1 | tail -2 | sed "s/^/$w: /") & done; wait; say race
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.7 --settle 0.3"
timeout -s INT 130 python -m gsbn bench --preset many --dtype float32 --dtype bfloat16 $F --publish . --publish-as many > lab/out/many.log 2>&1; say many
timeout -s INT 150 python -m gsbn bench --preset few --dtype float32 --dtype bfloat16 $F --publish . --publish-as few > lab/out/few.log 2>&1; say few
timeout -s INT 130 python -m gsbn bench --preset many --direction step --dtype float32 --dtype bfloat16 $F --json lab/out/many_step.json > lab/out/many_step.log 2>&1; say many_step
timeout -s INT 150 python -m gsbn bench --preset few --direction step --dtype float32 --dtype bfloat16 $F --json lab/out/few_step.json > lab/out/few_step.log 2>&1; say few_step
tail -3 lab/out/*.log | cut -c1-200
