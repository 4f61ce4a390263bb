"""backward: check, plan, launch, return."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple, overload

from . import _check, _cpu, _declared, _kernels, _plan
from ._call import ABSENT, Call, log, matrix_of, remember
from ._check import VECTOR_PARAMETERS
from ._copies import copied, move
from ._device import green_sms, hold_until_done, is_capturing, is_current, on_device
from ._dynamo import outside_graphs
from ._group import Group
from ._interop import Kind, kind_of, kinds_of
from ._products import add_parts, multiply_both
from ._ranks import Exchange, exchange_of, letters, posts_at, signature
from ._saved import Saved
from ._typing import A, AnyArray, Array
from .reference import Gradients

__all__ = ["Gradients", "How", "backward", "backward_of", "backward_within", "run"]

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
    return backward_within(_ANY, dy, saved, needs=needs, sms=sms)


_ANY = _plan.Limits()


def backward_within(
    limits: _plan.Limits,
    dy: Any,
    saved: Saved,
    *,
    needs: Collection[str] = Gradients._fields,
    sms: int | None = None,
) -> Gradients[Any]:
    """`backward` of the same arguments, the planner's choice being limited; on the CPU there is none."""
    wanted = needs if needs is Gradients._fields else _check.needs(needs, Gradients._fields)
    if not isinstance(saved, Saved):
        raise TypeError(
            f"saved: expected what gsbn.forward(..., return_saved=True) returned, got {_check.shown(saved)}"
        )
    _check.sm_count(sms)
    return backward_of(dy, saved, wanted, sms, limits)


@outside_graphs
def backward_of(
    dy: Any, saved: Saved, wanted: tuple[str, ...], sms: int | None = None, limits: _plan.Limits = _ANY
) -> Gradients[Any]:
    """`backward`, all but dy being known to be right; the wanted names are in the order of `Gradients`."""
    if saved.group is not None:
        saved.group.check()
    kind, given = kind_of(dy), dy
    if kind is None:  # a foreign DLPack producer, or no array at all
        kind, imported, _ = kinds_of({"dy": dy}, ("dy",))
        dy = imported["dy"]
    if not kind.on_gpu:
        _check_arguments(kind, dy, saved)
        _check_versions(kind, saved)
        return _backward_cpu(kind, dy, saved, wanted)
    arrays = (dy, *saved[:4])
    found, made = run(kind, arrays, How.of(saved, wanted, sms, limits), saved)
    if dy is not given:
        hold_until_done(dy, kind.device(dy))
    return Gradients(*(None if place is None else made[place] for place in found.places))


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
    limits: _plan.Limits = _ANY
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
        limits: _plan.Limits = _ANY,
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


def run(kind: Kind, arrays: tuple[Any, ...], how: How, saved: Saved | None = None) -> tuple[_Backward, list[Any]]:
    """Compute on the GPU, from the arrays named ARGUMENTS, what was prepared and the arrays that it made.

    With `saved` all is checked. Of half a backward `arrays` are those of that half alone, None for the others. The
    first half makes dg last. It is the first array of the second half, in rows on 16 bytes.
    """
    device = kind.device(arrays[0])
    if not is_current(device):
        with on_device(device, kind.stream):
            return run(kind, arrays, how, saved)
    stream = kind.stream(device)
    capturing = is_capturing(stream)
    if (held := green_sms(stream)) is not None:
        how = how._replace(sms=held if how.sms is None else min(how.sms, held))
    exchange = None if how.group is None or not how.norm else exchange_of(how.group, device, capturing)
    if exchange is not None:
        how.group.check()  # type: ignore[union-attr]
    found = key = None
    pointers: list[int] = []
    try:
        alike, pointers = kind.read(arrays)
        aligned = (pointers[0] & 15 == 0, pointers[1] & 15 == 0, pointers[2] & 15 == 0)
        key = (alike, how, aligned)
        found = _calls.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        key = None  # something is not what it should be: the checks say what
    if found is None:
        if saved is not None:
            _check_arguments(kind, arrays[0], saved)
        else:
            _check_arrays(kind, arrays, how)
        pointers = pointers or [0 if a is None else kind.pointer(a) for a in arrays]  # none if `read` refused
        found = _prepare_call(kind, arrays, how, device, exchange)
        remember(_calls, key, found)
    if saved is not None:
        _check_versions(kind, saved)
    if exchange is None:
        return found, found.call.run(arrays[0], pointers, stream, capturing)
    pointers.append(exchange.address)
    exchange.begin(stream, capturing)
    made = found.call.run(arrays[0], pointers, stream, capturing)
    exchange.end(stream, capturing)
    return found, made


# ---- check -----------------------------------------------------------------------------------------------------------


def _check_arguments(kind: Kind, dy: Any, saved: Saved) -> None:
    """Raise what is wrong with dy, or with what was saved."""
    named = {"x": saved.x, "weight": saved.weight, "dy": dy}
    kinds_of(named, ("x", "dy"))
    views = {name: kind.view(array) for name, array in named.items()}
    _check.backward_arguments(views["dy"], views["x"], views["weight"].shape[0])


def _check_arrays(kind: Kind, arrays: tuple[Any, ...], how: How) -> None:
    """Raise what is wrong with dy, and with what autograd kept: hooks on saved tensors may give back anything."""
    dy, x, weight, *_ = arrays
    named = dict(zip(ARGUMENTS, arrays, strict=True))
    kinds_of({name: array for name, array in named.items() if array is not None}, ("dy",))
    of_dy = kind.view(dy)
    rows, features = of_dy.shape
    if rows == 0:
        return
    inputs = next((kind.view(array).shape[1] for array in (x, weight) if array is not None), 0)
    kept = _plan.kept_dtype(of_dy.dtype, rows, training=how.training)
    expected = {"x": ((rows, inputs), of_dy.dtype), "weight": ((features, inputs), of_dy.dtype)}
    expected |= {"deviations": ((rows, features), kept), "vectors": ((_plan.SAVED_ROWS, features), "float64")}
    for name, (shape, dtype) in expected.items():
        if named[name] is None:
            continue
        view = kind.view(named[name])
        pitched = name == "deviations" and view.shape[0] == rows and view.shape[1] >= features  # in rows of whole words
        if not (view.shape == shape or pitched) or (view.dtype, view.device) != (dtype, of_dy.device):
            raise RuntimeError(
                f"saved {name}: expected {dtype} {shape} on {of_dy.device}, as the forward kept it, got {view.dtype} "
                f"{view.shape} on {view.device}: hooks on saved tensors must give back what they were given"
            )


def _check_versions(kind: Kind, saved: Saved) -> None:
    """Raise what autograd raises where an operand is no longer what the forward saw."""
    for name, expected in zip(("x", "weight"), saved.versions, strict=True):
        if expected is not None and (found := kind.version(getattr(saved, name))) != expected:
            raise RuntimeError(
                f"{name}: modified by an inplace operation since the forward: it is at version {found}, expected "
                f"version {expected}"
            )


# ---- plan ------------------------------------------------------------------------------------------------------------


class _Backward(NamedTuple):
    """A backward call, ready but for its addresses, and the places of its gradients among what it makes."""

    call: Call
    places: list[int | None]


_calls: dict[Any, _Backward] = {}


def _prepare_call(kind: Kind, arrays: tuple[Any, ...], how: How, device: int, exchange: Exchange | None) -> _Backward:
    like, needs = arrays[0], how.needs
    dy, x, weight = (None if array is None else kind.view(array) for array in arrays[:3])
    assert dy is not None
    (m, n), k = dy.shape, next((view.shape[1] for view in (x, weight) if view is not None), 1)
    given = (dy.dtype, "float32" if how.wide else dy.dtype, *how.dtypes)
    dtypes = [dtype if name in needs else None for name, dtype in zip(Gradients._fields, given, strict=True)]
    wanted = tuple(name for name, dtype in zip(Gradients._fields, dtypes, strict=True) if dtype is not None)
    gpu = (how.limits.gpu or _kernels.gpu(device)).at_most(how.sms)
    arguments = ARGUMENTS if exchange is None else (*ARGUMENTS, "ranks")
    call = Call(kind, device, arguments, limited=gpu.limited)
    shapes: list[tuple[int, ...]] = [(m, k), (n, k), *[(n,)] * len(VECTOR_PARAMETERS)]
    one_scale = how.scale_shape is not None and "scale" in wanted and how.norm
    if one_scale:
        assert how.scale_shape is not None
        shapes[Gradients._fields.index("scale")] = how.scale_shape
    of = dict.fromkeys(Gradients._fields, ABSENT)
    nbytes = {}
    made: list[str] = []
    for name, shape, dtype in zip(Gradients._fields, shapes, dtypes, strict=True):
        if dtype is not None and (how.norm if name in VECTOR_PARAMETERS else how.linear):
            of[name] = call.make(f"gradient of {name}", shape, like, dtype)
            nbytes[name] = math.prod(shape) * _plan.ITEMSIZE[dtype]
            made.append(name)
    places = [made.index(name) if name in made else None for name in Gradients._fields]
    if m == 0 and exchange is None:
        if not how.linear:
            call.make("dg", dy.shape, like, dy.dtype)
        for name in made:
            if nbytes[name]:
                call.clear(of[name], nbytes[name], gpu)
        return _Backward(call, places)

    x_at, w_at = (_plan.Matrix((k, 1), True) if view is None else matrix_of(view) for view in (x, weight))
    precision = _plan.precision_for(how.precision, n)
    plan = _plan.backward_plan(
        _plan.Matmul(max(m, 1), n, k, dy.dtype, gpu, x_at, w_at, matrix_of(dy), how.limits),
        training=how.training,
        needs=wanted,
        precision=precision,
        gemm=how.gemm,
        activation=how.activation,
        norm=how.norm,
        linear=how.linear,
        wide=how.wide,
        in_place=how.in_place,
        ranks=None if exchange is None else "inside" if exchange.waits and m else "between",
    )
    codes = {
        name: 8 + _declared.kind_code(dtype) for name, dtype in zip(VECTOR_PARAMETERS, dtypes[2:], strict=True) if dtype
    }
    fields = {
        "m": m,
        "n": n,
        "k": k,
        "ldx": x_at.strides[0],
        "ldw": w_at.strides[0],
        "skinny_rows": plan.narrow.rows if plan.narrow else 0,
        "skinny_features": plan.narrow.features if plan.narrow else 0,
        "dy_row": plan.dy.strides[0],
        "dy_col": plan.dy.strides[1],
        "ldd": 0 if arrays[3] is None else arrays[3].shape[1],
        "lddg": plan.pitch,
        "ld_transposed": plan.across,
        "row_threads": plan.along,
        "sums_rows": plan.sums_rows,
        "dg_rows": plan.dg_rows,
        "splits": plan.splits if m else 0,
        "signature": signature(f"backward of {n} features, {dy.dtype}") if exchange is not None else 0,
        "words": plan.limbs.maxima_bytes // 4,
        "vector_dy": plan.vector_dy,
        **{f"to_{name}": codes.get(name, 0) for name in VECTOR_PARAMETERS},
    }
    copies = [copied(call, "dy", dy, plan.dy, like)] if plan.copy_dy and m else []
    for name, view, product in (("x", x, plan.weight), ("weight", weight, plan.x)):  # the operand b of the product
        if m and view is not None and product is not None and product.p.w.own:
            copies.append(copied(call, name, view, product.p.w.T, like))
    where = {copy.name: copy.to for copy in copies}
    of_dy, of_x, of_w = (where.get(name, name) for name in ("dy", "x", "weight"))
    dg = across = ABSENT if how.norm else "dy"
    if plan.across and not how.norm:
        transposed = dy._replace(shape=(n, m), strides=dy.strides[::-1])
        copies.append(copied(call, "dy", transposed, _plan.Matrix((plan.across, 1), True), like))
        across = copies[-1].to
    if plan.dg and not how.linear:
        dg = "deviations" if how.in_place else call.make("dg", (m, plan.pitch), like, dy.dtype)
    move(call, copies, gpu)
    posted, gathered, end = posts_at(plan.workspace + (8 * n if one_scale else 0), n, exchange)
    call.workspace(plan.workspace + (8 * n if one_scale else 0) if exchange is None else end)
    if plan.dg and how.linear:
        dg = "deviations" if how.in_place else call.at(plan.dg_at)
        across = call.at(plan.across_at) if plan.across else dg
    to_vectors = {f"to_{name}": of[name] for name in VECTOR_PARAMETERS}
    if one_scale:  # those of the features first, in float64
        to_vectors["to_scale"] = call.at(plan.workspace)
        fields["to_scale"] = 8 + _declared.kind_code("float64")
    reads = {"dy": of_dy, "d": "deviations" if plan.reads_d else ABSENT, "saved": "vectors"}
    zeros = call.at(plan.limbs.maxima) if plan.limbs.maxima_bytes else ABSENT
    if plan.fused:
        ranks = ABSENT if exchange is None else "ranks"
        passed = {**reads, "dg": dg, **to_vectors, "zeros": zeros, "ranks": ranks}
        call.launch(plan.sums_kernel, plan.sums_grid, fields, passed)
    elif plan.sums and m:
        call.launch(plan.sums_kernel, plan.sums_grid, fields, {**reads, "workspace": call.at(0), "zeros": zeros})
    elif "bias" in made:  # in training, and nothing but zeros is wanted
        call.clear(of["bias"], nbytes["bias"], gpu)
    sums = call.at(0)
    if exchange is not None and plan.merge_kernel is not None and not plan.fused:
        totals = call.at(plan.totals_at)
        passed = {"saved": "vectors", "workspace": sums, "posted": ABSENT, "ranks": "ranks", "gathered": ABSENT}
        passed |= {"totals": totals, **to_vectors}
        if not exchange.waits:
            of_posted, of_gathered = call.at(posted), call.at(gathered)
            first = {**passed, "posted": of_posted, "totals": ABSENT}
            call.launch(plan.merge_kernel, plan.merge_grid, fields, first)
            call.gather(exchange, letters(n), of_posted, of_gathered)
            passed["gathered"] = of_gathered
        call.launch(plan.merge_kernel, plan.merge_grid, fields, passed)
        sums = totals
        fields |= {"splits": 1, **{f"to_{name}": 0 for name in VECTOR_PARAMETERS}}  # the gradients of vectors are there
    if m and plan.narrow is not None:
        partials = call.at(plan.dg_at)
        passed = {"dy": of_dy, "d": "deviations", "x": "x", "w": "weight", "saved": "vectors", "workspace": sums}
        passed |= {"partials": partials, "dx": of["x"], **to_vectors}
        call.launch(plan.narrow.kernel, plan.narrow.ctas, fields, passed, plan.narrow.block)
        add_parts(call, plan.narrow.parts, partials, of["weight"], (n, k), "float32" if how.wide else dy.dtype)
    elif m and (plan.dg or (plan.sums and exchange is None)) and not plan.fused:
        reads |= {"d": "deviations", "workspace": sums, "dg": dg, "transposed": across}
        call.launch(plan.dg_kernel, plan.dg_grid, fields, {**reads, **to_vectors})
    if one_scale:
        of_features = {"of_features": to_vectors["to_scale"], "to_scale": of["scale"]}
        call.launch(plan.total_kernel, 1, {**fields, "to_scale": codes["scale"]}, of_features)
    if m:
        names = {"dg": dg, "transposed": across, "x": of_x, "weight": of_w, "dx": of["x"], "dweight": of["weight"]}
        multiply_both(call, plan, names, precision, gpu)
    elif "weight" in made:
        call.clear(of["weight"], nbytes["weight"], gpu)
    gemms = ", ".join(f"d{name} by {p.gemm}" for name, p in (("x", plan.x), ("weight", plan.weight)) if p is not None)
    log.debug("backward %s x %s, %s: %s", (m, k), (n, k), dy.dtype, call.describe("backward", gemms))
    return _Backward(call, places)


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def _backward_cpu(kind: Kind, dy: Any, saved: Saved, needs: tuple[str, ...]) -> Gradients[Any]:
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
