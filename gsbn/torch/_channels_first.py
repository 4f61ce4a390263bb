"""Compute 1x1 convolutions and linear layers of contiguous (N, C, L) and (N, C, H, W)."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.autograd import Function
from torch.compiler import is_compiling

from .._arrays.check import checked_activation
from .._backward import BACKWARD, BACKWARD_CHANNELS_FIRST, How
from .._cuda import kernels
from .._forward import forward_of
from .._forward.channels_first import FORWARD_CHANNELS_FIRST
from .._forward.operation import WHOLE_BATCH
from .._host.run import call, run
from .._plan import LEAST_LENGTH, channels_first_obstacle
from ._again import Given, gradients_again
from ._autograd import (
    cast,
    drop_given,
    goes_again,
    in_place,
    is_watched,
    kind_of_tensor,
    needed_of,
    operands,
    shaped,
    widens,
)
from ._transpose import rows_of, transpose

IN_PLACE, COPIES = "in place", "copies"  # x and y as they are; or transposed, by a launch each
_COPIED = 2**20  # the least elements of x and y for which copies cost less than what PyTorch's modules launch


def way_of(x: Any, weight: Any, vectors: tuple[Any, ...], options: tuple[Any, ...]) -> str | None:
    """Return how gsbn computes the call of a contiguous x: IN_PLACE, COPIES, or None if PyTorch's operators copy.

    Kernels that read in place keep nothing for a backward with frozen statistics.
    """
    if not x.is_cuda or is_compiling() or is_watched() or not x.is_contiguous() or x.numel() == 0:
        return None
    dtype = autocast_dtype(x)
    if dtype is None and weight.dtype is not x.dtype:
        return None  # the call raises the error
    training, *_, gemm = options
    if x.data_ptr() % 16 or gemm not in ("auto", "sm90"):  # TMA needs addresses on 16 bytes
        return COPIES
    if not training and _needs_gradients(x, weight, vectors):
        return COPIES
    n, k, *sizes = x.shape
    sizes_of_call = n * prod(sizes), weight.shape[0], k, prod(sizes)
    name = str(dtype or x.dtype).removeprefix("torch.")
    return IN_PLACE if _serves(name, x.get_device(), *sizes_of_call) else COPIES


def beats_modules(x: Any, weight: Any, vectors: tuple[Any, ...], training: bool, precision: str) -> bool:
    """Return whether gsbn is faster than a convolution of this weight and a norm, of PyTorch, for a contiguous x.

    With copies it is in float32, where cuDNN may not use TF32, and in 16 bits for images that cuDNN does not take well,
    whose samples are short or not a multiple of 16 bytes. Without a backward PyTorch's modules move fewer bytes if
    there are more inputs than features. docs/history/channels_first.md has the figures.
    """
    way = way_of(x, weight, vectors, (training, "auto"))
    if way != COPIES:
        return way == IN_PLACE
    n, k, *sizes = x.shape
    features, length, dtype = weight.shape[0], prod(sizes), autocast_dtype(x) or x.dtype
    if n * length * (k + features) < _COPIED:
        return False
    if dtype is torch.float32:
        if precision != "highest" or _convolves_in_tf32():
            return False
        slow_elsewhere = min(k, features) >= 128  # the product takes longer than the copies
    elif dtype.itemsize == 2 and (length % 8 or length < LEAST_LENGTH):
        slow_elsewhere = length < LEAST_LENGTH  # cuDNN's product of such short samples
    else:
        return False
    return features >= k or slow_elsewhere or training or _needs_gradients(x, weight, vectors)


def autocast_dtype(x: Any) -> Any:
    """Return the dtype to which autocast casts x, or None."""
    return get_autocast_dtype("cuda") if is_autocast_enabled("cuda") and x.dtype is not torch.float64 else None


def _convolves_in_tf32() -> bool:
    of_conv = getattr(torch.backends.cudnn, "conv", None)  # new in PyTorch 2.9; with it, allow_tf32 may raise
    return bool(torch.backends.cudnn.allow_tf32 if of_conv is None else of_conv.fp32_precision == "tf32")


@lru_cache(maxsize=1024)
def _serves(dtype: str, device: int, m: int, n: int, k: int, length: int) -> bool:
    if dtype not in ("float16", "bfloat16"):  # decided without asking the device
        return False
    return channels_first_obstacle(dtype, m, n, k, length, kernels.gpu(device)) is None


def _needs_gradients(x: Any, weight: Any, vectors: tuple[Any, ...]) -> bool:
    return is_grad_enabled() and any(of is not None and of.requires_grad for of in (x, weight, *vectors))


def channels_first(
    x: Any, weight: Any, vectors: tuple[Any, ...], state: Any, options: Any, activation: Any, way: str
) -> Any:
    """Return a contiguous y for a contiguous x. `way` is what `way_of` returned.

    `weight` has shape (O, C), and `vectors` are bias, gamma and beta.
    """
    of_y = x.shape[0], weight.shape[0], *x.shape[2:]
    of_call = state, options, checked_activation(activation), way, of_y
    dtype = autocast_dtype(x)
    x = rows_of(x, dtype) if way == COPIES else x
    if _needs_gradients(x, weight, vectors):
        # as _apply_of in _nodes.py
        return super(Function, _ChannelsFirst).apply(x, weight, *vectors, of_call, dtype)
    return _forward(cast(x, dtype), cast(weight, dtype), vectors, *of_call, saves=False)[0]


def _forward(
    x: Any, weight: Any, vectors: Any, state: Any, options: Any, activation: Any, way: str, of_y: Any, *, saves: bool
) -> tuple[Any, Any]:
    """Return y, of this shape, and with `saves` what the backward needs, else None. With COPIES x is a matrix of rows.

    gsbn/_forward/channels_first.py describes the matrices IN_PLACE.
    """
    bias, gamma, beta = vectors
    n, features, *sizes = of_y
    length = prod(sizes)
    arrays = x.view(n * length, -1), weight, None, bias, gamma, beta, *state, None, None, None
    of_call = *options, saves, None, activation, *WHOLE_BATCH
    with torch.no_grad():
        if way == IN_PLACE:
            made = call(FORWARD_CHANNELS_FIRST, arrays, (*of_call, 1.0, length))
        else:
            made = forward_of(arrays, of_call)
        y, saved = made if saves else (made, None)
    return shaped(y if way == IN_PLACE else transpose(y.view(n, length, features)), of_y), saved


class _ChannelsFirst(Function):
    """One autograd node for the forward and the backward in training."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, of_call: Any, dtype: Any) -> Any:
        _, options, _, ctx.way, _ = of_call
        wide = widens(dtype, weight)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.given = Given.of((weight, bias, None, gamma, beta), options[2], connected=dtype is None)
        x, weight = cast(x, dtype), cast(weight, dtype)
        y, saved = _forward(x, weight, (bias, gamma, beta), *of_call, saves=True)
        ctx.how, ctx.of_x = How.of(saved, (), wide=wide), x.shape
        if ctx.way == COPIES:
            kept = operands(saved._replace(x=x, weight=weight), needs_x, needs_weight)
        else:  # dx needs x only to compute the call again
            kept = x if needs_x or needs_weight else None, weight if needs_x else None
        ctx.save_for_backward(*kept, saved.deviations, saved.vectors)
        ctx.at = saved.deviations.data_ptr()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, deviations, vectors = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_gamma, needs_beta, *_ = ctx.needs_input_grad
        needed = needs_x, needs_weight, needs_bias, False, needs_gamma, needs_beta, False
        how = ctx.how._replace(needs=needed_of(needed))
        copies = ctx.way == COPIES
        if goes_again(dy):
            rows = x.movedim(1, -1).reshape(-1, x.shape[1]) if not copies and x is not None else x
            found = gradients_again(how, ctx.given, dy.movedim(1, -1).reshape(-1, dy.shape[1]), rows, vectors)
            if found[0] is not None and not copies:
                n, k, *sizes = ctx.of_x
                found[0] = found[0].reshape(n, *sizes, k).movedim(-1, 1)
        else:
            drop_given(ctx)
            dy = dy.resolve_neg()
            of_call: Any
            if copies:
                dy = rows_of(dy)
                operation, of_call = BACKWARD, in_place(how, dy, deviations, ctx.at)
            else:
                dy = dy.contiguous()
                length = prod(dy.shape[2:])
                dy = (dy.clone() if dy.data_ptr() % 16 else dy).view(deviations.shape)  # it is read 16 bytes at a time
                x = x.view(len(dy), -1) if needs_weight else None
                operation, of_call = BACKWARD_CHANNELS_FIRST, (in_place(how, dy, deviations, ctx.at), length)
            checked, made = run(operation, kind_of_tensor(dy), (dy, x, weight, deviations, vectors, None), of_call)
            assert checked is not None
            found = checked.returned(made)
            if found[0] is not None:
                found[0] = found[0].view(ctx.of_x)
        dx, dweight, dbias, _, dgamma, dbeta, *_ = found
        return dx, dweight, dbias, dgamma, dbeta, None, None
