"""gsbn inside PyTorch's autograd: `gsbn.torch.convert` on a plain model.

As a script it trains a classifier of handwritten digits twice, with the plain modules and with gsbn, from the same
weights, and compares the loss curves; then once more under autocast, compiled, and replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys

try:
    import torch
    from torch import nn
except ModuleNotFoundError:
    sys.exit("torch_autograd: needs PyTorch: pip install torch")

import gsbn.torch


class Scale(nn.Module):
    """``x * scale``, feature by feature, as in KernelBench's problems: `convert` is told of it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def classifier(hidden: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = ((nn.Linear(i, hidden), Scale(hidden), nn.BatchNorm1d(hidden), nn.ReLU()) for i in (64, hidden))
    return nn.Sequential(*first, *second, nn.Linear(hidden, 10))


def with_gsbn(model: nn.Module) -> nn.Module:
    """A copy that gsbn runs."""
    model = copy.deepcopy(model)
    report = gsbn.torch.convert(model, scales=(Scale,))
    print(report)
    assert len(report.replaced) == 2 and not report.left
    return model


def train(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, steps: int, autocast: bool = False) -> list[float]:
    """The loss at every step of plain SGD over batches of 256."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        at = torch.arange(step * 256, (step + 1) * 256, device=x.device) % len(x)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(x[at]).float(), labels[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        sys.exit("torch_autograd: needs scikit-learn for the data: pip install scikit-learn")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and importlib.util.find_spec("cupy") is None:
        sys.exit("torch_autograd: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    if device == "cpu" and importlib.util.find_spec("ml_dtypes") is None:
        sys.exit("torch_autograd: needs ml_dtypes for bfloat16 on the CPU: pip install ml_dtypes")
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(data.target, device=device)
    plain = classifier().to(device)
    ours = with_gsbn(plain)
    assert list(ours.state_dict()) == list(plain.state_dict())
    compiled, cast, plain_cast = copy.deepcopy(ours), copy.deepcopy(ours), copy.deepcopy(plain)

    theirs = train(plain, x, labels, steps)
    losses = train(ours, x, labels, steps)
    print(
        f"{device}: loss {losses[0]:.4f} -> {losses[-1]:.4f}; furthest from PyTorch's curve {gap(losses, theirs):.1e}"
    )
    assert gap(losses, theirs) < 1e-3  # float32 roundings, amplified from step to step
    assert losses[-1] < losses[0] / 4

    half, half_theirs = train(cast, x, labels, steps, autocast=True), train(plain_cast, x, labels, steps, autocast=True)
    print(f"autocast to bfloat16: loss {half[-1]:.4f}, PyTorch's {half_theirs[-1]:.4f}")
    assert gap(half, half_theirs) < 0.1

    fused = torch.compile(compiled, fullgraph=True, dynamic=False)  # fullgraph: a graph break would be an error
    again = train(fused, x, labels, steps)
    print(f"torch.compile: furthest from eager {gap(again, losses):.1e}")
    assert gap(again, losses) < 1e-3

    if device == "cuda":
        replayed(ours, x[:256], labels[:256])


def replayed(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> None:
    """A whole training step in a CUDA graph, the optimiser included."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            before = step().item()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(20):
        graph.replay()
    print(f"CUDA graph: loss {before:.4f} -> {loss.item():.4f} in 20 replays")
    assert loss.item() < before


if __name__ == "__main__":
    main()
