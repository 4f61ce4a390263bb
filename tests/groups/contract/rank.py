"""The environment of the contract's functions, and the three lists of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn._ranks.group import gather_bytes
from tests.support.harness import Kind
from tests.support.strategies import Case

SECONDS = 60.0  # the timeout of a group
LIMIT = 420.0  # seconds; the program then prints its stack and ends. Beside 28 workers it took more than 240
SHORT = 2.0  # the timeout in tests that reach it
SLACK = 5.0  # how much later the error may be raised, on a busy machine
# The split of the rows: the weights of the ranks.
SPLITS: dict[str, Callable[[int], list[int]]] = {
    "even": lambda size: [1] * size,
    "uneven": lambda size: [1 << rank for rank in range(size)],
    "none on the first": lambda size: [0] + [1] * (size - 1),
    "none on the last": lambda size: [1] * (size - 1) + [0],
}
CASE = Case((9, 5, 4), "float32", training=True)
LARGE = Case((1500, 37, 520), "float32", training=True, offset=1.0)  # a rank may have several blocks of rows


@dataclass(frozen=True)
class Ranks:
    """The environment of a function of the contract: this rank's communicator, group and kind of arrays."""

    engine: str
    comm: Any
    kind: Kind
    group: gsbn.Group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def deal(self, rows: int, split: str) -> list[slice]:
        """The rows of every rank."""
        weights = SPLITS[split](self.size)
        ends = [rows * sum(weights[: rank + 1]) // sum(weights) for rank in range(self.size)]
        return list(itertools.starmap(slice, itertools.pairwise([0, *ends])))

    def gathered(self, a: np.ndarray) -> list[np.ndarray]:
        """The arrays of all ranks, which have the same shape and dtype."""
        return [np.frombuffer(data, a.dtype).reshape(a.shape) for data in gather_bytes(self.group, a.tobytes())]

    def natives(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: self.kind.put(a) for name, a in arrays.items()}


TOGETHER: dict[str, Callable[[Ranks], None]] = {}  # afterwards the group, or at least the communicator, still works
APART: dict[str, Callable[[Ranks], None]] = {}  # afterwards it does not: each needs its own program
ON_GPUS: dict[str, Callable[[Ranks], None]] = {}  # for GPUs only, each with its own group


def together(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    TOGETHER[function.__name__] = function
    return function


def apart(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    APART[function.__name__] = function
    return function


def on_gpus(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    ON_GPUS[function.__name__] = function
    return function


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as found:
        yield
    assert all(word in str(found.value) for word in words), f"{words} are not in: {found.value}"


def call(at: Ranks, group: gsbn.Group | None = None, **changes: Any) -> Any:
    """A forward with three rows per rank."""
    arrays = replace(CASE, shape=(3, 5, changes.pop("features", 4)), dtype=changes.pop("dtype", "float32")).arrays()
    native = at.natives({name: arrays[name] for name in ("x", "weight", "running_mean", "running_var")})
    return gsbn.forward(**native, **{"training": True, "group": group or at.group, **changes})
