"""A copy of a matrix whose strides a kernel cannot take, by copy_matrix."""

from __future__ import annotations

from typing import Any

from . import _kernels, _plan
from ._check import View
from ._interop import Kind

__all__ = ["Copy"]

WORDS = ("from", "row_stride", "col_stride", "to", "rows", "cols")
_WORD = (1 << 64) - 1


class Copy:
    """A C-contiguous copy of arrays that are like this one, ready but for the address; the copy is of x's kind."""

    def __init__(self, kind: Kind, view: View, like: Any, device: int, gpu: _plan.Device) -> None:
        rows, cols = view.shape
        row, col = (stride // view.itemsize & _WORD for stride in view.strides)  # as the launch packs them
        self._kind, self._make = kind, kind.maker((rows, cols), like)
        self._strides, self._shape = (row, col), (rows, cols)
        self._grid = _plan.copy_grid(rows, cols, gpu)
        self._launch = _kernels.launcher(_plan.copy_matrix(view.itemsize), device, WORDS)

    def __call__(self, at: int, stream: int) -> tuple[Any, int]:
        """The copy of the array that starts at this address, and its own."""
        copy = self._make()
        to = self._kind.pointer(copy)
        self._launch(self._grid, _plan.THREADS, (), (at, *self._strides, to, *self._shape), stream)
        return copy, to
