"""Transpose the samples of contiguous (N, C, L) tensors by one launch, where no kernel takes them as they lie."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd import Function
from torch.compiler import is_compiling

from .._arrays.admit import is_memory
from .._forward import transposed
from ._autograd import cast, goes_again, is_watched


def rows_of(x: Any, dtype: Any = None) -> Any:
    """Return x (N, C, ...) as a matrix whose rows have C adjacent features, cast to autocast's `dtype` if there is one.

    One launch transposes and casts a contiguous x.
    """
    n, features, *sizes = x.shape
    if features == 1 or prod(sizes) == 1 or not _by_launch(x):
        return cast(x, dtype).movedim(1, -1).reshape(n * prod(sizes), features)
    x = x.view(n, features, prod(sizes))
    differentiable = is_grad_enabled() and x.requires_grad
    apply: Any = super(Function, _Transpose).apply if differentiable else transpose  # as _apply_of in _nodes.py
    rows = apply(x, dtype)
    return rows.view(n * prod(sizes), features)


def transpose(x: Any, dtype: Any = None) -> Any:
    """Return x.transpose(1, 2).contiguous() of a contiguous x of three dimensions; autograd does not see it.

    It is cast as `rows_of` casts.
    """
    n, rows, cols = x.shape
    if dtype is x.dtype or x.dtype is torch.float64:
        dtype = None
    elif dtype is not None and (not x.is_cuda or torch.float32 not in (dtype, x.dtype)):
        x, dtype = x.to(dtype), None  # the launch does not cast between the 16-bit dtypes
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return transposed(x.view(n * rows, cols), n, name).view(n, cols, rows)


def _by_launch(x: Any) -> bool:
    """Return whether gsbn's launch serves: for plain memory on a GPU, in a call that nobody else watches."""
    if not x.is_cuda or is_compiling() or is_watched():
        return False
    return x.is_contiguous() and x.numel() > 0 and is_memory(torch, x)


class _Transpose(Function):
    """One autograd node for x.transpose(1, 2).contiguous() and a cast."""

    @staticmethod
    def forward(ctx: Any, x: Any, dtype: Any) -> Any:
        ctx.dtype = x.dtype
        return transpose(x, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        dy = dy.resolve_neg()
        if goes_again(dy) or not _by_launch(dy):
            return dy.transpose(1, 2).to(ctx.dtype), None
        return transpose(dy, ctx.dtype), None
