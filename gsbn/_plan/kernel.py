"""The name of a compiled variant of a kernel."""

from __future__ import annotations

from typing import NamedTuple


class Kernel(NamedTuple):
    """One compiled variant: the function of this name in kernels/<file>.cu, compiled with these macros."""

    name: str
    file: str
    defines: tuple[tuple[str, str], ...]
    arch: str | None = None  # if it compiles for one architecture only
    shared: int = 0  # bytes of dynamic shared memory


def with_activation(kernel: Kernel, activation: str | None) -> Kernel:
    """The variant of a kernel with this activation, a struct of common/activation.cuh; the kernel itself for None."""
    return kernel._replace(defines=(*kernel.defines, ("ACTIVATION", activation.capitalize()))) if activation else kernel
