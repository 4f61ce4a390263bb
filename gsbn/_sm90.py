"""c = a bᵀ by forward_sm90's GEMM alone."""

from __future__ import annotations

from . import _declared, _kernels, _plan, _tma
from ._check import VECTORS

__all__ = ["SM90_WORDS", "Sm90Gemm"]

SM90_WORDS = ("y", "partial", "merged", "epoch", *VECTORS, "batches", "x_exponents", "w_exponents")
_NONE = (0,) * (len(SM90_WORDS) - 3)  # neither workspace nor vectors


class Sm90Gemm:
    """A launch of forward_sm90 in mode "gemm", ready but for its addresses; those of a and b may be their limbs'.

    Rows of c may start anywhere. `beside`: it reads nothing that the launch ahead of it writes, which is of this
    library, and may run beside it.
    """

    kernels = ("forward_sm90",)

    def __init__(self, p: _plan.Matmul, one: _plan.OneLaunch, device: int, *, beside: bool = False) -> None:
        self._grid = one.ctas
        of_parts = ("in_panels", "parts_in_panels", "parts_alone")
        of_statistics = ("ld_deviations", "signature", *VECTORS, "momentum", "eps", "number")
        fields = {"m": p.m, "n": p.n, "k": p.k, "y_row": p.y.strides[0], "panel": one.panel}
        self._whole_words = _plan.whole_words(p.y, p.n, 4 if one.wide else _plan.ITEMSIZE[p.dtype])
        fields["flags"] = _declared.flags(independent=beside, vector_y=self._whole_words)
        self._record = _declared.record(one.kernel, fields | dict.fromkeys((*of_parts, *of_statistics), 0))
        self._at = self._record.ctypes.data
        of_a, of_b, of_c = _tma.map_arguments(one, p)
        self._matrices = _tma.Matrices([of_a, of_b, of_c if self._whole_words else of_a])
        self._launch = _kernels.launcher(one.kernel, device, SM90_WORDS, limited=p.device.limited)

    def __call__(self, operands: tuple[int, ...], stream: int) -> None:
        """Of the addresses of a, b and c, and, where they are limbs, of a's and b's exponents."""
        a, b, c, *exponents = operands
        # the owners live until the launch is made
        _owners, maps = _tma.tensor_maps(self._matrices, a, b, c if self._whole_words else a)
        words = (c, *_NONE, *(exponents or (0, 0)))
        self._launch(self._grid, _plan.SM90_THREADS, (self._at, *maps), words, stream)
