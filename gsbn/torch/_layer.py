"""Define LinearBatchNorm1d, and the base class of all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .._arrays.check import GEMMS, PRECISIONS, checked_activation
from .._fold import fold
from .._renorm import Renorm
from .._typing import Activation, Gemm, Precision
from .._values import choice, flag, ghost_count, type_name
from ._activations import module_of
from ._function import check_features, require_tensors
from ._ghosts import GhostBatchNorm1d
from ._groups import check_group
from ._modules import SyncBatchNorm, are_plain, fused
from ._renorm import BatchRenorm1d
from ._residual import check_residual

_USUAL = {"activation": None, "precision": "highest", "gemm": "auto"}


def check_options(activation: Any, precision: Any, gemm: Any = "auto") -> None:
    """Raise if one of these options of a layer is not an allowed value."""
    checked_activation(activation)
    choice("precision", precision, PRECISIONS)
    choice("gemm", gemm, GEMMS)


class Layer(nn.Module):
    """The base class of the layers. Each has a module that multiplies, `norm`, and the options of gsbn's call."""

    norm: Any
    activation: Activation | None
    precision: Precision

    def _fill(self, **attributes: Any) -> None:
        """Set the attributes of a new layer: its modules and its options."""
        for name, value in attributes.items():
            setattr(self, name, value)
        self.training = self.norm.training

    def _node(self, x: Any, residual: Any) -> Any:
        """Return the layer's one node in a program that torch.fx records, as for PyTorch's modules."""
        inputs = (x,) if residual is None else (x, residual)
        return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), inputs, {})

    def extra_repr(self) -> str:
        shown: dict[str, Any] = {"scale": True} if getattr(self, "scale", None) is not None else {}
        options = {name: getattr(self, name, usual) for name, usual in _USUAL.items()}
        shown |= {name: value for name, value in options.items() if value != _USUAL[name]}
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def _fold(self, product: Any, scale: Any, into: Any) -> Any:
        """Fold the layer into a module like `product`, and add the activation's module if there is one."""
        norm = self.norm
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError("fold: expected running statistics, got a layer of track_running_stats=False")
        statistics = norm.running_mean, norm.running_var
        vectors = {"bias": product.bias, "gamma": norm.weight, "beta": norm.bias}
        with torch.no_grad():
            weight, bias = fold(product.weight.flatten(1), scale, *statistics, eps=norm.eps, **vectors)
            weight = weight.view_as(product.weight)
        into.weight, into.bias = nn.Parameter(weight), nn.Parameter(bias)
        return into if self.activation is None else nn.Sequential(into, module_of(self.activation))


class LinearBatchNorm1d(Layer):
    """Run Linear, an optional scale, BatchNorm1d and an optional activation as one call of gsbn.

    `linear` is an ``nn.Linear`` and `norm` an ``nn.BatchNorm1d``, with their usual initialisation. They hold the
    parameters and the running statistics. The layer reads these and does not call the modules. It calls both modules
    instead of gsbn if one of them is not plain (it has hooks or a parametrization, or was replaced by something else),
    and under ``torch.jit.trace`` and ``torch.func``.

    Parameters
    ----------
    in_features, out_features : int
        The number of features of the input and of the output.
    bias : bool
        Whether the Linear has a bias. In training it has no effect on y, because BatchNorm1d subtracts the mean.
    scale : bool
        Whether the layer has a parameter `scale` of shape (out_features,), which multiplies the output of the Linear.
        It is initialised to 1.
    affine, eps, momentum, track_running_stats
        As in ``nn.BatchNorm1d``.
    activation : {"relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "elu"} or tuple, optional
        The activation that is applied to the output, as in `gsbn.forward`. ``("leaky_relu", 0.2)`` sets the slope,
        ``("elu", 0.5)`` sets alpha.
    device, dtype
        The device and the dtype of the parameters.
    precision, gemm : str
        As in `gsbn.forward`.
    process_group : torch.distributed.ProcessGroup, optional
        In training the statistics are those of the rows of all ranks of this group, as with ``nn.SyncBatchNorm``.
        `norm` is then a `gsbn.torch.SyncBatchNorm`. None uses only the rows of this rank.
    renorm : Renorm, (r_max, d_max), or tensor of two elements, optional
        Batch renormalisation, as in `gsbn.forward`. `norm` is then a `gsbn.torch.BatchRenorm1d`.
    groups : int
        The number of ghost batches, as in `gsbn.forward`. If it is above 1, `norm` is a `gsbn.torch.GhostBatchNorm1d`,
        and `process_group` and `renorm` must be None.

    Raises
    ------
    TypeError, ValueError
        `activation`, `precision` or `gemm` is not an allowed value, `process_group` is not a ProcessGroup, `renorm` is
        wrong or is given without running statistics, or `groups` is not a positive int or is above 1 with
        `process_group` or `renorm`.

    Attributes
    ----------
    linear : nn.Linear
    norm : nn.BatchNorm1d
    scale : Parameter or None
    activation : str, tuple or None
    precision, gemm : str
        Both may be changed at any time.

    Notes
    -----
    The input is (N, in_features) or, as for ``BatchNorm1d``, (N, in_features, L). The output is (N, out_features) or
    (N, out_features, L). If x is (N, L, in_features), as for ``nn.Linear``, pass ``x.transpose(1, 2)``, which is not
    copied. Without the transpose a ValueError says how x was read, unless L and in_features are equal. A contiguous (N,
    in_features, L) is copied, except in 16 bits on Hopper if L is a multiple of 8 and at least 64. The layer's optional
    second argument is a residual of y's shape, which is added before the activation, as in `linear_batch_norm`.
    ``train()`` and ``eval()`` work as for BatchNorm1d; the layer reads `norm.training`. The names in the ``state_dict``
    are ``scale``, ``linear.weight``, ``linear.bias``, ``norm.weight``, ``norm.bias``, ``norm.running_mean``,
    ``norm.running_var`` and ``norm.num_batches_tracked``.

    Examples
    --------
    >>> import torch
    >>> import gsbn.torch
    >>> layer = gsbn.torch.LinearBatchNorm1d(64, 32, activation="relu")
    >>> layer(torch.randn(256, 64)).shape
    torch.Size([256, 32])

    With a residual the layer computes relu(norm(linear(x)) + residual):

    >>> layer(torch.randn(256, 64), torch.randn(256, 32)).shape
    torch.Size([256, 32])
    """

    linear: nn.Linear
    norm: nn.BatchNorm1d
    scale: nn.Parameter | None
    gemm: Gemm

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
        renorm: Renorm | tuple[float, float] | Tensor | None = None,
        groups: int = 1,
    ) -> None:
        for name, chosen in (("bias", bias), ("scale", scale), ("affine", affine)):  # `from_modules` takes parameters
            flag(name, chosen)
        check_options(activation, precision, gemm)
        check_group(process_group)
        ghost_count(groups)
        for name, given in (("process_group", process_group), ("renorm", renorm)):
            if groups > 1 and given is not None:
                raise ValueError(f"groups: expected 1 with {name}, got {groups}")
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        of_norm = out_features, eps, momentum, affine, track_running_stats, device, dtype
        if renorm is not None:
            if not track_running_stats:
                raise ValueError("track_running_stats: expected True with renorm, got False")
            options: Any = {"process_group": process_group, "device": device, "dtype": dtype}
            norm: Any = BatchRenorm1d(out_features, renorm, eps, momentum, affine, **options)
        elif groups > 1:
            norm = GhostBatchNorm1d(out_features, groups, *of_norm[1:5], device=device, dtype=dtype)
        elif process_group is None:
            norm = nn.BatchNorm1d(*of_norm)
        else:
            norm = SyncBatchNorm(*of_norm, process_group=process_group)
        ones = nn.Parameter(torch.ones(out_features, device=device, dtype=dtype)) if scale else None
        self.register_parameter("scale", ones)
        self._fill(linear=linear, norm=norm, activation=activation, precision=precision, gemm=gemm)

    @classmethod
    def from_modules(
        cls,
        linear: nn.Linear,
        norm: nn.BatchNorm1d | nn.SyncBatchNorm,
        scale: nn.Parameter | None = None,
        activation: Activation | None = None,
        *,
        precision: Precision = "highest",
        gemm: Gemm = "auto",
    ) -> LinearBatchNorm1d:
        """Make a layer from existing modules.

        The layer uses the modules themselves, not copies: parameters, running statistics, hooks, mode and device are
        shared, and an existing optimiser continues to work.

        Parameters
        ----------
        linear : nn.Linear
            The module that becomes `layer.linear`.
        norm : nn.BatchNorm1d or nn.SyncBatchNorm
            A module with as many features as `linear` has outputs. It becomes `layer.norm`.
        scale : Parameter, optional
            A parameter of shape (out_features,) or with one element. It becomes `layer.scale`.
        activation, precision, gemm
            As for `LinearBatchNorm1d`.

        Returns
        -------
        LinearBatchNorm1d

        Raises
        ------
        TypeError, ValueError
            An argument has a wrong type, a module is lazy and has not run, or the numbers of features differ.

        Notes
        -----
        The names in the state_dict are those of any layer, ``linear.*`` and ``norm.*``. If a checkpoint has the names
        that the modules have in the model, load it before this call, or rename its keys as in `docs/guide/pytorch.md`.

        Examples
        --------
        In a model whose ``forward`` computes ``relu(bn1(fc1(x)))``:

        >>> from torch import nn
        >>> import gsbn.torch
        >>> model = nn.ModuleDict({"fc1": nn.Linear(64, 32), "bn1": nn.BatchNorm1d(32)})
        >>> layer = gsbn.torch.LinearBatchNorm1d.from_modules(model["fc1"], model["bn1"], activation="relu")
        >>> layer.linear.weight is model["fc1"].weight
        True
        """
        if not isinstance(linear, nn.Linear) or isinstance(linear, nn.LazyLinear):
            raise TypeError(f"linear: expected an nn.Linear that is not lazy, got {type_name(linear)}")
        if not isinstance(norm, (nn.BatchNorm1d, nn.SyncBatchNorm)) or isinstance(norm, nn.LazyBatchNorm1d):
            raise TypeError(
                f"norm: expected an nn.BatchNorm1d or nn.SyncBatchNorm that is not lazy, got {type_name(norm)}"
            )
        if scale is not None and not isinstance(scale, nn.Parameter):
            raise TypeError(f"scale: expected an nn.Parameter or None, got {type_name(scale)}")
        features = linear.out_features
        if norm.num_features != features:
            raise ValueError(
                f"norm: expected {features} features, as many as linear has outputs, got {norm.num_features}"
            )
        if scale is not None and tuple(scale.shape) != (features,) and scale.numel() != 1:
            raise ValueError(f"scale: expected shape ({features},) or one element, got shape {tuple(scale.shape)}")
        check_options(activation, precision, gemm)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.register_parameter("scale", scale)
        made._fill(linear=linear, norm=norm, activation=activation, precision=precision, gemm=gemm)
        return made

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute y from x. If there is a residual, which has y's shape, add it before the activation."""
        modules, parameters = self._modules, self._parameters
        linear: Any = modules["linear"]
        norm: Any = modules["norm"]
        scale: Any = parameters["scale"] if "scale" in parameters else self.scale  # noqa: SIM401  what get() would ask
        if are_plain(x, linear, norm):
            return fused(x, linear, scale, norm, self.activation, self.precision, self.gemm, residual)
        if isinstance(x, Proxy) and x.tracer.root is not self:
            return self._node(x, residual)
        if not isinstance(x, Proxy):
            require_tensors(x=x)
        if x.dim() == 3 and isinstance(linear, nn.Linear) and not torch.jit.is_tracing():
            check_features(x, linear.in_features)
        z = linear(x.transpose(1, 2) if x.dim() == 3 else x)
        z = z if scale is None else z * scale
        z = z.transpose(1, 2) if x.dim() == 3 else z
        if not (residual is None or isinstance(x, Proxy) or torch.jit.is_tracing()):
            check_residual(residual, z.shape, z.device)
        y = norm(z)
        y = y if residual is None else y + residual
        return y if self.activation is None else module_of(self.activation)(y)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return PyTorch's own modules in one module, which torch.jit.script compiles."""
        after = nn.Identity() if self.activation is None else module_of(self.activation)
        made = _Scriptable(self.linear, self.scale, self.norm, after)
        made.training = self.training
        return made

    def fold(self) -> nn.Linear | nn.Sequential:
        """Fold the layer in ``eval()`` into one ``nn.Linear``.

        Returns
        -------
        nn.Linear or nn.Sequential
            A new Linear with a bias, in the weight's dtype and on its device. `gsbn.fold` computes it in float64 from
            the current running statistics. If the layer has an activation, ``nn.Sequential(Linear, …)`` with the
            activation's module.

        Raises
        ------
        ValueError
            The layer has no running statistics.

        Examples
        --------
        >>> import gsbn.torch
        >>> gsbn.torch.LinearBatchNorm1d(64, 32).eval().fold()
        Linear(in_features=64, out_features=32, bias=True)
        """
        linear = self.linear
        into = nn.Linear(linear.in_features, linear.out_features, device="meta")  # meta draws no random numbers
        return self._fold(linear, self.scale, into)


class _Scriptable(nn.Module):
    """A module that runs the layer's modules in sequence, with the same names in the state_dict."""

    def __init__(self, linear: nn.Linear, scale: nn.Parameter | None, norm: nn.BatchNorm1d, after: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm, self.after = linear, norm, after
        self.register_parameter("scale", scale)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        z = self.linear(x.transpose(1, 2) if x.dim() == 3 else x)
        if self.scale is not None:
            z = z * self.scale
        u = self.norm(z.transpose(1, 2) if x.dim() == 3 else z)
        y: Tensor = self.after(u if residual is None else u + residual)
        return y
