"""fold: the inference forward as one Linear."""

from __future__ import annotations

from typing import Any, overload

from . import _check, _kernels, _plan, reference
from ._call import Call, matrix_of, vector_codes
from ._check import VECTORS
from ._copies import copied, move
from ._device import hold_until_done, is_capturing, on_device
from ._dynamo import outside_graphs
from ._interop import NUMBERS, kind_of, kinds_of
from ._prepared import Prepared
from ._typing import A, AnyArray, Array

__all__ = ["fold"]

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
    weight: Any,
    scale: Any,
    running_mean: Any,
    running_var: Any,
    *,
    bias: Any = None,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
) -> tuple[Any, Any]:
    """Fold scale and frozen batch normalisation into the linear layer: inference is then ``x wᵀ + b``.

    ::

        r = 1 / sqrt(running_var + eps)
        w = gamma r scale weight,   b = gamma r (scale bias - running_mean) + beta

    Parameters
    ----------
    weight : (O, I) array
        float32, float16, bfloat16 or float64, of any kind that `forward` takes.
    scale, running_mean, running_var, bias, gamma, beta : (O,) array
        As in `forward`: a scale may be None or a number, and the last three are optional.
    eps : float
        Added to the variance, >= 0.

    Returns
    -------
    w : (O, I) array
        The weight of that Linear: new, of weight's dtype and kind, computed in float64 and rounded once.
    b : (O,) array
        Its bias, likewise.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `forward`.
    """
    if isinstance(weight, Prepared):
        raise ValueError("weight: expected an array to fold, got a prepared weight: fold what it was prepared from")
    number = 1.0
    if isinstance(scale, NUMBERS):
        number, scale = scale, None  # type: ignore[assignment]
    given = (weight, scale, running_mean, running_var, bias, gamma, beta)
    kind, arrays, _ = kinds_of(dict(zip(ARRAYS, given, strict=True)), REQUIRED)
    views = {name: None if array is None else kind.view(array) for name, array in arrays.items()}
    _check.fold_arguments(views, eps=eps, number=number)
    if not kind.on_gpu:
        host = {name: None if array is None else kind.numpy(array) for name, array in arrays.items()}
        dtype = host["weight"].dtype  # type: ignore[union-attr]
        host["scale"] = number if host["scale"] is None else host["scale"]  # type: ignore[assignment]
        w, b = reference.fold(**host, eps=float(eps))  # type: ignore[arg-type]
        return kind.from_numpy(reference.round_to(w, dtype)), kind.from_numpy(reference.round_to(b, dtype))

    view = views["weight"]
    assert view is not None
    device, given_arrays = kind.device(arrays["weight"]), tuple(arrays[name] for name in ARRAYS)
    with on_device(device, kind.stream):
        at, call = matrix_of(view), Call(kind, device, ARRAYS)
        source = "weight"
        if at.strides[1] != 1:
            at = _plan.in_rows(view.shape[1], view.itemsize)
            copy = copied(call, "weight", view, at, arrays["weight"])
            move(call, [copy], _kernels.gpu(device))
            source = copy.to
        fields = {"k": view.shape[1], "ldw": at.strides[0], "eps": eps, "number": number, **vector_codes(views)}
        passed = {"w": source, "w_folded": call.make("w", view.shape, arrays["weight"])}
        passed |= {"b_folded": call.make("b", view.shape[:1], arrays["weight"]), **{name: name for name in VECTORS}}
        call.launch(_plan.fold(view.dtype), view.shape[0], fields, passed)
        stream = kind.stream(device)
        pointers = [0 if array is None else kind.pointer(array) for array in given_arrays]
        *_, folded, bias_folded = call.run(arrays["weight"], pointers, stream, is_capturing(stream))
    if kind_of(weight) is None:
        hold_until_done(arrays, device)
    return folded, bias_folded
