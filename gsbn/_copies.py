"""What lies where a kernel cannot take it, or shall lie where it cannot write: the launches that move it."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _plan
from ._call import ABSENT, Call, matrix_of
from ._check import View

__all__ = ["Move", "copied", "move"]

_SIDES = ("a", "b", "c")  # of copy_rows' matrices


class Move(NamedTuple):
    """A matrix, the names of the memory that it is in and shall be in, and how it lies in each."""

    name: str
    to: str
    shape: tuple[int, int]
    itemsize: int
    at: _plan.Matrix
    to_at: _plan.Matrix


def copied(call: Call, name: str, view: View, at: _plan.Matrix, like: Any) -> Move:
    """A copy of the argument of this name, which shall lie so, along rows or columns; every call makes it anew."""
    (rows, cols), of = view.shape, matrix_of(view)
    if at.strides[1] != 1:
        rows, cols, of, at = cols, rows, of.T, at.T
    to = call.make(f"copy of {name}", (rows, at.strides[0]), like, scratch=True)
    return Move(name, to, (rows, cols), view.itemsize, of, at)


def move(call: Call, moves: list[Move], gpu: _plan.Device) -> None:
    """The launches: one for three matrices whose rows are adjacent elements here and there, and one for any other."""
    fields: dict[str, Any]
    by_rows = [m for m in moves if all(_plan.adjacent(at, m.shape[1]) for at in (m.at, m.to_at))]
    for m in moves:
        if m not in by_rows:
            (rows, cols), (from_row, from_col), (to_row, to_col) = m.shape, m.at.strides, m.to_at.strides
            fields = {"rows": rows, "cols": cols}
            fields |= {"from_row": from_row, "from_col": from_col, "to_row": to_row, "to_col": to_col}
            kernel, grid = _plan.copy_matrix(m.itemsize), _plan.copy_grid(rows, cols, gpu)
            call.launch(kernel, grid, fields, {"from": m.name, "to": m.to})
    for first in range(0, len(by_rows), _plan.COPIES_AT_ONCE):
        together = by_rows[first : first + _plan.COPIES_AT_ONCE]
        # in pieces of 2 bytes, from here on
        sizes = [(m.shape[0], m.shape[1] * m.itemsize // 2) for m in together]
        none = [0] * (_plan.COPIES_AT_ONCE - len(together))
        fields = {
            "rows": [rows for rows, _ in sizes] + none,
            "cols": [cols for _, cols in sizes] + none,
            "from_row": [m.at.strides[0] * m.itemsize // 2 for m in together] + none,
            "to_row": [m.to_at.strides[0] * m.itemsize // 2 for m in together] + none,
        }
        passed = {f"{way}_{side}": ABSENT for side in _SIDES for way in ("from", "to")}
        for m, side in zip(together, _SIDES, strict=False):
            passed |= {f"from_{side}": m.name, f"to_{side}": m.to}
        call.launch(_plan.copy_rows(), _plan.rows_grid(sizes, gpu), fields, passed)
