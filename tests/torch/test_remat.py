"""Layers whose forward stores no deviations, under autograd and in recorded programs."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

from gsbn.torch import ConvBatchNorm1d, LinearBatchNorm1d, linear_batch_norm  # noqa: E402
from gsbn.torch._operators import TRAIN  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper", "fresh_dynamo")]

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


def bytes_kept(call: Any, x: Any) -> int:
    """Return the bytes that a call allocates for its backward."""
    leaf = x.detach().requires_grad_()
    gc.collect()  # what an earlier call left in cycles is not freed during this one
    before = torch.cuda.memory_allocated()
    y = call(leaf)
    return torch.cuda.memory_allocated() - before - y.numel() * y.element_size()


def gradients(call: Any, x: Any, dy: Any, parameters: Any = None) -> list[Any]:
    """Return the gradients of x and of the parameters, by default those of `call`."""
    leaf = x.detach().requires_grad_()
    return list(torch.autograd.grad(call(leaf), [leaf, *(parameters or call.parameters())], dy))


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
    recorded = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    assert_near(gradients(layer, x, dy), gradients(recorded, x, dy), 3 * EPS)
    assert bytes_kept(recorded, x) > ROWS * FEATURES * 2  # a program for any number of rows stores them


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}])
def test_a_recorded_program_keeps_none(options: dict[str, Any]) -> None:
    """A program for one number of rows computes the gradients of an eager call, bit by bit."""
    layer, x = layer_and_batch()
    dy = torch.randn(ROWS, FEATURES, device="cuda", dtype=x.dtype)
    wanted = gradients(layer, x, dy)
    recorded = torch.compile(layer, fullgraph=True, dynamic=False, **options)
    for _ in range(3):
        assert all(map(torch.equal, gradients(recorded, x, dy), wanted))
    if "mode" not in options:  # the memory of CUDA graphs is always allocated
        assert bytes_kept(recorded, x) < ROWS * FEATURES


@pytest.mark.parametrize("residual", [False, True])
def test_a_recorded_program_under_autocast(residual: bool) -> None:
    layer, x = layer_and_batch(torch.float32)
    more = [torch.randn(ROWS, FEATURES, device="cuda", dtype=torch.bfloat16)] if residual else []
    dy = torch.randn(ROWS, FEATURES, device="cuda", dtype=torch.bfloat16)

    def run(call: Any) -> list[Any]:
        with torch.autocast("cuda", torch.bfloat16):
            return gradients(lambda x: call(x, *more), x, dy, layer.parameters())

    found = run(torch.compile(layer, fullgraph=True, dynamic=False))
    assert_near(found, run(layer), 3 * EPS)  # it does not round dweight


def test_an_exported_program_stores_the_deviations() -> None:
    """It may run on another GPU, where no kernel computes g again."""
    layer, x = layer_and_batch()
    layer.forward = lambda x: linear_batch_norm(x, layer.linear.weight, training=True)
    program = torch.export.export(layer, (x,), strict=False)
    called = next(node for node in program.graph.nodes if node.target is TRAIN)
    assert called.kwargs.get("remat") is None and len(called.args) < len(TRAIN._schema.arguments)
    assert_near([program.module()(x)], [layer(x)], EPS)


def test_the_operator_copies_operands_off_16_bytes() -> None:
    layer, x = layer_and_batch()
    norm, weight = layer.norm, layer.linear.weight.detach()
    vectors = (None, None, norm.weight, norm.bias, norm.running_mean, norm.running_var, None)
    more = (1.0, 0.1, 1e-5, "highest", "auto", "relu", None, None, None, None, 1, None, True)
    wanted = TRAIN(x, weight, *vectors, *more)
    assert wanted[1].shape == (ROWS, 0)
    off = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    for given in (off, x.T.contiguous().T):
        assert all(map(torch.equal, TRAIN(given, weight.T.contiguous().T, *vectors, *more), wanted))


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


def test_the_operator_stores_deviations_unless_told() -> None:
    layer, x = layer_and_batch()
    norm = layer.norm
    more = (norm.running_mean, norm.running_var, None, 1.0, 0.1, 1e-5, "highest", "auto", "relu")
    made = TRAIN(x, layer.linear.weight, None, None, norm.weight, norm.bias, *more)
    assert made[1].shape == (ROWS, FEATURES)
