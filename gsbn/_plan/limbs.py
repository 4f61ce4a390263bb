"""Plans the limbs of float32 matrices: which limbs a call makes, and where the limbs and their exponents lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .copies import start_on_words
from .problem import Device, Matrix, ceil_div, round_up
from .sources import Constants
from .variants import split_rows_at_once

SPAN = Constants("split_limbs.cu", {})["SPAN"]  # elements of a row whose limbs lie together
AT_ONCE = 3  # matrices in a launch of take_maxima or split_tiles
Place = int | str  # an offset in the workspace in bytes, or the name of other memory
SCRATCH = "scratch"  # anywhere in the workspace
FOR_DX = "dg's limbs for dx"  # where these lie in the workspace


class Operand(NamedTuple):
    """One operand of a product, as limbs."""

    limbs: Place
    pitch: int  # pitch of rows in float32 elements: two limbs take as many bytes as one element
    exponents: int = 0  # offset in the workspace in bytes


class Split(NamedTuple):
    """A float32 matrix that is row-major in memory, and the limbs of it that a call needs."""

    name: str
    rows: int
    columns: int
    pitch: int  # in elements
    vector: bool  # rows start on 16 bytes
    k_major: Operand | None = None  # limbs of its rows, for sums over columns
    mn_major: Operand | None = None  # limbs of its columns, for sums over rows
    late: bool = False  # the limbs are made later, when the memory that they take is free


class Splits(NamedTuple):
    """All matrices of which a call makes limbs. Offsets and sizes are in bytes."""

    of: tuple[Split, ...]
    maxima: int
    exponents: int
    end: int

    @property
    def maxima_bytes(self) -> int:
        """The bytes of the maxima, which must be set to zero first; 0 if no matrix is MN-major."""
        return self.exponents - self.maxima if any(split.mn_major is not None for split in self.of) else 0

    def operand(self, name: str, at: Matrix) -> Operand:
        """Return the limbs of a matrix for a product whose operand has the layout `at`."""
        split = next(split for split in self.of if split.name == name)
        found = split.k_major if at.strides[1] == 1 else split.mn_major
        assert found is not None
        return found

    def word(self, operand: Operand | None) -> int:
        """Return the index of an operand's first exponent among all exponents; -1 for no operand.

        Its first maximum has the same index among all maxima.
        """
        return -1 if operand is None else (operand.exponents - self.exponents) // 4


def limb_pitch(k: int) -> int:
    """Return the pitch of limbs that have memory of their own."""
    return round_up(k, SPAN)


def split_of(name: str, at: Matrix, count: int, k: int, place: Place = SCRATCH) -> Split:
    """Return the split of an operand with `count` rows of k elements, which is K-major or MN-major."""
    operand = Operand(place, limb_pitch(k))
    if at.strides[1] == 1:
        return Split(name, count, k, at.strides[0], start_on_words(at, 4), k_major=operand)
    return Split(name, k, count, at.strides[1], start_on_words(at, 4, axis=1), mn_major=operand)


def lay_out(wanted: Iterable[Split], start: int) -> Splits:
    """Find room from offset `start` on for maxima, exponents, and limbs that have no other place."""
    splits = list(wanted)
    words = sum(_words(split.k_major, split.rows) + _words(split.mn_major, split.columns) for split in splits)
    exponents, end = start + words, start + 2 * words
    at = exponents

    def placed(operand: Operand | None, count: int) -> Operand | None:
        nonlocal at, end
        if operand is None:
            return None
        found = operand._replace(exponents=at, limbs=end if operand.limbs == SCRATCH else operand.limbs)
        at += _words(operand, count)
        end += round_up(4 * count * operand.pitch, 256) if operand.limbs == SCRATCH else 0
        return found

    of = tuple(
        split._replace(k_major=placed(split.k_major, split.rows), mn_major=placed(split.mn_major, split.columns))
        for split in splits
    )
    return Splits(of, start, exponents, end)


def _words(operand: Operand | None, count: int) -> int:
    """Return how many bytes an operand's exponents take."""
    return 0 if operand is None else round_up(4 * count, 256)


def split_grid(rows: Iterable[int], k: int, device: Device) -> int:
    """Return how many CTAs split_limbs has for matrices that have so many `rows` of k elements."""
    return device.grid(sum(ceil_div(count, split_rows_at_once(k)) for count in rows))


def maxima_grid(splits: Iterable[Split], device: Device) -> tuple[int, int]:
    """Return how many CTAs take_maxima has, and how many rows an item of its work has."""
    wide = [(split.rows, ceil_div(split.columns, 128)) for split in splits]
    rows = round_up(ceil_div(sum(rows * blocks for rows, blocks in wide), 2048), 64)
    return device.grid(sum(blocks * ceil_div(count, rows) for count, blocks in wide)), rows


def tiles_grid(splits: Iterable[Split], device: Device) -> int:
    return device.grid(sum(ceil_div(split.rows, SPAN) * ceil_div(split.columns, SPAN) for split in splits))
