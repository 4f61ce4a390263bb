"""forward and fold: check, plan, launch, return."""

from __future__ import annotations

import contextlib
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from . import _capture, _check, _kernels, _plan, _tma, reference
from ._interop import Kind, kind_of, kinds_of

__all__ = ["fold", "forward", "map_arguments"]

ARRAYS = (
    "x",
    "weight",
    "scale",
    "bias",
    "gamma",
    "beta",
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "out",
)
OPTIONS = ("training", "momentum", "eps", "precision", "gemm")
VECTORS = ("bias", "scale", "gamma", "beta", "running_mean", "running_var")


def forward(
    x: Any,
    weight: Any,
    scale: Any,
    *,
    bias: Any = None,
    gamma: Any = None,
    beta: Any = None,
    running_mean: Any = None,
    running_var: Any = None,
    num_batches_tracked: Any = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    precision: str = "highest",
    gemm: str = "auto",
    out: Any = None,
) -> Any:
    """``BatchNorm1d(Linear(x) * scale)``, as PyTorch defines the three.

    ::

        g = x weightᵀ
        training:   m = mean(g), v = mean((g - m)²) over the batch,  r = 1 / sqrt(scale² v + eps)
                    y = gamma scale r (g - m) + beta
        inference:  r = 1 / sqrt(running_var + eps)
                    y = gamma r (scale (g + bias) - running_mean) + beta

    In training the bias cancels in y and only moves `running_mean`. g is float32 (float64 for float64) and the variance
    is never formed as E[g²] - E[g]²; statistics and per-feature constants are merged in float64, by "sm90" in float32
    about a pivot.

    Parameters
    ----------
    x : (B, I) array
        float32, float16, bfloat16 or float64; any strides. CuPy, torch or NumPy arrays, or any DLPack producer; all
        array arguments are of one kind and on one device.
    weight : (O, I) array
        x's dtype.
    scale : (O,) array
        x's dtype or float32 (float64 with float64), as every per-feature vector, each independently.
    bias, gamma, beta : (O,) array, optional
        Taken as 0, 1 and 0 if absent.
    running_mean, running_var : (O,) array, optional
        Both or neither, of one dtype; needed in inference. Training updates them in place, the variance unbiased.
    num_batches_tracked : int64 array of one element, optional
        Training adds 1 to it.
    training : bool
        Statistics of this batch (True) or the running ones (False).
    momentum : float or None
        Weight of the new batch in the running statistics; None is the cumulative average 1 / num_batches_tracked.
    eps : float
        Added to the variance; > 0 in training, >= 0 in inference.
    precision : {"highest", "high"}
        For float32: "highest" is IEEE float32 products, "high" is TF32 where the GPU and the GEMM have it.
    gemm : {"auto", "cublas", "tiled", "sm90"}
        "sm90" is the whole forward in one launch on Hopper (float16, bfloat16, TF32; rows of x, weight and y that are
        multiples of 16 bytes), "cublas" is cuBLAS through CuPy, "tiled" gsbn's own portable kernel; "auto" takes the
        fastest one that serves. All but "cublas" (and so "auto") can be captured in a CUDA graph, after one call of
        the same kind.
    out : (B, O) array, optional
        Where y is written: x's dtype and kind, any strides, memory of its own.

    Returns
    -------
    y : (B, O) array
        x's dtype and kind (`out` itself if given; a CuPy or NumPy array for other DLPack producers).

    Raises
    ------
    TypeError
        An argument that is no array, of another kind than x, or of a dtype that is not allowed.
    ValueError
        A shape, device, stride or value that is not allowed, one element per feature in training, a `gemm` that
        cannot serve; an argument that is written and read-only, self-overlapping or overlapped by another.
    RuntimeError
        A torch tensor that requires grad while grad mode is on: gsbn is outside autograd.

    Notes
    -----
    Asynchronous on the current stream of x's library; the host never waits. Beside y it allocates O(O) scratch from
    that library's allocator, a copy of an operand whose strides the GEMM cannot take, and, but for "sm90", one B x O
    array of float32 for g where y's own memory cannot hold it (float16 and bfloat16; rows of y off a 16-byte boundary).
    "sm90" allocates 16 bytes a feature for every tile of rows instead; in training it may hold a tile's deviations from
    its own means in y, in y's dtype, until the batch's are known. On the CPU all arithmetic is NumPy's in float64, and
    y is rounded once.

    The same call gives the same bits, run to run, with "sm90" and "tiled"; with "cublas" as far as cuBLAS promises it,
    which is one stream at a time.
    """
    arrays = (x, weight, scale, bias, gamma, beta, running_mean, running_var, num_batches_tracked, out)
    options = (training, momentum, eps, precision, gemm)
    kind = kind_of(x)
    if kind is None:  # a foreign DLPack producer, or no array at all
        kind, imported, read_only = kinds_of(dict(zip(ARRAYS, arrays, strict=True)), ("x", "weight", "scale"))
        arrays = tuple(imported.values())
        return _forward(kind, arrays, options, read_only)
    return _forward(kind, arrays, options)


def _forward(
    kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], read_only: frozenset[str] = frozenset()
) -> Any:
    if not kind.on_gpu:
        return _forward_cpu(kind, arrays, options, read_only)
    device, stream, capturing = -1, 0, False
    call = key = None
    try:
        device = kind.device(arrays[0])
        stream = kind.stream(device)
        capturing = _is_capturing(stream)
        signature, pointers = kind.read(arrays)
        aligned = (pointers[0] & 15 == 0, pointers[1] & 15 == 0, pointers[-1] & 15 == 0)
        # True == 1 == 1.0: without the types a bad option would pass for a good one that came before it.
        key = (signature, options, type(options[0]), type(options[2]), aligned, capturing, read_only)
        call = _calls.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = None  # something is not what it should be: the checks say what
    if call is None:
        views = _views(kind, arrays, options, read_only)
        if views["x"].shape[0] == 0:
            with _on_device(device):
                return arrays[-1] if arrays[-1] is not None else kind.empty((0, views["weight"].shape[0]), arrays[0])
        call = _prepare_call(views, options, device, capturing)
        if key is not None:
            if len(_calls) >= _MAX_CALLS:
                _calls.clear()
            _calls[key] = call
    elif call.may_overlap(pointers):
        _views(kind, arrays, options, read_only)
    if _cuda().runtime.getDevice() == device:
        return _launch(call, kind, arrays, pointers, stream, capturing)
    with _on_device(device):
        return _launch(call, kind, arrays, pointers, stream, capturing)


# ---- check -----------------------------------------------------------------------------------------------------------


def _views(kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], read_only: frozenset[str]) -> dict[str, Any]:
    named = dict(zip(ARRAYS, arrays, strict=True))
    kinds_of(named, ("x", "weight", "scale"))
    views = {name: None if array is None else kind.view(array) for name, array in named.items()}
    for name in read_only:
        views[name] = views[name]._replace(writable=False)  # type: ignore[union-attr]
    _check.forward_arguments(views, **dict(zip(OPTIONS, options, strict=True)))
    return views


# ---- plan ------------------------------------------------------------------------------------------------------------

_MAX_CALLS = 1024


class _Gemm(NamedTuple):
    """cublasGemmEx's arguments in its column-major terms: gᵀ (n, m) = w (n, k) xᵀ (k, m)."""

    trans_w: int
    trans_x: int
    ldw: int
    ldx: int
    element: int
    accumulator: int
    compute: int


class _Call:
    """A forward call, ready but for its addresses."""

    def __init__(self, plan: _plan.Plan, problem: Any, gemm: _Gemm | None) -> None:
        self.plan, self.problem, self.gemm = plan, problem, gemm
        self.values = (problem.ctypes.data,)
        self.shape, self.k = (int(problem["m"][0]), int(problem["n"][0])), int(problem["k"][0])
        self.training = self.counts = False
        self.spans: list[tuple[int, int, int]] = []
        self.written: list[int] = []
        self.launch_one: Any = None
        self.maps: list[tuple[Any, ...]] = []
        self.launch_gemm: Any = None
        self.launch_affine: Any = None
        self.launch_normalize: Any = None
        self.affine_grid = 0

    def may_overlap(self, pointers: list[int]) -> bool:
        """Whether any two arrays' spans meet; what that means is for the full check to say."""
        if not self.written:
            return False
        end = 0
        for start, stop in sorted([(pointers[i] + low, pointers[i] + high) for i, low, high in self.spans]):
            if start < end:
                return True
            end = stop
        return False


_calls: dict[Any, _Call] = {}


def _prepare_call(views: dict[str, Any], options: tuple[Any, ...], device: int, capturing: bool) -> _Call:
    training, momentum, eps, precision, gemm = options
    x, weight, out = views["x"], views["weight"], views["out"]
    (m, k), n = x.shape, weight.shape[0]
    y_at = _plan.Matrix((n, 1), True) if out is None else _matrix(out)
    plan = _plan.plan(
        _plan.Matmul(m, n, k, x.dtype, _kernels.gpu(device), _matrix(x), _matrix(weight), y_at),
        training=bool(training),
        precision=precision,
        gemm=gemm,
        capturing=capturing,
        negative_momentum=momentum is not None and momentum < 0,
    )
    x_at = _plan.Matrix((k, 1), True) if plan.copy_x else _matrix(x)
    w_at = _plan.Matrix((k, 1), True) if plan.copy_w else _matrix(weight)

    flags = _kernels.FLAGS
    set_flags = (
        flags["vector_x"] * (x_at.aligned and x_at.strides[0] * x.itemsize % 16 == 0)
        + flags["vector_w"] * (w_at.aligned and w_at.strides[0] * x.itemsize % 16 == 0)
        + flags["vector_y"] * plan.vector_y
        + flags["cumulative"] * (momentum is None)
    )
    problem = np.zeros(1, _kernels.PROBLEM)
    fields = dict(m=m, n=n, k=k, ldx=x_at.strides[0], ldw=w_at.strides[0], ldg=plan.ldg)
    fields |= dict(y_row=y_at.strides[0], y_col=y_at.strides[1], splits=plan.splits, flags=set_flags)
    fields |= dict(stats_rows=plan.stats_rows, normalize_rows=plan.normalize_rows)
    fields |= dict(affine=plan.affine, partials=plan.partials, tickets=plan.tickets)
    fields |= dict(panel=plan.one.panel if plan.one is not None else 0)
    for name, value in fields.items():
        problem[name] = value
    for name in VECTORS:
        problem[name] = _vector_code(views[name])
    problem["momentum"], problem["eps"] = 0.0 if momentum is None else momentum, eps

    call = _Call(plan, problem, _gemm_arguments(x_at, w_at, x.dtype, precision) if plan.gemm == "cublas" else None)
    call.training = bool(training)
    call.counts = call.training and views["num_batches_tracked"] is not None
    call.written = [ARRAYS.index(name) for name in _check.written(views, training=call.training)]
    call.spans = [
        (i, *_check.span(views[name]))
        for i, name in enumerate(ARRAYS)
        if views[name] is not None and 0 not in views[name].shape
    ]
    call.affine_grid = -(-n // _plan.THREADS)
    with _on_device(device):
        if plan.one is not None:
            one = plan.one
            one = one.at_most(_kernels.resident_clusters(one.kernel, one.cluster, device))  # MPS may leave fewer
            call.plan = plan._replace(one=one)
            call.launch_one = _kernels.launcher(one.kernel, device)
            call.maps = map_arguments(one, (m, n, k), x.dtype, x.itemsize, x_at, w_at, y_at)
            return call
        if plan.gemm_kernel is not None:
            call.launch_gemm = _kernels.launcher(plan.gemm_kernel, device)
        call.launch_affine = _kernels.launcher(plan.stats_kernel if call.training else plan.affine_kernel, device)
        call.launch_normalize = _kernels.launcher(plan.normalize_kernel, device)
    return call


def _matrix(view: Any) -> _plan.Matrix:
    strides = tuple(stride // view.itemsize for stride in view.strides)
    return _plan.Matrix.of(view.shape, strides, view.pointer % 16 == 0)


def map_arguments(
    one: _plan.OneLaunch,
    shape: tuple[int, int, int],
    dtype: str,
    itemsize: int,
    x: _plan.Matrix,
    w: _plan.Matrix,
    y: _plan.Matrix,
) -> list[tuple[Any, ...]]:
    """What `tensor_map` wants beside a pointer, for x, weight and y: boxes of 128 bytes by the rows of a transfer."""
    (m, n, k), width = shape, 128 // itemsize
    operand = "tf32" if dtype == "float32" else dtype
    store_rows = 32 if itemsize == 4 else min(one.block_m, 64)
    return [
        (m, k, x.strides[0] * itemsize, operand, one.block_m // one.cluster, width, _tma.L2_256B),
        (n, k, w.strides[0] * itemsize, operand, _plan.SM90_BLOCK_N, width, _tma.L2_256B),
        (m, n, y.strides[0] * itemsize, dtype, store_rows, width, _tma.L2_NONE),
    ]


def _vector_code(view: Any) -> int:
    return 0 if view is None else view.strides[0] // view.itemsize * 8 + _kernels.KINDS[view.dtype]


def _gemm_arguments(x: _plan.Matrix, w: _plan.Matrix, dtype: str, precision: str) -> _Gemm:
    runtime, cublas = _cuda().runtime, _cuda().cublas
    element, accumulator, compute = {
        # Pedantic: as fast on this path, and the one mode that NVIDIA_TF32_OVERRIDE=1 leaves alone.
        "float32": (runtime.CUDA_R_32F, runtime.CUDA_R_32F, cublas.CUBLAS_COMPUTE_32F_PEDANTIC),
        "float16": (runtime.CUDA_R_16F, runtime.CUDA_R_32F, cublas.CUBLAS_COMPUTE_32F),
        "bfloat16": (runtime.CUDA_R_16BF, runtime.CUDA_R_32F, cublas.CUBLAS_COMPUTE_32F),
        "float64": (runtime.CUDA_R_64F, runtime.CUDA_R_64F, cublas.CUBLAS_COMPUTE_64F),
    }[dtype]
    if dtype == "float32" and precision == "high":
        compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32

    def orient(a: _plan.Matrix) -> tuple[bool, int]:
        return (True, a.strides[0]) if a.strides[1] == 1 else (False, a.strides[1])

    (w_rows, ldw), (x_rows, ldx) = orient(w), orient(x)
    none, transpose = cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T
    return _Gemm(
        trans_w=transpose if w_rows else none,
        trans_x=none if x_rows else transpose,
        ldw=ldw,
        ldx=ldx,
        element=element,
        accumulator=accumulator,
        compute=compute,
    )


# ---- launch ----------------------------------------------------------------------------------------------------------


def _launch(call: _Call, kind: Kind, arrays: tuple[Any, ...], pointers: list[int], stream: int, capturing: bool) -> Any:
    plan, values = call.plan, call.values
    x, w, y = arrays[0], arrays[1], arrays[-1]
    x_at, w_at, s, b, gamma, beta, mean, var, count, y_at = pointers
    if plan.copy_x:
        x = kind.contiguous(x)
        x_at = kind.pointer(x)
    if plan.copy_w:
        w = kind.contiguous(w)
        w_at = kind.pointer(w)
    if y is None:
        y = kind.empty(call.shape, x)
        y_at = kind.pointer(y)
    scratch, workspace = kind.scratch(plan.workspace if plan.one is None else plan.one.workspace, x)
    g = y_at if plan.y_is_g else workspace + plan.g
    if capturing:
        _capture.keep_alive(stream, (x, w, y, scratch))

    if plan.one is not None:
        one = plan.one
        maps = [_tma.tensor_map(at, *rest) for at, rest in zip((x_at, w_at, y_at), call.maps, strict=True)]
        words = (y_at, workspace, workspace + one.merged, workspace + one.roll, b, s, gamma, beta, mean, var)
        values += tuple(at for _, at in maps)
        call.launch_one(
            one.clusters * one.cluster, _plan.SM90_THREADS, values, (*words, count if call.counts else 0), stream
        )
        return _written(call, kind, arrays, y)
    if call.gemm is None:
        call.launch_gemm(plan.gemm_grid, plan.gemm_block, values, (x_at, w_at, g), stream)
    else:
        _cublas(call, stream, x_at, w_at, g)
    if call.training:
        if plan.tickets_bytes:
            _cuda().runtime.memsetAsync(workspace + plan.tickets, 0, plan.tickets_bytes, stream)
        addresses: tuple[int, ...] = (g, workspace, b, s, gamma, beta, mean, var, count)
        call.launch_affine(plan.stats_grid, _plan.THREADS, values, addresses, stream)
    else:
        call.launch_affine(call.affine_grid, _plan.THREADS, values, (workspace, b, s, gamma, beta, mean, var), stream)
    call.launch_normalize(
        plan.normalize_grid, _plan.THREADS, values, (g, y_at, workspace, count if call.counts else 0), stream
    )
    return _written(call, kind, arrays, y)


def _written(call: _Call, kind: Kind, arrays: tuple[Any, ...], y: Any) -> Any:
    if kind.counts_writes:
        for i in call.written:
            kind.written(arrays[i])
    return y


class _Stream:
    """A raw stream, as CuPy takes one over."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def _cublas(call: _Call, stream: int, x: int, w: int, g: int) -> None:
    cuda = _cuda()
    if cuda.current_stream().ptr == stream:
        _gemm_ex(call, cuda, x, w, g)
    else:
        with cuda.cupy.cuda.Stream.from_external(_Stream(stream)):  # CuPy's cuBLAS follows CuPy's current stream
            _gemm_ex(call, cuda, x, w, g)


def _gemm_ex(call: _Call, cuda: Any, x: int, w: int, g: int) -> None:
    cublas, gemm, (m, n) = cuda.cublas, call.gemm, call.shape
    assert gemm is not None
    one, zero = cuda.coefficients[gemm.accumulator]
    handle = cuda.cublas_handle()
    mode = cublas.getMathMode(handle)
    if mode != cublas.CUBLAS_DEFAULT_MATH:  # somebody else's TF32 must not reach our float32
        cublas.setMathMode(handle, cublas.CUBLAS_DEFAULT_MATH)
    try:
        cublas.gemmEx(
            handle, gemm.trans_w, gemm.trans_x, n, m, call.k, one,
            w, gemm.element, gemm.ldw, x, gemm.element, gemm.ldx, zero,
            g, gemm.accumulator, call.plan.ldg, gemm.compute, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
    finally:
        if mode != cublas.CUBLAS_DEFAULT_MATH:
            cublas.setMathMode(handle, mode)


@cache
def _cuda() -> Any:
    """The parts of CuPy that a call uses: importing them anew each time would cost it microseconds."""
    import cupy
    from cupy.cuda import runtime
    from cupy_backends.cuda.libs import cublas

    numbers: dict[int, Any] = {
        runtime.CUDA_R_32F: np.array([1, 0], np.float32),
        runtime.CUDA_R_64F: np.array([1, 0], np.float64),
    }
    coefficients = {key: (a.ctypes.data, a.ctypes.data + a.itemsize) for key, a in numbers.items()}
    return SimpleNamespace(
        cupy=cupy,
        runtime=runtime,
        cublas=cublas,
        numbers=numbers,
        coefficients=coefficients,
        current_stream=cupy.cuda.get_current_stream,
        cublas_handle=cupy.cuda.device.get_cublas_handle,
    )


def _is_capturing(stream: int) -> bool:
    # The legacy default stream cannot be captured, and may not be asked while another thread captures.
    return stream not in (0, 1) and bool(_cuda().runtime.streamIsCapturing(stream))


def _on_device(device: int) -> Any:
    cuda = _cuda()
    return contextlib.nullcontext() if cuda.runtime.getDevice() == device else cuda.cupy.cuda.Device(device)


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def _forward_cpu(kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], read_only: frozenset[str]) -> Any:
    views = _views(kind, arrays, options, read_only)
    training, momentum, eps, _, _ = options
    given = dict(zip(ARRAYS, arrays, strict=True))
    host = {name: None if array is None else kind.numpy(array) for name, array in given.items()}
    shape = (views["x"].shape[0], views["weight"].shape[0])
    if shape[0] == 0:
        return given["out"] if given["out"] is not None else kind.from_numpy(np.empty(shape, host["x"].dtype))  # type: ignore[union-attr]
    operands = {name: host[name] for name in ARRAYS[:-1]}
    result = reference.forward(**operands, training=bool(training), momentum=momentum, eps=float(eps))  # type: ignore[arg-type]
    y = reference.round_to(result.y, host["x"].dtype)  # type: ignore[union-attr]
    if training:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            target, value = host[name], getattr(result, name)
            if target is not None:
                target[...] = value if name == "num_batches_tracked" else reference.round_to(value, target.dtype)
    if host["out"] is not None:
        host["out"][...] = y
    for name in _check.written(views, training=bool(training)):
        kind.written(given[name])
    return given["out"] if given["out"] is not None else kind.from_numpy(y)


# ---- fold ------------------------------------------------------------------------------------------------------------

FOLD_ARRAYS = ("weight", "scale", "running_mean", "running_var", "bias", "gamma", "beta")


def fold(
    weight: Any,
    scale: Any,
    running_mean: Any,
    running_var: Any,
    *,
    bias: Any = None,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
) -> tuple[Any, Any]:
    """Fold scale and frozen batch normalisation into the linear layer: inference is then ``x wᵀ + b``.

    ::

        r = 1 / sqrt(running_var + eps)
        w = gamma r scale weight,   b = gamma r (scale bias - running_mean) + beta

    Parameters
    ----------
    weight : (O, I) array
        float32, float16, bfloat16 or float64, of any kind that `forward` takes.
    scale, running_mean, running_var, bias, gamma, beta : (O,) array
        As in `forward`; the last three are optional.
    eps : float
        Added to the variance, >= 0.

    Returns
    -------
    w : (O, I) array, b : (O,) array
        New arrays of weight's dtype and kind, computed in float64 and rounded once.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `forward`.
    """
    given = (weight, scale, running_mean, running_var, bias, gamma, beta)
    kind, arrays, _ = kinds_of(dict(zip(FOLD_ARRAYS, given, strict=True)), FOLD_ARRAYS[:4])
    views = {name: None if array is None else kind.view(array) for name, array in arrays.items()}
    _check.fold_arguments(views, eps=eps)
    if not kind.on_gpu:
        host = {name: None if array is None else kind.numpy(array) for name, array in arrays.items()}
        dtype = host["weight"].dtype  # type: ignore[union-attr]
        w, b = reference.fold(**host, eps=float(eps))  # type: ignore[arg-type]
        return kind.from_numpy(reference.round_to(w, dtype)), kind.from_numpy(reference.round_to(b, dtype))

    view = views["weight"]
    assert view is not None
    device = kind.device(arrays["weight"])
    with _on_device(device):
        at = _matrix(view)
        source = arrays["weight"]
        if at.strides[1] != 1:
            source, at = kind.contiguous(source), _plan.Matrix((view.shape[1], 1), True)
        problem = np.zeros(1, _kernels.PROBLEM)
        problem["n"], problem["k"] = view.shape
        problem["ldw"], problem["eps"] = at.strides[0], eps
        for name in VECTORS:
            problem[name] = _vector_code(views[name])
        w, b = kind.empty(view.shape, source), kind.empty(view.shape[:1], source)
        stream = kind.stream(device)
        if _is_capturing(stream):
            _capture.keep_alive(stream, (source, w, b))
        vectors = (0 if arrays[name] is None else kind.pointer(arrays[name]) for name in VECTORS)
        launch = _kernels.launcher(_kernels.fold_kernel(_plan.C_TYPE[view.dtype]), device)
        addresses = (kind.pointer(source), kind.pointer(w), kind.pointer(b), *vectors)
        launch(view.shape[0], _plan.THREADS, (problem.ctypes.data,), addresses, stream)
    return w, b
