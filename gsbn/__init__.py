"""gsbn: Linear, per-feature scale and BatchNorm1d in one call, as raw CUDA kernels under CuPy."""

from ._forward import fold, forward
from ._interop import Prepared
from ._prepare import prepare
from ._system import warm_up

__all__ = ["Prepared", "fold", "forward", "prepare", "warm_up"]
__version__ = "0.1.0"
