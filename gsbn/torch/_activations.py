"""Translate between gsbn's activations and PyTorch's modules, functions, and calls in a graph of torch.fx."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional

from .._arrays.check import checked_activation
from .._plan.activations import name_and_number
from .._typing import Activation

# Each entry has PyTorch's function, which takes y and perhaps a number; the module, which takes this number; and the
# functions and methods in a graph
_Known = tuple[Callable[..., Tensor], Callable[..., nn.Module], tuple[Any, ...]]
_KNOWN: dict[str, _Known] = {
    "relu": (
        torch.relu,
        nn.ReLU,
        (functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"),
    ),
    "leaky_relu": (functional.leaky_relu, nn.LeakyReLU, (functional.leaky_relu, functional.leaky_relu_)),
    "silu": (functional.silu, nn.SiLU, (functional.silu,)),
    "gelu": (functional.gelu, nn.GELU, (functional.gelu,)),
    "gelu_tanh": (partial(functional.gelu, approximate="tanh"), partial(nn.GELU, approximate="tanh"), ()),
    "elu": (functional.elu, nn.ELU, (functional.elu, functional.elu_)),
}
_NAME_OF: dict[Any, Any] = {target: name for name, (_, _, targets) in _KNOWN.items() for target in targets}
_NUMBER: dict[Any, str] = {"leaky_relu": "negative_slope", "elu": "alpha"}  # the name of the number in PyTorch
_GELU: dict[str, Any] = {"none": "gelu", "tanh": "gelu_tanh"}  # the keys are values of `approximate`
MODULES: dict[type[nn.Module], Any] = {
    nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.SiLU: "silu", nn.GELU: "gelu", nn.ELU: "elu",
}  # fmt: skip


def apply(y: Any, activation: Activation) -> Any:
    """Return the activation of y, computed by PyTorch's function."""
    name, number = name_and_number(activation)
    function = _KNOWN[name][0]
    return function(y) if number is None else function(y, number)


def before(activation: Activation, dy: Any, y: Any) -> Any:
    """Return the gradient before an activation whose derivative follows from y."""
    name, slope = name_and_number(activation)
    return dy.masked_fill(y <= 0, 0) if name == "relu" else torch.where(y > 0, dy, dy * slope)


def module_of(activation: Activation) -> nn.Module:
    """Return PyTorch's module of an activation. Raise an error if the argument is not an activation."""
    name, number = name_and_number(checked_activation(activation))
    make = _KNOWN[name][1]
    return make() if number is None else make(number)


def of_module(module: Any) -> Activation | None:
    """Return the activation that a module computes, or None if gsbn has no activation that does the same."""
    name = MODULES.get(module.__class__)
    if name == "gelu":
        return _GELU.get(module.approximate)
    return _numbered(name, getattr(module, _NUMBER[name])) if name in _NUMBER else name


def of_call(node: Node) -> Activation | None:
    """Return the activation that a node of a graph calls as a function or a method, or None if it calls none."""
    name = _NAME_OF.get(node.target) if node.op in ("call_function", "call_method") else None
    places = ("approximate",) if name == "gelu" else (*((_NUMBER[name],) if name in _NUMBER else ()), "inplace")
    given = {**dict(zip(places, node.args[1:], strict=False)), **node.kwargs}
    if name is None or not set(given) <= {*places}:
        return None
    if name == "gelu":
        return _GELU.get(given.get("approximate", "none"))
    number = given.get(_NUMBER.get(name))
    return name if number is None else _numbered(name, number)


def _numbered(name: Any, number: Any) -> Activation | None:
    """Return the activation with this number, or None if gsbn does not accept the number."""
    fits = isinstance(number, (int, float)) and not isinstance(number, bool) and abs(number) <= _MOST
    return (name, number) if fits else None


_MOST = torch.finfo(torch.float32).max
