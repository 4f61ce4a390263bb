"""``gsbn.matmul``: within the bound of any product, and in float32 on a GPU more accurate than cuBLAS."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gsbn
from gsbn import reference
from tests.support.harness import (
    CPU_KINDS,
    DTYPES,
    GPU_KINDS,
    LAYOUTS,
    Kind,
    assert_same_bits,
    kind_of,
    place,
    poisoned_allocations,
)
from tests.support.tolerance import TF32, arithmetic, assert_within, norm_error, roundoff

LIMBS = 2.0**-21  # of a row's, and a column's, largest element: what two float16 numbers leave of it
Shape = tuple[int, int, int]  # M, K, N


def operands(shape: Shape, dtype: str, seed: int = 0, mean: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    (M, K, N), rng = shape, np.random.default_rng(seed)
    a, b = rng.standard_normal((M, K)) + mean, rng.standard_normal((K, N)) / K**0.5
    return reference.round_to(a, DTYPES[dtype]), reference.round_to(b, DTYPES[dtype])


def check(kind: Kind, a: np.ndarray, b: np.ndarray, layouts: Any = ("C", "C"), **options: Any) -> np.ndarray:
    """The product, twice, with both operands between guards; within K u |a| |b|, and limbs' rounding of rows."""
    placed = [place(kind, array, layout) for array, layout in zip((a, b), layouts, strict=True)]
    made = []
    for _ in range(2):
        with poisoned_allocations(kind):
            c = gsbn.matmul(*(each.view for each in placed), **options)
        assert type(c) is type(placed[0].view)
        assert c.dtype == placed[0].view.dtype
        made.append(kind.get(c))
    assert not any(each.disturbed(kind) for each in placed)
    assert_same_bits(*made)
    assert made[0].shape == (len(a), b.shape[1])
    if not made[0].size:
        return made[0]
    wide = np.longdouble if a.dtype == np.float64 else np.float64
    of_a, of_b = a.astype(wide), b.astype(wide)
    truth, sizes = of_a @ of_b, abs(of_a) @ abs(of_b)
    limit = (a.shape[1] + 2) * arithmetic(a.dtype) * sizes + roundoff(a.dtype) * abs(truth)
    if a.itemsize == 4:
        tf32 = 2 * TF32 * sizes if options.get("precision") == "high" else 0.0
        largest = abs(of_a).max(1, keepdims=True) * abs(of_b).sum(0) + abs(of_a).sum(1, keepdims=True) * abs(of_b).max(
            0
        )
        limit = limit + tf32 + LIMBS * largest
    assert_within(made[0], truth, limit + 1e-7 * (a.dtype == np.float16), "c")
    return made[0]


@pytest.mark.parametrize("name", [*CPU_KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS)])
@given(
    shape=st.tuples(st.integers(0, 70), st.integers(1, 140), st.integers(0, 70)),
    dtype=st.sampled_from(list(DTYPES)),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
)
def test_any_call(name: str, shape: Shape, dtype: str, layouts: Any) -> None:
    check(kind_of(name), *operands(shape, dtype), layouts)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", [("C", "C"), ("F", "C"), ("C", "F"), ("F", "F"), ("unaligned", "strided")])
@pytest.mark.parametrize("gemm", ["auto", "cublas", "tiled", "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_path_on_a_gpu(dtype: str, gemm: str, layouts: Any) -> None:
    if gemm == "sm90" and dtype == "float64":
        gemm = "auto"
    for shape in ((300, 520, 264), (129, 1031, 77), (5000, 64, 40), (2100, 1100, 41)):
        check(kind_of("cupy"), *operands(shape, dtype), layouts, gemm=gemm)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize(
    "shape", [(2048, 2048, 2048), (4096, 300, 1000), (100000, 64, 128), (20000, 1024, 64), (64, 8192, 4096)]
)
def test_is_as_accurate_as_cublas(shape: Shape, mean: float, precision: str) -> None:
    """At most 1.1 times the norm-wise error of cuBLAS' IEEE product, and half a unit in the last place."""
    a, b = operands(shape, "float32", mean=mean)
    truth = a.astype(np.float64) @ b.astype(np.float64)
    kind = kind_of("cupy")
    errors = [norm_error(check(kind, a, b, gemm=gemm, precision=precision), truth) for gemm in ("auto", "cublas")]
    assert errors[0] <= 1.1 * errors[1] + 2.0**-25, errors


A, B = np.ones((4, 3), "f4"), np.ones((3, 2), "f4")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((A, B.T), {}, ValueError, r"^b: expected 3 rows to match a \(4, 3\)"),
        ((A[0], B), {}, ValueError, r"^a: expected 2 dimensions"),
        ((A, B[:, 0]), {}, ValueError, r"^b: expected 2 dimensions"),
        ((A[:, :0], B[:0]), {}, ValueError, r"^a: expected at least one column"),
        ((A, B.astype("f8")), {}, TypeError, r"^b: expected a's dtype float32"),
        ((A.astype("i4"), B.astype("i4")), {}, TypeError, r"^a: expected dtype float32"),
        ((A, [[1.0]]), {}, TypeError, r"^b: expected a NumPy array like a"),
        ((None, B), {}, TypeError, r"^a: expected an array"),
        ((A, B), {"precision": "low"}, ValueError, r"^precision: expected one of"),
        ((A, B), {"gemm": "sm90"}, ValueError, r"^gemm: expected 'auto'"),
        ((A, B), {"sms": 0}, ValueError, r"^sms: expected at least 1"),
    ],
)
def test_errors(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    for _ in range(2):
        with pytest.raises(error, match=message):
            gsbn.matmul(*arguments, **options)
