"""prepare: convert a weight once to the form that the GEMM reads, for use by many calls."""

from __future__ import annotations

from typing import Any

from . import _plan
from ._arrays import check
from ._arrays.dynamo import outside_graphs
from ._arrays.kinds import Kind
from ._host.call import matrix_of
from ._host.run import Arrays, Operation, Options, Views, call, views_of
from ._plan import declared
from ._plan.products import SPLIT_WORDS
from ._plan.program import ABSENT, Builder, Program
from ._prepared import Prepared
from ._typing import AnyArray, Precision


@outside_graphs
def prepare(weight: AnyArray, precision: Precision = "highest") -> Prepared:
    """Prepare a weight for many calls of `forward`, which takes the result as its `weight` and then has less to do.

    On Hopper a float32 weight at "highest" is split into two float16 limbs (`docs/design/limbs.md`); this saves each
    call 4 bytes read and 4 bytes written per element of the weight. All other weights are only copied, so that the same
    code serves all of them.

    Parameters
    ----------
    weight : (O, I) array
        float32, float16, bfloat16 or float64; any array that `forward` takes, any strides.
    precision : {"highest", "high"}
        The `precision` of the calls of `forward`.

    Returns
    -------
    Prepared
        A copy of weight on its device. **Later changes of weight do not change it**: prepare again after each step of
        an optimiser. It takes as many bytes as weight; with limbs, twice as many.

    Raises
    ------
    TypeError
        The weight is not an array, is prepared already, or has a dtype that is not supported.
    ValueError
        A shape, device or precision that is not supported.
    RuntimeError
        A torch tensor that requires grad while grad mode is on.

    Notes
    -----
    Asynchronous on the current stream of weight's library, as `forward`. Work on another stream must wait for it.

    Examples
    --------
    >>> import numpy as np
    >>> import gsbn
    >>> prepared = gsbn.prepare(np.ones((32, 64), np.float32))
    >>> gsbn.forward(np.ones((256, 64), np.float32), prepared, training=True).shape
    (256, 32)
    """
    if isinstance(weight, Prepared):
        raise TypeError("weight: expected an array, got one that is prepared already")
    return call(PREPARE, (weight,), (precision,))  # type: ignore[no-any-return]


def _views(kind: Kind, arrays: Arrays, options: Options, *_: Any) -> Views:
    views = views_of(kind, ("weight",), arrays, ("weight",))
    check.prepare_arguments(views, precision=options[0])
    return views


def _program(views: Views, options: Options, gpu: _plan.Device, *_: Any) -> Program:
    view = views["weight"]
    assert view is not None
    (n, k), build = view.shape, Builder(gpu)
    at = _plan.in_rows(k, view.itemsize)
    copied = build.operand("weight", (n, k), matrix_of(view), at, view.dtype)
    build.copy()
    if _plan.takes_limbs(view.dtype, options[0], gpu):
        limbs = _plan.limbs_of_rows(0, n, k, 0, gpu)
        fields = {"m": 0, "n": n, "k": k, "ldx": 0, "ldw": at.strides[0], "flags": declared.flags(vector_w=True)}
        # "float32" stands for words of 32 bits
        words = {"w": copied, "w_limbs": build.make("limbs", (n, limbs.pitch), "float32")}
        words |= {"w_exponents": build.make("exponents", (n,), "float32")}
        build.launch(limbs.kernel, limbs.grid, fields, dict.fromkeys(SPLIT_WORDS, ABSENT) | words)
    return build.program("prepare", "")


def _result(kind: Kind, arrays: Arrays, options: Options, found: Any, made: list[Any]) -> Prepared:
    prepared = Prepared(made[0][:, : arrays[0].shape[1]], options[0])
    if len(made) > 1:
        prepared.limbs = made, kind.pointer(made[1]), kind.pointer(made[2])
    return prepared


def _on_cpu(kind: Kind, arrays: Arrays, options: Options, *_: Any) -> Prepared:
    _views(kind, arrays, options)
    return Prepared(kind.copy(arrays[0]), options[0])


PREPARE = Operation(
    name="prepare",
    arguments=("weight",),
    required=("weight",),
    foreign=1,
    check=_views,
    program=_program,
    result=_result,
    on_cpu=_on_cpu,
)
