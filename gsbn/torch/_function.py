"""`linear_batch_norm`, and the one call that it, the layer and converted models share."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.autograd import Function
from torch.compiler import is_compiling

from .._backward import backward_of
from .._forward import Saved, forward_of
from .._typing import Activation, Gemm, Precision
from ..reference import Gradients
from ._operators import recorded

__all__ = ["call", "linear_batch_norm"]

_NUMBERS = (float, int)
_UNCOUNTED = (None, None)  # autograd itself counts the changes of what it saves
# The names of the gradients that are needed, by what autograd says of the arguments
_WANTED = {
    needed: tuple(name for name, need in zip(Gradients._fields, needed, strict=True) if need)
    for needed in product((False, True), repeat=len(Gradients._fields))
}
# Whoever watches operators (fake tensors, make_fx, counters of operations) must see one; there is no public question.
_watchers = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # not in older versions


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
) -> Tensor:
    """`gsbn.forward` as a part of PyTorch: autograd, autocast and torch.compile know it.

    Under ``torch.autocast`` x and weight are cast as ``nn.Linear`` casts them, and y has autocast's dtype; the vectors
    stay as they are. The gradients have the dtypes of the arguments. There are no second derivatives.

    Parameters
    ----------
    x : (B, I) or (N, I, L) tensor
        Of three dimensions every (n, l) is a row, as ``BatchNorm1d`` takes its input. Nothing is copied where the
        features lie next to each other in memory, as in ``z.transpose(1, 2)`` of a contiguous (N, L, I) tensor.
    weight : (O, I) tensor
        x's dtype, but under autocast.
    scale : (O,) tensor, tensor of one element, or float, optional
        1 if absent.
    bias, gamma, beta : (O,) tensor, optional
        Taken as 0, 1 and 0 if absent; in x's dtype or float32, as all vectors.
    running_mean, running_var : (O,) tensor, optional
        Both or neither; needed without `training`, updated in place with it.
    num_batches_tracked : int64 tensor of one element, optional
        Training adds 1 to it.
    training : bool
        Statistics of this batch (True) or the running ones (False).
    momentum : float or None
        Weight of the new batch in the running statistics; None is the cumulative average.
    eps : float
        Added to the variance.
    activation : {"relu"}, optional
        What y is put through.
    precision, gemm : str
        As in `gsbn.forward`.

    Returns
    -------
    y : (B, O) or (N, O, L) tensor
        x's dtype; under autocast autocast's. Of three dimensions its features lie next to each other in memory.

    Raises
    ------
    TypeError, ValueError, RuntimeError, ImportError
        As `gsbn.forward`. RuntimeError where a gradient is differentiated once more.
    """
    state = running_mean, running_var, num_batches_tracked
    options = training, momentum, eps, precision, gemm
    return call(x, weight, bias, scale, gamma, beta, state, options, activation)


def call(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, activation: Any
) -> Any:
    """`linear_batch_norm` of the statistics and of (training, momentum, eps, precision, gemm) as tuples."""
    if x.dim() == 3:
        n, features, length = x.shape
        rows = x.transpose(1, 2).reshape(n * length, features)
        y = call(rows, weight, bias, scale, gamma, beta, state, options, activation)
        return y.view(n, length, weight.shape[0]).transpose(1, 2)
    device = "cuda" if x.is_cuda else "cpu"
    dtype = get_autocast_dtype(device) if is_autocast_enabled(device) else None
    differentiate = is_grad_enabled() and (
        weight.requires_grad
        or x.requires_grad
        or (gamma is not None and gamma.requires_grad)
        or (beta is not None and beta.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (scale is not None and not isinstance(scale, _NUMBERS) and scale.requires_grad)
    )
    if is_compiling() or _watchers():
        training, *more = options
        if _exporting() and not training:  # for inference: nothing is kept for a backward
            differentiate = False
        scale, number = (None, float(scale)) if isinstance(scale, _NUMBERS) else (scale, 1.0)
        tensors = (_cast(x, dtype), _cast(weight, dtype), bias, scale, gamma, beta, *state)
        return recorded(tensors, training, differentiate, number, *more, activation)
    if differentiate:
        # Function's own apply takes 3 us to look for torch.func's transforms, whose tensors gsbn refuses anyway
        return super(Function, _Call).apply(
            x, weight, bias, scale, gamma, beta, (state, (*options, True, None, activation), dtype)
        )
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
    return forward_of((x, weight, scale, bias, gamma, beta, *state, None), (*options, False, None, activation))


def _cast(array: Any, dtype: Any) -> Any:
    """As autocast casts the operands of a product."""
    return array if dtype is None or array.dtype is torch.float64 else array.to(dtype)


class _Call(Function):
    """gsbn's forward and backward, which autograd calls with grad mode off."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, rest: Any) -> Any:
        state, options, dtype = rest
        if dtype is not None:
            x, weight = _cast(x, dtype), _cast(weight, dtype)
        y, saved = forward_of((x, weight, scale, bias, gamma, beta, *state, None), options)
        ctx.save_for_backward(x, weight, saved[2], saved[3])
        ctx.rest = (*saved[4:8], _UNCOUNTED, *saved[9:])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        # Where x and weight were cast, autograd casts their gradients back to what it knows of the arguments.
        wanted = _WANTED[ctx.needs_input_grad[:6]]
        if is_grad_enabled():  # the gradients are to be differentiated themselves
            return *_Again.apply(torch.empty(0, requires_grad=True), wanted, ctx.rest, dy, *ctx.saved_tensors), None
        return *backward_of(dy, Saved(*ctx.saved_tensors, *ctx.rest), wanted), None


class _Again(Function):
    """The gradients, of which there are no gradients; the first argument makes each of them ask for one."""

    @staticmethod
    def forward(ctx: Any, _: Any, wanted: Any, rest: Any, dy: Any, *saved: Any) -> Any:
        return tuple(backward_of(dy, Saved(*saved, *rest), wanted))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("gsbn.torch: expected first derivatives alone, got a gradient of a gradient: gsbn has none")
