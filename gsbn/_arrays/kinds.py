"""Find the library of arrays: NumPy, CuPy, torch or any other DLPack producer, without a copy.

Libraries are looked up in `sys.modules`, not imported: a caller with a torch tensor has imported torch.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from .._values import type_name
from .cupy_arrays import CupyArrays
from .dlpack import Producer
from .dynamo import skip_frames
from .kind import NUMBERS as NUMBERS
from .kind import Kind as Kind
from .numpy_arrays import NumpyArrays
from .torch_tensors import CpuTensors, CudaTensors

_kinds: dict[type, Kind] = {np.ndarray: NumpyArrays()}
_learning = threading.Lock()


def kind_of(array: Any) -> Kind | None:
    """Return the kind of an array.

    Return None for a DLPack producer of another library, and for an object that is not an array.
    """
    kind = _kinds.get(type(array)) or _learn(type(array))
    return kind.side(array) if kind is not None else None


def _learn(type_: type) -> Kind | None:
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with _learning:  # so that threads share one kind per library
        if issubclass(type_, np.ndarray):
            _kinds[type_] = _kinds[np.ndarray]
        elif cupy is not None and issubclass(type_, cupy.ndarray):
            if cupy.ndarray not in _kinds:
                _kinds[cupy.ndarray] = CupyArrays()
            _kinds[type_] = _kinds[cupy.ndarray]
        elif torch is not None and issubclass(type_, torch.Tensor):
            if torch.Tensor not in _kinds:
                skip_frames(torch)
                kind = CpuTensors(torch)
                kind.cuda = CudaTensors(torch)
                _kinds[torch.Tensor] = kind
            _kinds[type_] = _kinds[torch.Tensor]
        return _kinds.get(type_)


def kinds_of(
    arrays: dict[str, Any], required: tuple[str, ...], own: tuple[str, ...] = ("out",)
) -> tuple[Kind, dict[str, Any], frozenset[str]]:
    """Return the common kind of all arrays, the arrays, and the names of those that DLPack marks as read-only.

    Arrays of other libraries are returned as CuPy or NumPy arrays that share their memory. `own` names the arrays that
    may be CuPy or NumPy arrays even in that case, because gsbn made them. Raises TypeError for an argument that is not
    an array or comes from another library than the first of `required`, ValueError for an array on another device, and
    the errors of `Kind.admit`.
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
    for name, array in arrays.items():  # the same library, but another device
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
        known = array is not None and kind_of(array) is not None
        if array is None or (known and name in own):
            imported[name] = array
            continue
        if not hasattr(array, "__dlpack__") or isinstance(array, type):
            raise TypeError(
                f"{name}: expected a NumPy, CuPy or torch array or a DLPack producer, got {type_name(array)}"
            )
        if known:
            raise TypeError(f"{name}: expected a {type_name(arrays[like])} like {like}, got {type_name(array)}")
        producer = Producer(name, array)
        imported[name] = producer.take()
        if producer.read_only:
            read_only.add(name)
    kind = kind_of(imported[like])
    assert kind is not None
    for name, array in imported.items():
        if array is not None and kind_of(array) is not kind:
            raise ValueError(f"{name}: expected {like}'s device, got {type_name(arrays[name])} on another")
    return kind, imported, frozenset(read_only)


def _reject_device(name: str, array: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):  # it has no kind: it is neither on the CPU nor on CUDA
        raise ValueError(f"{name}: expected a tensor on cpu or cuda, got one on {array.device}")
