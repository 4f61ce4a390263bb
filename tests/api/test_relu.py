"""relu in one call with the layer: y is relu of the y without it, and the gradients agree with the returned y."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import _plan, reference
from gsbn._cuda import kernels as _kernels
from gsbn._plan import Limits
from gsbn._plan.sm90_variants import BLOCKS_M, CLUSTERS, SPLIT_K_TILES_BY_MODE
from tests.support.gradients import (
    NAMES,
    assert_beta_agrees,
    before_relu,
    draw_dy,
    draw_integers,
    gradient_bounds,
    step,
    truth_of,
)
from tests.support.harness import DTYPES, GPU_KINDS, Kind, assert_same_bits, forward, kind_of, without_out
from tests.support.strategies import Case
from tests.support.streams import capture, new_stream
from tests.support.tolerance import TF32, assert_outcome_within, assert_within, bounds

Arrays = dict[str, np.ndarray]
ELEMENTS = [*((dtype, "highest") for dtype in DTYPES), ("float32", "high")]
SHAPES = {
    "few rows": (7, 24, 40),
    "one tile": (100, 40, 72),
    "ragged": (300, 64, 1001),
    "several tiles": (1100, 136, 264),
}
PATHS = [
    ("numpy", "auto"),
    ("torch-cpu", "auto"),
    *(pytest.param("cupy", gemm, marks=pytest.mark.gpu) for gemm in ("auto", "cublas", "tiled", "sm90")),
    pytest.param("torch-cuda", "auto", marks=pytest.mark.gpu),
]
FORM_PATHS = [  # each library; on a GPU the kernels of one launch and of three
    ("numpy", "auto"),
    ("torch-cpu", "auto"),
    *(pytest.param("cupy", gemm, marks=pytest.mark.gpu) for gemm in ("auto", "tiled")),
]
FORMS = ("plain", "no beta", "negative gamma", "gamma 0", "gamma and beta 0", "no scale", "a number", "one element")
BASE = Case(SHAPES["one tile"], "float32", training=True, activation="relu")


def drawn(
    shape: tuple[int, int, int], dtype: str, training: bool, form: str = "plain"
) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and options of a call with relu."""
    scale = {"no scale": "none", "a number": "none", "one element": "(1,)"}.get(form, "vector")
    case = Case(shape, dtype, training, activation="relu", scale=scale)
    arrays, options = without_out(case.arrays()), case.options
    if form == "no beta":
        del arrays["beta"]
    elif form == "negative gamma":
        arrays["gamma"] = -np.abs(arrays["gamma"])
    elif form.startswith("gamma"):
        arrays["gamma"] = arrays["gamma"] * 0
        arrays["beta"] = arrays["beta"] * (0 if form.endswith("beta 0") else 1)
    elif form == "a number":
        options["scale"] = -0.75
    return arrays, options


def judged(arrays: Arrays, options: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """The same call for the reference and the bounds, with an array in place of a number."""
    options = dict(options)
    number = {"scale": np.array(options.pop("scale"))} if "scale" in options else {}
    return {**arrays, **number}, options


def takes_limbs(dtype: str, precision: str, name: str, gemm: str) -> bool:
    on_sm90 = name in GPU_KINDS and gemm in ("auto", "sm90")
    return on_sm90 and _plan.takes_limbs(dtype, precision, _kernels.gpu(0))


def assert_forward_within(got: Any, arrays: Arrays, options: dict[str, Any], *, limbs: bool, tf32: bool) -> None:
    arrays, options = judged(arrays, options)
    wide = np.longdouble if arrays["x"].dtype == np.float64 else np.float64
    truth = reference.forward(**arrays, **options, dtype=wide)
    of = [bounds(arrays, truth, **options, operand=TF32 if tf32 else 0.0, deferred=arrays["x"].dtype.itemsize == 2)]
    of += [bounds(arrays, truth, **options, limbs=True)] if limbs else []
    limit = of[0]._replace(**{
        field: np.maximum.reduce([getattr(one, field) for one in of])
        for field in ("y", "running_mean", "running_var") if getattr(of[0], field) is not None
    })  # fmt: skip
    assert_outcome_within(got, truth, limit)


def assert_gradients_within(
    y: np.ndarray,
    got: dict[str, np.ndarray | None],
    arrays: Arrays,
    dy: np.ndarray,
    options: dict[str, Any],
    tf32: bool,
) -> None:
    """Compare with the truth for the signs of this y; dbeta exactly if dy has integers."""
    judged_arrays, _ = judged(arrays, options)
    of_u, training = before_relu(dy, y), options["training"]
    truth = truth_of(judged_arrays, of_u, training=training)
    operand = TF32 if tf32 else 2.0**-22 + 48 * 2.0**-23  # or limbs, as in tests/fuzz/good.py
    form = {"training": training, "operand": operand, "deferred": True, "activation": "relu"}
    limits = gradient_bounds(judged_arrays, of_u, truth, **form)
    for name, gradient in got.items():
        if gradient is not None:
            assert_within(gradient, np.asarray(getattr(truth, name)), limits[name], name)
    of_beta = got["beta"]
    if of_beta is not None and (dy == np.round(dy.astype(float))).all():
        assert_beta_agrees(of_beta, dy, y)


def skip_what_sm90_refuses(gemm: str, error: ValueError) -> None:
    if gemm != "sm90" or not str(error).startswith("gemm:"):
        raise error
    pytest.skip(str(error))


# ---- the forward


@pytest.mark.parametrize(("name", "gemm"), PATHS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_y_is_relu_of_the_call_without_it(
    shape: tuple[int, int, int], dtype: str, precision: str, training: bool, name: str, gemm: str
) -> None:
    """Exactly, since the numbers before relu have the same bits. So have the statistics."""
    kind = kind_of(name)
    arrays, options = drawn(shape, dtype, training)
    options |= {"gemm": gemm, "precision": precision}
    try:
        got = forward(kind, arrays, **options)
    except ValueError as error:
        skip_what_sm90_refuses(gemm, error)
    plain = forward(kind, arrays, **{**options, "activation": None})
    np.testing.assert_array_equal(got.y, np.maximum(plain.y, plain.y.dtype.type(0)))
    for mine, its in zip(got[1:3], plain[1:3], strict=True):
        assert_same_bits(mine, its)
    assert 0 < (got.y > 0).mean() < 1, "relu had nothing to do"


@pytest.mark.parametrize(("name", "gemm"), FORM_PATHS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_within_its_bound(form: str, dtype: str, training: bool, name: str, gemm: str) -> None:
    arrays, options = drawn(SHAPES["one tile"], dtype, training, form)
    try:
        got = forward(kind_of(name), arrays, gemm=gemm, **options)
    except ValueError as error:
        skip_what_sm90_refuses(gemm, error)
    assert_forward_within(got, arrays, options, limbs=takes_limbs(dtype, "highest", name, gemm), tf32=False)


@pytest.mark.parametrize(("name", "gemm"), PATHS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_passes(dtype: str, training: bool, name: str, gemm: str) -> None:
    """In training to every feature; in inference to its row, where the gradient passes as well."""
    kind = kind_of(name)
    arrays, options = drawn(SHAPES["one tile"], dtype, training)
    arrays["x"][3, 5] = np.nan
    arrays["weight"] = np.where(arrays["weight"] == 0, arrays["weight"].dtype.type(1), arrays["weight"])
    dy = draw_integers(arrays)
    try:
        y, got = step(kind, arrays, dy, needs=("beta",), gemm=gemm, **options)
    except ValueError as error:
        skip_what_sm90_refuses(gemm, error)
    is_nan = np.isnan(y.astype(np.float64))
    assert is_nan[3].all() and (is_nan.all() if training else is_nan.sum() == y.shape[1])
    assert got["beta"] is not None
    assert_beta_agrees(got["beta"], dy, y)


# ---- the backward


@pytest.mark.parametrize(("name", "gemm"), PATHS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen statistics"])
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_belong_to_the_y_that_was_returned(
    shape: tuple[int, int, int], dtype: str, precision: str, training: bool, name: str, gemm: str
) -> None:
    kind = kind_of(name)
    arrays, options = drawn(shape, dtype, training)
    for dy in (draw_integers(arrays), draw_dy(arrays)):
        try:
            y, got = step(kind, arrays, dy, gemm=gemm, precision=precision, **options)
        except ValueError as error:
            skip_what_sm90_refuses(gemm, error)
        assert_gradients_within(y, got, arrays, dy, options, tf32=precision == "high")


@pytest.mark.parametrize(("name", "gemm"), FORM_PATHS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen statistics"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_every_form(form: str, dtype: str, training: bool, name: str, gemm: str) -> None:
    arrays, options = drawn(SHAPES["one tile"], dtype, training, form)
    dy = draw_integers(arrays)
    try:
        y, got = step(kind_of(name), arrays, dy, gemm=gemm, **options)
    except ValueError as error:
        skip_what_sm90_refuses(gemm, error)
    assert_gradients_within(y, got, arrays, dy, options, tf32=False)
    if form == "gamma and beta 0":
        assert not any(gradient.any() for gradient in got.values() if gradient is not None), "y is 0 everywhere"


@pytest.mark.parametrize("name", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("needs", [("beta",), ("x",), ("weight",), ("gamma", "beta"), ("scale",), ()], ids=str)
def test_needs_do_not_change_other_gradients(needs: tuple[str, ...], dtype: str, training: bool, name: str) -> None:
    """Gradients wanted one by one have the same signs."""
    arrays, options = drawn(SHAPES["one tile"], dtype, training)
    dy, kind = draw_integers(arrays), kind_of(name)
    options["gemm"] = "auto" if kind.is_cpu else "tiled"  # its bits repeat
    _, every = step(kind, arrays, dy, **options)
    _, some = step(kind, arrays, dy, needs=needs, **options)
    for gradient in needs:
        ours, want = some[gradient], every[gradient]
        assert ours is not None and want is not None
        assert_same_bits(ours, want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "limits",
    [Limits(fused=False), Limits(fused=True, cluster=1), Limits(fused=True, cluster=4)],
    ids=["two passes", "fused", "fused in clusters"],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_through_the_backward(dtype: str, training: bool, limits: Limits) -> None:
    arrays, options = drawn(SHAPES["ragged"], dtype, training)
    dy = draw_integers(arrays)
    y, got = step(kind_of("cupy"), arrays, dy, limits=limits, **options)
    assert_gradients_within(y, got, arrays, dy, options, tf32=False)


@pytest.mark.gpu
@pytest.mark.parametrize("products", ["auto", "cublas", "tiled"])
@pytest.mark.parametrize("layout", ["F", "strided", "unaligned", "padded", "negative"])
@pytest.mark.parametrize("name", GPU_KINDS)
def test_dy_and_out_in_any_layout(name: str, layout: str, products: str) -> None:
    arrays, options = drawn(SHAPES["several tiles"], "bfloat16", True)
    arrays["out"] = np.full((1100, 264), np.nan, DTYPES["bfloat16"])
    dy = draw_integers(arrays)
    layouts = {"dy": layout, "out": layout, "x": layout}
    y, got = step(kind_of(name), arrays, dy, layouts, products=products, **options)
    assert_gradients_within(y, got, without_out(arrays), dy, options, tf32=False)


# ---- every tile of the kernel that computes all in one launch


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [None, *itertools.product(BLOCKS_M, CLUSTERS), *SPLIT_K_TILES_BY_MODE["training"]], ids=str
)
@pytest.mark.parametrize(("dtype", "precision"), [e for e in ELEMENTS if e[0] != "float64"])
@pytest.mark.parametrize("shape", [(300, 72, 520), (4100, 264, 104), (600, 4104, 264), (9000, 64, 2104)])  # deferred
def test_every_tile(shape: tuple[int, int, int], dtype: str, precision: str, tile: Any) -> None:
    if (dtype, precision) == ("float32", "highest") and tile and tile[0] == 256:
        pytest.skip("limbs have no tile of 256 rows")
    if tile in SPLIT_K_TILES_BY_MODE["training"] and shape[1] < 4096:
        pytest.skip("k is too short for split-k")
    kind, within = kind_of("cupy"), Limits(sm90=tile)
    arrays, options = drawn(shape, dtype, True)
    asked = {"gemm": "sm90", "precision": precision}
    try:
        got = forward(kind, arrays, limits=within, **asked, **options)
    except ValueError as error:
        skip_what_sm90_refuses("sm90", error)
    plain = forward(kind, arrays, limits=within, **asked, **{**options, "activation": None})
    np.testing.assert_array_equal(got.y, np.maximum(plain.y, plain.y.dtype.type(0)))
    dy = draw_integers(arrays)
    y, gradients = step(kind, arrays, dy, forward_limits=within, **asked, **options)
    tf32 = precision == "high" and dtype == "float32"
    kept = got._replace(y=y)
    assert_forward_within(kept, arrays, options, limbs=takes_limbs(dtype, precision, "cupy", "sm90"), tf32=tf32)
    assert_gradients_within(y, gradients, arrays, dy, options, tf32=tf32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_tile_in_inference(dtype: str) -> None:
    kind = kind_of("cupy")
    arrays, options = drawn((4100, 264, 104), dtype, False)
    for tile in itertools.product(BLOCKS_M, CLUSTERS):
        asked: dict[str, Any] = {"gemm": "sm90", "precision": "high", "limits": Limits(sm90=tile)}
        try:
            got = forward(kind, arrays, **asked, **options)
        except ValueError as error:
            skip_what_sm90_refuses("sm90", error)
        plain = forward(kind, arrays, **asked, **{**options, "activation": None})
        np.testing.assert_array_equal(got.y, np.maximum(plain.y, plain.y.dtype.type(0)))


# ---- repetition and graphs


@pytest.mark.parametrize(
    ("name", "gemm"),
    [("numpy", "auto"), *(pytest.param("cupy", gemm, marks=pytest.mark.gpu) for gemm in ("cublas", "tiled", "sm90"))],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(dtype: str, training: bool, name: str, gemm: str) -> None:
    arrays, options = drawn(SHAPES["several tiles"], dtype, training)
    dy = draw_dy(arrays)
    try:
        y, first = step(kind_of(name), arrays, dy, gemm=gemm, **options)
    except ValueError as error:
        skip_what_sm90_refuses(gemm, error)
    for _ in range(5):
        again, gradients = step(kind_of(name), arrays, dy, gemm=gemm, **options)
        assert_same_bits(again, y)
        for n in NAMES:
            mine, its = gradients[n], first[n]
            assert mine is not None and its is not None
            assert_same_bits(mine, its)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["plain", "no scale", "one element"])
def test_a_replay_is_a_step(gpu_kind: Kind, form: str, dtype: str, training: bool) -> None:
    shape = SHAPES["several tiles"]
    arrays, options = drawn(shape, dtype, training, form)
    dy = draw_integers(arrays)
    native, dy_native = {name: gpu_kind.put(a) for name, a in arrays.items()}, gpu_kind.put(dy)

    def call() -> tuple[Any, Any]:
        y, saved = gsbn.forward(**native, **options, return_saved=True)
        return y, gsbn.backward(dy_native, saved)

    with new_stream(gpu_kind) as stream:
        call()
        replay, (y, gradients) = capture(gpu_kind, stream, call)
        for seed in (1, 2):
            arrays["x"] = replace(BASE, shape=shape, dtype=dtype, seed=seed).arrays()["x"]
            native["x"][...] = gpu_kind.put(arrays["x"])
            replay()
            stream.synchronize()
            got = {n: None if g is None else gpu_kind.get(g) for n, g in gradients._asdict().items()}
            assert_gradients_within(gpu_kind.get(y), got, arrays, dy, options, tf32=False)


# ---- the tests themselves


def test_a_gradient_of_other_signs_is_found() -> None:
    """If one element of dy passes where y is 0, or does not pass where y is above 0."""
    arrays, options = drawn(SHAPES["one tile"], "float32", True)
    dy = draw_integers(arrays)
    y, got = step(kind_of("numpy"), arrays, dy, **options)
    assert_gradients_within(y, got, arrays, dy, options, tf32=False)
    for positive in (True, False):
        row, column = np.argwhere((y > 0 if positive else y == 0) & (dy != 0))[0]
        wrong = y.copy()
        wrong[row, column] = 0 if positive else 1
        with pytest.raises(AssertionError):
            assert_gradients_within(wrong, got, arrays, dy, options, tf32=False)
