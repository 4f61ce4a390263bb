"""Find, by a trace of torch.fx, modules that a `forward` calls one after another, and let gsbn run them.

This is the part of `convert` for ``trace=True``.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Proxy, Tracer

from .._typing import Precision
from ._activations import of_call, of_module
from ._autograd import saves_by_hooks
from ._graph import (
    Calls,
    adds,
    functional_kind,
    nodes_from,
    other_operand,
    replace_calls,
    rows,
    writes_its_first_operand,
)
from ._modules import FOLLOWERS, NORMS, Row, around, hindrance, run, run_in_sequence, title

_DEVICES = ("cuda", "cpu")
_SEQUENTIAL = nn.Sequential.__module__, f"{__package__}._convert"  # they define the forward of an nn.Sequential
_NOT_ALONE = "its input is not the output of an nn.Linear that nothing else uses"


class Trace(NamedTuple):
    """The result of a trace of a module's forward. Names are relative to the module."""

    forward: Callable[..., Any] | None  # takes the module and its inputs; None if nothing is to be replaced
    replaced: tuple[tuple[str, ...], ...]
    left: dict[str, str]  # the norms that this forward calls, and why they are left
    called: frozenset[str]  # the modules that this forward calls, even if torch.fx cannot trace it
    failed: str | None


class Traced(nn.Module):
    """A base class of modules whose forward `convert` has traced: gsbn runs some of their modules as one call."""

    _scales: tuple[type, ...]
    _precision: Precision
    _inputs: int  # how many inputs a call gives
    _traces: dict[bool, Trace]  # the keys are values of `training`

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the changed forward if the call is like the one that was traced, else the module's own forward."""
        forward = self._traces[self.training].forward
        if forward is None or named or len(inputs) != self._inputs:
            return super().forward(*inputs, **named)
        for value in inputs:
            if not isinstance(value, Tensor):
                return super().forward(*inputs, **named)
        return forward(self, *inputs)

    def extra_repr(self) -> str:
        """Return one line for each call of gsbn, with the names of the modules that it runs."""
        rows = dict.fromkeys(self._traces[self.training].replaced)  # lists a row once if it is called twice
        return "\n".join(
            filter(None, (super().extra_repr(), *(f"one call of gsbn: {' + '.join(row)}" for row in rows)))
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_traces"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._traces = traces(self, self._scales, self._precision)


def traces(module: Any, scales: tuple[type, ...], precision: Precision) -> dict[bool, Trace]:
    """Return the traces of a module, one for each value of its `training`."""
    before, found = module.training, {}
    try:
        for module.training in (True, False):
            found[module.training] = trace(module, scales, precision)
    finally:
        module.training = before
    return found


def required(module: Any) -> list[str]:
    """Return the names of the arguments that each call of the module's forward must give."""
    parameters = list(inspect.signature(_own_forward(module)).parameters.values())[1:]
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in places and each.default is each.empty]


def _own_forward(module: Any) -> Any:
    class_: Any = type(module)
    made = next((each for each in class_.__mro__ if Traced in each.__bases__), None)
    return (class_ if made is None else made.__bases__[1]).forward


def trace(module: Any, scales: tuple[type, ...], precision: Precision) -> Trace:
    """Trace the module's own forward in the module's present mode, without looking into the modules that it calls."""
    before, failed, called, codes = [(each, dict(vars(each))) for each in module.modules()], None, set[str](), []
    try:
        for on in (False, True):  # each mode is on once and off once, so a change by the forward is seen
            with _context_of(grad=not on, autocast=on):
                tracer = _Tracer()
                graph = tracer.trace(module)
                codes.append(str(graph))
                called |= tracer.called
        if codes[0] != codes[1]:
            raise ValueError("it depends on the grad mode or autocast")
    except Exception as error:  # of any kind: the forward is a user's code, and gets no tensors here
        why = " ".join(str(error).split())
        failed = f"torch.fx cannot trace the forward of {title(module)}, torch.compile may: {why:.80}"
    for each, own in before:  # the attributes of the module and its submodules
        after = vars(each)
        if own.keys() != after.keys() or any(after[name] is not value for name, value in own.items()):
            after.clear()
            after.update(own)
            failed = f"the forward of {title(module)} sets attributes, which torch.fx cannot trace"
    if failed is not None:
        return Trace(None, (), {}, frozenset(called | tracer.called), failed)
    replaced, left = _replace(module, graph, scales, precision)
    return Trace(_code(graph) if replaced else None, tuple(replaced), left, frozenset(called), None)


class _Proxy(Proxy):
    """A proxy that records `+=` and the like as writes; torch.fx would record operators that write nothing."""


def _in_place(function: Any) -> Any:
    def record(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(_Proxy, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))


class _Tracer(Tracer):
    """A tracer that leaves optional arguments at their defaults, and records each module that is called as one node."""

    traced_func_name = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()
        self.context = _context()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in required(self.root)]
        return _own_forward(self.root), [self.root, *inputs]

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        self.called.add(module_qualified_name)
        return True

    def create_node(self, *arguments: Any, **named: Any) -> Node:
        if _context() != self.context:
            raise ValueError("it changes the grad mode, autocast or what autograd saves")
        return super().create_node(*arguments, **named)


def _context() -> tuple[Any, ...]:
    """Return the modes that torch.fx does not trace: grad mode, inference mode, hooks on saved tensors and autocast."""
    devices = [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in _DEVICES]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), saves_by_hooks(), *devices


@contextmanager
def _context_of(*, grad: bool, autocast: bool) -> Iterator[None]:
    """Set grad mode and autocast inside a context. torch.autocast would refuse a device that is not there."""
    before = [torch.is_autocast_enabled(name) for name in _DEVICES]
    try:
        for name in _DEVICES:
            torch.set_autocast_enabled(name, autocast)
        with torch.set_grad_enabled(grad):
            yield
    finally:
        for name, enabled in zip(_DEVICES, before, strict=True):
            torch.set_autocast_enabled(name, enabled)


def run_rows(x: Any, precision: Precision, *rows: tuple[Any, ...]) -> Any:
    """Run rows of modules in sequence; the changed forward calls this function. Each call decides as in an
    nn.Sequential."""
    return run_in_sequence(tuple([Row(*row) for row in rows]), x, precision)


def run_row_and_add(x: Any, precision: Precision, row: tuple[Any, ...], residual: Any, in_place: bool) -> Any:
    """Run a row of modules that adds a residual before the activation; the changed forward calls this function."""
    return run(Row(*row), x, precision, residual, in_place)


def _replace(
    module: Any, graph: Graph, scales: tuple[type, ...], precision: Precision
) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Replace the rows in the graph. Return the names of their modules, and why each other norm is left."""

    def kind(node: Node) -> str | None:
        if node.op != "call_module":
            return "add" if adds(node) else functional_kind(node)
        if len(node.args) != 1 or node.kwargs:
            return None
        child = module.get_submodule(node.target)
        if child.__class__ in scales:
            return "times"
        if _is_pure(child):
            return "pure"
        kinds = {**dict.fromkeys(FOLLOWERS, "linear"), **dict.fromkeys(NORMS, "norm")}
        return kinds.get(child.__class__, None if of_module(child) is None else "activation")

    replaced, left, added = [], {}, set[Node]()  # added: where two batch norms are added, the first takes the addition
    for calls in list(rows(graph, kind)):
        if calls.add in added or not _may_add(module, calls):
            calls = calls.without_residual()
        found = _row(module, calls) if calls.linear is not None else _NOT_ALONE
        if not isinstance(found, str):
            found = around(found, len(found) - (1 if calls.activation is None else 2), scales)
        if not isinstance(found, str):
            found = hindrance(found) or found
        if isinstance(found, str):
            left[str(calls.norm.target)] = found
            continue
        nodes = [node for node in calls if node is not None and node.op == "call_module"]
        replaced.append(tuple(str(node.target) for node in nodes))
        if calls.add is not None:
            added.add(calls.add)
        _substitute(graph, calls, precision)
    _join(graph)
    return replaced, left


def _join(graph: Graph) -> None:
    """Put rows that are called one after another, each with the output of the one before it alone, into one call."""
    for node in list(graph.nodes):
        before = node.args[0] if node.target is run_rows else None
        if not isinstance(before, Node) or before.target is not run_rows or len(before.users) > 1:
            continue
        if all(between.op == "get_attr" for between in nodes_from(before.next, node)):
            node.args = (*before.args, *node.args[2:])
            graph.erase_node(before)


def _may_add(module: Any, calls: Calls) -> bool:
    """Return whether a row may end in its addition, if it has one, and move to where the addition stands.

    No other call between may use the norm: its running statistics follow the order of the calls.
    """
    if calls.add is None:
        return True
    norm = module.get_submodule(calls.norm.target)
    between = [node for node in nodes_from(calls.norm.next, calls.add) if node.op == "call_module"]
    return not any(each is norm for node in between for each in module.get_submodule(node.target).modules())


def _is_pure(child: Any) -> bool:
    """Return whether a module only calls layers and norms one after another, as a shortcut of a residual block does."""
    if not isinstance(child, nn.Sequential) or child.__class__.forward.__module__ not in _SEQUENTIAL:
        return False
    return all(each.__class__ in (*FOLLOWERS, *NORMS, nn.Identity) for each in child)


def _row(module: Any, calls: Calls) -> tuple[Any, ...] | str:
    """Return the modules of a row as if they stood in an nn.Sequential, or the reason why there is no row."""
    children = []
    for node in calls:
        if node is None or node is calls.add:
            continue
        if node.op == "call_module":
            children.append(module.get_submodule(node.target))
        elif node is calls.activation:
            children.append(of_call(node))
        else:
            factor = other_operand(calls)
            if not isinstance(factor, Node) or factor.op != "get_attr":
                return "a factor that is not a parameter stands between it and its nn.Linear"
            children.append(module.get_parameter(factor.target))
    return tuple(children)


def _substitute(graph: Graph, calls: Calls, precision: Precision) -> None:
    linear, scale, norm, add, activation = calls

    def of(node: Node | None) -> Any:
        return graph.get_attr(node.target) if node is not None and node.op == "call_module" else None

    with graph.inserting_before(calls.sum):
        factor = other_operand(calls) if scale is not None and scale.op != "call_module" else of(scale)
        after = of_call(activation) if activation is not None and activation.op != "call_module" else of(activation)
        row = of(linear), factor, of(norm), after
    if add is None:
        replace_calls(graph, calls, run_rows, (linear.args[0], precision, row))
    else:
        of_residual = calls.residual, writes_its_first_operand(add)
        replace_calls(graph, calls, run_row_and_add, (linear.args[0], precision, row, *of_residual))


def _code(graph: Graph) -> Callable[..., Any]:
    """Return the graph as a function of the module and its inputs."""
    made = GraphModule(nn.Module(), Graph())
    made.graph = graph
    forward: Callable[..., Any] = type(made).forward
    return forward
