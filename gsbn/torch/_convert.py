"""convert: let gsbn run consecutive modules of an ``nn.Sequential`` as one call."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from types import new_class
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._arrays.check import PRECISIONS
from .._typing import Precision
from .._values import choice, type_name
from . import _modules as modules
from ._layer import LinearBatchNorm1d
from ._modules import NAMES, NORMS, Row, SyncBatchNorm, is_plain, run

_NORMS = (nn.BatchNorm1d, nn.SyncBatchNorm, nn.LazyBatchNorm1d)
_OURS = ("_scales", "_precision", "_plan")  # attributes that `convert` adds to an nn.Sequential


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
    """The result of `convert`; as a string, one line for each entry.

    Attributes
    ----------
    replaced : tuple of tuple of str
        For each call of gsbn the names of the modules that it runs.
    left : tuple of Left
        Every other BatchNorm1d and SyncBatchNorm of the model, except in a `LinearBatchNorm1d`, and why it is left.
    """

    replaced: tuple[tuple[str, ...], ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        lines = [f"replaced {' + '.join(names)}" for names in self.replaced]
        lines += [f"left {name}: {why}" for name, why in self.left]
        return "\n".join(lines) or "nothing to replace"


class Sequential(nn.Sequential):
    """An ``nn.Sequential`` that `convert` changed: it has the same children, and gsbn runs some of them as one call.

    An instance of a subclass of ``nn.Sequential`` gets a class that inherits from this one and from its own. It can be
    sliced, extended and changed: it detects when its children have changed.
    """

    _scales: tuple[type, ...] = ()
    _precision: Precision = "highest"

    def forward(self, input: Tensor) -> Tensor:
        """The output of the last child."""
        x: Any = input
        children = self._modules.values()
        if x.__class__ is Tensor and not any(modules.wins(x, child) for child in children if child.__class__ in NORMS):
            for module in children:
                x = module(x)
            return x
        for step in self._steps():
            x = run(step, x, self._precision) if step.__class__ is Row else step(x)
        return x

    def _steps(self) -> tuple[Any, ...]:
        children = tuple(self._modules.values())
        if is_compiling():
            return _steps(children, self._scales)
        key = children, tuple([child.__class__ for child in children])  # lazy and parametrized modules change class
        plan = self.__dict__.get("_plan")
        if plan is None or plan[0] != key:
            plan = self.__dict__["_plan"] = key, _steps(children, self._scales)
        return plan[1]

    def extra_repr(self) -> str:
        """One line for each call of gsbn: the names of the modules that it runs."""
        names = tuple(self._modules)
        shown, at = [super().extra_repr()], 0
        for step in _steps(tuple(self._modules.values()), self._scales):
            count = sum(module is not None for module in step) if step.__class__ is Row else 1
            if step.__class__ is Row and _hindrance(self, step) is None:
                shown.append(f"one call of gsbn: {' + '.join(names[at : at + count])}")
            at += count
        return "\n".join(filter(None, shown))

    @classmethod
    def of_class(cls, type_: Any) -> nn.Sequential:
        """For pickle and copy: a converted instance of this subclass of ``nn.Sequential``, without its state."""
        made: nn.Sequential = _class_for(type_).__new__(_class_for(type_))
        return made

    def __prepare_scriptable__(self) -> nn.Sequential:
        """For torch.jit.script, which runs PyTorch's own modules."""
        made = nn.Sequential(OrderedDict(self._modules))
        made.training = self.training
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_plan"}


@cache
def _class_for(type_: Any) -> Any:
    """The class that an instance of this class gets by `convert`."""
    if type_ is nn.Sequential:
        return Sequential
    if issubclass(type_, Sequential):
        return type_
    members = {"__module__": type_.__module__, "__qualname__": type_.__qualname__, "__doc__": type_.__doc__}
    return new_class(
        type_.__name__, (Sequential, type_), exec_body=lambda body: body.update(members, __reduce_ex__=_reduce)
    )


def _own_class(module: Any) -> Any:
    """The class that a `gsbn.torch.Sequential` had before `convert`."""
    type_ = type(module)
    if type_ is Sequential:
        return nn.Sequential
    return type_.__bases__[1] if vars(type_).get("__reduce_ex__") is _reduce else type_


def _reduce(self: Any, protocol: Any) -> Any:
    """How an instance of a class that `_class_for` made is pickled and copied: no module has its class."""
    return Sequential.of_class, (_own_class(self),), self.__getstate__()


def convert(model: nn.Module, *, scales: tuple[type, ...] = (), precision: Precision = "highest") -> Conversion:
    """Let gsbn run consecutive Linear, scale, BatchNorm1d and ReLU of an ``nn.Sequential`` as one call.

    The modules keep their places, parameters, hooks and dtypes; the names in the state_dict stay the same, and an
    optimiser that exists continues to work. Only classes change: that of the ``nn.Sequential`` becomes its subclass
    `gsbn.torch.Sequential`, that of an instance of a subclass without a ``forward`` of its own becomes a subclass of
    both, and that of each ``nn.SyncBatchNorm`` that gsbn runs becomes `gsbn.torch.SyncBatchNorm`.
    ``print`` the result to see what was converted.

    Parameters
    ----------
    model : nn.Module
        Changed in place; it may itself be an ``nn.Sequential``.
    scales : tuple of type
        Classes of modules that compute ``x * self.scale``, whose only parameter `scale` has shape (O,) or one element.
        Modules of other classes are never taken for a scale.
    precision : {"highest", "high"}
        As in `gsbn.forward`, for all float32 layers: "high" allows TF32. PyTorch's own switches have no effect.

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
    Every call decides again whether consecutive modules run as one call, or one by one as before;
    `docs/guide/pytorch.md` says when. A frozen BatchNorm1d, in ``eval()`` inside a model in training, normalises with
    its running statistics, as always. Under autocast y has autocast's dtype also after a scale, where PyTorch would
    continue in float32.

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
            if isinstance(child, _NORMS) and not isinstance(parent, LinearBatchNorm1d):
                found = _around(children, i, scales) if isinstance(parent, nn.Sequential) else _NO_ROW
                found = found if isinstance(found, str) else _hindrance(parent, found) or found
                if isinstance(found, str):
                    left.append(Left(names[i], found))
                else:
                    replaced.append(tuple(names[j] for j in _places(i, found)))
                    if child.__class__ is nn.SyncBatchNorm:
                        child.__class__ = SyncBatchNorm
        if len(replaced) > before:
            type_: Any = type(parent)
            parent.__class__ = _class_for(type_)
            parent.__dict__.update(_scales=scales, _precision=precision, _plan=None)
    return Conversion(tuple(replaced), tuple(left))


def revert(model: nn.Module) -> None:
    """Undo `convert`: every `gsbn.torch.Sequential` in the model, or the model itself, has its own class again.

    Every `gsbn.torch.SyncBatchNorm` becomes an ``nn.SyncBatchNorm`` again, except in a `LinearBatchNorm1d`.

    Parameters
    ----------
    model : nn.Module
        Changed in place; its modules, parameters and state stay as they are.

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
        if isinstance(module, Sequential) and _own_class(module) is not type(module):
            module.__class__ = _own_class(module)
            for name in _OURS:
                module.__dict__.pop(name, None)
        for child in () if isinstance(module, LinearBatchNorm1d) else module._modules.values():
            if child.__class__ is SyncBatchNorm:
                child.__class__ = nn.SyncBatchNorm


def _module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type_name(model)}")


_INSTEAD = "put the modules in an nn.Sequential, or use LinearBatchNorm1d.from_modules"
_NO_ROW = f"it is not in an nn.Sequential, so code in a forward calls it: {_INSTEAD}"


def _steps(children: tuple[Any, ...], scales: tuple[type, ...]) -> tuple[Any, ...]:
    """The steps of the Sequential in order: rows of modules, and children that are in no row."""
    steps = list(children)
    for i in range(len(children) - 1, -1, -1):
        if isinstance(children[i], _NORMS):
            found = _around(children, i, scales)
            if not isinstance(found, str):
                places = _places(i, found)
                steps[places[0] : places[-1] + 1] = [found]
    return tuple(steps)


def _places(i: int, row: Row) -> range:
    """The indices of the children in a row whose norm is child i."""
    return range(i - (1 if row.scale is None else 2), i + (1 if row.activation is None else 2))


def _around(children: tuple[Any, ...], i: int, scales: tuple[type, ...]) -> Row | str:
    """The row whose norm is child i, or why there is none; depends only on the modules' classes and sizes."""
    norm = children[i]
    if norm.__class__ not in NORMS:
        return f"it is a {_title(norm)}, not an nn.BatchNorm1d or nn.SyncBatchNorm"
    scaled = i > 0 and children[i - 1].__class__ in scales
    scale, at = (children[i - 1], i - 2) if scaled else (None, i - 1)
    if at < 0:
        return "no nn.Linear stands before it"
    linear = children[at]
    if linear.__class__ is not nn.Linear:
        return f"it follows a {_title(linear)}, not an nn.Linear{'' if scaled else ' or a class in scales='}"
    features = linear.out_features
    if norm.num_features != features:
        return f"it has {norm.num_features} features, its nn.Linear {features}"
    if scale is not None and not _is_scale(scale, features):
        return f"its {_title(scale)} holds something else than one parameter `scale` of ({features},) or of one element"
    follows = i + 1 < len(children) and children[i + 1].__class__ in NAMES
    return Row(linear, scale, norm, children[i + 1] if follows else None)


def _is_scale(module: Any, features: int) -> bool:
    factor = module._parameters.get("scale")
    if factor is None or len(module._parameters) > 1 or module._modules or module._buffers:
        return False
    return tuple(factor.shape) == (features,) or factor.numel() == 1


def _hindrance(parent: Any, row: Row) -> str | None:
    """The reason why a row cannot run as one call now, or None."""
    if "forward" in vars(parent) or type(parent).forward not in (nn.Sequential.forward, Sequential.forward):
        return f"its row is a {_title(parent)}, which has a forward of its own: {_INSTEAD}"
    modules = [module for module in row[:3] if module is not None]
    for module in modules:
        if not is_plain(module, type(module)):
            return f"its {_title(module)} has hooks or a forward of its own"
    devices = {str(tensor.device) for module in modules for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        return f"its tensors are on several devices: {', '.join(sorted(devices))}"
    return None


def _title(module: Any) -> str:
    return type(module).__qualname__
