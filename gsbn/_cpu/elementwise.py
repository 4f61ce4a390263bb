"""The elementwise passes, which are separate launches on a GPU: y = f(u), v = u + residual, the gradient before f."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .._activations import activation_of
from .._plan import FEW_ROWS
from .passes import BLOCK, rounded

Array = Any


@np.errstate(all="ignore")
def activate(u: Array, y: Array, activation: Any) -> None:
    """y = f(u), both (B, O) and of one dtype; y may be u. Without an activation f(u) is u."""
    f = activation_of(activation)
    for block, wide in _blocks(y) if f is not None or y is not u else ():
        y[block] = u[block] if f is None else rounded(f.of(u[block].astype(wide)), y.dtype)


@np.errstate(all="ignore")
def add(u: Array, residual: Array, v: Array) -> None:
    """v = u + residual, all (B, O) and of one dtype; v may be u."""
    for block, wide in _blocks(v):
        v[block] = rounded(np.add(u[block], residual[block], dtype=wide), v.dtype)


@np.errstate(all="ignore")
def before(dy: Array, v: Array | None, activation: Any) -> Array:
    """A new dv = dy f'(v), rounded to dy's dtype; `v` may be y if f'(v) follows from y. Without f dv = dy."""
    dv, f = np.empty(dy.shape, dy.dtype), activation_of(activation)
    for block, wide in _blocks(dy):
        dv[block] = dy[block] if f is None or v is None else _gradient(f, dy[block], v[block], wide)
    return dv


def _gradient(f: Any, dy: Array, v: Array, wide: Any) -> Array:
    return rounded(np.asarray(f.gradient(dy.astype(wide), v.astype(wide))), dy.dtype)


def _blocks(a: Array) -> Iterator[tuple[slice, Any]]:
    """Yield blocks of rows that stay in the cache, each with the dtype of the computation."""
    rows, features = a.shape
    wide = np.dtype(np.float64 if a.dtype == np.float64 or rows <= FEW_ROWS else np.float32)
    step = max(BLOCK // features, 1)
    for start in range(0, rows, step):
        yield slice(start, start + step), wide
