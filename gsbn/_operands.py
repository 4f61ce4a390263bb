"""The arguments of `gsbn.reference` in the dtype of its computation; errors name the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ._renorm import OFF, ratio_and_shift, renorm_of

Array = NDArray[Any]


def matrix_of(name: str, a: ArrayLike, dtype: DTypeLike, columns: int | None = None) -> Array:
    """``a`` in ``dtype`` and C order, so that the bits of the GEMM do not depend on strides."""
    matrix = np.ascontiguousarray(a, dtype)
    if matrix.ndim != 2 or columns not in (None, matrix.shape[1]):
        expected = "(rows, columns)" if columns is None else f"(rows, {columns})"
        raise ValueError(f"{name}: expected shape {expected}, got {matrix.shape}")
    return matrix


def vector_of(name: str, a: ArrayLike, dtype: DTypeLike, features: int) -> Array:
    """A copy of ``a`` in ``dtype``."""
    vector: Array = np.array(a, dtype)
    if vector.shape != (features,):
        raise ValueError(f"{name}: expected shape ({features},), got {vector.shape}")
    return vector


def correction_of(
    renorm: Any,
    batches: int | None,
    mean: Array,
    sigma: Array,
    old_mean: Array | None,
    old_var: Array | None,
    eps: float,
) -> tuple[Any, Any]:
    """ρ and δ of `gsbn.reference`, which are r and d of `Renorm`; `batches`: the count before this batch."""
    if renorm is None:
        return 1, 0
    if old_mean is None or old_var is None:
        raise ValueError("running_mean: expected the running statistics with renorm, got None")
    given = renorm if isinstance(renorm, tuple) else (*np.asarray(renorm, np.float64), 0)
    *limits, warmup = renorm_of(given)
    if warmup and batches is None:
        raise ValueError("num_batches_tracked: expected a count with renorm's warmup, got None")
    if batches is not None and warmup > max(batches, 0):
        limits = list(OFF)
    return ratio_and_shift(limits, mean, sigma, old_mean, np.sqrt(old_var + eps))


def scale_of(scale: ArrayLike | None, dtype: DTypeLike, features: int) -> Array:
    """The scale as a vector in ``dtype``."""
    s: Array = np.array(1 if scale is None else scale, dtype)
    if s.shape != (features,) and s.size != 1:
        raise ValueError(f"scale: expected shape ({features},) or one element, got {s.shape}")
    return s if s.shape == (features,) else np.full(features, s.reshape(()))


def affine_of(features: int, dtype: DTypeLike, scale: ArrayLike | None, *vectors: ArrayLike | None) -> list[Array]:
    """``s, b, γ, β`` in ``dtype``, with the defaults for absent ones."""
    given = zip(("bias", "gamma", "beta"), vectors, (0, 1, 0), strict=True)
    return [
        scale_of(scale, dtype, features),
        *(np.full(features, n, dtype) if a is None else vector_of(name, a, dtype, features) for name, a, n in given),
    ]


def statistics_of(
    features: int, dtype: DTypeLike, mean: ArrayLike | None, var: ArrayLike | None
) -> tuple[Array | None, Array | None]:
    """Copies of the running statistics in ``dtype``, or (None, None)."""
    if mean is None and var is None:
        return None, None
    if mean is None or var is None:
        missing = "running_mean" if mean is None else "running_var"
        raise ValueError(f"{missing}: expected the running statistics as a pair, got None")
    return vector_of("running_mean", mean, dtype, features), vector_of("running_var", var, dtype, features)


def count_of(number: ArrayLike) -> int:
    """num_batches_tracked as an int."""
    array = np.asarray(number)
    if array.size != 1:
        raise ValueError(f"num_batches_tracked: expected one element, got shape {array.shape}")
    return int(array.item())
