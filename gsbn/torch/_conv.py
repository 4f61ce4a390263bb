"""Define ConvBatchNorm1d and ConvBatchNorm2d, the layers of 1x1 convolutions."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .._typing import Activation, Precision
from .._values import flag, type_name
from ._activations import module_of
from ._groups import check_group
from ._layer import Layer, check_options
from ._modules import FOLLOWERS, SyncBatchNorm, are_plain, fused, not_pointwise
from ._residual import check_residual


class ConvBatchNorm(Layer):
    """The base class of the layers of one and two dimensions, which say what modules they consist of."""

    _conv: ClassVar[Any]
    _norm: ClassVar[Any]
    conv: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        bias: bool = False,
        affine: bool = True,
        activation: Activation | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        precision: Precision = "highest",
        process_group: Any = None,
    ) -> None:
        for name, given in (("bias", bias), ("affine", affine)):
            flag(name, given)
        check_options(activation, precision)
        check_group(process_group)
        super().__init__()
        conv = self._conv(in_channels, out_channels, 1, bias=bias, device=device, dtype=dtype)
        of_norm = out_channels, eps, momentum, affine, track_running_stats, device, dtype
        shared = process_group is not None
        norm = SyncBatchNorm(*of_norm, process_group=process_group) if shared else self._norm(*of_norm)
        self._fill(conv=conv, norm=norm, activation=activation, precision=precision)

    @classmethod
    def from_modules(
        cls, conv: Any, norm: Any, activation: Activation | None = None, *, precision: Precision = "highest"
    ) -> Any:
        """Make a layer from existing modules, which it does not copy, as `LinearBatchNorm1d.from_modules` does.

        Parameters
        ----------
        conv : nn.Conv1d or nn.Conv2d
            A convolution of the layer's number of dimensions, with a kernel and a stride of 1, no padding and no
            groups. It becomes `layer.conv`.
        norm : nn.BatchNorm1d, nn.BatchNorm2d or nn.SyncBatchNorm
            A module with as many features as `conv` has output channels. It becomes `layer.norm`.
        activation, precision
            As for the layer.

        Returns
        -------
        ConvBatchNorm1d or ConvBatchNorm2d

        Raises
        ------
        TypeError, ValueError
            An argument has a wrong type, a module is lazy and has not run, the convolution is not 1x1, or the numbers
            of features differ.

        Examples
        --------
        >>> from torch import nn
        >>> import gsbn.torch
        >>> conv, norm = nn.Conv2d(64, 32, 1), nn.BatchNorm2d(32)
        >>> gsbn.torch.ConvBatchNorm2d.from_modules(conv, norm, "relu").conv is conv
        True
        """
        lazy = nn.modules.lazy.LazyModuleMixin
        if not isinstance(conv, cls._conv) or isinstance(conv, lazy):
            raise TypeError(f"conv: expected an nn.{cls._conv.__name__} that is not lazy, got {type_name(conv)}")
        if not isinstance(norm, FOLLOWERS[cls._conv]) or isinstance(norm, lazy):
            names = f"nn.{cls._norm.__name__} or nn.SyncBatchNorm"
            raise TypeError(f"norm: expected an {names} that is not lazy, got {type_name(norm)}")
        why = not_pointwise(conv)
        if why is not None:
            raise ValueError(f"conv: expected a 1x1 convolution, but {why}")
        if norm.num_features != conv.out_channels:
            raise ValueError(
                f"norm: expected {conv.out_channels} features, as many as conv has output channels, got "
                f"{norm.num_features}"
            )
        check_options(activation, precision)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._fill(conv=conv, norm=norm, activation=activation, precision=precision)
        return made

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute y from x. If there is a residual, which has y's shape, add it before the activation."""
        conv: Any = self._modules["conv"]
        norm: Any = self._modules["norm"]
        if are_plain(x, conv, norm, self.precision):
            return cast(Tensor, fused(x, conv, None, norm, self.activation, self.precision, "auto", residual))
        if isinstance(x, Proxy) and x.tracer.root is not self:
            return cast(Tensor, self._node(x, residual))
        y = norm(conv(x))
        if residual is not None:
            if not (isinstance(x, Proxy) or torch.jit.is_tracing()):
                check_residual(residual, y.shape, y.device)
            y = y + residual
        return cast(Tensor, y if self.activation is None else module_of(self.activation)(y))

    def __prepare_scriptable__(self) -> nn.Module:
        """Return PyTorch's own modules in one module, which torch.jit.script compiles."""
        after = nn.Identity() if self.activation is None else module_of(self.activation)
        made = _Scriptable(self.conv, self.norm, after)
        made.training = self.training
        return made

    def fold(self) -> nn.Module:
        """Fold the layer in ``eval()`` into one convolution, as `LinearBatchNorm1d.fold` makes one Linear.

        Returns
        -------
        nn.Conv1d, nn.Conv2d or nn.Sequential
            A new 1x1 convolution with a bias. If the layer has an activation, ``nn.Sequential(Conv, …)`` with the
            activation's module.

        Raises
        ------
        ValueError
            The layer has no running statistics.

        Examples
        --------
        >>> import gsbn.torch
        >>> gsbn.torch.ConvBatchNorm1d(64, 32).eval().fold()
        Conv1d(64, 32, kernel_size=(1,), stride=(1,))
        """
        conv = self.conv
        into = self._conv(conv.in_channels, conv.out_channels, 1, device="meta")  # meta draws no random numbers
        return self._fold(conv, None, into)


class ConvBatchNorm1d(ConvBatchNorm):
    """Run 1x1 Conv1d, BatchNorm1d and an optional activation as one call of gsbn.

    `conv` is an ``nn.Conv1d`` of kernel size 1 and `norm` an ``nn.BatchNorm1d``, with their usual initialisation. They
    hold the parameters and the running statistics, and the names in the ``state_dict`` are ``conv.*`` and ``norm.*``. A
    second argument of a call is a residual of y's shape, which is added before the activation.

    Parameters
    ----------
    in_channels, out_channels : int
        The numbers of channels of the input and of the output.
    bias : bool
        Whether the convolution has a bias. In training it has no effect on y, because the mean is subtracted.
    affine, eps, momentum, track_running_stats
        As in ``nn.BatchNorm1d``.
    activation : {"relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "elu"} or tuple, optional
        The activation that is applied to the output, as in `gsbn.forward`.
    device, dtype
        The device and the dtype of the parameters.
    precision : str
        As in `gsbn.forward`. It has an effect only where gsbn computes the layer.
    process_group : torch.distributed.ProcessGroup, optional
        As in `LinearBatchNorm1d`.

    Raises
    ------
    TypeError, ValueError
        `activation` or `precision` is not an allowed value, or `process_group` is not a ProcessGroup.

    Notes
    -----
    The input is (N, in_channels, L), and the output is (N, out_channels, L). gsbn computes the layer if the channels of
    x are adjacent in memory, as in ``z.transpose(1, 2)`` of a contiguous (N, L, C) tensor, or if L is 1. The channels
    of y are then adjacent, too; but ``torch.compile`` copies such an x, and y is contiguous. gsbn also takes a
    contiguous x, and returns a contiguous y: in 16 bits on Hopper if L is a multiple of 8 and at least 64, and, with
    copies, where it is faster than PyTorch's modules (see the guide). For any other input, on a CPU, and if a module is
    not plain (see `LinearBatchNorm1d`), PyTorch's own modules compute the layer, in the precision that PyTorch is set
    to. Ranks that share a batch use gsbn in every layout.

    Examples
    --------
    >>> import torch
    >>> import gsbn.torch
    >>> layer = gsbn.torch.ConvBatchNorm1d(64, 32, activation="relu")
    >>> layer(torch.randn(8, 20, 64).transpose(1, 2)).shape
    torch.Size([8, 32, 20])
    """

    _conv, _norm = nn.Conv1d, nn.BatchNorm1d


class ConvBatchNorm2d(ConvBatchNorm):
    """Run 1x1 Conv2d, BatchNorm2d and an optional activation as one call of gsbn.

    Everything is as in `ConvBatchNorm1d`, in two dimensions: `conv` is an ``nn.Conv2d`` and `norm` an
    ``nn.BatchNorm2d``, the input is (N, in_channels, H, W) and the output (N, out_channels, H, W). The channels are
    adjacent in memory in the format ``torch.channels_last``; y then has this format, too.

    Examples
    --------
    >>> import torch
    >>> import gsbn.torch
    >>> layer = gsbn.torch.ConvBatchNorm2d(64, 32, activation="relu").to(memory_format=torch.channels_last)
    >>> x = torch.randn(8, 64, 14, 14).to(memory_format=torch.channels_last)
    >>> layer(x).shape
    torch.Size([8, 32, 14, 14])
    """

    _conv, _norm = nn.Conv2d, nn.BatchNorm2d


class _Scriptable(nn.Module):
    """A module that runs the layer's modules in sequence, with the same names in the state_dict."""

    def __init__(self, conv: nn.Module, norm: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.after = conv, norm, after

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        u = self.norm(self.conv(x))
        y: Tensor = self.after(u if residual is None else u + residual)
        return y
