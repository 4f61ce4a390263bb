"""The arguments of `gsbn.reference` in the dtype of its computation; errors name the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[Any]


def matrix_of(name: str, a: ArrayLike, dtype: DTypeLike, columns: int | None = None) -> Array:
    """``a`` in ``dtype`` and C order, so that the bits of the GEMM do not depend on strides."""
    matrix = np.ascontiguousarray(a, dtype)
    if matrix.ndim != 2 or columns not in (None, matrix.shape[1]):
        expected = "(rows, columns)" if columns is None else f"(rows, {columns})"
        raise ValueError(f"{name}: expected shape {expected}, got {matrix.shape}")
    return matrix


def rows_of(name: str, a: ArrayLike, dtype: DTypeLike, rows: int, features: int) -> Array:
    """``a`` as `matrix_of` returns it; raise unless it has y's shape, (rows, features)."""
    made = matrix_of(name, a, dtype, columns=features)
    if len(made) != rows:
        raise ValueError(f"{name}: expected shape {(rows, features)}, got {made.shape}")
    return made


def vector_of(name: str, a: ArrayLike, dtype: DTypeLike, features: int) -> Array:
    """A copy of ``a`` in ``dtype``."""
    vector: Array = np.array(a, dtype)
    if vector.shape != (features,):
        raise ValueError(f"{name}: expected shape ({features},), got {vector.shape}")
    return vector


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
