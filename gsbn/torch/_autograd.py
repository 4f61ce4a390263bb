"""What gsbn's autograd nodes share: casts, who else looks at a call, and what a backward may do."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import is_grad_enabled

from .._arrays.kinds import Kind, kind_of
from .._backward import How
from .._saved import VECTOR_PARAMETERS

transforms: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
# Whether the graph is kept for another backward; True if torch cannot tell.
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# TorchDispatch modes (fake tensors, make_fx, operation counters) must see one operator; torch has no public API to ask.
is_watched: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_is_batched: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)  # is_grads_batched

_NAMES = ("x", "weight", *VECTOR_PARAMETERS)
_NEEDED = {
    needed: tuple(name for name, need in zip(_NAMES, needed, strict=True) if need)
    for needed in product((False, True), repeat=len(_NAMES))
}


def goes_again(dy: Any) -> bool:
    """Whether PyTorch's operators must compute the gradients: for second derivatives or batched gradients."""
    return bool(is_grad_enabled() or transforms() or _is_batched(dy))


def needed_of(needs_input_grad: tuple[bool, ...]) -> tuple[str, ...]:
    """The names of the gradients that a node must compute, of x, weight, bias, scale, gamma and beta."""
    return _NEEDED[needs_input_grad]


def drop_given(ctx: Any) -> None:
    """Drop the forward's arguments when autograd frees what it saved: without a graph nothing is computed again."""
    if not keeps_graph():
        ctx.given = None


def cast(array: Any, dtype: Any) -> Any:
    """Cast as autocast casts the operands of a product."""
    return array if dtype is None or array.dtype is torch.float64 else array.to(dtype)


def widens(dtype: Any, weight: Any) -> bool:
    """Whether a call in autocast's dtype, or None, makes dweight in float32, so that autograd need not cast it."""
    return dtype is not None and dtype.itemsize == 2 and weight.dtype is torch.float32


def in_place(how: How, dy: Any, deviations: Any, at: int) -> How:
    """Let dg overwrite the deviations if nothing will read them again, and if they are still at the address `at` where
    the forward made them: hooks on saved tensors may return other memory."""
    if how.training and deviations.dtype is dy.dtype and deviations.data_ptr() == at and not keeps_graph():
        return how._replace(in_place=True)
    return how


def kind_of_tensor(tensor: Any) -> Kind:
    kind = kind_of(tensor)
    assert kind is not None
    return kind
