"""Define gsbn's interface to an array library; for each library a module implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .check import View

NUMBERS = (float, int, np.floating, np.integer)  # NumPy scalars have the attributes of arrays


class Kind:
    """Read and allocate the arrays of one library. One instance is for its CPU arrays, one for its CUDA arrays."""

    name: str  # in error messages
    on_gpu = False
    counts_writes = False  # whether `count_writes` does anything

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        """Return the key of a plan, and the addresses of the arrays, with 0 for None.

        The key is hashable; it has types, shapes, strides, dtypes and devices. The list of addresses is empty if the
        arrays evidently share no memory. Every call runs this, so it checks nothing: an array of another kind raises an
        error, or gives a key that no valid call has.
        """
        raise NotImplementedError

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def view(self, array: Any) -> View:
        raise NotImplementedError

    def dtype(self, array: Any) -> str:
        """Return the name of the dtype."""
        return array.dtype.name  # type: ignore[no-any-return]

    def admit(self, name: str, array: Any) -> None:
        """Raise if gsbn cannot use this array."""

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a NumPy view of the same memory (CPU kinds)."""
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        """Return an array of this library that shares the memory of a NumPy array: the inverse of `numpy`."""
        raise NotImplementedError

    def device(self, array: Any) -> int:
        raise NotImplementedError

    def stream(self, device: int) -> int:
        """Return the library's current stream on the device, as a pointer."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        """Return an uninitialised C-contiguous array on like's device, of like's dtype or the named one."""
        raise NotImplementedError

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Callable[[], Any]:
        """Return a function that returns `empty` of these arguments, for many calls (CUDA kinds)."""
        raise NotImplementedError

    def scratch(self, nbytes: int, like: Any) -> Callable[[], tuple[Any, int]]:
        """Return a function that returns uninitialised memory: its owner, and its address on 256 bytes (CUDA kinds)."""
        raise NotImplementedError

    def graph_keeps(self, arrays: tuple[Any, ...], capture: int) -> bool:
        """Return whether the library keeps the memory of these new arrays as long as the graph of a capture exists."""
        return False

    def version(self, array: Any) -> int | None:
        """Return how often the array was changed in place, or None if the library does not count this."""
        return None

    def copy(self, array: Any) -> Any:
        """Return a C-contiguous copy (CPU kinds)."""
        raise NotImplementedError

    def count_writes(self, arrays: list[Any]) -> None:
        """Tell the library that these arrays were changed in place."""

    def side(self, array: Any) -> Kind | None:
        """Return the kind for the device that this array is on, or None if gsbn cannot use this device."""
        return self
