"""A fake GPU: calls of gsbn on arrays without memory, whose launches are logged instead of run.

    python -m tests.support.fake_gpu > before.txt            # from the root of the repository: a line for each call
    python -m tests.support.fake_gpu --against before.txt    # what an edit of the host code changed

On any machine it shows what calls launch, in order, with grids, addresses and constants, and so what an edit of the
planner or of the call path changes. It computes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import gsbn
from gsbn import Gradients, _plan
from gsbn._arrays import kinds as _interop
from gsbn._arrays.check import View
from gsbn._cuda import device as _device
from gsbn._cuda import kernels as _kernels
from gsbn._cuda import tensor_maps as _tma
from gsbn._host import call as _call
from gsbn._host import run as _run
from gsbn._plan import declared

ITEMSIZE = {**_plan.ITEMSIZE, "int64": 8, "uint8": 1}
HOPPER = _plan.Device((9, 0), 132, pairs=66)
AMPERE = _plan.Device((8, 0), 108)


class Array:
    """Shape, strides in bytes, dtype and address of an array without memory."""

    _free = itertools.count(1 << 32, 1 << 32)  # addresses: 4 GiB apart, so that an address identifies its array

    def __init__(self, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None, at: int = 0) -> None:
        if strides is None:
            sizes = itertools.accumulate((ITEMSIZE[dtype], *reversed(shape[1:])), lambda a, b: a * b)
            strides = tuple(reversed(list(sizes)))[-len(shape) :] if shape else ()
        self.shape, self.dtype, self.strides = shape, dtype, strides
        self.pointer = at or next(self._free)

    def __getitem__(self, at: tuple[slice, slice]) -> Array:
        """The first columns."""
        return Array((self.shape[0], at[1].stop), self.dtype, self.strides, self.pointer)


class Kind(_interop.Kind):
    """How gsbn reads and allocates such arrays; `made` are those that a call allocated."""

    name, on_gpu = "fake_gpu", True

    def __init__(self) -> None:
        self.made: list[Array] = []
        self.current = 0  # stream

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        key = tuple(None if a is None else (a.shape, a.strides, a.dtype) for a in arrays)
        return key, [0 if a is None else a.pointer for a in arrays]

    def pointer(self, array: Array) -> int:
        return array.pointer

    def view(self, array: Array) -> View:
        size = ITEMSIZE[array.dtype]
        return View(array.pointer, array.shape, array.strides, array.dtype, size, "cuda:0", True)

    def dtype(self, array: Array) -> str:
        return array.dtype

    def device(self, array: Array) -> int:
        return 0

    def stream(self, device: int) -> int:
        return self.current

    def empty(self, shape: tuple[int, ...], like: Array, dtype: str | None = None) -> Array:
        self.made.append(Array(tuple(shape), dtype or like.dtype))
        return self.made[-1]

    def maker(self, shape: tuple[int, ...], like: Array, dtype: str | None = None) -> Callable[[], Array]:
        return lambda: self.empty(shape, like, dtype)

    def scratch(self, nbytes: int, like: Array) -> Callable[[], tuple[Array, int]]:
        def lend() -> tuple[Array, int]:
            memory = self.empty((nbytes,), like, "uint8")
            return memory, memory.pointer

        return lend

    def copy(self, array: Array) -> Array:
        return self.empty(array.shape, array)


class Launch(NamedTuple):
    """One entry of the log: a kernel of gsbn, or "cuBLAS" with all its arguments as words."""

    name: str
    defines: tuple[tuple[str, str], ...]
    cooperative: bool
    limited: bool  # never overlaps with the launch ahead
    grid: int
    records: tuple[str, ...]  # what is passed by value, in hexadecimal; a tensor map as what it encodes
    words: tuple[Any, ...]


@contextlib.contextmanager
def gpu(device: _plan.Device) -> Iterator[tuple[Kind, list[Launch]]]:
    """Run calls on `Array`s on such a device; yields the kind, with what they allocate, and the log of launches."""
    log: list[Launch] = []
    kind, maps = Kind(), {}

    def launcher(kernel: Any, device: int, words: tuple[str, ...], *, cooperative: bool = False, limited: bool) -> Any:
        assert words == declared.parameters(kernel)[1], kernel

        def launch(grid: int, block: int, values: tuple[int, ...], passed: tuple[int, ...], stream: int) -> None:
            records = (
                maps.get(at) or ctypes.string_at(at, declared.record_dtype(kernel).itemsize).hex() for at in values
            )
            log.append(Launch(kernel.name, kernel.defines, cooperative, limited, grid, tuple(records), passed))

        return SimpleNamespace(launch=launch)

    def tensor_maps(matrices: Any, *pointers: int) -> tuple[tuple[()], tuple[int, ...]]:
        at = range(-1 - len(maps), -1 - len(maps) - len(pointers), -1)  # not addresses
        maps.update((i, repr(m)) for i, m in zip(at, zip(pointers, matrices.arguments, strict=True), strict=True))
        return (), tuple(at)

    class Cublas:
        kernels, workspace = ("cuBLAS",), 1000

        def __init__(self, *told: Any, wide: bool) -> None:
            self._told = (*told, wide)

        def run(self, operands: tuple[int, ...], stream: int) -> None:
            log.append(Launch("cuBLAS", (), False, False, 1, (), (*self._told, *operands, stream)))

    found = SimpleNamespace(current_context=lambda: 1, runtime=SimpleNamespace(streamIsCapturing=lambda stream: False))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_device, "cuda", return_value=found))
        stack.enter_context(mock.patch.object(_run, "_found", {}))
        stack.enter_context(mock.patch.object(_call, "CublasGemm", Cublas))
        stack.enter_context(mock.patch.object(_tma, "tensor_maps", tensor_maps))
        stack.enter_context(mock.patch.object(_kernels, "gpu", return_value=device))
        stack.enter_context(mock.patch.object(_kernels, "launcher", launcher))
        stack.enter_context(mock.patch.dict(_device._primary, {0: 1}))
        stack.enter_context(mock.patch.dict(_interop._kinds, {Array: kind}))
        yield kind, log


class Call(NamedTuple):
    """A forward, and perhaps calls after it."""

    arrays: dict[str, Array | None]
    options: dict[str, Any]
    prepared: bool
    dy: Array
    products: str | None
    needs: tuple[str, ...]

    def with_residual(self, seed: int) -> Call:
        """The same with a residual, in rows that may have a gap, and perhaps an activation that y does not tell."""
        rng = random.Random(seed)
        (B, O), dtype = self.dy.shape, self.dy.dtype
        size = ITEMSIZE[dtype]
        residual = Array((B, O), dtype, ((O + rng.choice((0, 0, 3))) * size, size))
        activation = rng.choice((self.options["activation"], "silu"))
        needs = (*self.needs, *["residual"] * rng.choice((0, 1)))
        arrays, options = self.arrays | {"residual": residual}, self.options | {"activation": activation}
        return self._replace(arrays=arrays, options=options, needs=needs)

    def make(self) -> str | None:
        """Make the call; returns why it was refused, or None."""
        arrays = dict(self.arrays)
        if self.prepared:
            arrays["weight"] = gsbn.prepare(arrays["weight"], self.options["precision"])
        try:
            result = gsbn.forward(**arrays, **self.options)
            if self.options["return_saved"]:
                saved = result[1] if self.products is None else result[1]._replace(gemm=self.products)
                gsbn.backward(self.dy, saved, needs=self.needs, sms=self.options["sms"])
        except ValueError as error:
            return str(error)
        return None


def draw(seed: int) -> Call:
    """A call with any shape, layout, dtype and options; some are refused."""
    rng = random.Random(seed)
    dtype = rng.choice(("float16", "bfloat16", "float32", "float32", "float64"))
    wide = "float64" if dtype == "float64" else "float32"
    B = rng.choice((2, 7, 16, 17, 100, 300, 1024, 1100, 5000, rng.randint(2, 3000)))
    I, O = (rng.choice((8, 64, 72, 136, 259, 520, 1032, rng.randint(1, 2000))) for _ in range(2))
    training = rng.random() < 0.65

    def matrix(rows: int, columns: int) -> Array:
        size, pad = ITEMSIZE[dtype], rng.choice((0, 0, 1, 8))
        layouts = [(columns, 1), (columns, 1), (columns + pad, 1), (1, rows), (1, rows + pad), (2 * columns, 2)]
        row, column = rng.choice(layouts)
        base = Array((1,), dtype).pointer + rng.choice((0, 0, 0, size))
        return Array((rows, columns), dtype, (row * size, column * size), base)

    def vector(chance: float = 0.5) -> Array | None:
        return Array((O,), rng.choice((dtype, wide))) if rng.random() < chance else None

    statistics = rng.choice((dtype, wide))
    running = rng.random() < 0.7 or not training
    count = Array((), "int64") if running and rng.random() < 0.6 else None
    mean, var = (Array((O,), statistics) if running else None for _ in range(2))
    scale = rng.choice((vector(1), vector(1), None, Array((1,), wide), Array((), wide)))
    arrays = {"x": matrix(B, I), "weight": matrix(O, I), "scale": scale, "bias": vector(), "gamma": vector()}
    arrays |= {"beta": vector(), "running_mean": mean, "running_var": var, "num_batches_tracked": count}
    arrays |= {"out": matrix(B, O) if rng.random() < 0.4 else None}
    options = {
        "training": training,
        "momentum": None if count is not None and rng.random() < 0.3 else 0.1,
        "activation": rng.choice((None, "relu")),
        "precision": rng.choice(("highest", "high")),
        "gemm": rng.choice(("auto", "auto", "cublas", "tiled", "sm90")),
        "sms": rng.choice((None, None, None, 1, 40, 120)),
        "return_saved": rng.random() < 0.6,
    }
    products = rng.choice((None, "auto", "tiled", "sm90", "cublas"))
    needs = tuple(name for name in Gradients._fields if rng.random() < 0.7)
    return Call(arrays, options, rng.random() < 0.15, matrix(B, O), products, needs)


def lines(count: int) -> Iterator[str]:
    calls = [*((seed, False) for seed in range(count)), *((seed, True) for seed in range(0, count, 10))]
    for device, (seed, residual) in itertools.product((HOPPER, AMPERE), calls):
        Array._free = itertools.count(1 << 32, 1 << 32)  # the same addresses in every call
        with gpu(device) as (_, log):
            call = draw(seed)
            refusal = (call.with_residual(seed) if residual else call).make()
        told = refusal or hashlib.sha256(repr(log).encode()).hexdigest()[:16]
        title = f"{device.capability} {seed}{' with a residual' * residual}"
        yield f"{title}: {' '.join(launch.name for launch in log)} {told}"


def main() -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_gpu", description=about)
    parser.add_argument("--count", type=int, default=2000, help="calls for each of two devices")
    parser.add_argument("--against", type=Path, help="what an earlier run printed")
    args = parser.parse_args()
    before = set(args.against.read_text(encoding="utf-8").splitlines()) if args.against else set()
    different = [line for line in lines(args.count) if line not in before]
    print("\n".join(different) or "all the same")
    return int(args.against is not None and bool(different))


if __name__ == "__main__":
    sys.exit(main())
