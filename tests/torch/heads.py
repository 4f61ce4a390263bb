"""The models of ``gsbn.bench._heads``, small, with the loss of their training: `loss(*inputs)` of `batch(seed)`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gsbn.bench import _heads as heads

ROWS, IN, OUT = 24, 7, 5


class Small:
    """What all of them have."""

    rows = ROWS

    def batch(self: Any, seed: int) -> Any:
        return super().batch(self.rows, seed, torch.float64)  # type: ignore[misc]

    def loss(self: Any, *inputs: Any) -> Any:
        return self(*inputs).square().mean()


class GraphMLP(Small, heads.GraphMLP):
    def __init__(self) -> None:
        super().__init__(IN, 8, 6, OUT)


class FCLayers(Small, heads.FCLayers):
    def __init__(self) -> None:
        super().__init__(IN, 8, OUT)


class PointClassifier(Small, heads.PointClassifier):
    def __init__(self) -> None:
        super().__init__(IN, 8, 6, OUT)

    def loss(self, *inputs: Any) -> Any:
        y = self(*inputs)
        return functional.nll_loss(y, torch.arange(len(y), device=y.device) % OUT)


class Critic(Small, heads.Critic):
    rows = 2 * ROWS

    def __init__(self) -> None:
        super().__init__(IN, 2, 16, 16)

    def loss(self, *inputs: Any) -> Any:
        now, after = self(*inputs).chunk(2)
        return (now - (1 + 0.99 * after.detach())).square().mean()


class SimSiam(Small, heads.SimSiam):
    def __init__(self) -> None:
        super().__init__(IN, 8, 6, 4)

    def loss(self, *inputs: Any) -> Any:
        pa, pb, za, zb = self(*inputs)
        return -(functional.cosine_similarity(pa, zb) + functional.cosine_similarity(pb, za)).mean() / 2


class BarlowTwins(Small, heads.BarlowTwins):
    def __init__(self) -> None:
        super().__init__(IN, 8, 6)

    def loss(self, *inputs: Any) -> Any:
        found = self(*inputs)
        return (found - torch.eye(len(found), dtype=found.dtype, device=found.device)).square().sum()
