"""One correct rounding from a wide dtype to a narrow one, for the reference and for the results of a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[Any]


@np.errstate(all="ignore")
def round_to(a: ArrayLike, dtype: DTypeLike) -> Array:
    """Convert ``a`` to another floating dtype, with one rounding to nearest even; overflow gives infinity, no warning.

    Parameters
    ----------
    a : array_like
        Numbers in float64 or ``np.longdouble``.
    dtype : dtype
        float64, float32, float16 or ``ml_dtypes.bfloat16``.

    Returns
    -------
    array of ``dtype``

    Notes
    -----
    To convert float64 to bfloat16, ``ml_dtypes`` first rounds to float32; to convert ``longdouble`` to float16, NumPy
    first rounds to float64. Two roundings can give a wrong result (``1 + 2⁻⁸ + 2⁻⁴⁰`` would become 1). This function
    converts to a 16-bit dtype through a float32 that is rounded *to odd*: truncated, with the last bit set if
    the value was not exact. Such a float32 is halfway between two numbers of the 16-bit dtype only if ``a`` is (Boldo
    and Melquiond 2008: two more bits than the target suffice).

    Examples
    --------
    >>> import numpy as np
    >>> from gsbn import reference
    >>> float(reference.round_to(2049.0, np.float16))
    2048.0
    """
    a, dtype = np.asarray(a), np.dtype(dtype)
    if dtype.itemsize > 2:
        return a.astype(dtype)
    odd = a.astype(np.float32)
    inexact = odd != a
    np.nextafter(odd, np.float32(0), out=odd, where=np.abs(odd) > np.abs(a))
    bits = odd.view(np.uint32)
    bits |= inexact
    return odd.astype(dtype)
