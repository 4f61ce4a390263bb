"""Valid calls that look like errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import reference
from tests.support.harness import DTYPES, STATISTICS, Kind, assert_same_bits, forward, kind_of
from tests.support.refusals import SHAPES, VECTORS, B, Call, I, O, arguments, stretch
from tests.support.strategies import Case


def assert_right(kind: Kind, call: Call, dtype: str = "float32") -> None:
    """The call runs and agrees with the reference in float32: it reads and writes the right elements."""
    options = {name: call[name] for name in ("training", "momentum", "eps") if name in call}
    arrays = {name: kind.get(a) for name, a in call.items() if name in SHAPES and name != "out" and a is not None}
    truth = reference.forward(**arrays, **options)
    y = gsbn.forward(**call)
    close = {"rtol": 1e-5, "atol": 1e-5}  # enough to tell arrays apart; test_forward_* check the digits
    np.testing.assert_allclose(kind.get(y), truth.y, **close)
    for name in set(STATISTICS) & set(arrays):
        np.testing.assert_allclose(kind.get(call[name]), getattr(truth, name), **close)


def test_interleaved_views(kind: Kind) -> None:
    """The spans overlap, but no element does."""
    buffer = kind.put(np.ones(2 * O, np.float32))
    assert_right(kind, arguments(kind, running_mean=buffer[0::2], running_var=buffer[1::2]))

    normal = np.random.default_rng(0).standard_normal
    buffer = kind.put(normal((B, I + O)).astype(np.float32))
    assert_right(kind, arguments(kind, x=buffer[:, :I], out=buffer[:, I:]))
    buffer = kind.put(normal((2 * B, I)).astype(np.float32))
    assert_right(kind, arguments(kind, x=buffer[0::2], out=buffer[1::2, :O]))

    buffer = kind.put(np.ones((3, O), np.float32))
    assert_right(kind, arguments(kind, gamma=buffer[0], running_mean=buffer[1], beta=buffer[2]))


def test_inputs_may_be_the_same_array(kind: Kind) -> None:
    same = kind.put(np.linspace(1, 2, O, dtype=np.float32))
    assert_right(kind, arguments(kind, scale=same, bias=same, gamma=same, beta=same))
    square = kind.put(np.random.default_rng(0).standard_normal((I, I)).astype(np.float32))
    vectors = {name: kind.put(np.ones(I, np.float32)) for name in VECTORS}
    assert_right(kind, arguments(kind, x=square, weight=square, **vectors, out=None))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_x_may_reach_the_end_of_its_dtype(cpu_kind: Kind, dtype: str) -> None:
    """x minus its means, which the CPU path takes out, would overflow; its product with a small weight does not."""
    end = np.finfo(dtype).max
    x = np.full((B, I), 0.9 * end, dtype)
    x[1] *= -1
    x[2] *= 0.5
    x /= 1 if dtype == "float32" else B  # else the sum for its means overflows
    weight = (np.linspace(8, 16, O * I).reshape(O, I) / end).astype(dtype)
    y = cpu_kind.get(gsbn.forward(cpu_kind.put(x), cpu_kind.put(weight), training=True))
    truth = reference.forward(x / end, weight * end, training=True)
    np.testing.assert_allclose(y, truth.y, rtol=1e-4, atol=1e-4)


def test_inputs_may_have_strides_of_zero(kind: Kind) -> None:
    row = kind.put(np.arange(I, dtype=np.float32)[None])
    one = kind.put(np.full(1, 0.5, np.float32))
    vectors = {name: stretch(kind, one, (O,)) for name in VECTORS}
    assert_right(kind, arguments(kind, training=False, x=stretch(kind, row, (B, I)), **vectors))


def test_inputs_may_be_read_only() -> None:
    kind = kind_of("numpy")
    for training, written in ((True, (*STATISTICS, "out")), (False, ("out",))):
        call = arguments(kind, training=training)
        for name in SHAPES:
            call[name].setflags(write=name in written)
        assert_right(kind, call)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_count_is_one_element_of_any_rank(kind: Kind, shape: tuple[int, ...]) -> None:
    for momentum in (0.1, None):
        count = kind.put(np.full(shape, 6, np.int64))
        assert_right(kind, arguments(kind, num_batches_tracked=count, momentum=momentum))
        assert kind.get(count) == 7
        gsbn.forward(**arguments(kind, num_batches_tracked=count, training=False, momentum=momentum))
        assert kind.get(count) == 7


def test_out_is_returned(kind: Kind) -> None:
    for training in (True, False):
        call = arguments(kind, training=training)
        assert gsbn.forward(**call) is call["out"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch(kind: Kind, dtype: str, training: bool) -> None:
    arrays = Case((0, I, O), dtype, training).arrays()
    got = forward(kind, arrays, training=training)  # B = 0: checks that the result is empty
    for name in STATISTICS:
        counted = training and name == "num_batches_tracked"  # PyTorch counts it, too
        assert_same_bits(getattr(got, name), arrays[name] + 1 if counted else arrays[name])
    del arrays["out"]
    assert forward(kind, arrays, training=training).y.shape == (0, O)


def test_one_row_in_inference(kind: Kind) -> None:
    assert_right(kind, arguments(kind, rows=1, training=False))


def test_zero_eps_in_inference(kind: Kind) -> None:
    assert_right(kind, arguments(kind, training=False, eps=0))
    y = gsbn.forward(**arguments(kind, training=False, eps=0.0, running_var=kind.put(np.zeros(O, np.float32))))
    assert not np.isfinite(kind.get(y)[:, 0]).any()  # 1/sqrt(0), as in PyTorch, and no exception


@pytest.mark.parametrize("options", [{"eps": 1}, {"momentum": 1}, {"momentum": 0}, {"eps": np.float32(1e-3)}])
def test_numbers_of_any_type(kind: Kind, options: Call) -> None:
    assert_right(kind, arguments(kind, **options))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scale", [None, 2.0, 3, 0, -0.5, np.float16(0.5), np.int8(-2)])
def test_a_scale_that_is_no_array(kind: Kind, scale: Any, training: bool) -> None:
    call = arguments(kind, training=training)
    gsbn.forward(**{**call, "scale": scale})
    y, want = (
        kind.get(gsbn.forward(**arguments(kind, training=training, scale=given)))
        for given in (scale, kind.put(np.full(O, 1 if scale is None else scale, np.float32)))
    )
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    del call["scale"]
    if scale is None:
        np.testing.assert_allclose(kind.get(gsbn.forward(**call)), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_scale_of_one_element(kind: Kind, shape: tuple[int, ...]) -> None:
    assert_right(kind, arguments(kind, scale=kind.put(np.full(shape, 0.5, np.float32))))


@pytest.mark.parametrize("momentum", [np.float16(2e-4), np.float32(0.1), np.int8(1), True + 0])
def test_a_momentum_of_numpy_is_a_number(kind: Kind, momentum: Any) -> None:
    """1 - momentum of a float16 would be a float16."""
    states = []
    for given in (momentum, float(momentum)):
        call = arguments(kind, training=True, momentum=given)
        gsbn.forward(**call)
        states.append([kind.get(call[name]) for name in ("running_mean", "running_var")])
        arrays = {name: kind.get(a) for name, a in call.items() if name in SHAPES and name != "out" and a is not None}
        states[-1].append(reference.forward(**arrays, training=True, momentum=given).running_mean)
    for ours, theirs in zip(*states, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("groups", [1, 2, np.uint64(2)])
@pytest.mark.parametrize(("count", "momentum"), [(2**63 - 1, 0.1), (-5, None)])
def test_an_empty_batch_refuses_a_count_as_others_do(count: int, momentum: float | None, groups: Any) -> None:
    state = {"running_mean": np.zeros(O), "running_var": np.ones(O), "num_batches_tracked": np.array(count)}
    with pytest.raises(ValueError, match=r"^num_batches_tracked: expected a count"):
        gsbn.forward(np.ones((0, I)), np.ones((O, I)), **state, training=True, momentum=momentum, groups=groups)
    assert state["num_batches_tracked"] == count
    state["num_batches_tracked"][...] = 3
    gsbn.forward(np.ones((0, I)), np.ones((O, I)), **state, training=True, groups=groups)
    assert state["num_batches_tracked"] == 3 + int(groups)


def test_infinity_is_no_warning() -> None:
    x, weight = np.full((8, I), 1e30, "f4"), np.full((O, I), 1e30, "f4")
    state = {"running_mean": np.zeros(O, "f4"), "running_var": np.ones(O, "f4")}
    with np.errstate(all="raise"):
        y, saved = gsbn.forward(x, weight, **state, training=True, groups=2, return_saved=True)
        gsbn.backward(y, saved)
        gsbn.matmul(np.full((1, 1), np.inf, "f4"), np.zeros((1, 1), "f4"))


def test_equal_options_of_another_type_are_refused_after_a_good_call(kind: Kind) -> None:
    a, b = kind.put(np.ones((3, 4), "f4")), kind.put(np.ones((4, 2), "f4"))
    gsbn.matmul(a, b, sms=1)
    for sms in (True, 1.0):
        with pytest.raises(TypeError, match=r"^sms: expected a number of SMs"):
            gsbn.matmul(a, b, sms=sms)  # type: ignore[arg-type]


def test_a_y_of_few_rows_is_rounded_once() -> None:
    """1 + 2⁻⁸ is halfway between two numbers of bfloat16, and 2⁻⁴⁰ above it is not."""
    x, weight = np.array([[1, 2**-8]], DTYPES["bfloat16"]), np.ones((1, 2), DTYPES["bfloat16"])
    state = {"running_mean": np.zeros(1, "f4"), "running_var": np.ones(1, "f4")}
    y = gsbn.forward(x, weight, **state, eps=0, beta=np.array([2**-40], "f4"))
    assert float(y[0, 0]) == 1 + 2**-7


def test_a_copy_of_what_was_saved_notices_changes() -> None:
    torch = pytest.importorskip("torch")
    x, weight = torch.randn(8, I), torch.randn(O, I)
    y, saved = gsbn.forward(x, weight, training=True, return_saved=True)
    x += 1
    with pytest.raises(RuntimeError, match=r"^x: modified by an inplace operation"):
        gsbn.backward(y, copy.copy(saved))
