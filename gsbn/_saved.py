"""Saved: what a forward keeps for its backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._arrays.kind import Kind
from ._plan.problem import FEW_ROWS as FEW_ROWS
from ._plan.problem import RENORM_ROWS as RENORM_ROWS
from ._plan.problem import SAVED_ROWS as SAVED_ROWS
from ._plan.problem import VECTOR_PARAMETERS as VECTOR_PARAMETERS
from ._plan.problem import deviations_dtype as deviations_dtype
from ._ranks.group import Group
from ._typing import Activation, Gemm, Precision


class Saved(NamedTuple):
    """What `forward(..., return_saved=True)` keeps for `gsbn.backward`, which may be called several times with it.

    `linear` also keeps one. Its `vectors` are None. Its `deviations` are y or, if the gradient does not follow from y,
    the argument of the activation; without an activation they are None.

    x and weight are the arrays of the call, not copies. If one of the arrays here is changed in place before the
    backward, the gradients are wrong. Torch counts the changes of a tensor, so the backward raises for a torch x or
    weight that has changed; it cannot detect changes of other arrays.

    Attributes
    ----------
    x : (B, I) array
    weight : (O, I) array
    deviations : (B, P) array
        On a GPU in training: g - mean(g) in x's dtype. In 16 bits 0 takes the place of the mean where that is below the
        standard deviation, so that a row far from all others, which moves the mean, does not cost them their digits.
        float16 deviations are divided, per feature, by a power of two near the standard deviation, so that none
        overflows or underflows. With up to 16 rows (in a ghost batch) 16-bit dtypes use float64: with so few rows,
        normalisation cancels most of the values, and 16 bits would lose the rest.
        Shape (B, 0) on a Hopper GPU for many short rows in 16 bits: the backward then computes g again from x and
        weight, which takes less time than storing and reading the deviations, and does not round them.
        On a GPU in inference: g in float32 (float64 for float64). Rows are padded to 16 bytes: P >= O.
        On the CPU: float32 (float64 for float64 and up to 16 rows), P = O; in inference g minus a constant per feature
        or, with an activation, g itself.
    vectors : (9, O) array
        Per-feature constants in float64; (10, O) without deviations; (11, O) with renorm; (groups, 9, P) with groups
        above 1, with the P of the deviations.
    training : bool
    precision, gemm : str
        As given to the forward; they also apply to the products of the backward.
    dtypes : tuple
        The dtypes of bias, scale, gamma and beta by name; None for an absent one.
    versions : tuple
        Torch's counts of changes of x and of weight; None for an array without one.
    activation : str, tuple or None
        As given to the forward. The backward computes the activation's derivative from `deviations`. Where rounding
        would move a deviation across a jump of the derivative, the nearest number on the correct side is stored
        instead, so that the backward agrees with y in every element.
    scale_shape : tuple or None
        The shape of a scale of one element that serves all features, and of its gradient.
    group : Group or None
        As given to the forward: all its ranks must call the backward, too.
    groups : int
        As given to the forward; 1 in inference.
    residual : bool
        Whether the forward had a residual. The deviations are then those of a forward without an activation.
    kept : (B, O) array or None
        With a residual and an activation, the array from which the activation's gradient follows: y itself ("relu", and
        "leaky_relu" with a slope of at least 0), else the argument of the activation, in x's dtype.
    """

    x: Any
    weight: Any
    deviations: Any
    vectors: Any
    training: bool
    precision: Precision
    gemm: Gemm
    dtypes: tuple[str | None, str | None, str | None, str | None]
    versions: tuple[int | None, int | None] = (None, None)
    activation: Activation | None = None
    scale_shape: tuple[int, ...] | None = None
    group: Group | None = None
    groups: int = 1
    residual: bool = False
    kept: Any = None

    def __copy__(self) -> Saved:
        return self  # it has the same tensors, so their counts hold

    def __reduce__(self) -> Any:
        return Saved, tuple(self._replace(versions=(None, None)))  # a copied or loaded tensor has its own count


def saved_of(
    kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], deviations: Any, vectors: Any, of_vectors: Any,
    kept: Any = None,
) -> Saved:  # fmt: skip
    """What a forward with these arrays and options saves; both are in the order of `forward`. `of_vectors` is what
    `vectors_of` returns. `kept` matters with a residual and an activation."""
    training, _, _, precision, gemm, _, _, activation, group, _, groups, _ = options
    x, weight, adds, (dtypes, scale_shape) = arrays[0], arrays[1], arrays[-2] is not None, of_vectors
    versions = kind.version(x), kind.version(weight)
    of_call = bool(training), precision, gemm, dtypes, versions, activation, scale_shape, group, int(groups), adds
    kept = kept if adds and activation is not None else None
    return Saved._make((x, weight, deviations, vectors, *of_call, kept))  # quicker than the constructor


def vectors_of(kind: Kind, arrays: tuple[Any, ...]) -> tuple[tuple[str | None, ...], tuple[int, ...] | None]:
    """The `dtypes` and the `scale_shape` of Saved."""
    _, weight, scale, bias, gamma, beta, *_ = arrays
    dtypes = tuple(None if array is None else kind.dtype(array) for array in (bias, scale, gamma, beta))
    return dtypes, scale_shape(scale, weight.shape[0])


def scale_shape(scale: Any, features: int) -> tuple[int, ...] | None:
    """The shape of a scale that serves all features; None for a scale per feature, or none."""
    return None if scale is None or tuple(scale.shape) == (features,) else tuple(scale.shape)


def check_versions(kind: Kind, saved: Saved | None) -> None:
    """Raise, as autograd does, if x or weight was changed in place since the forward."""
    if saved is None or saved.versions == (kind.version(saved.x), kind.version(saved.weight)):
        return
    for name, expected in zip(("x", "weight"), saved.versions, strict=True):
        if expected is not None and (found := kind.version(getattr(saved, name))) != expected:
            raise RuntimeError(
                f"{name}: modified by an inplace operation since the forward: it is at version {found}, expected "
                f"version {expected}"
            )
