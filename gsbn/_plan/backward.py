"""A backward call, decided: its passes, its two products, where things lie in its workspace."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

from .copies import in_rows
from .cost import copies_us, ieee_us, product_us
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
from .narrow import NarrowBackward, for_narrow, narrow_backward, product_by_narrow
from .problem import (
    INT32_MAX,
    ITEMSIZE,
    SPLITS,
    Matmul,
    Matrix,
    ceil_div,
    kept_dtype,
    round_up,
    split_rows,
    threads_along,
)
from .sm90_variants import BLOCKS_M, CLUSTERS, SM90_BLOCK_N, by_limbs, element_for
from .tall import Tall, tall
from .variants import (
    CLUSTERS_OF_COLUMNS,
    RING,
    SPLIT_WIDTHS,
    SUMS_CLUSTER,
    THREADS,
    backward_kernels,
)

__all__ = ["FUSED_CTAS", "FUSED_ROWS", "SUMS_CTAS", "BackwardPlan", "Product", "backward_plan"]

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


class BackwardPlan(NamedTuple):
    """A backward call, decided. Sizes are in elements, offsets into the workspace and its size in bytes."""

    narrow: NarrowBackward | None  # which makes dg and both products of one reading
    sums: bool  # whether anything is made of sums, which backward_dg then merges
    dg: bool  # whether dg is made
    fused: bool  # all of that in one launch of sums_kernel
    reads_d: bool
    copy_dy: bool  # the kernels would not take these strides at speed
    dy: Matrix
    vector_dy: bool
    along: int  # threads along a row of dy
    pitch: int  # of dg
    across: int  # the pitch of its transpose, which the GEMM of dw then reads; 0 for none
    sums_grid: int
    sums_rows: int
    splits: int
    dg_grid: int
    merge_grid: int
    dg_rows: int
    totals_at: int  # of all ranks
    dg_at: int
    across_at: int
    limbs: Splits
    weight_first: bool  # dw is made before any limbs, which then lie where dg does
    workspace: int
    sums_kernel: Kernel
    dg_kernel: Kernel
    total_kernel: Kernel
    merge_kernel: Kernel | None
    x: Product | None  # dx = dg w
    weight: Product | None  # dw = dgᵀ x


def backward_plan(
    p: Matmul,
    *,
    training: bool,
    needs: tuple[str, ...],
    precision: str = "highest",
    gemm: str = "auto",
    activation: str | None = None,
    norm: bool = True,
    linear: bool = True,
    wide: bool = False,
    in_place: bool = False,
    ranks: Literal["inside", "between"] | None = None,
) -> BackwardPlan:
    """Decide a backward call, all sizes at least 1; `p` is the forward's with dy for y.

    It has two halves, of which one may be left out: `norm` goes from dy to dg and the gradients of vectors, `linear`
    from dg to the two products. Without `norm`, y stands for the dg that is given, in rows on 16 bytes, and is not
    written. `wide`: dw is float32 where the operands have 16 bits. `in_place`: dg lies where the deviations lay.
    `ranks`: where they share the batch, whether their sums come "inside" a launch, which waits for them, or "between"
    two; whatever this one needs.

    Raises ValueError that names `gemm` if the one chosen in the forward cannot serve the call.
    """
    m, n, k, dtype, device, x, w, dy, limits = p
    size = ITEMSIZE[dtype]
    dg = "x" in needs or "weight" in needs
    sums = (dg and training) or not {"scale", "gamma", "beta"}.isdisjoint(needs) or ("bias" in needs and not training)
    dg, sums = dg and norm, (sums or ranks is not None) and norm
    vector_dy = dy.aligned and dy.strides[1] == 1 and dy.strides[0] * size % 16 == 0
    copy_dy = norm and dy.strides[1] != 0 and not vector_dy
    if copy_dy:
        dy, vector_dy = in_rows(n, size), True

    pitch = round_up(n, 16 // size) if norm else dy.strides[0]
    # m, n, k of the two products; dg lies in rows of `pitch`
    rows = Matrix((pitch, 1), True)
    of_x = Matmul(m, k, n, dtype, device, rows, w.T, Matrix((k, 1), True), p.limits)
    of_weight = Matmul(n, k, m, dtype, device, rows.T, x.T, Matrix((k, 1), True), p.limits)
    dx = _product("dx", of_x, precision, gemm) if linear and "x" in needs else None
    dw = _product("dw", of_weight, precision, gemm, wide) if linear and "weight" in needs else None
    across = 0
    if dw is not None and dw.gemm == "cublas" and dtype == "float32" and precision == "high":
        # cuBLAS' TF32 takes 1.5 to 1.8 times as long where both operands run across what is summed over.
        across = round_up(m, 16 // size)
    if across and dw is not None:
        dw = dw._replace(p=dw.p._replace(x=Matrix((across, 1), True)))

    # 16 bytes of dy a thread; where `across` may be wanted, whatever `needs` leaves out, all of a warp along a row
    blocks, along = threads_along(n, 16 // size)
    narrow = narrow_backward(p, dy, activation) if gemm in ("auto", "tiled") and norm and linear and training else None
    if dtype == "float32" and precision == "high" and narrow is None:
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
    fused = sums and ranks != "between" and (dtype != "float32" or precision == "highest")
    resident = (device.with_room() if ranks else device).ctas(FUSED_CTAS)
    kept = kept_dtype(dtype, m, training=training)
    # 64 bytes of a row, or more where only then all CTAs are there at once
    fused_along = next((along for along in (4, 8) if ceil_div(n, along * 16 // size) <= resident), 16)
    cluster = 1
    if training and kept == dtype != "float64" and ranks is None and narrow is None:
        fused_along, cluster = _shared_columns(p, fused_along)
    columns = ceil_div(n, fused_along * 16 // size)  # CTAs, or clusters
    at_once = columns <= resident or cluster > 1  # several waves lose up to 5 us
    fused = fused and m <= FUSED_ROWS * cluster and (at_once if limits.fused is None else limits.fused)
    if fused or not sums:
        splits = 0
    if "weight" not in needs or fused or kept != dtype:
        narrow = None
    if narrow is not None:
        dx = dw = None
        across = 0
    totals_at = round_up(splits * 2 * n * 8, 256)  # after the sums of each split
    dg_at = round_up(totals_at + (2 * n * 8 if ranks else 0), 256)
    of_dg = m * pitch * size if dg and linear and not in_place else 0
    across_at = round_up(dg_at + (of_dg if narrow is None else narrow.parts.nbytes), 256)
    limbs_at = round_up(across_at + n * across * size, 256)
    limbs, weight_first = _split(dx, dw, limbs_at, own=norm)
    kernels = backward_kernels(dtype, kept, training=training, across=across > 0, cluster=cluster, sharing=sharing)
    sums_kernel, dg_kernel, fused_kernel, total_kernel, *merge = (with_activation(k, activation) for k in kernels)
    return BackwardPlan(
        narrow=narrow,
        sums=sums,
        dg=dg,
        fused=fused,
        reads_d=ranks is not None
        or (dg and training)
        or "scale" in needs
        or "gamma" in needs
        or activation is not None,
        copy_dy=copy_dy,
        dy=dy,
        vector_dy=vector_dy,
        along=fused_along if fused else along,
        pitch=pitch,
        across=across,
        sums_grid=device.grid(columns) * cluster if fused else device.grid(blocks * splits * sharing),
        sums_rows=sums_rows,
        splits=splits,
        dg_grid=device.grid(blocks * (row_blocks if dg else 1)),
        merge_grid=waiting_grid(blocks, device),
        dg_rows=dg_rows,
        totals_at=totals_at,
        dg_at=dg_at,
        across_at=across_at,
        limbs=limbs,
        weight_first=weight_first,
        workspace=limbs.end,
        sums_kernel=fused_kernel if fused else sums_kernel,
        dg_kernel=dg_kernel,
        total_kernel=total_kernel,
        merge_kernel=merge[0] if merge else None,
        x=dx,
        weight=dw,
    )


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
