mkdir -p ~/.cupy/kernel_cache && tar xf lab/kc.tar.xz -C ~/.cupy/kernel_cache; export PYTHONPATH=.
M=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__inst_issued.avg.pct_of_peak_sustained_active,l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed,l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum,sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active,launch__registers_per_thread,smsp__inst_executed.sum,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio,smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio,smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio,smsp__average_warps_issue_stalled_wait_per_issue_active.ratio,smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio,smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio
timeout 150 ncu --clock-control none -k "regex:narrow_backward|narrow_weight|backward_sums" --metrics $M --csv --page raw python lab/ncu2.py $@ > $OUT/ncu.csv 2>$OUT/err
python - <<'P'
import csv, os
rows=[r for r in csv.reader(open(os.environ["OUT"]+"/ncu.csv")) if len(r)>10]
h=rows[0]
i0=h.index("Kernel Name")
cols=[i for i,c in enumerate(h) if "__" in c]
names=[r[i0][:16] for r in rows[2:]]
print(" "*60, *names)
for c in cols: print(h[c][-58:].ljust(60), *[r[c].rjust(15) for r in rows[2:]])
P
tail -3 $OUT/err
