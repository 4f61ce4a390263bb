"""Read and allocate NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._values import type_name
from .check import View
from .kind import Kind


class NumpyArrays(Kind):
    name = "NumPy"

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        given = [a for a in arrays if a is not None]
        key = tuple([None if a is None else (type(a), a.shape, a.strides, a.dtype, a.flags.writeable) for a in arrays])
        # Reading an address takes 1 us. Different arrays that own their memory cannot overlap: they need no addresses.
        if len({id(a) for a in given if a.flags.owndata}) == len(given):
            return key, []
        return key, [0 if a is None else self.pointer(a) for a in arrays]

    def pointer(self, array: Any) -> int:
        return array.__array_interface__["data"][0]  # type: ignore[no-any-return]

    def view(self, array: Any) -> View:
        native = array.dtype.name if array.dtype.isnative else str(array.dtype)
        return View(
            self.pointer(array), array.shape, array.strides, native, array.itemsize, "cpu", array.flags.writeable
        )

    def admit(self, name: str, array: Any) -> None:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got {type_name(array)}")

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        return np.empty(shape, like.dtype if dtype is None else dtype)

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        return array

    def copy(self, array: Any) -> Any:
        return array.copy(order="C")
