"""The activations in NumPy: their formulas, for `gsbn.reference` and the path on the CPU.

    relu        max(u, 0), NaN passes
    leaky_relu  u where u > 0, else slope u
    silu        u σ(u),  σ(u) = 1 / (1 + exp(−u))
    gelu        u Φ(u),  Φ(u) = erfc(−u / √2) / 2
    gelu_tanh   u σ(2 √(2/π) (u + 0.044715 u³)), which is u (1 + tanh(√(2/π) (u + …))) / 2
    elu         u where u > 0, else alpha (exp(u) − 1)

These forms lose no digits to cancellation for u far below zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._plan.activations import name_and_number

Array = NDArray[Any]


class Activation(NamedTuple):
    """An activation, ``y = f(u)``, and its gradient.

    Attributes
    ----------
    of : callable
        ``of(u, out=None)`` is ``f(u)``, elementwise; ``out`` may be ``u`` itself.
    gradient : callable
        ``gradient(dy, u, zero=0.0)`` is ``f′(u) dy``, a new array. If ``y`` has a narrower dtype than ``u``, ``zero``
        is the largest ``u`` that it rounds to 0; a derivative that jumps at 0 then jumps at ``zero``, and agrees with
        this ``y``.
    """

    of: Callable[..., Array]
    gradient: Callable[..., Array]


def activation_of(activation: Any) -> Activation | None:
    """The formulas of an activation, a name or a name and its parameter; None for None."""
    if activation is None:
        return None
    name, parameter = name_and_number(activation)
    of, derivative = _FORMULAS[name]
    given = {} if parameter is None else {"parameter": parameter}
    return Activation(partial(of, **given), partial(derivative, **given))


@cache
def largest_zero(wide: Any, narrow: Any) -> float:
    """`zero` of a gradient: the largest number of the wide dtype that the narrow dtype rounds to zero."""
    word = f"i{wide.itemsize}"
    zero, more = 0, int(np.ones((), wide).view(word))  # positive floats are ordered as their bits
    while more - zero > 1:
        middle = (zero + more) // 2
        rounded = np.array(middle, word).view(wide).astype(narrow)
        zero, more = (zero, middle) if rounded else (middle, more)
    return float(np.array(zero, word).view(wide))


def _relu(u: Array, out: Array | None = None) -> Any:
    return np.maximum(u, 0, out=out)


def _relu_gradient(dy: Array, u: Array, zero: float = 0.0) -> Any:
    passes = ~(u <= zero)  # NaN passes
    # The product takes a tenth of the time of np.where, which branches for every element; but 0 · ∞ is NaN.
    return dy * passes if np.isfinite(dy).all() else np.where(passes, dy, 0)


def _leaky_relu(u: Array, out: Array | None = None, *, parameter: float) -> Any:
    return np.multiply(u, np.where(u > 0, u.dtype.type(1), u.dtype.type(parameter)), out=out)


def _leaky_relu_gradient(dy: Array, u: Array, zero: float = 0.0, *, parameter: float) -> Any:
    return dy * np.where(u > zero, u.dtype.type(1), u.dtype.type(parameter))


def _elu(u: Array, out: Array | None = None, *, parameter: float) -> Any:
    below = np.expm1(np.minimum(u, 0)) * u.dtype.type(parameter)
    return _into(out, np.where(u > 0, u, below))


def _elu_gradient(dy: Array, u: Array, zero: float = 0.0, *, parameter: float) -> Any:
    below = np.exp(np.minimum(u, 0)) * u.dtype.type(parameter)
    return dy * np.where(u > zero, u.dtype.type(1), below)


def _silu(u: Array, out: Array | None = None) -> Any:
    return np.divide(u, 1 + np.exp(-u), out=out)


def _silu_gradient(dy: Array, u: Array, zero: float = 0.0) -> Any:
    s = 1 / (1 + np.exp(-u))
    return dy * (s * (1 + u * (1 - s)))


def _gelu(u: Array, out: Array | None = None) -> Any:
    return np.multiply(u, _phi(u), out=out)


def _gelu_gradient(dy: Array, u: Array, zero: float = 0.0) -> Any:
    density = np.exp(u * u * -0.5) * u.dtype.type(1 / math.sqrt(2 * math.pi))
    return dy * (_phi(u) + u * density)


def _gelu_tanh(u: Array, out: Array | None = None) -> Any:
    return np.divide(u, 1 + np.exp(-_twice_v(u)), out=out)


def _gelu_tanh_gradient(dy: Array, u: Array, zero: float = 0.0) -> Any:
    s = 1 / (1 + np.exp(-_twice_v(u)))
    return dy * (s + u * (s * (1 - s)) * (_slope(u) * (1 + 3 * 0.044715 * u * u)))


def _twice_v(u: Array) -> Any:
    return _slope(u) * u * (1 + 0.044715 * u * u)


def _slope(u: Array) -> Any:
    """2 √(2/π) in u's dtype."""
    return 2 * np.sqrt(2 / (4 * np.arctan(u.dtype.type(1))))


def _into(out: Array | None, made: Array) -> Any:
    if out is None:
        return made
    out[...] = made
    return out


def _phi(u: Array) -> Any:
    """erfc(−u / √2) / 2 in u's dtype, computed in float64 at least."""
    wide = np.promote_types(u.dtype, np.float64).type
    found = _erfc(np.abs(u.astype(wide, copy=False)) * np.sqrt(wide(0.5)), *_RULES[u.itemsize == 4]) / 2
    return np.where(u > 0, 1 - found, found).astype(u.dtype, copy=False)


# The step h of `_erfc`, whose relative error is exp(−π² / h²), and its terms: until exp(−(h n)²) is as small. For a
# result of float64 or more 3e-31 and 2e-22, for one of float32 1e-11 and 1e-10.
_RULES = (0.375, 19), (0.625, 8)


def _erfc(x: Array, step: float, terms: int) -> Any:
    """erfc(x) for x ≥ 0: the midpoint rule for its integral (2 x / π) exp(−x²) ∫₀^∞ exp(−t²) / (x² + t²) dt, and the
    residue of the pole at t = i x, as long as that lies below i π / step. All terms are positive, so nothing cancels.

    Source: Chiarella and Reichel 1968; Hunter and Regan 1972.
    """
    square, real = x * x, x.dtype.type
    pi, total, term = 4 * np.arctan(real(1)), np.zeros_like(x), np.empty_like(x)
    for n in range(terms):
        t = real((n + 0.5) * step)
        np.add(square, t * t, out=term)
        np.divide(np.exp(-t * t), term, out=term)
        total += term
    np.exp(np.negative(square, out=square), out=term)
    total *= np.multiply(term, x, out=term)
    total *= 2 * step / pi
    np.exp(np.multiply(x, 2 * pi / step, out=term), out=term)
    total += np.where(x < pi / step, 2 / (1 + term), 0)
    return np.where(np.isinf(x), 0, total)


_FORMULAS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "relu": (_relu, _relu_gradient),
    "leaky_relu": (_leaky_relu, _leaky_relu_gradient),
    "silu": (_silu, _silu_gradient),
    "gelu": (_gelu, _gelu_gradient),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_gradient),
    "elu": (_elu, _elu_gradient),
}
