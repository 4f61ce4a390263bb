"""Layers whose forward stores no deviations, under autograd and in recorded programs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

from gsbn.torch import ConvBatchNorm1d, LinearBatchNorm1d  # noqa: E402
from gsbn.torch._operators import TRAIN  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

ROWS, INPUTS, FEATURES = 60001, 64, 200
EPS = torch.finfo(torch.bfloat16).eps


def layer_and_batch(dtype: Any = torch.bfloat16) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layer = LinearBatchNorm1d(INPUTS, FEATURES, activation="relu", device="cuda", dtype=dtype)
    return layer, torch.randn(ROWS, INPUTS, device="cuda", dtype=dtype)


def kept_by(layer: Any, x: Any, unpack: Any = lambda t: t) -> tuple[Any, list[Any]]:
    """Return y, and the tensors that autograd keeps."""
    kept: list[Any] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, unpack):
        return layer(x), kept


def gradients(layer: Any, x: Any, dy: Any) -> list[Any]:
    leaf = x.detach().requires_grad_()
    return list(torch.autograd.grad(layer(leaf), [leaf, *layer.parameters()], dy))


def assert_near(found: list[Any], wanted: list[Any], bound: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


def test_no_deviations_are_kept() -> None:
    _, kept = kept_by(*layer_and_batch())
    assert (ROWS, 0) in [tuple(t.shape) for t in kept]
    assert sum(t.numel() * t.element_size() for t in kept) < 1.1 * ROWS * INPUTS * 2


def test_the_gradients_are_those_of_stored_deviations() -> None:
    """Stored deviations, dg and the gradients are rounded: half an eps each, in either backward."""
    layer, x = layer_and_batch()
    dy = torch.randn(ROWS, FEATURES, device="cuda", dtype=x.dtype)
    recorded = torch.compile(layer, backend="eager", fullgraph=True)
    assert_near(gradients(layer, x, dy), gradients(recorded, x, dy), 3 * EPS)


@pytest.mark.parametrize("needed", ["gamma", "weight", "x"])
def test_one_gradient_alone(needed: str) -> None:
    layer, x = layer_and_batch()
    dy = torch.randn(ROWS, FEATURES, device="cuda", dtype=x.dtype)
    of_x, of_weight, of_gamma, *_ = gradients(layer, x, dy)
    layer.linear.weight.requires_grad_(needed == "weight")
    layer.norm.weight.requires_grad_(needed == "gamma")
    layer.norm.bias.requires_grad_(False)
    x.requires_grad_(needed == "x")
    layer(x).backward(dy)
    got = {"x": x, "weight": layer.linear.weight, "gamma": layer.norm.weight}[needed].grad
    assert torch.equal(got, {"x": of_x, "weight": of_weight, "gamma": of_gamma}[needed])


def test_a_broadcast_dy_and_a_backward_twice() -> None:
    layer, x = layer_and_batch()
    wanted = gradients(layer, x, torch.ones(ROWS, FEATURES, device="cuda", dtype=x.dtype))
    leaf = x.requires_grad_()
    total = layer(leaf).sum()
    for retain in (True, False):
        found = torch.autograd.grad(total, [leaf, *layer.parameters()], retain_graph=retain)
        assert all(map(torch.equal, found, wanted))


def test_a_hook_may_return_other_memory() -> None:
    def unaligned(t: Any) -> Any:
        if t.dtype is not torch.bfloat16 or t.numel() == 0:
            return t
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    layer, x = layer_and_batch()
    dy = torch.randn(ROWS, FEATURES, device="cuda", dtype=x.dtype)
    wanted = gradients(layer, x, dy)
    leaf = x.requires_grad_()
    y, _ = kept_by(layer, leaf, unaligned)
    assert all(map(torch.equal, torch.autograd.grad(y, [leaf, *layer.parameters()], dy), wanted))


def test_second_derivatives_follow_the_call() -> None:
    layer, x = layer_and_batch()
    dy = torch.randn(ROWS, FEATURES, device="cuda", dtype=x.dtype)
    wanted = gradients(layer, x, dy)
    leaf = x.requires_grad_()
    found = torch.autograd.grad(layer(leaf), [leaf, *layer.parameters()], dy, create_graph=True)
    assert found[0].requires_grad
    assert_near([a.detach() for a in found], wanted, 6 * EPS)  # PyTorch also rounds g and its gradient


def test_autocast_gives_float32_gradients() -> None:
    layer, x = layer_and_batch(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        y, kept = kept_by(layer, x.requires_grad_())
    assert (ROWS, 0) in [tuple(t.shape) for t in kept]
    y.float().square().sum().backward()
    assert x.grad.dtype is layer.linear.weight.grad.dtype is torch.float32
    assert torch.isfinite(layer.linear.weight.grad).all()


def test_convolutions_keep_none() -> None:
    """With channels last, x is a matrix of rows."""
    torch.manual_seed(0)
    layer = ConvBatchNorm1d(INPUTS, FEATURES, activation="relu", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(ROWS // 1000, 1000, INPUTS, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    dy = torch.randn(ROWS // 1000, FEATURES, 1000, device="cuda", dtype=torch.bfloat16)
    _, kept = kept_by(layer, x)
    assert 0 in [t.numel() for t in kept]
    assert_near(gradients(layer, x, dy), gradients(layer, x.contiguous(), dy), 3 * EPS)


def test_a_recorded_program_stores_the_deviations() -> None:
    layer, x = layer_and_batch()
    norm = layer.norm
    more = (norm.running_mean, norm.running_var, None, 1.0, 0.1, 1e-5, "highest", "auto", "relu")
    made = TRAIN(x, layer.linear.weight, None, None, norm.weight, norm.bias, *more)
    assert made[1].shape == (ROWS, FEATURES)
