"""Linear, per-feature scale, BatchNorm1d and activation in one call, as CUDA kernels for NVIDIA GPUs.

`forward` computes ``activation(BatchNorm1d(Linear(x) * scale))`` as PyTorch defines each step, in training and in
inference; `backward` computes its gradients. Both take CuPy arrays, PyTorch tensors and NumPy arrays, and return the
same kind. On a CPU they compute in NumPy, for tests and examples.

- `gsbn.torch`, imported on first use, is for PyTorch: a layer, a function, `convert` for models that exist, and
  `compare`, which measures whether it helps one.
- `prepare` and `fold` are for inference, `group` is for batches that several GPUs share.
- `linear` is the layer without a norm, `matmul` a product alone: in float32 on Hopper on the tensor cores.
- `describe` tells how a call is computed, and `warm_up` compiles all kernels ahead.
- `gsbn.reference` has the same mathematics in plain NumPy, `gsbn.bench` the measurements. The command ``gsbn`` runs
  these: ``gsbn info``, ``gsbn check``, ``gsbn bench``.

>>> import numpy as np
>>> import gsbn
>>> x, weight = np.random.rand(256, 64), np.random.rand(32, 64)
>>> y = gsbn.forward(x, weight, training=True, activation="relu")
>>> y.shape
(256, 32)
"""

from typing import TYPE_CHECKING

from ._backward import backward
from ._fold import fold
from ._forward import describe, forward, linear
from ._gradients import Gradients
from ._host.call import Description
from ._matmul import matmul
from ._prepare import prepare
from ._prepared import Prepared
from ._ranks.group import Group, group
from ._renorm import Renorm
from ._saved import Saved
from ._warm_up import warm_up

__all__ = [
    "Description",
    "Gradients",
    "Group",
    "Prepared",
    "Renorm",
    "Saved",
    "backward",
    "describe",
    "fold",
    "forward",
    "group",
    "linear",
    "matmul",
    "prepare",
    "warm_up",
]
__version__ = "0.1.0"

for _class in (Description, Gradients, Group, Prepared, Renorm, Saved):
    _class.__module__ = __name__  # in pickles, too, so that the files may change
del _class

if TYPE_CHECKING:
    from . import bench as bench
    from . import torch as torch
else:

    def __getattr__(name):
        """Import ``gsbn.bench`` and ``gsbn.torch`` on first use: not every program needs them."""
        if name not in ("bench", "torch"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"gsbn.{name}")

    def __dir__():
        """The names of this package, with ``torch`` only where PyTorch is installed: help() imports what is listed."""
        from importlib.util import find_spec

        names = {*globals(), "bench"} - {"TYPE_CHECKING"}
        try:
            found = find_spec("torch") is not None
        except (ImportError, ValueError):
            found = False
        return sorted(names | {"torch"} if found else names - {"torch"})
