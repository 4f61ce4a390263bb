"""backward: check, plan, launch, return."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple, overload

from . import _cpu, _plan
from ._arrays import check
from ._arrays.dynamo import outside_graphs
from ._arrays.kinds import Kind, kinds_of
from ._host.call import matrix_of
from ._host.run import ANY, Checked, Operation, Views, call
from ._host.run import run as run_on_gpu
from ._plan.backward import Vectors, gradient_of
from ._plan.problem import VECTOR_PARAMETERS
from ._plan.program import Program
from ._plan.ranks import Ranks
from ._plan.skinny import serves_skinny_backward
from ._ranks.exchange import signature
from ._ranks.group import Group
from ._saved import Saved
from ._typing import A, AnyArray, Array
from ._values import shown, sm_count
from .reference import Gradients

ARGUMENTS = ("dy", "x", "weight", "deviations", "vectors")


@overload
def backward(
    dy: Array[A], saved: Saved, *, needs: Collection[str] = Gradients._fields, sms: int | None = None
) -> Gradients[A]: ...
@overload
def backward(
    dy: AnyArray, saved: Saved, *, needs: Collection[str] = Gradients._fields, sms: int | None = None
) -> Gradients[Any]: ...
@outside_graphs
def backward(
    dy: Any, saved: Saved, *, needs: Collection[str] = Gradients._fields, sms: int | None = None
) -> Gradients[Any]:
    """The gradients of `forward`'s y, from what it saved.

    ::

        S = sum(dy), D = sum(dy (g - m)) over the batch,  a = gamma scale r
        training:   dg = a (dy - S/B - (g - m) scale² r² D/B)
                    dgamma = scale r D,  dscale = gamma eps r³ D,  dbias = 0
        inference:  dg = a dy
                    dgamma = r sum(dy (z - running_mean)),  dscale = gamma r sum(dy (g + bias)),  dbias = a S
        both:       dbeta = S,  dx = dg weight,  dweight = dgᵀ x

    In training the textbook's sum for dscale cancels down to this; summed as it stands, in float32, little but noise is
    left. dbias is exactly zero.

    With an activation, dy in these lines is the gradient before it: for "relu" 0 where y <= 0, and dy elsewhere, also
    where y is NaN. A scale of one element has one gradient, the sum of all features'.

    Parameters
    ----------
    dy : (B, O) array
        The gradient with respect to y: y's dtype, kind and device, any strides.
    saved : Saved
        What ``forward(..., return_saved=True)`` returned beside y. None of its arrays may have changed since.
    needs : collection of {"x", "weight", "bias", "scale", "gamma", "beta"}
        The gradients that are wanted. The others are None, and no work is done for them alone.
    sms : int, optional
        At most so many of the GPU's streaming multiprocessors are occupied by any launch of the call, as in `forward`;
        None is all. No launch of the backward waits for a part of itself.

    Returns
    -------
    Gradients
        ``(x, weight, bias, scale, gamma, beta)``: new C-contiguous arrays of dy's kind, each in its argument's dtype
        and shape. None for what is not in `needs`, and for an argument that the forward was not given, or as a number.

    Raises
    ------
    TypeError
        A dy that is no array, of another kind or dtype than x; a `saved` that is none; `needs` that is no collection of
        names.
    ValueError
        A shape or device of dy that is not allowed, an unknown name in `needs`, a `gemm` chosen in the forward that
        cannot serve here.
    RuntimeError
        A torch tensor that requires grad while grad mode is on: gsbn is outside autograd. An x or weight that was
        changed in place since the forward, where torch counts changes. A group that is closed or has failed.

    Notes
    -----
    Of a forward with a group the backward is a call of all its ranks, whatever each needs. S, D and B are then those of
    all ranks' rows in dg, and so in dx and dweight; the gradients of vectors, and dweight's sum, are of this rank's
    rows. The sum over the ranks is the whole batch's gradient.

    Asynchronous and safe to capture as `forward` is: on the stream that is current now, which must see what the forward
    did. Beside the result it allocates dg, in x's dtype (for TF32 its transpose as well), O(O) scratch, what cuBLAS
    or the parts of dweight want (32 MiB at most), limbs of float32 operands in about as many bytes as these have, and
    copies of operands and results that the kernels cannot take as they lie, or would take much longer for. dg passes
    through x's dtype as in PyTorch: beyond 65504 a float16 gradient overflows. S and D are float32 sums of 16 rows,
    merged in float64 in a fixed order; in 16 bits, of up to 16 rows, all but the GEMMs is float64. On the CPU
    arithmetic and memory are as the forward's there: float32 BLAS in blocks of rows, dg of one block at a time, each
    gradient rounded once.
    """
    return backward_within(ANY, dy, saved, needs=needs, sms=sms)


def backward_within(
    limits: _plan.Limits,
    dy: Any,
    saved: Saved,
    *,
    needs: Collection[str] = Gradients._fields,
    sms: int | None = None,
) -> Gradients[Any]:
    """`backward` of the same arguments, the planner's choice being limited; on the CPU there is none."""
    wanted = needs if needs is Gradients._fields else check.needs(needs, Gradients._fields)
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: expected what gsbn.forward(..., return_saved=True) returned, got {shown(saved)}")
    sm_count(sms)
    return backward_of(dy, saved, wanted, sms, limits)


@outside_graphs
def backward_of(
    dy: Any, saved: Saved, wanted: tuple[str, ...], sms: int | None = None, limits: _plan.Limits = ANY
) -> Gradients[Any]:
    """`backward`, all but dy being known to be right; the wanted names are in the order of `Gradients`."""
    if saved.group is not None:
        saved.group.check()
    how = How.of(saved, wanted, sms, limits)
    return call(BACKWARD, (dy, *saved[:4]), how, group=saved.group, limits=limits, context=saved)  # type: ignore[no-any-return]


def makes_both_products(dtype: str, rows: int, features: int, inputs: int) -> bool:
    """Whether a backward in training is expected to make dx and dweight in the launch that makes dg, which it does not
    write: it then reads the weight whatever is needed. How the operands lie is not looked at."""
    return serves_skinny_backward(dtype, rows, features, inputs)


class How(NamedTuple):
    """What a backward depends on beside its arrays."""

    training: bool
    precision: str
    gemm: str
    dtypes: tuple[str | None, ...]
    activation: str | None
    scale_shape: tuple[int, ...] | None
    group: Group | None
    needs: tuple[str, ...]
    sms: int | None = None
    limits: _plan.Limits = ANY
    norm: bool = True  # the halves: from dy to dg, and on from there
    linear: bool = True
    wide: bool = False  # dweight in float32, of 16-bit operands
    in_place: bool = False  # dg where the deviations lie, which have its dtype

    @classmethod
    def of(
        cls,
        saved: Saved,
        needs: tuple[str, ...],
        sms: int | None = None,
        limits: _plan.Limits = ANY,
        *,
        wide: bool = False,
    ) -> How:
        """Of the call that a Saved is of, for the gradients with these names."""
        _, _, _, _, training, precision, gemm, dtypes, _, activation, scale_shape, group = saved
        return cls(training, precision, gemm, dtypes, activation, scale_shape, group, needs, sms, limits, wide=wide)

    def saved(self, x: Any, weight: Any, deviations: Any, vectors: Any) -> Saved:
        """What `forward` returned, of these arrays; nobody counts how often they change."""
        training, precision, gemm, dtypes, activation, scale_shape, group, *_ = self
        of_call: Any = training, precision, gemm, dtypes, (None, None), activation, scale_shape, group
        return Saved(x, weight, deviations, vectors, *of_call)


def run(kind: Kind, arrays: tuple[Any, ...], how: How, saved: Saved | None = None) -> tuple[Checked, list[Any]]:
    """Compute on the GPU, from the arrays named ARGUMENTS. Gives the arrays that the call made; `returns` of what was
    found says which of them is which gradient, in the order of `Gradients`.

    With `saved` its arrays are the caller's; else autograd kept them. Of half a backward `arrays` are those of that
    half alone, None for the others. The first half makes dg last. It is the first array of the second half, in rows on
    16 bytes.
    """
    group = how.group if how.norm else None
    found, made = run_on_gpu(BACKWARD, kind, arrays, how, group, how.limits, saved)
    assert found is not None
    return found, made


def _result(kind: Kind, arrays: tuple[Any, ...], how: How, found: Checked | None, made: list[Any]) -> Gradients[Any]:
    assert found is not None
    return Gradients(*(None if place is None else made[place] for place in found.returns))


# ---- check -----------------------------------------------------------------------------------------------------------


def _views(kind: Kind, arrays: tuple[Any, ...]) -> Views:
    return {name: None if array is None else kind.view(array) for name, array in zip(ARGUMENTS, arrays, strict=True)}


def _check(kind: Kind, arrays: tuple[Any, ...], how: How, _: frozenset[str], saved: Saved | None) -> Views:
    return _check_kept(kind, arrays, how) if saved is None else _check_arguments(kind, arrays)


def _check_arguments(kind: Kind, arrays: tuple[Any, ...]) -> Views:
    """Raise what is wrong with dy, or with what was saved."""
    dy, x, weight, *_others = arrays
    kinds_of({"x": x, "weight": weight, "dy": dy}, ("x", "dy"))
    views = _views(kind, arrays)
    of_dy, of_x, of_weight = views["dy"], views["x"], views["weight"]
    assert of_dy is not None and of_x is not None and of_weight is not None
    check.backward_arguments(of_dy, of_x, of_weight.shape[0])
    return views


def _check_kept(kind: Kind, arrays: tuple[Any, ...], how: How) -> Views:
    """Raise what is wrong with dy, and with what autograd kept: hooks on saved tensors may give back anything."""
    named = dict(zip(ARGUMENTS, arrays, strict=True))
    kinds_of({name: array for name, array in named.items() if array is not None}, ("dy",))
    views = _views(kind, arrays)
    of_dy, x, weight = views["dy"], views["x"], views["weight"]
    assert of_dy is not None
    rows, features = of_dy.shape
    if rows == 0:
        return views
    inputs = next((view.shape[1] for view in (x, weight) if view is not None), 0)
    kept = _plan.deviations_dtype(of_dy.dtype, rows, training=how.training)
    expected = {"x": ((rows, inputs), of_dy.dtype), "weight": ((features, inputs), of_dy.dtype)}
    expected |= {"deviations": ((rows, features), kept), "vectors": ((_plan.SAVED_ROWS, features), "float64")}
    for name, (shape, dtype) in expected.items():
        view = views[name]
        if view is None:
            continue
        pitched = name == "deviations" and view.shape[0] == rows and view.shape[1] >= features  # in rows of whole words
        if not (view.shape == shape or pitched) or (view.dtype, view.device) != (dtype, of_dy.device):
            raise RuntimeError(
                f"saved {name}: expected {dtype} {shape} on {of_dy.device}, as the forward kept it, got {view.dtype} "
                f"{view.shape} on {view.device}: hooks on saved tensors must give back what they were given"
            )
    return views


def _check_versions(kind: Kind, saved: Saved | None) -> None:
    """Raise what autograd raises where an operand is no longer what the forward saw."""
    if saved is None:
        return
    for name, expected in zip(("x", "weight"), saved.versions, strict=True):
        if expected is not None and (found := kind.version(getattr(saved, name))) != expected:
            raise RuntimeError(
                f"{name}: modified by an inplace operation since the forward: it is at version {found}, expected "
                f"version {expected}"
            )


# ---- plan ------------------------------------------------------------------------------------------------------------


def _program(
    views: Views, how: How, gpu: _plan.Device, limits: _plan.Limits, ranks: Ranks | None, _: bool
) -> Program | None:
    dy, x, weight, deviations = (views[name] for name in ARGUMENTS[:4])
    assert dy is not None
    (m, n), k = dy.shape, next((view.shape[1] for view in (x, weight) if view is not None), 1)
    x_at, w_at = (_plan.Matrix((k, 1), True) if view is None else matrix_of(view) for view in (x, weight))
    given = dict(zip(VECTOR_PARAMETERS, how.dtypes, strict=True))
    dtypes = {name: dtype for name, dtype in given.items() if dtype is not None}
    if ranks is not None:
        ranks = ranks._replace(signature=signature(f"backward of {n} features, {dy.dtype}"))
    return _plan.plan_backward(
        _plan.Matmul(m, n, k, dy.dtype, gpu.at_most(how.sms), x_at, w_at, matrix_of(dy), limits),
        training=how.training,
        needs=tuple(name for name in how.needs if name in ("x", "weight") or name in dtypes),
        vectors=Vectors(dtypes, how.scale_shape),
        precision=_plan.precision_for(how.precision, n),
        gemm=how.gemm,
        activation=how.activation,
        norm=how.norm,
        linear=how.linear,
        wide=how.wide,
        in_place=how.in_place,
        ranks=ranks,
        ld_saved=0 if deviations is None else deviations.shape[1],
    )


def _within(how: How, held: int) -> How:
    """The same of a call that can occupy so many SMs at most."""
    return how._replace(sms=held if how.sms is None else min(how.sms, held))


def _returns(program: Program, views: Views, how: How) -> tuple[int | None, ...]:
    return tuple(program.made(gradient_of(name)) for name in Gradients._fields)


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def _on_cpu(kind: Kind, arrays: tuple[Any, ...], how: How, _: frozenset[str], saved: Saved) -> Gradients[Any]:
    _check_arguments(kind, arrays)
    _check_versions(kind, saved)
    dy, needs = arrays[0], how.needs
    dtypes = dict(zip(Gradients._fields, (kind.dtype(saved.x), kind.dtype(saved.x), *saved.dtypes), strict=True))
    wanted = {name: dtype for name, dtype in dtypes.items() if name in needs and dtype is not None}
    call = f"backward of {len(saved.weight)} features, {kind.dtype(dy)}"
    found = _cpu.backward(
        *map(kind.numpy, (dy, *saved[:4])),
        training=saved.training,
        needs=wanted,
        activation=saved.activation,
        scale_shape=saved.scale_shape,
        gather=None if saved.group is None else partial(saved.group.gather, call),
    )
    return Gradients(*(kind.from_numpy(found[name]) if name in found else None for name in Gradients._fields))


BACKWARD = Operation(
    name="backward",
    arguments=ARGUMENTS,
    required=("dy",),
    foreign=1,
    aligned=(0, 1, 2),
    numeric=(),
    check=_check,
    program=_program,
    returns=_returns,
    result=_result,
    on_cpu=_on_cpu,
    within=_within,
    before=_check_versions,
)
