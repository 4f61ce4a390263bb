"""Make a program ready to run, so that a call only fills in the addresses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from .._cuda import capture, kernels, tensor_maps
from .._cuda.cublas import CublasGemm
from .._plan import declared
from .._plan.gemm import OneLaunch
from .._plan.problem import VECTORS, Device, Limits, Matmul, Matrix
from .._plan.products import sm90_gemm
from .._plan.program import ABSENT, Builder, Gather, Gemm, Launch, Program, nbytes_of, place_of

_MAX_CALLS = 1024  # the most calls in a cache
log = logging.getLogger("gsbn")


class Description(NamedTuple):
    """A description of how a call is computed.

    Attributes
    ----------
    path : str
        "sm90", "cublas" or "tiled", as `gemm` names them; "numpy" on the CPU.
    why : str
        Why this path was chosen.
    kernels : tuple of str
        The kernels in the order of their launches, by the names that a profiler shows; "cuBLAS" stands for the kernels
        of cuBLAS.
    scratch : int
        Bytes that are allocated in addition to the results.
    """

    path: str
    why: str
    kernels: tuple[str, ...]
    scratch: int

    def __str__(self) -> str:
        kernels = f": {', '.join(self.kernels)}; {self.scratch} bytes of scratch" if self.kernels else ""
        return f"{self.path} ({self.why}){kernels}"


class Call:
    """A program that is ready for arrays of the same shapes, strides and dtypes; each run has its own addresses.

    Each name of memory becomes a position in one list of addresses. The list has the arguments, 0 for ABSENT, the
    arrays that the call allocates, the workspace, and then places in these. `like` tells the library where to allocate.
    """

    def __init__(
        self, kind: Any, device: int, arguments: tuple[str, ...], program: Program, like: Any, exchange: Any = None
    ) -> None:
        self._kind, self.program = kind, program
        arrays = tuple(array.name for array in program.arrays)
        self._positions = {name: i for i, name in enumerate((*arguments, ABSENT, *arrays, "workspace"))}
        dtypes = [None if array.dtype == kind.dtype(like) else array.dtype for array in program.arrays]  # None: like's
        self._makers = [kind.maker(a.shape, like, dtype) for a, dtype in zip(program.arrays, dtypes, strict=True)]
        self._places: list[tuple[int, int]] = []  # the position of memory, and an offset in bytes
        self._records: list[Any] = []  # kept alive, because launches hold their addresses
        self._steps: list[Callable[[list[int], int], None]] = []  # each takes the list of addresses, and a stream
        names: list[str] = []
        lent = program.lent
        for step in program.steps:
            if isinstance(step, Launch):
                names.append(step.kernel.name)
                self._steps.append(self._launch(step, device, limited=program.limited))
            elif isinstance(step, Gemm):
                names.append("cuBLAS")
                gemm = CublasGemm(step.p, step.precision, device, wide=step.wide)
                lent = max(lent, gemm.workspace)
                scratch = f"workspace + {program.workspace}" if gemm.workspace else ABSENT
                self._steps.append(self._passing(gemm.run, (*step.operands, scratch)))
            elif isinstance(step, Gather):
                names.append("ncclAllGather")
                gather = partial(exchange.gather, step.doubles) if exchange is not None else _no_gather
                self._steps.append(self._passing(gather, step.operands))
        nbytes = program.workspace + lent
        self._scratch = kind.scratch(nbytes, like) if nbytes else lambda: (None, 0)
        copied = sum(nbytes_of(array) for array in program.arrays if array.scratch)
        self.description = Description(program.path, program.why, tuple(names), nbytes + copied)

    def _launch(self, step: Launch, device: int, *, limited: bool) -> Callable[[list[int], int], None]:
        """Return the step of a launch."""
        parameters = tuple(step.passed)
        launch = kernels.launcher(step.kernel, device, parameters, cooperative=step.cooperative, limited=limited).launch
        record = declared.record(step.kernel, step.fields)
        self._records.append(record)
        values, pick = (record.ctypes.data,), self._picker(tuple(step.passed.values()))
        grid, block = step.grid, step.block
        if not step.maps:
            return lambda addresses, stream: launch(grid, block, values, pick(addresses), stream)
        pick_mapped = self._picker(tuple(name for name, _ in step.maps))
        matrices = tensor_maps.Matrices([what for _, what in step.maps])

        def act(addresses: list[int], stream: int) -> None:
            # the owners must live until the launch
            _owners, maps = tensor_maps.tensor_maps(matrices, *pick_mapped(addresses))
            launch(grid, block, values + maps, pick(addresses), stream)

        return act

    def _passing(self, act: Callable[[Any, int], None], names: tuple[str, ...]) -> Callable[[list[int], int], None]:
        """Return the step that calls `act` with the addresses of these names."""
        pick = self._picker(names)
        return lambda addresses, stream: act(pick(addresses), stream)

    def _picker(self, names: tuple[str, ...]) -> Callable[[list[int]], tuple[int, ...]]:
        """Return a function that picks the addresses of these names from the list."""
        for name in names:
            if name not in self._positions and (found := place_of(name)) is not None:
                memory, offset = found
                self._positions[name] = len(self._positions)
                self._places.append((self._positions[memory], offset))
        if len(names) == 1:  # itemgetter would return no tuple
            at = self._positions[names[0]]
            return lambda addresses: (addresses[at],)
        return itemgetter(*(self._positions[name] for name in names))

    def run(self, like: Any, pointers: list[int], stream: int, capturing: bool, prepared: Any = None) -> list[Any]:
        """Allocate memory and launch the steps. Return the arrays that were allocated.

        `pointers` has the addresses of the arguments; the other addresses are appended to it.
        """
        kind, addresses, made = self._kind, pointers, []
        addresses.append(0)
        for make in self._makers:  # a loop, since a comprehension would add a function call
            array = make()
            made.append(array)
            addresses.append(kind.pointer(array))
        scratch, workspace = self._scratch()
        addresses.append(workspace)
        for at, offset in self._places:
            addresses.append(addresses[at] + offset)
        if capturing:
            capture.keep_alive(kind, stream, (*made, scratch), prepared)
        for act in self._steps:
            act(addresses, stream)
        return made


def bare_gemm(p: Matmul, one: OneLaunch, device: int) -> Callable[[tuple[int, int, int], int], None]:
    """Return a function that launches forward_sm90's GEMM alone.

    The function takes the addresses of a, b and c, and a stream.
    """
    build = Builder(p.device)
    sm90_gemm(build, p, one, ("a", "b", "c"))
    call = Call(None, device, ("a", "b", "c"), build.program("sm90", ""), None)

    def launch(operands: tuple[int, int, int], stream: int) -> None:
        call.run(None, list(operands), stream, False)

    return launch


def _no_gather(*_: Any) -> None:
    raise RuntimeError("a program that gathers runs with a group")


def matrix_of(view: Any) -> Matrix:
    """Return the layout of a matrix, for the planner."""
    strides = tuple(stride // view.itemsize for stride in view.strides)
    return Matrix.of(view.shape, strides, view.pointer % 16 == 0)


def elementwise(view: Any, gpu: Device, limits: Limits) -> Matmul | None:
    """Return the problem of an elementwise launch over a matrix: the rows and columns of a product, without inputs.

    None if the matrix has no rows.
    """
    (m, n), at = view.shape, matrix_of(view)
    return Matmul(m, n, 0, view.dtype, gpu, at, at, at, limits) if m else None


def vector_codes(views: dict[str, Any]) -> dict[str, int]:
    """Return the code of each vector for the kernels."""
    return {name: vector_code(views[name]) for name in VECTORS}


def vector_code(view: Any) -> int:
    """Return 8 times the stride of a vector (0 for one element) plus its KIND_, or 0 if the vector is not given."""
    if view is None:
        return 0
    stride: int = view.strides[0] // view.itemsize if math.prod(view.shape) > 1 else 0
    return stride * 8 + declared.kind_code(view.dtype)


def remember(calls: dict[Any, Any], key: Any, call: Any) -> None:
    """Cache a call under its key, unless the key is None; a full cache is emptied first."""
    if key is None:
        return
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call
