"""Decides how a backward divides dy among CTAs, and whether one launch does all passes."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from .copies import vector_rows
from .gemm import waiting_grid
from .problem import ITEMSIZE, SPLITS, Matmul, ceil_div, deviations_dtype, row_threads_for, split_rows
from .skinny import Sums
from .sources import Kernel, with_activation, with_ghosts, with_renorm
from .variants import COLUMN_CLUSTERS, GHOST_KERNELS, ROW_STAGES, SUMS_CLUSTERS, THREADS, backward_kernels

SUMS_CTAS, DG_CTAS = 2, 2  # CTAs per SM of backward_sums and of backward_dg
# The most threads along a row of a 16-bit dy: the first number up to FEW_ELEMENTS elements of dy, the second beyond.
# A whole warp leaves more columns of the last block empty, and was up to 10 % slower.
ROW_THREADS, FEW_ELEMENTS = (8, 16), 8_000_000
SHARED_CTAS = 32  # backward_sums uses clusters if a block of columns has more CTAs than this
# With one block of columns and up to so many rows, merging the splits costs more than the SMs that large clusters leave
# without work.
ROWS_OF_LARGE_CLUSTERS = 2**17
FUSED_ROWS, FUSED_CTAS = 1024, 2  # backward_fused does all passes up to these rows per CTA and CTAs per SM
# A cluster of backward_fused shares columns if dy has at most so many elements. The second limit is for two CTAs per
# SM: one of them loads while the other waits for its cluster.
SHARED_ELEMENTS = 6_000_000, 20_000_000


class Sharing(NamedTuple):
    """Where a cluster of backward_fused shares columns. The limits were measured (docs/history/backward.md)."""

    least: int  # rows of a CTA
    most: int  # the same, with one CTA per SM; with two it is FUSED_ROWS
    most_off_words: int  # the same, if rows of dy end off 16 bytes: the last columns are then loaded more slowly
    per_cta: int  # each CTA of the cluster costs as much as so many words of 16 bytes of dy


SHARING = {2: Sharing(32, 704, 352, 70), 4: Sharing(128, FUSED_ROWS, FUSED_ROWS, 0)}  # by the bytes of an element


class Passes(NamedTuple):
    """The kernels of the passes, each with its grid."""

    fused: bool  # `sums` is backward_fused, which also writes dg
    sums: tuple[Kernel, int]
    merge: tuple[Kernel, int] | None  # merges the ranks' sums, in training
    dg: tuple[Kernel, int]
    total: tuple[Kernel, int]  # adds up the gradient of a scale of one element
    splits: int  # clusters of backward_sums that share a column block
    fields: dict[str, int]  # the fields of the kernels' structs that say how dy is divided


def cut_passes(
    p: Matmul, *, training: bool, sums: bool, dg: bool, skinny: bool, may_transpose: bool, transposed: bool,
    activation: Any, where: str | None, identity: bool, renorm: bool, ghosts: bool, remat: Sums | None,
) -> Passes:  # fmt: skip
    """Divide dy, whose layout is p.y, among CTAs, and return the kernels of the passes.

    `may_transpose`: the call writes dg's transpose, or would with other `needs`; `transposed`: it writes it. `where`:
    the sums of other ranks arrive "inside" a launch or "between" two launches. `identity`: the layer has no norm, and y
    takes the place of the deviations. `renorm`: the forward used batch renormalisation. `ghosts`: p has the rows of one
    ghost batch and the features of all ghost batches. `remat`: this launch computes the sums, and g again.
    """
    m, n, dtype, device, limits, size = p.m, p.n, p.dtype, p.device, p.limits, ITEMSIZE[p.dtype]
    # A thread takes 16 bytes of a row of dy. If dg's transpose may be needed, a warp takes a row. The choice does not
    # depend on which gradients are wanted, so that each gradient always has the same bits.
    blocks, row_threads = row_threads_for(n, 16 // size)
    if size == 2:
        row_threads = min(row_threads, ROW_THREADS[m * n > FEW_ELEMENTS])
        blocks = ceil_div(n, row_threads * 16 // size)
    if may_transpose and not skinny:
        blocks, row_threads = ceil_div(n, 128), 32
    step = ROW_STAGES * (THREADS // row_threads)
    # threads that merge a column (merge_splits)
    shares = 1 if dtype == "float64" else THREADS * size // (16 * row_threads)
    # If there are few blocks, clusters share the rows, so that few splits must be merged.
    sharing = SUMS_CLUSTERS[blocks == 1 and m <= ROWS_OF_LARGE_CLUSTERS]
    clusters = device.clusters(sharing) * device.ctas(SUMS_CTAS) // device.sms // blocks
    if sharing * clusters <= SHARED_CTAS:
        sharing = 1
    alone = min(device.ctas(SUMS_CTAS), SPLITS * shares * blocks)
    splits, sums_rows = split_rows(m, blocks, alone if sharing == 1 else sharing * clusters * blocks, step)
    splits = ceil_div(splits, sharing)
    row_blocks, dg_rows = split_rows(m, blocks, device.ctas(DG_CTAS), step)
    # In a fused launch, one CTA or cluster has all rows of its columns, and needs no sums of others.
    fused = sums and where != "between" and not may_transpose
    resident = (device.with_room() if where else device).ctas(FUSED_CTAS)
    saved_dtype = dtype if identity else deviations_dtype(dtype, m, training=training)
    if remat is not None:
        saved_dtype, fused = "float32", False
    # A CTA takes 64 bytes of a row. It takes more if all CTAs can be resident at once only then.
    fused_row_threads = next((t for t in (4, 8) if ceil_div(n, t * 16 // size) <= resident), 16)
    cluster = 1
    if training and saved_dtype == dtype != "float64" and where is None and not skinny:
        fused_row_threads, cluster = _shared_columns(p, fused_row_threads)
    columns = ceil_div(n, fused_row_threads * 16 // size)  # CTAs, or clusters
    at_once = columns <= resident or cluster > 1  # several waves take up to 5 us longer
    fused = fused and m <= FUSED_ROWS * cluster and (at_once if limits.fused is None else limits.fused)
    if fused or not sums:
        splits = 0
    kernels = backward_kernels(
        dtype, saved_dtype, training=training, transposed=transposed and not skinny, cluster=cluster,
        sharing=sharing, identity=identity,
    )  # fmt: skip
    kernels = tuple(with_renorm(k, renorm and k.name not in ("backward_sums", "sum_features")) for k in kernels)
    kernels = tuple(with_ghosts(k, ghosts and k.name in GHOST_KERNELS) for k in kernels)
    of_sums, of_dg, of_all, total, *merge = (with_activation(kernel, activation) for kernel in kernels)
    launch = (of_all, device.grid(columns) * cluster) if fused else (of_sums, device.grid(blocks * splits * sharing))
    if remat is not None:
        launch, splits, sums_rows = (remat.kernel, remat.ctas), remat.splits, remat.rows
    fields = {"row_threads": fused_row_threads if fused else row_threads, "sums_rows": sums_rows, "dg_rows": dg_rows}
    return Passes(
        fused=fused,
        sums=launch,
        merge=(merge[0], waiting_grid(blocks, device)) if merge else None,
        dg=(of_dg, device.grid(blocks * (row_blocks if dg else 1))),
        total=(total, 1),
        splits=splits,
        fields=fields | {"dy_row": p.y.strides[0], "dy_col": p.y.strides[1], "vector_dy": vector_rows(p.y, size)},
    )


def _shared_columns(p: Matmul, row_threads: int) -> tuple[int, int]:
    """Return row_threads of backward_fused, and how many CTAs of a cluster share the rows of its columns.

    Of the choices whose CTAs are all resident at once, it takes the one with the least work per CTA. `row_threads` is
    the choice without clusters.
    """
    m, n, size, asked = p.m, p.n, ITEMSIZE[p.dtype], p.limits.cluster
    sharing, off_words = SHARING[size], n * size % 16 > 0
    found = []
    for cluster, wide in itertools.product(COLUMN_CLUSTERS, (4, 8, 16)):
        blocks, rows = ceil_div(n, wide * 16 // size), ceil_div(m, cluster)
        resident = p.device.clusters(cluster) * p.device.ctas(FUSED_CTAS) // p.device.sms
        two_per_sm = blocks * cluster > p.device.sms
        most = sharing.most_off_words if off_words else FUSED_ROWS if two_per_sm else sharing.most
        wins = sharing.least <= rows <= most and m * n <= SHARED_ELEMENTS[two_per_sm]
        if blocks <= resident and rows <= FUSED_ROWS and (wins if asked is None else asked == cluster):
            found.append((rows * wide + sharing.per_cta * cluster, cluster, wide))
    work, cluster, wide = min(found, default=(0, 0, 0))
    alone = asked is None and m <= FUSED_ROWS and m * row_threads <= work
    return (row_threads, 1) if alone or not found else (wide, cluster)
