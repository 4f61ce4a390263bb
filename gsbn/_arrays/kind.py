"""The interface of gsbn to an array library; each library has a module that implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .check import View

NUMBERS = (float, int, np.floating, np.integer)  # NumPy scalars have the attributes of arrays


class Kind:
    """Reads and allocates the arrays of one library; one instance for its CPU arrays, one for its CUDA arrays."""

    name: str  # in error messages
    on_gpu = False
    counts_writes = False  # whether `written` does anything

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        """The key of a plan (hashable: types, shapes, strides, dtypes, devices), and the addresses, 0 for None.

        The list of addresses is empty if the arrays evidently share no memory. Every call runs this, so it checks
        nothing: an array of another kind raises, or gives a key that no valid call has.
        """
        raise NotImplementedError

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def view(self, array: Any) -> View:
        raise NotImplementedError

    def dtype(self, array: Any) -> str:
        """The dtype by name."""
        return array.dtype.name  # type: ignore[no-any-return]

    def admit(self, name: str, array: Any) -> None:
        """Raise if gsbn cannot use this array."""

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A NumPy view of the same memory (CPU kinds)."""
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        """The inverse of `numpy`."""
        raise NotImplementedError

    def device(self, array: Any) -> int:
        raise NotImplementedError

    def stream(self, device: int) -> int:
        """The library's current stream on the device, as a pointer."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        """An uninitialised C-contiguous array on like's device, of like's dtype or the named one."""
        raise NotImplementedError

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Callable[[], Any]:
        """A function that returns `empty` of these arguments, for many calls (CUDA kinds)."""
        raise NotImplementedError

    def scratch(self, nbytes: int, like: Any) -> tuple[Any, int]:
        """Uninitialised device memory from the library's allocator: its owner and its address, on 256 bytes."""
        raise NotImplementedError

    def graph_keeps(self, arrays: tuple[Any, ...], capture: int) -> bool:
        """Whether the library keeps the memory of these new arrays as long as the graph of a capture."""
        return False

    def version(self, array: Any) -> int | None:
        """How often the array was changed in place, if the library counts it, else None."""
        return None

    def copy(self, array: Any) -> Any:
        """A C-contiguous copy (CPU kinds)."""
        raise NotImplementedError

    def written(self, arrays: list[Any]) -> None:
        """Tell the library that these arrays were changed in place."""

    def side(self, array: Any) -> Kind | None:
        """The kind for the device that this array is on; None for a device that gsbn cannot use."""
        return self
