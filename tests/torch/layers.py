"""Pairs of the layer and PyTorch's own modules, with equal parameters, batches and steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gsbn.torch import LinearBatchNorm1d
from tests.support.gradients import activate

I, O = 7, 5  # inputs and outputs
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"bias": True, "scale": True, "activation": "relu"},
    "not affine": {"affine": False, "scale": True},
    "no statistics": {"track_running_stats": False, "momentum": None, "bias": True},
    "cumulative": {"momentum": None, "activation": "relu"},
    "eps and momentum": {"eps": 1e-2, "momentum": 1},
    "renorm": {"renorm": (1.25, 0.5), "bias": True, "scale": True, "activation": "relu"},
    "renorm that warms up": {"renorm": (1.25, 0.5, 1), "momentum": None, "affine": False},
    "groups": {"groups": 4, "bias": True, "scale": True, "activation": "relu"},
    "groups, cumulative": {"groups": 2, "momentum": None, "affine": False},
    "groups, no statistics": {"groups": 4, "track_running_stats": False},
}


class Plain(nn.Module):
    """The same layer by PyTorch's modules."""

    def __init__(self, layer: LinearBatchNorm1d) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = copy.deepcopy((layer.linear, layer.norm, layer.scale))
        self.activation = layer.activation

    def forward(self, x: Any) -> Any:
        z = self.linear(x.transpose(1, 2) if x.dim() == 3 else x)
        z = z if self.scale is None else z * self.scale
        y = self.norm(z.transpose(1, 2) if x.dim() == 3 else z)
        return activate(y, self.activation)


def pair(device: str = "cpu", dtype: Any = torch.float64, **options: Any) -> tuple[LinearBatchNorm1d, Plain]:
    """Our layer and PyTorch's in the same state on any device, without values of 0 or 1."""
    torch.manual_seed(0)
    layer = LinearBatchNorm1d(I, O, dtype=dtype, **options).to(device)  # random numbers differ between devices
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


def channels_adjacent(x: Any) -> Any:
    """The same (N, C, ...) with adjacent channels."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def way_taken(y: Any) -> str | None:
    """How gsbn has computed a contiguous y of a contiguous x: "in place" or by "copies"; None if it has not."""
    if getattr(y.grad_fn, "samples", None) is not None:
        return "in place"
    return "copies" if y.grad_fn.name() == "_TransposeBackward" else None


def assert_same(found: list[Any], wanted: list[Any], close: float = 1e-10) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


def assert_replay_is_a_step(step: Callable[[], Any]) -> None:
    """A replay of a step's CUDA graph writes the bits that a step returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which makes what the step reads
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for array in found:
        array.fill_(float("nan"))
    graph.replay()
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def replayed(step: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A copy of what ``step`` returned in a capture, after one replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(), step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    graph.replay()
    torch.cuda.synchronize()
    return made.clone()


def tf32(allowed: bool) -> Any:
    """A context in which cuDNN's convolutions may use TF32, or may not."""
    cudnn = torch.backends.cudnn  # whose flags() sets all flags
    same = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")}
    return cudnn.flags(**same, allow_tf32=allowed)
