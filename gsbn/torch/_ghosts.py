"""Define GhostBatchNorm1d, which computes ghost batch normalisation by PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._values import ghost_count


class GhostBatchNorm1d(nn.BatchNorm1d):
    """Apply ghost batch normalisation (Hoffer et al. 2017): call an ``nn.BatchNorm1d`` for each ghost batch.

    The batch is cut into `groups` ghost batches of consecutive rows. Each ghost batch is normalised with its own
    statistics. The ghost batches update the running statistics one after another. `LinearBatchNorm1d` with `groups` has
    this module as its `norm`, and `convert` accepts it after an ``nn.Linear``. If it is called by itself, it loops over
    the ghost batches. ``torch.jit.script`` supports it in ``eval()`` only. ``nn.SyncBatchNorm.convert_sync_batchnorm``
    would replace it. Its parameters and buffers and their names are those of ``nn.BatchNorm1d``: each of the two
    modules loads the other's state_dict, and in ``eval()`` both compute the same.

    Parameters
    ----------
    num_features : int
    groups : int
        The number of ghost batches, which must divide N. pytorch-tabnet sets the number of rows of a ghost batch
        instead: `groups` is N / virtual_batch_size.
    eps, momentum, affine, track_running_stats, device, dtype
        As for ``nn.BatchNorm1d``.

    Raises
    ------
    TypeError, ValueError
        `groups` is not an int, or it is below 1. In training, a call also raises if `groups` does not divide N, or if a
        ghost batch has one value per channel.

    Attributes
    ----------
    groups : int
        The number of ghost batches. It may be changed at any time.

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
        """Normalise an input (N, C) or (N, C, L), and keep its shape. A ghost batch has N / groups samples."""
        if self.groups == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        ghost_count(self.groups, input.shape[0])
        forward = super().forward
        return torch.cat([forward(run) for run in input.tensor_split(self.groups)])

    def __prepare_scriptable__(self) -> nn.BatchNorm1d:
        """Return an nn.BatchNorm1d, which computes the same in inference, for torch.jit.script."""
        if self.training:
            raise RuntimeError("GhostBatchNorm1d: torch.jit.script supports it in eval() only")
        made = nn.BatchNorm1d(1, device="meta")
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "groups"})
        return made

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}"
