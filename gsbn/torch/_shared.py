"""Share a weight among the calls of an autocast region: they read one cast of it, and make one gradient.

A model of two views, such as SimSiam, calls each layer twice in a forward. Autograd would add up two gradients of the
weight in float32, and keep the first one until then. Instead, the backward of each call leaves dg and x, which are
smaller. When all calls have left theirs, dweight is made as the sum of their products, Σ dgᵀ x: each GEMM after the
first one adds to what is there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ._autograd import cast, kind_of_tensor, shaped, widens

_NAME = "_gsbn_shared"  # the attribute of a cast weight
_einsum: Any = getattr(torch._C._VariableFunctions, "einsum", torch.einsum)  # without a layer of Python
_task: Any = getattr(torch._C, "_current_graph_task_id", None)  # the number of the backward that runs
# Whether PyTorch multiplies 16-bit operands into float32
_MULTIPLIES_WIDE = _task is not None and "dtype_out" in torch.ops.aten.addmm.overloads()


class SharedGradient:
    """The gradient of a weight, made of what the backwards of its calls have left, if there are several calls."""

    def __init__(self) -> None:
        self.several = False  # whether there are several calls
        self._sums: dict[int, _Sum] = {}  # by the number of the backward

    def share(self, weight: Any) -> None:
        """Let autograd call `gradient` for the gradient of this weight."""
        if not self.several:
            self.several = True
            weight.register_hook(self.gradient)

    def leave(self, dg: Any, x: Any) -> Any:
        """Keep dg and x until `gradient`, and return what a node returns as the gradient of the weight.

        This is zeros, without memory of their own, for the first node of a backward, because autograd calls `gradient`
        only if a node gives it something. It is None for other nodes.
        """
        task = _task()
        found = self._sums.get(task)
        if found is not None:
            found.add(dg, x)
            return None
        self._sums[task] = _Sum(dg, x)
        # A backward that does not need the weight's gradient never calls `gradient`.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._sums.pop, task, None))
        return x.new_zeros((), dtype=torch.float32).expand(dg.shape[1], x.shape[1])

    def gradient(self, others: Any) -> Any:
        """Return the gradient of the weight. `others` is the sum of what nodes have returned for it."""
        found = self._sums.pop(_task(), None)
        if found is None:
            return others
        total = found.total()
        return total if others.stride() == (0, 0) else others + total


class _Sum:
    """The sum Σ dgᵀ x, whose operands are kept until they are larger than the sum, or until it is asked for."""

    def __init__(self, dg: Any, x: Any) -> None:
        self._pairs, self._rows, self._total = [(dg, x)], x.shape[0], None

    def add(self, dg: Any, x: Any) -> None:
        self._pairs.append((dg, x))
        self._rows += x.shape[0]
        if not _are_small(self._rows, dg.shape[1], x.shape[1]):
            self.total()

    def total(self) -> Any:
        for dg, x in self._pairs:
            if self._total is None:
                self._total = torch.mm(dg.t(), x, out_dtype=torch.float32)
            else:
                torch.addmm(self._total, dg.t(), x, out_dtype=torch.float32, out=self._total)
        self._pairs, self._rows = [], 0
        return self._total


def _are_small(rows: int, features: int, inputs: int) -> bool:
    """Return whether dg and x of so many rows, with 2 bytes an element, are no larger than dweight, with 4."""
    return rows * (features + inputs) <= 2 * features * inputs


def shared_weight(weight: Any, dtype: Any, rows: int | None) -> tuple[Any, Any, SharedGradient | None]:
    """Return the weight that autograd sees in a call of so many rows, its cast, and a `SharedGradient` or None.

    In an autocast region of a GPU all calls with this weight share the cast, as PyTorch's own operators do. A call
    makes a gradient of its own if `rows` is None, if dg and x are larger than the gradient, if PyTorch cannot multiply
    them into float32, or if it runs on another stream than the first call.
    """
    if dtype is None or not (weight.is_cuda and weight.is_leaf and weight.requires_grad):
        return weight, cast(weight, dtype), None
    # The einsum of one operand is a view of the cast, which autocast keeps for the region as for all its operators.
    view = _einsum("...->...", (weight,))
    kept, found = view._base, cast(view.detach(), dtype)
    in_float32 = widens(dtype, weight) and _MULTIPLIES_WIDE
    if rows is None or kept is None or kept.dtype is not dtype or not in_float32 or not _are_small(rows, *weight.shape):
        return weight, found, None
    stream, known = kind_of_tensor(weight).stream(weight.get_device()), getattr(kept, _NAME, None)
    if known is None:
        # Only the calls that share contribute to the gradient of this alias.
        alias, shared = shaped(weight, weight.shape), SharedGradient()
        setattr(kept, _NAME, (alias, shared, stream))
        return alias, found, shared
    alias, shared, of_first = known
    if stream != of_first:
        return weight, found, None
    shared.share(alias)
    return alias, found, shared
