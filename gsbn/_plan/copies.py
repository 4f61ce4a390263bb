"""Plans copies of matrices to rows that every kernel can take, and back: layouts, and grids that copy and clear."""

from __future__ import annotations

from .problem import ITEMSIZE, Device, Matrix, ceil_div, round_up
from .sources import Constants, Kernel
from .variants import copied_at_once, copy_matrix

_ROWS = Constants("copy_rows.cu", {})
COPIES_AT_ONCE = _ROWS["MATRICES"]  # matrices in a launch of copy_rows
WORDS = _ROWS["WORDS"] * _ROWS["THREADS"]  # words of 16 bytes in an item of copy_rows
CLEARED = 16 * Constants("clear.cu", {})["THREADS"]  # bytes in an item of clear
_TILE = Constants("copy_matrix.cu", {})["TILE"]  # rows and columns of an item of copy_matrix


def in_rows(cols: int, itemsize: int) -> Matrix:
    """Return the layout of a copy. Rows start on 128 bytes if that makes them at most an eighth longer, else on 16."""
    lines = round_up(cols, 128 // itemsize)
    return Matrix((lines if 8 * lines <= 9 * cols else round_up(cols, 16 // itemsize), 1), aligned=True, own=True)


def copy_along(at: Matrix, rows: int, cols: int, itemsize: int) -> Matrix:
    """Return the layout of a copy that is row-major or column-major, as the matrix is."""
    row, col = at.strides
    return in_rows(cols, itemsize) if abs(col) <= abs(row) else in_rows(rows, itemsize).T


def adjacent(at: Matrix, cols: int) -> bool:
    """Return whether the elements of a row are adjacent, and rows do not overlap."""
    return at.strides[1] == 1 and at.strides[0] >= cols


def on_words(at: Matrix, cols: int, itemsize: int) -> bool:
    """Return whether the matrix is `adjacent` and all its rows start on 16 bytes."""
    return adjacent(at, cols) and word(at, itemsize) == 16


def start_on_words(at: Matrix, itemsize: int, axis: int = 0) -> bool:
    """Return whether all rows, or with ``axis=1`` all columns, start on 16 bytes. They may overlap."""
    return at.aligned and at.strides[axis] * itemsize % 16 == 0


def vector_rows(at: Matrix, itemsize: int) -> bool:
    """Return whether rows can be read as vectors of 16 bytes. They may overlap, as those of a broadcast array do."""
    return at.strides[1] == 1 and start_on_words(at, itemsize)


def whole_words(at: Matrix, cols: int, itemsize: int) -> bool:
    """Return whether rows may be written in whole words of 16 bytes. Rows of a copy are padded, so all words fit."""
    return on_words(at, cols, itemsize) and (at.own or cols * itemsize % 16 == 0)


def word(at: Matrix, itemsize: int) -> int:
    """Return the bytes, up to 16, on which all rows start, or all columns if the matrix is column-major."""
    pitch = max(at.strides) * itemsize
    return min(16, pitch & -pitch) if at.aligned else itemsize


def matrix_copy(
    shape: tuple[int, int], dtypes: tuple[str, str], at: Matrix, to: Matrix, device: Device, matrices: int = 1
) -> tuple[Kernel, int, dict[str, int]]:
    """Return the variant of copy_matrix, its grid and its fields, for a copy from layout `at` to layout `to`.

    Several matrices follow each other, contiguous, on both sides.
    """
    rows, cols = shape
    if abs(to.strides[0]) < abs(to.strides[1]):  # it writes rows
        rows, cols, at, to = cols, rows, at.T, to.T
    turned = abs(at.strides[0]) < abs(at.strides[1])
    each = copied_at_once(dtypes[1])
    vectors = [
        1 in of.strides and along % each == 0 and word(of, ITEMSIZE[dtype]) >= each * ITEMSIZE[dtype]
        for of, along, dtype in ((at, rows if turned else cols, dtypes[0]), (to, cols, dtypes[1]))
    ]
    kernel = copy_matrix(*dtypes, turned=turned, vectors=(vectors[0], vectors[1]))
    between = rows * cols if matrices > 1 else 0
    fields = {"matrices": matrices, "rows": rows, "cols": cols, "from_matrix": between, "to_matrix": between}
    for side, strides in (("from", at.strides), ("to", to.strides)):
        fields |= {f"{side}_row": strides[0], f"{side}_col": strides[1]}
    return kernel, device.grid(matrices * ceil_div(rows, _TILE) * ceil_div(cols, _TILE)), fields


def rows_grid(pieces: list[tuple[int, int]], device: Device) -> int:
    """Return how many CTAs copy_rows has. `pieces` has each matrix' rows, and the pieces of 2 bytes in its rows."""
    return device.grid(sum(ceil_div(rows * ((cols + 6) // 8 + 1), WORDS) for rows, cols in pieces))


def clear_grid(nbytes: int, device: Device) -> int:
    return device.grid(ceil_div(nbytes, CLEARED))
