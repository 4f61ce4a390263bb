"""Compile the kernels ahead of the first call."""

from __future__ import annotations

import os
from collections.abc import Callable

from . import _device, _kernels, _plan

__all__ = ["warm_up"]


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
    if obstacle := _device.gpu_obstacle():
        raise RuntimeError(f"no GPU to compile kernels for: {obstacle}")
    from concurrent.futures import ThreadPoolExecutor  # 5 ms, which `import gsbn` need not take

    import cupy

    device = cupy.cuda.Device().id
    gpu = _kernels.gpu(device)
    hopper = gpu.capability == (9, 0) and gpu.sm90a
    kernels = list(_kernels.all_kernels("sm_90a" if hopper else "any other"))

    def load(kernel: _plan.Kernel) -> None:
        with _device.on_device(device):
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
