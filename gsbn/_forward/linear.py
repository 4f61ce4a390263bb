"""linear: a layer without a norm, y = f(x wᵀ + bias), on the kernels of `forward`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

from .. import _cpu
from .._arrays.check import checked_activation
from .._arrays.dynamo import outside_graphs
from .._arrays.kinds import Kind
from .._host.run import Arrays, Checked, Options, Views, call, replaced
from .._plan.program import Program
from .._saved import Saved, saved_of, vectors_of
from .._typing import A, Activation, AnyArray, Array, Gemm, Precision
from .._values import flag
from .operation import FORWARD, OPTIONS, WHOLE_BATCH, forward_views, keeps_u, on_cpu, program_of, result_of


# For type checkers: return_saved is False; it is True; it is unknown, or x is another library's array.
@overload
def linear(
    x: Array[A], weight: AnyArray, bias: AnyArray | None = None, activation: Activation | None = None, *,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, out: AnyArray | None = None,
    return_saved: Literal[False] = False,
) -> A: ...  # fmt: skip
@overload
def linear(
    x: Array[A], weight: AnyArray, bias: AnyArray | None = None, activation: Activation | None = None, *,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, out: AnyArray | None = None,
    return_saved: Literal[True],
) -> tuple[A, Saved]: ...  # fmt: skip
@overload
def linear(
    x: AnyArray, weight: AnyArray, bias: AnyArray | None = None, activation: Activation | None = None, *,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, out: AnyArray | None = None,
    return_saved: bool = False,
) -> Any: ...  # fmt: skip
@outside_graphs
def linear(
    x: Array[Any] | AnyArray,
    weight: AnyArray,
    bias: AnyArray | None = None,
    activation: Activation | None = None,
    *,
    precision: Precision = "highest",
    gemm: Gemm = "auto",
    sms: int | None = None,
    out: AnyArray | None = None,
    return_saved: bool = False,
) -> Any:
    """Compute ``activation(x @ weight.T + bias)``: a linear layer without a norm, such as the last one of a head.

    In float32 on Hopper the product runs on the tensor cores, as three products of float16 numbers, with a smaller
    norm-wise error than an IEEE float32 product. `gsbn.backward` computes the gradients.

    Parameters
    ----------
    x : (B, I) array
        float32, float16, bfloat16 or float64, of NumPy, CuPy, PyTorch or another DLPack producer; any strides.
    weight : (O, I) array
        x's dtype, library and device, any strides.
    bias : (O,) array, optional
        x's dtype or float32; float64 for float64.
    activation, precision, gemm, sms, out
        As in `gsbn.forward`.
    return_saved : bool
        Also return what `gsbn.backward` needs.

    Returns
    -------
    y : (B, O) array
        x's dtype and library; `out` itself if given.
    saved : Saved
        With `return_saved`: x and weight themselves; with an activation also y itself, if the gradient follows from y
        ("relu", and "leaky_relu" with a slope of at least 0), else ``u = x weightᵀ + bias`` in x's dtype; y is then
        computed from u, as in PyTorch. None of these arrays may change before the backward.

    Raises
    ------
    TypeError, ValueError, RuntimeError, ImportError
        As `gsbn.forward`, for the arguments that both have.

    Examples
    --------
    >>> import numpy as np
    >>> import gsbn
    >>> x, weight, bias = np.ones((4, 3), "f4"), np.ones((2, 3), "f4"), np.array([0, -4], "f4")
    >>> y, saved = gsbn.linear(x, weight, bias, "relu", return_saved=True)
    >>> y[0].tolist()
    [3.0, 0.0]
    >>> gsbn.backward(np.ones_like(y), saved).bias.tolist()
    [4.0, 0.0]
    """
    flag("return_saved", return_saved)
    arrays = (x, weight, None, bias, None, None, None, None, None, None, None, out)
    activation = checked_activation(activation)
    # OPTIONS: inference, a momentum that is not used, eps 0, ...; then 1 for the scale
    options = (False, 0.1, 0.0, precision, gemm, return_saved, sms, activation, *WHOLE_BATCH, 1.0)
    return call(LINEAR, arrays, options, own=("out",))


def _unsaved(options: Options) -> Options:
    """The options of a forward that saves nothing, because the backward needs only x, the weight, and y or u."""
    return replaced(options, _SAVES, False)


def _with_saved(kind: Kind, arrays: Arrays, options: Options, y: Any, u: Any = None) -> Any:
    """y, or (y, saved)."""
    if not options[_SAVES]:
        return y
    kept = None if options[_ACTIVATION] is None else y if u is None else u
    return y, saved_of(kind, arrays, options, kept, None, vectors_of(kind, arrays))


def _program(views: Views, options: Options, *more: Any) -> Program | None:
    return program_of(views, _unsaved(options), *more, keeps=keeps_u(options))


def _result(kind: Kind, arrays: Arrays, options: Options, found: Checked | None, made: list[Any]) -> Any:
    y = result_of(kind, arrays, _unsaved(options), found, made)
    at = None if found is None else found.returns[1]
    return _with_saved(kind, arrays, options, y, None if at is None else made[at])


def _on_cpu(kind: Kind, arrays: Arrays, options: Options, *more: Any) -> Any:
    if not keeps_u(options):
        y = on_cpu(kind, arrays, _unsaved(options), *more, operation=LINEAR)
        return _with_saved(kind, arrays, options, y)
    plain = replaced(_unsaved(options), _ACTIVATION, None)
    y = on_cpu(kind, arrays, plain, *more, operation=LINEAR)
    u = kind.numpy(y).copy()
    _cpu.activate(u, kind.numpy(y), options[_ACTIVATION])
    return _with_saved(kind, arrays, options, y, kind.from_numpy(u))


_SAVES, _ACTIVATION = map(OPTIONS.index, ("return_saved", "activation"))
# `linear` is an inference without running statistics: they count as 0 and 1, and eps is 0.
LINEAR = replace(
    FORWARD,
    name="linear",
    check=partial(forward_views, identity=True),
    program=_program,
    returns=lambda program, views, options: (program.made("y"), program.made("u"), None),
    result=_result,
    on_cpu=_on_cpu,
    extra=(),
)
