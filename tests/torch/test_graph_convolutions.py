"""gsbn in the graphs of torch.compile where a forward calls 1x1 convolutions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gsbn.torch import _graph, backend, convert, inductor_options  # noqa: E402
from tests.torch.layers import assert_same, batch, channels_adjacent, step  # noqa: E402
from tests.torch.test_graph_pass import Counting, ours_and_plain  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

C, O = 7, 6
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last


class Points(nn.Module):
    """PointNet++'s set abstraction: convolutions over the neighbours of each point, then the greatest of them."""

    def __init__(self, widths: tuple[int, ...] = (C, 8, O)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 1) for pair in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(features) for _, features in pairs)

    def forward(self, x: Any) -> Any:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return torch.max(x, 2)[0]


class Cloud(nn.Module):
    """PointNet's features of a cloud of points, (N, L, C)."""

    def __init__(self, widths: tuple[int, ...] = (C, 8, O)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.convs = nn.ModuleList(nn.Conv1d(*pair, 1, bias=False) for pair in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(features) for _, features in pairs)

    def forward(self, points: Any) -> Any:
        x = points.transpose(2, 1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.leaky_relu(norm(conv(x)), 0.2)
        return torch.max(x, 2, keepdim=True)[0].view(x.shape[0], -1)


# The model, and x: (N, C, H, W) and (N, L, C)
MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any]] = {
    "images": (Points, (3, C, 4, 5), CONTIGUOUS),
    "channels last": (Points, (3, C, 4, 5), LAST),
    "points": (Cloud, (3, 20, C), CONTIGUOUS),
}  # fmt: skip


@pytest.mark.parametrize("other", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("what", MODELS)
def test_models(device: str, what: str, other: str) -> None:
    make, shape, layout = MODELS[what]
    ours, counting = make().double().to(device), Counting(other)
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(counting, cpu=True), fullgraph=True)
    x = batch(device, shape=shape).contiguous(memory_format=layout)
    for training in (True, True, False):
        ours.train(training), plain.train(training)
        found, wanted = step(ours, x, run), step(plain, x)
        assert_same(found, wanted)
        assert found[0].stride() == wanted[0].stride()
    activation = "relu" if make is Points else ("leaky_relu", 0.2)
    assert counting.calls == [[activation] * 2] * 2 and counting.left == [0, 0]
    layout = layout if device == "cpu" else CONTIGUOUS  # cuDNN's float64 knows no other
    assert counting.layouts == [[layout] * 2] * 2


class Net(nn.Module):
    """Functions of a model that the tests below name. x is in rows, so gsbn computes what is replaced."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.call = call
        self.conv, self.bn = nn.Conv1d(C, O, 1), nn.BatchNorm1d(O)
        self.other, self.free = nn.Conv1d(C, O, 1, bias=False), nn.BatchNorm1d(O, affine=False, momentum=0.3)
        self.tracked = nn.BatchNorm1d(O, track_running_stats=False)
        self.again, self.wide = nn.Conv1d(O, O, 1), nn.Conv1d(C, O, 3, padding=1)
        self.grouped = nn.Conv1d(C, C, 1, groups=C)
        self.of_groups, self.of_points = nn.BatchNorm1d(C), nn.BatchNorm1d(20)
        self.factor = nn.Parameter(torch.rand(()) + 0.5)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.call(self, x.transpose(1, 2))


def by_function(m: Any, x: Any) -> Any:
    z = functional.conv1d(weight=m.conv.weight, bias=m.conv.bias, input=x, padding="same", dilation=3)
    z = functional.batch_norm(z, m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias, m.training, 0.3, eps=1e-3)
    return functional.elu(z, 0.5).amax(dim=-1)


def two_branches(m: Any, x: Any) -> Any:
    y = m.bn(m.conv(x)).relu()
    return m.free(m.again(y)).mean(2), m.tracked(m.again(y)).sum(dim=[2])


# What a forward calls, and the activations of the calls of gsbn in its graph
CALLS: dict[str, tuple[Callable[[Any, Any], Any], list[Any]]] = {
    "modules": (lambda m, x: m.bn(m.conv(x)).relu(), ["relu"]),
    "functions": (by_function, [("elu", 0.5)]),
    "a view after it": (lambda m, x: m.bn(m.conv(x)).view(-1), [None]),
    "a pooling over samples": (lambda m, x: m.bn(m.conv(x)).mean(0).view(-1), [None]),
    "a maximum of two": (lambda m, x: torch.max(m.bn(m.conv(x)), m.free(m.other(x))).view(-1), [None] * 2),
    "two branches": (two_branches, ["relu", None, None]),
    "a residual": (lambda m, x: functional.relu(m.bn(m.conv(x)) + m.other(x)).view(-1), ["relu"]),
    "a residual in rows": (lambda m, x: (lambda r: functional.relu(m.bn(m.conv(x)) + r))(channels_adjacent(m.other(x))),
                           ["relu"]),
    "no statistics": (lambda m, x: m.tracked(m.other(x)), [None]),
    "a scale": (lambda m, x: m.bn(m.conv(x) * m.factor), []),
    "a kernel": (lambda m, x: m.bn(m.wide(x)), []),
    "groups": (lambda m, x: m.of_groups(m.grouped(x)), []),
    "a stride": (lambda m, x: m.bn(functional.conv1d(x, m.conv.weight, stride=2)), []),
    "a padding": (lambda m, x: m.bn(functional.conv1d(x, m.conv.weight, m.conv.bias, 1, 2)), []),
    "a sample without N": (lambda m, x: m.of_points(m.conv(x[0])), []),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_what_is_replaced(device: str, what: str) -> None:
    """x is in rows. Without a compiler gsbn computes all that is replaced, and y still has PyTorch's layout."""
    call, expected = CALLS[what]
    torch.manual_seed(0)
    ours, counting = Net(lambda m, x: flat(call(m, x))).to(device), Counting("eager")
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(counting, cpu=True), fullgraph=True)
    for training in (True, True, False):
        ours.train(training), plain.train(training)
        assert_same(*ours_and_plain(ours, plain, run, batch(device, shape=(3, 20, C))))
    if device == "cuda" and "residual" in what:  # in float64 PyTorch's operators add it
        expected = [None]
    assert counting.calls == [expected] * 2 and counting.layouts == [[CONTIGUOUS] * len(expected)] * 2


def flat(y: Any) -> Any:
    return torch.cat([each.reshape(-1) for each in y]) if isinstance(y, tuple) else y


@pytest.mark.parametrize("what", ["channels last", "points"])
def test_any_sizes(device: str, what: str) -> None:
    make, shape, layout = MODELS[what]
    ours, counting = make().double().to(device), Counting()
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend(counting, cpu=True), fullgraph=True)
    vary = [dim for dim, size in enumerate(shape) if size != C]
    for more in (0, 2, 11):
        sizes = tuple(size + more * (dim in vary) for dim, size in enumerate(shape))
        x = batch(device, shape=sizes).contiguous(memory_format=layout)
        for dim in vary:
            torch._dynamo.mark_dynamic(x, dim)
        assert_same([run(x), *ours.buffers()], [plain(x), *plain.buffers()])
    assert len(counting.calls) == 1


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of x of the calls that gsbn computes."""
    made: list[Any] = []
    run = _graph.call
    monkeypatch.setattr(_graph, "call", lambda x, *a, **o: made.append(tuple(x.shape)) or run(x, *a, **o))
    return made


# The model, its widths, x of 16 bits, and how many of the two layers gsbn computes
ON_A_GPU: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], Any, int]] = {
    "images": (Points, (64, 200, 136), (8, 64, 40, 40), CONTIGUOUS, 2),
    "small images": (Points, (64, 64, 64), (2, 64, 8, 8), CONTIGUOUS, 0),
    "channels last": (Points, (64, 72, 40), (2, 64, 8, 8), LAST, 2),
    "points": (Cloud, (64, 200, 136), (40, 800, 64), CONTIGUOUS, 2),
    "few points": (Cloud, (64, 72, 40), (4, 800, 64), CONTIGUOUS, 0),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("what", ON_A_GPU)
def test_which_layers_gsbn_computes_and_their_bits(what: str, autocast: bool, taken: list[Any]) -> None:
    """The bits of eager calls of a traced model, or of the compiler without gsbn where PyTorch's operators win."""
    make, widths, shape, layout, layers = ON_A_GPU[what]
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    ours = make(widths).to("cuda", dtype)
    other = copy.deepcopy(ours)
    wanted = other if layers else torch.compile(other, backend="aot_eager", fullgraph=True)
    assert layers == 0 or len(convert(other, trace=True).replaced) == 2
    x = batch("cuda", dtype, shape).contiguous(memory_format=layout)
    # Eager calls take the transpose of a contiguous (N, L, C) in rows, which a program does not
    x_contiguous = channels_adjacent(x) if make is Cloud else x
    run = torch.compile(ours, backend=backend("aot_eager"), fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for training in (True, True, False) if layers else (True, True):  # of inference gsbn computes small layers, too
            ours.train(training), other.train(training)
            with torch.set_grad_enabled(training):
                y, y_wanted = run(x), wanted(x_contiguous)
            assert torch.equal(y, y_wanted) and y.stride() == y_wanted.stride()
            if training and layers:
                assert_same(step(ours, x, run), step(other, x_contiguous), 0.0)
    assert len(set(taken)) == layers


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("what", MODELS)
def test_training_by_inductor_on_a_gpu(what: str, mode: str | None) -> None:
    make, shape, layout = MODELS[what]
    ours = make().double().cuda()
    plain = copy.deepcopy(ours)
    run = torch.compile(ours, options=inductor_options(mode=mode), fullgraph=True)
    x = batch("cuda", shape=shape).contiguous(memory_format=layout)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        found = [of.clone() for of in step(ours, x, run)]
        assert_same(found, step(plain, x))
