mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; tar cf $OUT/pub.tar README.md docs/results docs/results.md lab/out 2>/dev/null; }
mkdir -p lab/out
timeout 50 python -m pytest -m gpu -q --tb=line -n 10 -p no:cacheprovider tests/test_torch.py -k large_calls 2>&1 | tail -2; say large
timeout 95 python -m gsbn bench --preset few --dtype float32 --dtype bfloat16 --publish . --publish-as few --json lab/out/few.json > lab/out/few.log 2>&1; say few
timeout 125 python -m gsbn bench --preset models --publish . --publish-as models > lab/out/models.log 2>&1; say models
timeout 85 python -m gsbn bench --preset many --direction step --dtype bfloat16 --dtype float32 --seconds 1.5 --json lab/out/many_step.json > lab/out/many_step.log 2>&1; say many_step
