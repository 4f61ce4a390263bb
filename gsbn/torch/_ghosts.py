"""GhostBatchNorm1d: the module of ghost batch normalisation, in PyTorch's own operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._values import group_count


class GhostBatchNorm1d(nn.BatchNorm1d):
    """Ghost batch normalisation (Hoffer et al. 2017): an ``nn.BatchNorm1d`` that sees a batch in `groups` runs of rows.

    Each run has statistics of its own, and updates the running statistics as a batch, one after the other. It is a
    layer's `norm` with `groups`, and `convert` takes it as an ``nn.BatchNorm1d``. Called by itself it is a loop over
    the runs; ``torch.jit.script`` takes it in ``eval()`` alone. It has the parameters, the statistics and the names of
    ``nn.BatchNorm1d``, so that either loads the other's state_dict; ``eval()`` is the same.

    Parameters
    ----------
    num_features : int
    groups : int
        The number of runs; a batch has a multiple of it. pytorch-tabnet gives a run's size instead,
        `virtual_batch_size`: for batches of B rows `groups` is B / virtual_batch_size.
    eps, momentum, affine, track_running_stats, device, dtype
        As for ``nn.BatchNorm1d``.

    Raises
    ------
    TypeError, ValueError
        `groups` is not a positive int.

    Attributes
    ----------
    groups : int
        It may be changed at any time.

    Examples
    --------
    >>> import torch
    >>> import gsbn.torch
    >>> norm = gsbn.torch.GhostBatchNorm1d(32, 4)
    >>> norm(torch.randn(64, 32)).shape, norm.num_batches_tracked.item()
    (torch.Size([64, 32]), 4)
    """

    def __init__(
        self,
        num_features: int,
        groups: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group_count(groups)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.groups = groups

    def forward(self, input: Tensor) -> Tensor:
        """(N, C) or (N, C, L) to the same shape; with L, a run is N / groups samples."""
        if self.groups == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        check_divides(self.groups, input.shape[0])
        forward = super().forward
        return torch.cat([forward(run) for run in input.tensor_split(self.groups)])

    def __prepare_scriptable__(self) -> nn.BatchNorm1d:
        """For torch.jit.script: in inference it is an nn.BatchNorm1d."""
        if self.training:
            raise RuntimeError("GhostBatchNorm1d: torch.jit.script supports it in eval() only")
        made = nn.BatchNorm1d(1, device="meta")
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "groups"})
        return made

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}"


def check_divides(groups: Any, rows: Any) -> None:
    """Raise ValueError if a batch of so many rows, or samples, has no such groups."""
    if rows % groups:
        raise ValueError(f"groups: expected a divisor of x's {rows} rows, got {groups}")
