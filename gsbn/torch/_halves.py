"""Call gsbn's backward on the arrays that autograd kept: the whole of it, or one of its two halves."""

from __future__ import annotations

from typing import Any

from .._backward import How, backward_of
from .._backward import run as backward_run
from ._autograd import kind_of_tensor
from ._shared import SharedGradient


def gradients(how: How, dy: Any, x: Any, weight: Any, deviations: Any, vectors: Any, kept: Any) -> Any:
    """Return all gradients, that of the residual last."""
    if not dy.is_cuda:  # where no residual is a part of the call
        return *backward_of(dy, how.saved(x, weight, deviations, vectors), how.needs), None
    return backward_run(kind_of_tensor(dy), (dy, x, weight, deviations, vectors, kept), how)[0]


def gradients_but_of_weight(how: How, dy: Any, weight: Any, deviations: Any, vectors: Any, kept: Any) -> Any:
    """Return dx, dg and the gradients of bias, scale, gamma, beta and the residual."""
    needs_x, others = how.needs[0] == "x", tuple(name for name in how.needs if name not in ("x", "weight"))
    how = how._replace(needs=("x", *others))
    if needs_x and how.in_place:
        dx, _, *found = gradients(how, dy, None, weight, deviations, vectors, kept)
        return dx, deviations[:, : dy.shape[1]], *found
    dg, *found = before_norm(how._replace(linear=False), dy, deviations, vectors, kept)
    dx = products(second_half(how, ("x",)), dg, None, weight)[0] if needs_x else None
    return dx, dg, *found


def gradient_of_weight(how: How, shared: SharedGradient | None, dg: Any, x: Any) -> Any:
    """Return what a node returns as the gradient of the weight: it, or what stands for it if several calls share it."""
    if shared is not None and shared.several:
        return shared.leave(dg, x)
    return products(second_half(how, ("weight",)), dg, x, None)[1]


def before_norm(how: How, dy: Any, deviations: Any, vectors: Any, kept: Any) -> Any:
    """Return dg and the gradients of bias, scale, gamma, beta and the residual."""
    (_, _, *others), made = backward_run(kind_of_tensor(dy), (dy, None, None, deviations, vectors, kept), how)
    dg = None
    if how.needs[:1] == ("x",):
        dg = deviations if how.in_place and len(dy) else made[-1]
        if dg.shape[1] != dy.shape[1]:
            dg = dg[:, : dy.shape[1]]
    return [dg, *others]


def second_half(how: How, needs: tuple[str, ...]) -> How:
    """Return `how` for the half that computes dx and dweight, or what `needs` names of them, from dg.

    Ranks meet in the first half alone.
    """
    return how._replace(needs=needs, norm=False, group=None, residual_activation=None)


def products(how: How, dg: Any, x: Any, weight: Any) -> Any:
    """Return dx and dweight."""
    return backward_run(kind_of_tensor(dg), (dg, x, weight, None, None, None), how)[0][:2]
