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
from ._autograd import goes_again, is_watched


def rows_of(x: Any) -> Any:
    """Return x (N, C, ...) as a matrix whose rows have C adjacent features. One launch copies a contiguous x."""
    n, features, *sizes = x.shape
    if features == 1 or prod(sizes) == 1 or not _by_launch(x):
        return x.movedim(1, -1).reshape(n * prod(sizes), features)
    x = x.view(n, features, prod(sizes))
    differentiable = is_grad_enabled() and x.requires_grad
    rows = super(Function, _Transpose).apply(x) if differentiable else transpose(x)  # as _apply_of in _function.py
    return rows.view(n * prod(sizes), features)


def transpose(x: Any) -> Any:
    """Return x.transpose(1, 2).contiguous() of a contiguous x of three dimensions; autograd does not see it."""
    n, rows, cols = x.shape
    return transposed(x.view(n * rows, cols), n).view(n, cols, rows)


def _by_launch(x: Any) -> bool:
    """Return whether gsbn's launch serves: for plain memory on a GPU, in a call that nobody else watches."""
    if not x.is_cuda or is_compiling() or is_watched():
        return False
    return x.is_contiguous() and x.numel() > 0 and is_memory(torch, x)


class _Transpose(Function):
    """One autograd node for x.transpose(1, 2).contiguous()."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return transpose(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        dy = dy.resolve_neg()
        return dy.transpose(1, 2) if goes_again(dy) or not _by_launch(dy) else transpose(dy)
