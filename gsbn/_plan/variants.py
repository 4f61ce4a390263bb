"""Lists all variants of the kernels that a plan may launch, with their files, macros and shared memory.

`sm90_variants` lists those of forward_sm90.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from .problem import C_TYPE, ITEMSIZE
from .sm90_variants import ARCH, MODES, sm90_kernels
from .sources import Constants, Kernel, with_activation, with_ghosts, with_renorm

THREADS = Constants("normalize/features.cuh", {})["THREADS"]  # threads of a CTA of most kernels
# stages of the pipeline of a thread of backward_sums or backward_dg; a stage has one row
ROW_STAGES = Constants("backward/rows.cuh", {})["STAGES"]
COLUMN_CLUSTERS = (2, 4, 8)  # CTAs of a cluster that shares the rows of some columns in backward_fused
SUMS_CLUSTERS = (2, 8)  # the same in backward_sums, if it uses clusters
SPLIT_WIDTHS = (64, 128, 256, 512, 1024, 8192)  # WIDTH of split_limbs: the most elements of a row
# By operand: the chunks of 64 bytes of a row of x that skinny.cu's kernels take at once. Except with limbs, they take
# the whole row.
SKINNY_CHUNKS = {"bfloat16": (1, 2), "float16": (1, 2), "tf32": (1, 2), "limbs": (2,), "float32": (1, 2, 4)}
SKINNY_SUMS_CLUSTER = 2  # CTAs of a cluster of skinny_sums, so that half as many splits must be merged
SKINNY_SIZES = (32, 64, 128)  # features and input features for which variants of skinny_backward have room
SKINNY_BACKWARD = {"bfloat16": 128, "float16": 128, "float32": 64}  # the largest of these sizes, without wide variants
_TALL = Constants("tall_product.cu", {})
TALL_SIDE, TALL_THREADS = _TALL["SIDE"], _TALL["THREADS"]  # rows and columns of a CTA's block; threads
_DUAL = Constants("dual_gemm.cu", {})
DUAL_ROWS, DUAL_CLUSTERS = (32, 64, 128), (1, 2, 4, 8)  # variants of dual_gemm: its ROWS, and CTAs of a cluster
DUAL_INPUTS, DUAL_STEP, DUAL_THREADS = _DUAL["INPUTS"], _DUAL["STEP"], _DUAL["THREADS"]
GHOST_KERNELS = ("backward_sums", "backward_dg", "backward_fused")  # they have variants for ghost batches
GHOST_FEATURES = Constants("ghosts.cu", {})["LANES"]  # features of an item of track_ghosts and of sum_ghosts
FEW_FEATURES = 8  # columns of the tile for few features
TILES: dict[
    str, tuple[tuple[int, int, int, int], ...]
] = {  # gemm_tiled: BLOCK_M, BLOCK_N, THREAD_M, THREAD_N, the larger first
    "float": ((128, 128, 8, 8), (64, 64, 4, 4), (32, 32, 2, 2)),
    "double": ((64, 64, 4, 4), (32, 32, 2, 2), (128, FEW_FEATURES, 4, 1)),
}


def every_kernel(activations: Collection[Any] = ("relu",)) -> Iterator[Kernel]:
    """Yield all variants without an activation, and those with these activations, to be compiled ahead of time."""
    modes = {str(mode) for name, mode in MODES.items() if name != "gemm"}
    for plain in _plain_kernels():
        activates = (
            plain.file == "activate"
            or plain.name in ("normalize", "normalize_fused", "skinny_normalize", "skinny_backward", "skinny_sums")
            or plain.file in ("backward", "backward_sums", "backward_fused", "channels_backward")
            or dict(plain.defines).get("MODE") in modes
        )
        for kernel in (plain, *[with_renorm(plain)] * _renorms(plain), *[with_ghosts(plain)] * _has_ghosts(plain)):
            yield kernel
            if activates:
                yield from (with_activation(kernel, activation) for activation in activations)


def _renorms(kernel: Kernel) -> bool:
    """Return whether a kernel has a variant for batch renormalisation.

    It has one if it makes the constants of y or stores the gradient of gamma.
    """
    if _rematerializes(kernel):
        return False
    trains = dict(kernel.defines).get("TRAINING") == "true"
    makes = kernel.name in ("merge_statistics", "normalize_fused")
    return makes or (trains and kernel.name in ("backward_dg", "backward_fused", "merge_sums", "skinny_backward"))


def _rematerializes(kernel: Kernel) -> bool:
    """Return whether a kernel is for a backward that computes g again: 16-bit deviations are then float32."""
    defines = dict(kernel.defines)
    of_16_bits = defines.get("T_TYPE") in (C_TYPE["float16"], C_TYPE["bfloat16"])
    return of_16_bits and defines.get("TRAINING") == "true" and defines["D_TYPE"] == "float"


def _has_ghosts(kernel: Kernel) -> bool:
    """Return whether a kernel has a variant for ghost batches.

    It has one if it is a pass over g or dy in training that does not make g itself.
    """
    defines = dict(kernel.defines)
    if _rematerializes(kernel) or "RESIDUAL" in defines:
        return False
    statistics = kernel.file == "scale_stats" or kernel.name == "normalize_fused"
    backward = kernel.name in GHOST_KERNELS and defines["TRAINING"] == "true"
    return statistics or backward or defines.get("RUNNING") == "false"


def _plain_kernels() -> Iterator[Kernel]:
    for dtype, product in itertools.product(C_TYPE, ("forward", "dx", "dw")):
        for tile in TILES["double" if dtype == "float64" else "float"]:
            yield gemm_tiled(dtype, tile, product)
            if product == "dw" and dtype in ("float16", "bfloat16"):
                yield gemm_tiled(dtype, tile, product, wide=True)
    for dtype in C_TYPE:
        yield from (fold(dtype), activate(dtype)[0], activate(dtype, residual=True)[0], activate_backward(dtype)[0])
        wide = "float64" if dtype == "float64" else "float32"
        saved_in_training = {dtype, "float64"} if dtype in ("float16", "bfloat16") else {dtype}  # many rows, few rows
        for training, d_dtype in [(False, wide), *((True, d_dtype) for d_dtype in sorted(saved_in_training))]:
            yield from backward_kernels(dtype, d_dtype, training=training)
            yield from (
                backward_kernels(dtype, d_dtype, training=training, sharing=sharing)[0] for sharing in SUMS_CLUSTERS
            )
            if training and d_dtype == dtype:
                for sharing in (1, *SUMS_CLUSTERS):
                    yield making_residual_gradient(backward_kernels(dtype, dtype, training=True, sharing=sharing)[0])
            if training and d_dtype == dtype and remat_sizes(dtype):
                _, of_dg, _, total, _ = backward_kernels(dtype, "float32", training=True)
                yield from (of_dg, total)
            if training and d_dtype == dtype != "float64":
                for cluster in COLUMN_CLUSTERS:
                    yield backward_kernels(dtype, d_dtype, training=training, cluster=cluster)[2]
            if dtype == "float32":
                yield backward_kernels(dtype, d_dtype, training=training, transposed=True)[1]
        sums, dg, fused, _ = backward_kernels(dtype, dtype, training=False, identity=True)
        yield from (sums, dg, fused)
        for sharing in SUMS_CLUSTERS:
            yield backward_kernels(dtype, dtype, training=False, identity=True, sharing=sharing)[0]
        if dtype == "float32":
            yield backward_kernels(dtype, dtype, training=False, identity=True, transposed=True)[1]
        yield normalize(dtype, running=True)
        for maybe_saved in (None, *sorted(saved_in_training)):
            yield from (normalize(dtype, maybe_saved), normalize_fused(dtype, maybe_saved))
        yield from (scale_stats(dtype), merge_statistics(dtype))
    for element in SKINNY_CHUNKS:
        for features, chunks in itertools.product(skinny_features(element), SKINNY_CHUNKS[element]):
            yield skinny(element, features, chunks)[0]
            for any_rows in (False, True):
                for saves in (False, True):
                    yield skinny(element, features, chunks, saves=saves, any_rows=any_rows)[1]
                if element == "limbs":
                    yield skinny_product(features, chunks, any_rows)
    for dtype in SKINNY_BACKWARD:
        for sizes in skinny_backward_sizes(dtype):
            yield skinny_backward_kernel(dtype, *sizes)
        for features, inputs, cluster in remat_sizes(dtype):
            yield skinny_backward_kernel(dtype, features, inputs, cluster, remat=True)
            if cluster == 1 and features <= 128:
                yield from (skinny_sums(dtype, features, inputs, sharing) for sharing in (1, SKINNY_SUMS_CLUSTER))
    yield from (tall_product(), reduce_split_k())
    yield from itertools.chain.from_iterable(map(channels_backward, ("bfloat16", "float16")))
    yield from itertools.starmap(dual_gemm, itertools.product(("bfloat16", "float16"), DUAL_ROWS, DUAL_CLUSTERS))
    casts = [pair for dtype in ("float16", "bfloat16") for pair in ((dtype, "float32"), ("float32", dtype))]
    for types in (*((dtype, dtype) for dtype in ("float16", "float32", "float64")), *casts):
        for turned, *vectors in itertools.product((True, False), repeat=3):
            if turned or types not in casts:
                yield copy_matrix(*types, turned=turned, vectors=(vectors[0], vectors[1]))
    yield from (copy_rows(), clear(), track_ghosts(), sum_ghosts())
    yield fill_sm(0)
    yield from sm90_kernels()
    yield from map(split_limbs, SPLIT_WIDTHS)
    yield from tile_kernels()


def scale_stats(dtype: str) -> Kernel:
    return Kernel("scale_stats", "scale_stats", (("G_TYPE", "double" if dtype == "float64" else "float"),))


def merge_statistics(dtype: str) -> Kernel:
    return scale_stats(dtype)._replace(name="merge_statistics")


def fold(dtype: str) -> Kernel:
    return Kernel("fold", "fold", (("X_TYPE", C_TYPE[dtype]),))


def activate(dtype: str, *, residual: bool = False) -> tuple[Kernel, int]:
    """Return the variant of activate for this dtype, and the elements of an item. `residual`: it adds a residual."""
    defines = (("T_TYPE", C_TYPE[dtype]), *[("RESIDUAL", "1")] * residual)
    return Kernel("activate", "activate", defines), Constants("activate.cu", dict(defines))["ITEM"]


def activate_backward(dtype: str) -> tuple[Kernel, int]:
    """Return the same for activate_backward."""
    kernel, item = activate(dtype)
    return kernel._replace(name="activate_backward"), item


def normalize(dtype: str, d_dtype: str | None = None, *, running: bool = False) -> Kernel:
    """Return the variant of normalize for a y of `dtype` that saves deviations in `d_dtype`, or saves none.

    `running`: the constants come from the running statistics.
    """
    g_type = "double" if dtype == "float64" else "float"
    defines = (("G_TYPE", g_type), ("Y_TYPE", C_TYPE[dtype]), ("RUNNING", str(running).lower()))
    return Kernel("normalize", "normalize", defines if d_dtype is None else (*defines, ("D_TYPE", C_TYPE[d_dtype])))


def normalize_fused(dtype: str, d_dtype: str | None = None) -> Kernel:
    """Return the variant of normalize_fused for a y of `dtype` that saves deviations in `d_dtype`, or saves none."""
    g_type = "double" if dtype == "float64" else "float"
    defines = (("G_TYPE", g_type), ("Y_TYPE", C_TYPE[dtype]))
    saves = () if d_dtype is None else (("D_TYPE", C_TYPE[d_dtype]),)
    return Kernel("normalize_fused", "normalize_fused", defines + saves)


@cache
def skinny(
    element: str, features: int, chunks: int, *, saves: bool = False, any_rows: bool = False
) -> tuple[Kernel, Kernel]:
    """Return the variants of skinny_stats and skinny_normalize.

    They multiply operands as `element`, one of SKINNY_CHUNKS. A CTA has `features` features, and takes `chunks` chunks
    of 64 bytes of a row at once. `saves`: skinny_normalize also writes the deviations. `any_rows`: rows of y are not
    `whole_words`.
    """
    defines = _skinny_defines(element, features, chunks)
    shared = Constants("skinny/config.cuh", dict(defines))["SHARED_BYTES"]
    stats = Kernel("skinny_stats", "skinny", defines, arch=ARCH, shared=shared)
    ways = {"SAVE_DEVIATIONS": saves, "ANY_ROWS": any_rows}
    defines += tuple((name, "1") for name, wanted in ways.items() if wanted)
    return stats, stats._replace(name="skinny_normalize", defines=defines)


def skinny_product(features: int, chunks: int, any_rows: bool = False) -> Kernel:
    """Return the variant of skinny_product, which multiplies limbs, for a CTA like that of skinny_stats.

    `any_rows`: rows of g are not `whole_words`.
    """
    _, kernel = skinny("limbs", features, chunks, any_rows=any_rows)
    return kernel._replace(name="skinny_product", file="skinny_product")


def skinny_features(element: str) -> tuple[int, ...]:
    """Return the numbers of features that a CTA of skinny.cu's kernels may have."""
    return (32, 64, 128) if element == "limbs" else (32, 64)


@cache
def skinny_sizes(element: str, features: int, chunks: int) -> Constants:
    """Return the constants of skinny/config.cuh for such a CTA.

    CTA is its number of threads, TILE_ROWS the rows of a tile, BLOCK_ROWS the rows of all tiles that it has at once.
    """
    return Constants("skinny/config.cuh", dict(_skinny_defines(element, features, chunks)))


def _skinny_defines(element: str, features: int, chunks: int) -> tuple[tuple[str, str], ...]:
    return ("ELEMENT", f"ELEMENT_{element.upper()}"), ("FEATURES", str(features)), ("CHUNKS", str(chunks))


def skinny_backward_sizes(dtype: str) -> list[tuple[int, int, int]]:
    """Return the sizes of skinny_backward: features of a CTA, input features, CTAs of a cluster that share features."""
    if dtype not in SKINNY_BACKWARD:
        return []
    alone = [(n, k, 1) for n in SKINNY_SIZES for k in SKINNY_SIZES if max(n, k) <= SKINNY_BACKWARD[dtype]]
    wide = [(256, 64, 1), (256, 128, 1), (256, 64, 2), (256, 64, 4)]
    return alone + (wide if dtype != "float32" else [])


def remat_sizes(dtype: str) -> list[tuple[int, int, int]]:
    """Return the sizes, as `skinny_backward_sizes`, for which there are kernels that compute g again."""
    sizes = [size for size in skinny_backward_sizes(dtype) if dtype != "float32" and size[0] >= 64]
    return sizes + ([(256, 128, 2), (256, 128, 4)] if sizes else [])


@cache
def skinny_backward_kernel(dtype: str, features: int, inputs: int, cluster: int = 1, remat: bool = False) -> Kernel:
    """Return the variant of skinny_backward of this size, one of `skinny_backward_sizes`.

    `remat`: it computes g again, and the size is one of `remat_sizes`.
    """
    teams = _teams(dtype, features, inputs, remat)
    return _in_clusters(_of_teams("skinny_backward", dtype, features, inputs, teams, remat), cluster)


@cache
def skinny_sums(dtype: str, features: int, inputs: int, cluster: int) -> Kernel:
    """Return the variant of skinny_sums for CTAs like those of skinny_backward. `cluster`: how many share a split."""
    teams = 3 if features * inputs == 128 * 128 else 4  # as many as have room for two tiles
    return _in_clusters(_of_teams("skinny_sums", dtype, features, inputs, teams, True), cluster)


def _of_teams(name: str, dtype: str, features: int, inputs: int, teams: int, remat: bool) -> Kernel:
    t = C_TYPE[dtype]
    defines = {"T_TYPE": t, "D_TYPE": "float" if remat else t, "G_TYPE": "float", "TRAINING": "true"}
    defines |= {"FEATURES": str(features), "INPUTS": str(inputs), "TEAMS": str(teams)}
    defines |= {"REMAT": "1"} if remat else {}
    shared = Constants("skinny/pipeline.cuh", defines)["SHARED_BYTES"]
    return Kernel(name, name, tuple(defines.items()), arch=ARCH, shared=shared)


def _teams(dtype: str, features: int, inputs: int, remat: bool) -> int:
    """Return how many teams of a CTA of skinny_backward multiply: each of them has dw in registers.

    `remat`: it computes g again. It then has no tiles of deviations, so more teams have room for two tiles.
    """
    if dtype == "float32":
        return 16 if features * inputs == 1024 else 8
    if features == 128 and remat:
        return {32: 4, 64: 3, 128: 2}[inputs]
    return 1 if features > 128 else 4 if max(features, inputs) <= 64 else 2


@cache
def skinny_threads(kernel: Kernel) -> tuple[int, int, int]:
    """Return how many teams of a CTA multiply, the threads of the CTA, and the rows of a tile.

    `kernel` is a variant of skinny_backward or skinny_sums.
    """
    sizes = Constants("skinny/products.cuh", dict(kernel.defines))
    return int(dict(kernel.defines)["TEAMS"]), sizes["THREADS_HERE"], sizes["ROWS"]


def tall_product() -> Kernel:
    """Return the kernel that computes the partial products of a float32 product over many rows."""
    return Kernel("tall_product", "tall_product", (), arch=ARCH, shared=_TALL["SHARED_BYTES"])


def dual_gemm(dtype: str, rows: int, cluster: int) -> Kernel:
    """Return the variant of dual_gemm for up to so many rows, one of DUAL_ROWS, and a cluster of DUAL_CLUSTERS."""
    defines = (("ELEMENT", f"ELEMENT_{dtype.upper()}"), ("ROWS", str(rows)))
    shared = Constants("dual_gemm.cu", dict(defines))["SHARED_BYTES"]
    return _in_clusters(Kernel("dual_gemm", "dual_gemm", defines, arch=ARCH, shared=shared), cluster)


def reduce_split_k() -> Kernel:
    return Kernel("reduce_split_k", "reduce_split_k", ())


def copied_at_once(dtype: str) -> int:
    """Return the elements of a vector that copy_matrix writes; of those that it reads there are as many."""
    return min(4, 16 // ITEMSIZE[dtype])


def copy_matrix(dtype: str, to_dtype: str, *, turned: bool, vectors: tuple[bool, bool]) -> Kernel:
    """Return the kernel that copies matrices of one dtype to another: float32 and a 16-bit dtype, or any to itself.

    `turned`: it reads along columns, and writes along rows. `vectors`: whether it reads and writes vectors.
    """
    words = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
    types = [words[ITEMSIZE[dtype]]] * 2 if dtype == to_dtype else [C_TYPE[dtype], C_TYPE[to_dtype]]
    macros = ("FROM_TYPE", "TO_TYPE", "TURNED", "FROM_VECTOR", "TO_VECTOR", "EACH")
    values = (*types, *(str(int(flag)) for flag in (turned, *vectors)), str(copied_at_once(to_dtype)))
    return Kernel("copy_matrix", "copy_matrix", tuple(zip(macros, values, strict=True)))


def copy_rows() -> Kernel:
    """Return the kernel that copies rows of elements of any size, from and to any alignment."""
    return Kernel("copy_rows", "copy_rows", ())


def clear() -> Kernel:
    return Kernel("clear", "clear", ())


def track_ghosts() -> Kernel:
    return Kernel("track_ghosts", "ghosts", ())


def sum_ghosts() -> Kernel:
    return Kernel("sum_ghosts", "ghosts", ())


def fill_sm(shared: int) -> Kernel:
    """Return the kernel that fills an SM with one CTA, if `shared` is all of the SM's shared memory."""
    return Kernel("fill_sm", "fill_sm", (), arch=ARCH, shared=shared)


def tile_kernels() -> tuple[Kernel, Kernel]:
    """Return the two kernels that make limbs of MN-major operands: take_maxima and split_tiles."""
    maxima, tiles = (Kernel(name, *split_limbs(1)[1:]) for name in ("take_maxima", "split_tiles"))
    return maxima, tiles


@cache
def backward_kernels(
    dtype: str, d_dtype: str, *, training: bool, transposed: bool = False, cluster: int = 1, sharing: int = 1,
    identity: bool = False,
) -> tuple[Kernel, ...]:  # fmt: skip
    """Return the variants of the backward's passes for a dy of `dtype` and deviations of `d_dtype`.

    They are backward_sums, backward_dg, backward_fused, sum_features and, in training, merge_sums. `transposed`:
    backward_dg also writes dg's transpose. `cluster`, `sharing`: CTAs of a cluster of backward_fused, and of
    backward_sums. `identity`: the layer has no norm.
    """
    t, d = C_TYPE[dtype], C_TYPE[d_dtype]
    g = "double" if d == "double" else "float"
    defines: tuple[tuple[str, str], ...] = ("T_TYPE", t), ("D_TYPE", d), ("G_TYPE", g)
    defines += (("TRAINING", str(training).lower()), *[("IDENTITY", "true")] * identity)
    names = ("backward_dg", "sum_features", "merge_sums")[: 2 + training]
    dg, *others = (Kernel(name, "backward", defines) for name in names)
    sums = _in_clusters(Kernel("backward_sums", "backward_sums", defines), sharing)
    fused = _in_clusters(Kernel("backward_fused", "backward_fused", defines), cluster)
    sums, fused = (k._replace(shared=Constants(f"{k.file}.cu", dict(k.defines))["SHARED_BYTES"]) for k in (sums, fused))
    if transposed:
        dg = dg._replace(defines=(*defines, ("TRANSPOSED", "true")))
        dg = dg._replace(shared=Constants("backward.cu", dict(dg.defines))["TILE_BYTES"])
    return sums, dg, fused, *others


def making_residual_gradient(sums: Kernel) -> Kernel:
    """Return the variant of backward_sums that also makes the gradient of a residual."""
    made = sums._replace(defines=(*sums.defines, ("RESIDUAL", "1")))
    return made._replace(shared=Constants(f"{made.file}.cu", dict(made.defines))["SHARED_BYTES"])


def channels_backward(dtype: str) -> tuple[Kernel, Kernel]:
    """Return channel_sums and channel_dg, for a dy and deviations of `dtype`."""
    t = C_TYPE[dtype]
    defines = (("T_TYPE", t), ("D_TYPE", t), ("G_TYPE", "float"), ("TRAINING", "true"), ("CHANNELS_FIRST", "1"))
    sums, dg = (Kernel(name, "channels_backward", defines, arch=ARCH) for name in ("channel_sums", "channel_dg"))
    return sums, dg


def column_sums(kernel: Kernel) -> tuple[int, int]:
    """Return how many sums of each column backward_sums writes, and how many numbers per column a rank posts."""
    constants = Constants("backward/columns.cuh", dict(kernel.defines))
    return constants["SUMS"], constants["POSTS"]


def _in_clusters(kernel: Kernel, cluster: int) -> Kernel:
    if cluster == 1:
        return kernel
    return kernel._replace(defines=(*kernel.defines, ("CLUSTER", str(cluster))), arch=ARCH)


def split_limbs(k: int) -> Kernel:
    return Kernel("split_limbs", "split_limbs", (("WIDTH", str(_split_width(k))),), arch=ARCH)


def split_rows_at_once(k: int) -> int:
    """Return how many rows of k elements a CTA of split_limbs takes at once."""
    return _rows_at_once(_split_width(k))


@cache
def _rows_at_once(width: int) -> int:
    return Constants("split_limbs.cu", {"WIDTH": str(width)})["ROWS"]


def _split_width(k: int) -> int:
    return next((width for width in SPLIT_WIDTHS if k <= width), SPLIT_WIDTHS[-1])


def gemm_tiled(dtype: str, tile: tuple[int, int, int, int], product: str, *, wide: bool = False) -> Kernel:
    """Return gemm_tiled for "forward" (g = x wᵀ), "dx" (dg w) or "dw" (dgᵀ x). `wide`: the result is float32."""
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
