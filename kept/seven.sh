mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache
export PYTHONPATH=.:lab
timeout -s INT 35 python lab/fdw.py "[(802816,128,128),(131071,96,200),(65536,256,512),(100000,512,512),(380000,768,512),(200704,384,768),(50000,64,1024),(300000,96,160),(100000,128,128),(20000,128,256),(1000000,64,64),(65536,1024,1024),(8192,512,512),(16384,1024,512),(20000,200,300),(9000,333,1000),(4096,256,256)]" 5 > $OUT/fdw.txt 2>&1
cut -c1-130 $OUT/fdw.txt | head -5
grep -q "illegal" $OUT/fdw.txt && exit 1
timeout -s INT 170 python -m pytest -m gpu -v --tb=short -n 16 --dist=worksteal -p rest -p no:cacheprovider --durations=8 > $OUT/suite.log 2>&1
grep -aE "FAILED|ERROR" $OUT/suite.log | sed 's/.*FAILED/FAILED/' | sort -u | cut -c1-220 | head -40
grep -aE "passed|failed" $OUT/suite.log | tail -1; grep -aE "s (call|setup)" $OUT/suite.log | tail -8
grep -aE "^E  " $OUT/suite.log | sort | uniq -c | sort -rn | cut -c1-250 | head -20
