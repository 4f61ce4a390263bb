"""c = a bᵀ in float32 on tensor cores: operands to limbs, and forward_sm90's GEMM alone (docs/float32.md)."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from . import _declared, _plan
from ._call import ABSENT, Call
from ._sm90 import Sm90Gemm

__all__ = ["SPLIT_WORDS", "Limbs"]

SPLIT_WORDS = ("x", "x_limbs", "x_exponents", "w", "w_limbs", "w_exponents")


class Limbs:
    """The steps of a call that make limbs, and the products of these.

    `names` are those of memory, by the plan's; `cleared`: an earlier step makes zeros of the maxima.
    """

    def __init__(
        self,
        call: Call,
        splits: _plan.Splits,
        names: dict[str, str],
        gpu: _plan.Device,
        device: int,
        *,
        cleared: bool = False,
    ) -> None:
        self._call, self._splits, self._names, self._gpu, self._device = call, splits, names, gpu, device
        self._cleared = cleared

    def make(self, *, late: bool = False) -> None:
        """Limbs of all matrices, and then of those whose place was not free before."""
        if not late:
            self._maxima()
        now = [split for split in self._splits.of if split.late == late]
        rows = sorted((split for split in now if split.across is None), key=lambda split: split.columns)
        for k, same in groupby(rows, key=lambda split: split.columns):
            together = list(same)
            for i in range(0, len(together), 2):
                self._rows(k, together[i : i + 2])
        if tiles := [split for split in now if split.across is not None]:
            self._tiles(tiles)

    def multiply(self, p: _plan.Matmul, one: _plan.OneLaunch, a: str, b: str, c: str) -> None:
        """A product of limbs that are there, of the matrices of these names; or of b as it is."""
        a_at, a_limbs, a_exponents = self._operand(a, p.x)
        b_at, b_limbs, b_exponents = self._operand(b, p.w) if one.element == "limbs" else (p.w, self._names[b], ABSENT)
        gemm = Sm90Gemm(p._replace(x=a_at, w=b_at), one, self._device)
        self._call.multiply(gemm, a_limbs, b_limbs, c, a_exponents, b_exponents)

    def _operand(self, name: str, at: _plan.Matrix) -> tuple[_plan.Matrix, str, str]:
        """How its limbs lie, where, and where their exponents are."""
        of = self._splits.operand(name, at)
        return _plan.Matrix((of.pitch, 1), True), self._place(of.limbs), self._call.at(of.exponents)

    def _maxima(self) -> None:
        """Those of all matrices that want any: of early ones and of late ones in one launch."""
        call, splits = self._call, self._splits
        if across := [split for split in splits.of if split.across is not None]:
            if not self._cleared:
                call.clear(call.at(splits.maxima), splits.maxima_bytes, self._gpu)
            kernel, _ = _plan.tile_kernels()
            grid, rows = _plan.maxima_grid(across, self._gpu)
            passed = {**self._sources(across), "maxima": call.at(splits.maxima)}
            call.launch(kernel, grid, self._fields(across) | {"maxima_rows": rows}, passed)

    def _place(self, place: _plan.Place) -> str:
        return self._call.at(place) if isinstance(place, int) else self._names[place]

    def _rows(self, k: int, splits: list[_plan.Split]) -> None:
        """Matrices that lie along what is summed over, one or two."""
        passed = dict.fromkeys(SPLIT_WORDS, ABSENT)
        fields = {"m": 0, "n": 0, "k": k, "ldx": 0, "ldw": 0}
        for split, name, count in zip(splits, ("x", "w"), ("m", "n"), strict=False):
            assert split.along is not None
            fields |= {count: split.rows, f"ld{name}": split.pitch}
            passed |= {name: self._names[split.name], f"{name}_limbs": self._place(split.along.limbs)}
            passed[f"{name}_exponents"] = self._call.at(split.along.exponents)
        flags = {f"vector_{name}": split.vector for split, name in zip(splits, ("x", "w"), strict=False)}
        grid = _plan.split_grid((split.rows for split in splits), k, self._gpu)
        self._call.launch(_plan.split_limbs(k), grid, fields | {"flags": _declared.flags(**flags)}, passed)

    def _tiles(self, splits: list[_plan.Split]) -> None:
        """Matrices that lie across it, and perhaps along as well."""
        _, kernel = _plan.tile_kernels()
        passed = {**self._sources(splits), "maxima": self._call.at(self._splits.maxima)}
        passed["exponents"] = self._call.at(self._splits.exponents)
        for way, of in (("across", "transposed"), ("along", "limbs")):
            operands = [getattr(split, way) for split in splits]
            limbs = [ABSENT if operand is None else self._place(operand.limbs) for operand in operands]
            passed |= {f"{name}_{of}": at for name, at in zip("abc", _all(limbs, ABSENT), strict=True)}
        self._call.launch(kernel, _plan.tiles_grid(splits, self._gpu), self._fields(splits), passed)

    def _sources(self, splits: list[_plan.Split]) -> dict[str, str]:
        return dict(zip("abc", _all([self._names[split.name] for split in splits], ABSENT), strict=True))

    def _fields(self, splits: list[_plan.Split]) -> dict[str, Any]:
        fields = [
            {
                "m": split.rows,
                "n": split.columns,
                "lda": split.pitch,
                "vector": split.vector,
                "of_columns": self._splits.word(split.across),
                "of_rows": self._splits.word(split.along),
                "ld_limbs": 0 if split.along is None else 2 * split.along.pitch,
            }
            for split in splits
        ]
        return {name: _all([of[name] for of in fields], 0) for name in fields[0]} | {"maxima_rows": 0}


def _all(of_splits: list[Any], absent: Any) -> list[Any]:
    """For every matrix that a launch has room for."""
    return of_splits + [absent] * (_plan.AT_ONCE - len(of_splits))
