"""Import arrays of other libraries by DLPack."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from .._values import no_cupy, type_name

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 1, 2, 13


class Producer:
    """Wrap a DLPack producer, and record whether its memory may be written, which CuPy does not record.

    As in NumPy, memory is writable only if a versioned capsule says so. JAX arrays are always read-only.
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
        """Return a CuPy or NumPy array of the same memory."""
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(self.array, jax.core.Tracer):
            raise TypeError(
                f"{self.name}: expected an array that holds values, got JAX's {type(self.array).__name__}: "
                "call gsbn outside jit, grad and vmap, or as examples/jax_handoff.py does"
            )
        try:
            device_type = int(self.__dlpack_device__()[0])
        except Exception as error:  # an unknown library may raise anything
            raise self._refused(error) from error
        if device_type not in (_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            raise ValueError(
                f"{self.name}: expected an array on the CPU or a CUDA device, got DLPack device type {device_type}"
            )
        try:
            return self._on_cpu() if device_type == _DLPACK_CPU else _cupy(self.name).from_dlpack(self)
        except ImportError:
            raise
        except Exception as error:
            raise self._refused(error) from error

    def _on_cpu(self) -> Any:
        try:
            return np.from_dlpack(self)
        except (BufferError, RuntimeError, TypeError):
            if not hasattr(self.array, "__array__"):
                raise
            # NumPy's DLPack has no bfloat16; __array__ returns an array with the bfloat16 of ml_dtypes, perhaps a copy
            made = np.asarray(self.array)
            self.read_only = self.read_only or not np.shares_memory(made, np.asarray(self.array))
            return made

    def _refused(self, error: Exception) -> TypeError:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return TypeError(
            f"{self.name}: expected an array that hands over its memory by DLPack, got {type_name(self.array)}: {why}"
        )


def _cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise no_cupy(f"{name}: expected CuPy for an array on a GPU") from error
    return cupy
