"""Converted models and layers on a CPU: PyTorch's own operators run, with the same results and speed."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import gsbn.torch  # noqa: E402

WIDTHS = {
    "MLP": (64, (64, 128, 128, 10)),
    "tiny": (8, (16, 8, 4)),
    "wide": (64, (512, 1024, 16)),
    "tall": (4096, (64, 32, 8)),
}


def network(*widths: int) -> nn.Sequential:
    rows: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths[:-1]):
        rows += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*rows, nn.Linear(widths[-2], widths[-1]))


def both(name: str) -> tuple[list[nn.Sequential], Any]:
    torch.manual_seed(0)
    rows, widths = WIDTHS[name]
    plain = network(*widths)
    ours = copy.deepcopy(plain)
    assert gsbn.torch.convert(ours).replaced
    return [plain, ours], torch.randn(rows, widths[0])


@pytest.mark.parametrize("name", WIDTHS)
def test_a_converted_model_trains_as_before(name: str) -> None:
    """The results have the same bits, since it is the same arithmetic."""
    models, x = both(name)
    losses = []
    for model in models:
        torch.manual_seed(1)
        optimiser = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimiser.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimiser.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for ours, theirs in zip(models[1].state_dict().values(), models[0].state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("training", [True, False])
def test_a_sync_batch_norm_alone_runs_as_before(training: bool, calls: list[Any]) -> None:
    """Without other ranks it is a BatchNorm1d to PyTorch, too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), nn.SyncBatchNorm(6), nn.ReLU()).train(training)
    ours = copy.deepcopy(plain)
    assert gsbn.torch.convert(ours).replaced
    x = torch.randn(16, 8)
    assert torch.equal(ours(x), plain(x)) and not calls


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WIDTHS)
def test_a_converted_model_takes_no_longer(name: str, training: bool) -> None:
    """The best of many alternating calls takes at most 1.1 times the plain model's. Five tries, for a busy machine."""
    models, x = both(name)
    optimisers = [torch.optim.Adam(model.train(training).parameters()) for model in models]

    def step(i: int) -> float:
        begun = time.perf_counter()
        if training:
            optimisers[i].zero_grad()
            models[i](x).square().mean().backward()
            optimisers[i].step()
        else:
            with torch.no_grad():
                models[i](x)
        return time.perf_counter() - begun

    ratios = []
    for _ in range(5):
        times = [[step(i) for i in range(2)] for _ in range(40)]
        plain, ours = (min(of) for of in zip(*times, strict=True))
        ratios.append(ours / plain)
        if ratios[-1] <= 1.1:
            return
    raise AssertionError(f"{min(ratios):.2f} times as long")


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_layer_is_its_modules(activation: Any) -> None:
    layer = gsbn.torch.LinearBatchNorm1d(24, 16, bias=True, scale=True, activation=activation)
    x = torch.randn(32, 24)
    linear, norm = copy.deepcopy(layer.linear), copy.deepcopy(layer.norm)
    want = norm(linear(x) * layer.scale)
    assert torch.equal(layer(x), want.relu() if activation else want)
    assert torch.equal(layer.norm.running_var, norm.running_var)
