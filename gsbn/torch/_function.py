"""Define linear_batch_norm, and the call of gsbn that this function, the layers and converted models share."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled

from .._arrays.check import checked_activation
from .._arrays.kinds import NUMBERS
from .._forward import forward_of
from .._renorm import Renorm, renorm_of
from .._typing import Activation, Gemm, Precision
from .._values import ghost_count, shown
from ._autograd import cast, is_compiling, is_exporting, is_watched, transforms, widens
from ._channels_first import COPIES, IN_PLACE, autocast_dtype, channels_first, way_of
from ._groups import group_of, name_of
from ._nodes import apply, apply_in_sequence
from ._operators import recorded
from ._residual import added, check_residual, joins_call
from ._transpose import rows_of, samples_of

# torch.jit.trace would record a result as a constant; the tensors of torch.func (`transforms`) have no memory.
_trace: Any = getattr(torch._C, "_get_tracing_state", lambda: None)
_forward_ad: Any = torch.autograd.forward_ad
_NO_LEVEL = SimpleNamespace(_current_level=-1)
_level: Any = _forward_ad if hasattr(_forward_ad, "_current_level") else _NO_LEVEL  # >= 0 if tensors have tangents


def is_transformed() -> bool:
    """Return whether torch.jit.trace, forward-mode differentiation or a transform of torch.func is active.

    PyTorch's own modules must run then.
    """
    return not is_compiling() and (_trace() is not None or transforms() or _level._current_level >= 0)


def linear_batch_norm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | float | None = None,
    *,
    bias: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: Activation | None = None,
    precision: Precision = "highest",
    gemm: Gemm = "auto",
    process_group: Any = None,
    renorm: Renorm | tuple[float, float] | Tensor | None = None,
    groups: int = 1,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `gsbn.forward` on PyTorch's tensors, with support for autograd, autocast and torch.compile.

    Under ``torch.autocast`` x and weight are cast as in ``nn.Linear``, and y has autocast's dtype; the vectors are not
    cast. Each gradient has the dtype of its argument. For second derivatives (``create_graph=True``) and batched
    gradients, PyTorch's own operators compute the call again.

    Parameters
    ----------
    x : (B, I), (N, I, L) or (N, I, H, W) tensor
        float32, float16, bfloat16 or float64. Every (n, l) or (n, h, w) is a row, as in ``BatchNorm1d`` and
        ``BatchNorm2d``. x is not copied if its features are adjacent in memory, as in ``z.transpose(1, 2)`` of a
        contiguous (N, L, I) tensor, and in ``torch.channels_last``.
    weight : (O, I) tensor, or (O, I, 1) or (O, I, 1, 1) of a convolution, which then says how many dimensions x has
        It has x's dtype, except under autocast.
    scale, bias, gamma, beta, running_mean, running_var, num_batches_tracked : tensor, optional
    training, momentum, eps, activation, precision, gemm
        As in `gsbn.forward`.
    process_group : torch.distributed.ProcessGroup, optional
        In training the statistics are those of the rows of all ranks of this group, as with ``nn.SyncBatchNorm``. All
        ranks must then call the forward and the backward. Ranks may have different numbers of rows, even 0. None uses
        only the rows of this rank. The group has no effect in inference, or if it has one rank.
    renorm : Renorm, (r_max, d_max), or tensor of two elements, optional
        Batch renormalisation in training, as in `gsbn.forward`.
    groups : int
        The number of ghost batches in training, as in `gsbn.forward`. It must divide N, and be 1 with `process_group`.
    residual : tensor of y's shape, optional
        A tensor that is added before the activation: ``activation(batch_norm(linear(x)) + residual)``. If it has
        another dtype, such as float32 under autocast, y has the wider of the two dtypes, as in PyTorch. On a GPU, gsbn
        adds a residual of y's dtype and applies the activation. PyTorch's own operators do this for other dtypes, for
        some layouts of three and more dimensions, and under ``torch.compile`` in float32 and float64 and for
        activations other than relu and leaky_relu.

    Returns
    -------
    y : (B, O), (N, O, L) or (N, O, H, W) tensor
        It has x's dtype or, under autocast, autocast's dtype. If y has more than two dimensions, its features are
        adjacent in memory, with two exceptions. y of a convolution is contiguous if the features of x are not adjacent,
        and under ``torch.compile`` in any case if it has three dimensions.
        y of any weight is contiguous where gsbn has a kernel for contiguous x: in 16 bits on Hopper, without a scale,
        if L (or H W) is a multiple of 8 and at least 64.

    Raises
    ------
    TypeError, ValueError, RuntimeError, ImportError
        As for `gsbn.forward` (x of three dimensions is read as (N, I, L)) and, with `process_group`, as for
        `gsbn.group`. RuntimeError is also raised for second derivatives under autocast or with a process group, and
        inside ``torch.jit.trace``, forward-mode differentiation and the transforms of ``torch.func``.

    Examples
    --------
    >>> import torch
    >>> import gsbn.torch
    >>> x, weight = torch.randn(256, 64), torch.randn(32, 64, requires_grad=True)
    >>> y = gsbn.torch.linear_batch_norm(x, weight, training=True, activation="relu")
    >>> y.sum().backward()
    >>> weight.grad.shape
    torch.Size([32, 64])
    """
    state = running_mean, running_var, num_batches_tracked
    if is_transformed():
        raise RuntimeError(
            "linear_batch_norm: torch.jit.trace, torch.func and forward-mode differentiation cannot look into it: "
            "call it outside them"
        )
    require_tensors(x=x, weight=weight)
    given = {"bias": bias, "gamma": gamma, "beta": beta, "scale": None if isinstance(scale, NUMBERS) else scale}
    given |= {"running_mean": running_mean, "running_var": running_var, "num_batches_tracked": num_batches_tracked}
    require_tensors(**{name: tensor for name, tensor in given.items() if tensor is not None})
    options = training, momentum, eps, precision, gemm
    return call(
        x, weight, bias, scale, gamma, beta, state, options, activation, process_group, renorm, groups, residual
    )


def require_tensors(**given: Any) -> None:
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {shown(tensor)}")


def call(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, activation: Any,
    process_group: Any = None, renorm: Any = None, groups: int = 1, residual: Any = None,
) -> Any:  # fmt: skip
    """Compute `linear_batch_norm`; `state` has the statistics, `options` (training, momentum, eps, precision, gemm)."""
    if residual is not None:
        checked_activation(activation)
        if x.dim() > 1 and weight.dim() > 1:  # else the call below raises an error
            check_residual(residual, (x.shape[0], weight.shape[0], *x.shape[2:]), x.device)
        if x.dim() == weight.dim() == 2 and joins_call(x, residual, activation, autocast_dtype(x)):
            pass  # the call below takes it
        elif x.dim() < 3 or not taken_in_rows(x, weight):
            of_u = x, weight, bias, scale, gamma, beta, state, options, None, process_group, renorm, groups
            return added(call(*of_u), residual, activation)
    if groups.__class__ is not int or groups != 1:
        ghost_count(groups)
        groups = groups if options[0] else 1
    for of_state, running in zip(("running_mean", "running_var"), state, strict=False):
        if running is not None and running.requires_grad and is_grad_enabled():
            raise RuntimeError(
                f"{of_state}: expected a constant, got a tensor that requires grad: pass {of_state}.detach()"
            )
    conv = weight.dim() > 2
    if conv or x.dim() == 3:
        if conv and (x.dim() != weight.dim() or any(size != 1 for size in weight.shape[2:])):
            raise ValueError(
                f"weight: expected (O, I), or (O, I, 1, ...) of as many dimensions as x has, {x.dim()}; got shape "
                f"{tuple(weight.shape)}"
            )
        check_features(x, weight.shape[1])
        ghost_count(groups, x.shape[0])
        alone = renorm is None and groups == 1 and (not options[0] or name_of(process_group) is None)
        vectors = bias, gamma, beta
        as_it_lies = taken_in_rows(x, weight)
        x = x.contiguous() if conv and is_compiling() and not as_it_lies else x
        if scale is None and alone and not as_it_lies and way_of(x, weight, vectors, options) == IN_PLACE:
            return channels_first(x, weight.flatten(1), vectors, state, options, activation)
        of_rows: Any = weight.flatten(1), bias, scale, gamma, beta, state, options, activation
        of_rows += process_group, renorm, groups, None if residual is None else rows_of(residual)
        y = call(rows_of(x, _dtype_of_autocast(x)), *of_rows)
        return _as_x_lies(y, x) if as_it_lies or not conv else samples_of(y, x.shape[0], x.shape[2:])
    dtype = _dtype_of_autocast(x)
    differentiate = is_grad_enabled() and (
        weight.requires_grad
        or x.requires_grad
        or (gamma is not None and gamma.requires_grad)
        or (beta is not None and beta.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (scale is not None and not isinstance(scale, NUMBERS) and scale.requires_grad)
    )
    if is_compiling() or is_watched():
        training, *more = options
        if is_exporting() and not training:
            differentiate = False  # an exported inference keeps nothing for a backward
        scale, number = (None, float(scale)) if isinstance(scale, NUMBERS) else (scale, 1.0)
        # If autocast casts the weight, a compiled backward makes dweight in float32: a separate cast would read and
        # write dweight again.
        wide = differentiate and x.is_cuda and is_compiling() and widens(dtype, weight)
        tensors = (cast(x, dtype), weight if wide else cast(weight, dtype), bias, scale, gamma, beta, *state)
        name = name_of(process_group) if training else None
        options = number, *more, name, *_recorded_limits(renorm), groups, residual
        differentiate = differentiate or (residual is not None and residual.requires_grad and is_grad_enabled())
        return recorded(tensors, training, differentiate, wide, activation, *options)
    of_call = process_group, renorm, groups
    if differentiate:
        options = _options(x, options, True, activation, *of_call)
        return apply(x, weight, bias, scale, gamma, beta, state, options, dtype, residual)
    if dtype is not None:
        x, weight = cast(x, dtype), cast(weight, dtype)
    alone = residual is not None and residual.requires_grad and is_grad_enabled()  # it alone gets a gradient
    adds, of_y = (None, None) if alone else (residual, activation)
    arrays = x, weight, scale, bias, gamma, beta, *state, None, adds, None
    y = forward_of(arrays, _options(x, options, False, of_y, *of_call))
    return added(y, residual, activation) if alone else y


def _as_x_lies(y: Any, x: Any) -> Any:
    """Return y, whose rows are those of x (N, C, ...), in x's number of dimensions."""
    n, _, *sizes = x.shape
    if prod(sizes) == 1 and x.stride(-1) == 1:  # both layouts fit y: take PyTorch's choice for such an x
        return y.view(n, y.shape[1], *sizes)
    return y.view(n, *sizes, y.shape[1]).movedim(-1, 1)


def call_in_sequence(x: Any, layers: list[Any]) -> Any:
    """Compute layers in sequence, each from the y of the one before it, in as few autograd nodes as they can share.

    x is a matrix, or (N, C, ...) for weights of convolutions. Between layers that copy a contiguous x and y the copies
    are left out. Each layer has the arguments of `call` from the weight to the groups. Autograd needs the gradient of
    each weight, or of nothing.
    """
    dtype = _dtype_of_autocast(x)
    if x.dim() == 2:
        return apply_in_sequence(x, _with_options(x, layers), dtype)
    check_features(x, layers[0][0].shape[1])
    n, _, *sizes = x.shape
    ways = set() if in_rows(x) else {_way_of_layer(x, layer) for layer in layers}
    of_rows = [(weight.flatten(1), *more) for weight, *more in layers]
    if ways == {IN_PLACE}:
        if is_grad_enabled():
            return apply_in_sequence(x.view(n * prod(sizes), -1), _with_options(x, of_rows), dtype, (n, *sizes))
        return _one_by_one(x, layers)
    y = rows_of(x, dtype)
    y = apply_in_sequence(y, _with_options(x, of_rows), dtype) if is_grad_enabled() else _one_by_one(y, of_rows)
    return samples_of(y, n, sizes) if ways else _as_x_lies(y, x)


def _one_by_one(x: Any, layers: list[Any]) -> Any:
    for layer in layers:
        x = call(x, *layer)
    return x


def _way_of_layer(x: Any, layer: Any) -> Any:
    """Return how `call` would compute a layer of `call_in_sequence` alone, for x that is not in rows."""
    weight, bias, _, gamma, beta, _, options, _, process_group, *_ = layer
    return COPIES if name_of(process_group) is not None else way_of(x, weight, (bias, gamma, beta), options) or COPIES


def _with_options(x: Any, layers: list[Any]) -> list[Any]:
    return [(*layer[:6], _options(x, layer[6], True, *layer[7:])) for layer in layers]


def _options(
    x: Any, options: Any, saves: bool, activation: Any, process_group: Any, renorm: Any, groups: int
) -> tuple[Any, ...]:
    """Return the options of `forward` for those of `call`. `saves`: a backward will follow."""
    group = None if process_group is None or not options[0] else group_of(process_group, x.device)
    return *options, saves, None, activation, group, renorm, groups if options[0] else 1


def _dtype_of_autocast(x: Any) -> Any:
    """Return autocast's dtype on x's device, or None; `cast` leaves float64 as it is."""
    device = "cuda" if x.is_cuda else "cpu"
    return get_autocast_dtype(device) if is_autocast_enabled(device) else None


def _recorded_limits(renorm: Any) -> tuple[Any, Any]:
    """Return `renorm` in the form that a recorded program has: numbers or None, and a tensor or None."""
    if renorm is None or isinstance(renorm, Tensor):
        return None, renorm
    if isinstance(renorm, Renorm):  # it was checked, and may hold symbols
        return [float(limit) for limit in renorm], None
    return list(map(float, renorm_of(renorm))), None


def in_rows(x: Any) -> bool:
    """Return whether x (N, C, ...) is a matrix of evenly spaced rows of C adjacent features, so that it needs no copy.

    With one feature both layouts are the same memory, and x counts as contiguous, as in PyTorch.
    """
    (n, features, *sizes), (of_n, of_features, *more) = x.shape, x.stride()
    if prod(sizes) == 1:
        return True
    if of_features != 1:
        return False
    steps = [step for step in zip((n, *sizes), (of_n, *more), strict=True) if step[0] != 1]
    even = all(outer == size * stride for (_, outer), (size, stride) in pairwise(steps))
    return even and 1 < features <= steps[-1][1]


def taken_in_rows(x: Any, weight: Any) -> bool:
    """Return whether gsbn takes x (N, C, ...) in rows, and returns y in rows.

    A program of torch.compile does not with a Conv1d: PyTorch's y is contiguous, and so mostly is the gradient of y.
    """
    return in_rows(x) and not (weight.dim() == 3 and x.shape[2] != 1 and is_compiling() and not is_exporting())


def check_features(x: Any, features: int) -> None:
    """Raise ValueError if x of three or more dimensions is not (N, features, L)."""
    if x.shape[1] != features:
        use = ""
        if x.dim() == 3 and x.shape[2] == features:
            use = f"; use x.transpose(1, 2), as this is (N, L, {features})"
        raise ValueError(
            f"x: read as (N, C, L), as BatchNorm1d does, with C = {features} features; got shape {tuple(x.shape)}{use}"
        )
