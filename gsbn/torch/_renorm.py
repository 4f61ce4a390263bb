"""Define BatchRenorm1d, which computes batch renormalisation by PyTorch's own operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._renorm import Renorm, renorm_of
from ._groups import check_group


class BatchRenorm1d(nn.BatchNorm1d):
    """Apply batch renormalisation (see `gsbn.Renorm`): an ``nn.BatchNorm1d`` with limits.

    A layer with `renorm` has this module as its `norm`, and `convert` treats it like an ``nn.BatchNorm1d``. If it is
    called by itself, it uses PyTorch's own operators. ``torch.jit.script`` supports it in ``eval()`` only. It has the
    parameters, the statistics and the names of ``nn.BatchNorm1d``: each of the two modules loads the other's
    state_dict, and in ``eval()`` both compute the same.

    Parameters
    ----------
    num_features : int
    renorm : Renorm, (r_max, d_max), or tensor of two elements
        The limits, as in `gsbn.forward`. A tensor becomes a buffer that is not in the state_dict; change it in place.
    eps, momentum, affine, device, dtype
        As for ``nn.BatchNorm1d``. torchrl uses a momentum of 0.01, CrossQ uses 0.01 or 0.001.
    process_group : torch.distributed.ProcessGroup, optional
        In training the statistics are those of the rows of all ranks of this group. Only gsbn's layers support it. None
        uses only the rows of this rank. Use this argument instead of ``nn.SyncBatchNorm.convert_sync_batchnorm``, which
        would replace the module.

    Raises
    ------
    TypeError, ValueError
        The limits are wrong, or `process_group` is not a ProcessGroup.
    RuntimeError
        The module is called by itself in training, with a `process_group`.

    Attributes
    ----------
    renorm : Renorm or tensor

    Examples
    --------
    >>> import gsbn.torch
    >>> norm = gsbn.torch.BatchRenorm1d(32, (3.0, 5.0, 10_000), momentum=0.01)
    >>> norm.renorm.warmup
    10000
    """

    renorm: Any

    def __init__(
        self,
        num_features: int,
        renorm: Renorm | tuple[float, float] | Tensor = Renorm(),  # noqa: B008  immutable
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        process_group: Any = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_group(process_group)
        super().__init__(num_features, eps, momentum, affine, True, device, dtype)
        if isinstance(renorm, Tensor):
            self.register_buffer("renorm", renorm, persistent=False)
        else:
            self.renorm = renorm_of(renorm)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalise an input of shape (N, C) or (N, C, L), and return the same shape."""
        count, running_mean, running_var = self.num_batches_tracked, self.running_mean, self.running_var
        if not self.training:
            return super().forward(input)
        if self.process_group is not None:
            raise RuntimeError("BatchRenorm1d: expected to be called by a LinearBatchNorm1d, got a process_group")
        self._check_input_dim(input)
        assert count is not None and running_mean is not None and running_var is not None
        limits = self.renorm
        r_max, d_max = limits.to(running_var.dtype) if isinstance(limits, Tensor) else limits[:2]
        with torch.no_grad():
            z, dims = input.to(running_var.dtype), [i for i in range(input.dim()) if i != 1]
            sigma, of_running = (z.var(dims, False) + self.eps).sqrt(), (running_var + self.eps).sqrt()
            ratio = torch.clamp(sigma / of_running, 1 / r_max, r_max)
            shift = torch.clamp((z.mean(dims) - running_mean) / of_running, -d_max, d_max)
            if not isinstance(limits, Tensor) and limits.warmup:
                warm = count < limits.warmup
                ratio, shift = ratio.where(~warm, 1), shift.where(~warm, 0)
            count.add_(1)
            momentum = 1 / float(count) if self.momentum is None else self.momentum
        y = functional.batch_norm(input, running_mean, running_var, None, None, True, momentum, self.eps)
        gamma, beta = self.weight, self.bias
        ratio, shift = (ratio, shift) if gamma is None else (ratio * gamma, shift * gamma + beta)
        shape = (1, -1, *[1] * (input.dim() - 2))
        return torch.addcmul(shift.view(shape), y, ratio.view(shape)).to(input.dtype)

    def __prepare_scriptable__(self) -> nn.BatchNorm1d:
        """Return an nn.BatchNorm1d, which computes the same in inference, for torch.jit.script."""
        if self.training:
            raise RuntimeError("BatchRenorm1d: torch.jit.script supports it in eval() only")
        made = nn.BatchNorm1d(1, device="meta")
        own = {name: value for name, value in self.__dict__.items() if name not in ("renorm", "process_group")}
        made.__dict__.update(own, _buffers={n: b for n, b in self._buffers.items() if n != "renorm"})
        return made

    def extra_repr(self) -> str:
        shown = "on the device" if isinstance(self.renorm, Tensor) else tuple(self.renorm)
        return f"{super().extra_repr()}, renorm={shown}"
