"""What runs side by side: the names of the candidates, and what the clock needs to know of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAMES = {
    "gsbn": "gsbn",
    "gsbn-prepared": "gsbn, prepared",
    "gsbn-cublas": "gsbn, cublas",
    "gsbn-tiled": "gsbn, tiled",
    "gsbn-sm90": "gsbn, sm90",
    "gsbn-torch": "gsbn on tensors",
    "gsbn-gemm": "gsbn, GEMM alone",
    "gsbn-matmul": "gsbn.matmul",
    "gemm-torch": "GEMM, torch.mm",
    "gemm-lt": "GEMM, cuBLASLt",
    "gemm-cupy": "GEMM, cupy",
    "gemm-numpy": "GEMM, numpy",
    "gemm-jax-tf32x3": "GEMM, XLA TF32 X3",
    "gemm-jax-bf16x6": "GEMM, XLA BF16 X6",
    "addmm": "addmm, folded",
    "pytorch": "PyTorch eager",
    "compile": "torch.compile",
    "autotune": "max-autotune, in our graph",
    "max-autotune": "max-autotune",
    "triton-tf32x3": "Triton tf32x3",
    "triton-bf16x6": "Triton bf16x6",
    "jax": "JAX",
    "jax-tf32x3": "XLA TF32 X3",
    "jax-bf16x6": "XLA BF16 X6",
    "jax-bf16x9": "XLA BF16 X9",
}
GPU_ONLY = {
    "gsbn-prepared", "gsbn-cublas", "gsbn-tiled", "gsbn-sm90", "gsbn-gemm", "gemm-lt", "gemm-cupy", "compile",
    "autotune", "max-autotune", "triton-tf32x3", "triton-bf16x6", "jax-tf32x3", "jax-bf16x6", "jax-bf16x9",
    "gemm-jax-tf32x3", "gemm-jax-bf16x6",
}  # fmt: skip
COMPILED = ("compile", "autotune", "max-autotune")  # by torch.compile
OWN_GEMMS = ("gsbn-gemm", "gsbn-matmul")
WITHOUT_BACKWARD = ("gsbn-prepared", "gsbn-sm90")


class Unavailable(Exception):
    """The candidate cannot run this case here; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a case.

    ``call`` runs it once and returns its result. ``outputs`` also runs it once, from fresh running statistics, and
    returns arrays of NumPy or CuPy by name: ``y`` of a forward, ``g`` of a bare GEMM, of a backward or a step the
    gradients by the fields of ``gsbn.Gradients`` (None where there is none) and the ``y`` that they belong to; with the
    running statistics where they are known.
    ``capturable`` says that a CUDA graph of it would run the same kernels; ``wait`` blocks until a result is there.
    """

    name: str
    library: str  # cupy, numpy, torch or jax: whose streams and allocator it uses
    call: Callable[[], Any]
    outputs: Callable[[], dict[str, Any]]
    capturable: bool = True
    path: str = ""  # the GEMM that gsbn takes
    wait: Callable[[Any], None] = lambda result: None


def is_gemm(name: str) -> bool:
    """Whether a candidate computes g alone: a peer's GEMM, gsbn.matmul, or forward_sm90 without the rest of its
    forward."""
    return name.startswith("gemm-") or name in OWN_GEMMS


def is_emulated(name: str) -> bool:
    """Whether a candidate makes float32 products of several in TF32 or bfloat16."""
    return name.endswith(("-tf32x3", "-bf16x6", "-bf16x9"))


def names(gpu: bool) -> list[str]:
    """The candidates that make sense on this kind of machine, installed or not."""
    return [name for name in NAMES if (name != "gemm-numpy" if gpu else name not in GPU_ONLY)]
