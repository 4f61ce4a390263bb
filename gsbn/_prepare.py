"""prepare: a weight in the form that the GEMM wants, made once and used by many calls."""

from __future__ import annotations

from . import _check, _declared, _kernels, _plan
from ._call import ABSENT, Call
from ._copies import copied, move
from ._device import hold_until_done, is_capturing, on_device
from ._dynamo import outside_graphs
from ._interop import kind_of, kinds_of
from ._limbs import SPLIT_WORDS
from ._prepared import Prepared
from ._typing import AnyArray, Precision

__all__ = ["prepare"]


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
    kind, arrays, _ = kinds_of({"weight": weight}, ("weight",))
    _check.prepare_arguments(kind.view(arrays["weight"]), precision=precision)
    if not kind.on_gpu:
        return Prepared(kind.copy(arrays["weight"]), precision)
    device, given = kind.device(arrays["weight"]), arrays["weight"]
    with on_device(device, kind.stream):
        view, gpu, stream = kind.view(given), _kernels.gpu(device), kind.stream(device)
        (n, k), call = view.shape, Call(kind, device, ("weight",))
        at = _plan.in_rows(k, view.itemsize)
        copy = copied(call, "weight", view, at, given)
        move(call, [copy], gpu)
        words = {"w": copy.to}
        takes_limbs = _plan.takes_limbs(view.dtype, precision, gpu)
        if takes_limbs:
            limbs = _plan.limbs_of_rows(0, n, k, 0, gpu)
            fields = {"m": 0, "n": n, "k": k, "ldx": 0, "ldw": at.strides[0], "flags": _declared.flags(vector_w=True)}
            # In words of 32 bits, which is all that an allocator need know of them.
            words["w_limbs"] = call.make("limbs", (n, limbs.pitch), given, "float32")
            words["w_exponents"] = call.make("exponents", (n,), given, "float32")
            call.launch(limbs.kernel, limbs.grid, fields, dict.fromkeys(SPLIT_WORDS, ABSENT) | words)
        made = call.run(given, [view.pointer], stream, is_capturing(stream))
    prepared = Prepared(made[0][:, :k], precision)
    if takes_limbs:
        prepared.limbs = made, kind.pointer(made[1]), kind.pointer(made[2])
    if kind_of(weight) is None:
        hold_until_done(arrays, device)
    return prepared
