"""The forward of the reference against PyTorch in float64, against longdouble, and against results by hand."""

from __future__ import annotations

import typing
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from gsbn import reference
from gsbn._activations import _FORMULAS, activation_of
from gsbn._plan.activations import PARAMETERS
from gsbn._typing import ActivationName
from tests.support.gradients import activate
from tests.support.harness import DTYPES, assert_same_bits, without_out
from tests.support.strategies import EVERY, SCALES, Case, cases
from tests.support.tolerance import assert_within, bounds, roundoff

U64 = roundoff(np.float64)


def column(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


# ---- forward


def with_bias_in_the_gemm(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same problem with ``x ← (x, 1)`` and ``weight ← (weight, bias)``."""
    O = len(arrays["weight"])
    rest = {name: a for name, a in arrays.items() if name != "bias"}
    ones, bias = np.ones(len(arrays["x"])), arrays.get("bias", np.zeros(O))
    return {**rest, "x": np.column_stack([arrays["x"], ones]), "weight": np.column_stack([arrays["weight"], bias])}


@given(cases(limit=48, scales=tuple(SCALES), activations=EVERY))
def test_agrees_with_torch_in_float64(case: Case) -> None:
    torch = pytest.importorskip("torch")
    arrays = {n: a.astype(np.float64) if a.dtype.kind != "i" else a for n, a in without_out(case.arrays()).items()}
    tensors = {name: torch.from_numpy(a.copy()) for name, a in arrays.items()}

    z = torch.nn.functional.linear(tensors["x"], tensors["weight"], tensors.get("bias"))
    z = z * tensors.get("scale", 1.0)
    norm = torch.nn.BatchNorm1d(z.shape[1], eps=case.eps, momentum=case.momentum, dtype=torch.float64)
    norm.load_state_dict(
        {
            "weight": tensors.get("gamma", norm.weight),
            "bias": tensors.get("beta", norm.bias),
            "running_mean": tensors.get("running_mean", norm.running_mean),
            "running_var": tensors.get("running_var", norm.running_var),
            "num_batches_tracked": tensors.get("num_batches_tracked", norm.num_batches_tracked),
        }
    )
    y = norm.train(case.training)(z).detach()
    y = activate(y, case.activation).numpy()

    truth = reference.forward(**arrays, **case.options)
    # torch adds the bias to g, so its GEMM has one more term. It also multiplies every z by the scale, which the
    # reference does not: hence twice the roundoff.
    theirs = with_bias_in_the_gemm(arrays)
    limit = bounds(theirs, reference.forward(**theirs, **case.options), u=2 * U64, **case.options)
    assert_within(y, truth.y, limit.y, "y")
    if limit.running_mean is not None and limit.running_var is not None:
        assert_within(norm.running_mean.numpy(), truth.running_mean, limit.running_mean, "running_mean")
        assert_within(norm.running_var.numpy(), truth.running_var, limit.running_var, "running_var")
    if truth.num_batches_tracked is not None:
        assert truth.num_batches_tracked == norm.num_batches_tracked.item()


@given(cases(limit=32, scales=tuple(SCALES), activations=EVERY))
def test_agrees_with_longdouble(case: Case) -> None:
    arrays = without_out(case.arrays())
    truth = reference.forward(**arrays, **case.options, dtype=np.longdouble)
    got = reference.forward(**arrays, **case.options)
    as_float64 = {n: np.asarray(a, np.float64) for n, a in arrays.items()}
    limit = bounds(as_float64, truth, u=U64, **case.options)
    assert_within(got.y, truth.y, limit.y, "y")
    for name in ("running_mean", "running_var"):
        if getattr(limit, name) is not None:
            assert_within(getattr(got, name), getattr(truth, name), getattr(limit, name), name)


def test_training_by_hand() -> None:
    # g = (1, 3): m = 2, v = 1. With s = 2 and eps = 5, r = 1 / sqrt(4 + 5) = 1/3 and a = 3 · 2 / 3 = 2.
    got = reference.forward(
        column(1, 3),
        [[1]],
        [2],
        bias=[10],
        gamma=[3],
        beta=[7],
        running_mean=[100],
        running_var=[100],
        num_batches_tracked=3,
        training=True,
        momentum=0.5,
        eps=5,
    )
    np.testing.assert_allclose(got.y, column(5, 9), rtol=4 * U64)
    assert (got.mean, got.var) == (2, 1)
    assert got.running_mean == 0.5 * 100 + 0.5 * 2 * (2 + 10)
    assert got.running_var == 0.5 * 100 + 0.5 * 4 * 1 * 2  # unbiased: n / (n − 1) = 2
    assert got.num_batches_tracked == 4


def test_inference_by_hand() -> None:
    # r = 1 / sqrt(3 + 1) = 1/2; y = 4/2 · (2 g + 2 · 5 − 6) + 1
    options = {"gamma": [4], "beta": [1], "running_mean": [6], "running_var": [3], "eps": 1}
    got = reference.forward(column(1, 3), [[1]], [2], bias=[5], num_batches_tracked=3, **options)
    np.testing.assert_array_equal(got.y, column(13, 21))
    assert got.mean is got.var is None
    assert (got.running_mean, got.running_var, got.num_batches_tracked) == (6, 3, 3)

    w, b = reference.fold([[1]], [2], [6], [3], bias=[5], gamma=[4], beta=[1], eps=1)
    np.testing.assert_array_equal(w, [[4]])
    np.testing.assert_array_equal(b, [9])


@pytest.mark.parametrize("training", [True, False])
def test_relu_by_hand(training: bool) -> None:
    # u = g in inference and g / sqrt(0.5 + 0.5) in training: where u is 0, y and the gradient are 0
    x, dy = column(-1, 0, 1, 0), column(1, 2, 4, 8)
    options = {"running_mean": [0], "running_var": [0.5], "eps": 0.5, "training": training, "activation": "relu"}
    np.testing.assert_array_equal(reference.forward(x, [[1]], **options).y, column(0, 0, 1, 0))
    got = reference.backward(dy, x, [[1]], **options)
    want = reference.backward(column(0, 0, 4, 0), x, [[1]], **{**options, "activation": None})
    assert got.beta == 4
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # beta changes u, and so the gradient
    assert reference.backward(dy, x, [[1]], beta=[0.5], **options).beta == 2 + 4 + 8


@pytest.mark.parametrize("name", EVERY[1:])
def test_nan_and_infinity_through_an_activation(name: Any) -> None:
    torch = pytest.importorskip("torch")
    special = [-np.inf, -1.0, -5e-324, 0.0, 5e-324, 1.0, np.inf, np.nan]
    u, dy = (a.ravel() for a in np.meshgrid(special, special))
    leaf = torch.tensor(u, requires_grad=True)
    y = activate(leaf, name)
    (gradient,) = torch.autograd.grad(y, leaf, torch.tensor(dy))
    f = activation_of(name)
    assert f is not None
    alike = partial(np.testing.assert_allclose, rtol=1e-14, atol=0)
    with np.errstate(all="ignore"):
        alike(f.of(u), y.detach().numpy())
        alike(f.gradient(dy, u), gradient.numpy())
        finite = np.isfinite(dy)
        alike(f.gradient(dy[finite], u[finite]), gradient.numpy()[finite])


def test_the_activations_are_those_of_the_signatures() -> None:
    assert tuple(PARAMETERS) == typing.get_args(ActivationName) == tuple(_FORMULAS)


@pytest.mark.parametrize("training", [True, False])
def test_what_may_stand_for_the_scale(training: bool) -> None:
    case = replace(Case((9, 5, 4), "float64", training), given=("bias", "gamma", "beta", "running"))
    arrays = {n: a for n, a in without_out(case.arrays()).items() if n != "scale"}
    dy = np.random.default_rng(1).standard_normal((9, 4))

    def results(**scale: object) -> list[np.ndarray | None]:
        found = reference.forward(**arrays, **scale, training=training)
        return [*found[:5], *reference.backward(dy, **arrays, **scale, training=training)]

    for number, forms in ((1.0, ({}, {"scale": None}, {"scale": 1})), (-1.7, ({"scale": -1.7},))):
        vector = results(scale=np.full(4, number))
        for form in (*forms, *({"scale": np.full(shape, number)} for shape in ((), (1,), (1, 1)))):
            for i, (ours, want) in enumerate(zip(results(**form), vector, strict=True)):
                if i == 8 and form.get("scale") is not None:  # the gradient of the scale itself
                    assert ours.shape == np.shape(form["scale"])
                    want = want.sum().reshape(ours.shape)
                np.testing.assert_array_equal(ours, want)


def test_momentum_none_is_the_mean_of_all_batches() -> None:
    rng = np.random.default_rng(0)
    batches = rng.standard_normal((5, 8, 3))
    weight, scale = rng.standard_normal((2, 3)), np.array([0.5, -2])
    mean, var, count = np.zeros(2), np.ones(2), 0
    for x in batches:
        got = reference.forward(
            x,
            weight,
            scale,
            running_mean=mean,
            running_var=var,
            num_batches_tracked=count,
            training=True,
            momentum=None,
        )
        mean, var, count = got.running_mean, got.running_var, got.num_batches_tracked
    z = batches @ weight.T * scale
    assert count == 5
    np.testing.assert_allclose(mean, z.mean((0, 1)), rtol=100 * U64)
    np.testing.assert_allclose(var, z.var(1, ddof=1).mean(0), rtol=100 * U64)


@pytest.mark.parametrize("mean", [0.0, 0.1, 1e8 / 3, 1e15 / 7])
def test_a_constant_feature_gives_beta(mean: float) -> None:
    # The sum of a thousand equal numbers, and so their mean, is wrong by k units in the last place. Subtracting the
    # mean of the deviations leaves k u of this error; 1/sqrt(eps) multiplies it by 316.
    x = np.full((1000, 1), mean)
    got = reference.forward(x, [[1.0]], [1.0], beta=[0.25], training=True)
    np.testing.assert_allclose(got.y, np.full((1000, 1), 0.25), rtol=0, atol=316 * 1000**2 * U64**2 * mean + U64)
    np.testing.assert_allclose(got.mean, [mean], rtol=2 * U64)


def test_zero_scale_gives_beta() -> None:
    x = np.random.default_rng(0).standard_normal((9, 4))
    got = reference.forward(
        x, np.eye(4), np.zeros(4), bias=np.ones(4), beta=np.arange(4), training=True,
        running_mean=np.ones(4), running_var=np.ones(4), momentum=0.5,
    )  # fmt: skip
    np.testing.assert_array_equal(got.y, np.tile(np.arange(4.0), (9, 1)))
    np.testing.assert_array_equal(got.running_mean, np.full(4, 0.5))
    np.testing.assert_array_equal(got.running_var, np.full(4, 0.5))


def test_a_large_mean_costs_no_digits() -> None:
    # integers about 2³⁰: g, m and g − m are exact; only the root and the product round
    rng = np.random.default_rng(0)
    d = rng.integers(-50, 50, (64, 3)).astype(np.float64)
    d -= np.round(d.mean(0))
    near = reference.forward(d, np.eye(3), np.ones(3), training=True)
    far = reference.forward(d + 2.0**30, np.eye(3), np.ones(3), training=True)
    np.testing.assert_allclose(far.y, near.y, rtol=0, atol=64 * U64 * np.abs(near.y).max())


def test_an_empty_batch_is_counted_and_changes_nothing_else() -> None:
    given_ = {"running_mean": [1.0, 2.0], "running_var": [3.0, 4.0], "num_batches_tracked": 5}
    for training in (False, True):
        got = reference.forward(np.empty((0, 3)), np.ones((2, 3)), [1, 1], **given_, training=training)
        assert got.y.shape == (0, 2)
        assert got.mean is got.var is None
        np.testing.assert_array_equal([got.running_mean, got.running_var], [[1, 2], [3, 4]])
        assert got.num_batches_tracked == 5 + training


def test_nothing_is_written() -> None:
    arrays = without_out(Case((9, 5, 4), "float64", training=True).arrays())
    before = {name: a.tobytes() for name, a in arrays.items()}
    for training in (False, True):
        got = reference.forward(**arrays, training=training)
        for a in got[:5]:
            assert a is None or not any(np.shares_memory(a, b) for b in arrays.values())
    assert {name: a.tobytes() for name, a in arrays.items()} == before


def test_nan_and_infinity_stay_in_their_feature() -> None:
    arrays = without_out(Case((16, 5, 4), "float64", training=True).arrays())
    clean = reference.forward(**arrays, training=True)
    for bad in (np.nan, np.inf):
        weight = arrays["weight"].copy()
        weight[1, 2] = bad
        got = reference.forward(**{**arrays, "weight": weight}, training=True)
        assert np.isnan(got.y[:, 1]).all()
        assert not np.isfinite(got.running_mean[1])
        np.testing.assert_array_equal(np.delete(got.y, 1, 1), np.delete(clean.y, 1, 1))
        np.testing.assert_array_equal(np.delete(got.running_var, 1), np.delete(clean.running_var, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones(5)}, "x: "),
        ({"x": np.ones((9, 6))}, "weight: "),
        ({"weight": np.ones((4, 5, 1))}, "weight: "),
        ({"scale": np.ones(3)}, "scale: expected shape \\(4,\\) or one element, got \\(3,\\)"),
        ({"scale": np.ones((4, 1))}, "scale: "),
        ({"activation": "tanh"}, "activation: expected one of .*, got 'tanh'"),
        ({"activation": ["relu"]}, "activation: "),
        ({"bias": np.ones(1)}, "bias: "),
        ({"gamma": np.ones((4, 1))}, "gamma: "),
        ({"beta": np.ones(5)}, "beta: "),
        ({"running_mean": np.ones(3)}, "running_mean: "),
        ({"running_var": None}, "running_var: "),
        ({"running_mean": None, "running_var": None, "training": False}, "running_mean: "),
        ({"num_batches_tracked": None, "momentum": None}, "momentum: "),
        ({"num_batches_tracked": [1, 2]}, "num_batches_tracked: expected one element, got shape \\(2,\\)"),
        ({"x": np.ones((1, 5))}, "Expected more than 1 value per channel when training"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    arguments = {**without_out(Case((9, 5, 4), "float64", training=True).arrays()), "training": True, **changes}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        reference.forward(**arguments)


@pytest.mark.parametrize(("needs", "error"), [("xweight", TypeError), (("wieght",), ValueError), ((3,), TypeError)])
def test_needs_are_names(needs: Any, error: type[Exception]) -> None:
    x, weight = np.ones((9, 5)), np.ones((4, 5))
    with pytest.raises(error, match=r"^needs: expected "):
        reference.backward(np.ones((9, 4)), x, weight, training=True, needs=needs)


# ---- fold


@given(cases(limit=32, training=False, scales=tuple(SCALES)))
def test_fold_is_the_inference_forward(case: Case) -> None:
    case = replace(case, dtype="float64")
    arrays = without_out(case.arrays())
    truth = reference.forward(**arrays, eps=case.eps, dtype=np.longdouble)
    arguments = {name: a for name, a in arrays.items() if name not in ("x", "num_batches_tracked")}
    w, b = reference.fold(**{"scale": None, **arguments}, eps=case.eps)
    # folding adds three roundings to each term of the dot product: K + 4 in place of K + 1
    limit = bounds(arrays, truth, training=False, eps=case.eps, u=4 * U64)
    assert_within(arrays["x"] @ w.T + b, truth.y, limit.y)


# ---- round_to


@pytest.mark.parametrize("wide", [np.float64, np.longdouble])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore:invalid value")  # NaN among the bit patterns
def test_round_to_is_right_beside_every_midpoint(name: str, wide: type) -> None:
    dtype = DTYPES[name]
    values = np.arange(2**16, dtype=np.uint16).view(dtype).astype(wide)
    values = np.unique(values[np.isfinite(values)])
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact
    even = np.where(low.astype(dtype).view(np.uint16) % 2 == 0, low, high)
    below, above = np.nextafter(middle, wide(-np.inf)), np.nextafter(middle, wide(np.inf))
    for a, want in ((middle, even), (below, low), (above, high)):
        np.testing.assert_array_equal(reference.round_to(a, dtype).astype(wide), want)


def test_the_midpoint_that_rounding_twice_gets_wrong() -> None:
    a = np.array([1 + 2**-8 + 2**-40])
    assert a.astype(ml_dtypes.bfloat16) == 1  # the reason for round_to; if this fails, ml_dtypes rounds correctly now
    assert reference.round_to(a, ml_dtypes.bfloat16) == 1 + 2**-7


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.filterwarnings("error")
def test_round_to_at_the_ends(dtype: np.dtype) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    a = np.array([0.0, -0.0, largest, -largest, np.inf, -np.inf, np.nan])
    assert_same_bits(reference.round_to(a, dtype), a.astype(dtype))
    if dtype.itemsize < 8:
        half = 0.5 * 2.0 ** np.floor(np.log2(largest)) * float(ml_dtypes.finfo(dtype).eps)
        over = np.array([largest + half, -1e300, np.nextafter(largest + half, 0)])
        np.testing.assert_array_equal(reference.round_to(over, dtype).astype(np.float64), [np.inf, -np.inf, largest])


def test_round_to_takes_any_shape() -> None:
    for a in (np.float64(1.1), np.ones((0, 3)), np.ones((4, 6))[::2, ::-3]):
        assert reference.round_to(a, np.float16).shape == np.shape(a)
