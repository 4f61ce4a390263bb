"""``gsbn.linear``: the bits of an inference without statistics, and gradients within the bounds of one."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gsbn
from gsbn import Gradients
from tests.support.gradients import before_relu, draw_dy, gradient_bounds, truth_of
from tests.support.harness import (
    CPU_KINDS,
    DTYPES,
    GPU_KINDS,
    LAYOUTS,
    Kind,
    Producer,
    assert_same_bits,
    kind_of,
    place,
    poisoned_allocations,
)
from tests.support.strategies import ACTIVATIONS, Case
from tests.support.tolerance import TF32, assert_within

KINDS = st.sampled_from(LAYOUTS)


def arrays_of(shape: tuple[int, int, int], dtype: str, bias: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    arrays = Case(shape, dtype, training=False, seed=seed, narrow=("bias",)).arrays()
    return {name: arrays[name] for name in ("x", "weight", *["bias"] * bias)}


def without_norm(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arguments of an inference that normalises nothing."""
    O, dtype = len(arrays["weight"]), "f8" if arrays["x"].dtype == np.float64 else "f4"
    return {**arrays, "running_mean": np.zeros(O, dtype), "running_var": np.ones(O, dtype)}


def check(
    kind: Kind,
    arrays: dict[str, np.ndarray],
    layouts: dict[str, str],
    activation: Any = None,
    out: bool = False,
    needs: tuple[str, ...] = ("x", "weight", "bias"),
    operand: float = 0.0,
    **options: Any,
) -> None:
    """A call and its backward, twice: the bits of `gsbn.forward`, gradients within bounds, nothing else written."""
    B, O = len(arrays["x"]), len(arrays["weight"])
    placed = {name: place(kind, a, layouts.get(name, "C")) for name, a in arrays.items()}
    views = {name: p.view for name, p in placed.items()}
    made = place(kind, np.zeros((B, O), arrays["x"].dtype), layouts.get("out", "C")) if out else None
    dy = draw_dy(arrays)
    dy_placed = place(kind, dy, layouts.get("dy", "C"))
    results = []
    for _ in range(2):
        with poisoned_allocations(kind):
            given_out = {} if made is None else {"out": made.view}
            y, saved = gsbn.linear(**views, activation=activation, **given_out, **options, return_saved=True)
        with poisoned_allocations(kind):
            got = gsbn.backward(dy_placed.view, saved, needs=needs)
        assert isinstance(got, Gradients)
        assert made is None or (y is made.view and made.guards_hold(kind))
        found = {name: None if a is None else kind.get(a) for name, a in got._asdict().items()}
        results.append((kind.get(y), found))
    assert not any(p.disturbed(kind) for p in (*placed.values(), dy_placed))
    (y, found), (again, found_again) = results
    assert_same_bits(y, again)
    known = without_norm(arrays)
    same = gsbn.forward(**{name: kind.put(a) for name, a in known.items()}, activation=activation, eps=0, **options)
    if all(layouts.get(name, "C") == "C" for name in ("x", "weight", "out")):
        assert_same_bits(y, kind.get(same))
    elif B:
        np.testing.assert_allclose(np.float64(y), np.float64(kind.get(same)), rtol=0.02, atol=0.02)

    if not B:
        return
    dg = dy if activation is None else before_relu(dy, y)
    truth = truth_of(known, dg, training=False, eps=0.0)
    limits = gradient_bounds(known, dg, truth, training=False, eps=0.0, operand=operand)
    for name, gradient in found.items():
        assert (gradient is None) == (name not in needs or name not in arrays), name
        if gradient is not None:
            assert gradient.shape == arrays[name].shape and gradient.dtype == arrays[name].dtype
            assert_same_bits(gradient, found_again[name])
            assert_within(gradient, np.asarray(getattr(truth, name)), limits[name], name)


DRAWN = {
    "shape": st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40)),
    "dtype": st.sampled_from(list(DTYPES)),
    "activation": st.sampled_from(ACTIVATIONS),
    "bias": st.booleans(),
    "out": st.booleans(),
    "layouts": st.fixed_dictionaries(dict.fromkeys(("x", "weight", "bias", "out", "dy"), KINDS)),
    "needs": st.sets(st.sampled_from(("x", "weight", "bias"))),
}


@pytest.mark.parametrize("name", [*CPU_KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS)])
@given(**DRAWN)
def test_any_call(
    name: str, shape: Any, dtype: str, activation: Any, bias: bool, out: bool, layouts: Any, needs: set[str]
) -> None:
    order = tuple(each for each in ("x", "weight", "bias") if each in needs)
    check(kind_of(name), arrays_of(shape, dtype, bias), layouts, activation, out, order)


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", ["auto", "cublas", "tiled", "sm90"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 136, 72), (1100, 259, 131), (5000, 64, 48), (70, 1032, 520)])
def test_each_path_on_a_gpu(shape: Any, dtype: str, activation: Any, gemm: str) -> None:
    if gemm == "sm90" and dtype == "float64":
        pytest.skip("forward_sm90 has no float64")
    arrays = arrays_of(shape, dtype)
    for layouts in ({}, {"dy": "F"}, {"dy": "unaligned", "out": "strided"}):
        check(kind_of("cupy"), arrays, layouts, activation, "out" in layouts, gemm=gemm)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["C", "F", "unaligned"])
def test_tf32(layout: str, activation: Any) -> None:
    arrays = arrays_of((1100, 264, 136), "float32")
    check(kind_of("cupy"), arrays, {"dy": layout}, activation, operand=TF32, precision="high")


def test_a_stretched_dy(kind: Kind) -> None:
    """As `y.sum().backward()` has it: one element for all."""
    arrays = arrays_of((50, 24, 12), "float32")
    _, saved = gsbn.linear(*(kind.put(a) for a in arrays.values()), return_saved=True)
    one = kind.put(np.ones((1, 1), "f4"))
    if kind.is_torch:
        dy = one.expand(50, 12)
    else:
        library = sys.modules[type(one).__module__.partition(".")[0]]
        dy = library.lib.stride_tricks.as_strided(one, (50, 12), (0, 0))
    got = gsbn.backward(dy, saved)
    np.testing.assert_allclose(kind.get(got.bias), 50, rtol=1e-6)
    np.testing.assert_allclose(kind.get(got.x), np.tile(arrays["weight"].sum(0), (50, 1)), rtol=1e-4, atol=1e-5)


def test_other_libraries_arrays() -> None:
    """Imported without a copy; `out` may be an array that gsbn made."""
    arrays = arrays_of((20, 8, 4), "float32")
    want, kept = gsbn.linear(*arrays.values(), "relu", return_saved=True)
    foreign, out = [Producer(a) for a in arrays.values()], np.empty_like(want)
    y, saved = gsbn.linear(*foreign, "relu", out=out, return_saved=True)
    assert y is out
    assert_same_bits(y, want)
    dy = draw_dy(arrays)
    for a, b in zip(gsbn.backward(Producer(dy), saved), gsbn.backward(dy, kept), strict=True):
        assert (a is None and b is None) or np.array_equal(a, b)


def test_saved_can_be_copied_and_pickled(cpu_kind: Kind) -> None:
    arrays = arrays_of((20, 8, 4), "float32")
    dy = cpu_kind.put(draw_dy(arrays))
    _, saved = gsbn.linear(*(cpu_kind.put(a) for a in arrays.values()), "relu", return_saved=True)
    want = gsbn.backward(dy, saved)
    for other in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        for a, b in zip(gsbn.backward(dy, other), want, strict=True):
            assert (a is None and b is None) or np.array_equal(cpu_kind.get(a), cpu_kind.get(b))


X, W = np.ones((4, 3), "f4"), np.ones((2, 3), "f4")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, W[:, :2]), {}, ValueError, r"^weight: expected shape \(O, 3\)"),
        ((X[0], W), {}, ValueError, r"^x: expected 2 dimensions"),
        ((X, W, np.ones(3, "f4")), {}, ValueError, r"^bias: expected shape \(2,\)"),
        ((X, W, np.ones(2, "f8")), {}, TypeError, r"^bias: expected dtype float32"),
        ((X, W, None, "tanh"), {}, ValueError, r"^activation: expected one of"),
        ((X, W.astype("f8")), {}, TypeError, r"^weight: expected x's dtype"),
        ((X, None), {}, TypeError, r"^weight: expected an array"),
        ((X, W), {"precision": "low"}, ValueError, r"^precision: expected one of"),
        ((X, W), {"gemm": "tiled"}, ValueError, r"^gemm: expected 'auto'"),
        ((X, W), {"sms": 0}, ValueError, r"^sms: expected at least 1"),
        ((X, W), {"return_saved": 1}, TypeError, r"^return_saved: expected a bool"),
        ((X, W), {"out": np.ones((4, 3), "f4")}, ValueError, r"^out: expected shape \(4, 2\)"),
        ((X, W), {"out": W}, ValueError, r"^out: "),
    ],
)
def test_errors(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    for _ in range(2):
        with pytest.raises(error, match=message):
            gsbn.linear(*arguments, **options)


def test_a_wrong_dy() -> None:
    _, saved = gsbn.linear(X, W, return_saved=True)
    with pytest.raises(ValueError, match=r"^dy: expected shape \(4, 2\)"):
        gsbn.backward(X, saved)
    with pytest.raises(TypeError, match=r"^dy: expected x's dtype"):
        gsbn.backward(np.ones((4, 2)), saved)
