"""The plan of a backward call: its passes, its two products and the layout of its workspace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .backward_passes import cut_passes, dy_on_words
from .backward_products import choose_product, multiply_both, split_limbs_of
from .copies import in_rows
from .declared import kind_code
from .dual_gemm import dual_gemm_for, multiply_at_once
from .problem import ITEMSIZE, VECTOR_PARAMETERS, Matmul, Matrix, Ranks, deviations_dtype, letters, posts_at, round_up
from .products import reduce_split_k
from .program import ABSENT, Builder, Program, nbytes_of, place
from .skinny import skinny_backward
from .variants import column_sums


class Vectors(NamedTuple):
    """Gradients of vectors: the dtype of each by name, and the shape of the scale if it has one element."""

    dtypes: Mapping[str, str]
    scale_shape: tuple[int, ...] | None = None


def plan_backward(
    p: Matmul,
    *,
    training: bool,
    needs: tuple[str, ...],
    vectors: Vectors | None = None,
    precision: str = "highest",
    gemm: str = "auto",
    activation: str | None = None,
    norm: bool = True,
    linear: bool = True,
    wide: bool = False,
    in_place: bool = False,
    ranks: Ranks | None = None,
    ld_saved: int | None = None,
) -> Program:
    """Plan a backward call. `p` is the forward's, with dy for y; if ranks share the batch it may have no rows.

    A call has two stages, and may skip one: `norm` computes dg and the gradients of vectors from dy, `linear` the two
    products from dg. Without `norm`, y is the dg that the caller gives: its rows start on 16 bytes, and it is not
    written. `wide`: dw is float32 although the operands have 16 bits. `in_place`: dg overwrites the deviations, in rows
    of `ld_saved`. With `ranks`, the sums of the other ranks arrive during a launch that waits for them, or between two.

    Raises ValueError that names `gemm` if the one chosen in the forward cannot serve the call.
    """
    m, p = p.m, p._replace(m=max(p.m, 1))
    n, k, dtype, device, dy = p.n, p.k, p.dtype, p.device, p.y
    size = ITEMSIZE[dtype]
    where = None if ranks is None else "inside" if ranks.waits and m else "between"
    build = Builder(device)

    # ---- the gradients
    vectors = vectors or Vectors({name: dtype for name in needs if name in VECTOR_PARAMETERS})
    one_scale = vectors.scale_shape is not None and "scale" in needs and norm
    grads = dict.fromkeys(("x", "weight", *VECTOR_PARAMETERS), ABSENT)
    for name in grads:
        if name in needs and (norm if name in VECTOR_PARAMETERS else linear):
            shape: tuple[int, ...] = {"x": (m, k), "weight": (n, k)}.get(name, (n,))
            shape = vectors.scale_shape if name == "scale" and vectors.scale_shape is not None else shape
            of_dtype = vectors.dtypes.get(name, "float32" if name == "weight" and wide else dtype)
            grads[name] = build.make(gradient_of(name), shape, of_dtype)
    if m == 0 and ranks is None:
        return _of_nothing(build, p, linear=linear)

    # ---- which stages run, and how
    dg = ("x" in needs or "weight" in needs) and norm
    sums = (dg and training) or not {"scale", "gamma", "beta"}.isdisjoint(needs) or ("bias" in needs and not training)
    sums = (sums or ranks is not None) and norm
    copy_dy = norm and dy.strides[1] != 0 and not dy_on_words(dy, size)
    pitch = round_up(n, 16 // size) if norm else dy.strides[0]
    # the two products; dg lies in rows of `pitch`
    rows = Matrix((pitch, 1), True)
    product_x = Matmul(p.m, k, n, dtype, device, rows, p.w.T, Matrix((k, 1), True), p.limits)
    product_w = Matmul(n, k, p.m, dtype, device, rows.T, p.x.T, Matrix((k, 1), True), p.limits)
    dx = choose_product("dx", product_x, precision, gemm) if linear and "x" in needs else None
    dw = choose_product("dw", product_w, precision, gemm, wide) if linear and "weight" in needs else None
    ld_transposed = 0
    if dw is not None and dw.gemm == "cublas" and dtype == "float32" and precision == "high":
        # cuBLAS' TF32 takes 1.5 to 1.8 times as long if both operands are MN-major.
        ld_transposed = round_up(p.m, 16 // size)
    at_dy = in_rows(n, size) if copy_dy else dy
    p, skinny = p._replace(y=at_dy), None
    if gemm in ("auto", "tiled") and norm and linear and training:
        skinny = skinny_backward(p, activation)
    cut = cut_passes(
        p, training=training, sums=sums, dg=dg, skinny=skinny is not None, transposed=ld_transposed > 0,
        precision=precision, activation=activation, where=where,
    )  # fmt: skip
    if "weight" not in needs or cut.fused or deviations_dtype(dtype, p.m, training=training) != dtype:
        skinny = None
    if skinny is not None:
        dx = dw = None
        ld_transposed = 0
    dual = None
    if norm and gemm == "auto" and dx is not None and dw is not None:
        dual = dual_gemm_for(product_x, product_w, wide=wide)
    if dual is not None:
        dx = dw = None
    if ld_transposed and dw is not None:
        dw = dw._replace(p=dw.p._replace(x=Matrix((ld_transposed, 1), True)))

    # ---- the workspace: sums of each split, sums of all ranks, dg or the partial products of dw, dg's transpose, limbs
    sums_of_column, posts_of_column = column_sums(cut.sums[0])
    of_sums_bytes, posts = sums_of_column * n * 8, letters(n, posts_of_column)
    totals_at = round_up(cut.splits * of_sums_bytes, 256)
    dg_at = round_up(totals_at + (of_sums_bytes if ranks else 0), 256)
    of_dg = p.m * pitch * size if dg and linear and not in_place else 0
    transposed_at = round_up(dg_at + (of_dg if skinny is None else skinny.parts.nbytes), 256)
    limbs, weight_first = split_limbs_of(dx, dw, round_up(transposed_at + n * ld_transposed * size, 256), own=norm)
    scales_at = limbs.end
    workspace = scales_at + (8 * n if one_scale else 0)
    posted, gathered, end = posts_at(workspace, posts, ranks)

    # ---- copies
    of_dy = build.operand("dy", (m, n), dy, at_dy, dtype) if m else "dy"
    of_x = build.operand("x", (m, k), p.x, dw.p.w.T, dtype) if m and dw is not None else "x"
    of_w = build.operand("weight", (n, k), p.w, dx.p.w.T, dtype) if m and dx is not None else "weight"
    dg_name = transposed = ABSENT if norm else "dy"
    if ld_transposed and not norm:
        transposed = build.operand("dy", (n, m), dy.T, Matrix((ld_transposed, 1), True, own=True), dtype)
    if dg and not linear:
        dg_name = "deviations" if in_place else build.make("dg", (m, pitch), dtype)
    build.copy()
    build.reserve(workspace if ranks is None else end)
    if dg and linear:
        dg_name = "deviations" if in_place else place(dg_at)
        transposed = place(transposed_at) if ld_transposed else dg_name

    # ---- from dy to dg and the gradients of vectors
    codes = {name: 8 + kind_code(of) for name, of in vectors.dtypes.items() if name in needs}
    fields: dict[str, Any] = {"m": m, "n": n, "k": k, "ldx": p.x.strides[0], "ldw": p.w.strides[0], "lddg": pitch}
    fields |= {"ldd": pitch if ld_saved is None else ld_saved, "ld_transposed": ld_transposed, **cut.fields}
    fields |= {"splits": cut.splits if m else 0, "words": limbs.maxima_bytes // 4}
    fields |= {"skinny_rows": skinny.rows if skinny else 0, "skinny_features": skinny.features if skinny else 0}
    fields |= {"signature": 0 if ranks is None else ranks.signature}
    fields |= {f"to_{name}": codes.get(name, 0) for name in VECTOR_PARAMETERS}
    to_vectors = {f"to_{name}": grads[name] for name in VECTOR_PARAMETERS}
    if one_scale:  # first a gradient per feature, in float64; sum_features adds them up
        to_vectors["to_scale"] = place(scales_at)
        fields["to_scale"] = 8 + kind_code("float64")
    reads_d = ranks is not None or (dg and training) or not {"scale", "gamma"}.isdisjoint(needs) or bool(activation)
    reads = {"dy": of_dy, "d": "deviations" if reads_d else ABSENT, "saved": "vectors"}
    zeros = place(limbs.maxima) if limbs.maxima_bytes else ABSENT
    of_sums = place(0)
    if cut.fused:
        passed = {**reads, "dg": dg_name, **to_vectors, "zeros": zeros, "ranks": ABSENT if ranks is None else "ranks"}
        build.launch(*cut.sums, fields, passed)
    elif sums and m:
        build.launch(*cut.sums, fields, {**reads, "workspace": of_sums, "zeros": zeros})
    elif grads["bias"] != ABSENT:  # in training: the only gradient of a vector, and it is zero
        build.clear(grads["bias"], n * ITEMSIZE[vectors.dtypes["bias"]])
    if ranks is not None and norm and not cut.fused:
        assert cut.merge is not None
        totals = place(totals_at)
        passed = {"d": "deviations", "saved": "vectors", "workspace": of_sums, "posted": ABSENT, "ranks": "ranks"}
        passed |= {"gathered": ABSENT, "totals": totals, **to_vectors}
        if not ranks.waits:
            first = {**passed, "posted": place(posted), "totals": ABSENT}
            build.launch(*cut.merge, fields, first)
            build.gather(posts, place(posted), place(gathered))
            passed["gathered"] = place(gathered)
        build.launch(*cut.merge, fields, passed)
        of_sums = totals
        fields |= {"splits": 1, **{f"to_{name}": 0 for name in VECTOR_PARAMETERS}}  # merge_sums has written these
    if m and skinny is not None:
        parts = place(dg_at)
        passed = {"dy": of_dy, "d": "deviations", "x": "x", "w": "weight", "saved": "vectors", "workspace": of_sums}
        passed |= {"partials": parts, "dx": grads["x"], **to_vectors}
        build.launch(skinny.kernel, skinny.ctas, fields, passed, skinny.block, made_of=skinny)
        reduce_split_k(build, skinny.parts, parts, grads["weight"], (n, k), "float32" if wide else dtype)
    elif m and (dg or (sums and ranks is None)) and not cut.fused:
        passed = {**reads, "d": "deviations", "workspace": of_sums, "dg": dg_name, "transposed": transposed}
        build.launch(*cut.dg, fields, passed | to_vectors)
    if one_scale:
        of_features = {"of_features": to_vectors["to_scale"], "to_scale": grads["scale"]}
        build.launch(*cut.total, {**fields, "to_scale": codes["scale"]}, of_features)

    # ---- the products
    names = {"dg": dg_name, "transposed": transposed, "x": of_x, "weight": of_w}
    names |= {"dx": grads["x"], "dweight": grads["weight"]}
    if m and dual is not None:
        multiply_at_once(build, dual, product_x, product_w, names)
    elif m:
        multiply_both(build, dx, dw, limbs, names, precision, weight_first=weight_first, cleared=sums)
    elif grads["weight"] != ABSENT:
        build.clear(grads["weight"], n * k * (4 if wide else size))
    gemms = ", ".join(f"d{name} by {product.gemm}" for name, product in (("x", dx), ("weight", dw)) if product)
    return build.program("backward", "dx and dweight by sm90" if dual is not None else gemms)


def gradient_of(name: str) -> str:
    return f"gradient of {name}"


def _of_nothing(build: Builder, p: Matmul, *, linear: bool) -> Program:
    """The gradients of an empty batch are zeros."""
    made = build.program("", "").arrays
    if not linear:
        build.make("dg", (0, p.n), p.dtype)
    for array in made:
        if nbytes_of(array):
            build.clear(array.name, nbytes_of(array))
    return build.program("backward", "")
