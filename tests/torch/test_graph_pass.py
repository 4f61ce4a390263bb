"""gsbn in the graphs of torch.compile, and convert(trace=True): models whose own forward calls the modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gsbn.torch import backend, convert, inductor_options, revert  # noqa: E402
from gsbn.torch._graph import one_call  # noqa: E402
from tests.torch import heads  # noqa: E402
from tests.torch.layers import assert_same, batch, step  # noqa: E402
from tests.torch.models import I, Scale  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Calls of gsbn in a graph, all calls of batch_norm, and the rows that convert(trace=True) names
HEADS: dict[str, tuple[Callable[[], Any], int, int, int]] = {
    "PyTorch Geometric": (heads.GraphMLP, 2, 2, 2),
    "scvi-tools": (heads.FCLayers, 2, 2, 0),
    "PointNet++": (heads.PointClassifier, 2, 2, 2),
    "CrossQ": (heads.Critic, 2, 3, 2),
    "SimSiam": (heads.SimSiam, 8, 8, 4),  # each layer is called for two views
    "Barlow Twins": (heads.BarlowTwins, 6, 6, 3),
}


def made(name: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return HEADS[name][0]().to(device, torch.float64)


class Counting:
    """A backend behind gsbn's: of each graph, the activations of the calls of gsbn, whether they add a residual, the
    layouts that they must give y of a convolution, and the number of calls of batch_norm that are left."""

    def __init__(self, other: str = "aot_eager") -> None:
        self.other, self.calls, self.adds, self.layouts, self.left = other, [], [], [], []

    def __call__(self, module: Any, inputs: Any) -> Any:
        targets = [node.target for node in module.graph.nodes]
        ours = [node for node in module.graph.nodes if node.target is one_call]
        self.calls.append([node.args[8] for node in ours])
        self.adds.append([len(node.args) > 9 for node in ours])
        self.layouts.append([node.kwargs.get("layout") for node in ours])
        self.left.append(sum(target in (functional.batch_norm, torch.batch_norm) for target in targets))
        return torch._dynamo.lookup_backend(self.other)(module, inputs)


def curve(model: Any, run: Any = None, device: str = "cpu") -> list[Any]:
    """The losses of four steps of SGD, the output of inference after them, and the state."""
    forward, model.forward = model.forward, model.forward if run is None else run
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for seed in range(4):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = model.train().loss(*(x.to(device) for x in model.batch(seed)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(model.eval().loss(*(x.to(device) for x in model.batch(9))))
    model.forward = forward
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("other", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", HEADS)
def test_loss_curves(device: str, name: str, other: str) -> None:
    """float64, so 1e-10 of rounding after five calls is as in the tests of convert."""
    ours, plain, counting = made(name, device), made(name, device), Counting(other)
    run = torch.compile(ours.forward, backend=backend(counting, cpu=True), fullgraph=True)
    assert_same(curve(ours, run, device), curve(plain, None, device))
    replaced, total = HEADS[name][1:3]
    assert [len(calls) for calls in counting.calls] == [replaced] * 2, "one graph for training, one for inference"
    assert counting.left == [total - replaced] * 2
    assert "relu" in counting.calls[0] and set(counting.calls[0]) <= {"relu", None}


@pytest.mark.usefixtures("fused_on_a_cpu")
@pytest.mark.parametrize("name", HEADS)
def test_loss_curves_traced(device: str, name: str) -> None:
    ours, plain = made(name, device), made(name, device)
    state = list(ours.state_dict())
    report = convert(ours, trace=True)
    assert len(report.replaced) == HEADS[name][3] == len(convert(ours, trace=True).replaced)
    assert list(ours.state_dict()) == state
    assert_same(curve(ours, type(ours).forward.__get__(ours), device), curve(plain, None, device))
    inputs = [x.to(device) for x in ours.batch(0)]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same([other.loss(*inputs)], [plain.loss(*inputs)])
    revert(ours)
    assert type(ours) is type(plain)


def test_a_sequential_that_is_never_called_is_left() -> None:
    ours = made("scvi-tools")
    report = convert(ours, trace=True)
    assert [left.why for left in report.left] == ["a forward calls the modules of its nn.Sequential one by one"] * 2
    assert type(ours.fc_layers[0]) is nn.Sequential


class Two(nn.Module):
    """Functions of a model that the tests below name."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.call = call
        self.fc, self.bn, self.other = nn.Linear(I, 6), nn.BatchNorm1d(6), nn.Linear(I, 6)
        self.tracked, self.free = nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(6, affine=False)
        self.sized, self.leaky, self.times = nn.BatchNorm1d(4), nn.LeakyReLU(), Scale(6)
        self.factor = nn.Parameter(torch.rand(6) + 0.5)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


def by_function(m: Any, x: Any) -> Any:
    state = m.bn.running_mean, m.bn.running_var
    z = functional.linear(input=x, weight=m.fc.weight, bias=m.fc.bias)
    y = functional.relu(functional.batch_norm(z, *state, m.bn.weight, m.bn.bias, m.training, 0.3, eps=1e-3))
    z = functional.linear(y @ m.other.weight, m.other.weight)
    return torch.batch_norm(z, m.bn.weight, m.bn.bias, *state, m.training, 0.2, 1e-4, True)


def written_between(m: Any, x: Any) -> Any:
    with torch.no_grad():  # the gradient would be autograd's error
        other = x * 1
        z = m.fc(other)
        other.zero_()
        y = m.bn(z)
    return y + m.fc(x)


def through_a_view(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x).view(-1, 6))


# What a forward calls, and the activations of the calls of gsbn in its graph
CALLS: dict[str, tuple[Callable[[Any, Any], Any], list[Any]]] = {
    "functions": (by_function, ["relu", None]),
    "methods": (lambda m, x: m.bn(m.fc(x)).relu_(), ["relu"]),
    "a module for the scale": (lambda m, x: m.bn(m.times(m.fc(x))), [None]),
    "scales": (lambda m, x: m.bn(m.fc(x) * m.factor) + m.bn(m.factor * m.fc(x)) + m.bn(m.fc(x).mul(2)), [None] * 3),
    "a module called twice": (lambda m, x: m.bn(m.fc(x)).relu() + m.bn(m.fc(2 * x)), ["relu", None]),
    "two towers": (lambda m, x: sum(map(m.bn, (m.fc(x), m.other(x)))), [None] * 2),
    "another activation": (lambda m, x: m.leaky(m.bn(m.fc(x))), [("leaky_relu", 0.01)]),
    "another user of y": (lambda m, x: (lambda y: y.relu() + y)(m.bn(m.fc(x))), [None]),
    "a constant that is a matrix": (lambda m, x: m.bn(m.fc(x) * torch.ones_like(m.fc(x))), []),
    "another user of the intermediate result": (lambda m, x: (lambda z: m.bn(z) + z)(m.fc(x)), []),
    "another user of the scaled result": (lambda m, x: (lambda z: m.bn(z) + z)(m.fc(x) * m.factor), []),
    "x is written before the norm": (written_between, []),
    "something between": (lambda m, x: m.bn(m.fc(x).tanh()), []),
    "a view between": (through_a_view, []),
    "no running statistics": (lambda m, x: m.tracked(m.fc(x)), [None]),
    "no weight": (lambda m, x: m.free(m.fc(x)).relu(), ["relu"]),
    "three dimensions": (lambda m, x: m.sized(m.fc(x.view(-1, 4, I))), []),
    "no linear": (lambda m, x: m.bn(x[:, :6]), []),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_is_replaced(device: str, what: str) -> None:
    call, expected = CALLS[what]
    torch.manual_seed(0)
    ours, counting = Two(call).to(device), Counting()
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(counting, cpu=True), fullgraph=True)
    for training in (True, True, False):
        ours.train(training), plain.train(training)
        found, wanted = ours_and_plain(ours, plain, run, batch(device))
        assert_same(found, wanted)
    assert counting.calls == [expected] * 2


def ours_and_plain(ours: Any, plain: Any, run: Any, x: Any, of_plain: Any = None) -> tuple[list[Any], list[Any]]:
    """What `step` gives of both, with zeros for gradients that there are none of."""
    both = [step(ours, x, run), step(plain, x, of_plain)]
    assert [value is None for value in both[0]] == [value is None for value in both[1]]
    found, wanted = ([torch.zeros(()) if value is None else value for value in values] for values in both)
    return found, wanted


def test_cpu_tensors_are_left_to_pytorch() -> None:
    counting = Counting()
    torch.compile(Two(CALLS["methods"][0]), backend=backend(counting))(batch())
    assert (counting.calls, counting.left) == ([[]], [1])


def test_any_number_of_rows(device: str) -> None:
    ours, counting = Two(CALLS["functions"][0]).to(device), Counting()
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(counting, cpu=True), fullgraph=True)
    for rows in (80, 100, 133):  # an operator has another result for few rows
        x = batch(device, shape=(rows, I))
        torch._dynamo.mark_dynamic(x, 0)
        assert_same([run(x), *ours.buffers()], [plain(x), *plain.buffers()])
    assert counting.calls == [["relu", None]]


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(device: str, inside: bool) -> None:
    """Autocast around the call or in the forward; with a scale PyTorch continues in float32, so it is left."""

    def call(m: Any, x: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=inside or torch.is_autocast_enabled(device)):
            return m.bn(m.fc(x)).relu(), m.bn(m.fc(x) * m.factor)

    ours, counting = Two(call).to(device, torch.float32), Counting()
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(counting, cpu=True), fullgraph=True)
    x = batch(device, torch.float32, (64, I))
    with torch.autocast(device, torch.bfloat16, enabled=not inside):
        found, wanted = run(x), plain(x)
    assert [y.dtype for y in found] == [y.dtype for y in wanted] == [torch.bfloat16, torch.float32]
    assert counting.calls == [["relu"]] and counting.left == [1]
    assert_same(
        [y.float() for y in found], [y.float() for y in wanted], 2e-2
    )  # as test_compile's, of two 16-bit roundings
    for model, (y, z) in ((ours, found), (plain, wanted)):
        (y.float() * z).sum().backward()
        assert model.fc.weight.grad.dtype is torch.float32


def test_checkpointing(device: str) -> None:
    """As compiled without gsbn: the recomputation does not update the statistics again."""

    def call(m: Any, x: Any) -> Any:
        return checkpoint(lambda x: m.bn(m.fc(x)).relu(), x, use_reentrant=False)

    torch.manual_seed(0)
    ours, counting = Two(call).to(device), Counting()
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(counting, cpu=True), fullgraph=True)
    of_plain = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert_same(*ours_and_plain(ours, plain, run, batch(device), of_plain))
    assert ours.bn.num_batches_tracked == 1


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_transforms_are_left_to_pytorch(transform: Any) -> None:
    model, counting = Two(CALLS["methods"][0]).eval(), Counting()
    x = batch(shape=(3, 9, I))
    x = x if transform is torch.func.vmap else x[0]
    run = torch.compile(transform(lambda x: model(x)), backend=backend(counting, cpu=True))
    assert_same([run(x)], [transform(model)(x)])
    assert counting.calls == [[]]


def test_the_cumulative_average_breaks_the_graph_as_without_gsbn() -> None:
    ours = Two(CALLS["methods"][0])
    ours.bn.momentum = None
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend("aot_eager", cpu=True))
    for i in range(3):
        assert_same([run(batch() + i), *ours.buffers()], [plain(batch() + i), *plain.buffers()])


def test_inductor_with_options_of_the_users_own(device: str) -> None:
    seen: list[int] = []

    def own(graph: Any) -> None:
        seen.append(sum(node.target is functional.batch_norm for node in graph.nodes))

    options = inductor_options({"pre_grad_custom_pass": own, "epilogue_fusion": False}, cpu=True)
    assert options["epilogue_fusion"] is False
    ours = made("PointNet++", device).eval()
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, options=options, fullgraph=True)
    x = ours.batch(0)[0].to(device)
    assert_same([run(x)], [plain(x)])
    assert seen == [2], "the user's pass sees PyTorch's calls"


def test_options() -> None:
    reduce = inductor_options(mode="reduce-overhead")
    assert reduce["triton.cudagraphs"] is True
    assert reduce == inductor_options(mode="reduce-overhead"), "equal options compile once"
    assert reduce != inductor_options(mode="reduce-overhead", precision="high")
    ours = reduce["pre_grad_custom_pass"]
    assert ours.uuid() != inductor_options(precision="high")["pre_grad_custom_pass"].uuid()
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert inductor_options({"pre_grad_custom_pass": print})["pre_grad_custom_pass"].uuid() is None
    assert backend() == backend("inductor") != backend("eager")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_mode_with_the_backend(device: str, mode: str) -> None:
    ours = made("PyTorch Geometric", device)
    for module in ours.modules():
        module.training = isinstance(module, nn.BatchNorm1d)  # no dropout, whose numbers Inductor draws otherwise
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(cpu=True), mode=mode, fullgraph=True)
    for seed in range(3):
        x = ours.batch(seed)[0].to(device)
        assert_same([run(x).clone(), *ours.buffers()], [plain(x), *plain.buffers()])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: inductor_options(1), TypeError, "options: expected a dict or None, got 1"),
        (lambda: inductor_options(precision="low"), ValueError, "precision: expected one of"),
        (lambda: inductor_options(mode="none"), RuntimeError, "Unrecognized mode=none"),
        (lambda: backend(1), TypeError, "other: expected the name of a backend or a callable, got 1"),
        (lambda: backend("none"), torch._dynamo.exc.InvalidBackend, "none"),
        (lambda: backend(precision="low"), ValueError, "precision: expected one of"),
    ],
)
def test_errors(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def no_grad(m: Any, x: Any) -> Any:
    with torch.no_grad():
        return m.bn(m.fc(x))


def with_grad(m: Any, x: Any) -> Any:
    with torch.enable_grad():  # as it is where `convert` traces
        return m.bn(m.fc(x))


def in_full_precision(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return m.bn(m.fc(x))


def by_grad_mode(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x) if torch.is_grad_enabled() else m.fc(x) + 0)


def checkpointed(m: Any, x: Any) -> Any:
    return checkpoint(lambda z: m.bn(m.fc(z)), x, use_reentrant=False)


def counts(m: Any, x: Any) -> Any:
    m.count = getattr(m, "count", 0) + 1
    return m.bn(m.fc(x))


def of_a_child(m: Any, x: Any) -> Any:
    m.bn.momentum = 0.5
    return m.bn(m.fc(x))


UNTRACED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "grad mode": (no_grad, "it changes the grad mode, autocast or"),
    "grad mode as it is": (with_grad, "it changes the grad mode, autocast or"),
    "autocast off": (in_full_precision, "it changes the grad mode, autocast or"),
    "checkpoint": (checkpointed, "it changes the grad mode, autocast or what autograd saves"),
    "asks the grad mode": (by_grad_mode, "it depends on the grad mode"),
    "attributes": (counts, "sets attributes"),
    "attributes of a child": (of_a_child, "sets attributes"),
    "control flow": (lambda m, x: m.bn(m.fc(x)) if x.sum() > 0 else x, "the forward of Two, torch.compile may"),
    "another user": (lambda m, x: (lambda z: m.bn(z) + z)(m.fc(x)), "that nothing else uses"),
    "a factor": (lambda m, x: m.bn(m.fc(x) * 2), "a factor that is not a parameter"),
}


@pytest.mark.usefixtures("fused_on_a_cpu")
@pytest.mark.parametrize("what", UNTRACED)
def test_what_a_trace_leaves(calls: list[Any], what: str) -> None:
    call, why = UNTRACED[what]
    ours = Two(call)
    plain = copy.deepcopy(ours)
    report = convert(ours, trace=True)
    assert not report.replaced and why in dict(report.left)["bn"] and type(ours) is Two
    assert vars(ours).keys() == vars(plain).keys()
    assert_same([ours(batch())], [plain(batch())])
    assert calls == []


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_a_trace_writes_in_place_where_the_forward_does(calls: list[Any]) -> None:
    """Another name of the same tensor sees it."""

    def forward(m: Any, x: Any) -> Any:
        y = m.bn(m.fc(x))
        other = y
        y += 1
        y *= 2
        return y + other

    ours = Two(forward)
    plain = copy.deepcopy(ours)
    assert len(convert(ours, trace=True).replaced) == 1
    assert_same(step(ours, batch()), step(plain, batch()))
    assert calls == [None]


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_a_traced_module_follows_its_modules_and_arguments(calls: list[Any]) -> None:
    ours, plain = made("PyTorch Geometric").eval(), made("PyTorch Geometric").eval()
    convert(ours, trace=True)
    assert "one call of gsbn: lins.0 + norms.0 + act" in repr(ours)
    x = ours.batch(0)[0]
    y, emb = ours(x, return_emb=True)
    assert emb is not None and y.equal(plain(x)) and calls == [], "a call that was not traced runs the forward itself"
    hook = ours.norms[0].register_forward_hook(lambda *_: None)
    assert_same([ours(x)], [plain(x)])
    assert calls == ["relu"]
    hook.remove()
    assert_same([torch.compile(ours, fullgraph=True, backend="aot_eager")(x)], [plain(x)])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", HEADS)
def test_training_by_inductor_on_a_gpu(name: str, mode: str | None) -> None:
    """Without dropout, whose numbers Inductor draws in its own way."""
    ours, plain = made(name, "cuda"), made(name, "cuda")
    functions = [ours, plain]
    for model in functions:
        for module in model.modules():
            module.training = isinstance(module, nn.BatchNorm1d)
    run = torch.compile(ours.forward, options=inductor_options(mode=mode), fullgraph=True)
    ours.forward = run
    for seed in range(5):
        found = []
        for model in functions:
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            loss = model.loss(*(x.cuda() for x in model.batch(seed)))
            loss.backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            found.append([loss.detach().clone(), *gradients, *(b.clone() for b in model.buffers())])
        assert_same(*found)
