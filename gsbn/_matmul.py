"""matmul: the product of two matrices, by the GEMMs of the backward."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from . import _plan
from ._arrays import check
from ._arrays.dynamo import outside_graphs
from ._arrays.kinds import Kind
from ._host.call import matrix_of
from ._host.run import Arrays, Checked, Operation, Options, Views, call, checked, limited_at, views_of
from ._plan.backward_products import plan_product
from ._plan.program import Program
from ._typing import A, AnyArray, Array, Gemm, Precision

ARRAYS = ("a", "b")


@overload
def matmul(
    a: Array[A], b: AnyArray, *, precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None
) -> A: ...
@overload
def matmul(
    a: AnyArray, b: AnyArray, *, precision: Precision = "highest", gemm: Gemm = "auto", sms: int | None = None
) -> Any: ...
@outside_graphs
def matmul(
    a: Array[Any] | AnyArray,
    b: AnyArray,
    *,
    precision: Precision = "highest",
    gemm: Gemm = "auto",
    sms: int | None = None,
) -> Any:
    """Compute the matrix product ``a @ b``; in float32 on Hopper it runs on the tensor cores where that is faster.

    Such a product is the sum of three products of float16 numbers; its norm-wise error is smaller than that of an IEEE
    float32 product. Elsewhere cuBLAS computes the product, and on a CPU NumPy does.

    Parameters
    ----------
    a : (M, K) array
        float32, float16, bfloat16 or float64, of NumPy, CuPy, PyTorch or another DLPack producer; any strides.
    b : (K, N) array
        a's dtype, library and device, any strides.
    precision, gemm, sms
        As in `gsbn.forward`.

    Returns
    -------
    c : (M, N) array
        A new C-contiguous array of a's dtype and library.

    Raises
    ------
    TypeError, ValueError, RuntimeError, ImportError
        As `gsbn.forward`, for such arguments.

    Notes
    -----
    An element of c loses digits if its row of a, or its column of b, has an element that is 2^16 times larger than
    those which matter to it; ``gemm="cublas"`` keeps these digits.

    Examples
    --------
    >>> import numpy as np
    >>> import gsbn
    >>> gsbn.matmul(np.ones((2, 3), "f4"), np.ones((3, 4), "f4")).tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    return call(MATMUL, (a, b), (precision, gemm, sms))


def _views(kind: Kind, arrays: Arrays, options: Options, *_: Any) -> Views:
    views = views_of(kind, ARRAYS, arrays, ARRAYS)
    check.matmul_arguments(views, options)
    return views


def _program(views: Views, options: Options, gpu: _plan.Device, limits: _plan.Limits, *_: Any) -> Program | None:
    precision, gemm, sms = options
    a, b = views["a"], views["b"]
    assert a is not None and b is not None
    (m, k), n = a.shape, b.shape[1]
    if not m or not n:
        return None
    c = _plan.Matrix((n, 1), True)
    p = _plan.Matmul(m, n, k, a.dtype, gpu.at_most(sms), matrix_of(a), matrix_of(b).T, c, limits)
    return plan_product(p, precision, gemm)


def _result(kind: Kind, arrays: Arrays, options: Options, found: Checked | None, made: list[Any]) -> Any:
    a, b = arrays
    return kind.empty((a.shape[0], b.shape[1]), a) if found is None else made[0]


@np.errstate(all="ignore")
def _on_cpu(kind: Kind, arrays: Arrays, options: Options, read_only: frozenset[str], _: Any) -> Any:
    checked(MATMUL, kind, arrays, options, read_only)
    a, b = map(kind.numpy, arrays)
    wide = a.dtype if a.itemsize > 2 else np.dtype(np.float32)
    return kind.from_numpy(
        np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False)).astype(a.dtype, copy=False)
    )


MATMUL = Operation(
    name="matmul",
    arguments=ARRAYS,
    required=ARRAYS,
    foreign=2,
    aligned=(0, 1, 0, 0, 0),
    types=lambda options: (type(options[2]),),
    check=_views,
    program=_program,
    result=_result,
    on_cpu=_on_cpu,
    within=limited_at(2),
)
