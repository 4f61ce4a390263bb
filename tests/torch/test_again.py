"""Second derivatives, batched gradients, tangents, scripts and unusual tensors."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import LinearBatchNorm1d, convert, linear_batch_norm  # noqa: E402
from tests.torch.layers import assert_same, batch, pair  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")
B, I, O = 12, 7, 5


def tensors(device: str, *shapes: tuple[int, ...], dtype: Any = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [a.to(device, dtype).requires_grad_() for a in drawn]


class Scale(nn.Module):
    def __init__(self, features: int, dtype: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((features,), 1.5, dtype=dtype))

    def forward(self, x: Any) -> Any:
        return x * self.scale


def network(device: str = "cpu", dtype: Any = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(I, O), nn.BatchNorm1d(O), nn.ReLU()).to(device, dtype)


def converted(model: nn.Module, **options: Any) -> Any:
    model = copy.deepcopy(model)
    convert(model, **options)
    return model


# ---- second derivatives and batched gradients


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives(device: str, training: bool, activation: Any) -> None:
    """Against finite differences; also batched gradients, as in jacobian(vectorize=True)."""
    x, weight, *vectors = tensors(device, (B, I), (O, I), *[(O,)] * 4)
    mean, var = torch.randn(O, dtype=torch.float64).to(device), torch.rand(O, dtype=torch.float64).to(device) + 0.5

    def run(x: Any, weight: Any, scale: Any, bias: Any, gamma: Any, beta: Any) -> Any:
        return linear_batch_norm(
            x,
            weight,
            scale,
            bias=bias,
            gamma=gamma,
            beta=beta,
            running_mean=mean.clone(),
            running_var=var.clone(),
            training=training,
            activation=activation,
        )

    assert torch.autograd.gradcheck(run, (x, weight, *vectors), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight, *vectors), check_batched_grad=True)


@pytest.mark.parametrize("options", [{"renorm": (1.25, 0.5)}, {"renorm": (3.0, 5.0)}, {"groups": 4}], ids=str)
def test_second_derivatives_of_other_norms(device: str, options: dict[str, Any]) -> None:
    """As those of the module in PyTorch's own operators. That of batch renormalisation takes r and d as constants."""
    layer, plain = pair(device, bias=True, scale=True, activation="relu", **options)
    found = []
    for model in (layer, plain):
        x = batch(device).requires_grad_()
        y = model(x)
        (of_x,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        loss = (of_x.norm(dim=1) - 1).square().sum()
        found.append([of_x.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])])
    assert_same(*found)


def test_the_gradient_of_a_bias_is_a_function(device: str) -> None:
    """The mean cancels the bias: as in PyTorch the gradient is 0, and has a gradient of 0 with respect to x."""
    x, weight, bias = tensors(device, (B, I), (O, I), (O,))
    y = linear_batch_norm(x, weight, bias=bias, training=True)
    (of_bias,) = torch.autograd.grad(y.square().sum(), bias, create_graph=True)
    assert torch.equal(of_bias, torch.zeros_like(bias))
    (of_x,) = torch.autograd.grad(of_bias.sum(), x)
    assert torch.equal(of_x, torch.zeros_like(x))


@pytest.mark.parametrize("shape", [(B, I, O), pytest.param((4096, 1024, 2048), marks=pytest.mark.gpu)], ids=str)
def test_a_gradient_penalty(device: str, shape: tuple[int, int, int]) -> None:
    """As in the critics of Wasserstein GANs; on a GPU the large shape uses two autograd nodes."""
    rows, inputs, features = shape
    if device == "cpu" and rows > 1000:
        pytest.skip("one node is the same for any size there")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(inputs, features), nn.BatchNorm1d(features), nn.ReLU()).to(device).double()
    found = []
    for model in (plain, converted(plain)):
        x = torch.randn(rows, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
        x.requires_grad_()
        y = model(x)
        (of_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        loss = y.mean() + (of_x.norm(dim=1) - 1).square().mean()
        loss.backward()
        found.append([of_x.detach(), x.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm() + 1e-12 * rows


def test_what_has_no_second_derivative_says_so(device: str) -> None:
    x, weight = tensors(device, (B, I), (O, I), dtype=torch.float32)
    if device == "cuda":  # x is not kept there
        gamma = torch.ones(O, device=device, requires_grad=True)
        y = linear_batch_norm(x.detach(), weight.detach(), gamma=gamma, training=True)
        with pytest.raises(RuntimeError, match=r"^gsbn\.torch: no second .* in which neither x nor weight"):
            torch.autograd.grad(y.sum(), gamma, create_graph=True)
    with torch.autocast(device, torch.bfloat16):
        y = linear_batch_norm(x, weight, training=True)
    with pytest.raises(RuntimeError, match=r"^gsbn\.torch: no second derivatives under autocast"):
        torch.autograd.grad(y.float().square().sum(), x, create_graph=True)


# ---- arguments that depend on each other, and arguments that change


def block(converts: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(I, I), nn.BatchNorm1d(I), nn.SiLU()).double()
    if converts:
        convert(model)
    return model


@pytest.mark.parametrize("create", [False, True])
def test_one_block_twice(create: bool) -> None:
    """x of the second call depends on the weight: its gradient is that of both calls, each counted once."""
    x, found = tensors("cpu", (B, I))[0].detach(), []
    for model in (block(False), block(True)):
        loss = model(model(x)).square().sum()
        found.append(torch.autograd.grad(loss, list(model.parameters()), create_graph=create))
    assert_same(*map(list, found))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("tied", ["gamma from weight", "scale is gamma", "x from weight"])
def test_arguments_that_depend_on_each_other(tied: str, batched: bool) -> None:
    x, weight, gamma = tensors("cpu", (B, I), (I, I), (I,))
    given = {"gamma": weight.norm(dim=1) if tied == "gamma from weight" else gamma}
    given |= {"scale": gamma} if tied == "scale is gamma" else {}
    inputs = torch.tanh(x @ weight) if tied == "x from weight" else x
    ours = linear_batch_norm(inputs, weight, **given, training=True)
    z = nn.functional.linear(inputs, weight) * given.get("scale", 1.0)
    plain = nn.functional.batch_norm(z, None, None, given["gamma"], None, True)
    dy = torch.randn(2, B, I, dtype=torch.float64) if batched else torch.randn(B, I, dtype=torch.float64)
    how = {"is_grads_batched": True} if batched else {"create_graph": True}
    found = [
        torch.autograd.grad(y, [x, weight, gamma], dy, allow_unused=True, retain_graph=True, **how)
        for y in (ours, plain)
    ]
    assert_same(*([a for a in of if a is not None] for of in found))


def test_autocast_around_the_second_derivative_changes_nothing() -> None:
    x, found = tensors("cpu", (256, 64), dtype=torch.float32)[0], []
    x = (x.detach() + 10).requires_grad_()
    weight = torch.randn(32, 64, requires_grad=True)
    for on in (False, True):
        y = linear_batch_norm(x, weight, training=True, activation="relu")
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found.append(torch.autograd.grad(y.square().sum(), [x, weight], create_graph=True))
    assert_same(*map(list, found), close=1e-6)


@pytest.mark.parametrize("name", ["weight", "bias", "scale", "gamma", "beta"])
def test_an_argument_that_changed_is_noticed(name: str) -> None:
    x, weight, *vectors = tensors("cpu", (B, I), (O, I), *[(O,)] * 4)
    given = dict(zip(("weight", "bias", "scale", "gamma", "beta"), (weight, *vectors), strict=True))
    y = linear_batch_norm(x, **given, training=True, activation="silu")
    with torch.no_grad():
        given[name] += 0.5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_a_call_was_given_is_freed_by_its_backward() -> None:
    weight = tensors("cpu", (O, I))[0] * 2
    alive, loss = (
        weakref.ref(weight),
        linear_batch_norm(tensors("cpu", (B, I))[0], weight, training=True).square().sum(),
    )
    del weight
    loss.backward()
    assert alive() is None


def test_a_call_that_somebody_watches_has_second_derivatives() -> None:
    """Such as one that counts operations: the call is then one operator."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    x, dy, found = tensors("cpu", (B, I))[0], torch.randn(2, B, I, dtype=torch.float64), []
    for model in (block(False), block(True)):
        with Watch():
            y = model(x)
        (of_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        batched = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
        penalty = torch.autograd.grad(
            (of_x.norm(dim=1) - 1).square().mean(), list(model.parameters()), allow_unused=True
        )
        found.append([of_x.detach(), *batched, *(a for a in penalty if a is not None)])
    assert_same(*found)


# ---- tensors that are no plain memory, in a model that was converted


def sparse_x(model: Any, x: Any) -> Any:
    return model(x.to_sparse())


def sparse_weight(model: Any, x: Any) -> Any:
    model.eval()[0].weight = nn.Parameter(model[0].weight.detach().to_sparse_csr(), requires_grad=False)
    with torch.no_grad():
        return model(x)


def negated_x(model: Any, x: Any) -> Any:
    return model(torch.complex(x, x).conj().imag)


def negated_gradient(model: Any, x: Any) -> Any:
    y = model(x)
    z = torch.complex(torch.zeros_like(y), y).conj()
    (z * torch.ones_like(z)).abs().sum().backward()
    return model[0].weight.grad


def tangents(model: Any, x: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def batched_gradients(model: Any, x: Any) -> Any:
    y = model(x)
    weights = torch.stack([torch.ones_like(y), torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)])
    return torch.autograd.grad(y, model[0].weight, weights, is_grads_batched=True)[0]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("act", [sparse_x, sparse_weight, negated_x, negated_gradient, tangents, batched_gradients])
def test_odd_tensors_go_through_a_converted_model(device: str, act: Any) -> None:
    plain = network(device)
    (x,) = tensors(device, (B, I), dtype=torch.float32)
    x = x.detach()
    want, got = act(copy.deepcopy(plain), x), act(converted(plain), x)
    assert (got - want).norm() <= 1e-5 * want.norm() + 1e-6


@pytest.mark.parametrize(("of_linear", "of_scale"), [("float16", "float32"), ("float32", "float16")])
def test_a_scale_of_another_dtype_gives_pytorchs(device: str, of_linear: str, of_scale: str) -> None:
    linear, scale = nn.Linear(I, O, dtype=getattr(torch, of_linear)), Scale(O, getattr(torch, of_scale))
    plain = nn.Sequential(linear, scale, nn.BatchNorm1d(O)).to(device)
    x = torch.randn(B, I).to(device, linear.weight.dtype)
    want, got = plain(x), converted(plain, scales=(Scale,))(x)
    assert got.dtype is want.dtype is torch.float32
    assert torch.equal(got, want)


def test_a_class_that_was_patched_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As adapters, quantisers and tracers do, for all modules of a class."""
    model, calls, plain = converted(network()), [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(1) or plain(self, x))
    model(torch.randn(B, I))
    assert calls == [1]
    assert "hooks or a forward of its own" in str(convert(network()))


# ---- scripts


def test_scripts_run_pytorchs_modules() -> None:
    x = torch.randn(B, I)
    for model in (
        converted(network()).eval(),
        LinearBatchNorm1d(I, O, scale=True, activation="relu").eval(),
        LinearBatchNorm1d(I, O).train(),
    ):
        scripted = torch.jit.script(copy.deepcopy(model))
        assert list(scripted.state_dict()) == list(model.state_dict())
        assert scripted.training == model.training
        torch.testing.assert_close(scripted(x), model(x))


def test_a_scripted_model_is_not_converted() -> None:
    with pytest.raises(TypeError, match=r"^model: expected an nn.Module, got a scripted one: convert it before"):
        convert(torch.jit.script(network()))
    model = nn.Sequential(torch.jit.script(network()), nn.Linear(O, 3), nn.BatchNorm1d(3))
    assert str(convert(model)) == "replaced 1 + 2"
    assert model(torch.randn(B, I)).shape == (B, 3)


# ---- gradients that autograd owns


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 2048, 2048), (2048, 1024, 8192), (8192, 4096, 1024)], ids=str)
def test_a_gradient_of_autograds_is_not_written(hopper: None, shape: tuple[int, int, int]) -> None:
    """A gradient between the two nodes that a hook keeps is not overwritten."""
    rows, inputs, features = shape
    torch.manual_seed(0)
    layer = LinearBatchNorm1d(inputs, features, device="cuda")
    x, dy = torch.randn(rows, inputs, device="cuda", requires_grad=True), torch.randn(rows, features, device="cuda")
    y = layer(x)
    kept: list[Any] = []
    y.grad_fn.next_functions[0][0].register_prehook(lambda grads: kept.append((grads[0], grads[0].clone())))
    y.backward(dy)
    assert torch.equal(*kept[0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 8192])
@pytest.mark.parametrize("change", [lambda a: a.half() if a.is_floating_point() else a, lambda a: a[: len(a) // 2]])
def test_saved_tensors_that_changed_are_an_error(rows: int, change: Any) -> None:
    layer = LinearBatchNorm1d(128, 1024, device="cuda")
    x = torch.randn(rows, 128, device="cuda", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a, change):
        y = layer(x)
    with pytest.raises(RuntimeError, match=r"^saved \w+: expected .* hooks on saved tensors must give back"):
        y.sum().backward()


@pytest.mark.gpu
def test_memory_of_a_hook_is_not_written() -> None:
    layer = LinearBatchNorm1d(128, 1024, device="cuda")
    x = torch.randn(8192, 128, device="cuda", requires_grad=True)
    given: list[Any] = []

    def unpack(a: Any) -> Any:
        given.append((a.clone(), a))
        return given[-1][1]

    with torch.autograd.graph.saved_tensors_hooks(lambda a: a.clone(), unpack):
        y = layer(x)
    y.sum().backward()
    assert given and all(torch.equal(*pair) for pair in given)


# ---- an empty batch


def test_training_counts_an_empty_batch(device: str) -> None:
    x = torch.empty(0, I, device=device)
    counts = []
    for model in (network(device), converted(network(device))):
        model(x)
        counts.append(model[1].num_batches_tracked.item())
    layer = LinearBatchNorm1d(I, O, device=device)
    layer(x)
    layer.eval()(x)
    count = torch.zeros((), dtype=torch.int64, device=device)
    state = {"running_mean": torch.zeros(O, device=device), "running_var": torch.ones(O, device=device)}
    with torch.no_grad():
        for training in (True, False):
            gsbn.forward(x, layer.linear.weight, **state, num_batches_tracked=count, training=training)
    assert (*counts, layer.norm.num_batches_tracked.item(), count.item()) == (1, 1, 1, 1)
    assert torch.equal(state["running_mean"], torch.zeros(O, device=device))
