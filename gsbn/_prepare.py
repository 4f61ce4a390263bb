"""prepare: a weight in the form that the GEMM wants, made once and used by many calls."""

from __future__ import annotations

from typing import Any

from . import _plan
from ._arrays import check
from ._arrays.dynamo import outside_graphs
from ._arrays.kinds import Kind, kinds_of
from ._host.call import matrix_of
from ._host.run import Operation, Views, call
from ._plan import declared
from ._plan.products import SPLIT_WORDS
from ._plan.program import ABSENT, Builder, Program
from ._prepared import Prepared
from ._typing import AnyArray, Precision


@outside_graphs
def prepare(weight: AnyArray, precision: Precision = "highest") -> Prepared:
    """Make a weight ready for `forward`, which takes the result in the weight's place and then has less to do.

    float32 at "highest" on Hopper is split into two float16 limbs (`docs/design/limbs.md`), which spares every call
    4 bytes read and 4 written for each element of the weight. Everything else is merely copied, so that code need not
    ask.

    Parameters
    ----------
    weight : (O, I) array
        float32, float16, bfloat16 or float64, of any kind that `forward` takes, any strides.
    precision : {"highest", "high"}
        What `forward` will be called with.

    Returns
    -------
    Prepared
        Owns a copy on weight's device: **later changes of weight do not reach it**; prepare anew after a step of an
        optimiser. It takes the weight's own bytes and, for limbs, as many again.

    Raises
    ------
    TypeError
        No array, or of a dtype that is not allowed.
    ValueError
        A shape, device or precision that is not allowed.
    RuntimeError
        A torch tensor that requires grad while grad mode is on.

    Notes
    -----
    Asynchronous on the current stream of weight's library, as `forward`. Work on another stream must wait for it.
    """
    if isinstance(weight, Prepared):
        raise TypeError("weight: expected an array, got one that is prepared already")
    return call(PREPARE, (weight,), (precision,))  # type: ignore[no-any-return]


def _views(kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], *_: Any) -> Views:
    kinds_of({"weight": arrays[0]}, ("weight",))
    view = kind.view(arrays[0])
    check.prepare_arguments(view, precision=options[0])
    return {"weight": view}


def _program(views: Views, options: tuple[Any, ...], gpu: _plan.Device, *_: Any) -> Program:
    view = views["weight"]
    assert view is not None
    (n, k), build = view.shape, Builder(gpu)
    at = _plan.in_rows(k, view.itemsize)
    copy = build.copied("weight", (n, k), matrix_of(view), at, view.dtype)
    build.copy([copy])
    if _plan.takes_limbs(view.dtype, options[0], gpu):
        limbs = _plan.limbs_of_rows(0, n, k, 0, gpu)
        fields = {"m": 0, "n": n, "k": k, "ldx": 0, "ldw": at.strides[0], "flags": declared.flags(vector_w=True)}
        # In words of 32 bits, which is all that an allocator need know of them.
        words = {"w": copy.to, "w_limbs": build.make("limbs", (n, limbs.pitch), "float32")}
        words |= {"w_exponents": build.make("exponents", (n,), "float32")}
        build.launch(limbs.kernel, limbs.grid, fields, dict.fromkeys(SPLIT_WORDS, ABSENT) | words)
    return build.program("prepare", "")


def _result(kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], found: Any, made: list[Any]) -> Prepared:
    prepared = Prepared(made[0][:, : arrays[0].shape[1]], options[0])
    if len(made) > 1:
        prepared.limbs = made, kind.pointer(made[1]), kind.pointer(made[2])
    return prepared


def _on_cpu(kind: Kind, arrays: tuple[Any, ...], options: tuple[Any, ...], *_: Any) -> Prepared:
    _views(kind, arrays, options)
    return Prepared(kind.copy(arrays[0]), options[0])


PREPARE = Operation(
    name="prepare",
    arguments=("weight",),
    required=("weight",),
    foreign=1,
    aligned=(0, 0, 0),
    numeric=(),
    check=_views,
    program=_program,
    returns=lambda program, views, options: None,
    result=_result,
    on_cpu=_on_cpu,
)
