"""fold: the inference forward as one linear layer."""

from __future__ import annotations

from typing import Any, overload

from . import _plan, reference
from ._arrays import check
from ._arrays.dynamo import outside_graphs
from ._arrays.kinds import NUMBERS, Kind
from ._host.call import matrix_of, vector_codes
from ._host.run import Arrays, Operation, Options, Views, call, views_of
from ._plan.problem import VECTORS
from ._plan.program import Builder, Program
from ._prepared import Prepared
from ._typing import A, AnyArray, Array

ARRAYS = ("weight", "scale", "running_mean", "running_var", "bias", "gamma", "beta")
REQUIRED = ("weight", "running_mean", "running_var")


@overload
def fold(
    weight: Array[A], scale: AnyArray | float | None, running_mean: AnyArray, running_var: AnyArray, *,
    bias: AnyArray | None = None, gamma: AnyArray | None = None, beta: AnyArray | None = None, eps: float = 1e-5,
) -> tuple[A, A]: ...  # fmt: skip
@overload
def fold(
    weight: AnyArray, scale: AnyArray | float | None, running_mean: AnyArray, running_var: AnyArray, *,
    bias: AnyArray | None = None, gamma: AnyArray | None = None, beta: AnyArray | None = None, eps: float = 1e-5,
) -> tuple[Any, Any]: ...  # fmt: skip
@outside_graphs
def fold(
    weight: Array[Any] | AnyArray,
    scale: AnyArray | float | None,
    running_mean: AnyArray,
    running_var: AnyArray,
    *,
    bias: AnyArray | None = None,
    gamma: AnyArray | None = None,
    beta: AnyArray | None = None,
    eps: float = 1e-5,
) -> tuple[Any, Any]:
    """Fold the scale and the batch normalisation of inference into the linear layer, which is then ``x wᵀ + b``.

    ::

        r = 1 / sqrt(running_var + eps)
        w = gamma r scale weight,   b = gamma r (scale bias - running_mean) + beta

    These are the formulas of inference in `forward`, multiplied out.

    Parameters
    ----------
    weight : (O, I) array
        float32, float16, bfloat16 or float64; any array that `forward` takes.
    scale, running_mean, running_var, bias, gamma, beta : (O,) array
        As in `forward`. The scale may be None or a number; the last three are optional.
    eps : float
        Added to the variance, >= 0.

    Returns
    -------
    w : (O, I) array
        The weight of the linear layer: a new array of weight's dtype and library, computed in float64 and rounded once.
    b : (O,) array
        Its bias, computed in the same way.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `forward`; ValueError also for a weight that is prepared.

    Examples
    --------
    >>> import numpy as np
    >>> import gsbn
    >>> x, weight, mean, var = np.eye(8, 4), np.ones((2, 4)), np.array([1.0, 2.0]), np.array([4.0, 9.0])
    >>> w, b = gsbn.fold(weight, 0.5, mean, var)
    >>> np.allclose(x @ w.T + b, gsbn.forward(x, weight, 0.5, running_mean=mean, running_var=var))
    True
    """
    if isinstance(weight, Prepared):
        raise ValueError("weight: expected an array to fold, got a prepared weight: fold what it was prepared from")
    number = 1.0
    if isinstance(scale, NUMBERS):
        number, scale = scale, None
    given = (weight, scale, running_mean, running_var, bias, gamma, beta)
    return call(FOLD, given, (eps, number))  # type: ignore[no-any-return]


def _views(kind: Kind, arrays: Arrays, options: Options, *_: Any) -> Views:
    eps, number = options
    views = views_of(kind, ARRAYS, arrays, REQUIRED)
    check.fold_arguments(views, eps=eps, number=number)
    return views


def _program(views: Views, options: Options, gpu: _plan.Device, *_: Any) -> Program:
    eps, number = options
    view = views["weight"]
    assert view is not None
    (rows, columns), build, given = view.shape, Builder(gpu), matrix_of(view)
    at = given if given.strides[1] == 1 else _plan.in_rows(columns, view.itemsize)
    source = build.operand("weight", (rows, columns), given, at, view.dtype)
    build.copy()
    fields = {"k": columns, "ldw": at.strides[0], "eps": eps, "number": number, **vector_codes(views)}
    passed = {"w": source, "w_folded": build.make("w", (rows, columns), view.dtype)}
    passed |= {"b_folded": build.make("b", (rows,), view.dtype), **{name: name for name in VECTORS}}
    build.launch(_plan.fold(view.dtype), rows, fields, passed)
    return build.program("fold", "")


def _on_cpu(kind: Kind, arrays: Arrays, options: Options, *_: Any) -> tuple[Any, Any]:
    _views(kind, arrays, options)
    eps, number = options
    host: dict[str, Any] = {
        name: None if array is None else kind.numpy(array) for name, array in zip(ARRAYS, arrays, strict=True)
    }
    dtype = host["weight"].dtype
    host["scale"] = number if host["scale"] is None else host["scale"]
    w, b = reference.fold(**host, eps=float(eps))
    return kind.from_numpy(reference.round_to(w, dtype)), kind.from_numpy(reference.round_to(b, dtype))


FOLD = Operation(
    name="fold",
    arguments=ARRAYS,
    required=REQUIRED,
    foreign=len(ARRAYS),
    types=lambda options: tuple(map(type, options)),
    check=_views,
    program=_program,
    result=lambda kind, arrays, options, found, made: (made[-2], made[-1]),
    on_cpu=_on_cpu,
)
