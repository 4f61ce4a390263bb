"""Compute differentiable calls of gsbn: the autograd nodes of one layer, and the one of small layers in sequence."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from torch.autograd import Function

from .._backward import How, run_channels_first
from .._forward import forward_of
from .._forward.channels_first import forward_channels_first
from .._plan.dual_gemm import serves_dual_gemm
from .._plan.skinny import serves_skinny_backward
from .._saved import Saved
from ._again import Given, gradients_again, layers_again, products_again
from ._autograd import (
    cast,
    contiguous,
    drop_given,
    goes_again,
    in_place,
    keeps_graph,
    kind_of_tensor,
    needed_of,
    operands,
    saves_by_hooks,
    shaped,
    widens,
)
from ._halves import before_norm, gradient_of_weight, gradients, gradients_but_of_weight, products, second_half
from ._residual import before_again
from ._shared import SharedGradient, shared_weight


class _Whole(Function):
    """One autograd node for the whole forward and backward. Autograd calls both with grad mode off."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, residual: Any, more: Any
    ) -> Any:
        *of_call, ctx.shared = more
        y, saved, ctx.how, ctx.given = _forward(x, bias, scale, gamma, beta, residual, *of_call)
        ctx.samples = of_call[-1]
        kept_x, kept_weight = operands(saved, *ctx.needs_input_grad[:2])
        ctx.cast = None
        if ctx.shared is not None:
            ctx.cast, kept_weight = kept_weight, None
        ctx.save_for_backward(kept_x, kept_weight, saved.deviations, saved.vectors, saved.kept)
        ctx.at = saved.deviations.data_ptr()
        return _of_samples(y, ctx.samples)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        *_, of_residual, _ = ctx.needs_input_grad
        how, samples = ctx.how._replace(needs=needed_of(ctx.needs_input_grad[:7])), ctx.samples
        x, weight, deviations, vectors, kept = ctx.saved_tensors
        if goes_again(dy):
            dv = dy if kept is None else before_again(dy, kept, how.residual_activation)
            dx, *found = gradients_again(how, ctx.given, _transposed(dv, samples), _transposed(x, samples), vectors)
            return _transposed(dx, samples, back=True), *found, dv if of_residual else None, None
        drop_given(ctx)
        dy, how = dy.resolve_neg(), in_place(how, dy, deviations, ctx.at)
        held = [weight if ctx.shared is None else ctx.cast]
        del weight
        if not keeps_graph():
            ctx.cast = None
        *found, dv = _gradients(how, ctx.shared, dy, x, held, deviations, vectors, kept, samples)
        return *found, dy if of_residual and kept is None else dv, None


class _Layer(NamedTuple):
    """What `_Sequence` keeps of one layer."""

    how: How
    given: Given
    shared: SharedGradient | None
    x: Any  # None for the first layer, unless it is a cast
    weight: Any  # None if it is no cast
    deviations: Any
    vectors: Any
    at: int  # the address of the deviations


def _of_layer(i: int) -> slice:
    """Return the places of layer i's weight, bias, scale, gamma and beta among the parameters of `_Sequence`."""
    return slice(5 * i, 5 * i + 5)


class _Sequence(Function):
    """One autograd node for small layers in sequence, of which each takes the y of the one before it.

    Nobody else sees the arrays between the layers. So the node itself holds them, and frees those of a layer as soon as
    the backward has passed it.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, calls: Any, *parameters: Any) -> Any:
        needs_x, _, *needs = ctx.needs_input_grad
        ctx.layers, first, weights, y = [], None, [None] * len(calls), x
        for i, (*of_call, shared) in enumerate(calls):
            weight, bias, scale, gamma, beta = parameters[_of_layer(i)]
            needs_weight, *others = needs[_of_layer(i)]
            y, saved, how, given = _forward(y, bias, scale, gamma, beta, None, *of_call)
            kept_x, kept_weight = operands(saved, needs_x, needs_weight)
            needs_x = needs_x or needs_weight or any(others)
            if kept_x is x:
                first, kept_x = x, None
            if kept_weight is weight:
                weights[i], kept_weight = weight, None
            at = saved.deviations.data_ptr()
            ctx.layers.append(_Layer(how, given, shared, kept_x, kept_weight, saved.deviations, saved.vectors, at))
        ctx.save_for_backward(first, *weights)  # so that autograd sees whether they are changed
        ctx.samples = of_call[-1]
        return _of_samples(y, ctx.samples)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        needs_x, _, *needs = ctx.needs_input_grad
        first, *weights = ctx.saved_tensors
        layers, samples, kept = ctx.layers, ctx.samples, keeps_graph()
        if goes_again(dy):
            of_layers = [(layer.how, layer.given, layer.vectors) for layer in layers]
            x = _transposed(layers[0].x if first is None else first, samples)
            dx, *found = layers_again(of_layers, _transposed(dy, samples), x, (needs_x, *needs))
            return _transposed(dx, samples, back=True), None, *found
        found, dy = [None] * len(needs), dy.resolve_neg()
        for i in reversed(range(len(layers))):
            how, _, shared, x, weight, deviations, vectors, at = layers[i]
            if not kept:
                layers[i] = None
            of_layer = _of_layer(i)
            through = needs_x or any(needs[: of_layer.start])
            how = how._replace(needs=needed_of((through, *needs[of_layer], False)))
            held = [weights[i] if weight is None else weight]
            x, weight, how = first if i == 0 and x is None else x, None, in_place(how, dy, deviations, at)
            dy, *found[of_layer], _ = _gradients(how, shared, dy, x, held, deviations, vectors, None, samples)
            if not through:
                break
        return dy, None, *found


class _Linear(Function):
    """An autograd node for the forward of a large call and the second half of its backward.

    This half computes dx and dweight from dg, which `_Norm` has made.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, between: Any, vectors: Any, more: Any) -> Any:
        *of_call, ctx.shared = more
        y, saved, how, given = _forward(x, *vectors, *of_call)
        x, weight = operands(saved, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(x, *[weight] * (not how.wide))
        ctx.cast = weight if how.wide else None  # a cast weight that only gsbn holds
        ctx.how, ctx.given = how, given
        between += (saved.deviations, saved.vectors, saved.kept, how, given)
        return y

    @staticmethod
    def backward(ctx: Any, dg: Any) -> Any:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        how = second_half(ctx.how, needed_of((needs_x, needs_weight, *_NO_OTHERS)))
        if goes_again(dg):
            return *products_again(how, ctx.given, dg, ctx.saved_tensors[0]), None, None, None
        drop_given(ctx)
        dg = dg.resolve_neg()
        if not how.wide:
            return *products(how, dg, *ctx.saved_tensors), None, None, None
        # Free the cast weight before making dweight, which has twice as many bytes.
        dx = dweight = None
        if needs_x:
            dx, _ = products(how._replace(needs=("x",)), dg, None, ctx.cast)
        if not keeps_graph():
            ctx.cast = None
        if needs_weight:
            dweight = gradient_of_weight(how, ctx.shared, dg, ctx.saved_tensors[0])
        return dx, dweight, None, None, None


class _Norm(Function):
    """An autograd node for the first half of a large call's backward, from dy to dg.

    Its forward returns y unchanged.
    """

    @staticmethod
    def forward(ctx: Any, y: Any, bias: Any, scale: Any, gamma: Any, beta: Any, residual: Any, between: Any) -> Any:
        ctx.mark_dirty(y)
        deviations, of_features, kept, ctx.how, ctx.given = between
        ctx.save_for_backward(deviations, of_features, None if kept is None else y)
        ctx.at = deviations.data_ptr()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        through, *others, _ = ctx.needs_input_grad
        of_residual = others[-1]
        how = ctx.how._replace(needs=needed_of((through, False, *others)), linear=False)
        deviations, of_features, kept = ctx.saved_tensors
        if goes_again(dy):
            linear, _ = ctx.next_functions[0]  # if any node keeps x, this one does
            x = None if linear is None else linear.saved_tensors[0]
            dv = dy if kept is None else before_again(dy, kept, how.residual_activation)
            dg, _, *found = gradients_again(how, ctx.given, dv, x, of_features)
            return dg, *found, dv if of_residual else None, None
        drop_given(ctx)
        dy = dy.resolve_neg()
        *found, dv = before_norm(in_place(how, dy, deviations, ctx.at), dy, deviations, of_features, kept)
        return *found, dy if of_residual and kept is None else dv, None


def _takes_whole(rows: int, weight: Any, options: Any, dtype: Any) -> bool:
    """Return whether one launch makes dg and both products, or both products of few rows. `dtype` is x's."""
    name = str(dtype).removeprefix("torch.")
    if options[0] and options[-1] == 1 and serves_skinny_backward(name, rows, *weight.shape, remat=True):
        return True
    return weight.dtype.itemsize == 2 and serves_dual_gemm(name, rows)


def _is_small(x: Any, weight: Any) -> bool:
    """Return whether a second node takes the host, which needs 40 us, longer than the layer takes the GPU."""
    return not x.is_cuda or weight.shape[0] * x.shape[0] + weight.numel() < 2**23


def _more(rows: int, weight: Any, state: Any, options: Any, dtype: Any, whole: bool, samples: Any) -> tuple[Any, Any]:
    """Return the weight that autograd sees, and what a node needs beside tensors."""
    alone = whole or options[4] != "auto" or saves_by_hooks()  # hooks shall see the cast weight that is kept, too
    of_autograd, found, shared = shared_weight(weight, dtype, None if alone else rows)
    return of_autograd, (state, options, dtype, weight, found, samples, shared)


def apply(
    x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, state: Any, options: Any, dtype: Any,
    residual: Any, samples: Any = None,
) -> Any:  # fmt: skip
    """Return the y of a matrix x, as a part of autograd's graph. `dtype` is autocast's, or None.

    Two nodes let autograd free dy and the deviations before dx and dweight are made. One node serves a small layer. It
    also serves if one launch makes dg and both products, because dg is then never written, and if one launch makes both
    products of few rows, because dy is then small beside the weight.
    """
    rows = x.shape[0]
    whole = samples is not None or _takes_whole(rows, weight, options, dtype or x.dtype)
    one = whole or _is_small(x, weight)
    weight, more = _more(rows, weight, state, options, dtype, whole, samples)
    if one:
        return _apply_of(_Whole)(x, weight, bias, scale, gamma, beta, residual, more)
    between: list[Any] = []
    constant = None if residual is None else residual.detach()  # `_Norm` has its gradient
    y = _apply_of(_Linear)(x, weight, between, (bias, scale, gamma, beta, constant), more)
    return _apply_of(_Norm)(y, bias, scale, gamma, beta, residual, between)


def apply_in_sequence(x: Any, layers: list[Any], dtype: Any, samples: Any = None) -> Any:
    """Return the y of the last of layers in sequence, each of which takes the y of the one before it.

    Small layers in sequence share a node. A layer has its weight, bias, scale, gamma, beta, statistics and options.
    """
    for together in _in_nodes(x, layers, dtype):
        x = x if x.dim() == 2 else x.view(prod(samples), -1)
        if len(together) == 1:
            _, layer = together[0]
            of_layer = *layer, dtype, None, samples
            x = apply(x, *of_layer)
            continue
        calls: list[Any] = []
        parameters: list[Any] = []
        for whole, (weight, *vectors, state, options) in together:
            whole = whole or samples is not None
            of_autograd, more = _more(x.shape[0], weight, state, options, dtype, whole, samples)
            calls.append(more)
            parameters += of_autograd, *vectors
        x = _apply_of(_Sequence)(x, calls, *parameters)
    return x


def _in_nodes(x: Any, layers: list[Any], dtype: Any) -> Iterator[list[tuple[bool, Any]]]:
    """Yield layers in sequence that share a node, or a layer that has one or two of its own; with `_takes_whole`.

    A node makes all its gradients before autograd adds the first one to another, or frees it. So weights have at most
    _MOST elements besides the largest one; four times as many under autocast, where calls of a weight share a gradient.
    """
    most, alone = _MOST if dtype is None else 4 * _MOST, saves_by_hooks()  # hooks shall see what each layer saves
    together: list[tuple[bool, Any]] = []
    elements: list[int] = []
    joins = False
    for layer in layers:
        weight, options, joined = layer[0], layer[-1], joins
        whole = _takes_whole(x.shape[0], weight, options, dtype or x.dtype)
        joins = not alone and (whole or _is_small(x, weight))
        elements.append(weight.numel())
        if together and not (joined and joins and sum(elements) - max(elements) <= most):
            yield together
            together, elements = [], elements[-1:]
        together.append((whole, layer))
    yield together


def _apply_of(node: Any) -> Any:
    """Return the base class's apply: Function.apply takes 3 us to check for torch.func, whose tensors gsbn refuses."""
    return super(Function, node).apply


_NO_OTHERS = (False,) * 5
_MOST = 2**21  # elements of the weights of one node, besides the largest
_LARGE = 2**21  # elements of a cast weight that one node, too, frees early, at the cost of a second call of gsbn


def _forward(
    x: Any, bias: Any, scale: Any, gamma: Any, beta: Any, residual: Any, state: Any, options: Any, dtype: Any,
    weight: Any, cast_weight: Any, samples: Any,
) -> tuple[Any, Saved, How, Given]:  # fmt: skip
    """Return y as a matrix, and what the backward needs. `weight` is the one that was given."""
    arrays = cast(x, dtype), cast_weight, scale, bias, gamma, beta, *state, None, residual, None
    if samples is None:
        y, saved = forward_of(arrays, options)
    else:
        y, saved = forward_channels_first(arrays, options, _length(samples))
    given = Given.of((weight, bias, scale, gamma, beta), options[2], connected=saved.x is x)
    return y, saved, How.of(saved, (), wide=widens(dtype, weight)), given


def _gradients(
    how: How, shared: SharedGradient | None, dy: Any, x: Any, held: list[Any], deviations: Any, vectors: Any, kept: Any,
    samples: Any,
) -> Any:  # fmt: skip
    """Return all gradients, that of the residual last. The weight is taken out of `held`, so that nobody else holds it.

    If x and weight were cast, autograd casts their gradients to the dtypes of the arguments.
    """
    weight = held.pop()
    if samples is not None:
        arrays = contiguous(dy).view(deviations.shape), x, weight, deviations, vectors, None
        return run_channels_first(kind_of_tensor(dy), arrays, how, _length(samples))
    large = weight is not None and weight.numel() >= _LARGE
    if shared is None or not (shared.several or large):
        return gradients(how, dy, x, weight, deviations, vectors, kept)
    dx, dg, *found = gradients_but_of_weight(how, dy, weight, deviations, vectors, kept)
    del weight  # a cast: it is freed before dweight is made, which has twice as many bytes
    return dx, gradient_of_weight(how, shared, dg, x), *found


def _length(samples: Any) -> int:
    return prod(samples[1:])


def _of_samples(y: Any, samples: Any) -> Any:
    """Return y in the shape in which a node returns it."""
    return y if samples is None else shaped(y, (samples[0], y.shape[1], *samples[1:]))


def _transposed(a: Any, samples: Any, *, back: bool = False) -> Any:
    """Return the rows of (N, C, ...), or of a matrix that shares its memory; with `back` such a matrix, of its rows."""
    if a is None or samples is None:
        return a
    of_samples = (samples[0], _length(samples), -1) if back else (samples[0], -1, _length(samples))
    return a.reshape(of_samples).transpose(1, 2).reshape(prod(samples), -1)
