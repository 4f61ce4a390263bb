"""Reads structs, flags and parameter names from the kernels' sources, so that CUDA and Python cannot differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from .sources import KERNEL_DIR as KERNEL_DIR
from .sources import Constants, Kernel, text
from .sources import source as source

_NUMPY = {"long long": np.int64, "double": np.float64}
_FIELD = r"(\w+)(?:\[(\d+)\])?"  # a field of a struct: its name, and its size if it is an array
_COMMON = Constants("common/common.cuh", {})


@cache
def record_dtype(kernel: Kernel) -> np.dtype[Any]:
    """Return the fields of the struct that a kernel takes as its first parameter."""
    code = text(f"{kernel.file}.cu")
    first = re.search(rf"\b{kernel.name}\s*\(\s*const\s+(?:__grid_constant__\s+)?(\w+)\s+p\b", code)
    assert first is not None, kernel
    body = re.search(rf"struct {first[1]} \{{(.*?)\}};", code, re.DOTALL)
    assert body is not None, kernel
    lines = "\n".join(_present(body[1].split("\n"), kernel))
    declarations = (re.fullmatch(r"\s*(long long|double)\s+(.+)", d, re.DOTALL) for d in lines.split(";")[:-1])
    fields = [(name, _NUMPY[d[1]], size) for d in declarations if d for name, size in re.findall(_FIELD, d[2])]
    return np.dtype([(name, number, (int(size),)) if size else (name, number) for name, number, size in fields])


def fields_of(kernel: Kernel, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields that a kernel takes. Raises TypeError if `given` lacks one."""
    names = record_dtype(kernel).names or ()
    for name in names:
        if name not in given:
            raise TypeError(f"{kernel.name} takes a {name}, which is not among {sorted(given)}")
    return names


def record(kernel: Kernel, fields: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return the struct that a kernel takes by value. Raises TypeError if `fields` lacks a field of the struct."""
    found = np.zeros(1, record_dtype(kernel))
    for name in fields_of(kernel, fields):
        found[name] = fields[name]
    return found


def flags(**given: bool) -> int:
    """Return the FLAG_ bits of the arguments that are true. `vector_x` stands for FLAG_VECTOR_X."""
    return sum(_COMMON[f"FLAG_{name.upper()}"] * bool(is_set) for name, is_set in given.items())


def kind_code(dtype: str) -> int:
    """Return the KIND_ constant of a vector's dtype."""
    return _COMMON[f"KIND_{dtype.upper()}"]


def reciprocal(divisor: int) -> int:
    """Return the number that `quotient` (kernels/common/common.cuh) takes in place of a divisor below 2^31."""
    return 2**62 // divisor + 1


@cache
def parameters(kernel: Kernel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a kernel's parameters in order: those passed by value, and the 64-bit words after them."""
    code = text(f"{kernel.file}.cu")
    start = re.search(rf"__global__[^;{{]*?\b{kernel.name}\s*\(", code)
    assert start is not None, kernel
    by_value: list[str] = []
    words: list[str] = []
    inside = code[start.end() : code.index("{", start.end())].rpartition(")")[0]
    for piece in inside.split(","):
        lines = [line for line in piece.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        assert len(lines) <= 1, f"{kernel.file}.cu: expected a parameter on one line, got {lines}"
    for line in _present(re.split(r"[,\n]", inside), kernel):
        if name := re.search(r"(\w+)\s*$", line):
            (by_value if re.match(r"\s*const (__grid_constant__ )?\w+ \w+$", line.rstrip()) else words).append(name[1])
    return tuple(by_value), tuple(words)


def _present(lines: Iterable[str], kernel: Kernel) -> Iterator[str]:
    """Yield the lines that the macros of a variant leave. An #if may name one macro."""
    defines, absent = dict(kernel.defines), False
    for line in lines:
        if condition := re.match(r"\s*#if (\w+)", line):
            absent = defines.get(condition[1], "0") == "0"
        elif line.strip() == "#endif":
            absent = False
        elif not absent:
            yield line
