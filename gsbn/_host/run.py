"""The path from a caller's arrays to the launches, which all operations share.

An operation contributes its arguments, its checks and its program. Of arrays that are alike, the first call is checked
and planned; later ones find it by a key, and only their addresses are new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._arrays import check
from .._arrays.check import View
from .._arrays.kinds import Kind, kind_of, kinds_of
from .._cuda import kernels
from .._cuda.device import green_sms, hold_until_done, is_capturing, is_current, on_device
from .._plan import Device, Limits
from .._plan.program import Program
from .._plan.ranks import Ranks
from .._ranks.exchange import exchange_of
from .._ranks.group import Group
from .call import Call, Description, log, remember

ANY = Limits()
_MAX_APART = 64
_NONE: frozenset[str] = frozenset()
Views = dict[str, View | None]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """What an operation contributes. `options` are hashable and its own; `context` is what a call brings beside arrays:
    a prepared weight, or what a forward saved."""

    name: str
    arguments: tuple[str, ...]
    required: tuple[str, ...]  # of the arguments that may come from any DLPack producer: the first `foreign` ones
    foreign: int
    aligned: tuple[int, int, int]  # positions of the arguments whose start on 16 bytes the program depends on
    numeric: tuple[int, ...]  # positions of the options whose type is a part of the key: True == 1 == 1.0
    check: Callable[[Kind, tuple[Any, ...], Any, frozenset[str], Any], Views]  # raises whatever is wrong
    # of views, options, the device, limits, the ranks, and whether the extra arguments are there; None where nothing is
    # to be launched
    program: Callable[[Views, Any, Device, Limits, Ranks | None, bool], Program | None]
    # what is read of `Checked.returns` after each call
    returns: Callable[[Program, Views, Any], Any]
    # what the caller gets, of what was found, None where nothing was launched, and of the arrays that the call made
    result: Callable[[Kind, tuple[Any, ...], Any, Checked | None, list[Any]], Any]
    on_cpu: Callable[[Kind, tuple[Any, ...], Any, frozenset[str], Any], Any]
    within: Callable[[Any, int], Any] = lambda options, held: options  # for a call that may occupy so many SMs
    written: Callable[[Views, Any], tuple[str, ...]] = lambda views, options: ()
    before: Callable[[Kind, Any], None] | None = None  # the last check, which no key can spare
    extra: tuple[str, ...] = ()  # arguments that a prepared weight brings


class Checked:
    """Arguments that have been found right, but for their addresses, and what must hold of these."""

    def __init__(self, operation: Operation, views: Views, options: Any) -> None:
        self.written = [operation.arguments.index(name) for name in operation.written(views, options)]
        self._spans: list[tuple[int, int, int]] = []
        if self.written:
            given = [(i, views[name]) for i, name in enumerate(operation.arguments) if views[name] is not None]
            self._spans = [(i, *check.span(view)) for i, view in given if 0 not in view.shape]  # type: ignore[union-attr,arg-type]
        self._apart: set[tuple[int, ...]] = set()  # addresses at which no two spans meet
        self.call: Call | None = None  # on a GPU; and what `Operation.returns` says of its program
        self.returns: Any = None

    def may_overlap(self, pointers: list[int]) -> bool:
        """Whether any two arrays' spans meet; what that means is for the full check to say."""
        where = tuple(pointers)
        if not self.written or not where or where in self._apart:
            return False
        end = 0
        for start, stop in sorted([(where[i] + low, where[i] + high) for i, low, high in self._spans]):
            if start < end:
                return True
            end = stop
        if len(self._apart) >= _MAX_APART:
            self._apart.clear()
        self._apart.add(where)
        return False


_found: dict[Any, Checked] = {}


def call(
    operation: Operation,
    arrays: tuple[Any, ...],
    options: Any,
    *,
    group: Group | None = None,
    limits: Limits = ANY,
    context: Any = None,
    own: tuple[str, ...] = (),
) -> Any:
    """An operation from its arrays to its result; those named `own` come from no DLPack producer."""
    kind, arrays, read_only, borrowed = _admit(operation, arrays, own)
    if kind.on_gpu:
        found, made = run(operation, kind, arrays, options, group, limits, context, read_only)
        result = operation.result(kind, arrays, options, found, made)
    else:
        result = operation.on_cpu(kind, arrays, options, read_only, context)
    if borrowed and kind.on_gpu:
        hold_until_done(arrays[: operation.foreign], kind.device(arrays[0]))
    return result


def describe(
    operation: Operation,
    arrays: tuple[Any, ...],
    options: Any,
    *,
    group: Group | None,
    context: Any = None,
    own: tuple[str, ...] = (),
) -> Description:
    """How `call` would compute it; it is checked and prepared, but not made."""
    kind, arrays, read_only, borrowed = _admit(operation, arrays, own)
    views = operation.check(kind, arrays, options, read_only, context)
    if not kind.on_gpu:
        return Description("numpy", "the arrays are on the CPU", (), 0)
    device = kind.device(arrays[0])
    with on_device(device, kind.stream):
        if (held := green_sms(kind.stream(device))) is not None:
            options = operation.within(options, held)
        extra = bool(_extra(operation, context))
        ready = _prepare(operation, kind, arrays, views, options, device, extra, ANY, group, None)
    if borrowed:
        hold_until_done(arrays[: operation.foreign], device)
    return Description("numpy", "no rows", (), 0) if ready is None else ready.description


def _admit(
    operation: Operation, arrays: tuple[Any, ...], own: tuple[str, ...]
) -> tuple[Kind, tuple[Any, ...], frozenset[str], bool]:
    """Whose arrays these are; the arrays, imported where the first is a foreign DLPack producer, or no array at all;
    which of them are read-only; whether they were imported."""
    kind = kind_of(arrays[0])
    if kind is not None:
        return kind, arrays, _NONE, False
    named = dict(zip(operation.arguments[: operation.foreign], arrays, strict=False))
    kind, imported, read_only = kinds_of(named, operation.required, own)
    return kind, (*imported.values(), *arrays[operation.foreign :]), read_only, True


def _extra(operation: Operation, context: Any) -> tuple[int, ...]:
    """The addresses of the operation's extra arguments, if they are there."""
    limbs = context.limbs if operation.extra and context is not None else None
    return () if limbs is None else tuple(limbs[1:])


def checked(
    operation: Operation, kind: Kind, arrays: tuple[Any, ...], options: Any, read_only: frozenset[str] = frozenset()
) -> Checked:
    """On the CPU: the arguments, found right now or before."""
    found, key, pointers = _find(operation, kind, arrays, options, read_only, False, ANY)
    if found is None:
        found = Checked(operation, operation.check(kind, arrays, options, read_only, None), options)
        remember(_found, key, found)
    elif found.may_overlap(pointers):
        operation.check(kind, arrays, options, read_only, None)
    return found


def run(
    operation: Operation,
    kind: Kind,
    arrays: tuple[Any, ...],
    options: Any,
    group: Group | None = None,
    limits: Limits = ANY,
    context: Any = None,
    read_only: frozenset[str] = frozenset(),
) -> tuple[Checked | None, list[Any]]:
    """On a GPU: launch what the operation's program says. Gives what was found and the arrays that the call made.

    The first array is given. None is found where there is nothing to launch.
    """
    device = kind.device(arrays[0])
    if not is_current(device):
        with on_device(device, kind.stream):
            return run(operation, kind, arrays, options, group, limits, context, read_only)
    stream = kind.stream(device)
    capturing = is_capturing(stream)
    if (held := green_sms(stream)) is not None:
        options = operation.within(options, held)
    extra = () if context is None else _extra(operation, context)
    found, key, pointers = _find(operation, kind, arrays, options, read_only, bool(extra), limits)
    views: Views = {}
    if found is None:
        views = operation.check(kind, arrays, options, read_only, context)
    elif found.may_overlap(pointers):
        operation.check(kind, arrays, options, read_only, context)
    exchange = None
    if group is not None:
        exchange = exchange_of(group, device, capturing)  # the first call waits for all ranks
        group.check()
    if found is None:
        pointers = pointers or [0 if array is None else kind.pointer(array) for array in arrays]  # if `read` refused
        found = Checked(operation, views, options)
        found.call = _prepare(operation, kind, arrays, views, options, device, bool(extra), limits, group, exchange)
        if found.call is None:
            return None, []
        found.returns = operation.returns(found.call.program, views, options)
        remember(_found, key, found)
        log.debug("%s %s", operation.name, _described(views, found.call.description))
    if operation.before is not None:
        operation.before(kind, context)
    if extra:
        pointers += extra
    held_by_graph = context if operation.extra else None
    ready: Any = found.call
    if exchange is None:
        return found, ready.run(arrays[0], pointers, stream, capturing, held_by_graph)
    pointers.append(exchange.address)
    exchange.begin(stream, capturing)
    made = ready.run(arrays[0], pointers, stream, capturing, held_by_graph)
    exchange.end(stream, capturing)
    return found, made


def _find(
    operation: Operation, kind: Kind, arrays: tuple[Any, ...], options: Any, *more: Any
) -> tuple[Checked | None, Any, list[int]]:
    """What was prepared for arguments like these, its key and the addresses; None and None if something is wrong."""
    try:
        alike, pointers = kind.read(arrays)
        types = tuple([type(options[i]) for i in operation.numeric]) if operation.numeric else None
        aligned = None
        if kind.on_gpu:
            i, j, k = operation.aligned
            aligned = (pointers[i] & 15 == 0, pointers[j] & 15 == 0, pointers[k] & 15 == 0)
        key = (operation.name, alike, options, types, aligned, *more)
        return _found.get(key), key, pointers
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None, None, []  # the checks say what


def _prepare(
    operation: Operation, kind: Kind, arrays: tuple[Any, ...], views: Views, options: Any, device: int, extra: bool,
    limits: Limits, group: Group | None, exchange: Any,
) -> Call | None:  # fmt: skip
    """Plan a call, and make it ready to run; compiles the kernels that it needs."""
    ranks = None
    if group is not None:
        ranks = Ranks() if exchange is None else Ranks(exchange.waits, exchange.size, exchange.features)
    gpu = limits.gpu or kernels.gpu(device)
    program = operation.program(views, options, gpu, limits, ranks, extra)
    if program is None:
        return None
    arguments = (*operation.arguments, *(operation.extra if extra else ()), *(("ranks",) if group is not None else ()))
    return Call(kind, device, arguments, program, arrays[0], exchange)


def _described(views: Views, description: Description) -> str:
    shapes = " x ".join(str(view.shape) for view in views.values() if view is not None and len(view.shape) == 2)
    dtype = next(view.dtype for view in views.values() if view is not None)
    return f"{shapes}, {dtype}: {description}"
