"""Compute 1x1 convolutions and linear layers of contiguous (N, C, L) and (N, C, H, W).

torch.compile records one operator for a call IN_PLACE, and compiles the copies of the other calls itself.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.autograd import Function
from torch.compiler import is_compiling

from .._arrays.check import checked_activation
from .._arrays.dynamo import constant_in_graphs
from .._backward import How, run, run_channels_first
from .._cuda import kernels
from .._forward import forward_of
from .._forward.channels_first import FORWARD_CHANNELS_FIRST
from .._forward.operation import WHOLE_BATCH
from .._host.run import call
from .._plan import LEAST_LENGTH, MOST_ROWS, channels_first_obstacle
from ._again import Given, gradients_again
from ._autograd import (
    are_static,
    cast,
    contiguous,
    drop_given,
    goes_again,
    in_place,
    is_exporting,
    is_watched,
    kind_of_tensor,
    needed_of,
    operands,
    shaped,
    widens,
)
from ._operators import recorded
from ._transpose import rows_of, transpose

IN_PLACE, COPIES = "in place", "copies"  # x and y as they are; or transposed, by a launch each
_COPIED = 2**20  # the least elements of x and y for which copies cost less than what PyTorch's modules launch
# Beside Inductor: the least elements with a backward in 16 bits, of images and of other tensors; and the least elements
# of a float32 weight without a backward
_COMPILED_IMAGES, _COMPILED, _COMPILED_WEIGHT = 3 * 2**19, 2**23, 2**13


def way_of(x: Any, weight: Any, vectors: tuple[Any, ...], options: tuple[Any, ...]) -> str | None:
    """Return how gsbn computes the call of a contiguous x: IN_PLACE, COPIES, or None if PyTorch's operators copy.

    Kernels that read in place keep nothing for a backward with frozen statistics.
    """
    compiling = is_compiling()
    if not x.is_cuda or not (_is_recordable(x, weight) if compiling else not is_watched()):
        return None
    if not x.is_contiguous() or x.numel() == 0:
        return None
    dtype = autocast_dtype(x)
    if dtype is None and weight.dtype is not x.dtype:
        return None  # the call raises the error
    training, *_, gemm = options
    # TMA needs addresses on 16 bytes; a recorded program copies what starts elsewhere
    if gemm not in ("auto", "sm90") or not (compiling or x.data_ptr() % 16 == 0):
        return COPIES
    if not training and _needs_gradients(x, weight, vectors):
        return COPIES
    n, k, *sizes = x.shape
    length = prod(sizes)
    serves = n * length <= MOST_ROWS and _serves(str(dtype or x.dtype)[6:], x.device.index, weight.shape[0], k, length)
    return IN_PLACE if serves else COPIES


def _is_recordable(x: Any, weight: Any) -> bool:
    """Return whether torch.compile may record what way_of decides, which is then the way of each run of the program.

    The number of samples may vary. An exported program may run on another GPU.
    """
    return not is_exporting() and are_static(*x.shape[1:], weight.shape[0])


def beats_modules(x: Any, weight: Any, vectors: tuple[Any, ...], training: bool, precision: str) -> bool:
    """Return whether gsbn is faster than a convolution of this weight and a norm, of PyTorch, for a contiguous x.

    With copies it is in float32, where cuDNN may not use TF32, and in 16 bits for images that cuDNN does not take well,
    whose samples are short or not a multiple of 16 bytes. Without a backward PyTorch's modules move fewer bytes if
    there are more inputs than features. Inductor fuses the norm with other passes, which serves small calls better, but
    it also turns images to channels last and back. docs/history/channels_first.md has the figures.
    """
    way = way_of(x, weight, vectors, (training, "auto"))
    if way is None:
        return False
    n, k, *sizes = x.shape
    features, length, dtype = weight.shape[0], prod(sizes), autocast_dtype(x) or x.dtype
    elements, backward = n * length * (k + features), training or _needs_gradients(x, weight, vectors)
    compiled, images = is_compiling(), x.dim() > 3
    if way == IN_PLACE:
        return not (compiled and backward) or elements >= (_COMPILED_IMAGES if images else _COMPILED)
    if dtype is torch.float32:
        if elements < _COPIED or precision != "highest" or _convolves_in_tf32():
            return False
        if compiled:
            return backward or images or k * features >= _COMPILED_WEIGHT
        slow_elsewhere = min(k, features) >= 128  # the product takes longer than the copies
    elif dtype.itemsize == 2 and (length % 8 or length < LEAST_LENGTH):
        if elements < (_COMPILED_IMAGES if compiled else _COPIED):
            return False
        slow_elsewhere = length < LEAST_LENGTH  # cuDNN's product of such short samples
    else:
        return False
    return features >= k or slow_elsewhere or backward


def autocast_dtype(x: Any) -> Any:
    """Return the dtype to which autocast casts x, or None."""
    return get_autocast_dtype("cuda") if is_autocast_enabled("cuda") and x.dtype is not torch.float64 else None


@constant_in_graphs
def _convolves_in_tf32() -> bool:
    of_conv = getattr(torch.backends.cudnn, "conv", None)  # new in PyTorch 2.9; with it, allow_tf32 may raise
    return bool(torch.backends.cudnn.allow_tf32 if of_conv is None else of_conv.fp32_precision == "tf32")


@constant_in_graphs
def _serves(dtype: str, device: int, n: int, k: int, length: int) -> bool:
    return dtype in ("float16", "bfloat16") and _obstacle(dtype, device, n, k, length) is None


@lru_cache(maxsize=1024)
def _obstacle(dtype: str, device: int, n: int, k: int, length: int) -> str | None:
    return channels_first_obstacle(dtype, n, k, length, kernels.gpu(device))


def _needs_gradients(x: Any, weight: Any, vectors: tuple[Any, ...]) -> bool:
    return is_grad_enabled() and any(of is not None and of.requires_grad for of in (x, weight, *vectors))


def channels_first(
    x: Any, weight: Any, vectors: tuple[Any, ...], state: Any, options: Any, activation: Any, way: str
) -> Any:
    """Return a contiguous y for a contiguous x. `way` is what `way_of` returned.

    `weight` has shape (O, C), and `vectors` are bias, gamma and beta.
    """
    of_y = x.shape[0], weight.shape[0], *x.shape[2:]
    activation, dtype = checked_activation(activation), autocast_dtype(x)
    if is_compiling():
        return _recorded(x, weight, vectors, state, options, activation, dtype).view(of_y)
    of_call = state, options, activation, way, of_y
    x = rows_of(x, dtype) if way == COPIES else x
    if _needs_gradients(x, weight, vectors):
        # as _apply_of in _nodes.py
        return super(Function, _ChannelsFirst).apply(x, weight, *vectors, of_call, dtype)
    return _forward(cast(x, dtype), cast(weight, dtype), vectors, *of_call, saves=False)[0]


def _recorded(x: Any, weight: Any, vectors: Any, state: Any, options: Any, activation: Any, dtype: Any) -> Any:
    """Record a call IN_PLACE, and return y, as a matrix that shares its memory."""
    (bias, gamma, beta), (training, *more), (n, k, *sizes) = vectors, options, x.shape
    differentiate = _needs_gradients(x, weight, vectors)
    wide = differentiate and widens(dtype, weight)
    rows = cast(x, dtype).view(n * prod(sizes), k)
    tensors = rows, weight if wide else cast(weight, dtype), bias, None, gamma, beta, *state
    of_call = 1.0, *more, None, None, None, 1, None  # no process group, renorm, limits and residual, and one group
    return recorded(tensors, training, differentiate, wide, activation, *of_call, length=prod(sizes))


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
            if copies:
                dy = rows_of(dy)
            else:
                length = prod(dy.shape[2:])
                dy = contiguous(dy).view(deviations.shape)  # it is read 16 bytes at a time
                x = x.view(len(dy), -1) if needs_weight else None
            how, arrays = in_place(how, dy, deviations, ctx.at), (dy, x, weight, deviations, vectors, None)
            kind = kind_of_tensor(dy)
            found = run(kind, arrays, how)[0] if copies else run_channels_first(kind, arrays, how, length)
            if found[0] is not None:
                found[0] = found[0].view(ctx.of_x)
        dx, dweight, dbias, _, dgamma, dbeta, *_ = found
        return dx, dweight, dbias, dgamma, dbeta, None, None
