"""Compute c = a bᵀ by cuBLASLt, the library that CuPy's cuBLAS has loaded.

CuPy's handle has a stream, a workspace and modes that all calls share, and cannot be captured. Here nothing is shared.
A product is described and its algorithm is chosen once. Each call passes its stream, and its own scratch memory as the
workspace. So threads and streams are independent, a graph owns the memory that its replays use, and equal calls give
equal bits.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from functools import cache
from typing import Any

from .. import _plan
from .device import cuda
from .driver import beside_captures, pointer

_TRANS_A, _TRANS_B, _SM_COUNT_TARGET = 3, 4, 15  # CUBLASLT_MATMUL_DESC_...
_MAX_WORKSPACE_BYTES, _REDUCTION_SCHEMES, _MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_...; b, a, c, d
_ANY, _IN_ACCUMULATOR = 7, 2  # CUBLASLT_REDUCTION_SCHEME_MASK, ..._COMPUTE_TYPE
_WORKSPACE = 32 << 20  # bytes at most; NVIDIA recommends this for Hopper
_ONE_AND_ZERO: dict[str, ctypes.Array[Any]] = {
    "float32": (ctypes.c_float * 2)(1, 0),
    "float64": (ctypes.c_double * 2)(1, 0),
}


class _Choice(ctypes.Structure):  # cublasLtMatmulHeuristicResult_t
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Descriptor:
    """A descriptor of cuBLASLt that is destroyed with this object; `kind` is its name in cuBLASLt."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self._kind, made = kind, ctypes.c_void_p()
        _check(getattr(_library(), f"cublasLt{kind}Create")(ctypes.byref(made), *arguments))
        weakref.finalize(self, getattr(_library(), f"cublasLt{kind}Destroy"), made)
        self.at: int | None = made.value

    def set(self, attribute: int, value: Any) -> None:
        set_attribute = getattr(_library(), f"cublasLt{self._kind}SetAttribute")
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(set_attribute(ctypes.c_void_p(self.at), attribute, ctypes.byref(value), size))


class CublasGemm:
    """A product that is ready to run with addresses and `workspace` bytes of scratch memory.

    a is `p.x` and b is `p.w`, with any strides that cuBLAS takes. c is `p.y`, which starts on 16 bytes. If `wide`, c
    has the accumulator's type.
    """

    def __init__(self, p: _plan.Matmul, precision: str, device: int, *, wide: bool) -> None:
        types, op_n, op_t = _types(), cuda().cublas.CUBLAS_OP_N, cuda().cublas.CUBLAS_OP_T
        accumulator = "float64" if p.dtype == "float64" else "float32"
        result = accumulator if wide else p.dtype
        with beside_captures():
            handle = _handle(device)
            product = _Descriptor("MatmulDesc", _compute(p.dtype, precision), types[accumulator])
            # cuBLAS is column-major: it computes cᵀ = b aᵀ.
            b, b_k_major = _operand(types[p.dtype], p.w, p.n, p.k)
            a, a_k_major = _operand(types[p.dtype], p.x, p.m, p.k)
            c = _layout(types[result], p.n, p.m, p.y.strides[0])
            product.set(_TRANS_A, ctypes.c_int32(op_t if b_k_major else op_n))
            product.set(_TRANS_B, ctypes.c_int32(op_n if a_k_major else op_t))
            product.set(_SM_COUNT_TARGET, ctypes.c_int32(p.device.target))
            wanted = _Descriptor("MatmulPreference")
            wanted.set(_MAX_WORKSPACE_BYTES, ctypes.c_uint64(_WORKSPACE))
            # Partial products of split-k would otherwise be added up in 16 bits.
            wanted.set(_REDUCTION_SCHEMES, ctypes.c_uint32(_ANY if result == accumulator else _IN_ACCUMULATOR))
            aligned = (16 if operand.aligned else _plan.ITEMSIZE[p.dtype] for operand in (p.w, p.x))
            for attribute, nbytes in zip(_MIN_ALIGNMENTS, (*aligned, 16, 16), strict=True):
                wanted.set(attribute, ctypes.c_uint32(nbytes))
            choice, found = _Choice(), ctypes.c_int()
            asked = map(ctypes.c_void_p, (handle, product.at, b.at, a.at, c.at, c.at, wanted.at))
            _check(_library().cublasLtMatmulAlgoGetHeuristic(*asked, 1, ctypes.byref(choice), ctypes.byref(found)))
            _check(choice.state)
        self.workspace: int = choice.workspace
        self._kept, one_and_zero = (product, a, b, c, choice), _ONE_AND_ZERO[accumulator]
        one, size = ctypes.addressof(one_and_zero), ctypes.sizeof(one_and_zero) // 2
        self._matmul, self._handle, self._product = _library().cublasLtMatmul, pointer(handle), pointer(product.at)
        self._a, self._b, self._c, self._choice = map(pointer, (a.at, b.at, c.at, ctypes.addressof(choice)))
        self._one, self._zero = pointer(one), pointer(one + size)
        self._size = ctypes.c_size_t.from_param(choice.workspace)

    def run(self, operands: tuple[int, int, int, int], stream: int) -> None:
        """Launch the product on a stream, with the addresses of a, b, c and the workspace."""
        a, b, c, workspace = map(pointer, operands)
        of_c = self._c
        result = self._matmul(
            self._handle, self._product, self._one, b, self._b, a, self._a, self._zero, c, of_c, c, of_c,
            self._choice, workspace, self._size, pointer(stream),
        )  # fmt: skip
        if result:
            _check(result)


def _types() -> dict[str, int]:
    runtime = cuda().runtime
    names = {"float16": "16F", "bfloat16": "16BF", "float32": "32F", "float64": "64F"}
    return {dtype: getattr(runtime, f"CUDA_R_{name}") for dtype, name in names.items()}


def _compute(dtype: str, precision: str) -> int:
    name = "64F" if dtype == "float64" else "32F"
    if dtype == "float32":
        # The pedantic mode is as fast on this path, and is the only mode that NVIDIA_TF32_OVERRIDE=1 does not change.
        name = "32F_FAST_TF32" if precision == "high" else "32F_PEDANTIC"
    found: int = getattr(cuda().cublas, f"CUBLAS_COMPUTE_{name}")
    return found


def _operand(element: int, matrix: _plan.Matrix, rows: int, k: int) -> tuple[_Descriptor, bool]:
    """Return the layout of an operand of `rows` by k, and whether it is K-major."""
    row, col = matrix.strides
    k_major = col == 1 and row >= k
    return (_layout(element, k, rows, row) if k_major else _layout(element, rows, k, col)), k_major


def _layout(element: int, rows: int, columns: int, pitch: int) -> _Descriptor:
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(pitch)
    return _Descriptor("MatrixLayout", element, *sizes)


@cache
def _handle(device: int) -> int | None:
    """Return the handle of a device, which must be the current one. It has no state, so threads may share it."""
    made = ctypes.c_void_p()
    _check(_library().cublasLtCreate(ctypes.byref(made)))
    return made.value


@cache
def _library() -> ctypes.CDLL:
    """Return the library with which CuPy's cuBLAS is linked. It is loaded already, so its name is enough."""
    major = cuda().runtime.runtimeGetVersion() // 1000
    return ctypes.CDLL(f"cublasLt64_{major}.dll" if sys.platform == "win32" else f"libcublasLt.so.{major}")


def _check(result: int) -> None:
    if result:
        told = _library().cublasLtGetStatusName
        told.restype = ctypes.c_char_p
        raise RuntimeError(f"cuBLAS: {told(result).decode()} in a matrix product")
