"""linear_batch_norm under autograd and autocast: gradients, what is kept for them, and errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import LinearBatchNorm1d, linear_batch_norm  # noqa: E402
from gsbn.torch import _function as function  # noqa: E402
from gsbn.torch import _halves as halves  # noqa: E402
from gsbn.torch import _nodes as nodes  # noqa: E402
from tests.torch.layers import OPTIONS, I, O, assert_same, batch, pair, step  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")


# ---- autograd


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("one", [False, True])
def test_gradcheck(device: str, training: bool, activation: Any, one: bool) -> None:
    layer, _ = pair(device, bias=True, scale=True)
    scale = torch.tensor([[1.3]], dtype=torch.float64, device=device) if one else layer.scale.detach()
    given = (layer.linear.weight, layer.linear.bias, scale.requires_grad_(), layer.norm.weight, layer.norm.bias)

    def call(x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any) -> Any:
        state = dict(zip(("running_mean", "running_var"), (b.clone() for b in layer.norm.buffers()), strict=False))
        options = {"training": training, "activation": activation, "eps": 1e-3}
        return linear_batch_norm(x, weight, scale, bias=bias, gamma=gamma, beta=beta, **state, **options)

    x = batch(device, shape=(6, I)).requires_grad_()
    if activation is None:  # relu has the same u: gradcheck's steps of 1e-6 stay away from the kink
        assert call(x, *given).abs().min() > 1e-4
    assert torch.autograd.gradcheck(call, (x, *given))


@pytest.mark.parametrize("scale", [None, 2, 0.5])
def test_a_scale_that_is_a_number(scale: float | None) -> None:
    x, weight = batch(), batch(shape=(O, I)).requires_grad_()
    state = {"running_mean": torch.zeros(O, dtype=torch.float64), "running_var": torch.ones(O, dtype=torch.float64)}
    y = linear_batch_norm(x, weight, scale, **state, eps=0.0)
    torch.testing.assert_close(y, x @ weight.T * (1 if scale is None else scale))
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(O, I) * (1 if scale is None else scale))


def test_only_what_needs_a_gradient_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward_of = halves.backward_of
    monkeypatch.setattr(halves, "backward_of", lambda *a: asked.append(a[2]) or backward_of(*a))
    layer, _ = pair(bias=True, scale=True)
    layer.linear.weight.requires_grad_(False)
    layer.norm.bias.requires_grad_(False)
    layer(batch()).sum().backward()
    assert asked == [("bias", "scale", "gamma")]
    assert [name for name, p in layer.named_parameters() if p.grad is None] == ["linear.weight", "norm.bias"]


def test_nothing_is_kept_where_nothing_needs_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    forward_of = function.forward_of
    for module in (function, nodes):
        monkeypatch.setattr(module, "forward_of", lambda *a: kept.append(a[1][5]) or forward_of(*a))
    layer, _ = pair()
    with torch.no_grad():
        layer(batch())
    with torch.inference_mode():
        layer(batch())
    assert not layer.requires_grad_(False)(batch()).requires_grad
    layer(batch().requires_grad_())
    assert kept == [False, False, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("features", [512, 4096])  # one node, and two
@pytest.mark.parametrize("autocast", [False, True])
def test_only_what_a_gradient_needs_is_kept(features: int, autocast: bool) -> None:
    """A first layer, whose x needs no gradient, keeps no weight, cast or not; one of which gamma and beta alone are
    trained keeps neither. A frozen layer keeps x, for second derivatives."""
    layer = LinearBatchNorm1d(features, features, device="cuda")
    x = torch.randn(2048, features, device="cuda")
    for needed in ("weight", "x", "gamma"):
        layer.linear.weight.requires_grad_(needed == "weight")
        x = x.detach().requires_grad_(needed == "x")
        kept: list[Any] = []

        def keep(t: Any, kept: list[Any] = kept) -> Any:
            kept.append(t)
            return t

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), hooks:
            y = layer(x)
        shapes = [tuple(t.shape) for t in kept]
        assert shapes.count((features, features)) == int(needed == "x" and (not autocast or features < 4096))
        assert shapes.count((2048, features)) == (1 if needed == "gamma" else 2)  # x and the deviations
        y.sum().backward()
        assert (x.grad is not None) == (needed == "x")
        assert (layer.linear.weight.grad is not None) == (needed == "weight")
        layer.zero_grad()


def test_a_change_between_forward_and_backward_is_an_error() -> None:
    layer, _ = pair()
    y = layer(batch())
    with torch.no_grad():
        layer.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_backward_twice() -> None:
    layer, _ = pair()
    y = layer(batch()).square().sum()
    y.backward(retain_graph=True)
    first = layer.linear.weight.grad.clone()
    y.backward()
    torch.testing.assert_close(layer.linear.weight.grad, 2 * first)


def test_errors_are_gsbns() -> None:
    layer, _ = pair()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer(batch(shape=(1, I)))
    with pytest.raises(ValueError, match=r"x: expected 2 dimensions"):
        layer(batch(shape=(I,)))
    with pytest.raises(ValueError, match=r"weight: expected shape"):
        layer(batch(shape=(4, I + 1)))
    with pytest.raises(TypeError, match=r"weight: expected x's dtype"):
        layer(batch(dtype=torch.float32))
    for option in ("activation", "precision", "gemm"):
        with pytest.raises(ValueError, match=f"^{option}: expected one of .*, got 'tanh'$"):
            LinearBatchNorm1d(I, O, **{option: "tanh"})
    with pytest.raises(TypeError, match=r"^process_group: expected a torch.distributed ProcessGroup or None, got 3$"):
        LinearBatchNorm1d(I, O, process_group=3)
    layer.activation = "tanh"
    layer.linear.register_forward_hook(lambda module, args, z: z)  # then PyTorch's own modules run
    with pytest.raises(ValueError, match=r"^activation: expected one of"):
        layer(batch())
    layer, _ = pair()
    assert layer(batch(shape=(0, I))).shape == (0, O)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_statistics_that_require_grad_are_an_error(device: str, name: str, training: bool) -> None:
    """As in PyTorch: they would get no gradient, without a word."""
    x, weight = batch(device), torch.rand(O, I, dtype=torch.float64, device=device, requires_grad=True)
    state = {each: torch.ones(O, dtype=torch.float64, device=device) for each in ("running_mean", "running_var")}
    state[name].requires_grad_()
    for x_of in (x, x[:, :, None]):
        with pytest.raises(RuntimeError, match=f"^{name}: expected a constant, got a tensor that requires grad"):
            linear_batch_norm(x_of, weight, **state, training=training)
    with torch.no_grad():
        assert linear_batch_norm(x, weight, **state, training=training).shape == (len(x), O)


@pytest.mark.parametrize("name", ["x", "weight", "scale", "bias", "gamma", "beta", "running_mean"])
def test_what_is_no_tensor(name: str) -> None:
    given = {"x": batch(), "weight": torch.rand(O, I, dtype=torch.float64)}
    wrong: Any
    for wrong in ([1.0], np.ones(O)):
        with pytest.raises(TypeError, match=rf"^{name}: expected a torch\.Tensor, got "):
            linear_batch_norm(**{**given, name: wrong}, training=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [True, False])
def test_checkpointing(device: str, training: bool) -> None:
    """The recomputation updates the running statistics again, as with BatchNorm1d."""
    ours, theirs = (model.train(training) for model in pair(device, **OPTIONS["all"]))
    found = [step(m, batch(device), lambda x, m=m: checkpoint(m, x, use_reentrant=False)) for m in (ours, theirs)]
    assert_same(*found)
    assert ours.norm.num_batches_tracked == 2 * training


# ---- autocast


def test_autocast(device: str) -> None:
    layer = LinearBatchNorm1d(I, O, scale=True, bias=True, device=device)
    x = batch(device, torch.float32).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
        kept = y.grad_fn.saved_tensors[:2]
        with torch.no_grad():
            assert layer.eval()(x).dtype == torch.bfloat16
    assert [y.dtype, *(a.dtype for a in kept)] == [torch.bfloat16] * 3
    y.float().square().sum().backward()
    assert {a.grad.dtype for a in (x, *layer.parameters())} == {torch.float32}
    assert layer.norm.running_mean.dtype == torch.float32
    wanted = LinearBatchNorm1d(I, O, scale=True, bias=True, device=device)
    wanted.linear.to(torch.bfloat16).load_state_dict(layer.linear.state_dict())
    assert y.equal(wanted(x.bfloat16()))


def test_autocast_leaves_float64() -> None:
    ours, theirs = pair()
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(batch()).dtype == theirs(batch()).dtype == torch.float64


def test_grad_scaler(device: str) -> None:
    ours, theirs = pair(device, torch.float32, activation="relu")
    for model in (ours, theirs):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(device, 256.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = model(batch(device, torch.float32, (64, I))).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_same(list(ours.state_dict().values()), list(theirs.state_dict().values()), close=1e-2)


# ---- large calls, with two autograd nodes


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2000, 4096, 2048), (70000, 96, 128)])
def test_large_calls(shape: tuple[int, int, int], relu: bool, cast: bool, training: bool) -> None:
    """Agree with PyTorch's modules; and give the same bits if the graph is kept, when nothing may be overwritten."""
    rows, inputs, features = shape
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(inputs, features, bias=False), nn.BatchNorm1d(features), *[nn.ReLU()] * relu).cuda()
    ours = copy.deepcopy(plain).train(training)
    gsbn.torch.convert(ours)
    truth = copy.deepcopy(plain).double().train(training)
    x = torch.randn(rows, inputs, device="cuda")
    dy = torch.randn(rows, features, device="cuda") / rows
    errors = []
    kept: list[list[torch.Tensor]] = []
    for model, wide in ((truth, True), (plain.train(training), False), (ours, False), (ours, False)):
        model.zero_grad()
        at = (x.double() if wide else x).clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=cast and not wide):
            y = model(at)
        y.backward(dy.to(y.dtype), retain_graph=len(kept) == 3)
        kept.append([at.grad, *(parameter.grad for parameter in model.parameters())])
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(kept[-1], kept[0], strict=True)])
    at_once = cast and training and max(inputs, features) <= 128  # one kernel computes the whole backward
    assert y.grad_fn.name() == ("_WholeBackward" if at_once else "_NormBackward")
    assert {a.dtype for a in kept[2]} == {torch.float32}
    assert all(a.equal(b) for a, b in zip(kept[2], kept[3], strict=True))
    if relu:  # an element of y near zero may pass or not, which outweighs all rounding
        return
    eps = torch.finfo(torch.bfloat16 if cast else torch.float32).eps
    for mine, theirs in zip(errors[2], errors[1], strict=True):
        assert mine <= 1.05 * theirs + eps / 4  # the accuracy rule


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 4096, 4096), (100, 2048, 8192)])
def test_few_rows_of_a_large_weight(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """One node computes the whole backward, and agrees with PyTorch's modules."""
    rows, inputs, features = shape
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(inputs, features, bias=False), nn.BatchNorm1d(features)).cuda().to(dtype)
    ours, truth = copy.deepcopy(plain), copy.deepcopy(plain).double()
    gsbn.torch.convert(ours)
    x, dy = (torch.randn(rows, columns, device="cuda").to(dtype) for columns in (inputs, features))
    found, node = [], ""
    for model in (truth, plain, ours):
        at = x.to(next(model.parameters()).dtype).clone().requires_grad_()
        y = model(at)
        node = y.grad_fn.name()
        y.backward(dy.to(y.dtype))
        found.append([of.grad.double() for of in (at, *model.parameters()) if of.grad is not None])
    assert node == "_WholeBackward"
    for true, theirs, mine in zip(*found, strict=True):
        allowed = 1.1 * (theirs - true).norm() + torch.finfo(dtype).eps / 2 * true.norm()
        assert (mine - true).norm() <= allowed
