"""Run Linear or 1x1 convolution, optional scale, BatchNorm and optional activation as one call on their tensors."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from .._arrays.admit import is_memory
from .._typing import Activation, Gemm, Precision
from ._activations import MODULES, apply, of_module
from ._autograd import is_compiling, is_exporting, is_watched
from ._channels_first import autocast_dtype, beats_modules
from ._function import call, call_in_sequence, is_transformed, taken_in_rows
from ._ghosts import GhostBatchNorm1d
from ._groups import name_of, world
from ._linear import Linear
from ._renorm import BatchRenorm1d

_TENSORS = (Tensor, nn.Parameter, FakeTensor)  # x is a FakeTensor while torch records a program
_NO_STATISTICS = (None, None, None)
_hooks_of_all: Any = getattr(_module, "_has_any_global_hook", lambda: False)


class SyncBatchNorm(nn.BatchNorm1d):
    """A replacement of ``nn.SyncBatchNorm`` in converted models, and the `norm` of a layer with a process group.

    It has the same parameters, statistics and names in the state_dict, and gives the same output if it is called by
    itself. It is not a subclass of ``nn.SyncBatchNorm``, because DistributedDataParallel rejects that class on the CPU,
    which gsbn supports. A copy that ``copy.deepcopy`` makes has the same process group. As with ``nn.SyncBatchNorm``,
    it can be pickled only with the process group of all ranks.

    Parameters
    ----------
    *arguments, **options
        As for ``nn.BatchNorm1d``.
    process_group : torch.distributed.ProcessGroup, optional
        The group whose ranks share their rows. None means the group of all ranks at the time when training starts.

    Examples
    --------
    >>> import gsbn.torch
    >>> norm = gsbn.torch.SyncBatchNorm(32)
    >>> norm.num_features, norm.process_group
    (32, None)
    """

    def __init__(self, *arguments: Any, process_group: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.process_group = None if process_group is world() else process_group  # None can be pickled

    forward = nn.SyncBatchNorm.forward
    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self.process_group)] = self.process_group
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made


NORMS: tuple[Any, ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.SyncBatchNorm,
    SyncBatchNorm,
    BatchRenorm1d,
    GhostBatchNorm1d,
)
# The norms that may follow each class
FOLLOWERS: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys(
        (nn.Linear, Linear), (nn.BatchNorm1d, nn.SyncBatchNorm, SyncBatchNorm, BatchRenorm1d, GhostBatchNorm1d)
    ),
    nn.Conv1d: (nn.BatchNorm1d, nn.SyncBatchNorm, SyncBatchNorm),
    nn.Conv2d: (nn.BatchNorm2d, nn.SyncBatchNorm, SyncBatchNorm),
}
# These norms have no process group unless one is given; without one, the other norms use the group of all ranks.
_NO_DEFAULT_GROUP = (nn.BatchNorm1d, nn.BatchNorm2d, BatchRenorm1d, GhostBatchNorm1d)
# PyTorch's own forward of each class; adapters, quantisers and tracers may replace the forward of a class
_FORWARDS = {type_: type_.forward for type_ in (*FOLLOWERS, *NORMS, *MODULES)}


class Row(NamedTuple):
    """Consecutive modules in order; a field is None if its module is absent."""

    linear: Any  # or a 1x1 convolution
    scale: Any  # a module that multiplies by its parameter `scale`, or the parameter itself
    norm: Any
    activation: Any  # a module, or an activation as gsbn takes it


def run(row: Row, x: Any, precision: Precision, residual: Any = None, in_place: bool = False) -> Any:
    """Return the output of the modules in sequence, by one call of gsbn if possible, else by the modules themselves.

    If there is a residual, it is added before the activation; `in_place`: by +=, as the forward does.
    """
    linear, scale, norm, after = row
    factor = _factor(scale)
    if not _is_one_call(row, factor, x, precision):
        for step in row[:3]:
            if step is not None:
                x = x * step if step is factor else step(x)
        return finish(x, residual, in_place, after)
    if residual is not None and not _is_like_y(residual, x, linear):
        return finish(fused(x, linear, factor, norm, None, precision, "auto"), residual, in_place, after)
    activation = _activation_of(after)
    y = fused(x, linear, factor, norm, activation, precision, "auto", residual)
    return y if after is None or activation is not None else after(y)


def run_in_sequence(rows: tuple[Row, ...], x: Any, precision: Precision) -> Any:
    """Return the output of rows in sequence. Small ones share an autograd node, which takes the host less time, and
    convolutions need no copies between them."""
    if len(rows) > 1 and not (is_compiling() or is_watched()):
        layers = _layers(rows, x, precision)
        if layers is not None:
            return call_in_sequence(x, layers)
    for row in rows:
        x = run(row, x, precision)
    return x


def _layers(rows: tuple[Row, ...], x: Any, precision: Precision) -> list[Any] | None:
    """Return the arguments of `call_in_sequence` for rows in sequence; None if it does not serve one of them."""
    found, differentiate = [], is_grad_enabled()
    if not differentiate and (x.__class__ not in _TENSORS or x.dim() == 2):
        return None
    for row in rows:
        linear, scale, norm, after = row
        factor, activation = _factor(scale), _activation_of(after)
        if not _is_one_call(row, factor, x, precision):
            return None
        if after is not None and activation is None:
            return None
        if differentiate and not linear._parameters["weight"].requires_grad:
            return None
        running = norm._buffers["running_mean"], norm._buffers["running_var"]
        if any(of is not None and of.requires_grad for of in running):
            return None  # `call` raises
        found.append((linear, factor, norm, activation))
    return [arguments(*of_row, precision, "auto") for of_row in found]


def _factor(scale: Any) -> Any:
    """Return the parameter by which a scale multiplies; None if there is no scale, or no such parameter."""
    return scale._parameters.get("scale") if isinstance(scale, nn.Module) else scale


def _is_one_call(row: Row, factor: Any, x: Any, precision: Precision) -> bool:
    """Return whether one call may replace the modules before the activation. `factor` is that of the scale."""
    linear, scale, norm, _ = row
    replaced = scale is not None and factor is None  # pruning or a parametrization replaced the parameter
    return not replaced and are_plain(x, linear, norm, precision) and _agree(x, linear, scale, factor)


def _activation_of(after: Any) -> Activation | None:
    """Return the activation that one call of gsbn applies for this module, or None if it cannot."""
    if not isinstance(after, nn.Module):
        return after  # type: ignore[no-any-return]
    return of_module(after) if is_plain(after, after.__class__) else None


def finish(u: Any, residual: Any, in_place: bool, after: Any) -> Any:
    """Add the residual, if there is one, and apply the activation by PyTorch's own operators."""
    if in_place:
        u += residual  # keeps u's dtype
    elif residual is not None:
        u = u + residual
    return u if after is None else after(u) if isinstance(after, nn.Module) else apply(u, after)


def _agree(x: Any, linear: Any, scale: Any, factor: Any) -> bool:
    """Return whether the modules after the Linear compute the same as one call of gsbn."""
    if isinstance(linear, nn.Linear) and x.dim() != 2:
        return False  # with three dimensions, Linear and BatchNorm1d disagree about the dimension of the features
    if scale is None:
        return True
    # if the two dtypes differ, PyTorch continues in the wider one; under autocast gsbn uses autocast's, as documented
    agree = factor.dtype is linear._parameters["weight"].dtype
    return (scale is factor or is_plain(scale, scale.__class__)) and (
        agree or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    )


def _is_like_y(residual: Any, x: Any, linear: Any) -> bool:
    """Return whether a residual has the shape, dtype and device of a row's output: adding it changes none of these."""
    if residual.__class__ not in _TENSORS or residual.device != x.device or torch.is_autocast_enabled("cpu"):
        return False
    shape = x.shape[0], linear._parameters["weight"].shape[0], *x.shape[2:]
    return residual.shape == shape and residual.dtype is (autocast_dtype(x) or x.dtype)


def is_plain(module: Any, type_: Any) -> bool:
    """Return whether a call of the module does exactly what its class does, without hooks or a replaced forward."""
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


def are_plain(x: Any, linear: Any, norm: Any, precision: Precision = "highest") -> bool:
    """Return whether one call of gsbn may replace the calls of both modules for this input."""
    if norm.__class__ not in FOLLOWERS.get(linear.__class__, ()) or not is_plain(norm, norm.__class__):
        return False
    if not is_plain(linear, linear.__class__) or _hooks_of_all() or is_transformed():
        return False
    of_linear, of_norm, buffers = linear._parameters, norm._parameters, norm._buffers
    if not ("bias" in of_linear and "weight" in of_norm and "bias" in of_norm and "running_mean" in buffers):
        return False  # a parameter was replaced by something else
    if not ("running_var" in buffers and "num_batches_tracked" in buffers):
        return False
    if (buffers["running_mean"] is None) is not (buffers["running_var"] is None):
        return False  # PyTorch refuses one without the other
    weight = of_linear.get("weight")
    if x.__class__ not in _TENSORS or weight.__class__ not in _TENSORS or not (x.is_cuda or x.is_cpu):
        return False
    if is_compiling():  # the compiler's tensors are plain memory
        if (linear.training or norm.training) and is_exporting():
            return False  # an exported program would have no gradients
    elif not (is_memory(torch, x) and is_memory(torch, weight)):
        return False
    return wins(x, norm) and (isinstance(linear, nn.Linear) or _suits(x, linear, norm, precision))


def _suits(x: Any, conv: Any, norm: Any, precision: Precision) -> bool:
    """Return whether gsbn takes this input of a convolution: without a copy, or where it is faster with copies.

    Ranks that share a batch always accept them, because PyTorch's SyncBatchNorm is slower and does not exist on a CPU.
    """
    weight, of_norm = conv._parameters["weight"], norm._parameters
    if x.dim() != weight.dim() or not_pointwise(conv) is not None:
        return False
    if taken_in_rows(x, weight):
        return True
    if norm.training and name_of(group_of_norm(norm)) is not None:
        return True
    training = norm.training or norm._buffers["running_mean"] is None
    vectors = conv._parameters["bias"], of_norm["weight"], of_norm["bias"]
    return beats_modules(x, weight, vectors, training, precision)


def not_pointwise(conv: Any) -> str | None:
    """Return why a convolution is not a product of a matrix of rows with its weight, or None if it is one."""
    for name, what in (("kernel_size", "a kernel"), ("stride", "a stride")):
        if any(size != 1 for size in getattr(conv, name)):
            return f"its {title(conv)} has {what} of {' x '.join(map(str, getattr(conv, name)))}, not of 1"
    if not isinstance(conv.padding, str) and any(conv.padding):
        return f"its {title(conv)} has a padding"
    return None if conv.groups == 1 else f"its {title(conv)} has {conv.groups} groups"


def wins(x: Tensor, norm: Any) -> bool:
    """Return whether gsbn is faster than the modules. Only this function decides by speed.

    On a CPU PyTorch's operators are faster, and NumPy's threads would compete with PyTorch's. But there PyTorch's
    SyncBatchNorm refuses to train with a process group.
    """
    return x.is_cuda or (norm.training and group_of_norm(norm) is not None)


def group_of_norm(norm: Any) -> Any:
    """Return the process group whose ranks share the norm's batch in training, or None."""
    group = norm.__dict__.get("process_group")
    return world() if group is None and norm.__class__ not in _NO_DEFAULT_GROUP else group


def fused(
    x: Any, linear: Any, scale: Any, norm: Any, activation: Activation | None, precision: Precision, gemm: Gemm,
    residual: Any = None,
) -> Any:  # fmt: skip
    """Make the call of gsbn that replaces the modules."""
    of_call = *arguments(linear, scale, norm, activation, precision, gemm), residual
    return call(x, *of_call)


def arguments(
    linear: Any, scale: Any, norm: Any, activation: Activation | None, precision: Precision, gemm: Gemm
) -> Any:
    """Return the arguments of `call` after x. Read the modules' dictionaries, because each attribute costs 1 us."""
    of_linear, of_norm, buffers, momentum = linear._parameters, norm._parameters, norm._buffers, norm.momentum
    mean, training = buffers["running_mean"], norm.training
    # Choose the statistics as BatchNorm1d and SyncBatchNorm do
    process_group = group_of_norm(norm) if training else None
    if training and mean is not None and norm.track_running_stats:
        count = buffers["num_batches_tracked"]
        state = mean, buffers["running_var"], count
        if momentum is None and count is None:
            momentum = 0.0
    elif training or mean is None:
        if training and norm.track_running_stats and (count := buffers["num_batches_tracked"]) is not None:
            count.add_(norm.groups if norm.__class__ is GhostBatchNorm1d else 1)  # BatchNorm1d counts here, too
        training, state, momentum = True, _NO_STATISTICS, 0.0
    else:
        state = mean, buffers["running_var"], None
    return (
        of_linear["weight"], of_linear["bias"], scale, of_norm["weight"], of_norm["bias"], state,
        (training, momentum, norm.eps, precision, gemm), activation, process_group,
        norm.renorm if norm.__class__ is BatchRenorm1d else None,
        norm.groups if norm.__class__ is GhostBatchNorm1d else 1,
    )  # fmt: skip


def around(children: tuple[Any, ...], i: int, scales: tuple[type, ...]) -> Row | str:
    """Return the row whose norm is child i, or the reason why there is none.

    The result depends only on the modules' classes and sizes.
    """
    norm = children[i]
    if isinstance(norm, LazyModuleMixin):
        return "it has no parameters yet: call the model once, then convert"
    if norm.__class__ not in NORMS:
        return f"it is a {title(norm)}, not an nn.BatchNorm1d, nn.BatchNorm2d or nn.SyncBatchNorm"
    scaled = i > 0 and (children[i - 1].__class__ in scales or isinstance(children[i - 1], Tensor))
    scale, at = (children[i - 1], i - 2) if scaled else (None, i - 1)
    if at < 0:
        return "no nn.Linear or convolution stands before it"
    linear = children[at]
    if isinstance(linear, LazyModuleMixin):
        return f"its {title(linear)} has no parameters yet: call the model once, then convert"
    if is_parametrized(linear):
        return "its weight is parametrized: remove the parametrization, then convert"
    if linear.__class__ not in FOLLOWERS:
        more = "" if scaled else " or a class in scales="
        return f"it follows a {title(linear)}, not an nn.Linear, an nn.Conv1d, an nn.Conv2d{more}"
    if norm.__class__ not in FOLLOWERS[linear.__class__]:
        return f"a {title(norm)} does not take the output of its {title(linear)}"
    conv = not isinstance(linear, nn.Linear)
    why = not_pointwise(linear) if conv else None
    if why is None and conv and scaled:
        why = f"a scale stands between it and its {title(linear)}"
    if why is not None:
        return why
    inputs, features = (linear.in_channels, linear.out_channels) if conv else (linear.in_features, linear.out_features)
    if not inputs or not features:
        return f"its {title(linear)} has no inputs or no outputs"
    if norm.num_features != features:
        return f"it has {norm.num_features} features, its nn.{title(linear)} {features}"
    if scale is not None and not _is_scale(scale, features):
        return f"its {title(scale)} holds something else than one parameter `scale` of ({features},) or of one element"
    after = children[i + 1] if i + 1 < len(children) else None
    follows = of_module(after) is not None if isinstance(after, nn.Module) else isinstance(after, (str, tuple))
    return Row(linear, scale, norm, after if follows else None)


def _is_scale(scale: Any, features: int) -> bool:
    factor = scale
    if isinstance(scale, nn.Module):
        factor = scale._parameters.get("scale")
        if factor is None or len(scale._parameters) > 1 or scale._modules or scale._buffers:
            return False
    return tuple(factor.shape) == (features,) or factor.numel() == 1


def hindrance(row: Row) -> str | None:
    """Return the reason why modules that stand in a row cannot run as one call now, or None."""
    modules = [module for module in row[:3] if isinstance(module, nn.Module)]
    for module in modules:
        if not is_plain(module, type(module)):
            return f"its {title(module)} has hooks or a forward of its own"
    devices = {str(tensor.device) for module in modules for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        return f"its tensors are on several devices: {', '.join(sorted(devices))}"
    return None


def title(module: Any) -> str:
    """Return the name of a module's class, for a message."""
    return type(module).__qualname__
