"""gsbn.torch's layer does what PyTorch's own modules do, wherever PyTorch takes a module."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import GhostBatchNorm1d, LinearBatchNorm1d, linear_batch_norm  # noqa: E402
from tests.torch.layers import OPTIONS, I, O, Plain, assert_same, batch, pair, step  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")


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
                continue  # the gradients of bias and scale: PyTorch's have nothing but rounding
            assert (a.double() - b.double()).norm() <= close * b.double().norm() + close / 10


def test_a_row_of_three_dimensions_is_not_copied() -> None:
    ours, _ = pair()
    z = batch(shape=(4, 6, I))
    y = ours(z.transpose(1, 2))
    assert y.shape == (4, O, 6) and y.transpose(1, 2).is_contiguous()
    assert y.grad_fn.next_functions[0][0].next_functions[0][0].name() == "_WholeBackward"
    assert y.transpose(1, 2).reshape(24, O).data_ptr() == y.data_ptr()


@pytest.mark.parametrize("here", ["gsbn", "the modules"])
@pytest.mark.parametrize(("shape", "use"), [((4, 6, I), r"; use x\.transpose\(1, 2\), as this is \(N, L, 7\)$"),
                                            ((4, 6, 3), r"got shape \(4, 6, 3\)$")])  # fmt: skip
def test_how_three_dimensions_are_read_is_said(here: str, shape: tuple[int, ...], use: str) -> None:
    layer, _ = pair()
    if here == "the modules":
        layer.norm.register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match=r"^x: read as \(N, C, L\), .* C = 7 features; .*" + use):
        layer(batch(shape=shape))
    with pytest.raises(ValueError, match=use):
        linear_batch_norm(batch(shape=shape), layer.linear.weight, training=True)
    x = batch(shape=(4, 6, I)).transpose(1, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    assert_same([compiled(x)], [layer(x)])


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


@pytest.mark.parametrize("shape", [(20, I), (4, I, 6)])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_layer_of_modules_that_exist(options: dict[str, Any], sync: bool, shape: tuple[int, ...]) -> None:
    theirs = pair(**options)[1]
    own = copy.deepcopy(theirs)
    if sync and not {"renorm", "groups"}.isdisjoint(options):
        pytest.skip("PyTorch's conversion replaces every subclass of its norms by nn.SyncBatchNorm")
    if sync:
        nn.SyncBatchNorm.convert_sync_batchnorm(own)
    own.norm.train(not sync)
    layer = LinearBatchNorm1d.from_modules(own.linear, own.norm, own.scale, own.activation)
    assert (layer.linear, layer.norm, layer.scale) == (own.linear, own.norm, own.scale)
    assert layer.training is own.norm.training
    x = batch(shape=shape)
    for training in (True, False):
        found, wanted = (step(model.train(training), x) for model in (layer, theirs))
        assert_same(found[:2], wanted[:2])
        assert all(own_p is p for own_p, p in zip(own.parameters(), layer.parameters(), strict=True))
        assert_same(list(own.buffers()), list(theirs.buffers()))


def test_a_checkpoint_of_two_modules_is_loaded_before_or_with_other_names() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.bn1, self.head = nn.Linear(I, O), nn.BatchNorm1d(O), nn.Linear(O, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.bn1(self.fc1(x)).relu())

    plain, before, after = (Model().double() for _ in range(3))
    step(plain, batch())
    checkpoint = plain.state_dict()
    before.load_state_dict(checkpoint)
    for model in (before, after):  # the forward stays as it is
        model.fc1 = LinearBatchNorm1d.from_modules(model.fc1, model.bn1)
        model.bn1 = nn.Identity()
    names = {"fc1": "fc1.linear", "bn1": "fc1.norm"}
    parts = {key: key.rpartition(".") for key in checkpoint}
    after.load_state_dict({f"{names.get(m, m)}{dot}{k}": checkpoint[key] for key, (m, dot, k) in parts.items()})
    for training in (True, False):
        wanted = plain.train(training)(batch())
        assert_same([before.train(training)(batch()), after.train(training)(batch())], [wanted, wanted])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((nn.ReLU(), nn.BatchNorm1d(O)), {}, TypeError, r"linear: expected an nn\.Linear .* got .*ReLU"),
        ((nn.LazyLinear(O), nn.BatchNorm1d(O)), {}, TypeError, "linear: .* not lazy"),
        ((nn.Linear(I, O), nn.LayerNorm(O)), {}, TypeError, r"norm: expected an nn\.BatchNorm1d"),
        ((nn.Linear(I, O), nn.LazyBatchNorm1d()), {}, TypeError, "norm: .* not lazy"),
        ((nn.Linear(I, O), nn.BatchNorm1d(O + 1)), {}, ValueError, f"norm: expected {O} features.* got {O + 1}"),
        ((nn.Linear(I, O), nn.BatchNorm1d(O), torch.ones(O)), {}, TypeError, r"scale: expected an nn\.Parameter"),
        ((nn.Linear(I, O), nn.BatchNorm1d(O), nn.Parameter(torch.ones(2))), {}, ValueError, "scale: expected shape"),
        ((nn.Linear(I, O), nn.BatchNorm1d(O)), {"activation": "tanh"}, ValueError, "activation: expected one of"),
        ((nn.Linear(I, O), nn.BatchNorm1d(O)), {"precision": "low"}, ValueError, "precision: expected one of"),
        ((nn.Linear(I, O), nn.BatchNorm1d(O)), {"gemm": "sm80"}, ValueError, "gemm: expected one of"),
    ],
)
def test_modules_that_make_no_layer(arguments: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        LinearBatchNorm1d.from_modules(*arguments, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 2.0}, "scale: expected a bool, got 2.0"),
        ({"scale": torch.ones(O)}, "scale: expected a bool"),
        ({"bias": torch.ones(O)}, "bias: expected a bool"),
        ({"activation": nn.ReLU()}, "activation: expected its name, one of"),
        ({"activation": torch.relu}, "activation: expected its name, one of"),
    ],
)
def test_options_that_make_no_layer(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        LinearBatchNorm1d(I, O, **options)


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
    """As hypernetworks do, which compute the parameters of another network."""
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


def test_torch_fx_takes_the_layer_for_one_module() -> None:
    model = nn.Sequential(nn.Sequential(pair(activation="relu")[0], nn.Linear(O, 3).double()), nn.Tanh()).eval()
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0.0", "0.1", "1"]
    for shape in ((20, I), (4, I, O)):
        x = batch(shape=shape)
        torch.testing.assert_close(traced.get_submodule("0.0")(x), model[0][0](x))
    torch.testing.assert_close(traced(batch()), model(batch()))


@pytest.mark.parametrize("x", [None, [1.0], np.ones((4, I))], ids=["None", "list", "numpy"])
def test_what_is_no_tensor_is_an_error(x: Any) -> None:
    with pytest.raises(TypeError, match=r"^x: expected a torch\.Tensor, got "):
        pair()[0](x)


def test_sync_batch_norm_is_plain() -> None:
    """PyTorch's own SyncBatchNorm may replace the layer's norm, in one process."""
    ours, theirs = pair(scale=True, activation="relu")
    nn.SyncBatchNorm.convert_sync_batchnorm(ours)
    y = ours(batch())
    assert type(ours.norm) is nn.SyncBatchNorm and y.grad_fn.name() == "_WholeBackward"
    assert_same([y], [theirs(batch())])


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


# ---- batch renormalisation


@pytest.mark.parametrize("shape", [(20, I), (4, I, 6)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_module_of_batch_renormalisation(shape: tuple[int, ...], affine: bool) -> None:
    """By itself it computes what its formulas say, also in the first batch after a warm-up, and trains like them."""
    torch.manual_seed(0)
    norm = gsbn.torch.BatchRenorm1d(I, (1.25, 0.5, 1), affine=affine, dtype=torch.float64)
    dims = [i for i in range(len(shape)) if i != 1]
    columns = [-1 if i == 1 else 1 for i in range(len(shape))]
    for count in range(3):
        x = (3 * torch.randn(shape, dtype=torch.float64) + 1).requires_grad_()
        mean, sigma = x.mean(dims), (x.var(dims, unbiased=False) + norm.eps).sqrt()
        running_sigma = (norm.running_var + norm.eps).sqrt()
        r_max, d_max = (1.25, 0.5) if count >= 1 else (1.0, 0.0)
        r = (sigma / running_sigma).detach().clamp(1 / r_max, r_max).view(columns)
        d = ((mean - norm.running_mean) / running_sigma).detach().clamp(-d_max, d_max).view(columns)
        wanted = (x - mean.view(columns)) / sigma.view(columns) * r + d
        if affine:
            with torch.no_grad():
                norm.weight.normal_(), norm.bias.normal_()
            wanted = wanted * norm.weight.view(columns) + norm.bias.view(columns)
        plain = nn.BatchNorm1d(I, affine=affine, dtype=torch.float64)
        plain.load_state_dict(norm.state_dict())
        y = norm(x)
        plain(x)
        assert_same([y, *norm.buffers()], [wanted, *plain.buffers()])
        leaves = [x, *norm.parameters()]
        assert_same(*(list(torch.autograd.grad(z.sin().sum(), leaves)) for z in (y, wanted)))
    assert_same([norm.eval()(x)], [plain.eval()(x)])
    assert_same([torch.jit.script(norm)(x)], [plain(x)])
    with pytest.raises(RuntimeError, match=r"^BatchRenorm1d: .* eval\(\)"):
        torch.jit.script(norm.train())


def test_limits_in_a_tensor_move_with_the_layer_and_may_change() -> None:
    limits = torch.tensor([1.0, 0.0])
    layer, plain = pair(renorm=limits)
    assert "norm.renorm" not in layer.state_dict()
    for now in ([1.0, 0.0], [1.5, 0.25]):
        for model in (layer, plain):
            model.norm.renorm.copy_(torch.tensor(now))
        assert_same(step(layer, batch()), step(plain, batch()))
    assert layer.norm.renorm.dtype == plain.norm.renorm.dtype


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"renorm": (0.5, 1.0)}, ValueError, "^renorm: expected r_max"),
        ({"renorm": 3.0}, TypeError, "^renorm: expected a gsbn.Renorm"),
        ({"renorm": (3.0, 5.0), "track_running_stats": False}, ValueError, "^track_running_stats: expected True"),
    ],
)
def test_a_layer_refuses_limits(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LinearBatchNorm1d(I, O, **options)


@pytest.mark.parametrize("trace", [False, True])
def test_a_converted_model_renormalises(trace: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(I, O), gsbn.torch.BatchRenorm1d(O, (1.25, 0.5)), nn.ReLU()).double()
    ours = copy.deepcopy(plain)
    assert len(gsbn.torch.convert(ours, trace=trace).replaced) == 1
    for _ in range(2):
        assert_same(step(ours, batch()), step(plain, batch()))
    assert_same([ours.eval()(batch())], [plain.eval()(batch())])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"renorm": (1.25, 0.5)}, {"groups": 8}], ids=str)
def test_a_large_step_has_two_nodes(options: dict[str, Any]) -> None:
    """Two autograd nodes share what the forward saved; sums of 4096 terms err by less than 1e-9 in float64."""
    torch.manual_seed(0)
    layer = LinearBatchNorm1d(1024, 2048, bias=True, activation="relu", device="cuda", dtype=torch.float64, **options)
    x = torch.randn(4096, 1024, dtype=torch.float64, device="cuda")
    assert_same(*(step(model, x) for model in (layer, Plain(layer))), close=1e-9)


# ---- ghost batches


def chunked(norm: nn.BatchNorm1d, x: Any, groups: int) -> Any:
    """The loop that users write."""
    return torch.cat([norm(run) for run in x.chunk(groups)])


@pytest.mark.parametrize("shape", [(20, I), (8, I, 6)])
def test_the_module_of_ghost_batches(shape: tuple[int, ...]) -> None:
    norm, plain = GhostBatchNorm1d(I, 4, dtype=torch.float64), nn.BatchNorm1d(I, dtype=torch.float64)
    for _ in range(2):
        x = torch.randn(shape, dtype=torch.float64)
        assert_same([norm(x), *norm.buffers()], [chunked(plain, x, 4), *plain.buffers()])
    assert_same([norm.eval()(x), torch.jit.script(norm)(x)], [plain.eval()(x)] * 2)
    with pytest.raises(RuntimeError, match=r"^GhostBatchNorm1d: .* eval\(\)"):
        torch.jit.script(norm.train())


@pytest.mark.parametrize("trace", [False, True])
def test_a_converted_model_has_ghost_batches(device: str, trace: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(I, O), GhostBatchNorm1d(O, 5), nn.ReLU()).to(device).double()
    ours = copy.deepcopy(plain)
    assert len(gsbn.torch.convert(ours, trace=trace).replaced) == 1
    for _ in range(2):
        assert_same(step(ours, batch(device)), step(plain, batch(device)))
    assert_same([ours.eval()(batch(device))], [plain.eval()(batch(device))])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"groups": 0}, ValueError, "^groups: expected at least 1"),
        ({"groups": 2.0}, TypeError, "^groups: expected a whole number"),
        ({"groups": 2, "renorm": (3.0, 5.0)}, ValueError, "^groups: expected 1 with renorm"),
    ],
)
def test_a_layer_refuses_groups(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LinearBatchNorm1d(I, O, **options)


@pytest.mark.parametrize("shape", [(21, I), (3, I, 8)])
def test_rows_that_groups_do_not_divide(device: str, shape: tuple[int, ...]) -> None:
    layer = LinearBatchNorm1d(I, O, groups=4, device=device)
    with pytest.raises(ValueError, match=f"^groups: expected a divisor of the batch size {shape[0]}"):
        layer(torch.randn(shape, device=device))
    layer.eval()(torch.randn(shape, device=device))


@pytest.mark.parametrize("groups", [1, 4])
def test_in_eval_groups_change_no_path(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels first have kernels without ghost batches; y would have another layout without them."""
    from gsbn.torch import _function as function

    monkeypatch.setattr(function, "way_of", lambda *a: function.IN_PLACE)
    monkeypatch.setattr(function, "channels_first", lambda x, *a: x)
    x, layer = torch.randn(3, I, 8), LinearBatchNorm1d(I, O, groups=groups).eval()
    assert layer(x) is x
    assert linear_batch_norm(x, layer.linear.weight, running_mean=layer.norm.running_mean,
                             running_var=layer.norm.running_var, groups=groups) is x  # fmt: skip
