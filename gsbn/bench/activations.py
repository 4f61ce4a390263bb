"""How an activation changes the error of its input; and the gradient with respect to that input."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._activations import activation_of
from .._plan.activations import name_and_number

# The largest |f′| and |f″|, rounded up; of the others they depend on the parameter
_STEEPEST = {"silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
_BENT = {"silu": 0.5, "gelu": 0.8, "gelu_tanh": 0.8}
OF_F, OF_SLOPE = 16, 32  # roundings in f, of |u| times the largest |f′|, and in f′, of the largest |f′|


def steepest(activation: Any) -> float:
    """The largest |f′|: by this factor at most the activation moves two numbers apart."""
    name, parameter = name_and_number(activation)
    return _STEEPEST.get(name, max(1.0, abs(parameter or 0.0)))


def bent(activation: Any) -> float:
    """The largest |f″| on one side of a jump of f′."""
    name, parameter = name_and_number(activation)
    return abs(parameter or 0.0) if name == "elu" else _BENT.get(name, 0.0)


@np.errstate(all="ignore")
def of_y(xp: Any, u: Any, error: Any, activation: Any, roundoff: float) -> tuple[Any, Any]:
    """y of an exact u, and how far y may be from it if u has this error."""
    if activation is None or activation == "relu":  # relu rounds nothing
        return (u if activation is None else xp.maximum(u, 0)), error
    f: Any = activation_of(activation)
    return f.of(u), steepest(activation) * (error + OF_F * roundoff * xp.abs(u))


@np.errstate(all="ignore")
def before(xp: Any, dy: Any, u: Any, above: Any, activation: Any) -> Any:
    """The gradient before the activation; `above` says of each element on which side of 0 its u was, exact or not."""
    if activation is None:
        return dy
    f: Any = activation_of(activation)
    name, _ = name_and_number(activation)
    if name in ("relu", "leaky_relu", "elu"):
        return xp.where(above, dy, f.gradient(dy, xp.minimum(u, 0)))
    return f.gradient(dy, u)


def of_before(xp: Any, dy: Any, of_u: Any, activation: Any, roundoff: float) -> Any:
    """How far it may be from `before` if u has the error `of_u`, beside a jump that `above` has decided."""
    if activation is None or activation == "relu":
        return 0.0 * of_u
    return xp.abs(dy) * (bent(activation) * of_u + OF_SLOPE * roundoff * steepest(activation))
