"""The launch of its own that makes the gradient before an activation, which is that of a residual: dv = dy f'(v)."""

from __future__ import annotations

from typing import Any

from .. import _cpu, _plan
from .._arrays import check
from .._arrays.kinds import Kind
from .._host.call import elementwise, matrix_of
from .._host.run import ANY, Arrays, Checked, Operation, Options, Views, call, limited_at, views_of
from .._plan.program import Program
from .._saved import Saved, check_versions


def before_activation(dy: Any, saved: Saved, sms: int | None = None, limits: _plan.Limits = ANY) -> Any:
    """dy f'(v) as a new array: the gradient of the residual. v is the sum to which the activation was applied."""
    arrays = dy, saved.x, saved.weight, saved.kept
    return call(ACTIVATE_BACKWARD, arrays, (saved.activation, sms), limits=limits, context=saved)


def before_kept(dy: Any, kept: Any, activation: Any) -> Any:
    """`before_activation` from the array that autograd kept."""
    return call(ACTIVATE_BACKWARD, (dy, None, None, kept), (activation, None))


ARRAYS = ("dy", "x", "weight", "kept")


def _views(kind: Kind, arrays: Arrays, options: Options, _: Any, saved: Saved | None) -> Views:
    views = views_of(kind, ARRAYS, arrays, ("dy",) if saved is None else ("x", "dy"))
    dy, x, weight, kept = (views[name] for name in ARRAYS)
    assert dy is not None
    if x is not None and weight is not None:
        check.backward_arguments(dy, x, weight.shape[0])
    if kept is not None:
        check.kept("kept", kept, dy.shape, dy.dtype, dy)
    return views


def _program(views: Views, options: Options, gpu: _plan.Device, limits: _plan.Limits, *_: Any) -> Program | None:
    activation, sms = options
    dy, kept = views["dy"], views["kept"]
    assert dy is not None
    p = elementwise(dy, gpu.at_most(sms), limits)
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
    check=_views,
    program=_program,
    result=_dv_of,
    on_cpu=_on_cpu,
    within=limited_at(1),
    before=check_versions,
)
