"""forward and fold: check, plan, launch, return."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from . import _check, _declared, _kernels, _plan, _tma, reference
from ._call import ABSENT, Call
from ._device import gemm_arguments, is_capturing, is_current, on_device
from ._interop import Kind, Prepared, kind_of, kinds_of
from ._limbs import Multiply

__all__ = ["Saved", "fold", "forward", "forward_within", "matrix_of"]

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
OPTIONS = ("training", "momentum", "eps", "precision", "gemm", "return_saved", "sms")
VECTORS = ("bias", "scale", "gamma", "beta", "running_mean", "running_var")
PREPARED = ("limbs of weight", "exponents of weight")  # what a prepared weight brings


class Saved(NamedTuple):
    """What `forward(..., return_saved=True)` keeps for `gsbn.backward`: pass it on, once or several times.

    x and weight are the arrays that were given, not copies. Whoever changes them, or any array here, in place before
    the backward would get the gradients of something that never ran. Torch counts changes of a tensor, and the backward
    refuses an x or weight that has changed; of other arrays nothing notices.

    Attributes
    ----------
    x : (B, I) array
    weight : (O, I) array
    deviations : (B, P) array
        In training g - mean(g) in x's dtype, for float16 each feature in units of a power of two near its standard
        deviation, so that none overflows or vanishes; for 16-bit dtypes up to 16 rows in float64, since what
        normalisation leaves of so few would be lost otherwise. In inference g in float32 (float64 for float64). Rows
        are padded to 16 bytes: P >= O. On the CPU of no rows: there the backward computes g anew, in float64.
    vectors : (7, O) array
        Per-feature constants in float64.
    training : bool
    precision, gemm : str
        As they were given; the backward's products follow them.
    dtypes : tuple
        The dtypes of bias, scale, gamma and beta by name; None for an absent one.
    versions : tuple
        Torch's counts of changes of x and of weight; None for what has none.
    """

    x: Any
    weight: Any
    deviations: Any
    vectors: Any
    training: bool
    precision: str
    gemm: str
    dtypes: tuple[str | None, str | None, str | None, str | None]
    versions: tuple[int | None, int | None] = (None, None)

    def __reduce__(self) -> Any:
        return Saved, self[:8]  # what is loaded or copied begins to count anew


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
    sms: int | None = None,
    out: Any = None,
    return_saved: bool = False,
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
    weight : (O, I) array or Prepared
        x's dtype; or what `prepare` made of such an array.
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
        For float32: "highest" is norm-wise at least as accurate as a product in IEEE float32; "high" is TF32 where the
        GPU and the GEMM have it. With "sm90", "highest" goes through two float16 limbs an operand (`docs/float32.md`):
        an element beside one 2^16 times its size in the same row loses digits, which "cublas" keeps.
    gemm : {"auto", "cublas", "tiled", "sm90"}
        "sm90" is the whole forward in one launch on Hopper, for all but float64, and for rows of x, weight and y that
        are multiples of 16 bytes; with `return_saved` in training only, in 16 bits from 17 rows on; with at most
        32768 input features, 262144 in bfloat16. float32 at "highest" has a launch before it, which makes limbs, and
        takes any number of input features and any rows of x and weight; with other rows of y "sm90" is its GEMM alone,
        with two launches after it.
        "cublas" is cuBLAS through CuPy, "tiled" gsbn's own portable kernel; "auto" takes the fastest that serves. All
        but "cublas" (and so "auto") can be captured in a CUDA graph, after one call of the same kind.
    sms : int, optional
        At most so many of the GPU's streaming multiprocessors are occupied by any launch of the call; None is all. It
        matters where another kernel on the GPU waits for this call, a collective of another library for one: in
        training "sm90" needs all the SMs that it takes at once (unless all rows fit one tile), and would wait for the
        other to leave them. cuBLAS takes the number as a target, and waits for nobody. No effect on the CPU.
    out : (B, O) array, optional
        Where y is written: x's dtype and kind, any strides, memory of its own.
    return_saved : bool
        Also return what `gsbn.backward` needs.

    Returns
    -------
    y : (B, O) array
        x's dtype and kind (`out` itself if given; a CuPy or NumPy array for other DLPack producers).
    saved : Saved
        With `return_saved`: x and weight themselves, B x O deviations of g from its mean, O(O) constants.

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
    With `return_saved` the deviations are one B x O array more (`Saved` tells its dtype); but for "sm90", g is computed
    in it where it is wide enough.
    "sm90" allocates 16 bytes a feature for every tile of rows instead, and for limbs x's own bytes and, unless it is
    prepared, the weight's; in training it may hold a tile's deviations from its own means in y, in y's dtype, until the
    batch's are known. What a captured call allocates, y included, lives as long as the graph and no longer. On the CPU
    all arithmetic is NumPy's in float64, and y is rounded once.

    The same call gives the same bits, run to run, with "sm90" and "tiled"; with "cublas" as far as cuBLAS promises it,
    which is one stream at a time.
    """
    arrays = (x, weight, scale, bias, gamma, beta, running_mean, running_var, num_batches_tracked, out)
    options = (training, momentum, eps, precision, gemm, return_saved, sms)
    return _read(arrays, options, _ANY)


def forward_within(limits: _plan.Limits, *arguments: Any, **keywords: Any) -> Any:
    """`forward` of the same arguments, the planner's choice being limited; on the CPU there is none."""
    given = _signature().bind(*arguments, **keywords)
    given.apply_defaults()
    arrays, options = (tuple(given.arguments[name] for name in names) for names in (ARRAYS, OPTIONS))
    return _read(arrays, options, limits)


@cache
def _signature() -> inspect.Signature:
    return inspect.signature(forward)


_ANY = _plan.Limits()


def _read(arrays: tuple[Any, ...], options: tuple[Any, ...], limits: _plan.Limits) -> Any:
    """What kind of arrays these are, and the rest by it."""
    prepared = None
    x, weight, precision = arrays[0], arrays[1], options[3]
    if isinstance(weight, Prepared):
        if weight.precision != precision:
            raise ValueError(f"weight: expected one prepared for precision={precision!r}, got {weight.precision!r}")
        prepared, arrays = weight, (x, weight.weight, *arrays[2:])
    kind = kind_of(x)
    if kind is None:  # a foreign DLPack producer, or no array at all
        own = ("out",) if prepared is None else ("out", "weight")
        kind, imported, read_only = kinds_of(dict(zip(ARRAYS, arrays, strict=True)), ("x", "weight", "scale"), own)
        arrays = tuple(imported.values())
        return _forward(kind, arrays, options, prepared, limits, read_only)
    return _forward(kind, arrays, options, prepared, limits)


def _forward(
    kind: Kind,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    prepared: Prepared | None,
    limits: _plan.Limits,
    read_only: frozenset[str] = frozenset(),
) -> Any:
    if not kind.on_gpu:
        return _forward_cpu(kind, arrays, options, read_only)
    device = kind.device(arrays[0])
    if not is_current(device):
        with on_device(device):
            return _forward(kind, arrays, options, prepared, limits, read_only)
    stream = kind.stream(device)
    capturing = is_capturing(stream)
    found = key = None
    limbs = prepared is not None and prepared.limbs is not None
    try:
        signature, pointers = kind.read(arrays)
        aligned = (pointers[0] & 15 == 0, pointers[1] & 15 == 0, pointers[-1] & 15 == 0)
        # True == 1 == 1.0: without the types a bad option would pass for a good one that came before it.
        types = (type(options[0]), type(options[1]), type(options[2]), type(options[5]), type(options[6]))
        key = (signature, options, types, aligned, capturing, limbs, read_only, limits)
        found = _calls.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = None  # something is not what it should be: the checks say what
    if found is None:
        views = _views(kind, arrays, options, read_only)
        if views["x"].shape[0] == 0:
            return _nothing(kind, arrays, options, views["weight"].shape[0])
        found = _prepare_call(kind, arrays, views, options, device, capturing, prepared, limits)
        if key is not None:
            if len(_calls) >= _MAX_CALLS:
                _calls.clear()
            _calls[key] = found
    elif found.may_overlap(pointers):
        _views(kind, arrays, options, read_only)
    if limbs:
        pointers += prepared.limbs[1:]  # type: ignore[union-attr, index]
    made = found.call.run(arrays[0], pointers, stream, capturing, prepared)
    if found.written and kind.counts_writes:
        kind.written([arrays[i] for i in found.written])
    y = arrays[-1] if found.y is None else made[found.y]
    return y if found.dtypes is None else (y, _saved(kind, arrays, options, made[-2], made[-1], found.dtypes))


def _nothing(kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], features: int) -> Any:
    """The result of an empty batch."""
    x, y = arrays[0], arrays[-1]
    y = kind.empty((0, features), x) if y is None else y
    if not options[5]:
        return y
    vectors = kind.empty((_plan.SAVED_ROWS, features), x, "float64")  # never read
    return y, _saved(kind, arrays, options, kind.empty((0, features), x), vectors, _dtypes(kind, arrays))


def _dtypes(kind: Kind, arrays: tuple[Any, ...]) -> tuple[str | None, ...]:
    """Of bias, scale, gamma and beta."""
    return tuple(None if a is None else kind.dtype(a) for a in (arrays[3], arrays[2], *arrays[4:6]))


def _saved(
    kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], deviations: Any, vectors: Any, dtypes: Any
) -> Saved:
    training, _, _, precision, gemm, *_ = options
    versions = kind.version(arrays[0]), kind.version(arrays[1])
    return Saved(arrays[0], arrays[1], deviations, vectors, bool(training), precision, gemm, dtypes, versions)


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

_MAX_CALLS, _MAX_APART = 1024, 64


class _Forward:
    """A forward call, ready but for its addresses, and what must hold of them."""

    def __init__(self, call: Call, dtypes: Any) -> None:
        self.call, self.dtypes = call, dtypes  # of the vectors' gradients; None where nothing is saved
        self.y: int | None = None  # which of the arrays that it makes; None if it is given
        self.spans: list[tuple[int, int, int]] = []
        self.apart: set[tuple[int, ...]] = set()  # addresses at which no two spans meet
        self.written: list[int] = []

    def may_overlap(self, pointers: list[int]) -> bool:
        """Whether any two arrays' spans meet; what that means is for the full check to say."""
        where = tuple(pointers)
        if not self.written or where in self.apart:
            return False
        end = 0
        for start, stop in sorted([(where[i] + low, where[i] + high) for i, low, high in self.spans]):
            if start < end:
                return True
            end = stop
        if len(self.apart) >= _MAX_APART:
            self.apart.clear()
        self.apart.add(where)
        return False


_calls: dict[Any, _Forward] = {}


def _prepare_call(
    kind: Kind,
    arrays: tuple[Any, ...],
    views: dict[str, Any],
    options: tuple[Any, ...],
    device: int,
    capturing: bool,
    prepared: Prepared | None,
    limits: _plan.Limits,
) -> _Forward:
    training, momentum, eps, precision, gemm, return_saved, sms = options
    x, weight, out = views["x"], views["weight"], views["out"]
    (m, k), n = x.shape, weight.shape[0]
    y_at = _plan.Matrix((n, 1), True) if out is None else matrix_of(out)
    gpu = _kernels.gpu(device).at_most(sms)
    p = _plan.Matmul(m, n, k, x.dtype, gpu, matrix_of(x), matrix_of(weight), y_at, limits)
    limbs = prepared is not None and prepared.limbs is not None
    plan = _plan.plan(
        p,
        training=bool(training),
        precision=precision,
        gemm=gemm,
        capturing=capturing,
        prepared=limbs,
        saved=bool(return_saved),
        cumulative=momentum is None,
    )
    x_at = _plan.Matrix((k, 1), True) if plan.copy_x else matrix_of(x)
    w_at = _plan.Matrix((k, 1), True) if plan.copy_w else matrix_of(weight)
    flags = _declared.flags(
        vector_x=x_at.aligned and x_at.strides[0] * x.itemsize % 16 == 0,
        vector_w=w_at.aligned and w_at.strides[0] * x.itemsize % 16 == 0,
        vector_y=plan.vector_y,
        cumulative=momentum is None,
        units=plan.keep is not None and plan.keep.dtype == "float16",
        alone=plan.one is not None and not plan.one.cooperative,
    )
    problem = _declared.problem(
        m=m,
        n=n,
        k=k,
        ldx=x_at.strides[0],
        ldw=w_at.strides[0],
        ldg=plan.ldg,
        y_row=y_at.strides[0],
        y_col=y_at.strides[1],
        stats_rows=plan.stats_rows,
        normalize_rows=plan.normalize_rows,
        splits=plan.splits,
        panel=plan.one.panel if plan.one is not None else 0,
        affine=plan.affine,
        partials=plan.partials,
        tickets=plan.tickets,
        flags=flags,
        **{name: _vector_code(views[name]) for name in VECTORS},
        momentum=0.0 if momentum is None else momentum,
        eps=eps,
    )

    call = Call(kind, device, (*ARRAYS, *(PREPARED if limbs else ())))
    of_x = call.copy("x", x, arrays[0], gpu) if plan.copy_x else "x"
    of_w = call.copy("weight", weight, arrays[1], gpu) if plan.copy_w else "weight"
    y = "out" if out is not None else call.make("y", (m, n), arrays[0])
    deviations = vectors = ABSENT
    if plan.keep is not None:
        deviations = call.make("deviations", (m, plan.ldg), arrays[0], plan.keep.dtype)
        vectors = call.make("vectors", (_plan.SAVED_ROWS, n), arrays[0], "float64")
    counts = training and views["num_batches_tracked"] is not None
    count = "num_batches_tracked" if counts else ABSENT
    own = {name: name for name in VECTORS}
    if plan.one is not None:
        one = plan.one
        call.workspace(one.workspace)
        exponents = (ABSENT, ABSENT)
        if one.limbs is not None:
            at_x, at_w = call.at(one.limbs.x), PREPARED[0] if limbs else call.at(one.limbs.w)
            exponents = call.at(one.limbs.x_exponents), PREPARED[1] if limbs else call.at(one.limbs.w_exponents)
            split = {"x": of_x, "x_limbs": at_x, "x_exponents": exponents[0]}
            split |= dict(zip(("w", "w_limbs", "w_exponents"), (of_w, at_w, exponents[1]), strict=True))
            if limbs:
                split |= dict.fromkeys(("w", "w_limbs", "w_exponents"), ABSENT)
            call.launch(one.limbs.kernel, one.limbs.grid, problem, split)
            of_x, of_w = at_x, at_w
        boxes = _tma.map_arguments(one, p._replace(x=x_at, w=w_at))
        mapped: tuple[str, ...] = (of_x, of_w, y)
        passed = {"y": y, "partial": call.at(0), "merged": call.at(one.merged), "roll": call.at(one.roll), **own}
        passed |= {"batches": count, "x_exponents": exponents[0], "w_exponents": exponents[1]}
        if plan.keep is not None:
            rows, cols, _, *rest = boxes[-1]
            boxes.append((rows, cols, plan.ldg * x.itemsize, *rest))
            mapped += (deviations,)
            passed |= {"kept": deviations, "saved": vectors}
        call.launch_mapped(one, problem, boxes, mapped, passed)
    else:
        call.workspace(plan.workspace)
        workspace = call.at(0)
        g = y if plan.y_is_g else deviations if plan.keep is not None and plan.keep.is_g else call.at(plan.g)
        if plan.through is not None:
            q = p._replace(x=x_at, w=w_at, y=_plan.Matrix((plan.ldg, 1), True))
            call.multiply(Multiply(q, plan.through, device), of_x, of_w, g, call.at(plan.limbs_at))
        elif plan.gemm_kernel is not None:
            call.launch(plan.gemm_kernel, plan.gemm_grid, problem, {"x": of_x, "w": of_w, "g": g}, plan.gemm_block)
        else:
            shape, ldg = (m, n, k), plan.ldg
            product = gemm_arguments(shape, x_at, w_at, ldg, x.dtype, precision, wide=True, sms=gpu.target)
            call.multiply(product, of_x, of_w, g)
        if training:
            if plan.tickets_bytes:
                call.clear(call.at(plan.tickets), plan.tickets_bytes)
            passed = {"g": g, "workspace": workspace, **own, "num_batches_tracked": "num_batches_tracked"}
            call.launch(plan.stats_kernel, plan.stats_grid, problem, {**passed, "saved": vectors})
        else:
            passed = {"workspace": workspace, **own, "g": g, "saved": vectors}
            call.launch(plan.affine_kernel, plan.affine_grid, problem, passed)
        passed = {"g": g, "y": y, "workspace": workspace, "num_batches_tracked": count}
        passed |= {"deviations": deviations, "saved": vectors}
        call.launch(plan.normalize_kernel, plan.normalize_grid, problem, passed)

    found = _Forward(call, None if plan.keep is None else _dtypes(kind, arrays))
    found.y = None if out is not None else plan.copy_x + plan.copy_w
    found.written = [ARRAYS.index(name) for name in _check.written(views, training=bool(training))]
    found.spans = [
        (i, *_check.span(views[name]))
        for i, name in enumerate(ARRAYS)
        if views[name] is not None and 0 not in views[name].shape
    ]
    return found


def matrix_of(view: Any) -> _plan.Matrix:
    strides = tuple(stride // view.itemsize for stride in view.strides)
    return _plan.Matrix.of(view.shape, strides, view.pointer % 16 == 0)


def _vector_code(view: Any) -> int:
    return 0 if view is None else view.strides[0] // view.itemsize * 8 + _declared.kind_code(view.dtype)


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def _forward_cpu(kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], read_only: frozenset[str]) -> Any:
    views = _views(kind, arrays, options, read_only)
    training, momentum, eps, _, _, return_saved, _ = options
    given = dict(zip(ARRAYS, arrays, strict=True))
    host = {name: None if array is None else kind.numpy(array) for name, array in given.items()}
    shape = (views["x"].shape[0], views["weight"].shape[0])
    if shape[0] == 0:
        return _nothing(kind, arrays, options, shape[1])
    operands = {name: host[name] for name in ARRAYS[:-1]}
    momentum = None if momentum is None else float(momentum)
    result = reference.forward(**operands, training=bool(training), momentum=momentum, eps=float(eps))  # type: ignore[arg-type]
    y = reference.round_to(result.y, host["x"].dtype)  # type: ignore[union-attr]
    if training:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            target, value = host[name], getattr(result, name)
            if target is not None:
                target[...] = value if name == "num_batches_tracked" else reference.round_to(value, target.dtype)
    if host["out"] is not None:
        host["out"][...] = y
    kind.written([given[name] for name in _check.written(views, training=bool(training))])
    result_y = given["out"] if given["out"] is not None else kind.from_numpy(y)
    if not return_saved:
        return result_y
    # What `reference.backward` takes; in training it takes no notice of the running statistics.
    neutral = {"scale": 1.0, "bias": 0.0, "gamma": 1.0, "running_mean": 0.0, "running_var": 1.0}  # eps after them
    vectors = np.full((_plan.SAVED_ROWS, shape[1]), eps, np.float64)
    for row, (name, absent) in zip(vectors, neutral.items(), strict=False):
        row[...] = absent if host[name] is None else host[name]
    deviations = kind.empty((0, shape[1]), arrays[0])
    return result_y, _saved(kind, arrays, options, deviations, kind.from_numpy(vectors), _dtypes(kind, arrays))


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
    if isinstance(weight, Prepared):
        raise ValueError("weight: expected an array to fold, got a prepared weight: fold what it was prepared from")
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
    device, given_arrays = kind.device(arrays["weight"]), tuple(arrays[name] for name in FOLD_ARRAYS)
    with on_device(device):
        codes = {name: _vector_code(views[name]) for name in VECTORS}
        at, call = matrix_of(view), Call(kind, device, FOLD_ARRAYS)
        source = "weight"
        if at.strides[1] != 1:
            at = _plan.Matrix((view.shape[1], 1), True)
            source = call.copy("weight", view, arrays["weight"], _kernels.gpu(device))
        problem = _declared.problem(n=view.shape[0], k=view.shape[1], ldw=at.strides[0], eps=eps, **codes)
        passed = {"w": source, "w_folded": call.make("w", view.shape, arrays["weight"])}
        passed |= {"b_folded": call.make("b", view.shape[:1], arrays["weight"]), **{name: name for name in VECTORS}}
        call.launch(_plan.fold(view.dtype), view.shape[0], problem, passed)
        stream = kind.stream(device)
        pointers = [0 if array is None else kind.pointer(array) for array in given_arrays]
        *_, folded, bias_folded = call.run(arrays["weight"], pointers, stream, is_capturing(stream))
    return folded, bias_folded
