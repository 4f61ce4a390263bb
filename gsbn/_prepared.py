"""What `gsbn.prepare` returns."""

from __future__ import annotations

from typing import Any

from ._typing import Precision


class Prepared:
    """A weight that `gsbn.prepare` has made ready; `gsbn.forward` takes it where it takes a weight.

    `precision` is what it was made for; shape and dtype are the weight's.
    """

    def __init__(self, weight: Any, precision: Precision) -> None:
        self.weight: Any = weight  # a copy that nobody else writes
        self.precision: Precision = precision
        self.limbs: tuple[Any, int, int] | None = None  # who owns them, address of the limbs, of the exponents

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    def __repr__(self) -> str:
        return f"gsbn.Prepared(shape={self.shape}, dtype={self.dtype}, precision={self.precision!r})"
