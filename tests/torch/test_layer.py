"""gsbn.torch's layer and function do what PyTorch's own modules do, wherever PyTorch takes a module."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import LinearBatchNorm1d, linear_batch_norm  # noqa: E402
from gsbn.torch import _function as function  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")

I, O = 7, 5  # inputs and outputs
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"bias": True, "scale": True, "activation": "relu"},
    "not affine": {"affine": False, "scale": True},
    "no statistics": {"track_running_stats": False, "momentum": None, "bias": True},
    "cumulative": {"momentum": None, "activation": "relu"},
    "eps and momentum": {"eps": 1e-2, "momentum": 1},
}


class Plain(nn.Module):
    """The same by PyTorch's modules."""

    def __init__(self, layer: LinearBatchNorm1d) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = copy.deepcopy((layer.linear, layer.norm, layer.scale))
        self.activation = layer.activation

    def forward(self, x: Any) -> Any:
        z = self.linear(x.transpose(1, 2) if x.dim() == 3 else x)
        z = z if self.scale is None else z * self.scale
        y = self.norm(z.transpose(1, 2) if x.dim() == 3 else z)
        return y if self.activation is None else y.relu()


def pair(device: str = "cpu", dtype: Any = torch.float64, **options: Any) -> tuple[LinearBatchNorm1d, Plain]:
    """Our layer and PyTorch's in the same state on any device, in which nothing is 0 or 1."""
    torch.manual_seed(0)
    layer = LinearBatchNorm1d(I, O, dtype=dtype, **options).to(device)  # each device has random numbers of its own
    with torch.no_grad():
        for tensor in (*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())):
            tensor.copy_(torch.rand(tensor.shape, dtype=torch.float64) + 0.5)
        layer.linear.weight -= 1
    return layer, Plain(layer)


def batch(device: str = "cpu", dtype: Any = torch.float64, shape: tuple[int, ...] = (20, I)) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)


def step(model: nn.Module, x: Any, run: Callable[..., Any] | None = None) -> list[Any]:
    """y, all gradients and the buffers after a forward and a backward."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = (model if run is None else run)(leaf)
    (y * torch.arange(y.numel(), device=y.device, dtype=y.dtype).reshape(y.shape).cos()).sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_same(found: list[Any], wanted: list[Any], close: float = 1e-10) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


# ---- the layer


@pytest.mark.parametrize("shape", [(20, I), (4, I, 6)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_layer_is_pytorchs(device: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    ours, theirs = pair(device, **options)
    x = batch(device, shape=shape)
    for training in (True, True, False):
        assert_same(step(ours.train(training), x), step(theirs.train(training), x))
    ours.train().norm.eval(), theirs.train().norm.eval()  # frozen statistics
    assert_same(step(ours, x), step(theirs, x))
    with torch.no_grad():
        assert_same([ours.train()(x), *ours.buffers()], [theirs.train()(x), *theirs.buffers()])


def test_ten_steps_of_sgd(device: str) -> None:
    ours, theirs = pair(device, **OPTIONS["all"])
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for i in range(10):
            optimizer.zero_grad()
            model(batch(device) + i).square().mean().backward()
            optimizer.step()
    assert_same(list(ours.state_dict().values()), list(theirs.state_dict().values()))


@pytest.mark.parametrize(("dtype", "close"), [("float32", 2e-5), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("vectors", ["own", "float32"])
def test_other_dtypes(device: str, dtype: str, close: float, vectors: str) -> None:
    ours, theirs = pair(device, getattr(torch, dtype), scale=True, bias=True)
    if vectors == "float32":
        ours.norm.float(), theirs.norm.float()
    x = batch(device, getattr(torch, dtype), (64, I))
    for training in (True, False):
        found, wanted = (step(model.train(training), x) for model in (ours, theirs))
        assert [a.dtype for a in found] == [b.dtype for b in wanted]
        for a, b in zip(found, wanted, strict=True):
            if training and a.shape == (O,) and b.double().norm() < 1:
                continue  # the gradients of bias and scale, in which PyTorch has its roundings alone
            assert (a.double() - b.double()).norm() <= close * b.double().norm() + close / 10


def test_a_row_of_three_dimensions_is_not_copied() -> None:
    ours, _ = pair()
    z = batch(shape=(4, 6, I))
    y = ours(z.transpose(1, 2))
    assert y.shape == (4, O, 6) and y.transpose(1, 2).is_contiguous()
    assert y.grad_fn.next_functions[0][0].next_functions[0][0].name() == "_WholeBackward"
    assert y.transpose(1, 2).reshape(24, O).data_ptr() == y.data_ptr()


def test_initialised_as_pytorchs() -> None:
    torch.manual_seed(3)
    linear, norm = nn.Linear(I, O), nn.BatchNorm1d(O)
    torch.manual_seed(3)
    layer = LinearBatchNorm1d(I, O, bias=True, scale=True)
    state = layer.state_dict()
    assert state.pop("scale").equal(torch.ones(O))
    wanted = {
        f"{name}.{key}": a for name, m in (("linear", linear), ("norm", norm)) for key, a in m.state_dict().items()
    }
    assert list(state) == list(wanted)
    assert all(state[name].equal(wanted[name]) for name in wanted)


def test_what_it_prints() -> None:
    assert "LinearBatchNorm1d(\n  (linear): Linear(in_features=7" in repr(LinearBatchNorm1d(I, O))
    layer = LinearBatchNorm1d(I, O, scale=True, activation="relu", precision="high", gemm="sm90")
    assert layer.extra_repr() == "scale=True, activation=relu, precision=high, gemm=sm90"


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_copies(how: str) -> None:
    layer, _ = pair(**OPTIONS["all"])
    layer(batch())
    if how == "state_dict":
        memory = io.BytesIO()
        torch.save(layer.state_dict(), memory)
        made = LinearBatchNorm1d(I, O, dtype=torch.float64, **OPTIONS["all"])
        made.load_state_dict(torch.load(io.BytesIO(memory.getvalue())))
    else:
        made = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert made.linear.weight is not layer.linear.weight
    assert_same(step(made, batch()), step(layer, batch()), close=0)


def test_functional_call() -> None:
    ours, theirs = pair(**OPTIONS["all"])
    found = []
    for model in (ours, theirs):
        state = {name: a.detach() * 1.5 if a.is_floating_point() else a + 1 for name, a in model.state_dict().items()}
        found.append([torch.func.functional_call(model, state, (batch(),)), *state.values()])
        assert model.norm.num_batches_tracked == 0
    assert_same(*found)


@pytest.mark.parametrize("what", ["a hook", "weight_norm", "spectral_norm", "scale", "a subclass"])
def test_modules_that_are_not_plain_are_called(what: str) -> None:
    ours, theirs = pair(scale=True, activation="relu")
    for model in (ours, theirs):
        torch.manual_seed(2)
        if what == "a hook":
            model.linear.register_forward_hook(lambda module, args, z: z + 1)
        elif what == "weight_norm":
            nn.utils.parametrizations.weight_norm(model.linear)
        elif what == "spectral_norm":
            nn.utils.parametrizations.spectral_norm(model.linear)
        elif what == "scale":
            nn.utils.parametrize.register_parametrization(model, "scale", nn.Tanh())
        else:
            model.norm.__class__ = type("Doubled", (nn.BatchNorm1d,), {"forward": lambda self, x: 2 * x})
    assert_same(step(ours, batch()), step(theirs, batch()))
    assert_same(step(ours, batch(shape=(4, I, 6))), step(theirs, batch(shape=(4, I, 6))))


@pytest.mark.parametrize(("module", "name"), [("norm", "weight"), ("norm", "running_mean"), ("linear", "bias")])
def test_a_tensor_in_a_parameters_place(module: str, name: str) -> None:
    """As networks that make another's parameters put it there."""
    ours, theirs = pair(bias=True)
    for model in (ours, theirs):
        part = getattr(model, module)
        value = getattr(part, name).detach()
        delattr(part, name)
        setattr(part, name, value)
    torch.testing.assert_close(ours(batch()), theirs(batch()), rtol=0, atol=1e-10)


def test_what_looks_into_the_layer_sees_pytorchs_modules() -> None:
    ours, theirs = (model.eval() for model in pair(activation="relu"))
    x = batch()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(ours, x)
        torch.testing.assert_close(traced(2 * x), theirs(2 * x))
    want = torch.autograd.functional.jacobian(lambda x: theirs(x).sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: ours(x).sum())(x), want)
    torch.testing.assert_close(torch.func.vmap(ours)(x[:, None])[:, 0], theirs(x))
    _, along = torch.func.jvp(ours, (x,), (x,))
    torch.testing.assert_close(along, torch.func.jvp(theirs, (x,), (x,))[1])
    with pytest.raises(RuntimeError, match=r"^linear_batch_norm: .* outside them$"):
        torch.func.grad(lambda x: linear_batch_norm(x, ours.linear.weight.detach(), training=True).sum())(x)


def test_sync_batch_norm_is_plain() -> None:
    """PyTorch's own in place of the layer's norm, in one process."""
    ours, theirs = pair(scale=True, activation="relu")
    nn.SyncBatchNorm.convert_sync_batchnorm(ours)
    y = ours(batch())
    assert type(ours.norm) is nn.SyncBatchNorm and y.grad_fn.name() == "_WholeBackward"
    assert_same([y], [theirs(batch())])


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
    if activation is None:  # the same u is relu's: gradcheck's steps of 1e-6 stay off the kink
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
    backward_of = function.backward_of
    monkeypatch.setattr(function, "backward_of", lambda *a: asked.append(a[2]) or backward_of(*a))
    layer, _ = pair(bias=True, scale=True)
    layer.linear.weight.requires_grad_(False)
    layer.norm.bias.requires_grad_(False)
    layer(batch()).sum().backward()
    assert asked == [("bias", "scale", "gamma")]
    assert [name for name, p in layer.named_parameters() if p.grad is None] == ["linear.weight", "norm.bias"]


def test_nothing_is_kept_where_nothing_needs_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    forward_of = function.forward_of
    monkeypatch.setattr(function, "forward_of", lambda *a: kept.append(a[1][5]) or forward_of(*a))
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
    """Of a first layer, whose x needs no gradient, the weight, cast or not; of a frozen one x."""
    layer = LinearBatchNorm1d(features, features, device="cuda")
    x = torch.randn(2048, features, device="cuda")
    for first in (True, False):
        layer.linear.weight.requires_grad_(first)
        x = x.detach().requires_grad_(not first)
        kept: list[Any] = []

        def keep(t: Any, kept: list[Any] = kept) -> Any:
            kept.append(t)
            return t

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), hooks:
            y = layer(x)
        shapes = [tuple(t.shape) for t in kept]
        assert shapes.count((features, features)) == (0 if first else int(not autocast or features < 4096))
        assert shapes.count((2048, features)) == (2 if first else 1)  # x and the deviations
        y.sum().backward()
        assert (x.grad is None) == first and (layer.linear.weight.grad is None) != first
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
        with pytest.raises(ValueError, match=f"^{option}: expected one of .*, got 'gelu'$"):
            LinearBatchNorm1d(I, O, **{option: "gelu"})
    with pytest.raises(TypeError, match=r"^process_group: expected a torch.distributed ProcessGroup or None, got 3$"):
        LinearBatchNorm1d(I, O, process_group=3)
    layer.activation = "gelu"
    layer.linear.register_forward_hook(lambda module, args, z: z)  # and PyTorch's own modules run
    with pytest.raises(ValueError, match=r"^activation: expected one of"):
        layer(batch())
    layer, _ = pair()
    assert layer(batch(shape=(0, I))).shape == (0, O)


@pytest.mark.parametrize("name", ["x", "weight", "scale", "bias", "gamma", "beta", "running_mean"])
def test_what_is_no_tensor(name: str) -> None:
    given = {"x": batch(), "weight": torch.rand(O, I, dtype=torch.float64)}
    wrong: Any
    for wrong in ([1.0], np.ones(O)):
        with pytest.raises(TypeError, match=rf"^{name}: expected a torch\.Tensor, got "):
            linear_batch_norm(**{**given, name: wrong}, training=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [True, False])
def test_checkpointing(device: str, training: bool) -> None:
    """The recomputation updates the running statistics once more, as that of BatchNorm1d does."""
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


# ---- inference


@pytest.mark.parametrize("options", [o for o in OPTIONS.values() if o.get("track_running_stats", True)])
def test_fold(device: str, options: dict[str, Any]) -> None:
    layer, _ = pair(device, **options)
    state = torch.random.get_rng_state()
    folded = layer.eval().fold()
    assert torch.random.get_rng_state().equal(state)
    assert [type(m) for m in folded.modules()][-2:] == ([nn.Linear, nn.ReLU] if layer.activation else [nn.Linear])
    torch.testing.assert_close(folded(batch(device)), layer(batch(device)))


def test_fold_without_statistics() -> None:
    with pytest.raises(ValueError, match="fold: expected running statistics"):
        pair(track_running_stats=False)[0].fold()


# ---- large calls, of which autograd sees two nodes


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2000, 4096, 2048), (70000, 96, 128)])
def test_large_calls(shape: tuple[int, int, int], relu: bool, cast: bool, training: bool) -> None:
    """As PyTorch's modules; and with the same bits where the graph is kept, so that nothing may be overwritten."""
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
    at_once = cast and training and max(inputs, features) <= 128  # one kernel makes all of the backward
    assert y.grad_fn.name() == ("_WholeBackward" if at_once else "_NormBackward")
    assert {a.dtype for a in kept[2]} == {torch.float32}
    assert all(a.equal(b) for a, b in zip(kept[2], kept[3], strict=True))
    if relu:  # an element of y next to zero, whom chance decides about, is more than all roundings
        return
    eps = torch.finfo(torch.bfloat16 if cast else torch.float32).eps
    for mine, theirs in zip(errors[2], errors[1], strict=True):
        assert mine <= 1.05 * theirs + eps / 4  # the accuracy rule
