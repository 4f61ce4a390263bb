"""Compute 1x1 convolutions and linear layers of contiguous (N, C, L) and (N, C, H, W) by kernels for channels first."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.autograd import Function
from torch.compiler import is_compiling

from .._arrays.check import checked_activation
from .._backward import BACKWARD_CHANNELS_FIRST, How
from .._cuda import kernels
from .._forward.channels_first import FORWARD_CHANNELS_FIRST
from .._forward.operation import WHOLE_BATCH
from .._host.run import call, run
from .._plan import channels_first_obstacle
from ._again import Given, gradients_again
from ._autograd import cast, drop_given, goes_again, in_place, is_watched, kind_of_tensor, needed_of, widens


def serves_channels_first(x: Any, weight: Any, vectors: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
    """Return whether these kernels can compute the call. They need a contiguous x.

    With frozen statistics they keep nothing for a backward.
    """
    if not x.is_cuda or is_compiling() or is_watched() or not x.is_contiguous() or x.numel() == 0:
        return False
    dtype = x.dtype
    if is_autocast_enabled("cuda") and dtype is not torch.float64:
        dtype = get_autocast_dtype("cuda")
    elif weight.dtype is not dtype:
        return False
    if x.data_ptr() % 16:  # TMA needs addresses on 16 bytes
        return False
    training, *_, gemm = options
    if not training and _needs_gradients(x, weight, vectors):
        return False
    n, k, *sizes = x.shape
    sizes_of_call = n * prod(sizes), weight.shape[0], k, prod(sizes)
    return gemm in ("auto", "sm90") and _serves(str(dtype).removeprefix("torch."), x.get_device(), *sizes_of_call)


@lru_cache(maxsize=1024)
def _serves(dtype: str, device: int, m: int, n: int, k: int, length: int) -> bool:
    if dtype not in ("float16", "bfloat16"):  # decided without asking the device
        return False
    return channels_first_obstacle(dtype, m, n, k, length, kernels.gpu(device)) is None


def _needs_gradients(x: Any, weight: Any, vectors: tuple[Any, ...]) -> bool:
    return is_grad_enabled() and any(of is not None and of.requires_grad for of in (x, weight, *vectors))


def channels_first(x: Any, weight: Any, vectors: tuple[Any, ...], state: Any, options: Any, activation: Any) -> Any:
    """Return a contiguous y for an x that `serves_channels_first` accepts.

    `weight` has shape (O, C), and `vectors` are bias, gamma and beta.
    """
    dtype = get_autocast_dtype("cuda") if is_autocast_enabled("cuda") else None
    more = vectors, state, options, checked_activation(activation), dtype
    if _needs_gradients(x, weight, vectors):
        return super(Function, _ChannelsFirst).apply(x, weight, *vectors, more)  # as _apply_of in _function.py
    y = _forward(cast(x, dtype), cast(weight, dtype), *more[:-1], saves=False)
    return y.view(x.shape[0], weight.shape[0], *x.shape[2:])


def _forward(x: Any, weight: Any, vectors: Any, state: Any, options: Any, activation: Any, *, saves: bool) -> Any:
    """Return y, or (y, saved) with `saves`, as the matrices that gsbn/_forward/channels_first.py describes."""
    n, k, *sizes = x.shape
    bias, gamma, beta = vectors
    arrays = x.view(n * prod(sizes), k), weight, None, bias, gamma, beta, *state, None, None, None
    of_call = *options, saves, None, activation, *WHOLE_BATCH, 1.0, prod(sizes)
    with torch.no_grad():
        return call(FORWARD_CHANNELS_FIRST, arrays, of_call)


class _ChannelsFirst(Function):
    """One autograd node for the forward and the backward in training."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, more: Any) -> Any:
        vectors, state, options, activation, dtype = more
        wide = widens(dtype, weight)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.given = Given.of((weight, bias, None, gamma, beta), options[2], connected=dtype is None)
        x, weight = cast(x, dtype), cast(weight, dtype)
        y, saved = _forward(x, weight, vectors, state, options, activation, saves=True)
        ctx.how = How.of(saved, (), wide=wide)
        # dx needs x only to compute the call again
        kept = x if needs_x or needs_weight else None, weight if needs_x else None
        ctx.save_for_backward(*kept, saved.deviations, saved.vectors)
        ctx.at, ctx.shape = saved.deviations.data_ptr(), x.shape
        return y.view(x.shape[0], weight.shape[0], *x.shape[2:])

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, deviations, vectors = ctx.saved_tensors
        n, k, *sizes = ctx.shape
        needs_x, needs_weight, *needs_vectors, _ = ctx.needs_input_grad
        needs_bias, needs_gamma, needs_beta = needs_vectors
        how = ctx.how._replace(needs=needed_of((needs_x, needs_weight, needs_bias, False, needs_gamma, needs_beta)))
        if goes_again(dy):
            rows = None if x is None else x.movedim(1, -1).reshape(-1, k)
            found = gradients_again(how, ctx.given, dy.movedim(1, -1).reshape(-1, dy.shape[1]), rows, vectors)
            if found[0] is not None:
                found[0] = found[0].reshape(n, *sizes, k).movedim(-1, 1)
        else:
            drop_given(ctx)
            dy = dy.resolve_neg().contiguous()
            dy = (dy.clone() if dy.data_ptr() % 16 else dy).view(deviations.shape)  # dy is read 16 bytes at a time
            arrays = dy, None if x is None or not needs_weight else x.view(len(dy), k), weight, deviations, vectors
            how = in_place(how, dy, deviations, ctx.at)
            of_call = how, prod(sizes)
            checked, made = run(BACKWARD_CHANNELS_FIRST, kind_of_tensor(dy), arrays, of_call)
            assert checked is not None
            found = checked.returned(made)
            if found[0] is not None:
                found[0] = found[0].view(ctx.shape)
        dx, dweight, dbias, _, dgamma, dbeta = found
        return dx, dweight, dbias, dgamma, dbeta, None
