"""A float32 product in Triton, made of several in TF32 or bfloat16; importing this module imports Triton.

x is (B, I), w (O, I) and z (B, O), all float32 and contiguous. A program computes a tile of z, and eight rows of tiles
run together, so that the L2 cache serves them.
"""

# Triton reads the kernel's annotations when it compiles it: no `from __future__ import annotations` here.
from typing import Any

import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK_B": b, "BLOCK_O": o, "BLOCK_I": 32}, num_warps=warps, num_stages=stages)
    for b, o, warps, stages in ((64, 64, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3), (128, 256, 8, 3))
]


@triton.autotune(CONFIGS, key=["rows", "features", "depth", "PRECISION"])
@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x, w, bias, z, rows, features, depth,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(features, BLOCK_O)
    together = 8 * across  # tiles of eight rows of tiles
    first = tl.program_id(0) // together * 8
    height = min(tl.cdiv(rows, BLOCK_B) - first, 8)
    inside = tl.program_id(0) % together
    b = (first + inside % height) * BLOCK_B + tl.arange(0, BLOCK_B)
    o = inside // height * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    x_tile = x + b[:, None].to(tl.int64) * depth + i[None, :]
    w_tile = w + o[None, :].to(tl.int64) * depth + i[:, None]
    sums = tl.zeros((BLOCK_B, BLOCK_O), tl.float32)
    for start in range(0, depth, BLOCK_I):
        left = i < depth - start
        x_part = tl.load(x_tile + start, mask=(b[:, None] < rows) & left[None, :], other=0.0)
        w_part = tl.load(w_tile + start, mask=(o[None, :] < features) & left[:, None], other=0.0)
        sums = tl.dot(x_part, w_part, sums, input_precision=PRECISION)
    if HAS_BIAS:
        sums += tl.load(bias + o, mask=o < features, other=0.0)[None, :]
    inside_z = (b[:, None] < rows) & (o[None, :] < features)
    tl.store(z + b[:, None].to(tl.int64) * features + o[None, :], sums, mask=inside_z)


def linear(x: Any, weight: Any, bias: Any = None, precision: str = "tf32x3") -> Any:
    """``x @ weight.T + bias`` of float32 CUDA tensors, (B, I) and (O, I) to (B, O).

    ``precision`` is one of ``tl.dot``'s: "tf32x3", "bf16x6" and others. An older Triton raises for one it lacks.
    """
    (rows, depth), features = x.shape, len(weight)
    z = x.new_empty(rows, features)

    def grid(chosen: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(rows, chosen["BLOCK_B"]) * triton.cdiv(features, chosen["BLOCK_O"]),)

    has_bias = bias is not None
    _linear[grid](x, weight, bias if has_bias else x, z, rows, features, depth, has_bias, precision)
    return z
