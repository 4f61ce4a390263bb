"""Tell torch.compile what it cannot trace: gsbn's functions launch kernels and use NumPy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])
_codes: list[CodeType] = []


def outside_graphs(function: _Function) -> _Function:
    """Mark a function that torch.compile cannot trace, and return it without a wrapper.

    torch.compile breaks its graph at a call of the function or, with fullgraph=True, prints why.
    """
    plain = cast(FunctionType, function)
    vars(plain).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg=f"gsbn.{plain.__name__}: expected to be called outside a traced graph; "
        "gsbn.torch can be traced",
    )
    _codes.append(plain.__code__)
    if (torch := sys.modules.get("torch")) is not None:
        skip_frames(torch)
    return function


def constant_in_graphs(function: _Function) -> _Function:
    """Mark a function that torch.compile calls as it traces, to record the result, and return it without a wrapper.

    Its arguments must be constants. `torch.compiler.assume_constant_result` does the same, but is slow to import.
    """
    vars(cast(FunctionType, function))["_dynamo_marked_constant"] = True
    return function


def skip_frames(torch: Any) -> None:
    """Make torch.compile skip the frames of these functions, too; else it would trace the functions that they call."""
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    except (AttributeError, TypeError):  # this version has other names: torch then compiles what it can
        return
    for code in _codes:
        frames.set_code_exec_strategy(code, skip)
