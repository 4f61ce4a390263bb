"""Plans one launch for both products of a backward of few rows. The launch reads the weight once."""

from __future__ import annotations

from typing import NamedTuple

from .copies import on_words
from .problem import ITEMSIZE, Matmul, ceil_div
from .program import Builder
from .sources import Kernel
from .tensor_maps import L2_256B, L2_NONE
from .variants import DUAL_CLUSTERS, DUAL_INPUTS, DUAL_ROWS, DUAL_STEP, DUAL_THREADS, dual_gemm

DUAL_LEAST_STEPS = 2  # least steps per CTA of a cluster: with one step, (128, 1024, 512) took longer than two products
LEAST_FILL = 0.48  # least part of the SMs that have a CTA: with fewer CTAs, two launches are as fast


class DualGemm(NamedTuple):
    """A launch of dual_gemm."""

    kernel: Kernel
    rows: int  # rows that the kernel has room for
    ctas: int
    steps: int  # steps of each CTA


def serves_dual_gemm(dtype: str, rows: int) -> bool:
    """Return whether dual_gemm has a variant for so many rows. The layout of the operands is not considered."""
    return dtype in ("float16", "bfloat16") and rows <= DUAL_ROWS[-1]


def dual_gemm_for(x: Matmul, w: Matmul, *, wide: bool) -> DualGemm | None:
    """Return the launch for both products, or None if it cannot serve or is not expected to be faster.

    `x` is the product dx (m, k) = dg w, and `w` is dw (n, k) = dgᵀ x. `wide`: dw is float32, which the kernel does not
    write.
    """
    m, k, n, device = x.m, x.n, x.k, x.device
    size, asked = ITEMSIZE[x.dtype], x.limits.dual
    if wide or not serves_dual_gemm(x.dtype, m) or not device.hopper or k * size % 16 or max(n, k) >= 2**31:
        return None
    if asked is False or not (on_words(x.w.T, k, size) and on_words(w.w.T, k, size)):
        return None
    blocks, steps = ceil_div(k, DUAL_INPUTS), ceil_div(n, DUAL_STEP)
    at_once = [c for c in DUAL_CLUSTERS if blocks <= device.clusters(c) and (c == 1 or DUAL_LEAST_STEPS * c <= steps)]
    cluster = max(at_once, default=0)
    if not cluster or (asked is None and blocks * cluster < LEAST_FILL * device.sms):
        return None
    rows = next(rows for rows in DUAL_ROWS if m <= rows)
    return DualGemm(dual_gemm(x.dtype, rows, cluster), rows, blocks * cluster, ceil_div(steps, cluster))


def multiply_at_once(build: Builder, dual: DualGemm, x: Matmul, w: Matmul, operands: dict[str, str]) -> None:
    """Add the launch of dual_gemm. `operands` names the memory of "dg", "x", "weight", "dx" and "dweight".

    The boxes of its tensor maps are 128 bytes wide.
    """
    m, k, n, dtype, size = x.m, x.n, x.k, x.dtype, ITEMSIZE[x.dtype]
    width = 128 // size
    maps = (
        (operands["dg"], (m, n, x.x.strides[0] * size, dtype, dual.rows, width, L2_256B)),
        (operands["x"], (m, k, w.w.strides[1] * size, dtype, dual.rows, width, L2_256B)),
        (operands["weight"], (n, k, x.w.strides[1] * size, dtype, DUAL_STEP, width, L2_256B)),
        (operands["dweight"], (n, k, k * size, dtype, DUAL_STEP, width, L2_NONE)),
    )
    fields = {"m": m, "n": n, "k": k, "steps": dual.steps}
    passed = {"dx": operands["dx"]}
    build.launch(dual.kernel, dual.ctas, fields, passed, DUAL_THREADS, maps=maps, made_of=dual)
