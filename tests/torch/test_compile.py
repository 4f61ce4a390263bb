"""gsbn.torch where torch records a program: torch.compile, torch.export, CUDA graphs, fake tensors."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import LinearBatchNorm1d, linear_batch_norm  # noqa: E402
from gsbn.torch import _operators as operators  # noqa: E402
from tests.torch.layers import OPTIONS, I, O, assert_same, batch, pair, step  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fused_on_a_cpu")
SOME = ("all", "no statistics", "renorm", "renorm that warms up", "groups", "groups, no statistics")


@pytest.mark.parametrize("shape", [(20, I), (4, I, 6)])
@pytest.mark.parametrize("options", [OPTIONS[name] for name in SOME], ids=SOME)
def test_compiled(device: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    eager, _ = pair(device, **options)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for training in (True, True, False):
        eager.train(training), compiled.train(training)
        assert_same(step(compiled, batch(device, shape=shape), run), step(eager, batch(device, shape=shape)), 1e-12)
        with torch.no_grad():
            x = batch(device, shape=shape)
            assert_same([run(x), *compiled.buffers()], [eager(x), *eager.buffers()], 1e-12)


def test_compiled_code_refuses_the_dtypes_that_a_call_refuses(device: str) -> None:
    x, weight = torch.randn(5, 4, device=device), torch.randn(3, 4, device=device, dtype=torch.float64)
    weight.requires_grad_()
    for run in (linear_batch_norm, torch.compile(linear_batch_norm, backend="eager")):
        with pytest.raises(TypeError, match=r"^weight: expected x's dtype float32, got float64"):
            run(x, weight, training=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_under_autocast(device: str, dynamic: bool) -> None:
    eager = LinearBatchNorm1d(I, O, scale=True, activation="relu", device=device)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (32, 24) if dynamic else (32,):
        with torch.autocast(device, torch.bfloat16):
            x = batch(device, torch.float32, (rows, I))
            found, wanted = step(compiled, x, run), step(eager, x)
        assert found[0].dtype == torch.bfloat16
        assert_same(found, wanted, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_under_autocast_dweight_is_not_rounded(backend: str) -> None:
    """It is made in float32, as in an eager call: no element has been rounded to bfloat16."""
    eager = LinearBatchNorm1d(256, 256, activation="relu", device="cuda")
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    x = batch("cuda", torch.float32, (512, 256))
    with torch.autocast("cuda", torch.bfloat16):
        assert_same(step(compiled, x, run), step(eager, x), 1e-2)
    for model in (eager, compiled):
        dweight = model.linear.weight.grad
        assert dweight is not None and dweight.dtype == torch.float32
        assert (dweight != dweight.to(torch.bfloat16).float()).float().mean() > 0.5


def test_compiled_with_limits_for_any_number_of_rows() -> None:
    """Numbers are symbols then."""
    eager, _ = pair(renorm=(1.25, 0.5))
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 24):
        assert_same(step(compiled, batch(shape=(rows, I)), run), step(eager, batch(shape=(rows, I))), 1e-12)


def test_by_inductor(device: str) -> None:
    plain = nn.Sequential(nn.Linear(I, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, O), nn.BatchNorm1d(O))
    plain = plain.to(device, torch.float64)
    compiled = copy.deepcopy(plain)
    assert len(gsbn.torch.convert(compiled).replaced) == 2
    run = torch.compile(compiled, fullgraph=True)
    for _ in range(2):
        assert_same(step(compiled, batch(device), run), step(plain, batch(device)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gemm", ["auto", "cublas"])
def test_reduce_overhead(gemm: Any, training: bool, dtype: str) -> None:
    """torch.compile's own CUDA graphs: nothing but their outputs may be alive in their pool."""
    features = 256 if gemm == "auto" else 251  # "auto" also uses cuBLAS then
    layer = {"scale": True, "activation": "relu", "device": "cuda", "gemm": gemm}
    eager = LinearBatchNorm1d(features, features, **layer).train(training)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, mode="reduce-overhead")
    target = batch("cuda", torch.float32, (512, features))
    for i in range(7):
        x = batch("cuda", torch.float32, (512, features)).roll(i, 0)
        found = []
        for model, call in ((eager, eager), (compiled, run)):
            leaf = x.clone().requires_grad_()
            model.zero_grad()  # gradients are outputs of the last step's graph, which this step overwrites
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16"):
                y = call(leaf)
            (y.float() * target).mean().backward()
            buffers = [b.clone().float() for b in model.buffers()]
            found.append([y.detach().float().clone(), leaf.grad.clone(), model.linear.weight.grad.clone(), *buffers])
        close = 2e-5 if dtype == "float32" else 3e-2
        for got, want in zip(*found, strict=True):
            assert torch.linalg.norm(got - want) <= close * torch.linalg.norm(want) + 1e-6


@pytest.mark.gpu
def test_a_training_step_in_a_cuda_graph() -> None:
    eager = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8)).cuda()
    gsbn.torch.convert(eager)
    model = copy.deepcopy(eager)
    x = batch("cuda", torch.float32, (128, 64))

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train(model, optimizers[1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(model, optimizers[1])
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        train(eager, optimizers[0])
    assert_same(list(model.state_dict().values()), list(eager.state_dict().values()), 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [16, 1000])
def test_make_graphed_callables(rows: int, dtype: str) -> None:
    """PyTorch captures forward and backward as a graph each: steps on new inputs have the same bits."""
    plain = nn.Sequential(
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 40), nn.BatchNorm1d(40), nn.Linear(40, 8)
    ).cuda()
    eager, model = copy.deepcopy(plain), plain
    gsbn.torch.convert(eager), gsbn.torch.convert(model)
    x = batch("cuda", torch.float32, (rows, 64))

    def autocast() -> Any:
        return torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False)

    gc.collect()  # CUDA graphs of other tests: the end of one would end a capture
    with autocast():
        graphed = torch.cuda.make_graphed_callables(model, (torch.empty_like(x).normal_(),))
    model.load_state_dict(eager.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    for i in range(3):
        for call, optimizer in zip((eager, graphed), optimizers, strict=True):
            optimizer.zero_grad()
            with autocast():
                y = call(x.roll(i, 1))
            y.float().square().mean().backward()
            optimizer.step()
    for got, want in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        assert got.equal(want)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_export_of_inference(device: str, converted: bool, strict: bool) -> None:
    """The graph has one operator, which keeps nothing for a backward and takes any number of rows."""
    model: Any = pair(device, **OPTIONS["all"])[0]
    if converted:
        model = nn.Sequential(nn.Linear(I, O), nn.BatchNorm1d(O), nn.ReLU()).to(device, torch.float64)
        gsbn.torch.convert(model)
    model.eval()
    shapes = ({0: torch.export.Dim("rows")},)
    exported = torch.export.export(model, (batch(device),), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == ["gsbn.infer.default"]
    x = batch(device, shape=(33, I))
    with torch.no_grad():
        assert exported.module()(x).equal(model(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_export_of_training(device: str, converted: bool, frozen: bool, strict: bool) -> None:
    """The program has PyTorch's own operators, which give gradients, for any number of rows."""
    model: Any = pair(device, **OPTIONS["all"])[0]
    if converted:
        model = nn.Sequential(nn.Linear(I, O), nn.BatchNorm1d(O), nn.ReLU()).to(device, torch.float64)
        gsbn.torch.convert(model)
    (model[1] if converted else model.norm).train(not frozen)
    plain = copy.deepcopy(model)
    shapes = ({0: torch.export.Dim("rows", min=2)},)
    exported = torch.export.export(model, (batch(device),), dynamic_shapes=shapes, strict=strict).module()
    assert not [node for node in exported.graph.nodes if str(node.target).startswith("gsbn")]
    found = []
    for made in (exported, plain):
        made(batch(device, shape=(5, I))).square().sum().backward()
        found.append({name: parameter.grad for name, parameter in made.named_parameters()})
        found[-1] |= {name: buffer for name, buffer in made.named_buffers() if buffer.is_floating_point()}
    assert found[0].keys() == found[1].keys()
    assert_same([found[0][name] for name in found[1]], list(found[1].values()), 1e-9)


@pytest.mark.parametrize("mode", ["fake", "make_fx"])
def test_who_watches_operators_sees_ours(mode: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    layer, _ = pair()
    if mode == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert layer(fake.from_tensor(batch())).shape == (20, O)
        assert layer.norm.num_batches_tracked == 0
    else:
        with torch.no_grad():
            graph = make_fx(layer.eval())(batch())
            assert "gsbn.infer" in graph.code
            assert graph(batch() + 1).equal(layer(batch() + 1))


def test_selective_checkpointing() -> None:
    """A function of the user chooses the operators whose results are kept; ours can be one of them."""
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    seen = []

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> Any:
        seen.append(str(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE

    ours, theirs = pair(activation="relu")
    contexts = partial(create_selective_checkpoint_contexts, policy)
    found = step(ours, batch(), lambda x: checkpoint(ours, x, use_reentrant=False, context_fn=contexts))
    step(theirs, batch())
    assert_same(found[:-3], step(theirs, batch())[:-3])
    assert "gsbn.train.default" in seen


def test_a_program_without_deviations_refuses_a_device_that_stores_them() -> None:
    """Its backward is recorded for the other shapes. A CPU always stores them."""
    x, weight = torch.randn(9, 6), torch.randn(5, 6)
    more = (1.0, 0.1, 1e-5, "highest", "auto", "relu", None, None, None, None, 1, None, True)
    with pytest.raises(RuntimeError, match=r"^linear_batch_norm: expected as many SMs"):
        operators.TRAIN(x, weight, *[None] * 7, *more)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("rows", [9, 40])
def test_the_operators_keep_torchs_rules(device: str, rows: int, dtype: str, activation: Any) -> None:
    """opcheck: schemas declare what is written, and fake implementations agree with the real ones."""
    tests = ("test_schema", "test_faketensor")
    x, weight = (torch.randn(n, 6, device=device, dtype=getattr(torch, dtype)) for n in (rows, 5))
    of_vectors = torch.float64 if dtype == "float64" else torch.float32
    bias, scale, beta, mean, var = (torch.rand(5, device=device, dtype=of_vectors) + 0.5 for _ in range(5))
    count = torch.zeros((), dtype=torch.int64, device=device)
    for factor, one in ((scale, None), (scale[:1].clone(), [1])):
        arguments = (
            x,
            weight,
            bias,
            factor,
            None,
            beta,
            mean,
            var,
            count,
            1.0,
            0.1,
            1e-5,
            "highest",
            "auto",
            activation,
        )
        torch.library.opcheck(operators.INFER, arguments, test_utils=tests)
        for training, operator in ((True, operators.TRAIN), (False, operators.INFER_SAVED)):
            torch.library.opcheck(operator, arguments, test_utils=tests)
            y, deviations, vectors = operator(*arguments)
            name = str(of_vectors).removeprefix("torch.")
            rest = (training, "highest", "auto", activation, f"{name} {name} None {name}", one, "x weight scale beta")
            backward = (torch.ones_like(y), x, weight, deviations, vectors, *rest)
            torch.library.opcheck(operators.BACKWARD, backward, test_utils=tests)


def test_the_function_compiled_with_a_number() -> None:
    weight = batch(shape=(O, I)).requires_grad_()

    def call(x: Any) -> Any:
        return linear_batch_norm(x, weight, 2, training=True, activation="relu")

    found, wanted = torch.compile(call, fullgraph=True, backend="aot_eager")(batch()), call(batch())
    assert found.equal(wanted)
    gradients = [torch.autograd.grad(y.sum(), weight)[0] for y in (found, wanted)]
    assert gradients[0].equal(gradients[1])
