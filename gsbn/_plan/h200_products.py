"""The rates of an H200 for the products of a backward, where they differ from the rates of a forward.

They were fitted to times of GEMMs (docs/history/backward.md). Rates that are not listed are those of a forward.
Products in 16 bits with an MN-major weight, as dx and dw have, take `h100.PRODUCTS_16`.
"""

from .h200 import H200

PRODUCTS = H200._replace(
    mma_us=0.00215,
    step_us=0.0424,
    l2_rate=13.2,
    memory_rate=12.9,
    memory_us=1.11,
    l2_us=1.05,
    crowd=0.0,
    sharing_us=0.0,
    tma_rate={True: float("inf"), False: float("inf")},
    off_line=1.44,
    off_line_y=1.53,
    exchange_us=0.806,
    exchange_rate=0.0404,
    cluster_us={2: 0.364, 4: 0.364, 8: 0.364, 16: 0.364},
    early_us=0.0,
    copy_rate=4.57,
    limbs_of_w_us=0.416,
    limb_us=1.67,
    limb_rate=3.1,
    cublas_flops=H200.cublas_flops | {"limbs": 54400000.0},
    ieee_call_us=5.0,
    ieee_split_us=10.9,
    cublas_step_us=0.0,
    cublas_off_words={2: 20.8, 4: 5.73, 8: 5.5},
    cublas_off_words_us=10.0,
    operand_rate=(6.73, 3.1),
    skinny_call_us={False: 4.27},
    skinny_rate=3.54,
    skinny_chunk_us={"limbs": 0.221},
    skinny_weight_us={"limbs": 0.0003},
    skinny_row_us=0.538,
    skinny_off_words_us=1.8,
    copy_us=2.65,
    l2_mb=32.3,
)
