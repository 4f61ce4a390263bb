"""Models for `convert`: rows of modules, nested and in subclasses of nn.Sequential."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gsbn.torch import convert

I = 7  # inputs


class Scale(nn.Module):
    """As in KernelBench's problems."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: Any) -> Any:
        return x * self.scale


class Doubled(nn.BatchNorm1d):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


class Backwards(nn.Sequential):
    def forward(self, x: Any) -> Any:
        for module in reversed(self):
            x = module(x)
        return x


class Block(nn.Sequential):
    """A subclass without a forward of its own, as torchvision has them."""

    def __init__(self, out: int = 6, between: Any = ()) -> None:
        super().__init__(nn.Linear(I, out), *between, nn.BatchNorm1d(out), nn.ReLU())
        self.out = out

    def extra_repr(self) -> str:
        return f"out={self.out}"


def row(*between: nn.Module, out: int = 6, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(I, out), *between, nn.BatchNorm1d(out, **options), nn.ReLU())


def network() -> nn.Module:
    """Nested modules; some can be converted, others cannot."""
    torch.manual_seed(0)
    model = nn.ModuleDict()
    model["encoder"] = nn.Sequential(nn.Linear(I, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.0), nn.Linear(6, I))
    model["blocks"] = nn.Sequential(row(Scale(6), momentum=None), nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    model["head"] = nn.Linear(4, 3)
    model.forward = None  # never called: `call` replaces it
    return model.double()


def call(model: Any) -> Callable[[Any], Any]:
    return lambda x: model["head"](model["blocks"](model["encoder"](x)))


def converted(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    plain = copy.deepcopy(model)
    convert(model, **options)
    return model, plain
