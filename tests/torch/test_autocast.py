"""The cast of a weight under autocast, which layers that are called twice share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

from gsbn.torch import LinearBatchNorm1d  # noqa: E402
from gsbn.torch._autograd import cast_weight  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")
KIND = torch.bfloat16


@pytest.fixture
def weight(device: str) -> Any:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(24, 40, device=device))


@pytest.fixture
def autocast(device: str) -> Iterator[None]:
    with torch.autocast(device, KIND):
        yield


def shared(weight: Any) -> bool:
    """Whether two calls get the same memory; both must have the weight's numbers."""
    first, second = cast_weight(weight, KIND), cast_weight(weight, KIND)
    for found in (first, second):
        assert found.dtype is KIND
        assert not found.requires_grad
        assert torch.equal(found, weight.detach().to(KIND))
    return bool(first.data_ptr() == second.data_ptr())


def test_two_calls_share_it_until_autocast_ends(weight: Any, device: str) -> None:
    for _ in range(2):
        with torch.autocast(device, KIND):
            assert shared(weight)
        with torch.no_grad():
            weight.mul_(2)


def test_it_is_that_of_pytorchs_operators(weight: Any, autocast: None) -> None:
    found = cast_weight(weight, KIND)
    x = torch.randn(3, 40, device=weight.device, requires_grad=True)
    node = nn.functional.linear(x, weight).grad_fn
    nn.functional.linear(x, weight).sum().backward()
    assert node is not None and weight.grad is not None and weight.grad.abs().sum() > 0
    assert shared(weight) and cast_weight(weight, KIND).data_ptr() == found.data_ptr()


@pytest.mark.parametrize("change", ["in place", "data"])
def test_a_weight_that_changed_is_cast_anew(weight: Any, autocast: None, change: str) -> None:
    assert shared(weight)
    if change == "data":
        weight.data = weight.detach() * 2
    else:
        with torch.no_grad():
            weight.mul_(2)
    assert not shared(weight)


def test_what_autocast_does_not_keep_is_not_shared(weight: Any, device: str) -> None:
    with torch.autocast(device, KIND, cache_enabled=False):
        assert not shared(weight)
    with torch.autocast(device, KIND):
        with torch.no_grad():
            assert not shared(weight)
        assert not shared(weight.detach())
        assert not shared(weight * 1)
        y = nn.functional.linear(torch.randn(3, 40, device=device), weight)
    assert y.requires_grad  # a cast without a gradient must not get into the cache


def test_hooks_on_saved_tensors_see_nothing_new(weight: Any, autocast: None) -> None:
    seen: list[Any] = []
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        assert not shared(weight)
    assert not seen


def test_two_views_of_a_batch(device: str) -> None:
    """y and the gradients have the bits of a layer that casts for each call."""
    torch.manual_seed(0)
    layer = LinearBatchNorm1d(40, 24, activation="relu", device=device)
    views = [torch.randn(64, 40, device=device) for _ in range(2)]
    found = []
    for cache in (True, False):
        layer.zero_grad()
        with torch.autocast(device, KIND, cache_enabled=cache):
            ys = [layer(view) for view in views]
        sum(y.float().square().sum() for y in ys).backward()
        found.append([*(y.detach() for y in ys), *(p.grad.clone() for p in layer.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
def test_a_graph_replays_its_own_cast() -> None:
    layer = LinearBatchNorm1d(40, 24, affine=False, device="cuda")
    x = torch.randn(64, 40, device="cuda")
    with torch.autocast("cuda", KIND):
        layer(x)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(x)
        with torch.cuda.graph(graph, stream=stream):
            y = layer(x)
    with torch.no_grad():
        layer.linear.weight.copy_(torch.randn(24, 40, device="cuda"))
    graph.replay()
    with torch.autocast("cuda", KIND):
        torch.testing.assert_close(y, layer(x))


@pytest.mark.gpu
def test_streams_cast_for_themselves() -> None:
    weight = nn.Parameter(torch.randn(24, 40, device="cuda"))
    with torch.autocast("cuda", KIND):
        first = cast_weight(weight, KIND)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert cast_weight(weight, KIND).data_ptr() != first.data_ptr()
