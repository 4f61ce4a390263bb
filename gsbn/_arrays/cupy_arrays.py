"""Read and allocate CuPy's arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .check import View
from .kind import Kind


class CupyArrays(Kind):
    name = "CuPy"
    on_gpu = True

    def __init__(self) -> None:
        import cupy

        self._ndarray = cupy.ndarray
        self._alloc = cupy.cuda.alloc
        self._current_stream = cupy.cuda.get_current_stream

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        key: list[Any] = []
        pointers = []
        for a in arrays:
            if a is None:
                key.append(None)
                pointers.append(0)
            else:
                data = a.data
                key.append((type(a), a.shape, a.strides, a.dtype, data.device_id))
                pointers.append(data.ptr)
        return tuple(key), pointers

    def pointer(self, array: Any) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def view(self, array: Any) -> View:
        dtype, device = array.dtype, f"cuda:{self.device(array)}"
        return View(array.data.ptr, array.shape, array.strides, dtype.name, dtype.itemsize, device, True)

    def device(self, array: Any) -> int:
        return array.data.device_id  # type: ignore[no-any-return]

    def stream(self, device: int) -> int:
        return self._current_stream(device).ptr  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        return self.maker(shape, like, dtype)()

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Callable[[], Any]:
        # CuPy does not know the name bfloat16; only like.dtype can be bfloat16. It reads a type faster than a dtype.
        return partial(self._ndarray, shape, like.dtype.type if dtype in (None, like.dtype.name) else dtype)

    def scratch(self, nbytes: int, like: Any) -> Callable[[], tuple[Any, int]]:
        alloc = self._alloc

        def lend() -> tuple[Any, int]:
            memory = alloc(nbytes)
            return memory, memory.ptr

        return lend
