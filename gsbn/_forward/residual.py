"""The launch of its own that adds a residual: y = f(u + residual)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _cpu, _plan
from .._arrays.kinds import Kind
from .._host.call import elementwise, matrix_of
from .._host.run import Arrays, Operation, Options, Views, call, limited_at, views_of
from .._plan.program import Program

ARRAYS = ("u", "residual")


def add_and_activate(u: Any, residual: Any, activation: Any, *, keeps: bool) -> Any:
    """y = f(v) with v = u + residual, for a contiguous u. Afterwards u's memory holds v if `keeps`, else y; the result
    is then u itself."""
    return call(RESIDUAL, (u, residual), (activation, keeps, None))


def _views(kind: Kind, arrays: Arrays, *_: Any) -> Views:
    return views_of(kind, ARRAYS, arrays, ARRAYS)


def _program(views: Views, options: Options, gpu: _plan.Device, limits: _plan.Limits, *_: Any) -> Program | None:
    activation, keeps, sms = options
    u, residual = views["u"], views["residual"]
    assert u is not None and residual is not None
    p = elementwise(u, gpu.at_most(sms), limits)
    if p is None:
        return None
    return _plan.plan_residual(p, activation, matrix_of(residual), keeps=keeps)


def _on_cpu(kind: Kind, arrays: Arrays, options: Options, *_: Any) -> Any:
    u, residual = map(kind.numpy, arrays)
    activation, keeps, _ = options
    _cpu.add(u, residual, u)
    y = np.empty_like(u) if keeps else u
    _cpu.activate(u, y, activation)
    return kind.from_numpy(y) if keeps else arrays[0]


RESIDUAL = Operation(
    name="residual",
    arguments=ARRAYS,
    required=ARRAYS,
    foreign=0,
    check=_views,
    program=_program,
    result=lambda kind, arrays, options, found, made: made[0] if made else arrays[0],
    on_cpu=_on_cpu,
    within=limited_at(2),
)
