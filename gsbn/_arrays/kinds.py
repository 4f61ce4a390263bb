"""Arrays in and out: NumPy, CuPy, torch and any other DLPack producer, without a copy, on the caller's stream.

A library is only ever looked up in `sys.modules`: whoever hands over a torch tensor has imported torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from .._values import type_name
from . import admit
from .check import View
from .dlpack import Producer
from .dynamo import skip_frames

NUMBERS = (float, int, np.floating, np.integer)  # which are no arrays, whatever attributes they have


class Kind:
    """How one array library is read and allocated; one instance a library and side (CPU or CUDA)."""

    name: str  # as error messages say it
    on_gpu = False
    counts_writes = False  # `written` has something to tell

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        """What a plan depends on (hashable: types, shapes, strides, dtypes, devices) and the addresses; None gives 0.

        No addresses at all where it is plain that no two arrays share memory.
        The fast path of every call, so it checks nothing: an array of another kind raises or gives a key never seen.
        """
        raise NotImplementedError

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def view(self, array: Any) -> View:
        raise NotImplementedError

    def dtype(self, array: Any) -> str:
        """The dtype by name."""
        return array.dtype.name  # type: ignore[no-any-return]

    def admit(self, name: str, array: Any) -> None:
        """Raise if the library forbids handing this array over."""

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A NumPy view of the same memory (CPU kinds)."""
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        """The inverse of `numpy`."""
        raise NotImplementedError

    def device(self, array: Any) -> int:
        raise NotImplementedError

    def stream(self, device: int) -> int:
        """The library's current stream on the device, as a pointer."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        """An uninitialised C-contiguous array on like's device, of like's dtype or of another, by name."""
        raise NotImplementedError

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Callable[[], Any]:
        """`empty` of these arguments, for many times (CUDA kinds)."""
        raise NotImplementedError

    def scratch(self, nbytes: int, like: Any) -> tuple[Any, int]:
        """Uninitialised device memory in the library's own allocator: its owner and its address, on 256 bytes."""
        raise NotImplementedError

    def graph_keeps(self, arrays: tuple[Any, ...], capture: int) -> bool:
        """Whether the library keeps these new arrays' memory for the graph of a capture, whatever becomes of them."""
        return False

    def version(self, array: Any) -> int | None:
        """How often the array was changed in place, where the library counts that."""
        return None

    def copy(self, array: Any) -> Any:
        """A C-contiguous array of its own memory (CPU kinds)."""
        raise NotImplementedError

    def written(self, arrays: list[Any]) -> None:
        """Tell the library that its arrays were changed in place."""

    def side(self, array: Any) -> Kind | None:
        """The kind for the device that this array is on; None for a device that gsbn cannot use."""
        return self


class _Numpy(Kind):
    name = "NumPy"

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        given = [a for a in arrays if a is not None]
        key = tuple([None if a is None else (type(a), a.shape, a.strides, a.dtype, a.flags.writeable) for a in arrays])
        # An address takes a microsecond to ask for. Different arrays that own their memory need none: they cannot meet.
        if len({id(a) for a in given if a.flags.owndata}) == len(given):
            return key, []
        return key, [0 if a is None else self.pointer(a) for a in arrays]

    def pointer(self, array: Any) -> int:
        return array.__array_interface__["data"][0]  # type: ignore[no-any-return]

    def view(self, array: Any) -> View:
        native = array.dtype.name if array.dtype.isnative else str(array.dtype)
        return View(
            self.pointer(array), array.shape, array.strides, native, array.itemsize, "cpu", array.flags.writeable
        )

    def admit(self, name: str, array: Any) -> None:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got {type_name(array)}")

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        return np.empty(shape, like.dtype if dtype is None else dtype)

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        return array

    def copy(self, array: Any) -> Any:
        return array.copy(order="C")


class _Cupy(Kind):
    name = "CuPy"
    on_gpu = True

    def __init__(self) -> None:
        import cupy

        self._ndarray = cupy.ndarray
        self._alloc = cupy.cuda.alloc
        self._current_stream = cupy.cuda.get_current_stream

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        key: list[Any] = []
        pointers = []
        for a in arrays:
            if a is None:
                key.append(None)
                pointers.append(0)
            else:
                data = a.data
                key.append((type(a), a.shape, a.strides, a.dtype, data.device_id))
                pointers.append(data.ptr)
        return tuple(key), pointers

    def pointer(self, array: Any) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def view(self, array: Any) -> View:
        dtype, device = array.dtype, f"cuda:{self.device(array)}"
        return View(array.data.ptr, array.shape, array.strides, dtype.name, dtype.itemsize, device, True)

    def device(self, array: Any) -> int:
        return array.data.device_id  # type: ignore[no-any-return]

    def stream(self, device: int) -> int:
        return self._current_stream(device).ptr  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        return self.maker(shape, like, dtype)()

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Callable[[], Any]:
        # bfloat16 is never another's: ml_dtypes' name means nothing to CuPy
        return partial(self._ndarray, shape, like.dtype if dtype is None or dtype == like.dtype.name else dtype)

    def scratch(self, nbytes: int, like: Any) -> tuple[Any, int]:
        memory = self._alloc(nbytes)
        return memory, memory.ptr


class _Torch(Kind):
    name = "torch"
    counts_writes = True
    cuda: Kind

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._names = {
            torch.float32: "float32",
            torch.float16: "float16",
            torch.bfloat16: "bfloat16",
            torch.float64: "float64",
            torch.int64: "int64",
        }
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        dual = torch.autograd.forward_ad  # whose _current_level is -1 where nothing is differentiated forward
        self._forward_ad = dual if hasattr(dual, "_current_level") else SimpleNamespace(_current_level=-1)

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        if self._forward_ad._current_level >= 0:
            raise RuntimeError("a tensor may have a tangent")
        grad = self._torch.is_grad_enabled()
        key: list[Any] = [grad]
        pointers = []
        for a in arrays:
            if a is None:
                key.append(None)
                pointers.append(0)
            else:
                key.append((type(a), a.shape, a.stride(), a.dtype, a.device, grad and a.requires_grad, a.is_neg()))
                pointers.append(a.data_ptr() or _nowhere(a))
        return tuple(key), pointers

    def pointer(self, array: Any) -> int:
        return array.data_ptr()  # type: ignore[no-any-return]

    def view(self, array: Any) -> View:
        size = array.element_size()
        strides = tuple(stride * size for stride in array.stride())
        dtype = self._names.get(array.dtype, str(array.dtype))
        return View(array.data_ptr(), tuple(array.shape), strides, dtype, size, str(array.device), True)

    def dtype(self, array: Any) -> str:
        return self._names[array.dtype]

    def admit(self, name: str, array: Any) -> None:
        admit.tensor(self._torch, name, array)
        if array.dtype is self._torch.bfloat16 and not self.on_gpu:
            _bfloat16(name)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        if dtype is None:
            return like.new_empty(shape)
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device=like.device)

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        array = array.detach()
        if array.dtype is self._torch.bfloat16:
            return array.view(self._torch.int16).numpy().view(_bfloat16("array"))  # type: ignore[no-any-return]
        return array.numpy()  # type: ignore[no-any-return]

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.name == "bfloat16":
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def copy(self, array: Any) -> Any:
        return array.detach().clone(memory_format=self._torch.contiguous_format)

    def version(self, array: Any) -> int | None:
        try:
            return array._version  # type: ignore[no-any-return]
        except RuntimeError:  # a tensor that inference mode made counts nothing
            return None

    def written(self, arrays: list[Any]) -> None:
        increment = self._torch.autograd.graph.increment_version
        try:
            increment(arrays)
        except (RuntimeError, TypeError):  # older versions take one, and none that inference mode made
            for array in arrays:
                if not array.is_inference():
                    increment(array)

    def side(self, array: Any) -> Kind | None:
        return self.cuda if array.is_cuda else self if array.is_cpu else None


class _TorchCuda(_Torch):
    on_gpu = True

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self._bytes: dict[Any, Any] = {}  # an empty tensor of bytes for every device
        self._asked = (0, False)  # the last capture that graph_keeps was asked of, and the answer
        # 0.3 against 3.7 us for the public current_stream(), which builds a Stream object around the same pointer.
        self._raw_stream: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
        )

    def device(self, array: Any) -> int:
        return array.device.index  # type: ignore[no-any-return]

    def stream(self, device: int) -> int:
        return self._raw_stream(device)

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Callable[[], Any]:
        # The quickest way that torch has: no dtype or device to parse, no tuple to unpack.
        return partial(self.empty((0,), like, dtype).new_empty, *(shape or ((),)))

    def scratch(self, nbytes: int, like: Any) -> tuple[Any, int]:
        like_it = self._bytes.get(like.device)
        if like_it is None:
            like_it = self._bytes[like.device] = self._torch.empty(0, dtype=self._torch.uint8, device=like.device)
        memory = like_it.new_empty(nbytes)
        return memory, memory.data_ptr()

    def graph_keeps(self, arrays: tuple[Any, ...], capture: int) -> bool:
        # Within torch's own capture memory comes from a pool of the graph's; within another's, from the common one.
        pointer = next(filter(None, (array.data_ptr() for array in arrays)), 0)
        if pointer == 0:
            return True  # no memory at all
        asked, found = self._asked
        if asked != capture:
            found = self._is_of_a_graph(pointer)
            self._asked = capture, found
        return found

    def _is_of_a_graph(self, pointer: int) -> bool:
        try:
            segments = self._torch.cuda.memory_snapshot()
        except (RuntimeError, AttributeError):  # an allocator without pools
            return False
        common = (0, 0)
        for segment in segments:
            if segment["address"] <= pointer < segment["address"] + segment["total_size"]:
                return tuple(segment.get("segment_pool_id", common)) != common
        return False


def _nowhere(array: Any) -> int:
    """The address of a tensor that has none: 0 if it has no elements either."""
    if array.numel():
        raise RuntimeError("a tensor without memory")
    return 0


_kinds: dict[type, Kind] = {np.ndarray: _Numpy()}
_learning = threading.Lock()


def kind_of(array: Any) -> Kind | None:
    """The kind of an array; None for a DLPack producer of no known library and for what is no array at all."""
    kind = _kinds.get(type(array)) or _learn(type(array))
    return kind.side(array) if kind is not None else None


def _learn(type_: type) -> Kind | None:
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with _learning:  # one kind of a library, whichever thread comes first
        if issubclass(type_, np.ndarray):
            _kinds[type_] = _kinds[np.ndarray]
        elif cupy is not None and issubclass(type_, cupy.ndarray):
            if cupy.ndarray not in _kinds:
                _kinds[cupy.ndarray] = _Cupy()
            _kinds[type_] = _kinds[cupy.ndarray]
        elif torch is not None and issubclass(type_, torch.Tensor):
            if torch.Tensor not in _kinds:
                skip_frames(torch)
                kind = _Torch(torch)
                kind.cuda = _TorchCuda(torch)
                _kinds[torch.Tensor] = kind
            _kinds[type_] = _kinds[torch.Tensor]
        return _kinds.get(type_)


def kinds_of(
    arrays: dict[str, Any], required: tuple[str, ...], own: tuple[str, ...] = ("out",)
) -> tuple[Kind, dict[str, Any], frozenset[str]]:
    """The one kind of all arrays, the arrays themselves, and the names of those that DLPack marks as read-only.

    `own` names those that may be of a known kind where the others are foreign: they came from gsbn. Foreign DLPack
    producers come back as CuPy or NumPy arrays. Raises TypeError that names the first argument that is no array or of
    another kind than the first of `required`, ValueError for one on another device, and what `Kind.admit` raises.
    """
    like = required[0]
    owner = arrays[like]
    for name in required:
        if arrays[name] is None:
            raise TypeError(f"{name}: expected an array, got None")
    kind = kind_of(owner)
    if kind is None:
        return _import_dlpack(arrays, like, own)
    for name, array in arrays.items():
        if array is None:
            continue
        other = kind_of(array)
        if other is None:
            _reject_device(name, array)
        if other is None or other.name != kind.name:
            raise TypeError(f"{name}: expected a {kind.name} array like {like}, got {type_name(array)}")
        other.admit(name, array)
    for name, array in arrays.items():  # one library, two devices
        if array is not None and kind_of(array) is not kind:
            raise ValueError(f"{name}: expected {like}'s device {owner.device}, got {array.device}")
    return kind, arrays, frozenset()


def _import_dlpack(
    arrays: dict[str, Any], like: str, own: tuple[str, ...]
) -> tuple[Kind, dict[str, Any], frozenset[str]]:
    _reject_device(like, arrays[like])
    imported: dict[str, Any] = {}
    read_only = set()
    for name, array in arrays.items():
        known = array is None or (name in own and kind_of(array) is not None)
        if not known and (not hasattr(array, "__dlpack__") or isinstance(array, type)):
            raise TypeError(
                f"{name}: expected a NumPy, CuPy or torch array or a DLPack producer, got {type_name(array)}"
            )
        if not known and kind_of(array) is not None:
            raise TypeError(f"{name}: expected a {type_name(arrays[like])} like {like}, got {type_name(array)}")
        producer = Producer(name, array)
        imported[name] = array if known else producer.take()
        if not known and producer.read_only:
            read_only.add(name)
    kind = kind_of(imported[like])
    assert kind is not None
    for name, array in imported.items():
        if array is not None and kind_of(array) is not kind:
            raise ValueError(f"{name}: expected {like}'s device, got {type_name(arrays[name])} on another")
    return kind, imported, frozenset(read_only)


def _reject_device(name: str, array: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):  # of no kind: neither on the CPU nor on CUDA
        raise ValueError(f"{name}: expected a tensor on cpu or cuda, got one on {array.device}")


def _bfloat16(name: str) -> Any:
    """NumPy's bfloat16, in which the CPU computes."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"{name}: expected ml_dtypes for bfloat16 on the CPU, got an environment without it: pip install ml_dtypes"
        ) from error
    return ml_dtypes.bfloat16
