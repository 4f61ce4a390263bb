"""Second derivatives and batched gradients: compute the call again, by PyTorch's own operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from .._arrays.kinds import NUMBERS
from .._backward import How
from .._plan.problem import RENORM_ROWS, SAVED_RATIO, SAVED_SHIFT
from ..reference import OF_LAYER
from ._activations import apply

# Rows of the saved vectors in inference, as kernels/common/common.cuh numbers them
_R, _BIASED, _Z, _S = 2, 4, 5, 6


class Given(NamedTuple):
    """The arguments of the forward except x, which autograd keeps."""

    weight: Any
    bias: Any
    scale: Any
    gamma: Any
    beta: Any
    eps: float
    connected: bool  # autograd keeps the x that was given, not a cast of it
    versions: tuple[int, ...]  # of the tensors among the first five

    @classmethod
    def of(cls, arguments: tuple[Any, ...], eps: float, *, connected: bool) -> Given:
        """`arguments`: weight, bias, scale, gamma and beta."""
        weight, bias, scale, gamma, beta = arguments
        return cls(weight, bias, scale, gamma, beta, eps, connected, _versions(arguments))


def _versions(arguments: Any) -> tuple[int, ...]:
    """How often each tensor was changed in place; an inference tensor does not count."""
    return tuple([a._version for a in arguments if isinstance(a, torch.Tensor) and not a.is_inference()])


def apart(create: bool, *arguments: Any) -> list[Any]:
    """Each argument as a variable of its own: a gradient then is that of this argument alone, though another one may
    have been computed from it. With `create` they are functions of the arguments."""

    def alone(a: Any) -> Any:
        if not isinstance(a, torch.Tensor) or not a.is_floating_point():
            return a
        return a.view_as(a) if create else a.detach().requires_grad_()

    return list(map(alone, arguments))


def gradients_again(how: How, given: Given, dy: Any, x: Any, vectors: Any) -> list[Any]:
    """The gradients in `how.needs`, in the order of OF_LAYER, as functions of x, dy and the arguments in `given`.

    For the first half of a backward the gradient of x is that of g. Raises RuntimeError if x was not kept.
    """
    create, eps = _checked(how, given, x), given.eps
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        x, weight, bias, scale, gamma, beta = apart(create, x, *given[:5])
        g = functional.linear(x, weight.to(x.dtype))
        z = g if scale is None else g * scale
        if how.training:
            features = weight.shape[0]
            ones, zeros = torch.ones(features, device=z.device), torch.zeros(features, device=z.device)
            z = z.to(torch.promote_types(x.dtype, torch.float32))
            if bias is not None:
                z = z + (bias - bias).to(z.dtype)  # the mean cancels the bias: a gradient of 0 that has derivatives
            # each ghost batch has features of its own
            z = z.unflatten(0, (how.groups, -1)).movedim(0, 1).flatten(1) if how.groups > 1 else z
            ones, zeros = (vector.repeat(how.groups).to(z.dtype) for vector in (ones, zeros))
            y = functional.batch_norm(z, None, None, ones, zeros, True, 0.0, eps)
            y = y.unflatten(1, (how.groups, -1)).movedim(1, 0).flatten(0, 1) if how.groups > 1 else y
            if vectors.shape[-2] == RENORM_ROWS:
                y = y * vectors[SAVED_RATIO].to(z.dtype) + vectors[SAVED_SHIFT].to(z.dtype)
        else:
            if bias is not None:
                z = z + (bias if scale is None else bias * scale)
            mean = vectors[_S] * vectors[_BIASED] - vectors[_Z]
            y = (z - mean.to(z.dtype)) * vectors[_R].to(z.dtype)
        y = y if gamma is None else y * gamma
        y = y if beta is None else y + beta
        y = (y if how.activation is None else apply(y, how.activation)).to(x.dtype)
        inputs = dict(zip(OF_LAYER, (x if how.linear else g, weight, bias, scale, gamma, beta), strict=True))
        wanted = [name for name in how.needs if not isinstance(inputs[name], NUMBERS)]
        found = torch.autograd.grad(y, [inputs[name] for name in wanted], dy, create_graph=create, allow_unused=True)
    gradients = dict(zip(wanted, found, strict=True))
    return [gradients.get(name) for name in OF_LAYER]


def products_again(how: How, given: Given, dg: Any, x: Any) -> tuple[Any, Any]:
    """dx and dweight from dg, each None if not in `how.needs`."""
    _checked(how, given, x if "weight" in how.needs else dg)
    with torch.autocast(dg.device.type, enabled=False):
        dx = dg @ given.weight.to(dg.dtype) if "x" in how.needs else None
        return dx, dg.transpose(0, 1) @ x if "weight" in how.needs else None


def _checked(how: How, given: Given, x: Any) -> bool:
    """Whether the gradients will be differentiated; raise RuntimeError if they cannot."""
    create = torch.is_grad_enabled()
    if _versions(given[:5]) != given.versions:
        raise RuntimeError(
            "gsbn.torch: one of the variables needed for gradient computation has been modified by an inplace "
            "operation since the forward: second derivatives and batched gradients compute the call again"
        )
    if how.group is not None:
        raise RuntimeError(
            "gsbn.torch: no second derivatives and no batched gradients of a batch that ranks share: use "
            "nn.SyncBatchNorm there"
        )
    if x is None:
        raise RuntimeError(
            "gsbn.torch: no second derivatives and no batched gradients of a call in which neither x nor weight "
            "requires grad, which keeps no x: let one of them require grad, or call PyTorch's own modules"
        )
    if create and not given.connected:
        raise RuntimeError(
            "gsbn.torch: no second derivatives under autocast: call the model outside torch.autocast, or `revert` it"
        )
    return bool(create)
