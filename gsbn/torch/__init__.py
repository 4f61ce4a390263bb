"""gsbn as a part of PyTorch: a layer, a function and a conversion that autograd, autocast and torch.compile know.

>>> import gsbn.torch
>>> layer = gsbn.torch.LinearBatchNorm1d(64, 32, activation="relu")
>>> layer
LinearBatchNorm1d(
  activation=relu
  (linear): Linear(in_features=64, out_features=32, bias=False)
  (norm): BatchNorm1d(32, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
)

Nothing else in gsbn imports this package: `gsbn.forward` and `gsbn.backward` know tensors, but no autograd.
"""

from ._convert import Conversion, Left, Sequential, convert, revert
from ._function import linear_batch_norm
from ._layer import LinearBatchNorm1d

__all__ = ["Conversion", "Left", "LinearBatchNorm1d", "Sequential", "convert", "linear_batch_norm", "revert"]
