# suite.sh WORKERS TIMEOUT args: the GPU suite
mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache
export PYTHONPATH=.
timeout -s INT $2 python -m pytest -m gpu -v --tb=short -n $1 -p no:cacheprovider --durations=12 ${@:3} > $OUT/suite.log 2>&1
grep -aE "FAILED|ERROR" $OUT/suite.log | sed 's/.*FAILED/FAILED/' | sort -u | cut -c1-220 | head -40
grep -aE "passed|failed" $OUT/suite.log | tail -1; grep -aE "s (call|setup)" $OUT/suite.log | tail -12
grep -aE "^E  " $OUT/suite.log | sort | uniq -c | sort -rn | cut -c1-250 | head -30
ls ~/.cupy/kernel_cache | wc -l
