# survey.sh SEED: unseen shapes beside torch.compile, whose caches are filled by many processes first
mkdir -p ~/.cupy/kernel_cache; tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s); say() { echo "== $1 $(( $(date +%s) - T0 ))"; }
mapfile -t S < <(python lab/survey.py $1); echo ${#S[@]}
export TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_CACHE_DIR=/tmp/ind
for j in 0 1 2 3 4 5 6 7 8 9 10 11 12 13; do (A=(); for ((i=j;i<${#S[@]};i+=14)); do A+=(--shape ${S[$i]}); done
  timeout 170 python -m gsbn bench "${A[@]}" --dtype bfloat16 --only compile --mode both --rounds 1 --seconds 0.01 --settle 0 --no-graph > /tmp/pre$j.log 2>&1
  timeout 170 python -m gsbn bench "${A[@]}" --dtype bfloat16 --only compile --direction step --rounds 1 --seconds 0.01 --settle 0 --no-graph >> /tmp/pre$j.log 2>&1) & done; wait; say prefill; tail -2 /tmp/pre0.log | cut -c1-200
A=(); for s in "${S[@]}"; do A+=(--shape $s); done
F="--only gsbn,pytorch,compile --seconds 0.25 --settle 0.1"
timeout -s INT 200 python -m gsbn bench "${A[@]}" --dtype bfloat16 --mode both $F --json $OUT/fwd.json > /tmp/f.log 2>&1; say forward
timeout -s INT 150 python -m gsbn bench "${A[@]}" --dtype bfloat16 --direction step $F --json $OUT/step.json > /tmp/s.log 2>&1; say step
