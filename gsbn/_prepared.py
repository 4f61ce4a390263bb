"""Prepared: the result of `gsbn.prepare`."""

from __future__ import annotations

from typing import Any

from ._typing import Precision


class Prepared:
    """A weight that `gsbn.prepare` prepared for `gsbn.forward`, which takes it as its `weight`.

    `precision` is the one that it was prepared for; `shape` (O, I) and `dtype` are those of the weight.
    """

    def __init__(self, weight: Any, precision: Precision) -> None:
        self.weight: Any = weight  # a copy that nothing else writes to
        self.precision: Precision = precision
        self.limbs: tuple[Any, int, int] | None = None  # owner, address of the limbs and of the exponents

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    def __repr__(self) -> str:
        return f"gsbn.Prepared(shape={self.shape}, dtype={self.dtype}, precision={self.precision!r})"
