"""Families of data: changes that turn average operands into cases that users meet, or hard ones.

A family changes x (B, I), weight (O, I) and scale (O,) in place. At first x is standard normal, so is the weight times
√I, and the scale is between 1/2 and 2. They are NumPy or CuPy arrays or PyTorch tensors of a wide dtype, and are
rounded to their own dtype afterwards, for which large numbers are bounded (Reach).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "spoil"]


class Reach(NamedTuple):
    """The largest factor and the largest mean for a dtype.

    float16 ends at 65504, and PyTorch's scaled feature has x's dtype and is up to ten times as large as x. bfloat16's
    numbers are 8 apart at 2000: with a larger mean nothing is left of the deviations.
    """

    factor: float = 1e5
    mean: float = 1e4


REACHES = {"float16": Reach(2e3, 2e3), "bfloat16": Reach(mean=1e3)}


class Operands(NamedTuple):
    x: Any
    weight: Any
    scale: Any
    random: random.Random  # for what a family draws
    reach: Reach

    @property
    def rows(self) -> int:
        return len(self.x)


def _one_row(factor: float, which: Callable[[Operands], int]) -> Callable[[Operands], None]:
    def change(o: Operands) -> None:
        o.x[which(o)] *= min(factor, o.reach.factor)

    return change


def _one_row_in(period: int, factor: float) -> Callable[[Operands], None]:
    """One row in every `period` rows, at least one row in all, and not the first row of a period."""

    def change(o: Operands) -> None:
        o.x[min(period, o.rows) // 2 :: period] *= min(factor, o.reach.factor)

    return change


def _mean(mean: float, zero: bool) -> Callable[[Operands], None]:
    def change(o: Operands) -> None:
        o.x[...] += min(mean, o.reach.mean)
        if zero:
            o.x[0] = 0

    return change


def _zero(part: float) -> Callable[[Operands], None]:
    def change(o: Operands) -> None:
        o.x[: max(1, int(part * o.rows))] = 0

    return change


def _positive(o: Operands) -> None:
    """As after a ReLU."""
    o.x[...] = (abs(o.x) + o.x) / 2


def _alternating(o: Operands) -> None:
    o.x[...] = abs(o.x)
    o.x[1::2] *= -1


def _sorted(o: Operands) -> None:
    made = o.x.sort(0)
    if made is not None:  # PyTorch's sort is not in place
        o.x[...] = made.values


def _one_hot(o: Operands) -> None:
    """One category per row."""
    categories = min(o.x.shape[1], 64)
    o.x[...] = 0
    for i in range(categories):
        o.x[i::categories, i] = 1


def _constant_input(o: Operands) -> None:
    """One column is a large constant: a bias that was put into x."""
    o.x[:, 0] = 100


def _constant_features(o: Operands) -> None:
    """Every other feature has constant columns alone: its variance is 0."""
    half = o.x.shape[1] // 2
    o.x[:, :half] = 1
    o.weight[::2, half:] = 0


def _equal(o: Operands) -> None:
    """All rows are equal: y is beta, and all gradients through the normalisation are 0."""
    o.x[...] = o.x[:1] * 1


def _tiny(o: Operands) -> None:
    o.x[...] *= 1e-6


def _tiny_variance(o: Operands) -> None:
    """The variance of every other feature is far below eps."""
    o.weight[::2] *= 1e-3


def _tiny_scale(o: Operands) -> None:
    for i, factor in enumerate((0, 1e-6, 1e-3)):
        o.scale[i::4] *= factor


FAMILIES: dict[str, Callable[[Operands], None]] = {
    "normal": lambda o: None,
    "row 0 x 2e3": _one_row(2e3, lambda o: 0),
    "row 0 x 1e5": _one_row(1e5, lambda o: 0),
    "a row x 2e3": _one_row(2e3, lambda o: o.random.randrange(o.rows)),
    "last row x 1e5": _one_row(1e5, lambda o: o.rows - 1),
    "each 4096th row x 1e4": _one_row_in(4096, 1e4),
    "each 128th row x 1e3": _one_row_in(128, 1e3),
    "row 0 zero": _zero(0.0),
    "first tenth zero": _zero(0.1),
    "mean 1e2": _mean(1e2, zero=False),
    "mean 1e3": _mean(1e3, zero=False),
    "mean 1e4": _mean(1e4, zero=False),
    "mean 1e2, row 0 zero": _mean(1e2, zero=True),
    "mean 1e3, row 0 zero": _mean(1e3, zero=True),
    "mean 1e4, row 0 zero": _mean(1e4, zero=True),
    "alternating signs": _alternating,
    "sorted rows": _sorted,
    "after ReLU": _positive,
    "one-hot": _one_hot,
    "constant input": _constant_input,
    "constant features": _constant_features,
    "equal rows": _equal,
    "x 1e-6": _tiny,
    "tiny variance": _tiny_variance,
    "tiny and zero scale": _tiny_scale,
}


def spoil(name: str, x: Any, weight: Any, scale: Any, dtype: str, seed: int = 0) -> None:
    """Change operands, which are later rounded to ``dtype``, into this family's; the same for the same seed."""
    if not len(x):
        return
    FAMILIES[name](Operands(x, weight, scale, random.Random(seed), REACHES.get(dtype, Reach())))
    _see_what_spreads(x, weight)


def _see_what_spreads(x: Any, weight: Any) -> None:
    """Change the weight of features whose variance cancels by chance.

    If one row is far from all others it determines the variance. A feature that is nearly orthogonal to this row then
    has almost no variance, but all the rounding errors of its terms. One such error exceeds those of all other features
    in a norm: it is distributed as 1 / |N(0, 1)|, which has no finite variance, so a norm over any number of features
    would be chance. A feature with less than a quarter of the variance that its weight has on average over directions
    therefore gets half of the usual component in the direction of the farthest row. Features without any variance stay:
    they are intended.
    """
    d = x - x.mean(0)
    squares, size = (d * d).sum(1), (weight * weight).sum(1)
    if float(squares.sum()) <= 1e-12 * float((x * x).sum()):  # rows that are equal except for the rounding of a mean
        return
    farthest = d[int(squares.argmax())]
    g = d @ weight.T
    found, usual = (g * g).sum(0), size * squares.sum() / x.shape[1]
    missed = (found < 0.25 * usual) * (found > 1e-12 * usual)
    part = 0.5 * (size / x.shape[1]) ** 0.5 * (((weight @ farthest) >= 0) * 2 - 1) * missed
    weight += part[:, None] * (farthest / float((farthest * farthest).sum() or 1) ** 0.5)
