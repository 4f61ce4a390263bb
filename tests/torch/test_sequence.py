"""Small layers of a converted nn.Sequential share an autograd node, and compute what they compute alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.autograd.graph import save_on_cpu  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gsbn.bench import _heads as heads  # noqa: E402
from gsbn.torch import BatchRenorm1d, GhostBatchNorm1d, convert  # noqa: E402
from gsbn.torch import _modules as modules  # noqa: E402
from gsbn.torch import _nodes as nodes  # noqa: E402
from tests.torch.layers import I as INPUTS  # noqa: E402
from tests.torch.layers import assert_replay_is_a_step, assert_same, batch  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")
NODE = "_SequenceBackward"


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape, dtype=torch.float64) + 0.5)

    def forward(self, x: Any) -> Any:
        return x * self.scale


def head(device: str = "cpu", dtype: Any = torch.float64, widths: tuple[int, ...] = (INPUTS, 12, 9, 5)) -> Any:
    """A converted model of three layers: with a bias, with a scale, and without an activation."""
    torch.manual_seed(0)
    a, b, c, d = widths
    after = nn.GELU() if device == "cpu" else nn.ReLU()  # a GPU would have to compile many kernels
    model = nn.Sequential(
        *(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()),
        *(nn.Linear(b, c, bias=False), Scale(c), nn.BatchNorm1d(c, momentum=None), after),
        *(nn.Linear(c, d, bias=False), nn.BatchNorm1d(d, affine=False)),
    ).to(device, dtype)
    assert len(convert(model, scales=(Scale,)).replaced) == 3
    return model


def alone(model: nn.Module) -> Callable[[Any], Any]:
    """The same, of a copy of the model, with a node or two for each layer."""
    theirs = copy.deepcopy(model)

    def run(x: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modules, "_layers", lambda *a: None)
            return theirs(x)

    run.model = theirs  # type: ignore[attr-defined]
    return run


def gradients(model: Any, y: Any, x: Any, **options: Any) -> list[Any]:
    leaves = [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad]
    return list(torch.autograd.grad(y, leaves, y.detach().cos(), **options))


def assert_alike(model: Any, x: Any, node: str = NODE, autocast: Any = None) -> None:
    """y, gradients and statistics are those of the layers alone, bit for bit."""
    theirs, found = alone(model), []
    for run, of in ((model, model), (theirs, theirs.model)):  # type: ignore[attr-defined]
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            y = run(x)
        assert run is theirs or y.grad_fn.name() == node
        found.append([y.detach(), *gradients(of, y, x), *of.buffers()])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("mode", ["training", "frozen", "one is frozen"])
def test_results_are_those_of_the_layers_alone(device: str, mode: str, needs_x: bool) -> None:
    model = head(device).train(mode != "frozen")
    model[5].train(mode == "training")
    assert_alike(model, batch(device).requires_grad_(needs_x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_layers_without_statistics(device: str, tracks: bool, training: bool) -> None:
    model = head(device)
    model[1] = nn.BatchNorm1d(12, track_running_stats=tracks, device=device, dtype=torch.float64)
    if tracks:  # PyTorch then counts the batch
        model[1].running_mean = model[1].running_var = None
    assert_alike(model.train(training), batch(device).requires_grad_())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 48, 600, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, "autocast"], ids=str)
def test_results_on_a_gpu(dtype: Any, rows: int) -> None:
    autocast = torch.bfloat16 if dtype == "autocast" else None
    of_x = torch.float32 if autocast else dtype
    for widths in ((72, 128, 64, 40), (1024, 512, 264, 512)):
        model = head("cuda", of_x, widths if rows < 10000 else (72, 128, 64, 40))
        x = batch("cuda", of_x, (rows, model[0].in_features)).requires_grad_()
        assert_alike(model, x, autocast=autocast)


def drawn(seed: int) -> Any:
    """A model of two to five layers of all kinds, some of them frozen in part; another module may stand between."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    widths = [INPUTS, *(draw.randint(1, 9) for _ in range(draw.randint(2, 5)))]
    norms: tuple[Callable[[int], nn.Module], ...] = (
        nn.BatchNorm1d,
        lambda n: nn.BatchNorm1d(n, momentum=None, affine=False),
        lambda n: nn.BatchNorm1d(n, track_running_stats=draw.random() < 0.8),
        lambda n: GhostBatchNorm1d(n, 2),
        lambda n: BatchRenorm1d(n, (1.5, 0.5)),
    )
    model = nn.Sequential()
    for a, b in pairwise(widths):
        model.append(nn.Linear(a, b, bias=draw.random() < 0.5))
        if draw.random() < 0.3:
            model.append(Scale(draw.choice((b, 1))))
        model.append(draw.choice(norms)(b).train(draw.random() < 0.85))
        model.append(draw.choice((nn.SiLU, nn.ELU, nn.Identity, nn.Sigmoid))())  # ReLU's kink would decide by roundings
    for parameter in model.double().parameters():
        parameter.requires_grad_(draw.random() < 0.9)
    return model


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), rows=st.sampled_from([8, 14, 20]), needs_x=st.booleans())
def test_any_model_computes_what_pytorchs_modules_do(seed: int, rows: int, needs_x: bool) -> None:
    plain, found = drawn(seed), []
    model = copy.deepcopy(plain)
    convert(model, scales=(Scale,))
    for each in (model, plain):
        x = batch(shape=(rows, INPUTS)).requires_grad_(needs_x)
        for _ in range(2):
            y = each(x)
        leaves = [leaf for leaf in (x, *each.parameters()) if leaf.requires_grad and y.requires_grad]
        of = torch.autograd.grad(y, leaves, y.detach().cos(), allow_unused=True) if leaves else ()
        zero = [
            torch.zeros_like(leaf) if of_leaf is None else of_leaf for leaf, of_leaf in zip(leaves, of, strict=True)
        ]
        found.append([y.detach(), *zero, *each.buffers()])
    assert_same(*found, close=1e-7)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda n: BatchRenorm1d(n, (1.5, 0.5))], ids=["batch", "renorm"])
def test_against_pytorchs_own_modules(device: str, norm: Any) -> None:
    layers = [(nn.Linear(INPUTS if i == 0 else 8, 8), norm(8), nn.SiLU()) for i in range(4)]
    model = nn.Sequential(*[module for layer in layers for module in layer]).to(device).double()
    plain = copy.deepcopy(model)
    convert(model)
    found = []
    for each in (model, plain):
        x = batch(device).requires_grad_()
        for _ in range(2):
            y = each(x)
        found.append([y.detach(), *gradients(each, y, x), *each.buffers()])
    assert_same(*found)


def test_gradients_of_some_arguments(device: str) -> None:
    """Frozen vectors get none; a backward for later layers alone ends there."""
    model, x = head(device), batch(device).requires_grad_()
    for parameter in (model[1].weight, model[4].scale, model[0].bias):
        parameter.requires_grad_(False)
    assert_alike(model, x)
    y = model(x)
    every = dict(zip([x, *filter(lambda p: p.requires_grad, model.parameters())], gradients(model, y, x), strict=True))
    for some in ([x], [model[7].weight], [model[5].weight, model[3].weight], [model[1].bias]):
        found = torch.autograd.grad(model(x), some, y.detach().cos())
        for leaf, gradient in zip(some, found, strict=True):
            torch.testing.assert_close(gradient, every[leaf], rtol=1e-9, atol=1e-12)


def test_a_graph_that_is_kept(device: str) -> None:
    model, x = head(device), batch(device).requires_grad_()
    y = model(x)
    first = gradients(model, y, x, retain_graph=True)
    kept = list(y.grad_fn.layers)
    second = gradients(model, y, x)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert None not in kept and y.grad_fn.layers == [None] * 3  # what the layers held is free
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(model, y, x)


def test_a_changed_weight_is_an_error(device: str) -> None:
    model, x = head(device), batch(device).requires_grad_()
    y = model(x)
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives(device: str) -> None:
    """Against finite differences, and batched gradients."""
    model, x = head(device), batch(device, shape=(9, INPUTS)).requires_grad_()
    model[2], model[6] = nn.SiLU(), nn.SiLU()  # without a kink
    model[5].momentum = 0.1
    names, values = zip(*model.named_parameters(), strict=True)
    for training in (True, False):
        model.train(training)
        assert model(x).grad_fn.name() == NODE

        def run(x: Any, *values: Any) -> Any:
            for name, value in zip(names, values, strict=True):
                owner, _, parameter = name.rpartition(".")
                model.get_submodule(owner)._parameters[parameter] = value
            return model(x)

        leaves = [x, *(value.detach().clone().requires_grad_() for value in values)]
        of_some = lambda x, w, *rest, leaves=leaves: run(x, w, *leaves[2:])  # noqa: E731
        assert torch.autograd.gradcheck(run, leaves, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(of_some, leaves[:2], check_batched_grad=True)


def test_a_gradient_penalty(device: str) -> None:
    model = head(device)
    theirs, found = alone(model), []
    for run, of in ((model, model), (theirs, theirs.model)):  # type: ignore[attr-defined]
        x = batch(device).requires_grad_()
        y = run(x)
        (of_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        loss = y.mean() + (of_x.norm(dim=1) - 1).square().mean()
        found.append([of_x.detach(), *torch.autograd.grad(loss, [x, *of.parameters()])])
    assert_same(*found, close=1e-8)


def test_a_layer_twice(device: str) -> None:
    """One Linear in two rows has the sum of both gradients."""
    torch.manual_seed(0)
    linear = nn.Linear(INPUTS, INPUTS)
    model = nn.Sequential(linear, nn.BatchNorm1d(INPUTS), nn.ReLU(), linear, nn.BatchNorm1d(INPUTS)).to(device).double()
    convert(model)
    assert_alike(model, batch(device).requires_grad_())


def nodes_of(*ys: Any) -> list[str]:
    """The names of gsbn's nodes in autograd's graph of these outputs."""
    found, names = [y.grad_fn for y in ys if y.grad_fn is not None], {}
    while found:
        node = found.pop()
        if node not in names:
            names[node] = node.name()
            found += [each for each, _ in node.next_functions if each is not None]
    return sorted(name for name in names.values() if name in (NODE, "_WholeBackward"))


class Branches(nn.Module):
    """Of three layers, the first two stand in sequence; a call stands between the others."""

    def __init__(self, uses_twice: bool) -> None:
        super().__init__()
        self.uses_twice = uses_twice
        self.linears = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(INPUTS) for _ in range(3))

    def forward(self, x: Any) -> Any:
        first = self.norms[0](self.linears[0](x)).relu()
        second = self.norms[1](self.linears[1](first))
        third = self.norms[2](self.linears[2](second.sin())).relu()
        return third + first if self.uses_twice else third


@pytest.mark.parametrize(
    ("make", "sequences", "single"),
    [
        (lambda: heads.SimSiam(INPUTS, 6, 5, 4), 2, 2),  # z has a second use, so the predictor is apart
        (lambda: heads.BarlowTwins(INPUTS, 6, 5), 2, 0),
        (lambda: heads.Critic(INPUTS, 2, 6, 5), 1, 0),
        (lambda: Branches(False), 1, 1),
        (lambda: Branches(True), 0, 3),
    ],
    ids=["SimSiam", "Barlow Twins", "Critic", "a call between", "two uses"],
)
def test_a_traced_forward(make: Any, sequences: int, single: int) -> None:
    torch.manual_seed(0)
    model = make().double()
    inputs = (batch(),) if isinstance(model, Branches) else model.batch(20, dtype=torch.float64)
    plain, found = copy.deepcopy(model), []
    convert(model, trace=True)
    for each in (model, plain):
        made = each(*inputs)
        ys = [y for y in (made if isinstance(made, tuple) else (made,)) if y.requires_grad]
        if each is model:
            assert nodes_of(*ys) == [NODE] * sequences + ["_WholeBackward"] * single
        dys = [y.detach().cos() for y in ys]
        found.append([*map(torch.Tensor.detach, ys), *torch.autograd.grad(ys, list(each.parameters()), dys)])
        found[-1] += each.buffers()
    assert_same(*found, close=1e-9)


@pytest.mark.parametrize("autocast", [False, True])
def test_wide_weights_do_not_share_a_node(device: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node would make all their gradients before any is added up."""
    model, x = head(device, torch.float32), batch(device, torch.float32).requires_grad_()
    assert [model[at].weight.numel() for at in (0, 3, 7)] == [84, 108, 45]
    for most, found in ((44, ["_WholeBackward"] * 3), (84, [NODE, "_WholeBackward"]), (129, [NODE])):
        monkeypatch.setattr(nodes, "_MOST", -(-most // 4) if autocast else most)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            assert nodes_of(model(x)) == found
    monkeypatch.setattr(nodes, "_MOST", 84)
    assert_alike(model, x, "_WholeBackward")


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("why", ["frozen", "hook", "modes", "saved tensors", "checkpoint"])
def test_layers_that_stay_alone(device: str, why: str) -> None:
    """Whoever shall see the layers one by one does."""
    model, x = head(device), batch(device).requires_grad_()
    seen: list[Any] = []
    context: Any = torch.enable_grad()
    call: Any = model
    if why == "frozen":
        model[3].weight.requires_grad_(False)
    elif why == "hook":
        model[3].register_forward_hook(lambda module, given, made: seen.append(made))
    elif why == "modes":
        context = Operators()
    elif why == "saved tensors":
        context = save_on_cpu()
    else:
        call = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    theirs = alone(model)
    with context:
        y = call(x)
    assert y.grad_fn.name() != NODE and (why != "hook" or len(seen) == 1)
    wanted = theirs(x)
    of_wanted = gradients(theirs.model, wanted, x)  # type: ignore[attr-defined]
    assert_same([y.detach(), *gradients(model, y, x)], [wanted.detach(), *of_wanted])
    with torch.no_grad():
        assert model(x).grad_fn is None


def test_an_error_of_a_later_layer(device: str) -> None:
    model = head(device)
    model[3] = nn.Linear(11, 9, device=device, dtype=torch.float64)
    for run in (model, alone(model)):
        with pytest.raises(ValueError, match=r"^weight: expected .*12"):
            run(batch(device))


# ---- on a GPU


@pytest.mark.gpu
def test_a_large_layer_has_nodes_of_its_own() -> None:
    """The layers before it still share one."""
    model = head("cuda", torch.float32, (512, 256, 128, 264))
    few, many = torch.randn(600, 512, device="cuda"), torch.randn(32000, 512, device="cuda")
    assert nodes_of(model(few)) == [NODE]
    y = model(many)
    assert y.grad_fn.name() == "_NormBackward" and nodes_of(y) == [NODE]


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_peak_memory_is_that_of_the_layers_alone(autocast: bool) -> None:
    """The node frees what lies between the layers as a backward goes on."""
    layers = [(nn.Linear(256, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*[module for layer in layers for module in layer]).cuda()
    convert(model)
    theirs, peaks = alone(model), []
    x = torch.randn(8000, 256, device="cuda")
    for run, of in ((model, model), (theirs, theirs.model)):  # type: ignore[attr-defined]
        for _ in range(2):
            of.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                y = run(x)
            loss = y.float().sum()
            del y
            loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
            del loss
        peaks.append(peak)
    assert peaks[0] <= 1.02 * peaks[1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 512])
def test_two_views_share_the_gradient_of_each_weight(rows: int) -> None:
    model = head("cuda", torch.float32, (512, 512, 512, 256))
    xs = [torch.randn(rows, 512, device="cuda") for _ in range(2)]
    theirs, found = alone(model), []
    for run, of in ((model, model), (theirs, theirs.model)):  # type: ignore[attr-defined]
        with torch.autocast("cuda", torch.bfloat16):
            ys = [run(x) for x in xs]
        found.append(torch.autograd.grad(ys, list(of.parameters()), [y.detach().cos() for y in ys]))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    model = head("cuda", torch.float32, (256, 512, 264, 128))
    model[5].momentum = 0.1
    x = torch.randn(600, 256, device="cuda", requires_grad=True)

    def step() -> list[Any]:
        y = model(x)
        return [y.detach(), *gradients(model, y, x)]

    assert_replay_is_a_step(step)
