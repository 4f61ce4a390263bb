"""The planner as pure code: it serves every shape, and what it hands out fits together."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from strategies import sides

from gsbn import _driver, _kernels
from gsbn._plan import (
    AT_ONCE,
    C_TYPE,
    FEW_ROWS,
    INT32_MAX,
    ITEMSIZE,
    SM90_BLOCK_N,
    BackwardPlan,
    Device,
    Limits,
    Matmul,
    Matrix,
    OneLaunch,
    Plan,
    Product,
    Splits,
    backward_plan,
    maxima_grid,
    plan,
    precision_for,
    split_grid,
    split_limbs,
    tile_kernels,
    tiles_grid,
    whole_words,
)
from gsbn._plan.backward import FUSED_CTAS, FUSED_ROWS, SUMS_CTAS
from gsbn._plan.forward import STATS_GROUP
from gsbn._plan.gemm import CUBLAS_SMS, FEW_TERMS, LEAST_TERMS, MAX_TERMS, candidates
from gsbn._plan.parts import Parts
from gsbn._plan.problem import threads_along
from gsbn._plan.sm90_variants import ELEMENTS, MODES, SPLIT_TILES, SPLITS_OF_K, TILES_OF_X
from gsbn._plan.tall import Tall
from gsbn._plan.variants import THREADS, split_rows_at_once

ROOT = Path(__file__).resolve().parent.parent
H200 = Device((9, 0), 132)
SHARES = [H200.at_most(120), H200.at_most(1), Device((9, 0), 15, pairs=0), Device((8, 0), 108).at_most(20)]
DEVICES = [Device((7, 5), 40), Device((8, 6), 28), Device((8, 9), 128), H200, Device((10, 0), 148), Device((12, 0), 1)]
DEVICES += SHARES
LARGEST_GRID = 2**31 - 1


def sizes() -> st.SearchStrategy[int]:
    return sides(600) | st.integers(1, 2**22)


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int) -> Matrix:
    """C or Fortran order, padded or not, or strides of any kind."""
    pad = draw(st.sampled_from([0, 0, 1, 8]))
    strides = draw(
        st.sampled_from([(columns + pad, 1), (1, rows + pad), (-(columns + pad), 1), (2 * columns, 2), (0, 0), (0, 1)])
    )
    return Matrix.of((rows, columns), strides, draw(st.booleans()))


@st.composite
def problems(draw: st.DrawFn) -> Matmul:
    m, n, k = draw(sizes()), draw(sizes()), draw(sizes())
    dtype, device = draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from(DEVICES))
    return Matmul(m, n, k, dtype, device, draw(matrices(m, k)), draw(matrices(n, k)), draw(matrices(m, n)))


def largest_grid(device: Device) -> int:
    """CTAs spread over the SMs before any gets a second: as many of them take as many SMs."""
    return device.sms if device.limited else LARGEST_GRID


def assert_fits(p: Matmul, decided: Plan, *, training: bool) -> None:
    # every kernel is one that compile_all compiles
    kernels = {decided.stats_kernel, decided.normalize_kernel, decided.gemm_kernel} - {None}
    assert kernels <= set(_kernels.all_kernels())

    # what lies elsewhere is a copy, in rows on 16 bytes
    taken, size = decided.taken, ITEMSIZE[p.dtype]
    assert taken._replace(x=p.x, w=p.w, y=p.y, device=p.device) == p
    for lies, at, rows, columns in ((p.x, taken.x, p.m, p.k), (p.w, taken.w, p.n, p.k), (p.y, taken.y, p.m, p.n)):
        assert_copied_or_given(lies, at, rows, columns, size)

    if decided.one is not None:
        assert_one_launch_fits(taken, decided.one)
        assert not decided.one.parks or whole_words(taken.y, p.n, size)
        copied = p.m * taken.y.strides[0] * size if taken.y.own else 0
        assert decided.one.workspace <= decided.y and decided.y + copied <= decided.workspace
        return
    assert taken.y == p.y

    # the grids are neither empty nor too large, and cover every row once
    grids = [decided.stats_grid, decided.normalize_grid]
    grids += [decided.gemm_grid] * (decided.gemm_kernel is not None)
    assert all(1 <= grid <= largest_grid(p.device) for grid in grids)
    assert decided.one_pass == (training and decided.stats_kernel is None)
    if decided.stats_kernel is not None:
        assert (decided.splits - 1) * decided.stats_rows < p.m <= decided.splits * decided.stats_rows
        assert training
    if decided.one_pass:  # a CTA has all rows of its columns, a thread a whole number of them in a warp
        assert decided.normalize_rows == p.m <= STATS_GROUP * THREADS // decided.along
        assert decided.along in (2, 4, 8, 16)

    # the workspace: aligned, in order, and large enough
    g_size = max(ITEMSIZE[p.dtype], 4)
    assert decided.ldg >= p.n
    assert all(at % 256 == 0 for at in (decided.affine, decided.partials, decided.g))
    constants = 4 * decided.ldg * g_size if decided.stats_kernel is not None else 0
    partials = decided.splits * 2 * decided.ldg * 8 if decided.stats_kernel is not None else 0  # (mean, M2), float64
    assert decided.affine + constants <= decided.partials <= decided.partials + partials <= decided.g
    of_g = 0 if decided.y_is_g or decided.narrow else p.m * decided.ldg * g_size
    assert decided.g + of_g <= decided.workspace
    assert decided.merge_columns in (8, 16, 32, 64, 128, 256)
    assert 1 <= decided.merge_grid <= max(1, p.device.sms // 2)

    # 16-byte accesses only where every row begins on 16 bytes
    if decided.vector_y:  # of y itself, or of a copy that one launch writes
        written = decided.taken.y
        assert written == p.y or (decided.one is not None and written.own)
        assert written.aligned
        assert written.strides[1] == 1
        assert written.strides[0] * ITEMSIZE[p.dtype] % 16 == 0
    assert decided.ldg * g_size % 16 == 0
    if decided.y_is_g:
        assert ITEMSIZE[p.dtype] == g_size
        assert (p.y.strides[1], decided.ldg) == (1, p.y.strides[0])
        if decided.limbs.of:  # the copy engine stores whole words: the last may not reach past a row
            assert p.n * g_size % 16 == 0

    # a GEMM reads rows or, cuBLAS alone, columns that are contiguous and do not overlap; all else is copied
    for matrix, rows in ((taken.x, p.m), (taken.w, p.n)):
        row, column = matrix.strides
        if decided.limbs.of:  # limbs are made of rows and columns that lie anywhere
            assert 1 in matrix.strides
            continue
        by_rows = column == 1 and (decided.gemm == "tiled" or row >= p.k)
        assert by_rows or (decided.gemm == "cublas" and row == 1 and column >= rows)


def assert_copied_or_given(given: Matrix, at: Matrix, rows: int, columns: int, size: int) -> None:
    if not at.own:
        assert at == given
        return
    beside, pitch = sorted(at.strides)
    assert (beside, at.aligned, pitch * size % 16) == (1, True, 0)
    assert pitch >= (columns if at.strides[1] == 1 else rows)


def makes_g_twice(one: OneLaunch) -> bool:
    return dict(one.kernel.defines)["MODE"] == str(MODES["recompute"])


def has_all_rows(one: OneLaunch) -> bool:
    return dict(one.kernel.defines)["MODE"] == str(MODES["cluster_batch"])


def assert_one_launch_fits(p: Matmul, one: OneLaunch) -> None:
    assert one.kernel in set(_kernels.all_kernels("sm_90a"))
    assert one.kernel.shared <= 227 << 10  # what a CTA may have on Hopper
    of_rows, of_features = one.split * (one.cluster if one.along_rows else 1), 1 if one.along_rows else one.cluster
    tiles = -(-p.m // (one.block_m * of_rows)) * -(-p.n // (SM90_BLOCK_N * of_features))  # of a cluster
    two = dict(one.kernel.defines)["OCCUPANCY"] == "2"
    assert not two or (one.cluster * one.split == 1 and one.kernel.shared + 1024 <= 228 << 9)  # half of an SM's
    assert 1 <= one.clusters <= min(tiles, p.device.ctas(2) if two else p.device.clusters(one.cluster * one.split))
    assert one.ctas <= p.device.ctas(1 + two)
    if one.split > 1:  # each CTA has one tile, and a part of k
        assert one.clusters == tiles and p.k > one.split and not makes_g_twice(one)
    features, parts = -(-p.n // SM90_BLOCK_N) * SM90_BLOCK_N, -(-p.m // one.block_m)
    if makes_g_twice(one):  # every cluster keeps to its features
        assert one.clusters % one.panel == 0 and one.cooperative
        assert one.panel == -(-p.n // (SM90_BLOCK_N * one.cluster))
        parts = one.clusters // one.panel
    end = 0
    if has_all_rows(one):  # in a cluster, which has one tile
        assert p.m <= one.block_m * of_rows and one.clusters == tiles and one.along_rows and not one.cooperative
    else:
        assert parts * features * 16 <= one.merged  # (mean, M2, launch) of every part and feature
        assert_folded_parts_fit(p, one)
        assert one.merged + features * 16 <= one.roll
        end = one.roll + 8 * (1 + one.ctas)
    if one.limbs is not None:
        limbs, size = one.limbs, 4 * one.limbs.pitch  # of a row, both limbs
        assert limbs.kernel in set(_kernels.all_kernels("sm_90a"))
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
    assert not one.parks or (p.y.aligned and p.y.strides[0] * ITEMSIZE[p.dtype] % 16 == 0)
    # what the copy engine takes
    for at in (p.x, p.w):
        assert at.strides[1] == 1
        if one.limbs is None or (one.element == "limbs_rs" and at is p.w):
            assert at.strides[0] >= p.k and at.aligned and at.strides[0] * ITEMSIZE[p.dtype] % 16 == 0


def assert_folded_parts_fit(p: Matmul, one: OneLaunch) -> None:
    """Behind the words of all tiles there is room for those of folded parts."""
    rows, blocks = -(-p.m // one.block_m), -(-p.n // SM90_BLOCK_N)
    counts = [one.parts_in_panels if block < one.in_panels else one.parts_alone for block in range(blocks)]
    if not makes_g_twice(one) and any(count != rows for count in counts):
        assert one.parks and one.in_panels < blocks and all(1 <= count <= rows for count in counts)
        assert (rows * blocks + sum(counts)) * SM90_BLOCK_N * 16 <= one.merged


def assert_limbs_fit(limbs: Splits, gpu: Device, start: int, lent: dict[str, int]) -> None:
    """Maxima, exponents and limbs apart from each other; what lies elsewhere in no more than the bytes `lent`."""
    taken: list[tuple[int, int]] = []

    def take(at: int, size: int) -> None:
        assert at >= start and at % 256 == 0
        assert all(at + size <= first or end <= at for first, end in taken)
        taken.append((at, at + size))

    for split in limbs.of:
        assert split.along is not None or split.across is not None
        assert 1 <= split_grid((split.rows,), split.columns, gpu) <= largest_grid(gpu)
        for operand, count, k in ((split.along, split.rows, split.columns), (split.across, split.columns, split.rows)):
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
    across = [split for split in limbs.of if split.across is not None]
    assert len(across) <= AT_ONCE
    if across:
        take(limbs.maxima, limbs.exponents - limbs.maxima)
        grid, rows = maxima_grid(across, gpu)
        assert 1 <= grid <= largest_grid(gpu) and 1 <= tiles_grid(across, gpu) <= largest_grid(gpu)
        assert rows * grid >= sum(split.rows * -(-split.columns // 128) for split in across) or gpu.limited
    assert all(end <= limbs.end for _, end in taken)
    # What is written over dg: the limbs of its own rows, tile by tile, and what waits until these were read.
    for split in limbs.of:
        for operand in (split.along, split.across):
            if operand is not None and operand.limbs == "dg":
                assert split.late or (split.name == "dg" and operand is split.along and operand.pitch == split.pitch)


def assert_dg_is_read_before_limbs_lie_there(decided: BackwardPlan) -> None:
    operands = {split.name: (split.along, split.across) for split in decided.limbs.of}
    places = {name: {operand.limbs for operand in of if operand is not None} for name, of in operands.items()}
    takes_dg = decided.weight is not None and not decided.weight.of_limbs
    assert decided.weight_first <= takes_dg
    assert decided.weight_first or not (takes_dg and "dg" in places.get("dg", ()))
    assert not (decided.weight_first and any("dweight" in of for of in places.values()))
    along, across = operands.get("dg", (None, None))
    if along is not None and along.limbs == "dg" and across is None:  # by split_limbs: dense rows, each held in full
        split = next(split for split in decided.limbs.of if split.name == "dg")
        assert split.pitch == split.columns == along.pitch <= 8192


def assert_limb_gemm_fits(p: Matmul, one: OneLaunch, limbs: Splits, a: str, b: str) -> None:
    assert (one.limbs, one.workspace) == (None, 0)
    assert (p.dtype, p.device.capability) == ("float32", (9, 0))
    assert {one.kernel, split_limbs(p.k), *tile_kernels()} <= set(_kernels.all_kernels("sm_90a"))
    assert one.ctas <= p.device.sms
    assert p.y.strides[0] % 4 == 0
    of_both = one.element == "limbs"
    if not of_both:  # what the copy engine takes
        assert (one.element, dict(one.kernel.defines)["W_MN_MAJOR"], p.w.strides[0]) == ("limbs_rs", "1", 1)
        assert p.w.aligned and p.w.strides[1] >= p.n and p.w.strides[1] % 4 == 0
        assert b not in {split.name for split in limbs.of}
    for name, at, count in ((a, p.x, p.m), (b, p.w, p.n))[: 1 + of_both]:
        split, across = next(split for split in limbs.of if split.name == name), at.strides[1] != 1
        assert at.strides[0 if across else 1] == 1
        assert limbs.operand(name, at) == (split.across if across else split.along)
        assert (split.rows, split.columns) == ((p.k, count) if across else (count, p.k))
        assert split.pitch == at.strides[1 if across else 0]


def assert_parts_fit(parts: Parts, n: int, k: int, gpu: Device) -> None:
    assert parts.pitch >= k and parts.pitch % 4 == 0 and parts.size >= n * parts.pitch
    assert parts.share in (1, 2, 4, 8) and parts.share <= parts.number
    assert 1 <= parts.grid <= largest_grid(gpu)


def assert_tall_product_fits(p: Matmul, tall: Tall) -> None:
    """c (m, n) of operands (k, m) and (k, n)."""
    assert (p.dtype, p.device.capability) == ("float32", (9, 0)) and p.limits.tall is not False
    assert {tall.kernel, tall.parts.kernel} <= set(_kernels.all_kernels()) and tall.kernel.shared <= 227 << 10
    blocks = -(-p.m // 128) * -(-p.n // 128)
    assert tall.ctas == blocks * tall.parts.number <= p.device.sms
    assert tall.rows % 32 == 0 and (tall.parts.number - 1) * tall.rows < p.k <= tall.parts.number * tall.rows
    assert tall.parts.size == blocks * 128 * 128
    assert_parts_fit(tall.parts, p.m, p.n, p.device)
    for at in (p.x, p.w):
        assert at.strides[0] == 1
        assert not tall.whole_words or (at.aligned and at.strides[1] % 4 == 0)
    assert p.y == Matrix((p.n, 1), True)


def assert_narrow_product_fits(p: Matmul, product: Product) -> None:
    assert (p.dtype, p.device.capability) == ("float32", (9, 0)) and p.limits.narrow is not False
    assert p.k >= LEAST_TERMS and product.kernel is not None and product.kernel.name == "skinny_product"
    assert product.kernel.shared <= 227 << 10
    features = int(dict(product.kernel.defines)["FEATURES"])
    assert 4 * features * -(-p.k // 32) * 32 <= 128 << 10  # limbs of the weight in shared memory
    blocks = -(-p.n // features)
    assert product.grid % blocks == 0 and product.grid <= p.device.sms
    assert (product.grid // blocks - 1) * product.rows < p.m <= product.grid // blocks * product.rows
    for at in (p.x, p.w):
        assert at.aligned and at.strides[1] == 1 and at.strides[0] >= p.k and at.strides[0] % 4 == 0
    assert p.y == Matrix((p.n, 1), True)


def assert_sm90_product_fits(p: Matmul, one: OneLaunch) -> None:
    assert p.dtype in ("float16", "bfloat16") and p.device.capability == (9, 0)
    assert one.kernel in set(_kernels.all_kernels("sm_90a"))
    assert one.kernel.shared <= 227 << 10
    assert (one.workspace, one.limbs) == (0, None)
    tiles = -(-p.m // one.block_m) * -(-p.n // (SM90_BLOCK_N * one.cluster))
    assert 1 <= one.clusters <= min(tiles, p.device.clusters(one.cluster))
    macros = dict(one.kernel.defines)
    for at, rows, across in ((p.x, p.m, macros["X_MN_MAJOR"] == "1"), (p.w, p.n, macros["W_MN_MAJOR"] == "1")):
        (beside, pitch), length = (at.strides if across else at.strides[::-1]), rows if across else p.k
        assert beside == 1 and pitch >= length and at.aligned and pitch % 8 == 0  # what the copy engine takes
    assert p.y.strides[1] == 1 and p.y.strides[0] % 8 == 0


@given(rows=st.tuples(sizes(), st.integers(0, 300)), k=st.integers(1, 2**20) | st.sampled_from([64, 65, 8192, 8193]))
def test_split_limbs_takes_as_many_rows_as_it_holds(rows: tuple[int, int], k: int) -> None:
    """A CTA for each 8192 elements, of x or of the weight: none takes a second item where all may be there."""
    kernel, at_once = split_limbs(k), split_rows_at_once(k)
    width = int(dict(kernel.defines)["WIDTH"])
    assert kernel in set(_kernels.all_kernels("sm_90a"))
    assert at_once * width == 8192 and (k <= width < 2 * k or width in (64, 8192))
    assert split_grid(rows, k, H200) == sum(-(-count // at_once) for count in rows)


@given(p=problems(), training=st.booleans())
def test_auto_serves_every_call(p: Matmul, training: bool) -> None:
    decided = plan(p, training=training)
    assert_fits(p, decided, training=training)
    assert decided.why


@given(p=problems(), training=st.booleans(), gemm=st.sampled_from(["cublas", "tiled"]))
def test_a_choice_is_kept_or_refused(p: Matmul, training: bool, gemm: str) -> None:
    if gemm == "cublas" and p.device.capability < (8, 0) and p.dtype == "bfloat16":
        with pytest.raises(ValueError, match=r"^gemm: expected .+, got 'cublas'"):
            plan(p, training=training, gemm=gemm)
    else:
        decided = plan(p, training=training, gemm=gemm)
        assert decided.gemm == gemm
        assert_fits(p, decided, training=training)


# ---- what a forward keeps, and the backward

FIELDS = ("x", "weight", "bias", "scale", "gamma", "beta")


def kept_by(p: Matmul, *, training: bool) -> str:
    if ITEMSIZE[p.dtype] > 2:
        return p.dtype
    if not training:
        return "float32"
    return p.dtype if p.m > FEW_ROWS else "float64"


@given(p=problems(), training=st.booleans())
def test_a_forward_keeps_whole_words(p: Matmul, training: bool) -> None:
    decided = plan(p, training=training, saved=True)
    assert (decided.gemm == "sm90") == (decided.product is not None or decided.one is not None)
    if decided.one is not None:
        assert training
        assert dict(decided.one.kernel.defines)["SAVE_DEVIATIONS"] == "1"
        assert not decided.keep.is_g  # type: ignore[union-attr]
    assert_fits(p, decided._replace(workspace=2**62), training=training)
    assert decided.keep is not None
    assert decided.normalize_kernel in set(_kernels.all_kernels())
    assert decided.ldg * ITEMSIZE[p.dtype] % 16 == decided.ldg * ITEMSIZE[decided.keep.dtype] % 16 == 0
    assert decided.ldg - p.n < 16 // ITEMSIZE[p.dtype]
    assert decided.keep.dtype == kept_by(p, training=training)
    if decided.one is None and not decided.keep.is_g:
        assert decided.g + p.m * decided.ldg * 4 <= decided.workspace


@given(
    p=problems(),
    training=st.booleans(),
    needs=st.sets(st.sampled_from(FIELDS)),
    gemm=st.sampled_from(["auto", "cublas", "tiled", "sm90"]),
    precision=st.sampled_from(["highest", "high"]),
    of_x=st.sampled_from([None, True, False]),
    by_narrow=st.sampled_from([None, True, False]),
    by_tall=st.sampled_from([None, True, False]),
)
def test_a_backward_fits(
    p: Matmul,
    training: bool,
    needs: set[str],
    gemm: str,
    precision: str,
    of_x: bool | None,
    by_narrow: bool | None,
    by_tall: bool | None,
) -> None:
    p = p._replace(limits=Limits(limbs_rs=of_x, narrow=by_narrow, tall=by_tall))
    options: dict[str, Any] = {"training": training, "needs": tuple(sorted(needs))}
    options["precision"] = precision
    has_bfloat16 = p.device.capability >= (8, 0) or p.dtype != "bfloat16"
    too_few_sms = p.device.limited and p.device.sms < CUBLAS_SMS
    if gemm == "cublas" and (too_few_sms or not has_bfloat16) and needs & {"x", "weight"}:
        with pytest.raises(ValueError, match=r"^gemm: expected .+, got 'cublas'"):
            backward_plan(p, gemm=gemm, **options)
        return
    decided, size = backward_plan(p, gemm=gemm, **options), ITEMSIZE[p.dtype]

    # no work that nobody needs
    assert decided.dg == bool(needs & {"x", "weight"})
    narrow = decided.narrow
    if narrow is None:
        assert (decided.x is None, decided.weight is None) == ("x" not in needs, "weight" not in needs)
    else:
        assert "weight" in needs and decided.x is decided.weight is None
        sizes = dict(narrow.kernel.defines)
        sharing = int(sizes.get("CLUSTER", 1))
        number, rest = divmod(narrow.ctas, sharing)
        assert (number - 1) * narrow.rows < p.m <= number * narrow.rows and rest == 0
        assert number <= p.device.clusters(sharing) and narrow.ctas <= p.device.sms
        assert int(sizes["FEATURES"]) >= narrow.features >= p.n / sharing and int(sizes["INPUTS"]) >= p.k
        assert sharing == 1 or narrow.features * size % 16 == 0
        assert decided.dg_at + narrow.parts.nbytes <= decided.workspace
        assert {narrow.kernel, narrow.parts.kernel} <= set(_kernels.all_kernels())
        assert_parts_fit(narrow.parts, p.n, p.k, p.device)
    alone = needs <= {"bias"} if training else needs <= {"x", "weight"}
    assert decided.sums != alone
    if not needs & {"scale", "gamma"}:
        assert decided.reads_d == (decided.dg and training)

    # grids and workspace
    largest = largest_grid(p.device)
    assert 1 <= decided.dg_grid <= largest and decided.sums <= decided.sums_grid <= largest
    assert decided.dg_grid * decided.dg_rows >= p.m or not decided.dg or p.device.limited
    assert decided.pitch >= p.n and decided.pitch * size % 16 == 0
    if decided.fused:
        assert decided.sums and not decided.across
        assert p.m <= FUSED_ROWS and decided.sums_grid <= FUSED_CTAS * p.device.sms
        assert (decided.splits, decided.sums_kernel.name) == (0, "backward_fused")
        assert decided.sums_grid * 16 * decided.along >= p.n * size or p.device.limited
    elif decided.sums:
        sharing = int(dict(decided.sums_kernel.defines).get("CLUSTER", 1))
        rows = decided.sums_rows * sharing
        assert (decided.splits - 1) * rows < p.m <= decided.splits * rows
        assert decided.sums_grid % (decided.splits * sharing) == 0 or (sharing == 1 and p.device.limited)
        assert sharing == 1 or decided.sums_grid // sharing <= SUMS_CTAS * p.device.clusters(sharing)
        assert decided.splits * 2 * p.n * 8 <= decided.dg_at
    else:
        assert decided.splits == 0
    if narrow is None:
        assert decided.dg_at + (p.m * decided.pitch * size if decided.dg else 0) <= decided.across_at
    assert decided.across_at + p.n * decided.across * size <= decided.workspace
    if decided.across:
        assert decided.across >= p.m and (p.dtype, precision) == ("float32", "high")
    assert {decided.sums_kernel, decided.dg_kernel} <= set(_kernels.all_kernels())
    assert dict(decided.sums_kernel.defines)["D_TYPE"] == C_TYPE[kept_by(p, training=training)]
    if decided.vector_dy:
        assert decided.dy.aligned and decided.dy.strides[1] == 1 and decided.dy.strides[0] * size % 16 == 0

    lent = {"dg": 4 * p.m * decided.pitch} | ({"dweight": 4 * p.n * p.k} if decided.weight is not None else {})
    assert_limbs_fit(decided.limbs, p.device, decided.across_at + p.n * decided.across * size, lent)
    assert decided.limbs.end <= decided.workspace
    assert_dg_is_read_before_limbs_lie_there(decided)

    # the products: shapes that chain, and strides that the GEMM takes
    for product, shape in ((decided.x, (p.m, p.k, p.n)), (decided.weight, (p.n, p.k, p.m))):
        if product is None:
            continue
        q = product.p
        assert (q.m, q.n, q.k) == shape
        b = p.w if product is decided.x else p.x
        assert_copied_or_given(b.T, q.w, q.n, q.k, size)
        assert q.y == Matrix((q.n, 1), True)  # rows that start anywhere, too
        if product.of_limbs:
            assert product.gemm == "sm90"
            assert_limb_gemm_fits(q, product.one, decided.limbs, "dg", "weight" if product is decided.x else "x")
            continue
        if product.one is not None:
            assert product.gemm == "sm90"
            assert_sm90_product_fits(q, product.one)
            continue
        assert product.gemm == ("tiled" if product.kernel is not None or product.tall is not None else "cublas")
        if product.tall is not None:
            assert product is decided.weight and gemm in ("auto", "tiled")
            assert_tall_product_fits(q, product.tall)
            continue
        if product.kernel is not None:
            assert product.kernel in set(_kernels.all_kernels()) and 1 <= product.grid <= largest
            if product.rows:
                assert_narrow_product_fits(q, product)
                continue
            assert q.w.strides[0] == 1 and q.x.strides in ((decided.pitch, 1), (1, decided.pitch))
        else:
            for matrix, rows in ((q.x, q.m), (q.w, q.n)):
                row, column = matrix.strides
                assert (column == 1 and row >= q.k) or (row == 1 and column >= rows)


@pytest.mark.parametrize(
    ("shape", "auto"),
    [
        ((802816, 128, 128), True),
        ((65536, 256, 512), True),
        ((380000, 768, 512), True),
        ((131071, 97, 201), True),
        ((3000, 64, 128), False),  # cuBLAS has done it before two launches begin
        ((16384, 4096, 4096), False),  # more blocks than SMs
    ],
)
def test_dw_of_many_rows_makes_limbs_on_the_way(shape: tuple[int, int, int], auto: bool) -> None:
    """Of float32 at "highest" alone, of rows that are adjacent elements; no limbs of x are made for it."""
    B, I, O = shape
    p = contiguous(B, O, I, "float32")._replace(limits=Limits(narrow=False))
    can = -(-I // 128) * -(-O // 128) <= 132

    def by_tall(p: Matmul = p, **options: Any) -> bool:
        decided = backward_plan(p, **{"training": True, "needs": ("weight", "gamma"), **options})
        assert decided.weight is not None
        if found := decided.weight.tall is not None:
            assert_tall_product_fits(decided.weight.p, decided.weight.tall)
            assert not decided.weight.of_limbs and not decided.limbs.of
        return found

    asked, refused = (p._replace(limits=p.limits._replace(tall=of)) for of in (True, False))
    assert by_tall() == by_tall(training=False) == auto and not by_tall(refused)
    assert by_tall(asked) == by_tall(gemm="tiled") == can
    for options in ({"gemm": "cublas"}, {"gemm": "sm90"}, {"precision": "high"}):
        assert not by_tall(asked, **options)
    assert not by_tall(asked._replace(dtype="float64")) and not by_tall(asked._replace(dtype="bfloat16"))
    assert not by_tall(asked._replace(device=Device((8, 0), 108)))
    assert not by_tall(asked._replace(x=Matrix((1, B), True)))


def test_a_share_of_the_gpu() -> None:
    """Whoever holds the other SMs may have broken a pair with each; without pairs, CTAs stay alone."""
    assert (H200.at_most(None), H200.at_most(132), H200.at_most(10**30)) == (H200,) * 3
    assert [H200.at_most(n).clusters(2) for n in (131, 120, 67, 66, 2)] == [65, 54, 1, 0, 0]
    assert [H200.at_most(n).clusters(4) for n in (131, 120, 99)] == [32, 21, 0]
    assert Device((9, 0), 132, eights=14).at_most(130).clusters(8) == 12
    assert Device((9, 0), 132, pairs=60).at_most(130).clusters(2) == 58
    assert [H200.at_most(120).clusters(size) for size in (1, 2, 4, 8, 16)] == [120, 54, 21, 4, 0]
    assert H200.clusters(16) == 8 and Device((9, 0), 132, sixteens=7).at_most(131).clusters(16) == 6
    assert [Device((9, 0), 20, eights=1).clusters(size) for size in (4, 8, 16)] == [5, 1, 0]
    assert [Device((9, 0), 15, pairs=0).clusters(size) for size in (4, 8)] == [0, 0]
    for device in SHARES[:3]:
        one = plan(contiguous(16384, 4096, 4096, device=device), training=True, gemm="sm90").one
        assert one is not None and (one.cluster == 1 or device.clusters(2) > 0)


@pytest.mark.parametrize(("rows", "cumulative", "want"), [(200, False, False), (200, True, True), (300, False, True)])
def test_a_launch_is_cooperative_where_its_ctas_wait_for_each_other(rows: int, cumulative: bool, want: bool) -> None:
    p = contiguous(rows, 1024, 64)._replace(limits=Limits(cluster_batch=False))
    one = plan(p, training=True, gemm="sm90", cumulative=cumulative).one
    assert one is not None
    assert one.cooperative == (want or one.block_m < rows)
    frozen = plan(contiguous(rows, 1024, 64), training=False, gemm="sm90").one
    assert frozen is not None and not frozen.cooperative


@pytest.mark.parametrize(("dtype", "precision"), [("float16", "highest"), ("bfloat16", "highest"), ("float32", "high")])
def test_long_sums_are_not_left_to_the_tensor_core_alone(dtype: str, precision: str) -> None:
    limit = MAX_TERMS["tf32" if dtype == "float32" else dtype]
    assert plan(contiguous(64, 64, limit, dtype), training=True, precision=precision, gemm="sm90").one is not None
    p = contiguous(64, 64, limit + 8, dtype)
    assert plan(p, training=True, precision=precision).gemm == "cublas"
    with pytest.raises(ValueError, match=r"gemm: .*lose digits"):
        plan(p, training=True, precision=precision, gemm="sm90")
    if dtype != "float32":
        decided = backward_plan(p._replace(n=limit + 8, k=64, w=Matrix((64, 1), True)), training=True, needs=("x",),
                                gemm="sm90")  # fmt: skip
        assert decided.x is not None and decided.x.gemm == "cublas"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("features", [32, 128, 512])
def test_dw_of_very_many_short_rows_is_not_left_to_the_tensor_core_alone(dtype: str, features: int) -> None:
    """A team keeps dw in the tensor core's accumulators over all of its rows: there are no more than MAX_TERMS."""
    rows = 600 * MAX_TERMS[dtype]
    p = contiguous(rows, features, 32, dtype)._replace(y=Matrix((features, 1), True))
    plan = backward_plan(p, training=True, needs=("x", "weight"))
    assert plan.narrow is not None
    teams = plan.narrow.block // (256 if plan.narrow.features > 128 else 128)
    assert plan.narrow.rows <= teams * MAX_TERMS[dtype]
    together = plan.narrow.ctas * plan.narrow.rows
    assert together >= rows
    held = p._replace(device=p.device.at_most(100))  # where a second wave would take other SMs than it may
    assert backward_plan(held, training=True, needs=("x", "weight")).narrow is None


@pytest.mark.parametrize("shape", [(3, 8192, 1), (64, 4096, 1), (4096, 512, 1)])
def test_one_feature_is_a_matrix_vector_product_of_cublas(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    p = contiguous(m, n, k, "float32")
    assert precision_for("high", n) == "highest"
    assert precision_for("high", 2) == "high"
    assert plan(p, training=True, precision="highest").gemm == "cublas"
    backward = backward_plan(p, training=True, needs=("x", "weight"), precision="highest")
    assert backward.x is not None
    assert backward.x.gemm == "cublas"
    assert backward.weight is not None
    assert backward.weight.one is None


def test_the_driver_is_asked_how_many_clusters_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def occupancy(found: Any, function: Any, config: Any) -> int:
        c = config._obj
        assert ctypes.sizeof(c) == 56  # of CUlaunchConfig
        attribute = _driver._LaunchAttribute.from_address(c.attributes)
        assert ctypes.sizeof(attribute) == 72  # of CUlaunchAttribute
        asked.append((function.value, c.gx, c.gy, c.gz, c.bx, c.by, c.bz, c.shared, c.count))
        asked.append((attribute.id, *attribute.value[:3]))  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        found._obj.value = 61
        return 0

    monkeypatch.setattr(_driver, "driver", lambda: SimpleNamespace(cuOccupancyMaxActiveClusters=occupancy))
    assert _driver.resident_clusters(2**40, threads=384, cluster=2, shared=1000) == 61
    assert asked == [(2**40, 2, 1, 1, 384, 1, 1, 1000, 1), (4, 2, 1, 1)]


def contiguous(m: int, n: int, k: int, dtype: str = "float16", device: Device = H200) -> Matmul:
    return Matmul(m, n, k, dtype, device, Matrix((k, 1), True), Matrix((k, 1), True), Matrix((n, 1), True))


A100 = Device((8, 0), 108)
OLD_NVRTC = Device((9, 0), 132, sm90a=False)


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "options", "want"),
    [
        ((1024, 8192, 8192), "bfloat16", H200, {}, "sm90"),
        ((16384, 4096, 4096), "float16", H200, {}, "sm90"),
        ((16384, 4096, 4096), "float32", H200, {"precision": "high"}, "sm90"),
        ((16384, 4096, 4096), "float32", H200, {}, "sm90"),
        ((1000, 1000, 777), "float32", H200, {}, "sm90"),  # limbs have a pitch of their own
        ((16384, 4096, 4096), "float32", A100, {}, "cublas"),
        ((1000, 1001, 777), "float32", H200, {}, "sm90"),  # its GEMM, and the portable passes
        ((1000, 4096, 32), "float32", H200, {}, "cublas"),  # IEEE is the more accurate
        ((1000000, 32, 32), "float32", H200, {}, "tiled"),  # 148 against 241 us: g is made twice, in IEEE arithmetic
        ((1000000, 32, 32), "bfloat16", H200, {}, "tiled"),  # 59 against 122 us
        ((1000000, 32, 32), "bfloat16", A100, {}, "cublas"),
        ((100000, 64, 64), "float32", H200, {}, "tiled"),  # 49 against 62 us: g is made twice, of limbs
        ((16384, 4096, 4096), "float64", H200, {}, "cublas"),
        ((1024, 8192, 8191), "bfloat16", H200, {}, "sm90"),  # of copies in rows on 16 bytes
        ((1024, 8191, 8192), "bfloat16", H200, {}, "sm90"),
        ((1024, 8192, 8192), "bfloat16", A100, {}, "cublas"),
        ((1024, 8192, 8192), "bfloat16", OLD_NVRTC, {}, "cublas"),
        ((128, 8192, 8192), "bfloat16", H200, {}, "sm90"),  # 39 against 50 us, all rows in a cluster
        ((512, 1024, 16384), "bfloat16", H200._replace(eights=15), {}, "cublas"),  # 44 against 52 us
        ((65536, 128, 64), "bfloat16", H200, {}, "sm90"),  # 22 against 36 us, one CTA a cluster
        ((32, 32, 16384), "bfloat16", H200, {}, "cublas"),  # 15 against 49 us: cuBLAS splits k
    ],
)
def test_auto_takes_what_was_measured_to_win(
    shape: tuple[int, int, int], dtype: str, device: Device, options: dict[str, Any], want: str
) -> None:
    assert plan(contiguous(*shape, dtype, device), training=True, **options).gemm == want


@pytest.mark.parametrize(
    ("shape", "options", "dx", "dw"),
    [  # cuBLAS's us and forward_sm90's, for dx and for dw
        ((1024, 8192, 8192), {}, "sm90", "sm90"),  # 174 and 174, 199 and 190
        ((16384, 4096, 4096), {}, "sm90", "sm90"),  # 861 and 833, 818 and 811
        ((3072, 5120, 5120), {}, "cublas", "cublas"),  # 221 and 231, 236 and 256: a wave is half empty
        ((4096, 1024, 1024), {}, "cublas", "cublas"),  # 20.0 and 20.8: one wave; 17.7 and 19.2: cuBLAS splits k
        ((32768, 1024, 1024), {}, "sm90", "cublas"),  # 122 and 121; 99 and 142
        ((128, 1024, 512), {}, "sm90", "sm90"),  # 6.5 and 7.1, 6.8 and 7.6: the host takes 8 to call cuBLAS
        ((256, 2048, 2048), {}, "cublas", "sm90"),  # 10.6 and 13.1; with the sums before 11.3 and 11.1
        ((32, 2048, 8192), {}, "cublas", "sm90"),  # dw with the sums before 20.2 and 15.3
        ((128, 1024, 512), {"gemm": "sm90"}, "sm90", "sm90"),
        ((128, 1020, 512), {"gemm": "sm90"}, "sm90", "sm90"),  # rows of dx off 16 bytes: it is copied
        ((1024, 8192, 8192), {"gemm": "cublas"}, "cublas", "cublas"),
        ((1024, 8192, 8192), {"gemm": "tiled"}, "tiled", "tiled"),
    ],
)
def test_a_backward_takes_what_was_measured_to_win(
    shape: tuple[int, int, int], options: dict[str, Any], dx: str, dw: str
) -> None:
    B, I, O = shape
    decided = backward_plan(contiguous(B, O, I, "bfloat16"), training=True, needs=("x", "weight"), **options)
    assert decided.x is not None and decided.weight is not None
    assert (decided.x.gemm, decided.weight.gemm) == (dx, dw)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_product_of_few_terms_is_written_row_by_row(dtype: str) -> None:
    """Clusters take all columns of some rows of dw before the next."""
    for B in (64, FEW_TERMS, FEW_TERMS + 8):
        decided = backward_plan(contiguous(B, 8192, 8192, dtype), training=True, needs=("weight",), gemm="sm90").weight
        assert decided is not None and decided.one is not None
        columns = -(-8192 // (SM90_BLOCK_N * decided.one.cluster))
        assert (decided.one.panel == columns) == (B <= FEW_TERMS)


@pytest.mark.parametrize(
    ("shape", "dtype", "narrow"),
    [
        ((1000000, 32, 32), "float32", True),  # 281 us and 510 by four launches
        ((20000, 64, 64), "float32", False),  # 45.5 and 42.0
        ((5000, 128, 128), "bfloat16", True),  # 25.2 and 27.1
        ((24575, 128, 256), "bfloat16", False),  # 38.4 and 37.7 of 24000 rows
        ((100000, 128, 136), "bfloat16", True),
        ((100000, 64, 1024), "float16", True),
        ((50000, 64, 640), "float16", False),  # 152 and 139
        ((50000, 64, 768), "float16", True),  # 155 and 161
        ((100000, 64, 1032), "float16", False),
        ((100000, 72, 264), "float16", False),
        ((100000, 32, 72), "float32", False),
        ((2000, 32, 32), "float16", False),
        ((5000, 36, 32), "float16", False),  # rows of x off 16 bytes
        ((5000, 32, 32), "float64", False),
    ],
)
def test_many_short_rows_have_a_backward_of_their_own(shape: tuple[int, int, int], dtype: str, narrow: bool) -> None:
    B, I, O = shape
    p = contiguous(B, O, I, dtype)
    for needs in (FIELDS, ("weight",), ("x",)):
        decided = backward_plan(p, training=True, needs=needs)
        assert (decided.narrow is not None) == (narrow and "weight" in needs)
        assert (decided.splits, decided.along) == (backward_plan(p, training=True, needs=FIELDS).splits, decided.along)
    assert backward_plan(p, training=False, needs=FIELDS).narrow is None
    assert (backward_plan(p, training=True, needs=FIELDS, in_place=True).narrow is not None) == narrow
    assert backward_plan(p, training=True, needs=FIELDS, gemm="cublas").narrow is None


@pytest.mark.parametrize(
    ("shape", "auto", "can"),
    [
        ((802816, 128, 128), True, True),
        ((131071, 96, 200), True, True),
        ((70001, 97, 201), True, True),  # rows of dg have a pitch of their own
        ((65536, 256, 512), True, True),
        ((8192, 256, 256), False, True),  # forward_sm90 makes limbs of the weight in registers, which are few
        ((5000, 96, 96), False, True),  # cuBLAS in IEEE arithmetic
        ((2048, 500, 64), False, True),
        ((50000, 64, 1024), False, False),  # the weight's limbs find no room
        ((50000, 32, 1024), True, True),
        ((100000, 128, 63), False, False),  # too few terms
        ((2047, 128, 128), False, False),
    ],
)
def test_dx_of_many_short_rows_makes_limbs_of_dg_in_registers(
    shape: tuple[int, int, int], auto: bool, can: bool
) -> None:
    """Of float32 at "highest" alone; whatever else is wanted, and where dg lies. No limbs of dg are made for it."""
    B, I, O = shape
    p = contiguous(B, O, I, "float32")

    def by_narrow(p: Matmul = p, **options: Any) -> bool:
        options = {"training": True, "needs": ("x", "weight", "gamma"), **options}
        decided = backward_plan(p, **options)
        assert decided.x is not None
        assert decided.weight is None or decided.weight.rows == 0
        if found := decided.x.rows > 0:
            assert_narrow_product_fits(decided.x.p, decided.x)
            assert all(split.along is None for split in decided.limbs.of) and not decided.weight_first
        return found

    asked, refused = (p._replace(limits=Limits(narrow=of)) for of in (True, False))
    for options in ({}, {"needs": ("x",)}, {"in_place": True}, {"training": False}, {"norm": False}):
        at = p._replace(y=Matrix((-(-O // 4) * 4, 1), True)) if "norm" in options else p
        assert by_narrow(at, **options) == auto
        assert by_narrow(at._replace(limits=asked.limits), **options) == can
    assert by_narrow(gemm="tiled") == can
    assert not by_narrow(refused) and not by_narrow(refused, gemm="tiled")
    for options in ({"gemm": "cublas"}, {"gemm": "sm90"}, {"precision": "high"}):
        assert not by_narrow(asked, **options)
    for other in ("float64", "bfloat16"):
        assert not by_narrow(asked._replace(dtype=other), needs=("x",))
    assert not by_narrow(asked._replace(device=Device((8, 0), 108)))
    if can:  # a weight of columns on 16 bytes lies as it is wanted
        across = backward_plan(asked._replace(w=Matrix((1, -(-O // 4) * 4), True)), training=True, needs=("x",)).x
        copied = backward_plan(asked, training=True, needs=("x",)).x
        assert across is not None and copied is not None and (across.p.w.own, copied.p.w.own) == (False, True)


def test_sm90_takes_operands_where_the_copy_engine_can() -> None:
    """What starts off 16 bytes is copied, unless cuBLAS is as fast without; dw reads dg in place."""
    p = contiguous(1024, 8192, 8192)
    p = p._replace(w=p.w._replace(aligned=False))
    asked, auto = (backward_plan(p, training=True, needs=FIELDS, gemm=gemm) for gemm in ("sm90", "auto"))
    assert asked.x is not None and asked.weight is not None and auto.x is not None
    assert (asked.x.gemm, asked.x.p.w.own, asked.weight.p.w.own) == ("sm90", True, False)
    assert (auto.x.gemm, auto.x.p.w.own) == ("sm90", True)
    few = backward_plan(contiguous(2, 9, 9), training=True, needs=FIELDS).x
    assert few is not None and not (few.p.w.own or few.p.y.own)
    assert asked.weight.p.x.strides == (1, asked.pitch)
    assert asked.across == 0


def test_a_choice_can_be_limited() -> None:
    """What tests, sweeps and benches ask for instead of the cheapest; a limit that leaves nothing is passed over."""
    p = contiguous(1000, 1032, 136)
    tiles = [(tile.block_m, tile.cluster) for tile in candidates(p, "training", "float16")]
    assert len(tiles) == 8 + 2  # those with all rows in a cluster: 256 by 8, 128 by 8
    for tile in tiles[:8]:
        one = plan(p._replace(limits=Limits(sm90=tile, recompute=True)), training=True, gemm="sm90").one
        assert one is not None and (one.block_m, one.cluster) == tile and not makes_g_twice(one)  # no CTA has two tiles
    for tile in tiles[8:]:
        one = plan(p._replace(limits=Limits(sm90=tile, cluster_batch=True)), training=True, gemm="sm90").one
        assert one is not None and (one.block_m, one.cluster) == tile and has_all_rows(one)
    many = contiguous(100000, 512, 512)
    for tile, again in itertools.product([(256, 1), (256, 2)], (True, False)):
        one = plan(many._replace(limits=Limits(sm90=tile, recompute=again)), training=True, gemm="sm90").one
        assert one is not None and ((one.block_m, one.cluster), makes_g_twice(one)) == (tile, again)
    limbs = contiguous(1000, 1032, 136, "float32")._replace(limits=Limits(sm90=(256, 2)))
    one = plan(limbs, training=True, gemm="sm90").one
    assert one is not None and one.block_m < 256
    small = plan(p._replace(limits=Limits(tiled=(32, 32, 2, 2))), training=True, gemm="tiled")
    assert dict(small.gemm_kernel.defines)["BLOCK_M"] == "32"  # type: ignore[union-attr]
    for fused in (True, False):
        limited = p._replace(limits=Limits(fused=fused))
        assert backward_plan(limited, training=True, needs=FIELDS).fused == fused
        assert plan(limited, training=True, gemm="tiled").one_pass == fused


@given(
    m=st.integers(17, 9000), n=st.integers(1, 9000), dtype=st.sampled_from(["float32", "bfloat16"]), sms=st.booleans()
)
def test_clusters_that_share_columns_have_all_rows_and_are_there_at_once(m: int, n: int, dtype: str, sms: bool) -> None:
    p = contiguous(m, n, 64, dtype)
    p = p._replace(device=p.device.at_most(100 if sms else None))
    decided = backward_plan(p, training=True, needs=FIELDS)
    cluster = int(dict(decided.sums_kernel.defines).get("CLUSTER", 1))
    if decided.fused and cluster > 1:
        blocks, rest = divmod(decided.sums_grid, cluster)
        assert rest == 0 and blocks * decided.along * (16 // ITEMSIZE[dtype]) >= n
        assert m <= FUSED_ROWS * cluster and blocks <= FUSED_CTAS * p.device.clusters(cluster)
        assert not sms or decided.sums_grid <= 100
    other = backward_plan(p._replace(limits=Limits(cluster=1)), training=True, needs=FIELDS)
    assert not other.fused or "CLUSTER" not in dict(other.sums_kernel.defines)
    for needs in (("x",), ("weight", "gamma")):  # whose bits are to be the same
        some = backward_plan(p, training=True, needs=needs)
        assert (some.sums_kernel, some.along) == (decided.sums_kernel, decided.along) or not some.sums


def test_ctas_share_a_long_k_where_tiles_are_few() -> None:
    few = contiguous(256, 1024, 16384, "bfloat16")
    for mode, tiles in SPLITS_OF_K.items():
        assert {tile.shape for tile in candidates(few, mode, "bfloat16") if tile.split > 1} == set(tiles)
    one = plan(few, training=True, gemm="sm90").one
    assert one is not None and one.split > 2 and (one.ctas, one.cooperative) == (16 * one.split, True)
    of_x = [tile for tile in TILES_OF_X if tile[2] > 1]
    for element, saved, mode in itertools.product(ELEMENTS, (False, True), SPLITS_OF_K):
        training = mode == "training"
        for tile in (of_x if element == "limbs_rs" else SPLITS_OF_K[mode]) if training or not saved else ():
            of_float32 = {"tf32": "high", "limbs": "highest", "limbs_rs": "highest"}
            dtype, precision = ("float32", of_float32[element]) if element in of_float32 else (element, "high")
            p = few._replace(dtype=dtype, limits=Limits(sm90=tile, split=True, limbs_rs=element == "limbs_rs"))
            one = plan(p, training=training, precision=precision, gemm="sm90", saved=saved).one
            assert one is not None and (one.block_m, one.cluster, one.split, one.element) == (*tile, element)
            assert_one_launch_fits(p, one)
    fewer = contiguous(50, 1024, 16384, "bfloat16")
    found = candidates(fewer, "training", "bfloat16")
    whole = {tile.shape for tile in found if tile.mode == "cluster_batch" and tile.split > 1}
    assert whole == {(m, 1, split) for m, split in SPLIT_TILES if m * split >= 50}
    for m, split in SPLIT_TILES:
        p = contiguous(m * split, 1024, 16384, "bfloat16")
        p = p._replace(limits=Limits(sm90=(m, 1, split), split=True, cluster_batch=True))
        one = plan(p, training=True, gemm="sm90").one
        assert one is not None and has_all_rows(one) and (one.block_m, one.split) == (m, split)
        assert_one_launch_fits(p, one)
    for p in (
        contiguous(512, 1024, 8 * 64 * 2 - 64),  # k too short
        contiguous(4096, 4096, 16384),  # tiles that fill the GPU without
        few._replace(device=Device((9, 0), 132, pairs=0, fours=0, eights=0)),
    ):
        assert all(tile.split == 1 for mode in MODES for tile in candidates(p, mode, p.dtype))
    assert all(tile.split == 1 for tile in candidates(few, "training", "bfloat16", ranks=True))
    assert plan(few._replace(limits=Limits(split=False)), training=True, gemm="sm90").one.split == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "of_x"),
    [
        ((128, 8192, 8192), True),  # 115 us and 223 with limbs of both
        ((8, 4096, 11008), True),  # 71 and 148, cuBLAS 118
        ((32, 2048, 8192), True),  # 37 and 75
        ((1024, 8192, 8192), False),
        ((16384, 4096, 4096), False),
    ],
)
def test_few_rows_make_limbs_of_the_weight_in_registers(
    shape: tuple[int, int, int], of_x: bool, training: bool
) -> None:
    """Not of a weight whose limbs are there, or whose rows the copy engine cannot bring; ranks have no such variant."""
    B, I, O = shape
    p = contiguous(B, O, I, "float32")

    def element(p: Matmul, **options: Any) -> str:
        one = plan(p, training=training, gemm="sm90", **options).one
        assert one is not None and one.limbs is not None
        assert_one_launch_fits(p, one)
        return one.element

    assert element(p) == ("limbs_rs" if of_x else "limbs")
    assert element(p._replace(limits=Limits(limbs_rs=False))) == "limbs"
    assert element(p._replace(w=p.w._replace(aligned=False))) == "limbs"
    assert plan(p, training=training, gemm="sm90", prepared=True).one.element == "limbs"  # type: ignore[union-attr]
    if training:
        assert element(p, ranks="inside") == "limbs"


@pytest.mark.parametrize(
    ("shape", "dx", "dw"),
    [
        ((128, 8192, 8192), "limbs_rs", "limbs"),
        ((32, 8192, 2048), "limbs_rs", None),  # sums of 32 rows are cuBLAS'
        ((64, 16384, 1024), "limbs_rs", "limbs"),
        ((16384, 4096, 4096), "limbs", "limbs"),
        ((1, 4096, 4096), None, None),
    ],
)
def test_dx_of_few_rows_makes_limbs_of_the_weight_in_registers(
    shape: tuple[int, int, int], dx: str | None, dw: str | None
) -> None:
    B, I, O = shape
    decided = backward_plan(contiguous(B, O, I, "float32"), training=True, needs=("x", "weight"))
    for product, name, want in ((decided.x, "weight", dx), (decided.weight, "x", dw)):
        assert product is not None
        assert (None if product.one is None else product.one.element) == want
        assert (name in {split.name for split in decided.limbs.of}) == (want == "limbs")
    alone = backward_plan(contiguous(B, O, I, "float32"), training=True, needs=("x",))
    if dx == "limbs_rs":  # neither maxima nor limbs of anything but dg, row by row
        assert [(split.name, split.across) for split in alone.limbs.of] == [("dg", None)]
        assert alone.limbs.maxima_bytes == 0 and alone.workspace < 16 * B * O + 2**20


def test_limbs_of_dg_alone_are_asked_for_refused_or_impossible() -> None:
    p = contiguous(100, 4104, 520, "float32")

    def one_of(p: Matmul, **limits: Any) -> OneLaunch:
        found = backward_plan(p._replace(limits=Limits(**limits)), training=True, needs=("x",), gemm="sm90").x
        assert found is not None and found.one is not None
        return found.one

    assert one_of(p, limbs_rs=False).element == "limbs"
    for tile in TILES_OF_X:
        shape = tile[: 2 + (tile[2] > 1)]
        one = one_of(p, limbs_rs=True, sm90=shape)
        assert (one.element, (one.block_m, one.cluster, one.split)) == ("limbs_rs", tile)
    for w, want in (
        (p.w._replace(aligned=False), "limbs"),
        (Matrix((521, 1), True), "limbs"),
        (Matrix((1, 4104), True), "limbs"),  # along what dx sums over
        (Matrix((524, 1), True), "limbs_rs"),
        (Matrix((1040, 2), True), "limbs_rs"),  # of a copy
    ):
        assert one_of(p._replace(w=w), limbs_rs=True).element == want


def test_g_alone_takes_a_weight_that_lies_across() -> None:
    """Ranks that meet between launches leave a bare GEMM, which reads a weight of columns as the backward's dx does."""
    p = contiguous(32, 4102, 2048, "float32")._replace(w=Matrix((1, 4104), True))
    for of_x, want in ((True, ["x"]), (False, ["x", "weight"])):
        decided = plan(p._replace(limits=Limits(limbs_rs=of_x)), training=True, gemm="sm90", ranks="between")
        assert decided.product is not None and [split.name for split in decided.limbs.of] == want
        assert decided.product.element == ("limbs_rs" if of_x else "limbs")
        q = decided.taken._replace(y=Matrix((decided.ldg, 1), True))
        assert_limb_gemm_fits(q, decided.product, decided.limbs, "x", "weight")


@pytest.mark.parametrize("element", ["bfloat16", "float32"])
@pytest.mark.parametrize("tile", [(256, 1), (256, 2), (128, 1), (128, 2), (64, 1), (32, 2)])
@pytest.mark.parametrize(
    "shape", [(9000, 2104), (8000, 2104), (135732, 128), (70000, 1001), (65536, 1024), (20000, 384)]
)
def test_a_part_of_the_statistics_is_all_that_a_cluster_has_of_a_column(
    shape: tuple[int, int], tile: tuple[int, int], element: str
) -> None:
    """The order of tiles is forward_sm90's (Order): those of a folded column come one after the other, in one part."""
    m, n = shape
    if element == "float32" and tile[0] == 256:
        pytest.skip("limbs have no tile of 256 rows")
    limits = Limits(sm90=tile, recompute=False, cluster_batch=False, split=False, limbs_rs=False)
    one = plan(contiguous(m, n, 512, element)._replace(limits=limits), training=True, gemm="sm90").one
    assert one is not None and one.parks and (one.block_m, one.cluster) == tile
    rows, columns = -(-m // one.block_m), -(-n // (SM90_BLOCK_N * one.cluster))
    grouped = (columns - 1) // one.panel * one.panel
    order = [
        (row, column)
        for first in range(0, grouped, one.panel)
        for row in range(rows)
        for column in range(first, first + one.panel)
    ]
    order += [(row, column) for column in range(grouped, columns) for row in range(rows)]
    assert len(order) == rows * columns and one.in_panels == grouped * one.cluster
    of_parts: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for cluster in range(one.clusters):
        for nth, (row, column) in enumerate(order[cluster :: one.clusters]):
            count = one.parts_in_panels if column < grouped else one.parts_alone
            if count != rows:
                owner, rows_of_it = of_parts.setdefault((column, row % count), (cluster, []))
                assert owner == cluster and row == row % count + count * len(rows_of_it)
                assert nth == 0 or not rows_of_it or order[cluster :: one.clusters][nth - 1][1] == column
                rows_of_it.append(row)
    assert all(
        rows_of_it[-1] + len({part for c, part in of_parts if c == column}) >= rows
        for (column, _), (_, rows_of_it) in of_parts.items()
    )
    assert of_parts or rows <= one.clusters


def test_few_features_take_clusters_of_one() -> None:
    """A second CTA without features would only load."""
    few, many = (
        plan(contiguous(100000, 64, 64), training=True, gemm="sm90").one,
        plan(contiguous(4096, 4096, 4096), training=True).one,
    )
    assert few is not None and many is not None
    assert (few.block_m, few.cluster) == (many.block_m, many.cluster - 1) == (256, 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "want"),
    [  # us of g made twice, and of tiles that are parked
        ((524288, 128, 128), "bfloat16", {}, True),  # 110 and 164
        ((802816, 128, 128), "bfloat16", {}, True),  # 166 and 245
        ((802816, 128, 128), "float32", {"precision": "high"}, True),  # 316 and 445
        ((131071, 96, 200), "float16", {}, True),  # 53 and 87 in bfloat16
        ((50000, 64, 1024), "bfloat16", {"saved": True}, True),
        ((50000, 64, 1024), "float32", {}, True),  # 199 and 391
        ((65536, 256, 512), "bfloat16", {}, True),  # 65 and 84
        ((65536, 256, 512), "bfloat16", {"training": False}, False),
        ((65536, 256, 512), "bfloat16", {"ranks": "inside"}, False),
        ((380000, 768, 512), "bfloat16", {}, False),  # 851 and 707, call after call
        ((380000, 768, 512), "bfloat16", {"saved": True}, False),  # 911 and 840
        ((380000, 768, 512), "float32", {"precision": "high"}, False),  # 1686 and 1466
        ((380000, 768, 512), "float32", {}, False),  # 3443 and 2813
        ((65536, 1024, 1024), "bfloat16", {}, False),
        ((16384, 4096, 4096), "bfloat16", {}, False),
        ((1024, 8192, 8192), "bfloat16", {}, False),
    ],
)
def test_g_is_made_twice_where_that_was_measured_to_win(
    shape: tuple[int, int, int], dtype: str, options: dict[str, Any], want: bool
) -> None:
    m, k, n = shape
    one = plan(contiguous(m, n, k, dtype), gemm="sm90", **{"training": True, **options}).one
    assert one is not None and makes_g_twice(one) == want


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "want"),
    [
        ((128, 1024, 512), "bfloat16", {}, True),
        ((2, 64, 64), "float16", {"saved": True}, False),  # so few rows are kept in float64
        ((512, 2048, 2048), "float16", {"saved": True}, True),
        ((256, 2048, 8192), "float32", {"precision": "high"}, True),
        ((64, 512, 4096), "float32", {"prepared": True}, True),
        ((256, 2048, 8192), "bfloat16", {"training": False}, False),
        ((256, 2048, 8192), "bfloat16", {"cumulative": True}, False),  # who counts batches waits for all who read
        ((256, 2048, 8192), "bfloat16", {"ranks": "inside"}, False),
        ((2048, 512, 512), "bfloat16", {}, True),
        ((4097, 512, 512), "bfloat16", {}, False),
        ((1024, 8192, 8192), "bfloat16", {}, False),  # more clusters than there are at once
    ],
)
def test_few_rows_lie_in_one_cluster(
    shape: tuple[int, int, int], dtype: str, options: dict[str, Any], want: bool
) -> None:
    m, k, n = shape
    one = plan(contiguous(m, n, k, dtype), **{"training": True, **options}).one
    assert want == (one is not None and has_all_rows(one))


@pytest.mark.parametrize(("n", "sixteens", "want"), [(512, 7, 16), (512, 3, 8), (1024, 7, 8)])
def test_a_cluster_has_16_ctas_where_all_of_them_fit(n: int, sixteens: int, want: int) -> None:
    one = plan(contiguous(2048, n, 512, "bfloat16", H200._replace(sixteens=sixteens)), training=True).one
    assert one is not None and has_all_rows(one) and one.cluster == want


def test_no_cluster_is_larger_than_its_gpu_holds() -> None:
    for device in (Device((9, 0), 132, pairs=60, fours=0, eights=0), H200.at_most(99), Device((9, 0), 7, pairs=0)):
        p = contiguous(128, 512, 1024, device=device)
        found = [tile for tile in candidates(p, "training", "bfloat16") if tile.mode == "cluster_batch"]
        assert found and all(
            tile.clusters <= (device.ctas(2) if tile.shape == (32, 1) else device.clusters(tile.cluster))
            for tile in found
        )


def test_the_planner_loses_little_on_what_was_measured() -> None:
    """docs/results/sweep.jsonl has the times of all choices on an H200: 515 shapes, three dtypes, both modes."""
    spec = importlib.util.spec_from_file_location("sweep", ROOT / "tools" / "sweep.py")
    assert spec is not None and spec.loader is not None
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)
    lines = sweep.judged(ROOT / "docs" / "results" / "sweep.jsonl")
    assert len(lines) == 1509
    regret = np.array([line["regret"] for line in lines])
    assert (regret <= 0.05).mean() > 0.91 and regret.mean() < 0.015
    assert (regret <= 0.2).mean() > 0.985
    # TF32 of 16 features, for which cuBLAS takes longer than the model knows, and rows of 16 bytes by tiles made twice
    slow = [(line["dtype"], line["shape"][1:]) for line in lines if line["regret"] > 0.52]
    assert slow == [("tf32", [96, 16]), ("bfloat16", [8, 80])]
    assert len([line for line in lines if line["of eager"] > 1]) <= 7
    # Those are of TF32 and long sums, for which cuBLAS picks a better kernel where PyTorch asks.
    slower = [line for line in lines if line["of eager"] > 1.1]
    assert all(line["dtype"] == "tf32" and line["shape"][1] > 16000 for line in slower)


@pytest.mark.parametrize("columns", [2, 4, 8])
def test_threads_lie_along_rows_of_any_length(columns: int) -> None:
    """A power of two, a warp at most, and no more than the row has vectors but for the rounding."""
    for n in range(1, 2000):
        blocks, along = threads_along(n, columns)
        assert along in (1, 2, 4, 8, 16, 32) and (blocks - 1) * along * columns < n <= blocks * along * columns
        assert along in (1, 32) or n > along // 2 * columns


def test_sm90_parks_in_whole_words_of_16_bytes() -> None:
    """A row of y that ends within a word would take the caller's padding with it, wherever the rows start."""
    ends_within = contiguous(50000, 1020, 1024)._replace(y=Matrix((1024, 1), True))
    for p in (ends_within, contiguous(50000, 1001, 1024), ends_within._replace(n=1024)):
        decided = plan(p, training=True, gemm="sm90")
        assert decided.one is not None and decided.one.parks
        assert decided.taken.y == (p.y if p.n == 1024 else Matrix((1024, 1), aligned=True, own=True))
        for one in (plan(p, training=False, gemm="sm90"), plan(p._replace(m=1024), training=True, gemm="sm90")):
            assert one.one is not None and not one.one.parks and one.taken.y is p.y
    turned = Matrix((1, 1024), True)
    assert plan(contiguous(1024, 1024, 1024)._replace(y=turned), training=True, gemm="sm90").taken.y.own


@pytest.mark.parametrize("sizes_", [(2**31 + 5, 3, 8), (3, 8, 2**31 + 5), (2**17, 2**15, 8), (2**16, 8, 2**16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_2_31(sizes_: tuple[int, int, int], dtype: str) -> None:
    p = contiguous(*sizes_, dtype)
    decided = plan(p, training=True)
    assert_fits(p, decided, training=True)
    if max(sizes_) > INT32_MAX:
        assert decided.gemm == "tiled"
        with pytest.raises(ValueError, match=r"^gemm: "):
            plan(p, training=True, gemm="cublas")


@pytest.mark.parametrize("saved", [True, False])
def test_limbs_end_where_the_copy_engine_does(saved: bool) -> None:
    """The kernel counts in 32 bits."""
    p = contiguous(2, 8, 2**30 + 8, "float32")
    assert plan(p, training=True, saved=saved).gemm == "cublas"
    with pytest.raises(ValueError, match=r"gemm: .*copy engine"):
        plan(p, training=True, gemm="sm90", saved=saved)


def test_the_same_question_is_answered_once() -> None:
    p = contiguous(1024, 8192, 8192)
    assert plan(p, training=True) is plan(p, training=True)


@pytest.mark.parametrize(
    ("shape", "strides", "want"),
    [
        ((4, 5), (5, 1), (5, 1)),
        ((1, 5), (99, 1), (5, 1)),
        ((4, 1), (7, 99), (7, 1)),
        ((1, 1), (0, 0), (1, 1)),
        ((1, 5), (0, -1), (1, -1)),
    ],
)
def test_strides_of_a_single_row_or_column_mean_nothing(shape: Any, strides: Any, want: Any) -> None:
    assert Matrix.of(shape, strides, aligned=True).strides == want
