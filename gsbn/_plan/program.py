"""Defines the program of a call: the memory that it allocates, and its steps in order. Nothing here touches a GPU.

A planner writes a `Program` with a `Builder`. The host runs it; `describe` and the tests read the same list. Memory has
a name: that of an argument, that of an array that the call allocates, or that of a place in the workspace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import declared
from .copies import COPIES_AT_ONCE, adjacent, clear_grid, matrix_copy, rows_grid
from .problem import ITEMSIZE, Device, Matmul, Matrix
from .sources import Kernel
from .variants import THREADS, clear, copy_rows

ABSENT = "absent"  # the address 0
_SIDES = ("a", "b", "c")  # the names of copy_rows' matrices


class Array(NamedTuple):
    """An array that every call allocates. `scratch`: it is freed after the call; else it is returned."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scratch: bool = False


class Launch(NamedTuple):
    kernel: Kernel
    grid: int
    block: int
    fields: dict[str, Any]  # the fields of the kernel's struct
    passed: dict[str, str]  # the kernel's parameters and their memory
    maps: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # for each tensor map: the memory, and what the map encodes
    cooperative: bool = False  # its CTAs wait for each other, so all must be resident
    made_of: Any = None  # the choice that the launch carries out, for tests and sweeps


class Gemm(NamedTuple):
    """A product c = a bᵀ by cuBLAS. `operands` is the memory of a, b and c. `wide`: c has the accumulator's type."""

    p: Matmul
    precision: str
    wide: bool
    operands: tuple[str, str, str]


class Gather(NamedTuple):
    """NCCL gathers so many doubles of every rank, from the first of `operands` to the second."""

    doubles: int
    operands: tuple[str, str]


Step = Launch | Gemm | Gather


class Program(NamedTuple):
    """What a call does. Sizes are in bytes."""

    path: str  # the path, as `gemm` names it
    why: str
    arrays: tuple[Array, ...]
    workspace: int
    lent: int  # scratch memory after the workspace, shared by all steps
    steps: tuple[Step, ...]
    limited: bool = False  # no launch begins before the one ahead has ended

    @property
    def adds_residual(self) -> bool:
        """Whether a launch adds the residual."""
        return any("residual" in step.passed for step in self.launches())

    def launches(self, name: str | None = None) -> list[Launch]:
        """Return all launches, or the launches of the kernel with this name."""
        return [step for step in self.steps if isinstance(step, Launch) and name in (None, step.kernel.name)]

    def launch(self, name: str) -> Launch | None:
        """Return the first launch of the kernel with this name, or None."""
        return next(iter(self.launches(name)), None)

    def made(self, name: str) -> int | None:
        """Return the position of an array among `arrays`, or None."""
        return next((i for i, array in enumerate(self.arrays) if array.name == name), None)


class Copy(NamedTuple):
    """A copy of a matrix, with the name and layout of its source and of its destination."""

    name: str
    to: str
    shape: tuple[int, int]
    dtype: str
    at: Matrix
    to_at: Matrix


def place(offset: int, memory: str = "workspace") -> str:
    """Return the name of the address that lies `offset` bytes after the start of `memory`."""
    return f"{memory} + {offset}"


def place_of(name: str) -> tuple[str, int] | None:
    """Return the memory and the offset of a place; None for the name of memory itself."""
    memory, plus, offset = name.partition(" + ")
    return (memory, int(offset)) if plus else None


class Builder:
    """Collects the arrays and steps of a program."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._arrays: list[Array] = []
        self._steps: list[Step] = []
        self._copies: list[Copy] = []  # the copies that the next `copy` makes
        self._nbytes = self._lent = 0

    def program(self, path: str, why: str) -> Program:
        return Program(
            path, why, tuple(self._arrays), self._nbytes, self._lent, tuple(self._steps), self.device.limited
        )

    # ---- memory

    def make(self, name: str, shape: tuple[int, ...], dtype: str, *, scratch: bool = False) -> str:
        """Allocate an array and return its name."""
        self._arrays.append(Array(name, shape, dtype, scratch))
        return name

    def reserve(self, nbytes: int) -> None:
        """Set the size of the workspace, before any `lend`."""
        self._nbytes = nbytes + -nbytes % 256

    def lend(self, nbytes: int) -> str:
        """Return scratch memory after the workspace. A later `lend`, or a GEMM of cuBLAS, may overwrite it."""
        self._lent = max(self._lent, nbytes)
        return place(self._nbytes) if nbytes else ABSENT

    # ---- steps

    def launch(
        self,
        kernel: Kernel,
        grid: int,
        fields: Mapping[str, Any],
        passed: dict[str, str],
        block: int = THREADS,
        *,
        maps: tuple[tuple[str, tuple[Any, ...]], ...] = (),
        cooperative: bool = False,
        made_of: Any = None,
    ) -> None:
        """Add the launch of a kernel, with those of `fields` that the kernel's struct declares."""
        mine = {name: fields[name] for name in declared.fields_of(kernel, fields)}
        self._steps.append(Launch(kernel, grid, block, mine, passed, maps, cooperative, made_of))

    def gemm(self, p: Matmul, precision: str, a: str, b: str, c: str, *, wide: bool) -> None:
        self._steps.append(Gemm(p, precision, wide, (a, b, c)))

    def gather(self, doubles: int, posted: str, gathered: str) -> None:
        self._steps.append(Gather(doubles, (posted, gathered)))

    def clear(self, name: str, nbytes: int) -> None:
        """Add a launch that writes zeros to memory that starts on 16 bytes."""
        self.launch(clear(), clear_grid(nbytes, self.device), {"bytes": nbytes}, {"to": name})

    def operand(
        self, name: str, shape: tuple[int, int], of: Matrix, at: Matrix, dtype: str, called: str = "copy"
    ) -> str:
        """Return the memory of an argument with the layout `of`, for kernels that take it with the layout `at`.

        If `at` is the layout of a copy, the copy is allocated here, and made by the next `copy`.
        """
        if not at.own:
            return name
        rows, cols = shape
        if at.strides[1] != 1:
            rows, cols, of, at = cols, rows, of.T, at.T
        to = self.make(f"{called} of {name}", (rows, at.strides[0]), dtype, scratch=True)
        self._copies.append(Copy(name, to, (rows, cols), dtype, of, at))
        return to

    def copy(self, *more: Copy) -> None:
        """Add the launches of copies: one for up to three that are `adjacent` in both layouts, one for any other."""
        fields: dict[str, Any]
        copies, self._copies = [*self._copies, *more], []
        by_rows = [c for c in copies if all(adjacent(at, c.shape[1]) for at in (c.at, c.to_at))]
        for c in copies:
            if c not in by_rows:
                kernel, grid, fields = matrix_copy(c.shape, (c.dtype, c.dtype), c.at, c.to_at, self.device)
                self.launch(kernel, grid, fields, {"from": c.name, "to": c.to})
        for first in range(0, len(by_rows), COPIES_AT_ONCE):
            together = by_rows[first : first + COPIES_AT_ONCE]
            # sizes and strides in pieces of 2 bytes
            halves = [ITEMSIZE[c.dtype] // 2 for c in together]
            sizes = [(c.shape[0], c.shape[1] * size) for c, size in zip(together, halves, strict=True)]
            none = [0] * (COPIES_AT_ONCE - len(together))
            fields = {
                "rows": [rows for rows, _ in sizes] + none,
                "cols": [cols for _, cols in sizes] + none,
                "from_row": [c.at.strides[0] * size for c, size in zip(together, halves, strict=True)] + none,
                "to_row": [c.to_at.strides[0] * size for c, size in zip(together, halves, strict=True)] + none,
            }
            passed = {f"{way}_{side}": ABSENT for side in _SIDES for way in ("from", "to")}
            for c, side in zip(together, _SIDES, strict=False):
                passed |= {f"from_{side}": c.name, f"to_{side}": c.to}
            self.launch(copy_rows(), rows_grid(sizes, self.device), fields, passed)


def nbytes_of(array: Array) -> int:
    return math.prod(array.shape) * ITEMSIZE[array.dtype]
