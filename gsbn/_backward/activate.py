"""The elementwise operations of a forward with a residual: y = f(u + residual), and the gradient before f."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _cpu, _plan
from .._arrays import check
from .._arrays.kinds import Kind, kinds_of
from .._host.call import matrix_of
from .._host.run import ANY, Arrays, Checked, Operation, Options, Views, call
from .._plan.program import Program
from .._saved import Saved, check_versions
from .._values import sms_within


def before_activation(dy: Any, saved: Saved, sms: int | None = None, limits: _plan.Limits = ANY) -> Any:
    """dy f'(v) as a new array: the gradient of the residual. v is the sum to which the activation was applied."""
    arrays = dy, saved.x, saved.weight, saved.kept
    return call(ACTIVATE_BACKWARD, arrays, (saved.activation, sms), limits=limits, context=saved)


def before_kept(dy: Any, kept: Any, activation: Any) -> Any:
    """`before_activation` from the array that autograd kept."""
    return call(ACTIVATE_BACKWARD, (dy, None, None, kept), (activation, None))


def add_and_activate(u: Any, residual: Any, activation: Any, *, keeps: bool) -> Any:
    """y = f(v) with v = u + residual, for a contiguous u. Afterwards u's memory holds v if `keeps`, else y; the result
    is then u itself."""
    return call(RESIDUAL, (u, residual), (activation, keeps, None))


# ---- y = f(u + residual)


def _views_of_sum(kind: Kind, arrays: Arrays, *_: Any) -> Views:
    kinds_of({"u": arrays[0], "residual": arrays[1]}, ("u", "residual"))
    return {"u": kind.view(arrays[0]), "residual": kind.view(arrays[1])}


def _program_of_sum(views: Views, options: Options, gpu: _plan.Device, limits: _plan.Limits, *_: Any) -> Program | None:
    activation, keeps, sms = options
    u, residual = views["u"], views["residual"]
    assert u is not None and residual is not None
    p = _elementwise(u, gpu.at_most(sms), limits)
    if p is None:
        return None
    return _plan.plan_residual(p, activation, matrix_of(residual), keeps=keeps)


def _sum_on_cpu(kind: Kind, arrays: Arrays, options: Options, *_: Any) -> Any:
    u, residual = map(kind.numpy, arrays)
    activation, keeps, _ = options
    _cpu.add(u, residual, u)
    y = np.empty_like(u) if keeps else u
    _cpu.activate(u, y, activation)
    return kind.from_numpy(y) if keeps else arrays[0]


def _within(options: Options, held: int) -> Options:
    """The options with `sms` limited to `held`."""
    return (*options[:-1], sms_within(options[-1], held))


def _elementwise(a: check.View, gpu: _plan.Device, limits: _plan.Limits) -> _plan.Matmul | None:
    """The matrix in the form that planners take; None if it has no rows."""
    (m, n), at = a.shape, matrix_of(a)
    return _plan.Matmul(m, n, 0, a.dtype, gpu, at, at, at, limits) if m else None


RESIDUAL = Operation(
    name="residual",
    arguments=("u", "residual"),
    required=("u", "residual"),
    foreign=0,
    check=_views_of_sum,
    program=_program_of_sum,
    result=lambda kind, arrays, options, found, made: made[0] if made else arrays[0],
    on_cpu=_sum_on_cpu,
    within=_within,
)


# ---- dv = dy f'(v)

ARRAYS = ("dy", "x", "weight", "kept")


def _views(kind: Kind, arrays: Arrays, options: Options, _: Any, saved: Saved | None) -> Views:
    named = dict(zip(ARRAYS, arrays, strict=True))
    given = {name: array for name, array in named.items() if array is not None}
    kinds_of(given, ("dy",) if saved is None else ("x", "dy"))
    views = {name: None if array is None else kind.view(array) for name, array in named.items()}
    dy, x, weight, kept = (views[name] for name in ARRAYS)
    assert dy is not None
    if x is not None and weight is not None:
        check.backward_arguments(dy, x, weight.shape[0])
    if kept is not None and (kept.shape, kept.dtype, kept.device) != (dy.shape, dy.dtype, dy.device):
        raise RuntimeError(
            f"saved kept: expected {dy.dtype} {dy.shape} on {dy.device}, as the forward kept it, got {kept.dtype} "
            f"{kept.shape} on {kept.device}: hooks on saved tensors must give back what they were given"
        )
    return views


def _program(views: Views, options: Options, gpu: _plan.Device, limits: _plan.Limits, *_: Any) -> Program | None:
    activation, sms = options
    dy, kept = views["dy"], views["kept"]
    assert dy is not None
    p = _elementwise(dy, gpu.at_most(sms), limits)
    if p is None:
        return None
    return _plan.plan_activate_backward(p, activation, None if kept is None else matrix_of(kept))


def _dv_of(kind: Kind, arrays: Arrays, options: Options, found: Checked | None, made: list[Any]) -> Any:
    dy = arrays[0]
    return kind.empty(tuple(dy.shape), dy) if found is None else made[0]


def _on_cpu(kind: Kind, arrays: Arrays, options: Options, read_only: frozenset[str], saved: Saved) -> Any:
    _views(kind, arrays, options, read_only, saved)
    check_versions(kind, saved)
    dy, kept = arrays[0], arrays[3]
    return kind.from_numpy(_cpu.before(kind.numpy(dy), None if kept is None else kind.numpy(kept), options[0]))


ACTIVATE_BACKWARD = Operation(
    name="activate_backward",
    arguments=ARRAYS,
    required=("dy",),
    foreign=1,
    aligned=(0, 0, 0),
    check=_views,
    program=_program,
    result=_dv_of,
    on_cpu=_on_cpu,
    within=_within,
    before=check_versions,
)
