"""What class, text and pickle a model has after gsbn.torch.convert."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import convert, revert  # noqa: E402
from tests.torch.layers import assert_same, batch, step  # noqa: E402
from tests.torch.models import Block, I, Scale, converted, row  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")


@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle", "torch.save"])
def test_a_subclass_without_a_forward_of_its_own(calls: list[Any], how: str) -> None:
    ours, plain = converted(Block(between=[Scale(6)]).double(), scales=(Scale,))
    assert type(ours) is not Block and isinstance(ours, Block) and isinstance(ours, gsbn.torch.Sequential)
    assert type(ours).__name__ == "Block" and ours.out == 6
    assert convert(ours, scales=(Scale,)).replaced == (("0", "1", "2", "3"),), "twice is once"
    made = ours
    if how == "deepcopy":
        made = copy.deepcopy(ours)
    elif how == "pickle":
        made = pickle.loads(pickle.dumps(ours))
    elif how == "torch.save":
        torch.save(ours, memory := io.BytesIO())
        made = torch.load(io.BytesIO(memory.getvalue()), weights_only=False)
    assert type(made) is type(ours)
    assert_same(step(made, batch()), step(copy.deepcopy(plain), batch()))
    assert calls == ["relu"]
    revert(made)
    assert type(made) is Block and set(vars(made)) == set(vars(plain))
    assert_same([made.eval()(batch())], [step(plain, batch()) and plain.eval()(batch())])
    assert calls == ["relu"]


class Two(nn.Module):
    """Calls its modules in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(I, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        y: torch.Tensor = self.bn(self.fc(x)).relu()
        return y * factor


class Outer(nn.Module):
    """A traced module in a traced module."""

    def __init__(self) -> None:
        super().__init__()
        self.two, self.fc, self.bn = Two(), nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.bn(self.fc(self.two(x)))
        return y


def traced(class_: type) -> tuple[Any, Any]:
    """A module that was converted by a trace, and the same without."""
    torch.manual_seed(0)
    plain = class_().double()
    ours = copy.deepcopy(plain)
    assert convert(ours, trace=True).replaced
    return ours, plain


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("class_", [Two, Outer])
def test_a_traced_module_becomes_a_script_of_its_own_forward(class_: type, training: bool) -> None:
    ours, plain = traced(class_)
    before = [type(module) for module in ours.modules()]
    script = torch.jit.script(ours.train(training))
    assert [type(module) for module in ours.modules()] == before
    assert list(script.state_dict()) == list(plain.state_dict()) and script.training is training
    assert_same(step(script, batch()), step(plain.train(training), batch()))


@pytest.mark.parametrize("class_", [Two, Outer])
def test_a_traced_module_has_the_signature_of_its_own_forward(class_: type) -> None:
    """Programs ask for it, and so do torch.fx and torch.export."""
    ours, plain = traced(class_)
    assert inspect.signature(ours.forward) == inspect.signature(plain.forward)
    assert_same(step(torch.fx.symbolic_trace(ours), batch()), step(torch.fx.symbolic_trace(plain), batch()))
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(ours.eval(), (batch(),), dynamic_shapes={"x": {0: rows}})
    assert_same([exported.module()(batch()[:9])], [plain.eval()(batch()[:9])])


def test_a_forward_that_an_instance_has_is_seen() -> None:
    model = row()
    model.forward = lambda x: x
    assert "which has a forward of its own" in convert(model).left[0].why and type(model) is nn.Sequential


def test_a_subclass_of_gsbns_own_sequential_keeps_its_class(calls: list[Any]) -> None:
    class Mine(gsbn.torch.Sequential):
        pass

    model = Mine(*row())
    assert convert(model).replaced == (("0", "1", "2"),) and type(model) is Mine
    model(torch.randn(8, I))
    revert(model)
    assert type(model) is Mine and calls == ["relu"]


def test_the_compiler_takes_a_subclass() -> None:
    ours, plain = converted(Block().double())
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert_same([compiled(batch())], [plain(batch())])


def test_what_it_prints() -> None:
    model = nn.Sequential(nn.Flatten(), *row(Scale(6)), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout())
    model.add_module("last", Block(4))
    before = repr(model)
    convert(model, scales=(Scale,))
    ours = ["  one call of gsbn: 1 + 2 + 3 + 4", "  one call of gsbn: 5 + 6", "    one call of gsbn: 0 + 1 + 2"]
    assert [line for line in repr(model).splitlines() if line not in before.splitlines()] == ours
    assert repr(model).splitlines()[:3] == ["Sequential(", *ours[:2]] and "    out=4\n    one call of" in repr(model)
    model[5].register_forward_hook(lambda *a: None)
    assert ours[1] not in repr(model) and ours[0] in repr(model)
    revert(model)
    assert repr(model) == before


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickles_name_public_modules_only(protocol: int) -> None:
    model = nn.Sequential(row(), Block(), nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6)))
    report = convert(model)
    model.append(gsbn.torch.LinearBatchNorm1d(6, 6))
    saved = gsbn.forward(np.ones((20, 3)), np.ones((2, 3)), training=True, return_saved=True)[1]
    plan = gsbn.describe(np.ones((20, 3)), np.ones((2, 3)), training=True)
    for thing in (model, report, saved, plan, gsbn.torch.convert):
        data = pickle.dumps(thing, protocol)
        assert {b"gsbn" + rest for rest in re.findall(rb"gsbn([.\w]*)", data) if b"._" in rest} == set()
        assert type(pickle.loads(data)) is type(thing)


def test_pickles_of_earlier_versions_can_be_loaded() -> None:
    assert pickle.loads(b"cgsbn.torch._convert\nSequential\n.") is gsbn.torch.Sequential
    assert pickle.loads(b"cgsbn.torch._layer\nLinearBatchNorm1d\n.") is gsbn.torch.LinearBatchNorm1d
    assert pickle.loads(b"cgsbn._saved\nSaved\n.") is gsbn.Saved
