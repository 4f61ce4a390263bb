# Tables: WITHOUT these flags every cell takes 40 s (max-autotune, JAX); with them: kernelbench 54, step 48, many 61, few 77, models 113 s on a fast host
mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
F="--only gsbn,pytorch,compile,gemm-torch --seconds 0.7 --settle 0.3"
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md lab/out 2>/dev/null; }
mkdir -p lab/out
timeout -s INT 150 python -m gsbn bench --preset many --dtype float32 --dtype bfloat16 $F --publish . --publish-as many --json lab/out/many.json > lab/out/many.log 2>&1; say many
timeout -s INT 150 python -m gsbn bench --preset few --dtype float32 --dtype bfloat16 $F --publish . --publish-as few --json lab/out/few.json > lab/out/few.log 2>&1; say few
timeout -s INT 100 python -m gsbn bench --preset kernelbench --direction step $F --publish . --publish-as step > lab/out/step.log 2>&1; say step
timeout -s INT 200 python -m gsbn bench --preset models --publish . --publish-as models > lab/out/models.log 2>&1; say models
timeout -s INT 120 python -m gsbn bench --preset many --direction step --dtype bfloat16 --dtype float32 $F --json lab/out/many_step.json > lab/out/many_step.log 2>&1; say many_step
timeout -s INT 120 python -m gsbn bench --preset few --direction step --dtype bfloat16 --dtype float32 $F --json lab/out/few_step.json > lab/out/few_step.log 2>&1; say few_step
