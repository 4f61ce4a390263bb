"""c = a bᵀ in float32 on tensor cores: operands to limbs, and forward_sm90's GEMM alone (docs/float32.md)."""

from __future__ import annotations

from . import _declared, _kernels, _plan
from ._device import cuda
from ._sm90 import Sm90Gemm

__all__ = ["SPLIT_WORDS", "Multiply"]

SPLIT_WORDS = ("x", "x_limbs", "x_exponents", "w", "w_limbs", "w_exponents")


class Multiply:
    """A product as `_plan.limb_gemm` decides it, ready but for its addresses."""

    def __init__(self, p: _plan.Matmul, gemm: _plan.LimbGemm, device: int) -> None:
        assert gemm.one.limbs is not None
        self._limbs, self._gemm = gemm.one.limbs, gemm
        flags = _declared.flags(vector_x=_whole(p.x, 0), vector_w=_whole(p.w, 0))
        fields = {"m": p.m, "n": p.n, "k": p.k, "ldx": p.x.strides[0], "ldw": p.w.strides[0], "flags": flags}
        self._record = _declared.record(self._limbs.kernel, fields)
        self._multiply = Sm90Gemm(p, gemm.one, device)
        across = (gemm.a_maxima is not None) + (gemm.b_maxima is not None)
        self.kernels = (*["split_limbs"] * (across < 2), *["memset", "column_maxima", "split_columns"] * across)
        self.kernels += self._multiply.kernels
        self._split = _kernels.launcher(self._limbs.kernel, device, SPLIT_WORDS)
        maxima, columns = _plan.column_kernels()
        self._maxima = _kernels.launcher(maxima, device, ("a", "maxima"))
        self._columns = _kernels.launcher(columns, device, ("a", "maxima", "limbs", "exponents"))
        self._of_a = None if gemm.a_maxima is None else _Columns(p.k, p.m, p.x, p.device)
        self._of_b = None if gemm.b_maxima is None else _Columns(p.k, p.n, p.w, p.device)

    def __call__(self, a: int, b: int, c: int, workspace: int, stream: int) -> None:
        limbs, gemm = self._limbs, self._gemm
        of_a, of_b = workspace + limbs.x, workspace + limbs.w
        a_exponents, b_exponents = workspace + limbs.x_exponents, workspace + limbs.w_exponents
        # The rows of both operands in one launch; the grid leaves out who is not there.
        rows = [0, 0, 0] if self._of_a else [a, of_a, a_exponents]
        rows += [0, 0, 0] if self._of_b else [b, of_b, b_exponents]
        if any(rows):
            self._split(gemm.split_grid, _plan.THREADS, (self._record.ctypes.data,), tuple(rows), stream)
        for columns, at, to, exponents, maxima in (
            (self._of_a, a, of_a, a_exponents, gemm.a_maxima),
            (self._of_b, b, of_b, b_exponents, gemm.b_maxima),
        ):
            if columns is not None:
                assert maxima is not None
                address = (columns.record.ctypes.data,)
                cuda().runtime.memsetAsync(workspace + maxima, 0, 4 * columns.count, stream)
                self._maxima(columns.maxima_grid, _plan.THREADS, address, (at, workspace + maxima), stream)
                words = (at, workspace + maxima, to, exponents)
                self._columns(columns.grid, _plan.THREADS, address, words, stream)
        self._multiply(of_a, of_b, c, stream, a_exponents, b_exponents)


class _Columns:
    """An operand that lies across what is summed over: `count` columns of a matrix of k rows."""

    def __init__(self, k: int, count: int, at: _plan.Matrix, gpu: _plan.Device) -> None:
        self.count = count
        self.maxima_grid, maxima_rows, self.grid = _plan.column_grids(k, count, gpu)
        fields = {"m": k, "n": count, "lda": at.strides[1], "maxima_rows": maxima_rows, "vector_a": _whole(at, 1)}
        self.record = _declared.record(_plan.column_kernels()[0], fields)


def _whole(at: _plan.Matrix, axis: int) -> bool:
    return at.aligned and at.strides[axis] % 4 == 0
