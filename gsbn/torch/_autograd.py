"""Help gsbn's autograd nodes: cast arrays, ask who else watches a call, and ask what a backward may do."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import is_grad_enabled

from .._arrays.kinds import Kind, kind_of
from .._backward import How
from .._plan.skinny import serves_skinny_backward
from .._saved import VECTOR_PARAMETERS, Saved

transforms: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
# Tells whether autograd keeps the graph for another backward; True if torch cannot tell.
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# Above 0 in TorchDispatch modes (fake tensors, make_fx, operation counters). These must see one operator. torch has no
# public API for this question.
is_watched: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
# The dispatch mode in which AOTAutograd traces a program
_functional: Any = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FUNCTIONAL", None)
_is_batched: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)  # is_grads_batched

# torch has no public API for the question of `saves_by_hooks`.
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)
_NAMES = ("x", "weight", *VECTOR_PARAMETERS, "residual")
_NEEDED = {
    needed: tuple(name for name, need in zip(_NAMES, needed, strict=True) if need)
    for needed in product((False, True), repeat=len(_NAMES))
}


def saves_by_hooks() -> bool:
    """Return whether hooks replace what autograd saves, as in torch.utils.checkpoint and save_on_cpu."""
    return _hooks(True) is not None


def goes_again(dy: Any) -> bool:
    """Return whether PyTorch's operators must compute the gradients, for second derivatives or batched gradients."""
    return bool(is_grad_enabled() or transforms() or _is_batched(dy))


def needed_of(needs_input_grad: tuple[bool, ...]) -> tuple[str, ...]:
    """Return the names of those of x, weight, bias, scale, gamma, beta and residual whose gradients a node computes."""
    return _NEEDED[needs_input_grad]


def drop_given(ctx: Any) -> None:
    """Drop the forward's arguments if autograd frees the graph, because no call is computed again without a graph."""
    if not keeps_graph():
        ctx.given = None


def cast(array: Any, dtype: Any) -> Any:
    """Return the array in autocast's `dtype`. If `dtype` is None or the array is float64, return it as it is."""
    return array if dtype is None or array.dtype is torch.float64 else array.to(dtype)


def contiguous(x: Any) -> Any:
    """Return x, or a copy if x is not contiguous or does not start on 16 bytes."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def widens(dtype: Any, weight: Any) -> bool:
    """Return whether a call makes dweight in float32, so that autograd need not cast it.

    `dtype` is autocast's dtype, or None without autocast.
    """
    return dtype is not None and dtype.itemsize == 2 and weight.dtype is torch.float32


def is_compiling() -> bool:
    """Return whether torch.compile or torch.export records a program.

    Before PyTorch 2.13 ``torch.compiler.is_compiling`` is False while AOTAutograd traces the calls that a pass of gsbn
    has put into a graph.
    """
    if torch.compiler.is_compiling():
        return True
    return bool(is_watched()) and _functional is not None and torch._C._get_dispatch_mode(_functional) is not None


def is_exporting() -> bool:
    """Return whether torch.export records. `torch.compiler.is_exporting` is not asked: some versions of torch.compile
    replace it by True."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def are_static(*sizes: Any) -> bool:
    """Return whether these sizes are numbers, and not symbols, in the program that torch records."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import, so only where torch traces

    return all(map(has_static_value, sizes))


def in_place(how: How, dy: Any, deviations: Any, at: int) -> How:
    """Return `how`, changed so that dg overwrites the deviations if nothing will read them again.

    The deviations must still be at the address `at`, where the forward made them, because hooks on saved tensors may
    return other memory.
    """
    own = deviations.numel() > 0 and deviations.data_ptr() == at
    if how.training and own and deviations.dtype is dy.dtype and not keeps_graph():
        return how._replace(in_place=True)
    return how


def operands(saved: Saved, needs_x: bool, needs_weight: bool) -> tuple[Any, Any]:
    """Return x and weight, each None if no backward reads it: a cast is then freed, and the original may change.

    A backward on the CPU reads both, and so does one that computes g again because no deviations are saved. Any other
    reads x only for dweight, but second derivatives and batched gradients also read it, to compute the call again.
    """
    x, weight = saved.x, saved.weight
    if not x.is_cuda or saved.deviations.numel() == 0:
        return x, weight
    reads_weight = serves_skinny_backward(str(weight.dtype).removeprefix("torch."), x.shape[0], *weight.shape)
    return x if needs_x or needs_weight else None, weight if needs_x or reads_weight else None


def shaped(new: Any, shape: Any) -> Any:
    """Return a new tensor in this shape, not as a view: autograd forbids to change a view from a node in place."""
    return torch.ops.aten._unsafe_view.default(new, shape)


def kind_of_tensor(tensor: Any) -> Kind:
    kind = kind_of(tensor)
    assert kind is not None
    return kind
