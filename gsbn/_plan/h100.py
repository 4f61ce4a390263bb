"""The rates of 16-bit forwards on a GPU with slower or faster memory than an H200's, from times on an H100.

An H100's L2 feeds tiles more slowly, too. For inference, what does not depend on memory was fitted anew, to
docs/results/sweep_h100.jsonl (docs/history/planner.md). Rates that are not listed are an H200's.
"""

from __future__ import annotations

from .h200 import H200
from .problem import Device
from .rates import Rates

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


def rates_on(device: Device, mode: str) -> Rates:
    """Return the rates of a 16-bit forward in mode "training" or "inference", scaled by `device.bandwidth`."""
    bandwidth = device.bandwidth
    if bandwidth == 1.0:
        return H200
    if mode == "inference":
        hot, cold = INFERENCE.y_cublas_rate
        l2_rate, passes = INFERENCE.l2_rate * bandwidth, (hot * bandwidth, cold * bandwidth)
        return INFERENCE._replace(l2_rate=l2_rate, y_cublas_rate=passes)
    y_rate = H200.y_rate | {"training": H200.y_rate["training"] * bandwidth}
    deferred_rate, copy_rate = H200.deferred_rate * bandwidth, H200.copy_rate * bandwidth
    return H200._replace(y_rate=y_rate, deferred_rate=deferred_rate, copy_rate=copy_rate)
