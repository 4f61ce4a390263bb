"""A call that is ready but for its addresses: what it allocates, and what it launches in which order."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from . import _capture, _declared, _kernels, _plan, _tma
from ._check import VECTORS
from ._interop import Kind

__all__ = ["ABSENT", "Call", "Description", "log", "matrix_of", "remember", "vector_codes"]

ABSENT = "absent"  # the address 0
_MAX_CALLS = 1024  # that a cache holds
log = logging.getLogger("gsbn")


class Description(NamedTuple):
    """How a call is computed.

    Attributes
    ----------
    path : str
        "sm90", "cublas" or "tiled", as `gemm` names them; "numpy" on the CPU.
    why : str
        Why this one.
    kernels : tuple of str
        What is launched, in this order, by the names that a profiler shows; "cuBLAS" stands for its own.
    scratch : int
        Bytes that are allocated beside what is returned.
    """

    path: str
    why: str
    kernels: tuple[str, ...]
    scratch: int

    def __str__(self) -> str:
        kernels = f": {', '.join(self.kernels)}; {self.scratch} bytes of scratch" if self.kernels else ""
        return f"{self.path} ({self.why}){kernels}"


class Call:
    """Built once for arrays that are alike, then run with the addresses of each call.

    Memory has names: the arguments', those of arrays that the call makes, and the workspace with offsets into it. They
    become positions in one list of addresses when the call is built; a name that is not known fails there. No launch of
    a `limited` call begins before the one ahead of it in the stream has ended.
    """

    def __init__(self, kind: Kind, device: int, arguments: tuple[str, ...], *, limited: bool = False) -> None:
        self._kind, self.device, self._limited = kind, device, limited
        self._positions = {name: i for i, name in enumerate((*arguments, ABSENT))}
        self._makers: list[Callable[[], Any]] = []
        self._offsets: list[int] = []  # into the workspace; the first is 0
        self._nbytes = self._lent = 0
        # What acts, what it is told each time, and what it picks of the addresses
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...], Callable[[list[int]], Any]]] = []
        self._records: list[Any] = []  # whose addresses are among the values
        self._kernels: list[str] = []  # of the steps
        self._copied = 0  # bytes

    # ---- memory

    def make(
        self, name: str, shape: tuple[int, ...], like: Any, dtype: str | None = None, *, scratch: bool = False
    ) -> str:
        """An array that every call makes anew, perhaps for itself; all of them before the workspace. Gives the name."""
        assert not self._offsets
        if scratch:
            self._copied += math.prod(shape) * _plan.ITEMSIZE[dtype or self._kind.dtype(like)]
        self._positions[name] = len(self._positions)
        self._makers.append(self._kind.maker(shape, like, dtype))
        return name

    def workspace(self, nbytes: int) -> None:
        """Scratch memory for one call, of the library's own allocator."""
        self._nbytes = nbytes + -nbytes % 256
        self.at(0)

    def at(self, offset: int) -> str:
        """The name of a place in the workspace."""
        name = f"workspace + {offset}"
        if name not in self._positions:
            self._positions[name] = len(self._positions)
            self._offsets.append(offset)
        return name

    def lend(self, nbytes: int) -> str:
        """Scratch memory for one step, at the workspace's end: what it leaves there, the next one may overwrite."""
        self._lent = max(self._lent, nbytes)
        return self.at(self._nbytes) if nbytes else ABSENT

    def _of(self, names: tuple[str, ...]) -> Callable[[list[int]], tuple[int, ...]]:
        if len(names) == 1:  # of which itemgetter would make no tuple
            at = self._positions[names[0]]
            return lambda addresses: (addresses[at],)
        return itemgetter(*(self._positions[name] for name in names))

    # ---- steps

    def launch(
        self,
        kernel: _plan.Kernel,
        grid: int,
        fields: Mapping[str, Any],
        passed: dict[str, str],
        block: int = _plan.THREADS,
    ) -> None:
        """A kernel, with the fields that it declares of those given, and addresses by the names of its parameters."""
        launch = _kernels.launcher(kernel, self.device, tuple(passed), limited=self._limited)
        record = _declared.record(kernel, fields)
        self._kernels.append(kernel.name)
        self._records.append(record)
        self._steps.append((launch, (grid, block, (record.ctypes.data,)), self._of(tuple(passed.values()))))

    def launch_mapped(
        self,
        one: _plan.OneLaunch,
        fields: Mapping[str, Any],
        boxes: list[Any],
        mapped: tuple[str, ...],
        passed: dict[str, str],
    ) -> None:
        """forward_sm90, which takes tensor maps of some addresses too."""
        record = _declared.record(one.kernel, fields)
        how = {"cooperative": one.cooperative, "limited": self._limited}
        launch = _kernels.launcher(one.kernel, self.device, tuple(passed), **how)
        matrices, of_maps, of = _tma.Matrices(boxes), self._of(mapped), self._of(tuple(passed.values()))
        self._kernels.append(one.kernel.name)
        self._records.append(record)
        grid, values = one.ctas, (record.ctypes.data,)

        def act(addresses: list[int], stream: int) -> None:
            _owners, maps = _tma.tensor_maps(matrices, *of_maps(addresses))  # the owners live until the launch is made
            launch(grid, _plan.SM90_THREADS, values + maps, of(addresses), stream)

        self._steps.append((act, (), _all))

    def multiply(self, gemm: Any, *names: str) -> None:
        """A product that takes the addresses of a, b and c, and what else it wants, as one tuple."""
        self._kernels += gemm.kernels
        self._steps.append((gemm, (), self._of(names)))

    def gather(self, exchange: Any, count: int, posted: str, gathered: str) -> None:
        """So many doubles of every rank, by NCCL."""
        self._kernels.append("ncclAllGather")
        self._steps.append((exchange.gather, (count,), self._of((posted, gathered))))

    def clear(self, name: str, nbytes: int, gpu: _plan.Device) -> None:
        """Zeros, of memory on 16 bytes."""
        self.launch(_plan.clear(), _plan.clear_grid(nbytes, gpu), {"bytes": nbytes}, {"to": name})

    # ---- the call

    def describe(self, path: str, why: str) -> Description:
        return Description(path, why, tuple(self._kernels), self._nbytes + self._lent + self._copied)

    def run(self, like: Any, pointers: list[int], stream: int, capturing: bool, prepared: Any = None) -> list[Any]:
        """Allocate and launch; gives what was made, in order. To `pointers`, the arguments', the others are added."""
        kind, addresses, made = self._kind, pointers, []
        addresses.append(0)
        for make in self._makers:  # loops, since a comprehension would cost each call a function's frame
            array = make()
            made.append(array)
            addresses.append(kind.pointer(array))
        nbytes = self._nbytes + self._lent
        scratch, workspace = kind.scratch(nbytes, like) if nbytes else (None, 0)
        for offset in self._offsets:
            addresses.append(workspace + offset)
        if capturing:
            _capture.keep_alive(kind, stream, (*made, scratch), prepared)
        for act, told, words in self._steps:
            act(*told, words(addresses), stream)
        return made


def _all(addresses: list[int]) -> Any:
    return addresses


def matrix_of(view: Any) -> _plan.Matrix:
    """What the planner looks at of a matrix."""
    strides = tuple(stride // view.itemsize for stride in view.strides)
    return _plan.Matrix.of(view.shape, strides, view.pointer % 16 == 0)


def vector_codes(views: dict[str, Any]) -> dict[str, int]:
    """What a kernel is told of each per-feature vector: 8 times its stride, 0 for one element, plus its KIND_; or 0."""
    given = {name: views[name] for name in VECTORS if views[name] is not None}
    strides = {name: v.strides[0] // v.itemsize if math.prod(v.shape) > 1 else 0 for name, v in given.items()}
    codes = {name: strides[name] * 8 + _declared.kind_code(v.dtype) for name, v in given.items()}
    return dict.fromkeys(VECTORS, 0) | codes


def remember(calls: dict[Any, Any], key: Any, call: Any) -> None:
    """Keep a prepared call for those of the same key, None being no key; a full cache is emptied first."""
    if key is None:
        return
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call
