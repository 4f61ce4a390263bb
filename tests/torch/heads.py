"""Models whose own `forward` calls Linear and BatchNorm1d, written anew from papers and libraries.

Each has `batch(seed)`, its inputs, and `loss(*inputs)`, which calls the model as its training does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROWS, IN, OUT = 24, 7, 5


def numbers(seed: int, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


class Head(nn.Module):
    def batch(self, seed: int) -> tuple[Any, ...]:
        return (numbers(seed, ROWS, IN),)

    def loss(self, *inputs: Any) -> Any:
        return self(*inputs).square().mean()


class GraphMLP(Head):
    """PyTorch Geometric's MLP: lists of layers and of norms, called in turn; the last layer is plain."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (IN, 8, 6, OUT)
        self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in sizes[1:-1])
        self.act = nn.ReLU()

    def forward(self, x: Any, return_emb: bool | None = None) -> Any:
        emb = None
        for lin, norm in zip(self.lins[:-1], self.norms, strict=True):
            x = self.act(norm(lin(x)))
            x = functional.dropout(x, p=0.25, training=self.training)
            emb = x
        x = self.lins[-1](x)
        return (x, emb) if return_emb else x


class FCLayers(Head):
    """scvi-tools' FCLayers: a Sequential for each layer that is never called; its modules are, with covariates beside
    the input of each Linear."""

    def __init__(self, categories: int = 3) -> None:
        super().__init__()
        self.categories = categories
        self.fc_layers = nn.Sequential()
        for i, (a, b) in enumerate(((IN, 8), (8, OUT))):
            norm = nn.BatchNorm1d(b, momentum=0.01, eps=0.001)
            layer = nn.Sequential(nn.Linear(a + categories, b), norm, nn.ReLU(), nn.Dropout(p=0.1))
            self.fc_layers.add_module(f"Layer {i}", layer)

    def batch(self, seed: int) -> tuple[Any, ...]:
        return *super().batch(seed), torch.arange(ROWS) % self.categories

    def forward(self, x: Any, *covariates: Any) -> Any:
        hot = [functional.one_hot(each, self.categories).to(x.dtype) for each in covariates]
        for layers in self.fc_layers:
            for layer in layers:
                if isinstance(layer, nn.BatchNorm1d) and x.dim() == 3:
                    x = torch.cat([layer(part).unsqueeze(0) for part in x], dim=0)
                    continue
                if isinstance(layer, nn.Linear):
                    x = torch.cat((x, *hot), dim=-1)
                x = layer(x)
        return x


class PointClassifier(Head):
    """The classifier behind PointNet++'s features: functions, dropout, and log_softmax at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1, self.drop1 = nn.Linear(IN, 8), nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.fc2, self.bn2, self.drop2 = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.fc3 = nn.Linear(6, OUT)

    def forward(self, x: Any) -> Any:
        x = self.drop1(functional.relu(self.bn1(self.fc1(x))))
        x = self.drop2(functional.relu(self.bn2(self.fc2(x))))
        return functional.log_softmax(self.fc3(x), -1)

    def loss(self, *inputs: Any) -> Any:
        y = self(*inputs)
        return functional.nll_loss(y, torch.arange(len(y), device=y.device) % OUT)


class Critic(Head):
    """CrossQ's critic: the batch holds the state and the next one, so that both share the statistics, and no target
    network is needed. A norm stands before the first layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(IN + 2, momentum=0.01)
        self.hidden = nn.ModuleList([nn.Linear(IN + 2, 16), nn.Linear(16, 16)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(16, momentum=0.01), nn.BatchNorm1d(16, momentum=0.01)])
        self.value = nn.Linear(16, 1)

    def batch(self, seed: int) -> tuple[Any, ...]:
        return numbers(seed, 2 * ROWS, IN), numbers(seed + 50, 2 * ROWS, 2)

    def forward(self, states: Any, actions: Any) -> Any:
        x = self.first(torch.cat((states, actions), 1))
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = norm(layer(x)).relu()
        return self.value(x)

    def loss(self, *inputs: Any) -> Any:
        now, after = self(*inputs).chunk(2)
        return (now - (1 + 0.99 * after.detach())).square().mean()


class SimSiam(Head):
    """A projector of three layers, whose last norm has no weight, and a predictor; no gradient through the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(IN, 8, bias=False), nn.BatchNorm1d(8)
        self.fc2, self.bn2 = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.fc3, self.bn3 = nn.Linear(8, 6), nn.BatchNorm1d(6, affine=False)
        self.fc4, self.bn4 = nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)
        self.fc5 = nn.Linear(4, 6)
        self.relu = nn.ReLU(inplace=True)

    def batch(self, seed: int) -> tuple[Any, ...]:
        return numbers(seed, ROWS, IN), numbers(seed + 50, ROWS, IN)

    def view(self, x: Any) -> tuple[Any, Any]:
        x = self.relu(self.bn1(self.fc1(x)))
        x = self.relu(self.bn2(self.fc2(x)))
        z = self.bn3(self.fc3(x))
        return z, self.fc5(self.relu(self.bn4(self.fc4(z))))

    def forward(self, a: Any, b: Any) -> Any:
        (za, pa), (zb, pb) = self.view(a), self.view(b)
        return pa, pb, za.detach(), zb.detach()

    def loss(self, *inputs: Any) -> Any:
        pa, pb, za, zb = self(*inputs)
        return -(functional.cosine_similarity(pa, zb) + functional.cosine_similarity(pb, za)).mean() / 2


class BarlowTwins(Head):
    """A projector that ends in a plain Linear, a norm without weight over it, and the correlation of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(IN, 8, bias=False), nn.BatchNorm1d(8)
        self.fc2, self.bn2 = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.fc3, self.bn = nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6, affine=False)

    batch = SimSiam.batch

    def project(self, x: Any) -> Any:
        x = functional.relu(self.bn1(self.fc1(x)), inplace=True)
        return self.fc3(torch.relu(self.bn2(self.fc2(x))))

    def forward(self, a: Any, b: Any) -> Any:
        return self.bn(self.project(a)).T @ self.bn(self.project(b)) / a.shape[0]

    def loss(self, *inputs: Any) -> Any:
        found = self(*inputs)
        return (found - torch.eye(len(found), dtype=found.dtype, device=found.device)).square().sum()
