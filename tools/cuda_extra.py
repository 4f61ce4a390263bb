"""Print the gsbn extra for this machine's NVIDIA driver: cuda13, cuda12, or nothing without a driver.

Asks the driver library, which CuPy will load, so it works without nvidia-smi. Uses only the standard library.
"""

import ctypes
import sys


def driver_cuda_version() -> int:
    """The newest CUDA version that the driver supports, as 1000 * major + 10 * minor; 0 without a driver."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def extra(version: int) -> str:
    return "cuda13" if version >= 13000 else "cuda12" if version else ""


if __name__ == "__main__":
    version = driver_cuda_version()
    if 0 < version < 12000:
        print(
            f"gsbn: this driver supports CUDA {version // 1000}.{version % 1000 // 10}; the GPU path needs 12 or newer",
            file=sys.stderr,
        )
    print(extra(version))
