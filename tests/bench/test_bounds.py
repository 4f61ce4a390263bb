"""The truth and the bounds of gsbn.bench: correct results pass, one wrong element does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gsbn import reference
from gsbn.bench import bounds
from tests.support.strategies import OTHERS

NAMED = [activation for activation in OTHERS if isinstance(activation, str)]


@pytest.mark.parametrize(("activation", "scale"), [(None, True), ("relu", False), *((name, True) for name in NAMED)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", bounds.FAMILIES)
def test_the_truth_is_the_reference(family: str, training: bool, activation: Any, scale: bool) -> None:
    o = bounds.make_operands(np, 33, 40, 21, "float32", family, with_scale=scale)
    assert (o.scale is not None) == scale
    got = bounds.expected(np, o, "highest", training, activation=activation)
    statistics = {"running_mean": o.running_mean, "running_var": o.running_var}
    want = reference.forward(o.x, o.weight, o.scale, **o.affine, **statistics, training=training, activation=activation)
    for name in ("y", "running_mean", "running_var") if training else ("y",):
        np.testing.assert_allclose(got[name].value, getattr(want, name), rtol=1e-9, atol=1e-9)


def test_the_bound_admits_float32_and_refuses_tf32() -> None:
    o = bounds.make_operands(np, 257, 384, 131, "float32")
    truth = bounds.expected(np, o, "highest", True)["g"]
    assert truth.judge(o.x @ o.weight.T, np).passed

    def tf32(a: np.ndarray) -> np.ndarray:
        return ((a.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)

    rounded = tf32(o.x) @ tf32(o.weight).T
    assert not truth.judge(rounded, np).passed
    assert bounds.expected(np, o, "high", True)["g"].judge(rounded, np).passed


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 1.0])
def test_one_wrong_element_is_seen(spoil: float) -> None:
    o = bounds.make_operands(np, 16, 8, 4, "float16")
    truth = bounds.expected(np, o, "highest", True)["y"]
    y = truth.value.astype(np.float16)
    assert truth.judge(y, np).passed
    y[3, 2] += np.float16(spoil)
    assert not truth.judge(y, np).passed


@pytest.mark.parametrize(
    ("activation", "scale"), [(None, True), ("relu", True), ("relu", False), *((name, True) for name in NAMED)]
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", bounds.FAMILIES)
def test_the_true_gradients_are_the_reference(family: str, training: bool, activation: Any, scale: bool) -> None:
    """Both are float64: they agree to 1e-9 of the largest element, and within the bound for float64 operands."""
    o = bounds.make_operands(np, 33, 40, 21, "float64", family, with_scale=scale)
    dy = bounds.draw_dy(np, o)
    same = {**o.affine, "running_mean": o.running_mean, "running_var": o.running_var, "training": training}
    y = reference.forward(o.x, o.weight, o.scale, **same, activation=activation).y
    got = bounds.expected_gradients(np, o, dy, "highest", training, activation, y)
    want = reference.backward(dy, o.x, o.weight, o.scale, **same, activation=activation)._asdict()
    assert set(want) - set(got) == (set() if scale else {"scale"})
    for name, gradient in want.items():
        if name not in got:
            continue
        assert got[name].judge(gradient, np).passed, name
        if family == "normal":
            np.testing.assert_allclose(
                gradient, got[name].value.astype(float), rtol=0, atol=1e-9 * np.abs(gradient).max()
            )


@pytest.mark.parametrize("field", bounds.GRADIENTS)
def test_one_wrong_gradient_is_seen(field: str) -> None:
    o = bounds.make_operands(np, 64, 48, 20, "float32")
    dy = bounds.draw_dy(np, o)
    truth = bounds.expected_gradients(np, o, dy, "highest", True)[field]
    gradient = truth.value.astype(np.float32)
    assert truth.judge(gradient, np).passed
    gradient.flat[7] = gradient.flat[7] * np.float32(1.01) + np.float32(1e-3)
    assert not truth.judge(gradient, np).passed


def test_gradients_of_other_signs_than_ys_are_seen() -> None:
    """Gradients of a y with one other sign are out of bound: a whole element of dy is missing."""
    o = bounds.make_operands(np, 64, 48, 20, "float32")
    dy = bounds.draw_dy(np, o)
    y = bounds.expected(np, o, "highest", True, activation="relu")["y"].value.astype(np.float32)
    other = y.copy()
    row, column = np.argwhere((y > 0) & (np.abs(dy) > 0.5))[0]
    other[row, column] = 0
    one, another = (bounds.expected_gradients(np, o, dy, "highest", True, "relu", at) for at in (y, other))
    for name in ("x", "weight", "beta"):
        gradient = one[name].value.astype(np.float32)
        assert one[name].judge(gradient, np).passed
        assert not another[name].judge(gradient, np).passed, name


def test_an_error_stands_beside_its_bound_and_beside_zero_it_is_absolute() -> None:
    value, bound, error = np.array([[3.0, 4.0]]), np.array([[0.3, 0.4]]), np.array([[0.03, -0.2]])
    judged = bounds.Expected(value, bound).judge(value + error, np)
    assert judged.relative
    assert judged.share == pytest.approx(0.5)
    assert judged.norm_error == pytest.approx(np.hypot(0.03, 0.2) / 5)
    assert judged.relative_error == judged.norm_error
    judged = bounds.Expected(value / 100, bound).judge(value / 100 + error, np)  # 0.05 < 0.5
    assert not judged.relative
    assert (judged.norm_error, judged.share) == pytest.approx((np.hypot(0.03, 0.2), 0.5))
    assert judged.relative_error == pytest.approx(np.hypot(0.03, 0.2) / 0.05)  # the limit for peers in a bench
    beyond = bounds.Expected(value * 1e5, bound).judge(np.array([[np.inf, np.inf]], np.float16), np)
    assert (beyond.norm, beyond.norm_error, beyond.share) == (0, 0, 0), "what float16 cannot hold is not judged"
