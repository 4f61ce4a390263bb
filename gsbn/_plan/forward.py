"""A forward call, decided: its GEMM, its passes, where things lie in its workspace."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from .copies import in_rows, whole_words
from .cost import copies_us, cublas_us
from .gemm import (
    LEAST_TERMS,
    OneLaunch,
    cheapest_tile,
    cublas_obstacle,
    for_cublas,
    for_sm90,
    for_tiled,
    one_launch,
    sm90_obstacle,
    tiled,
    waiting_grid,
)
from .kernel import Kernel, with_activation
from .limbs import Splits, lay_out, split_of
from .narrow import for_narrow, narrow_forward, serves_narrow
from .problem import (
    INT32_MAX,
    ITEMSIZE,
    SPLITS,
    Device,
    Matmul,
    Matrix,
    ceil_div,
    kept_dtype,
    round_up,
    split_rows,
    threads_along,
)
from .sm90_variants import ELEMENTS, by_limbs, element_for
from .variants import THREADS, merge_statistics, normalize, normalize_fused, scale_stats

__all__ = ["SAVED_ROWS", "Keep", "Plan", "gemm_for", "plan"]

SAVED_ROWS = 9  # O-vectors that a forward keeps for its backward
STATS_CTAS, STATS_GROUP = 2, 16  # CTAs on an SM; rows that a thread holds at once
NORMALIZE_CTAS, NORMALIZE_GROUP = 4, 4
ONE_PASS_ROWS = 1024  # up to which a CTA of normalize has all rows, and makes their statistics


class Keep(NamedTuple):
    """The B x O array that a forward keeps for its backward."""

    dtype: str
    is_g: bool  # g is computed in it


class Plan(NamedTuple):
    """A forward call, decided. Sizes are in elements, offsets into the workspace and its size in bytes."""

    gemm: str
    why: str
    taken: Matmul  # the call with x, weight and y as the kernels take them, perhaps copies
    y_is_g: bool  # g is computed in y's memory and normalised in place
    vector_y: bool  # rows of y start on 16 bytes; where one launch writes them, they end there, too
    ldg: int
    along: int  # threads along a row of g
    stats_grid: int
    stats_rows: int
    splits: int
    merge_columns: int
    merge_grid: int
    normalize_grid: int
    normalize_rows: int
    affine: int
    partials: int
    g: int
    y: int  # of what is then copied to y
    workspace: int
    gemm_kernel: Kernel | None
    gemm_grid: int
    gemm_block: int
    block: int  # threads of a CTA of stats_kernel and of normalize_kernel
    one_pass: bool  # normalize_kernel makes the statistics, too
    narrow: bool  # stats_kernel and normalize_kernel make g of x, each for itself
    stats_kernel: Kernel | None  # None where normalize_kernel makes the constants itself
    merge_kernel: Kernel
    normalize_kernel: Kernel
    one: OneLaunch | None
    product: OneLaunch | None  # g alone, by forward_sm90
    limbs: Splits  # that it wants
    keep: Keep | None

    @property
    def g_of_limbs(self) -> bool:
        """Whether the tensor core makes g of limbs."""
        made = self.one or self.product
        limbs = "ELEMENT", str(ELEMENTS["limbs"])
        return by_limbs(made.element) if made else self.narrow and limbs in self.normalize_kernel.defines


@lru_cache(maxsize=1024)
def plan(
    p: Matmul,
    *,
    training: bool,
    precision: str = "highest",
    gemm: str = "auto",
    prepared: bool = False,
    saved: bool = False,
    cumulative: bool = False,
    activation: str | None = None,
    ranks: Literal["inside", "between"] | None = None,
) -> Plan:
    """Decide a forward call, all sizes at least 1; `prepared`: the weight comes with its limbs; `cumulative`: the
    running statistics are averages over all batches; `activation`: what y is put through; `ranks`: where they share the
    batch, whether their statistics come "inside" a launch, which waits for them, or "between" two.

    Raises ValueError that names `gemm` if the chosen one cannot serve the call; "auto" always serves.
    """
    if ranks == "inside":
        p = p._replace(device=p.device.with_room())
        if p.device.clusters(2) == 0:  # forward_sm90 has no other tiles for ranks
            ranks = "between"
    chosen, why = gemm_for(
        p,
        precision=precision,
        gemm=gemm,
        training=training,
        prepared=prepared,
        saved=saved,
        cumulative=cumulative,
        ranks=ranks,
    )
    m, n, k, dtype, device, _, _, y, _ = p
    g_size = ITEMSIZE["float64" if dtype == "float64" else "float32"]
    y_size = ITEMSIZE[dtype]
    fused = chosen == "sm90" and ranks != "between"
    narrow = None
    if chosen == "tiled" and p.limits.narrow is not False and serves_narrow(p, precision, training, saved):
        narrow = narrow_forward(p, precision, training=training, keeps=saved)
    taken = for_narrow(p) if narrow else _taken(p, chosen, element_for(dtype, precision), fused)

    vector_y = y.aligned and y.strides[1] == 1 and y.strides[0] * y_size % 16 == 0
    # float32 and float64: y itself, or what is kept, can hold g, one B x O array less and half the footprint in L2.
    y_is_g = vector_y and y_size == g_size and n <= y.strides[0] <= INT32_MAX and not saved and not narrow
    if chosen == "sm90" and n * y_size % 16:  # the copy engine stores whole 16 bytes, and would reach past the row
        y_is_g = False
    ldg = y.strides[0] if y_is_g else round_up(n, 16 // (y_size if saved else g_size))
    keep = None
    if saved:
        kept = kept_dtype(dtype, m, training=training)
        keep = Keep(kept, not fused and not narrow and ITEMSIZE[kept] == g_size)

    one_pass = not narrow and _one_pass(p, training, cumulative, ranks)
    parted = training and not one_pass  # statistics are made in parts, and merged
    columns = 16 // g_size  # 16 bytes of g a thread
    blocks, along = _one_pass_threads(m, n, columns, device) if one_pass else threads_along(n, columns)
    rows = THREADS // along  # of a CTA at once
    splits, stats_rows = split_rows(m, blocks, min(device.ctas(STATS_CTAS), SPLITS * blocks), STATS_GROUP * rows)
    row_blocks, normalize_rows = split_rows(m, blocks, device.ctas(NORMALIZE_CTAS), NORMALIZE_GROUP * rows)
    if one_pass:
        splits, row_blocks, normalize_rows = 1, 1, m
    stats_grid, normalize_grid = device.grid(blocks * splits), device.grid(blocks * row_blocks)
    if narrow is not None:
        splits, stats_rows, stats_grid, normalize_grid = narrow.splits, narrow.rows, narrow.grid, narrow.grid
    merge_columns, merge_grid = _merge(n, splits, device)

    affine = 0
    partials = round_up(affine + (4 * ldg * g_size if parted else 0), 256)
    g = round_up(partials + (splits * 2 * ldg * 8 if parted else 0), 256)
    workspace = g + (0 if narrow or y_is_g or (keep is not None and keep.is_g) else m * ldg * g_size)

    stats_kernel, block = scale_stats(dtype) if parted else None, THREADS
    kept_in_training = keep.dtype if keep is not None and training else None
    if one_pass:
        normalize_kernel = normalize_fused(dtype, kept_in_training)
    else:
        normalize_kernel = normalize(dtype, kept_in_training, running=not training)
    if narrow is not None:
        stats_kernel, normalize_kernel, block = narrow.stats if training else None, narrow.normalize, narrow.threads

    kernel, grid, gemm_block, one = None, 0, 0, None
    if chosen == "tiled" and narrow is None:
        kernel, grid, gemm_block = tiled(p, "forward")
    product, split = None, lay_out((), round_up(workspace, 256))
    if chosen == "sm90" and not fused:
        of_g = Matrix((ldg, 1), aligned=True, own=True)
        product = one_launch(taken._replace(y=of_g), "gemm", precision, wide=dtype != "float32")
        if by_limbs(product.element):
            wanted = [split_of("x", taken.x, m, k), split_of("weight", taken.w, n, k)]
            split = lay_out(wanted[: 1 + (product.element == "limbs")], split.end)
            workspace = split.end
    elif fused:
        one = one_launch(
            taken,
            _mode(training),
            precision,
            prepared=prepared,
            keeps=saved,
            cumulative=cumulative,
            ranks=ranks is not None,
        )
        one = one._replace(kernel=with_activation(one.kernel, activation))
        if one.parks and not whole_words(taken.y, n, y_size):
            taken = taken._replace(y=in_rows(n, y_size))
        vector_y = whole_words(taken.y, n, y_size)
        workspace = round_up(one.workspace, 256)
    of_y = workspace
    if taken.y.own:
        workspace = round_up(of_y + m * taken.y.strides[0] * y_size, 256)
    return Plan(
        gemm=chosen,
        why=why,
        taken=taken,
        y_is_g=y_is_g,
        vector_y=vector_y,
        ldg=ldg,
        along=along,
        one_pass=one_pass,
        narrow=narrow is not None,
        block=block,
        stats_grid=stats_grid,
        stats_rows=stats_rows,
        splits=splits,
        merge_columns=merge_columns,
        merge_grid=merge_grid,
        normalize_grid=normalize_grid,
        normalize_rows=normalize_rows,
        affine=affine,
        partials=partials,
        g=g,
        y=of_y,
        workspace=workspace,
        gemm_kernel=kernel,
        gemm_grid=grid,
        gemm_block=gemm_block,
        stats_kernel=stats_kernel,
        merge_kernel=merge_statistics(dtype),
        normalize_kernel=with_activation(normalize_kernel, activation),
        one=one,
        product=product,
        limbs=split,
        keep=keep,
    )


def _merge(n: int, splits: int, device: Device) -> tuple[int, int]:
    """Columns in an item of merge_statistics, and its CTAs.

    Few columns, so that many threads share one, each with no more than 8 splits; but CTAs that leave half of the SMs
    free, since they may wait for other ranks.
    """

    def fits(columns: int) -> bool:
        items = ceil_div(n, columns)
        return 2 * columns * splits > 8 * THREADS and items == waiting_grid(items, device)

    columns = 8
    while columns < THREADS and not fits(columns):
        columns *= 2
    return columns, waiting_grid(ceil_div(n, columns), device)


def _one_pass(p: Matmul, training: bool, cumulative: bool, ranks: str | None) -> bool:
    """Whether normalize makes the statistics, too, a CTA having all rows of its columns: nobody else's sums are needed,
    and no other CTA reads the count of batches."""
    return training and ranks is None and not cumulative and p.m <= ONE_PASS_ROWS and p.limits.fused is not False


def passes_over_g(p: Matmul, training: bool, cumulative: bool = False, ranks: str | None = None) -> str:
    """What follows a product of cuBLAS: "inference", "one_pass", or statistics "apart" from what makes y."""
    if not training:
        return "inference"
    return "one_pass" if _one_pass(p, training, cumulative, ranks) else "apart"


def _one_pass_threads(m: int, n: int, columns: int, device: Device) -> tuple[int, int]:
    """Blocks of columns and threads along a row where a CTA has all rows, and a thread 16 of them at most: the widest
    that keep all SMs busy, or the narrowest, 32 bytes."""
    along = 2
    while 2 * along <= min(16, STATS_GROUP * THREADS // m) and ceil_div(n, 2 * along * columns) >= device.sms:
        along *= 2
    return ceil_div(n, along * columns), along


def gemm_for(
    p: Matmul,
    *,
    precision: str,
    gemm: str,
    training: bool = True,
    prepared: bool = False,
    saved: bool = False,
    cumulative: bool = False,
    ranks: Literal["inside", "between"] | None = None,
) -> tuple[str, str]:
    """The path that serves a call of `plan`, and why; ValueError if `gemm` names one that cannot."""
    sm90 = sm90_obstacle(p, precision, training, saved)
    obstacles = {
        "sm90": sm90,
        "cublas": cublas_obstacle(p),
        "tiled": None,
    }
    if gemm != "auto":
        obstacle = obstacles[gemm]
        if obstacle is not None:
            raise ValueError(f"gemm: expected a choice that can serve this call, got {gemm!r}: {obstacle}")
        return gemm, "asked for"
    chosen, why, us = _fastest(p, precision, training, prepared, saved, cumulative, ranks, obstacles)
    narrow = p.limits.narrow is not False and serves_narrow(p, precision, training, saved)
    if narrow and (p.limits.narrow or narrow_forward(p, precision, training=training, keeps=saved).us < us):
        return "tiled", "g is made twice in less time than it is written and read"
    return chosen, why


def _fastest(
    p: Matmul,
    precision: str,
    training: bool,
    prepared: bool,
    saved: bool,
    cumulative: bool,
    ranks: Literal["inside", "between"] | None,
    obstacles: dict[str, str | None],
) -> tuple[str, str, float]:
    """Of the paths that have g in memory, or in registers: the fastest, why, and its us, 0 if none was compared."""
    if obstacles["sm90"] is obstacles["cublas"] is None:
        element = element_for(p.dtype, precision)
        theirs = for_cublas(p, element)
        passes = passes_over_g(p, training, cumulative, ranks)
        by_cublas = cublas_us(theirs, element, passes, keeps=saved) + copies_us(theirs)
        if ranks == "between" and element != "limbs":
            why = "the statistics of other ranks come between two launches, which leaves a bare GEMM"
            return "cublas", why, by_cublas
        if element == "limbs" and p.k < LEAST_TERMS:
            return "cublas", "more accurate for few features", by_cublas
        if element == "limbs" and p.n == 1:
            return "cublas", "a matrix-vector product, which it adds up in a tree", by_cublas
        taken, inside = for_sm90(p, element), ranks == "inside"
        of_call = {"prepared": prepared, "keeps": saved, "cumulative": cumulative, "ranks": inside}
        ours = cheapest_tile(taken, _mode(training), element, **of_call).us + copies_us(taken)
        if by_cublas < ours:
            return "cublas", "its GEMM cuts this shape better than tiles of one launch", by_cublas
        return "sm90", "fastest of those that serve", ours
    chosen = next(name for name, obstacle in obstacles.items() if obstacle is None)
    better = [obstacle for obstacle in obstacles.values() if obstacle is not None]
    return chosen, better[-1] if better and chosen == "tiled" else "fastest of those that serve", 0.0


def _taken(p: Matmul, gemm: str, element: str, fused: bool) -> Matmul:
    """The call as its path takes it. All but the one launch write y wherever it lies."""
    if gemm == "cublas":
        return for_cublas(p, element)
    if gemm == "tiled":
        return for_tiled(p)
    if element == "limbs" and not fused:  # which are made of columns, too
        x, w = (at if 1 in at.strides else in_rows(p.k, ITEMSIZE[p.dtype]) for at in (p.x, p.w))
        return p._replace(x=x, w=w)
    taken = for_sm90(p, element)
    return taken if fused else taken._replace(y=p.y)


def _mode(training: bool) -> str:
    return "training" if training else "inference"
