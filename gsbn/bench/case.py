"""What is measured: a shape, a dtype, a mode and a direction; and named lists of shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from .._plan import ITEMSIZE
from .._plan.activations import title
from .._typing import Activation, Precision
from .._values import choice

DTYPES: dict[str, tuple[str, Precision]] = {  # what a user asks for: (dtype of the arrays, precision)
    "float32": ("float32", "highest"),
    "tf32": ("float32", "high"),
    "bfloat16": ("bfloat16", "highest"),
    "float16": ("float16", "highest"),
    "float64": ("float64", "highest"),
}
GEMMS_BY_DIRECTION = {"forward": 1, "backward": 2, "step": 3}  # a step is a forward and its backward


def _sweep() -> list[tuple[int, int, int]]:
    """One of the three sizes runs over powers of two and their neighbours, the other two stay at 2048."""
    sizes = [p + d for p in (64, 256, 1024, 4096, 16384) for d in (-1, 0, 1)]
    return [(n, 2048, 2048) for n in sizes] + [(2048, n, 2048) for n in sizes] + [(2048, 2048, n) for n in sizes]


_MANY = [
    (65536, 1024, 1024), (65536, 256, 512), (380000, 768, 512), (100000, 512, 512), (802816, 128, 128),
    (200704, 384, 768), (1000000, 32, 32), (50000, 64, 1024), (131071, 96, 200),
]  # fmt: skip
_FEW = [
    (512, 16384, 1024), (128, 1024, 512), (64, 16384, 1024), (128, 8192, 8192), (8, 4096, 11008), (32, 2048, 8192),
    (64, 8192, 8192), (256, 2048, 8192), (256, 256, 256), (512, 512, 128), (777, 1111, 2222), (2048, 2047, 2047),
    (5000, 999, 1001), (1024, 8192, 8192),
]  # fmt: skip
PRESETS: dict[str, list[tuple[int, int, int]]] = {
    "kernelbench": [(1024, 8192, 8192), (16384, 4096, 4096), (4096, 1024, 1024), (128, 1024, 512)],
    "small": [(32, 256, 256), (128, 1024, 512), (256, 512, 1024), (1000, 300, 500)],
    "many": _MANY,
    "few": _FEW,
    "sweep": _sweep(),
}


@dataclass(frozen=True)
class Case:
    """One call that is measured; its operands are random, and have every vector and statistic.

    Attributes
    ----------
    batch, in_features, out_features : int
        B, I and O: x is (B, I), the weight (O, I), and y (B, O).
    dtype : {"float32", "float16", "bfloat16", "float64"}
    precision : {"highest", "high"}
        As of `gsbn.forward`; "high" is TF32 for float32.
    training : bool
        Statistics of the batch (True) or the running ones (False).
    direction : {"forward", "backward", "step"}
        "backward" is all gradients of such a forward; a "step" is a forward and its backward.
    activation : str, tuple or None
        As of `gsbn.forward`.
    scale : bool
        False leaves the scale out, and so its gradient.

    >>> Case(1024, 8192, 8192, "bfloat16").title
    '(1024, 8192, 8192) bfloat16 training'
    """

    batch: int
    in_features: int
    out_features: int
    dtype: str = "float32"
    precision: Precision = "highest"
    training: bool = True
    direction: str = "forward"
    activation: Activation | None = None
    scale: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.in_features, self.out_features

    @property
    def kind(self) -> str:
        """The name of dtype and precision together: a key of ``DTYPES``."""
        return "tf32" if self.dtype == "float32" and self.precision == "high" else self.dtype

    @property
    def title(self) -> str:
        direction = "" if self.direction == "forward" else f", {self.direction}"
        return f"{self.shape} {self.kind} {'training' if self.training else 'inference'}{self.variant}{direction}"

    @property
    def variant(self) -> str:
        """How the layer differs from the plain one, such as ", relu, no scale"; empty if it does not."""
        return (f", {title(self.activation)}" if self.activation else "") + ("" if self.scale else ", no scale")

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products: two for a multiplication and an addition."""
        return GEMMS_BY_DIRECTION[self.direction] * 2 * self.batch * self.in_features * self.out_features

    @property
    def least_bytes(self) -> int:
        """The fewest bytes that can be read and written.

        A forward reads x, weight, vectors and running statistics once; it writes y, and in training the statistics. A
        backward reads x, weight, dy and the deviations, and writes the gradients. A step has as many bytes as a
        backward: it also writes y, but need not save anything. A backward that computes g again reads no deviations.
        """
        b, i, o = self.shape
        if self.direction != "forward":
            vectors = 12 if self.scale else 10
            return (2 * (b * i + o * i) + 2 * b * o + vectors * o) * ITEMSIZE[self.dtype]
        vectors = (8 if self.training else 6) - (not self.scale)
        return (b * i + o * i + b * o + vectors * o) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class ModelCase:
    """A training step of a stack of layers without bias: their widths, the number of rows, and the dtype (bfloat16 is
    autocast over float32). `head` names a class of `_heads` that is made of the widths instead. With `spatial`, (L,)
    or (H, W), the layers are 1×1 convolutions, and each pixel of a sample is a row; `channels_last` is how x lies."""

    widths: tuple[int, ...]
    rows: int
    kind: str
    head: str = ""
    spatial: tuple[int, ...] = ()
    channels_last: bool = False

    @property
    def layers(self) -> str:
        """The model in few characters: equal layers are counted."""
        if self.head:
            return f"{self.head} {', '.join(map(str, self.widths))}"
        if self.spatial:
            sizes = " × ".join(map(str, self.spatial))
            return f"{'→'.join(map(str, self.widths))} at {sizes}{', channels last' * self.channels_last}"
        first, *rest = self.widths
        if len(rest) > 3 and len(set(self.widths)) == 1:
            return f"{len(rest)} × {first}"
        return "→".join(map(str, self.widths))

    @property
    def title(self) -> str:
        return f"{self.layers}, {self.rows} rows, {self.kind}"


def cases(
    shapes: str | Iterable[tuple[int, int, int]] = "kernelbench",
    dtypes: Iterable[str] = ("float32", "tf32", "bfloat16", "float16"),
    training: Iterable[bool] = (True,),
    directions: Iterable[str] = ("forward",),
    activation: Activation | None = None,
    scale: bool = True,
) -> list[Case]:
    """Every combination of these shapes, dtypes, modes and directions.

    Parameters
    ----------
    shapes : str or iterable of (B, I, O)
        The name of a preset, a key of `PRESETS`, or sizes.
    dtypes : iterable of str
        Keys of `DTYPES`.
    training : iterable of bool
    directions : iterable of {"forward", "backward", "step"}
    activation, scale
        As of `Case`, for all of them.

    Raises
    ------
    ValueError, TypeError
        For another preset, dtype or direction; where one is no string.

    >>> [case.kind for case in cases([(8, 4, 3)], ["tf32", "bfloat16"])]
    ['tf32', 'bfloat16']
    """
    if isinstance(shapes, str):
        choice("shapes", shapes, tuple(PRESETS))
    dtypes, directions = list(dtypes), list(directions)
    for name in dtypes:
        choice("dtypes", name, tuple(DTYPES))
    for name in directions:
        choice("directions", name, tuple(GEMMS_BY_DIRECTION))
    chosen = PRESETS[shapes] if isinstance(shapes, str) else list(shapes)
    rest = list(itertools.product(dtypes, training, directions))
    return [Case(*shape, *DTYPES[name], mode, way, activation, scale) for shape in chosen for name, mode, way in rest]
