"""linear_batch_norm, and the call of gsbn that it, the layer and converted models share."""

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
from .._plan import DUAL_ROWS
from .._renorm import Renorm, renorm_of
from .._saved import Saved
from .._typing import Activation, Gemm, Precision
from .._values import shown
from ..reference import Gradients
from ._again import Given, gradients_again, products_again
from ._groups import group_of, name_of
from ._operators import recorded

# The names of the needed gradients, by autograd's needs_input_grad
_WANTED = {
    needed: tuple(name for name, need in zip(Gradients._fields, needed, strict=True) if need)
    for needed in product((False, True), repeat=len(Gradients._fields))
}
# TorchDispatch modes (fake tensors, make_fx, operation counters) must see one operator; torch has no public API to ask.
is_watched = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


# torch.jit.trace would record a result as a constant; the tensors of torch.func have no memory.
_trace: Any = getattr(torch._C, "_get_tracing_state", lambda: None)
_transforms: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_forward_ad: Any = torch.autograd.forward_ad
_NO_LEVEL = SimpleNamespace(_current_level=-1)
_level: Any = _forward_ad if hasattr(_forward_ad, "_current_level") else _NO_LEVEL  # 0 or more: tensors have tangents


def is_transformed() -> bool:
    """Whether torch.jit.trace, forward-mode differentiation or a transform of torch.func is active: PyTorch's own
    modules must run then."""
    return not is_compiling() and (_trace() is not None or _transforms() or _level._current_level >= 0)


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
) -> Tensor:
    """`gsbn.forward` for PyTorch, with support for autograd, autocast and torch.compile.

    Under ``torch.autocast`` x and weight are cast as in ``nn.Linear``, and y has autocast's dtype; the vectors are not
    cast. Each gradient has the dtype of its argument. Second derivatives (``create_graph=True``) and batched gradients
    compute the call again, by PyTorch's own operators.

    Parameters
    ----------
    x : (B, I) or (N, I, L) tensor
        float32, float16, bfloat16 or float64. With three dimensions every (n, l) is a row, as in ``BatchNorm1d``. x is
        not copied if its features are adjacent in memory, as in ``z.transpose(1, 2)`` of a contiguous (N, L, I) tensor.
    weight : (O, I) tensor
        x's dtype, except under autocast.
    scale, bias, gamma, beta, running_mean, running_var, num_batches_tracked : tensor, optional
    training, momentum, eps, activation, precision, gemm
        As in `gsbn.forward`.
    process_group : torch.distributed.ProcessGroup, optional
        In training the statistics are those of the rows of all its ranks, as with ``nn.SyncBatchNorm``. All ranks must
        then call the forward and the backward; the number of rows of a rank may differ and may be 0. None uses this
        rank's rows alone. It has no effect in inference, or with one rank.
    renorm : Renorm, (r_max, d_max), or tensor of two elements, optional
        Batch renormalisation in training, as in `gsbn.forward`.

    Returns
    -------
    y : (B, O) or (N, O, L) tensor
        x's dtype; under autocast, autocast's dtype. With three dimensions the features are adjacent in memory.

    Raises
    ------
    TypeError, ValueError, RuntimeError, ImportError
        As `gsbn.forward` (x of three dimensions is read as (N, I, L)) and, with `process_group`, as `gsbn.group`.
        RuntimeError also for second derivatives under autocast or with a process group, and inside
        ``torch.jit.trace``, forward-mode differentiation and the transforms of ``torch.func``.

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
    return call(x, weight, bias, scale, gamma, beta, state, options, activation, process_group, renorm)


def require_tensors(**given: Any) -> None:
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {shown(tensor)}")


def call(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, activation: Any,
    process_group: Any = None, renorm: Any = None,
) -> Any:  # fmt: skip
    """`linear_batch_norm`, with the statistics and (training, momentum, eps, precision, gemm) as tuples."""
    if x.dim() == 3:
        check_features(x, weight.shape[1])
        n, features, length = x.shape
        rows = x.transpose(1, 2).reshape(n * length, features)
        y = call(rows, weight, bias, scale, gamma, beta, state, options, activation, process_group, renorm)
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
    if is_compiling() or is_watched():
        training, *more = options
        # Not torch.compiler.is_exporting(), which some versions of torch.compile replace by True.
        if getattr(torch.compiler, "_is_exporting_flag", False) and not training:
            differentiate = False  # an exported inference keeps nothing for a backward
        scale, number = (None, float(scale)) if isinstance(scale, NUMBERS) else (scale, 1.0)
        tensors = (cast(x, dtype), cast(weight, dtype), bias, scale, gamma, beta, *state)
        name = name_of(process_group) if training else None
        return recorded(tensors, training, differentiate, number, *more, activation, name, *_recorded_limits(renorm))
    group = None if process_group is None or not options[0] else group_of(process_group, x.device)
    if differentiate:
        return _apply(
            x, weight, bias, scale, gamma, beta, state, (*options, True, None, activation, group, renorm), dtype
        )
    if dtype is not None:
        x, weight = cast(x, dtype), cast(weight, dtype)
    arrays = x, weight, scale, bias, gamma, beta, *state, None, None
    return forward_of(arrays, (*options, False, None, activation, group, renorm))


def _recorded_limits(renorm: Any) -> tuple[Any, Any]:
    """`renorm` as a recorded program has it: numbers or None, and a tensor or None."""
    if renorm is None or isinstance(renorm, Tensor):
        return None, renorm
    return list(map(float, renorm_of(renorm))), None


def check_features(x: Any, features: int) -> None:
    """Raise ValueError if x of three dimensions is not (N, features, L)."""
    if x.shape[1] != features:
        use = f"; use x.transpose(1, 2), as this is (N, L, {features})" if x.shape[2] == features else ""
        raise ValueError(
            f"x: read as (N, C, L), as BatchNorm1d does, with C = {features} features; got shape {tuple(x.shape)}{use}"
        )


def cast(array: Any, dtype: Any) -> Any:
    """Cast as autocast casts the operands of a product."""
    return array if dtype is None or array.dtype is torch.float64 else array.to(dtype)


class _Whole(Function):
    """The whole forward and backward as one autograd node; autograd calls them with grad mode off."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, more: Any) -> Any:
        y, saved, ctx.how = _forward(x, weight, bias, scale, gamma, beta, *more)
        ctx.save_for_backward(*_operands(saved, *ctx.needs_input_grad[:2]), saved.deviations, saved.vectors)
        ctx.at = saved.deviations.data_ptr()
        ctx.given = Given(weight, bias, scale, gamma, beta, more[1][2], saved.x is x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        # If x and weight were cast, autograd casts their gradients to the dtypes of the arguments.
        how = ctx.how._replace(needs=_WANTED[ctx.needs_input_grad[:6]])
        x, weight, deviations, vectors = ctx.saved_tensors
        if goes_again(dy):
            return *gradients_again(how, ctx.given, dy, x, vectors), None
        dy = dy.resolve_neg()
        return *_gradients(_in_place(how, dy, deviations, ctx.at), dy, x, weight, deviations, vectors), None


class _Linear(Function):
    """The forward of a large call, and the second half of its backward: from dg, made by `_Norm`, to dx and dweight."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, between: Any, vectors: Any, more: Any) -> Any:
        y, saved, how = _forward(x, weight, *vectors, *more)
        given = Given._make((weight, *vectors, more[1][2], saved.x is x))
        x, weight = _operands(saved, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(x, *[weight] * (not how.wide))
        ctx.cast = weight if how.wide else None  # a cast that only gsbn holds
        ctx.how, ctx.given = how, given
        between += (saved.deviations, saved.vectors, how, given)
        return y

    @staticmethod
    def backward(ctx: Any, dg: Any) -> Any:
        of_x, of_weight, *_ = ctx.needs_input_grad
        how = ctx.how._replace(needs=_WANTED[(of_x, of_weight, *_FOUR)], norm=False, group=None)  # only `_Norm` syncs
        if goes_again(dg):
            return *products_again(how, ctx.given, dg, ctx.saved_tensors[0]), None, None, None
        dg = dg.resolve_neg()
        if not how.wide:
            return *_products(how, dg, *ctx.saved_tensors), None, None, None
        # Free the cast weight before making dweight, which has twice its bytes.
        dx = dweight = None
        if of_x:
            dx, _ = _products(how._replace(needs=("x",)), dg, None, ctx.cast)
        if not _keeps_graph():
            ctx.cast = None
        if of_weight:
            _, dweight = _products(how._replace(needs=("weight",)), dg, ctx.saved_tensors[0], None)
        return dx, dweight, None, None, None


class _Norm(Function):
    """The first half of the backward of a large call: from dy to dg. Its forward returns y unchanged."""

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
        if goes_again(dy):
            linear, _ = ctx.next_functions[0]  # this node has x if any has
            x = None if linear is None else linear.saved_tensors[0]
            dg, _, *found = gradients_again(how, ctx.given, dy, x, of_features)
            return dg, *found, None
        dy = dy.resolve_neg()
        return *_before_norm(_in_place(how, dy, deviations, ctx.at), dy, deviations, of_features), None


def _apply(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, dtype: Any
) -> Any:
    more = state, options, dtype
    # Two nodes let autograd free dy and the deviations before dx and dweight are made. The second node costs 40 us on
    # the host; a GPU processes some millions of elements in that time. One node if one launch makes dg and both
    # products, because dg is then never written; or both products of few rows, beside whose weight dy is small.
    name, rows = str(dtype or x.dtype).removeprefix("torch."), x.shape[0]
    whole = options[0] and makes_both_products(name, rows, *weight.shape)
    whole = whole or (rows <= DUAL_ROWS[-1] and weight.dtype.itemsize == 2)
    if not x.is_cuda or weight.shape[0] * rows + weight.numel() < 2**23 or whole:
        return _apply_of(_Whole)(x, weight, bias, scale, gamma, beta, more)
    between: list[Any] = []
    y = _apply_of(_Linear)(x, weight, between, (bias, scale, gamma, beta), more)
    return _apply_of(_Norm)(y, bias, scale, gamma, beta, between)


def _apply_of(node: Any) -> Any:
    """The base class's apply: Function.apply takes 3 us to check for torch.func, whose tensors gsbn refuses anyway."""
    return super(Function, node).apply


_FOUR = (False,) * 4
# Whether the graph is kept for another backward; True if torch cannot tell.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _forward(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, dtype: Any
) -> tuple[Any, Saved, How]:
    wide = dtype is not None and dtype.itemsize == 2 and weight.dtype is torch.float32
    x, weight = cast(x, dtype), cast(weight, dtype)
    y, saved = forward_of((x, weight, scale, bias, gamma, beta, *state, None, None), options)
    return y, saved, How.of(saved, (), wide=wide)


def _operands(saved: Saved, of_x: bool, of_weight: bool) -> tuple[Any, Any]:
    """x and weight, each None unless a backward reads it: then a cast is freed, and the original may change.

    The backward reads x for dweight alone, but second derivatives and batched gradients compute the call again.
    """
    x, weight = saved.x, saved.weight
    if not x.is_cuda:  # the backward on the CPU takes both
        return x, weight
    reads_weight = makes_both_products(str(weight.dtype).removeprefix("torch."), x.shape[0], *weight.shape)
    return x if of_x or of_weight else None, weight if of_x or reads_weight else None


def _gradients(how: How, dy: Any, x: Any, weight: Any, deviations: Any, vectors: Any) -> Any:
    """All six gradients."""
    if not dy.is_cuda:
        return backward_of(dy, how.saved(x, weight, deviations, vectors), how.needs)
    found, made = backward_run(kind_of_tensor(dy), (dy, x, weight, deviations, vectors), how)
    return [None if place is None else made[place] for place in found.returns]


def _before_norm(how: How, dy: Any, deviations: Any, vectors: Any) -> Any:
    """dg and the gradients of bias, scale, gamma and beta."""
    found, made = backward_run(kind_of_tensor(dy), (dy, None, None, deviations, vectors), how)
    dg = None
    if how.needs[:1] == ("x",):
        dg = deviations if how.in_place and len(dy) else made[-1]
        if dg.shape[1] != dy.shape[1]:
            dg = dg[:, : dy.shape[1]]
    return [dg, *(None if place is None else made[place] for place in found.returns[2:])]


def _products(how: How, dg: Any, x: Any, weight: Any) -> Any:
    """dx and dweight."""
    found, made = backward_run(kind_of_tensor(dg), (dg, x, weight, None, None), how)
    return [None if place is None else made[place] for place in found.returns[:2]]


_is_batched: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)  # is_grads_batched


def goes_again(dy: Any) -> bool:
    """Whether PyTorch's operators must compute the gradients: for second derivatives or batched gradients."""
    return bool(is_grad_enabled() or _transforms() or _is_batched(dy))


def _in_place(how: How, dy: Any, deviations: Any, at: int) -> How:
    """Let dg overwrite the deviations if nothing will read them again, and if they are still at the address `at` where
    the forward made them: hooks on saved tensors may return other memory."""
    if how.training and deviations.dtype is dy.dtype and deviations.data_ptr() == at and not _keeps_graph():
        return how._replace(in_place=True)
    return how


def kind_of_tensor(tensor: Any) -> Kind:
    kind = kind_of(tensor)
    assert kind is not None
    return kind
