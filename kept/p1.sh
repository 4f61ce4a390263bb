mkdir -p ~/.cupy/kernel_cache; tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
T0=$(date +%s)
for s in 256x64x1 256x128x1 256x64x2 256x64x4; do for t in memcheck racecheck; do (timeout -s KILL 45 compute-sanitizer --tool $t --print-limit 2 python tools/sanitize.py $s bfloat16 2>&1 | tail -2 | cut -c1-160 | sed "s/^/$t $s: /") & done; done
(timeout -s KILL 45 compute-sanitizer --tool initcheck --print-limit 2 python tools/sanitize.py 256x64x4 bfloat16 --clear 2>&1 | tail -2 | cut -c1-160 | sed "s/^/initcheck: /") & 
wait; echo $(( $(date +%s) - T0 ))
timeout 60 ncu --clock-control none -k "regex:sm90|backward|copy|norm|stats|gemm|split|add_parts|narrow|cutlass|nvjet" --metrics gpu__time_duration.sum --csv --page raw python lab/p1.py "[(777,1111,2222),(2048,2047,2047),(5000,999,1001),(2048,2048,2048)]" > $OUT/ncu.csv 2>$OUT/err
python - <<'P'
import csv, os
rows=[r for r in csv.reader(open(os.environ["OUT"]+"/ncu.csv")) if len(r)>10]
h=rows[0]; n=h.index("Kernel Name"); g=h.index("Grid Size"); d=h.index("gpu__time_duration.sum")
for r in rows[2:]: print(r[n][:60].ljust(62), r[g], r[d])
P
echo $(( $(date +%s) - T0 ))
timeout 45 python lab/p2.py
echo $(( $(date +%s) - T0 ))
