"""Adds the steps of a product c = a bᵀ by gsbn's kernels: limbs, forward_sm90's GEMM, the reduction of split-k."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from . import declared
from .copies import whole_words
from .gemm import OneLaunch
from .limbs import AT_ONCE, Operand, Place, Split, Splits, maxima_grid, split_grid, tiles_grid
from .problem import ITEMSIZE, VECTORS, Matmul, Matrix
from .program import ABSENT, Builder, place
from .sm90_variants import SM90_THREADS
from .split_k import SplitKReduction
from .tensor_maps import map_arguments
from .variants import split_limbs, tile_kernels

SPLIT_WORDS = ("x", "x_limbs", "x_exponents", "w", "w_limbs", "w_exponents")
SM90_WORDS = ("y", "partial", "merged", "epoch", *VECTORS, "batches", "x_exponents", "w_exponents")
_OF_STATISTICS = ("ld_deviations", "signature", *VECTORS, "momentum", "eps", "number")


def sm90_gemm(
    build: Builder,
    p: Matmul,
    one: OneLaunch,
    operands: tuple[str, str, str],
    exponents: tuple[str, str] = (ABSENT, ABSENT),
    *,
    independent: bool = False,
    of: Matmul | None = None,
) -> None:
    """Add forward_sm90 in mode "gemm". `operands` is the memory of a, b and c.

    `exponents` is the memory of the exponents of a and b, if these are limbs. Rows of c may start anywhere.
    `independent`: the launch reads nothing that the launch before it writes, and may overlap with that launch. `of`:
    the product whose operands are in p as limbs.
    """
    a, b, c = operands
    fields = {"m": p.m, "n": p.n, "k": p.k, "y_row": p.y.strides[0], **one.order._asdict()}
    by_words = whole_words(p.y, p.n, 4 if one.wide else ITEMSIZE[p.dtype])
    fields["flags"] = declared.flags(independent=independent, vector_y=by_words)
    fields |= dict.fromkeys(_OF_STATISTICS, 0)
    of_a, of_b, of_c = map_arguments(one, p)
    maps = (a, of_a), (b, of_b), (c, of_c) if by_words else (a, of_a)  # without by_words c needs no map
    passed = dict.fromkeys(SM90_WORDS, ABSENT) | {"y": c, "x_exponents": exponents[0], "w_exponents": exponents[1]}
    build.launch(one.kernel, one.ctas, fields, passed, SM90_THREADS, maps=maps, made_of=(one, of or p))


def reduce_split_k(
    build: Builder, partials: SplitKReduction, at: str, to: str, shape: tuple[int, int], dtype: str
) -> None:
    fields = {"n": shape[0], "k": shape[1], "pitch": partials.pitch, "size": partials.size, "number": partials.number}
    fields |= {"share": partials.share, "to_c": 8 + declared.kind_code(dtype)}
    build.launch(partials.kernel, partials.grid, fields, {"partials": at, "c": to}, made_of=partials)


class Limbs:
    """Adds the steps that make limbs, and the products of limbs.

    `names` maps the names of the splits to their memory. `cleared`: an earlier step clears the maxima.
    """

    def __init__(self, build: Builder, splits: Splits, names: dict[str, str], *, cleared: bool = False) -> None:
        self._build, self._splits, self._names, self._cleared = build, splits, names, cleared

    def make(self, *, late: bool = False) -> None:
        """Make the limbs of all matrices that are not late or, if `late`, of all that are late."""
        if not late:
            self._maxima()
        now = [split for split in self._splits.of if split.late == late]
        rows = sorted((split for split in now if split.mn_major is None), key=lambda split: split.columns)
        for k, same in groupby(rows, key=lambda split: split.columns):
            together = list(same)
            for i in range(0, len(together), 2):
                self._rows(k, together[i : i + 2])
        if tiles := [split for split in now if split.mn_major is not None]:
            self._tiles(tiles)

    def multiply(self, p: Matmul, one: OneLaunch, a: str, b: str, c: str) -> None:
        """Add a product of matrices whose limbs have been made. "limbs_rs" takes b itself, not its limbs."""
        a_at, a_limbs, a_exponents = self._operand(a, p.x)
        b_at, b_limbs, b_exponents = self._operand(b, p.w) if one.element == "limbs" else (p.w, self._names[b], ABSENT)
        q = p._replace(x=a_at, w=b_at)
        sm90_gemm(self._build, q, one, (a_limbs, b_limbs, c), (a_exponents, b_exponents), of=p)

    def _operand(self, name: str, at: Matrix) -> tuple[Matrix, str, str]:
        """Return the layout of a matrix's limbs, the memory of the limbs, and the memory of their exponents."""
        of = self._splits.operand(name, at)
        return Matrix((of.pitch, 1), True), self._place(of.limbs), place(of.exponents)

    def _maxima(self) -> None:
        """Add one launch that takes the maxima of all matrices that need them, including late ones."""
        build, splits = self._build, self._splits
        if tiles := [split for split in splits.of if split.mn_major is not None]:
            if not self._cleared:
                build.clear(place(splits.maxima), splits.maxima_bytes)
            kernel, _ = tile_kernels()
            grid, rows = maxima_grid(tiles, build.device)
            passed = {**self._sources(tiles), "maxima": place(splits.maxima)}
            build.launch(kernel, grid, self._fields(tiles) | {"maxima_rows": rows}, passed, made_of=splits)

    def _place(self, at: Place) -> str:
        return place(at) if isinstance(at, int) else self._names[at]

    def _rows(self, k: int, splits: list[Split]) -> None:
        """Add a launch that makes the limbs of one or two K-major matrices."""
        passed = dict.fromkeys(SPLIT_WORDS, ABSENT)
        fields = {"m": 0, "n": 0, "k": k, "ldx": 0, "ldw": 0}
        for split, name, count in zip(splits, ("x", "w"), ("m", "n"), strict=False):
            assert split.k_major is not None
            fields |= {count: split.rows, f"ld{name}": split.pitch}
            passed |= {name: self._names[split.name], f"{name}_limbs": self._place(split.k_major.limbs)}
            passed[f"{name}_exponents"] = place(split.k_major.exponents)
        flags = {f"vector_{name}": split.vector for split, name in zip(splits, ("x", "w"), strict=False)}
        grid = split_grid((split.rows for split in splits), k, self._build.device)
        fields["flags"] = declared.flags(**flags)
        self._build.launch(split_limbs(k), grid, fields, passed, made_of=self._splits)

    def _tiles(self, splits: list[Split]) -> None:
        """Add a launch that makes the limbs of MN-major matrices, and those of their rows if they are needed, too."""
        _, kernel = tile_kernels()
        passed = {**self._sources(splits), "maxima": place(self._splits.maxima)}
        passed["exponents"] = place(self._splits.exponents)
        for way, of in (("mn_major", "transposed"), ("k_major", "limbs")):
            operands: list[Operand | None] = [getattr(split, way) for split in splits]
            limbs = [ABSENT if operand is None else self._place(operand.limbs) for operand in operands]
            passed |= {f"{name}_{of}": at for name, at in zip("abc", _all(limbs, ABSENT), strict=True)}
        grid = tiles_grid(splits, self._build.device)
        self._build.launch(kernel, grid, self._fields(splits), passed, made_of=self._splits)

    def _sources(self, splits: list[Split]) -> dict[str, str]:
        return dict(zip("abc", _all([self._names[split.name] for split in splits], ABSENT), strict=True))

    def _fields(self, splits: list[Split]) -> dict[str, Any]:
        fields = [
            {
                "m": split.rows,
                "n": split.columns,
                "lda": split.pitch,
                "vector": split.vector,
                "of_columns": self._splits.word(split.mn_major),
                "of_rows": self._splits.word(split.k_major),
                "ld_limbs": 0 if split.k_major is None else 2 * split.k_major.pitch,
            }
            for split in splits
        ]
        return {name: _all([of[name] for of in fields], 0) for name in fields[0]} | {"maxima_rows": 0}


def _all(of_splits: list[Any], absent: Any) -> list[Any]:
    """Return one entry for every matrix that a launch has room for; `absent` fills the places without a matrix."""
    return of_splits + [absent] * (AT_ONCE - len(of_splits))
