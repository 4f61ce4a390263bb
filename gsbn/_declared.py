"""What the kernels' sources declare, read from them, so that CUDA and Python cannot drift apart."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ._plan import Kernel

__all__ = ["KERNEL_DIR", "flags", "kind_code", "parameters", "problem", "source"]


def _find() -> Path:
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels", here.parent / "kernels"):  # in a wheel; in a checkout
        if (folder / "common.cuh").is_file():
            return folder
    raise ImportError(f"gsbn: no kernels/ inside or beside {here}: reinstall gsbn")


KERNEL_DIR = _find()
_NUMPY = {"long long": np.int64, "double": np.float64}


@cache
def source(file: str) -> str:
    """The text of a file in kernels/."""
    return (KERNEL_DIR / file).read_text(encoding="utf-8")


@cache
def _common() -> str:
    return re.sub(r"//.*", "", source("common.cuh"))


@cache
def _problem_dtype() -> np.dtype[Any]:
    body = re.search(r"struct Problem \{(.*?)\};", _common(), re.DOTALL)
    assert body is not None
    declarations = (re.fullmatch(r"\s*(long long|double)\s+(.+)", d, re.DOTALL) for d in body[1].split(";")[:-1])
    return np.dtype([(name.strip(), _NUMPY[d[1]]) for d in declarations if d for name in d[2].split(",")])


@cache
def _constants() -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\b((?:FLAG|KIND)_\w+) = (\d+)", _common())}


def problem(**fields: Any) -> np.ndarray[Any, Any]:
    """A struct Problem, what is not given being 0; TypeError for a field that it does not have."""
    record = np.zeros(1, _problem_dtype())
    for name, value in fields.items():
        if name not in _problem_dtype().fields:  # type: ignore[operator]
            raise TypeError(f"struct Problem has no {name}")
        record[name] = value
    return record


def flags(**given: bool) -> int:
    """The FLAG_ bits of those that are true, by the rest of their names."""
    return sum(_constants()[f"FLAG_{name.upper()}"] for name, is_set in given.items() if is_set)


def kind_code(dtype: str) -> int:
    """The KIND_ of a per-feature vector's elements."""
    return _constants()[f"KIND_{dtype.upper()}"]


@cache
def parameters(kernel: Kernel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a kernel's parameters in order: of those that are passed by value, and then of the 64-bit words."""
    text = re.sub(r"//.*", "", source(f"{kernel.file}.cu"))
    start = re.search(rf"__global__[^;{{]*?\b{kernel.name}\s*\(", text)
    assert start is not None, kernel
    defines, absent = dict(kernel.defines), False
    by_value: list[str] = []
    words: list[str] = []
    for line in re.split(r"[,\n]", text[start.end() : text.index("{", start.end())].rpartition(")")[0]):
        if condition := re.match(r"\s*#if (\w+)", line):
            absent = defines.get(condition[1], "0") == "0"
        elif line.strip() == "#endif":
            absent = False
        elif not absent and (name := re.search(r"(\w+)\s*$", line)):
            (by_value if re.search(r"\b(Problem|TensorMap)\b", line) else words).append(name[1])
    return tuple(by_value), tuple(words)
