"""The launch of its own that transposes matrices: for tensors (N, C, L) that no kernel takes where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _plan
from .._arrays.kinds import Kind
from .._host.call import elementwise
from .._host.run import Arrays, Operation, Options, Views, call, limited_at, views_of
from .._plan.program import Program

ARRAYS = ("x",)


def transposed(x: Any, matrices: int, dtype: str | None = None) -> Any:
    """The transposes of so many matrices (rows, cols), one below the other: x is (matrices * rows, cols), contiguous,
    of any dtype of gsbn, and the result a new (matrices * cols, rows) array of x's dtype or, on a GPU, of `dtype`; one
    of the two is then float32, and the other a 16-bit dtype."""
    return call(TRANSPOSE, (x,), (matrices, None, dtype))


def _views(kind: Kind, arrays: Arrays, *_: Any) -> Views:
    return views_of(kind, ARRAYS, arrays, ARRAYS)


def _program(views: Views, options: Options, gpu: _plan.Device, limits: _plan.Limits, *_: Any) -> Program | None:
    matrices, sms, dtype = options
    x = views["x"]
    assert x is not None
    p = elementwise(x, gpu.at_most(sms), limits)
    return None if p is None else _plan.plan_transpose(p, matrices, dtype or x.dtype)


def _on_cpu(kind: Kind, arrays: Arrays, options: Options, *_: Any) -> Any:
    x, matrices = kind.numpy(arrays[0]), options[0]
    rows, cols = len(x) // matrices, x.shape[1]
    turned = x.reshape(matrices, rows, cols).transpose(0, 2, 1)
    return kind.from_numpy(np.array(turned, order="C").reshape(matrices * cols, rows))


TRANSPOSE = Operation(
    name="transpose",
    arguments=ARRAYS,
    required=ARRAYS,
    foreign=0,
    check=_views,
    program=_program,
    result=lambda kind, arrays, options, found, made: made[0],
    on_cpu=_on_cpu,
    within=limited_at(1),
)
