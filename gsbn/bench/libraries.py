"""NumPy, CuPy, PyTorch and JAX: how each is imported, switched, and given arrays."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from .candidate import Unavailable
from .machine import has_gpu


def load(names: list[str]) -> dict[str, Any]:
    """Import what the named candidates need; None in place of a module that is not installed."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes three quarters of the GPU
    needed = {
        "jax" if "jax" in name else "torch"
        for name in names
        if name not in ("gsbn", "gsbn-matmul", "gemm-cupy", "gemm-numpy")
    }
    found: dict[str, Any] = {}
    for library in sorted(needed):
        try:
            found[library] = importlib.import_module(library)
        except ImportError:
            found[library] = None
    return found


@contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """PyTorch's and CuPy's global precision of float32 products and convolutions, restored on the way out."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy") if has_gpu() else None
    with ExitStack() as stack:
        if torch is not None:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(precision)
            cudnn = torch.backends.cudnn  # whose flags() sets all flags
            same = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")}
            stack.enter_context(cudnn.flags(**same, allow_tf32=precision == "high"))
        if cupy is not None:
            from cupy._core import _routines_linalg as core

            stack.callback(core.set_compute_type, "f", core.get_compute_type("f"))
            core.set_compute_type("f", core.COMPUTE_TYPE_TF32 if precision == "high" else core.COMPUTE_TYPE_FP32)
        yield


def forget_compiled() -> None:
    """Drop what torch.compile holds, so that every case is compiled for its own shape and no limit is reached."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


def torch_with_gpu() -> Any:
    """torch if it is imported and sees a GPU, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def has_gpus() -> bool:
    """Whether both PyTorch and CuPy see a GPU."""
    load(["pytorch"])
    return has_gpu() and torch_with_gpu() is not None


def no_grad() -> Any:
    """``torch.no_grad()`` if torch is imported, else nothing."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else nullcontext()


def as_dtype(name: str) -> np.dtype[Any]:
    """A dtype by name, bfloat16 included; ImportError without ``ml_dtypes``."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from error
        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def on_host(a: Any) -> Any:
    """An array of NumPy or CuPy as NumPy's."""
    return a.get() if hasattr(a, "get") else a


class Native:
    """NumPy or CuPy arrays as they are."""

    name: str
    torch: Any = None

    def __init__(self, xp: Any) -> None:
        self.name = xp.__name__

    def take(self, a: Any) -> Any:
        return a

    def give(self, a: Any) -> Any:
        return a


class Torch(Native):
    """Tensors over the memory of NumPy or CuPy arrays, and back. DLPack refuses their bfloat16, so it goes as int16."""

    def __init__(self, xp: Any) -> None:
        self.name: str = "torch"
        self.xp: Any = xp
        self.torch: Any = load(["pytorch"])["torch"]
        if self.torch is None:
            raise Unavailable("torch is not installed")
        self.device = "cuda" if xp.__name__ == "cupy" else "cpu"
        if self.device == "cuda" and not self.torch.cuda.is_available():
            raise Unavailable("this torch sees no GPU")

    def take(self, a: Any) -> Any:
        if a.dtype.name == "bfloat16":
            return self.torch.from_dlpack(a.view("int16")).view(self.torch.bfloat16)
        return self.torch.from_dlpack(a)

    def give(self, a: Any) -> Any:
        if a.dtype == self.torch.bfloat16:
            return self.xp.from_dlpack(a.view(self.torch.int16)).view(as_dtype("bfloat16"))
        return self.xp.from_dlpack(a)
