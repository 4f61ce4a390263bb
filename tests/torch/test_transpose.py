"""Contiguous (N, C, L) and (N, C, H, W) that no kernel takes where they lie: gsbn transposes them if it is faster."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import ConvBatchNorm2d, LinearBatchNorm1d  # noqa: E402
from gsbn.torch._transpose import rows_of, samples_of, transpose  # noqa: E402
from tests.torch.layers import tf32, way_taken  # noqa: E402

SHAPES = [((64, 256, 14, 14), 512), ((33, 130, 7, 7), 600), ((700, 24, 9, 11), 16)]  # x, features
DTYPES = ["float32", "bfloat16", "float16"]
pytestmark = pytest.mark.usefixtures("ieee")


def layer_of(inputs: int, features: int, dtype: str, **options: Any) -> Any:
    layer = ConvBatchNorm2d(inputs, features, device="cuda", dtype=getattr(torch, dtype), **options)
    nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    nn.init.normal_(layer.norm.bias)
    return layer


def of_modules(layer: Any, wide: bool = False) -> Any:
    made = nn.Sequential(copy.deepcopy(layer.conv), copy.deepcopy(layer.norm))
    return made.double() if wide else made


def step(model: Any, x: Any, dy: Any) -> list[Any]:
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy.to(y.dtype))
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 4), (2, 64, 1), (4, 130, 67)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_transposes(device: str, shape: tuple[int, ...], dtype: Any) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    wanted = x.transpose(1, 2)
    found = transpose(x, None, wanted.shape)
    assert found.is_contiguous() and torch.equal(found, wanted)


@pytest.mark.parametrize("length", [49, 196])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
def test_casts(device: str, dtypes: tuple[Any, Any], length: int) -> None:
    """Rounded as PyTorch rounds, subnormal and large numbers, infinities and NaN, too."""
    special = torch.tensor([1e-40, -3e-41, 6e-8, 65519.0, 65520.0, 3.4e38, 1.00390625, -0.0, torch.inf, torch.nan])
    x = torch.randn(3, 70, length, device=device)
    x[:, :10, 5] = special.to(device)
    x, wanted = x.to(dtypes[0]), x.to(dtypes[0]).transpose(1, 2).to(dtypes[1])
    assert torch.equal(transpose(x, dtypes[1], wanted.shape).nan_to_num(7.0), wanted.nan_to_num(7.0))
    leaf = x.clone().requires_grad_()
    rows = rows_of(leaf, dtypes[1])  # casts only where it launches
    assert rows.dtype is dtypes[device == "cuda"]
    assert torch.equal(rows.to(dtypes[1]).nan_to_num(7.0), wanted.reshape(-1, 70).nan_to_num(7.0))
    dy = torch.randn(rows.shape, device=device).to(rows.dtype)
    rows.backward(dy)
    assert leaf.grad is not None and torch.equal(leaf.grad, dy.view(3, length, 70).transpose(1, 2).to(dtypes[0]))


def test_rows_and_their_gradients(device: str) -> None:
    x = torch.randn(3, 5, 2, 7, device=device, dtype=torch.float64, requires_grad=True)
    rows = rows_of(x)
    assert rows.is_contiguous() and torch.equal(rows, x.movedim(1, -1).reshape(-1, 5))
    assert torch.autograd.gradcheck(rows_of, x) and torch.autograd.gradgradcheck(rows_of, x)
    assert torch.equal(rows_of(x[:, ::2]), x[:, ::2].movedim(1, -1).reshape(-1, 3))


@pytest.mark.parametrize("sizes", [(14,), (2, 7), (1, 1)], ids=str)
def test_samples_and_their_gradients(device: str, sizes: tuple[int, ...]) -> None:
    x = torch.randn(3, 5, *sizes, device=device, dtype=torch.float64)
    rows = x.movedim(1, -1).reshape(-1, 5).requires_grad_()
    found = samples_of(rows, 3, sizes)
    assert found.is_contiguous() and torch.equal(found, x)
    of = lambda rows: samples_of(rows, 3, sizes)  # noqa: E731
    assert torch.autograd.gradcheck(of, rows) and torch.autograd.gradgradcheck(of, rows)
    assert torch.equal(torch.autograd.grad(found, rows, x.mT.contiguous().mT)[0], rows)
    made = of(1 * rows)
    made += 1


@pytest.mark.parametrize("shape", [(5, 7, 1), (5, 7, 1, 1), (5, 1, 9)], ids=str)
def test_a_view_is_enough(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device)
    assert rows_of(x).data_ptr() == x.data_ptr() and rows_of(x).shape == (x.numel() // shape[1], shape[1])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", [14, 16])  # with copies, and where it lies in 16 bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_may_be_changed_in_place(device: str, dtype: Any, size: int, frozen: bool) -> None:
    """As that of PyTorch's modules, in a residual block say."""
    layer = ConvBatchNorm2d(64, 64, device=device, dtype=dtype).requires_grad_(not frozen)
    x = torch.randn(64, 64, size, size, device=device, dtype=dtype)
    z = torch.ones(64, 1, 1, device=device, dtype=dtype, requires_grad=True)
    y = layer(x)
    y += z
    nn.functional.relu(y, inplace=True).sum().backward()
    assert z.grad is not None and (layer.conv.weight.grad is None) == frozen
    layer.eval()
    y = layer(x)
    y *= z


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "features"), SHAPES, ids=str)
def test_a_step_beside_float64(shape: tuple[int, ...], features: int, dtype: str, training: bool) -> None:
    """Each result has at most 1.1 times the error of PyTorch's modules, and half a unit of its dtype, norm-wise."""
    layer = layer_of(shape[1], features, dtype).train(training)
    layer.norm.running_mean.normal_()
    plain, exact = of_modules(layer), of_modules(layer, wide=True)
    x, dy = (torch.randn((shape[0], c, *shape[2:]), device="cuda").to(layer.conv.weight) for c in (shape[1], features))
    found = [step(layer, x, dy), step(plain, x, dy), step(exact, x.double(), dy)]
    assert found[0][0].is_contiguous() and found[0][1].is_contiguous()
    for mine, its, truth in zip(*found, strict=True):
        assert mine.dtype is its.dtype and mine.shape == its.shape
        if mine.is_floating_point():
            size = float(truth.norm())
            errors = [float((of.double() - truth).norm()) / size for of in (mine, its)]
            assert errors[0] <= 1.1 * errors[1] + torch.finfo(mine.dtype).eps / 2
        else:
            assert torch.equal(mine, its)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("autocast", [False, True])
def test_who_takes_them(autocast: bool) -> None:
    def taken(layer: Any, *shape: int, last: bool = False) -> bool:
        x = torch.randn(shape, device="cuda", dtype=torch.float32 if autocast else layer.conv.weight.dtype)
        x = x.to(memory_format=torch.channels_last) if last else x
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = layer(x.requires_grad_())
        return way_taken(y) == "copies"

    short = layer_of(64, 64, "float32" if autocast else "bfloat16")
    assert taken(short, 64, 64, 14, 14) and taken(short.eval(), 64, 64, 14, 14)
    assert not taken(short.train(), 4, 64, 14, 14), "PyTorch's modules are faster"
    assert not taken(short, 64, 64, 14, 14, last=True)
    assert not taken(short.eval(), 64, 64, 32, 32), "frozen, and cuDNN takes this length well"
    if not autocast:
        wide = layer_of(64, 64, "float32")
        assert taken(wide, 64, 64, 14, 14) and taken(wide, 8, 64, 64, 64)
        assert not taken(layer_of(64, 64, "float32", precision="high"), 64, 64, 14, 14)
        with tf32(True):
            assert not taken(wide, 64, 64, 14, 14), "cuDNN uses TF32"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_without_a_backward_few_features_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward_of = gsbn.torch._function.forward_of
    monkeypatch.setattr(gsbn.torch._function, "forward_of", lambda *a: calls.append(a) or forward_of(*a))
    x = torch.randn(128, 96, 14, 14, device="cuda")
    with torch.no_grad():
        for features, times in ((24, 0), (96, 1)):
            layer = layer_of(96, features, "float32").eval()
            y = layer(x)
            assert y.is_contiguous() and len(calls) == times
            torch.testing.assert_close(y, of_modules(layer)(x), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_gradients_in_any_layout_and_of_gradients() -> None:
    layer = layer_of(64, 64, "float32")
    plain = of_modules(layer, wide=True)
    x = torch.randn(64, 64, 14, 14, device="cuda", requires_grad=True)
    dy = torch.randn(64, 64, 14, 14, device="cuda")
    for given in (dy, dy.to(memory_format=torch.channels_last), dy[:1].expand_as(dy), dy._neg_view()):
        found = torch.autograd.grad(layer(x), [x, layer.conv.weight], given)
        wanted = torch.autograd.grad(plain(x.double()), [x, plain[0].weight], given.double())
        for a, b in zip(found, wanted, strict=True):
            assert float((a.double() - b).norm()) < 1e-5 * float(b.norm())
    found = []
    for model, leaf in ((layer, x), (plain, x.detach().double().requires_grad_())):
        weight = next(model.parameters())
        (gradient,) = torch.autograd.grad(model(leaf).sin().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [leaf, weight]))
    for a, b in zip(*found, strict=True):
        assert float((a.double() - b).norm()) < 1e-3 * float(b.norm())


@pytest.mark.gpu
def test_the_linear_layer_copies_by_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """y keeps its layout: the features are adjacent."""
    layer = LinearBatchNorm1d(64, 32, device="cuda")
    x, dy = torch.randn(20, 64, 99, device="cuda", requires_grad=True), torch.randn(20, 32, 99, device="cuda")
    y = layer(x)
    assert y.transpose(1, 2).is_contiguous()
    found = torch.autograd.grad(y, [x, layer.linear.weight], dy)
    rows = x.transpose(1, 2).reshape(-1, 64)
    layer.norm.reset_running_stats()
    wanted = torch.autograd.grad(layer(rows), [x, layer.linear.weight], dy.transpose(1, 2).reshape(-1, 32))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
