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
    """Return x (N, C, ...) as a matrix whose rows have C adjacent features."""
    n, features, *sizes = x.shape
    if not _by_launch(x):
        return x.movedim(1, -1).reshape(n * prod(sizes), features)
    return _apply(x.view(n, features, prod(sizes))).view(n * prod(sizes), features)


def samples_of(rows: Any, n: int, sizes: Any) -> Any:
    """Return the matrix `rows_of` a tensor (N, C, *sizes) as such a tensor, which is contiguous."""
    features = rows.shape[1]
    if not _by_launch(rows):
        return rows.view(n, *sizes, features).movedim(-1, 1).contiguous()
    return _apply(rows.view(n, prod(sizes), features)).view(n, features, *sizes)


def _by_launch(x: Any) -> bool:
    """Return whether gsbn's launch serves: for plain memory on a GPU, in a call that nobody else watches."""
    if not x.is_cuda or not x.is_contiguous() or x.numel() == 0 or is_compiling() or is_watched():
        return False
    return is_memory(torch, x)


def _apply(x: Any) -> Any:
    if is_grad_enabled() and x.requires_grad:
        return super(Function, _Transpose).apply(x)  # as _apply_of in _function.py
    return _of(x)


def _of(x: Any) -> Any:
    n, rows, cols = x.shape
    return transposed(x.view(n * rows, cols), n).view(n, cols, rows)


class _Transpose(Function):
    """One autograd node for x.transpose(1, 2).contiguous()."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return _of(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        dy = dy.resolve_neg()
        if goes_again(dy) or not _by_launch(dy):
            return dy.transpose(1, 2)
        return _of(dy)
