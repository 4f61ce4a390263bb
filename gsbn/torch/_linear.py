"""Define `linear`, and the `Linear` that `convert` makes from an nn.Linear with ``linear=True``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, nn
from torch.autograd import Function
from torch.nn import functional

from .._arrays.admit import is_memory
from .._arrays.check import GEMMS, PRECISIONS, checked_activation
from .._backward import How
from .._backward import run as backward_run
from .._cuda import kernels
from .._forward import linear as of_arrays
from .._plan.activations import follows_from_y
from .._typing import Activation, Gemm, Precision
from .._values import choice
from ._activations import apply, before
from ._again import as_variables
from ._autograd import cast, goes_again, is_compiling, is_watched, kind_of_tensor, needed_of, widens
from ._function import is_transformed, require_tensors

# `Linear` calls gsbn for at least so many multiplications. With fewer, a training step waits for the host, which needs
# longer for gsbn's autograd node than for PyTorch's.
LEAST_MULTIPLICATIONS = 2**31
_PLAIN = (Tensor, nn.Parameter)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    precision: Precision = "highest",
    gemm: Gemm = "auto",
) -> Tensor:
    """Compute ``activation(x @ weight.T + bias)`` as `gsbn.linear` does, with support for autograd and autocast.

    On a CPU, under torch.compile, and inside ``torch.jit.trace``, forward-mode differentiation and the transforms of
    ``torch.func``, PyTorch's own operators compute it. They also compute second derivatives and batched gradients.

    Parameters
    ----------
    x : (..., I) tensor
        float32, float16, bfloat16 or float64.
    weight : (O, I) tensor
        It has x's dtype, except under autocast, which casts both as in ``nn.Linear``.
    bias : (O,) tensor, optional
    activation, precision, gemm
        As in `gsbn.linear`.

    Returns
    -------
    y : (..., O) tensor
        It has x's dtype or, under autocast, autocast's dtype.

    Raises
    ------
    TypeError, ValueError, RuntimeError, ImportError
        As for `gsbn.linear`. RuntimeError is also raised for second derivatives under autocast.

    Examples
    --------
    >>> import torch
    >>> import gsbn.torch
    >>> x, weight = torch.randn(256, 64), torch.randn(32, 64, requires_grad=True)
    >>> gsbn.torch.linear(x, weight, activation="relu").sum().backward()
    >>> weight.grad.shape
    torch.Size([32, 64])
    """
    require_tensors(x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    choice("precision", precision, PRECISIONS)
    choice("gemm", gemm, GEMMS)
    checked_activation(activation)
    if not x.is_cuda or is_compiling() or is_watched() or is_transformed():
        y = functional.linear(x, weight, bias)
        return y if activation is None else apply(y, activation)
    dtype = get_autocast_dtype("cuda") if is_autocast_enabled("cuda") else None
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = _LinearCall.apply(rows, weight, bias, (activation, precision, gemm, dtype))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


class _LinearCall(Function):
    """One autograd node for the forward and the backward of `linear`."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, more: Any) -> Any:
        activation, precision, gemm, dtype = more
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        wide = widens(dtype, weight)
        operands = cast(x, dtype), cast(weight, dtype)
        ctx.connected = operands[0] is x and operands[1] is weight
        x, weight = operands
        y, saved = of_arrays(x, weight, bias, activation, precision=precision, gemm=gemm, return_saved=True)
        ctx.how = How.of(saved, (), wide=wide)
        # second derivatives need all that the activation's derivative depends on
        ctx.through = again = saved.activation is not None and not follows_from_y(saved.activation)
        kept = x if needs_weight or again else None, weight if needs_x or again else None, bias if again else None
        ctx.save_for_backward(*kept, saved.deviations)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, bias, deviations = ctx.saved_tensors
        needs = needed_of((*ctx.needs_input_grad[:3], *[False] * 4))
        if goes_again(dy):
            if torch.is_grad_enabled() and not ctx.connected:
                raise RuntimeError(
                    "gsbn.torch: no second derivatives under autocast: call linear outside torch.autocast"
                )
            if ctx.through:
                return *_through(ctx.how.activation, needs, dy, x, weight, bias), None
            with torch.autocast(dy.device.type, enabled=False):
                dg = dy if deviations is None else before(ctx.how.activation, dy, deviations)
                dx = dg @ weight if "x" in needs else None
                dweight = dg.transpose(0, 1) @ x if "weight" in needs else None
                return dx, dweight, dg.sum(0) if "bias" in needs else None, None
        dy, how = dy.resolve_neg(), ctx.how._replace(needs=needs)
        arrays = dy, x if "weight" in needs else None, weight if "x" in needs else None, deviations, None, None
        (dx, dweight, dbias, *_), _ = backward_run(kind_of_tensor(dy), arrays, how)
        return dx, dweight, dbias, None


def _through(activation: Any, needs: tuple[str, ...], dy: Any, *operands: Any) -> list[Any]:
    """Return the gradients of x, weight and bias, each None if not needed, computed by PyTorch's own operators."""
    create = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(dy.device.type, enabled=False):
        operands = tuple(as_variables(create, *operands))
        named = dict(zip(("x", "weight", "bias"), operands, strict=True))
        x, weight, bias = operands
        y = apply(functional.linear(x, weight, None if bias is None else bias.to(x.dtype)), activation)
        found = torch.autograd.grad(y, [named[name] for name in needs], dy, create_graph=create)
    gradients = dict(zip(needs, found, strict=True))
    return [gradients.get(name) for name in named]


class Linear(nn.Linear):
    """An ``nn.Linear`` that calls `gsbn.torch.linear` where this is faster: in float32 on Hopper, with enough rows.

    `convert` with ``linear=True`` makes such modules from ``nn.Linear``. In other cases, and under autocast and
    torch.compile, the module uses PyTorch's own product. Its parameters and its state_dict are those of ``nn.Linear``.

    Parameters
    ----------
    *arguments, **options
        As for ``nn.Linear``.

    Examples
    --------
    >>> import gsbn.torch
    >>> list(gsbn.torch.Linear(64, 32).state_dict())
    ['weight', 'bias']
    """

    _precision: Precision = "highest"

    def forward(self, input: Tensor) -> Tensor:
        """Return an output (..., out_features) for an input (..., in_features)."""
        weight, bias = self.weight, self.bias
        if not _wins(input, weight):
            return functional.linear(input, weight, bias)
        return linear(input, weight, bias, precision=self._precision)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float32 by gsbn"

    def __prepare_scriptable__(self) -> nn.Linear:
        """Return an nn.Linear for torch.jit.script, which runs PyTorch's own modules."""
        made = nn.Linear(1, 1)
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_precision"})
        return made


def _wins(x: Any, weight: Any) -> bool:
    """Return whether gsbn can compute the product, and is faster than PyTorch."""
    own = x.__class__ in _PLAIN and weight.__class__ in _PLAIN  # a DTensor, for example, is not
    if not own or is_compiling() or is_transformed():
        return False
    if not x.is_cuda or not is_memory(torch, x):
        return False
    if not x.dtype is weight.dtype is torch.float32 or is_autocast_enabled("cuda") or not is_memory(torch, weight):
        return False
    return x.numel() * weight.shape[0] >= LEAST_MULTIPLICATIONS and _is_hopper(x.get_device())


@cache
def _is_hopper(device: int) -> bool:
    """Return whether gsbn has kernels for the GPU. Other GPUs are not asked further, which would take CuPy."""
    return bool(torch.cuda.get_device_capability(device) == (9, 0)) and kernels.gpu(device).hopper
