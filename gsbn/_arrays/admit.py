"""Accept torch tensors that are plain memory with a shape and strides; raise a helpful error for all others."""

from __future__ import annotations

from typing import Any

from .._values import type_name

_COMPILED = "call it through gsbn.torch"
_ADVICE = {  # for subclasses that hold no memory themselves
    "FakeTensor": f"gsbn cannot be traced: {_COMPILED}",
    "FunctionalTensor": f"gsbn cannot be traced: {_COMPILED}",
    "DTensor": "pass the local shard, {name}.to_local()",
    "MaskedTensor": "pass {name}.get_data(), which has no mask",
}
_TRANSFORMS = {
    "is_batchedtensor": "torch.func.vmap",
    "is_gradtrackingtensor": "torch.func.grad or jvp",
    "is_functionaltensor": "torch.func.functionalize",
    "is_legacy_batchedtensor": "torch.autograd.grad(is_grads_batched=True)",
}


def is_memory(torch: Any, array: Any) -> bool:
    """Return whether a tensor of torch's own class is plain memory: not sparse, and not lazily negated.

    `tensor` checks the other conditions.
    """
    return array.layout is torch.strided and not array.is_neg()


def tensor(torch: Any, name: str, array: Any) -> None:
    """Raise RuntimeError for a tensor that autograd tracks, TypeError or ValueError for one without plain memory."""
    type_ = type(array)
    if torch.nn.parameter.is_lazy(array):
        raise ValueError(f"{name}: expected a tensor with a shape, got {type_name(array)}: run the lazy module once")
    if array.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: requires grad, and gsbn is outside autograd: call it under torch.no_grad(), "
            f"pass {name}.detach(), or call it through gsbn.torch, which is part of autograd"
        )
    if array.is_nested:
        raise TypeError(
            f"{name}: expected one rectangular tensor, got a nested one: pass torch.cat({name}.unbind()) for all rows"
        )
    if type_.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        advice = _ADVICE.get(type_.__name__, "pass the tensor that it wraps").format(name=name)
        raise TypeError(f"{name}: expected a plain tensor, got {type_name(array)}: {advice}")
    if array.layout is not torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got layout {array.layout}: pass {name}.to_dense()")
    if transform := _transform(torch, array):
        raise TypeError(
            f"{name}: expected a tensor with memory of its own, got one that {transform} made: call gsbn outside it"
        )
    if torch.autograd.forward_ad.unpack_dual(array).tangent is not None:
        raise RuntimeError(f"{name}: has a tangent, and gsbn is outside autograd: pass {name} without it")
    if array.is_neg():
        raise ValueError(f"{name}: expected plain memory, got a lazily negated tensor: pass {name}.resolve_neg()")
    if array.data_ptr() == 0 and array.numel():
        raise ValueError(
            f"{name}: expected a tensor with memory, got an empty storage: bring its values back first (FSDP frees the "
            f"storage of a parameter that is not in use)"
        )


def _transform(torch: Any, array: Any) -> str | None:
    """Return the transform that wrapped the caller's tensor in this one, or None; torch has no public API for it."""
    ask = torch._C._functorch
    return next((transform for question, transform in _TRANSFORMS.items() if getattr(ask, question)(array)), None)
