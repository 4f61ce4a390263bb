"""Arrays that a call writes must not overlap others or themselves, must be writable, and must not require grad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn._host.run import Checked
from tests.support.harness import DTYPES, STATISTICS, Kind, Producer, kind_of
from tests.support.refusals import SHAPES, VECTORS, B, I, O, about, arguments, fold_arguments, refuses, stretch

# ---- overlap and read-only memory


def sharing(kind: Kind, shapes: list[tuple[tuple[int, ...], str]]) -> list[Any]:
    """Arrays of the given shapes and dtypes over the same bytes."""
    size = max(int(np.prod(shape)) * DTYPES.get(dtype, np.dtype("int64")).itemsize for shape, dtype in shapes)
    ints = kind.put(np.zeros(-(-size // 8), np.int64))
    arrays = []
    for shape, dtype in shapes:
        flat = ints if dtype == "int64" else ints.view(kind.put(np.zeros(1, DTYPES[dtype])).dtype)
        arrays.append(flat[: int(np.prod(shape))].reshape(shape))
    return arrays


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


def test_arrays_that_are_only_read_may_be_one(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls do not check them again; but a written array that comes to overlap another is found."""
    found: list[bool] = []
    may_overlap = Checked.may_overlap
    monkeypatch.setattr(Checked, "may_overlap", lambda *given: found.append(may_overlap(*given)) or found[-1])
    ones = kind.put(np.ones(O, np.float32))
    for _ in range(3):
        gsbn.forward(**arguments(kind, gamma=ones, beta=ones, bias=ones))
    assert len(found) >= 2 and not any(found)
    call = arguments(kind, gamma=ones, beta=ones, bias=ones, running_mean=ones)
    refuses(kind, call, ValueError, about("running_mean"))
    assert found[-1]


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
