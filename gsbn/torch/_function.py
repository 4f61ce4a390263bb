"""`linear_batch_norm`, and the one call that it, the layer and converted models share."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.autograd import Function
from torch.compiler import is_compiling

from .._arrays.kinds import NUMBERS, Kind, kind_of
from .._backward import How, backward_of, makes_both_products
from .._backward import run as backward_run
from .._forward import forward_of
from .._saved import Saved
from .._typing import Activation, Gemm, Precision
from .._values import shown
from ..reference import Gradients
from ._again import Given, gradients_again, products_again
from ._groups import group_of, name_of
from ._operators import recorded

# The names of the gradients that are needed, by what autograd says of the arguments
_WANTED = {
    needed: tuple(name for name, need in zip(Gradients._fields, needed, strict=True) if need)
    for needed in product((False, True), repeat=len(Gradients._fields))
}
# Whoever watches operators (fake tensors, make_fx, counters of operations) must see one; there is no public question.
_watchers = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


# torch.jit.trace would record one result as a constant, and torch.func's tensors have no memory.
_trace: Any = getattr(torch._C, "_get_tracing_state", lambda: None)
_transforms: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_forward_ad: Any = torch.autograd.forward_ad
_NO_LEVEL = SimpleNamespace(_current_level=-1)
_level: Any = _forward_ad if hasattr(_forward_ad, "_current_level") else _NO_LEVEL  # 0 or more: tensors have tangents


def is_transformed() -> bool:
    """Whether torch.jit.trace, forward-mode differentiation or a transform of torch.func looks on, for which PyTorch's
    own modules are to run."""
    return not is_compiling() and (_trace() is not None or _transforms() or _level._current_level >= 0)


def _exporting() -> bool:
    # Not torch.compiler.is_exporting(), of which torch.compile makes True in some versions.
    return getattr(torch.compiler, "_is_exporting_flag", False)


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
) -> Tensor:
    """`gsbn.forward` as a part of PyTorch: autograd, autocast and torch.compile know it.

    Under ``torch.autocast`` x and weight are cast as ``nn.Linear`` casts them, and y has autocast's dtype; the vectors
    stay as they are. The gradients have the dtypes of the arguments. Second derivatives (``create_graph=True``) and
    batched gradients go through PyTorch's own operators, which compute the call anew.

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
    process_group : torch.distributed.ProcessGroup, optional
        In training the statistics are those of the rows of all its ranks, as with ``nn.SyncBatchNorm``; None is this
        rank's rows alone. Forward and backward are then calls of all ranks, with any number of rows each, none
        included. It has no effect in inference, and where there is but one rank.

    Returns
    -------
    y : (B, O) or (N, O, L) tensor
        x's dtype; under autocast autocast's. Of three dimensions its features lie next to each other in memory.

    Raises
    ------
    TypeError, ValueError, RuntimeError, ImportError
        As `gsbn.forward`, with `process_group` as `gsbn.group` and with a `group`. RuntimeError for second derivatives
        under autocast or with a process group, and within ``torch.jit.trace``, forward-mode differentiation and the
        transforms of ``torch.func``.
    """
    state = running_mean, running_var, num_batches_tracked
    if is_transformed():
        raise RuntimeError(
            "linear_batch_norm: torch.jit.trace, torch.func and forward-mode differentiation cannot look into it: "
            "call it outside them"
        )
    _require_tensors(x=x, weight=weight)
    given = {"bias": bias, "gamma": gamma, "beta": beta, "scale": None if isinstance(scale, NUMBERS) else scale}
    given |= {"running_mean": running_mean, "running_var": running_var, "num_batches_tracked": num_batches_tracked}
    _require_tensors(**{name: tensor for name, tensor in given.items() if tensor is not None})
    options = training, momentum, eps, precision, gemm
    return call(x, weight, bias, scale, gamma, beta, state, options, activation, process_group)


def _require_tensors(**given: Any) -> None:
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {shown(tensor)}")


def call(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, activation: Any,
    process_group: Any = None,
) -> Any:  # fmt: skip
    """`linear_batch_norm` of the statistics and of (training, momentum, eps, precision, gemm) as tuples."""
    if x.dim() == 3:
        n, features, length = x.shape
        rows = x.transpose(1, 2).reshape(n * length, features)
        y = call(rows, weight, bias, scale, gamma, beta, state, options, activation, process_group)
        return y.view(n, length, weight.shape[0]).transpose(1, 2)
    device = "cuda" if x.is_cuda else "cpu"
    dtype = get_autocast_dtype(device) if is_autocast_enabled(device) else None
    differentiate = is_grad_enabled() and (
        weight.requires_grad
        or x.requires_grad
        or (gamma is not None and gamma.requires_grad)
        or (beta is not None and beta.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (scale is not None and not isinstance(scale, NUMBERS) and scale.requires_grad)
    )
    if is_compiling() or _watchers():
        training, *more = options
        if _exporting() and not training:  # for inference: nothing is kept for a backward
            differentiate = False
        scale, number = (None, float(scale)) if isinstance(scale, NUMBERS) else (scale, 1.0)
        tensors = (_cast(x, dtype), _cast(weight, dtype), bias, scale, gamma, beta, *state)
        name = name_of(process_group) if training else None
        return recorded(tensors, training, differentiate, number, *more, activation, name)
    group = None if process_group is None or not options[0] else group_of(process_group, x.device)
    if differentiate:
        return _apply(x, weight, bias, scale, gamma, beta, state, (*options, True, None, activation, group), dtype)
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
    return forward_of((x, weight, scale, bias, gamma, beta, *state, None), (*options, False, None, activation, group))


def _cast(array: Any, dtype: Any) -> Any:
    """As autocast casts the operands of a product."""
    return array if dtype is None or array.dtype is torch.float64 else array.to(dtype)


class _Whole(Function):
    """gsbn's forward and backward, which autograd calls with grad mode off."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, more: Any) -> Any:
        y, saved, ctx.how = _forward(x, weight, bias, scale, gamma, beta, *more)
        ctx.save_for_backward(*_operands(saved, *ctx.needs_input_grad[:2]), saved.deviations, saved.vectors)
        ctx.at = saved.deviations.data_ptr()
        ctx.given = Given(weight, bias, scale, gamma, beta, more[1][2], saved.x is x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        # Where x and weight were cast, autograd casts their gradients back to what it knows of the arguments.
        how = ctx.how._replace(needs=_WANTED[ctx.needs_input_grad[:6]])
        x, weight, deviations, vectors = ctx.saved_tensors
        if _goes_again(dy):
            return *gradients_again(how, ctx.given, dy, x, vectors), None
        dy = dy.resolve_neg()
        return *_gradients(_in_place(how, dy, deviations, ctx.at), dy, x, weight, deviations, vectors), None


class _Linear(Function):
    """All of the forward of a large call; of the backward what is left when the gradient has come through `_Norm`."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, between: Any, vectors: Any, more: Any) -> Any:
        y, saved, how = _forward(x, weight, *vectors, *more)
        given = Given._make((weight, *vectors, more[1][2], saved.x is x))
        x, weight = _operands(saved, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(x, *[weight] * (not how.wide))
        ctx.cast = weight if how.wide else None  # gsbn's own
        ctx.how, ctx.given = how, given
        between += (saved.deviations, saved.vectors, how, given)
        return y

    @staticmethod
    def backward(ctx: Any, dg: Any) -> Any:
        of_x, of_weight, *_ = ctx.needs_input_grad
        how = ctx.how._replace(needs=_WANTED[(of_x, of_weight, *_FOUR)], norm=False, group=None)  # `_Norm`'s matter
        if _goes_again(dg):
            return *products_again(how, ctx.given, dg, ctx.saved_tensors[0]), None, None, None
        dg = dg.resolve_neg()
        if not how.wide:
            return *_products(how, dg, *ctx.saved_tensors), None, None, None
        # The cast weight is free before dweight is made, which has twice its bytes.
        dx = dweight = None
        if of_x:
            dx, _ = _products(how._replace(needs=("x",)), dg, None, ctx.cast)
        if not _keeps_graph():
            ctx.cast = None
        if of_weight:
            _, dweight = _products(how._replace(needs=("weight",)), dg, ctx.saved_tensors[0], None)
        return dx, dweight, None, None, None


class _Norm(Function):
    """Nothing of the forward, in which y passes through; of the backward the way from dy to dg."""

    @staticmethod
    def forward(ctx: Any, y: Any, bias: Any, scale: Any, gamma: Any, beta: Any, between: Any) -> Any:
        ctx.mark_dirty(y)
        *kept, ctx.how, ctx.given = between
        ctx.save_for_backward(*kept)
        ctx.at = kept[0].data_ptr()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        through, *vectors, _ = ctx.needs_input_grad
        how = ctx.how._replace(needs=_WANTED[(through, False, *vectors)], linear=False)
        deviations, of_features = ctx.saved_tensors
        if _goes_again(dy):
            linear, _ = ctx.next_functions[0]  # which has x, where anybody has
            x = None if linear is None else linear.saved_tensors[0]
            dg, _, *found = gradients_again(how, ctx.given, dy, x, of_features)
            return dg, *found, None
        dy = dy.resolve_neg()
        return *_before_norm(_in_place(how, dy, deviations, ctx.at), dy, deviations, of_features), None


def _apply(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, dtype: Any
) -> Any:
    more = state, options, dtype
    # Two nodes let autograd free dy and the deviations before dx and dweight are made. The second costs the host 40 us,
    # in which a GPU deals with some millions of elements. Where one launch makes dg and both products, no dg passes.
    name, rows = str(dtype or x.dtype).removeprefix("torch."), x.shape[0]
    whole = options[0] and makes_both_products(name, rows, *weight.shape)
    if not x.is_cuda or weight.shape[0] * rows + weight.numel() < 2**23 or whole:
        return _apply_of(_Whole)(x, weight, bias, scale, gamma, beta, more)
    between: list[Any] = []
    y = _apply_of(_Linear)(x, weight, between, (bias, scale, gamma, beta), more)
    return _apply_of(_Norm)(y, bias, scale, gamma, beta, between)


def _apply_of(node: Any) -> Any:
    """Function's own apply takes 3 us to look for torch.func's transforms, whose tensors gsbn refuses anyway."""
    return super(Function, node).apply


_FOUR = (False,) * 4
# Whether the graph is kept for another backward; where torch cannot tell, it may be.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _forward(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, dtype: Any
) -> tuple[Any, Saved, How]:
    wide = dtype is not None and dtype.itemsize == 2 and weight.dtype is torch.float32
    x, weight = _cast(x, dtype), _cast(weight, dtype)
    y, saved = forward_of((x, weight, scale, bias, gamma, beta, *state, None), options)
    return y, saved, How.of(saved, (), wide=wide)


def _operands(saved: Saved, of_x: bool, of_weight: bool) -> tuple[Any, Any]:
    """x and weight, each where the gradient of the other is wanted: else it is free, if it was cast, or may change."""
    x, weight = saved.x, saved.weight
    if not x.is_cuda:  # NumPy's backward takes both
        return x, weight
    reads_weight = makes_both_products(str(weight.dtype).removeprefix("torch."), x.shape[0], *weight.shape)
    return x if of_weight else None, weight if of_x or reads_weight else None


def _gradients(how: How, dy: Any, x: Any, weight: Any, deviations: Any, vectors: Any) -> Any:
    """All six."""
    if not dy.is_cuda:
        return backward_of(dy, how.saved(x, weight, deviations, vectors), how.needs)
    found, made = backward_run(_kind(dy), (dy, x, weight, deviations, vectors), how)
    return [None if place is None else made[place] for place in found.returns]


def _before_norm(how: How, dy: Any, deviations: Any, vectors: Any) -> Any:
    """dg and the gradients of bias, scale, gamma and beta."""
    found, made = backward_run(_kind(dy), (dy, None, None, deviations, vectors), how)
    dg = None
    if how.needs[:1] == ("x",):
        dg = deviations if how.in_place and len(dy) else made[-1]
        if dg.shape[1] != dy.shape[1]:
            dg = dg[:, : dy.shape[1]]
    return [dg, *(None if place is None else made[place] for place in found.returns[2:])]


def _products(how: How, dg: Any, x: Any, weight: Any) -> Any:
    """dx and dweight."""
    rows, size = dg.stride(0), dg.element_size()
    if dg.stride(1) != 1 or rows * size % 16 or dg.data_ptr() % 16:  # not as `_before_norm` left it
        pitch = -(-dg.shape[1] * size // 16) * 16 // size
        dg = dg.new_empty(len(dg), pitch)[:, : dg.shape[1]].copy_(dg)
    found, made = backward_run(_kind(dg), (dg, x, weight, None, None), how)
    return [None if place is None else made[place] for place in found.returns[:2]]


_is_batched: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)  # by is_grads_batched


def _goes_again(dy: Any) -> bool:
    """Whether PyTorch's own operators make the gradients: they are differentiated themselves, or come in batches."""
    return bool(is_grad_enabled() or _transforms() or _is_batched(dy))


def _in_place(how: How, dy: Any, deviations: Any, at: int) -> How:
    """dg takes the deviations' place, where nobody will read them again, and they are still what the forward made `at`
    this address: hooks on saved tensors may give back memory of their own."""
    if how.training and deviations.dtype is dy.dtype and deviations.data_ptr() == at and not _keeps_graph():
        return how._replace(in_place=True)
    return how


def _kind(tensor: Any) -> Kind:
    kind = kind_of(tensor)
    assert kind is not None
    return kind
