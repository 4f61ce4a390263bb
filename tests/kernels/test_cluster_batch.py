"""forward_sm90 in mode "cluster_batch": every tile, CTAs without rows, overlapping launches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gsbn import _plan, reference
from gsbn._forward import forward_within
from gsbn._plan import Limits
from gsbn._plan.sm90_variants import (
    CLUSTER_BATCH_TILES,
    FEW_ROWS_TILES,
    LIMBS_RS_TILES,
    SPLIT_K_TILES,
    largest_block,
)
from tests.support.accuracy import FAMILIES, assert_as_accurate_as_torch, assert_right_and_repeated
from tests.support.gradients import backward, draw_dy, gradient_bounds, truth_of
from tests.support.harness import assert_same_bits, kind_of, poisoned_allocations, without_out
from tests.support.strategies import Case
from tests.support.tolerance import assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")

ELEMENTS = [("float16", "high"), ("bfloat16", "high"), ("float32", "high"), ("float32", "highest")]


@pytest.mark.parametrize("tile", CLUSTER_BATCH_TILES, ids=str)
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
def test_all_rows_in_a_cluster(dtype: str, precision: str, tile: tuple[int, int]) -> None:
    """Five rows fewer than the tiles have; one row more than a tile has, which leaves CTAs without rows; two rows.

    A block of features is not full, and k has more steps than the pipeline has stages.
    """
    block_m, cluster = tile
    if block_m > largest_block(_plan.element_for(dtype, precision)):
        pytest.skip("limbs have no such tile")
    for rows in {2, min(block_m + 1, block_m * cluster), block_m * cluster - 5}:
        limits = Limits(sm90=tile, cluster_batch=True)
        assert_right_and_repeated(Case((rows, 776, 200), dtype, True).arrays(), dtype, precision, limits)


@pytest.mark.parametrize("tile", [tile for tile in LIMBS_RS_TILES if tile[2] == 1], ids=str)
def test_all_rows_in_a_tile_with_limbs_rs(tile: tuple[int, int, int]) -> None:
    block_m, *_ = tile
    limits = Limits(sm90=tile[:2], split=False, cluster_batch=True, limbs_rs=True)
    for rows in {2, block_m - 5, block_m}:
        assert_right_and_repeated(Case((rows, 776, 200), "float32", True).arrays(), "float32", "highest", limits)


@pytest.mark.parametrize("of_x", [False, True], ids=["", "limbs of x"])
@pytest.mark.parametrize("tile", SPLIT_K_TILES, ids=str)
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
def test_all_rows_in_a_cluster_with_split_k(dtype: str, precision: str, tile: tuple[int, int], of_x: bool) -> None:
    """As above, with parts of k that differ in length."""
    if of_x and (dtype, precision) != ("float32", "highest"):
        pytest.skip("limbs_rs is for float32 at highest")
    block_m, split = tile
    limits = Limits(sm90=(block_m, 1, split), split=True, cluster_batch=True, limbs_rs=of_x)
    for rows in {2, block_m + 1, block_m * split - 5}:
        assert_right_and_repeated(Case((rows, 4392, 200), dtype, True).arrays(), dtype, precision, limits)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("tile", FEW_ROWS_TILES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_few_rows_save_float64_deviations(dtype: str, tile: tuple[int, int], activation: str | None) -> None:
    """The deviations add up to 0, y follows from them, and the gradients are within their bounds."""
    block_m, split = tile
    limits = Limits(sm90=(block_m, 1, split)[: 2 + (split > 1)], split=split > 1)
    for rows in (2, 3, 9, 16):
        arrays = without_out(Case((rows, 4392, 200), dtype, True).arrays())
        options = {"training": True, "gemm": "sm90", "activation": activation, "return_saved": True}
        with poisoned_allocations(kind_of("cupy")):
            y, saved = forward_within(limits, **{name: cupy.asarray(a) for name, a in arrays.items()}, **options)
        d, slope, offset = saved.deviations, saved.vectors[7], saved.vectors[8]
        assert d.dtype == np.float64 and (abs(d.sum(0)) <= rows * 2.0**-50 * abs(d).max(0)).all()
        assert (d[:, 3::8] == 0).all()  # constant features
        u = (slope * d + offset).astype("f4")
        want = reference.round_to((cupy.maximum(u, 0) if activation else u).get(), y.dtype)
        np.testing.assert_array_equal(y.get(), want)

        dy = draw_dy(arrays)
        got = backward(kind_of("cupy"), arrays, dy, training=True, gemm="sm90", forward_limits=limits)
        truth = truth_of(arrays, dy, training=True)
        allowed = gradient_bounds(arrays, dy, truth, training=True)
        for name, gradient in got.items():
            if gradient is not None:
                assert_within(gradient, getattr(truth, name), allowed[name], name)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("tile", [(32, 4), (64, 8), (16, 1, 8)], ids=str)
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", [(128, 8, 8), (77, 72, 1040), (100, 4104, 504)])
def test_all_rows_in_a_cluster_whatever_the_shape(
    shape: tuple[int, int, int], dtype: str, precision: str, tile: tuple[int, int], activation: str | None
) -> None:
    limits = Limits(sm90=tile, cluster_batch=True)
    assert_right_and_repeated(Case(shape, dtype, True).arrays(), dtype, precision, limits, activation)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_rows_in_a_cluster_are_as_accurate_as_torch(name: str, dtype: str) -> None:
    limits = Limits(sm90=(64, 8), cluster_batch=True)
    assert_as_accurate_as_torch(kind_of("torch-cuda"), name, (512, 1024, 512), dtype, gemm="sm90", limits=limits)


@pytest.mark.parametrize("graph", [False, True])
def test_a_cluster_with_all_rows_begins_before_the_launch_ahead_ends(graph: bool) -> None:
    """Each call's x is the previous call's y, and all count batches and update the same running statistics."""
    rng, n, calls = np.random.default_rng(0), 512, 20
    weight = cupy.asarray(rng.standard_normal((n, n)).astype("f2") / 16)
    first = cupy.asarray(rng.standard_normal((128, n)).astype("f2"))

    def chain(limits: Limits, graph: bool) -> list[Any]:
        ys = [first, *(cupy.full_like(first, cupy.nan) for _ in range(calls))]
        state = [cupy.zeros(n, "f4"), cupy.ones(n, "f4"), cupy.zeros((), "i8")]
        names = ("running_mean", "running_var", "num_batches_tracked")

        def run() -> None:
            for x, y in itertools.pairwise(ys):
                options = {**dict(zip(names, state, strict=True)), "training": True, "gemm": "sm90", "out": y}
                forward_within(limits, x, weight, **options)

        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            run()
            if graph:
                stream.begin_capture()
                run()
                stream.end_capture().launch(stream)
            else:
                run()
        stream.synchronize()
        assert int(state[2]) == 2 * calls
        return [*ys[1:], *state[:2]]

    whole, again = (chain(Limits(sm90=(32, 4), cluster_batch=True), graph=g) for g in (graph, False))
    for a, b in zip(whole, again, strict=True):
        assert_same_bits(a.get(), b.get())
    for a, b in zip(
        whole[:3], chain(Limits(recompute=False, cluster_batch=False), graph=False)[:3], strict=True
    ):  # later ones differ too much
        assert float(abs(a.astype("f4") - b.astype("f4")).max()) < 0.1
