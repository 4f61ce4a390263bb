"""Support second derivatives and batched gradients: PyTorch's own operators compute the call again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from .._arrays.kinds import NUMBERS
from .._backward import How
from .._gradients import Gradients
from .._plan.problem import RENORM_ROWS, SAVED, SAVED_RATIO, SAVED_SHIFT
from ._activations import apply

# The rows of the saved vectors that are read in inference
_R, _BIASED, _Z, _S = (SAVED[f"SAVED_{name}"] for name in ("GAMMA", "BIASED", "Z", "S"))


class Given(NamedTuple):
    """The arguments of the forward except x, which autograd keeps."""

    weight: Any
    bias: Any
    scale: Any
    gamma: Any
    beta: Any
    eps: float
    connected: bool  # True if autograd keeps the x that was given, and not a cast of it
    versions: tuple[int, ...]  # the version counters of the tensors among the first five fields

    @classmethod
    def of(cls, arguments: tuple[Any, ...], eps: float, *, connected: bool) -> Given:
        """Make a `Given` from `arguments`: weight, bias, scale, gamma and beta."""
        weight, bias, scale, gamma, beta = arguments
        return cls(weight, bias, scale, gamma, beta, eps, connected, _versions(arguments))


def _versions(arguments: Any) -> tuple[int, ...]:
    """Return how often each tensor was changed in place. Inference tensors have no such count."""
    return tuple([a._version for a in arguments if isinstance(a, torch.Tensor) and not a.is_inference()])


def as_variables(create: bool, *arguments: Any) -> list[Any]:
    """Return each argument as a separate variable.

    The gradient of a variable is then that of this argument alone, even if another argument was computed from it. With
    `create` the variables are functions of the arguments.
    """

    def alone(a: Any) -> Any:
        if not isinstance(a, torch.Tensor) or not a.is_floating_point():
            return a
        return a.view_as(a) if create else a.detach().requires_grad_()

    return list(map(alone, arguments))


def gradients_again(how: How, given: Given, dy: Any, x: Any, vectors: Any) -> list[Any]:
    """Return the gradients that `how.needs` names, save that of a residual, as functions of x, dy and `given`.

    The list has the order of `Gradients`, with None for the other gradients. In the first half of a backward, the
    gradient of g takes the place of the gradient of x. Raises RuntimeError if x was not kept.
    """
    create = _checked(how, given, x)
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        x, *arguments = as_variables(create, x, *given[:5])
        g, y = _outputs(how, given.eps, x, arguments, vectors)
        inputs = dict(zip(Gradients._fields, (x if how.linear else g, *arguments), strict=True))
        wanted = [name for name in how.needs if name in inputs and not isinstance(inputs[name], NUMBERS)]
        found = torch.autograd.grad(y, [inputs[name] for name in wanted], dy, create_graph=create, allow_unused=True)
    gradients = dict(zip(wanted, found, strict=True))
    return [gradients.get(name) for name in Gradients._fields]


def layers_again(layers: list[tuple[How, Given, Any]], dy: Any, x: Any, needs: tuple[bool, ...]) -> list[Any]:
    """Return the gradients of layers in sequence, each with what `gradients_again` takes of it; x is the first one's.

    The list has the gradient of x and then, for each layer, those of weight, bias, scale, gamma and beta; or None for
    those that are not in `needs`, which has the same order.
    """
    create = False
    for how, given, _ in layers:
        create = _checked(how, given, x)
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        variables = as_variables(create, x)
        (y,) = variables
        for how, given, vectors in layers:
            arguments = as_variables(create, *given[:5])
            variables += arguments
            _, y = _outputs(how, given.eps, y, arguments, vectors)
        wanted = [variable for variable, need in zip(variables, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=create, allow_unused=True))
    return [next(found) if need else None for need in needs]


def _outputs(how: How, eps: float, x: Any, arguments: list[Any], vectors: Any) -> tuple[Any, Any]:
    """Return g and y. `arguments` are weight, bias, scale, gamma and beta; `vectors` is what the forward saved."""
    weight, bias, scale, gamma, beta = arguments
    g = functional.linear(x, weight.to(x.dtype))
    z = g if scale is None else g * scale
    if how.training:
        features = weight.shape[0]
        ones, zeros = torch.ones(features, device=z.device), torch.zeros(features, device=z.device)
        z = z.to(torch.promote_types(x.dtype, torch.float32))
        if bias is not None:
            z = z + (bias - bias).to(z.dtype)  # the mean cancels the bias; its gradient is 0, with derivatives
        # the features of each ghost batch count as separate features
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
    return g, (y if how.activation is None else apply(y, how.activation)).to(x.dtype)


def products_again(how: How, given: Given, dg: Any, x: Any) -> tuple[Any, Any]:
    """Return dx and dweight, computed from dg. Each is None if `how.needs` does not name it."""
    _checked(how, given, x if "weight" in how.needs else dg)
    with torch.autocast(dg.device.type, enabled=False):
        dx = dg @ given.weight.to(dg.dtype) if "x" in how.needs else None
        return dx, dg.transpose(0, 1) @ x if "weight" in how.needs else None


def _checked(how: How, given: Given, x: Any) -> bool:
    """Return whether the gradients will be differentiated. Raise RuntimeError if they cannot be computed."""
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
