"""Modules in a row, Linear, perhaps a scale, BatchNorm1d, perhaps ReLU, as one call with their own parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _module

from .._typing import Activation, Gemm, Precision
from ._function import call

__all__ = ["Group", "are_plain", "fused", "is_plain", "run"]

_TENSORS = (Tensor, nn.Parameter, FakeTensor)  # a fake one where a program is recorded
_NO_STATISTICS = (None, None, None)
_hooks_of_all: Any = getattr(_module, "_has_any_global_hook", lambda: False)


class Group(NamedTuple):
    """The modules, in the order in which they run; None for one that is not there."""

    linear: Any
    scale: Any  # whose parameter `scale` multiplies
    norm: Any
    relu: Any


def run(group: Group, x: Any, precision: Precision) -> Any:
    """What the modules give one after the other; they do it themselves where gsbn cannot, or would not win."""
    linear, scale, norm, relu = group
    if x.dim() != 2 or not (are_plain(x, linear, norm) and (scale is None or is_plain(scale, scale.__class__))):
        for module in group:
            x = x if module is None else module(x)
        return x
    factor = None if scale is None else scale._parameters["scale"]
    if relu is None:
        return fused(x, linear, factor, norm, None, precision, "auto")
    if is_plain(relu, nn.ReLU):
        return fused(x, linear, factor, norm, "relu", precision, "auto")
    return relu(fused(x, linear, factor, norm, None, precision, "auto"))


def is_plain(module: Any, type_: Any) -> bool:
    """Whether a call of the module does what its type does and nothing else."""
    own = module.__dict__
    return module.__class__ is type_ and not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def are_plain(x: Any, linear: Any, norm: Any) -> bool:
    """Whether one call may take the place of the two modules' for this input."""
    if not (is_plain(linear, nn.Linear) and is_plain(norm, nn.BatchNorm1d)) or _hooks_of_all():
        return False
    weight = linear._parameters.get("weight")
    if x.__class__ not in _TENSORS or weight.__class__ not in _TENSORS or not (x.is_cuda or x.is_cpu):
        return False
    return _wins(x, weight)


def _wins(x: Tensor, weight: Tensor) -> bool:
    """Whether gsbn is expected to be no slower than the modules; the one place that decides it."""
    return True


def fused(
    x: Any, linear: Any, scale: Any, norm: Any, activation: Activation | None, precision: Precision, gemm: Gemm
) -> Any:
    """The call that the modules stand for. It reads their own dictionaries: their attributes cost 1 us each."""
    of_linear, of_norm, buffers, momentum = linear._parameters, norm._parameters, norm._buffers, norm.momentum
    mean, training = buffers["running_mean"], norm.training
    # As BatchNorm1d chooses its statistics
    if training and mean is not None and norm.track_running_stats:
        count = buffers["num_batches_tracked"]
        state = mean, buffers["running_var"], count
        if momentum is None and count is None:
            momentum = 0.0
    elif training or mean is None:
        training, state, momentum = True, _NO_STATISTICS, 0.0
    else:
        state = mean, buffers["running_var"], None
    return call(
        x, of_linear["weight"], of_linear["bias"], scale, of_norm["weight"], of_norm["bias"], state,
        (training, momentum, norm.eps, precision, gemm), activation,
    )  # fmt: skip
