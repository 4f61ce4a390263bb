"""backward: the checks, the plan of a call, and its results."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, overload

from .. import _cpu, _plan
from .._arrays import check
from .._arrays.dynamo import outside_graphs
from .._arrays.kinds import Kind
from .._gradients import NEEDS, Gradients
from .._host.call import matrix_of
from .._host.run import ANY, Arrays, Checked, Operation, Views, call, views_of
from .._host.run import run as run_on_gpu
from .._plan.backward import Asked, Vectors, gradient_of
from .._plan.problem import VECTOR_PARAMETERS, Ranks
from .._plan.program import Program
from .._ranks.exchange import signature
from .._ranks.group import Group, gather
from .._saved import Saved, check_versions
from .._typing import A, AnyArray, Array
from .._values import shown, sm_count, sms_within
from .activate import before_activation

ARGUMENTS = ("dy", "x", "weight", "deviations", "vectors", "kept")


@overload
def backward(dy: Array[A], saved: Saved, *, needs: Collection[str] = NEEDS, sms: int | None = None) -> Gradients[A]: ...
@overload
def backward(
    dy: AnyArray, saved: Saved, *, needs: Collection[str] = NEEDS, sms: int | None = None
) -> Gradients[Any]: ...
@outside_graphs
def backward(
    dy: Array[Any] | AnyArray, saved: Saved, *, needs: Collection[str] = NEEDS, sms: int | None = None
) -> Gradients[Any]:
    """Compute the gradients of `forward`'s y from what the forward saved.

    ::

        S = sum(dy), D = sum(dy (g - m)) over the batch,  a = gamma scale r
        training:   dg = a (dy - S/B - (g - m) scale² r² D/B)
                    dgamma = scale r D,  dscale = gamma eps r³ D,  dbias = 0
        inference:  dg = a dy
                    dgamma = r sum(dy (z - running_mean)),  dscale = gamma r sum(dy (g + bias)),  dbias = a S
        both:       dbeta = S,  dx = dg weight,  dweight = dgᵀ x

    In training dbias is exactly zero, and dscale has no sum that cancels; `gsbn.reference` has the derivation.

    With an activation, dy in these formulas is the gradient before the activation: dy times the activation's
    derivative. For "relu" it is 0 where y <= 0, and dy elsewhere, also where y is NaN. This is also the residual's
    gradient; with a residual it is first rounded to x's dtype. A scale of one element has one gradient, the sum over
    all features.

    Parameters
    ----------
    dy : (B, O) array
        The gradient with respect to y: y's dtype, library and device, any strides.
    saved : Saved
        From ``forward(..., return_saved=True)``, or from `linear`: its formulas are those of inference with a = 1. None
        of its arrays may have changed since.
    needs : collection of {"x", "weight", "bias", "scale", "gamma", "beta", "residual"}
        The gradients to compute. The others are None, and cost no time.
    sms : int, optional
        The largest number of the GPU's streaming multiprocessors that a launch of this call may occupy, as in
        `forward`; None is all.

    Returns
    -------
    Gradients
        ``(x, weight, bias, scale, gamma, beta)``, and `residual` as an attribute: new C-contiguous arrays of dy's
        library, each with the dtype and the shape of its argument. None if not in `needs`, or if the argument was
        absent or a number.

    Raises
    ------
    TypeError
        dy is not an array, or not of x's library and dtype. `saved` is not a Saved. `needs` is not a collection of
        names.
    ValueError
        dy has the wrong shape or device. `needs` has an unknown name. The `gemm` of the forward does not support this
        backward. `sms` is too small for a backward that computes g again; the message gives the least.
    RuntimeError
        A torch tensor requires grad while grad mode is on: gsbn is outside autograd. A torch x or weight was changed
        in place since the forward. The group is closed or has failed.

    Notes
    -----
    After a forward with a group all ranks must call the backward, whatever gradients each needs. In dg, and so in dx
    and dweight, S, D and B are those of all ranks' rows. dweight and the gradients of vectors are sums over this rank's
    rows: their sum over the ranks is the gradient of the whole batch.

    Like `forward` it is asynchronous and can be captured. It runs on the current stream, which must be ordered after
    the forward. dg is rounded to x's dtype, as in PyTorch: a float16 gradient overflows beyond 65504. S and D are
    float32 sums over 16 rows, merged in float64 in a fixed order. For 16-bit dtypes with up to 16 rows everything but
    the GEMMs is float64. On the CPU arithmetic is as in the forward, and each gradient is rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> import gsbn
    >>> x, weight = np.random.rand(256, 64).astype("f4"), np.random.rand(32, 64).astype("f4")
    >>> y, saved = gsbn.forward(x, weight, training=True, return_saved=True)
    >>> gradients = gsbn.backward(np.ones_like(y), saved, needs=("x", "weight"))
    >>> gradients.x.shape, gradients.weight.shape, gradients.beta
    ((256, 64), (32, 64), None)
    """
    return backward_within(ANY, dy, saved, needs=needs, sms=sms)


def backward_within(
    limits: _plan.Limits, dy: Any, saved: Saved, *, needs: Collection[str] = NEEDS, sms: int | None = None
) -> Gradients[Any]:
    """`backward` with limits on the planner's choice; they have no effect on the CPU."""
    wanted = needs if needs is NEEDS else check.needs(needs, NEEDS)
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: expected what gsbn.forward(..., return_saved=True) returned, got {shown(saved)}")
    sm_count(sms)
    return backward_of(dy, saved, wanted, sms, limits)


@outside_graphs
def backward_of(
    dy: Any,
    saved: Saved,
    wanted: tuple[str, ...],
    sms: int | None = None,
    limits: _plan.Limits = ANY,
    *,
    wide: bool = False,
) -> Gradients[Any]:
    """`backward`, but only dy is checked. The names in `wanted` are in the order of `Gradients`. `wide`: see `How`."""
    if saved.group is not None:
        saved.group.check()
    if saved.residual and "residual" in wanted:
        others = tuple(name for name in wanted if name != "residual")
        alone = not others and saved.group is None  # the ranks of a group wait for each other
        if alone or saved.activation is None:  # without an activation it is a copy of dy
            of_residual = before_activation(dy, saved, sms, limits)
            none: Gradients[Any] = Gradients(*[None] * len(Gradients._fields))
            made = none if alone else backward_of(dy, saved, others, sms, limits, wide=wide)
            made.residual = of_residual
            return made
    how = How.of(saved, wanted, sms, wide=wide)
    return call(BACKWARD, (dy, *saved[:4], saved.kept), how, group=saved.group, limits=limits, context=saved)  # type: ignore[no-any-return]


class How(NamedTuple):
    """The options of a backward: everything that it depends on, except its arrays."""

    training: bool
    precision: str
    gemm: str
    dtypes: tuple[str | None, ...]
    activation: Any
    scale_shape: tuple[int, ...] | None
    group: Group | None
    needs: tuple[str, ...]
    sms: int | None = None
    norm: bool = True  # the first half of the backward: from dy to dg
    linear: bool = True  # the second half: from dg to dx and dweight
    wide: bool = False  # dweight is float32 although the operands have 16 bits
    in_place: bool = False  # dg overwrites the deviations, which have its dtype
    identity: bool = False  # the layer is `gsbn.linear`: y takes the place of the deviations
    groups: int = 1  # the number of ghost batches
    residual_activation: Any = None  # the activation after a residual, whose gradient follows from `kept`

    @classmethod
    def of(cls, saved: Saved, needs: tuple[str, ...], sms: int | None = None, *, wide: bool = False) -> How:
        """The options of a backward from `saved`, for the gradients named in `needs`."""
        _, _, _, vectors, training, precision, gemm, dtypes, _, activation, scale_shape, group, groups, adds, _ = saved
        of_y, residual_activation = (None, activation) if adds else (activation, None)
        of_call = training, precision, gemm, dtypes, of_y, scale_shape, group, needs, sms
        norm, linear, in_place, identity = True, True, False, vectors is None
        # quicker than the constructor
        return cls._make((*of_call, norm, linear, wide, in_place, identity, groups, residual_activation))

    def saved(self, x: Any, weight: Any, deviations: Any, vectors: Any) -> Saved:
        """The Saved of these arrays, without torch's counts of their changes."""
        training, precision, gemm, dtypes, activation, scale_shape, group, *_ = self
        of_call: Any = training, precision, gemm, dtypes, (None, None), activation, scale_shape, group, self.groups
        return Saved(x, weight, deviations, vectors, *of_call)


def run(
    kind: Kind, arrays: Arrays, how: How, saved: Saved | None = None, limits: _plan.Limits = ANY
) -> tuple[list[Any], list[Any]]:
    """Compute on the GPU, from the arrays named ARGUMENTS. Returns the gradients, in the order of NEEDS, and all
    arrays that the call made.

    With `saved` the arrays are the caller's; otherwise autograd kept them. A call of one half of the backward gets None
    for the arrays that it does not read. The first half makes dg as its last array; the second half takes dg in place
    of dy.
    """
    group = how.group if how.norm else None
    found, made = run_on_gpu(BACKWARD, kind, arrays, how, group, limits, saved)
    assert found is not None
    return found.returned(made), made


def _result(kind: Kind, arrays: Arrays, how: How, found: Checked | None, made: list[Any]) -> Gradients[Any]:
    assert found is not None
    return Gradients(*found.returned(made))


# ---- check -----------------------------------------------------------------------------------------------------------


def _check(kind: Kind, arrays: Arrays, how: How, _: frozenset[str], saved: Saved | None) -> Views:
    return _check_kept(kind, arrays, how) if saved is None else _check_arguments(kind, arrays)


def _check_arguments(kind: Kind, arrays: Arrays) -> Views:
    """Raise if dy or a saved array is wrong."""
    views = views_of(kind, ARGUMENTS, arrays, ("x", "dy"))
    dy, x, weight, kept = views["dy"], views["x"], views["weight"], views["kept"]
    assert dy is not None and x is not None and weight is not None
    check.backward_arguments(dy, x, weight.shape[0])
    if kept is not None:
        check.kept("kept", kept, dy.shape, dy.dtype, dy)
    return views


def _check_kept(kind: Kind, arrays: Arrays, how: How) -> Views:
    """Raise if dy or an array that autograd kept is wrong: hooks on saved tensors may return anything."""
    views = views_of(kind, ARGUMENTS, arrays, ("dy",))
    dy, x, weight = views["dy"], views["x"], views["weight"]
    assert dy is not None
    rows, features = dy.shape
    if rows == 0:
        return views
    inputs = next((view.shape[1] for view in (x, weight) if view is not None), 0)
    of_deviations = dy.dtype
    if not how.identity:
        of_deviations = _plan.deviations_dtype(dy.dtype, rows // how.groups, training=how.training)
    expected: dict[str, tuple[tuple[int, ...], str]] = {
        "x": ((rows, inputs), dy.dtype),
        "weight": ((features, inputs), dy.dtype),
    }
    vectors = views["vectors"]
    remat, renorm = (_has_rows(vectors, number) for number in (_plan.REMAT_ROWS, _plan.RENORM_ROWS))
    constants = _plan.REMAT_ROWS if remat else _plan.RENORM_ROWS if renorm else _plan.SAVED_ROWS
    if remat and (x is None or weight is None):
        raise RuntimeError("saved x and weight: expected both, as the forward kept no deviations")
    of_vectors: tuple[int, ...] = (constants, features)
    if how.groups > 1:
        of_vectors = (how.groups, constants, _plan.ghost_pitch(features, dy.dtype))
    expected |= {"deviations": ((rows, 0 if remat else features), of_deviations), "vectors": (of_vectors, "float64")}
    expected |= {"kept": ((rows, features), dy.dtype)}
    for name, (shape, dtype) in expected.items():
        if (view := views[name]) is not None:
            check.kept(name, view, shape, dtype, dy, pitched=name == "deviations")
    return views


def _has_rows(vectors: check.View | None, rows: int) -> bool:
    """Whether the forward saved so many rows: RENORM_ROWS with batch renormalisation, REMAT_ROWS without deviations."""
    return vectors is not None and vectors.shape[-2:-1] == (rows,)


# ---- plan ------------------------------------------------------------------------------------------------------------


def _program(
    views: Views, how: How, gpu: _plan.Device, limits: _plan.Limits, ranks: Ranks | None, _: bool
) -> Program | None:
    dy, x, weight, deviations, vectors, kept = (views[name] for name in ARGUMENTS)
    assert dy is not None
    (m, n), k = dy.shape, next((view.shape[1] for view in (x, weight) if view is not None), 1)
    x_at, w_at = (_plan.Matrix((k, 1), True) if view is None else matrix_of(view) for view in (x, weight))
    dtypes = _given_dtypes(how)
    if ranks is not None:
        ranks = ranks._replace(signature=signature(f"backward of {n} features, {dy.dtype}"))
    p = _plan.Matmul(m, n, k, dy.dtype, gpu.at_most(how.sms), x_at, w_at, matrix_of(dy), limits)
    asked = Asked(
        training=how.training,
        needs=tuple(name for name in how.needs if name in ("x", "weight", "residual") or name in dtypes),
        vectors=Vectors(dtypes, how.scale_shape),
        precision=_plan.precision_for(how.precision, n, k if how.linear else None),
        gemm=how.gemm,
        activation=how.activation,
        norm=how.norm,
        linear=how.linear,
        wide=how.wide,
        in_place=how.in_place,
        ranks=ranks,
        identity=how.identity,
        renorm=_has_rows(vectors, _plan.RENORM_ROWS),
        remat=_has_rows(vectors, _plan.REMAT_ROWS),
        groups=how.groups if how.norm else 1,
        ld_saved=0 if deviations is None else deviations.shape[1],
        y=matrix_of(deviations) if how.identity and deviations is not None else None,
        kept=None if kept is None else matrix_of(kept),
        residual_activation=how.residual_activation,
    )
    return _plan.plan_backward(p, asked)


def _given_dtypes(how: How) -> dict[str, str]:
    """The dtypes of the vectors that the forward had, by name."""
    given = zip(VECTOR_PARAMETERS, how.dtypes, strict=True)
    return {name: dtype for name, dtype in given if dtype is not None}


def _within(how: How, held: int) -> How:
    """The options with `sms` limited to `held`."""
    return how._replace(sms=sms_within(how.sms, held))


def _returns(program: Program, views: Views, how: How) -> tuple[int | None, ...]:
    return tuple(program.made(gradient_of(name)) for name in NEEDS)


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def _on_cpu(kind: Kind, arrays: Arrays, how: How, _: frozenset[str], saved: Saved) -> Gradients[Any]:
    _check_arguments(kind, arrays)
    check_versions(kind, saved)
    dy, needs, kept, dv = arrays[0], how.needs, arrays[-1], None
    dtypes = dict(zip(Gradients._fields, (kind.dtype(saved.x), kind.dtype(saved.x), *saved.dtypes), strict=True))
    wanted = {name: dtype for name, dtype in dtypes.items() if name in needs and dtype is not None}
    given: tuple[Any, ...] = tuple(map(kind.numpy, (dy, *saved[:2])))
    if kept is not None:
        dv = _cpu.before(given[0], kind.numpy(kept), how.residual_activation)
        given = dv, *given[1:]
    if how.identity:
        y = given[0] if saved.deviations is None else kind.numpy(saved.deviations)
        given += _cpu.without_norm(y)
    else:
        given += tuple(map(kind.numpy, saved[2:4]))
    call = f"backward of {len(saved.weight)} features, {kind.dtype(dy)}"
    found = _cpu.backward(
        *given,
        training=saved.training,
        needs=wanted,
        activation=how.activation,
        scale_shape=saved.scale_shape,
        groups=saved.groups,
        gather=None if saved.group is None else partial(gather, saved.group, call),
    )
    if dv is not None and "residual" in needs:
        found = found | {"residual": dv}
    made: Any = [kind.from_numpy(found[name]) if name in found else None for name in NEEDS]
    return Gradients(*made)


BACKWARD = Operation(
    name="backward",
    arguments=ARGUMENTS,
    required=("dy",),
    foreign=1,
    aligned=(0, 1, 2, 3, 5),
    check=_check,
    program=_program,
    returns=_returns,
    result=_result,
    on_cpu=_on_cpu,
    within=_within,
    before=check_versions,
)


# ---- channels first: see _forward/channels_first.py ------------------------------------------------------------------


def _channels_first_program(
    views: Views, options: tuple[How, int], gpu: _plan.Device, limits: _plan.Limits, *_: Any
) -> Program:
    how, length = options
    dy, x, weight = views["dy"], views["x"], views["weight"]
    assert dy is not None
    (m, n), k = dy.shape, next((view.shape[1] for view in (x, weight) if view is not None), 1)
    at = _plan.Matrix((k, 1), True)
    w_at = at if weight is None else matrix_of(weight)
    p = _plan.Matmul(m, n, k, dy.dtype, gpu.at_most(how.sms), at, w_at, at, limits)
    return _plan.plan_backward_channels_first(
        p,
        length,
        needs=how.needs,
        dtypes=_given_dtypes(how),
        activation=how.activation,
        wide=how.wide,
        in_place=how.in_place,
    )


BACKWARD_CHANNELS_FIRST = replace(
    BACKWARD,
    name="backward_channels_first",
    check=lambda kind, arrays, options, *more: BACKWARD.check(kind, arrays, options[0], *more),
    program=_channels_first_program,
    returns=lambda program, views, options: BACKWARD.returns(program, views, options[0]),
    within=lambda options, held: (BACKWARD.within(options[0], held), options[1]),
    before=None,
)


def run_channels_first(kind: Kind, arrays: Arrays, how: How, length: int, limits: _plan.Limits = ANY) -> list[Any]:
    """Compute on the GPU as `run` does, of samples of this length. Returns the gradients alone."""
    found, made = run_on_gpu(BACKWARD_CHANNELS_FIRST, kind, arrays, (how, length), limits=limits)
    assert found is not None
    return found.returned(made)
