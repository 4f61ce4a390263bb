"""A GPU that is this machine's CPU: calls of gsbn on its arrays run the portable kernels, compiled by g++.

Calls are planned for a Turing GPU, so gemm_tiled makes the products; the other kernels are the ones that any GPU runs.
Nothing of Hopper runs: no TMA, no wgmma, no clusters, no cuBLAS.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from shutil import copy, which
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from gsbn import _plan
from gsbn._arrays.check import View
from gsbn._cuda import kernels as _kernels
from gsbn._plan import declared
from tests.support import fake_gpu
from tests.support.harness import BAND, DTYPES

TURING = _plan.Device((7, 5), 4)
ALIGNMENT = 256  # bytes, of memory that a call allocates
HEADER = Path(__file__).with_suffix(".h")
# Structs of one name differ between variants, so the libraries share no symbols.
OPTIONS = ["-std=c++20", "-O1", "-w", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique"]
# what takes the place of PTX; the rest of it aborts
PTX = {
    "cvt.rn.f32.f64": "out = float(v);",
    "cvt.f64.f32": "out = v;",
    "mul.rn.f32": "c = a * b;",
    "max.NaN.f32": "up = v < above ? above : v;",
    "min.NaN.f32": "down = below < v ? below : v;",
    "st.global.v4.b32": "*reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&v);",
    "prefetch.global.L1": ";",
}


class Array(np.ndarray):
    """An array in the memory of this GPU."""


def put(a: np.ndarray) -> Array:
    return a.copy().view(Array)


class Kind(fake_gpu.Kind):
    """How gsbn reads and allocates such arrays. New memory is poisoned, and lies between guard bands."""

    name = "on_cpu"

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[np.ndarray, int, int]] = []  # a block, and where the bytes lie that a call may write

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        key = tuple(None if a is None else (a.shape, a.strides, a.dtype) for a in arrays)
        return key, [0 if a is None else self.pointer(a) for a in arrays]

    def pointer(self, array: Any) -> int:
        return int(array.__array_interface__["data"][0])

    def view(self, array: Any) -> View:
        name, size = array.dtype.name, array.itemsize
        return View(self.pointer(array), array.shape, array.strides, name, size, "cuda:0", True)

    def dtype(self, array: Any) -> str:
        return str(array.dtype.name)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        of = like.dtype if dtype is None else DTYPES.get(dtype) or np.dtype(dtype)
        size = int(np.prod(shape)) * of.itemsize
        block = np.full(size + 2 * BAND + ALIGNMENT, 255, np.uint8)
        start = BAND + -(self.pointer(block) + BAND) % ALIGNMENT
        self.blocks.append((block, start, start + size))
        return block[start : start + size].view(of).reshape(shape).view(Array)

    def scratch(self, nbytes: int, like: Any) -> Callable[[], tuple[Any, int]]:
        def lend() -> tuple[Any, int]:
            memory = self.empty((nbytes,), like, "uint8")
            return memory, self.pointer(memory)

        return lend

    def copy(self, array: Any) -> Any:
        made = self.empty(array.shape, array)
        made[...] = array
        return made

    def assert_bands_hold(self) -> None:
        for block, start, end in self.blocks:
            beside = np.delete(block, slice(start, end))
            assert (beside == 255).all(), f"written beside {end - start} bytes that a call allocated"


@cache
def compiled(kernel: Any, folder: Path) -> Any:
    """The launch of a kernel, as a function of a shared library."""
    call = 'extern "C" void run(unsigned grid, unsigned threads, const void* record, const unsigned long long* words)'
    code = f'#include "{kernel.file}.cu"\n{call} {{ launch({kernel.name}, grid, threads, record, words); }}\n'
    return library_of(f"{kernel.name}_{abs(hash(kernel)):x}", code, kernel.defines, folder).run


def library_of(name: str, code: str, macros: Iterable[tuple[str, str]], folder: Path) -> ctypes.CDLL:
    """Compile code that includes the sources in a folder."""
    unit, library = folder / f"{name}.cpp", folder / f"{name}.so"
    unit.write_text(code)
    defines = [f"-D{a}={b}" for a, b in macros]
    header = folder / HEADER.name  # of `write_sources`
    files = ["-include", str(header if header.exists() else HEADER), f"-I{folder}", str(unit), "-o", str(library)]
    done = subprocess.run(["g++", "-shared", *OPTIONS, *defines, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@cache
def why_not() -> str | None:
    """Why kernels cannot be compiled here; None if they can."""
    if which("g++") is None:
        return "there is no g++ to compile the kernels"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-include", str(HEADER), "-x", "c++", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else f"g++ cannot compile {HEADER.name}: {done.stderr.splitlines()[0]}"


def translate(code: str) -> str:
    """A source for g++: without PTX, and with shared memory as it declares it."""

    def statement(found: re.Match[str]) -> str:
        return PTX.get(found[1].partition(" ")[0], "not_portable();")

    code = re.sub(r'asm\s*(?:volatile)?\s*\(\s*"([^"]*)".*?\);', statement, code, flags=re.DOTALL)
    code = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", _dynamic, code)
    return re.sub(r"__shared__ (alignas\((?:[^()]|\([^()]*\))*\))", r"\1 __shared__", code)


def _dynamic(found: re.Match[str]) -> str:
    return f"{found[1]}* const {found[2]} = reinterpret_cast<{found[1]}*>(dynamic_memory);"


def write_sources(folder: Path) -> None:
    """Write all kernels, translated, into a folder for `gpu`, and the header, compiled once for all of them."""
    for file in declared.KERNEL_DIR.rglob("*.cu*"):
        to = folder / file.relative_to(declared.KERNEL_DIR)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(translate(file.read_text()))
    for header in ("cuda_bf16.h", "cuda_fp16.h"):
        (folder / header).write_text("")
    subprocess.run(["g++", *OPTIONS, "-x", "c++-header", str(copy(HEADER, folder))], check=True)


@contextlib.contextmanager
def gpu(folder: Path) -> Iterator[Kind]:
    """Run calls on `Array`s. `folder` holds the sources (`write_sources`) and what is compiled."""

    def launcher(kernel: Any, device: int, words: tuple[str, ...], *, cooperative: bool = False, limited: bool) -> Any:
        def launch(grid: int, block: int, values: tuple[int, ...], passed: tuple[int, ...], stream: int) -> None:
            assert not cooperative
            (record,) = values
            compiled(kernel, folder)(grid, block, ctypes.c_void_p(record), (ctypes.c_uint64 * len(passed))(*passed))

        return SimpleNamespace(launch=launch)

    kind = Kind()
    with (
        fake_gpu.gpu(TURING) as (_, log),
        mock.patch.object(_kernels, "launcher", launcher),
        mock.patch.dict(fake_gpu._interop._kinds, {Array: kind}),
    ):
        yield kind
    assert not log, "cuBLAS was called: choose gemm='tiled'"
    kind.assert_bands_hold()
