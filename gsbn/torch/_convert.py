"""`convert`: a model's own modules, run by gsbn where they stand in a row in an ``nn.Sequential``."""

from __future__ import annotations

from collections import OrderedDict
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
_OURS = ("_scales", "_precision", "_plan")  # what conversion adds to an nn.Sequential


class Left(NamedTuple):
    """A normalisation that `convert` left as it was.

    Attributes
    ----------
    name : str
        The module's name in the model.
    why : str
    """

    name: str
    why: str


class Conversion(NamedTuple):
    """What `convert` did; as a string, a line for each entry.

    Attributes
    ----------
    replaced : tuple of tuple of str
        The names of the modules that run as one call, for each such call.
    left : tuple of Left
        Every BatchNorm1d and SyncBatchNorm of the model that is in none of these and in no `LinearBatchNorm1d`, and
        why.
    """

    replaced: tuple[tuple[str, ...], ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        lines = [f"replaced {' + '.join(names)}" for names in self.replaced]
        lines += [f"left {name}: {why}" for name, why in self.left]
        return "\n".join(lines) or "nothing to replace"


class Sequential(nn.Sequential):
    """The ``nn.Sequential`` that `convert` makes of one: the same children, of which some run as one call of gsbn.

    It looks at its children again whenever they are others, so that it can be sliced, extended and changed.
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
        key = children, tuple([child.__class__ for child in children])  # lazy and parametrized modules change theirs
        plan = self.__dict__.get("_plan")
        if plan is None or plan[0] != key:
            plan = self.__dict__["_plan"] = key, _steps(children, self._scales)
        return plan[1]

    def __prepare_scriptable__(self) -> nn.Sequential:
        """For torch.jit.script, which runs PyTorch's own modules."""
        made = nn.Sequential(OrderedDict(self._modules))
        made.training = self.training
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_plan"}


def convert(model: nn.Module, *, scales: tuple[type, ...] = (), precision: Precision = "highest") -> Conversion:
    """Let gsbn run Linear, scale, BatchNorm1d and ReLU wherever they stand in a row in an ``nn.Sequential``.

    The modules stay where they are, with their parameters, hooks and dtypes, and so do the names in the state_dict; an
    optimiser that was made before goes on. What changes is the class of the ``nn.Sequential`` around them, to
    `gsbn.torch.Sequential`, which is one, and that of each ``nn.SyncBatchNorm`` that runs in a row, to
    `gsbn.torch.SyncBatchNorm`. ``print`` what this returns to see what was found.

    Parameters
    ----------
    model : nn.Module
        Is changed in place; it may be a Sequential itself.
    scales : tuple of type
        Classes of modules that compute ``x * self.scale``, with one parameter `scale` of (O,) or of one element and
        nothing else. Nothing is taken for a scale by its looks.
    precision : {"highest", "high"}
        As in `gsbn.forward`, for all float32 layers: "high" allows TF32. PyTorch's own switches have no effect.

    Returns
    -------
    Conversion
        ``(replaced, left)``.

    Raises
    ------
    TypeError, ValueError
        A `model` that is no module, `scales` that are no classes, an unknown `precision`.

    Notes
    -----
    Whether a row runs as one call is decided again in every call. Its modules run one by one, as before, while one of
    them has hooks or a parametrization, and for an input that is not a plain tensor of (B, I): of three dimensions
    Linear and BatchNorm1d do not agree which one is the features. So they do under ``torch.jit.trace`` and
    ``torch.func``. A ReLU with hooks runs on its own.

    A frozen BatchNorm1d, in ``eval()`` inside a model in training, normalises with its running statistics, as always.
    Under autocast y has autocast's dtype also behind a scale, where PyTorch goes on in float32; without it the modules
    run one by one where the scale has another dtype than the Linear. ``torch.jit.script`` of a converted model gives
    PyTorch's own modules.
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
            parent.__class__ = Sequential
            parent.__dict__.update(_scales=scales, _precision=precision, _plan=None)
    return Conversion(tuple(replaced), tuple(left))


def revert(model: nn.Module) -> None:
    """Undo `convert`: every `gsbn.torch.Sequential` in the model, and the model itself, is an ``nn.Sequential`` again.

    And every `gsbn.torch.SyncBatchNorm`, wherever it stands by now, is an ``nn.SyncBatchNorm`` again, but in a
    `LinearBatchNorm1d`.

    Parameters
    ----------
    model : nn.Module
        Is changed in place; its modules, parameters and state are untouched.

    Raises
    ------
    TypeError
        A `model` that is no module.
    """
    _module(model)
    for module in model.modules():
        if type(module) is Sequential:
            module.__class__ = nn.Sequential
            for name in _OURS:
                module.__dict__.pop(name, None)
        for child in () if isinstance(module, LinearBatchNorm1d) else module._modules.values():
            if child.__class__ is SyncBatchNorm:
                child.__class__ = nn.SyncBatchNorm


def _module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type_name(model)}")


_NO_ROW = "it is not in an nn.Sequential"


def _steps(children: tuple[Any, ...], scales: tuple[type, ...]) -> tuple[Any, ...]:
    """What runs one after the other: rows, and children that are in none."""
    steps = list(children)
    for i in range(len(children) - 1, -1, -1):
        if isinstance(children[i], _NORMS):
            found = _around(children, i, scales)
            if not isinstance(found, str):
                places = _places(i, found)
                steps[places[0] : places[-1] + 1] = [found]
    return tuple(steps)


def _places(i: int, row: Row) -> range:
    """Where the modules of a row stand whose norm is child i."""
    return range(i - (1 if row.scale is None else 2), i + (1 if row.activation is None else 2))


def _around(children: tuple[Any, ...], i: int, scales: tuple[type, ...]) -> Row | str:
    """The row whose norm is child i, or why there is none, by what the modules are."""
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
    """What keeps a row from running as one call now."""
    if type(parent) not in (nn.Sequential, Sequential):
        return f"its row is a {_title(parent)}, which may have a forward of its own"
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
