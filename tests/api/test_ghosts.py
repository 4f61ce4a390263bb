"""Ghost batches (`groups`): each run of rows is normalised by itself, in every layout, and as a loop would do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import reference
from gsbn._plan import Limits
from tests.support.families import FAMILIES
from tests.support.gradients import NAMES, before_relu, draw_dy, gradient_bounds, step, truth_of
from tests.support.harness import ANY, DTYPES, LAYOUTS, Kind, assert_same_bits, forward, without_out
from tests.support.strategies import Case
from tests.support.tolerance import assert_outcome_within, assert_within, bounds

CASE = Case((40, 8, 24), "float32", True, groups=4)


def assert_right(kind: Kind, case: Case, limits: Limits = ANY, *, deferred: bool = False, **options: Any) -> None:
    """All results are within the bounds of each run of rows, and repeat bit by bit."""
    arrays, layouts = case.arrays(), dict(case.layouts)
    options |= case.options
    got = forward(kind, arrays, layouts, limits=limits, **options)
    wide = np.longdouble if case.dtype == "float64" else np.float64
    given = without_out(arrays)
    truth = reference.forward(**given, **case.options, dtype=wide)
    limbs = case.dtype == "float32" and not kind.is_cpu
    deferred |= kind.is_cpu and DTYPES[case.dtype].itemsize == 2
    assert_outcome_within(got, truth, bounds(given, truth, **case.options, deferred=deferred, limbs=limbs))
    dy = draw_dy(arrays)
    y, gradients = step(kind, arrays, dy, layouts, limits=limits, forward_limits=limits, **options)
    again, repeated = step(kind, arrays, dy, layouts, limits=limits, forward_limits=limits, **options)
    assert_same_bits(y, again)
    dy = dy if case.activation is None else before_relu(dy, y)
    form = {"training": True, "eps": case.eps, "groups": case.groups}
    want = truth_of(given, dy, **form)
    allowed = gradient_bounds(given, dy, want, **form, activation=case.activation, deferred=deferred)
    for name, gradient in gradients.items():
        if gradient is not None:
            assert_within(gradient, np.asarray(getattr(want, name)), allowed[name], name)
            assert_same_bits(gradient, np.asarray(repeated[name]))


@pytest.mark.parametrize(("shape", "groups"), [
    ((9, 5, 4), 3), ((300, 72, 136), 2), ((300, 72, 136), 150), ((1024, 40, 12), 8), ((3000, 40, 264), 2),
    ((96, 3, 1), 6),
    ((4096, 16, 500), 16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_within_its_bounds(kind: Kind, shape: tuple[int, int, int], groups: int, dtype: str) -> None:
    assert_right(kind, Case(shape, dtype, True, offset=1.0, groups=groups))
    assert_right(kind, Case(shape, dtype, True, momentum=None, groups=groups, activation="relu", scale="(1,)"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families(kind: Kind, dtype: str, family: str) -> None:
    assert_right(kind, Case((320, 72, 136), dtype, True, family=family, groups=5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_layout(kind: Kind, dtype: str, layout: str) -> None:
    names = ("x", "weight", "out", "dy", "gamma", "running_var")
    layouts = tuple((name, layout) for name in names)
    for shape in ((60, 33, 17), (64, 40, 48)):
        assert_right(kind, Case(shape, dtype, True, layouts=layouts, groups=4, activation="relu"))


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["passes", "fused"])
@pytest.mark.parametrize("gemm", ["cublas", "tiled", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 16, 200, 1500])
def test_each_way_on_a_gpu(gpu_kind: Kind, rows: int, dtype: str, gemm: str, fused: bool) -> None:
    for features in (136, 61):
        case = Case((3 * rows, 72, features), dtype, True, offset=1.0, groups=3)
        assert_right(gpu_kind, case, Limits(fused=fused), gemm=gemm)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clusters(gpu_kind: Kind, dtype: str, cluster: int) -> None:
    """Of backward_fused, and of backward_sums where few features have many rows."""
    assert_right(gpu_kind, Case((3000, 72, 24), dtype, True, groups=3), Limits(fused=True, cluster=cluster))
    assert_right(gpu_kind, Case((40000, 24, 24), dtype, True, groups=2), Limits(fused=False))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_after_the_other(gpu_kind: Kind, dtype: str, momentum: float | None) -> None:
    """A call for each run, whose results lie as those of passes that know ghost batches."""
    layouts = (("x", "padded"), ("out", "strided"), ("weight", "C"))
    for shape, groups in (((4096, 64, 256), 4), ((3000, 264, 136), 3), ((20000, 32, 40), 2)):
        case = Case(shape, dtype, True, momentum=momentum, groups=groups, activation="relu")
        for each in (case, replace(case, layouts=layouts)):
            assert_right(gpu_kind, each, Limits(by_runs=True), deferred=dtype in ("float16", "bfloat16"))


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 7, 100])
def test_sms(gpu_kind: Kind, sms: int) -> None:
    """With fewer SMs the rows may be split otherwise: results differ by rounding alone."""
    arrays = replace(CASE, shape=(640, 40, 200)).arrays()
    dy, results = draw_dy(arrays), []
    for n in (None, sms):
        y, gradients = step(gpu_kind, arrays, dy, training=True, groups=5, gemm="tiled", sms=n)
        results.append([y, *gradients.values()])
    for all_of_them, limited in zip(*results, strict=True):
        np.testing.assert_allclose(limited, all_of_them, rtol=0, atol=1e-4 * np.abs(all_of_them).max())


@pytest.mark.parametrize("momentum", [0.1, 0.75, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_a_loop(kind: Kind, dtype: str, momentum: float | None) -> None:
    """What a loop over the runs gives, up to rounding: y, the state, and the sums of the gradients."""
    arrays = without_out(replace(CASE, dtype=dtype).arrays())
    dy = draw_dy(arrays)
    once, loop = ({name: kind.put(a) for name, a in arrays.items()} for _ in range(2))
    y, saved = gsbn.forward(**once, training=True, momentum=momentum, groups=4, return_saved=True)
    ours = gsbn.backward(kind.put(dy), saved)
    ys, theirs = [], []
    for x, of_dy in zip(np.split(arrays["x"], 4), np.split(dy, 4), strict=True):
        of_run = {**loop, "x": kind.put(x)}
        y_of_run, saved = gsbn.forward(**of_run, training=True, momentum=momentum, return_saved=True)
        ys.append(kind.get(y_of_run))
        theirs.append(gsbn.backward(kind.put(of_dy), saved))
    close = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-2, "bfloat16": 0.1}[dtype]
    np.testing.assert_allclose(np.float64(kind.get(y)), np.float64(np.concatenate(ys)), rtol=close, atol=close)
    for name in ("running_mean", "running_var"):
        np.testing.assert_allclose(kind.get(once[name]), kind.get(loop[name]), rtol=1e-5, atol=1e-5)
    assert kind.get(once["num_batches_tracked"]) == arrays["num_batches_tracked"] + 4
    for name in NAMES:
        parts = [np.float64(kind.get(getattr(of_run, name))) for of_run in theirs]
        want = np.concatenate(parts) if name == "x" else np.sum(parts, axis=0)
        np.testing.assert_allclose(
            np.float64(kind.get(getattr(ours, name))),
            want,
            rtol=close,
            atol=close * (1 + np.abs(want).max()),
            err_msg=name,
        )


@pytest.mark.parametrize("momentum", [0.5, 1.0])
def test_a_variance_beyond_float16_between_the_runs(kind: Kind, momentum: float) -> None:
    """Passes that know ghost batches round the running statistics once, after all runs: no infinity comes between."""
    arrays = replace(CASE, dtype="float16", narrow=("running",), momentum=momentum).arrays()
    arrays["x"][:10] *= 256
    got = forward(kind, arrays, limits=Limits(by_runs=False), training=True, momentum=momentum, groups=4)
    given = without_out(arrays)
    form: dict[str, Any] = {"training": True, "momentum": momentum, "groups": 4}
    truth = reference.forward(**given, **form)
    first = reference.forward(**{**given, "x": given["x"][:10]}, training=True, momentum=momentum)
    assert first.running_var is not None
    assert first.running_var.max() > 65504
    assert_outcome_within(got, truth, bounds(given, truth, **form, deferred=kind.is_cpu))


def test_one_group_is_the_whole_batch(kind: Kind) -> None:
    arrays = replace(CASE, groups=1).arrays()
    plain, one = (forward(kind, arrays, training=True, **more) for more in ({}, {"groups": 1}))
    for ours, theirs in zip(plain, one, strict=True):
        assert_same_bits(np.atleast_1d(ours), np.atleast_1d(theirs))


def test_inference_ignores_it(kind: Kind) -> None:
    call = {name: kind.put(a) for name, a in without_out(CASE.arrays()).items()}
    assert_same_bits(kind.get(gsbn.forward(**call, groups=7)), kind.get(gsbn.forward(**call)))


def test_an_empty_batch(kind: Kind) -> None:
    """Each empty run is counted, as PyTorch counts an empty batch."""
    call = {name: kind.put(a) for name, a in without_out(Case((0, 5, 4), "float32", True).arrays()).items()}
    before = kind.get(call["num_batches_tracked"]).copy()
    y, saved = gsbn.forward(**call, training=True, groups=3, return_saved=True)
    assert tuple(y.shape) == (0, 4)
    assert kind.get(call["num_batches_tracked"]) == before + 3
    for name, gradient in zip(NAMES, gsbn.backward(y, saved), strict=True):
        assert not kind.get(gradient).any(), name


@pytest.mark.parametrize("needs", [("bias",), ("x",), ("weight", "beta"), ("gamma", "scale"), ()], ids=str)
def test_some_gradients(kind: Kind, needs: tuple[str, ...]) -> None:
    """Those that are asked for have the bits that they have among all."""
    for scale in ("vector", "(1,)"):
        arrays = replace(CASE, scale=scale).arrays()
        dy = draw_dy(arrays)
        every = step(kind, arrays, dy, training=True, groups=4)[1]
        some = step(kind, arrays, dy, needs=needs, training=True, groups=4)[1]
        for name in needs:
            if name in ("x", "weight"):  # a product may take another path beside the other one
                np.testing.assert_allclose(some[name], every[name], rtol=1e-4, atol=1e-4)
            else:
                assert_same_bits(np.asarray(some[name]), np.asarray(every[name]))


@pytest.mark.gpu
def test_a_graph_replays_it(gpu_kind: Kind) -> None:
    from tests.support.streams import capture, new_stream

    arrays = without_out(CASE.arrays())
    call = {name: gpu_kind.put(a) for name, a in arrays.items()}
    with new_stream(gpu_kind) as stream:
        gsbn.forward(**call, training=True, groups=4)
        replay, y = capture(gpu_kind, stream, lambda: gsbn.forward(**call, training=True, groups=4))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            call[name][...] = gpu_kind.put(arrays[name])
        for count in (4, 8):
            replay()
            stream.synchronize()
            assert gpu_kind.get(call["num_batches_tracked"]) == arrays["num_batches_tracked"] + count
    truth = reference.forward(**arrays, **CASE.options)
    assert_within(gpu_kind.get(y), truth.y, bounds(arrays, truth, **CASE.options, limbs=True).y, "y")
