"""The path from a caller's arrays to the launches, which all operations share.

An operation contributes its arguments, its checks and its program. Of arrays that are alike, the first call is checked
and planned; later ones find it by a key, and only their addresses are new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import _check, _kernels
from ._call import Call, Description, log, remember
from ._check import View
from ._device import green_sms, hold_until_done, is_capturing, is_current, on_device
from ._group import Group
from ._interop import Kind, kind_of, kinds_of
from ._plan import Device, Limits
from ._plan.program import Program
from ._plan.ranks import Ranks
from ._ranks import exchange_of

ANY = Limits()
_MAX_APART = 64
Views = dict[str, View | None]


class Operation(NamedTuple):
    """What an operation contributes. `options` are hashable and the operation's own."""

    name: str
    arguments: tuple[str, ...]
    aligned: tuple[int, ...]  # positions of the arguments whose start on 16 bytes the program depends on
    numeric: tuple[int, ...]  # positions of the options whose type is a part of the key: True == 1 == 1.0
    check: Callable[[Kind, tuple[Any, ...], Any, frozenset[str]], Views]  # raises whatever is wrong
    # of views, options, the device and the ranks; None where nothing is launched
    program: Callable[[Views, Any, Device, Limits, Ranks | None, bool], Program | None]
    returns: Callable[[Program, Views, Any], Any]  # what the operation reads of `Checked.returns` after each call
    within: Callable[[Any, int], Any]  # the options of a call that can occupy so many SMs at most
    written: Callable[[Views, Any], tuple[str, ...]] = lambda views, options: ()
    extra: tuple[str, ...] = ()  # arguments that a prepared weight brings


class Checked:
    """Arguments that have been found right, but for their addresses, and what must hold of these."""

    def __init__(self, operation: Operation, views: Views, options: Any) -> None:
        self.written = [operation.arguments.index(name) for name in operation.written(views, options)]
        self._spans: list[tuple[int, int, int]] = []
        if self.written:
            given = [(i, views[name]) for i, name in enumerate(operation.arguments) if views[name] is not None]
            self._spans = [(i, *_check.span(view)) for i, view in given if 0 not in view.shape]  # type: ignore[union-attr,arg-type]
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


def borrow(
    names: tuple[str, ...], arrays: tuple[Any, ...], required: tuple[str, ...], own: tuple[str, ...] = ()
) -> tuple[Kind, tuple[Any, ...], frozenset[str], bool]:
    """Whose arrays these are; the arrays, imported where the first is a foreign DLPack producer; which of them are
    read-only; whether they were imported, and are to be given back."""
    kind = kind_of(arrays[0])
    if kind is not None:
        return kind, arrays, frozenset(), False
    kind, imported, read_only = kinds_of(dict(zip(names, arrays, strict=True)), required, own)
    return kind, tuple(imported.values()), read_only, True


def give_back(kind: Kind, arrays: tuple[Any, ...]) -> None:
    """Hold imported arrays until the GPU is done with them."""
    if kind.on_gpu:
        hold_until_done(arrays, kind.device(arrays[0]))


def checked(
    operation: Operation, kind: Kind, arrays: tuple[Any, ...], options: Any, read_only: frozenset[str] = frozenset()
) -> Checked:
    """On the CPU: the arguments, found right now or before."""
    found, key, pointers = _find(operation, kind, arrays, options, read_only, False, ANY)
    if found is None:
        found = Checked(operation, operation.check(kind, arrays, options, read_only), options)
        remember(_found, key, found)
    elif found.may_overlap(pointers):
        operation.check(kind, arrays, options, read_only)
    return found


def run(
    operation: Operation,
    kind: Kind,
    arrays: tuple[Any, ...],
    options: Any,
    *,
    group: Group | None = None,
    limits: Limits = ANY,
    read_only: frozenset[str] = frozenset(),
    prepared: Any = None,
    before: Callable[[], None] | None = None,
) -> tuple[Checked | None, list[Any]]:
    """On a GPU: launch what the operation's program says. Gives what was found and the arrays that the call made.

    The first array is given. `prepared` is a weight whose limbs are there. `before` is called just before anything is
    allocated or launched. None is found where there is nothing to launch.
    """
    device = kind.device(arrays[0])
    if not is_current(device):
        with on_device(device, kind.stream):
            return run(
                operation, kind, arrays, options, group=group, limits=limits, read_only=read_only, prepared=prepared,
                before=before,
            )  # fmt: skip
    stream = kind.stream(device)
    capturing = is_capturing(stream)
    if (held := green_sms(stream)) is not None:
        options = operation.within(options, held)
    limbs = prepared is not None and prepared.limbs is not None
    found, key, pointers = _find(operation, kind, arrays, options, read_only, limbs, limits)
    views: Views = {}
    if found is None:
        views = operation.check(kind, arrays, options, read_only)
    elif found.may_overlap(pointers):
        operation.check(kind, arrays, options, read_only)
    exchange = None
    if group is not None:
        exchange = exchange_of(group, device, capturing)  # the first call waits for all ranks
        group.check()
    if found is None:
        pointers = pointers or [0 if array is None else kind.pointer(array) for array in arrays]  # if `read` refused
        found = Checked(operation, views, options)
        found.call = _prepare(operation, kind, arrays, views, options, device, limbs, limits, group, exchange)
        if found.call is None:
            return None, []
        found.returns = operation.returns(found.call.program, views, options)
        remember(_found, key, found)
        log.debug("%s %s", operation.name, _described(views, found.call.description))
    assert found.call is not None
    if before is not None:
        before()
    if limbs:
        pointers += prepared.limbs[1:]
    if exchange is None:
        return found, found.call.run(arrays[0], pointers, stream, capturing, prepared)
    pointers.append(exchange.address)
    exchange.begin(stream, capturing)
    made = found.call.run(arrays[0], pointers, stream, capturing, prepared)
    exchange.end(stream, capturing)
    return found, made


def describe(
    operation: Operation, kind: Kind, arrays: tuple[Any, ...], options: Any, *, group: Group | None, limits: Limits,
    read_only: frozenset[str], prepared: Any,
) -> Description | None:  # fmt: skip
    """How `run` would compute a call, which is checked and prepared, but not made."""
    views = operation.check(kind, arrays, options, read_only)
    device = kind.device(arrays[0])
    limbs = prepared is not None and prepared.limbs is not None
    with on_device(device, kind.stream):
        if (held := green_sms(kind.stream(device))) is not None:
            options = operation.within(options, held)
        call = _prepare(operation, kind, arrays, views, options, device, limbs, limits, group, None)
    return None if call is None else call.description


def _find(
    operation: Operation, kind: Kind, arrays: tuple[Any, ...], options: Any, *more: Any
) -> tuple[Checked | None, Any, list[int]]:
    """What was prepared for arguments like these, its key and the addresses; None and None if something is wrong."""
    try:
        alike, pointers = kind.read(arrays)
        types = tuple([type(options[i]) for i in operation.numeric])
        aligned = tuple([pointers[i] & 15 == 0 for i in operation.aligned]) if kind.on_gpu else None
        key = (operation.name, alike, options, types, aligned, *more)
        return _found.get(key), key, pointers
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None, None, []  # the checks say what


def _prepare(
    operation: Operation, kind: Kind, arrays: tuple[Any, ...], views: Views, options: Any, device: int, limbs: bool,
    limits: Limits, group: Group | None, exchange: Any,
) -> Call | None:  # fmt: skip
    """Plan a call, and make it ready to run; compiles the kernels that it needs."""
    ranks = None
    if group is not None:
        ranks = Ranks() if exchange is None else Ranks(exchange.waits, exchange.size, exchange.features)
    gpu = limits.gpu or _kernels.gpu(device)
    program = operation.program(views, options, gpu, limits, ranks, limbs)
    if program is None:
        return None
    arguments = (*operation.arguments, *(operation.extra if limbs else ()), *(("ranks",) if group is not None else ()))
    return Call(kind, device, arguments, program, arrays[0], exchange)


def _described(views: Views, description: Description) -> str:
    shapes = " x ".join(str(view.shape) for view in views.values() if view is not None and len(view.shape) == 2)
    dtype = next(view.dtype for view in views.values() if view is not None)
    return f"{shapes}, {dtype}: {description}"
