"""Arrays of every kind and layout between guard bands, and a checked call of ``gsbn.forward`` on them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import gsbn
from gsbn._forward import forward_within
from gsbn._plan import Limits

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
CPU_KINDS = ("numpy", "torch-cpu")
GPU_KINDS = ("cupy", "torch-cuda")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
WRITTEN = (*STATISTICS, "out")
LAYOUTS = ("C", "F", "strided", "negative", "unaligned", "padded")
GUARD = 64  # elements on each side of a buffer: whole 128-byte lines, so that a guard does not change the alignment
ANY = Limits()  # the planner's own choice
BAND = 512  # bytes on each side of what a call allocates, also whole lines


class Kind(NamedTuple):
    """One kind of array: how it is made from NumPy (a C-contiguous copy), and converted back."""

    name: str
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]

    @property
    def is_torch(self) -> bool:
        return self.name.startswith("torch")

    @property
    def is_cpu(self) -> bool:
        return self.name in CPU_KINDS


@cache
def kind_of(name: str) -> Kind:
    """``numpy``, ``cupy``, ``torch-cpu`` or ``torch-cuda``; skips the test if the package is missing."""
    if name == "numpy":
        return Kind(name, lambda a: np.array(a, order="C"), lambda a: np.array(a, order="C"))
    if name == "cupy":
        cupy = pytest.importorskip("cupy")

        def put_now(a: np.ndarray) -> Any:
            native = cupy.array(a, order="C")
            cupy.cuda.get_current_stream().synchronize()  # so that any stream may read it
            return native

        return Kind(name, put_now, lambda a: np.array(cupy.asnumpy(a), order="C"))
    torch = pytest.importorskip("torch")
    bfloat16 = DTYPES["bfloat16"]

    def put(a: np.ndarray) -> Any:
        a = np.array(a, order="C")
        t = torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == bfloat16 else torch.from_numpy(a)
        return t.to(name.removeprefix("torch-"), copy=True)

    def get(t: Any) -> np.ndarray:
        t = t.detach().cpu().contiguous().clone()
        return t.view(torch.int16).numpy().view(bfloat16) if t.dtype == torch.bfloat16 else t.numpy()

    return Kind(name, put, get)


@cache
def no_gpu() -> str | None:
    """Why no GPU can be used; None if one can."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "CuPy finds no CUDA device"
    except Exception as error:
        return f"no CuPy with a CUDA device: {type(error).__name__}: {str(error).splitlines()[0]}"


def available(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds whose library is installed."""
    return tuple(kind for kind in kinds if find_spec(kind.partition("-")[0]))


class Producer:
    """A DLPack producer with the required methods alone."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


def poison(dtype: np.dtype) -> Any:
    return np.iinfo(dtype).min if dtype.kind == "i" else np.nan


def footprint(shape: tuple[int, ...], layout: str) -> int:
    """Elements that a layout spans."""
    if layout == "strided":
        return math.prod(2 * n + 1 for n in shape)
    return math.prod(padded(shape) if layout == "padded" else shape)


def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with 8 to 15 more columns, so that rows start on 16 bytes; the array does not own these columns."""
    return (shape[0], (shape[1] + 15) // 8 * 8) if len(shape) == 2 else shape


def cut(base: Any, shape: tuple[int, ...], layout: str) -> Any:
    """The array of that shape and layout inside a flat buffer of any kind: a view, as it uses slices only."""
    # With ... an array without dimensions also becomes a view; without an index it would become its element.
    start = GUARD + (layout == "unaligned")  # aligned to an element alone
    flat = base[start : start + footprint(shape, layout)]
    if layout == "strided":
        return flat.reshape(tuple(2 * n + 1 for n in shape))[(..., *[slice(1, None, 2)] * len(shape))]
    if layout == "negative":
        return flat.reshape(shape)[(..., *[slice(None, None, -1)] * len(shape))]
    if layout == "padded" and len(shape) == 2:
        return flat.reshape(padded(shape))[:, : shape[1]]
    if layout == "F" and len(shape) == 2:
        return flat.reshape(shape[::-1]).T
    return flat.reshape(shape)


class Placed(NamedTuple):
    """An array inside a poisoned buffer."""

    view: Any
    base: Any
    layout: str
    before: bytes

    def disturbed(self, kind: Kind) -> bool:
        """Whether any byte changed, guards included."""
        return bool(kind.get(self.base).tobytes() != self.before)

    def guards_hold(self, kind: Kind) -> bool:
        """Whether the poison around the array, and between its elements, is unchanged."""
        base = kind.get(self.base)
        cut(base, tuple(self.view.shape), self.layout)[...] = poison(base.dtype)
        return bool(base.tobytes() == np.full_like(base, poison(base.dtype)).tobytes())


def place(kind: Kind, a: np.ndarray, layout: str = "C") -> Placed:
    if kind.is_torch and layout == "negative":
        layout = "strided"  # torch has no negative strides
    layout = layout if a.ndim else "C"  # without dimensions there are no strides
    base = np.full(footprint(a.shape, layout) + 2 * GUARD + 1, poison(a.dtype), a.dtype)
    cut(base, a.shape, layout)[...] = a
    native = kind.put(base)
    return Placed(cut(native, a.shape, layout), native, layout, base.tobytes())


@contextlib.contextmanager
def poisoned_allocations(kind: Kind) -> Iterator[None]:
    """New memory holds NaN, or bytes of 255. In CuPy it lies between guard bands, which are checked."""
    if kind.name == "torch-cuda":
        import torch

        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # also fills what torch.empty returns
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
    elif kind.name == "cupy":
        import cupy

        blocks: list[tuple[Any, int]] = []

        def malloc(nbytes: int) -> Any:
            block = cupy.get_default_memory_pool().malloc(nbytes + 2 * BAND)
            block.memset_async(255, nbytes + 2 * BAND)
            blocks.append((block, nbytes))
            return block + BAND

        with cupy.cuda.using_allocator(malloc):
            yield
        for block, nbytes in blocks:
            whole = cupy.ndarray(nbytes + 2 * BAND, np.uint8, block)
            bands = cupy.concatenate([whole[:BAND], whole[BAND + nbytes :]])
            assert (bands == 255).all(), f"written beside {nbytes} bytes that the call allocated"
    else:
        yield


class Outcome(NamedTuple):
    """The result and the arguments that were written, as NumPy arrays."""

    y: np.ndarray
    running_mean: np.ndarray | None
    running_var: np.ndarray | None
    num_batches_tracked: np.ndarray | None


def forward(
    kind: Kind,
    arrays: Mapping[str, np.ndarray],
    layouts: Mapping[str, str] | None = None,
    *,
    prepared: bool = False,
    limits: Limits = ANY,
    **options: Any,
) -> Outcome:
    """``gsbn.forward`` on placed copies of ``arrays``; checks what must be true of every call.

    The result has x's kind, dtype and rows; if ``out`` is given it is the result; guards and inputs are unchanged.
    """
    placed = {name: place(kind, a, (layouts or {}).get(name, "C")) for name, a in arrays.items()}
    views = {name: p.view for name, p in placed.items()}
    if prepared:
        views["weight"] = gsbn.prepare(views["weight"], options.get("precision", "highest"))
    with poisoned_allocations(kind):
        y = forward_within(limits, **views, **options)

    assert type(y) is type(views["x"])
    assert y.dtype == views["x"].dtype
    assert tuple(y.shape) == (len(arrays["x"]), len(arrays["weight"]))
    if "out" in views:
        assert y is views["out"]
    for name, p in placed.items():
        # every call is counted; statistics change if there are rows, on this rank or another
        any_rows = len(y) > 1 or options.get("group") is not None or name == "num_batches_tracked"
        written = name == "out" or (name in WRITTEN and options.get("training", False) and any_rows)
        assert p.guards_hold(kind) if written else not p.disturbed(kind), name

    def after(name: str) -> np.ndarray | None:
        return kind.get(views[name]) if name in views else None

    return Outcome(kind.get(y), after("running_mean"), after("running_var"), after("num_batches_tracked"))


def without_out(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arguments of ``forward`` that the reference takes."""
    return {name: a for name, a in arrays.items() if name != "out"}


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    word = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(word), np.ascontiguousarray(want).view(word))
