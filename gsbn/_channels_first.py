"""The forward and the backward of 1x1 convolutions in contiguous (N, C, L) tensors, for `gsbn.torch`.

Arrays are handed over as matrices of as many elements and the same memory: x as (N L, C), y, dy and the deviations as
(N L, O). An option, the length L, says that they are (N, C, L) and (N, O, L). All are contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import _plan
from ._backward import BACKWARD
from ._forward.operation import FORWARD, OPTIONS
from ._host.call import matrix_of, vector_codes
from ._host.run import Options, Views
from ._plan.problem import VECTOR_PARAMETERS

_GIVEN = len(OPTIONS) + 1  # those of `forward`, and the scale as a number; then the length


def _forward_program(views: Views, options: Options, gpu: Any, limits: Any, *_: Any) -> Any:
    training, momentum, eps, _, _, saves, sms, activation = options[:8]
    number, length = options[-2:]
    x, weight = views["x"], views["weight"]
    assert x is not None and weight is not None
    (m, k), n = x.shape, weight.shape[0]
    at = _plan.Matrix((k, 1), True)
    p = _plan.Matmul(m, n, k, x.dtype, gpu.at_most(sms), at, matrix_of(weight), at, limits)
    return _plan.plan_forward_channels_first(
        p,
        length,
        training=bool(training),
        momentum=momentum,
        eps=eps,
        saves=bool(saves),
        activation=activation,
        number=number,
        vectors=vector_codes(views),
        counts=views["num_batches_tracked"] is not None,
    )


def _backward_program(views: Views, options: Any, gpu: Any, limits: Any, *_: Any) -> Any:
    how, length = options
    dy, x, weight = views["dy"], views["x"], views["weight"]
    assert dy is not None
    (m, n), k = dy.shape, next((view.shape[1] for view in (x, weight) if view is not None), 1)
    given = dict(zip(VECTOR_PARAMETERS, how.dtypes, strict=True))
    at = _plan.Matrix((k, 1), True)
    w_at = at if weight is None else matrix_of(weight)
    p = _plan.Matmul(m, n, k, dy.dtype, gpu.at_most(how.sms), at, w_at, at, limits)
    return _plan.plan_backward_channels_first(
        p,
        length,
        needs=how.needs,
        dtypes={name: dtype for name, dtype in given.items() if dtype is not None},
        activation=how.activation,
        wide=how.wide,
        in_place=how.in_place,
    )


FORWARD_CHANNELS_FIRST = replace(
    FORWARD,
    name="forward_channels_first",
    check=lambda kind, arrays, options, *more: FORWARD.check(kind, arrays, options[:_GIVEN], *more),
    program=_forward_program,
    result=lambda kind, arrays, options, found, made: FORWARD.result(kind, arrays, options[:_GIVEN], found, made),
    extra=(),
)
BACKWARD_CHANNELS_FIRST = replace(
    BACKWARD,
    name="backward_channels_first",
    check=lambda kind, arrays, options, *more: BACKWARD.check(kind, arrays, options[0], *more),
    program=_backward_program,
    returns=lambda program, views, options: BACKWARD.returns(program, views, options[0]),
    within=lambda options, held: (BACKWARD.within(options[0], held), options[1]),
    before=None,
)
