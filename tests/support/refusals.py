"""Calls with every argument. A wrong one is refused: the error names it, and no byte changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.support.harness import DTYPES, Kind
from tests.support.strategies import Case

B, I, O = 6, 5, 4
VECTORS = ("scale", "bias", "gamma", "beta", "running_mean", "running_var")
Call = dict[str, Any]


def arguments(kind: Kind, dtype: str = "float32", *, rows: int = B, **changes: Any) -> Call:
    """A training call with every argument, valid except for ``changes``."""
    arrays = Case((rows, I, O), dtype, training=True).arrays()
    return {**{name: kind.put(a) for name, a in arrays.items()}, "training": True, **changes}


def fold_arguments(kind: Kind, **changes: Any) -> Call:
    call = arguments(kind)
    for name in ("x", "num_batches_tracked", "out", "training"):
        del call[name]
    return {**call, **changes}


def refuses(
    kind: Kind, call: Call, error: type[Exception], message: str, function: Callable[..., Any] = gsbn.forward
) -> None:
    """``function`` raises ``error`` with ``message``, and changes no byte of any array."""
    array_type = type(kind.put(np.zeros(1)))
    arrays = {name: a for name, a in call.items() if isinstance(a, array_type)}
    before = {name: kind.get(a).tobytes() for name, a in arrays.items()}
    with pytest.raises(error, match=message):
        function(**call)
    assert {name: kind.get(a).tobytes() for name, a in arrays.items()} == before


def about(name: str) -> str:
    """A pattern for messages about an argument."""
    return rf"^({name}): expected .+, got .+"


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, DTYPES.get(dtype) or dtype)


SHAPES = {
    "x": ((B, I), "float32"),
    "weight": ((O, I), "float32"),
    **dict.fromkeys(VECTORS, ((O,), "float32")),
    "num_batches_tracked": ((1,), "int64"),
    "out": ((B, O), "float32"),
}


def stretch(kind: Kind, a: Any, shape: tuple[int, ...]) -> Any:
    """``a`` repeated along new or longer dimensions by strides of 0, writable if the library allows it."""
    if kind.is_torch:
        return a.expand(shape)
    if kind.name == "numpy":
        strides = np.broadcast_to(a, shape).strides
        return np.lib.stride_tricks.as_strided(a, shape, strides, writeable=True)
    import cupy

    return cupy.broadcast_to(a, shape)
