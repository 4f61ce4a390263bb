"""The types of the signatures: overloads agree with the function, and arrays match `Array`.

`make lint` runs mypy and pyright on tests/typed/: usage.py must pass, and each line of wrong.py must be an error.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import runpy
import sys
import typing
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn._typing import Array
from tests.support import ROOT

TYPED = ROOT / "tests" / "typed"
WRONG = [line.strip() for line in (TYPED / "wrong.py").read_text(encoding="utf-8").splitlines() if "ignore[" in line]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads came with Python 3.11")
@pytest.mark.parametrize("function", [gsbn.forward, gsbn.backward, gsbn.fold], ids=lambda function: function.__name__)
def test_overloads_have_the_arguments_of_the_function(function: typing.Callable[..., object]) -> None:
    """The same names, order, kinds and defaults, since type checkers see only the overloads."""
    overloads = typing.get_overloads(function)  # type: ignore[attr-defined]
    assert len(overloads) >= 2
    wanted = inspect.signature(function).parameters
    for overload in overloads:
        typing.get_type_hints(overload)  # every name in the hints exists
        found = inspect.signature(overload).parameters
        assert [(p.name, p.kind) for p in found.values()] == [(p.name, p.kind) for p in wanted.values()]
        for name, parameter in found.items():
            needs_true = parameter.annotation == "Literal[True]"
            assert parameter.default is (inspect.Parameter.empty if needs_true else wanted[name].default), name


def test_arrays_have_what_the_protocol_asks_for() -> None:
    members = [name for name in ("__imul__", "squeeze") if name in vars(Array)]
    assert members == ["__imul__", "squeeze"]
    types: list[type] = [np.ndarray]
    for library, name in (("torch", "Tensor"), ("cupy", "ndarray")):
        try:
            types.append(getattr(__import__(library), name))
        except ImportError:
            continue
    for kind in types:
        assert all(hasattr(kind, member) for member in members), kind


def test_squeeze_of_a_parameter_is_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    assert type(torch.nn.Parameter(torch.ones(1, 2)).squeeze()) is torch.Tensor


def test_gradients_are_generic_and_what_they_were() -> None:
    assert typing.get_origin(gsbn.Gradients[int]) is gsbn.Gradients
    gradients = gsbn.Gradients(*range(6))
    assert isinstance(gradients, tuple) and len(gradients) == 6 and gradients.residual is None
    assert pickle.loads(pickle.dumps(gradients)) == gradients
    assert pickle.loads(b"cgsbn.reference\nGradients\n(I0\nI1\nI2\nI3\nI4\nI5\nt\x81.") == gradients
    assert gradients._replace(x=7)._asdict()["x"] == 7
    given: Any = (*range(6), 8)
    with_residual = gsbn.Gradients(*given)
    for again in (copy.copy(with_residual), pickle.loads(pickle.dumps(with_residual)), with_residual._replace(x=7)):
        assert again.residual == 8 and again[1:] == gradients[1:]


def test_the_script_runs() -> None:
    runpy.run_path(str(TYPED / "usage.py"))["numpy_arrays"]()


@pytest.mark.parametrize("line", WRONG, ids=range(len(WRONG)))
def test_what_a_type_checker_refuses_gsbn_refuses(line: str) -> None:
    x, w, s = np.eye(3, 2, dtype=np.float32), np.ones((2, 2), np.float32), np.ones(2, np.float32)
    _, saved = gsbn.forward(x, w, s, training=True, return_saved=True)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        eval(line, {"gsbn": gsbn, "x": x, "w": w, "s": s, "saved": saved})
