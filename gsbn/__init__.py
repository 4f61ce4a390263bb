"""gsbn: Linear, per-feature scale and BatchNorm1d in one call, as raw CUDA kernels under CuPy."""

from ._backward import Gradients, backward
from ._forward import Saved, fold, forward
from ._system import warm_up

__all__ = ["Gradients", "Saved", "backward", "fold", "forward", "warm_up"]
__version__ = "0.1.0"
