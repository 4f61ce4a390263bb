"""Every variant of every kernel that a plan may ask for: its file, its macros, its shared memory. Those of forward_sm90
are in `sm90_variants`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .kernel import ACTIVATIONS, Kernel, with_activation
from .problem import C_TYPE, ITEMSIZE
from .sm90_variants import ELEMENTS, MODES, sm90_kernels

__all__ = [
    "CLUSTERS_OF_COLUMNS",
    "NARROW_BACKWARD",
    "NARROW_CHUNKS",
    "NARROW_LIMBS_KB",
    "NARROW_SIZES",
    "RING",
    "SPLIT_WIDTHS",
    "SUMS_CLUSTER",
    "TALL_SIDE",
    "TALL_THREADS",
    "THREADS",
    "TILES",
    "add_parts",
    "backward_kernels",
    "clear",
    "copy_matrix",
    "copy_rows",
    "every_kernel",
    "fill_sm",
    "fold",
    "gemm_tiled",
    "merge_statistics",
    "narrow",
    "narrow_backward_kernel",
    "narrow_backward_sizes",
    "narrow_features",
    "narrow_product",
    "narrow_teams",
    "narrow_threads",
    "normalize",
    "normalize_fused",
    "scale_stats",
    "split_limbs",
    "split_rows_at_once",
    "tall_product",
    "tile_kernels",
]

THREADS = 256  # of a CTA of most kernels
RING = 4  # rows that a thread of backward_sums or backward_dg has on their way at once
CLUSTERS_OF_COLUMNS = (2, 4, 8)  # CTAs that share the rows of some columns in backward_fused
SUMS_CLUSTER = 8  # and in backward_sums, where they do
SPLIT_WIDTHS = (64, 128, 256, 512, 1024, 8192)  # split_limbs' WIDTH: elements of a row up to which it takes several
# By operand, how many times 64 bytes of a row of x skinny.cu's kernels take at once, which but for limbs is all of it.
NARROW_CHUNKS = {"bfloat16": (1, 2), "float16": (1, 2), "tf32": (1, 2), "limbs": (2,), "float32": (1, 2, 4)}
NARROW_LIMBS_KB = 128  # of the weight in a CTA
NARROW_SIZES = (32, 64, 128)  # features in and out that variants of narrow_backward, but for wide ones, have room for
NARROW_BACKWARD = {"bfloat16": 128, "float16": 128, "float32": 64}  # and the most for each dtype
TALL_SIDE, TALL_THREADS = 128, 512  # of tall_product: rows and columns of its block, threads
TILES = {  # gemm_tiled: BLOCK_M, BLOCK_N, THREAD_M, THREAD_N, the larger first
    "float": ((128, 128, 8, 8), (64, 64, 4, 4), (32, 32, 2, 2)),
    "double": ((64, 64, 4, 4), (32, 32, 2, 2)),
}


def every_kernel() -> Iterator[Kernel]:
    """All variants; what is compiled ahead of time."""
    for kernel in _plain_kernels():
        yield kernel
        modes = {str(mode) for name, mode in MODES.items() if name != "gemm"}
        if (
            kernel.name in ("normalize", "normalize_fused", "skinny_normalize", "skinny_backward")
            or kernel.file in ("backward", "backward_sums", "backward_fused")
            or dict(kernel.defines).get("MODE") in modes
        ):
            yield from (with_activation(kernel, activation) for activation in ACTIVATIONS)


def _plain_kernels() -> Iterator[Kernel]:
    for dtype, product in itertools.product(C_TYPE, ("forward", "dx", "dw")):
        for tile in TILES["double" if dtype == "float64" else "float"]:
            yield gemm_tiled(dtype, tile, product)
            if product == "dw" and dtype in ("float16", "bfloat16"):
                yield gemm_tiled(dtype, tile, product, wide=True)
    for dtype in C_TYPE:
        yield fold(dtype)
        wide = "float64" if dtype == "float64" else "float32"
        kept_in_training = {dtype, "float64"} if dtype in ("float16", "bfloat16") else {dtype}  # of many rows, of few
        for training, kept in [(False, wide), *((True, kept) for kept in sorted(kept_in_training))]:
            yield from backward_kernels(dtype, kept, training=training)
            yield backward_kernels(dtype, kept, training=training, sharing=SUMS_CLUSTER)[0]
            if training and kept == dtype != "float64":
                for cluster in CLUSTERS_OF_COLUMNS:
                    yield backward_kernels(dtype, kept, training=training, cluster=cluster)[2]
            if dtype == "float32":
                yield backward_kernels(dtype, kept, training=training, across=True)[1]
        yield normalize(dtype, running=True)
        for of_kept in (None, *sorted(kept_in_training)):
            yield from (normalize(dtype, of_kept), normalize_fused(dtype, of_kept))
        yield from (scale_stats(dtype), merge_statistics(dtype))
    for element in NARROW_CHUNKS:
        for features, chunks in itertools.product(narrow_features(element), NARROW_CHUNKS[element]):
            yield from (*narrow(element, features, chunks), narrow(element, features, chunks, keeps=True)[1])
            if element == "limbs":
                yield narrow_product(features, chunks)
    for dtype in NARROW_BACKWARD:
        for sizes in narrow_backward_sizes(dtype):
            yield narrow_backward_kernel(dtype, *sizes)
    yield from (tall_product(), add_parts())
    yield from map(copy_matrix, (2, 4, 8))
    yield from (copy_rows(), clear())
    yield fill_sm(0)
    yield from sm90_kernels()
    yield from map(split_limbs, SPLIT_WIDTHS)
    yield from tile_kernels()


def scale_stats(dtype: str) -> Kernel:
    """The variant of scale_stats for an x of this dtype."""
    return Kernel("scale_stats", "scale_stats", (("G_TYPE", "double" if dtype == "float64" else "float"),))


def merge_statistics(dtype: str) -> Kernel:
    """The variant of merge_statistics for an x of this dtype."""
    return scale_stats(dtype)._replace(name="merge_statistics")


def fold(dtype: str) -> Kernel:
    """The variant of fold for a weight of this dtype."""
    return Kernel("fold", "fold", (("X_TYPE", C_TYPE[dtype]),))


def normalize(dtype: str, kept: str | None = None, *, running: bool = False) -> Kernel:
    """The variant of normalize for a y of this dtype, for keeping g - m in another, or in the same; `running`: it makes
    the constants of the running statistics."""
    g_type = "double" if dtype == "float64" else "float"
    defines = (("G_TYPE", g_type), ("Y_TYPE", C_TYPE[dtype]), ("RUNNING", str(running).lower()))
    return Kernel("normalize", "normalize", defines if kept is None else (*defines, ("D_TYPE", C_TYPE[kept])))


def normalize_fused(dtype: str, kept: str | None = None) -> Kernel:
    """The variant of normalize_fused for a y of this dtype, and for keeping g - m in another, or in the same."""
    g_type = "double" if dtype == "float64" else "float"
    defines = (("G_TYPE", g_type), ("Y_TYPE", C_TYPE[dtype]))
    of_kept = () if kept is None else (("D_TYPE", C_TYPE[kept]),)
    return Kernel("normalize_fused", "normalize_fused", defines + of_kept)


def narrow(element: str, features: int, chunks: int, keeps: bool = False) -> tuple[Kernel, Kernel]:
    """The variants of skinny_stats and skinny_normalize for operands that are multiplied as `element`, one of
    NARROW_CHUNKS, and a CTA that has so many features and takes so many times 64 bytes of a row at once; `keeps`: y's
    also writes g - m."""
    number = ELEMENTS.get(element, 4)  # ELEMENT_FLOAT32 of kernels/skinny/config.cuh: IEEE arithmetic
    defines = {"ELEMENT": number, "FEATURES": features, "CHUNKS": chunks}
    limbs = element == "limbs"
    weight = 1024 * NARROW_LIMBS_KB if limbs else 64 * features * chunks
    shared = weight + 1024 * (72 if limbs else 128)  # and rings
    of_x = tuple((name, str(value)) for name, value in defines.items())
    stats = Kernel("skinny_stats", "skinny", of_x, arch="sm_90a", shared=shared)
    return stats, stats._replace(name="skinny_normalize", defines=(*of_x, ("SAVE_DEVIATIONS", "1")) if keeps else of_x)


def narrow_product(features: int, chunks: int) -> Kernel:
    """The variant of skinny_product, of limbs, for a CTA like that of skinny_stats."""
    return narrow("limbs", features, chunks)[0]._replace(name="skinny_product")


def narrow_features(element: str) -> tuple[int, ...]:
    """Features that a CTA of skinny.cu's kernels may have."""
    return (32, 64, 128) if element == "limbs" else (32, 64)


def narrow_threads(element: str, features: int) -> int:
    """Threads of a CTA of skinny_stats and skinny_normalize: CTA of kernels/skinny/config.cuh."""
    return 256 if element == "float32" or features > (64 if element == "limbs" else 32) else 384


def narrow_backward_sizes(dtype: str) -> list[tuple[int, int, int]]:
    """Features of a CTA of narrow_backward, input features, CTAs of a cluster with features of their own."""
    if dtype not in NARROW_BACKWARD:
        return []
    alone = [(n, k, 1) for n in NARROW_SIZES for k in NARROW_SIZES if max(n, k) <= NARROW_BACKWARD[dtype]]
    wide = [(256, 64, 1), (256, 128, 1), (256, 64, 2), (256, 64, 4)]
    return alone + (wide if dtype != "float32" else [])


def narrow_backward_kernel(dtype: str, features: int, inputs: int, cluster: int = 1) -> Kernel:
    """The variant of narrow_backward of this size, one of `narrow_backward_sizes`."""
    t, teams = C_TYPE[dtype], narrow_teams(dtype, features, inputs)[0]
    defines = {"T_TYPE": t, "D_TYPE": t, "G_TYPE": "float", "TRAINING": "true"}
    defines |= {"FEATURES": str(features), "INPUTS": str(inputs), "TEAMS": str(teams)}
    row = 4 * inputs if dtype == "float32" else max(128, 2 * inputs)  # bytes of the weight, as it is multiplied by
    shared = (192 if features <= 128 else 160) * 1024 + features * row  # after the rings
    alone = Kernel("skinny_backward", "skinny_backward", tuple(defines.items()), arch="sm_90a", shared=shared)
    return _in_clusters(alone, cluster)


def narrow_teams(dtype: str, features: int, inputs: int) -> tuple[int, int, int]:
    """How many teams a CTA of narrow_backward has, each with room for dw in its registers; threads and rows of each."""
    if dtype == "float32":
        return (16 if features * inputs == 1024 else 8), 32, 16
    return (1, 256, 64) if features > 128 else (4 if max(features, inputs) <= 64 else 2, 128, 64)


def tall_product() -> Kernel:
    """What makes the parts of a float32 product over many rows."""
    shared = 198 * 1024
    return Kernel("tall_product", "tall_product", (("SHARED", str(shared)),), arch="sm_90a", shared=shared)


def add_parts() -> Kernel:
    """What adds up the parts of a matrix."""
    return Kernel("reduce_split_k", "reduce_split_k", ())


def copy_matrix(itemsize: int) -> Kernel:
    """The variant of copy_matrix for elements of so many bytes."""
    word = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[itemsize]
    return Kernel("copy_matrix", "copy_matrix", (("WORD_TYPE", word),))


def copy_rows() -> Kernel:
    """What copies rows of elements of any size from and to any bytes."""
    return Kernel("copy_rows", "copy_rows", ())


def clear() -> Kernel:
    """What writes zeros."""
    return Kernel("clear", "clear", ())


def fill_sm(shared: int) -> Kernel:
    """What fills an SM with one CTA, if `shared` is all of its shared memory."""
    return Kernel("fill_sm", "fill_sm", (), arch="sm_90a", shared=shared)


def tile_kernels() -> tuple[Kernel, Kernel]:
    """What makes limbs of operands that lie across what is summed over."""
    maxima, tiles = (Kernel(name, *split_limbs(1)[1:]) for name in ("take_maxima", "split_tiles"))
    return maxima, tiles


def backward_kernels(
    dtype: str, kept: str, *, training: bool, across: bool = False, cluster: int = 1, sharing: int = 1
) -> tuple[Kernel, ...]:
    """The variants of backward_sums, _dg and _fused, of sum_features and, in training, of merge_sums, for a dy of this
    dtype and what was kept.

    `across`: backward_dg writes dg's transpose, too; `cluster`: how many CTAs share columns in backward_fused, and
    `sharing` in backward_sums.
    """
    t, d = C_TYPE[dtype], C_TYPE[kept]
    g = "double" if d == "double" else "float"
    defines = (("T_TYPE", t), ("D_TYPE", d), ("G_TYPE", g), ("TRAINING", str(training).lower()))
    names = ("backward_dg", "sum_features", "merge_sums")[: 2 + training]
    dg, *others = (Kernel(name, "backward", defines) for name in names)
    sums = _in_clusters(Kernel("backward_sums", "backward_sums", defines), sharing)
    shared = _shared_of_fused(dtype, kept, cluster)
    fused = Kernel("backward_fused", "backward_fused", (*defines, ("SHARED", str(shared))), shared=shared)
    if across:
        tile = 4 * 32 * (RING * THREADS // 32 + 1)  # float32 columns of a warp by rows of a CTA's ring, padded by one
        dg = dg._replace(defines=(*defines, ("TRANSPOSED", "true")), shared=4 * tile)
    return sums, dg, _in_clusters(fused, cluster), *others


def _in_clusters(kernel: Kernel, cluster: int) -> Kernel:
    if cluster == 1:
        return kernel
    return kernel._replace(defines=(*kernel.defines, ("CLUSTER", str(cluster))), arch="sm_90a")


def _shared_of_fused(dtype: str, kept: str, cluster: int) -> int:
    """Bytes of shared memory of a CTA of backward_fused: rings, sums in float64, coefficients, its cluster's sums."""
    columns, chunks = 16 // ITEMSIZE[dtype], 1 + ITEMSIZE[kept] // ITEMSIZE[dtype]  # of a thread, 16 bytes each
    rings = {2: RING, 3: 2, 5: 1}[chunks] * chunks * 16 * THREADS
    sums = 2 * 8 * (columns * (THREADS // 2 + 16 // columns) + THREADS)
    of_cluster = 16 * (1 if cluster == 1 else cluster * 16 * columns) + 16
    nbytes = rings + sums + 4 * 16 * columns * max(4, ITEMSIZE[kept] * (kept == "float64")) + of_cluster
    return nbytes + -nbytes % 64  # as coefficients lie


def split_limbs(k: int) -> Kernel:
    """The variant of split_limbs for rows of k elements."""
    return Kernel("split_limbs", "split_limbs", (("WIDTH", str(_split_width(k))),), arch="sm_90a")


def split_rows_at_once(k: int) -> int:
    """Rows of k elements that a CTA of split_limbs takes at once."""
    return SPLIT_WIDTHS[-1] // _split_width(k)


def _split_width(k: int) -> int:
    return next((width for width in SPLIT_WIDTHS if k <= width), SPLIT_WIDTHS[-1])


def gemm_tiled(dtype: str, tile: tuple[int, int, int, int], product: str, *, wide: bool = False) -> Kernel:
    """The variant of gemm_tiled for "forward" (g = x wᵀ), "dx" (dg w) or "dw" (dgᵀ x); `wide`: a float32 result."""
    t = C_TYPE[dtype]
    names = ("BLOCK_M", "BLOCK_N", "THREAD_M", "THREAD_N")
    defines = [("X_TYPE", t), ("G_TYPE", "double" if t == "double" else "float")]
    defines += zip(names, map(str, tile), strict=True)
    if product != "forward":
        defines += [
            ("C_TYPE", "float" if wide else t),
            ("X_MN_MAJOR", str(product == "dw").lower()),
            ("W_MN_MAJOR", "true"),
        ]
    return Kernel("gemm_tiled", "gemm_tiled", tuple(defines))
