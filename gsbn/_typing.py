"""The types in the public signatures, for type checkers; they have no effect at run time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING or sys.version_info >= (3, 11):
    from typing import NamedTuple as NamedTuple
else:  # in 3.10 only the class behind NamedTuple accepts Generic as a second base
    pass

Precision = Literal["highest", "high"]
Gemm = Literal["auto", "cublas", "tiled", "sm90"]
ActivationName = Literal["relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "elu"]
Activation = ActivationName | tuple[Literal["leaky_relu", "elu"], float]  # with PyTorch's default, or with a number

A = TypeVar("A")  # the array type of a library
A_co = TypeVar("A_co", covariant=True)


class Array(Protocol[A_co]):
    """A NumPy, CuPy or torch array. A is the type of its library's arrays of any shape, and of the results.

    A is the return type of `squeeze`, because torch.Tensor cannot be named without importing torch: Tensor, also for a
    Parameter; NDArray[float32] for a NumPy matrix of float32. JAX arrays are read-only, so they have no `*=` and do not
    match; their results are CuPy or NumPy arrays, typed Any. CuPy has no types yet, so its results are Any, too.
    """

    @property
    def __imul__(self) -> Any: ...

    def squeeze(self) -> A_co: ...


class DLPack(Protocol):
    """An array that exports its memory by DLPack."""

    @property
    def __dlpack__(self) -> Any: ...


AnyArray = DLPack | np.ndarray[Any, Any]  # for type checkers a NumPy array of bfloat16 has no __dlpack__
