"""What this machine has: hardware, libraries, which path a call will take, and what is missing."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import gsbn

from .. import _plan
from .._cuda import device, kernels
from .._cuda.driver import driver
from .case import Case

LIBRARIES = ("numpy", "ml_dtypes", "cupy", "torch", "jax", "matplotlib")


def has_gpu() -> bool:
    """Whether CuPy is installed, works, and sees a GPU."""
    return not device.gpu_obstacle()


def environment() -> dict[str, Any]:
    """What a figure depends on and does not show: versions, GPU, driver, digests of the sources. As JSON's types."""
    found: dict[str, Any] = {
        "gsbn": gsbn.__version__,
        "digest": source_digests(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "libraries": {name: version(name) for name in LIBRARIES},
        "driver": _driver_version(),
        "cuda_driver": _dotted(cuda_driver()),
        "gpus": [],
    }
    if has_gpu():
        import cupy

        runtime = cupy.cuda.runtime
        found["cuda_runtime"] = _dotted(runtime.runtimeGetVersion())
        found["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        for index in range(runtime.getDeviceCount()):
            device = runtime.getDeviceProperties(index)
            gpu = {"name": device["name"].decode(), "capability": f"{device['major']}.{device['minor']}"}
            gpu |= {"sms": device["multiProcessorCount"], "memory_gib": round(device["totalGlobalMem"] / 2**30, 1)}
            found["gpus"].append(gpu | {"l2_mib": round(device["l2CacheSize"] / 2**20, 1)})
    return found


def source_digests() -> dict[str, str]:
    """A digest of the Python sources and one of the kernels: they tell which code a saved result is of."""
    package, hasher = Path(gsbn.__file__).parent, hashlib.sha256()
    for name, file in sorted((file.relative_to(package).as_posix(), file) for file in package.rglob("*.py")):
        hasher.update(name.encode() + b"\0" + file.read_bytes())
    return {"gsbn": hasher.hexdigest()[:16], "kernels": kernels.digest()}


def matmul_of(case: Case, xp: Any) -> _plan.Matmul:
    """A case's GEMM as the planner of the current GPU sees it; all operands are contiguous."""
    operand, result = (_plan.Matrix((columns, 1), True) for columns in (case.in_features, case.out_features))
    gpu = kernels.gpu(xp.cuda.Device().id)
    return _plan.Matmul(case.batch, case.out_features, case.in_features, case.dtype, gpu, operand, operand, result)


def path(case: Case, gemm: str, xp: Any) -> tuple[str, str]:
    """Which GEMM serves a case, and why; on the CPU always NumPy."""
    if xp.__name__ == "numpy":
        return "numpy", "arrays on the CPU: float32 BLAS in blocks of rows (float64 for float64)"
    options: dict[str, Any] = {"precision": case.precision, "gemm": gemm, "training": case.training}
    return _plan.gemm_for(matmul_of(case, xp), **options)[:2]


def missing() -> list[tuple[str, str]]:
    """What keeps this machine from more: (what, the command or step that mends it)."""
    problems = []
    extra = "cuda13" if cuda_driver() >= 13000 else "cuda12"
    wheels = [name for name in packages().get("cupy", []) if name.startswith("cupy")]
    obstacle = device.gpu_obstacle()
    if len(wheels) > 1:
        both = " ".join(sorted(wheels))
        problems.append((f"two CuPy wheels that break each other: {both}",
                         f"pip uninstall -y {both} && {pip_install(extra)}"))  # fmt: skip
    elif obstacle and not cuda_driver():
        problems.append(("no NVIDIA driver: gsbn computes on the CPU",
                         "with an NVIDIA GPU, install its driver: https://www.nvidia.com/drivers"))  # fmt: skip
    elif obstacle and not wheels:
        problems.append(("CuPy is not installed: gsbn computes on the CPU", pip_install(extra)))
    elif obstacle:
        fix = f"pip uninstall -y {wheels[0]} && {pip_install(extra)}"
        problems.append((f"CuPy sees no usable GPU: {obstacle}", "nvidia-smi" if extra[4:] in wheels[0] else fix))
    if version("ml_dtypes") is None:
        problems.append(("no bfloat16 in NumPy and CuPy arrays", "pip install ml_dtypes"))
    if version("matplotlib") is None:
        problems.append(("no plots", pip_install("cli")))
    return problems


def pip_install(extra: str) -> str:
    """The command that brings what an extra of gsbn asks for. It names the packages, as gsbn itself is in no index."""
    lines: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        lines = metadata.requires("gsbn") or []
    wanted = [line.partition(";")[0].strip() for line in lines if re.search(rf"extra == .{extra}\b", line)]
    if not wanted:  # the sources are on the path and not installed, or were when they had no such extra
        return f'pip install -e "{Path(gsbn.__file__).parents[1]}[{extra}]"'
    return "pip install " + " ".join(f'"{package}"' for package in wanted)


@cache
def packages() -> dict[str, list[str]]:
    """The distributions that provide each import name."""
    return {name: sorted(set(found)) for name, found in metadata.packages_distributions().items()}


def version(package: str) -> str | None:
    """The installed version of a package, by import name; nothing is imported."""
    return next(map(metadata.version, packages().get(package, [])), None)


def _driver_version() -> str | None:
    """The driver's own version, such as 580.95.05."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.split("\n")[0].strip() or None


def cuda_driver() -> int:
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
