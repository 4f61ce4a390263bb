"""Gradients: what a backward returns."""

from __future__ import annotations

from typing import Any, Generic

from ._typing import A_co, NamedTuple


class _Gradients(NamedTuple, Generic[A_co]):
    x: A_co | Any  # Any, not None: users need not check the gradients that they asked for
    weight: A_co | Any
    bias: A_co | Any
    scale: A_co | Any
    gamma: A_co | Any
    beta: A_co | Any


class Gradients(_Gradients[A_co]):
    """The gradients of the forward: one new array per differentiable argument, None if not in `needs`.

    Attributes
    ----------
    x : (B, I) array or None
    weight : (O, I) array or None
    bias, gamma, beta : (O,) array or None
    scale : (O,) array or None
        For a scale of one element that serves all features, an array of its shape.
    residual : (B, O) array or None
        An attribute, and not in the tuple: without a residual there are six gradients.
    """

    residual: A_co | Any = None

    def __new__(
        cls, x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, residual: Any = None
    ) -> Gradients[A_co]:
        made = super().__new__(cls, x, weight, bias, scale, gamma, beta)
        made.residual = residual
        return made

    def __repr__(self) -> str:
        shown = super().__repr__()
        return shown if self.residual is None else f"{shown[:-1]}, residual={self.residual!r})"

    def __reduce__(self) -> Any:
        return Gradients, (*self, self.residual)

    def _replace(self, **fields: Any) -> Gradients[A_co]:
        made = super()._replace(**fields)
        made.residual = self.residual
        return made


NEEDS = (*Gradients._fields, "residual")  # the names of all gradients
