"""``gsbn bench --model``: ``gsbn.torch.compare`` of a model that a function of the user makes."""

from __future__ import annotations

import importlib
import os
import sys
from datetime import datetime, timezone
from typing import Any

from .machine import environment


class CannotLoad(ValueError):
    """What ``--model`` names is not there, or gives no model; the message says what was expected."""


def load(spec: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model, its inputs and arguments of ``compare``, as ``module:function`` gives them.

    The module may lie in the current folder. The function takes nothing and gives ``(model, inputs)``, inputs being a
    tensor or a tuple of what the model is called with, or ``(model, inputs, arguments)``, arguments being a dict.
    """
    name, colon, function = spec.partition(":")
    if not (name and colon and function) or name.endswith(".py") or "/" in name:
        raise CannotLoad(f"expected module:function, such as train:make for make() of train.py; got {spec!r:.80}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(name), function, None)
    except ImportError as error:
        raise CannotLoad(f"{name} cannot be imported: {error}") from error
    if not callable(make):
        raise CannotLoad(f"expected a function, but {name} has no {function} that can be called")
    made = make()
    if isinstance(made, tuple) and len(made) == 2:
        made = (*made, {})
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[2], dict):
        raise CannotLoad(f"expected {spec} to return (model, inputs), or these and a dict of arguments of compare")
    model, inputs, arguments = made
    return model, inputs if isinstance(inputs, tuple) else (inputs,), arguments


def run(spec: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The comparison, and all of it as JSON's types; arguments that the function gives precede these options."""
    try:
        from .. import torch as of_torch
    except ImportError as error:
        raise CannotLoad(f"it needs PyTorch: {error}") from error
    model, inputs, arguments = load(spec)
    try:
        found = of_torch.compare(model, *inputs, **options | arguments)
    except (TypeError, ValueError) as error:
        raise CannotLoad(str(error)) from error
    content = {
        "schema": 1,
        "preset": "model",
        "model": spec,
        "environment": environment(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return found, content | found.as_dict()
