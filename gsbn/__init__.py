"""gsbn: Linear, per-feature scale and BatchNorm1d in one call, as raw CUDA kernels under CuPy."""

from ._backward import Gradients, backward
from ._forward import Saved, fold, forward
from ._interop import Prepared
from ._prepare import prepare
from .bench.machine import warm_up

__all__ = ["Gradients", "Prepared", "Saved", "backward", "fold", "forward", "prepare", "warm_up"]
__version__ = "0.1.0"
