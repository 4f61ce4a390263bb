"""Plans a forward call: its GEMM, its passes and the layout of its workspace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .copies import in_rows, start_on_words, vector_rows, whole_words
from .declared import flags
from .forward_passes import divide
from .forward_path import gemm_for, mode_of, one_pass_serves, stores_vectors_alone, taken_by
from .gemm import OneLaunch, one_launch, tiled
from .limbs import Splits, lay_out, split_of
from .problem import (
    INT32_MAX,
    ITEMSIZE,
    REMAT_ROWS,
    RENORM_ROWS,
    SAVED_ROWS,
    VECTORS,
    Matmul,
    Matrix,
    Ranks,
    ceil_div,
    deviations_dtype,
    flattened,
    ghost_pitch,
    letters,
    posts_at,
    round_up,
)
from .products import SPLIT_WORDS, Limbs, sm90_gemm
from .program import ABSENT, Builder, Copy, Program, place
from .skinny import Skinny, for_skinny, serves_skinny, skinny_forward
from .sm90_tiles import OfCall
from .sm90_variants import SM90_THREADS, adding_residual, by_limbs, element_for, may_add_residual, saving_vectors
from .sources import with_activation, with_ghosts, with_renorm
from .tensor_maps import map_arguments
from .variants import (
    GHOST_FEATURES,
    THREADS,
    merge_statistics,
    normalize,
    normalize_fused,
    scale_stats,
    track_ghosts,
)

PREPARED = ("limbs of weight", "exponents of weight")  # extra arguments of a call with a prepared weight
NO_VECTORS = dict.fromkeys(VECTORS, 0)


class _Call(NamedTuple):
    p: Matmul
    taken: Matmul  # p with the layouts that the kernels take: those of the arguments or of copies
    m: int  # rows; may be 0 if ranks share the batch
    gemm: str
    training: bool
    precision: str
    saved_dtype: str | None  # dtype of the deviations, if they are saved
    remat: bool  # the backward computes g again: no deviations are saved, only vectors
    activation: Any
    cumulative: bool
    reads_count: bool  # kernels read the number of batches so far
    prepared: bool
    renorm: Mapping[str, Any] | None
    ranks: Ranks | None
    groups: int  # how many ghost batches there are
    residual: Matrix | None  # layout of the residual that the one launch may add
    # memory of x and weight (or of copies), y, deviations, vectors, num_batches_tracked; ABSENT for what is not there
    names: tuple[str, str, str, str, str, str]
    fields: dict[str, Any]  # the fields of the kernels' structs that the caller determines


_OWN = {name: name for name in VECTORS}  # the kernels' parameters have the names of the call's arguments


def plan_forward(
    p: Matmul,
    *,
    training: bool,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    precision: str = "highest",
    gemm: str = "auto",
    prepared: bool = False,
    saves: bool = False,
    activation: Any = None,
    number: float = 1.0,
    vectors: Mapping[str, int] = NO_VECTORS,
    renorm: Mapping[str, Any] | None = None,
    counts: bool = False,
    out: bool = False,
    ranks: Ranks | None = None,
    groups: int = 1,
    residual: Matrix | None = None,
    result: str = "y",
) -> Program:
    """Plan a forward call. If ranks share the batch, `p` may have no rows; all other sizes are at least 1.

    `prepared`: the weight's limbs exist. `saves`: the call saves deviations and vectors for a backward. `number`: the
    scale, if it is not an array. `vectors`: the result of `vector_codes`. `renorm`: the fields of the kernels' structs
    for batch renormalisation. `counts`: num_batches_tracked is given. `out`: y is given. `groups`: how many ghost
    batches there are; 1 in inference. `residual`: the layout of a residual that the one launch adds where it can
    (`Program.adds_residual`); elsewhere the program computes y without the residual and the activation. `result`: the
    name of the array that the call makes for y without `out`; `activate.py` names it "u".

    Raises a ValueError that names `gemm` if that GEMM cannot serve the call.
    """
    m, p = p.m, p._replace(m=max(p.m, 1))
    cumulative, where = momentum is None, None
    reads_count = cumulative or (renorm is not None and renorm["warmup"] > 0)
    if ranks is not None:
        if ranks.waits and ranks.features is not None and p.n > ranks.features:
            raise ValueError(f"weight: expected at most {ranks.features} features with a group, got {p.n}")
        # A rank with one row or none cannot start from its own statistics, so each step is a launch.
        where = "inside" if m > 1 and ranks.waits else "between"
        gemm = "auto" if m <= 1 else gemm
    if where == "inside":
        p = p._replace(device=p.device.with_room())
        if p.device.clusters(2) == 0:  # with ranks, all tiles of forward_sm90 are for clusters of two
            where = "between"
    # Batch renormalisation is for training with a backward, so all variants of forward_sm90 for it save deviations.
    separate = "the limits of batch renormalisation" if renorm is not None and not saves else None
    of_call = {"precision": precision, "gemm": gemm, "training": training, "prepared": prepared, "saved": saves}
    of_call |= {"reads_count": reads_count, "separate": separate, "ranks": where, "groups": groups}
    of_call |= {"renorm": renorm is not None}
    chosen, why, us = gemm_for(p, **of_call)  # type: ignore[arg-type]
    remat = saves and training and gemm in ("auto", "sm90") and ranks is None and renorm is None and groups == 1
    remat = remat and stores_vectors_alone(p, precision, OfCall(prepared, reads_count=reads_count), us)
    if remat:
        chosen, why = "sm90", "its backward computes g again, so that nothing else is written"
    fused = chosen == "sm90" and where != "between" and separate is None and groups == 1
    skinny = None
    if (
        chosen == "tiled"
        and p.limits.skinny is not False
        and groups == 1
        and serves_skinny(p, precision, training, saves)
    ):
        skinny = skinny_forward(p, precision, training=training, saves=saves)
    taken = for_skinny(p) if skinny else taken_by(p, chosen, element_for(p.dtype, precision), fused)
    if residual is not None and not fused:
        residual = activation = None

    build = Builder(p.device)
    saved_dtype = deviations_dtype(p.dtype, p.m // groups, training=training) if saves else None
    x_name = build.operand("x", (m, p.k), p.x, taken.x, p.dtype) if m else "x"
    w_name = build.operand("weight", (p.n, p.k), p.w, taken.w, p.dtype) if m else "weight"
    y = "out" if out else build.make(result, (m, p.n), p.dtype)
    fields: dict[str, Any] = {"m": m, "n": p.n, "k": p.k, "ldx": taken.x.strides[0], "ldw": taken.w.strides[0]}
    fields |= {"momentum": 0.0 if momentum is None else momentum, "eps": eps, "number": number, **vectors}
    fields |= {"signature": 0 if ranks is None else ranks.signature, **(renorm or {})}
    saved = ("deviations", "vectors") if saves else (ABSENT, ABSENT)
    count = "num_batches_tracked" if training and counts else ABSENT
    names = x_name, w_name, y, *saved, count
    call = _Call(
        p, taken, m, chosen, training, precision, saved_dtype, remat, activation, cumulative, reads_count,
        prepared, renorm, ranks, groups, residual, names, fields,
    )  # fmt: skip
    if fused:
        _in_one_launch(build, call)
    else:
        _in_passes(build, call, skinny, where)
    return build.program(chosen, why)


def _save(build: Builder, call: _Call, pitch: int) -> None:
    """Allocate what a backward needs: deviations, in rows of this pitch, and vectors."""
    if call.saved_dtype is not None:
        build.make("deviations", (call.m, 0 if call.remat else pitch), call.saved_dtype)
        rows, groups = SAVED_ROWS if call.renorm is None else RENORM_ROWS, call.groups
        rows = REMAT_ROWS if call.remat else rows
        shape = (rows, call.p.n) if groups == 1 else (groups, rows, ghost_pitch(call.p.n, call.p.dtype))
        build.make("vectors", shape, "float64")


def _flags(call: _Call, **given: bool) -> int:
    taken, size = call.taken, ITEMSIZE[call.p.dtype]
    return flags(
        vector_x=start_on_words(taken.x, size),
        vector_w=start_on_words(taken.w, size),
        cumulative=call.cumulative,
        units=call.saved_dtype == "float16",
        rounds=call.saved_dtype in ("float16", "bfloat16"),
        running=not call.training,
        **given,
    )


# ---- one launch of forward_sm90, with one before it if limbs are made, and one after it if y is copied


def _in_one_launch(build: Builder, call: _Call) -> None:
    p, taken, size = call.p, call.taken, ITEMSIZE[call.p.dtype]
    x_name, w_name, y, deviations, vectors, count = call.names
    saves = call.saved_dtype is not None
    of_call = OfCall(
        call.prepared, saves and not call.remat, call.reads_count, call.ranks is not None, call.renorm is not None
    )
    if call.remat:
        taken = taken._replace(limits=taken.limits._replace(recompute=True))
    one = one_launch(taken, mode_of(call.training), call.precision, of_call)
    kernel = saving_vectors(one.kernel) if call.remat else one.kernel
    residual, activation = call.residual, call.activation
    if residual is not None:
        whole = not taken.y.own and all(whole_words(at, p.n, size) for at in (taken.y, residual))
        if whole and may_add_residual(kernel):
            kernel = adding_residual(kernel)
        else:
            residual = activation = None
    one = one._replace(kernel=with_activation(kernel, activation))
    if one.defers and not whole_words(taken.y, p.n, size):
        taken = taken._replace(y=in_rows(p.n, size))
    vector_y = whole_words(taken.y, p.n, size)
    ldg = round_up(p.n, 16 // (size if saves else max(size, 4)))
    y_holds_g = whole_words(p.y, p.n, size) and p.n <= p.y.strides[0] <= INT32_MAX
    if y_holds_g and size >= 4 and not saves:
        ldg = p.y.strides[0]
    _save(build, call, ldg)
    build.copy()

    at_y = round_up(one.workspace, 256)
    build.reserve(at_y + (p.m * taken.y.strides[0] * size if taken.y.own else 0))
    y_memory = place(at_y) if taken.y.own else y
    fields = call.fields | {"y_row": taken.y.strides[0], "ld_deviations": ldg} | one.order._asdict()
    fields["flags"] = _flags(call, vector_y=vector_y, alone=not one.cooperative, limbs=by_limbs(one.element))
    exponents = (ABSENT, ABSENT)
    x_at, w_at = taken.x, taken.w
    if one.limbs is not None:
        exponents = place(one.limbs.x_exponents), place(one.limbs.w_exponents)
        split = dict(zip(SPLIT_WORDS, (x_name, place(one.limbs.x), exponents[0]), strict=False))
        split |= dict.fromkeys(SPLIT_WORDS[3:], ABSENT)
        x_name, x_at = place(one.limbs.x), Matrix((one.limbs.pitch, 1), True)
        if one.element == "limbs_rs":  # the launch makes the weight's limbs itself
            exponents = exponents[0], ABSENT
        elif call.prepared:
            w_name, exponents, w_at = PREPARED[0], (exponents[0], PREPARED[1]), x_at
        else:
            split |= dict(zip(SPLIT_WORDS[3:], (w_name, place(one.limbs.w), exponents[1]), strict=True))
            w_name, w_at = place(one.limbs.w), x_at
        build.launch(one.limbs.kernel, one.limbs.grid, fields, split)
    boxes = map_arguments(one, taken._replace(x=x_at, w=w_at))
    maps = [(x_name, boxes[0]), (w_name, boxes[1]), (y_memory, boxes[2])]
    passed = {"y": y_memory, "partial": place(0), "merged": place(one.merged), "epoch": place(one.epoch), **_OWN}
    passed |= {"batches": count, "x_exponents": exponents[0], "w_exponents": exponents[1]}
    if saves and not call.remat:
        rows, cols, _, *rest = boxes[2]
        if call.saved_dtype == p.dtype:  # else they are float64, and lanes store them
            maps.append((deviations, (rows, cols, ldg * size, *rest)))
        passed |= {"deviations": deviations}
    if saves:
        passed |= {"saved": vectors}
    if residual is not None:
        rows, cols, _, *rest = boxes[2]
        fields |= {"residual_row": residual.strides[0]}
        maps.append(("residual", (rows, cols, residual.strides[0] * size, *rest)))
        passed |= {"residual": "residual"}
    if not vector_y:  # the kernel does not use the map of y
        maps[2] = maps[0]
    if call.ranks is not None:
        passed |= {"ranks": "ranks"}
    passed |= _of_renorm(call)
    how: dict[str, Any] = {"maps": tuple(maps), "cooperative": one.cooperative, "made_of": (one, taken)}
    build.launch(one.kernel, one.ctas, fields, passed, SM90_THREADS, **how)
    if y_memory != y:
        build.copy(Copy(y_memory, y, (call.m, p.n), p.dtype, taken.y, p.y))


# ---- a GEMM makes g, then come statistics, then y; the skinny kernels compute g themselves


def _in_passes(build: Builder, call: _Call, skinny: Skinny | None, where: str | None) -> None:
    p, taken, training, ranks = call.p, call.taken, call.training, call.ranks
    m, n, k, dtype, y = call.m, p.n, p.k, p.dtype, p.y
    x_name, w_name, y_name, deviations, vectors, count = call.names
    saves = call.saved_dtype is not None
    y_size, g_size = ITEMSIZE[dtype], max(ITEMSIZE[dtype], 4)

    # In float32 and float64, g can lie in y or in the deviations, which saves a B x O array, half in L2.
    vector_y = vector_rows(y, y_size)
    y_is_g = vector_y and y_size == g_size and n <= y.strides[0] <= INT32_MAX and not saves and not skinny
    if call.gemm == "sm90" and n * y_size % 16:  # TMA stores whole 16 bytes, which would pass the end of a row
        y_is_g = False
    ldg = y.strides[0] if y_is_g else round_up(n, 16 // (y_size if saves else g_size))
    saved_is_g = call.saved_dtype is not None and not skinny and ITEMSIZE[call.saved_dtype] == g_size

    flat, ghosts = flattened(p, call.groups), call.groups > 1
    one_pass = not skinny and one_pass_serves(flat, training, call.reads_count and not ghosts, where)
    merges = training and not one_pass
    division = divide(flat, skinny, 16 // g_size, one_pass)

    # The workspace holds constants, the statistics of each split, the statistics of each ghost batch, and g.
    affine, columns = 0, flat.n if ghosts else ldg
    partials = round_up(affine + (4 * columns * g_size if merges else 0), 256)
    ghost_statistics = round_up(partials + (division.splits * 2 * columns * 8 if merges else 0), 256)
    tracks = ghosts and call.fields["running_mean"] != 0
    g_at = round_up(ghost_statistics + (2 * columns * 8 if tracks else 0), 256)
    workspace = g_at + (0 if skinny or y_is_g or saved_is_g else p.m * ldg * g_size)

    saved_in_training = call.saved_dtype if training else None
    if one_pass:
        normalize_kernel = with_renorm(normalize_fused(dtype, saved_in_training), call.renorm is not None)
    else:
        normalize_kernel = normalize(dtype, saved_in_training, running=not training)
    stats_kernel, block = scale_stats(dtype), THREADS
    if skinny is not None:
        stats_kernel, normalize_kernel, block = skinny.stats, skinny.normalize, skinny.threads

    product, limbs = None, lay_out((), round_up(workspace, 256))
    q = p._replace(x=taken.x, w=taken.w, y=Matrix((ldg, 1), aligned=True, own=True))
    if call.gemm == "sm90":
        product = one_launch(taken._replace(y=q.y), "gemm", call.precision, wide=dtype != "float32")
        if by_limbs(product.element):
            wanted = [split_of("x", taken.x, p.m, k), split_of("weight", taken.w, n, k)]
            limbs = lay_out(wanted[: 1 + (product.element == "limbs")], limbs.end)
            workspace = limbs.end
    posted, gathered, end = posts_at(workspace, letters(n, 2), ranks)

    _save(build, call, ldg)
    build.copy()
    build.reserve(end if ranks is not None else workspace)
    g = y_name if y_is_g else deviations if saved_is_g else place(g_at)
    of_g = {"x": x_name, "w": w_name} if skinny else {"g": g}
    fields = call.fields | division.fields | {"ldg": ldg, "y_row": y.strides[0], "y_col": y.strides[1]}
    fields |= {"affine": affine, "partials": partials}
    g_by_limbs = by_limbs(product.element) if product else skinny is not None and skinny.product is not None
    fields["flags"] = _flags(call, vector_y=vector_y, limbs=g_by_limbs)

    if m and not skinny:  # otherwise only other ranks have rows, or the skinny kernels compute g
        _multiply(build, call, q, product, limbs, g, fields)
    arguments = _OWN
    if ghosts:
        fields |= {"m": flat.m, "n": flat.n, "features": n, "ghost_pitch": flat.n // call.groups}
    if tracks:
        mean_of_each, var_of_each = place(ghost_statistics), place(ghost_statistics + 8 * columns)
        arguments = _OWN | {"running_mean": mean_of_each, "running_var": var_of_each}
    if merges and m:
        kernel = with_ghosts(stats_kernel, ghosts)
        build.launch(kernel, division.stats_grid, fields, {**of_g, "workspace": place(0)}, block)
    if merges:
        _merge_statistics(build, call, fields, arguments, division.merge_grid, posted, gathered)
        count = ABSENT if ranks is not None else count  # merge_statistics has counted the batch
    if m:
        passed = {**of_g, "y": y_name} | ({} if one_pass else {"workspace": place(0)})
        passed |= {**arguments, "num_batches_tracked": count, "deviations": deviations, "saved": vectors}
        passed |= _of_renorm(call) if one_pass else {}
        kernel = with_activation(with_ghosts(normalize_kernel, ghosts), call.activation)
        build.launch(kernel, division.normalize_grid, fields, passed, block)
    if tracks:
        passed = {"statistics": place(ghost_statistics), "running_mean": "running_mean", "running_var": "running_var"}
        passed |= {"num_batches_tracked": count}
        build.launch(track_ghosts(), p.device.grid(ceil_div(n, GHOST_FEATURES)), fields, passed)


def _of_renorm(call: _Call) -> dict[str, str]:
    """Return the memory that is passed in addition to a variant for batch renormalisation."""
    return {} if call.renorm is None else {"renorm": "renorm"}


def _multiply(
    build: Builder, call: _Call, q: Matmul, product: OneLaunch | None, limbs: Splits, g: str, fields: dict[str, Any]
) -> None:
    """Add the steps of g = x wᵀ by forward_sm90 (`product`), gemm_tiled or cuBLAS. In `q`, g takes the place of y."""
    x_name, w_name, *_ = call.names
    if product is not None and limbs.of:
        made = Limbs(build, limbs, {"x": x_name, "weight": w_name})
        made.make()
        made.multiply(q, product, "x", "weight", g)
    elif product is not None:
        sm90_gemm(build, q, product, (x_name, w_name, g))
    elif call.gemm == "tiled":
        kernel, grid, block = tiled(call.p, "forward")
        build.launch(kernel, grid, fields, {"x": x_name, "w": w_name, "g": g}, block)
    else:
        build.gemm(q, call.precision, x_name, w_name, g, wide=True)


def _merge_statistics(
    build: Builder, call: _Call, fields: dict[str, Any], arguments: dict[str, str], grid: int, posted: int,
    gathered: int,
) -> None:  # fmt: skip
    """Add the launch that merges the statistics of all splits and all ranks.

    Over NCCL, a launch before it posts the statistics of this rank. `arguments` names the memory of the vectors.
    """
    kernel = with_ghosts(with_renorm(merge_statistics(call.p.dtype), call.renorm is not None), call.groups > 1)
    ranks, count = call.ranks, letters(call.p.n, 2)
    *_, vectors, batches = call.names
    passed = {"workspace": place(0), "posted": ABSENT, "ranks": ABSENT, "gathered": ABSENT, **arguments}
    passed |= {"num_batches_tracked": batches, "saved": vectors, **_of_renorm(call)}
    if ranks is not None and not ranks.waits:
        if call.m == 0:
            build.clear(place(posted), 8 * count)
        else:
            build.launch(kernel, grid, fields, passed | {"posted": place(posted)})
        build.gather(count, place(posted), place(gathered))
        passed["gathered"] = place(gathered)
    if ranks is not None:
        passed["ranks"] = "ranks"
    build.launch(kernel, grid, fields, passed)
