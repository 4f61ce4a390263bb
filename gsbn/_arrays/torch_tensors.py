"""Read and allocate PyTorch's tensors, on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import admit
from .check import View
from .kind import Kind


class CpuTensors(Kind):
    name = "torch"
    counts_writes = True
    cuda: Kind

    def __init__(self, torch: Any) -> None:
        self._torch, self._is_grad_enabled = torch, torch.is_grad_enabled
        self._names = {
            torch.float32: "float32",
            torch.float16: "float16",
            torch.bfloat16: "bfloat16",
            torch.float64: "float64",
            torch.int64: "int64",
        }
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        dual = torch.autograd.forward_ad  # _current_level is -1 outside forward-mode differentiation
        self._forward_ad = dual if hasattr(dual, "_current_level") else SimpleNamespace(_current_level=-1)

    def read(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        if self._forward_ad._current_level >= 0:
            raise RuntimeError("a tensor may have a tangent")
        grad = self._is_grad_enabled()
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
        except RuntimeError:  # tensors from inference mode have no count
            return None

    def count_writes(self, arrays: list[Any]) -> None:
        increment = self._torch.autograd.graph.increment_version
        try:
            increment(arrays)
        except (RuntimeError, TypeError):  # older versions take one tensor, not from inference mode
            for array in arrays:
                if not array.is_inference():
                    increment(array)

    def side(self, array: Any) -> Kind | None:
        return self.cuda if array.is_cuda else self if array.is_cpu else None


class CudaTensors(CpuTensors):
    on_gpu = True

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self._asked = (0, False)  # the last capture that graph_keeps was called for, and its result
        # This takes 0.3 us. The public current_stream() takes 3.7 us: it builds a Stream object around the same
        # pointer.
        self._raw_stream: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
        )

    def device(self, array: Any) -> int:
        return array.device.index  # type: ignore[no-any-return]

    def stream(self, device: int) -> int:
        return self._raw_stream(device)

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Callable[[], Any]:
        # This is the fastest allocation in torch: it has no dtype or device to parse, and no tuple to unpack.
        return partial(self.empty((0,), like, dtype).new_empty, *(shape or ((),)))

    def scratch(self, nbytes: int, like: Any) -> Callable[[], tuple[Any, int]]:
        make = self._torch.empty(0, dtype=self._torch.uint8, device=like.device).new_empty

        def lend() -> tuple[Any, int]:
            memory = make(nbytes)
            return memory, memory.data_ptr()

        return lend

    def graph_keeps(self, arrays: tuple[Any, ...], capture: int) -> bool:
        # During torch's own capture, memory comes from the graph's pool; during another library's capture, it comes
        # from the common pool.
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
    """Return the address 0 of a tensor without elements. Raise for a tensor with elements but without memory."""
    if array.numel():
        raise RuntimeError("a tensor without memory")
    return 0


def _bfloat16(name: str) -> Any:
    """Return the bfloat16 that ml_dtypes adds to NumPy."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"{name}: expected ml_dtypes for bfloat16 on the CPU, got an environment without it: pip install ml_dtypes"
        ) from error
    return ml_dtypes.bfloat16
