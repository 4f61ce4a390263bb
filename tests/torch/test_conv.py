"""1x1 convolutions: the layers, and convert; which inputs gsbn takes, and that it copies none of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from gsbn import reference  # noqa: E402
from gsbn.torch import (  # noqa: E402
    ConvBatchNorm1d,
    ConvBatchNorm2d,
    LinearBatchNorm1d,
    _conv,
    convert,
    revert,
)
from gsbn.torch._function import in_rows, linear_batch_norm  # noqa: E402
from tests.torch.layers import assert_same, step  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")

LAYERS: dict[int, Any] = {1: ConvBatchNorm1d, 2: ConvBatchNorm2d}
CONVS: dict[int, Any] = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"bias": True, "activation": "relu"},
    "not affine": {"affine": False},
    "no statistics": {"track_running_stats": False, "momentum": None, "bias": True},
    "cumulative": {"momentum": None, "activation": "relu"},
}
LAYOUTS = ["contiguous", "adjacent", "a slice"]


def modules_of(dims: int, i: int = 6, o: int = 5, after: bool = True, **options: Any) -> Any:
    conv, norm = CONVS[dims]
    made = nn.Sequential(conv(i, o, 1, **options), norm(o), *[nn.ReLU()] * after)
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
        made[0].weight -= 1
    return made


def batch(shape: tuple[int, ...], layout: str, device: str = "cpu", dtype: Any = torch.float64) -> Any:
    """Random numbers; "adjacent": the channels, and "a slice": of such a tensor with more channels."""
    n, c, *sizes = shape
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, *sizes, c, dtype=torch.float64, generator=generator).to(device, dtype)
    if layout == "contiguous":
        return x.movedim(-1, 1).contiguous()
    return (x if layout == "adjacent" else torch.cat([x, x], -1)[..., :c]).movedim(-1, 1)


@pytest.fixture
def layer_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of the calls of gsbn by layers."""
    made: list[Any] = []
    fused = _conv.fused
    monkeypatch.setattr(_conv, "fused", lambda *a: made.append(a[0]) or fused(*a))
    return made


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "shape", [(4, 6, 10), (4, 6, 3, 7), (8, 6, 1), (8, 6, 1, 1), (1, 6, 9), (3, 1, 8), (0, 6, 3, 7)]
)
def test_the_layer_is_pytorchs(
    device: str, shape: tuple[int, ...], options: dict[str, Any], layout: str, layer_calls: list[Any]
) -> None:
    """y, gradients and statistics in training and in inference, and y's layout."""
    torch.manual_seed(0)
    dims = len(shape) - 2
    layer = LAYERS[dims](shape[1], 5, dtype=torch.float64, **options).to(device)
    plain = nn.Sequential(copy.deepcopy(layer.conv), copy.deepcopy(layer.norm))
    if layer.activation:
        plain.append(nn.ReLU())
    x = batch(shape, layout, device)
    for training in (True, True, False):
        layer.train(training), plain.train(training)
        assert_same(step(layer, x), step(plain, x))
    served = in_rows(x)
    assert len(layer_calls) == (3 if served else 0)
    assert served or layout == "contiguous" or shape[1] == 1
    y, wanted = layer(x), plain(x)
    if layout == "contiguous" or dims == 2 or shape[1] == 1:
        # cuDNN has no channels_last in float64
        assert device == "cuda" or y.is_contiguous() == wanted.is_contiguous()
    else:  # PyTorch's Conv1d copies x, and has no such layout
        assert in_rows(y)


@pytest.mark.parametrize(
    ("shape", "strides", "found"),
    [
        ((4, 6, 3, 7), (126, 1, 42, 6), True),  # channels_last
        ((4, 6, 3, 7), (252, 1, 84, 12), True),  # half of its channels
        ((4, 6, 3, 7), (126, 21, 7, 1), False),
        ((4, 6, 3, 7), (126, 1, 42, 12), False),  # every other column
        ((4, 6, 3, 7), (0, 1, 0, 0), False),
        ((4, 6, 1, 7), (42, 1, 6, 6), True),
        ((4, 1, 3, 7), (21, 21, 7, 1), False),  # as PyTorch: both layouts, and it takes the contiguous one
        ((4, 6, 1, 1), (6, 1, 1, 1), True),
        ((4, 6, 1), (12, 2, 1), True),
        ((1, 6, 9), (54, 9, 1), False),
        ((1, 6, 9), (54, 1, 6), True),
        ((4, 6, 9), (54, 1, 6), True),
        ((4, 6, 9), (54, 1, 5), False),  # rows overlap
    ],
)
def test_what_is_a_matrix_of_rows(shape: tuple[int, ...], strides: tuple[int, ...], found: bool) -> None:
    x = torch.arange(2000.0).as_strided(shape, strides)
    assert in_rows(x) is found
    if found:
        assert x.movedim(1, -1).reshape(-1, shape[1]).data_ptr() == x.data_ptr()  # a view


@pytest.mark.parametrize("shape", [(4, 6, 10), (4, 6, 3, 7)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_copied(shape: tuple[int, ...], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gsbn gets x's own memory, or is not called."""
    from gsbn.torch import _function

    seen: list[Any] = []
    forward = _function.forward_of
    monkeypatch.setattr(
        _function, "forward_of", lambda arrays, options: seen.append(arrays[0]) or forward(arrays, options)
    )
    x = batch(shape, layout)
    layer = LAYERS[len(shape) - 2](6, 5, dtype=torch.float64)
    with torch.no_grad():
        y = layer(x)
    assert [rows.data_ptr() for rows in seen] == ([] if layout == "contiguous" else [x.data_ptr()])
    assert in_rows(y) is (layout != "contiguous")


def test_the_function_takes_convolutions_and_refuses_others() -> None:
    x, weight = torch.randn(4, 6, 3, 7), torch.randn(5, 6, 1, 1)
    y = linear_batch_norm(x, weight, training=True)
    wanted = nn.functional.batch_norm(nn.functional.conv2d(x, weight), None, None, training=True)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    assert y.is_contiguous() and linear_batch_norm(x.mT, weight, training=True).is_contiguous()
    with pytest.raises(
        ValueError, match=r"weight: expected \(O, I\), or \(O, I, 1, ...\) of as many dim.*3; got shape \(5, 6, 1, 1"
    ):
        linear_batch_norm(x[0], weight, training=True)
    with pytest.raises(ValueError, match="weight: expected"):
        linear_batch_norm(x, torch.randn(5, 6, 3, 3), training=True)
    with pytest.raises(ValueError, match=r"read as \(N, C, L\).*C = 6 features; got shape \(4, 3, 6, 7\)$"):
        linear_batch_norm(x.transpose(1, 2), weight, training=True)


@pytest.mark.parametrize("dims", CONVS)
def test_convert_finds_them(dims: int, calls: list[Any]) -> None:
    plain = nn.Sequential(modules_of(dims), modules_of(dims, 5, 4, after=False)).double()
    ours = copy.deepcopy(plain)
    names = list(ours.state_dict())
    assert convert(ours).replaced == (("0.0", "0.1", "0.2"), ("1.0", "1.1"))
    assert list(ours.state_dict()) == names
    x = batch((4, 6, *(3, 7)[:dims]), "adjacent")
    assert_same(step(ours, x), step(plain, x))
    assert calls == ["relu", None]
    step(ours, x.contiguous())
    assert len(calls) == 2  # PyTorch's own modules take what lies channels first
    revert(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in plain.modules()]


def test_convert_traces_them(calls: list[Any]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5)

        def forward(self, x: Any) -> Any:
            return self.norm(self.conv(x)).relu()

    ours = Block().double()
    plain = copy.deepcopy(ours)
    assert convert(ours, trace=True).replaced == (("conv", "norm"),)
    x = batch((4, 6, 3, 7), "adjacent")
    assert_same(step(ours, x), step(plain, x))
    assert calls == ["relu"]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        return x * self.scale


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5)], "its Conv2d has a kernel of 3 x 3, not of 1"),
        ([nn.Conv1d(6, 5, 3), nn.BatchNorm1d(5)], "its Conv1d has a kernel of 3, not of 1"),
        ([nn.Conv2d(6, 5, 1, stride=(1, 2)), nn.BatchNorm2d(5)], "its Conv2d has a stride of 1 x 2, not of 1"),
        ([nn.Conv2d(6, 5, 1, padding=1), nn.BatchNorm2d(5)], "its Conv2d has a padding"),
        ([nn.Conv2d(6, 4, 1, groups=2), nn.BatchNorm2d(4)], "its Conv2d has 2 groups"),
        ([nn.Conv2d(6, 5, 1), nn.BatchNorm1d(5)], "a BatchNorm1d does not take the output of its Conv2d"),
        ([nn.Conv3d(6, 5, 1), nn.SyncBatchNorm(5)], "follows a Conv3d, not an nn.Linear"),
        ([nn.ConvTranspose2d(6, 5, 1), nn.BatchNorm2d(5)], "follows a ConvTranspose2d, not"),
        ([nn.Conv2d(6, 5, 1), nn.BatchNorm2d(7)], "it has 7 features, its nn.Conv2d 5"),
        ([nn.Conv2d(6, 5, 1), Scale(), nn.BatchNorm2d(5)], "a scale stands between it and its Conv2d"),
        ([nn.LazyConv2d(5, 1), nn.LazyBatchNorm2d()], "it has no parameters yet"),
    ],
)  # fmt: skip
def test_what_is_left(rows: list[Any], why: str) -> None:
    report = convert(nn.Sequential(*rows), scales=(Scale,))
    assert report.replaced == () and why in report.left[0].why


def test_padding_dilation_and_no_padding_by_name_change_nothing(calls: list[Any]) -> None:
    for options in ({"padding": "same"}, {"padding": "valid"}, {"dilation": 2}, {"padding_mode": "circular"}):
        ours = modules_of(2, **options).double()
        plain = copy.deepcopy(ours)
        assert len(convert(ours).replaced) == 1
        x = batch((4, 6, 3, 7), "adjacent")
        assert_same(step(ours, x), step(plain, x))
    assert len(calls) == 4


def test_what_changes_later_is_seen(calls: list[Any]) -> None:
    """A stride, hooks, one sample without its dimension: the modules run."""
    ours = modules_of(1).double()
    plain = copy.deepcopy(ours)
    convert(ours)
    x = batch((4, 6, 10), "adjacent")
    ours[0].stride = plain[0].stride = (2,)
    assert_same(step(ours, x), step(plain, x))
    ours[0].stride = plain[0].stride = (1,)
    for model in (ours, plain):
        model[0].register_forward_hook(lambda module, given, made: made + 1)
    assert_same(step(ours, x), step(plain, x))
    assert calls == []


@pytest.mark.parametrize("dims", CONVS)
def test_a_layer_of_modules_that_exist(dims: int) -> None:
    conv, norm, after = modules_of(dims)
    layer = LAYERS[dims].from_modules(conv, norm, "relu")
    assert layer.conv is conv and layer.norm is norm
    x = batch((4, 6, *(3, 7)[:dims]), "adjacent", dtype=torch.float32)
    torch.testing.assert_close(layer(x), after(norm(conv(x))), rtol=1e-4, atol=1e-4)
    assert list(layer.state_dict())[:2] == ["conv.weight", "conv.bias"]
    assert convert(nn.Sequential(layer)) == ((), ())
    assert "activation=relu" in repr(layer)
    loaded = copy.deepcopy(layer)
    loaded.load_state_dict(layer.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear(6, 5), nn.BatchNorm2d(5)), TypeError, "conv: expected an nn.Conv2d that is not lazy, got"),
        ((nn.LazyConv2d(5, 1), nn.BatchNorm2d(5)), TypeError, "conv: expected an nn.Conv2d that is not lazy"),
        ((nn.Conv2d(6, 5, 1), nn.BatchNorm1d(5)), TypeError, "norm: expected an nn.BatchNorm2d or nn.SyncBatchNorm"),
        ((nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5)), ValueError, "conv: expected a 1x1 convolution, but its Conv2d has a"),
        ((nn.Conv2d(6, 5, 1), nn.BatchNorm2d(6)), ValueError, "norm: expected 5 features"),
        ((nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5), "tanh"), ValueError, "activation: expected"),
    ],
)
def test_modules_that_make_no_layer(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ConvBatchNorm2d.from_modules(*arguments)


@pytest.mark.parametrize("dims", CONVS)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_fold(dims: int, activation: Any) -> None:
    layer = LAYERS[dims](6, 5, bias=True, activation=activation, dtype=torch.float64)
    x = batch((4, 6, *(3, 7)[:dims]), "adjacent")
    layer(x), layer.eval()
    torch.testing.assert_close(layer.fold()(x), layer(x))
    with pytest.raises(ValueError, match="fold: expected running statistics"):
        LAYERS[dims](6, 5, track_running_stats=False).fold()


def test_one_row_in_training_is_pytorchs_error() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ConvBatchNorm2d(6, 5)(torch.randn(1, 6, 1, 1))


def test_autocast_and_gradients_of_gradients(layer_calls: list[Any]) -> None:
    layer = ConvBatchNorm2d(6, 5, activation="relu")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        pytest.importorskip("ml_dtypes")
        y = layer(batch((4, 6, 3, 7), "adjacent", dtype=torch.float32))
    assert y.dtype is torch.bfloat16
    layer = layer.double()
    x = batch((4, 6, 3, 7), "adjacent").requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    gradient.square().mean().backward()
    assert layer.conv.weight.grad.shape == (5, 6, 1, 1) and len(layer_calls) == 2


def test_the_compiler_takes_it() -> None:
    layer = ConvBatchNorm2d(6, 5, activation="relu", dtype=torch.float64)
    plain = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for layout in LAYOUTS[:2]:
        x = batch((4, 6, 3, 7), layout)
        assert_same(step(layer, x, compiled), step(plain, x))


def test_scripts_are_pytorchs_modules() -> None:
    layer = ConvBatchNorm2d(6, 5, activation="relu").eval()
    x = batch((4, 6, 3, 7), "adjacent", dtype=torch.float32)
    scripted, residual = torch.jit.script(layer), torch.randn(4, 5, 3, 7)
    for given in ((x,), (x, residual)):
        torch.testing.assert_close(scripted(*given), layer(*given), rtol=1e-4, atol=1e-4)


def test_sync_batch_norm_of_one_process(device: str, calls: list[Any]) -> None:
    """Without other ranks it is a BatchNorm: what lies channels first goes through PyTorch's modules."""
    ours = nn.SyncBatchNorm.convert_sync_batchnorm(modules_of(2).double()).to(device)
    plain = modules_of(2).double().to(device)
    plain.load_state_dict(ours.state_dict())
    assert len(convert(ours).replaced) == 1
    for layout in LAYOUTS[:2]:
        x = batch((4, 6, 3, 7), layout, device)
        assert_same(step(ours, x), step(plain, x))
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu_beside_float64(dtype: str, layout: str) -> None:
    """Each format of PyTorch's on a GPU, against gsbn.reference: y's error is at most that of PyTorch's own modules in
    the same dtype, and a quarter of the dtype's eps, norm-wise, as the contract has it."""
    type_ = getattr(torch, dtype)
    plain = modules_of(2, 64, 48).to("cuda", type_)
    ours = copy.deepcopy(plain)
    convert(ours)
    x = batch((8, 64, 12, 8), layout, "cuda", type_)
    y, wanted = ours(x), plain(x)
    assert y.stride() == wanted.stride()
    rows = x.movedim(1, -1).reshape(-1, 64).double().cpu().numpy()
    of_norm = {
        "gamma": plain[1].weight.detach().double().cpu().numpy(),
        "beta": plain[1].bias.detach().double().cpu().numpy(),
    }
    weight = plain[0].weight.detach().flatten(1).double().cpu().numpy()
    exact = torch.from_numpy(reference.forward(rows, weight, training=True, activation="relu", **of_norm).y)

    def error(of: Any) -> float:
        return float((of.movedim(1, -1).reshape(-1, 48).double().cpu() - exact).norm() / exact.norm())

    assert error(y) <= 1.05 * error(wanted) + torch.finfo(type_).eps / 4


def test_three_dimensions_of_the_linear_layer_keep_their_layout() -> None:
    layer = LinearBatchNorm1d(6, 5, dtype=torch.float64)
    for layout in LAYOUTS:
        assert in_rows(layer(batch((4, 6, 10), layout)))


FORMATS = {"contiguous": None, "channels last": torch.channels_last}


@pytest.mark.parametrize("layouts", [(a, b) for a in FORMATS for b in FORMATS], ids=str)  # of x and the residual
@pytest.mark.parametrize("size", [4, 16])  # 16 x 16 pixels have a kernel for channels first in 16 bits
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_residual(device: str, dtype: Any, activation: Any, size: int, layouts: tuple[str, str]) -> None:
    torch.manual_seed(0)
    layer = ConvBatchNorm2d(6, 5, activation=activation, device=device, dtype=dtype)
    modules = [nn.Sequential(copy.deepcopy(layer.conv), copy.deepcopy(layer.norm)) for _ in range(2)]
    after = nn.Identity() if activation is None else nn.ReLU() if activation == "relu" else nn.SiLU()
    given = [torch.randn(3, n, size, size, device=device).to(dtype) for n in (6, 5, 5)]
    given[:2] = [
        a if FORMATS[b] is None else a.to(memory_format=FORMATS[b]) for a, b in zip(given, layouts, strict=False)
    ]
    before, found = [a.clone() for a in given], []
    for model, type_ in ((layer, dtype), (modules[0], dtype), (modules[1].double(), torch.float64)):
        x, residual = (a.to(type_).detach().requires_grad_() for a in given[:2])
        y = model(x, residual) if model is layer else after(model(x) + residual)
        found.append([y, *torch.autograd.grad(y, [x, residual, *model.parameters()], given[2].to(type_))])
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    for mine, its, truth in zip(*found, strict=True):
        assert mine.dtype is its.dtype and mine.shape == its.shape
        # few features: each error is chance; and the truth has sums of 768 rows
        error, limit = (float((of.double() - truth).norm()) for of in (mine, its))
        roundoff = 4 * torch.finfo(dtype).eps + 768**0.5 * torch.finfo(torch.float64).eps
        assert error <= 3 * limit + roundoff * float(truth.norm())
