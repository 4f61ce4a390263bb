"""The forward of 1x1 convolutions in contiguous (N, C, L) tensors, for `gsbn.torch`; `_backward` has the backward.

Arrays are passed as matrices that share their memory: x as (N L, C), and y, dy and the deviations as (N L, O). An
option, the length L, says that they really are (N, C, L) and (N, O, L). All are contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import _plan
from .._host.call import matrix_of, vector_codes
from .._host.run import Arrays, Options, Views, call
from .operation import FORWARD, OPTIONS

_GIVEN = len(OPTIONS) + 1  # the options of `forward` and the scale as a number; the length follows


def _program(views: Views, options: Options, gpu: Any, limits: Any, *_: Any) -> Any:
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


FORWARD_CHANNELS_FIRST = replace(
    FORWARD,
    name="forward_channels_first",
    check=lambda kind, arrays, options, *more: FORWARD.check(kind, arrays, options[:_GIVEN], *more),
    types=lambda options: FORWARD.types(options[:_GIVEN]),
    program=_program,
    result=lambda kind, arrays, options, found, made: FORWARD.result(kind, arrays, options[:_GIVEN], found, made),
    extra=(),
)


def forward_channels_first(arrays: Arrays, options: Options, length: int, number: float = 1.0) -> Any:
    """Compute as `forward_of` does, of samples of this length. `number` is the scale; that of `arrays` is None."""
    return call(FORWARD_CHANNELS_FIRST, arrays, (*options, number, length))
