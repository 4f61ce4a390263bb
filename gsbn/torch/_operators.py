"""Define gsbn's calls as torch operators, for torch.compile and torch.export, which record a program.

Each operator is one node of the recorded graph. Eager calls do not use the operators, because the dispatcher would only
cost time on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _plan
from .._arrays.dynamo import constant_in_graphs
from .._backward import How, backward_of, run_channels_first
from .._cuda import kernels
from .._forward import forward_of
from .._forward.channels_first import forward_channels_first
from .._gradients import Gradients
from .._renorm import Renorm
from .._saved import FEW_ROWS, RENORM_ROWS, SAVED_ROWS, VECTOR_PARAMETERS, deviations_dtype
from ._activations import before
from ._again import Given, gradients_again
from ._autograd import are_static, contiguous, goes_again, is_compiling, is_exporting, kind_of_tensor
from ._groups import group_named

_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? gamma, Tensor? beta, Tensor{0}? running_mean, "
    "Tensor{1}? running_var, Tensor{2}? num_batches_tracked, float number, float? momentum, float eps, "
    "str precision, str gemm, str? activation, str? group=None, float[]? renorm=None, Tensor? limits=None, "
    "float? parameter=None, int groups=1, Tensor? residual=None, bool remat=False, int length=0) -> "
)
_WRITTEN, _READ = _SCHEMA.format("(a!)", "(b!)", "(c!)"), _SCHEMA.format("", "", "")


def _run(training: bool, keep: bool) -> Callable[..., Any]:
    """Return the forward as an operator, which returns y.

    To `keep` what a backward needs, the operator also returns deviations and vectors. A recorded program knows their
    shapes before the call, so its argument `remat` says whether the backward computes g again. With a `length` above 0
    the matrices share the memory of contiguous (N, C, length) tensors, as gsbn/_forward/channels_first.py describes.
    """

    def run(x: Any, weight: Any, bias: Any, scale: Any, *more: Any) -> Any:
        gamma, beta, mean, var, count, number, momentum, eps, precision, gemm, *_ = more
        activation, name, renorm, groups, residual, remat, length = _last(more)
        x, weight = map(contiguous, (x, weight)) if remat or length else (x, weight)
        group = group_named(x.device, name)
        factor = number if scale is None else scale
        arrays = (x, weight, factor, bias, gamma, beta, mean, var, count, None, residual, None)
        options = (training, momentum, eps, precision, gemm, keep, None, activation, group, renorm, groups)
        with torch.no_grad():
            if length:
                made = forward_channels_first((x, weight, None, *arrays[3:]), options, length, number)
            else:
                made = forward_of(arrays, options, _plan.Limits(remat=remat))
        if not keep:
            return made
        y, (deviations, vectors) = made[0], (made[1].deviations, made[1].vectors)
        if remat and deviations.shape[1] > 0:
            raise RuntimeError(
                "linear_batch_norm: expected as many SMs as where torch.compile recorded this program, which stores no "
                "deviations, got too few for its clusters; record it in this context, or with dynamic=True"
            )
        if deviations.shape[1] > y.shape[1]:
            deviations[:, y.shape[1] :].zero_()  # clears the padding: equal calls have equal results
        return y, deviations, vectors

    return run


# torch.library.custom_op does the same, but costs 85 us a call for an operator that writes an argument, and 20 us for
# any other. It fills in the schema's defaults and looks for results that share memory. Here gsbn itself counts what it
# writes.
_LIBRARY = torch.library.Library("gsbn", "DEF")


def _last(more: Any) -> tuple[Any, Any, Any, int, Any, bool, int]:
    """Return the activation, the group's name, `renorm`, `groups`, the residual, `remat` and `length` from the
    arguments after `scale`.

    The arguments after the activation may be absent.
    """
    name, group, numbers, limits, parameter, groups, residual, remat, length = (*more[10:], *[None] * 8)[:9]
    if numbers is not None:
        r_max, d_max, warmup = numbers
        limits = Renorm(r_max, d_max, int(warmup))
    activation, groups = _with_number(name, parameter), 1 if groups is None else groups
    return activation, group, limits, groups, residual, bool(remat), length or 0


def _with_number(name: Any, parameter: Any) -> Any:
    return name if parameter is None else (name, parameter)


def _operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    _LIBRARY.define(name + schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"gsbn::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.gsbn, name).default


def _fake_saved(training: bool) -> Callable[..., Any]:
    """Return a function that makes results with the shapes and dtypes that `gsbn.Saved` documents."""

    def fake(x: Any, weight: Any, bias: Any, scale: Any, *more: Any) -> Any:
        (rows, _), features = x.shape, weight.shape[0]
        _, _, renorm, groups, _, remat, length = _last(more)
        constants = SAVED_ROWS if not training or renorm is None else RENORM_ROWS
        constants = _plan.REMAT_ROWS if remat else constants
        of_vectors: tuple[int, ...] = (constants, features)
        if rows == 0:
            return x.new_empty(0, features), x.new_empty(0, features), x.new_empty(of_vectors, dtype=torch.float64)
        if length:
            pitch, kept = features, x.dtype
        elif x.device.type == "cpu":
            pitch, double = features, rows // groups <= FEW_ROWS or x.dtype == torch.float64
            kept = torch.float64 if double else torch.float32
        else:
            pad = 16 // x.dtype.itemsize
            pitch = (features + pad - 1) // pad * pad
            kept = getattr(torch, deviations_dtype(str(x.dtype)[6:], rows // groups, training=training))
        deviations = x.new_empty(rows, 0 if remat else pitch, dtype=kept)
        of_vectors = of_vectors if groups == 1 else (groups, constants, pitch)
        return x.new_empty(rows, features), deviations, x.new_empty(of_vectors, dtype=torch.float64)

    return fake


def _fake_y(x: Any, weight: Any, *_: Any) -> Any:
    return x.new_empty(x.shape[0], weight.shape[0])


TRAIN = _operator("train", f"{_WRITTEN}(Tensor, Tensor, Tensor)", _run(True, True), _fake_saved(True))
INFER_SAVED = _operator("infer_saved", f"{_READ}(Tensor, Tensor, Tensor)", _run(False, True), _fake_saved(False))
INFER = _operator("infer", f"{_READ}Tensor", _run(False, False), _fake_y)


def _backward(dy: Any, x: Any, weight: Any, deviations: Any, vectors: Any, *more: Any) -> Any:
    training, precision, gemm, name, dtypes, scale_shape, needs, *rest = more
    of_group, parameter, groups, wide, length = (*rest, *[None] * 5)[:5]
    activation, group = _with_number(name, parameter), group_named(dy.device, of_group)
    of_vectors: Any = tuple(None if name == "None" else name for name in dtypes.split())
    one, wanted = None if scale_shape is None else tuple(scale_shape), tuple(needs.split())
    how = How(training, precision, gemm, of_vectors, activation, one, group, wanted, groups=groups or 1)
    found: Any
    with torch.no_grad():
        if length:
            arrays = contiguous(dy), contiguous(x) if "weight" in wanted else None, weight, deviations, vectors, None
            found = run_channels_first(kind_of_tensor(dy), arrays, how._replace(wide=bool(wide)), length)
        else:
            found = backward_of(dy, how.saved(x, weight, deviations, vectors), wanted, wide=bool(wide))
    return [gradient for gradient in found if gradient is not None]


def _fake_backward(dy: Any, x: Any, weight: Any, deviations: Any, vectors: Any, *more: Any) -> Any:
    dtypes, scale_shape, needs, *rest = more[4:]
    of_weight = torch.float32 if (*rest, *[None] * 4)[3] else weight.dtype
    made = {"x": x.new_empty(x.shape), "weight": weight.new_empty(weight.shape, dtype=of_weight)}
    for name, dtype in zip(VECTOR_PARAMETERS, dtypes.split(), strict=True):
        shape = scale_shape if name == "scale" and scale_shape is not None else (weight.shape[0],)
        made[name] = None if dtype == "None" else dy.new_empty(shape, dtype=getattr(torch, dtype))
    return [made[name] for name in needs.split()]


# An operator cannot return None, so it returns a list of the gradients in `needs`, a string of names with spaces
# between them.
BACKWARD = _operator(
    "backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor deviations, Tensor vectors, bool training, str precision, str gemm, "
    "str? activation, str dtypes, int[]? scale_shape, str needs, str? group=None, float? parameter=None, "
    "int groups=1, bool wide=False, int length=0) -> Tensor[]",
    _backward,
    _fake_backward,
)


class _Recorded(torch.autograd.Function):
    """Connect the operators to autograd; torch allows no autograd formula for an operator that writes an argument."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        tensors, (training, wide, remat, length, *options) = arguments[:9], arguments[9:]
        number, _, eps, precision, gemm, activation, group, *_, parameter, groups, residual = options
        run = TRAIN if training else INFER_SAVED
        x, weight, bias, scale, gamma, beta = tensors[:6]
        weight = weight.to(x.dtype) if wide else weight
        y, deviations, vectors = run(x, weight, *tensors[2:], *options, remat, length)
        ctx.through = None  # the activation after a residual: PyTorch's operators compute its gradient from y
        if residual is not None and activation is not None:
            ctx.through, activation, parameter = _with_number(activation, parameter), None, None
        ctx.save_for_backward(x, weight, deviations, vectors, None if ctx.through is None else y)
        dtypes = " ".join(["None" if a is None else str(a.dtype)[6:] for a in (bias, scale, gamma, beta)])
        one = None if scale is None or scale.shape == (weight.shape[0],) else list(scale.shape)
        ctx.rest = training, precision, gemm, activation, dtypes, one
        ctx.last = group, parameter, groups, wide, length
        if not is_compiling():  # a compiled backward is differentiated by its compiler, if at all
            factor = number if scale is None else scale
            ctx.given = Given.of((weight, bias, factor, gamma, beta), eps, connected=True)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        *wanted, of_residual = ctx.needs_input_grad
        *saved, y = ctx.saved_tensors
        dv = dy if ctx.through is None else before(ctx.through, dy, y)
        nothing = [None] * (len(wanted) - len(Gradients._fields))
        if not is_compiling() and goes_again(dy):
            return *_again(ctx, dv), *nothing, dv if of_residual else None
        needs = [name for name, needed in zip(Gradients._fields, wanted, strict=False) if needed]
        found = iter(BACKWARD(dv, *saved, *ctx.rest, " ".join(needs), *ctx.last) if needs else ())
        gradients = [next(found) if name in needs else None for name in Gradients._fields]
        return *gradients, *nothing, dv if of_residual else None


def _again(ctx: Any, dy: Any) -> list[Any]:
    """Return the gradients of a call that was watched and not compiled, computed by PyTorch's operators."""
    training, precision, gemm, name, dtypes, scale_shape = ctx.rest
    of_group, parameter, groups, *_ = ctx.last
    of_vectors: Any = tuple(None if dtype == "None" else dtype for dtype in dtypes.split())
    one = None if scale_shape is None else tuple(scale_shape)
    needs = tuple(name for name, need in zip(Gradients._fields, ctx.needs_input_grad, strict=False) if need)
    x, _, _, vectors, _ = ctx.saved_tensors
    activation, group = _with_number(name, parameter), group_named(dy.device, of_group)
    how = How(training, precision, gemm, of_vectors, activation, one, group, needs, groups=groups)
    return gradients_again(how, ctx.given, dy, x, vectors)


def recorded(
    tensors: tuple[Any, ...],
    training: bool,
    differentiate: bool,
    wide: bool,
    activation: Any,
    *options: Any,
    length: int = 0,
) -> Any:
    """Record a call, and return y.

    `tensors` are x, weight, bias, scale, gamma, beta and the statistics. `options` are the operator's arguments from
    `number` on, without the activation and its parameter. With a residual the activation's gradient must follow from y.
    `wide`: the weight is float32 while x has 16 bits. It is then cast, and its gradient is float32; this needs
    `differentiate`. `length` is that of the operators.
    """
    name, parameter = activation if isinstance(activation, tuple) else (activation, None)
    *more, group, renorm, limits, groups, residual = options
    options = (*more, name, group, renorm, limits, None if parameter is None else float(parameter), groups, residual)
    if differentiate:
        _, momentum, *_, gemm = more
        plain = gemm == "auto" and group is renorm is limits is None and groups == 1 and not length
        remat = training and plain and is_compiling() and _records_remat(tensors[0], tensors[1], momentum)
        return _Recorded.apply(*tensors, training, wide, remat, length, *options)
    options = *options, False, length
    return TRAIN(*tensors, *options)[0] if training else INFER(*tensors, *options)


def _records_remat(x: Any, weight: Any, momentum: Any) -> bool:
    """Return whether to record a training call whose backward computes g again, as an eager call decides for its rows.

    A program for any number of rows or features stores deviations. So does an exported one, which may run on another
    GPU.
    """
    if is_exporting() or not x.is_cuda or x.dtype.itemsize != 2 or not are_static(*x.shape, weight.shape[0]):
        return False
    (rows, inputs), features, dtype = x.shape, weight.shape[0], str(x.dtype)[6:]
    return _chooses_remat(rows, features, inputs, dtype, x.device.index, momentum is None)


@constant_in_graphs
def _chooses_remat(rows: int, features: int, inputs: int, dtype: str, device: int, cumulative: bool) -> bool:
    """Return the planner's choice for contiguous operands on 16 bytes."""
    x, weight, y = (_plan.Matrix((pitch, 1), True) for pitch in (inputs, inputs, features))
    p = _plan.Matmul(rows, features, inputs, dtype, kernels.gpu(device), x, weight, y)
    return _plan.chooses_remat(p, reads_count=cumulative)
