"""The current GPU as a call sees it, and cuBLAS through CuPy."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from . import _plan

__all__ = [
    "Gemm",
    "cuda",
    "gemm_arguments",
    "gemm_ex",
    "gpu_obstacle",
    "hold_until_done",
    "is_capturing",
    "is_current",
    "on_device",
]


def gpu_obstacle() -> str:
    """Why CuPy cannot be used on a GPU here; empty if it can."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "no GPU is visible"
        cupy.cuda.nvrtc.getVersion()
    except ImportError as error:
        return "CuPy is not installed" if error.name == "cupy" else str(error).strip().splitlines()[0]
    except Exception as error:  # CUDARuntimeError and whatever a broken installation raises
        return str(error).strip().splitlines()[0]
    return ""


@cache
def cuda() -> Any:
    """The parts of CuPy that a call uses: importing them anew each time would cost it microseconds."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "gsbn: expected CuPy for arrays on a GPU, got an environment without it: "
            "pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]', whichever CUDA the driver has"
        ) from error
    from cupy.cuda import driver, runtime
    from cupy_backends.cuda.libs import cublas

    numbers: dict[int, Any] = {
        runtime.CUDA_R_32F: np.array([1, 0], np.float32),
        runtime.CUDA_R_64F: np.array([1, 0], np.float64),
    }
    coefficients = {key: (a.ctypes.data, a.ctypes.data + a.itemsize) for key, a in numbers.items()}
    return SimpleNamespace(
        cupy=cupy,
        runtime=runtime,
        current_context=driver.ctxGetCurrent,
        set_context=driver.ctxSetCurrent,
        cublas=cublas,
        numbers=numbers,
        coefficients=coefficients,
        current_stream=cupy.cuda.get_current_stream,
        cublas_handle=cupy.cuda.device.get_cublas_handle,
    )


def is_capturing(stream: int) -> bool:
    # The legacy default stream cannot be captured, and may not be asked while another thread captures.
    return stream not in (0, 1) and bool(cuda().runtime.streamIsCapturing(stream))


_primary: dict[int, int] = {}  # handles of primary contexts, by device


def is_current(device: int) -> bool:
    """Whether a device's primary context, in which gsbn's kernels are loaded, is this thread's current one.

    A thread that has no context gets its device's primary one: the driver, unlike the runtime, does not see to it.
    """
    found = cuda()
    context = found.current_context()
    if context == 0:
        found.runtime.setDevice(found.runtime.getDevice())
        context = found.current_context()
    return bool(context == _primary.get(device))


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make a device's primary context current, and leave what was."""
    if is_current(device):
        yield
        return
    found = cuda()
    before = found.current_context()
    found.runtime.setDevice(device)
    _primary[device] = found.current_context()
    try:
        yield
    finally:
        found.set_context(before)


_NO_SHORT_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, which CuPy does not name


_lent: deque[tuple[Any, Any]] = deque()  # an event, and what must stay until it has happened


def hold_until_done(arrays: Any, device: int) -> None:
    """Hold what DLPack producers have lent until CuPy's current stream on the device has done what it has to do.

    A producer may use the memory for something else as soon as nobody holds it any more; what holds it is let go by the
    next call of this function. A captured call holds nothing: what a graph reads is the caller's to keep.
    """
    import cupy

    with on_device(device):
        stream = cupy.cuda.get_current_stream()
        if is_capturing(stream.ptr):
            return
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
    _lent.append((event, arrays))
    while _lent and _lent[0][0].done:
        _lent.popleft()


class Gemm(NamedTuple):
    """cublasGemmEx's arguments for c (m, n) = a (m, k) bᵀ (k, n), in its column-major terms: cᵀ = b aᵀ."""

    m: int
    n: int
    k: int
    trans_a: int
    trans_b: int
    lda: int
    ldb: int
    ldc: int
    element: int
    result: int
    accumulator: int
    compute: int
    mode: int
    sms: int  # that cuBLAS shall aim at; 0 for all


def gemm_arguments(
    shape: tuple[int, int, int],
    a: _plan.Matrix,
    b: _plan.Matrix,
    ldc: int,
    dtype: str,
    precision: str,
    *,
    wide: bool,
    sms: int,
) -> Gemm:
    """For a (m, k) and b (n, k) of any strides that cuBLAS takes; c is in the accumulator's type if `wide`."""
    runtime, cublas = cuda().runtime, cuda().cublas
    element, accumulator, compute = {
        # Pedantic: as fast on this path, and the one mode that NVIDIA_TF32_OVERRIDE=1 leaves alone.
        "float32": (runtime.CUDA_R_32F, runtime.CUDA_R_32F, cublas.CUBLAS_COMPUTE_32F_PEDANTIC),
        "float16": (runtime.CUDA_R_16F, runtime.CUDA_R_32F, cublas.CUBLAS_COMPUTE_32F),
        "bfloat16": (runtime.CUDA_R_16BF, runtime.CUDA_R_32F, cublas.CUBLAS_COMPUTE_32F),
        "float64": (runtime.CUDA_R_64F, runtime.CUDA_R_64F, cublas.CUBLAS_COMPUTE_64F),
    }[dtype]
    if dtype == "float32" and precision == "high":
        compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32

    def orient(matrix: _plan.Matrix) -> tuple[bool, int]:
        row, col = matrix.strides
        return (True, row) if col == 1 and row >= shape[2] else (False, col)

    (a_rows, lda), (b_rows, ldb) = orient(a), orient(b)
    none, transpose = cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T
    return Gemm(
        *shape,
        trans_a=none if a_rows else transpose,
        trans_b=transpose if b_rows else none,
        lda=lda,
        ldb=ldb,
        ldc=ldc,
        element=element,
        result=accumulator if wide else element,
        accumulator=accumulator,
        compute=compute,
        # A 16-bit result of a split k would else be added up in 16 bits.
        mode=cublas.CUBLAS_DEFAULT_MATH if wide or element == accumulator else _NO_SHORT_SUMS,
        sms=sms,
    )


class _Stream:
    """A raw stream, as CuPy takes one over."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def gemm_ex(gemm: Gemm, operands: tuple[int, int, int], stream: int) -> None:
    """Launch it on a stream, with the addresses of a, b and c."""
    found = cuda()
    if found.current_stream().ptr == stream:
        _gemm_ex(gemm, found, *operands)
    else:
        with found.cupy.cuda.Stream.from_external(_Stream(stream)):  # CuPy's cuBLAS follows CuPy's current stream
            _gemm_ex(gemm, found, *operands)


def _gemm_ex(gemm: Gemm, found: Any, a: int, b: int, c: int) -> None:
    cublas = found.cublas
    one, zero = found.coefficients[gemm.accumulator]
    handle = found.cublas_handle()
    mode = cublas.getMathMode(handle)
    if mode != gemm.mode:  # somebody else's TF32 must not reach our float32
        cublas.setMathMode(handle, gemm.mode)
    aim = _aim_at(handle, gemm.sms) if gemm.sms else 0
    try:
        cublas.gemmEx(
            handle, gemm.trans_b, gemm.trans_a, gemm.n, gemm.m, gemm.k, one,
            b, gemm.element, gemm.ldb, a, gemm.element, gemm.lda, zero,
            c, gemm.result, gemm.ldc, gemm.compute, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
    finally:
        if mode != gemm.mode:
            cublas.setMathMode(handle, mode)
        if gemm.sms:
            _aim_at(handle, aim)


def _aim_at(handle: int, sms: int) -> int:
    """Tell cuBLAS how many SMs its kernels shall take, 0 for all; what it was told before. CuPy does not wrap it."""
    library, before = _cublas_library(), ctypes.c_int()
    result = library.cublasGetSmCountTarget(ctypes.c_void_p(handle), ctypes.byref(before))
    result = result or library.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(sms))
    if result != 0:
        raise RuntimeError(f"cuBLAS: error {result} while setting the number of SMs to aim at")
    return before.value


@cache
def _cublas_library() -> ctypes.CDLL:
    """The library that CuPy has loaded, found by its name."""
    major = cuda().runtime.runtimeGetVersion() // 1000
    return ctypes.CDLL(f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}")
