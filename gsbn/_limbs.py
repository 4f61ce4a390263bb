"""c = a bᵀ in float32 on tensor cores: operands to limbs, and forward_sm90's GEMM alone (docs/float32.md)."""

from __future__ import annotations

from . import _declared, _kernels, _plan
from ._device import cuda
from ._sm90 import Sm90Gemm

__all__ = ["SPLIT_WORDS", "Multiply"]

SPLIT_WORDS = ("x", "x_limbs", "x_exponents", "w", "w_limbs", "w_exponents")


class Multiply:
    """A product as `_plan.limb_gemm` decides it, ready but for its addresses.

    Where a lies across, b's limbs are made after a has been read for the last time: they may take its place.
    """

    def __init__(self, p: _plan.Matmul, gemm: _plan.LimbGemm, device: int) -> None:
        self._gemm = gemm
        self._multiply = Sm90Gemm(p, gemm.one, device)
        in_rows = not gemm.a_across, not gemm.b_across
        steps: list[_Rows | _Columns] = []
        if gemm.a_across:
            steps.append(_Columns(0, p.k, p.m, p.x, p.device, device))
        if any(in_rows):
            steps.append(_Rows(p, gemm, in_rows, device))
        if gemm.b_across:
            steps.append(_Columns(1, p.k, p.n, p.w, p.device, device))
        self._steps = steps
        self.kernels = (*(name for step in steps for name in step.kernels), *self._multiply.kernels)

    def __call__(self, a: int, b: int, c: int, of_a: int, of_b: int, rest: int, stream: int) -> None:
        gemm = self._gemm
        a_exponents, b_exponents = rest + gemm.a_exponents, rest + gemm.b_exponents
        places = (a, of_a, a_exponents, rest + gemm.a_maxima), (b, of_b, b_exponents, rest + gemm.b_maxima)
        for step in self._steps:
            step(places, stream)
        self._multiply(of_a, of_b, c, stream, a_exponents, b_exponents)


_Place = tuple[int, int, int, int]  # the addresses of an operand, its limbs, its exponents and its columns' maxima


class _Rows:
    """Operands that lie along what is summed over, one or both in one launch."""

    kernels: tuple[str, ...] = ("split_limbs",)

    def __init__(self, p: _plan.Matmul, gemm: _plan.LimbGemm, here: tuple[bool, bool], device: int) -> None:
        self._here = here
        m, n = (count if is_here else 0 for count, is_here in zip((p.m, p.n), here, strict=True))
        flags = _declared.flags(vector_x=_whole(p.x, 0), vector_w=_whole(p.w, 0))
        fields = {"m": m, "n": n, "k": p.k, "ldx": p.x.strides[0], "ldw": p.w.strides[0], "flags": flags}
        self._record = _declared.record(gemm.limbs.kernel, fields)
        self._grid = _plan.split_grid(m + n, p.k, p.device)
        self._launch = _kernels.launcher(gemm.limbs.kernel, device, SPLIT_WORDS)

    def __call__(self, places: tuple[_Place, _Place], stream: int) -> None:
        words: tuple[int, ...] = ()
        for place, is_here in zip(places, self._here, strict=True):
            words += place[:3] if is_here else (0, 0, 0)
        self._launch(self._grid, _plan.THREADS, (self._record.ctypes.data,), words, stream)


class _Columns:
    """An operand that lies across what is summed over: `count` columns of a matrix of k rows."""

    kernels = ("memset", "column_maxima", "split_columns")

    def __init__(self, nth: int, k: int, count: int, at: _plan.Matrix, gpu: _plan.Device, device: int) -> None:
        self._nth, self._count = nth, count
        self._maxima_grid, maxima_rows, self._grid = _plan.column_grids(k, count, gpu)
        fields = {"m": k, "n": count, "lda": at.strides[1], "maxima_rows": maxima_rows, "vector_a": _whole(at, 1)}
        maxima, columns = _plan.column_kernels()
        self._record = _declared.record(maxima, fields)
        self._maxima = _kernels.launcher(maxima, device, ("a", "maxima"))
        self._columns = _kernels.launcher(columns, device, ("a", "maxima", "limbs", "exponents"))

    def __call__(self, places: tuple[_Place, _Place], stream: int) -> None:
        a, limbs, exponents, maxima = places[self._nth]
        values = (self._record.ctypes.data,)
        cuda().runtime.memsetAsync(maxima, 0, 4 * self._count, stream)
        self._maxima(self._maxima_grid, _plan.THREADS, values, (a, maxima), stream)
        self._columns(self._grid, _plan.THREADS, values, (a, maxima, limbs, exponents), stream)


def _whole(at: _plan.Matrix, axis: int) -> bool:
    return at.aligned and at.strides[axis] % 4 == 0
