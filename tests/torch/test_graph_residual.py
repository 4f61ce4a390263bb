"""torch.compile where a forward adds a residual to the output of a batch norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gsbn.torch import _operators as operators  # noqa: E402
from gsbn.torch import backend, inductor_options, linear_batch_norm  # noqa: E402
from gsbn.torch._graph import one_call  # noqa: E402
from tests.torch.layers import I, assert_same, batch, step  # noqa: E402
from tests.torch.test_graph_pass import Counting  # noqa: E402
from tests.torch.test_trace_residual import APART, JOINED, Block, O  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu", "fresh_dynamo")


def run_compiled(call: Any) -> list[tuple[Any, bool]]:
    """Compare three steps of a compiled model with plain PyTorch's.

    Return, for each call of gsbn in its graphs, the activation and whether it has a residual.
    """
    ours, counting = Block(call), Counting()
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(counting, cpu=True), fullgraph=True)
    for training in (True, True, False):
        ours.train(training), plain.train(training)
        assert_same(step(ours, batch(), run), step(plain, batch()))
    graphs = zip(counting.calls, counting.adds, strict=True)
    return [call for graph in graphs for call in zip(*graph, strict=True)]


@pytest.mark.parametrize("what", JOINED)
def test_the_call_adds_the_residual(what: str) -> None:
    call, expected = JOINED[what]
    assert run_compiled(call) == expected * 2


OTHERS = {
    "an activation whose gradient needs more than y": lambda m, x: functional.silu(m.bn(m.fc(x)) + m.other(x)),
    "a row": lambda m, x: functional.relu(m.bn(m.fc(x)) + m.other(x)[0]),
    "another dtype": lambda m, x: functional.relu(m.bn(m.fc(x)) + m.other(x).float()),
}


@pytest.mark.parametrize("what", [*APART, *OTHERS])
def test_an_addition_that_stays(what: str) -> None:
    # a Sequential is part of the graph, so here the second norm takes the addition
    joined = [("relu", True)] if what == "the norm of a shortcut" else []
    assert set(run_compiled({**APART, **OTHERS}[what])) == {(None, False), *joined}


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "the residual alone"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", ("leaky_relu", 0.2)])
def test_the_recorded_call(activation: Any, training: bool, frozen: bool) -> None:
    """Its gradients and those of its backward, which PyTorch's operators compute again."""
    x, r = batch()[:6], batch(shape=(6, O)).requires_grad_()
    weight, gamma, beta = torch.randn(O, I), torch.rand(O) + 0.5, torch.randn(O)
    given = [each.double().requires_grad_(not frozen) for each in (x, weight, gamma, beta)]
    mean, var = torch.zeros(O).double(), torch.ones(O).double()

    def call(x: Any, weight: Any, gamma: Any, beta: Any, r: Any) -> Any:
        return linear_batch_norm(
            x, weight, gamma=gamma, beta=beta, running_mean=mean.clone(), running_var=var.clone(), training=training,
            activation=activation, residual=r,
        )  # fmt: skip

    wanted = [*given, r] if not frozen else [r]
    eager = torch.autograd.grad(call(*given, r).sin().sum(), wanted)
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "forward_of", lambda *a, run=operators.forward_of: calls.append(a) or run(*a))
        run = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert_same(torch.autograd.grad(run(*given, r).sin().sum(), wanted), eager)
    assert [made[0][10] is not None for made in calls] == [True]
    with Watching():
        assert torch.autograd.gradcheck(call, (*given, r))
        assert frozen or torch.autograd.gradgradcheck(call, (*given, r))


class Watching(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """A mode that sees the operators; gsbn then records its call as one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_operators_keep_torchs_rules(device: str, dtype: str, activation: Any) -> None:
    x, weight, residual = (torch.randn(n, m, device=device, dtype=getattr(torch, dtype)) for n, m in
                           ((40, 6), (5, 6), (40, 5)))  # fmt: skip
    of_vectors = torch.float64 if dtype == "float64" else torch.float32
    mean, var = (torch.rand(5, device=device, dtype=of_vectors) + 0.5 for _ in range(2))
    arguments = (x, weight, None, None, None, None, mean, var, None, 1.0, 0.1, 1e-5, "highest", "auto", activation)
    arguments = (*arguments, None, None, None, None, 1, residual)
    for operator in (operators.INFER, operators.INFER_SAVED, operators.TRAIN):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(512, 256, 384), (300, 40, 24), (16384, 128, 256)])
@pytest.mark.parametrize("activation", ["relu", None])
def test_inductor_in_16_bits(activation: Any, rows: int, inputs: int, outputs: int, training: bool) -> None:
    """y is that of the eager call bit for bit; the gradients differ by roundings of dv, if at all."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs)

        def forward(self, x: Any, r: Any) -> Any:
            v = self.bn(self.fc(x)) + r
            return v if activation is None else v.relu()

    torch.manual_seed(0)
    model = Residual().to("cuda").train(training)
    model.fc.bfloat16()
    fc, bn = model.fc, model.bn
    x, r, dy = (torch.randn(rows, n, device="cuda").bfloat16() for n in (inputs, outputs, outputs))
    given = [x.requires_grad_(), r.requires_grad_(), *model.parameters()]
    state = bn.running_mean.clone(), bn.running_var.clone()
    y = linear_batch_norm(
        x, fc.weight, gamma=bn.weight, beta=bn.bias, running_mean=state[0], running_var=state[1], training=training,
        activation=activation, residual=r,
    )  # fmt: skip
    recorded: list[tuple[Any, bool]] = []

    def note(graph: Any) -> None:
        recorded.extend((node.args[8], len(node.args) > 9) for node in graph.nodes if node.target is one_call)

    options = inductor_options()
    run = torch.compile(model, fullgraph=True, options={**options, "pre_grad_custom_pass": Both(options, note)})
    found = run(x, r)
    assert recorded == [(activation, True)]
    assert found.equal(y)
    if training:
        assert bn.running_mean.equal(state[0]) and bn.running_var.equal(state[1])
    of_found, of_y = (torch.autograd.grad(each, given, dy) for each in (found, y))
    for a, b in zip(of_found, of_y, strict=True):
        assert float((a.double() - b.double()).norm()) <= 2.0**-8 * float(b.double().norm())  # a rounding of bfloat16


class Both:
    """gsbn's pass, and then a look at the graph."""

    def __init__(self, options: Any, note: Any) -> None:
        self.first, self.note = options["pre_grad_custom_pass"], note

    def __call__(self, graph: Any) -> None:
        self.first(graph)
        self.note(graph)

    def uuid(self) -> Any:
        return None
