"""Every edge case and every error of the contract, on every kind of array.

An error names its argument, says what was expected and what came, and comes before anything is written.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import reference
from tests.support.harness import DTYPES, STATISTICS, Kind, Producer, assert_same_bits, forward, kind_of
from tests.support.strategies import Case

B, I, O = 6, 5, 4
VECTORS = ("scale", "bias", "gamma", "beta", "running_mean", "running_var")
Call = dict[str, Any]


def arguments(kind: Kind, dtype: str = "float32", *, rows: int = B, **changes: Any) -> Call:
    """A training call with every argument, in order but for ``changes``."""
    arrays = Case((rows, I, O), dtype, training=True).arrays()
    return {**{name: kind.put(a) for name, a in arrays.items()}, "training": True, **changes}


def fold_arguments(kind: Kind, **changes: Any) -> Call:
    call = arguments(kind)
    for name in ("x", "num_batches_tracked", "out", "training"):
        del call[name]
    return {**call, **changes}


def refuses(
    kind: Kind, call: Call, error: type[Exception], message: str, function: Callable[..., Any] = gsbn.forward
) -> None:
    """``function`` raises ``error`` with ``message``, and every byte of every array is what it was."""
    array_type = type(kind.put(np.zeros(1)))
    arrays = {name: a for name, a in call.items() if isinstance(a, array_type)}
    before = {name: kind.get(a).tobytes() for name, a in arrays.items()}
    with pytest.raises(error, match=message):
        function(**call)
    assert {name: kind.get(a).tobytes() for name, a in arrays.items()} == before


def about(name: str) -> str:
    """The form of every message about an argument."""
    return rf"^({name}): expected .+, got .+"


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, DTYPES.get(dtype) or dtype)


# ---- one wrong argument at a time: (what is passed instead, the error, the argument that it names)

WRONG_SHAPE = [
    ({"x": ones(I)}, "x"),
    ({"x": ones(B, I, 1)}, "x"),
    ({"x": ones(B, I + 1)}, "x|weight"),
    ({"x": ones(B, 0), "weight": ones(O, 0)}, "x|weight"),
    ({"weight": ones(O)}, "weight"),
    ({"weight": ones(O, I, 1)}, "weight"),
    ({"weight": ones(O, I - 1)}, "weight"),
    ({"weight": ones(0, I)}, "weight"),
    *(({name: ones(O + 1)}, name) for name in VECTORS),
    *(({name: ones(1)}, name) for name in VECTORS[1:]),
    *(({name: ones(O, 1)}, name) for name in VECTORS),
    *(({name: ones()}, name) for name in VECTORS[1:]),
    ({"scale": ones(2)}, "scale"),
    ({"scale": ones(0)}, "scale"),
    ({"scale": ones(1, 2)}, "scale"),
    ({"num_batches_tracked": ones(2, dtype="int64")}, "num_batches_tracked"),
    ({"num_batches_tracked": ones(0, dtype="int64")}, "num_batches_tracked"),
    ({"out": ones(B, O + 1)}, "out"),
    ({"out": ones(B * O)}, "out"),
    ({"out": ones(O, B)}, "out"),
]

WRONG_DTYPE = [
    ("float32", {"x": ones(B, I, dtype="int32")}, "x"),
    ("float32", {"x": ones(B, I, dtype="complex64")}, "x"),
    ("float32", {"x": ones(B, I, dtype="bool")}, "x"),
    ("float32", {"weight": ones(O, I, dtype="float64")}, "weight"),
    ("float32", {"weight": ones(O, I, dtype="float16")}, "weight"),
    ("float16", {"weight": ones(O, I, dtype="bfloat16")}, "weight"),
    *(("float32", {name: ones(O, dtype="float64")}, name) for name in VECTORS),
    *(("float32", {name: ones(O, dtype="float16")}, name) for name in VECTORS),
    *(("float64", {name: ones(O, dtype="float32")}, name) for name in VECTORS),
    *(("float16", {name: ones(O, dtype="bfloat16")}, name) for name in VECTORS),
    *(("bfloat16", {name: ones(O, dtype="float64")}, name) for name in VECTORS),
    ("float16", {"running_mean": ones(O, dtype="float16")}, "running_mean|running_var"),
    ("bfloat16", {"running_var": ones(O, dtype="bfloat16")}, "running_mean|running_var"),
    ("float32", {"num_batches_tracked": ones(dtype="int32")}, "num_batches_tracked"),
    ("float32", {"num_batches_tracked": ones(dtype="float32")}, "num_batches_tracked"),
    ("float32", {"out": ones(B, O, dtype="float64")}, "out"),
    ("float16", {"out": ones(B, O, dtype="float32")}, "out"),
]

WRONG_VALUE = [
    ({"precision": "medium"}, ValueError, "precision"),
    ({"gemm": "fastest"}, ValueError, "gemm"),
    ({"eps": -1e-5}, ValueError, "eps"),
    ({"eps": -1e-5, "training": False}, ValueError, "eps"),
    ({"eps": 0}, ValueError, "eps"),
    ({"eps": "1e-5"}, TypeError, "eps"),
    ({"momentum": "0.1"}, TypeError, "momentum"),
    ({"running_mean": None}, ValueError, "running_mean"),
    ({"running_var": None}, ValueError, "running_var"),
    ({"running_var": None, "training": False}, ValueError, "running_var"),
    ({"running_mean": None, "running_var": None}, ValueError, "num_batches_tracked"),
    (dict.fromkeys(STATISTICS) | {"training": False}, ValueError, "running_mean|running_var"),
    ({"momentum": None, "num_batches_tracked": None}, ValueError, "momentum|num_batches_tracked"),
    ({"x": None}, TypeError, "x"),
    ({"weight": None}, TypeError, "weight"),
    ({"scale": True}, TypeError, "scale"),
    ({"scale": np.True_}, TypeError, "scale"),
    ({"scale": "2"}, TypeError, "scale"),
    ({"scale": [2.0]}, TypeError, "scale"),
    ({"scale": 2j}, TypeError, "scale"),
    ({"scale": float("nan")}, ValueError, "scale"),
    ({"scale": np.float32("inf")}, ValueError, "scale"),
    ({"scale": 10**400}, ValueError, "scale"),
    ({"activation": "gelu"}, ValueError, "activation"),
    ({"activation": "ReLU"}, ValueError, "activation"),
    ({"activation": ""}, ValueError, "activation"),
    ({"activation": True}, TypeError, "activation"),
    ({"activation": False}, TypeError, "activation"),
    ({"activation": ["relu"]}, TypeError, "activation"),
    ({"activation": max}, TypeError, "activation"),
    ({"x": [[1.0] * I] * B}, TypeError, "x"),
    ({"weight": "weight"}, TypeError, "weight"),
    ({"num_batches_tracked": 3}, TypeError, "num_batches_tracked"),
    ({"out": [[0.0] * O] * B}, TypeError, "out"),
]


def identify(value: Any) -> str | None:
    """Readable test ids: ``x=float32(6,)``."""
    if isinstance(value, dict):
        show = lambda v: f"{v.dtype}{v.shape}".replace(" ", "") if isinstance(v, np.ndarray) else repr(v)  # noqa: E731
        return ",".join(f"{name}={show(v)}" for name, v in value.items())
    return value.__name__ if isinstance(value, type) else None


def native(kind: Kind, changes: Call) -> Call:
    return {name: kind.put(v) if isinstance(v, np.ndarray) else v for name, v in changes.items()}


@pytest.mark.parametrize(("changes", "name"), WRONG_SHAPE, ids=identify)
def test_wrong_shape(kind: Kind, changes: Call, name: str) -> None:
    refuses(kind, arguments(kind, **native(kind, changes)), ValueError, about(name))


@pytest.mark.parametrize(("dtype", "changes", "name"), WRONG_DTYPE, ids=identify)
def test_wrong_dtype(kind: Kind, dtype: str, changes: Call, name: str) -> None:
    refuses(kind, arguments(kind, dtype, **native(kind, changes)), TypeError, about(name))


@pytest.mark.parametrize(("changes", "error", "name"), WRONG_VALUE, ids=identify)
def test_wrong_value(kind: Kind, changes: Call, error: type[Exception], name: str) -> None:
    refuses(kind, arguments(kind, **changes), error, about(name))


@pytest.mark.parametrize("gemm", ["cublas", "tiled"])
def test_a_gemm_of_the_gpu_on_the_cpu(cpu_kind: Kind, gemm: str) -> None:
    refuses(cpu_kind, arguments(cpu_kind, gemm=gemm), ValueError, about("gemm"))


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"weight": ones(O)}, ValueError, "weight"),
        ({"weight": ones(0, I)}, ValueError, "weight"),
        ({"weight": ones(O, 0)}, ValueError, "weight"),
        ({"weight": ones(O, I, dtype="int32")}, TypeError, "weight"),
        ({"weight": [[1.0] * I] * O}, TypeError, "weight"),
        *(({name: ones(O + 1)}, ValueError, name) for name in VECTORS),
        *(({name: ones(O, dtype="float64")}, TypeError, name) for name in VECTORS),
        ({"running_mean": None}, (TypeError, ValueError), "running_mean"),
        ({"running_var": None}, (TypeError, ValueError), "running_var"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"scale": ones(2)}, ValueError, "scale"),
        ({"scale": True}, TypeError, "scale"),
        ({"scale": "2"}, TypeError, "scale"),
        ({"scale": float("inf")}, ValueError, "scale"),
    ],
    ids=identify,
)
def test_fold_refuses(kind: Kind, changes: Call, error: type[Exception], name: str) -> None:
    refuses(kind, fold_arguments(kind, **native(kind, changes)), error, about(name), gsbn.fold)


@pytest.mark.parametrize("name", ["momentum", "eps", "training", "return_saved", "sms", "scale"])
def test_an_equal_value_of_another_type_came_first(kind: Kind, name: str) -> None:
    """True == 1 == 1.0: what is remembered of a call that was right must not let a wrong one pass."""
    right, wrong = (True, 1) if name in ("training", "return_saved") else (1 if name == "sms" else 1.0, True)
    for _ in range(2):
        gsbn.forward(**arguments(kind, **{name: right}))
        refuses(kind, arguments(kind, **{name: wrong}), TypeError, about(name))


@pytest.mark.parametrize(("shape", "message"), [((2,), "(2,)"), ((O, 1), "(4, 1)")])
def test_a_scale_that_fits_no_features(kind: Kind, shape: tuple[int, ...], message: str) -> None:
    """It may have one element as well, and the message says so."""
    expected = rf"^scale: expected shape \({O},\) or one element, got {re.escape(message)}$"
    refuses(kind, arguments(kind, scale=kind.put(ones(*shape))), ValueError, expected)
    call = fold_arguments(kind, scale=kind.put(ones(*shape)))
    refuses(kind, call, ValueError, expected, gsbn.fold)


def test_an_activation_that_is_not_known(kind: Kind) -> None:
    expected = r"^activation: expected one of \('relu',\), got 'gelu'$"
    refuses(kind, arguments(kind, activation="gelu"), ValueError, expected)
    gsbn.forward(**arguments(kind, activation="relu"))
    refuses(kind, arguments(kind, activation="gelu"), ValueError, expected)


@pytest.mark.parametrize(("count", "momentum"), [(2**63 - 1, 0.1), (2**63 - 1, None), (-1, None), (-5, None)], ids=str)
def test_a_count_that_cannot_be_raised(cpu_kind: Kind, count: int, momentum: float | None) -> None:
    """On the CPU; on a GPU the host reads no array."""
    call = arguments(cpu_kind, num_batches_tracked=cpu_kind.put(np.array(count)), momentum=momentum)
    refuses(cpu_kind, call, ValueError, about("num_batches_tracked"))


@pytest.mark.parametrize(("name", "value"), [("eps", 10**400), ("momentum", -(10**400)), ("eps", Fraction(1, 10**400))])
def test_a_number_beyond_float64(kind: Kind, name: str, value: Any) -> None:
    refuses(kind, arguments(kind, **{name: value}), ValueError, about(name))


def test_an_error_shows_no_elements(kind: Kind) -> None:
    """To print those of an array on a GPU would wait for it."""
    call = {name: a for name, a in arguments(kind).items() if name != "out"}
    y, saved = gsbn.forward(**call, return_saved=True)
    for wrong, what in (((y, saved), "a tuple of 2"), (y, f"a {type(y).__module__}.{type(y).__qualname__}")):
        with pytest.raises(TypeError, match=rf"^saved: expected .*, got {re.escape(what)}$"):
            gsbn.backward(y, wrong)


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_prepared_weight_and_an_unknown_precision(gpu: bool) -> None:
    kind = kind_of("cupy" if gpu else "numpy")
    call = arguments(kind)
    call["weight"] = gsbn.prepare(call["weight"])
    with pytest.raises(ValueError, match=r"^precision: expected one of"):
        gsbn.forward(**call, precision="foo")
    with pytest.raises(ValueError, match=r"^weight: expected one prepared for precision='high'"):
        gsbn.forward(**call, precision="high")


@pytest.mark.parametrize("sms", [0, -1, True, 1.5, "8", [8]])
def test_a_number_of_sms(kind: Kind, sms: Any) -> None:
    error = ValueError if isinstance(sms, int) and sms is not True else TypeError
    refuses(kind, arguments(kind, sms=sms), error, about("sms"))
    call = {name: a for name, a in arguments(kind).items() if name != "out"}
    _, saved = gsbn.forward(**call, return_saved=True)
    refuses(kind, {"dy": saved.x[:, :O], "saved": saved, "sms": sms}, error, about("sms"), gsbn.backward)


@pytest.mark.parametrize("name", ["x", "weight", *VECTORS, "num_batches_tracked", "out"])
def test_a_mask_is_not_lost_without_a_word(name: str) -> None:
    call = arguments(kind_of("numpy"))
    call[name] = np.ma.masked_array(call[name])
    refuses(kind_of("numpy"), call, TypeError, about(name))


@pytest.mark.parametrize("name", ["x", "weight"])
def test_what_was_saved_has_changed_since(torch_kind: Kind, name: str) -> None:
    """Torch counts the changes of a tensor: a backward for what the forward never saw is refused, as by autograd."""
    import torch

    call = {n: a for n, a in arguments(torch_kind).items() if n != "out"}
    dy = torch_kind.put(np.ones((B, O), np.float32))
    y, saved = gsbn.forward(**call, return_saved=True)
    gsbn.backward(dy, saved)
    y.mul_(2)  # nobody's business
    gsbn.backward(dy, saved)
    call[name].mul_(2)
    with pytest.raises(RuntimeError, match=rf"^{name}: .*inplace operation"):
        gsbn.backward(dy, saved)
    _, saved = gsbn.forward(**call, return_saved=True)
    assert gsbn.backward(dy, saved).x.isfinite().all()
    for copied in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):  # whose tensors count anew
        assert gsbn.backward(dy, copied).x.isfinite().all()
    with torch.inference_mode():  # which counts nothing
        call = {n: a for n, a in arguments(torch_kind).items() if n != "out"}
        _, saved = gsbn.forward(**call, return_saved=True)
        gsbn.backward(dy, saved)


# ---- kinds and devices


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # of which NumPy can show nobody its memory
@pytest.mark.parametrize("name", ["weight", *VECTORS, "num_batches_tracked", "out"])
def test_mixed_kinds(kind: Kind, name: str, dtype: str) -> None:
    other = kind_of("torch-cpu" if kind.name == "numpy" else "numpy")
    call = arguments(kind, dtype)
    call[name] = other.put(kind.get(call[name]))
    refuses(kind, call, TypeError, about(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", *VECTORS, "num_batches_tracked", "out"])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_mixed_devices(home: str, name: str) -> None:
    kind, other = kind_of(f"torch-{home}"), kind_of("torch-cuda" if home == "cpu" else "torch-cpu")
    call = arguments(kind)
    call[name] = other.put(kind.get(call[name]))
    refuses(kind, call, ValueError, about(name))


@pytest.mark.parametrize("name", ["x", "weight", "scale", "running_mean"])
def test_a_producer_among_arrays(name: str) -> None:
    kind = kind_of("numpy")
    call = arguments(kind)
    call[name] = Producer(call[name])
    refuses(kind, call, TypeError, about("x|weight|scale|running_mean"))


@pytest.mark.parametrize("name", ["x", "weight", "running_var", "out"])
def test_tensors_without_plain_memory(name: str) -> None:
    call = arguments(kind_of("torch-cpu"))
    with pytest.raises(ValueError, match=about(name)):
        gsbn.forward(**{**call, name: call[name].to("meta")})
    with pytest.raises(TypeError, match=about(name)):
        gsbn.forward(**{**call, name: call[name].to_sparse()})


# ---- training on one row


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_in_training(kind: Kind, dtype: str) -> None:
    refuses(kind, arguments(kind, dtype, rows=1), ValueError, "^Expected more than 1 value per channel when training")


# ---- what is written: memory of its own, writable, every element once


def sharing(kind: Kind, shapes: list[tuple[tuple[int, ...], str]]) -> list[Any]:
    """Arrays of the given shapes and dtypes over the same bytes."""
    size = max(int(np.prod(shape)) * DTYPES.get(dtype, np.dtype("int64")).itemsize for shape, dtype in shapes)
    ints = kind.put(np.zeros(-(-size // 8), np.int64))
    arrays = []
    for shape, dtype in shapes:
        flat = ints if dtype == "int64" else ints.view(kind.put(np.zeros(1, DTYPES[dtype])).dtype)
        arrays.append(flat[: int(np.prod(shape))].reshape(shape))
    return arrays


SHAPES = {
    "x": ((B, I), "float32"),
    "weight": ((O, I), "float32"),
    **dict.fromkeys(VECTORS, ((O,), "float32")),
    "num_batches_tracked": ((1,), "int64"),
    "out": ((B, O), "float32"),
}
PAIRS = [(w, other) for w in (*STATISTICS, "out") for other in SHAPES if w != other]


@pytest.mark.parametrize(("written", "other"), PAIRS)
def test_a_written_array_overlaps(kind: Kind, written: str, other: str) -> None:
    ours, theirs = sharing(kind, [SHAPES[written], SHAPES[other]])
    refuses(kind, arguments(kind, **{written: ours, other: theirs}), ValueError, about(f"{written}|{other}"))


def test_a_written_array_overlaps_by_one_element(kind: Kind) -> None:
    buffer = kind.put(np.ones(2 * O - 1, np.float32))
    call = arguments(kind, running_mean=buffer[:O], running_var=buffer[O - 1 :])
    refuses(kind, call, ValueError, about("running_mean|running_var"))

    buffer = kind.put(np.ones((B + 1, I + O - 1), np.float32))  # the last column of x is the first of out
    refuses(kind, arguments(kind, x=buffer[:B, :I], out=buffer[:B, I - 1 :]), ValueError, about("x|out"))
    buffer = kind.put(
        np.ones((2 * B + 2, I), np.float32)
    )  # every other row, as in test_interleaved_views: the same rows
    refuses(kind, arguments(kind, x=buffer[:-2:2], out=buffer[2::2, :O]), ValueError, about("x|out"))


@pytest.mark.parametrize("name", STATISTICS)
def test_in_inference_only_out_is_written(kind: Kind, name: str) -> None:
    ours, theirs = sharing(kind, [SHAPES[name], SHAPES["out"]])
    refuses(kind, arguments(kind, training=False, **{name: ours, "out": theirs}), ValueError, about(f"{name}|out"))

    shared = kind.put(np.ones(O, np.float32))
    y = gsbn.forward(**arguments(kind, training=False, running_mean=shared, running_var=shared, gamma=shared))
    assert np.isfinite(kind.get(y)).all()


@pytest.mark.parametrize("name", [*STATISTICS, "out"])
def test_a_written_array_is_read_only(name: str) -> None:
    kind = kind_of("numpy")
    call = arguments(kind)
    call[name].setflags(write=False)
    refuses(kind, call, ValueError, about(name))


@pytest.mark.parametrize("name", STATISTICS)
def test_a_producer_hands_out_read_only_memory(name: str) -> None:
    arrays = {n: a for n, a in arguments(kind_of("numpy")).items() if n not in ("out", "training")}
    arrays[name].setflags(write=False)
    before = {n: a.tobytes() for n, a in arrays.items()}
    with pytest.raises(ValueError, match=about(name)):
        gsbn.forward(**{n: Producer(a) for n, a in arrays.items()}, training=True)
    assert {n: a.tobytes() for n, a in arrays.items()} == before


def stretch(kind: Kind, a: Any, shape: tuple[int, ...]) -> Any:
    """``a`` repeated along new or longer dimensions by strides of 0, writable where the library allows it."""
    if kind.is_torch:
        return a.expand(shape)
    if kind.name == "numpy":
        strides = np.broadcast_to(a, shape).strides
        return np.lib.stride_tricks.as_strided(a, shape, strides, writeable=True)
    import cupy

    return cupy.broadcast_to(a, shape)


@pytest.mark.parametrize(("name", "shape"), [("running_mean", (O,)), ("running_var", (O,)), ("out", (B, O))])
def test_a_written_array_has_a_stride_of_zero(kind: Kind, name: str, shape: tuple[int, ...]) -> None:
    narrow = kind.put(np.ones((*shape[:-1], 1), np.float32))
    refuses(kind, arguments(kind, **{name: stretch(kind, narrow, shape)}), ValueError, about(name))


# ---- torch's autograd


@pytest.mark.parametrize("name", ["x", "weight", *VECTORS[:4]])
def test_requires_grad(torch_kind: Kind, name: str) -> None:
    import torch

    kind, call = torch_kind, arguments(torch_kind)
    call[name].requires_grad_()
    refuses(kind, call, RuntimeError, rf"(?s)^{name}\b.*no_grad")
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not gsbn.forward(**call).requires_grad


def test_fold_of_parameters(torch_kind: Kind) -> None:
    import torch

    kind, call = torch_kind, fold_arguments(torch_kind)
    call["weight"].requires_grad_()
    refuses(kind, call, RuntimeError, r"(?s)^weight\b.*no_grad", gsbn.fold)
    with torch.no_grad():
        assert not any(a.requires_grad for a in gsbn.fold(**call))


# ---- what looks like an error and is none


def assert_right(kind: Kind, call: Call, dtype: str = "float32") -> None:
    """The call runs, and its results are the reference's to float32: the arguments were read and written as meant."""
    options = {name: call[name] for name in ("training", "momentum", "eps") if name in call}
    arrays = {name: kind.get(a) for name, a in call.items() if name in SHAPES and name != "out" and a is not None}
    truth = reference.forward(**arrays, **options)
    y = gsbn.forward(**call)
    close = {"rtol": 1e-5, "atol": 1e-5}  # to tell arrays apart, not to judge digits: that is test_forward_*'s work
    np.testing.assert_allclose(kind.get(y), truth.y, **close)
    for name in set(STATISTICS) & set(arrays):
        np.testing.assert_allclose(kind.get(call[name]), getattr(truth, name), **close)


def test_interleaved_views(kind: Kind) -> None:
    """Spans that overlap, and elements that do not."""
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
        counted = training and name == "num_batches_tracked"  # as PyTorch counts it
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
