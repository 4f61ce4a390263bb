"""What is true of every plan: its launches, workspace and copies fit together, and fit the device."""

from __future__ import annotations

from functools import cache

from hypothesis import assume
from hypothesis import strategies as st

from gsbn._cuda import kernels as _kernels
from gsbn._plan import FEW_ROWS, ITEMSIZE, SM90_BLOCK_N, Device, Matmul, Matrix, OneLaunch
from gsbn._plan.copies import whole_words
from gsbn._plan.declared import flags
from gsbn._plan.forward import PREPARED
from gsbn._plan.forward_passes import STATS_GROUP
from gsbn._plan.gemm import LEAST_TERMS
from gsbn._plan.limbs import AT_ONCE, FOR_DX, Splits, maxima_grid, split_grid, tiles_grid
from gsbn._plan.problem import VECTORS
from gsbn._plan.program import Launch
from gsbn._plan.sm90_variants import MODES
from gsbn._plan.sources import Constants, Kernel
from gsbn._plan.split_k import RESIDENT, SplitKReduction, Tall
from gsbn._plan.variants import THREADS, split_limbs, tile_kernels
from tests.plan.seen import Backward, Forward, Made, assert_steps_fit, offset_of
from tests.support.harness import DTYPES
from tests.support.strategies import sides


@cache
def known(arch: str | None = None, activations: tuple[str, ...] = ("relu",)) -> frozenset[Kernel]:
    """All variants that a plan may launch, made once: it takes 0.1 seconds."""
    return frozenset(_kernels.all_kernels(arch, activations))


H200 = Device((9, 0), 132)
SHARES = [H200.at_most(120), H200.at_most(1), Device((9, 0), 15, pairs=0), Device((8, 0), 108).at_most(20)]
DEVICES = [Device((7, 5), 40), Device((8, 6), 28), Device((8, 9), 128), H200, Device((10, 0), 148), Device((12, 0), 1)]
DEVICES += SHARES
LARGEST_GRID = 2**31 - 1


def sizes() -> st.SearchStrategy[int]:
    return sides(600) | st.integers(1, 2**22)


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int) -> Matrix:
    """In C or Fortran order, padded or not, or with any strides."""
    pad = draw(st.sampled_from([0, 0, 1, 8]))
    strides = draw(
        st.sampled_from([(columns + pad, 1), (1, rows + pad), (-(columns + pad), 1), (2 * columns, 2), (0, 0), (0, 1)])
    )
    return Matrix.of((rows, columns), strides, draw(st.booleans()))


@st.composite
def problems(draw: st.DrawFn) -> Matmul:
    m, n, k = draw(sizes()), draw(sizes()), draw(sizes())
    assume(max(m * n, m * k, n * k) <= 2**40)  # no GPU holds more, and a copy of more needs a grid beyond 2^31 - 1
    dtype, device = draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from(DEVICES))
    return Matmul(m, n, k, dtype, device, draw(matrices(m, k)), draw(matrices(n, k)), draw(matrices(m, n)))


def largest_grid(device: Device) -> int:
    """The most CTAs of a launch. CTAs spread over all SMs before any gets a second, so n of them take n SMs."""
    return device.sms if device.limited else LARGEST_GRID


ARGUMENTS = {"x", "weight", *VECTORS, "num_batches_tracked", "out", *PREPARED, "dy", "deviations", "vectors"}


def assert_fits(p: Matmul, decided: Forward, *, training: bool) -> None:
    assert_steps_fit(decided.program, ARGUMENTS, known(), largest_grid(p.device))

    # an operand is the argument, or a copy whose rows start on 16 bytes
    taken, size, one = decided.taken, ITEMSIZE[p.dtype], decided.one
    if taken is not None:
        assert taken._replace(x=p.x, w=p.w, y=p.y, device=p.device) == p
        for given, at, rows, columns in ((p.x, taken.x, p.m, p.k), (p.w, taken.w, p.n, p.k)):
            assert_copied_or_given(given, at, rows, columns, size)
    if one is not None:
        assert taken is not None
        assert_copied_or_given(p.y, taken.y, p.m, p.n, size)
        assert_one_launch_fits(taken, one)
        assert not one.defers or whole_words(taken.y, p.n, size)
        copied = p.m * taken.y.strides[0] * size if taken.y.own else 0
        assert one.workspace + copied <= decided.workspace
        return

    # the passes cover every row once
    passes = decided.normalize
    assert passes is not None
    fields, stats = passes.fields, decided.stats
    assert decided.one_pass == (training and stats is None)
    if stats is not None:
        assert (fields["splits"] - 1) * fields["stats_rows"] < p.m <= fields["splits"] * fields["stats_rows"]
        assert training
    if decided.one_pass:  # a CTA has all rows of its columns, and a warp has whole rows
        assert fields["normalize_rows"] == p.m <= STATS_GROUP * THREADS // fields["row_threads"]
        assert fields["row_threads"] in (2, 4, 8, 16)

    # the workspace has constants, the statistics of each split and g: aligned, in order, and large enough
    g_size, ldg = max(size, 4), fields["ldg"]
    affine, partials = fields["affine"], fields["partials"]
    assert ldg >= p.n and affine % 256 == partials % 256 == 0
    of_constants = 4 * ldg * g_size if stats is not None else 0
    of_partials = fields["splits"] * 2 * ldg * 8 if stats is not None else 0  # (mean, M2), float64
    assert affine + of_constants <= partials
    g_at = None if decided.g is None else offset_of(decided.g)
    end = partials + of_partials
    if g_at is not None:
        assert g_at % 256 == 0 and end <= g_at
        end = g_at + p.m * ldg * g_size
    assert end <= decided.workspace
    if decided.merge is not None:
        assert fields["merge_columns"] in (8, 16, 32, 64, 128, 256)
        assert 1 <= decided.merge.grid <= max(1, p.device.sms // 2)

    # 16-byte accesses only if every row starts on 16 bytes
    if fields["flags"] & flags(vector_y=True):
        assert p.y.aligned and p.y.strides[1] == 1 and p.y.strides[0] * size % 16 == 0
    assert ldg * g_size % 16 == 0
    if decided.g in ("y", "out"):
        assert size == g_size and (p.y.strides[1], ldg) == (1, p.y.strides[0])
        if decided.product is not None:  # TMA stores whole words: the last may not pass the end of a row
            assert p.n * g_size % 16 == 0

    # operands of a GEMM have contiguous rows (for cuBLAS, or columns) that do not overlap; others are copied
    for name, ld, given, rows in (("x", "ldx", p.x, p.m), ("weight", "ldw", p.w, p.n)):
        at = given if taken is None else taken.x if name == "x" else taken.w
        if taken is None and decided.array(f"copy of {name}") is not None:
            at = Matrix((fields[ld], 1), True)
        row, column = at.strides
        if decided.limbs.of:  # limbs can be made of rows and columns of any alignment
            assert 1 in at.strides
            continue
        by_rows = column == 1 and (decided.gemm == "tiled" or row >= p.k)
        assert by_rows or (decided.gemm == "cublas" and row == 1 and column >= rows)


def assert_copied_or_given(given: Matrix, at: Matrix, rows: int, columns: int, size: int) -> None:
    if not at.own:
        assert at == given
        return
    step, pitch = sorted(at.strides)
    assert (step, at.aligned, pitch * size % 16) == (1, True, 0)
    assert pitch >= (columns if at.strides[1] == 1 else rows)


def quotient(a: int, reciprocal: int) -> int:
    """As `quotient` in kernels/common/common.cuh."""
    return 4 * a * reciprocal >> 64


def is_recompute(one: OneLaunch) -> bool:
    return dict(one.kernel.defines)["MODE"] == MODES["recompute"]


def is_cluster_batch(one: OneLaunch) -> bool:
    return dict(one.kernel.defines)["MODE"] == MODES["cluster_batch"]


def assert_one_launch_fits(p: Matmul, one: OneLaunch) -> None:
    assert one.kernel in known("sm_90a")
    assert one.kernel.shared <= 227 << 10  # the limit of a CTA on Hopper
    of_rows = one.split * one.cluster_m  # tiles of a cluster, one below the other
    ctas = one.cluster * of_rows
    tiles = -(-p.m // (one.block_m * of_rows)) * -(-p.n // (SM90_BLOCK_N * one.cluster))  # of all CTAs of a cluster
    two = dict(one.kernel.defines)["OCCUPANCY"] == "2"
    assert not two or (ctas == 1 and one.kernel.shared + 1024 <= 228 << 9)  # half of an SM's
    assert 1 <= one.clusters <= min(tiles, p.device.ctas(2) if two else p.device.clusters(ctas))
    assert one.ctas == one.clusters * ctas
    assert one.ctas <= p.device.ctas(1 + two)
    if one.split > 1:  # each CTA has one tile, and a part of k
        assert one.clusters == tiles and p.k > one.split and not is_recompute(one)
    features, parts = -(-p.n // SM90_BLOCK_N) * SM90_BLOCK_N, -(-p.m // one.block_m)
    if is_recompute(one):  # all tiles of a cluster have the same features
        assert one.clusters % one.order.panel == 0 and one.cooperative
        assert one.order.panel == -(-p.n // (SM90_BLOCK_N * one.cluster))
        parts = one.clusters // one.order.panel
    end = 0
    if is_cluster_batch(one):  # each cluster has one tile
        assert p.m <= one.block_m * of_rows and one.clusters == tiles and one.cluster == 1 and not one.cooperative
    else:
        assert parts * features * 16 <= one.merged  # (mean, M2, launch) of every part and feature
        assert_merged_parts_fit(p, one)
        assert one.merged + features * 16 <= one.epoch
        end = one.epoch + 8 * (1 + one.ctas)
    if one.limbs is not None:
        limbs, size = one.limbs, 4 * one.limbs.pitch  # of a row, both limbs
        assert limbs.kernel in known("sm_90a")
        assert limbs.pitch >= p.k
        assert 1 <= limbs.grid <= largest_grid(p.device)
        assert limbs.pitch % 64 == limbs.x % 256 == limbs.w % 256 == 0
        assert end <= limbs.x
        assert limbs.x + p.m * size <= limbs.w
        of_w = 0 if one.element == "limbs_rs" else p.n
        assert limbs.w + of_w * size <= limbs.x_exponents
        assert limbs.x_exponents + 4 * p.m <= limbs.w_exponents
        end = limbs.w_exponents + 4 * of_w
    assert end <= one.workspace
    assert p.y.strides[1] == 1 and p.n <= p.y.strides[0]
    assert not one.defers or (p.y.aligned and p.y.strides[0] * ITEMSIZE[p.dtype] % 16 == 0)
    # what TMA can load
    for at in (p.x, p.w):
        assert at.strides[1] == 1
        if one.limbs is None or (one.element == "limbs_rs" and at is p.w):
            assert at.strides[0] >= p.k and at.aligned and at.strides[0] * ITEMSIZE[p.dtype] % 16 == 0


def assert_merged_parts_fit(p: Matmul, one: OneLaunch) -> None:
    """After the words of all tiles there is room for those of merged parts."""
    rows, blocks = -(-p.m // one.block_m), -(-p.n // SM90_BLOCK_N)
    counts = [
        one.order.parts_in_panels if block < one.order.in_panels else one.order.parts_alone for block in range(blocks)
    ]
    if not is_recompute(one) and any(count != rows for count in counts):
        assert one.defers and one.order.in_panels < blocks and all(1 <= count <= rows for count in counts)
        assert (rows * blocks + sum(counts)) * SM90_BLOCK_N * 16 <= one.merged


def assert_limbs_fit(limbs: Splits, gpu: Device, start: int, lent: dict[str, int]) -> None:
    """Maxima, exponents and limbs do not overlap; limbs in other memory take no more than its bytes in `lent`."""
    taken: list[tuple[int, int]] = []

    def take(at: int, size: int) -> None:
        assert at >= start and at % 256 == 0
        assert all(at + size <= first or end <= at for first, end in taken)
        taken.append((at, at + size))

    for split in limbs.of:
        assert split.k_major is not None or split.mn_major is not None
        assert 1 <= split_grid((split.rows,), split.columns, gpu) <= largest_grid(gpu)
        for operand, count, k in (
            (split.k_major, split.rows, split.columns),
            (split.mn_major, split.columns, split.rows),
        ):
            if operand is None:
                assert limbs.word(operand) == -1
                continue
            assert operand.pitch % 4 == 0 and operand.pitch >= -(-k // 64) * 64
            take(operand.exponents, 4 * count)
            assert limbs.maxima <= limbs.maxima + 4 * limbs.word(operand) <= limbs.exponents - 4 * count
            if isinstance(operand.limbs, int):
                take(operand.limbs, 4 * count * operand.pitch)
            else:
                assert 4 * count * operand.pitch <= lent[operand.limbs]
    mn_major = [split for split in limbs.of if split.mn_major is not None]
    assert len(mn_major) <= AT_ONCE
    if mn_major:
        take(limbs.maxima, limbs.exponents - limbs.maxima)
        grid, rows = maxima_grid(mn_major, gpu)
        assert 1 <= grid <= largest_grid(gpu) and 1 <= tiles_grid(mn_major, gpu) <= largest_grid(gpu)
        assert rows * grid >= sum(split.rows * -(-split.columns // 128) for split in mn_major) or gpu.limited
    assert all(end <= limbs.end for _, end in taken)
    # Only two kinds of limbs overwrite dg: those of its own rows, tile by tile, and late ones, after these were read.
    for split in limbs.of:
        for operand in (split.k_major, split.mn_major):
            if operand is not None and operand.limbs == "dg":
                assert split.late or (split.name == "dg" and operand is split.k_major and operand.pitch == split.pitch)
            assert operand is None or operand.limbs != FOR_DX or split.late


def assert_dg_is_read_before_limbs_lie_there(decided: Backward) -> None:
    operands = {split.name: (split.k_major, split.mn_major) for split in decided.limbs.of}
    places = {name: {operand.limbs for operand in of if operand is not None} for name, of in operands.items()}
    takes_dg = decided.weight is not None and not decided.weight.of_limbs
    assert decided.weight_first <= takes_dg
    assert decided.weight_first or not (takes_dg and "dg" in places.get("dg", ()))
    assert not (decided.weight_first and any("dweight" in of for of in places.values()))
    k_major, mn_major = operands.get("dg", (None, None))
    if (
        k_major is not None and k_major.limbs == "dg" and mn_major is None
    ):  # by split_limbs: dense rows, each held in registers as a whole
        split = next(split for split in decided.limbs.of if split.name == "dg")
        assert split.pitch == split.columns == k_major.pitch <= 8192


def assert_limb_gemm_fits(p: Matmul, one: OneLaunch, limbs: Splits, a: str, b: str) -> None:
    assert (one.limbs, one.workspace) == (None, 0)
    assert (p.dtype, p.device.capability) == ("float32", (9, 0))
    assert {one.kernel, split_limbs(p.k), *tile_kernels()} <= known("sm_90a")
    assert one.ctas <= p.device.sms
    of_both = one.element == "limbs"
    if not of_both:  # what TMA can load
        mn_major = int(dict(one.kernel.defines)["W_MN_MAJOR"])
        length = p.n if mn_major else p.k
        assert one.element == "limbs_rs" and p.w.strides[1 - mn_major] == 1
        assert p.w.aligned and p.w.strides[mn_major] >= length and p.w.strides[mn_major] % 4 == 0
        assert b not in {split.name for split in limbs.of}
    for name, at, count in ((a, p.x, p.m), (b, p.w, p.n))[: 1 + of_both]:
        split, mn_major = next(split for split in limbs.of if split.name == name), at.strides[1] != 1
        assert at.strides[0 if mn_major else 1] == 1
        assert limbs.operand(name, at) == (split.mn_major if mn_major else split.k_major)
        assert (split.rows, split.columns) == ((p.k, count) if mn_major else (count, p.k))
        assert split.pitch == at.strides[1 if mn_major else 0]


def assert_reduction_fits(parts: SplitKReduction, n: int, k: int, gpu: Device) -> None:
    assert parts.pitch >= k and parts.pitch % 4 == 0 and parts.size >= n * parts.pitch
    assert parts.share in (1, 2, 4, 8) and parts.share <= parts.number
    assert parts.share == 1 or parts.share * -(-parts.size // (4 * THREADS)) <= RESIDENT * gpu.sms
    assert 1 <= parts.grid <= largest_grid(gpu)


def assert_tall_product_fits(p: Matmul, tall: Tall) -> None:
    """c (m, n) of operands (k, m) and (k, n)."""
    assert (p.dtype, p.device.capability) == ("float32", (9, 0)) and p.limits.tall is not False
    assert {tall.kernel, tall.partials.kernel} <= known() and tall.kernel.shared <= 227 << 10
    blocks = -(-p.m // 128) * -(-p.n // 128)
    assert tall.ctas == blocks * tall.partials.number <= p.device.sms
    assert tall.rows % 32 == 0 and (tall.partials.number - 1) * tall.rows < p.k <= tall.partials.number * tall.rows
    assert tall.partials.size == blocks * 128 * 128
    assert_reduction_fits(tall.partials, p.m, p.n, p.device)
    for at in (p.x, p.w):
        assert at.strides[0] == 1
        assert not tall.whole_words or (at.aligned and at.strides[1] % 4 == 0)
    assert p.y == Matrix((p.n, 1), True)


def assert_dual_gemm_fits(p: Matmul, launch: Launch) -> None:
    """p is the forward's product."""
    fields, sizes = launch.fields, dict(launch.kernel.defines)
    cluster, size = int(sizes.get("CLUSTER", 1)), ITEMSIZE[p.dtype]
    assert p.dtype in ("float16", "bfloat16") and p.device.hopper and p.limits.dual is not False
    assert (fields["m"], fields["n"], fields["k"]) == (p.m, p.n, p.k) and p.m <= int(sizes["ROWS"])
    assert launch.grid == cluster * -(-p.k // 128) <= cluster * p.device.clusters(cluster)
    assert fields["steps"] * cluster * 64 >= p.n
    for _, (_, columns, pitch, *_) in launch.maps:
        assert pitch % 16 == 0 and pitch >= columns * size
    for at in (p.x, p.w):
        assert at.aligned and at.strides[1] == 1


def assert_skinny_product_fits(p: Matmul, product: Made) -> None:
    assert (p.dtype, p.device.capability) == ("float32", (9, 0)) and p.limits.skinny is not False
    assert p.k >= LEAST_TERMS and product.kernel is not None and product.kernel.name == "skinny_product"
    assert product.kernel.shared <= 227 << 10
    features = int(dict(product.kernel.defines)["FEATURES"])
    at_once = Constants("skinny_product.cu", dict(product.kernel.defines))["K_AT_ONCE"]
    assert at_once % 32 == 0 and 4 * features * at_once <= 128 << 10  # limbs of the weight in shared memory
    blocks = -(-p.n // features)
    assert product.grid % blocks == 0 and product.grid <= p.device.sms
    assert (product.grid // blocks - 1) * product.rows < p.m <= product.grid // blocks * product.rows
    for at in (p.x, p.w):
        assert at.aligned and at.strides[1] == 1 and at.strides[0] >= p.k and at.strides[0] % 4 == 0
    assert p.y == Matrix((p.n, 1), True)


def assert_sm90_product_fits(p: Matmul, one: OneLaunch) -> None:
    assert p.dtype in ("float16", "bfloat16") and p.device.capability == (9, 0)
    assert one.kernel in known("sm_90a")
    assert one.kernel.shared <= 227 << 10
    assert (one.workspace, one.limbs) == (0, None)
    of_rows, ctas = one.cluster_m * one.split, one.cluster * one.cluster_m * one.split
    tiles = -(-p.m // (one.block_m * of_rows)) * -(-p.n // (SM90_BLOCK_N * one.cluster))
    assert 1 <= one.clusters <= min(tiles, p.device.clusters(ctas)) and one.ctas == one.clusters * ctas
    macros = dict(one.kernel.defines)
    for at, rows, mn_major in ((p.x, p.m, macros["X_MN_MAJOR"] == "1"), (p.w, p.n, macros["W_MN_MAJOR"] == "1")):
        (step, pitch), length = (at.strides if mn_major else at.strides[::-1]), rows if mn_major else p.k
        assert step == 1 and pitch >= length and at.aligned and pitch % 8 == 0  # what TMA can load
    assert p.y.strides[1] == 1  # rows may start anywhere


# ---- the dtype of saved deviations

FIELDS = ("x", "weight", "bias", "scale", "gamma", "beta")


def saved_dtype(p: Matmul, *, training: bool) -> str:
    if ITEMSIZE[p.dtype] > 2:
        return p.dtype
    if not training:
        return "float32"
    return p.dtype if p.m > FEW_ROWS else "float64"


def contiguous(m: int, n: int, k: int, dtype: str = "float16", device: Device = H200) -> Matmul:
    return Matmul(m, n, k, dtype, device, Matrix((k, 1), True), Matrix((k, 1), True), Matrix((n, 1), True))


A100 = Device((8, 0), 108)
OLD_NVRTC = Device((9, 0), 132, sm90a=False)
