"""Convert a model: gsbn then runs consecutive modules of an ``nn.Sequential``, or of a traced forward, as one call."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache, wraps
from types import new_class
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .._arrays.check import PRECISIONS
from .._typing import Precision
from .._values import choice, type_name
from . import _modules as modules
from ._autograd import is_compiling
from ._conv import ConvBatchNorm
from ._layer import LinearBatchNorm1d
from ._linear import Linear
from ._modules import NORMS, Row, SyncBatchNorm, around, hindrance, run_in_sequence, title
from ._trace import Traced, required, traces

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm1d, nn.LazyBatchNorm2d)
_LAYERS = (LinearBatchNorm1d, ConvBatchNorm)
_OURS = ("_scales", "_precision", "_plan", "_inputs", "_traces")  # attributes that `convert` adds to a module


class Left(NamedTuple):
    """A normalisation that `convert` did not change.

    Attributes
    ----------
    name : str
        The module's name in the model.
    why : str
        The reason.
    """

    name: str
    why: str


class Conversion(NamedTuple):
    """The result of `convert`. As a string it has one line for each entry.

    Attributes
    ----------
    replaced : tuple of tuple of str
        For each call of gsbn the names of the modules that it runs.
    left : tuple of Left
        Every other BatchNorm1d, BatchNorm2d and SyncBatchNorm of the model, and the reason why it is left. Modules in a
        layer of gsbn are not listed.
    """

    replaced: tuple[tuple[str, ...], ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        lines = [f"replaced {' + '.join(names)}" for names in self.replaced]
        lines += [f"left {name}: {why}" for name, why in self.left]
        return "\n".join(lines) or "nothing to replace"


class Sequential(nn.Sequential):
    """An ``nn.Sequential`` that `convert` changed: it has the same children, and gsbn runs some of them as one call.

    `convert` gives an instance of a subclass of ``nn.Sequential`` a class that inherits from this class and from the
    instance's own class. A converted module can be sliced, extended and changed: it detects when its children have
    changed.
    """

    _scales: tuple[type, ...] = ()
    _precision: Precision = "highest"

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last child."""
        x: Any = input
        children = self._modules.values()
        if x.__class__ is Tensor and not any(modules.wins(x, child) for child in children if child.__class__ in NORMS):
            for module in children:
                x = module(x)
            return x
        for step in self._steps():
            x = run_in_sequence(step, x, self._precision) if step.__class__ is tuple else step(x)
        return x

    def _steps(self) -> list[Any]:
        """Return the steps in order: a tuple of consecutive rows, or a child that is in no row."""
        children = tuple(self._modules.values())
        if is_compiling():
            return _joined(_steps(children, self._scales))
        key = children, tuple([child.__class__ for child in children])  # lazy and parametrized modules change class
        plan = self.__dict__.get("_plan")
        if plan is None or plan[0] != key:
            plan = self.__dict__["_plan"] = key, _joined(_steps(children, self._scales))
        return plan[1]

    def extra_repr(self) -> str:
        """Return one line for each call of gsbn, with the names of the modules that it runs."""
        names = tuple(self._modules)
        shown, at = [super().extra_repr()], 0
        for step in _steps(tuple(self._modules.values()), self._scales):
            count = sum(module is not None for module in step) if step.__class__ is Row else 1
            if step.__class__ is Row and _hindrance(self, step) is None:
                shown.append(f"one call of gsbn: {' + '.join(names[at : at + count])}")
            at += count
        return "\n".join(filter(None, shown))

    @classmethod
    def of_class(cls, type_: Any, traced: bool = False) -> nn.Module:
        """Return a converted instance of this class without its state, for pickle and copy."""
        class_ = _class_for(type_, Traced if traced else Sequential)
        made: nn.Module = class_.__new__(class_)
        return made

    def __prepare_scriptable__(self) -> nn.Sequential:
        """Return an nn.Sequential of the children for torch.jit.script, which runs PyTorch's own modules."""
        made = nn.Sequential(OrderedDict(self._modules))
        made.training = self.training
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_plan"}


@cache
def _class_for(type_: Any, base: Any) -> Any:
    """Return the class that `convert` gives an instance of this class. It inherits from the base, too."""
    if type_ is nn.Sequential:
        return Sequential
    if issubclass(type_, base):
        return type_
    members = {"__module__": type_.__module__, "__qualname__": type_.__qualname__, "__doc__": type_.__doc__}
    members["__reduce_ex__"] = _reduce
    if base is Traced:
        members |= {"forward": _with_signature(type_.forward), "__prepare_scriptable__": _as_it_was}
    return new_class(type_.__name__, (base, type_), exec_body=lambda body: body.update(members))


def _with_signature(own: Any) -> Any:
    """Return a traced module's forward with the signature of its own forward, which torch.export and torch.fx read."""

    @wraps(own)
    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        return Traced.forward(self, *inputs, **named)

    return forward


def _as_it_was(self: Any) -> nn.Module:
    """Return the module with the forward that it had before `convert`, which torch.jit.script compiles."""
    made: nn.Module = _own_class(self).__new__(_own_class(self))
    made.__dict__.update({name: value for name, value in vars(self).items() if name not in _OURS})
    made._modules = self._modules.copy()
    return made


def _class_of(module: Any) -> Any:
    """Return the class of a module, without the subclass that torch.nn.utils.parametrize has put around it."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def _set_class(module: Any, class_: Any) -> None:
    """Give a module this class. A parametrized module keeps its outer class, and its copies keep theirs."""
    around = type(module)
    if is_parametrized(module):
        members = {name: value for name, value in vars(around).items() if name not in ("__dict__", "__weakref__")}
        class_ = type(around.__name__, (class_,), members)
    module.__class__ = class_


def _own_class(module: Any) -> Any:
    """Return the class that a module had before `convert`."""
    type_ = _class_of(module)
    if type_ is Sequential:
        return nn.Sequential
    return type_.__bases__[1] if vars(type_).get("__reduce_ex__") is _reduce else type_


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle or copy an instance of a class that `_class_for` made, which no Python module contains."""
    return Sequential.of_class, (_own_class(self), isinstance(self, Traced)), self.__getstate__()


def convert(
    model: nn.Module, *, scales: tuple[type, ...] = (), precision: Precision = "highest", trace: bool = False,
    linear: bool = False,
) -> Conversion:  # fmt: skip
    """Let gsbn run consecutive Linear, scale, BatchNorm1d and activation modules of an ``nn.Sequential`` as one call.

    gsbn also runs consecutive 1x1 convolution (Conv1d or Conv2d), BatchNorm1d or BatchNorm2d, and activation modules as
    one call. It does this if the channels of the input are adjacent in memory, as in ``torch.channels_last``, and, in
    16 bits on Hopper, for contiguous inputs.

    The modules keep their places, parameters, hooks and dtypes. The names in the state_dict stay the same, and an
    existing optimiser continues to work. Only classes change. An ``nn.Sequential`` becomes a `gsbn.torch.Sequential`,
    which is a subclass. An instance of another subclass without a ``forward`` of its own gets a class that inherits
    from both. Each ``nn.SyncBatchNorm`` that gsbn runs becomes a `gsbn.torch.SyncBatchNorm`. With `trace`, each module
    whose ``forward`` was traced and changed gets a subclass of its class. With `linear`, each other ``nn.Linear``
    becomes a `gsbn.torch.Linear`. ``print`` the result to see what was converted.

    Parameters
    ----------
    model : nn.Module
        The model, which is changed in place. It may itself be an ``nn.Sequential``.
    scales : tuple of type
        Classes of modules that compute ``x * self.scale`` and whose only parameter, `scale`, has shape (O,) or one
        element. Modules of other classes are never treated as a scale.
    precision : {"highest", "high"}
        As in `gsbn.forward`, for all float32 layers: "high" allows TF32. PyTorch's own switches have no effect.
    trace : bool
        Also convert modules whose own ``forward`` calls Linear, scale, BatchNorm1d and activation one after another, if
        ``torch.fx`` can trace it. A residual that is added before the activation becomes a part of the call. Whatever
        this ``forward`` reads besides its inputs, its modules and `training` stays as it is now.
    linear : bool
        Also convert each ``nn.Linear`` that is not in such a row, for example the last one of a head. This changes only
        float32.

    Returns
    -------
    Conversion
        ``(replaced, left)``.

    Raises
    ------
    TypeError, ValueError
        `model` is not a module, `scales` is not a tuple of classes, or `precision` is unknown.

    Notes
    -----
    Each call decides again whether consecutive modules run as one call, or one by one as before;
    `docs/guide/pytorch.md` says when. A frozen BatchNorm1d (one in ``eval()`` inside a model in training) normalises
    with its running statistics, as always. Under autocast, y has autocast's dtype even after a scale, where PyTorch
    would continue in float32.

    Examples
    --------
    >>> from torch import nn
    >>> import gsbn.torch
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    >>> print(gsbn.torch.convert(model))
    replaced 0 + 1 + 2
    """
    _module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model: expected an nn.Module, got a scripted one: convert it before torch.jit.script")
    if not isinstance(scales, tuple) or not all(isinstance(scale, type) for scale in scales):
        raise TypeError(f"scales: expected a tuple of classes, got {scales!r:.80}")
    choice("precision", precision, PRECISIONS)
    replaced: list[tuple[str, ...]] = []
    left = [Left("", _NO_ROW)] if isinstance(model, _NORMS) else []
    for prefix, parent in model.named_modules():
        if isinstance(parent, torch.jit.ScriptModule):
            continue
        names = [f"{prefix}.{name}".lstrip(".") for name in parent._modules]
        children = tuple(parent._modules.values())
        before = len(replaced)
        for i, child in enumerate(children):
            if isinstance(child, _NORMS) and not isinstance(parent, _LAYERS):
                found = around(children, i, scales) if isinstance(parent, nn.Sequential) else _NO_ROW
                found = found if isinstance(found, str) else _hindrance(parent, found) or found
                if isinstance(found, str):
                    left.append(Left(names[i], found))
                else:
                    replaced.append(tuple(names[j] for j in _places(i, found)))
                    if child.__class__ is nn.SyncBatchNorm:
                        child.__class__ = SyncBatchNorm
        if len(replaced) > before:
            type_: Any = type(parent)
            parent.__class__ = _class_for(type_, Sequential)
            parent.__dict__.update(_scales=scales, _precision=precision, _plan=None)
    if trace:
        made = _convert_traced(model, replaced, dict(left), scales, precision)
    else:
        made = Conversion(tuple(replaced), tuple(left))
    return made._replace(replaced=(*made.replaced, *_linears(model, made, precision))) if linear else made


def _convert_traced(
    model: nn.Module, rows: list[tuple[str, ...]], left: dict[str, str], scales: tuple[type, ...], precision: Precision
) -> Conversion:
    """Convert modules with a forward of their own; `rows` are those of each nn.Sequential, `left` the other norms."""
    replaced: list[tuple[str, ...]] = []
    called: set[str] = set()
    failures = {_NO_ROW}
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for prefix, module in modules:
        within = f"{prefix}." if prefix else ""
        if not _may_trace(module) or not any(name.startswith(within) for name in (*left, *sum(rows, ()))):
            continue
        both = traces(module, scales, precision)
        found = both[module.training]
        called |= {within + name for name in found.called}
        if found.failed is not None:
            failures.add(found.failed)
            left.update({name: found.failed for name in left if name.startswith(within) and left[name] in failures})
        left.update({within + name: why for name, why in found.left.items() if within + name in left})
        replaced += [tuple(within + name for name in row) for row in found.replaced]
        if found.replaced or isinstance(module, Traced):
            type_: Any = type(module)
            module.__class__ = _class_for(type_, Traced)
            inputs = len(required(module))
            module.__dict__.update(_scales=scales, _precision=precision, _inputs=inputs, _traces=both)
    for row in rows:
        parent = row[0].rpartition(".")[0]
        if _calls_apart(model, parent, called):
            _restore(model.get_submodule(parent))
            left.update({name: _NOT_CALLED for name in row if isinstance(model.get_submodule(name), _NORMS)})
        else:
            replaced.insert(0, row)
    for name in {name for row in replaced for name in row}:
        left.pop(name, None)
        if model.get_submodule(name).__class__ is nn.SyncBatchNorm:
            model.get_submodule(name).__class__ = SyncBatchNorm
    return Conversion(tuple(dict.fromkeys(replaced)), tuple(Left(*entry) for entry in left.items()))


def _linears(model: nn.Module, found: Conversion, precision: Precision) -> list[tuple[str, ...]]:
    """Convert each nn.Linear that is in no row, and return the names."""
    rows = {name for row in found.replaced for name in row}
    within = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, _LAYERS))
    names: list[tuple[str, ...]] = []
    for name, module in model.named_modules():
        alone = name not in rows and not f"{name}.".startswith(within)
        if alone and module.__class__ is nn.Linear and modules.is_plain(module, nn.Linear):
            module.__class__ = Linear
            module.__dict__["_precision"] = precision
            names.append((name,))
    return names


def _calls_apart(model: nn.Module, name: str, called: set[str]) -> bool:
    """Return whether a traced forward calls the children of this nn.Sequential, or of one beside it, one by one.

    `name` is the name of the nn.Sequential, and `called` has the names of the modules that traced forwards call.
    """
    apart = {other.rpartition(".")[0] for other in called} - called
    above = name.rpartition(".")[0]
    beside = any(other.rpartition(".")[0] == above for other in apart)
    in_list = isinstance(model.get_submodule(above), (nn.Sequential, nn.ModuleList))  # a trace may end after the first
    return name in apart or (name not in called and in_list and beside)


def _may_trace(module: Any) -> bool:
    """Return whether the module has a forward in Python that is neither PyTorch's nor gsbn's."""
    class_ = type(module)
    if isinstance(module, (torch.jit.ScriptModule, *_LAYERS)) or "forward" in vars(module):
        return False
    return not isinstance(module, Sequential) and not str(class_.forward.__module__).startswith("torch.")


def revert(model: nn.Module) -> None:
    """Undo `convert`: give every `gsbn.torch.Sequential` in the model, also the model itself, its own class again.

    Every `gsbn.torch.SyncBatchNorm` becomes an ``nn.SyncBatchNorm`` again, except in a layer of gsbn, and every
    `gsbn.torch.Linear` becomes an ``nn.Linear`` again.

    Parameters
    ----------
    model : nn.Module
        The model, which is changed in place. Its modules, parameters and state stay as they are.

    Raises
    ------
    TypeError
        `model` is not a module.

    Examples
    --------
    >>> from torch import nn
    >>> import gsbn.torch
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32))
    >>> conversion = gsbn.torch.convert(model)
    >>> gsbn.torch.revert(model)
    >>> type(model) is nn.Sequential
    True
    """
    _module(model)
    for module in model.modules():
        if isinstance(module, (Sequential, Traced)) and _own_class(module) is not _class_of(module):
            _restore(module)
        if _class_of(module) is Linear:
            _set_class(module, nn.Linear)
            module.__dict__.pop("_precision", None)
        for child in () if isinstance(module, _LAYERS) else module._modules.values():
            if child is not None and _class_of(child) is SyncBatchNorm:
                _set_class(child, nn.SyncBatchNorm)


def _restore(module: Any) -> None:
    """Give a module the class that it had before `convert`."""
    _set_class(module, _own_class(module))
    for name in _OURS:
        module.__dict__.pop(name, None)


def _module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type_name(model)}")


_INSTEAD = "put the modules in an nn.Sequential, use LinearBatchNorm1d.from_modules, or try trace=True"
_NOT_CALLED = "a forward calls the modules of its nn.Sequential one by one"
_NO_ROW = f"it is not in an nn.Sequential, so code in a forward calls it: {_INSTEAD}"


def _steps(children: tuple[Any, ...], scales: tuple[type, ...]) -> tuple[Any, ...]:
    """Return the steps of the Sequential in order: rows of modules, and children that are in no row."""
    steps = list(children)
    for i in range(len(children) - 1, -1, -1):
        if isinstance(children[i], _NORMS):
            found = around(children, i, scales)
            if not isinstance(found, str):
                places = _places(i, found)
                steps[places[0] : places[-1] + 1] = [found]
    return tuple(steps)


def _joined(steps: tuple[Any, ...]) -> list[Any]:
    """Return the steps with consecutive rows in one tuple."""
    joined: list[Any] = []
    for step in steps:
        if step.__class__ is not Row:
            joined.append(step)
        elif joined and joined[-1].__class__ is tuple:
            joined[-1] += (step,)
        else:
            joined.append((step,))
    return joined


def _places(i: int, row: Row) -> range:
    """Return the indices of the children in the row whose norm is child i."""
    return range(i - (1 if row.scale is None else 2), i + (1 if row.activation is None else 2))


def _hindrance(parent: Any, row: Row) -> str | None:
    """Return the reason why a row of a Sequential cannot run as one call now, or None."""
    if "forward" in vars(parent) or type(parent).forward not in (nn.Sequential.forward, Sequential.forward):
        return f"its row is a {title(parent)}, which has a forward of its own: {_INSTEAD}"
    return hindrance(row)
