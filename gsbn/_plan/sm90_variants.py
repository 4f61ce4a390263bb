"""The variants of forward_sm90: its modes, operands and tiles, and what they are compiled with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .kernel import Kernel

__all__ = [
    "BLOCKS_M",
    "CLUSTERS",
    "CLUSTERS_OF_RANKS",
    "COLUMN",
    "ELEMENTS",
    "MODES",
    "SM90_BLOCK_N",
    "SM90_THREADS",
    "SPLITS_OF_K",
    "SPLIT_TILES",
    "TILES_OF_ROWS",
    "TILES_OF_X",
    "by_limbs",
    "element_for",
    "forward_sm90",
    "largest_block",
    "precision_for",
    "resident",
    "sm90_kernels",
    "stages",
]

SM90_THREADS = 384  # of a CTA
# forward_sm90's ELEMENT. From "tf32" on operands are float32; of "limbs_rs" the weight's limbs are made in registers.
ELEMENTS = {"bfloat16": 0, "float16": 1, "tf32": 2, "limbs": 3, "limbs_rs": 4}
# "gemm" is for limbs, the backward, and the bench; the last two are other ways to train
MODES = {"gemm": 0, "inference": 1, "training": 2, "recompute": 3, "cluster_batch": 4}  # and its MODE
BLOCKS_M = (256, 128, 64, 32)  # rows of x in a tile
CLUSTERS = (2, 1)  # CTAs that share an x tile
# BLOCK_M, and CTAs that share a weight tile, where a cluster has the whole batch: others were best by 12 % at most, and
# (64, 1) never
TILES_OF_ROWS = (
    (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (64, 16), (128, 2), (128, 8), (128, 16), (256, 1), (256, 8),
    (256, 16),
)  # fmt: skip
CLUSTERS_OF_RANKS = (2,)  # the same where ranks share the batch: half the variants to compile
# BLOCK_M and SPLIT_K where CTAs share k. They multiply 128 rows of x at most: of 256 they would load as much, and send
# each other twice as many sums.
SPLIT_TILES = ((16, 2), (32, 2), (64, 2), (16, 4), (32, 4), (16, 8))
# BLOCK_M, CLUSTER and SPLIT_K, by mode; of fewer rows they train as "cluster_batch"
SPLITS_OF_K = {
    "inference": (*((block_m, 1, split) for block_m, split in SPLIT_TILES), (32, 2, 4)),
    "training": ((32, 1, 2), (64, 1, 2), (32, 2, 4), (16, 1, 8)),
}
# The same, and tiles whose k one CTA has alone, where it makes the weight's limbs in registers: for few rows. "gemm"
# reads a weight that lies across k alone, as the backward's do.
TILES_OF_X = tuple((block_m, 1, 1) for block_m in (32, 64, 128)) + SPLITS_OF_K["inference"][:-1]
SM90_BLOCK_N = 128
COLUMN = 64  # rows side by side in forward_sm90's stages, of an operand that lies across what is summed over


def sm90_kernels() -> Iterator[Kernel]:
    """All of them, without an activation."""
    *elements, of_x = ELEMENTS
    for element, mode, block_m, cluster in itertools.product(elements, MODES, BLOCKS_M, CLUSTERS):
        largest = largest_block(element)
        if mode != "cluster_batch" and (block_m == largest or (block_m < largest and mode != "recompute")):
            for keeps in (False, True) if mode in ("training", "recompute") else (False,):
                yield forward_sm90(element, mode, block_m, cluster, keeps)
                if mode == "training" and cluster in CLUSTERS_OF_RANKS:
                    yield forward_sm90(element, mode, block_m, cluster, keeps, ranks=True)
    for element, (block_m, cluster), keeps in itertools.product(elements, TILES_OF_ROWS, (False, True)):
        if block_m <= largest_block(element):
            yield forward_sm90(element, "cluster_batch", block_m, cluster, keeps)
    for element, (block_m, split), keeps in itertools.product(elements, SPLIT_TILES, (False, True)):
        yield forward_sm90(element, "cluster_batch", block_m, 1, keeps, split=split)
    for element, block_m, cluster in itertools.product(("float16", "bfloat16"), BLOCKS_M, CLUSTERS):
        yield forward_sm90(element, "gemm", block_m, cluster, wide=True)
        for x_mn_major in (False, True):  # dx and dw of the backward
            if not x_mn_major or block_m // cluster >= COLUMN:
                yield forward_sm90(element, "gemm", block_m, cluster, x_mn_major=x_mn_major, w_mn_major=True)
                if x_mn_major:
                    yield forward_sm90(element, "gemm", block_m, cluster, x_mn_major=True, w_mn_major=True, wide=True)
    tiles = [(element, mode, *tile) for mode in SPLITS_OF_K for element in elements for tile in SPLITS_OF_K[mode]]
    tiles += [(of_x, mode, *tile) for mode in ("inference", "training", "cluster_batch") for tile in TILES_OF_X]
    for element, mode, block_m, cluster, split in tiles:
        for keeps in (False,) if mode == "inference" else (False, True):
            yield forward_sm90(element, mode, block_m, cluster, keeps, split=split)
    for block_m, cluster, split in TILES_OF_X:
        yield forward_sm90(of_x, "gemm", block_m, cluster, w_mn_major=True, split=split)


def forward_sm90(
    element: str,
    mode: str,
    block_m: int,
    cluster: int,
    keeps: bool = False,
    x_mn_major: bool = False,
    w_mn_major: bool = False,
    wide: bool = False,
    ranks: bool = False,
    split: int = 1,
) -> Kernel:
    """The variant of forward_sm90 for these operands, this mode, this many rows in a tile and CTAs that share them.

    `keeps`: training, any way, that also writes g - m; `x_mn_major`, `w_mn_major`: a GEMM whose x, or weight, lies across
    k, in 16 bits, or the weight beside limbs of x; `wide`: one whose result is float32; `ranks`: training of a batch
    that ranks share; `split`: how many CTAs share k.
    """
    limbs, rows = 2 if by_limbs(element) else 1, split * block_m  # that a CTA multiplies
    ring = stages(element, mode, block_m, cluster, split)
    of_float32 = wide or element == "tf32" or by_limbs(element)
    staging = 2 * min(block_m, 32) if of_float32 else min(block_m, 64)  # rows of 128 bytes that a buffer of y holds
    # Beside the rings: arguments (12 bytes a feature; 4 with SAVE_DEVIATIONS) or constants (2 * 8), barriers and counters;
    # where g is made twice, beta and what makes y of it (4 and 16); where a cluster has the whole batch, mean and M2 from each
    # of its CTAs (8), for which y has half the buffers.
    of_features = SM90_BLOCK_N * ({"recompute": 20, "cluster_batch": 16 + 8 * cluster * split}.get(mode, 16))
    buffers = 2 if mode == "cluster_batch" else 4
    shared = limbs * ring * (SM90_BLOCK_N + rows) * 128 + buffers * staging * 128 + of_features + 256
    defines = {"ELEMENT": ELEMENTS[element], "MODE": MODES[mode], "BLOCK_M": block_m}
    defines |= {
        "STAGES": ring,
        "SHARED": shared,
        "OCCUPANCY": resident(element, mode, block_m, cluster * split),
        "CLUSTER": cluster,
        "SPLIT_K": split,
        "SAVE_DEVIATIONS": int(keeps),
        "X_MN_MAJOR": int(x_mn_major),
        "W_MN_MAJOR": int(w_mn_major),
        "FLOAT32_OUTPUT": int(wide),
        "RANKS": int(ranks),
    }
    return Kernel(
        "forward_sm90",
        "forward_sm90",
        tuple((name, str(value)) for name, value in defines.items()),
        arch="sm_90a",
        shared=shared,
    )


def stages(element: str, mode: str, block_m: int, cluster: int, split: int) -> int:
    """Of forward_sm90's ring: steps of k that are on their way at once."""
    if resident(element, mode, block_m, cluster * split) == 2:
        return {"inference": 4, "cluster_batch": 5}[mode]
    return {256: 4, 128: 6, 64: 8, 32: 8}[split * block_m] // (2 if by_limbs(element) else 1)


def resident(element: str, mode: str, block_m: int, ctas: int) -> int:
    """CTAs of forward_sm90 on an SM, a cluster being of so many."""
    small = block_m == 32 and ctas == 1 and element in ("float16", "bfloat16")
    return 2 if small and mode in ("inference", "cluster_batch") else 1


def largest_block(element: str) -> int:
    """The most rows of x in a tile of forward_sm90: limbs leave no room for sums beside so many accumulators."""
    return BLOCKS_M[by_limbs(element)]


def by_limbs(element: str) -> bool:
    """Whether forward_sm90 multiplies it as limbs."""
    return element in ("limbs", "limbs_rs")


def precision_for(precision: str, features: int) -> str:
    """What a call is computed in: products of a matrix and a vector, those of one feature, have no TF32 in PyTorch."""
    return "highest" if features == 1 else precision


def element_for(dtype: str, precision: str) -> str:
    """What forward_sm90 makes of operands of a dtype: one of ELEMENTS."""
    return {"highest": "limbs", "high": "tf32"}[precision] if dtype == "float32" else dtype
