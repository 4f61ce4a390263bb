"""forward: whose arrays they are, the checks, the call that was prepared, what it returns."""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any, Literal, overload

import numpy as np

from . import _cpu, _plan
from ._arrays import check
from ._arrays.dynamo import outside_graphs
from ._arrays.kinds import NUMBERS, Kind, kinds_of
from ._host.call import Description, matrix_of, vector_codes
from ._host.run import ANY, Checked, Operation, Views, call, checked
from ._host.run import describe as describe_call
from ._plan.forward import PREPARED
from ._plan.problem import VECTOR_PARAMETERS
from ._plan.program import Program
from ._plan.ranks import Ranks
from ._prepared import Prepared
from ._ranks.exchange import forward_words, signature
from ._ranks.group import Group
from ._saved import Saved
from ._typing import A, Activation, AnyArray, Array, Gemm, Precision
from ._values import shown, sm_count

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
OPTIONS = ("training", "momentum", "eps", "precision", "gemm", "return_saved", "sms", "activation", "group")
_TRAINING, _PRECISION, _SAVES, _SMS, _GROUP = map(
    OPTIONS.index, ("training", "precision", "return_saved", "sms", "group")
)


# For a type checker: without `return_saved`, with it, and where it is not known or x is another library's array.
@overload
def forward(
    x: Array[A], weight: AnyArray | Prepared, scale: AnyArray | float | None = None, *, bias: AnyArray | None = None,
    gamma: AnyArray | None = None, beta: AnyArray | None = None, running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None, num_batches_tracked: AnyArray | None = None, training: bool = False,
    momentum: float | None = 0.1, eps: float = 1e-5, activation: Activation | None = None,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, group: Group | None = None,
    out: AnyArray | None = None, return_saved: Literal[False] = False,
) -> A: ...  # fmt: skip
@overload
def forward(
    x: Array[A], weight: AnyArray | Prepared, scale: AnyArray | float | None = None, *, bias: AnyArray | None = None,
    gamma: AnyArray | None = None, beta: AnyArray | None = None, running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None, num_batches_tracked: AnyArray | None = None, training: bool = False,
    momentum: float | None = 0.1, eps: float = 1e-5, activation: Activation | None = None,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, group: Group | None = None,
    out: AnyArray | None = None, return_saved: Literal[True],
) -> tuple[A, Saved]: ...  # fmt: skip
@overload
def forward(
    x: AnyArray, weight: AnyArray | Prepared, scale: AnyArray | float | None = None, *, bias: AnyArray | None = None,
    gamma: AnyArray | None = None, beta: AnyArray | None = None, running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None, num_batches_tracked: AnyArray | None = None, training: bool = False,
    momentum: float | None = 0.1, eps: float = 1e-5, activation: Activation | None = None,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, group: Group | None = None,
    out: AnyArray | None = None, return_saved: bool = False,
) -> Any: ...  # fmt: skip
@outside_graphs
def forward(
    x: Any,
    weight: Any,
    scale: Any = None,
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
    activation: str | None = None,
    precision: str = "highest",
    gemm: str = "auto",
    sms: int | None = None,
    group: Group | None = None,
    out: Any = None,
    return_saved: bool = False,
) -> Any:
    """``activation(BatchNorm1d(Linear(x) * scale))``, as PyTorch defines them.

    ::

        g = x weightᵀ
        training:   m = mean(g), v = mean((g - m)²) over the batch,  r = 1 / sqrt(scale² v + eps)
                    y = gamma scale r (g - m) + beta
        inference:  r = 1 / sqrt(running_var + eps)
                    y = gamma r (scale (g + bias) - running_mean) + beta
        both:       y = activation(y), if there is one

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
    scale : (O,) array, array of one element, or float, optional
        x's dtype or float32 (float64 with float64), as every per-feature vector, each independently. One element or
        one number serves all features; 1 if absent.
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
    activation : {"relu"}, optional
        What y is put through before it is written: "relu" is max(y, 0), NaN passes. None is nothing.
    precision : {"highest", "high"}
        For float32: "highest" is norm-wise at least as accurate as a product in IEEE float32; "high" is TF32 where the
        GPU and the GEMM have it. With "sm90", and from 64 input features on with "tiled" where g is made twice,
        "highest" goes through two float16 limbs an operand (`docs/design/limbs.md`): an element beside one 2^16 times
        its size in the same row loses digits, which "cublas" keeps.
    gemm : {"auto", "cublas", "tiled", "sm90"}
        "sm90" is the whole forward in one launch on Hopper, for all but float64; with `return_saved` in training only,
        in 16 bits from 17 rows on; with at most 32768 input features, 262144 in bfloat16. float32 at "highest" has a
        launch before it, which makes limbs, and takes any number of input features; with rows of y that do not start
        and end on 16 bytes it is the GEMM alone, with the launches after it. In other dtypes such rows of x, weight or
        y cost a launch more, which copies the operands, and one that copies y.
        "cublas" is cuBLAS, "tiled" gsbn's own kernels for all else: a portable product and, on Hopper, where rows of x
        are many and short, two launches that make g, each for itself, and never write it. "auto" takes the fastest that
        serves. After one call of the same kind any can be captured in a CUDA graph.
    sms : int, optional
        At most so many of the GPU's streaming multiprocessors are occupied by any launch of the call, none of which
        begins before the one ahead of it has ended; None is all, or those of the stream's green context. It
        matters where another kernel on the GPU waits for this call, a collective of another library for one: in
        training "sm90" needs all the SMs that it takes at once (up to 16 where one cluster has all rows), and would
        wait for the other to leave them. cuBLAS takes the number as a target, and waits for nobody. No effect on the
        CPU.
    group : Group, optional
        Of `gsbn.group`: the statistics are those of all its ranks' rows, as with ``torch.nn.SyncBatchNorm``. Every rank
        calls with the same features, dtype and options and any number of rows, none included; y is of its own rows. The
        running statistics come out the same, bit for bit, on every rank. In training alone. A weight that is split by
        features needs no group: each rank has all rows of its features.
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
        An argument that is no array, of another kind than x, or of a dtype that is not allowed; a tensor that is no
        plain memory: nested, sparse, traced, of a subclass that wraps others; a DLPack producer that does not produce.
    ValueError
        A shape, device, stride or value that is not allowed, one element per feature in training, a `gemm` that
        cannot serve; an argument that is written and read-only, self-overlapping or overlapped by another.
    RuntimeError
        A torch tensor that requires grad while grad mode is on, or has a tangent: gsbn is outside autograd. A group
        that is closed or has failed; on the CPU, a rank of it that makes another call, or none before the timeout.
    ImportError
        A bfloat16 tensor on the CPU where ml_dtypes is not installed, an array on a GPU where CuPy is not.

    Notes
    -----
    Asynchronous on the current stream of x's library; the host never waits. Beside y it allocates O(O) scratch from
    that library's allocator, what cuBLAS wants (32 MiB at most), a copy of an operand that the GEMM cannot take as it
    lies or would take much longer for (rows off a 16-byte boundary), and one B x O array where y's own memory cannot
    serve: of y's dtype with "sm90" (such rows of y), otherwise of float32 for g (such rows, float16 and bfloat16).
    With `return_saved` the deviations are one B x O array more (`Saved` tells its dtype); but for "sm90", g is computed
    in it where it is wide enough.
    "sm90" allocates 16 bytes a feature for every tile of rows instead, unless one cluster has them all, and for
    limbs x's own bytes and, unless it is prepared, the weight's; in training it may hold a tile's deviations from its
    own means in y, in y's dtype, until the batch's are known. What a captured call allocates, y included, lives as long
    as the graph and no longer.

    On the CPU the product is float32 BLAS (float64 for float64) whose threads are BLAS's, the rest is done in blocks of
    rows, and y is rounded once; of up to 16 rows all but the product is float64. Beside y it allocates a few blocks,
    1 MiB or 512 rows each; in training a 16-bit y holds deviations, in its dtype, until the batch's mean is known.

    The same call gives the same bits, run to run, in a CUDA graph or not.
    """
    arrays = (x, weight, scale, bias, gamma, beta, running_mean, running_var, num_batches_tracked, out)
    options = (training, momentum, eps, precision, gemm, return_saved, sms, activation, group)
    return _call(arrays, options, ANY)


@outside_graphs
def forward_of(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """`forward` of arrays and options in the order of ARRAYS and OPTIONS: what a caller of a hot loop has at hand."""
    return _call(arrays, options, ANY)


def forward_within(limits: _plan.Limits, *arguments: Any, **keywords: Any) -> Any:
    """`forward` of the same arguments, the planner's choice being limited; on the CPU there is none."""
    return _call(*_bind(arguments, keywords), limits)


def describe(*arguments: Any, **keywords: Any) -> Description:
    """How `forward` would compute a call: the path, why it was chosen, its kernels and its scratch memory.

    Nothing is launched and nothing is written; kernels that the call needs are compiled. The logger "gsbn" says the
    same at level DEBUG whenever a forward or a backward of a new shape, dtype, layout or option is prepared.

    Parameters
    ----------
    *arguments, **keywords
        Those of `forward`.

    Returns
    -------
    Description
        ``(path, why, kernels, scratch)``; as a string, one line.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        What `forward` would raise.
    """
    arrays, options, prepared, own = _given(*_bind(arguments, keywords))
    return describe_call(FORWARD, arrays, options, group=options[_GROUP], context=prepared, own=own)


def _bind(arguments: Any, keywords: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays and the options of a call of `forward`, in the order of ARRAYS and OPTIONS."""
    given = _signature().bind(*arguments, **keywords)
    given.apply_defaults()
    arrays, options = (tuple(given.arguments[name] for name in names) for names in (ARRAYS, OPTIONS))
    return arrays, options


@cache
def _signature() -> inspect.Signature:
    return inspect.signature(forward)


_COUNT = ARRAYS.index("num_batches_tracked")


def _given(
    arrays: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Prepared | None, tuple[str, ...]]:
    """Arrays and options, a scale that is a number being among the options; a prepared weight; the names of the arrays
    that no other library may own."""
    x, weight, scale, precision, group = arrays[0], arrays[1], arrays[2], options[_PRECISION], options[_GROUP]
    if group is not None:
        if not isinstance(group, Group):
            raise TypeError(f"group: expected what gsbn.group(comm) returned, got {shown(group)}")
        group.check()
    if isinstance(scale, NUMBERS):
        arrays, options = (x, weight, None, *arrays[3:]), (*options, scale)
    else:
        options = (*options, 1.0)
    if not isinstance(weight, Prepared):
        return arrays, options, None, ("out",)
    if weight.precision != precision and precision in check.PRECISIONS:
        raise ValueError(f"weight: expected one prepared for precision={precision!r}, got {weight.precision!r}")
    return (x, weight.weight, *arrays[2:]), options, weight, ("out", "weight")


def _call(arrays: tuple[Any, ...], options: tuple[Any, ...], limits: _plan.Limits) -> Any:
    arrays, options, prepared, own = _given(arrays, options)
    return call(FORWARD, arrays, options, group=options[_GROUP], limits=limits, context=prepared, own=own)


def _result(
    kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], found: Checked | None, made: list[Any]
) -> Any:
    """y, and what is saved."""
    if found is None:
        return _nothing(kind, arrays, options, arrays[1].shape[0])
    y_at, dtypes = found.returns
    if found.written and kind.counts_writes:
        kind.written([arrays[i] for i in found.written])
    y = arrays[-1] if y_at is None else made[y_at]
    return y if dtypes is None else (y, _saved(kind, arrays, options, made[-2], made[-1], dtypes))


def _within(options: tuple[Any, ...], held: int) -> tuple[Any, ...]:
    """The options of a call that can occupy so many SMs at most."""
    sm_count(options[_SMS])
    sms = held if options[_SMS] is None else min(options[_SMS], held)
    return (*options[:_SMS], sms, *options[_SMS + 1 :])


def _nothing(kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], features: int) -> Any:
    """The result of an empty batch, which training counts, as PyTorch does."""
    x, count, y = arrays[0], arrays[_COUNT], arrays[-1]
    y = kind.empty((0, features), x) if y is None else y
    if options[_TRAINING] and count is not None:
        count += 1
    if not options[_SAVES]:
        return y
    vectors = kind.empty((_plan.SAVED_ROWS, features), x, "float64")  # never read
    return y, _saved(kind, arrays, options, kind.empty((0, features), x), vectors, _dtypes(kind, arrays))


def _saved(
    kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], deviations: Any, vectors: Any, dtypes: Any
) -> Saved:
    training, _, _, precision, gemm, _, _, activation, group, _ = options
    x, weight, scale, *_ = arrays
    versions = kind.version(x), kind.version(weight)
    one = scale is not None and tuple(scale.shape) != (weight.shape[0],)
    return Saved(
        x, weight, deviations, vectors, bool(training), precision, gemm, dtypes, versions, activation,
        tuple(scale.shape) if one else None, group,
    )  # fmt: skip


# ---- check -----------------------------------------------------------------------------------------------------------


def _views(
    kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], read_only: frozenset[str], _: Any = None
) -> Views:
    named = dict(zip(ARRAYS, arrays, strict=True))
    kinds_of(named, ("x", "weight"))
    views = {name: None if array is None else kind.view(array) for name, array in named.items()}
    for name in read_only:
        views[name] = views[name]._replace(writable=False)  # type: ignore[union-attr]
    check.forward_arguments(views, **dict(zip((*OPTIONS, "number"), options, strict=True)))
    return views


def _program(
    views: Views, options: tuple[Any, ...], gpu: _plan.Device, limits: _plan.Limits, ranks: Ranks | None, limbs: bool
) -> Program | None:
    training, momentum, eps, precision, gemm, return_saved, sms, activation, _, number = options
    x, weight, out = views["x"], views["weight"], views["out"]
    assert x is not None and weight is not None
    (m, k), n = x.shape, weight.shape[0]
    if m == 0 and ranks is None:
        return None
    y_at = _plan.Matrix((n, 1), True) if out is None else matrix_of(out)
    p = _plan.Matmul(m, n, k, x.dtype, gpu.at_most(sms), matrix_of(x), matrix_of(weight), y_at, limits)
    if ranks is not None:
        words = forward_words(views, n, k, x.dtype, momentum, eps, activation, number)
        ranks = ranks._replace(signature=signature(words))
    return _plan.plan_forward(
        p,
        training=bool(training),
        momentum=momentum,
        eps=eps,
        precision=_plan.precision_for(precision, n),
        gemm=gemm,
        prepared=limbs,
        saves=bool(return_saved),
        activation=activation,
        number=number,
        vectors=vector_codes(views),
        counts=views["num_batches_tracked"] is not None,
        out=out is not None,
        ranks=ranks,
    )


def _returns(program: Program, views: Views, options: tuple[Any, ...]) -> Any:
    """Which of the arrays that a call makes is y, None if it is given; the vectors' dtypes where they are saved."""
    dtypes = tuple(None if (view := views[name]) is None else view.dtype for name in VECTOR_PARAMETERS)
    return program.made("y"), dtypes if options[_SAVES] else None


def _dtypes(kind: Kind, arrays: tuple[Any, ...]) -> tuple[str | None, ...]:
    """Of bias, scale, gamma and beta."""
    vectors = (arrays[ARRAYS.index(name)] for name in VECTOR_PARAMETERS)
    return tuple(None if a is None else kind.dtype(a) for a in vectors)


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def _on_cpu(
    kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], read_only: frozenset[str], _: Any = None
) -> Any:
    found = checked(FORWARD, kind, arrays, options, read_only)
    training, momentum, eps, _, _, return_saved, _, activation, group, number = options
    host: dict[str, Any] = {n: None if a is None else kind.numpy(a) for n, a in zip(ARRAYS, arrays, strict=True)}
    x, weight, out = host["x"], host["weight"], host["out"]
    if group is not None:
        group.check_host()
        words = forward_words(host, len(weight), x.shape[1], str(x.dtype), momentum, eps, activation, number)
        if momentum is None:
            words += f", after {host['num_batches_tracked'].item()} batches"
    elif len(x) == 0:
        return _nothing(kind, arrays, options, len(weight))
    y = np.empty((len(x), len(weight)), x.dtype) if out is None else out
    kept = _cpu.forward(
        host,
        y,
        training=training,
        momentum=momentum,
        eps=float(eps),
        keep=return_saved,
        activation=activation,
        number=float(number),
        gather=None if group is None else partial(group.gather, words),
    )
    if found.written and kind.counts_writes:
        kind.written([arrays[i] for i in found.written])
    result = arrays[-1] if out is not None else kind.from_numpy(y)
    if kept is None:
        return result
    deviations, vectors = map(kind.from_numpy, kept)
    return result, _saved(kind, arrays, options, deviations, vectors, _dtypes(kind, arrays))


FORWARD = Operation(
    name="forward",
    arguments=ARRAYS,
    required=("x", "weight"),
    foreign=len(ARRAYS),
    aligned=(0, 1, len(ARRAYS) - 1),
    numeric=tuple(map((*OPTIONS, "number").index, ("training", "momentum", "eps", "return_saved", "sms", "number"))),
    check=_views,
    program=_program,
    returns=_returns,
    result=_result,
    on_cpu=_on_cpu,
    within=_within,
    written=lambda views, options: check.written(views, training=bool(options[_TRAINING])),
    extra=PREPARED,
)
