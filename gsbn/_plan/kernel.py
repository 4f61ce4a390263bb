"""What names a compiled variant of a kernel."""

from __future__ import annotations

from typing import NamedTuple, get_args

from .._typing import Activation

__all__ = ["ACTIVATIONS", "Kernel", "with_activation"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)


class Kernel(NamedTuple):
    """One compiled variant: the function of this name in kernels/<file>.cu, compiled with these macros."""

    name: str
    file: str
    defines: tuple[tuple[str, str], ...]
    arch: str | None = None  # where only one will do
    shared: int = 0  # bytes of dynamic shared memory


def with_activation(kernel: Kernel, activation: str | None) -> Kernel:
    """The variant of a kernel that knows this activation, a struct of common/activation.cuh; itself for None."""
    return kernel._replace(defines=(*kernel.defines, ("ACTIVATION", activation.capitalize()))) if activation else kernel
