"""backward: check, plan, launch, return."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from . import _capture, _check, _declared, _kernels, _plan, reference
from ._copy import Copy
from ._device import cuda, gemm_arguments, gemm_ex, is_capturing, is_current, on_device
from ._forward import Saved, matrix_of
from ._interop import Kind, kind_of, kinds_of
from ._limbs import Multiply
from ._sm90 import Sm90Gemm
from .reference import Gradients

__all__ = ["Gradients", "backward", "backward_within"]

VECTORS = Gradients._fields[2:]
TO_VECTORS = tuple(f"to_{name}" for name in VECTORS)  # as the kernels call them


def backward(dy: Any, saved: Saved, *, needs: Collection[str] = Gradients._fields, sms: int | None = None) -> Gradients:
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
        ``(x, weight, bias, scale, gamma, beta)``: new C-contiguous arrays of dy's kind, each in its argument's dtype.
        None for what is not in `needs`, and for an argument that the forward was not given.

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
        changed in place since the forward, where torch counts changes.

    Notes
    -----
    Asynchronous and safe to capture as `forward` is: on the stream that is current now, which must see what the forward
    did; under capture the GEMMs are gsbn's own. Beside the result it allocates dg, in x's dtype (for TF32 its transpose
    as well), O(O) scratch, and copies of operands whose strides the kernels cannot take. dg passes through x's dtype as
    in PyTorch: beyond 65504 a float16 gradient overflows. S and D are float32 sums of 16 rows, merged in float64 in a
    fixed order; in 16 bits, of up to 16 rows, all but the GEMMs is float64. On the CPU all arithmetic is NumPy's in
    float64, g included, and each gradient is rounded once.
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
) -> Gradients:
    """`backward` of the same arguments, the planner's choice being limited; on the CPU there is none."""
    wanted = needs if needs is Gradients._fields else _check.needs(needs, Gradients._fields)
    kind = kind_of(dy)
    if kind is None:  # a foreign DLPack producer, or no array at all
        kind, imported, _ = kinds_of({"dy": dy}, ("dy",))
        dy = imported["dy"]
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: expected what gsbn.forward(..., return_saved=True) returned, got {saved!r:.80}")
    _check.sm_count(sms)
    if not kind.on_gpu:
        _views(kind, dy, saved)
        _check_versions(kind, saved)
        return _backward_cpu(kind, dy, saved, wanted)
    return _backward(kind, dy, saved, wanted, sms, limits)


def _backward(
    kind: Kind, dy: Any, saved: Saved, wanted: tuple[str, ...], sms: int | None, limits: _plan.Limits
) -> Gradients:
    device = kind.device(dy)
    if not is_current(device):
        with on_device(device):
            return _backward(kind, dy, saved, wanted, sms, limits)
    stream = kind.stream(device)
    capturing = is_capturing(stream)
    call = key = None
    pointers: list[int] = []
    try:
        signature, pointers = kind.read((dy, *saved[:4]))
        aligned = (pointers[0] & 15 == 0, pointers[1] & 15 == 0, pointers[2] & 15 == 0)
        key = (signature, saved[4:8], wanted, sms, aligned, capturing, limits)
        call = _calls.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = None  # something is not what it should be: the checks say what
    if call is None:
        views = _views(kind, dy, saved)
        call = _prepare_call(kind, views, saved, wanted, sms, device, capturing, limits)
        if key is not None:
            if len(_calls) >= _MAX_CALLS:
                _calls.clear()
            _calls[key] = call
    _check_versions(kind, saved)
    return _launch(call, kind, dy, saved, pointers, stream, capturing)


# ---- check -----------------------------------------------------------------------------------------------------------


def _views(kind: Kind, dy: Any, saved: Saved) -> dict[str, _check.View]:
    """All arrays of the call as views, dy found right."""
    named = {"x": saved.x, "weight": saved.weight, "dy": dy}
    kinds_of(named, ("x", "dy"))
    views = {name: kind.view(array) for name, array in named.items()}
    _check.backward_arguments(views["dy"], views["x"], views["weight"].shape[0])
    return views


def _check_versions(kind: Kind, saved: Saved) -> None:
    """Raise what autograd raises where an operand is no longer what the forward saw."""
    for name, expected in zip(("x", "weight"), saved.versions, strict=True):
        if expected is not None and (found := kind.version(getattr(saved, name))) != expected:
            raise RuntimeError(
                f"{name}: modified by an inplace operation since the forward: it is at version {found}, expected "
                f"version {expected}"
            )


# ---- plan ------------------------------------------------------------------------------------------------------------

_MAX_CALLS = 1024


class _Call:
    """A backward call, ready but for its addresses."""

    def __init__(
        self, plan: _plan.BackwardPlan, problem: Any, shapes: list[Any], dtypes: list[str | None], makers: list[Any]
    ) -> None:
        self.plan, self.problem = plan, problem
        self.values = (problem.ctypes.data,)
        self.shapes, self.dtypes, self.makers = shapes, dtypes, makers  # of the gradients; None is not made
        self.copy_dy: Copy | None = None
        self.copy_x: Copy | None = None
        self.copy_w: Copy | None = None
        self.launch_sums: Any = None
        self.launch_dg: Any = None
        self.products: list[tuple[_plan.Product, Any]] = []  # with what _product made of it


_calls: dict[Any, _Call] = {}


def _prepare_call(
    kind: Kind,
    views: dict[str, _check.View],
    saved: Saved,
    needs: tuple[str, ...],
    sms: int | None,
    device: int,
    capturing: bool,
    limits: _plan.Limits,
) -> _Call:
    dy, x, weight = views["dy"], views["x"], views["weight"]
    (m, k), n = x.shape, weight.shape[0]
    given = (x.dtype, x.dtype, *saved.dtypes)
    dtypes = [dtype if name in needs else None for name, dtype in zip(Gradients._fields, given, strict=True)]
    shapes = [x.shape, weight.shape, *[(n,)] * len(VECTORS)]
    made = tuple(name for name, dtype in zip(Gradients._fields, dtypes, strict=True) if dtype is not None)
    makers = [
        None if dtype is None else kind.maker(shape, saved.x, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    if m == 0:
        return _Call(None, _declared.problem(), shapes, dtypes, makers)  # type: ignore[arg-type]

    ldd = saved.deviations.shape[1]
    gpu = _kernels.gpu(device).at_most(sms)
    plan = _plan.backward_plan(
        _plan.Matmul(m, n, k, x.dtype, gpu, matrix_of(x), matrix_of(weight), matrix_of(dy), limits),
        ldd=ldd,
        training=saved.training,
        needs=made,
        precision=saved.precision,
        gemm=saved.gemm,
        capturing=capturing,
    )
    problem = _declared.problem(
        m=m,
        n=n,
        k=k,
        ldx=plan.pitch,
        ldw=plan.across,
        ldg=ldd,
        y_row=plan.dy.strides[0],
        y_col=plan.dy.strides[1],
        stats_rows=plan.sums_rows,
        normalize_rows=plan.dg_rows,
        splits=plan.splits,
        flags=_declared.flags(vector_y=plan.vector_dy),
        **{name: 8 + _declared.kind_code(dtype) for name, dtype in zip(VECTORS, dtypes[2:], strict=True) if dtype},
    )
    call = _Call(plan, problem, shapes, dtypes, makers)
    if plan.copy_dy:
        call.copy_dy = Copy(kind, dy, saved.x, device, gpu)
    if plan.weight is not None and plan.weight.copy:
        call.copy_x = Copy(kind, x, saved.x, device, gpu)
    if plan.x is not None and plan.x.copy:
        call.copy_w = Copy(kind, weight, saved.x, device, gpu)
    if plan.sums:
        words = ("dy", "d", "saved", "dg", *TO_VECTORS) if plan.fused else ("dy", "d", "saved", "workspace")
        call.launch_sums = _kernels.launcher(plan.sums_kernel, device, words)
    if (plan.sums or plan.dg) and not plan.fused:
        words = ("dy", "d", "saved", "workspace", "dg", "across", *TO_VECTORS)
        call.launch_dg = _kernels.launcher(plan.dg_kernel, device, words)
    for product in (plan.x, plan.weight):
        if product is not None:
            call.products.append((product, _product(product, x.dtype, saved.precision, device)))
    return call


def _product(product: _plan.Product, dtype: str, precision: str, device: int) -> Any:
    """What a launch of this GEMM wants beside its addresses."""
    p = product.p
    if product.through is not None:
        return Multiply(p, product.through, device)
    if product.one is not None:
        return Sm90Gemm(p, product.one, device)
    if product.kernel is None:
        return gemm_arguments((p.m, p.n, p.k), p.x, p.w, p.n, dtype, precision, wide=False, sms=p.device.target)
    ldx, ldw = max(p.x.strides), p.w.strides[1]
    flags = _declared.flags(vector_x=True, vector_w=p.w.aligned and ldw * _plan.ITEMSIZE[dtype] % 16 == 0)
    problem = _declared.problem(m=p.m, n=p.n, k=p.k, ldx=ldx, ldw=ldw, ldg=p.n, flags=flags)
    launch = _kernels.launcher(product.kernel, device, ("x", "w", "g"))
    return launch, problem, (problem.ctypes.data,)  # an address does not keep it


# ---- launch ----------------------------------------------------------------------------------------------------------


def _launch(
    call: _Call, kind: Kind, dy: Any, saved: Saved, pointers: list[int], stream: int, capturing: bool
) -> Gradients:
    plan = call.plan
    dy_at, x_at, w_at, d_at, saved_at = pointers
    made = [None if make is None else make() for make in call.makers]
    at = [0 if array is None else kind.pointer(array) for array in made]
    if plan is None:  # an empty batch
        for target, shape, dtype in zip(at, call.shapes, call.dtypes, strict=True):
            if dtype is not None and 0 not in shape:
                cuda().runtime.memsetAsync(target, 0, int(np.prod(shape)) * _plan.ITEMSIZE[dtype], stream)
        return Gradients(*made)

    dy_copy = x_copy = w_copy = None
    if call.copy_dy is not None:
        dy_copy, dy_at = call.copy_dy(dy_at, stream)
    if call.copy_x is not None:
        x_copy, x_at = call.copy_x(x_at, stream)
    if call.copy_w is not None:
        w_copy, w_at = call.copy_w(w_at, stream)
    scratch, workspace = kind.scratch(plan.workspace, saved.x)
    if capturing:
        _capture.keep_alive(kind, stream, (*made, scratch, dy_copy, x_copy, w_copy))

    dg_at = workspace + plan.dg_at
    d_read = d_at if plan.reads_d else 0
    if plan.fused:
        words: tuple[int, ...] = (dy_at, d_read, saved_at, dg_at if plan.dg else 0, *at[2:])
        call.launch_sums(plan.sums_grid, _plan.THREADS, call.values, words, stream)
    elif plan.sums:
        call.launch_sums(plan.sums_grid, _plan.THREADS, call.values, (dy_at, d_read, saved_at, workspace), stream)
    elif at[2]:  # in training, and nothing but zeros is wanted
        cuda().runtime.memsetAsync(at[2], 0, call.shapes[2][0] * _plan.ITEMSIZE[str(call.dtypes[2])], stream)
    if call.launch_dg is not None:
        words = (dy_at, d_at, saved_at, workspace, dg_at if plan.dg else 0, workspace + plan.across_at, *at[2:])
        call.launch_dg(plan.dg_grid, _plan.THREADS, call.values, words, stream)
    for product, how in call.products:
        operands = (dg_at, w_at, at[0])
        if product is plan.weight:
            operands = (workspace + plan.across_at if plan.across else dg_at, x_at, at[1])
        if product.through is not None:
            how(*operands, workspace + plan.limbs_at, stream)
        elif product.one is not None:
            how(*operands, stream)
        elif product.kernel is None:
            gemm_ex(how, stream, *operands)
        else:
            launch, _, values = how
            launch(product.grid, product.block, values, operands, stream)
    return Gradients(*made)


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def _backward_cpu(kind: Kind, dy: Any, saved: Saved, needs: tuple[str, ...]) -> Gradients:
    x, weight = kind.numpy(saved.x), kind.numpy(saved.weight)
    vectors = kind.numpy(saved.vectors) if len(x) else np.ones((_plan.SAVED_ROWS, len(weight)))
    scale, bias, gamma, running_mean, running_var, eps, _ = vectors
    found = reference.backward(
        kind.numpy(dy), x, weight, scale, bias=bias, gamma=gamma, running_mean=running_mean, running_var=running_var,
        training=saved.training, eps=float(eps[0]), needs=needs,
    )  # fmt: skip
    of = found._asdict()
    for name, dtype in zip(Gradients._fields, (x.dtype.name, x.dtype.name, *saved.dtypes), strict=True):
        if of[name] is not None:
            # NumPy does not know bfloat16 by its name
            target = x.dtype if dtype == x.dtype.name else np.dtype(dtype or "float64")
            of[name] = None if dtype is None else kind.from_numpy(reference.round_to(of[name], target))
    return Gradients(**of)
