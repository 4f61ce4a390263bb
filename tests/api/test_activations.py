"""Activations that round, and whose gradient y does not always tell: each call beside the reference, by bounds.

test_relu.py does this for relu, which rounds nothing.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gsbn
from gsbn import _plan, reference
from gsbn._activations import activation_of
from gsbn._cuda import kernels as _kernels
from gsbn._forward import forward_within
from gsbn._plan import Limits
from gsbn._plan.activations import PARAMETERS, macros, name_and_number
from gsbn.bench.activations import OF_SLOPE, before, of_y
from tests.support.families import FAMILIES
from tests.support.gradients import draw_dy, draw_integers, gradient_bounds, step, truth_of
from tests.support.harness import (
    ANY,
    CPU_KINDS,
    DTYPES,
    GPU_KINDS,
    LAYOUTS,
    Kind,
    assert_same_bits,
    forward,
    kind_of,
    place,
    poisoned_allocations,
    without_out,
)
from tests.support.strategies import EVERY, OTHERS, Case
from tests.support.streams import call_and_replay
from tests.support.tolerance import TF32, arithmetic, assert_outcome_within, assert_within, bounds, roundoff, summed

Arrays = dict[str, np.ndarray]
ELEMENTS = [*((dtype, "highest") for dtype in DTYPES), ("float32", "high")]
SHAPES = {"few rows": (7, 24, 40), "ragged": (300, 64, 201), "several tiles": (1100, 136, 264)}
ON_GPU = [*(("cupy", gemm) for gemm in ("auto", "cublas", "tiled", "sm90")), ("torch-cuda", "auto")]
PATHS = [("numpy", "auto"), ("torch-cpu", "auto"), *(pytest.param(*path, marks=pytest.mark.gpu) for path in ON_GPU)]
JUMPING = [("leaky_relu", 0.25), ("leaky_relu", -0.25), ("leaky_relu", 4.0), ("elu", 2.0), ("elu", -2.0)]


def drawn(
    shape: tuple[int, int, int], dtype: str, training: bool, activation: Any, family: str = "normal"
) -> tuple[Arrays, dict[str, Any]]:
    case = Case(shape, dtype, training, activation=activation, family=family)
    return without_out(case.arrays()), case.options


def skip_what_sm90_refuses(gemm: str, error: ValueError) -> None:
    if gemm != "sm90" or not str(error).startswith("gemm:"):
        raise error
    pytest.skip(str(error))


def wide_of(arrays: Arrays) -> Any:
    return np.longdouble if arrays["x"].dtype == np.float64 else np.float64


def assert_step_within(
    kind: Kind, arrays: Arrays, dy: np.ndarray, options: dict[str, Any], gemm: str = "auto", precision: str = "highest",
    limits: Limits = ANY, backward_limits: Limits = ANY,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray | None]]:  # fmt: skip
    """A forward and its backward within their bounds; returns where u is above zero, the dy taken, y, the gradients."""
    asked = {"gemm": gemm, "precision": precision}
    try:
        got = forward(kind, arrays, limits=limits, **asked, **options)
    except ValueError as error:
        skip_what_sm90_refuses(gemm, error)
    plain = forward(kind, arrays, limits=limits, **asked, **{**options, "activation": None})
    for mine, its in zip(got[1:3], plain[1:3], strict=True):
        if mine is not None and its is not None:
            assert_same_bits(mine, its)
    wide, activation = wide_of(arrays), options["activation"]
    tf32 = precision == "high" and arrays["x"].dtype == np.float32
    limbs = not kind.is_cpu and _plan.takes_limbs(str(arrays["x"].dtype), precision, _kernels.gpu(0))
    truth = reference.forward(**arrays, **options, dtype=wide)
    form: dict[str, Any] = {"deferred": arrays["x"].dtype.itemsize == 2, "operand": TF32 if tf32 else 0.0}
    found = [bounds(arrays, truth, **options, **form)]
    found += [bounds(arrays, truth, **options, limbs=True)] if limbs else []
    limit = found[0]._replace(**{
        name: np.maximum.reduce([getattr(one, name) for one in found])
        for name in ("y", "running_mean", "running_var") if getattr(found[0], name) is not None
    })  # fmt: skip
    assert_outcome_within(got, truth, limit)

    u = reference.forward(**arrays, **{**options, "activation": None}, dtype=wide).y
    if not follows(activation) and kind.is_cpu:  # where u is within its bound of 0, nothing tells its side
        of_u = reference.forward(**arrays, **{**options, "activation": None}, dtype=wide)
        unsure = np.abs(u) <= bounds(arrays, of_u, **{**options, "activation": None}, **form).y
        dy = np.where(unsure, dy.dtype.type(0), dy)
    try:
        y, gradients = step(kind, arrays, dy, forward_limits=limits, limits=backward_limits, **asked, **options)
    except ValueError as error:
        skip_what_sm90_refuses(gemm, error)
    told = y if follows(activation) else saving(kind, arrays, limits, {**options, **asked, "activation": None})
    above = np.asarray(told, np.float64) > 0
    assert_gradients_within(gradients, arrays, dy, options, u, above, TF32 if tf32 else 2.0**-22 + 48 * 2.0**-23)
    return above, dy, y, gradients


def assert_gradients_within(
    got: dict[str, np.ndarray | None], arrays: Arrays, dy: np.ndarray, options: dict[str, Any], u: np.ndarray,
    above: np.ndarray, operand: float,
) -> None:  # fmt: skip
    """`u` is the true one; `above` says where the forward's is above zero."""
    activation, form = options["activation"], {"training": options["training"], "operand": operand, "deferred": True}
    of_u = before(np, np.asarray(dy, wide_of(arrays)), u, above, activation)
    want = truth_of(arrays, of_u, training=options["training"])
    limits = gradient_bounds(arrays, of_u, want, activation=activation, after=np.asarray(dy, np.float64), **form)  # type: ignore[arg-type]
    for name, gradient in got.items():
        if gradient is not None:
            assert_within(gradient, np.asarray(getattr(want, name)), limits[name], name)


def follows(activation: Any) -> bool:
    """Whether y is above zero where u is, after rounding to y's dtype; or the derivative does not jump."""
    _, parameter = name_and_number(activation)
    return parameter is None or parameter > 0


def saving(kind: Kind, arrays: Arrays, limits: Limits, options: Any) -> np.ndarray:
    """y of a forward that saves."""
    y, _ = forward_within(limits, **{name: kind.put(a) for name, a in arrays.items()}, **options, return_saved=True)
    return kind.get(y)


# ---- each path


@pytest.mark.parametrize(("name", "gemm"), PATHS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("activation", OTHERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step(
    shape: tuple[int, int, int], activation: Any, dtype: str, precision: str, training: bool, name: str, gemm: str
) -> None:
    if dtype == "float64" and shape == SHAPES["several tiles"]:
        shape = (300, 72, 136)  # several tiles of 64 x 64; the truth is in long double, without a BLAS
    arrays, options = drawn(shape, dtype, training, activation)
    assert_step_within(kind_of(name), arrays, draw_dy(arrays), options, gemm, precision)


@pytest.mark.parametrize(("name", "gemm"), PATHS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", JUMPING, ids=str)
def test_gradients_jump_where_y_does(activation: Any, dtype: str, training: bool, name: str, gemm: str) -> None:
    """In every element, on the side on which u is, rounded to y's dtype: exactly for a slope that is a power of two, as
    multiples of 1/4 are added without rounding."""
    arrays, options = drawn(SHAPES["ragged"], dtype, training, activation)
    dy = draw_integers(arrays)
    above, dy, y, gradients = assert_step_within(kind_of(name), arrays, dy, options, gemm)
    assert 0.2 < above.mean() < 0.8
    assert (y[above] > 0).all()
    of_beta = gradients["beta"]
    if activation[0] == "leaky_relu" and of_beta is not None:
        sums = np.where(above, 1.0, activation[1]) * dy.astype(np.float64)
        np.testing.assert_array_equal(of_beta, reference.round_to(sums.sum(0), of_beta.dtype))


@pytest.mark.parametrize("name", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, dtype: str, name: str) -> None:
    for activation in ("leaky_relu", "silu", "gelu", "gelu_tanh", ("elu", 1.5)):
        arrays, options = drawn((260, 72, 40), dtype, True, activation, family)
        assert_step_within(kind_of(name), arrays, draw_dy(arrays), options)


@pytest.mark.parametrize(("name", "gemm"), PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", EVERY[1:], ids=str)
def test_nan_and_large_numbers(activation: Any, dtype: str, name: str, gemm: str) -> None:
    """NaN passes; what is far from zero becomes zero, itself or the limit, and never NaN."""
    kind, rows = kind_of(name), 40
    u = np.zeros((rows, 8))
    u[:, 0] = np.nan
    u[:, 1], u[:, 2], u[:, 3], u[:, 4] = -3e4, 3e4, -100, -20
    arrays = {"x": np.eye(rows, dtype=DTYPES[dtype]), "weight": u.T.astype(DTYPES[dtype])}
    wide = np.float64 if dtype == "float64" else np.float32
    arrays |= {"running_mean": np.zeros(8, wide), "running_var": np.ones(8, wide)}
    try:
        got = forward(kind, arrays, eps=0.0, activation=activation, gemm=gemm).y.astype(np.float64)
    except ValueError as error:
        skip_what_sm90_refuses(gemm, error)
    assert np.isnan(got[:, 0]).all() and np.isfinite(got[:, 1:]).all()
    truth = reference.forward(**arrays, eps=0.0, activation=activation).y
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(got[:, 1:], truth[:, 1:], rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize(("name", "gemm"), PATHS)
@pytest.mark.parametrize("activation", OTHERS, ids=str)
def test_the_same_bits_every_time_and_for_every_spelling(activation: Any, name: str, gemm: str) -> None:
    arrays, options = drawn(SHAPES["several tiles"], "bfloat16", True, activation)
    dy, kind = draw_dy(arrays), kind_of(name)
    spelt: list[Any] = [activation, activation]
    if isinstance(activation, str) and (parameter := PARAMETERS[activation]) is not None:
        spelt += [(activation, parameter), (activation, np.float64(parameter))]
    results = [step(kind, arrays, dy, gemm=gemm, **{**options, "activation": each}) for each in spelt]
    for y, gradients in results[1:]:
        assert_same_bits(y, results[0][0])
        for each, first in zip(gradients.values(), results[0][1].values(), strict=True):
            assert (each is None and first is None) or assert_same_bits(each, first) is None  # type: ignore[arg-type]


# ---- on a GPU: every kernel


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", ("leaky_relu", -0.25)], ids=str)
@pytest.mark.parametrize("tile", [None, *itertools.product((64, 128, 256), (1, 2))], ids=str)
@pytest.mark.parametrize(("dtype", "precision"), [e for e in ELEMENTS if e[0] != "float64"])
@pytest.mark.parametrize("shape", [(300, 72, 520), (4100, 264, 104), (9000, 64, 1064)])  # the last: deferred
def test_tiles_of_one_launch(shape: Any, dtype: str, precision: str, tile: Any, activation: Any) -> None:
    if (dtype, precision) == ("float32", "highest") and tile and tile[0] == 256:
        pytest.skip("limbs have no tile of 256 rows")
    arrays, options = drawn(shape, dtype, True, activation)
    dy = draw_integers(arrays)
    assert_step_within(kind_of("cupy"), arrays, dy, options, "sm90", precision, Limits(sm90=tile))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu_tanh", "elu", ("leaky_relu", 0.25)], ids=str)
@pytest.mark.parametrize(
    "limits", [Limits(fused=False), Limits(fused=True, cluster=1), Limits(fused=True, cluster=4)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_through_the_backward(dtype: str, limits: Limits, activation: Any) -> None:
    arrays, options = drawn(SHAPES["ragged"], dtype, True, activation)
    assert_step_within(kind_of("cupy"), arrays, draw_integers(arrays), options, backward_limits=limits)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", OTHERS, ids=str)
@pytest.mark.parametrize(("dtype", "precision"), [e for e in ELEMENTS if e[0] != "float64"])
@pytest.mark.parametrize("training", [True, False])
def test_many_short_rows(training: bool, dtype: str, precision: str, activation: Any) -> None:
    """The skinny kernels, forward and backward."""
    arrays, options = drawn((9000, 32, 48), dtype, training, activation)
    limits = Limits(skinny=True)
    assert_step_within(
        kind_of("cupy"), arrays, draw_dy(arrays), options, "tiled", precision, limits, backward_limits=limits
    )


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", ("leaky_relu", -0.25)], ids=str)
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_replay_is_a_step(kind: str, activation: Any) -> None:
    gpu = kind_of(kind)
    arrays, options = drawn(SHAPES["several tiles"], "bfloat16", True, activation)
    native, dy = {name: gpu.put(a) for name, a in arrays.items()}, gpu.put(draw_dy(arrays))

    def call() -> tuple[Any, Any]:
        y, saved = gsbn.forward(**native, **options, return_saved=True)
        return y, gsbn.backward(dy, saved)

    with call_and_replay(gpu, call) as ((want_y, want), (y, gradients)):
        assert_same_bits(gpu.get(y), gpu.get(want_y))
        assert_same_bits(gpu.get(gradients.x), gpu.get(want.x))


# ---- linear


@pytest.mark.parametrize(("name", "gemm"), PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [*OTHERS, ("leaky_relu", 0.25), ("elu", -2.0)], ids=str)
def test_linear(activation: Any, dtype: str, name: str, gemm: str) -> None:
    """y within the bound of f, of the u that is kept or, if nothing is, of the true one; gradients at the kept u."""
    if gemm == "sm90" and dtype == "float64":
        pytest.skip("forward_sm90 has no float64")
    arrays, kind = drawn((300, 136, 72), dtype, False, activation)[0], kind_of(name)
    narrow = np.dtype("f8" if dtype == "float64" else "f4")
    given = {name: arrays[name] for name in ("x", "weight", "bias")}
    statistics = {"running_mean": np.zeros(72, narrow), "running_var": np.ones(72, narrow)}
    wide = wide_of(arrays)
    native, dy = {name: kind.put(a) for name, a in given.items()}, draw_dy(arrays)
    for absent in ((), ("bias",)):
        of_call = {name: a for name, a in native.items() if name not in absent}
        inputs = {**{name: a for name, a in given.items() if name not in absent}, **statistics}
        y, saved = gsbn.linear(**of_call, activation=activation, gemm=gemm, return_saved=True)
        alone = gsbn.linear(**of_call, activation=activation, gemm=gemm)
        options: dict[str, Any] = {"training": False, "eps": 0.0}
        form: dict[str, Any] = {"limbs": True} if dtype == "float32" and not kind.is_cpu else {}
        truth = reference.forward(**inputs, **options, activation=activation, dtype=wide)
        assert_within(kind.get(alone), truth.y, bounds(inputs, truth, **options, **form, activation=activation).y, "y")
        u = reference.forward(**inputs, **options, dtype=wide)
        assert saved.vectors is None
        kept = np.asarray(u.y, dy.dtype) if saved.deviations is y else kind.get(saved.deviations)
        above = (kind.get(y if saved.deviations is y else saved.deviations)).astype(float) > 0
        if saved.deviations is not y:
            assert_within(kept, u.y, bounds(inputs, u, **options, **form).y, "u")
            want, error = of_y(np, kept.astype(wide), 0.0, activation, arithmetic(dy.dtype))
            unit = roundoff(dy.dtype) * np.abs(want) + float(ml_dtypes.finfo(dy.dtype).smallest_normal)
            assert_within(kind.get(y), want, error + unit, "y of u")
        before_f = before(np, np.asarray(dy, wide), kept.astype(wide), above, activation)
        expected = truth_of(inputs, before_f, training=False, eps=0.0)
        limits = gradient_bounds(
            inputs, before_f, expected, training=False, eps=0.0, operand=2.0**-22 + 48 * 2.0**-23,
            activation=activation, after=np.asarray(dy, np.float64),
        )  # fmt: skip
        for copied in (saved, copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
            found = gsbn.backward(kind.put(dy), copied)
            for field in ("x", "weight", "bias")[: 3 - len(absent)]:
                assert_within(
                    kind.get(getattr(found, field)), np.asarray(getattr(expected, field)), limits[field], field
                )


def test_linear_keeps_y_where_it_tells_the_gradient() -> None:
    x, weight = np.ones((4, 3), "f4"), np.ones((2, 3), "f4")
    for activation in ("relu", "leaky_relu", ("leaky_relu", 0.0)):
        y, saved = gsbn.linear(x, weight, activation=activation, return_saved=True)  # type: ignore[arg-type]
        assert saved.deviations is y and saved.vectors is None
    for activation in ("silu", ("leaky_relu", -0.5), "elu"):
        y, saved = gsbn.linear(x, weight, activation=activation, return_saved=True)  # type: ignore[arg-type]
        np.testing.assert_array_equal(saved.deviations, x @ weight.T)
        assert saved.vectors is None and (y != saved.deviations).any() == (activation == "silu")
        y, saved = gsbn.linear(x[:0], weight, activation=activation, return_saved=True)  # type: ignore[arg-type]
        assert y.shape == (0, 2) and gsbn.backward(y, saved).weight.tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("kind", [*CPU_KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 1), (3, 40, 7), (130, 24, 259), (1100, 16, 264)])
def test_linear_into_any_memory(shape: tuple[int, int, int], dtype: str, layout: str, kind: str) -> None:
    """y is the activation of the u that is kept, wherever it is written, and nothing is written beside it."""
    library, arrays = kind_of(kind), drawn(shape, dtype, False, "silu")[0]
    placed = {name: place(library, arrays[name]) for name in ("x", "weight", "bias")}
    made = place(library, np.zeros((shape[0], shape[2]), DTYPES[dtype]), layout)
    with poisoned_allocations(library):
        given = {name: each.view for name, each in placed.items()}
        y, saved = gsbn.linear(**given, activation="gelu_tanh", out=made.view, return_saved=True)
    assert y is made.view
    u = library.get(saved.deviations)
    wide = u.astype(np.float64)
    truth = reference.round_to(activation_of("gelu_tanh").of(wide), u.dtype)  # type: ignore[union-attr]
    unit = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(library.get(y).astype(float), truth.astype(float), rtol=unit, atol=1e-7)
    assert_same_bits(u, library.get(gsbn.linear(**given)))
    dy = library.put(np.ones(u.shape, u.dtype))
    found = gsbn.backward(dy, saved)
    assert made.guards_hold(library)  # from here on y is poisoned
    want = activation_of("gelu_tanh").gradient(np.ones_like(wide), wide).sum(0, dtype=np.longdouble)  # type: ignore[union-attr]
    got = library.get(found.bias)  # a sum of rows terms of at most 1.13, each with OF_SLOPE roundings
    error = 1.13 * shape[0] * (OF_SLOPE + summed(shape[0])) * arithmetic(u.dtype)
    assert_within(got, want, error + 2 * roundoff(got.dtype) * np.abs(want))


# ---- the tests themselves


@pytest.mark.parametrize(("taken", "for_"), [("silu", "gelu"), ("gelu", "gelu_tanh"), ("elu", ("elu", 1.02)),
                                             (("leaky_relu", -0.25), ("leaky_relu", -0.251))])  # fmt: skip
def test_another_derivative_is_found(taken: Any, for_: Any) -> None:
    """Also the two kinds of GELU, which differ by 5e-4, and a slope that is off by a 250th."""
    arrays, options = drawn(SHAPES["ragged"], "float32", True, taken)
    dy, plain = draw_dy(arrays), {**options, "activation": None}
    u = reference.forward(**arrays, **plain).y
    _, saved = gsbn.forward(**arrays, **options, return_saved=True)
    for activation in (taken, for_):
        got = gsbn.backward(dy, saved._replace(activation=activation))._asdict()
        if activation == taken:
            assert_gradients_within(got, arrays, dy, options, u, u > 0, 0.0)
        else:
            with pytest.raises(AssertionError, match="expected"):
                assert_gradients_within(got, arrays, dy, options, u, u > 0, 0.0)


# ---- names and numbers


def test_a_variant_is_named_after_its_activation() -> None:
    assert macros("gelu_tanh") == (("ACTIVATION", "GeluTanh"),)
    assert macros(("leaky_relu", -0.25)) == (
        ("ACTIVATION", "LeakyRelu"),
        ("ACTIVATION_PARAMETER", "-0x1.0000000000000p-2"),
    )
    assert macros("elu") == macros(("elu", 1.0))
    for name in PARAMETERS:
        struct = macros(name)[0][1]
        assert f"struct {struct} " in (_plan.declared.KERNEL_DIR / "common/activation.cuh").read_text(), struct


@pytest.mark.parametrize("activation", [("leaky_relu", 0.2), ("elu", np.float32(0.5)), ("leaky_relu", -0.0)])
def test_the_number_is_kept_as_a_float(activation: Any) -> None:
    x, weight = np.ones((4, 3), "f4"), np.ones((2, 3), "f4")
    _, saved = gsbn.forward(x, weight, training=True, activation=activation, return_saved=True)
    assert saved.activation == activation and type(saved.activation[1]) is float  # type: ignore[index]
    assert not np.signbit(saved.activation[1])  # type: ignore[arg-type,index]
