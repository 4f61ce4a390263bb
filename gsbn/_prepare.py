"""prepare: a weight in the form that the GEMM wants, made once and used by many calls."""

from __future__ import annotations

from . import _capture, _check, _declared, _kernels, _plan
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

    float32 at "highest" on Hopper is split into two float16 limbs (`docs/float32.md`), which spares every call 4 bytes
    read and 4 written for each element of the weight. Everything else is merely copied, so that code need not ask.

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
    device = kind.device(arrays["weight"])
    with on_device(device):
        prepared = Prepared(kind.copy(arrays["weight"]), precision)
        view = kind.view(prepared.weight)
        (n, k), stream = view.shape, kind.stream(device)
        if _plan.takes_limbs(view.dtype, precision, gpu := _kernels.gpu(device)):
            limbs = _plan.limbs(0, n, k, 0, gpu)
            owner, at = kind.scratch(limbs.w_exponents + 4 * n, prepared.weight)
            flags = _declared.flags(vector_w=view.pointer % 16 == 0 and k % 4 == 0)
            record = _declared.record(limbs.kernel, {"m": 0, "n": n, "k": k, "ldx": 0, "ldw": k, "flags": flags})
            prepared.limbs = owner, at + limbs.w, at + limbs.w_exponents
            words = (0, 0, 0, view.pointer, *prepared.limbs[1:])
            launch = _kernels.launcher(limbs.kernel, device, SPLIT_WORDS)
            launch(limbs.grid, _plan.THREADS, (record.ctypes.data,), words, stream)
        if is_capturing(stream):
            _capture.keep_alive(kind, stream, (prepared.weight, prepared.limbs and prepared.limbs[0]))
    if kind_of(weight) is None:
        hold_until_done(arrays, device)
    return prepared
