"""Contiguous (N, C, L) and (N, C, H, W) under torch.compile: which calls gsbn takes, with the bits of eager calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from gsbn.torch import (  # noqa: E402
    ConvBatchNorm1d,
    ConvBatchNorm2d,
    LinearBatchNorm1d,
    _channels_first,
    convert,
    linear_batch_norm,
)
from gsbn.torch import _operators as operators  # noqa: E402
from tests.torch.layers import tf32, way_taken  # noqa: E402

BACKENDS = [{"backend": "eager"}, {"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}]
# Of each layer a batch that gsbn takes beside Inductor
LAYERS: dict[str, Any] = {
    "conv1d": (lambda **o: ConvBatchNorm1d(64, 200, activation="relu", **o), (40, 64, 800)),
    "conv2d": (lambda **o: ConvBatchNorm2d(64, 200, bias=True, momentum=None, **o), (8, 64, 40, 40)),
    "linear": (lambda **o: LinearBatchNorm1d(65, 200, activation=("elu", 0.5), **o), (3, 65, 72)),
    "copies": (lambda **o: ConvBatchNorm2d(64, 264, activation="relu", **o), (50, 64, 14, 14)),
}  # fmt: skip


def recorded(model: Any, **options: Any) -> Any:
    return torch.compile(model, fullgraph=True, **options)


def step(model: Any, run: Any, x: Any) -> list[Any]:
    """y, the gradients, and the statistics."""
    leaf = x.detach().clone().requires_grad_()
    torch.compiler.cudagraph_mark_step_begin()
    y = run(leaf)
    dy = torch.arange(y.numel(), device=y.device).view(y.shape).cos().to(y.dtype)
    found = torch.autograd.grad(y, [leaf, *model.parameters()], dy)
    return [of.detach().clone() for of in (y, *found, *model.buffers())]


def assert_same_bits(found: list[Any], wanted: list[Any]) -> None:
    """All are equal, and y lies in memory as the other y does."""
    assert found[0].stride() == wanted[0].stride(), (found[0].stride(), wanted[0].stride())
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype is b.dtype and torch.equal(a, b), (i, a.dtype, float((a.double() - b.double()).abs().max()))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "fresh_dynamo")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", BACKENDS, ids=str)
@pytest.mark.parametrize("what", LAYERS)
def test_a_program_computes_the_bits_of_an_eager_call(what: str, options: dict[str, Any], autocast: bool) -> None:
    """In training, with frozen statistics where gsbn takes them, and in inference. Under autocast dweight is not
    rounded."""
    torch.manual_seed(0)
    make, shape = LAYERS[what]
    eager = make(device="cuda", dtype=torch.float32 if autocast else torch.bfloat16)
    model = copy.deepcopy(eager)
    run = recorded(model, **options)
    x = torch.randn(shape, device="cuda").to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        assert way_taken(eager(x)) == ("copies" if what == "copies" else "in place")
        model.load_state_dict(eager.state_dict())
        for training in (True, True, *[False] * (what in ("linear", "copies"))):
            eager.train(training), model.train(training)
            assert_same_bits(step(model, run, x), step(eager, eager, x))
        eager.eval(), model.eval()
        with torch.no_grad():
            assert_same_bits([run(x).clone()], [eager(x)])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "fresh_dynamo")
@pytest.mark.parametrize("options", BACKENDS[1:3], ids=str)
def test_float32_with_copies(options: dict[str, Any]) -> None:
    plain = nn.Sequential(nn.Conv2d(64, 136, 1, bias=False), nn.BatchNorm2d(136), nn.ReLU()).to("cuda")
    models = [copy.deepcopy(plain) for _ in range(2)]
    assert all(convert(model).replaced for model in models)
    x = torch.randn(8, 64, 28, 28, device="cuda")
    with tf32(False):
        assert way_taken(copy.deepcopy(models[1])(x)) == "copies"
        found, wanted = step(models[0], recorded(models[0], **options), x), step(models[1], models[1], x)
    assert_same_bits(found, wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "fresh_dynamo")
def test_any_number_of_samples() -> None:
    """One program, which gsbn computes, for a varying number; of a varying length PyTorch's modules."""
    torch.manual_seed(0)
    eager = LinearBatchNorm1d(64, 200, activation="relu", device="cuda", dtype=torch.bfloat16)
    model = copy.deepcopy(eager)
    run = recorded(model, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for samples in (3, 5, 7):
            x = torch.randn(samples, 64, 72, device="cuda", dtype=torch.bfloat16)
            torch._dynamo.mark_dynamic(x, 0)
            with torch.no_grad():
                assert_same_bits([run(x), *model.buffers()], [eager(x), *eager.buffers()])
    torch._dynamo.reset()
    conv = ConvBatchNorm1d(64, 200, device="cuda", dtype=torch.bfloat16)
    run = recorded(conv, backend="aot_eager", dynamic=True)
    for length in (800, 1600):
        x = torch.randn(40, 64, length, device="cuda", dtype=torch.bfloat16)
        assert_same_bits(step(conv, run, x)[:1], step(conv, lambda x: conv.norm(conv.conv(x)), x)[:1])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "fresh_dynamo")
def test_memory_that_starts_anywhere() -> None:
    """x, dy and the weight off 16 bytes, after the program was recorded with others."""
    layer = LinearBatchNorm1d(64, 32, device="cuda", dtype=torch.bfloat16)
    weight = layer.linear.weight.detach().clone()
    run = recorded(layer, backend="aot_eager")

    def off(a: Any) -> Any:
        memory = torch.empty(a.numel() + 1, device="cuda", dtype=a.dtype)[1:].view(a.shape)
        return memory.copy_(a)

    x, dy = torch.randn(4, 64, 128, device="cuda").bfloat16(), torch.randn(4, 32, 128, device="cuda").bfloat16()
    results = []
    for place in (lambda a: a.clone(), off):
        leaf = place(x).requires_grad_()
        layer.linear.weight.data = place(weight)
        y = run(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *layer.parameters()], place(dy))])
    assert results[1][0].data_ptr() % 16 == 0
    assert_same_bits(*results)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators(dtype: Any) -> None:
    """PyTorch's check of operators: what they write, fake tensors, and recorded programs."""
    rows, inputs, features, length = 3 * 72, 24, 40, 72
    draw = lambda *shape: torch.randn(shape, device="cuda")  # noqa: E731
    x, weight = draw(rows, inputs).to(dtype), draw(features, inputs).to(dtype)
    state = draw(features), draw(features).square(), torch.tensor(3, device="cuda")
    vectors = None, None, draw(features), draw(features)
    options = 1.0, 0.1, 1e-5, "highest", "auto", "relu", None, None, None, None, 1, None, False, length
    for operator in (operators.TRAIN, operators.INFER):
        torch.library.opcheck(operator, (x, weight, *vectors, *state, *options))
    y, deviations, saved = operators.TRAIN(x, weight, *vectors, *state, *options)
    for needs in ("x weight gamma beta", "weight", "x"):
        of_call = True, "highest", "auto", "relu", "None None float32 float32", None, needs, None, None, 1
        for wide in (False, True):
            given = torch.ones_like(y), x, weight, deviations, saved, *of_call, wide, length
            torch.library.opcheck(operators.BACKWARD, given)


@pytest.mark.usefixtures("an_h200", "fresh_dynamo")
@pytest.mark.parametrize("varies", [None, "samples", "features", "inputs"])
def test_sizes_that_vary(varies: str | None) -> None:
    """One program decides for its runs, if it knows the sizes that decide; traced without memory."""
    seen: list[Any] = []

    def look(graph: Any, _: Any) -> Any:
        seen.extend(node for node in graph.graph.nodes if "gsbn.train" in str(node.target))
        return graph

    def call(x: Any, weight: Any) -> Any:
        return linear_batch_norm(x, weight, training=True, activation="relu")

    def keeps_none(x: Any, weight: Any) -> Any:
        return x.new_empty(1 if operators._records_remat(x, weight, 0.1) else 2)

    with FakeTensorMode():
        x, rows = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in ((4, 64, 72), (60000, 64)))
        for run, given in ((call, x), (keeps_none, rows)):
            weight = torch.empty(200, 64, device="cuda", dtype=torch.bfloat16)
            where = {
                None: (),
                "samples": ((given, 0),),
                "features": ((weight, 0),),
                "inputs": ((given, 1), (weight, 1)),
            }
            for of, dim in where[varies]:
                torch._dynamo.mark_dynamic(of, dim)
            made = torch.compile(run, backend=look, fullgraph=True)(given, weight)
            assert run is call or len(made) == (1 if varies is None else 2)
    length = seen[0].args[-1]
    assert len(seen) == 1 and (length == 72) is (varies in (None, "samples"))


# (N, C, ...) and features; training or not: whether gsbn takes the call of a convolution, in bfloat16 and in float32
TAKEN = [
    ((32, 64, 4096), 64, True, True, True),
    ((32, 64, 1024), 64, True, False, True),  # small: Inductor's passes take less time than more launches
    ((32, 64, 1024), 64, False, True, False),  # one launch
    ((32, 64, 1024), 128, False, True, True),
    ((8, 64, 28, 28), 256, True, True, True),  # an image, which Inductor turns to channels last
    ((2, 64, 64, 64), 64, True, False, True),
    ((2, 64, 64, 64), 64, False, True, True),
    ((64, 256, 14, 14), 512, True, True, True),  # with copies
    ((64, 512, 14, 14), 256, False, False, True),
    ((64, 64, 100), 64, True, False, False),
    ((64, 256, 49), 512, False, True, True),
]  # fmt: skip


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(("shape", "features", "training", "of_16_bits", "of_32_bits"), TAKEN)
def test_which_calls_gsbn_takes(
    shape: tuple[int, ...], features: int, training: bool, of_16_bits: bool, of_32_bits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of tensors without memory. docs/history/channels_first.md has their times."""
    monkeypatch.setattr(_channels_first, "is_compiling", lambda: True)
    with tf32(False), FakeTensorMode():
        for dtype, taken in ((torch.bfloat16, of_16_bits), (torch.float32, of_32_bits)):
            x = torch.empty(shape, device="cuda", dtype=dtype)
            weight = torch.empty(features, shape[1], device="cuda", dtype=dtype)
            given = x, weight, (None, None, None), training
            assert _channels_first.beats_modules(*given, "highest") is taken
            assert dtype is torch.bfloat16 or not _channels_first.beats_modules(*given, "high")
            monkeypatch.setattr(_channels_first, "is_exporting", lambda: True)
            assert not _channels_first.beats_modules(*given, "highest")  # it may run on another GPU
            monkeypatch.setattr(_channels_first, "is_exporting", lambda: False)
