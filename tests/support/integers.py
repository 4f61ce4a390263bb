"""Arrays of small integers, whose products are exact in any order."""

from __future__ import annotations

from typing import Any

import numpy as np

from gsbn._arrays.kinds import kind_of
from gsbn._backward import How, run
from gsbn._plan import Limits
from tests.support.harness import ANY, DTYPES


def integers(shape: tuple[int, int], dtype: str) -> Any:
    """A CuPy array of integers from -3 to 3."""
    import cupy

    rng = np.random.default_rng(shape[0] + shape[1])
    return cupy.array(rng.integers(-3, 4, shape).astype(DTYPES[dtype]))


def assert_products_are_exact(
    shape: tuple[int, int, int], dtype: str, gemm: str, *, wide: bool, limits: Limits = ANY
) -> None:
    """Check dx = dg w and dweight = dgᵀ x of so many rows, inputs and features. `wide`: dweight is float32."""
    import cupy

    rows, inputs, features = shape
    x, weight, dg = (integers(of, dtype) for of in ((rows, inputs), (features, inputs), (rows, features)))
    exact = [cupy.asnumpy(a).astype(np.float64) for a in (x, weight, dg)]
    dx, dweight = exact[2] @ exact[1], exact[2].T @ exact[0]
    how = How(True, "highest", gemm, (None,) * 4, None, None, None, ("x", "weight"), norm=False)._replace(wide=wide)
    found, _ = run(kind_of(x), (dg, x, weight, None, None, None), how, limits=limits)
    got = [cupy.asnumpy(gradient) for gradient in found[:2]]
    assert got[1].dtype == (np.float32 if wide else DTYPES[dtype])
    np.testing.assert_array_equal(got[1], dweight.astype(got[1].dtype))
    np.testing.assert_array_equal(got[0], dx.astype(got[0].dtype))
