"""``gsbn.backward`` on the CPU: within its bounds, as accurate as autograd, and equal to finite differences."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gsbn
from gsbn import reference
from gsbn._cpu.passes import BLOCK
from tests.support.accuracy import FAMILIES, SEEDS, family
from tests.support.gradients import (
    NAMES,
    SPECIAL,
    backward,
    before_relu,
    draw_dy,
    gradient_bounds,
    step,
    torch_gradients,
    truth_of,
)
from tests.support.harness import DTYPES, LAYOUTS, Kind, assert_same_bits, forward, kind_of, without_out
from tests.support.strategies import ACTIVATIONS, RENORMS, SCALES, Case, cases
from tests.support.tolerance import assert_within, norm_error

B, I, O = 9, 5, 4
CASE = Case((B, I, O), "float32", training=True)
DRAWN = cases(limit=48, scales=tuple(SCALES), activations=ACTIVATIONS, renorms=RENORMS)


@pytest.mark.parametrize("name", ["numpy", "torch-cpu"])
@given(case=DRAWN, layout=st.sampled_from(LAYOUTS))
def test_is_within_its_bounds(name: str, case: Case, layout: str) -> None:
    arrays = case.arrays()
    dy = draw_dy(arrays)
    y, got = step(kind_of(name), arrays, dy, {**dict(case.layouts), "dy": layout}, **case.options)
    if case.shape[0]:
        dy = dy if case.activation is None else before_relu(dy, y)
        assert_gradients_within(got, arrays, dy, training=case.training, eps=case.eps, renorm=case.renorm)


def assert_gradients_within(got: Any, arrays: dict[str, np.ndarray], dy: np.ndarray, **options: Any) -> None:
    arrays = without_out(arrays)
    want = truth_of(arrays, dy, **options)
    limits = gradient_bounds(arrays, dy, want, **options)
    for field, gradient in got.items():
        if gradient is not None:
            assert_within(gradient, np.asarray(getattr(want, field)), limits[field], field)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_blocks(cpu_kind: Kind, dtype: str, training: bool) -> None:
    arrays = Case((1100, 37, 520), dtype, training, offset=10.0).arrays()
    dy = draw_dy(arrays)
    assert_gradients_within(backward(cpu_kind, arrays, dy, training=training), arrays, dy, training=training)
    y, got = step(cpu_kind, arrays, dy, training=training, activation="relu")
    assert_gradients_within(got, arrays, before_relu(dy, y), training=training)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_is_as_accurate_as_autograd(dtype: str, name: str) -> None:
    """The accuracy rule, norm-wise over five seeds. Autograd's dscale is noise, and its dbias is 0 plus rounding."""
    kind, problems = kind_of("torch-cpu"), [family(name, seed, (600, 250, 48), dtype) for seed in SEEDS]
    found: dict[str, list[list[np.ndarray]]] = {n: [[], [], []] for n in NAMES}
    for arrays in problems:
        dy = draw_dy(arrays)
        truth = truth_of(arrays, dy, training=True)._asdict()
        for at, result in enumerate(
            (truth, backward(kind, arrays, dy, training=True), torch_gradients(kind, arrays, dy))
        ):
            for n in NAMES:
                found[n][at].append(np.asarray(result[n]))
    for n in NAMES:
        eps = float(ml_dtypes.finfo(found[n][1][0].dtype).eps)
        want, mine, its = (np.stack(results) for results in found[n])
        error, its_error = norm_error(mine, want), norm_error(its, want)
        allowed = np.inf if np.isnan(its_error) else 1.05 * its_error + eps / 4  # its float16 overflows
        assert error <= allowed, f"{n}: {error} for autograd's {its_error}"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_memory_beyond_the_gradients_is_a_block(activation: str | None) -> None:
    arrays = without_out(Case((60000, 8, 64), "float32", training=True).arrays())
    _, saved = gsbn.forward(**arrays, training=True, return_saved=True, activation=activation)
    dy = draw_dy(arrays)
    tracemalloc.start()
    try:
        of_x = gsbn.backward(dy, saved).x
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - of_x.nbytes < 4 * 4 * BLOCK < 4 * dy.size


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saving_changes_nothing_in_the_forward(kind: Kind, activation: str | None, training: bool) -> None:
    arrays = replace(CASE, training=training).arrays()
    options = {"training": training, "gemm": "auto" if kind.is_cpu else "tiled", "activation": activation}
    plain, saving = (forward_of(kind, arrays, **options, return_saved=r) for r in (False, True))
    for a, b in zip(plain, saving, strict=True):
        assert_same_bits(a, b)


def forward_of(kind: Kind, arrays: dict[str, np.ndarray], return_saved: bool, **options: Any) -> list[np.ndarray]:
    native = {name: kind.put(a) for name, a in arrays.items()}
    result = gsbn.forward(**native, **options, return_saved=return_saved)
    assert (result[0] if return_saved else result) is native["out"]
    return [kind.get(a) for a in native.values()]


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("given_", [("bias", "gamma", "beta", "running"), ("running",)])
@pytest.mark.parametrize(
    ("activation", "scale"), [(None, "vector"), ("relu", "vector"), ("relu", "none"), ("relu", "()"), (None, "(1,)")]
)
def test_agrees_with_autograd(
    activation: str | None, scale: str, given_: tuple[str, ...], training: bool, special: str
) -> None:
    """In float64, within 1e-11 of the largest element: both round sums of a few hundred terms."""
    case = replace(Case((37, 11, 13), "float64", training), given=given_, eps=1e-2, scale=scale)
    arrays = without_out(case.arrays())
    for name, value in SPECIAL[special].items():
        if name in arrays:
            arrays[name].reshape(-1)[::2] = value
    dy = draw_dy(arrays)
    kind, options = kind_of("torch-cpu"), {"training": training, "eps": case.eps, "activation": activation}
    ours = backward(kind, arrays, dy, **options)
    theirs = torch_gradients(kind, arrays, dy, **options)
    assert {name for name, gradient in ours.items() if gradient is not None} == set(theirs)
    for name, want in theirs.items():
        size = max(np.abs(want).max(), np.abs(dy).sum() if name in ("bias", "scale") else 0.0)
        np.testing.assert_allclose(ours[name], want, rtol=0, atol=1e-11 * size, err_msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_agrees_with_differences(kind: Kind, training: bool) -> None:
    """Central differences in float64 at h = 1e-5: h² of truncation and a hundred roundings over h stay below 1e-8."""
    case = replace(Case((6, 4, 3), "float64", training), given=("bias", "gamma", "beta", "running"), eps=1e-2)
    arrays = {n: a for n, a in without_out(case.arrays()).items() if n != "num_batches_tracked"}
    dy = draw_dy(arrays)
    gemm, h = "auto" if kind.is_cpu else "tiled", 1e-5
    got = backward(kind, arrays, dy, training=training, eps=case.eps, gemm=gemm)

    def loss(changed: dict[str, np.ndarray]) -> float:
        y = forward(kind, {**arrays, **changed}, training=training, eps=case.eps, gemm=gemm).y
        return float((y * dy).sum())

    for name, gradient in got.items():
        assert gradient is not None
        for at in np.ndindex(gradient.shape):
            step = np.zeros_like(arrays[name])
            step[at] = h
            difference = (loss({name: arrays[name] + step}) - loss({name: arrays[name] - step})) / (2 * h)
            assert abs(gradient[at] - difference) <= 1e-8 * (1 + abs(difference)), (name, at)


def test_constant_features(kind: Kind) -> None:
    """v = 0: D is 0 plus rounding, and dg = a (dy - mean(dy)) in the dtype of the computation."""
    arrays = without_out(replace(CASE, dtype="float64", given=("gamma",)).arrays())
    arrays["x"][:] = arrays["x"][0]
    dy = draw_dy(arrays)
    got = backward(kind, arrays, dy, training=True, gemm="auto" if kind.is_cpu else "tiled")
    a = arrays["gamma"] * arrays["scale"] / np.sqrt(1e-5)
    np.testing.assert_allclose(got["x"], (a * (dy - dy.mean(0))) @ arrays["weight"], rtol=1e-12, atol=1e-9)
    assert np.abs(got["scale"]).max() <= 1e-9


# ---- activations


MANY = (700, 24, 400)  # rows in several blocks


def integers(dtype: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Integers from 1 to 7: a sum of a few hundred is exact in float32."""
    return np.random.default_rng(seed).integers(1, 8, shape).astype(DTYPES[dtype])


@pytest.mark.parametrize("beta", ["none", "0", "normal", "tiny", "cancels"])
@pytest.mark.parametrize("shape", [(16, I, O), (17, I, O), (200, 24, 48), MANY])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_the_gradient_is_zero_where_y_is(
    cpu_kind: Kind, training: bool, dtype: str, shape: tuple[int, int, int], beta: str
) -> None:
    """For every element, because dbeta is an exact sum of integers. Many y are near 0, or round to 0 in 16 bits."""
    case = Case(shape, dtype, training, given=("gamma", "running", *(("beta",) if beta != "none" else ())))
    arrays = without_out(case.arrays())
    wide = arrays["gamma"].dtype
    if beta == "none":
        arrays["beta"] = np.zeros(shape[2], wide)
    elif beta == "0":
        arrays["beta"][:] = 0
    elif beta == "tiny":  # u is about the smallest number of a 16-bit dtype
        least = np.ones(1, "u2").view(arrays["x"].dtype)[0] if DTYPES[dtype].itemsize == 2 else 1e-30
        arrays["gamma"][:] = arrays["beta"][:] = np.asarray(least, wide)
        arrays["running_mean"][:], arrays["running_var"][:] = 0, 1
    elif beta == "cancels":  # in one row of each feature u is 0 plus rounding
        arrays["beta"][:] = 0
        u = reference.forward(**arrays, training=training).y
        arrays["beta"][:] = -u[np.arange(shape[2]) % shape[0], np.arange(shape[2])]
    dy = integers(dtype, (shape[0], shape[2]))
    y, got = step(cpu_kind, arrays, dy, training=training, activation="relu", needs=("beta",))
    passes = np.asarray(y, np.float64) > 0
    assert passes.any() and not passes.all()
    np.testing.assert_array_equal(got["beta"], (dy.astype(np.float64) * passes).sum(0))


@pytest.mark.parametrize("rows", [9, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_element_by_element(cpu_kind: Kind, training: bool, dtype: str, rows: int) -> None:
    """A dy with one row other than 0 shows where the gradient passes."""
    arrays = without_out(replace(Case((rows, I, O), dtype, training), given=("beta", "running")).arrays())
    arrays["beta"][0] = 0
    native = {name: cpu_kind.put(a) for name, a in arrays.items()}
    y, saved = gsbn.forward(**native, training=training, activation="relu", return_saved=True)
    for row, of_row in enumerate(cpu_kind.get(y).astype(np.float64)):
        dy = np.zeros((rows, O), DTYPES[dtype])
        dy[row] = 1
        of_beta = cpu_kind.get(gsbn.backward(cpu_kind.put(dy), saved, needs=("beta",)).beta)
        np.testing.assert_array_equal(of_beta, of_row > 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(9, I, O), MANY])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_not_finite_before_relu(
    cpu_kind: Kind, training: bool, shape: tuple[int, int, int], bad: float
) -> None:
    """A dy that is not finite gives 0 where y is 0, as in torch, and passes where y is NaN."""
    arrays = without_out(Case(shape, "float32", training).arrays())
    arrays["weight"][1, 2] = np.nan
    dy = integers("float32", (shape[0], shape[2]))
    clean, clean_gradients = step(cpu_kind, arrays, dy, training=training, activation="relu")
    lost = dy.copy()
    lost[clean == 0] = bad
    _, got = step(cpu_kind, arrays, lost, training=training, activation="relu")
    for name in NAMES:
        assert_same_bits(got[name], clean_gradients[name])
    assert np.isnan(clean[:, 1]).all() and got["beta"][1] == dy[:, 1].sum()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_y_that_is_exactly_zero(cpu_kind: Kind, dtype: str) -> None:
    """g - mean is exact and beta is 0: the rows in the middle have y = 0 and no gradient."""
    x = np.array([[-1], [0], [1], [0]], DTYPES[dtype])
    arrays = {"x": x, "weight": np.ones((1, 1), DTYPES[dtype]), "beta": np.zeros(1, DTYPES[dtype])}
    dy = np.array([[1], [2], [4], [8]], DTYPES[dtype])
    y, got = step(cpu_kind, arrays, dy, training=True, activation="relu")
    np.testing.assert_array_equal(y > 0, [[False], [False], [True], [False]])
    assert got["beta"] == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_a_saved_with_an_activation_travels(cpu_kind: Kind, training: bool, dtype: str) -> None:
    arrays = without_out(replace(CASE, dtype=dtype, training=training, scale="()").arrays())
    native = {name: cpu_kind.put(a) for name, a in arrays.items()}
    _, saved = gsbn.forward(**native, training=training, activation="relu", return_saved=True)
    assert (saved.activation, saved.scale_shape) == ("relu", ())
    dy = cpu_kind.put(draw_dy(arrays))
    again = pickle.loads(pickle.dumps(saved))
    for ours, want in zip(gsbn.backward(dy, again), gsbn.backward(dy, saved), strict=True):
        assert_same_bits(cpu_kind.get(ours), cpu_kind.get(want))


# ---- a scale of one element


@pytest.mark.parametrize("shape", [(9, I, O), MANY])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_one_number_is_a_vector_of_it(cpu_kind: Kind, training: bool, dtype: str, shape: tuple[int, int, int]) -> None:
    """All other gradients have the same bits. The gradient of an array of one element is the sum over the features."""
    arrays = without_out(Case(shape, dtype, training).arrays())
    wide, dy = arrays.pop("scale").dtype, cpu_kind.put(draw_dy(arrays))

    def gradients(scale: object) -> Any:
        native = {name: cpu_kind.put(a) for name, a in arrays.items()}
        scale = cpu_kind.put(scale) if isinstance(scale, np.ndarray) else scale
        return gsbn.backward(dy, gsbn.forward(**native, scale=scale, training=training, return_saved=True)[1])

    for number, forms in ((1.0, (None, 1)), (-1.5, (-1.5, np.float64(-1.5)))):
        want = gradients(np.full(shape[2], number, wide))
        terms = cpu_kind.get(want.scale).astype(np.float64)
        for form in (*forms, *(np.full(one, number, wide) for one in ((), (1,), (1, 1)))):
            got = gradients(form)
            for name in set(NAMES) - {"scale"}:
                assert_same_bits(cpu_kind.get(getattr(got, name)), cpu_kind.get(getattr(want, name)))
            if not isinstance(form, np.ndarray):
                assert got.scale is None
                continue
            found = cpu_kind.get(got.scale)
            assert (found.shape, found.dtype) == (form.shape, wide)
            u = float(ml_dtypes.finfo(wide).eps)  # each term was rounded, and so was the sum
            assert abs(found.item() - terms.sum()) <= u * np.abs(terms).sum()


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_one_element_of_one_feature(cpu_kind: Kind, shape: tuple[int, ...]) -> None:
    """With one feature it is a vector, possibly in another shape."""
    arrays = without_out(Case((9, I, 1), "float64", training=True).arrays())
    dy = draw_dy(arrays)
    want = backward(cpu_kind, arrays, dy, training=True)
    native = {name: cpu_kind.put(a) for name, a in arrays.items()}
    assert gsbn.forward(**native, training=True, return_saved=True)[1].scale_shape is None
    got = backward(cpu_kind, arrays | {"scale": arrays["scale"].reshape(shape)}, dy, training=True)
    for name in NAMES:
        assert_same_bits(got[name], want[name].reshape(got[name].shape))
    assert got["scale"].shape == shape
