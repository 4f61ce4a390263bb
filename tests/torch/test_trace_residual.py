"""convert(trace=True) where a forward adds a residual to the output of a batch norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gsbn.torch import _modules as modules  # noqa: E402
from gsbn.torch import convert  # noqa: E402
from tests.torch.layers import I, assert_same, batch, step  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu", "fresh_dynamo")
O = 6


class Block(nn.Module):
    """Layers for the functions below."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        self.fc, self.bn, self.other, self.bn2 = nn.Linear(I, O), nn.BatchNorm1d(O), nn.Linear(I, O), nn.BatchNorm1d(O)
        self.leaky, self.relu = nn.LeakyReLU(), nn.ReLU(inplace=True)
        self.shortcut, self.shared = (
            nn.Sequential(nn.Linear(I, O), nn.BatchNorm1d(O)),
            nn.Sequential(self.other, self.bn),
        )
        self.double()

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """For each call of gsbn, its activation and whether it has a residual."""
    made: list[tuple[Any, bool]] = []
    fused = modules.fused
    monkeypatch.setattr(modules, "fused", lambda *a: made.append((a[4], (*a, None)[7] is not None)) or fused(*a))
    return made


def in_place(m: Any, x: Any) -> Any:
    identity = m.other(x)
    y = m.bn(m.fc(x))
    y += identity
    return m.relu(y)


def by_method(m: Any, x: Any) -> Any:
    identity = m.other(x)
    return m.bn(m.fc(x)).add_(identity).relu()


def made_between(m: Any, x: Any) -> Any:
    u = m.bn(m.fc(x))
    identity = m.other(x)
    return functional.relu(identity + u)


def by_a_shortcut(m: Any, x: Any) -> Any:
    identity = x
    y = m.bn(m.fc(x))
    if m.shortcut is not None:
        identity = m.shortcut(x)
    y += identity
    return m.relu(y)


def same_norm(m: Any, x: Any) -> Any:
    u = m.bn(m.fc(x))
    return functional.relu(u + m.bn(m.other(x)))


RELU = [("relu", True)]
JOINED: dict[str, tuple[Callable[[Any, Any], Any], list[tuple[Any, bool]]]] = {
    "an operator": (lambda m, x: (lambda r: functional.relu(m.bn(m.fc(x)) + r))(m.other(x)), RELU),
    "the residual first": (lambda m, x: (lambda r: functional.relu(r + m.bn(m.fc(x))))(m.other(x)), RELU),
    "a function": (lambda m, x: torch.relu(torch.add(m.bn(m.fc(x)), m.other(x))), RELU),
    "a method": (lambda m, x: m.relu(m.bn(m.fc(x)).add(m.other(x))), RELU),
    "in place": (in_place, RELU),
    "in place, by a method": (by_method, RELU),
    "made between": (made_between, RELU),
    "a shortcut": (by_a_shortcut, [(None, False), *RELU]),
    "no activation": (lambda m, x: m.bn(m.fc(x)) + m.other(x), [(None, True)]),
    "another activation": (lambda m, x: m.leaky(m.bn(m.fc(x)) + m.other(x)), [(("leaky_relu", 0.01), True)]),
    "two norms": (lambda m, x: m.relu(m.bn(m.fc(x)) + m.bn2(m.other(x))), [(None, False), *RELU]),
    "one norm for both": (same_norm, [(None, False), *RELU]),
}


def alike(ours: Any, plain: Any, x: Any) -> None:
    """Two steps in training, then inference."""
    for _ in range(2):
        assert_same(step(ours, x), step(plain, x))
    assert_same([ours.eval()(x)], [plain.eval()(x)])


@pytest.mark.parametrize("what", JOINED)
def test_the_call_adds_the_residual(device: str, joined: list[Any], what: str) -> None:
    call, expected = JOINED[what]
    ours = Block(call).to(device)
    plain = copy.deepcopy(ours)
    assert ("fc", "bn") in [row[:2] for row in convert(ours, trace=True).replaced]
    ours(batch(device))
    assert joined == expected
    plain(batch(device))
    alike(ours, plain, batch(device))
    compiled = torch.compile(ours.train(), fullgraph=True, backend="aot_eager")
    assert_same([compiled(batch(device))], [plain.train()(batch(device))])


def writes_residual(m: Any, x: Any) -> Any:
    identity = m.other(x)
    identity += m.bn(m.fc(x))
    return functional.relu(identity)


def used_again(m: Any, x: Any) -> Any:
    u = m.bn(m.fc(x))
    return functional.relu(u + m.other(x)) + u


def written_between(m: Any, x: Any) -> Any:
    identity = m.other(x)
    u = m.bn(m.fc(x))
    identity.mul_(2)
    return functional.relu(u + identity)


def norm_of_a_shortcut(m: Any, x: Any) -> Any:
    u = m.bn(m.fc(x))
    return functional.relu(u + m.shared(x))


APART: dict[str, Callable[[Any, Any], Any]] = {
    "a number": lambda m, x: functional.relu(m.bn(m.fc(x)) + 1),
    "a factor": lambda m, x: functional.relu(torch.add(m.bn(m.fc(x)), m.other(x), alpha=2)),
    "the residual is written": writes_residual,
    "another user": used_again,
    "a write between": written_between,
    "the norm of a shortcut": norm_of_a_shortcut,
    "twice itself": lambda m, x: (lambda u: functional.relu(u + u))(m.bn(m.fc(x))),
}


@pytest.mark.parametrize("what", APART)
def test_an_addition_that_stays(joined: list[Any], what: str) -> None:
    ours = Block(APART[what])
    plain = copy.deepcopy(ours)
    assert ("fc", "bn") in convert(ours, trace=True).replaced
    alike(ours, plain, batch())
    assert set(joined) == {(None, False)}


@pytest.mark.parametrize("written", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("what", ["a row", "a column", "another dtype", "autocast"])
def test_a_residual_unlike_y_is_added_by_pytorch(joined: list[Any], what: str, written: bool) -> None:
    """The sum has the shape and dtype that PyTorch gives it, which in place are those of the norm's output."""
    change: dict[str, Callable[[Any], Any]] = {
        "a row": lambda r: r[0],
        "a column": lambda r: r[:, :1],
        "another dtype": lambda r: r.double(),
        "autocast": lambda r: r.float(),
    }

    def call(m: Any, x: Any) -> Any:
        identity = change[what](m.other(x))
        y = m.bn(m.fc(x))
        if written:
            y += identity
        else:
            y = y + identity
        return functional.relu(y)

    ours = Block(call).float()
    plain = copy.deepcopy(ours)
    convert(ours, trace=True)
    x = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        y, expected = ours(x), plain(x)
    assert joined == [(None, False)] and y.dtype is expected.dtype and y.shape == expected.shape
    torch.testing.assert_close(y, expected, rtol=0.02 if what == "autocast" else 1e-5, atol=0.02)


def test_a_hook_on_the_norm_sees_its_output(joined: list[Any]) -> None:
    ours = Block(in_place)
    plain, seen = copy.deepcopy(ours), []
    convert(ours, trace=True)
    ours.bn.register_forward_hook(lambda _, __, u: seen.append(u.clone()))
    assert_same([ours(batch())], [plain(batch())])
    assert len(seen) == 1 and joined == []


class Bottleneck(nn.Module):
    """The end of a block of a residual network of images, as its authors write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.relu = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.double()

    def forward(self, x: Any) -> Any:
        identity = x
        y = self.bn(self.conv(x))
        y += identity
        return self.relu(y)


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_a_block_of_convolutions(joined: list[Any], layout: str) -> None:
    """On a CPU gsbn takes rows whose channels are adjacent."""
    ours = Bottleneck()
    plain = copy.deepcopy(ours)
    assert convert(ours, trace=True).replaced == (("conv", "bn", "relu"),)
    alike(ours, plain, batch(shape=(4, 8, 5, 3)).to(memory_format=getattr(torch, layout)))
    assert set(joined) == ({("relu", True)} if layout == "channels_last" else set())
