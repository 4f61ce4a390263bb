"""The operation that computes a forward: the checks, the plan of a call, and its results."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .. import _cpu, _plan
from .._arrays import check
from .._arrays.kinds import Kind
from .._host.call import matrix_of, vector_code, vector_codes
from .._host.run import Arrays, Checked, Operation, Options, Views, checked, limited_at, replaced, views_of
from .._plan.activations import follows_from_y, title
from .._plan.forward import PREPARED
from .._plan.problem import VECTOR_PARAMETERS, VECTORS, Ranks
from .._plan.program import Program
from .._ranks.exchange import signature
from .._ranks.group import check_host, gather
from .._saved import saved_of, scale_shape, vectors_of
from .._values import raised_count

ARRAYS = (
    "x", "weight", "scale", "bias", "gamma", "beta", "running_mean", "running_var", "num_batches_tracked", "renorm",
    "residual", "out",
)  # fmt: skip
OPTIONS = (
    "training", "momentum", "eps", "precision", "gemm", "return_saved", "sms", "activation", "group", "renorm",
    "groups",
)  # fmt: skip
REQUIRED = "x", "weight"
WHOLE_BATCH = None, None, 1  # group, renorm and groups of a call that uses the statistics of the whole batch
_COUNT = ARRAYS.index("num_batches_tracked")
_TRAINING, _SAVES, _SMS, _ACTIVATION, _RENORM, _GROUPS = map(
    OPTIONS.index, ("training", "return_saved", "sms", "activation", "renorm", "groups")
)


def with_number(options: Options) -> Options:
    """The options with the activation and its number in the form that keys use; raise if the activation is not
    valid."""
    return replaced(options, _ACTIVATION, check.checked_activation(options[_ACTIVATION]))


def result_of(kind: Kind, arrays: Arrays, options: Options, found: Checked | None, made: list[Any]) -> Any:
    """y, or (y, saved)."""
    if found is None:
        return _nothing(kind, arrays, options, arrays[1].shape[0])
    y_at, u_at, of_vectors = found.returns
    if found.written and kind.counts_writes:
        kind.count_writes([arrays[i] for i in found.written])
    y = arrays[-1] if y_at is None else made[y_at]
    if of_vectors is None:
        return y
    kept = y if u_at is None else made[u_at]
    return y, saved_of(kind, arrays, options, made[-2], made[-1], of_vectors, kept)


def _nothing(kind: Kind, arrays: Arrays, options: Options, features: int) -> Any:
    """The result of an empty batch. Training counts it, as PyTorch does."""
    x, count, y = arrays[0], arrays[_COUNT], arrays[-1]
    y = kind.empty((0, features), x) if y is None else y
    if options[_TRAINING] and count is not None:
        count += int(options[_GROUPS])
    if not options[_SAVES]:
        return y
    rows = _plan.SAVED_ROWS if options[_RENORM] is None else _plan.RENORM_ROWS
    vectors = kind.empty((rows, features), x, "float64")  # nothing reads these
    return y, saved_of(kind, arrays, options, kind.empty((0, features), x), vectors, vectors_of(kind, arrays), y)


def keeps_u(options: Options) -> bool:
    """Whether the call keeps u, the argument of the activation, as an array, because the backward needs it."""
    activation = options[_ACTIVATION]
    return bool(options[_SAVES]) and activation is not None and not follows_from_y(activation)


# ---- check -----------------------------------------------------------------------------------------------------------


def forward_views(
    kind: Kind, arrays: Arrays, options: Options, read_only: frozenset[str], _: Any = None, *, identity: bool = False
) -> Views:
    views = views_of(kind, ARRAYS, arrays, REQUIRED)
    for name in read_only:
        views[name] = views[name]._replace(writable=False)  # type: ignore[union-attr]
    check.forward_arguments(views, options, identity=identity)
    return views


def program_of(
    views: Views, options: Options, gpu: _plan.Device, limits: _plan.Limits, ranks: Ranks | None, limbs: bool, *,
    keeps: bool | None = None,
) -> Program | None:  # fmt: skip
    """The program of a call. `keeps`: whether the call keeps u and makes y from it in one more launch; None means that
    the options decide."""
    training, momentum, eps, precision, gemm, return_saved, sms, activation, _, renorm, groups, number = options
    x, weight, residual, out = views["x"], views["weight"], views["residual"], views["out"]
    assert x is not None and weight is not None
    (m, k), n = x.shape, weight.shape[0]
    if m == 0 and ranks is None:
        return None
    y_at = _plan.Matrix((n, 1), True) if out is None else matrix_of(out)
    p = _plan.Matmul(m, n, k, x.dtype, gpu.at_most(sms), matrix_of(x), matrix_of(weight), y_at, limits)
    if ranks is not None:
        ranks = ranks._replace(signature=signature(_call_text(views, options, n, k, x.dtype)))
    activates = keeps or residual is not None  # the usual launches then make u, and one more makes y from it
    keeps = keeps_u(options) if keeps is None else keeps
    of_u, result = _plan.place_of_u(p, out=out is not None, keeps=keeps) if activates else (p, {"out": out is not None})
    plan = _plan.plan_forward if groups == 1 else partial(_plan.plan_ghosts, groups=int(groups))
    at = None if residual is None else matrix_of(residual)
    in_epilogue = at is not None and of_u is p and groups == 1  # one launch may add the residual as it makes y
    if in_epilogue:
        result |= {"residual": at}
    program = plan(
        of_u,
        training=bool(training),
        momentum=momentum,
        eps=eps,
        precision=_plan.precision_for(precision, n, k),
        gemm=gemm,
        prepared=limbs,
        saves=bool(return_saved),
        activation=None if activates and not in_epilogue else activation,
        number=number,
        vectors=vector_codes(views),
        renorm=None if renorm is None else renorm._asdict() | {"renorm": vector_code(views["renorm"])},
        counts=views["num_batches_tracked"] is not None,
        ranks=ranks,
        **result,
    )
    if not activates or program.adds_residual:
        return program
    return _plan.then_activate(program, p, activation, out=out is not None, keeps=keeps, residual=at)


def _call_text(arrays: Any, options: Options, features: int, inputs: int, dtype: str) -> str:
    """A text of everything that must be equal in the forwards of all ranks; error messages show it."""
    _, momentum, eps, *_, activation, _, renorm, _, number = options
    given = ", ".join(name for name in (*VECTORS, "renorm") if arrays[name] is not None)
    average = "cumulative" if momentum is None else float(momentum)
    scale = "" if number == 1 else f", scale {float(number)}"
    corrects = "" if renorm is None else f", renorm {tuple(renorm)}"
    told = f"eps {float(eps)}, momentum {average}, activation {title(activation)}{scale}{corrects}"
    return f"forward of {features} features, {dtype}; {inputs} input features, {told}; with {given or 'no vectors'}"


def _returns(program: Program, views: Views, options: Options) -> Any:
    """Three results: the index of y among the arrays that the call makes, None with `out`; the index of u, None if it
    is not kept; `of_vectors` of `saved_of` if the call saves, else None."""
    kept = program.made("u") if keeps_u(options) else None
    if not options[_SAVES]:
        return program.made("y"), kept, None
    weight, scale = views["weight"], views["scale"]
    assert weight is not None
    dtypes = tuple(None if (view := views[name]) is None else view.dtype for name in VECTOR_PARAMETERS)
    return program.made("y"), kept, (dtypes, scale_shape(scale, weight.shape[0]))


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def on_cpu(
    kind: Kind, arrays: Arrays, options: Options, read_only: frozenset[str], _: Any = None, *,
    operation: Operation | None = None,
) -> Any:  # fmt: skip
    found = checked(FORWARD if operation is None else operation, kind, arrays, options, read_only)
    training, momentum, eps, _, _, return_saved, _, activation, group, renorm, groups, number = options
    host: dict[str, Any] = {n: None if a is None else kind.numpy(a) for n, a in zip(ARRAYS, arrays, strict=True)}
    x, weight, out = host["x"], host["weight"], host["out"]
    if group is not None:
        check_host(group)
        text = _call_text(host, options, len(weight), x.shape[1], str(x.dtype))
        if momentum is None or (renorm is not None and renorm.warmup):
            text += f", after {host['num_batches_tracked'].item()} batches"
    elif len(x) == 0:
        if training and host["num_batches_tracked"] is not None:
            raised_count(host["num_batches_tracked"].item(), momentum, int(groups))
        return _nothing(kind, arrays, options, len(weight))
    y = np.empty((len(x), len(weight)), x.dtype) if out is None else out
    residual, v = host.pop("residual"), None
    kept = _cpu.forward(
        host,
        y,
        training=training,
        momentum=None if momentum is None else float(momentum),  # 1 - momentum of a float16 would be a float16
        eps=float(eps),
        keep=return_saved,
        activation=activation if residual is None else None,
        number=float(number),
        renorm=renorm,
        groups=int(groups),
        gather=None if group is None else partial(gather, group, text),
    )
    if residual is not None:
        v = np.empty(y.shape, y.dtype) if keeps_u(options) else y
        _cpu.add(y, residual, v)
        _cpu.activate(v, y, activation)
    if found.written and kind.counts_writes:
        kind.count_writes([arrays[i] for i in found.written])
    result = arrays[-1] if out is not None else kind.from_numpy(y)
    if kept is None:
        return result
    deviations, vectors = map(kind.from_numpy, kept)
    of_f = result if v is None or v is y else kind.from_numpy(v)
    return result, saved_of(kind, arrays, options, deviations, vectors, vectors_of(kind, arrays), of_f)


def _types(options: Options) -> tuple[type, ...]:
    training, momentum, eps, _, _, return_saved, sms, _, _, _, groups, number = options
    return type(training), type(momentum), type(eps), type(return_saved), type(sms), type(groups), type(number)


FORWARD = Operation(
    name="forward",
    arguments=ARRAYS,
    required=REQUIRED,
    foreign=len(ARRAYS),
    aligned=(0, 1, len(ARRAYS) - 1, len(ARRAYS) - 2, 0),
    types=_types,
    check=forward_views,
    program=program_of,
    returns=_returns,
    result=result_of,
    on_cpu=on_cpu,
    within=limited_at(_SMS),
    written=lambda views, options: check.written(views, training=bool(options[_TRAINING])),
    extra=PREPARED,
)
