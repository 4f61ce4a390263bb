"""What gsbn asks of an array library; a module for each library answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .check import View

NUMBERS = (float, int, np.floating, np.integer)  # which are no arrays, whatever attributes they have


class Kind:
    """How one array library is read and allocated; one instance a library and side (CPU or CUDA)."""

    name: str  # as error messages say it
    on_gpu = False
    counts_writes = False  # `written` has something to tell

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        """What a plan depends on (hashable: types, shapes, strides, dtypes, devices) and the addresses; None gives 0.

        No addresses at all where it is plain that no two arrays share memory.
        The fast path of every call, so it checks nothing: an array of another kind raises or gives a key never seen.
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
        """Raise if the library forbids handing this array over."""

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
        """An uninitialised C-contiguous array on like's device, of like's dtype or of another, by name."""
        raise NotImplementedError

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Callable[[], Any]:
        """`empty` of these arguments, for many times (CUDA kinds)."""
        raise NotImplementedError

    def scratch(self, nbytes: int, like: Any) -> tuple[Any, int]:
        """Uninitialised device memory in the library's own allocator: its owner and its address, on 256 bytes."""
        raise NotImplementedError

    def graph_keeps(self, arrays: tuple[Any, ...], capture: int) -> bool:
        """Whether the library keeps these new arrays' memory for the graph of a capture, whatever becomes of them."""
        return False

    def version(self, array: Any) -> int | None:
        """How often the array was changed in place, where the library counts that."""
        return None

    def copy(self, array: Any) -> Any:
        """A C-contiguous array of its own memory (CPU kinds)."""
        raise NotImplementedError

    def written(self, arrays: list[Any]) -> None:
        """Tell the library that its arrays were changed in place."""

    def side(self, array: Any) -> Kind | None:
        """The kind for the device that this array is on; None for a device that gsbn cannot use."""
        return self
