"""The two products of the backward: from what the planner decided to the steps of a call."""

from __future__ import annotations

from . import _declared, _plan
from ._call import Call
from ._cublas import CublasGemm
from ._limbs import Limbs
from ._sm90 import Sm90Gemm

__all__ = ["add_parts", "multiply_both"]


def multiply_both(
    call: Call, plan: _plan.BackwardPlan, names: dict[str, str], precision: str, gpu: _plan.Device
) -> None:
    """dx = dg w and dweight = dgᵀ x, or what is wanted of them, and the limbs that they take.

    `names` are of the memory of "dg", of "transposed" (dg or its transpose, as dweight takes it), and of "x",
    "weight", "dx" and "dweight".
    """
    of_limbs = {name: names[name] for name in ("dg", "x", "weight", "dweight")}
    limbs = Limbs(call, plan.limbs, of_limbs, gpu, call.device, cleared=plan.sums)

    def multiply_weight(*, first: bool) -> None:
        if plan.weight is not None and plan.weight_first == first:
            # dx's launch has waited for dg; limbs may lie where dweight will, and two launches take more SMs
            dx = plan.x
            beside = not (first or gpu.limited) and dx is not None and dx.one is not None and not dx.of_limbs
            operands = (names["transposed"], names["x"], names["dweight"])
            _multiply(call, plan.weight, operands, limbs, "x", precision, beside=beside)

    multiply_weight(first=True)
    limbs.make()
    if plan.x is not None:
        _multiply(call, plan.x, (names["dg"], names["weight"], names["dx"]), limbs, "weight", precision)
    limbs.make(late=True)
    multiply_weight(first=False)


def _multiply(
    call: Call,
    product: _plan.Product,
    operands: tuple[str, str, str],
    limbs: Limbs,
    b: str,
    precision: str,
    *,
    beside: bool = False,
) -> None:
    """The step that makes c of a and b, of which these are the memory; a is dg, and b as the plan calls it."""
    p = product.p
    if product.one is not None and product.of_limbs:
        limbs.multiply(p, product.one, "dg", b, operands[-1])
    elif product.one is not None:
        call.multiply(Sm90Gemm(p, product.one, call.device, beside=beside), *operands)
    elif product.tall is not None:
        tall = product.tall
        fields = {"m": p.k, "n": p.m, "k": p.n, "lda": p.x.strides[1], "ldb": p.w.strides[1], "rows": tall.rows}
        fields |= {"flags": _declared.flags(vector_x=tall.whole_words)}
        of_dg, of_x, c = operands
        parts = call.lend(tall.parts.nbytes)
        call.launch(tall.kernel, tall.ctas, fields, {"a": of_dg, "b": of_x, "parts": parts}, _plan.TALL_THREADS)
        add_parts(call, tall.parts, parts, c, (p.m, p.n), p.dtype)
    elif product.kernel is None:
        cublas = CublasGemm(p, precision, call.device, wide=product.wide)
        call.multiply(cublas, *operands, call.lend(cublas.workspace))
    else:
        along = 0 if product.rows else 1  # narrow_product has b along what is summed over, gemm_tiled across
        size, ldw = _plan.ITEMSIZE[p.dtype], p.w.strides[along]
        whole = {"vector_w": p.w.aligned and ldw * size % 16 == 0, "vector_y": p.n * size % 16 == 0}
        fields = {"m": p.m, "n": p.n, "k": p.k, "ldx": max(p.x.strides), "ldw": ldw, "ldg": p.n}
        fields |= {"stats_rows": product.rows, "flags": _declared.flags(vector_x=True, **whole)}
        passed = dict(zip(("x", "w", "g"), operands, strict=True))
        call.launch(product.kernel, product.grid, fields, passed, product.block)


def add_parts(call: Call, parts: _plan.Parts, at: str, to: str, shape: tuple[int, int], dtype: str) -> None:
    """The step that adds up the parts of a matrix."""
    fields = {"n": shape[0], "k": shape[1], "pitch": parts.pitch, "size": parts.size, "number": parts.number}
    fields |= {"share": parts.share, "to_c": 8 + _declared.kind_code(dtype)}
    call.launch(parts.kernel, parts.grid, fields, {"parts": at, "c": to})
