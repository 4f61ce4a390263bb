"""GhostBatchNorm1d: the module of ghost batch normalisation, in PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._values import ghost_count


class GhostBatchNorm1d(nn.BatchNorm1d):
    """Ghost batch normalisation (Hoffer et al. 2017): an ``nn.BatchNorm1d`` that is called for each ghost batch.

    The batch is cut into `groups` ghost batches of consecutive rows. Each is normalised with its own statistics, and
    updates the running statistics, in order. `LinearBatchNorm1d` with `groups` has this module as its `norm`, and
    `convert` takes it behind an ``nn.Linear``. Called by itself it is a loop; ``torch.jit.script`` supports it in
    ``eval()`` only, and ``nn.SyncBatchNorm.convert_sync_batchnorm`` would replace it. Parameters, buffers and their
    names are those of ``nn.BatchNorm1d``: each loads the other's state_dict, and in ``eval()`` both compute the same.

    Parameters
    ----------
    num_features : int
    groups : int
        The number of ghost batches, a divisor of N. pytorch-tabnet gives the rows of one instead: `groups` is N /
        virtual_batch_size.
    eps, momentum, affine, track_running_stats, device, dtype
        As for ``nn.BatchNorm1d``.

    Raises
    ------
    TypeError, ValueError
        `groups` is not an int, or below 1. In a call in training: it does not divide N, or a ghost batch has one value
        per channel.

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
        ghost_count(groups)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.groups = groups

    def forward(self, input: Tensor) -> Tensor:
        """(N, C) or (N, C, L) to the same shape; a ghost batch is N / groups samples."""
        if self.groups == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        ghost_count(self.groups, input.shape[0])
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
