"""Compute y = f(u + residual): in gsbn's call that makes u, in one launch after it, or by PyTorch's own operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import is_autocast_enabled, is_grad_enabled
from torch.autograd import Function

from .._arrays.admit import is_memory
from .._backward import before_kept
from .._forward import add_and_activate
from .._plan.activations import follows_from_y
from .._values import shown
from ._activations import apply, before
from ._again import as_variables
from ._autograd import goes_again, is_compiling, is_watched, shaped


def check_residual(residual: Any, expected: Any, device: Any) -> None:
    """Raise unless the residual has the expected shape, that of y, and y's device."""
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"residual: expected a torch.Tensor, got {shown(residual)}")
    if not residual.is_floating_point():
        raise TypeError(f"residual: expected a floating dtype, got {residual.dtype}")
    if residual.shape != expected:
        raise ValueError(f"residual: expected shape {tuple(expected)}, got {tuple(residual.shape)}")
    if residual.device != device:
        raise ValueError(f"residual: expected x's device {device}, got {residual.device}")


def added(u: Any, residual: Any, activation: Any) -> Any:
    """Return f(u + residual), in the dtype that PyTorch gives it. Only the caller uses u, so y may take u's memory."""
    if activation is None or not _fuses(u, residual):
        y = u + residual
        return y if activation is None else apply(y, activation)
    if is_grad_enabled() and (u.requires_grad or residual.requires_grad):
        made = super(Function, _Residual).apply(u, residual, activation)  # as _apply_of in _nodes.py
        return made[0] if isinstance(made, tuple) else made
    add_and_activate(u.flatten(1), residual.flatten(1), activation, keeps=False)  # in u's memory
    return u


def joins_call(x: Any, residual: Any, activation: Any, dtype: Any) -> bool:
    """Return whether the call that makes u from a matrix x takes the residual. `dtype` is autocast's, or None.

    Autograd must need nothing but y for the activation's gradient.
    """
    if residual.dtype is not (dtype or x.dtype) or not (activation is None or follows_from_y(activation)):
        return False
    if is_compiling() or is_watched():
        return recorded_call_adds(x, dtype)
    return x.is_cuda and is_memory(torch, residual)


def recorded_call_adds(x: Any, dtype: Any = None) -> bool:
    """Return whether a recorded call takes a residual. In other dtypes a launch of its own would add it.

    A compiler can do that as well. On a CPU this is for tests.
    """
    return (dtype or x.dtype).itemsize == 2 or not (x.is_cuda or is_autocast_enabled("cpu"))


def _fuses(u: Any, residual: Any) -> bool:
    """Return whether gsbn's launch serves: for matrices of one dtype on a GPU, in a call that nobody else watches.

    A contiguous tensor of more dimensions is a matrix, too.
    """
    if not u.is_cuda or is_compiling() or is_watched():
        return False
    if u.dim() > 2 and not (u.is_contiguous() and residual.is_contiguous() and u.numel() and not u._is_view()):
        return False
    return residual.dtype is u.dtype and is_memory(torch, residual)


class _Residual(Function):
    """One autograd node for the launch and its backward.

    If the gradient does not follow from y, the node returns a second result, v = u + residual, in u's memory. Second
    derivatives depend on v, and through this result autograd passes them to u and the residual.
    """

    @staticmethod
    def forward(ctx: Any, u: Any, residual: Any, activation: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(u)
        ctx.activation = activation
        keeps = not follows_from_y(activation)
        y = add_and_activate(u.flatten(1), residual.flatten(1), activation, keeps=keeps)
        ctx.save_for_backward(u)
        return (y if u.dim() == 2 else shaped(y, u.shape), u) if keeps else u

    @staticmethod
    def backward(ctx: Any, dy: Any, of_v: Any = None) -> Any:
        dv = of_v
        if dy is not None:
            (kept,) = ctx.saved_tensors
            again = goes_again(dy)
            dy = dy.resolve_neg()
            if again:
                dv = before_again(dy, kept, ctx.activation)
            else:
                dv = before_kept(dy.flatten(1), kept.flatten(1), ctx.activation)
                dv = dv if kept.dim() == 2 else shaped(dv, kept.shape)
            dv = dv if of_v is None else dv + of_v
        return dv, dv, None


def before_again(dy: Any, kept: Any, activation: Any) -> Any:
    """Return the gradient before the activation, computed by PyTorch's own operators."""
    if follows_from_y(activation):
        return before(activation, dy, kept)
    create = is_grad_enabled()
    with torch.enable_grad(), torch.autocast(dy.device.type, enabled=False):
        (v,) = as_variables(create, kept)
        (dv,) = torch.autograd.grad(apply(v, activation), v, dy, create_graph=create)
    return dv
