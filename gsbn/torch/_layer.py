"""The layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._arrays.check import ACTIVATIONS, GEMMS, PRECISIONS
from .._fold import fold
from .._typing import Activation, Gemm, Precision
from .._values import choice
from ._groups import check_group
from ._modules import NAMES, SyncBatchNorm, are_plain, fused


class LinearBatchNorm1d(nn.Module):
    """Linear, perhaps a scale, BatchNorm1d, perhaps ReLU: three or four modules in one call of gsbn.

    `linear` is an ``nn.Linear`` and `norm` an ``nn.BatchNorm1d``, initialised as such; they hold the parameters and the
    running statistics. Neither is called: the layer reads them. Only where one of them is not plain (it has hooks or a
    parametrization, or something else was put in its place), and under ``torch.jit.trace`` and ``torch.func``, both are
    called, and gsbn is not.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of one row of the input and of the output.
    bias : bool
        Whether the Linear has one. In training BatchNorm1d subtracts it again with the mean, so it is of no use there.
    scale : bool
        Whether there is a parameter `scale` (out_features) between the Linear and the BatchNorm1d, at first 1.
    affine, eps, momentum, track_running_stats
        BatchNorm1d's.
    activation : {"relu"}, optional
        What follows.
    device, dtype
        Where the parameters are made, and of what dtype.
    precision, gemm : str
        As in `gsbn.forward`.
    process_group : torch.distributed.ProcessGroup, optional
        In training the statistics are those of the rows of all its ranks, as with ``nn.SyncBatchNorm``; None is this
        rank's rows alone. `norm` is a `gsbn.torch.SyncBatchNorm` then.

    Raises
    ------
    TypeError, ValueError
        An `activation`, `precision` or `gemm` that is none of the words, a `process_group` that is none.

    Attributes
    ----------
    linear : nn.Linear
    norm : nn.BatchNorm1d
    scale : Parameter or None
    activation, precision, gemm : str
        May be set at any time.

    Notes
    -----
    The input is (N, in_features) or, as ``BatchNorm1d`` takes it, (N, in_features, L); the output has out_features
    instead. An ``nn.Linear`` takes (N, L, in_features), which is another layout: transpose it, then nothing is copied.
    ``train()`` and ``eval()`` act as on BatchNorm1d; it is `norm.training` that counts. Names in the ``state_dict``:
    ``scale``, ``linear.weight``, ``linear.bias``, ``norm.weight``, ``norm.bias``, ``norm.running_mean``,
    ``norm.running_var`` and ``norm.num_batches_tracked``.

    Examples
    --------
    >>> import torch
    >>> import gsbn.torch
    >>> layer = gsbn.torch.LinearBatchNorm1d(64, 32, activation="relu")
    >>> layer(torch.randn(256, 64)).shape
    torch.Size([256, 32])
    """

    linear: nn.Linear
    norm: nn.BatchNorm1d
    scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        scale: bool = False,
        affine: bool = True,
        activation: Activation | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        precision: Precision = "highest",
        gemm: Gemm = "auto",
        process_group: Any = None,
    ) -> None:
        if activation is not None:
            choice("activation", activation, ACTIVATIONS)
        choice("precision", precision, PRECISIONS)
        choice("gemm", gemm, GEMMS)
        check_group(process_group)
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias, device, dtype)
        of_norm = out_features, eps, momentum, affine, track_running_stats, device, dtype
        if process_group is None:
            self.norm = nn.BatchNorm1d(*of_norm)
        else:
            self.norm = SyncBatchNorm(*of_norm, process_group=process_group)
        ones = nn.Parameter(torch.ones(out_features, device=device, dtype=dtype)) if scale else None
        self.register_parameter("scale", ones)
        self.activation = activation
        self.precision = precision
        self.gemm = gemm

    def forward(self, x: Tensor) -> Tensor:
        """y of x."""
        modules, parameters = self._modules, self._parameters
        linear: Any = modules["linear"]
        norm: Any = modules["norm"]
        scale: Any = parameters["scale"] if "scale" in parameters else self.scale  # noqa: SIM401  what get() would ask
        if are_plain(x, linear, norm):
            return fused(x, linear, scale, norm, self.activation, self.precision, self.gemm)
        z = linear(x.transpose(1, 2) if x.dim() == 3 else x)
        z = z if scale is None else z * scale
        y = norm(z.transpose(1, 2) if x.dim() == 3 else z)
        return y if self.activation is None else self._module()(y)

    def _module(self) -> nn.Module:
        """PyTorch's of the activation."""
        choice("activation", self.activation, ACTIVATIONS)
        return next(module for module, name in NAMES.items() if name == self.activation)()

    def __prepare_scriptable__(self) -> nn.Module:
        """For torch.jit.script, which runs PyTorch's own modules."""
        after = nn.Identity() if self.activation is None else self._module()
        made = _Scriptable(self.linear, self.scale, self.norm, after)
        made.training = self.training
        return made

    def extra_repr(self) -> str:
        shown: dict[str, Any] = {"scale": True} if self.scale is not None else {}
        shown |= {"activation": self.activation} if self.activation is not None else {}
        shown |= {"precision": self.precision} if self.precision != "highest" else {}
        shown |= {"gemm": self.gemm} if self.gemm != "auto" else {}
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def fold(self) -> nn.Linear | nn.Sequential:
        """What the layer computes in ``eval()``, as PyTorch's own modules.

        Returns
        -------
        nn.Linear or nn.Sequential
            A new Linear with bias, of the weight's dtype and device, computed in float64 by `gsbn.fold`; with an
            activation, ``nn.Sequential(Linear, ReLU)``. It holds the running statistics of now.

        Raises
        ------
        ValueError
            A layer without running statistics.
        """
        linear, norm = self.linear, self.norm
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError("fold: expected running statistics, got a layer of track_running_stats=False")
        with torch.no_grad():
            weight, bias = fold(
                linear.weight,
                self.scale,
                norm.running_mean,
                norm.running_var,
                bias=linear.bias,
                gamma=norm.weight,
                beta=norm.bias,
                eps=norm.eps,
            )
        made = nn.Linear(linear.in_features, linear.out_features, device="meta")  # which draws no random numbers
        made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
        return made if self.activation is None else nn.Sequential(made, self._module())


class _Scriptable(nn.Module):
    """The layer's modules one after the other, under its names in the state_dict."""

    def __init__(self, linear: nn.Linear, scale: nn.Parameter | None, norm: nn.BatchNorm1d, after: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm, self.after = linear, norm, after
        self.register_parameter("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x.transpose(1, 2) if x.dim() == 3 else x)
        if self.scale is not None:
            z = z * self.scale
        y: Tensor = self.after(self.norm(z.transpose(1, 2) if x.dim() == 3 else z))
        return y
