"""Models whose own ``forward`` calls Linear and BatchNorm1d, written anew from papers and libraries.

Each is made of its widths, and has ``batch(rows)``: what it is called with.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Head(nn.Module):
    """A model of batches of one kind: `views` matrices of `inputs` columns."""

    views = 1

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs

    def batch(self, rows: int, seed: int = 0, dtype: Any = torch.float32) -> tuple[Any, ...]:
        return tuple(_numbers(seed + 50 * view, (rows, self.inputs), dtype) for view in range(self.views))

    def without_dropout(self) -> Head:
        """The same model, which drops nothing: two candidates would drop different numbers."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return self


def _numbers(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


class GraphMLP(Head):
    """PyTorch Geometric's MLP: lists of layers and of norms, called in turn; the last layer is plain."""

    def __init__(self, *widths: int) -> None:
        super().__init__(widths[0])
        self.drop = nn.Dropout(0.25)
        self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths[1:-1])
        self.act = nn.ReLU()

    def forward(self, x: Any, return_emb: bool | None = None) -> Any:
        emb = None
        for lin, norm in zip(self.lins[:-1], self.norms, strict=True):
            x = self.act(norm(lin(x)))
            x = functional.dropout(x, p=self.drop.p, training=self.training)
            emb = x
        x = self.lins[-1](x)
        return (x, emb) if return_emb else x


class FCLayers(Head):
    """scvi-tools' FCLayers: a Sequential for each layer that is never called; its modules are, with covariates beside
    the input of each Linear."""

    def __init__(self, *widths: int, categories: int = 3) -> None:
        super().__init__(widths[0])
        self.categories = categories
        self.fc_layers = nn.Sequential()
        for i, (a, b) in enumerate(pairwise(widths)):
            norm = nn.BatchNorm1d(b, momentum=0.01, eps=0.001)
            layer = nn.Sequential(nn.Linear(a + categories, b), norm, nn.ReLU(), nn.Dropout(p=0.1))
            self.fc_layers.add_module(f"Layer {i}", layer)

    def batch(self, rows: int, seed: int = 0, dtype: Any = torch.float32) -> tuple[Any, ...]:
        return *super().batch(rows, seed, dtype), torch.arange(rows) % self.categories

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

    def __init__(self, inputs: int, wide: int, narrow: int, classes: int) -> None:
        super().__init__(inputs)
        self.fc1, self.bn1, self.drop1 = nn.Linear(inputs, wide), nn.BatchNorm1d(wide), nn.Dropout(0.4)
        self.fc2, self.bn2, self.drop2 = nn.Linear(wide, narrow), nn.BatchNorm1d(narrow), nn.Dropout(0.5)
        self.fc3 = nn.Linear(narrow, classes)

    def forward(self, x: Any) -> Any:
        x = self.drop1(functional.relu(self.bn1(self.fc1(x))))
        x = self.drop2(functional.relu(self.bn2(self.fc2(x))))
        return functional.log_softmax(self.fc3(x), -1)


class Critic(Head):
    """CrossQ's critic: the batch holds the state and the next one, so that both share the statistics, and no target
    network is needed. A norm stands before the first layer, too."""

    def __init__(self, states: int, actions: int, *hidden: int) -> None:
        super().__init__(states)
        self.actions = actions
        widths = (states + actions, *hidden)
        self.first = nn.BatchNorm1d(widths[0], momentum=0.01)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, momentum=0.01) for width in hidden)
        self.value = nn.Linear(widths[-1], 1)

    def batch(self, rows: int, seed: int = 0, dtype: Any = torch.float32) -> tuple[Any, ...]:
        return *super().batch(rows, seed, dtype), _numbers(seed + 50, (rows, self.actions), dtype)

    def forward(self, states: Any, actions: Any) -> Any:
        x = self.first(torch.cat((states, actions), 1))
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = norm(layer(x)).relu()
        return self.value(x)


class SimSiam(Head):
    """A projector of three layers, whose last norm has no weight, and a predictor; no gradient through the targets."""

    views = 2

    def __init__(self, inputs: int, hidden: int, out: int, bottleneck: int) -> None:
        super().__init__(inputs)
        self.fc1, self.bn1 = nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden)
        self.fc2, self.bn2 = nn.Linear(hidden, hidden, bias=False), nn.BatchNorm1d(hidden)
        self.fc3, self.bn3 = nn.Linear(hidden, out), nn.BatchNorm1d(out, affine=False)
        self.fc4, self.bn4 = nn.Linear(out, bottleneck, bias=False), nn.BatchNorm1d(bottleneck)
        self.fc5 = nn.Linear(bottleneck, out)
        self.relu = nn.ReLU(inplace=True)

    def view(self, x: Any) -> tuple[Any, Any]:
        x = self.relu(self.bn1(self.fc1(x)))
        x = self.relu(self.bn2(self.fc2(x)))
        z = self.bn3(self.fc3(x))
        return z, self.fc5(self.relu(self.bn4(self.fc4(z))))

    def forward(self, a: Any, b: Any) -> Any:
        (za, pa), (zb, pb) = self.view(a), self.view(b)
        return pa, pb, za.detach(), zb.detach()


class BarlowTwins(Head):
    """A projector that ends in a plain Linear, a norm without weight over it, and the correlation of two views."""

    views = 2

    def __init__(self, inputs: int, hidden: int, out: int) -> None:
        super().__init__(inputs)
        self.fc1, self.bn1 = nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden)
        self.fc2, self.bn2 = nn.Linear(hidden, hidden, bias=False), nn.BatchNorm1d(hidden)
        self.fc3, self.bn = nn.Linear(hidden, out, bias=False), nn.BatchNorm1d(out, affine=False)

    def project(self, x: Any) -> Any:
        x = functional.relu(self.bn1(self.fc1(x)), inplace=True)
        return self.fc3(torch.relu(self.bn2(self.fc2(x))))

    def forward(self, a: Any, b: Any) -> Any:
        return self.bn(self.project(a)).T @ self.bn(self.project(b)) / a.shape[0]
