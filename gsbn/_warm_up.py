"""warm_up: compile the kernels before the first call."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Collection

from . import _plan
from ._arrays.check import checked_activation
from ._cuda import device as devices
from ._cuda import kernels as kernels_
from ._typing import Activation
from ._values import shown

_USUAL: tuple[Activation, ...] = ("relu",)


def warm_up(
    progress: Callable[[int, int, str], None] | None = None,
    *,
    arch: str | None = None,
    activations: Collection[Activation] = _USUAL,
) -> int:
    """Compile every kernel that a GPU can use into the cache on disk, so that no later call has to compile.

    Parameters
    ----------
    progress : callable, optional
        Called as ``progress(done, total, name)`` before each kernel and once at the end.
    arch : str, optional
        The architecture to compile for, such as "sm_90" for compute capability 9.0. This needs no GPU, for example
        when an image is built. None compiles for the current GPU and also loads the kernels.
    activations : collection
        The activations that calls will have, as `gsbn.forward` takes them; kernels without one are always compiled.

    Returns
    -------
    int
        The number of kernels that are ready. Kernels in the cache are not compiled again.

    Raises
    ------
    RuntimeError
        There is no GPU and no `arch`, or no CuPy, which brings the compiler (NVRTC). The message says why.
    OSError
        The cache cannot be written.
    TypeError
        `progress` is not callable, `arch` is not a string, or `activations` is not a collection of activations.
    ValueError
        `arch` is not a compute capability from 7.5 on, or an activation is not known.

    Notes
    -----
    The cache is CuPy's folder for compiled kernels: the environment variable CUPY_CACHE_DIR, or ~/.cupy/kernel_cache.
    Another version of gsbn or of NVRTC compiles its kernels again.

    Examples
    --------
    >>> import gsbn
    >>> kernels = gsbn.warm_up(arch="sm_90", activations=["silu", ("leaky_relu", 0.2)])  # doctest: +SKIP
    """
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a function or None, got {shown(progress)}")
    if isinstance(activations, str) or not isinstance(activations, Collection):
        raise TypeError(f"activations: expected a collection such as ['silu'], got {shown(activations)}")
    chosen = dict.fromkeys(checked_activation(activation) for activation in activations if activation is not None)
    if arch is not None:
        if not isinstance(arch, str):
            raise TypeError(f"arch: expected a string or None, got {shown(arch)}")
        number = re.fullmatch(r"sm_(\d+)(\d)a?", arch)
        if number is None or (capability := (int(number[1]), int(number[2]))) < (7, 5):
            raise ValueError(f"arch: expected a compute capability from sm_75 on, such as 'sm_90', got {arch!r}")
        if importlib.util.find_spec("cupy") is None:
            raise RuntimeError("no compiler for the kernels: CuPy, which brings NVRTC, is not installed")
    elif obstacle := devices.gpu_obstacle():
        raise RuntimeError(f"no GPU to compile kernels for: {obstacle}")
    from concurrent.futures import ThreadPoolExecutor  # takes 5 ms, so not at `import gsbn`

    import cupy

    device = None if arch is not None else cupy.cuda.Device().id
    if device is not None:
        capability = kernels_.gpu(device).capability
    kernels = list(kernels_.usable(capability, tuple(chosen)))

    def ready(kernel: _plan.Kernel) -> None:
        if device is None:
            file = kernels_.compiled(kernel, capability)
            if not file.exists():
                raise OSError(
                    f"cannot write to {file.parent}, where compiled kernels lie: set CUPY_CACHE_DIR to a folder"
                )
            return
        with devices.on_device(device):
            kernels_.launcher(kernel, device)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC works without the GIL
        waiting = [pool.submit(ready, kernel) for kernel in kernels]
        try:
            for done, (kernel, future) in enumerate(zip(kernels, waiting, strict=True)):
                if progress:
                    progress(done, len(kernels), " ".join([kernel.name, *(value for _, value in kernel.defines)]))
                future.result()
        except BaseException:  # also Ctrl-C, and what `progress` raises
            pool.shutdown(cancel_futures=True)  # else the others are all compiled first
            raise
    if progress:
        progress(len(kernels), len(kernels), "")
    return len(kernels)
