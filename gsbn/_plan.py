"""What runs for a shape: which GEMM, which tiles, how the work is cut, where things lie. Pure: it needs no GPU."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

__all__ = [
    "Device",
    "Kernel",
    "LimbGemm",
    "Matmul",
    "Matrix",
    "OneLaunch",
    "Plan",
    "backward_plan",
    "column_grids",
    "column_kernels",
    "element_for",
    "forward_sm90",
    "gemm_for",
    "limb_gemm",
    "limbs",
    "one_launch",
    "plan",
    "takes_limbs",
]

INT32_MAX = 2**31 - 1
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
C_TYPE = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "float64": "double"}
SAVED_ROWS = 7  # O-vectors that a forward keeps for its backward
WARPS = 8  # of a CTA of scale_stats and normalize; each takes every WARPS-th row
THREADS, SM90_THREADS = 32 * WARPS, 384  # of a CTA of either, of running_affine and fold; of forward_sm90
STATS_CTAS, STATS_STEP = 2, 16 * WARPS  # CTAs on an SM; rows that a CTA holds at once
SPLITS = 64  # CTAs at most that share a column block of scale_stats or backward_sums: merging them takes time
NORMALIZE_CTAS, NORMALIZE_STEP = 4, 4 * WARPS
SUMS_CTAS, DG_CTAS = 1, 2  # CTAs on an SM, of backward_sums and of backward_dg
RING_STEP = 4 * WARPS  # rows that a CTA of either has on their way at once
FUSED_ROWS, FUSED_CTAS = 1024, 2  # rows, and CTAs on an SM, up to which backward_fused makes one launch of the two
# Up to so many rows 16-bit calls keep deviations in float64, and their backward computes in it. Of B rows dg has B - 2
# dimensions left, into which the rounding of d turns a part of the other two: about sqrt(2 / (B - 2)) roundings of dg;
# of two rows eps / var is left, of which float32 would keep a digit or two. Simulated on normal data, 16-bit deviations
# pass the accuracy rule from 8 rows on, and beyond 16 rows with a third of it to spare.
FEW_ROWS = 16
COPY_TILE = 64  # rows and columns of an item of copy_matrix
ELEMENTS = {"bfloat16": 0, "float16": 1, "tf32": 2, "limbs": 3}  # forward_sm90's ELEMENT; the last two are float32
MODES = {"gemm": 0, "inference": 1, "training": 2}  # and its MODE; "gemm" is for limbs, the backward, and the bench
BLOCKS_M = (256, 128, 64, 32)  # rows of x in a tile
CLUSTERS = (2, 1)  # CTAs that share an x tile
SM90_BLOCK_N = 128
COLUMN = 64  # rows side by side in forward_sm90's stages, of an operand that lies across what is summed over
SPLIT_WIDTH = 1024  # elements of a row up to which one warp of split_limbs takes it, and eight beyond
# What forward_sm90 and the path on cuBLAS cost on an H200, in us and MB: fitted to docs/results/sweep.jsonl, so that
# the choice is right rather than each time. See _one_launch_us and _cublas_us.
MMA_US, STEP_US = 0.0018, 0.067  # a step, 128 bytes of k: a row of x in it, and whatever is in it
SHARED_US = 1 / 1950  # 128 bytes in or out of shared memory, one clock; the other modes' terms were fitted without it
L2_RATE, MEMORY_RATE = 10.2, 11.2  # MB/us: of all that the CTAs load; of what differs, where it comes from memory
OFF_LINE, OFF_LINE_Y = 1.4, 1.45  # times the traffic where rows of x and weight, or of y, do not start on 128 bytes
TILE_US = {"training": 7.1, "inference": 1.65, "gemm": 1.65}  # beginning and end of a tile
Y_RATE, PARKED_RATE = {"training": 4.1, "inference": 3.75, "gemm": 3.75}, 10.9
CALL_US = {"training": 1.9, "inference": 4.0, "gemm": 4.0}
LAYING_US, RELAYING_US = 0.57, 1.9  # inference: a round of constants, 96 features by three warps; of a later tile
PARK_US, MERGE_US = 7.8, {1: 9.0, 2: 2.3, 3: 2.3, 4: 0.0, 5: 0.0, 6: 0.0}  # training: by rows of tiles
TRIP_US = 2.2  # and of more rows
SPLIT_US, SPLIT_RATE = 3.7, 3.6  # float32 to limbs
CUBLAS_FLOPS = {"bfloat16": 915e6, "float16": 915e6, "tf32": 368e6, "limbs": 53e6}  # FLOP/us; for limbs, IEEE float32
CUBLAS_SMS = 16  # SMs to aim at; with a target of one it was seen to end the process (a division by zero)
CUBLAS_HOST_US = 8.0  # what a call costs the host; a launch of ours 3.5. On the GPU no product of cuBLAS is below 6.5
IEEE_CALL_US = 6.1  # more than a GEMM on tensor cores
CUBLAS_CALL_US = {True: 14.6, False: 10.7}  # three launches, of training or not
OPERAND_RATE, G_RATE, Y_CUBLAS_RATE = 7.15, (6.2, 3.5), (2.2, 2.4)  # g in L2, g in memory
L2_MB = 30.0  # of operands, and 0.8 times that of g, stay in L2
PANEL_MB = 40.0  # of operands, beyond which the GEMM alone takes its tiles in panels as wide as high
# Terms of a sum up to which forward_sm90 adds them in the tensor core alone, which cuts off what float32 cannot hold:
# the error grows with their number, and beyond would pass a quarter of the dtype's eps (TF32: what cuBLAS errs by).
MAX_TERMS = {"float16": 2**15, "bfloat16": 2**18, "tf32": 2**15}
FILL = 0.94  # of several waves of the largest tiles, from which on forward_sm90 beats cuBLAS (docs/backward.md)
TILES = {  # gemm_tiled: BLOCK_M, BLOCK_N, THREAD_M, THREAD_N, the larger first
    "float": ((128, 128, 8, 8), (64, 64, 4, 4), (32, 32, 2, 2)),
    "double": ((64, 64, 4, 4), (32, 32, 2, 2)),
}


class Device(NamedTuple):
    """A GPU, or a context's share of it, as far as a plan depends on it."""

    capability: tuple[int, int]
    sms: int
    sm90a: bool = True  # NVRTC can compile for it
    pairs: int | None = (
        None  # clusters of two CTAs, each with an SM to itself, that are there at once; None for sms / 2
    )
    limited: bool = False  # a launch may take no SM beyond `sms`, though there are more

    def at_most(self, sms: int | None) -> Device:
        """The same for a call that may occupy so many SMs. Who holds the others may have broken a pair with each."""
        if sms is None or sms >= self.sms:
            return self
        pairs = min(sms // 2, max(0, self.clusters(2) - (self.sms - sms)))
        return self._replace(sms=sms, pairs=pairs, limited=True)

    @property
    def target(self) -> int:
        """How many SMs cuBLAS shall take; 0 for all."""
        return self.sms if self.limited else 0

    def clusters(self, size: int) -> int:
        """How many clusters of 1 or 2 CTAs, each with an SM to itself, are resident at once."""
        return self.sms if size == 1 else self.sms // 2 if self.pairs is None else self.pairs

    def ctas(self, of_an_sm: int) -> int:
        """CTAs that fill the GPU. They spread over all SMs before any gets a second."""
        return self.sms if self.limited else of_an_sm * self.sms

    def grid(self, items: int) -> int:
        """CTAs for so many items of work."""
        return min(items, self.sms) if self.limited else items


class Matrix(NamedTuple):
    """Where a 2-D operand lies: strides in elements, and whether its first element is on 16 bytes."""

    strides: tuple[int, int]
    aligned: bool

    @classmethod
    def of(cls, shape: tuple[int, int], strides: tuple[int, int], aligned: bool) -> Matrix:
        """With the strides of dimensions of size 1, which mean nothing, made those of a C-contiguous array."""
        col = strides[1] if shape[1] > 1 else 1
        return cls((strides[0] if shape[0] > 1 else max(shape[1] * col, 1), col), aligned)

    @property
    def T(self) -> Matrix:
        return self._replace(strides=self.strides[::-1])


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


class Kernel(NamedTuple):
    """One compiled variant: the function of this name in kernels/<file>.cu, compiled with these macros."""

    name: str
    file: str
    defines: tuple[tuple[str, str], ...]
    arch: str | None = None  # where only one will do
    shared: int = 0  # bytes of dynamic shared memory


class Limbs(NamedTuple):
    """float32 operands as two float16 limbs, by split_limbs; offsets into the workspace in bytes."""

    kernel: Kernel
    grid: int
    pitch: int  # bytes from row to row
    x: int
    w: int
    x_exponents: int
    w_exponents: int


class OneLaunch(NamedTuple):
    """A launch of forward_sm90, the whole forward or its GEMM alone; offsets and sizes in bytes."""

    kernel: Kernel
    cooperative: bool  # its CTAs wait for each other: all must be resident
    element: str
    limbs: Limbs | None
    block_m: int
    cluster: int
    clusters: int
    panel: int
    merged: int
    roll: int
    workspace: int


class LimbGemm(NamedTuple):
    """A float32 GEMM c = a bᵀ through limbs; offsets and sizes in bytes."""

    one: OneLaunch
    split_grid: int  # of what lies in rows
    a_maxima: int | None  # where those of its columns lie, if it lies across what is summed over
    b_maxima: int | None
    workspace: int


class Keep(NamedTuple):
    """The B x O array that a forward keeps for its backward."""

    dtype: str
    is_g: bool  # g is computed in it


class Plan(NamedTuple):
    """A forward call, decided. Sizes are in elements, offsets into the workspace and its size in bytes."""

    gemm: str
    why: str
    copy_x: bool  # the GEMM cannot take these strides
    copy_w: bool
    y_is_g: bool  # g is computed in y's memory and normalised in place
    vector_y: bool
    ldg: int
    stats_grid: int
    stats_rows: int
    splits: int
    affine_grid: int
    normalize_grid: int
    normalize_rows: int
    affine: int
    partials: int
    tickets: int
    tickets_bytes: int
    g: int
    workspace: int
    gemm_kernel: Kernel | None
    gemm_grid: int
    gemm_block: int
    stats_kernel: Kernel
    affine_kernel: Kernel
    normalize_kernel: Kernel
    one: OneLaunch | None
    through: LimbGemm | None  # float32's g, where one launch does not serve
    limbs_at: int
    keep: Keep | None


class Product(NamedTuple):
    """One GEMM of the backward, c (m, n) = a (m, k) bᵀ (k, n): a is dg or its transpose, b one of the weight or x."""

    p: Matmul
    gemm: str
    copy: bool  # the GEMM cannot take b's strides: p has those of a copy
    kernel: Kernel | None
    grid: int
    block: int
    through: LimbGemm | None = None
    one: OneLaunch | None = None


class BackwardPlan(NamedTuple):
    """A backward call, decided. Sizes are in elements, offsets into the workspace and its size in bytes."""

    sums: bool  # whether anything is made of sums, which backward_dg then merges
    dg: bool  # whether dg is made
    fused: bool  # all of that in one launch of sums_kernel
    reads_d: bool
    copy_dy: bool  # the kernels would not take these strides at speed
    dy: Matrix
    vector_dy: bool
    pitch: int  # of dg
    across: int  # the pitch of its transpose, which the GEMM of dw then reads; 0 for none
    sums_grid: int
    sums_rows: int
    splits: int
    dg_grid: int
    dg_rows: int
    dg_at: int
    across_at: int
    limbs_at: int  # one product's after the other's
    workspace: int
    sums_kernel: Kernel
    dg_kernel: Kernel
    x: Product | None  # dx = dg w
    weight: Product | None  # dw = dgᵀ x


@lru_cache(maxsize=1024)
def plan(
    p: Matmul,
    *,
    training: bool,
    precision: str = "highest",
    gemm: str = "auto",
    capturing: bool = False,
    prepared: bool = False,
    saved: bool = False,
    cumulative: bool = False,
) -> Plan:
    """Decide a forward call, all sizes at least 1; `prepared`: the weight comes with its limbs; `cumulative`: the
    running statistics are averages over all batches.

    Raises ValueError that names `gemm` if the chosen one cannot serve the call; "auto" always serves.
    """
    chosen, why = gemm_for(
        p, precision=precision, gemm=gemm, capturing=capturing, training=training, prepared=prepared, saved=saved
    )
    m, n, k, dtype, device, x, w, y = p
    g_type = "double" if dtype == "float64" else "float"
    g_size = ITEMSIZE["float64" if dtype == "float64" else "float32"]
    y_size = ITEMSIZE[dtype]

    vector_y = y.aligned and y.strides[1] == 1 and y.strides[0] * y_size % 16 == 0
    # float32 and float64: y itself, or what is kept, can hold g, one B x O array less and half the footprint in L2.
    y_is_g = vector_y and y_size == g_size and n <= y.strides[0] <= INT32_MAX and not saved
    if chosen == "sm90" and n * y_size % 16:  # the copy engine stores whole 16 bytes, and would reach past the row
        y_is_g = False
    ldg = y.strides[0] if y_is_g else _round_up(n, 16 // (y_size if saved else g_size))
    keep, fused = None, chosen == "sm90" and _parking_obstacle(p) is None
    if saved:
        kept = kept_dtype(dtype, m, training=training)
        keep = Keep(kept, not fused and ITEMSIZE[kept] == g_size)

    blocks = _ceil(n, 32 * (16 // g_size))  # a warp's width, 16 bytes a lane
    splits, stats_rows = _split(m, blocks, min(device.ctas(STATS_CTAS), SPLITS * blocks), STATS_STEP)
    row_blocks, normalize_rows = _split(m, blocks, device.ctas(NORMALIZE_CTAS), NORMALIZE_STEP)

    affine = 0
    partials = _round_up(affine + 5 * ldg * g_size, 256)
    tickets = _round_up(partials + (splits * 2 * ldg * 8 if training and splits > 1 else 0), 256)
    tickets_bytes = blocks * 4 if training and splits > 1 else 0
    g = _round_up(tickets + tickets_bytes, 256)
    workspace = g + (0 if y_is_g or (keep is not None and keep.is_g) else m * ldg * g_size)

    kernel, grid, block, one = None, 0, 0, None
    if chosen == "tiled":
        kernel, grid, block = _tiled(p, "forward")
    through, limbs_at = None, _round_up(workspace, 256)
    if chosen == "sm90" and not fused:
        a, b = (at if 1 in at.strides else Matrix((k, 1), True) for at in (x, w))  # which are copied
        through = limb_gemm(p._replace(x=a, w=b, y=Matrix((ldg, 1), True)))
        workspace = limbs_at + through.workspace
    elif fused:
        one = one_launch(p, _mode(training), precision, prepared=prepared, keeps=saved, cumulative=cumulative)
    limbs = one is not None and one.limbs is not None
    return Plan(
        gemm=chosen,
        why=why,
        copy_x=1 not in x.strides if through else not _takes(limbs, chosen, x, m, k, y_size),
        copy_w=1 not in w.strides if through else not _takes(limbs, chosen, w, n, k, y_size),
        y_is_g=y_is_g,
        vector_y=vector_y,
        ldg=ldg,
        stats_grid=device.grid(blocks * splits),
        stats_rows=stats_rows,
        splits=splits,
        affine_grid=device.grid(_ceil(n, THREADS)),
        normalize_grid=device.grid(blocks * row_blocks),
        normalize_rows=normalize_rows,
        affine=affine,
        partials=partials,
        tickets=tickets,
        tickets_bytes=tickets_bytes,
        g=g,
        workspace=workspace,
        gemm_kernel=kernel,
        gemm_grid=grid,
        gemm_block=block,
        stats_kernel=Kernel("scale_stats", "scale_stats", (("G_TYPE", g_type),)),
        affine_kernel=Kernel("running_affine", "scale_stats", (("G_TYPE", g_type),)),
        normalize_kernel=normalize(dtype, keep.dtype if keep is not None and training else None),
        one=one,
        through=through,
        limbs_at=limbs_at,
        keep=keep,
    )


def kept_dtype(dtype: str, rows: int, *, training: bool) -> str:
    """What a forward keeps for its backward, g - m in training and g in inference: its dtype for an x of `dtype`.

    In inference a float16 g overflows, and there are no statistics to scale it by.
    """
    if ITEMSIZE[dtype] > 2:
        return dtype
    return "float32" if not training else dtype if rows > FEW_ROWS else "float64"


def normalize(dtype: str, kept: str | None = None) -> Kernel:
    """The variant of normalize for a y of this dtype, and for keeping g - m in another, or in the same."""
    defines = (("G_TYPE", "double" if dtype == "float64" else "float"), ("Y_TYPE", C_TYPE[dtype]))
    return Kernel("normalize", "normalize", defines if kept is None else (*defines, ("D_TYPE", C_TYPE[kept])))


def copy_matrix(itemsize: int) -> Kernel:
    """The variant of copy_matrix for elements of so many bytes."""
    word = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[itemsize]
    return Kernel("copy_matrix", "copy_matrix", (("WORD_TYPE", word),))


def copy_grid(rows: int, cols: int, device: Device) -> int:
    return device.grid(_ceil(rows, COPY_TILE) * _ceil(cols, COPY_TILE))


def fill_sm(shared: int) -> Kernel:
    """What fills an SM with one CTA, if `shared` is all of its shared memory."""
    return Kernel("fill_sm", "fill_sm", (), arch="sm_90a", shared=shared)


def backward_plan(
    p: Matmul,
    *,
    ldd: int,
    training: bool,
    needs: tuple[str, ...],
    precision: str = "highest",
    gemm: str = "auto",
    capturing: bool = False,
) -> BackwardPlan:
    """Decide a backward call, all sizes at least 1; `p` is the forward's with dy for y, `ldd` the deviations' pitch.

    Raises ValueError that names `gemm` if the one chosen in the forward cannot serve the call.
    """
    m, n, k, dtype, device, x, w, dy = p
    size = ITEMSIZE[dtype]
    dg = "x" in needs or "weight" in needs
    sums = (dg and training) or not {"scale", "gamma", "beta"}.isdisjoint(needs) or ("bias" in needs and not training)
    copy_dy = dy.strides[1] not in (0, 1)
    if copy_dy:
        dy = Matrix((n, 1), True)

    pitch = _round_up(n, 16 // size)
    # m, n, k of the two products; dg lies in rows of `pitch`
    rows = Matrix((pitch, 1), True)
    of_x = Matmul(m, k, n, dtype, device, rows, w.T, Matrix((k, 1), True))
    of_weight = Matmul(n, k, m, dtype, device, rows.T, x.T, Matrix((k, 1), True))
    dx = _product("dx", of_x, precision, gemm, capturing) if "x" in needs else None
    dw = _product("dw", of_weight, precision, gemm, capturing) if "weight" in needs else None
    across = 0
    if dw is not None and dw.gemm == "cublas" and dtype == "float32" and precision == "high":
        # cuBLAS' TF32 takes 1.5 to 1.8 times as long where both operands run across what is summed over.
        across = _round_up(m, 16 // size)
        dw = dw._replace(p=dw.p._replace(x=Matrix((across, 1), True)))

    blocks = _ceil(n, 32 * (16 // size))  # a warp's width, 16 bytes of dy a lane
    splits, sums_rows = _split(m, blocks, min(device.ctas(SUMS_CTAS), SPLITS * blocks), RING_STEP)
    row_blocks, dg_rows = _split(m, blocks, device.ctas(DG_CTAS), RING_STEP)
    # All rows of 64 bytes of columns by one CTA: nobody else's sums are needed. Unlike `across`, it does not depend on
    # what `needs` leaves out: the bits of the rest are the same.
    columns = _ceil(n, 64 // size)
    fused = sums and m <= FUSED_ROWS and columns <= device.ctas(FUSED_CTAS)
    fused = fused and (dtype != "float32" or precision == "highest")
    if fused or not sums:
        splits = 0
    dg_at = _round_up(splits * 2 * ldd * 8, 256)  # after the sums of each split
    across_at = _round_up(dg_at + (m * pitch * size if dg else 0), 256)
    limbs_at = _round_up(across_at + n * across * size, 256)
    limbs_bytes = max(
        (one.through.workspace for one in (dx, dw) if one is not None and one.through is not None), default=0
    )
    kept = kept_dtype(dtype, m, training=training)
    sums_kernel, dg_kernel, fused_kernel = backward_kernels(dtype, kept, training=training, across=across > 0)
    return BackwardPlan(
        sums=sums,
        dg=dg,
        fused=fused,
        reads_d=(dg and training) or "scale" in needs or "gamma" in needs,
        copy_dy=copy_dy,
        dy=dy,
        vector_dy=dy.aligned and dy.strides[1] == 1 and dy.strides[0] * size % 16 == 0,
        pitch=pitch,
        across=across,
        sums_grid=device.grid(columns if fused else blocks * splits),
        sums_rows=sums_rows,
        splits=splits,
        dg_grid=device.grid(blocks * (row_blocks if dg else 1)),
        dg_rows=dg_rows,
        dg_at=dg_at,
        across_at=across_at,
        limbs_at=limbs_at,
        workspace=limbs_at + limbs_bytes,
        sums_kernel=fused_kernel if fused else sums_kernel,
        dg_kernel=dg_kernel,
        x=dx,
        weight=dw,
    )


def _product(name: str, p: Matmul, precision: str, gemm: str, capturing: bool) -> Product:
    """Which GEMM makes dx or dw."""
    obstacle = _cublas_obstacle(p, capturing)
    if gemm == "cublas" and obstacle is not None:
        raise ValueError(f"gemm: expected a choice that can serve this call, got 'cublas' in the forward: {obstacle}")
    if _wants_limbs(p, precision, gemm, obstacle):
        copy = 1 not in p.w.strides
        p = p._replace(w=Matrix((1, p.n), True)) if copy else p
        return Product(p, "sm90", copy, None, 0, 0, limb_gemm(p))
    if _wants_sm90(p, gemm, obstacle):
        copy = not _lies_across(p)
        p = p._replace(w=Matrix((1, p.n), True)) if copy else p
        return Product(p, "sm90", copy, None, 0, 0, one=one_launch(p, "gemm", precision))
    if gemm != "tiled" and obstacle is None:
        copy = not _takes(False, "cublas", p.w, p.n, p.k, ITEMSIZE[p.dtype])
        return Product(p._replace(w=Matrix((1, p.n), True)) if copy else p, "cublas", copy, None, 0, 0)
    copy = p.w.strides[0] != 1
    if copy:
        p = p._replace(w=Matrix((1, p.n), True))
    return Product(p, "tiled", copy, *_tiled(p, name))


def _wants_limbs(p: Matmul, precision: str, gemm: str, obstacle: str | None) -> bool:
    """Whether a GEMM of the backward goes through limbs: asked for, or faster than cuBLAS, or cuBLAS cannot."""
    if not takes_limbs(p.dtype, precision, p.device) or p.n % 4 or max(p.m, p.n, p.k) > INT32_MAX // 2:
        return False
    if gemm != "auto":
        return gemm == "sm90"
    columns = 8e-6 * p.k * (p.m * (p.x.strides[1] != 1) + p.n * (p.w.strides[1] != 1))
    ours = (
        _tile(p, "gemm", "limbs").us + _split_us(p, "limbs", prepared=False) + 2 * SPLIT_US + columns / 2 / SPLIT_RATE
    )
    ieee = 2 * p.m * p.n * p.k / (CUBLAS_FLOPS["limbs"] * p.device.sms / 132) + IEEE_CALL_US
    return obstacle is not None or (p.k >= 64 and ours < ieee)


def _wants_sm90(p: Matmul, gemm: str, obstacle: str | None) -> bool:
    """Whether forward_sm90 makes a 16-bit product: asked for, faster than cuBLAS or than its call, or cuBLAS cannot."""
    if p.device.capability != (9, 0) or not p.device.sm90a or p.dtype not in ("float16", "bfloat16"):
        return False
    if p.n % 8 or max(p.m, p.n, p.k) > INT32_MAX // 2:  # rows of the result are multiples of 16 bytes
        return False
    if p.k > MAX_TERMS[p.dtype]:
        return False
    if gemm != "auto" or obstacle is not None:
        return gemm in ("auto", "sm90")
    return _lies_across(p) and (_fills_waves(p) or _tile(p, "gemm", p.dtype).us <= CUBLAS_HOST_US)


def _fills_waves(p: Matmul) -> bool:
    """Whether the largest tiles fill several waves: measured to beat cuBLAS, which cuts other shapes better."""
    tile = _tile(p, "gemm", p.dtype)
    resident = p.device.clusters(tile.cluster)
    block_n = SM90_BLOCK_N * tile.cluster
    waves = _ceil(_ceil(p.m, tile.block_m) * _ceil(p.n, block_n), resident)
    largest = (tile.block_m, tile.cluster) == (BLOCKS_M[0], CLUSTERS[0])
    return largest and waves > 1 and p.m * p.n >= FILL * waves * resident * tile.block_m * block_n


def _lies_across(p: Matmul) -> bool:
    """Whether forward_sm90 takes the weight, or x, as it lies across what is summed over."""
    row, col = p.w.strides
    return row == 1 and p.n <= col < 2**39 and p.w.aligned and col % 8 == 0


def limb_gemm(p: Matmul) -> LimbGemm:
    """A float32 GEMM through limbs; operands lie along what is summed over, or across it, rows of y on 16 bytes."""
    one = one_launch(p, "gemm", "highest")
    a, b = (at.strides[1] != 1 for at in (p.x, p.w))
    a_maxima = _round_up(one.workspace, 256)
    b_maxima = _round_up(a_maxima + 4 * p.m * a, 256)
    return LimbGemm(
        one=one,
        split_grid=_split_grid((0 if a else p.m) + (0 if b else p.n), p.k, p.device),
        a_maxima=a_maxima if a else None,
        b_maxima=b_maxima if b else None,
        workspace=b_maxima + 4 * p.n * b,
    )


def column_kernels() -> tuple[Kernel, Kernel]:
    """What makes limbs of an operand that lies across what is summed over."""
    maxima, columns = (Kernel(name, *split_limbs(SPLIT_WIDTH)[1:]) for name in ("column_maxima", "split_columns"))
    return maxima, columns


def column_grids(k: int, count: int, device: Device) -> tuple[int, int, int]:
    """For k rows of `count` columns: column_maxima's grid and rows of an item, split_columns' grid."""
    blocks = _ceil(count, 128)
    rows = _round_up(_ceil(k, max(1, 1024 // blocks)), 64)
    return device.grid(blocks * _ceil(k, rows)), rows, device.grid(_ceil(count, 64) * _ceil(k, 64))


def backward_kernels(dtype: str, kept: str, *, training: bool, across: bool = False) -> tuple[Kernel, Kernel, Kernel]:
    """The variants of backward_sums, backward_dg and backward_fused for a dy of this dtype and what was kept."""
    t, d = C_TYPE[dtype], C_TYPE[kept]
    g = "double" if d == "double" else "float"
    defines = (("T_TYPE", t), ("D_TYPE", d), ("G_TYPE", g), ("TRAINING", str(training).lower()))
    sums, dg, fused = (Kernel(f"backward_{name}", "backward", defines) for name in ("sums", "dg", "fused"))
    if across:
        tile = 4 * THREADS // WARPS * (RING_STEP + 1)  # float32 columns of a CTA by rows of its ring, padded by one
        dg = dg._replace(defines=(*defines, ("ACROSS", "true")), shared=4 * tile)
    return sums, dg, fused


def gemm_for(
    p: Matmul,
    *,
    precision: str,
    gemm: str,
    capturing: bool,
    training: bool = True,
    prepared: bool = False,
    saved: bool = False,
) -> tuple[str, str]:
    """The path that serves a call, and why; ValueError if `gemm` names one that cannot."""
    obstacles = {
        "sm90": _sm90_obstacle(p, precision, training, saved),
        "cublas": _cublas_obstacle(p, capturing),
        "tiled": None,
    }
    if gemm != "auto":
        obstacle = obstacles[gemm]
        if obstacle is not None:
            raise ValueError(f"gemm: expected a choice that can serve this call, got {gemm!r}: {obstacle}")
        return gemm, "asked for"
    if obstacles["sm90"] is obstacles["cublas"] is None:
        element = element_for(p.dtype, precision)
        if element == "limbs" and (p.k < 64 or (p.k * p.n <= 64 * 64 and p.m > 8192)):
            return "cublas", "more accurate, or faster, for few features"
        ours = _tile(p, _mode(training), element, keeps=saved).us + _split_us(p, element, prepared=prepared)
        few_rows = training and element != "limbs" and p.m <= 128 and p.n * p.k >= 2**24  # where the model misses
        if few_rows or _cublas_us(p, element, training, keeps=saved) < ours:
            return "cublas", "its GEMM cuts this shape better than tiles of one launch"
    chosen = next(name for name, obstacle in obstacles.items() if obstacle is None)
    better = [obstacle for obstacle in obstacles.values() if obstacle is not None]
    return chosen, better[-1] if better and chosen == "tiled" else "fastest of those that serve"


def _cublas_obstacle(p: Matmul, capturing: bool) -> str | None:
    if max(p.m, p.n, p.k, *map(abs, p.x.strides), *map(abs, p.w.strides)) > INT32_MAX:
        return "cuBLAS takes sizes below 2^31"
    if p.dtype == "bfloat16" and p.device.capability < (8, 0):
        return "cuBLAS has no bfloat16 below compute capability 8.0"
    if p.device.limited and p.device.sms < CUBLAS_SMS:
        return f"cuBLAS cannot be held to fewer than {CUBLAS_SMS} SMs"
    return "CuPy's cuBLAS cannot be captured in a CUDA graph" if capturing else None


def takes_limbs(dtype: str, precision: str, device: Device) -> bool:
    """Whether forward_sm90 takes operands of this dtype as limbs."""
    return element_for(dtype, precision) == "limbs" and device.capability == (9, 0) and device.sm90a


def element_for(dtype: str, precision: str) -> str:
    """What forward_sm90 makes of operands of a dtype: one of ELEMENTS."""
    return {"highest": "limbs", "high": "tf32"}[precision] if dtype == "float32" else dtype


def _sm90_obstacle(p: Matmul, precision: str, training: bool, saved: bool) -> str | None:
    m, n, k, dtype, device, x, w, y = p
    if device.capability != (9, 0) or not device.sm90a:
        return "it needs a GPU of compute capability 9.0 and NVRTC 12.9"
    if dtype == "float64":
        return "it has no float64"
    size, limbs = ITEMSIZE[dtype], element_for(dtype, precision) == "limbs"
    if max(m, n, k) > INT32_MAX // 2 or max(x.strides[0], w.strides[0], y.strides[0]) * size >= 2**40:
        return "the copy engine takes smaller sizes"
    if saved and not training:
        # The sums over g see all of its error that has one sign: what tensor cores cut off.
        return "it keeps nothing for a backward with frozen statistics (return_saved=True)"
    if saved and kept_dtype(dtype, m, training=True) != dtype:
        return f"it keeps no deviations in float64, as up to {FEW_ROWS} rows need (return_saved=True)"
    if limbs:  # they have a pitch of their own, and their g need not lie in y
        return None
    if k > MAX_TERMS[element_for(dtype, precision)]:
        return f"beyond {MAX_TERMS[element_for(dtype, precision)]} input features its sums lose digits"
    if k * size % 16:  # what is copied has rows of k elements
        return "rows of x and weight must be multiples of 16 bytes"
    return _parking_obstacle(p)


def _parking_obstacle(p: Matmul) -> str | None:
    """Why forward_sm90 cannot work in y's memory."""
    y, size = p.y, ITEMSIZE[p.dtype]
    if not y.aligned or y.strides[1] != 1 or y.strides[0] < p.n or y.strides[0] * size % 16:
        return "rows of y must start on 16 bytes"
    if p.n * size % 16:  # a parked tile is finished in words of 16 bytes: the last would reach past the row
        return "rows of y must be multiples of 16 bytes"
    return None


def _mode(training: bool) -> str:
    return "training" if training else "inference"


class _Tile(NamedTuple):
    us: float
    block_m: int
    cluster: int
    clusters: int


def _tile(p: Matmul, mode: str, element: str, *, keeps: bool = False) -> _Tile:
    """The tile that is cheapest for forward_sm90, and the clusters of its grid."""
    found = []
    for block_m, cluster in itertools.product(BLOCKS_M, CLUSTERS):
        if element == "limbs" and block_m == 256:
            continue  # no room for sums beside its accumulators
        if _across(p, mode, element)[0] and block_m // cluster < COLUMN:
            continue
        tiles, resident = _ceil(p.m, block_m) * _ceil(p.n, SM90_BLOCK_N * cluster), p.device.clusters(cluster)
        if resident == 0:
            continue
        waves = _ceil(tiles, resident)
        # As few clusters as need no more waves: the power that the others would draw goes to these.
        clusters = _ceil(tiles, waves)
        us = _one_launch_us(p, mode, element, block_m, cluster, waves, clusters, keeps=keeps)
        found.append(_Tile(us, block_m, cluster, clusters))
    return min(found)


def _one_launch_us(
    p: Matmul, mode: str, element: str, block_m: int, cluster: int, waves: int, clusters: int, *, keeps: bool
) -> float:
    """A forward by forward_sm90: waves of tiles, each steps of the tensor core or of what feeds it, and what is around.

    Feeding: each CTA loads its weight tile and its share of the x tile through L2; what differs among the CTAs of a
    wave comes from memory, where the operands do not stay in L2. A short tile waits for the constants of the next
    (inference) or for the others' statistics (training).
    """
    m, n, k, dtype, *_ = p
    rows, ctas = _ceil(m, block_m), clusters * cluster
    limbs = 2 if element == "limbs" else 1
    size = 2 if element == "limbs" else ITEMSIZE[dtype]  # of an operand's element
    loaded = limbs * ctas * (block_m / cluster + SM90_BLOCK_N) * 128e-6
    distinct = limbs * (min(rows, clusters) * block_m + max(1.0, clusters / rows) * cluster * SM90_BLOCK_N) * 128e-6
    feed = loaded / L2_RATE + (distinct / MEMORY_RATE if limbs * (m + n) * k * size > 1e6 * L2_MB else 0.0)
    if limbs == 1 and k * size % 128:
        feed *= OFF_LINE
    products = 3 if element == "limbs" else 1
    pace = [products * MMA_US * block_m, STEP_US, feed]
    if mode == "gemm" and limbs == 1:  # a step is written to shared memory once, and x is read by both warpgroups
        pace.append(SHARED_US * (SM90_BLOCK_N + block_m + SM90_BLOCK_N + 2 * block_m))
    step = sum(us**6 for us in pace) ** (1 / 6)  # the largest, smoothly
    y = ctas * block_m * SM90_BLOCK_N * ITEMSIZE[dtype] * 1e-6 * (OFF_LINE_Y if n * ITEMSIZE[dtype] % 128 else 1.0)
    y *= 1 + keeps  # g - m is written as y is
    tile = _ceil(k * size, 128) * step + TILE_US[mode] + y / Y_RATE[mode]
    warps = _ceil(min(n, SM90_BLOCK_N), 32)  # of features
    if mode == "training":
        merge = MERGE_US.get(rows, TRIP_US)
        around = (warps - 1) / 3 * merge if rows == 1 else merge if warps > 1 or rows > 3 else 0.0
        later = max(tile + y / PARKED_RATE, PARK_US)
    else:
        laying = _ceil(warps, 3) if mode == "inference" else 0
        around, later = LAYING_US * laying, max(tile, RELAYING_US * laying)
    us: float = CALL_US[mode] + tile + (waves - 1) * later + around
    return us


def _split_us(p: Matmul, element: str, *, prepared: bool) -> float:
    """What comes before the one launch."""
    if element != "limbs":
        return 0.0
    return SPLIT_US + (p.m + (0 if prepared else p.n)) * p.k * 8e-6 / SPLIT_RATE


def _cublas_us(p: Matmul, element: str, training: bool, *, keeps: bool) -> float:
    """A forward by cuBLAS and two launches more."""
    m, n, k, dtype, device, *_ = p
    size, g = ITEMSIZE[dtype] * (1 + keeps), 4e-6 * m * n
    cold = g > 0.8 * L2_MB
    us = CUBLAS_CALL_US[training] + (IEEE_CALL_US if element == "limbs" else 0.0)
    us += 2 * m * n * k / (CUBLAS_FLOPS[element] * device.sms / 132)
    us += (m + n) * k * ITEMSIZE[dtype] * 1e-6 / OPERAND_RATE + g * (4 + size) / 4 / Y_CUBLAS_RATE[cold]
    return us + (g / G_RATE[cold] if training else 0.0)


def one_launch(
    p: Matmul, mode: str, precision: str, *, prepared: bool = False, keeps: bool = False, cumulative: bool = False
) -> OneLaunch:
    """The launch of forward_sm90 in this mode, with the tile of least cost; `keeps`: g - m for a backward, too.

    CTAs wait for each other's statistics where a feature has several tiles, and where `cumulative` makes all of them
    read the count of batches that one raises.
    """
    m, n, k = p.m, p.n, p.k
    element = element_for(p.dtype, precision)
    _, block_m, cluster, clusters = _tile(p, mode, element, keeps=keeps)
    rows, blocks = _ceil(m, block_m), _ceil(n, SM90_BLOCK_N)
    merged = roll = workspace = 0
    if mode != "gemm":  # which has neither statistics nor flags
        merged = rows * blocks * SM90_BLOCK_N * 16
        roll = merged + blocks * SM90_BLOCK_N * 16 * (2 if keeps else 1)
        workspace = roll + _round_up(8 * (1 + clusters * cluster), 256)
    split = limbs(m, 0 if prepared else n, k, workspace, p.device) if element == "limbs" else None
    if split is not None:
        workspace = split.w_exponents + (0 if prepared else 4 * n)
    return OneLaunch(
        kernel=forward_sm90(element, mode, block_m, cluster, keeps, *_across(p, mode, element)),
        cooperative=mode == "training" and (rows > 1 or cumulative),
        element=element,
        limbs=split,
        block_m=block_m,
        cluster=cluster,
        clusters=clusters,
        panel=_panel(p, mode, element),
        merged=merged,
        roll=roll,
        workspace=workspace,
    )


def _panel(p: Matmul, mode: str, element: str) -> int:
    """Columns of blocks of features that clusters take together: x is then streamed less often, but more of w is."""
    if mode == "gemm" and element != "limbs":
        return 8 if (p.m + p.n) * p.k * ITEMSIZE[p.dtype] > 1e6 * PANEL_MB else 2
    return 1 if p.m <= 8192 else 2 if mode == "training" and element != "limbs" else 4


def _across(p: Matmul, mode: str, element: str) -> tuple[bool, bool]:
    """Whether forward_sm90 reads x, and the weight, across what is summed over: in all other modes none lies so."""
    if mode != "gemm" or element not in ("float16", "bfloat16"):
        return False, False
    return p.x.strides[1] != 1, p.w.strides[1] != 1


def limbs(m: int, n: int, k: int, start: int, device: Device) -> Limbs:
    """Limbs of the m rows of x and the n rows of the weight, none of which may be there, from an offset on."""
    pitch = 2 * _round_up(k, 8)
    w = start + _round_up(2 * m * pitch, 256)
    x_exponents = w + _round_up(2 * n * pitch, 256)
    return Limbs(
        kernel=split_limbs(k),
        grid=_split_grid(m + n, k, device),
        pitch=pitch,
        x=start,
        w=w,
        x_exponents=x_exponents,
        w_exponents=x_exponents + _round_up(4 * m, 256),
    )


def _split_grid(rows: int, k: int, device: Device) -> int:
    return device.grid(_ceil(rows, 1 if k > SPLIT_WIDTH else THREADS // 32))


def split_limbs(k: int) -> Kernel:
    """The variant of split_limbs for rows of k elements."""
    return Kernel("split_limbs", "split_limbs", (("ROW_WARPS", "8" if k > SPLIT_WIDTH else "1"),), arch="sm_90a")


def forward_sm90(
    element: str,
    mode: str,
    block_m: int,
    cluster: int,
    keeps: bool = False,
    x_across: bool = False,
    w_across: bool = False,
) -> Kernel:
    """The variant of forward_sm90 for these operands, this mode, this many rows in a tile and CTAs in a cluster.

    `keeps`: training that also writes g - m; `x_across`, `w_across`: a 16-bit GEMM whose x, or weight, lies across k.
    """
    limbs = 2 if element == "limbs" else 1
    stages = {256: 4, 128: 6, 64: 8, 32: 8}[block_m] // limbs
    staging = 64 if element in ("tf32", "limbs") else min(block_m, 64)  # rows of 128 bytes that a buffer of y holds
    # Beside the rings: arguments (12 bytes a feature; 4 with KEEP), coefficients (8 bytes; 16), barriers and counters.
    shared = limbs * stages * (SM90_BLOCK_N + block_m) * 128 + 4 * staging * 128 + SM90_BLOCK_N * (12 + 8) + 256
    defines = {"ELEMENT": ELEMENTS[element], "MODE": MODES[mode], "BLOCK_M": block_m, "STAGES": stages}
    defines |= {"CLUSTER": cluster, "KEEP": int(keeps), "X_ACROSS": int(x_across), "W_ACROSS": int(w_across)}
    return Kernel(
        "forward_sm90",
        "forward_sm90",
        tuple((name, str(value)) for name, value in defines.items()),
        arch="sm_90a",
        shared=shared,
    )


def _takes(limbs: bool, gemm: str, operand: Matrix, rows: int, k: int, itemsize: int) -> bool:
    """Whether the GEMM reads these strides as they are."""
    row, col = operand.strides
    if gemm == "tiled" or limbs:
        return col == 1
    if gemm == "sm90":
        return col == 1 and row >= k and operand.aligned and row * itemsize % 16 == 0
    return (col == 1 and row >= k) or (row == 1 and col >= rows)


def _tiled(p: Matmul, product: str) -> tuple[Kernel, int, int]:
    """The largest tile that still gives every SM one; failing that, the smallest."""
    for tile in TILES["double" if p.dtype == "float64" else "float"]:
        block_m, block_n, thread_m, thread_n = tile
        grid = _ceil(p.m, block_m) * _ceil(p.n, block_n)
        if grid >= p.device.sms:
            break
    return gemm_tiled(p.dtype, tile, product), p.device.grid(grid), (block_m // thread_m) * (block_n // thread_n)


def gemm_tiled(dtype: str, tile: tuple[int, int, int, int], product: str) -> Kernel:
    """The variant of gemm_tiled for "forward" (g = x wᵀ), "dx" (dg w) or "dw" (dgᵀ x)."""
    t = C_TYPE[dtype]
    names = ("BLOCK_M", "BLOCK_N", "THREAD_M", "THREAD_N")
    defines = [("X_TYPE", t), ("G_TYPE", "double" if t == "double" else "float")]
    defines += zip(names, map(str, tile), strict=True)
    if product != "forward":
        defines += [("C_TYPE", t), ("X_ACROSS", str(product == "dw").lower()), ("W_ACROSS", "true")]
    return Kernel("gemm_tiled", "gemm_tiled", tuple(defines))


def _split(m: int, blocks: int, ctas: int, step: int) -> tuple[int, int]:
    """Cut m rows so that blocks * cuts fill one wave of `ctas`: (cuts, rows each), rows in whole steps."""
    rows = _round_up(_ceil(m, max(1, ctas // blocks)), step)
    return _ceil(m, rows), rows


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil(a, b) * b
