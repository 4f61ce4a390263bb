"""``gsbn.torch.linear``, ``gsbn.torch.Linear`` and ``convert(linear=True)``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import gsbn  # noqa: E402
import gsbn.torch  # noqa: E402
from gsbn.torch import _linear as module  # noqa: E402
from tests.torch.layers import replayed  # noqa: E402

gpu = pytest.mark.gpu
B, I, O = 96, 40, 24


def operands(device: str, dtype: Any = torch.float64, shape: tuple[int, ...] = (B, I), out: int = O) -> list[Any]:
    torch.manual_seed(0)
    made = torch.randn(shape), torch.randn(out, shape[-1]), torch.randn(out)
    return [a.to(device, dtype).requires_grad_() for a in made]


def plain(x: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    y = functional.linear(x, weight, bias)
    return y if activation is None else torch.relu(y)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("shape", [(B, I), (3, 5, I), (I,), (0, I)])
def test_gradients(device: str, shape: tuple[int, ...], activation: Any) -> None:
    ours, theirs = operands(device, shape=shape), operands(device, shape=shape)
    y, want = gsbn.torch.linear(*ours, activation), plain(*theirs, activation)
    dy = torch.randn_like(want)
    for a, b in ((y, want), *zip(torch.autograd.grad(y, ours, dy), torch.autograd.grad(want, theirs, dy), strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("needs", range(1, 8))
def test_frozen_arguments(device: str, needs: int, activation: Any) -> None:
    ours, theirs = operands(device), operands(device)
    for i in range(3):
        ours[i].requires_grad_(bool(needs >> i & 1)), theirs[i].requires_grad_(bool(needs >> i & 1))
    gsbn.torch.linear(*ours, activation).square().sum().backward()
    plain(*theirs, activation).square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11)


@gpu
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(("dtype", "shape"), [
    (torch.float32, (2048, 2048, 1024)), (torch.float32, (300, 72, 1000)), (torch.float32, (70000, 64, 40)),
    (torch.bfloat16, (1024, 512, 768)), (torch.float16, (100, 1024, 512)),
])  # fmt: skip
def test_is_as_accurate_as_pytorch(dtype: Any, shape: tuple[int, int, int], activation: Any) -> None:
    """At most 1.1 times PyTorch's norm-wise error against float64, and half a unit in the last place."""
    rows, inputs, features = shape
    for mean in (0.0, 100.0):
        torch.manual_seed(1)
        made = torch.randn(rows, inputs) + mean, torch.randn(features, inputs) / inputs**0.5, torch.randn(features)
        made = tuple(a.cuda().to(dtype) for a in made)
        ours, theirs, truth = ([a.to(t).requires_grad_() for a in made] for t in (dtype, dtype, torch.float64))
        outputs = gsbn.torch.linear(*ours, activation), plain(*theirs, activation), plain(*truth, activation)
        dy = torch.randn(rows, features, device="cuda").to(dtype)
        found = []
        for y, inputs_of in zip(outputs, (ours, theirs, truth), strict=True):
            masked = dy if activation is None else dy.masked_fill(outputs[2] <= 0, 0)  # the same elements for all
            masked = masked.masked_fill(y <= 0, 0) if activation is not None else masked
            found.append((y, *torch.autograd.grad(y, inputs_of, masked.to(y.dtype))))
        for name, mine, its, want in zip(("y", "x", "weight", "bias"), *found, strict=True):
            error, bar = (float((a.double() - want).norm() / want.norm()) for a in (mine, its))
            assert error <= 1.1 * bar + torch.finfo(dtype).eps / 2, (name, mean, error, bar)


def test_second_derivatives_and_batched_gradients(device: str) -> None:
    ours, theirs = operands(device), operands(device)
    penalties = []
    for made, of in ((gsbn.torch.linear, ours), (plain, theirs)):
        y = made(*of, "relu")
        (dx,) = torch.autograd.grad(y.square().sum(), of[0], create_graph=True)
        (dx.norm(dim=1) - 1).square().mean().backward()
        penalties.append([a.grad for a in of[:2]])
    for a, b in zip(*penalties, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    y, many = (
        gsbn.torch.linear(*ours, "relu"),
        torch.eye(O, device=device, dtype=torch.float64)[:, None].expand(O, B, O),
    )
    want = torch.autograd.grad(plain(*theirs, "relu"), theirs, many, is_grads_batched=True)
    for a, b in zip(torch.autograd.grad(y, ours, many, is_grads_batched=True), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_gradcheck(device: str) -> None:
    made = operands(device, shape=(5, 4), out=3)
    torch.autograd.gradcheck(lambda *a: gsbn.torch.linear(*a), made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device: str, dtype: Any) -> None:
    ours, theirs = operands(device, torch.float32), operands(device, torch.float32)
    with torch.autocast(device, dtype=dtype):
        y, want = gsbn.torch.linear(*ours), functional.linear(*theirs)
    assert y.dtype is want.dtype is dtype
    torch.testing.assert_close(y, want, rtol=0.02, atol=0.05)
    y.float().square().mean().backward(), want.float().square().mean().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad.dtype is torch.float32
        torch.testing.assert_close(a.grad, b.grad, rtol=0.05, atol=0.02)


def test_a_stretched_dy_and_other_layouts(device: str) -> None:
    ours, theirs = operands(device), operands(device)
    for made, of in ((gsbn.torch.linear, ours), (plain, theirs)):
        made(of[0].t().contiguous().t(), of[1].t().contiguous().t(), of[2], None).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11)


@gpu
def test_hooks_on_saved_tensors_that_return_something_else() -> None:
    made = operands("cuda", torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a, lambda a: a.double()):
        y = gsbn.torch.linear(*made, "relu")
        with pytest.raises(RuntimeError, match=r"^saved \w+: expected float32"):
            y.sum().backward()


@gpu
def test_a_training_step_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_MULTIPLICATIONS", 0)
    torch.manual_seed(0)
    layer, x = gsbn.torch.Linear(128, 64).cuda(), torch.randn(512, 128, device="cuda")

    def step() -> Any:
        layer.zero_grad(set_to_none=True)
        y = layer(x)
        y.square().mean().backward()
        return y

    y = replayed(step)
    want = functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def model() -> Any:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(I, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    made = nn.ModuleDict({"head": head, "last": nn.Linear(8, 4), "layer": gsbn.torch.LinearBatchNorm1d(4, 4)})
    made.forward = None
    return made


def call(made: Any, x: Any) -> Any:
    return made["layer"](made["last"](made["head"](x)))


def test_convert_and_revert(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_MULTIPLICATIONS", 0)
    want, made = model().to(device), model().to(device)
    assert gsbn.torch.convert(copy.deepcopy(made)).replaced == (("head.0", "head.1", "head.2"),)
    found = gsbn.torch.convert(made, linear=True)
    assert found.replaced == (("head.0", "head.1", "head.2"), ("head.3",), ("last",))
    assert type(made["last"]) is gsbn.torch.Linear and "by gsbn" in repr(made["last"])
    assert made.state_dict().keys() == want.state_dict().keys()
    x = torch.randn(B, I, device=device)
    torch.testing.assert_close(call(made, x), call(want, x), rtol=1e-4, atol=1e-4)
    assert gsbn.torch.convert(made, linear=True).replaced[1:] == ()  # nothing is left
    for other in (copy.deepcopy(made["head"]), pickle.loads(pickle.dumps(made["head"]))):
        assert type(other[3]) is gsbn.torch.Linear
        torch.testing.assert_close(other.eval()(x), made["head"].eval()(x))
    gsbn.torch.revert(made)
    assert type(made["last"]) is type(made["head"][3]) is nn.Linear
    assert made["last"].__dict__.keys() == want["last"].__dict__.keys()


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.last = nn.Linear(I, O), nn.BatchNorm1d(O), nn.Linear(O, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.fc(x)))


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_a_linear_that_was_converted_may_stand_in_a_row(calls: list[Any]) -> None:
    torch.manual_seed(0)
    made, x = Row(), torch.randn(B, I)
    want = copy.deepcopy(made)(x)
    assert gsbn.torch.convert(made, linear=True).replaced == (("fc",), ("last",))
    assert gsbn.torch.convert(made, trace=True).replaced == (("fc", "norm"),)
    torch.testing.assert_close(made(x), want, rtol=1e-4, atol=1e-4)
    model = nn.Sequential(made.fc, nn.BatchNorm1d(O))
    assert gsbn.torch.convert(model).replaced == (("0", "1"),)
    model(x)
    assert len(calls) == 2


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_revert_finds_what_was_parametrized_later() -> None:
    """Also where a copy shares the class: that keeps it."""
    torch.manual_seed(0)
    made, x = Row(), torch.randn(B, I)
    own = type(made)
    gsbn.torch.convert(made, trace=True, linear=True)
    for each in (made.last, made.norm):
        nn.utils.parametrizations.weight_norm(each, dim=0)
    reverted = copy.deepcopy(made)
    gsbn.torch.revert(reverted)
    assert type(reverted) is own and type(reverted.last).__mro__[1] is nn.Linear
    assert type(made.last).__mro__[1] is gsbn.torch.Linear
    torch.testing.assert_close(reverted(x), made(x), rtol=1e-4, atol=1e-4)
    nn.utils.parametrize.remove_parametrizations(reverted.last, "weight")
    assert type(reverted.last) is nn.Linear
    assert "_precision" not in vars(reverted.last)


def test_hooks_and_patched_forwards_are_left() -> None:
    made = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    made[0].register_forward_hook(lambda *a: None)
    made[1].forward = lambda x: x
    assert gsbn.torch.convert(made, linear=True).replaced == ()


def test_tools_see_pytorchs_linear(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_MULTIPLICATIONS", 0)
    layer, x = gsbn.torch.Linear(I, O).to(device), torch.randn(B, I, device=device)
    want = functional.linear(x, layer.weight, layer.bias)
    scripted, traced = torch.jit.script(layer), torch.jit.trace(layer, x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for other in (scripted, traced, compiled, torch.fx.symbolic_trace(layer)):
        torch.testing.assert_close(other(x), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.func.vmap(layer)(x), want, rtol=1e-4, atol=1e-4)
    _, tangent = torch.func.jvp(layer, (x,), (x,))
    torch.testing.assert_close(tangent, want - layer.bias, rtol=1e-4, atol=1e-4)


@gpu
def test_only_large_float32_calls_of_a_layer_are_gsbns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    own = module.linear
    monkeypatch.setattr(module, "linear", lambda *a, **k: calls.append(1) or own(*a, **k))
    layer = gsbn.torch.Linear(512, 512).cuda()
    layer(torch.randn(8, 512, device="cuda"))
    layer.bfloat16()(torch.randn(4096, 512, device="cuda").bfloat16())
    layer.float()
    with torch.autocast("cuda", torch.bfloat16):
        layer(torch.randn(4096, 512, device="cuda"))
    assert calls == []
    layer(torch.randn(4, 2048, 512, device="cuda"))
    assert calls == [1] * (torch.cuda.get_device_capability() == (9, 0))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((np.ones((2, 3)), torch.ones(2, 3)), {}, TypeError, r"^x: expected a torch.Tensor"),
        ((torch.ones(2, 3), None), {}, TypeError, r"^weight: expected a torch.Tensor"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0), {}, TypeError, r"^bias: expected a torch.Tensor"),
        ((torch.ones(2, 3), torch.ones(2, 3), None, "tanh"), {}, ValueError, r"^activation: expected one of"),
        ((torch.ones(2, 3), torch.ones(2, 3)), {"precision": "low"}, ValueError, r"^precision: expected one of"),
        ((torch.ones(2, 3), torch.ones(2, 3)), {"gemm": "fast"}, ValueError, r"^gemm: expected one of"),
    ],
)
def test_errors(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gsbn.torch.linear(*arguments, **options)
