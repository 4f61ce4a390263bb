"""Every documented error, on every kind of array.

An error names its argument, what was expected and what it got, and is raised before anything is written.
"""

from __future__ import annotations

import copy
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.support.harness import DTYPES, STATISTICS, Kind, Producer, kind_of
from tests.support.refusals import VECTORS, B, Call, I, O, about, arguments, fold_arguments, ones, refuses

# ---- one wrong argument at a time: (its value, the error, the argument that the error names)

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
    *(({"renorm": ones(*shape)}, "renorm") for shape in ((), (1,), (3,), (2, 1))),
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
    *((x, {"renorm": ones(2, dtype=of)}, "renorm") for x, of in (("float32", "int64"), ("float16", "float16"))),
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
    ({"activation": "tanh"}, ValueError, "activation"),
    ({"activation": "ReLU"}, ValueError, "activation"),
    ({"activation": ""}, ValueError, "activation"),
    ({"activation": True}, TypeError, "activation"),
    ({"activation": False}, TypeError, "activation"),
    ({"activation": ["relu"]}, TypeError, "activation"),
    ({"activation": max}, TypeError, "activation"),
    ({"groups": 0}, ValueError, "groups"),
    ({"groups": -2}, ValueError, "groups"),
    ({"groups": True}, TypeError, "groups"),
    ({"groups": 2.0}, TypeError, "groups"),
    ({"groups": "2"}, TypeError, "groups"),
    ({"groups": 5}, ValueError, "groups"),
    ({"groups": 2**40}, ValueError, "groups"),
    ({"groups": 2, "renorm": (3.0, 5.0)}, ValueError, "groups"),
    ({"renorm": 3.0}, TypeError, "renorm"),
    ({"renorm": [3.0, 5.0]}, TypeError, "renorm"),
    ({"renorm": ()}, TypeError, "renorm"),
    ({"renorm": ("3", 5.0)}, TypeError, "renorm"),
    ({"renorm": (0.5, 5.0)}, ValueError, "renorm"),
    ({"renorm": (float("inf"), 5.0)}, ValueError, "renorm"),
    ({"renorm": (3.0, -1.0)}, ValueError, "renorm"),
    ({"renorm": (3.0, 5.0, 1.5)}, TypeError, "renorm"),
    ({"renorm": (3.0, 5.0, True)}, TypeError, "renorm"),
    ({"renorm": (3.0, 5.0, -1)}, ValueError, "renorm"),
    ({"renorm": (3.0, 5.0, 9, 9)}, TypeError, "renorm"),
    (dict.fromkeys(STATISTICS) | {"renorm": (3.0, 5.0)}, ValueError, "running_mean"),
    ({"renorm": (3.0, 5.0, 9), "num_batches_tracked": None}, ValueError, "num_batches_tracked"),
    ({"activation": ("relu", 0.5)}, ValueError, "activation"),
    ({"activation": ("leaky_relu",)}, ValueError, "activation"),
    ({"activation": ("leaky_relu", 0.5, 0.5)}, ValueError, "activation"),
    ({"activation": ("leaky_relu", "0.5")}, TypeError, "activation"),
    ({"activation": ("leaky_relu", True)}, TypeError, "activation"),
    ({"activation": ("elu", np.nan)}, ValueError, "activation"),
    ({"activation": ("elu", 1e39)}, ValueError, "activation"),
    ({"activation": (0.5, "elu")}, ValueError, "activation"),
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
    """True == 1 == 1.0: the cached plan of a valid call must not serve an invalid one."""
    right, wrong = (True, 1) if name in ("training", "return_saved") else (1 if name == "sms" else 1.0, True)
    for _ in range(2):
        gsbn.forward(**arguments(kind, **{name: right}))
        refuses(kind, arguments(kind, **{name: wrong}), TypeError, about(name))


@pytest.mark.parametrize(("shape", "message"), [((2,), "(2,)"), ((O, 1), "(4, 1)")])
def test_a_scale_that_fits_no_features(kind: Kind, shape: tuple[int, ...], message: str) -> None:
    """The message also says that one element is allowed."""
    expected = rf"^scale: expected shape \({O},\) or one element, got {re.escape(message)}$"
    refuses(kind, arguments(kind, scale=kind.put(ones(*shape))), ValueError, expected)
    call = fold_arguments(kind, scale=kind.put(ones(*shape)))
    refuses(kind, call, ValueError, expected, gsbn.fold)


def test_an_activation_that_is_not_known(kind: Kind) -> None:
    expected = r"^activation: expected one of \('relu', 'leaky_relu', .*\), got 'tanh'$"
    refuses(kind, arguments(kind, activation="tanh"), ValueError, expected)
    gsbn.forward(**arguments(kind, activation="relu"))
    refuses(kind, arguments(kind, activation="tanh"), ValueError, expected)
    gsbn.forward(**arguments(kind, activation=("elu", 1)))  # 1 == True
    refuses(kind, arguments(kind, activation=("elu", True)), TypeError, r"^activation: expected a finite number beside")


@pytest.mark.parametrize(("count", "momentum"), [(2**63 - 1, 0.1), (2**63 - 1, None), (-1, None), (-5, None)], ids=str)
def test_a_count_that_cannot_be_raised(cpu_kind: Kind, count: int, momentum: float | None) -> None:
    """On the CPU only: on a GPU the host reads no array."""
    call = arguments(cpu_kind, num_batches_tracked=cpu_kind.put(np.array(count)), momentum=momentum)
    refuses(cpu_kind, call, ValueError, about("num_batches_tracked"))


@pytest.mark.parametrize(("name", "value"), [("eps", 10**400), ("momentum", -(10**400)), ("eps", Fraction(1, 10**400))])
def test_a_number_beyond_float64(kind: Kind, name: str, value: Any) -> None:
    refuses(kind, arguments(kind, **{name: value}), ValueError, about(name))


def test_an_error_shows_no_elements(kind: Kind) -> None:
    """Printing an array on a GPU would wait for the GPU."""
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
    """Torch counts the changes of a tensor: the backward raises if x or weight changed, as autograd does."""
    import torch

    call = {n: a for n, a in arguments(torch_kind).items() if n != "out"}
    dy = torch_kind.put(np.ones((B, O), np.float32))
    y, saved = gsbn.forward(**call, return_saved=True)
    gsbn.backward(dy, saved)
    y.mul_(2)  # y may change
    gsbn.backward(dy, saved)
    call[name].mul_(2)
    with pytest.raises(RuntimeError, match=rf"^{name}: .*inplace operation"):
        gsbn.backward(dy, saved)
    _, saved = gsbn.forward(**call, return_saved=True)
    assert gsbn.backward(dy, saved).x.isfinite().all()
    for copied in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):  # their tensors have new counts
        assert gsbn.backward(dy, copied).x.isfinite().all()
    with torch.inference_mode():  # tensors without counts
        call = {n: a for n, a in arguments(torch_kind).items() if n != "out"}
        _, saved = gsbn.forward(**call, return_saved=True)
        gsbn.backward(dy, saved)


# ---- kinds and devices


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # NumPy cannot export bfloat16 by DLPack
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
