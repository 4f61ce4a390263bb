"""forward and describe: the public functions, and how they handle their arguments."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Literal, overload

from .. import _plan
from .._arrays import check
from .._arrays.dynamo import outside_graphs
from .._arrays.kinds import NUMBERS
from .._host.call import Description
from .._host.run import ANY, Arrays, Options, call, replaced
from .._host.run import describe as describe_call
from .._prepared import Prepared
from .._ranks.group import Group
from .._renorm import Renorm, renorm_of
from .._saved import Saved
from .._typing import A, Activation, AnyArray, Array, Gemm, Precision
from .._values import flag, ghost_count, shown
from .operation import ARRAYS, FORWARD, OPTIONS, with_number

_TRAINING, _PRECISION, _ACTIVATION, _GROUP, _RENORM, _GROUPS = map(
    OPTIONS.index, ("training", "precision", "activation", "group", "renorm", "groups")
)

_RENORM_ARRAY = ARRAYS.index("renorm")


# For type checkers: return_saved is False; it is True; it is unknown, or x is another library's array.
@overload
def forward(
    x: Array[A], weight: AnyArray | Prepared, scale: AnyArray | float | None = None, *, bias: AnyArray | None = None,
    gamma: AnyArray | None = None, beta: AnyArray | None = None, running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None, num_batches_tracked: AnyArray | None = None, training: bool = False,
    momentum: float | None = 0.1, eps: float = 1e-5, activation: Activation | None = None,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, group: Group | None = None,
    renorm: Renorm | tuple[float, float] | AnyArray | None = None, groups: int = 1, residual: AnyArray | None = None,
    out: AnyArray | None = None, return_saved: Literal[False] = False,
) -> A: ...  # fmt: skip
@overload
def forward(
    x: Array[A], weight: AnyArray | Prepared, scale: AnyArray | float | None = None, *, bias: AnyArray | None = None,
    gamma: AnyArray | None = None, beta: AnyArray | None = None, running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None, num_batches_tracked: AnyArray | None = None, training: bool = False,
    momentum: float | None = 0.1, eps: float = 1e-5, activation: Activation | None = None,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, group: Group | None = None,
    renorm: Renorm | tuple[float, float] | AnyArray | None = None, groups: int = 1, residual: AnyArray | None = None,
    out: AnyArray | None = None, return_saved: Literal[True],
) -> tuple[A, Saved]: ...  # fmt: skip
@overload
def forward(
    x: AnyArray, weight: AnyArray | Prepared, scale: AnyArray | float | None = None, *, bias: AnyArray | None = None,
    gamma: AnyArray | None = None, beta: AnyArray | None = None, running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None, num_batches_tracked: AnyArray | None = None, training: bool = False,
    momentum: float | None = 0.1, eps: float = 1e-5, activation: Activation | None = None,
    precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None, group: Group | None = None,
    renorm: Renorm | tuple[float, float] | AnyArray | None = None, groups: int = 1, residual: AnyArray | None = None,
    out: AnyArray | None = None, return_saved: bool = False,
) -> Any: ...  # fmt: skip
@outside_graphs
def forward(
    x: Array[Any] | AnyArray,
    weight: AnyArray | Prepared,
    scale: AnyArray | float | None = None,
    *,
    bias: AnyArray | None = None,
    gamma: AnyArray | None = None,
    beta: AnyArray | None = None,
    running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None,
    num_batches_tracked: AnyArray | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: Activation | None = None,
    precision: Precision = "highest",
    gemm: Gemm = "auto",
    sms: int | None = None,
    group: Group | None = None,
    renorm: Renorm | tuple[float, float] | AnyArray | None = None,
    groups: int = 1,
    residual: AnyArray | None = None,
    out: AnyArray | None = None,
    return_saved: bool = False,
) -> Any:
    """Compute ``activation(BatchNorm1d(Linear(x) * scale) + residual)``, with each step as in PyTorch.

    ::

        g = x weightᵀ
        training:   m = mean(g), v = mean((g - m)²) over the batch,  r = 1 / sqrt(scale² v + eps)
                    y = gamma scale r (g - m) + beta
        inference:  r = 1 / sqrt(running_var + eps)
                    y = gamma r (scale (g + bias) - running_mean) + beta
        both:       y = activation(y + residual), if there is one or the other

    In training the bias cancels in y and only moves `running_mean`. g is float32 (float64 for float64 inputs). The
    variance is never computed as E[g²] - E[g]². Statistics and per-feature constants are merged in float64; "sm90"
    merges statistics in float32, as differences from a pivot.

    Source: Ioffe and Szegedy 2015, algorithms 1 and 2, for ``scale (g + bias)``; `gsbn.reference` has the derivation.

    Parameters
    ----------
    x : (B, I) array
        float32, float16, bfloat16 or float64; any strides. A CuPy, torch or NumPy array, or any DLPack producer. All
        array arguments must be of the same library and on the same device.
    weight : (O, I) array or Prepared
        x's dtype, or the result of `prepare` for such an array.
    scale : (O,) array, array of one element, or float, optional
        Each per-feature vector has x's dtype or float32 (float64 with float64); they may differ. One element or one
        number applies to all features. Default: 1.
    bias, gamma, beta : (O,) array, optional
        Default: 0, 1 and 0.
    running_mean, running_var : (O,) array, optional
        Both or neither, of the same dtype; required in inference. Training updates them in place; the variance is
        unbiased.
    num_batches_tracked : int64 array of one element, optional
        Training adds 1 to it, or `groups` with groups.
    training : bool
        Use the statistics of this batch (True) or the running statistics (False).
    momentum : float or None
        Weight of the new batch in the running statistics; None is the cumulative average 1 / num_batches_tracked.
    eps : float
        Added to the variance; > 0 in training, >= 0 in inference.
    activation : {"relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "elu"} or tuple, optional
        Applied to y, as PyTorch's function of this name ("gelu_tanh": ``gelu`` with ``approximate="tanh"``); NaN stays
        NaN. A tuple gives the slope of "leaky_relu" or the alpha of "elu", such as ``("leaky_relu", 0.2)``; the name
        alone means PyTorch's default, 0.01 or 1. Each number has kernels of its own, which its first call compiles.
    precision : {"highest", "high"}
        For float32: "highest" is norm-wise at least as accurate as a product in IEEE float32; "high" uses TF32 where
        the GPU and the GEMM support it. "sm90" computes "highest" with two float16 limbs per operand
        (`docs/design/limbs.md`), and so does "tiled" where it computes g twice and I >= 64: an element loses digits if
        its row contains one that is 2^16 times larger. "cublas" keeps these digits.
    gemm : {"auto", "cublas", "tiled", "sm90"}
        "auto" takes the fastest of the others that supports the call. "sm90" computes the whole forward in one launch
        on Hopper, "cublas" uses cuBLAS, and "tiled" gsbn's other kernels: a portable product and, on Hopper, for many
        short rows of x, two launches that both compute g and never write it. `docs/guide/limits.md` says what each
        supports. After a first call of the same kind, a call with any `gemm` can be captured in a CUDA graph.
    sms : int, optional
        The largest number of the GPU's streaming multiprocessors (SMs) that a launch of this call may occupy; no launch
        then starts before the previous one has ended. None is all SMs, or those of the stream's green context. Set it
        if another kernel on the GPU waits for this call, such as a collective of another library
        (`docs/guide/pytorch.md`). cuBLAS treats the number as a target. No effect on the CPU.
    group : Group, optional
        From `gsbn.group`, in training only: the statistics are those of the rows of all ranks, as with
        ``torch.nn.SyncBatchNorm``. Every rank must call with the same features, dtype and options; its number of rows
        may differ and may be 0. y has this rank's rows. All ranks get the same running statistics, bit for bit.
    renorm : Renorm, (r_max, d_max), or array of two elements, optional
        Batch renormalisation in training, as `gsbn.Renorm` says: needs the running statistics, and num_batches_tracked
        if there is a warm-up. No effect in inference. An array, float32 or float64, holds r_max and d_max on x's
        device: a CUDA graph reads its values at each replay. They are not checked.
    groups : int
        Ghost batch normalisation in training (Hoffer et al. 2017): x is cut into `groups` ghost batches of B / groups
        consecutive rows, each of which has its own statistics. The result is that of a loop over them: y, the
        gradients, the running statistics and the count, which each ghost batch updates in order. `groups` divides B,
        and a ghost batch has at least two rows. Not with `group`, which is about ranks, or `renorm`. No effect in
        inference.
    residual : (B, O) array, optional
        Added before the activation, as in a residual block: x's dtype, library and device, any strides. The other term
        of the sum is first rounded to x's dtype, and so is the sum, as in PyTorch. Except for some calls in 16 bits on
        Hopper, one more launch adds the residual and applies the activation.
    out : (B, O) array, optional
        Where y is written: x's dtype and library, any strides. It must not overlap another argument.
    return_saved : bool
        Also return what `gsbn.backward` needs.

    Returns
    -------
    y : (B, O) array
        x's dtype and library; `out` itself if given. For other DLPack producers a CuPy or NumPy array.
    saved : Saved
        With `return_saved`: x and weight themselves, O(O) constants, or O(groups O) with `groups`, and the (B, O)
        deviations of g from its mean, unless the backward computes g again. With `residual` and an activation also y
        itself or, if the gradient does not follow from y, the (B, O) sum before the activation.

    Raises
    ------
    TypeError
        An argument is not an array, is of another library than x, or has a dtype that is not supported. A tensor has no
        plain memory: nested, sparse, traced, or of a subclass that wraps another tensor. A DLPack producer fails.
    ValueError
        A shape, device, stride or value is not supported. Training has one row in all. The `gemm` does not support the
        call. An argument to be written is read-only, or overlaps itself or another argument.
    RuntimeError
        A torch tensor requires grad while grad mode is on, or has a tangent: gsbn is outside autograd. The group is
        closed or has failed. On the CPU, another rank makes a different call, or none before the timeout.
    ImportError
        A bfloat16 tensor is on the CPU without ml_dtypes, or an array is on a GPU without CuPy.

    Notes
    -----
    The call is asynchronous on the current stream of x's library; the host never waits. It allocates from that
    library's allocator; `docs/guide/limits.md` lists what. Memory that a captured call allocates, y included, is freed
    with the graph. The same call gives the same bits in every run, in a CUDA graph or not.

    On the CPU the product is float32 BLAS (float64 for float64, and with up to 64 rows or 8 features), with the threads
    of BLAS. The rest is computed in blocks of rows, and y is rounded once. With up to 16 rows it is float64.

    Examples
    --------
    >>> import numpy as np
    >>> import gsbn
    >>> x, weight = np.random.rand(256, 64).astype("f4"), np.random.rand(32, 64).astype("f4")
    >>> y = gsbn.forward(x, weight, training=True, activation="relu")
    >>> y.shape, y.dtype.name
    ((256, 32), 'float32')

    The second layer of a residual block, relu(BatchNorm1d(Linear(y)) + x):

    >>> gsbn.forward(y, weight.T.copy(), training=True, activation="relu", residual=x).shape
    (256, 64)
    """
    arrays = (x, weight, scale, bias, gamma, beta, running_mean, running_var, num_batches_tracked, None, residual, out)
    options = (training, momentum, eps, precision, gemm, return_saved, sms, activation, group, renorm, groups)
    return forward_of(arrays, options)


@outside_graphs
def forward_of(arrays: Arrays, options: Options, limits: _plan.Limits = ANY) -> Any:
    """`forward` with its arguments as tuples, in the order of ARRAYS and OPTIONS, which takes the host less time."""
    arrays, options, prepared, own = _given(arrays, options)
    return call(FORWARD, arrays, options, group=options[_GROUP], limits=limits, context=prepared, own=own)


def forward_within(limits: _plan.Limits, *arguments: Any, **keywords: Any) -> Any:
    """`forward` with limits on the planner's choice; they have no effect on the CPU."""
    return forward_of(*_bind(arguments, keywords), limits)


def describe(*arguments: Any, **keywords: Any) -> Description:
    """Describe how `forward` would compute a call: the path, why it was chosen, its kernels and its scratch memory.

    Launches and writes nothing, but compiles the kernels of the call. The logger "gsbn" reports the same at level DEBUG
    for the first forward or backward of each shape, dtype, layout and set of options.

    Parameters
    ----------
    *arguments, **keywords
        The arguments of `forward`.

    Returns
    -------
    Description
        ``(path, why, kernels, scratch)``; as a string, one line.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `forward`.

    Examples
    --------
    >>> import numpy as np
    >>> import gsbn
    >>> print(gsbn.describe(np.ones((256, 64)), np.ones((32, 64)), training=True))
    numpy (the arrays are on the CPU)
    """
    arrays, options, prepared, own = _given(*_bind(arguments, keywords))
    return describe_call(FORWARD, arrays, options, group=options[_GROUP], context=prepared, own=own)


def _bind(arguments: Any, keywords: Any) -> tuple[Arrays, Options]:
    """The arguments of `forward` as two tuples, in the order of ARRAYS and OPTIONS."""
    given = _signature().bind(*arguments, **keywords)
    given.apply_defaults()
    arrays, options = (tuple(given.arguments[name] for name in names) for names in (ARRAYS, OPTIONS))
    return arrays, options


@cache
def _signature() -> inspect.Signature:
    return inspect.signature(forward)


def _given(arrays: Arrays, options: Options) -> tuple[Arrays, Options, Prepared | None, tuple[str, ...]]:
    """Split the arguments into four results: the arrays, with the limits of renorm if they are an array; the options,
    followed by the scale if it is a number, else by 1; the prepared weight or None; and the names of the arrays that
    gsbn itself may have made (`own` of `kinds_of`)."""
    x, weight, scale, precision, group = arrays[0], arrays[1], arrays[2], options[_PRECISION], options[_GROUP]
    if (renorm := options[_RENORM]) is not None:
        arrays, options = _with_renorm(arrays, options, renorm)
    groups = options[_GROUPS]
    if type(groups) is not int or groups != 1:
        flag("training", options[_TRAINING])
        ghost_count(groups)
        options = replaced(options, _GROUPS, int(groups) if options[_TRAINING] else 1)
    if group is not None:
        if not isinstance(group, Group):
            raise TypeError(f"group: expected what gsbn.group(comm) returned, got {shown(group)}")
        group.check()
    if isinstance(options[_ACTIVATION], tuple):
        options = with_number(options)
    if isinstance(scale, NUMBERS):
        arrays, options = (x, weight, None, *arrays[3:]), (*options, scale)
    else:
        options = (*options, 1.0)
    if not isinstance(weight, Prepared):
        return arrays, options, None, ("out",)
    if isinstance(precision, str) and weight.precision != precision and precision in check.PRECISIONS:
        raise ValueError(f"weight: expected one prepared for precision={precision!r}, got {weight.precision!r}")
    return (x, weight.weight, *arrays[2:]), options, weight, ("out", "weight")


def _with_renorm(arrays: Arrays, options: Options, renorm: Any) -> tuple[Arrays, Options]:
    """The arrays with the limits of renorm as an array, or the options with the limits as numbers; in inference neither
    has limits."""
    limits = None
    flag("training", options[_TRAINING])
    if hasattr(renorm, "shape") or hasattr(renorm, "__dlpack__"):
        renorm, limits = Renorm(), renorm
    renorm = renorm_of(renorm)
    if not options[_TRAINING]:
        renorm = limits = None
    return replaced(arrays, _RENORM_ARRAY, limits), replaced(options, _RENORM, renorm)
