"""The rates of an H200, fitted to docs/results/sweep.jsonl; `tools/sweep.py fit` writes this file."""

from .rates import Rates

H200 = Rates(
    mma_us=0.0018,
    step_us=0.067,
    shared_us=1 / 1950,
    l2_rate=10.2,
    memory_rate=11.2,
    off_line=1.4,
    off_line_y=1.45,
    tile_us={"training": 7.1, "inference": 1.65, "gemm": 1.65},
    y_rate={"training": 4.1, "inference": 3.75, "gemm": 3.75},
    parked_rate=10.9,
    call_us={"training": 1.9, "inference": 4.0, "gemm": 4.0},
    laying_us=0.57,
    relaying_us=1.9,
    park_us=7.8,
    merge_us={1: 9.0, 2: 2.3, 3: 2.3, 4: 0.0, 5: 0.0, 6: 0.0},
    trip_us=2.2,
    limb_us=3.7,
    limb_rate=3.6,
    cublas_flops={"bfloat16": 915e6, "float16": 915e6, "tf32": 368e6, "limbs": 53e6},
    ieee_call_us=6.1,
    cublas_call_us={True: 14.6, False: 10.7},
    cublas_host_us=8.0,
    operand_rate=7.15,
    g_rate=(6.2, 3.5),
    y_cublas_rate=(2.2, 2.4),
    l2_mb=30.0,
)
