"""A backward call, decided: its passes, its two products, where things lie in its workspace."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from .copies import in_rows
from .cost import copies_us, ieee_us, product_us
from .declared import flags, kind_code
from .gemm import (
    LEAST_TERMS,
    MAX_TERMS,
    OneLaunch,
    cheapest_tile,
    cublas_obstacle,
    for_cublas,
    lies_across,
    mostly_writes,
    one_launch,
    takes_limbs,
    tiled,
    waiting_grid,
)
from .h200 import PRODUCTS
from .kernel import Kernel, with_activation
from .limbs import SCRATCH, Operand, Splits, lay_out, limb_pitch, split_of
from .narrow import for_narrow, narrow_backward, product_by_narrow
from .problem import (
    INT32_MAX,
    ITEMSIZE,
    SPLITS,
    VECTOR_PARAMETERS,
    Matmul,
    Matrix,
    ceil_div,
    kept_dtype,
    round_up,
    split_rows,
    threads_along,
)
from .products import Limbs, add_parts, sm90_gemm
from .program import ABSENT, Builder, Program, nbytes_of, place
from .ranks import Ranks, letters, posts_at
from .sm90_variants import BLOCKS_M, CLUSTERS, SM90_BLOCK_N, by_limbs, element_for
from .tall import Tall, tall
from .variants import (
    CLUSTERS_OF_COLUMNS,
    RING,
    SPLIT_WIDTHS,
    SUMS_CLUSTER,
    TALL_THREADS,
    THREADS,
    backward_kernels,
)

SUMS_CTAS, DG_CTAS = 2, 2  # CTAs on an SM, of backward_sums and of backward_dg
SHARED_SPLITS = 4  # clusters that share a block of columns, from which on backward_sums has them
FUSED_ROWS, FUSED_CTAS = 1024, 2  # rows of a CTA, and CTAs on an SM, up to which backward_fused does what both do
# Rows of each CTA from which a cluster shares columns; elements of dy up to which it does, with one CTA on an SM and
# with two, of which one loads while the other waits for its cluster
SHARED_ROWS, SHARED_ELEMENTS = 128, (6_000_000, 20_000_000)
FILL = 0.94  # of several waves of the largest tiles, from which on forward_sm90 beats cuBLAS (docs/history/backward.md)


class Product(NamedTuple):
    """One GEMM of the backward, c (m, n) = a (m, k) bᵀ (k, n): a is dg or its transpose, b one of the weight or x."""

    p: Matmul  # b being a copy where the GEMM takes it otherwise than it lies
    gemm: str
    kernel: Kernel | None
    grid: int
    block: int
    one: OneLaunch | None = None
    wide: bool = False  # c is float32, of 16-bit operands
    rows: int = 0  # of a CTA of narrow_product but the last; 0 for any other kernel
    tall: Tall | None = None  # the launches of many rows, for dw

    @property
    def of_limbs(self) -> bool:
        return self.one is not None and by_limbs(self.one.element)


class Vectors(NamedTuple):
    """Gradients of vectors: the dtype of each by name, and of a scale of one element its shape."""

    dtypes: Mapping[str, str]
    scale_shape: tuple[int, ...] | None = None


class _Rows(NamedTuple):
    """How the passes over dy cut its rows and columns."""

    dy: Matrix  # perhaps of a copy
    vector_dy: bool
    row_threads: int
    blocks: int  # of columns
    sums_grid: int
    sums_rows: int
    splits: int  # clusters of backward_sums that share a column block
    dg_grid: int
    dg_rows: int
    merge_grid: int
    sums_kernel: Kernel
    dg_kernel: Kernel
    total_kernel: Kernel
    merge_kernel: Kernel | None
    fused: bool  # sums_kernel makes dg, too


def plan_backward(
    p: Matmul,
    *,
    training: bool,
    needs: tuple[str, ...],
    vectors: Vectors | None = None,
    precision: str = "highest",
    gemm: str = "auto",
    activation: str | None = None,
    norm: bool = True,
    linear: bool = True,
    wide: bool = False,
    in_place: bool = False,
    ranks: Ranks | None = None,
    ld_saved: int | None = None,
) -> Program:
    """Decide a backward call; `p` is the forward's with dy for y. Rows may be none where ranks share the batch.

    It has two halves, of which one may be left out: `norm` goes from dy to dg and the gradients of vectors, `linear`
    from dg to the two products. Without `norm`, y stands for the dg that is given, in rows on 16 bytes, and is not
    written. `wide`: dw is float32 where the operands have 16 bits. `in_place`: dg lies where the deviations lay, in
    rows of `ld_saved`. With `ranks`, their sums come inside a launch, which waits for them, or between two.

    Raises ValueError that names `gemm` if the one chosen in the forward cannot serve the call.
    """
    m, p = p.m, p._replace(m=max(p.m, 1))
    n, k, dtype, device, dy = p.n, p.k, p.dtype, p.device, p.y
    size = ITEMSIZE[dtype]
    where = None if ranks is None else "inside" if ranks.waits and m else "between"
    build = Builder(device)

    # ---- gradients, which the call makes
    vectors = vectors or Vectors({name: dtype for name in needs if name in VECTOR_PARAMETERS})
    one_scale = vectors.scale_shape is not None and "scale" in needs and norm
    grads = dict.fromkeys(("x", "weight", *VECTOR_PARAMETERS), ABSENT)
    for name in grads:
        if name in needs and (norm if name in VECTOR_PARAMETERS else linear):
            shape: tuple[int, ...] = {"x": (m, k), "weight": (n, k)}.get(name, (n,))
            shape = vectors.scale_shape if name == "scale" and vectors.scale_shape is not None else shape
            of_dtype = vectors.dtypes.get(name, "float32" if name == "weight" and wide else dtype)
            grads[name] = build.make(gradient_of(name), shape, of_dtype)
    if m == 0 and ranks is None:
        return _of_nothing(build, p, linear=linear)

    # ---- what is done
    dg = ("x" in needs or "weight" in needs) and norm
    sums = (dg and training) or not {"scale", "gamma", "beta"}.isdisjoint(needs) or ("bias" in needs and not training)
    sums = (sums or ranks is not None) and norm
    copy_dy = norm and dy.strides[1] != 0 and not _on_words(dy, size)
    pitch = round_up(n, 16 // size) if norm else dy.strides[0]
    # m, n, k of the two products; dg lies in rows of `pitch`
    rows = Matrix((pitch, 1), True)
    of_x = Matmul(p.m, k, n, dtype, device, rows, p.w.T, Matrix((k, 1), True), p.limits)
    of_weight = Matmul(n, k, p.m, dtype, device, rows.T, p.x.T, Matrix((k, 1), True), p.limits)
    dx = _product("dx", of_x, precision, gemm) if linear and "x" in needs else None
    dw = _product("dw", of_weight, precision, gemm, wide) if linear and "weight" in needs else None
    across = 0
    if dw is not None and dw.gemm == "cublas" and dtype == "float32" and precision == "high":
        # cuBLAS' TF32 takes 1.5 to 1.8 times as long where both operands run across what is summed over.
        across = round_up(p.m, 16 // size)
    at_dy = in_rows(n, size) if copy_dy else dy
    narrow = None
    if gemm in ("auto", "tiled") and norm and linear and training:
        narrow = narrow_backward(p, at_dy, activation)
    cut = _cut(
        p, at_dy, training=training, sums=sums, dg=dg, narrow=narrow is not None, across=across > 0,
        precision=precision, activation=activation, where=where,
    )  # fmt: skip
    if "weight" not in needs or cut.fused or kept_dtype(dtype, p.m, training=training) != dtype:
        narrow = None
    if narrow is not None:
        dx = dw = None
        across = 0
    if across and dw is not None:
        dw = dw._replace(p=dw.p._replace(x=Matrix((across, 1), True)))

    # ---- the workspace: the sums of each split, those of all ranks, dg or the parts of dw, dg's transpose, limbs
    totals_at = round_up(cut.splits * 2 * n * 8, 256)
    dg_at = round_up(totals_at + (2 * n * 8 if ranks else 0), 256)
    of_dg = p.m * pitch * size if dg and linear and not in_place else 0
    across_at = round_up(dg_at + (of_dg if narrow is None else narrow.parts.nbytes), 256)
    limbs, weight_first = _split(dx, dw, round_up(across_at + n * across * size, 256), own=norm)
    scales_at = limbs.end
    workspace = scales_at + (8 * n if one_scale else 0)
    posted, gathered, end = posts_at(workspace, n, ranks)

    # ---- copies
    copies = [build.copied("dy", (m, n), dy, at_dy, dtype)] if copy_dy and m else []
    for name, given, count, product in (("x", p.x, m, dw), ("weight", p.w, n, dx)):  # the operand b of the product
        if m and product is not None and product.p.w.own:
            copies.append(build.copied(name, (count, k), given, product.p.w.T, dtype))
    copied = {copy.name: copy.to for copy in copies}
    of_dy, of_b_x, of_b_w = (copied.get(name, name) for name in ("dy", "x", "weight"))
    dg_name = transposed = ABSENT if norm else "dy"
    if across and not norm:
        copies.append(build.copied("dy", (n, m), dy.T, Matrix((across, 1), True), dtype))
        transposed = copies[-1].to
    if dg and not linear:
        dg_name = "deviations" if in_place else build.make("dg", (m, pitch), dtype)
    build.copy(copies)
    build.reserve(workspace if ranks is None else end)
    if dg and linear:
        dg_name = "deviations" if in_place else place(dg_at)
        transposed = place(across_at) if across else dg_name

    # ---- from dy to dg and the gradients of vectors
    codes = {name: 8 + kind_code(of) for name, of in vectors.dtypes.items() if name in needs}
    fields: dict[str, Any] = {
        "m": m,
        "n": n,
        "k": k,
        "ldx": p.x.strides[0],
        "ldw": p.w.strides[0],
        "narrow_rows": narrow.rows if narrow else 0,
        "narrow_features": narrow.features if narrow else 0,
        "dy_row": cut.dy.strides[0],
        "dy_col": cut.dy.strides[1],
        "ldd": ld_saved if ld_saved is not None else pitch,
        "lddg": pitch,
        "ld_across": across,
        "along": cut.row_threads,
        "sums_rows": cut.sums_rows,
        "dg_rows": cut.dg_rows,
        "splits": cut.splits if m else 0,
        "signature": 0 if ranks is None else ranks.signature,
        "words": limbs.maxima_bytes // 4,
        "vector_dy": cut.vector_dy,
        **{f"to_{name}": codes.get(name, 0) for name in VECTOR_PARAMETERS},
    }
    to_vectors = {f"to_{name}": grads[name] for name in VECTOR_PARAMETERS}
    if one_scale:  # those of the features first, in float64
        to_vectors["to_scale"] = place(scales_at)
        fields["to_scale"] = 8 + kind_code("float64")
    reads_d = ranks is not None or (dg and training) or not {"scale", "gamma"}.isdisjoint(needs) or bool(activation)
    reads = {"dy": of_dy, "d": "deviations" if reads_d else ABSENT, "saved": "vectors"}
    zeros = place(limbs.maxima) if limbs.maxima_bytes else ABSENT
    of_sums = place(0)
    if cut.fused:
        passed = {**reads, "dg": dg_name, **to_vectors, "zeros": zeros, "ranks": ABSENT if ranks is None else "ranks"}
        build.launch(cut.sums_kernel, cut.sums_grid, fields, passed)
    elif sums and m:
        build.launch(cut.sums_kernel, cut.sums_grid, fields, {**reads, "workspace": of_sums, "zeros": zeros})
    elif grads["bias"] != ABSENT:  # in training, and nothing but zeros is wanted
        build.clear(grads["bias"], n * ITEMSIZE[vectors.dtypes["bias"]])
    if ranks is not None and norm and not cut.fused:
        assert cut.merge_kernel is not None
        totals = place(totals_at)
        passed = {"saved": "vectors", "workspace": of_sums, "posted": ABSENT, "ranks": "ranks", "gathered": ABSENT}
        passed |= {"totals": totals, **to_vectors}
        if not ranks.waits:
            first = {**passed, "posted": place(posted), "totals": ABSENT}
            build.launch(cut.merge_kernel, cut.merge_grid, fields, first)
            build.gather(letters(n), place(posted), place(gathered))
            passed["gathered"] = place(gathered)
        build.launch(cut.merge_kernel, cut.merge_grid, fields, passed)
        of_sums = totals
        fields |= {"splits": 1, **{f"to_{name}": 0 for name in VECTOR_PARAMETERS}}  # the gradients of vectors are there
    if m and narrow is not None:
        parts = place(dg_at)
        passed = {"dy": of_dy, "d": "deviations", "x": "x", "w": "weight", "saved": "vectors", "workspace": of_sums}
        passed |= {"partials": parts, "dx": grads["x"], **to_vectors}
        build.launch(narrow.kernel, narrow.ctas, fields, passed, narrow.block, made_of=narrow)
        add_parts(build, narrow.parts, parts, grads["weight"], (n, k), "float32" if wide else dtype)
    elif m and (dg or (sums and ranks is None)) and not cut.fused:
        passed = {**reads, "d": "deviations", "workspace": of_sums, "dg": dg_name, "across": transposed, **to_vectors}
        build.launch(cut.dg_kernel, cut.dg_grid, fields, passed)
    if one_scale:
        of_features = {"of_features": to_vectors["to_scale"], "to_scale": grads["scale"]}
        build.launch(cut.total_kernel, 1, {**fields, "to_scale": codes["scale"]}, of_features)

    # ---- the products
    if m:
        names = {"dg": dg_name, "across": transposed, "x": of_b_x, "weight": of_b_w}
        names |= {"dx": grads["x"], "dweight": grads["weight"]}
        _multiply_both(build, dx, dw, limbs, names, precision, weight_first=weight_first, cleared=sums)
    elif grads["weight"] != ABSENT:
        build.clear(grads["weight"], n * k * (4 if wide else size))
    gemms = ", ".join(f"d{name} by {product.gemm}" for name, product in (("x", dx), ("weight", dw)) if product)
    return build.program("backward", gemms)


def gradient_of(name: str) -> str:
    """The name of a gradient's memory."""
    return f"gradient of {name}"


def _of_nothing(build: Builder, p: Matmul, *, linear: bool) -> Program:
    """The gradients of an empty batch: zeros."""
    made = build.program("", "").arrays
    if not linear:
        build.make("dg", (0, p.n), p.dtype)
    for array in made:
        if nbytes_of(array):
            build.clear(array.name, nbytes_of(array))
    return build.program("backward", "")


def _on_words(dy: Matrix, size: int) -> bool:
    return dy.aligned and dy.strides[1] == 1 and dy.strides[0] * size % 16 == 0


def _cut(
    p: Matmul, dy: Matrix, *, training: bool, sums: bool, dg: bool, narrow: bool, across: bool, precision: str,
    activation: str | None, where: str | None,
) -> _Rows:  # fmt: skip
    """How the passes cut dy, and whether one launch of them does all."""
    m, n, dtype, device, limits, size = p.m, p.n, p.dtype, p.device, p.limits, ITEMSIZE[p.dtype]
    # 16 bytes of dy a thread; where `across` may be wanted, whatever `needs` leaves out, all of a warp along a row
    blocks, along = threads_along(n, 16 // size)
    if dtype == "float32" and precision == "high" and not narrow:
        blocks, along = ceil_div(n, 128), 32
    step = RING * (THREADS // along)
    shares = 1 if dtype == "float64" else THREADS * size // (16 * along)  # threads that merge a column (merge_splits)
    # of few blocks clusters share the rows, so that whoever merges their sums finds few splits
    clusters = device.clusters(SUMS_CLUSTER) * device.ctas(SUMS_CTAS) // device.sms // blocks if device.hopper else 0
    sharing = SUMS_CLUSTER if clusters >= SHARED_SPLITS else 1
    alone = min(device.ctas(SUMS_CTAS), SPLITS * shares * blocks)
    splits, sums_rows = split_rows(m, blocks, alone if sharing == 1 else sharing * clusters * blocks, step)
    splits = ceil_div(splits, sharing)
    row_blocks, dg_rows = split_rows(m, blocks, device.ctas(DG_CTAS), step)
    # All rows of some columns by one CTA: nobody else's sums are needed. Unlike `across`, it does not depend on what
    # `needs` leaves out: the bits of the rest are the same.
    fused = sums and where != "between" and (dtype != "float32" or precision == "highest")
    resident = (device.with_room() if where else device).ctas(FUSED_CTAS)
    kept = kept_dtype(dtype, m, training=training)
    # 64 bytes of a row, or more where only then all CTAs are there at once
    fused_along = next((along for along in (4, 8) if ceil_div(n, along * 16 // size) <= resident), 16)
    cluster = 1
    if training and kept == dtype != "float64" and where is None and not narrow:
        fused_along, cluster = _shared_columns(p, fused_along)
    columns = ceil_div(n, fused_along * 16 // size)  # CTAs, or clusters
    at_once = columns <= resident or cluster > 1  # several waves lose up to 5 us
    fused = fused and m <= FUSED_ROWS * cluster and (at_once if limits.fused is None else limits.fused)
    if fused or not sums:
        splits = 0
    kernels = backward_kernels(
        dtype, kept, training=training, across=across and not narrow, cluster=cluster, sharing=sharing
    )
    sums_kernel, dg_kernel, fused_kernel, total_kernel, *merge = (with_activation(k, activation) for k in kernels)
    return _Rows(
        dy=dy,
        vector_dy=_on_words(dy, size),
        row_threads=fused_along if fused else along,
        blocks=blocks,
        sums_grid=device.grid(columns) * cluster if fused else device.grid(blocks * splits * sharing),
        sums_rows=sums_rows,
        splits=splits,
        dg_grid=device.grid(blocks * (row_blocks if dg else 1)),
        dg_rows=dg_rows,
        merge_grid=waiting_grid(blocks, device),
        sums_kernel=fused_kernel if fused else sums_kernel,
        dg_kernel=dg_kernel,
        total_kernel=total_kernel,
        merge_kernel=merge[0] if merge else None,
        fused=fused,
    )


def _multiply_both(
    build: Builder, dx: Product | None, dw: Product | None, splits: Splits, names: dict[str, str], precision: str, *,
    weight_first: bool, cleared: bool,
) -> None:  # fmt: skip
    """dx = dg w and dweight = dgᵀ x, or what is wanted of them, and the limbs that they take.

    `names` are of the memory of "dg", of "across", dg or its transpose as dweight takes it, and of "x", "weight", "dx"
    and "dweight". `cleared`: an earlier step clears the maxima.
    """
    of_limbs = {name: names[name] for name in ("dg", "x", "weight", "dweight")}
    limbs = Limbs(build, splits, of_limbs, cleared=cleared)

    def multiply_weight(*, first: bool) -> None:
        if dw is not None and weight_first == first:
            # dx's launch has waited for dg; limbs may lie where dweight will, and two launches take more SMs
            beside = not (first or build.device.limited) and dx is not None and dx.one is not None and not dx.of_limbs
            operands = (names["across"], names["x"], names["dweight"])
            _multiply(build, dw, operands, limbs, "x", precision, beside=beside)

    multiply_weight(first=True)
    limbs.make()
    if dx is not None:
        _multiply(build, dx, (names["dg"], names["weight"], names["dx"]), limbs, "weight", precision)
    limbs.make(late=True)
    multiply_weight(first=False)


def _multiply(
    build: Builder, product: Product, operands: tuple[str, str, str], limbs: Limbs, b: str, precision: str, *,
    beside: bool = False,
) -> None:  # fmt: skip
    """The steps that make c of a and b, of which these are the memory; a is dg, and b as the limbs call it."""
    p = product.p
    if product.one is not None and product.of_limbs:
        limbs.multiply(p, product.one, "dg", b, operands[-1])
    elif product.one is not None:
        sm90_gemm(build, p, product.one, operands, beside=beside)
    elif product.tall is not None:
        tall = product.tall
        fields = {"m": p.k, "n": p.m, "k": p.n, "lda": p.x.strides[1], "ldb": p.w.strides[1], "rows": tall.rows}
        fields |= {"flags": flags(vector_x=tall.whole_words)}
        of_dg, of_x, c = operands
        parts = build.lend(tall.parts.nbytes)
        passed = {"a": of_dg, "b": of_x, "parts": parts}
        build.launch(tall.kernel, tall.ctas, fields, passed, TALL_THREADS, made_of=product)
        add_parts(build, tall.parts, parts, c, (p.m, p.n), p.dtype)
    elif product.kernel is None:
        build.gemm(p, precision, *operands, wide=product.wide)
    else:
        along = 0 if product.rows else 1  # narrow_product has b along what is summed over, gemm_tiled across
        size, ldw = ITEMSIZE[p.dtype], p.w.strides[along]
        whole = {"vector_w": p.w.aligned and ldw * size % 16 == 0, "vector_y": p.n * size % 16 == 0}
        fields = {"m": p.m, "n": p.n, "k": p.k, "ldx": max(p.x.strides), "ldw": ldw, "ldg": p.n}
        fields |= {"stats_rows": product.rows, "flags": flags(vector_x=True, **whole)}
        passed = dict(zip(("x", "w", "g"), operands, strict=True))
        build.launch(product.kernel, product.grid, fields, passed, product.block, made_of=product)


def _shared_columns(p: Matmul, along: int) -> tuple[int, int]:
    """Threads along a row, and CTAs of a cluster that shares the rows of its columns, in backward_fused: the least work
    for a CTA with all of them there at once. `along` is what serves without clusters."""
    m, n, size, asked = p.m, p.n, ITEMSIZE[p.dtype], p.limits.cluster
    found = []
    for cluster, wide in itertools.product(CLUSTERS_OF_COLUMNS if p.device.hopper else (), (4, 8, 16)):
        blocks, rows = ceil_div(n, wide * 16 // size), ceil_div(m, cluster)
        resident = p.device.clusters(cluster) * p.device.ctas(FUSED_CTAS) // p.device.sms
        wins = rows >= SHARED_ROWS and m * n <= SHARED_ELEMENTS[blocks * cluster > p.device.sms]
        if blocks <= resident and rows <= FUSED_ROWS and (wins if asked is None else asked == cluster):
            found.append((rows * wide, cluster, wide))
    work, cluster, wide = min(found, default=(0, 0, 0))
    alone = asked is None and m <= FUSED_ROWS and m * along <= work
    return (along, 1) if alone or not found else (wide, cluster)


def _product(name: str, p: Matmul, precision: str, gemm: str, wide: bool = False) -> Product:
    """Which GEMM makes dx or dw; `wide`: in float32, of 16-bit operands."""
    obstacle, element = cublas_obstacle(p), element_for(p.dtype, precision)
    if gemm == "cublas" and obstacle is not None:
        raise ValueError(f"gemm: expected a choice that can serve this call, got 'cublas' in the forward: {obstacle}")
    size = ITEMSIZE[p.dtype]
    across = in_rows(p.n, size).T

    def product(path: str, q: Matmul, kernel: tuple[Kernel | None, int, int] = (None, 0, 0)) -> Product:
        one = one_launch(q, "gemm", precision, wide=wide) if path == "sm90" else None
        return Product(q, path, *kernel, one, wide)

    of_limbs = p if 1 in p.w.strides else p._replace(w=across)
    own, asked = gemm in ("auto", "tiled"), gemm == "tiled"  # the kernels that make limbs on the way

    def wins(us: float) -> bool:
        others = [_limbs_us(of_limbs)] + [ieee_us(p, PRODUCTS)] * (obstacle is None)
        return us < min(others)

    of_rows = tall(p, precision) if name == "dw" and own else None
    if of_rows is not None and (asked or p.limits.tall or wins(of_rows.us)):
        return product("tiled", p)._replace(tall=of_rows)
    narrow = product_by_narrow(p, precision) if own and p.limits.narrow is not False else None
    if narrow is not None and (asked or p.limits.narrow or wins(narrow.us)):
        kernel = (narrow.product, narrow.grid, narrow.threads)
        return product("tiled", for_narrow(p), kernel)._replace(rows=narrow.rows)
    if _wants_limbs(p, of_limbs, precision, gemm, obstacle):
        return product("sm90", of_limbs)
    ours = p if lies_across(p) else p._replace(w=across)
    theirs = for_cublas(p, element)
    if ours.w.own and p.dtype != "float64":
        theirs = min(theirs, ours, key=lambda q: _cublas_us(q, element))
    if _wants_sm90(ours, gemm, obstacle, theirs):
        return product("sm90", ours)
    if gemm != "tiled" and obstacle is None:
        return product("cublas", theirs)
    return product("tiled", p if p.w.strides[0] == 1 else p._replace(w=across), tiled(p, name, wide=wide))


def _split(dx: Product | None, dw: Product | None, start: int, *, own: bool) -> tuple[Splits, bool]:
    """The limbs that the products want, and whether dw is made before them.

    Where both want limbs dx is made first. The weight's then lie where dw will: they take the same bytes. dg's are all
    made at once, those for dx in its place, and x's there as soon as dx is made. A dw that takes dg as it is comes
    first if there are more rows than input features: dg's limbs take its place, and only the weight's want room. A
    dx whose launch makes the weight's in registers wants dg's alone. A dg that is not the call's `own` stays as it is:
    all limbs have room of their own.
    """
    of_x, of_weight = (q.p if q is not None and q.of_limbs else None for q in (dx, dw))
    of_both = dx is not None and dx.one is not None and dx.one.element == "limbs"
    wanted, weight_first = [], False
    if of_x is not None:
        dg = split_of("dg", of_x.x, of_x.m, of_x.k)
        fits = limb_pitch(of_x.k) == of_x.k  # rows of limbs are no longer than rows of float32
        in_place = fits and own
        if of_weight is None:  # split_limbs makes them, one row after the other and each read in full
            in_place = in_place and dg.pitch == of_x.k <= SPLIT_WIDTHS[-1] and (dw is None or of_x.m > of_x.n)
            weight_first = in_place and dw is not None
        else:
            dg = dg._replace(across=split_of("dg", of_weight.x, of_weight.m, of_weight.k).across)
        if in_place:
            dg = dg._replace(along=Operand("dg", dg.pitch))
        if of_both:
            place = "dweight" if fits and dw is not None and not weight_first else SCRATCH
            wanted.append(split_of("weight", of_x.w, of_x.n, of_x.k, place))
        wanted.append(dg)
    elif of_weight is not None:
        wanted.append(split_of("dg", of_weight.x, of_weight.m, of_weight.k))
    if of_weight is not None:
        late = own and of_weight.n * limb_pitch(of_weight.k) <= of_weight.k * of_weight.x.strides[1]
        x = split_of("x", of_weight.w, of_weight.n, of_weight.k, "dg" if late else SCRATCH)
        wanted.append(x._replace(late=late))
    return lay_out(wanted, start), weight_first


def _limbs_us(p: Matmul) -> float:
    """What a product of limbs by forward_sm90 takes."""
    return cheapest_tile(p, "gemm", "limbs").us + copies_us(p, rates=PRODUCTS)


def _cublas_us(p: Matmul, element: str) -> float:
    """What cuBLAS takes for a product, copies included."""
    return product_us(p, element, to_y=True, rates=PRODUCTS) + copies_us(p, rates=PRODUCTS)


def _wants_limbs(p: Matmul, taken: Matmul, precision: str, gemm: str, obstacle: str | None) -> bool:
    """Whether a GEMM of the backward goes through limbs: asked for, or faster than cuBLAS, or cuBLAS cannot."""
    if not takes_limbs(p.dtype, precision, p.device) or max(p.m, p.n, p.k) > INT32_MAX // 2:
        return False
    if gemm != "auto" or obstacle is not None:
        return gemm in ("auto", "sm90")
    return p.k >= LEAST_TERMS and min(p.m, p.n) > 1 and _limbs_us(taken) < ieee_us(p, PRODUCTS)


def _wants_sm90(p: Matmul, gemm: str, obstacle: str | None, theirs: Matmul) -> bool:
    """Whether forward_sm90 makes a 16-bit product: asked for, faster than cuBLAS or than its call, or cuBLAS cannot.

    `theirs` is the same as cuBLAS would take it, with other copies or none.
    """
    if not p.device.hopper or p.dtype not in ("float16", "bfloat16"):
        return False
    if max(p.m, p.n, p.k) > INT32_MAX // 2 or p.k > MAX_TERMS[p.dtype]:
        return False
    if gemm != "auto" or obstacle is not None:
        return gemm in ("auto", "sm90")
    ours = cheapest_tile(p, "gemm", p.dtype).us
    if p != theirs:
        return ours + copies_us(p, rates=PRODUCTS) < _cublas_us(theirs, p.dtype)
    of_few_rows = p.x.strides[1] != 1 and mostly_writes(p)  # dw
    return of_few_rows or _fills_waves(p) or ours <= PRODUCTS.cublas_host_us


def _fills_waves(p: Matmul) -> bool:
    """Whether the largest tiles fill several waves: measured to beat cuBLAS, which cuts other shapes better."""
    tile = cheapest_tile(p, "gemm", p.dtype)
    resident = p.device.clusters(tile.cluster)
    block_n = SM90_BLOCK_N * tile.cluster
    waves = ceil_div(ceil_div(p.m, tile.block_m) * ceil_div(p.n, block_n), resident)
    largest = (tile.block_m, tile.cluster) == (BLOCKS_M[0], CLUSTERS[0])
    return largest and waves > 1 and p.m * p.n >= FILL * waves * resident * tile.block_m * block_n
