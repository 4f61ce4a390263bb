"""Lists the activations: their names, and the number that some of them take.

An activation is a name, or a name and its number, such as ("leaky_relu", 0.2). The kernels' structs have the names in
camel case (kernels/common/activation.cuh), `gsbn._activations` has the formulas in NumPy.
"""

from __future__ import annotations

from typing import Any

# The parameter that is used if the caller gives none: PyTorch's default. None: the activation takes no parameter.
PARAMETERS: dict[str, float | None] = {
    "relu": None,
    "leaky_relu": 0.01,
    "silu": None,
    "gelu": None,
    "gelu_tanh": None,
    "elu": 1.0,
}


def name_and_number(activation: Any) -> tuple[str, float | None]:
    """Return the name of an activation, and its parameter or None if it takes none."""
    return (activation, PARAMETERS[activation]) if isinstance(activation, str) else activation


def macros(activation: Any) -> tuple[tuple[str, str], ...]:
    """Return the macros that compile a kernel with this activation; the kernel's other macros come in addition."""
    name, parameter = name_and_number(activation)
    struct = "".join(word.capitalize() for word in name.split("_"))
    return ("ACTIVATION", struct), *([] if parameter is None else [("ACTIVATION_PARAMETER", parameter.hex())])


def follows_from_y(activation: Any) -> bool:
    """Return whether y alone tells the gradient. A layer without a norm then need not keep the activation's input."""
    name, parameter = name_and_number(activation)
    return name == "relu" or (name == "leaky_relu" and parameter is not None and parameter >= 0)


def title(activation: Any) -> str:
    """Return the text that names the activation in a message."""
    if activation is None:
        return "None"
    name, parameter = name_and_number(activation)
    return name if parameter is None else f"{name} {parameter!r}"
