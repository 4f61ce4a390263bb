"""What the public signatures say of arrays and options. A type checker reads it; at run time it decides nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING or sys.version_info >= (3, 11):
    from typing import NamedTuple
else:  # the class behind 3.10's NamedTuple takes Generic as a second base, NamedTuple itself does not
    from typing import _NamedTuple as NamedTuple

__all__ = ["A", "A_co", "Activation", "AnyArray", "Array", "DLPack", "Gemm", "NamedTuple", "Precision"]

Precision = Literal["highest", "high"]
Gemm = Literal["auto", "cublas", "tiled", "sm90"]
Activation = Literal["relu"]

A = TypeVar("A")  # a library's array, as that library calls it
A_co = TypeVar("A_co", covariant=True)


class Array(Protocol[A_co]):
    """A NumPy, CuPy or torch array. A is what its library calls an array of any shape: a result has this type.

    torch.Tensor cannot be named here without importing torch, so A is what `squeeze` returns: Tensor for a Parameter
    as well, NDArray[float32] for a matrix of float32. JAX's arrays have no `*=`, for nobody can write to them; results
    for them are CuPy's or NumPy's, which is Any. CuPy has no types yet, so its arrays and their results are Any, too.
    """

    @property
    def __imul__(self) -> Any: ...

    def squeeze(self) -> A_co: ...


class DLPack(Protocol):
    """Whatever can hand its memory over."""

    @property
    def __dlpack__(self) -> Any: ...


AnyArray = DLPack | np.ndarray[Any, Any]  # by its types, a NumPy array of bfloat16 has no __dlpack__
