"""What a forward keeps for its backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._plan.problem import FEW_ROWS as FEW_ROWS
from ._plan.problem import SAVED_ROWS as SAVED_ROWS
from ._plan.problem import VECTOR_PARAMETERS as VECTOR_PARAMETERS
from ._plan.problem import deviations_dtype as deviations_dtype
from ._ranks.group import Group
from ._typing import Activation, Gemm, Precision


class Saved(NamedTuple):
    """What `forward(..., return_saved=True)` keeps for `gsbn.backward`: pass it on, once or several times.

    x and weight are the arrays that were given, not copies. Whoever changes them, or any array here, in place before
    the backward would get the gradients of something that never ran. Torch counts changes of a tensor, and the backward
    refuses an x or weight that has changed; of other arrays nothing notices.

    Attributes
    ----------
    x : (B, I) array
    weight : (O, I) array
    deviations : (B, P) array
        In training g - mean(g) in x's dtype, for float16 each feature in units of a power of two near its standard
        deviation, so that none overflows or vanishes; for 16-bit dtypes up to 16 rows in float64, since what
        normalisation leaves of so few would be lost otherwise. In inference g in float32 (float64 for float64). Rows
        are padded to 16 bytes: P >= O. On the CPU float32 for all but float64 (float64 up to 16 rows), in inference g
        less a centre, with an activation g itself, P = O. One that an earlier version pickled has none there: the
        backward makes them anew.
    vectors : (9, O) array
        Per-feature constants in float64.
    training : bool
    precision, gemm : str
        As they were given; the backward's products follow them.
    dtypes : tuple
        The dtypes of bias, scale, gamma and beta by name; None for an absent one.
    versions : tuple
        Torch's counts of changes of x and of weight; None for what has none.
    activation : str or None
        As it was given. The backward tells from `deviations` where it was flat: where rounding would carry one to the
        other side, its nearest neighbour on the right side is kept, so that this agrees with y in every element.
    scale_shape : tuple or None
        The shape of a scale of one element that serves all features, and so of its gradient.
    group : Group or None
        As it was given: the backward is a call of all ranks, too.
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

    def __reduce__(self) -> Any:
        return Saved, tuple(self._replace(versions=(None, None)))  # what is loaded or copied begins to count anew
