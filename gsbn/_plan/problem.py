"""What a plan depends on: a product of two matrices, where its operands lie, and the GPU that it runs on."""

from __future__ import annotations

from typing import NamedTuple

VECTOR_PARAMETERS = ("bias", "scale", "gamma", "beta")  # those that have gradients, in the order of Gradients
VECTORS = (*VECTOR_PARAMETERS, "running_mean", "running_var")
INT32_MAX = 2**31 - 1
ROOM = 4  # SMs that a kernel which waits for another GPU leaves to others: enough for any one CTA of theirs to advance
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
C_TYPE = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "float64": "double"}
SPLITS = 64  # CTAs, but for clusters, that share a column block of scale_stats or backward_sums: merging takes time
# Up to so many rows 16-bit calls keep deviations in float64, and their backward computes in it. Of B rows dg has B - 2
# dimensions left, into which the rounding of d turns a part of the other two: about sqrt(2 / (B - 2)) roundings of dg;
# of two rows eps / var is left, of which float32 would keep a digit or two. Simulated on normal data, 16-bit deviations
# pass the accuracy rule from 8 rows on, and beyond 16 rows with a third of it to spare.
FEW_ROWS = 16
SAVED_ROWS = 9  # O-vectors that a forward saves for its backward


class Device(NamedTuple):
    """A GPU, or a context's share of it, as far as a plan depends on it."""

    capability: tuple[int, int]
    sms: int
    sm90a: bool = True  # NVRTC can compile for it
    pairs: int | None = None  # clusters of two CTAs, an SM to each, that are there at once; None for sms / 2
    fours: int | None = None  # of four, eight and sixteen; None for half as many as of half the size
    eights: int | None = None
    sixteens: int | None = None
    limited: bool = False  # a launch may take no SM beyond `sms`, though there are more

    def at_most(self, sms: int | None) -> Device:
        """The same for a call that may occupy so many SMs. Who holds the others may have broken a cluster with each."""
        if sms is None or sms >= self.sms:
            return self
        return self._with(sms, self.sms - sms)._replace(limited=True)

    def with_room(self) -> Device:
        """The same for a launch that waits for another GPU: that one may wait for another kernel to run here."""
        if self.limited or self.sms <= 2 * ROOM:  # whoever gave `sms` has left what room he wants
            return self
        return self._with(self.sms - ROOM, ROOM // 2)

    def _with(self, sms: int, broken: int) -> Device:
        """The same with so many SMs, and so many clusters of each size broken."""
        pairs, fours, eights, sixteens = (max(0, self.clusters(size) - broken) for size in (2, 4, 8, 16))
        return self._replace(sms=sms, pairs=pairs, fours=fours, eights=eights, sixteens=sixteens)

    @property
    def hopper(self) -> bool:
        """Whether the kernels for compute capability 9.0 can be compiled for it and run."""
        return self.capability == (9, 0) and self.sm90a

    @property
    def target(self) -> int:
        """How many SMs cuBLAS shall take; 0 for all."""
        return self.sms if self.limited else 0

    def clusters(self, size: int) -> int:
        """How many clusters of 1, 2, 4, 8 or 16 CTAs, each with an SM to itself, are resident at once."""
        if size == 1:
            return self.sms
        most = self.clusters(size // 2) // 2
        found = {2: self.pairs, 4: self.fours, 8: self.eights, 16: self.sixteens}[size]
        return most if found is None else min(found, most)

    def ctas(self, of_an_sm: int) -> int:
        """CTAs that fill the GPU. They spread over all SMs before any gets a second."""
        return self.sms if self.limited else of_an_sm * self.sms

    def grid(self, items: int) -> int:
        """CTAs for so many items of work."""
        return min(items, self.sms) if self.limited else items


class Matrix(NamedTuple):
    """Where a 2-D operand lies: strides in elements, whether its first element is on 16 bytes, whether it is a copy."""

    strides: tuple[int, int]
    aligned: bool
    own: bool = False  # the call makes it of what it was given, or what it gives back of it

    @classmethod
    def of(cls, shape: tuple[int, int], strides: tuple[int, int], aligned: bool) -> Matrix:
        """With the strides of dimensions of size 1, which mean nothing, made those of a C-contiguous array."""
        col = strides[1] if shape[1] > 1 else 1
        return cls((strides[0] if shape[0] > 1 else max(shape[1] * col, 1), col), aligned)

    @property
    def T(self) -> Matrix:
        return self._replace(strides=self.strides[::-1])


class Limits(NamedTuple):
    """What the planner's choice is limited to, for whoever wants another than the cheapest: tests, sweeps, benches.

    A limit that leaves a product no choice is passed over.
    """

    # forward_sm90's rows in a tile, CTAs that share them, and CTAs that share k if several do
    sm90: tuple[int, ...] | None = None
    split: bool | None = None  # whether CTAs of forward_sm90 share k, where they can
    recompute: bool | None = None  # whether forward_sm90 makes g twice in training, where it can
    cluster_batch: bool | None = None  # whether a cluster of forward_sm90 has all rows in training, where they fit
    limbs_rs: bool | None = None  # whether forward_sm90 makes the weight's limbs itself, in registers, where it can
    tiled: tuple[int, int, int, int] | None = None  # gemm_tiled's tile, one of `variants.TILES`
    skinny: bool | None = None  # whether the kernels of skinny.cu may serve; True: wherever they can
    tall: bool | None = None  # whether tall_product may make dw; True: wherever it can
    fused: bool | None = None  # the passes after a GEMM, or before the backward's, in one launch for few rows; or never
    cluster: int | None = None  # CTAs of backward_fused that share columns, where they can; 1: none
    gpu: Device | None = None  # one to plan for in place of the real one, which has no fewer SMs


class Matmul(NamedTuple):
    """g = x wᵀ and where its result goes, as far as a plan depends on it: x (m, k), w (n, k), y (m, n)."""

    m: int
    n: int
    k: int
    dtype: str
    device: Device
    x: Matrix
    w: Matrix
    y: Matrix
    limits: Limits = Limits()


def deviations_dtype(dtype: str, rows: int, *, training: bool) -> str:
    """What a forward keeps for its backward, g - m in training and g in inference: its dtype for an x of `dtype`.

    In inference a float16 g overflows, and there are no statistics to scale it by.
    """
    if ITEMSIZE[dtype] > 2:
        return dtype
    return "float32" if not training else dtype if rows > FEW_ROWS else "float64"


def split_rows(m: int, blocks: int, ctas: int, step: int) -> tuple[int, int]:
    """Cut m rows so that blocks * cuts fill one wave of `ctas`: (cuts, rows each), rows in whole steps."""
    rows = round_up(ceil_div(m, max(1, ctas // blocks)), step)
    return ceil_div(m, rows), rows


def row_threads_for(n: int, columns: int) -> tuple[int, int]:
    """Blocks of columns and threads along a row, of so many columns each: a power of two, and a warp at most.

    A CTA then has a power of two of rows at once: what rounding makes of their sums is the same at any width.
    """
    row_threads = min(32, 1 << (ceil_div(n, columns) - 1).bit_length())
    return ceil_div(n, row_threads * columns), row_threads


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b
