"""Arrays of libraries that gsbn does not know, through DLPack."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

__all__ = ["Producer"]

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 1, 2, 13


class Producer:
    """A DLPack producer that remembers whether what it handed over may be written, which CuPy forgets.

    As in NumPy, only a versioned capsule can say so; JAX arrays are immutable whatever their capsules say.
    """

    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array, self.read_only = name, array, True

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.array.__dlpack__(**options)
        api = ctypes.pythonapi
        api.PyCapsule_IsValid.argtypes = api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        if api.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
            # struct DLManagedTensorVersioned: version (8 bytes), manager_ctx, deleter, then flags; bit 0 is READ_ONLY
            managed = api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
            flagged = bool(ctypes.c_uint64.from_address(managed + 24).value & 1)
            jax = sys.modules.get("jax")
            self.read_only = flagged or (jax is not None and isinstance(self.array, jax.Array))
        return capsule

    def take(self) -> Any:
        kind = int(self.__dlpack_device__()[0])
        if kind == _DLPACK_CPU:
            try:
                return np.from_dlpack(self)
            except (BufferError, RuntimeError, TypeError) as error:
                if hasattr(self.array, "__array__"):  # NumPy's DLPack has no bfloat16; __array__ gives ml_dtypes' one
                    return np.asarray(self.array)
                raise TypeError(f"{self.name}: expected an array that NumPy can take: {error}") from error
        if kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            import cupy

            return cupy.from_dlpack(self)
        raise ValueError(f"{self.name}: expected an array on the CPU or a CUDA device, got DLPack device type {kind}")
