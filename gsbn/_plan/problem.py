"""Describes what a plan depends on: a product, the layouts of its operands, the GPU, and ranks that share a batch."""

from __future__ import annotations

from typing import NamedTuple

from .sources import Constants

VECTOR_PARAMETERS = ("bias", "scale", "gamma", "beta")  # vectors with gradients, in the order of Gradients
VECTORS = (*VECTOR_PARAMETERS, "running_mean", "running_var")
INT32_MAX = 2**31 - 1
ROOM = 4  # SMs that a kernel leaves free while it waits for another GPU: any CTA of another kernel can run there
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
C_TYPE = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "float64": "double"}
SPLITS = 64  # the most CTAs (without clusters) per column block of scale_stats or backward_sums: merging takes time
# Up to so many rows, 16-bit calls save deviations in float64, and their backward computes in float64. For B rows dg has
# B - 2 degrees of freedom. Rounding d turns a part of the other two dimensions into these, which is an error of about
# sqrt(2 / (B - 2)) roundings of dg. For two rows only eps / var is left, a digit or two in float32. In a simulation on
# normal data, 16-bit deviations meet the accuracy rule from 8 rows on. Beyond 16 rows a third of it is to spare.
FEW_ROWS = 16
SAVED = Constants("common/common.cuh", {})  # SAVED_...: the rows of the vectors that a forward saves for its backward
SAVED_ROWS = SAVED["SAVED_ROWS"]  # the number of these rows
SAVED_RATIO, SAVED_SHIFT = SAVED["SAVED_RATIO"], SAVED["SAVED_SHIFT"]  # two more rows, with batch renormalisation
RENORM_ROWS = SAVED_SHIFT + 1
REMAT_ROWS = SAVED["SAVED_G_MEAN"] + 1  # their number if the backward computes g again


class Device(NamedTuple):
    """The properties of a GPU, or of a context's share of it, that a plan depends on."""

    capability: tuple[int, int]
    sms: int
    sm90a: bool = True  # NVRTC can compile for it
    pairs: int | None = None  # clusters of two CTAs, each with its own SM, that are resident at once; None for sms / 2
    fours: int | None = None  # the same for four, eight and sixteen CTAs; None for half as many as of half the size
    eights: int | None = None
    sixteens: int | None = None
    limited: bool = False  # a launch may take no SM beyond `sms`, though there are more
    bandwidth: float = 1.0  # of its memory, divided by an H200's

    def at_most(self, sms: int | None) -> Device:
        """Return the device for a call that may occupy `sms` SMs. Each SM left out may break another cluster."""
        if sms is None or sms >= self.sms:
            return self
        return self._with(sms, self.sms - sms)._replace(limited=True)

    def with_room(self) -> Device:
        """Return the device for a launch that waits for another GPU.

        The other GPU may in turn wait for another kernel on this one.
        """
        if self.limited or self.sms <= 2 * ROOM:  # the caller's `sms` leaves room
            return self
        return self._with(self.sms - ROOM, ROOM // 2)

    def _with(self, sms: int, broken: int) -> Device:
        """Return the device with `sms` SMs, and with `broken` clusters fewer of each size."""
        pairs, fours, eights, sixteens = (max(0, self.clusters(size) - broken) for size in (2, 4, 8, 16))
        return self._replace(sms=sms, pairs=pairs, fours=fours, eights=eights, sixteens=sixteens)

    @property
    def hopper(self) -> bool:
        """Whether the kernels of architecture ARCH, which use wgmma, TMA or clusters, can be compiled and run."""
        return self.capability == (9, 0) and self.sm90a

    @property
    def target(self) -> int:
        """The SM target for cuBLAS; 0 for all SMs."""
        return self.sms if self.limited else 0

    def clusters(self, size: int) -> int:
        """Return how many clusters of 1, 2, 4, 8 or 16 CTAs are resident at once, if each CTA has its own SM."""
        if size == 1:
            return self.sms
        if not self.hopper:
            return 0
        most = self.clusters(size // 2) // 2
        found = {2: self.pairs, 4: self.fours, 8: self.eights, 16: self.sixteens}[size]
        return most if found is None else min(found, most)

    def ctas(self, of_an_sm: int) -> int:
        """Return how many CTAs fill the GPU, with `of_an_sm` on each SM.

        If limited, it is one per SM: CTAs spread over all SMs before any SM gets a second CTA.
        """
        return self.sms if self.limited else of_an_sm * self.sms

    def grid(self, items: int) -> int:
        """Return how many CTAs do so many items of work: one for each item, but at most one per SM if limited."""
        return min(items, self.sms) if self.limited else items


class Matrix(NamedTuple):
    """The layout of a 2-D operand; strides in elements."""

    strides: tuple[int, int]
    aligned: bool  # the first element is on 16 bytes
    own: bool = False  # memory that the call makes: a copy of an operand, or what it later copies to the result

    @classmethod
    def of(cls, shape: tuple[int, int], strides: tuple[int, int], aligned: bool) -> Matrix:
        """Return the layout of an array. A stride of a dimension of size 1 has no meaning, and is set as in C order."""
        col = strides[1] if shape[1] > 1 else 1
        return cls((strides[0] if shape[0] > 1 else max(shape[1] * col, 1), col), aligned)

    @property
    def T(self) -> Matrix:
        return self._replace(strides=self.strides[::-1])


class Limits(NamedTuple):
    """Limits of the planner's choice, for tests, sweeps and benches that want another choice than the cheapest.

    None leaves the choice free. True forces a way wherever it can serve, False forbids it. A limit that leaves no
    choice is ignored.
    """

    sm90: tuple[int, ...] | None = None  # forward_sm90's BLOCK_M, CLUSTER; SPLIT_K, CLUSTER_M if not 1
    split: bool | None = None  # split-k in forward_sm90
    recompute: bool | None = None  # mode "recompute" of forward_sm90 in training
    cluster_batch: bool | None = None  # mode "cluster_batch" of forward_sm90 in training
    limbs_rs: bool | None = None  # forward_sm90 makes the weight's limbs in registers
    tiled: tuple[int, int, int, int] | None = None  # gemm_tiled's tile, one of `variants.TILES`
    skinny: bool | None = None  # the skinny kernels
    remat: bool | None = None  # the backward computes g again, and the forward stores no deviations
    tall: bool | None = None  # tall_product for dw
    dual: bool | None = None  # dual_gemm for dx and dw
    fused: bool | None = None  # one launch for the passes after the forward's GEMM, or before the backward's
    cluster: int | None = None  # CTAs of a cluster of backward_fused; 1: no clusters
    by_runs: bool | None = None  # ghost batches one after the other in a forward
    gpu: Device | None = None  # the GPU to plan for; the real one must have at least as many SMs


class Matmul(NamedTuple):
    """The product x wᵀ, as far as a plan depends on it: x (m, k), w (n, k), and the result of the call, y (m, n)."""

    m: int
    n: int
    k: int
    dtype: str
    device: Device
    x: Matrix
    w: Matrix
    y: Matrix
    limits: Limits = Limits()


class Ranks(NamedTuple):
    """The properties of the ranks of a group that a program depends on."""

    waits: bool = True  # kernels wait for the other ranks' numbers in peer memory; else NCCL gathers between launches
    size: int = 1
    features: int | None = None  # the features for which a mailbox has room
    signature: int = 0  # signature of the call; it must be the same on all ranks


def ghost_pitch(features: int, dtype: str) -> int:
    """Return how many columns a ghost batch takes among those of all: its features, rounded up to 16 bytes."""
    return round_up(features, 16 // ITEMSIZE[dtype])


def flattened(p: Matmul, groups: int) -> Matmul:
    """Return p as the passes over g or dy see it: the rows of one ghost batch, and the columns of all ghost batches."""
    return p if groups == 1 else p._replace(m=p.m // groups, n=groups * ghost_pitch(p.n, p.dtype))


def letters(features: int, numbers: int) -> int:
    """Return how many numbers a rank posts, if there are `numbers` numbers per feature."""
    return 2 + numbers * features


def posts_at(start: int, count: int, ranks: Ranks | None) -> tuple[int, int, int]:
    """Return three offsets in the workspace, from `start` on.

    They are the offsets of the `count` numbers that this rank posts, of what NCCL gathers, and of the end.
    """
    nbytes = round_up(8 * count, 256)
    start += -start % 256
    return start, start + nbytes, start + nbytes * (1 if ranks is None or ranks.waits else 1 + ranks.size)


def deviations_dtype(dtype: str, rows: int, *, training: bool) -> str:
    """Return the dtype in which a forward on an x of `dtype` saves g - mean (in training) or g (in inference).

    In inference a float16 g could overflow, and there are no statistics to scale it by.
    """
    if ITEMSIZE[dtype] > 2:
        return dtype
    return "float32" if not training else dtype if rows > FEW_ROWS else "float64"


def split_rows(m: int, blocks: int, ctas: int, step: int) -> tuple[int, int]:
    """Split m rows so that blocks * splits fill one wave of `ctas`.

    Returns the number of splits, and the rows of each split, a multiple of `step`.
    """
    rows = round_up(ceil_div(m, max(1, ctas // blocks)), step)
    return ceil_div(m, rows), rows


def row_threads_for(n: int, columns: int) -> tuple[int, int]:
    """Return how many blocks of columns there are, and row_threads. A thread has `columns` columns.

    row_threads is a power of two, at most a warp. A CTA then takes a power of two of rows at once, and the rounding of
    their sums does not depend on the width.
    """
    row_threads = min(32, 1 << (ceil_div(n, columns) - 1).bit_length())
    return ceil_div(n, row_threads * columns), row_threads


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b
