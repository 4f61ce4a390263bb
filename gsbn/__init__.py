"""gsbn: Linear, per-feature scale, BatchNorm1d and ReLU in one call, as raw CUDA kernels under CuPy."""

from typing import TYPE_CHECKING

from ._backward import backward
from ._fold import fold
from ._forward import describe, forward
from ._host.call import Description
from ._prepare import prepare
from ._prepared import Prepared
from ._ranks.group import Group, group
from ._saved import Saved
from ._warm_up import warm_up
from .reference import Gradients

__all__ = [
    "Description",
    "Gradients",
    "Group",
    "Prepared",
    "Saved",
    "backward",
    "describe",
    "fold",
    "forward",
    "group",
    "prepare",
    "warm_up",
]
__version__ = "0.1.0"

for _class in (Description, Group, Prepared, Saved):
    _class.__module__ = __name__  # in pickles, too, so that the files may change

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
