"""The gradients of the reference against autograd and finite differences, and where they are nearly zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gsbn import Gradients, reference
from tests.support.gradients import SPECIAL, activate
from tests.support.harness import without_out
from tests.support.strategies import EVERY, OTHERS, Case


def torch_gradients(case: Case, arrays: dict[str, np.ndarray], dy: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients by autograd in float64, through PyTorch's three modules."""
    torch = pytest.importorskip("torch")
    O = len(arrays["weight"])
    neutral = {"bias": np.zeros(O), "gamma": np.ones(O), "beta": np.zeros(O)}
    names = ["x", "weight", "bias", "gamma", "beta", *(n for n in ("scale", "residual") if n in arrays)]
    t = {n: torch.tensor(arrays.get(n, neutral.get(n)), dtype=torch.float64, requires_grad=True) for n in names}
    z = torch.nn.functional.linear(t["x"], t["weight"], t["bias"]) * t.get("scale", 1.0)
    old = [torch.tensor(arrays[n]) if n in arrays else None for n in ("running_mean", "running_var")]
    y = torch.nn.functional.batch_norm(z, *old, t["gamma"], t["beta"], case.training, 0.1, case.eps)
    y = activate(y + t.get("residual", 0), case.activation)
    return dict(zip(names, (g.numpy() for g in torch.autograd.grad(y, t.values(), torch.tensor(dy))), strict=True))


def gradients(
    case: Case, arrays: dict[str, np.ndarray], dy: np.ndarray, dtype: type = np.float64
) -> dict[str, np.ndarray]:
    names = ("x", "weight", "scale", "bias", "gamma", "beta", "running_mean", "running_var", "residual")
    given = {n: arrays[n] for n in names if n in arrays}
    options = {"training": case.training, "eps": case.eps, "activation": case.activation}
    found = reference.backward(dy, **given, **options, dtype=dtype)
    return {name: getattr(found, name) for name in (*Gradients._fields, *["residual"] * ("residual" in arrays))}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("given_", [("bias", "gamma", "beta", "running"), ("running",), ("running", "residual")])
@pytest.mark.parametrize(
    ("activation", "scale"),
    [(None, "vector"), ("relu", "vector"), ("relu", "()"), (None, "(1,)"), *((name, "vector") for name in OTHERS)],
)
def test_gradients_agree_with_autograd(
    activation: Any, scale: str, given_: tuple[str, ...], training: bool, special: str
) -> None:
    """Within 1e-11 of the largest element: both round the sums of a gradient a few hundred times."""
    case = replace(Case((37, 11, 13), "float64", training), given=given_, eps=1e-2, scale=scale, activation=activation)
    arrays = without_out(case.arrays())
    for name, value in SPECIAL[special].items():
        if name in arrays:
            arrays[name].reshape(-1)[::2] = value
    dy = np.random.default_rng(1).standard_normal((37, 13))
    ours, theirs = gradients(case, arrays, dy), torch_gradients(case, arrays, dy)
    for name, want in theirs.items():
        size = max(np.abs(want).max(), np.abs(dy).sum() if name in ("bias", "scale") else 0.0)
        np.testing.assert_allclose(ours[name], want, rtol=0, atol=1e-11 * size, err_msg=name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", EVERY)
def test_gradients_agree_with_differences(activation: Any, training: bool) -> None:
    """Central differences in longdouble: h² of truncation and 1e-19 / h of rounding, both below 1e-11 at h = 1e-6."""
    case = replace(
        Case((6, 4, 3), "float64", training), given=("bias", "gamma", "beta", "running", "residual"), eps=1e-2
    )
    case = replace(case, activation=activation)
    options = {"training": training, "eps": case.eps, "activation": activation, "dtype": np.longdouble}
    arrays = {n: a for n, a in without_out(case.arrays()).items() if n != "num_batches_tracked"}
    dy = np.random.default_rng(1).standard_normal((6, 3)).astype(np.longdouble)
    h = np.longdouble(1e-6)

    def loss(**changed: np.ndarray) -> np.longdouble:
        y = reference.forward(**{**arrays, **changed}, **options).y
        return (y * dy).sum()

    for name, got in gradients(case, arrays, dy, np.longdouble).items():
        base = np.asarray(arrays[name], np.longdouble)
        for at in np.ndindex(base.shape):
            step = np.zeros_like(base)
            step[at] = h
            difference = (loss(**{name: base + step}) - loss(**{name: base - step})) / (2 * h)
            assert abs(got[at] - difference) <= 1e-9 * (1 + abs(got[at])), (name, at)


def test_the_bias_has_no_gradient_in_training() -> None:
    case = Case((20, 5, 7), "float64", training=True)
    arrays = without_out(case.arrays())
    assert not gradients(case, arrays, np.random.default_rng(2).standard_normal((20, 7)))["bias"].any()


def test_gradients_of_constant_features_are_finite_and_nearly_zero() -> None:
    """v = 0: r = 1 / sqrt(eps), D = 0 and dg = a (dy - mean(dy))."""
    case = replace(Case((9, 4, 3), "float64", training=True), given=("gamma",))
    arrays = without_out(case.arrays())
    arrays["x"][:] = arrays["x"][0]
    dy = np.random.default_rng(3).standard_normal((9, 3))
    got = gradients(case, arrays, dy)
    a = arrays["gamma"] * arrays["scale"] / np.sqrt(case.eps)
    np.testing.assert_allclose(got["x"], (a * (dy - dy.mean(0))) @ arrays["weight"], rtol=1e-12, atol=1e-9)
    assert np.abs(got["scale"]).max() <= 1e-9
    assert np.abs(got["weight"]).max() <= 1e-9 * np.abs(a).max()  # x is constant, dg sums to zero


def test_gradients_of_nothing_are_zeros() -> None:
    case = Case((0, 4, 3), "float64", training=True)
    arrays = {**without_out(replace(case, shape=(2, 4, 3)).arrays()), "x": np.empty((0, 4))}
    got = gradients(case, arrays, np.empty((0, 3)))
    assert got["x"].shape == (0, 4)
    assert not any(a.any() for a in got.values())
