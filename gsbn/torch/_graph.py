"""Change torch.fx graphs so that gsbn runs linear, scale, batch_norm and activation, whatever `forward` calls them.

A 1x1 convolution counts as a linear.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.nn import functional

from .._arrays.check import DTYPES
from .._plan.activations import follows_from_y
from .._typing import Activation, Precision
from ._activations import of_call
from ._channels_first import beats_modules
from ._function import call, taken_in_rows
from ._modules import finish
from ._residual import recorded_call_adds

_log = logging.getLogger("gsbn.torch")

# The names of the parameters of PyTorch's functions
_OPERANDS = ("input", "weight", "bias")
_CONVOLUTIONS: dict[int, Any] = {3: torch.conv1d, 4: torch.conv2d}  # by the number of dimensions
_LINEAR = {
    functional.linear: _OPERANDS,
    **dict.fromkeys(_CONVOLUTIONS.values(), (*_OPERANDS, "stride", "padding", "dilation", "groups")),
}
_NORM = {
    functional.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", ""),
}
_TENSORS = ("bias", "weight", "running_mean", "running_var")  # tensors that may be absent
_DEFAULTS = {
    **dict.fromkeys(_TENSORS), "training": False, "momentum": 0.1, "eps": 1e-5, "stride": 1, "padding": 0, "groups": 1,
}  # fmt: skip
_ADD = (operator.add, torch.add, "add")
_ADD_IN_PLACE = (operator.iadd, "add_")
_TIMES = (operator.mul, torch.mul, torch.multiply, "mul", "multiply")
# Further calls that write nothing
_PURE = (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.getitem, torch.cat)
_DTYPES = [getattr(torch, name) for name in DTYPES]


class Calls(NamedTuple):
    """The nodes of a graph that one call of gsbn may replace."""

    linear: Any
    scale: Node | None
    norm: Node
    add: Node | None  # the addition of a residual
    activation: Node | None

    @property
    def last(self) -> Node:
        """The node whose result the row leaves."""
        return self.activation or self.sum

    @property
    def sum(self) -> Node:
        """The node that computes what the activation takes: the call of gsbn stands there."""
        return self.add or self.norm

    @property
    def residual(self) -> Any:
        """The operand beside the norm's output in the addition."""
        assert self.add is not None
        return next(other for other in self.add.args if other is not self.norm)

    def without_residual(self) -> Calls:
        """Return the row without its addition, and so without what follows that."""
        return self._replace(add=None, activation=None)


def one_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | float | None, gamma: Tensor | None,
    beta: Tensor | None, state: tuple[Tensor | None, ...], options: tuple[Any, ...], activation: Activation | None,
    residual: Tensor | None = None, *, layout: torch.memory_format | None = None,
) -> Tensor:  # fmt: skip
    """Compute a row; the pass puts this function into a graph in place of the row.

    Each run decides like any other call how to compute it, and so does a compiler that traces this function. Of a
    convolution PyTorch's operators may win. `layout` is that of PyTorch's y of a convolution; other code may need it.
    """
    training, momentum, eps, precision, _ = options
    vectors = bias, gamma, beta
    if weight.dim() < 3 or taken_in_rows(x, weight) or beats_modules(x, weight, vectors, training, precision):
        y: Tensor = call(x, weight, bias, scale, gamma, beta, state, options, activation, residual=residual)
        return y if layout is None else y.contiguous(memory_format=layout)
    running_mean, running_var, count = state
    if count is not None:
        count.add_(1)
    z = _CONVOLUTIONS[weight.dim()](x, weight, bias)
    u = functional.batch_norm(z, running_mean, running_var, gamma, beta, training, momentum, eps)
    return cast(Tensor, finish(u, residual, False, activation))


def replace(graph: Graph, precision: Precision = "highest", cpu: bool = False) -> int:
    """Put `one_call` in the place of rows in a graph that Dynamo captured, and return how many rows were replaced."""
    replaced = total = 0
    added = set[Node]()
    for row in list(rows(graph, _kind)):
        total += 1
        if row.add in added or not _may_add(row):
            row = row.without_residual()
        on = _value(row.norm)
        if row.linear is not None and _computes_the_same(row) and (on.is_cuda or (cpu and on.is_cpu)):
            _substitute(graph, row, precision)
            replaced += 1
            if row.add is not None:
                added.add(row.add)
    if total:
        _log.info("replaced %d of %d calls of batch_norm", replaced, total)
    return replaced


def rows(graph: Graph, kind: Callable[[Node], str | None]) -> Iterator[Calls]:
    """Yield each batch norm of a graph with the calls around it.

    `kind` returns "linear", "times", "norm", "add" or "activation" for a node, "pure" for another call of a module that
    writes nothing of the row's, or None. The `linear` of a row is None if the batch norm does not follow a linear, if
    another node uses a result between them, or if another node may write the operands of the linear. The nodes of a row
    may move to where its `sum` stands.
    """
    for norm in graph.nodes:
        if kind(norm) == "norm":
            scale, linear = None, _input(norm)
            if linear is not None and kind(linear) == "times":
                scale = linear
                linear = next((node for node in scale.all_input_nodes if kind(node) == "linear"), None)
            steps = [linear, norm] if scale is None else [linear, scale, norm]
            if linear is None or kind(linear) != "linear" or not _stand_together(steps, kind):
                linear = scale = None
            add = _only_user(norm, "add", kind)
            if add is not None and (linear is None or not _stand_together([norm, add], kind)):
                add = None
            if add is not None and writes_its_first_operand(add) and add.args[0] is not norm:
                add = None
            yield Calls(linear, scale, norm, add, _only_user(add or norm, "activation", kind))


def _only_user(node: Node, kind_of_user: str, kind: Callable[[Node], str | None]) -> Node | None:
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and kind(user) == kind_of_user else None


def _stand_together(steps: list[Any], kind: Callable[[Node], str | None]) -> bool:
    """Return whether no other node uses the results of these steps before the last, or can write x, weight or bias."""
    for node in nodes_from(steps[0], steps[-1]):
        harmless = node in steps or node.op == "get_attr" or node.target in ("item", "size", one_call, *_PURE)
        if not (harmless or _is_count(node) or kind(node) in ("linear", "norm", "pure")):
            return False
    return all(len(node.users) == 1 for node in steps[:-1])


def nodes_from(node: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes of a graph from `node` on that stand before `last`."""
    while node is not last:
        yield node
        node = node.next


def replace_calls(graph: Graph, row: Calls, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Node:
    """Replace the nodes of a row by a call of the function, and return its node."""
    with graph.inserting_before(row.sum):
        y = graph.call_function(function, arguments)
    y.meta = dict(row.last.meta)
    row.last.replace_all_uses_with(y)
    for node in reversed(row):
        if node is not None:
            graph.erase_node(node)
    return y


def other_operand(row: Calls) -> Any:
    """Return the operand by which the Linear's output is multiplied, or None if there is no multiplication."""
    if row.scale is None:
        return None
    return row.scale.args[1] if row.scale.args[0] is row.linear else row.scale.args[0]


def _substitute(graph: Graph, row: Calls, precision: Precision) -> None:
    linear, norm = _arguments(row.linear), _arguments(row.norm)
    count = _count_before(row.norm) if norm["training"] else None
    state = norm["running_mean"], norm["running_var"], None if count is None else count.args[0]
    options = norm["training"], norm["momentum"], norm["eps"], precision, "auto"
    vectors = linear["bias"], other_operand(row), norm["weight"], norm["bias"]
    activation = None if row.activation is None else of_call(row.activation)
    operands = linear["input"], linear["weight"]
    residual = () if row.add is None else (row.residual,)
    y = replace_calls(graph, row, one_call, (*operands, *vectors, state, options, activation, *residual))
    if _value(y).dim() > 2:
        y.kwargs = {"layout": _layout(y)}
    if count is not None:
        graph.erase_node(count)


def _computes_the_same(row: Calls) -> bool:
    """Return whether one call of gsbn gives the same result as these calls."""
    linear, norm = _arguments(row.linear), _arguments(row.norm)
    if not isinstance(norm["training"], bool) or not isinstance(norm["momentum"], (float, int, Node)):
        return False
    operands = [_value(linear[name]) for name in ("input", "weight")]
    running = norm["running_mean"], norm["running_var"]
    if None in running and not (norm["training"] and running == (None, None)):
        return False
    vectors = [_value(of) for of in (*running, norm["weight"], norm["bias"], linear["bias"]) if of is not None]
    steps = [_value(node) for node in row if node is not None]
    tensors = [*operands, *vectors, *steps]
    if not all(value.__class__ is FakeTensor and value.layout is torch.strided for value in tensors):
        return False  # not a tensor with plain memory, or a transform of torch.func wraps it
    y = steps[0]
    dims = 2  # with three dimensions, linear and batch_norm disagree about the dimension of the features
    if row.linear.target is not functional.linear:
        dims = operands[1].dim()
        if row.scale is not None or not _is_pointwise(linear, operands[1]):
            return False
    if any(value.dim() != dims for value in (*operands, *steps)) or (dims > 2 and _layout(row.last) is None):
        return False  # or a convolution of one sample without N
    if any(value.dtype is not y.dtype or value.shape != y.shape for value in steps) or y.dtype not in _DTYPES:
        return False  # PyTorch continues in a wider dtype
    wide = torch.promote_types(y.dtype, torch.float32)
    if any(value.dtype not in (y.dtype, wide) for value in tensors):
        return False
    if len({_value(of).dtype for of in running if of is not None}) > 1:
        return False
    if row.scale is not None and not _is_factor(other_operand(row), y):
        return False
    return all(value.device == y.device for value in tensors)


def _is_pointwise(conv: dict[str, Any], weight: Tensor) -> bool:
    """Return whether a convolution is a product of its pixels with the weight. `conv` has the arguments of the call."""
    stride, padding = (of if isinstance(of, (tuple, list, str)) else (of,) for of in (conv["stride"], conv["padding"]))
    unpadded = isinstance(padding, str) or not any(padding)
    return unpadded and conv["groups"] == 1 and all(size == 1 for size in (*weight.shape[2:], *stride))


def _layout(y: Node) -> torch.memory_format | None:
    """Return the layout of a node's result, or None if it has no name."""
    value = _value(y)
    formats = [torch.contiguous_format, *[torch.channels_last] * (value.dim() == 4)]
    return next((each for each in formats if value.is_contiguous(memory_format=each)), None)


def _may_add(row: Calls) -> bool:
    """Return whether a row may end in its addition, if it has one, and what follows it.

    No call between may use the norm's statistics, which change in the order of the calls.
    """
    if row.add is None:
        return True
    value, other, norm = _value(row.norm), _value(row.residual), _arguments(row.norm)
    if other.__class__ is not FakeTensor or other.layout is not torch.strided:
        return False
    if other.shape != value.shape or other.dtype is not value.dtype:
        return False
    if not (recorded_call_adds(value) and (row.activation is None or follows_from_y(of_call(row.activation)))):
        return False
    state = {norm[name] for name in ("running_mean", "running_var")} - {None}
    return all(state.isdisjoint(node.all_input_nodes) for node in nodes_from(row.norm.next, row.add))


def adds(node: Node) -> bool:
    """Return whether a node adds the results of two other nodes."""
    if node.target not in (*_ADD, *_ADD_IN_PLACE) or node.kwargs or len(node.args) != 2:
        return False
    return all(isinstance(each, Node) for each in node.args) and node.args[0] is not node.args[1]


def writes_its_first_operand(add: Node) -> bool:
    return add.target in _ADD_IN_PLACE


def _is_factor(factor: Any, y: Tensor) -> bool:
    """Return whether the operand beside the Linear's output is a number, or a scale for the output's features."""
    if not isinstance(factor, Node):
        return isinstance(factor, (int, float)) and not isinstance(factor, bool)
    value = _value(factor)
    if value.__class__ is not FakeTensor or value.dtype is not y.dtype or value.device != y.device:
        return False
    return tuple(value.shape) in ((y.shape[1],), (1,), ())


def _count_before(norm: Node) -> Node | None:
    """Return the call just before this batch norm that adds 1 to num_batches_tracked, or None; gsbn adds it itself."""
    node = norm.prev
    while node.op != "root" and node.target == "item":
        node = node.prev
    return node if _is_count(node) and _value(node).device == _value(norm).device else None


def _is_count(node: Node) -> bool:
    if node.op != "call_method" or node.target != "add_" or node.args[1:] != (1,) or node.kwargs or node.users:
        return False
    value = _value(node)
    return isinstance(value, Tensor) and value.dtype is torch.int64 and value.dim() == 0


def _kind(node: Node) -> str | None:
    """Return the kind of call that a node of Dynamo's graph makes, for `rows`."""
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target in _LINEAR or node.target in _NORM:
        return "linear" if node.target in _LINEAR else "norm"
    return "add" if adds(node) else functional_kind(node)


def functional_kind(node: Node) -> str | None:
    """Return "times" or "activation" if the node calls a function or a method that does this, else None."""
    if node.op in ("call_function", "call_method") and node.target in _TIMES and len(node.args) == 2:
        return None if node.kwargs else "times"
    return None if of_call(node) is None else "activation"


def _input(node: Node) -> Node | None:
    found = node.args[0] if node.args else node.kwargs.get("input")
    return found if isinstance(found, Node) else None


def _value(node: Any) -> Any:
    """Return the fake tensor that Dynamo computed for a node."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of `_LINEAR` or `_NORM` by name."""
    names = {**_LINEAR, **_NORM}[node.target]
    return {**_DEFAULTS, **dict(zip(names, node.args, strict=False)), **node.kwargs}
