"""The arguments of ``gsbn.backward``: the needed gradients, edge cases, and every error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.support.gradients import NAMES, backward, draw_dy, truth_of
from tests.support.harness import DTYPES, Kind, Producer, assert_same_bits, kind_of, without_out
from tests.support.strategies import Case

B, I, O = 9, 5, 4
CASE = Case((B, I, O), "float32", training=True)

# ---- needs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("needs", [(), ("x",), ("bias",), ["gamma", "scale"], {"beta", "weight"}])
def test_needs(kind: Kind, needs: Any, training: bool) -> None:
    arrays = replace(CASE, training=training).arrays()
    dy, gemm = draw_dy(arrays), "auto" if kind.is_cpu else "tiled"
    everything = backward(kind, arrays, dy, training=training, gemm=gemm)
    got = backward(kind, arrays, dy, needs=needs, training=training, gemm=gemm)
    for name in needs:
        assert_same_bits(got[name], everything[name])


def test_a_saved_serves_twice(kind: Kind) -> None:
    native = {name: kind.put(a) for name, a in CASE.arrays().items()}
    _, saved = gsbn.forward(**native, training=True, gemm="auto" if kind.is_cpu else "tiled", return_saved=True)
    dy = kind.put(draw_dy(CASE.arrays()))
    for a, b in zip(gsbn.backward(dy, saved), gsbn.backward(dy, saved), strict=True):
        assert_same_bits(kind.get(a), kind.get(b))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch(kind: Kind, dtype: str, training: bool) -> None:
    arrays = Case((0, I, O), dtype, training).arrays()
    got = backward(kind, arrays, np.empty((0, O), DTYPES[dtype]), training=training)
    assert got["x"].shape == (0, I)
    assert not any(gradient.any() for gradient in got.values())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch_with_one_scale(cpu_kind: Kind, dtype: str, training: bool, shape: tuple[int, ...]) -> None:
    arrays = Case((0, I, O), dtype, training, scale=str(shape)).arrays()
    got = backward(cpu_kind, arrays, np.empty((0, O), DTYPES[dtype]), training=training, activation="relu")
    assert got["scale"].shape == shape
    assert not any(gradient.any() for gradient in got.values())


def test_one_row_in_inference(kind: Kind) -> None:
    arrays = Case((1, I, O), "float64", training=False).arrays()
    dy = draw_dy(arrays)
    got, want = backward(kind, arrays, dy, training=False), truth_of(arrays, dy, training=False)
    for name in NAMES:
        np.testing.assert_allclose(got[name], np.asarray(getattr(want, name), float), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_another_producer_gets_numpy_back(dtype: str) -> None:
    arrays = without_out(replace(CASE, dtype=dtype).arrays())
    dy = draw_dy(arrays)
    want = backward(kind_of("numpy"), arrays, dy, training=True)
    _, saved = gsbn.forward(**{n: Producer(a) for n, a in arrays.items()}, training=True, return_saved=True)
    for name, gradient in zip(NAMES, gsbn.backward(Producer(dy), saved), strict=True):
        assert type(gradient) is np.ndarray
        assert_same_bits(gradient, want[name])


# ---- errors


def saved_of(kind: Kind) -> Any:
    native = {name: kind.put(a) for name, a in CASE.arrays().items()}
    return gsbn.forward(**native, training=True, return_saved=True)[1]


@pytest.mark.parametrize(
    ("dy", "error"),
    [
        (np.ones((B, O + 1), np.float32), ValueError),
        (np.ones((B + 1, O), np.float32), ValueError),
        (np.ones(B * O, np.float32), ValueError),
        (np.ones((O, B), np.float32), ValueError),
        (np.ones((0, O), np.float32), ValueError),
        (np.ones((B, O), np.float64), TypeError),
        (np.ones((B, O), np.float16), TypeError),
        (np.ones((B, O), np.int32), TypeError),
    ],
)
def test_a_wrong_dy(kind: Kind, dy: np.ndarray, error: type[Exception]) -> None:
    saved = saved_of(kind)
    for _ in range(2):  # a wrong call must not be cached as valid
        with pytest.raises(error, match=r"^dy: expected .+, got .+"):
            gsbn.backward(kind.put(dy), saved)
    gsbn.backward(kind.put(np.ones((B, O), np.float32)), saved)


@pytest.mark.parametrize("dy", [None, [[1.0] * O] * B, 1.0])
def test_no_array(kind: Kind, dy: Any) -> None:
    with pytest.raises(TypeError, match=r"^dy: expected .+, got .+"):
        gsbn.backward(dy, saved_of(kind))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dy_of_another_kind(kind: Kind, dtype: str) -> None:
    other = kind_of("torch-cpu" if kind.name == "numpy" else "numpy")
    error = ValueError if kind.name == "torch-cuda" and other.name == "torch-cpu" else TypeError
    with pytest.raises(error, match=r"^dy: expected .+, got .+"):
        gsbn.backward(other.put(np.ones((B, O), DTYPES[dtype])), saved_of(kind))


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_dy_on_another_device(home: str) -> None:
    kind, other = kind_of(f"torch-{home}"), kind_of("torch-cuda" if home == "cpu" else "torch-cpu")
    with pytest.raises(ValueError, match=r"^dy: expected .+, got .+"):
        gsbn.backward(other.put(np.ones((B, O), np.float32)), saved_of(kind))


@pytest.mark.parametrize("saved", [None, (), "saved", np.ones(3)])
def test_no_saved(kind: Kind, saved: Any) -> None:
    with pytest.raises(TypeError, match=r"^saved: expected .+, got .+"):
        gsbn.backward(kind.put(np.ones((B, O), np.float32)), saved)


@pytest.mark.parametrize(
    ("needs", "error"),
    [(("y",), ValueError), (("x", "w"), ValueError), ("x", TypeError), (None, TypeError), ((1,), TypeError)],
)
def test_wrong_needs(kind: Kind, needs: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^needs: expected .+, got .+"):
        gsbn.backward(kind.put(np.ones((B, O), np.float32)), saved_of(kind), needs=needs)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_return_saved_is_a_bool(kind: Kind, value: Any) -> None:
    native = {name: kind.put(a) for name, a in CASE.arrays().items()}
    gsbn.forward(**native, training=True, return_saved=True)
    with pytest.raises(TypeError, match=r"^return_saved: expected a bool, got .+"):
        gsbn.forward(**native, training=True, return_saved=value)


def test_dy_requires_grad(torch_kind: Kind) -> None:
    import torch

    saved, dy = saved_of(torch_kind), torch_kind.put(np.ones((B, O), np.float32)).requires_grad_()
    with pytest.raises(RuntimeError, match=r"(?s)^dy\b.*no_grad"):
        gsbn.backward(dy, saved)
    with torch.no_grad():
        assert not any(a.requires_grad for a in gsbn.backward(dy, saved))
