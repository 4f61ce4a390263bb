"""Use gsbn in PyTorch through a layer, a function and a conversion that support autograd, autocast and torch.compile.

`compare` measures whether gsbn helps a model.

>>> import gsbn.torch
>>> layer = gsbn.torch.LinearBatchNorm1d(64, 32, activation="relu")
>>> list(layer.state_dict())[:3]
['linear.weight', 'norm.weight', 'norm.bias']

No other part of gsbn imports this package: `gsbn.forward` and `gsbn.backward` take tensors, but do not support
autograd.
"""

from ._compare import Comparison, Measured, compare
from ._compile import backend, inductor_options
from ._conv import ConvBatchNorm1d, ConvBatchNorm2d
from ._convert import Conversion, Left, Sequential, convert, revert
from ._function import linear_batch_norm
from ._ghosts import GhostBatchNorm1d
from ._groups import group
from ._layer import LinearBatchNorm1d
from ._linear import Linear, linear
from ._modules import SyncBatchNorm
from ._renorm import BatchRenorm1d

__all__ = [
    "BatchRenorm1d",
    "Comparison",
    "ConvBatchNorm1d",
    "ConvBatchNorm2d",
    "Conversion",
    "GhostBatchNorm1d",
    "Left",
    "Linear",
    "LinearBatchNorm1d",
    "Measured",
    "Sequential",
    "SyncBatchNorm",
    "backend",
    "compare",
    "convert",
    "group",
    "inductor_options",
    "linear",
    "linear_batch_norm",
    "revert",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # pickles store this name, so the files may change
del _name
