"""What this machine has: hardware, libraries, which path a call will take, what is missing; and ``warm_up``."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gsbn

from .. import _kernels, _plan
from .._device import on_device
from .._driver import driver

if TYPE_CHECKING:
    from .measure import Case

LIBRARIES = ("numpy", "ml_dtypes", "cupy", "torch", "jax", "matplotlib")


def has_gpu() -> bool:
    """Whether CuPy is installed, works, and sees a GPU."""
    return not _gpu_obstacle()


def environment() -> dict[str, Any]:
    """What a figure depends on and a reader cannot see: versions, GPU, driver, digests of the sources. JSON types."""
    found: dict[str, Any] = {
        "gsbn": gsbn.__version__,
        "digest": source_digests(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "libraries": {name: version(name) for name in LIBRARIES},
        "driver": _driver_version(),
        "cuda_driver": _dotted(_cuda_driver()),
        "gpus": [],
    }
    if has_gpu():
        import cupy

        runtime = cupy.cuda.runtime
        found["cuda_runtime"] = _dotted(runtime.runtimeGetVersion())
        found["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        for index in range(runtime.getDeviceCount()):
            device = runtime.getDeviceProperties(index)
            found["gpus"].append(
                {
                    "name": device["name"].decode(),
                    "capability": f"{device['major']}.{device['minor']}",
                    "sms": device["multiProcessorCount"],
                    "memory_gib": round(device["totalGlobalMem"] / 2**30, 1),
                    "l2_mib": round(device["l2CacheSize"] / 2**20, 1),
                }
            )
    return found


def source_digests() -> dict[str, str]:
    """A digest of the Python sources and one of the kernels: which code a saved result describes."""
    hasher = hashlib.sha256()
    for file in sorted(Path(gsbn.__file__).parent.rglob("*.py")):
        hasher.update(file.name.encode() + b"\0" + file.read_bytes())
    return {"gsbn": hasher.hexdigest()[:16], "kernels": _kernels.digest()}


def path(case: Case, gemm: str, xp: Any) -> tuple[str, str]:
    """Which GEMM serves a case outside of a capture, and why; on the CPU always the NumPy reference."""
    if xp.__name__ == "numpy":
        return "numpy", "arrays on the CPU: the float64 reference, rounded once"
    operand, result = (_plan.Matrix((columns, 1), True) for columns in (case.in_features, case.out_features))
    gpu = _kernels.gpu(xp.cuda.Device().id)
    matmul = _plan.Matmul(case.batch, case.out_features, case.in_features, case.dtype, gpu, operand, operand, result)
    return _plan.gemm_for(matmul, precision=case.precision, gemm=gemm, capturing=False, training=case.training)


def missing() -> list[tuple[str, str]]:
    """What keeps this machine from more: (what, the command or step that mends it)."""
    problems = []
    extra = "cuda13" if _cuda_driver() >= 13000 else "cuda12"
    wheels = [name for name in _packages().get("cupy", []) if name.startswith("cupy")]
    obstacle = _gpu_obstacle()
    if len(wheels) > 1:
        both = " ".join(sorted(wheels))
        problems.append((f"two CuPy wheels that break each other: {both}",
                         f'pip uninstall -y {both} && pip install "gsbn[{extra}]"'))  # fmt: skip
    elif obstacle and not _cuda_driver():
        problems.append(("no NVIDIA driver: gsbn computes on the CPU",
                         "with an NVIDIA GPU, install its driver: https://www.nvidia.com/drivers"))  # fmt: skip
    elif obstacle and not wheels:
        problems.append(("CuPy is not installed: gsbn computes on the CPU", f'pip install "gsbn[{extra}]"'))
    elif obstacle:
        fix = f'pip uninstall -y {wheels[0]} && pip install "gsbn[{extra}]"'
        problems.append((f"CuPy sees no usable GPU: {obstacle}", "nvidia-smi" if extra[4:] in wheels[0] else fix))
    if version("ml_dtypes") is None:
        problems.append(("no bfloat16 in NumPy and CuPy arrays", "pip install ml_dtypes"))
    if version("matplotlib") is None:
        problems.append(("no plots", 'pip install "gsbn[cli]"'))
    return problems


def warm_up(progress: Callable[[int, int, str], None] | None = None) -> int:
    """Compile every kernel that the current GPU can use into CuPy's cache on disk, so that no first call pays for it.

    Parameters
    ----------
    progress : callable, optional
        Called as ``progress(done, total, name)`` before each kernel is waited for and once at the end.

    Returns
    -------
    int
        How many kernels are ready. What the cache already holds is loaded, not compiled again.

    Raises
    ------
    RuntimeError
        If there is no GPU to compile for; the message says why.
    """
    if obstacle := _gpu_obstacle():
        raise RuntimeError(f"no GPU to compile kernels for: {obstacle}")
    import cupy

    device = cupy.cuda.Device().id
    gpu = _kernels.gpu(device)
    hopper = gpu.capability == (9, 0) and gpu.sm90a
    kernels = list(_kernels.all_kernels("sm_90a" if hopper else "any other"))

    def load(kernel: _plan.Kernel) -> None:
        with on_device(device):
            _kernels.launcher(kernel, device)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC works without the GIL
        loading = [pool.submit(load, kernel) for kernel in kernels]
        for done, (kernel, future) in enumerate(zip(kernels, loading, strict=True)):
            if progress:
                progress(done, len(kernels), " ".join([kernel.name, *(value for _, value in kernel.defines)]))
            future.result()
    if progress:
        progress(len(kernels), len(kernels), "")
    return len(kernels)


@lru_cache(maxsize=1)
def _packages() -> dict[str, list[str]]:
    """Import name to the distributions that provide it, in a form that the type checker knows."""
    from importlib import metadata  # 20 ms, which `import gsbn` need not take

    return {name: sorted(set(found)) for name, found in metadata.packages_distributions().items()}


def version(package: str) -> str | None:
    """The installed version of a package, by import name; nothing is imported."""
    from importlib import metadata

    for distribution in _packages().get(package, []):
        return metadata.version(distribution)
    return None


def _gpu_obstacle() -> str:
    """Why CuPy cannot be used on a GPU here; empty if it can."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "no GPU is visible"
        cupy.cuda.nvrtc.getVersion()
    except ImportError as error:
        return "CuPy is not installed" if error.name == "cupy" else str(error).strip().splitlines()[0]
    except Exception as error:  # CUDARuntimeError and whatever a broken installation raises
        return str(error).strip().splitlines()[0]
    return ""


def _driver_version() -> str | None:
    """The driver's own version, such as 580.95.05."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.split("\n")[0].strip() or None


def _cuda_driver() -> int:
    """The newest CUDA that the driver serves, 13000 for 13.0; 0 without a driver. Needs no CuPy."""
    try:
        library = driver()
    except OSError:
        return 0
    number = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(number))
    return number.value


def _dotted(number: int) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
