"""Check arguments before anything is launched or written. Errors name the argument. No library but NumPy is needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import numpy as np

from .._plan.activations import PARAMETERS
from .._plan.problem import INT32_MAX, VECTORS
from .._typing import ActivationName, Gemm, Precision
from .._values import choice, flag, ghost_count, real_number, shown, sm_count

DTYPES = ("float32", "float16", "bfloat16", "float64")
PRECISIONS: tuple[str, ...] = get_args(Precision)
GEMMS: tuple[str, ...] = get_args(Gemm)
ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)
WRITTEN = ("running_mean", "running_var", "num_batches_tracked", "out")


class View(NamedTuple):
    """The properties of an array that the checks use, the same for every library."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: str
    itemsize: int
    device: str
    writable: bool


def forward_arguments(views: Mapping[str, View | None], options: tuple[Any, ...], *, identity: bool = False) -> None:
    """Raise the errors of `gsbn.forward`; `views` maps every array argument to its view or None.

    The last option is the scale if it is not an array. The type of the group has been checked already. `identity` is
    True for `gsbn.linear`, which has no norm.
    """
    training, momentum, eps, precision, gemm, return_saved, sms, activation, group, renorm, groups, number = options
    x, weight = _matrices(views)
    batch, features = x.shape[0], weight.shape[0]
    _vectors(views, features, x.dtype)

    flag("training", training)
    flag("return_saved", return_saved)
    if not identity:
        _eps(eps, positive=bool(training))
    real_number("scale", number, "an array, a finite number or None")
    checked_activation(activation)
    if momentum is not None:
        real_number("momentum", momentum, "a finite number or None")
    _product_options(x, precision, gemm, sms)

    if group is not None and not training:
        raise ValueError("group: expected None in inference (training=False), whose statistics are given")

    mean, count = views["running_mean"], views["num_batches_tracked"]
    if mean is None and not training and not identity:
        raise ValueError(
            "running_mean: expected an array, got None: inference (training=False) needs the running statistics"
        )
    if count is not None:
        if count.dtype != "int64":
            raise TypeError(f"num_batches_tracked: expected dtype int64, got {count.dtype}")
        if math.prod(count.shape) != 1:
            raise ValueError(f"num_batches_tracked: expected one element, got shape {count.shape}")
        _device("num_batches_tracked", count, x)
        if mean is None:
            raise ValueError("num_batches_tracked: expected running_mean and running_var beside it, got None")
    elif momentum is None and training:
        raise ValueError(
            "num_batches_tracked: expected an int64 array, got None: momentum=None averages over its count"
        )
    if renorm is not None:
        _renorm(views, x, renorm.warmup)
    for name in ("residual", "out"):
        view = views[name]
        if view is None:
            continue
        if view.shape != (batch, features):
            raise ValueError(f"{name}: expected shape {(batch, features)}, got {view.shape}")
        if view.dtype != x.dtype:
            raise TypeError(f"{name}: expected x's dtype {x.dtype}, got {view.dtype}")
        _device(name, view, x)

    for name in written(views, training=bool(training)):
        view = views[name]
        assert view is not None
        _writable(name, view)
    overlaps(views, training=bool(training))
    _ghost_batches(groups, batch, features, group, renorm)
    if training and batch == 1 and group is None:
        raise ValueError(f"Expected more than 1 value per channel when training, got x of shape {x.shape}")


def matmul_arguments(views: Mapping[str, View | None], options: tuple[Any, ...]) -> None:
    """Raise the errors of `gsbn.matmul`."""
    precision, gemm, sms = options
    a, b = views["a"], views["b"]
    assert a is not None and b is not None
    _floating("a", a)
    if b.dtype != a.dtype:
        raise TypeError(f"b: expected a's dtype {a.dtype}, got {b.dtype}")
    for name, view in (("a", a), ("b", b)):
        if len(view.shape) != 2:
            raise ValueError(f"{name}: expected 2 dimensions, got shape {view.shape}")
    if a.shape[1] == 0:
        raise ValueError(f"a: expected at least one column, got shape {a.shape}")
    if b.shape[0] != a.shape[1]:
        raise ValueError(f"b: expected {a.shape[1]} rows to match a {a.shape}, got shape {b.shape}")
    _device("b", b, a, "a")
    _product_options(a, precision, gemm, sms)


def fold_arguments(views: Mapping[str, View | None], *, eps: Any, number: Any) -> None:
    """Raise the errors of `gsbn.fold`."""
    weight = views["weight"]
    assert weight is not None
    _floating("weight", weight)
    _matrix("weight", weight)
    _vectors(views, weight.shape[0], weight.dtype, like="weight")
    real_number("scale", number, "an array, a finite number or None")
    _eps(eps, positive=False)


def prepare_arguments(views: Mapping[str, View | None], *, precision: Any) -> None:
    """Raise the errors of `gsbn.prepare`."""
    weight = views["weight"]
    assert weight is not None
    _floating("weight", weight)
    _matrix("weight", weight)
    choice("precision", precision, PRECISIONS)


def backward_arguments(dy: View, x: View, features: int) -> None:
    """Raise the errors of `gsbn.backward` for dy."""
    if dy.dtype != x.dtype:
        raise TypeError(f"dy: expected x's dtype {x.dtype}, got {dy.dtype}")
    if dy.shape != (x.shape[0], features):
        raise ValueError(f"dy: expected shape {(x.shape[0], features)}, got {dy.shape}")
    _device("dy", dy, x)


def kept(name: str, view: View, shape: tuple[int, ...], dtype: str, like: View, *, pitched: bool = False) -> None:
    """Raise if an array that a forward kept is not as it was: hooks on saved tensors may return anything.

    A `pitched` matrix may have more columns.
    """
    fits = view.shape == shape or (pitched and view.shape[:1] == shape[:1] and view.shape[1:] >= shape[1:])
    if not fits or (view.dtype, view.device) != (dtype, like.device):
        raise RuntimeError(
            f"saved {name}: expected {dtype} {shape} on {like.device}, as the forward kept it, got {view.dtype} "
            f"{view.shape} on {view.device}: hooks on saved tensors must give back what they were given"
        )


_WITH_NUMBER = tuple(name for name, parameter in PARAMETERS.items() if parameter is not None)
_MOST = float(np.finfo(np.float32).max)


def checked_activation(value: Any) -> Any:
    """Return the activation as plans and caches know it, with its number as a float. Raise if it is no activation."""
    if value is None:
        return None
    if not isinstance(value, tuple):
        if callable(value):
            raise TypeError(f"activation: expected its name, one of {ACTIVATIONS}, got {shown(value)}")
        choice("activation", value, ACTIVATIONS)
        return value
    if len(value) != 2 or not isinstance(value[0], str) or value[0] not in _WITH_NUMBER:
        raise ValueError(
            f"activation: expected a name and its number, the name one of {_WITH_NUMBER}, got {shown(value)}"
        )
    name, number = value
    parameter = real_number("activation", number, f"a finite number beside {name!r}")
    if abs(parameter) > _MOST:
        raise ValueError(f"activation: expected a number that float32 can hold beside {name!r}, got {shown(number)}")
    return name, parameter + 0.0  # makes 0 of -0, which is equal to 0


def needs(names: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of `allowed` that are in `names`, in the order of `allowed`.

    Raise an error if `names` has anything else.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"needs: expected a collection of names among {allowed}, got {shown(names)}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"needs: expected names among {allowed}, got {shown(name)}")
        if name not in allowed:
            raise ValueError(f"needs: expected names among {allowed}, got {shown(name)}")
    return tuple(name for name in allowed if name in names)


def written(views: Mapping[str, View | None], *, training: bool) -> tuple[str, ...]:
    """Return the names of the arguments that the call writes."""
    names = WRITTEN if training else ("out",)
    return tuple(name for name in names if views.get(name) is not None)


def overlaps(views: Mapping[str, View | None], *, training: bool) -> None:
    """Raise if an array that the call writes shares memory with an element of another argument."""
    for name in written(views, training=training):
        target = views[name]
        assert target is not None
        for other, view in views.items():
            if view is not None and other != name and _share(target, view):
                raise ValueError(
                    f"{name}: expected memory of its own, got memory that {other} overlaps; {name} is written"
                )


def span(view: View) -> tuple[int, int]:
    """Return the array's first byte and the byte after its last, relative to its pointer; (0, 0) if it is empty."""
    if 0 in view.shape:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + view.itemsize


def _share(a: View, b: View) -> bool:
    (a_low, a_high), (b_low, b_high) = span(a), span(b)
    if a_low == a_high or b_low == b_high or a.device != b.device:
        return False
    if a.pointer + a_high <= b.pointer + b_low or b.pointer + b_high <= a.pointer + a_low:
        return False
    # Interleaved views (buf[0::2], buf[1::2]) have overlapping spans but no common element. NumPy solves this exactly,
    # without reading the memory.
    return np.shares_memory(_phantom(a), _phantom(b))


def _phantom(view: View) -> np.ndarray[Any, Any]:
    interface = {
        "version": 3,
        "shape": view.shape,
        "strides": view.strides,
        "typestr": f"|V{view.itemsize}",
        "data": (view.pointer, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _product_options(first: View, precision: Any, gemm: Any, sms: Any) -> None:
    """Raise the errors of the options that say how a product is computed; `first` is its first operand."""
    choice("precision", precision, PRECISIONS)
    choice("gemm", gemm, GEMMS)
    sm_count(sms)
    if first.device == "cpu" and gemm != "auto":
        raise ValueError(f"gemm: expected 'auto' for arrays on the CPU, got {gemm!r}")


def _matrices(views: Mapping[str, View | None]) -> tuple[View, View]:
    x, weight = views["x"], views["weight"]
    assert x is not None and weight is not None
    _floating("x", x)
    if weight.dtype != x.dtype:
        raise TypeError(f"weight: expected x's dtype {x.dtype}, got {weight.dtype}")
    if len(x.shape) != 2:
        raise ValueError(f"x: expected 2 dimensions (B, I), got shape {x.shape}")
    _matrix("weight", weight)
    if x.shape[1] == 0:
        raise ValueError(f"x: expected at least one input feature, got shape {x.shape}")
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight: expected shape (O, {x.shape[1]}) to match x {x.shape}, got {weight.shape}")
    _device("weight", weight, x)
    return x, weight


def _matrix(name: str, view: View) -> None:
    if len(view.shape) != 2:
        raise ValueError(f"{name}: expected 2 dimensions (O, I), got shape {view.shape}")
    if 0 in view.shape:
        raise ValueError(f"{name}: expected at least one output and one input feature, got shape {view.shape}")


def _vectors(views: Mapping[str, View | None], features: int, dtype: str, like: str = "x") -> None:
    owner = views[like]
    assert owner is not None
    allowed = ("float64",) if dtype == "float64" else tuple(dict.fromkeys((dtype, "float32")))
    for name in VECTORS:
        view = views[name]
        if view is None:
            continue
        if view.dtype not in allowed:
            raise TypeError(f"{name}: expected dtype {' or '.join(allowed)}, got {view.dtype}")
        if view.shape != (features,) and (name != "scale" or math.prod(view.shape) != 1):
            one = " or one element" if name == "scale" else ""
            raise ValueError(f"{name}: expected shape ({features},){one}, got {view.shape}")
        _device(name, view, owner, like)
    mean, var = views["running_mean"], views["running_var"]
    if (mean is None) != (var is None):
        missing, given = ("running_mean", "running_var") if mean is None else ("running_var", "running_mean")
        raise ValueError(f"{missing}: expected an array beside {given}, got None")
    if mean is not None and var is not None and mean.dtype != var.dtype:
        raise TypeError(f"running_var: expected running_mean's dtype {mean.dtype}, got {var.dtype}")


def _renorm(views: Mapping[str, View | None], x: View, warmup: int) -> None:
    """Raise if limits in an array, or other arguments that batch renormalisation needs, are wrong."""
    limits = views["renorm"]
    if limits is not None:
        if limits.dtype not in ("float32", "float64"):
            raise TypeError(f"renorm: expected dtype float32 or float64, got {limits.dtype}")
        if limits.shape != (2,):
            raise ValueError(f"renorm: expected r_max and d_max, an array of shape (2,), got shape {limits.shape}")
        _device("renorm", limits, x)
    if views["running_mean"] is None:
        raise ValueError("running_mean: expected an array with renorm, got None")
    if warmup and views["num_batches_tracked"] is None:
        raise ValueError("num_batches_tracked: expected an int64 array with renorm's warmup, got None")


def _ghost_batches(groups: Any, batch: int, features: int, group: Any, renorm: Any) -> None:
    """Raise if the batch cannot be cut into `groups` ghost batches."""
    ghost_count(groups)
    if groups == 1:
        return
    for name, given in (("group", group), ("renorm", renorm)):
        if given is not None:
            raise ValueError(f"groups: expected 1 with {name}, got {groups}")
    ghost_count(groups, batch)
    if batch == groups:
        raise ValueError(f"groups: expected at least 2 rows in each ghost batch, got {groups} of {batch} rows")
    if groups * (features + 8) > INT32_MAX:
        raise ValueError(f"groups: expected fewer than 2^31 features in all ghost batches, got {groups} x {features}")


def _floating(name: str, view: View) -> None:
    if view.dtype not in DTYPES:
        raise TypeError(f"{name}: expected dtype {', '.join(DTYPES)}, got {view.dtype}")


def _device(name: str, view: View, owner: View, like: str = "x") -> None:
    if view.device != owner.device:
        raise ValueError(f"{name}: expected {like}'s device {owner.device}, got {view.device}")


def _writable(name: str, view: View) -> None:
    if not view.writable:
        raise ValueError(f"{name}: expected writable memory, got a read-only array; it is written")
    if 0 in view.shape:
        return
    reach = view.itemsize  # bytes that the inner dimensions cover
    for stride, size in sorted((abs(n), size) for size, n in zip(view.shape, view.strides, strict=True) if size > 1):
        if stride < reach:
            raise ValueError(
                f"{name}: expected elements apart in memory, got a stride of {stride} bytes; it is written"
            )
        reach += stride * (size - 1)


def _eps(eps: Any, *, positive: bool) -> None:
    in_float64 = real_number("eps", eps, "a finite number")
    if in_float64 < 0 or (positive and in_float64 == 0):
        raise ValueError(f"eps: expected {'> 0 in training' if positive else '>= 0'}, got {shown(eps)}")
