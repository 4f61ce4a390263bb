"""The kernels' sources: where they lie, their text, and the integers that they declare.

Sizes that a plan needs (threads of a CTA, rows of a tile, bytes of shared memory) are said once, in CUDA, as constexpr
integers. `Constants` evaluates them as the compiler does, for the macros of one variant.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

__all__ = ["KERNEL_DIR", "Constants", "macros", "source", "text"]


def _find() -> Path:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):  # in a wheel; in a checkout
        if (folder / "common" / "common.cuh").is_file():
            return folder
    raise ImportError(f"gsbn: no kernels/ inside or beside {package}: reinstall gsbn")


KERNEL_DIR = _find()


@cache
def source(file: str) -> str:
    """The text of a file in kernels/."""
    return (KERNEL_DIR / file).read_text(encoding="utf-8")


@cache
def _own(file: str) -> str:
    """A file without its comments."""
    return re.sub(r"//.*", "", source(file))


@cache
def _includes(file: str) -> tuple[str, ...]:
    return tuple(re.findall(r'#include "(.+)"', _own(file)))


@cache
def text(file: str) -> str:
    """A file without its comments, and the headers that it includes."""
    return "".join(map(text, _includes(file))) + _own(file)


def macros(file: str, prefix: str) -> tuple[str, ...]:
    """The macros of a file that begin so, in their order: an enum whose names #if can compare."""
    return tuple(re.findall(rf"^#define ({prefix}\w+) ", _own(file), re.MULTILINE))


_DECLARATION = re.compile(r"\bconstexpr (?:int|bool|unsigned) (.*?);", re.DOTALL)
_ENUM = re.compile(r"\benum[^{;]*\{(.*?)\}", re.DOTALL)
_TYPES = {"__half": 2, "__nv_bfloat16": 2, "float": 4, "double": 8}
_OPERATORS: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda a, b: a or b),
    "&&": (2, lambda a, b: a and b),
    "==": (3, operator.eq),
    "!=": (3, operator.ne),
    "<": (4, operator.lt),
    "<=": (4, operator.le),
    ">": (4, operator.gt),
    ">=": (4, operator.ge),
    "+": (5, operator.add),
    "-": (5, operator.sub),
    "*": (6, operator.mul),
    "/": (6, operator.floordiv),
    "%": (6, operator.mod),
}


@cache
def _definitions(file: str) -> dict[str, str]:
    """What a file's own macros, constants, enumerators and aliases stand for; the first of each name."""
    code = _own(file)
    found = re.findall(r"^#define (\w+) +(.+?) *$", code, re.MULTILINE)
    found += re.findall(r"\busing (\w+) = (\w+);", code)
    for declaration in _DECLARATION.findall(code):
        found += [
            pair for part in _split(declaration) for pair in re.findall(r"^\s*(\w+)\s+=\s+(.+)$", part, re.DOTALL)
        ]
    for body in _ENUM.findall(code):
        found += re.findall(r"(\w+) = (\d+)", body)
    return dict(reversed(found))


def _split(declaration: str) -> list[str]:
    """Where commas part declarators, not the arguments of a function."""
    return re.split(r",(?![^()]*\))", declaration)


class Constants:
    """The integers that a file and its headers declare, for a variant with these macros."""

    def __init__(self, file: str, defines: Mapping[str, str]) -> None:
        self._file, self._defines = file, defines
        self._known: dict[str, int] = {"true": 1, "false": 0}

    def __getitem__(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = self._evaluate(self._meaning(name))
        return self._known[name]

    def _meaning(self, name: str) -> str:
        return self._defines[name] if name in self._defines else _meaning(self._file, name)

    def _size(self, of: str) -> int:
        while of not in _TYPES:
            of = self._meaning(of)
        return _TYPES[of]

    def _evaluate(self, expression: str) -> int:
        tokens = [*re.findall(r"\w+|\|\||&&|[<>=!]=|\S", expression), ""]
        tokens.reverse()

        def primary() -> int:
            token = tokens.pop()
            if token == "sizeof":
                _, of, _ = tokens.pop(), tokens.pop(), tokens.pop()
                return self._size(of)
            if token == "(":
                value = conditional()
                assert tokens.pop() == ")", expression
                return value
            if token == "!":
                return not primary()
            return int(token) if token.isdigit() else self[token]

        def binary(least: int) -> int:
            value = primary()
            while tokens[-1] in _OPERATORS and _OPERATORS[tokens[-1]][0] >= least:
                precedence, apply = _OPERATORS[tokens.pop()]
                value = apply(value, binary(precedence + 1))
            return value

        def conditional() -> int:
            test = binary(1)
            if tokens[-1] != "?":
                return test
            tokens.pop()
            chosen = conditional()
            assert tokens.pop() == ":", expression
            other = conditional()
            return chosen if test else other

        value = conditional()
        assert tokens == [""], expression
        return int(value)


@cache
def _meaning(file: str, name: str) -> str:
    """What a name stands for in a file, or in the first of its headers that declares it."""
    if name in _definitions(file):
        return _definitions(file)[name]
    for header in _includes(file):
        try:
            return _meaning(header, name)
        except KeyError:
            continue
    raise KeyError(name)
