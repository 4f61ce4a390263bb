"""The rates of 16-bit kernels from times on an H100: of forwards on GPUs but the H200, and of a backward on any GPU.

An H100's L2 feeds tiles more slowly, too. For inference, what does not depend on memory was fitted anew, to
docs/results/sweep_h100.jsonl, and for the products of the backward to products_h100.jsonl (docs/history/planner.md).
Rates that are not listed are an H200's.
"""

from __future__ import annotations

from .h200 import H200
from .h200_products import PRODUCTS
from .problem import Device
from .rates import Rates

BANDWIDTH = 0.68  # `Device.bandwidth` of an H100

INFERENCE = H200._replace(
    step_us=0.103,
    l2_us=0.459,
    sharing_us=0.0567,
    tma_rate={True: 0.149, False: 0.0764},
    tile_us=H200.tile_us | {"inference": 0.332},
    row_us=H200.row_us | {"inference": 0.0034},
    exchange_us=0.0117,
    exchange_rate=0.0339,
    cluster_us=H200.cluster_us | {2: 0.357, 4: 0.104, 8: 0.222},
    early_us=0.883,
    call_us=H200.call_us | {"inference": 2.54},
    constants_us=0.0006,
    short_passes=1.16,
)

PRODUCTS_16 = PRODUCTS._replace(
    mma_us=0.00235,
    step_us=0.186,
    shared_us=0.0,
    l2_rate=11.7,
    memory_rate=22.0,
    memory_us=0.978,
    l2_us=1.04,
    crowd=5.26,
    sharing_us=0.076,
    tma_rate={True: 0.156, False: 0.0673},
    off_line=1.83,
    off_line_y=2.67,
    tile_us=PRODUCTS.tile_us | {"gemm": 0.106},
    row_us=PRODUCTS.row_us | {"gemm": 0.00271},
    y_rate=PRODUCTS.y_rate | {"gemm": 10.7},
    exchange_us=0.176,
    exchange_rate=0.0208,
    cluster_us=PRODUCTS.cluster_us | {2: 0.115, 4: 0.0822, 8: 0.103},
    early_us=0.483,
    call_us=PRODUCTS.call_us | {"gemm": 2.17},
    short_passes=1.05,
    copy_rate=2.7,
    l2_mb=21.4,
)


def rates_on(device: Device, mode: str) -> Rates:
    """Return the rates of 16-bit calls in a mode: "training", "inference", or "gemm" for a product of the backward.

    Rates of memory are scaled by `device.bandwidth`.
    """
    bandwidth = device.bandwidth
    if mode == "gemm":
        of_h100 = bandwidth / BANDWIDTH
        memory_rate, copy_rate = PRODUCTS_16.memory_rate * of_h100, PRODUCTS_16.copy_rate * of_h100
        return PRODUCTS_16._replace(memory_rate=memory_rate, copy_rate=copy_rate)
    if bandwidth == 1.0:
        return H200
    if mode == "inference":
        hot, cold = INFERENCE.y_cublas_rate
        l2_rate, passes = INFERENCE.l2_rate * bandwidth, (hot * bandwidth, cold * bandwidth)
        return INFERENCE._replace(l2_rate=l2_rate, y_cublas_rate=passes)
    y_rate = H200.y_rate | {"training": H200.y_rate["training"] * bandwidth}
    deferred_rate, copy_rate = H200.deferred_rate * bandwidth, H200.copy_rate * bandwidth
    return H200._replace(y_rate=y_rate, deferred_rate=deferred_rate, copy_rate=copy_rate)
