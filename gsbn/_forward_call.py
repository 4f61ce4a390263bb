"""A forward call, from the plan to named memory and steps: prepared once for arrays that are alike."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _check, _declared, _kernels, _plan, _tma
from ._call import ABSENT, Call, Description, matrix_of, vector_codes
from ._check import VECTOR_PARAMETERS, VECTORS
from ._copies import Move, copied, move
from ._cublas import CublasGemm
from ._interop import Kind
from ._limbs import SPLIT_WORDS, Limbs
from ._prepared import Prepared
from ._ranks import Exchange, forward_words, letters, posts_at, signature
from ._sm90 import Sm90Gemm

__all__ = ["ARRAYS", "CheckedCall", "ForwardCall", "prepare_call", "vector_dtypes"]

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
PREPARED = ("limbs of weight", "exponents of weight")  # what a prepared weight brings
RANKS = ("ranks",)  # what a group brings
_MAX_APART = 64


class CheckedCall:
    """Arguments that have been found right, but for their addresses, and what must hold of these."""

    def __init__(self, views: dict[str, Any], training: bool) -> None:
        self.written = [ARRAYS.index(name) for name in _check.written(views, training=training)]
        given = [(i, views[name]) for i, name in enumerate(ARRAYS) if views[name] is not None]
        self.spans = [(i, *_check.span(view)) for i, view in given if 0 not in view.shape]
        self.apart: set[tuple[int, ...]] = set()  # addresses at which no two spans meet

    def may_overlap(self, pointers: list[int]) -> bool:
        """Whether any two arrays' spans meet; what that means is for the full check to say."""
        where = tuple(pointers)
        if not self.written or not where or where in self.apart:
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


class ForwardCall(CheckedCall):
    """A forward call, ready but for its addresses."""

    def __init__(
        self, views: dict[str, Any], training: bool, call: Call, description: Description, dtypes: Any
    ) -> None:
        super().__init__(views, training)
        self.call, self.description = call, description
        self.dtypes = dtypes  # of the vectors' gradients; None where nothing is saved
        self.y: int | None = None  # which of the arrays that it makes; None if it is given


def prepare_call(
    kind: Kind,
    arrays: tuple[Any, ...],
    views: dict[str, Any],
    options: tuple[Any, ...],
    device: int,
    prepared: Prepared | None,
    limits: _plan.Limits,
    exchange: Exchange | None = None,
) -> ForwardCall:
    """Plan a forward of arrays like these, and lay out what it allocates and launches; nothing is launched yet.

    `exchange` is the group's, or None where nothing will be launched.
    """
    training, momentum, eps, precision, gemm, return_saved, sms, activation, group, number = options
    x, weight, out = views["x"], views["weight"], views["out"]
    (m, k), n = x.shape, weight.shape[0]
    precision = _plan.precision_for(precision, n)
    y_at = _plan.Matrix((n, 1), True) if out is None else matrix_of(out)
    gpu = (limits.gpu or _kernels.gpu(device)).at_most(sms)
    p = _plan.Matmul(max(m, 1), n, k, x.dtype, gpu, matrix_of(x), matrix_of(weight), y_at, limits)
    limbs = prepared is not None and prepared.limbs is not None
    ranks = None
    if group is not None:
        if exchange is not None and exchange.waits and n > exchange.features:
            raise ValueError(f"weight: expected at most {exchange.features} features with a group, got {n}")
        # Of a row or none of its own a rank has no statistics to begin with: it takes a launch for each step.
        ranks = "inside" if m > 1 and (exchange is None or exchange.waits) else "between"
    plan = _plan.plan(
        p,
        training=bool(training),
        precision=precision,
        gemm="auto" if group is not None and m <= 1 else gemm,
        prepared=limbs,
        saved=bool(return_saved),
        cumulative=momentum is None,
        activation=activation,
        ranks=ranks,
    )
    x_at, w_at = plan.taken.x, plan.taken.w
    flags = _declared.flags(
        vector_x=x_at.aligned and x_at.strides[0] * x.itemsize % 16 == 0,
        vector_w=w_at.aligned and w_at.strides[0] * x.itemsize % 16 == 0,
        vector_y=plan.vector_y,
        cumulative=momentum is None,
        units=plan.keep is not None and plan.keep.dtype == "float16",
        alone=plan.one is not None and not plan.one.cooperative,
        running=not training,
        limbs=plan.g_of_limbs,
    )
    words = forward_words(views, n, k, x.dtype, momentum, eps, activation, number)
    fields = {
        "m": m,
        "n": n,
        "k": k,
        "ldx": x_at.strides[0],
        "ldw": w_at.strides[0],
        "ldg": plan.ldg,
        "ld_deviations": plan.ldg,
        "y_row": y_at.strides[0],
        "y_col": y_at.strides[1],
        "row_threads": plan.along,
        "stats_rows": plan.stats_rows,
        "normalize_rows": plan.normalize_rows,
        "splits": plan.splits,
        "merge_columns": plan.merge_columns,
        **{name: getattr(plan.one, name, 0) for name in ("panel", "in_panels", "parts_in_panels", "parts_alone")},
        "affine": plan.affine,
        "partials": plan.partials,
        "flags": flags,
        "signature": 0 if group is None else signature(words),
        **vector_codes(views),
        "momentum": 0.0 if momentum is None else momentum,
        "eps": eps,
        "number": number,
    }

    arguments = (*ARRAYS, *(PREPARED if limbs else ()), *(RANKS if group is not None else ()))
    call = Call(kind, device, arguments, limited=gpu.limited)
    copies = [
        copied(call, name, view, at, array)
        for name, view, at, array in (("x", x, x_at, arrays[0]), ("weight", weight, w_at, arrays[1]))
        if at.own and m
    ]
    where = {copy.name: copy.to for copy in copies}
    y = "out" if out is not None else call.make("y", (m, n), arrays[0])
    deviations = vectors = ABSENT
    if plan.keep is not None:
        deviations = call.make("deviations", (m, plan.ldg), arrays[0], plan.keep.dtype)
        vectors = call.make("vectors", (_plan.SAVED_ROWS, n), arrays[0], "float64")
    counts = training and views["num_batches_tracked"] is not None
    count = "num_batches_tracked" if counts else ABSENT
    names = _Names(where.get("x", "x"), where.get("weight", "weight"), y, deviations, vectors, count)
    move(call, copies, gpu)
    if plan.one is not None:
        _one_launch(call, p, plan, fields, names, prepared=limbs, ranks=group is not None)
    else:
        _product_and_passes(call, p, plan, fields, names, precision, group is not None, exchange)

    dtypes = None if plan.keep is None else vector_dtypes(kind, arrays)
    found = ForwardCall(views, bool(training), call, call.describe(plan.gemm, plan.why), dtypes)
    found.y = None if out is not None else len(copies)
    return found


class _Names(NamedTuple):
    """Of a call's memory: operands, as they are or their copies, and what it writes; ABSENT for what there is not."""

    x: str
    weight: str
    y: str
    deviations: str
    vectors: str
    batches: str  # their number


_OWN = {name: name for name in VECTORS}  # parameters of kernels, and what is passed as such, by one name


def _one_launch(
    call: Call, p: _plan.Matmul, plan: _plan.Plan, fields: dict[str, Any], names: _Names, *, prepared: bool, ranks: bool
) -> None:
    """forward_sm90, perhaps behind the launch that makes limbs, and before one that copies y."""
    one, taken, size = plan.one, plan.taken, _plan.ITEMSIZE[p.dtype]
    assert one is not None
    of_x, of_w, y, deviations, vectors, count = names
    x_at, w_at = taken.x, taken.w
    call.workspace(plan.workspace)
    of_y = call.at(plan.y) if taken.y.own else y  # where the launch works
    exponents = (ABSENT, ABSENT)
    if one.limbs is not None:
        exponents = call.at(one.limbs.x_exponents), call.at(one.limbs.w_exponents)
        split = dict(zip(SPLIT_WORDS, (of_x, call.at(one.limbs.x), exponents[0]), strict=False))
        split |= dict.fromkeys(SPLIT_WORDS[3:], ABSENT)
        of_x, x_at = call.at(one.limbs.x), _plan.Matrix((one.limbs.pitch, 1), True)
        if one.element == "limbs_rs":  # the launch makes those of the weight for itself
            exponents = exponents[0], ABSENT
        elif prepared:
            of_w, exponents, w_at = PREPARED[0], (exponents[0], PREPARED[1]), x_at
        else:
            split |= dict(zip(SPLIT_WORDS[3:], (of_w, call.at(one.limbs.w), exponents[1]), strict=True))
            of_w, w_at = call.at(one.limbs.w), x_at
        call.launch(one.limbs.kernel, one.limbs.grid, fields, split)
    boxes = _tma.map_arguments(one, taken._replace(x=x_at, w=w_at))
    mapped: tuple[str, ...] = (of_x, of_w, of_y)
    passed = {"y": of_y, "partial": call.at(0), "merged": call.at(one.merged), "epoch": call.at(one.roll), **_OWN}
    passed |= {"batches": count, "x_exponents": exponents[0], "w_exponents": exponents[1]}
    if plan.keep is not None:
        rows, cols, _, *rest = boxes[-1]
        boxes.append((rows, cols, plan.ldg * size, *rest))
        mapped += (deviations,)
        passed |= {"deviations": deviations, "saved": vectors}
    if not plan.vector_y:  # it reads no map of y
        boxes[2], mapped = boxes[0], (of_x, of_w, of_x, *mapped[3:])
    if ranks:
        passed |= {"ranks": "ranks"}
    call.launch_mapped(one, fields | {"y_row": taken.y.strides[0]}, boxes, mapped, passed)
    if of_y != y:
        move(call, [Move(of_y, y, (fields["m"], p.n), size, taken.y, p.y)], p.device)


def _product_and_passes(
    call: Call,
    p: _plan.Matmul,
    plan: _plan.Plan,
    fields: dict[str, Any],
    names: _Names,
    precision: str,
    ranks: bool,
    exchange: Exchange | None,
) -> None:
    """g, or nothing where the passes make it, the statistics and y."""
    m, n, device = fields["m"], p.n, call.device
    of_x, of_w, y, deviations, vectors, count = names
    posted, gathered, end = posts_at(plan.workspace, n, exchange)
    call.workspace(end if ranks else plan.workspace)
    workspace = call.at(0)
    g = y if plan.y_is_g else deviations if plan.keep is not None and plan.keep.is_g else call.at(plan.g)
    q = p._replace(x=plan.taken.x, w=plan.taken.w, y=_plan.Matrix((plan.ldg, 1), aligned=True, own=True))
    of_g = {"x": of_x, "w": of_w} if plan.narrow else {"g": g}
    if m == 0 or plan.narrow:  # the group's other ranks have some; or g is made by what follows
        pass
    elif plan.product is not None:
        if plan.limbs.of:
            made = Limbs(call, plan.limbs, {"x": of_x, "weight": of_w}, p.device, device)
            made.make()
            made.multiply(q, plan.product, "x", "weight", g)
        else:
            call.multiply(Sm90Gemm(q, plan.product, device), of_x, of_w, g)
    elif plan.gemm_kernel is not None:
        call.launch(plan.gemm_kernel, plan.gemm_grid, fields, {"x": of_x, "w": of_w, "g": g}, plan.gemm_block)
    else:
        cublas = CublasGemm(q, precision, device, wide=True)
        call.multiply(cublas, of_x, of_w, g, call.lend(cublas.workspace))
    if plan.stats_kernel is not None and m:
        call.launch(plan.stats_kernel, plan.stats_grid, fields, {**of_g, "workspace": workspace}, plan.block)
    if plan.stats_kernel is not None:
        passed = {"workspace": workspace, "posted": ABSENT, "ranks": ABSENT, "gathered": ABSENT, **_OWN}
        passed |= {"num_batches_tracked": count, "saved": vectors}
        if exchange is not None and not exchange.waits:
            passed |= {"posted": call.at(posted), "gathered": call.at(gathered)}
            if m == 0:
                call.clear(passed["posted"], 8 * letters(n), p.device)
            else:
                call.launch(plan.merge_kernel, plan.merge_grid, fields, passed | {"gathered": ABSENT})
            call.gather(exchange, letters(n), passed["posted"], passed["gathered"])
            passed["posted"] = ABSENT
        if ranks:
            passed["ranks"] = "ranks"
        call.launch(plan.merge_kernel, plan.merge_grid, fields, passed)
        count = ABSENT if ranks else count  # it has counted
    if m:
        passed = {**of_g, "y": y} | ({} if plan.one_pass else {"workspace": workspace})
        passed |= {**_OWN, "num_batches_tracked": count}
        passed |= {"deviations": deviations, "saved": vectors}
        call.launch(plan.normalize_kernel, plan.normalize_grid, fields, passed, plan.block)


def vector_dtypes(kind: Kind, arrays: tuple[Any, ...]) -> tuple[str | None, ...]:
    """Of bias, scale, gamma and beta."""
    vectors = (arrays[ARRAYS.index(name)] for name in VECTOR_PARAMETERS)
    return tuple(None if a is None else kind.dtype(a) for a in vectors)
