"""gsbn: Linear, per-feature scale and BatchNorm1d in one call, as raw CUDA kernels under CuPy."""

from ._forward import fold, forward

__all__ = ["fold", "forward"]
__version__ = "0.1.0"
