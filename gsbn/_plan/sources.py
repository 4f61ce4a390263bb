"""Names the variants of kernels, finds their sources, and reads the integers that the sources declare.

Sizes that a plan needs (threads of a CTA, rows of a tile, bytes of shared memory) are declared only in CUDA, as
constexpr integers. `Constants` evaluates them as the compiler does, for the macros of one variant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .activations import macros as of_activation


class Kernel(NamedTuple):
    """One compiled variant: the function of this name in kernels/<file>.cu, compiled with these macros."""

    name: str
    file: str
    defines: tuple[tuple[str, str], ...]
    arch: str | None = None  # the architecture, if it compiles for one only
    shared: int = 0  # bytes of dynamic shared memory


def with_activation(kernel: Kernel, activation: Any) -> Kernel:
    """Return the variant of a kernel with this activation (common/activation.cuh), or the kernel itself for None."""
    return kernel if activation is None else kernel._replace(defines=(*kernel.defines, *of_activation(activation)))


def with_renorm(kernel: Kernel, renorm: bool = True) -> Kernel:
    """Return a kernel's variant for batch renormalisation (common/renorm.cuh), or the kernel itself if not `renorm`."""
    return kernel._replace(defines=(*kernel.defines, ("RENORM", "1"))) if renorm else kernel


def with_ghosts(kernel: Kernel, ghosts: bool = True) -> Kernel:
    """Return the variant of a kernel for ghost batches (common/ghost.cuh), or the kernel itself if not `ghosts`."""
    return kernel._replace(defines=(*kernel.defines, ("GHOST", "1"))) if ghosts else kernel


def _find() -> Path:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):  # in a wheel; in a checkout
        if (folder / "common" / "common.cuh").is_file():
            return folder
    raise ImportError(f"gsbn: no kernels/ inside or beside {package}: reinstall gsbn")


KERNEL_DIR = _find()


@cache
def source(file: str) -> str:
    """Return the text of a file in kernels/."""
    return (KERNEL_DIR / file).read_text(encoding="utf-8")


@cache
def _own(file: str) -> str:
    """Return the text of a file without its comments."""
    return re.sub(r"//.*", "", source(file))


@cache
def _includes(file: str) -> tuple[str, ...]:
    return tuple(re.findall(r'#include "(.+)"', _own(file)))


@cache
def text(file: str) -> str:
    """Return the text of the headers that a file includes and of the file, without comments."""
    return "".join(map(text, _includes(file))) + _own(file)


def macros(file: str, prefix: str) -> tuple[str, ...]:
    """Return the macros of a file that begin with `prefix`, in order. They are an enum that #if can compare."""
    return tuple(re.findall(rf"^#define ({prefix}\w+) ", _own(file), re.MULTILINE))


_DECLARATION = re.compile(r"\bconstexpr (?:int|bool|unsigned) (.*?);", re.DOTALL)
_ENUM = re.compile(r"\benum[^{;]*\{(.*?)\}", re.DOTALL)
_OPERATORS = ((r"!(\w+)", r"(not \1)"), (r"&&", " and "), (r"\|\|", " or "), ("/", "//"))  # others are as in Python
_SIZES = {"__half": 2, "__nv_bfloat16": 2, "float": 4, "double": 8}


@cache
def _definitions(file: str) -> dict[str, str]:
    """Return the values of a file's own macros, constants, enumerators and aliases; of each name, the first value."""
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
    """Split a declaration at commas between declarators, not between the arguments of a function."""
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
        while of not in _SIZES:
            of = self._meaning(of)
        return _SIZES[of]

    def _evaluate(self, expression: str) -> int:
        """Return the value of an expression of C. It evaluates the innermost parentheses first."""
        expression = re.sub(r"sizeof\((\w+)\)", lambda found: str(self._size(found[1])), expression)
        while inner := re.search(r"\(([^()]*)\)", expression):
            expression = f"{expression[: inner.start()]}{self._flat(inner[1])}{expression[inner.end() :]}"
        return self._flat(expression)

    def _flat(self, expression: str) -> int:
        """Return the value of an expression without parentheses."""
        test, conditional, choices = expression.partition("?")
        if conditional:
            chosen, _, other = choices.partition(":")
            return self._flat(chosen if self._flat(test) else other)
        for of_c, of_python in _OPERATORS:
            test = re.sub(of_c, of_python, test)
        return int(eval(test.strip(), {"__builtins__": {}}, self))  # type: ignore[arg-type]  # eval asks for items only


@cache
def _meaning(file: str, name: str) -> str:
    """Return the value of a name in a file, or in the first of the file's headers that declares it."""
    if name in _definitions(file):
        return _definitions(file)[name]
    for header in _includes(file):
        try:
            return _meaning(header, name)
        except KeyError:
            continue
    raise KeyError(name)
