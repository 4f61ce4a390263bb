"""Transpose the samples of contiguous (N, C, L) tensors by one launch, where no kernel takes them as they lie."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd import Function

from .._arrays.admit import is_memory
from .._forward import transposed
from ._autograd import goes_again, is_compiling, is_watched, shaped


def rows_of(x: Any, dtype: Any = None) -> Any:
    """Return x (N, C, ...) as a matrix whose rows have C adjacent features.

    One launch transposes a contiguous x, and casts it to `dtype` if there is one.
    """
    n, features, *sizes = x.shape
    if features == 1 or prod(sizes) == 1 or not _by_launch(x):
        return x.movedim(1, -1).reshape(n * prod(sizes), features)
    x = x.view(n, features, prod(sizes))
    return _transpose_with_gradient(x, dtype, (n * prod(sizes), features))


def samples_of(rows: Any, n: int, sizes: Any) -> Any:
    """Return a contiguous (n, O, *sizes) of a matrix of rows, by one launch. This is the opposite of `rows_of`."""
    features, length = rows.shape[1], prod(sizes)
    if features == 1 or length == 1 or not _by_launch(rows):
        return rows.view(n, *sizes, features).movedim(-1, 1).contiguous()
    return _transpose_with_gradient(rows.view(n, length, features), None, (n, features, *sizes))


def _transpose_with_gradient(x: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return what `transpose` does, as a part of autograd's graph if x needs a gradient."""
    differentiable = is_grad_enabled() and x.requires_grad
    apply: Any = super(Function, _Transpose).apply if differentiable else transpose  # as _apply_of in _nodes.py
    return apply(x, dtype, shape)


def transpose(x: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return x.transpose(1, 2) of a contiguous x of three dimensions in this shape; autograd does not see it.

    It is cast as `rows_of` casts.
    """
    n, rows, cols = x.shape
    if dtype is x.dtype or x.dtype is torch.float64:
        dtype = None
    elif dtype is not None and (not x.is_cuda or torch.float32 not in (dtype, x.dtype)):
        x, dtype = x.to(dtype), None  # the launch does not cast between the 16-bit dtypes
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return shaped(transposed(x.view(n * rows, cols), n, name), shape)


def _by_launch(x: Any) -> bool:
    """Return whether gsbn's launch serves: for plain memory on a GPU, in a call that nobody else watches."""
    if not x.is_cuda or is_compiling() or is_watched():
        return False
    return x.is_contiguous() and x.numel() > 0 and is_memory(torch, x)


class _Transpose(Function):
    """One autograd node for x.transpose(1, 2) in a shape, and a cast."""

    @staticmethod
    def forward(ctx: Any, x: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        ctx.dtype, ctx.of_x = x.dtype, x.shape
        return transpose(x, dtype, shape)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        n, rows, cols = ctx.of_x
        again = goes_again(dy)
        dy = dy.resolve_neg().reshape(n, cols, rows)
        if again or not _by_launch(dy):
            return dy.transpose(1, 2).to(ctx.dtype), None, None
        return transpose(dy, ctx.dtype, ctx.of_x), None, None
