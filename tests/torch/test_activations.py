"""The activations in gsbn.torch: the layer, `linear`, converted models and graphs, each beside PyTorch's own."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import LinearBatchNorm1d, _operators  # noqa: E402
from gsbn.torch._graph import one_call  # noqa: E402
from tests.support.gradients import activate  # noqa: E402
from tests.support.strategies import OTHERS  # noqa: E402
from tests.torch.layers import I, O, assert_same, batch, pair, step  # noqa: E402

each = pytest.mark.parametrize("activation", OTHERS, ids=str)
HIDDEN = 6

# Modules behind a norm, and the activation of the call that takes them in; None if gsbn has none that does the same
MODULES: dict[str, tuple[Callable[[], Any], Any]] = {
    "LeakyReLU": (nn.LeakyReLU, ("leaky_relu", 0.01)),
    "a slope": (lambda: nn.LeakyReLU(0.2, inplace=True), ("leaky_relu", 0.2)),
    "a slope below zero": (lambda: nn.LeakyReLU(-0.3), ("leaky_relu", -0.3)),
    "an int": (lambda: nn.LeakyReLU(2), ("leaky_relu", 2)),
    "SiLU": (nn.SiLU, "silu"),
    "SiLU in place": (lambda: nn.SiLU(inplace=True), "silu"),
    "GELU": (nn.GELU, "gelu"),
    "GELU by tanh": (lambda: nn.GELU(approximate="tanh"), "gelu_tanh"),
    "ELU": (nn.ELU, ("elu", 1.0)),
    "an alpha": (lambda: nn.ELU(1.5, inplace=True), ("elu", 1.5)),
    "beyond float32": (lambda: nn.LeakyReLU(1e39), None),
    "another one": (nn.Tanh, None),
}
# Calls behind a norm
CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "leaky_relu": (functional.leaky_relu, ("leaky_relu", 0.01)),
    "a slope": (lambda y: functional.leaky_relu(y, 0.2), ("leaky_relu", 0.2)),
    "by name": (lambda y: functional.leaky_relu(y, negative_slope=0.2, inplace=True), ("leaky_relu", 0.2)),
    "in place": (lambda y: functional.leaky_relu_(y, 0.2), ("leaky_relu", 0.2)),
    "silu": (functional.silu, "silu"),
    "silu in place": (lambda y: functional.silu(y, inplace=True), "silu"),
    "gelu": (functional.gelu, "gelu"),
    "gelu by tanh": (lambda y: functional.gelu(y, approximate="tanh"), "gelu_tanh"),
    "elu": (functional.elu, "elu"),
    "an alpha": (lambda y: functional.elu(y, 2.0, True), ("elu", 2.0)),
    "elu in place": (lambda y: functional.elu_(y, alpha=2.0), ("elu", 2.0)),
    "relu": (functional.relu, "relu"),
    "tanh": (torch.tanh, None),
}


class Own(nn.Module):
    """A forward of its own."""

    def __init__(self, after: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fc, self.bn, self.after = nn.Linear(I, HIDDEN), nn.BatchNorm1d(HIDDEN), after

    def forward(self, x: Any) -> Any:
        return self.after(self.bn(self.fc(x)))


def named(found: Any) -> Any:
    """With PyTorch's default, however it is spelt."""
    return {"leaky_relu": ("leaky_relu", 0.01), "elu": ("elu", 1.0)}.get(found, found)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.usefixtures("fused_on_a_cpu")
def test_a_module_behind_a_norm(device: str, name: str, calls: list[Any]) -> None:
    make, activation = MODULES[name]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(I, HIDDEN), nn.BatchNorm1d(HIDDEN), make(), nn.Linear(HIDDEN, O))
    plain = plain.to(device, torch.float64)
    ours = copy.deepcopy(plain)
    (row,) = gsbn.torch.convert(ours).replaced
    assert row == ("0", "1", "2")[: 3 if activation else 2] and ours.state_dict().keys() == plain.state_dict().keys()
    if name == "a slope below zero" or activation is not None:
        assert_same(step(ours, batch(device)), step(plain, batch(device)))
        assert calls == [activation]
        ours[2].register_forward_hook(lambda module, args, y: y + 1)
        torch.testing.assert_close(ours(batch(device)), plain[3](plain[2](plain[1](plain[0](batch(device)))) + 1))
        assert calls[1:] == [None]
    gsbn.torch.revert(ours)
    assert type(ours) is nn.Sequential


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("fused_on_a_cpu", "fresh_dynamo")
def test_a_call_behind_a_norm(device: str, name: str, calls: list[Any]) -> None:
    """Traced, and in the graph of torch.compile."""
    after, activation = CALLS[name]
    torch.manual_seed(0)
    plain = Own(after).to(device, torch.float64)
    traced, compiled = copy.deepcopy(plain), copy.deepcopy(plain)
    assert gsbn.torch.convert(traced, trace=True).replaced == (("fc", "bn"),)
    seen: list[Any] = []

    def look(module: Any, inputs: Any) -> Any:
        seen.extend(node.args[-1] for node in module.graph.nodes if node.target is one_call)
        return module.forward

    run = torch.compile(compiled, backend=gsbn.torch.backend(look, cpu=True))
    want = step(plain, batch(device))
    assert_same(step(traced, batch(device)), want)
    assert_same(step(compiled, batch(device), run), want)
    assert named(seen[0]) == named(activation) == named(calls[0])


@each
@pytest.mark.usefixtures("fused_on_a_cpu", "fresh_dynamo")
def test_the_layer(device: str, activation: Any) -> None:
    """Eager and compiled, in training and inference, and folded."""
    ours, theirs = pair(device, scale=True, bias=True, activation=activation)
    run = torch.compile(copy.deepcopy(ours), fullgraph=True, backend="aot_eager")
    for training in (True, False):
        ours.train(training), theirs.train(training), run.train(training)
        want = step(theirs, batch(device))
        assert_same(step(ours, batch(device)), want)
        assert_same(step(run, batch(device)), want)
    assert f"activation={activation}" in ours.extra_repr()
    torch.testing.assert_close(ours.fold()(batch(device)), ours(batch(device)))
    other = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert other.activation == activation and torch.equal(other(batch(device)), ours(batch(device)))
    of_modules = LinearBatchNorm1d.from_modules(ours.linear, ours.norm, ours.scale, activation)
    assert torch.equal(of_modules(batch(device)), ours(batch(device)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.testing.assert_close(torch.jit.script(ours)(batch(device)), ours(batch(device)))


@each
@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives(device: str, training: bool, activation: Any) -> None:
    torch.manual_seed(0)
    x, weight, beta = (
        torch.randn(shape, dtype=torch.float64).to(device).requires_grad_() for shape in ((9, 4), (3, 4), (3,))
    )
    mean, var = torch.randn(3, dtype=torch.float64).to(device), torch.rand(3, dtype=torch.float64).to(device) + 0.5

    def run(x: Any, weight: Any, beta: Any) -> Any:
        given = {"running_mean": mean.clone(), "running_var": var.clone(), "training": training}
        return gsbn.torch.linear_batch_norm(x, weight, beta=beta, activation=activation, **given)

    assert torch.autograd.gradcheck(run, (x, weight, beta), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight, beta), check_batched_grad=True)


@each
@pytest.mark.parametrize("needs", [7, 1, 2, 4, 3])
def test_linear(device: str, needs: int, activation: Any) -> None:
    """Gradients, and those of gradients, whatever is frozen."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape, dtype=torch.float64).to(device) for shape in ((24, I), (O, I), (O,))]
    ours, theirs = ([a.clone().requires_grad_(bool(needs >> i & 1)) for i, a in enumerate(drawn)] for _ in range(2))
    leaves = [[a for a in of if a.requires_grad] for of in (ours, theirs)]
    y, want = gsbn.torch.linear(*ours, activation), activate(functional.linear(*theirs), activation)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    first = [
        torch.autograd.grad(of_y.square().sum(), of, create_graph=True)
        for of_y, of in zip((y, want), leaves, strict=True)
    ]
    for a, b in zip(*first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    penalties = [sum(a.square().sum() for a in found) for found in first]
    second = [
        torch.autograd.grad(penalty, of, allow_unused=True) for penalty, of in zip(penalties, leaves, strict=True)
    ]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    y = gsbn.torch.linear(*ours, activation)
    once = torch.autograd.grad(y, leaves[0], torch.ones_like(y))
    expected = torch.autograd.grad(activate(functional.linear(*theirs), activation), leaves[1], torch.ones_like(y))
    for a, b in zip(once, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.gpu
@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_is_as_accurate_as_pytorch(dtype: str, activation: Any) -> None:
    """y, dx and dweight of the layer and of `linear`: at most 1.1 times PyTorch's norm-wise error, and half a unit.

    A derivative may jump at u = 0, where either rounding may fall on the other side. float32 errs by less than 1e-5
    here, |u| being below 6: dy is zero where the true u is closer to 0.
    """
    kind = getattr(torch, dtype)
    torch.manual_seed(1)
    x, weight, drawn = torch.randn(2048, 512), torch.randn(768, 512) / 512**0.5, torch.randn(2048, 768)

    def step_of(layer: bool, own: bool, dtype: Any, dy: Any = None) -> list[Any]:
        leaves = [a.cuda().to(kind).to(dtype).requires_grad_() for a in (x, weight)]
        if own and layer:
            y = gsbn.torch.linear_batch_norm(*leaves, training=True, activation=activation)
        elif own:
            y = gsbn.torch.linear(*leaves, None, activation)
        else:
            z = functional.linear(*leaves)
            z = functional.batch_norm(z, None, None, training=True) if layer else z
            if dy is None:
                return [z]
            y = activate(z, activation)
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

    for layer in (True, False):
        (u,) = step_of(layer, False, torch.float64)
        dy = torch.where(u.abs() > 1e-5, drawn.cuda().to(kind).double(), 0.0)
        truth = step_of(layer, False, torch.float64, dy)
        both = step_of(layer, True, kind, dy), step_of(layer, False, kind, dy)
        for ours, theirs, want in zip(*both, truth, strict=True):
            error, bar = (float((a.double() - want).norm() / want.norm()) for a in (ours, theirs))
            assert error <= 1.1 * bar + torch.finfo(kind).eps / 2, (layer, error, bar)


def test_the_operators_keep_torchs_rules(device: str) -> None:
    tests = ("test_schema", "test_faketensor")
    x, weight = (torch.randn(n, 6, device=device) for n in (40, 5))
    mean, var = torch.zeros(5, device=device), torch.ones(5, device=device)
    rest = 1.0, 0.1, 1e-5, "highest", "auto", "leaky_relu", None, None, None, 0.2
    arguments = x, weight, None, None, None, None, mean, var, None, *rest
    torch.library.opcheck(_operators.INFER, arguments, test_utils=tests)
    y = _operators.INFER(*arguments)
    want = functional.leaky_relu(functional.batch_norm(functional.linear(x, weight), mean, var), 0.2)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(_operators.TRAIN, arguments, test_utils=tests)
    y, deviations, vectors = _operators.TRAIN(*arguments)
    of_backward = True, "highest", "auto", "leaky_relu", "None None None None", None, "x weight", None, 0.2
    backward = torch.ones_like(y), x, weight, deviations, vectors, *of_backward
    torch.library.opcheck(_operators.BACKWARD, backward, test_utils=tests)


def test_an_exported_layer_has_its_number(device: str) -> None:
    layer = LinearBatchNorm1d(I, O, activation=("leaky_relu", 0.2), device=device).eval()
    x = batch(device, torch.float32)
    program = torch.export.export(layer, (x,))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), layer(x))


def test_errors_name_the_activation() -> None:
    for wrong in (("relu", 1), ("leaky_relu", "0.2"), ["elu", 1], "GELU"):
        for make in (
            lambda wrong=wrong: LinearBatchNorm1d(I, O, activation=wrong),
            lambda wrong=wrong: gsbn.torch.linear(torch.ones(2, 3), torch.ones(2, 3), None, wrong),
        ):
            with pytest.raises((TypeError, ValueError), match=r"^activation: expected"):
                make()
