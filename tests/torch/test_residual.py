"""A residual through gsbn.torch beside PyTorch's own operators, in one launch and by these operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import _residual as module  # noqa: E402
from gsbn.torch import linear_batch_norm  # noqa: E402
from tests.support.gradients import activate  # noqa: E402
from tests.support.strategies import EVERY  # noqa: E402
from tests.torch.layers import OPTIONS, I, O, assert_same, batch, pair, replayed  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")
B = 20
gpu = pytest.mark.gpu


@pytest.fixture(params=[True, False], ids=["one launch", "operators"])
def fuses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether gsbn adds, also on a CPU, in eager calls of one dtype."""

    def serves(u: Any, residual: Any) -> bool:
        busy = torch.compiler.is_compiling() or module.is_watched()
        matrices = u.dim() == 2 or (u.is_contiguous() and residual.is_contiguous() and not u._is_view())
        return bool(request.param) and not busy and matrices and residual.dtype is u.dtype

    monkeypatch.setattr(module, "_fuses", serves)
    return bool(request.param)


def tensors(device: str, dtype: Any = torch.float64, shape: tuple[int, ...] = (B, O)) -> list[Any]:
    """x, weight, gamma, beta and the residual."""
    draw = torch.Generator().manual_seed(0)
    shapes = (shape[0], I, *shape[2:]), (shape[1], I), (shape[1],), (shape[1],), shape
    drawn = [torch.randn(of, generator=draw, dtype=torch.float64) for of in shapes]
    return [a.to(device, dtype).requires_grad_() for a in drawn]


def ours(x: Any, weight: Any, gamma: Any, beta: Any, residual: Any, activation: Any = None, **options: Any) -> Any:
    state = {"running_mean": beta.detach().clone(), "running_var": gamma.detach().abs() + 0.5}
    given: dict[str, Any] = {"gamma": gamma, "beta": beta, "training": True, **state, **options}
    return linear_batch_norm(x, weight, activation=activation, residual=residual, **given)


def plain(x: Any, weight: Any, gamma: Any, beta: Any, residual: Any, activation: Any = None, **options: Any) -> Any:
    z = functional.linear(x.movedim(1, -1), weight).movedim(-1, 1)
    mean, var = beta.detach().clone(), gamma.detach().abs() + 0.5
    u = functional.batch_norm(z, mean, var, gamma, beta, options.get("training", True))
    return activate(u + residual, activation)


def results(call: Any, given: list[Any], *more: Any, **options: Any) -> list[Any]:
    """y and the gradients of what requires one."""
    leaves = [a.detach().requires_grad_(a.requires_grad) for a in given]
    y = call(*leaves, *more, **options)
    weights = torch.arange(y.numel(), device=y.device, dtype=y.dtype).reshape(y.shape).cos()
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [a for a in leaves if a.requires_grad])]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(B, O), (4, O, 6)], ids=str)
@pytest.mark.parametrize("activation", EVERY, ids=str)
def test_y_and_gradients(device: str, fuses: bool, activation: Any, shape: tuple[int, ...], training: bool) -> None:
    given = tensors(device, shape=shape)
    options = {"training": training}
    assert_same(results(ours, given, activation, **options), results(plain, given, activation, **options))
    with torch.no_grad():
        torch.testing.assert_close(ours(*given, activation, **options), plain(*given, activation, **options))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("frozen", [(0,), (4,), (0, 1, 2, 3), (1, 2, 3, 4)], ids=str)
def test_whatever_is_frozen(device: str, fuses: bool, frozen: tuple[int, ...], activation: Any) -> None:
    given = [a.detach() if i in frozen else a for i, a in enumerate(tensors(device))]
    assert_same(results(ours, given, activation), results(plain, given, activation))


def test_the_operands_are_not_written(device: str, fuses: bool) -> None:
    given = tensors(device)
    before = [a.detach().clone() for a in given]
    for activation in EVERY:
        for needs in (True, False):
            y = ours(*[a.detach().requires_grad_(needs) for a in given], activation)
            assert y.requires_grad is needs and y.is_contiguous()
            if needs:
                y.sum().backward()
    for a, b in zip(given, before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ["relu", "silu", ("leaky_relu", -0.25)], ids=str)
def test_one_residual_serves_two_calls(device: str, fuses: bool, activation: Any) -> None:
    """Its gradient is the sum, and the gradients that a node returns for two inputs are not mixed up."""
    found = []
    for call in (ours, plain):
        x, weight, gamma, beta, h = (a.detach().requires_grad_() for a in tensors(device))
        y = call(x, weight, gamma, beta, h, activation)
        again = call(x, weight * 2, gamma, beta, h * y, activation)
        found.append([y.detach(), *torch.autograd.grad((again * y).sum(), [x, weight, gamma, beta, h])])
    assert_same(*found)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", ("leaky_relu", -0.25)], ids=str)
def test_second_derivatives(device: str, fuses: bool, activation: Any, training: bool) -> None:
    given = [a.detach()[:6].requires_grad_() if len(a) == B else a for a in tensors(device)]

    mean, var = given[3].detach().clone(), given[2].detach().abs() + 0.5

    def run(x: Any, weight: Any, gamma: Any, beta: Any, residual: Any) -> Any:
        of_call: dict[str, Any] = {"gamma": gamma, "beta": beta, "training": training, "activation": activation}
        state = {"running_mean": mean.clone(), "running_var": var.clone()}
        return linear_batch_norm(x, weight, residual=residual, **of_call, **state)

    assert torch.autograd.gradcheck(run, given, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, given, check_batched_grad=True)


def test_a_gradient_penalty(device: str, fuses: bool) -> None:
    found = []
    for call in (ours, plain):
        of = [a.detach().requires_grad_() for a in tensors(device)]
        y = call(*of, "gelu")
        of_x, of_h = torch.autograd.grad(y.sin().sum(), [of[0], of[4]], create_graph=True)
        ((of_x.norm(dim=1) - 1).square().sum() + of_h.square().sum() + y.mean()).backward()
        found.append([a.grad for a in of])
    assert_same(*found)


def test_a_graph_that_is_kept(device: str, fuses: bool) -> None:
    for activation in ("relu", "elu"):
        given = tensors(device)
        y = ours(*given, activation)
        first = torch.autograd.grad(y.sum(), given, retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(y.sum(), given), strict=True):
            torch.testing.assert_close(a, b)


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_autocast(device: str, fuses: bool, activation: Any, dtype: Any) -> None:
    """y has the dtype that PyTorch gives the sum."""
    for of_residual in (torch.float32, dtype):
        given = tensors(device, torch.float32)
        given[4] = given[4].detach().to(of_residual).requires_grad_()
        with torch.autocast(device, dtype=dtype):
            found, want = results(ours, given, activation), results(plain, given, activation)
        assert found[0].dtype is want[0].dtype is of_residual
        assert found[-1].dtype is of_residual
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=0.1, atol=0.2)


def test_a_wider_residual(device: str) -> None:
    given = [*tensors(device, torch.float32)[:4], tensors(device)[4]]
    y = ours(*given, "relu")
    assert y.dtype is torch.float64
    y.sum().backward()
    assert [a.grad.dtype for a in given] == [torch.float32] * 4 + [torch.float64]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(300, 77, 45), (4096, 1024, 2048)], ids=str)  # the second takes two nodes
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "columns of a wider one"])
def test_bits_and_gradients_on_a_gpu(layout: str, shape: tuple[int, int, int], dtype: Any) -> None:
    rows, inputs, features = shape
    draw = torch.Generator("cuda").manual_seed(0)
    x, weight, wide, dy = (
        torch.randn(of, generator=draw, device="cuda").to(dtype)
        for of in ((rows, inputs), (features, inputs), (rows, features + 3), (rows, features))
    )
    residual = wide[:, :features]
    residual = residual.contiguous() if layout == "contiguous" else residual
    residual = residual.t().contiguous().t() if layout == "transposed" else residual
    for activation in (None, "relu", ("leaky_relu", 0.25), "silu"):
        u = linear_batch_norm(x, weight, training=True)
        v = u + residual
        leaves = [a.detach().requires_grad_() for a in (x, weight, residual)]
        y = linear_batch_norm(*leaves[:2], training=True, activation=activation, residual=leaves[2])
        with torch.no_grad():
            alone = linear_batch_norm(x, weight, training=True, activation=activation, residual=residual)
        want = activate(v, activation)
        if activation in (None, "relu"):
            assert torch.equal(alone, want)
        close = {
            "rtol": 1e-12 if dtype is torch.float64 else 8 * torch.finfo(dtype).eps,
            "atol": torch.finfo(dtype).eps,
        }
        torch.testing.assert_close(alone, want, **close)
        torch.testing.assert_close(y, want, rtol=0.05, atol=0.05)  # what a backward needs may be another path
        of_x, of_weight, of_residual = torch.autograd.grad(y, leaves, dy)
        point = v.detach().requires_grad_()
        (of_v,) = torch.autograd.grad(activate(point, activation), point, dy)
        if activation in (None, "relu"):
            assert (of_residual != of_v).float().mean() < 0.01  # u of the other path may lie on the other side of 0
        parts = [a.detach().requires_grad_() for a in (x, weight)]
        plainly = torch.autograd.grad(linear_batch_norm(*parts, training=True), parts, of_residual.contiguous())
        for a, b in zip((of_x, of_weight), plainly, strict=True):
            assert torch.equal(a, b)


@gpu
def test_a_training_step_in_a_graph() -> None:
    layer = gsbn.torch.LinearBatchNorm1d(128, 128, activation="gelu", device="cuda")
    x = torch.randn(512, 128, device="cuda", requires_grad=True)

    def step() -> Any:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y = layer(x, x)
        y.square().mean().backward()
        return y

    y = replayed(step)
    weight, norm = layer.linear.weight.detach().double(), layer.norm
    z = functional.linear(x.detach().double(), weight)
    u = functional.batch_norm(z, None, None, norm.weight.double(), norm.bias.double(), True)
    torch.testing.assert_close(y.double(), functional.gelu(u + x.double()), rtol=1e-5, atol=1e-5)


@gpu
def test_pytorch_frees_what_it_does_not_need() -> None:
    """One array more than without a residual, and none with an activation that y tells."""
    rows = features = 4096
    x, weight = (torch.randn(rows, features, device="cuda", requires_grad=True) for _ in range(2))
    made = []
    for activation, residual in ((None, None), ("relu", x), ("silu", x)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = linear_batch_norm(x, weight, training=True, activation=activation, residual=residual)
        made.append((torch.cuda.memory_allocated() - before) / (4 * rows * features))
        del y
    assert made[1] - made[0] < 0.05 and 0.95 < made[2] - made[0] < 1.05


# ---- the layer


@pytest.mark.parametrize("shape", [(20, I), (4, I, 6)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_layer(device: str, fuses: bool, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    layer, other = pair(device, **options)
    residual = batch(device, shape=(shape[0], O, *shape[2:]))
    for training in (True, False):
        layer.train(training), other.train(training)
        found = []
        for model in (layer, other):
            model.zero_grad()
            x, h = batch(device, shape=shape).requires_grad_(), residual.clone().requires_grad_()
            if model is layer:
                y = layer(x, h)
            else:  # the same modules, with the sum before the activation
                activation, other.activation = other.activation, None
                y = activate(other(x) + h, activation)
                other.activation = activation
            (y * torch.arange(y.numel(), device=device, dtype=y.dtype).reshape(y.shape).cos()).sum().backward()
            found.append([y.detach(), x.grad, h.grad, *(p.grad for p in model.parameters()), *model.buffers()])
        assert_same(*found)


def test_a_layer_that_is_not_plain(device: str) -> None:
    """It calls its modules, and adds between them; so does a script."""
    layer, _ = pair(device, bias=True, scale=True, activation="silu")
    want = layer(batch(device), h := batch(device, shape=(20, O)))
    hooked, scripted = copy.deepcopy(layer), torch.jit.script(layer)
    hooked.norm.register_forward_hook(lambda *a: None)
    for other in (hooked, scripted):
        torch.testing.assert_close(other(batch(device), h), want)
        torch.testing.assert_close(other(batch(device)), layer(batch(device)))
    layer.eval()
    _, tangent = torch.func.jvp(lambda h: layer(batch(device), h), (h,), (torch.ones_like(h),))
    assert tangent.shape == want.shape


class Block(nn.Module):
    """A residual block, y = x + layer, whose last layer adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, _ = pair(activation="relu")
        self.last = gsbn.torch.LinearBatchNorm1d(O, I, activation="relu").double()

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x), x)


def test_programs_keep_the_residual() -> None:
    """torch.fx takes each layer for one module with two inputs; a trace and an export record the sum."""
    model, x = Block().eval(), batch()
    want = model(x)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["first", "last"]
    for program in (traced, torch.jit.trace(model, x), torch.export.export(model, (x,)).module()):
        torch.testing.assert_close(program(2 * x), model(2 * x))
        torch.testing.assert_close(program(x), want)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_compiled(device: str, activation: Any, backend: str) -> None:
    eager, _ = pair(device, activation=activation, bias=True)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    for training in (True, False):
        found = []
        for model, call in ((eager.train(training), eager), (compiled.train(training), run)):
            model.zero_grad()
            x, h = batch(device).requires_grad_(), batch(device, shape=(20, O)).requires_grad_()
            y = call(x, h)
            y.sin().sum().backward()
            found.append([y.detach(), x.grad, h.grad, *(p.grad for p in model.parameters()), *model.buffers()])
        assert_same(*found)


def test_fake_tensors(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer, _ = pair(device, activation="relu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, h = (mode.from_tensor(batch(device, shape=(20, n))) for n in (I, O))
        assert layer(x, h).shape == (20, O)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("dims", [1, 2])
def test_a_convolution(device: str, fuses: bool, dims: int, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    add = module.add_and_activate
    monkeypatch.setattr(module, "add_and_activate", lambda *a, **o: calls.append(a) or add(*a, **o))
    x = torch.randn(3, I, *[4] * dims, device=device, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(O, I, *[1] * dims, device=device, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(3, O, *[4] * dims, device=device, dtype=torch.float64, requires_grad=True)
    conv = functional.conv1d if dims == 1 else functional.conv2d
    f = getattr(functional, activation)
    want = f(functional.batch_norm(conv(x, weight), None, None, None, None, True) + residual)
    found = linear_batch_norm(x, weight, training=True, activation=activation, residual=residual)
    assert len(calls) == fuses
    torch.testing.assert_close(found, want)
    of = [torch.autograd.grad(y.sin().sum(), [x, weight, residual]) for y in (found, want)]
    for a, b in zip(*of, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sizes", [(), (4, 4)], ids=["matrix", "convolution"])
@pytest.mark.parametrize("gradients", [True, False])
def test_y_may_be_changed_in_place(device: str, fuses: bool, gradients: bool, sizes: tuple[int, ...]) -> None:
    """As with PyTorch's operators, with an activation whose gradient does not follow from y."""
    shapes = (B, I, *sizes), (O, I, *[1] * len(sizes)), (B, O, *sizes)
    x, weight, residual = (torch.randn(n, device=device, requires_grad=gradients) for n in shapes)
    y = linear_batch_norm(x, weight, training=True, activation="silu", residual=residual)
    y += torch.ones(O, *[1] * len(sizes), device=device, requires_grad=True)
    y.sum().backward()
    assert (x.grad is not None) == gradients


def test_a_layer_of_a_convolution_is_traced() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = gsbn.torch.ConvBatchNorm2d(I, I, activation="relu")

        def forward(self, x: Any) -> Any:
            return self.layer(x, x)

    block, x = Block(), torch.randn(3, I, 4, 4)
    torch.testing.assert_close(torch.fx.symbolic_trace(copy.deepcopy(block))(x), block(x))


# ---- errors


@pytest.mark.parametrize(
    ("residual", "error", "message"),
    [
        (1.0, TypeError, r"^residual: expected a torch.Tensor"),
        (torch.ones(B, O, dtype=torch.int64), TypeError, r"^residual: expected a floating dtype"),
        (torch.ones(B, 1), ValueError, r"^residual: expected shape \(20, 5\), got \(20, 1\)"),
        (torch.ones(O), ValueError, r"^residual: expected shape \(20, 5\), got \(5,\)"),
        (torch.ones(B, O, device="meta"), ValueError, r"^residual: expected x's device cpu, got meta"),
    ],
)
def test_errors(residual: Any, error: type[Exception], message: str) -> None:
    mean = torch.zeros(O)
    state = {"running_mean": mean, "running_var": torch.ones(O)}
    for activation in (None, "relu"):
        with pytest.raises(error, match=message):
            linear_batch_norm(
                torch.ones(B, I), torch.ones(O, I), training=True, activation=activation, residual=residual, **state
            )
    with pytest.raises(ValueError, match=r"^activation: expected one of"):
        linear_batch_norm(
            torch.ones(B, I), torch.ones(O, I), training=True, activation="tanh", residual=torch.ones(B, O), **state
        )
    assert not mean.any()
    layer = gsbn.torch.LinearBatchNorm1d(I, O)
    for _ in ("fused", "by its modules"):
        with pytest.raises(error, match=message):
            layer(torch.ones(B, I), residual)
        assert not layer.norm.running_mean.any()
        layer.norm.register_forward_hook(lambda *a: None)


def test_hooks_on_saved_tensors_that_return_something_else(device: str, fuses: bool) -> None:
    if not fuses:
        pytest.skip("PyTorch's operators take any dtype")
    u, residual = (a.detach().requires_grad_() for a in tensors(device, torch.float32)[4:] * 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a, lambda a: a.double()):
        y = module.added(u * 1, residual, "relu")
    with pytest.raises(RuntimeError, match=r"^saved kept: expected float32"):
        y.sum().backward()


def test_modules_keep_their_state_dict() -> None:
    layer = gsbn.torch.LinearBatchNorm1d(I, O, activation="relu")
    names = ["linear.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    assert list(layer.state_dict()) == [*names, "norm.num_batches_tracked"]
    block = nn.Sequential(layer)
    assert block(torch.randn(8, I)).shape == (8, O)
