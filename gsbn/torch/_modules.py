"""Modules in a row, Linear, perhaps a scale, BatchNorm1d, perhaps ReLU, as one call with their own parameters."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.nn.modules import module as _module

from .._arrays.admit import is_memory
from .._typing import Activation, Gemm, Precision
from ._function import call, is_transformed
from ._groups import world

_TENSORS = (Tensor, nn.Parameter, FakeTensor)  # a fake one where a program is recorded
_NO_STATISTICS = (None, None, None)
_hooks_of_all: Any = getattr(_module, "_has_any_global_hook", lambda: False)


class SyncBatchNorm(nn.BatchNorm1d):
    """``nn.SyncBatchNorm`` where gsbn runs it: what `convert` makes of one, and a layer's `norm` with a process group.

    It has the same parameters, statistics and names in the state_dict, and called by itself gives the same output. It
    is no ``nn.SyncBatchNorm``, since DistributedDataParallel refuses these on the CPU, where gsbn runs them. A copy by
    ``copy.deepcopy`` is of the same ranks. Only one of the world's process group can be pickled, as with theirs.

    Parameters
    ----------
    *arguments, **options
        ``nn.BatchNorm1d``'s.
    process_group : torch.distributed.ProcessGroup, optional
        Whose ranks share their rows; None is the world, of which there is one when training begins.
    """

    def __init__(self, *arguments: Any, process_group: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.process_group = None if process_group is world() else process_group  # which can be pickled

    forward = nn.SyncBatchNorm.forward
    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self.process_group)] = self.process_group
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made


NORMS = (nn.BatchNorm1d, nn.SyncBatchNorm, SyncBatchNorm)
NAMES: dict[type[nn.Module], Activation] = {nn.ReLU: "relu"}  # of the modules that are an `activation`
# What a call of such a module runs: adapters, quantisers and tracers put something else there, for all of a class
_FORWARDS = {type_: type_.forward for type_ in (nn.Linear, *NORMS, *NAMES)}


class Row(NamedTuple):
    """The modules, in the order in which they run; None for one that is not there."""

    linear: Any
    scale: Any  # whose parameter `scale` multiplies
    norm: Any
    activation: Any


def run(row: Row, x: Any, precision: Precision) -> Any:
    """What the modules give one after the other; they do it themselves where gsbn cannot."""
    linear, scale, norm, after = row
    factor = None if scale is None else scale._parameters["scale"]
    if not are_plain(x, linear, norm) or not _agree(x, linear, scale, factor):
        for module in row:
            x = x if module is None else module(x)
        return x
    if after is None:
        return fused(x, linear, factor, norm, None, precision, "auto")
    if is_plain(after, after.__class__):
        return fused(x, linear, factor, norm, NAMES[after.__class__], precision, "auto")
    return after(fused(x, linear, factor, norm, None, precision, "auto"))


def _agree(x: Any, linear: Any, scale: Any, factor: Any) -> bool:
    """Whether what follows the Linear does with its output what one call does."""
    if x.dim() != 2:  # of three dimensions Linear and BatchNorm1d do not agree which one is the features
        return False
    if scale is None:
        return True
    # of two dtypes PyTorch goes on in the wider one; under autocast one call is documented to give autocast's
    return is_plain(scale, scale.__class__) and (factor.dtype is linear._parameters["weight"].dtype or _casts(x))


def is_plain(module: Any, type_: Any) -> bool:
    """Whether a call of the module does what its type does and nothing else."""
    own = module.__dict__
    if module.__class__ is not type_ or type_.forward is not _FORWARDS.get(type_, type_.forward):
        return False
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def are_plain(x: Any, linear: Any, norm: Any) -> bool:
    """Whether one call may take the place of the two modules' for this input."""
    if norm.__class__ not in NORMS or not is_plain(norm, norm.__class__):
        return False
    if not is_plain(linear, nn.Linear) or _hooks_of_all() or is_transformed():
        return False
    of_linear, of_norm, buffers = linear._parameters, norm._parameters, norm._buffers
    if not ("bias" in of_linear and "weight" in of_norm and "bias" in of_norm and "running_mean" in buffers):
        return False  # somebody put something else in a parameter's place
    if not ("running_var" in buffers and "num_batches_tracked" in buffers):
        return False
    weight = of_linear.get("weight")
    if x.__class__ not in _TENSORS or weight.__class__ not in _TENSORS or not (x.is_cuda or x.is_cpu):
        return False
    if not (is_compiling() or (is_memory(torch, x) and is_memory(torch, weight))):  # a compiler's tensors are
        return False
    return wins(x, norm)


def wins(x: Tensor, norm: Any) -> bool:
    """The one place that leaves a call to the modules for being slower: on a CPU PyTorch's own operators are the faster
    ones, and NumPy's threads would fight with theirs. Ranks that share a batch there have no other way."""
    return x.is_cuda or norm.__class__ is not nn.BatchNorm1d


def _casts(x: Tensor) -> bool:
    """Whether autocast casts the operands of a product."""
    return bool(torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"))


def fused(
    x: Any, linear: Any, scale: Any, norm: Any, activation: Activation | None, precision: Precision, gemm: Gemm
) -> Any:
    """The call that the modules stand for. It reads their own dictionaries: their attributes cost 1 us each."""
    of_linear, of_norm, buffers, momentum = linear._parameters, norm._parameters, norm._buffers, norm.momentum
    mean, training = buffers["running_mean"], norm.training
    # As BatchNorm1d and SyncBatchNorm choose their statistics
    process_group = None
    if training and norm.__class__ is not nn.BatchNorm1d:
        process_group = norm.process_group or world()
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
        (training, momentum, norm.eps, precision, gemm), activation, process_group,
    )  # fmt: skip
