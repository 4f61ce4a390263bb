"""Checks of arguments that are not arrays. An error names the argument, what was expected, and what it got."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np


def shown(value: Any) -> str:
    """A value as an error message shows it: short, without the elements of an array, and never raising an error."""
    if hasattr(value, "shape") and not isinstance(value, np.generic):  # printing would wait for the GPU
        return f"a {type_name(value)}"
    if isinstance(value, tuple) and any(hasattr(item, "shape") for item in value):
        return f"a tuple of {len(value)}"
    try:
        return f"{value!r:.80}"
    except Exception:  # such as an int of thousands of digits
        return f"a value of type {type(value).__name__} that cannot be printed"


def type_name(array: Any) -> str:
    """The name of the type of a value, with its module."""
    return f"{type(array).__module__}.{type(array).__qualname__}"


def no_cupy(expected: str) -> ImportError:
    """The error of a call that needs CuPy."""
    return ImportError(
        f"{expected}, got an environment without it: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]', whichever "
        "CUDA the driver has"
    )


def sm_count(value: Any) -> None:
    """Raise if it is not a number of SMs; None is allowed."""
    if value is None:
        return
    if not isinstance(value, numbers.Integral) or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"sms: expected a number of SMs or None, got {shown(value)}")
    if value < 1:
        raise ValueError(f"sms: expected at least 1, got {shown(value)}")


def ghost_count(value: Any, batch: int | None = None) -> None:
    """Raise if it is not a number of ghost batches, or does not divide the batch size."""
    if not isinstance(value, numbers.Integral) or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"groups: expected a whole number, got {shown(value)}")
    if value < 1:
        raise ValueError(f"groups: expected at least 1, got {shown(value)}")
    if batch is not None and batch % value:
        raise ValueError(f"groups: expected a divisor of the batch size {batch}, got {value}")


def next_count(count: int, momentum: float | None) -> int:
    """The count of batches after this one; raise if it would overflow int64 or, for an average, be below 1."""
    if count >= 2**63 - 1:
        raise ValueError(f"num_batches_tracked: expected a count below 2⁶³ − 1, got {count}")
    if momentum is None and count < 0:
        raise ValueError(f"num_batches_tracked: expected a count of at least 0 with momentum=None, got {count}")
    return count + 1


def raised_count(count: int, momentum: float | None, batches: int) -> int:
    """The count after so many batches; raise as `next_count`."""
    next_count(count, momentum)
    return next_count(count + int(batches) - 1, momentum)


def sms_within(value: Any, held: int) -> int:
    """The number of SMs of a call that asks for `value` where it has `held`; raises as `sm_count`."""
    sm_count(value)
    return held if value is None else min(value, held)


def timeout_seconds(value: Any) -> float:
    """The seconds as a float; raise if it is not a number above 0."""
    seconds = real_number("timeout", value, "a number of seconds")
    if seconds <= 0:
        raise ValueError(f"timeout: expected more than 0 s, got {shown(value)}")
    return seconds


def flag(name: str, value: Any) -> None:
    """Raise if it is not a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected a bool, got {shown(value)}")


def real_number(name: str, value: Any, expected: str) -> float:
    """The value as a float64; raise if it is not finite there."""
    if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected {expected}, got {shown(value)}")
    try:
        in_float64 = float(value)
    except OverflowError:
        in_float64 = math.inf
    if not math.isfinite(in_float64):
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")
    return in_float64


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise if it is not one of the allowed words."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {allowed}, got {shown(value)}")
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {allowed}, got {shown(value)}")
