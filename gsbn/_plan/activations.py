"""The activations: their names, and the number that some of them take.

An activation is a name, or a name and its number, such as ("leaky_relu", 0.2). The kernels' structs have the names in
camel case (kernels/common/activation.cuh), `gsbn._activations` has the formulas in NumPy.
"""

from __future__ import annotations

from typing import Any

# The parameter if none is given, which is PyTorch's default; None: the activation takes none
PARAMETERS: dict[str, float | None] = {
    "relu": None,
    "leaky_relu": 0.01,
    "silu": None,
    "gelu": None,
    "gelu_tanh": None,
    "elu": 1.0,
}


def parts(activation: Any) -> tuple[str, float | None]:
    """The name of an activation, and its parameter if it takes one."""
    return (activation, PARAMETERS[activation]) if isinstance(activation, str) else activation


def macros(activation: Any) -> tuple[tuple[str, str], ...]:
    """What a kernel's variant with this activation is compiled with, beside its other macros."""
    name, parameter = parts(activation)
    struct = "".join(word.capitalize() for word in name.split("_"))
    return ("ACTIVATION", struct), *([] if parameter is None else [("ACTIVATION_PARAMETER", parameter.hex())])


def follows_from_y(activation: Any) -> bool:
    """Whether y alone tells the gradient: then a layer without a norm need not keep what was before the activation."""
    name, parameter = parts(activation)
    return name == "relu" or (name == "leaky_relu" and parameter is not None and parameter >= 0)


def title(activation: Any) -> str:
    """The activation in a message."""
    if activation is None:
        return "None"
    name, parameter = parts(activation)
    return name if parameter is None else f"{name} {parameter!r}"
