"""Run an operation, from the caller's arrays to the launches. All operations share this path.

An operation contributes its arguments, its checks and its program. The first call with arrays of certain shapes,
strides and dtypes is checked and planned. Later calls find its plan by a key, and only their addresses are new.
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
from .._plan.problem import Ranks
from .._plan.program import Program
from .._ranks.exchange import exchange_of
from .._ranks.group import Group
from .._values import sms_within
from .call import Call, Description, log, remember

ANY = Limits()
_MAX_APART = 64
_NONE: frozenset[str] = frozenset()
Arrays = tuple[Any, ...]  # of a call, in the order of its arguments; None for one that is not given
Options = tuple[Any, ...]  # hashable
Views = dict[str, View | None]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """The parts that an operation contributes.

    The `options` of a call are hashable. `context` is what a call takes in addition to arrays: a prepared weight, or
    what a forward saved.
    """

    name: str
    arguments: tuple[str, ...]
    required: tuple[str, ...]  # arguments, among the first `foreign`, that must be arrays
    foreign: int  # the first `foreign` arguments may come from any DLPack producer
    check: Callable[[Kind, Arrays, Any, frozenset[str], Any], Views]  # raises an error if anything is wrong
    # makes the program from views, options, device, limits, ranks, and whether there are extra arguments; returns None
    # if nothing is launched
    program: Callable[[Views, Any, Device, Limits, Ranks | None, bool], Program | None]
    # makes the caller's result from what `run` found (None if nothing was launched) and the arrays that the call
    # allocated
    result: Callable[[Kind, Arrays, Any, Checked | None, list[Any]], Any]
    on_cpu: Callable[[Kind, Arrays, Any, frozenset[str], Any], Any]
    # positions of the arguments for which the program depends on whether the address is a multiple of 16 bytes; always
    # five, so fewer are repeated
    aligned: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    # the types of the options that may be numbers: they are a part of the key, because True == 1 == 1.0
    types: Callable[[Options], tuple[type, ...]] = lambda options: ()
    # makes `Checked.returns`, which `result` reads after each call
    returns: Callable[[Program, Views, Any], Any] = lambda program, views, options: None
    within: Callable[[Any, int], Any] = lambda options, held: options  # limits a call to so many SMs
    written: Callable[[Views, Any], tuple[str, ...]] = lambda views, options: ()
    before: Callable[[Kind, Any], None] | None = None  # a check that every call needs
    extra: tuple[str, ...] = ()  # further arguments of a call with a prepared weight


def replaced(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    """Return the tuple with another value at this place."""
    return (*values[:place], value, *values[place + 1 :])


def limited_at(place: int) -> Callable[[Options, int], Options]:
    """Return `Operation.within` for options that have `sms` at this place."""

    def within(options: Options, held: int) -> Options:
        return replaced(options, place, sms_within(options[place], held))

    return within


def views_of(kind: Kind, names: tuple[str, ...], arrays: Arrays, required: tuple[str, ...]) -> Views:
    """Return the view of each argument, None for one that is not given.

    Raises the errors of `kinds_of` if the arrays are not of one library and device.
    """
    named = dict(zip(names, arrays, strict=True))
    kinds_of(named, required)
    return {name: None if array is None else kind.view(array) for name, array in named.items()}


class Checked:
    """Arguments that were checked, except for their addresses, and the conditions on the addresses."""

    def __init__(self, operation: Operation, views: Views, options: Any) -> None:
        self.written = [operation.arguments.index(name) for name in operation.written(views, options)]
        self._spans: list[tuple[int, int, int, bool]] = []
        if self.written:
            for i, name in enumerate(operation.arguments):
                view = views[name]
                if view is not None and 0 not in view.shape:
                    self._spans.append((i, *check.span(view), i in self.written))
        self._apart: set[tuple[int, ...]] = set()  # addresses at which no written array overlaps another
        self.call: Call | None = None  # on a GPU
        self.returns: Any = None  # the result of `Operation.returns`

    def returned(self, made: list[Any]) -> list[Any]:
        """Return the arrays in `made` at the places in `returns`; a place that is None gives None."""
        return [None if place is None else made[place] for place in self.returns]

    def may_overlap(self, pointers: list[int]) -> bool:
        """Return whether the span of a written array overlaps another span.

        If so, the full check decides whether this is an error.
        """
        if not self.written or not pointers:
            return False
        where = tuple(pointers)
        if where in self._apart:
            return False
        end = end_of_written = 0  # the ends of the spans so far
        for start, stop, writes in sorted([(where[i] + low, where[i] + high, w) for i, low, high, w in self._spans]):
            if start < (end if writes else end_of_written):
                return True
            end = max(end, stop)
            if writes:
                end_of_written = end
        if len(self._apart) >= _MAX_APART:
            self._apart.clear()
        self._apart.add(where)
        return False


_found: dict[Any, Checked] = {}


def call(
    operation: Operation,
    arrays: Arrays,
    options: Any,
    *,
    group: Group | None = None,
    limits: Limits = ANY,
    context: Any = None,
    own: tuple[str, ...] = (),
) -> Any:
    """Run an operation on its arrays, and return its result.

    The arrays that `own` names do not come from a DLPack producer.
    """
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
    arrays: Arrays,
    options: Any,
    *,
    group: Group | None,
    context: Any = None,
    own: tuple[str, ...] = (),
) -> Description:
    """Return how `call` would compute the result. The call is checked and prepared, but not run."""
    kind, arrays, read_only, borrowed = _admit(operation, arrays, own)
    views = operation.check(kind, arrays, options, read_only, context)
    if not kind.on_gpu:
        return Description("numpy", "the arrays are on the CPU", (), 0)
    device = kind.device(arrays[0])
    with on_device(device, kind.stream):
        if (held := green_sms(kind.stream(device))) is not None:
            options = operation.within(options, held)
        has_extra = bool(_extra(operation, context))
        ready = _prepare(operation, kind, arrays, views, options, device, has_extra, ANY, group, None)
    if borrowed:
        hold_until_done(arrays[: operation.foreign], device)
    return Description("numpy", "no rows", (), 0) if ready is None else ready.description


def _admit(operation: Operation, arrays: Arrays, own: tuple[str, ...]) -> tuple[Kind, Arrays, frozenset[str], bool]:
    """Return the arrays' kind, the arrays, the names of the read-only ones, and whether the arrays were imported.

    They are imported if the first one is not of a known kind.
    """
    kind = kind_of(arrays[0])
    if kind is not None:
        return kind, arrays, _NONE, False
    named = dict(zip(operation.arguments[: operation.foreign], arrays, strict=False))
    kind, imported, read_only = kinds_of(named, operation.required, own)
    return kind, (*imported.values(), *arrays[operation.foreign :]), read_only, True


def _extra(operation: Operation, context: Any) -> tuple[int, ...]:
    """Return the addresses of the operation's extra arguments, if it has any."""
    limbs = context.limbs if operation.extra and context is not None else None
    return () if limbs is None else tuple(limbs[1:])


def checked(
    operation: Operation, kind: Kind, arrays: Arrays, options: Any, read_only: frozenset[str] = frozenset()
) -> Checked:
    """Return the checked arguments of a call on the CPU, from this call or an earlier one."""
    found, key, pointers = _find(operation, kind, arrays, options, read_only, False, None)
    if found is None:
        found = Checked(operation, operation.check(kind, arrays, options, read_only, None), options)
        remember(_found, key, found)
    elif found.may_overlap(pointers):
        operation.check(kind, arrays, options, read_only, None)
    return found


def run(
    operation: Operation,
    kind: Kind,
    arrays: Arrays,
    options: Any,
    group: Group | None = None,
    limits: Limits = ANY,
    context: Any = None,
    read_only: frozenset[str] = frozenset(),
) -> tuple[Checked | None, list[Any]]:
    """Run the operation's program on a GPU. Return its checked arguments and the arrays that the call allocated.

    The first array must not be None. The checked arguments are None if there is nothing to launch.
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
    narrowed = None if limits is ANY else limits  # quicker to hash
    found, key, pointers = _find(operation, kind, arrays, options, read_only, bool(extra), narrowed)
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
        pointers = pointers or [0 if array is None else kind.pointer(array) for array in arrays]  # if `_find` failed
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
    operation: Operation, kind: Kind, arrays: Arrays, options: Any, read_only: frozenset[str], extra: bool, limits: Any
) -> tuple[Checked | None, Any, list[int]]:
    """Return what an earlier call with such arguments left in the cache, or None; its key; and the addresses.

    Return (None, None, []) if an argument is wrong.
    """
    try:
        alike, pointers = kind.read(arrays)
        aligned = None
        if kind.on_gpu:
            i, j, k, m, n = operation.aligned  # a loop would take longer
            aligned = (
                pointers[i] & 15 == 0, pointers[j] & 15 == 0, pointers[k] & 15 == 0, pointers[m] & 15 == 0,
                pointers[n] & 15 == 0,
            )  # fmt: skip
        key = (operation.name, alike, options, operation.types(options), aligned, read_only, extra, limits)
        return _found.get(key), key, pointers
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None, None, []  # the checks will raise an error


def _prepare(
    operation: Operation, kind: Kind, arrays: Arrays, views: Views, options: Any, device: int, extra: bool,
    limits: Limits, group: Group | None, exchange: Any,
) -> Call | None:  # fmt: skip
    """Plan a call, compile its kernels and make it ready to run. Return None if there is nothing to launch."""
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
