"""Lists the variants of forward_sm90: its modes, operands and tiles, and their macros."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

from .sources import Constants, Kernel, macros, with_renorm

ARCH = "sm_90a"  # the architecture of kernels that use wgmma, TMA or clusters
CONFIG = "sm90/config.cuh"
SM90_THREADS = Constants(CONFIG, {})["THREADS"]  # threads of a CTA
SM90_BLOCK_N = Constants(CONFIG, {})["BLOCK_N"]  # features in a tile
COLUMN = Constants(CONFIG, {})["COLUMN"]  # rows of an MN-major operand in one block of shared memory


def _names(file: str, prefix: str) -> dict[str, str]:
    """Return the macros that begin with a prefix, by the rest of their names in lower case."""
    return {name.removeprefix(prefix).lower(): name for name in macros(file, prefix)}


# Values of the macros ELEMENT and MODE. Only the skinny kernels have "float32", with multiply-adds.
ELEMENTS = {name: macro for name, macro in _names("common/elements.cuh", "ELEMENT_").items() if name != "float32"}
MODES = _names("sm90/modes.cuh", "MODE_")
TF32_INPUTS = 16  # the least input features of a call that uses TF32
BLOCKS_M = (256, 128, 64, 32)  # rows of x in a tile
CLUSTERS = (2, 1)  # CTAs that share an x tile
# (BLOCK_M, CLUSTER, SPLIT_K, CLUSTER_M) of inference in 16 bits, where more CTAs share tiles: CLUSTER of them one of x,
# and CLUSTER_M, if it is not 1, one of the weight. On 150 shapes the best of 60 such tiles was 0.5 % faster than the
# best of these. Limbs have none: a CTA loads one limb of x, so two share them.
SHARING_TILES: tuple[tuple[int, ...], ...] = (
    (192, 2, 1, 4), (160, 1, 1, 2), (160, 4, 1, 2), (128, 1, 1, 2), (128, 1, 1, 8), (128, 2, 1, 4), (128, 4, 1, 2),
    (96, 1, 1, 8), (96, 2, 1, 4), (96, 4, 1, 2), (64, 1, 1, 4), (64, 1, 1, 8), (64, 4, 1, 2), (32, 4, 2),
)  # fmt: skip
# The same for the products of the backward in 16 bits, by whether x is MN-major: dx = dg w, dw = dg^T x. On 580
# products the best of some 35 tiles each was 1 to 2 % faster than the best of these and of BLOCKS_M and CLUSTERS.
GEMM_TILES: dict[bool, tuple[tuple[int, ...], ...]] = {
    False: (
        (192, 2, 1, 4), (128, 1, 1, 8), (128, 2, 1, 4), (128, 4, 1, 2), (96, 1, 1, 8), (96, 2, 1, 4), (64, 1, 1, 4),
        (64, 1, 1, 8), (32, 1, 2), (32, 1, 4), (16, 1, 4),
    ),
    True: (
        (128, 2, 1, 4), (128, 4, 1, 2), (64, 1, 1, 4), (64, 1, 1, 8), (64, 2, 1, 4), (32, 1, 2), (32, 1, 4), (16, 1, 4),
        (16, 1, 8),
    ),
}  # fmt: skip
# (BLOCK_M, CLUSTER) of mode "cluster_batch", where CTAs share a weight tile. Other tiles were faster by at most 12 %
# anywhere, and (64, 1) nowhere.
CLUSTER_BATCH_TILES = (
    (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (64, 16), (128, 2), (128, 4), (128, 8), (128, 16), (256, 1),
    (256, 2), (256, 4), (256, 8), (256, 16),
)  # fmt: skip
# (BLOCK_M, SPLIT_K) of mode "cluster_batch" for calls in 16 bits that save float64 deviations, of up to FEW_ROWS rows
FEW_ROWS_TILES = ((32, 1), (16, 2), (16, 4), (16, 8))
RANKS_CLUSTERS = (2,)  # CLUSTERS if ranks share the batch, so that only half of the variants are compiled
# (BLOCK_M, SPLIT_K). A cluster multiplies at most 128 rows of x: with 256 its CTAs would load as much, and exchange
# twice as many sums.
SPLIT_K_TILES = ((16, 2), (32, 2), (64, 2), (16, 4), (32, 4), (16, 8))
# (BLOCK_M, CLUSTER, SPLIT_K) by mode. Training with fewer rows uses "cluster_batch".
SPLIT_K_TILES_BY_MODE = {
    "inference": (*((block_m, 1, split) for block_m, split in SPLIT_K_TILES), (32, 2, 4)),
    "training": ((32, 1, 2), (64, 1, 2), (32, 2, 4), (16, 1, 8)),
}
# (BLOCK_M, CLUSTER, SPLIT_K) of "limbs_rs", for few rows. In mode "gemm" the weight may be MN-major, as for dx.
LIMBS_RS_TILES = tuple((block_m, 1, 1) for block_m in (32, 64, 128)) + SPLIT_K_TILES_BY_MODE["inference"][:-1]
# (BLOCK_M, CLUSTER) with channels first, whose x is MN-major: a CTA loads whole columns
CHANNELS_FIRST_TILES = ((256, 2), (256, 1), (128, 2), (128, 1), (64, 1))


def sizes_of(tile: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return BLOCK_M, CLUSTER, SPLIT_K and CLUSTER_M of a tile from the lists above, which leave out a 1 at the end."""
    block_m, cluster, split, cluster_m = (*tile, 1, 1)[:4]
    return block_m, cluster, split, cluster_m


def sm90_kernels() -> Iterator[Kernel]:
    """Yield all variants of forward_sm90 without an activation."""
    for kernel in _without_renorm():
        yield kernel
        if dict(kernel.defines)["SAVE_DEVIATIONS"] == "1":
            yield renormalising(kernel)
        if may_add_residual(kernel):
            yield adding_residual(kernel)
    for element, (block_m, split) in itertools.product(("float16", "bfloat16"), FEW_ROWS_TILES):
        yield saving_float64(forward_sm90(element, "cluster_batch", block_m, 1, saves=True, split=split))


def renormalising(kernel: Kernel) -> Kernel:
    """Return the variant for batch renormalisation of a variant of forward_sm90 that saves deviations."""
    made = with_renorm(kernel)
    return made._replace(shared=Constants(CONFIG, dict(made.defines))["SHARED_BYTES"])


def saving_vectors(kernel: Kernel) -> Kernel:
    """Return the variant of mode "recompute" that saves vectors for a backward that computes g again."""
    return kernel._replace(defines=tuple((dict(kernel.defines) | {"SAVE_VECTORS": "1"}).items()))


def adding_residual(kernel: Kernel) -> Kernel:
    """Return the variant that adds a residual, of one for which `may_add_residual` is true."""
    return kernel._replace(defines=(*kernel.defines, ("RESIDUAL", "1")))


def saving_float64(kernel: Kernel) -> Kernel:
    """Return the variant that saves float64 deviations, of one that saves and has a tile in FEW_ROWS_TILES."""
    defines = {**dict(kernel.defines), "FEW_ROWS": "1"}
    return kernel._replace(defines=tuple(defines.items()), shared=Constants(CONFIG, defines)["SHARED_BYTES"])


def may_add_residual(kernel: Kernel) -> bool:
    """Return whether a variant has one that adds a residual: in 16 bits, for inference and training with a backward.

    There is none with split-k, ranks, batch renormalisation, channels first or float64 deviations.
    """
    of = {"RENORM": "0", "CHANNELS_FIRST": "0", "FEW_ROWS": "0"} | dict(kernel.defines)
    serves = of["MODE"] == MODES["inference"] or (of["MODE"] != MODES["gemm"] and of["SAVE_VECTORS"] == "1")
    in_16_bits = of["ELEMENT"] in (ELEMENTS["float16"], ELEMENTS["bfloat16"])
    bare = of["SPLIT_K"] == "1" and of["RANKS"] == of["RENORM"] == of["CHANNELS_FIRST"] == of["FEW_ROWS"] == "0"
    return serves and in_16_bits and bare


def _without_renorm() -> Iterator[Kernel]:
    elements, limbs_rs = [element for element in ELEMENTS if element != "limbs_rs"], "limbs_rs"
    for element, mode, block_m, cluster in itertools.product(elements, MODES, BLOCKS_M, CLUSTERS):
        largest = largest_block(element)
        if mode != "cluster_batch" and (block_m == largest or (block_m < largest and mode != "recompute")):
            for saves in (False, True) if mode in ("training", "recompute") else (False,):
                yield forward_sm90(element, mode, block_m, cluster, saves)
                if mode == "recompute" and not saves and element in ("float16", "bfloat16"):
                    yield saving_vectors(forward_sm90(element, mode, block_m, cluster))
                if mode == "training" and cluster in RANKS_CLUSTERS:
                    yield forward_sm90(element, mode, block_m, cluster, saves, ranks=True)
    for element, tile in itertools.product(("float16", "bfloat16"), SHARING_TILES):
        block_m, cluster, split, cluster_m = sizes_of(tile)
        yield forward_sm90(element, "inference", block_m, cluster, split=split, cluster_m=cluster_m)
    for element, (block_m, cluster), saves in itertools.product(elements, CLUSTER_BATCH_TILES, (False, True)):
        if block_m <= largest_block(element):
            yield forward_sm90(element, "cluster_batch", block_m, cluster, saves)
    for element, (block_m, split), saves in itertools.product(elements, SPLIT_K_TILES, (False, True)):
        yield forward_sm90(element, "cluster_batch", block_m, 1, saves, split=split)
    for element, block_m, cluster in itertools.product(("float16", "bfloat16"), BLOCKS_M, CLUSTERS):
        yield forward_sm90(element, "gemm", block_m, cluster, wide=True)
    for element, x_mn_major in itertools.product(("float16", "bfloat16"), GEMM_TILES):
        for tile in (*itertools.product(BLOCKS_M, CLUSTERS), *GEMM_TILES[x_mn_major]):
            block_m, cluster, split, cluster_m = sizes_of(tile)
            for wide in (False, True) if x_mn_major else (False,):
                if not x_mn_major or block_m * split % COLUMN == 0:
                    yield forward_sm90(
                        element, "gemm", block_m, cluster, x_mn_major=x_mn_major, w_mn_major=True, wide=wide,
                        split=split, cluster_m=cluster_m,
                    )  # fmt: skip
    tiles = [
        (element, mode, *tile)
        for mode in SPLIT_K_TILES_BY_MODE
        for element in elements
        for tile in SPLIT_K_TILES_BY_MODE[mode]
    ]
    tiles += [(limbs_rs, mode, *tile) for mode in ("inference", "training", "cluster_batch") for tile in LIMBS_RS_TILES]
    for element, mode, block_m, cluster, split in tiles:
        for saves in (False,) if mode == "inference" else (False, True):
            yield forward_sm90(element, mode, block_m, cluster, saves, split=split)
    for (block_m, cluster, split), w_mn_major in itertools.product(LIMBS_RS_TILES, (False, True)):
        yield forward_sm90(limbs_rs, "gemm", block_m, cluster, w_mn_major=w_mn_major, split=split)
    for element, tile in itertools.product(("float16", "bfloat16"), CHANNELS_FIRST_TILES):
        for mode, saves in (("inference", False), ("recompute", False), ("recompute", True)):
            yield channels_first_sm90(element, mode, *tile, saves)
        yield channels_first_sm90(element, "gemm", *tile, w_mn_major=True)
        if tile[1] == 1:
            yield k_in_samples_sm90(element, tile[0])


@cache
def forward_sm90(
    element: str,
    mode: str,
    block_m: int,
    cluster: int,
    saves: bool = False,
    x_mn_major: bool = False,
    w_mn_major: bool = False,
    wide: bool = False,
    ranks: bool = False,
    split: int = 1,
    cluster_m: int = 1,
) -> Kernel:
    """Return the variant of forward_sm90 with these values of ELEMENT, MODE, BLOCK_M, CLUSTER and SPLIT_K (`split`).

    `saves`: training also writes the deviations, g - mean. `x_mn_major`, `w_mn_major`: mode "gemm" has an MN-major x or
    weight, in 16 bits or as the weight of "limbs_rs". `wide`: mode "gemm" has a float32 result. `ranks`: in training,
    ranks share the batch.
    """
    of_x, of_w = sharers(mode, cluster, cluster_m)
    ctas = of_x * of_w * split
    defines = {
        "ELEMENT": ELEMENTS[element],
        "MODE": MODES[mode],
        "BLOCK_M": str(block_m),
        "STAGES": str(stages(element, mode, block_m, ctas, split)),
        "OCCUPANCY": str(occupancy(element, mode, block_m, ctas)),
        "CLUSTER": str(of_x),
        "CLUSTER_M": str(of_w),
        "SPLIT_K": str(split),
        "SAVE_DEVIATIONS": str(int(saves)),
        "SAVE_VECTORS": str(int(saves)),
        "X_MN_MAJOR": str(int(x_mn_major)),
        "W_MN_MAJOR": str(int(w_mn_major)),
        "FLOAT32_OUTPUT": str(int(wide)),
        "RANKS": str(int(ranks)),
    }
    shared = Constants(CONFIG, defines)["SHARED_BYTES"]
    return Kernel("forward_sm90", "forward_sm90", tuple(defines.items()), arch=ARCH, shared=shared)


@cache
def channels_first_sm90(
    element: str, mode: str, block_m: int, cluster: int, saves: bool = False, w_mn_major: bool = False
) -> Kernel:
    """Return the variant of forward_sm90 for an x (N, k, L) and a y (N, n, L)."""
    kernel = forward_sm90(element, mode, block_m, cluster, saves, x_mn_major=True, w_mn_major=w_mn_major)
    return kernel._replace(defines=(*kernel.defines, ("CHANNELS_FIRST", "1")))


@cache
def k_in_samples_sm90(element: str, block_m: int) -> Kernel:
    """Return the variant that sums over the rows of an x (N, m, L) and a weight (N, n, L).

    Each split of the rows gives a partial product.
    """
    kernel = forward_sm90(element, "gemm", block_m, 1, wide=True)
    return kernel._replace(defines=(*kernel.defines, ("K_IN_SAMPLES", "1")))


@cache
def pass_rows(kernel: Kernel) -> int:
    """Return how many rows of y a variant stores at a time."""
    return Constants(CONFIG, dict(kernel.defines))["PASS_M"]


def sharers(mode: str, cluster: int, cluster_m: int) -> tuple[int, int]:
    """Return how many CTAs of a cluster share a tile of x, and one of the weight. `cluster`: a tile's CLUSTER."""
    return (1, cluster) if mode == "cluster_batch" else (cluster, cluster_m)


def stages(element: str, mode: str, block_m: int, ctas: int, split: int) -> int:
    if occupancy(element, mode, block_m, ctas) == 2:
        return {"inference": 4, "cluster_batch": 5}[mode]
    return {256: 4, 192: 5, 160: 5, 128: 6, 96: 7, 64: 8, 32: 8}[split * block_m] // (2 if by_limbs(element) else 1)


def occupancy(element: str, mode: str, block_m: int, ctas: int) -> int:
    """Return how many CTAs of forward_sm90 an SM has. `ctas` is the size of a cluster."""
    small = block_m == 32 and ctas == 1 and element in ("float16", "bfloat16")
    return 2 if small and mode in ("inference", "cluster_batch") else 1


def largest_block(element: str) -> int:
    """Return the most rows of x in a tile of forward_sm90. With limbs it is half, as their sums need registers, too."""
    return BLOCKS_M[by_limbs(element)]


def by_limbs(element: str) -> bool:
    return element in ("limbs", "limbs_rs")


def precision_for(precision: str, features: int, inputs: int | None) -> str:
    """Return the precision of a call; `inputs` is None if the call has no product.

    With one feature or few inputs it is "highest". PyTorch has no TF32 for such products, and IEEE arithmetic takes no
    longer, since their kernels wait for memory.
    """
    few = features == 1 or (inputs is not None and inputs < TF32_INPUTS)
    return "highest" if few else precision


def element_for(dtype: str, precision: str) -> str:
    """Return how forward_sm90 multiplies operands of a dtype: one of ELEMENTS."""
    return {"highest": "limbs", "high": "tf32"}[precision] if dtype == "float32" else dtype


def statistics_words(partial: int, blocks: int, *, saves: bool) -> tuple[int, int]:
    """Return two offsets in forward_sm90's workspace: of the merged statistics, and of `epoch` behind them.

    The workspace begins with `partial` statistics of a block of features each, of which there are `blocks`.
    """
    merged = partial * SM90_BLOCK_N * 16
    return merged, merged + blocks * SM90_BLOCK_N * 16 * (2 if saves else 1)
