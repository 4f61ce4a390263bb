"""Plans a backward call: its passes, its two products and the layout of its workspace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from .activate import add_before
from .backward_passes import Passes, cut_passes
from .backward_products import Product, choose_product, multiply_both, split_limbs_of
from .copies import in_rows, on_words, vector_rows
from .declared import kind_code
from .dual_gemm import DualGemm, dual_gemm_for, multiply_at_once
from .limbs import Splits
from .problem import (
    ITEMSIZE,
    VECTOR_PARAMETERS,
    Matmul,
    Matrix,
    Ranks,
    ceil_div,
    deviations_dtype,
    flattened,
    letters,
    posts_at,
    round_up,
)
from .products import reduce_split_k
from .program import ABSENT, Builder, Program, nbytes_of, place
from .skinny import SkinnyBackward, Sums, remat_backward, skinny_backward
from .sources import with_activation
from .tensor_maps import row_boxes
from .variants import GHOST_FEATURES, column_sums, making_residual_gradient, sum_ghosts

_NO_VECTORS = dict.fromkeys((f"to_{name}" for name in VECTOR_PARAMETERS), 0)  # for a launch that writes no gradients


class Vectors(NamedTuple):
    """The dtypes of the vectors' gradients, by name, and the shape of the scale if it has one element."""

    dtypes: Mapping[str, str]
    scale_shape: tuple[int, ...] | None = None


class Asked(NamedTuple):
    """What the caller asks of a backward.

    A call has two stages, and may skip one. `norm` computes dg and the gradients of vectors from dy. `linear` computes
    the two products from dg. Without `norm`, the caller gives dg in place of dy. The call does not overwrite it, and
    copies it if its rows do not start on 16 bytes.
    """

    training: bool
    needs: tuple[str, ...]
    vectors: Vectors | None = None  # None: all gradients have the dtype of x
    precision: str = "highest"
    gemm: str = "auto"  # the `gemm` of the forward
    activation: Any = None
    norm: bool = True
    linear: bool = True
    wide: bool = False  # dw is float32 although the operands have 16 bits
    in_place: bool = False  # dg overwrites the deviations
    renorm: bool = False  # the forward used batch renormalisation
    remat: bool = False  # the forward stored no deviations: g is computed again
    groups: int = 1  # how many ghost batches there are
    identity: bool = False  # no norm: y takes the place of the deviations, and without an activation dg is dy
    ranks: Ranks | None = None  # their sums arrive during a launch that waits for them, or between two launches
    ld_saved: int | None = None  # row pitch of the deviations
    y: Matrix | None = None  # layout of y, with `identity` and an activation
    kept: Matrix | None = None  # with a residual and an activation: layout of the array that tells its gradient
    residual_activation: Any = None  # that activation


class Chosen(NamedTuple):
    """The planner's choices for the stages."""

    dg: bool  # whether dg is computed; if not, the products, if any, read dy instead of dg
    sums: bool  # whether sums of columns are computed
    sums_make_dv: bool  # whether the launch that computes them also makes the gradient of the residual
    passes: Passes
    dy: Matrix  # layout of the dy that the passes read, perhaps of a copy
    x: Matrix  # of the x and the weight that skinny_backward reads, perhaps of copies
    w: Matrix
    y: Matrix | None
    pitch: int  # pitch of dg's rows
    ld_transposed: int  # pitch of dg's transpose, which cuBLAS reads to compute dw; 0 if it reads dg
    # what computes the products: skinny_backward, which also makes dg; or dual_gemm; or else a `Product` for each
    skinny: SkinnyBackward | None
    remat: Sums | None  # what computes the sums if g is computed again
    dual: DualGemm | None
    of_dx: Matmul
    of_dw: Matmul
    dx: Product | None
    dw: Product | None


class Layout(NamedTuple):
    """Offsets in the workspace. The sums of each split come first, at offset 0."""

    totals: int  # the sums of all ranks
    dg: int  # dg, or the partial products of dw
    transposed: int
    limbs: Splits
    weight_first: bool
    scales: int  # gradients per feature, if the scale has one element
    ghost_gradients: int  # gradients of vectors for each ghost batch
    posted: int  # the numbers that this rank posts
    posts: int  # how many numbers it posts
    gathered: int
    end: int


def plan_backward(p: Matmul, asked: Asked) -> Program:
    """Plan a backward call. `p` is the product of the forward, with dy in place of y.

    If ranks share the batch, `p` may have no rows. Raises a ValueError that names `gemm` if the `gemm` of the forward
    cannot serve the call.
    """
    plan = _Backward(p, asked)
    if p.m == 0 and asked.ranks is None:
        return plan.of_nothing()
    plan.choose()
    plan.lay_out()
    plan.copy_operands()
    if asked.norm:
        plan.add_norm()
    plan.add_products()
    return plan.program()


class _Backward:
    """Makes the plan of a call of `m` rows. p.m is at least 1, so that ranks without rows make the same choices."""

    def __init__(self, p: Matmul, asked: Asked) -> None:
        self.m, self.given_dy, self.asked = p.m, p.y, asked
        self.p = p._replace(m=max(p.m, 1))
        if asked.kept is not None:  # dv takes the place of dy
            self.p = self.p._replace(y=Matrix((p.n, 1), True))
        self.flat = flattened(self.p, asked.groups)
        self.build = Builder(p.device)
        given = Vectors({name: p.dtype for name in asked.needs if name in VECTOR_PARAMETERS})
        self.vectors = asked.vectors or given
        self.one_scale = self.vectors.scale_shape is not None and "scale" in asked.needs and asked.norm
        of_stages = (*(VECTOR_PARAMETERS if asked.norm else ()), *(("x", "weight") if asked.linear else ()))
        of_stages += ("residual",) * (asked.kept is not None)
        needs = [name for name in of_stages if name in asked.needs]
        self.gradients = make_gradients(self.build, p, needs, self.vectors, wide=asked.wide)
        self.dy = "dy"  # the memory that the passes take as dy
        if asked.kept is not None:
            self.dy = self.gradients["residual"]
            if self.dy == ABSENT:
                self.dy = self.build.make("dv", (p.m, p.n), p.dtype, scratch=True)

    def of_nothing(self) -> Program:
        """Return the program for an empty batch, whose gradients are zeros."""
        made = self.build.program("", "").arrays
        if not self.asked.linear:
            self.build.make("dg", (0, self.p.n), self.p.dtype)
        for array in made:
            if nbytes_of(array):
                self.build.clear(array.name, nbytes_of(array))
        return self.build.program("backward", "")

    def choose(self) -> None:
        """Decide which stages run, and how."""
        p, asked, n, k, dtype, dy = self.p, self.asked, self.p.n, self.p.k, self.p.dtype, self.p.y
        training, needs, precision, gemm = asked.training, asked.needs, asked.precision, asked.gemm
        norm, linear, ranks, size = asked.norm, asked.linear, asked.ranks, ITEMSIZE[dtype]
        where = None if ranks is None else "inside" if ranks.waits and self.m else "between"
        products = "x" in needs or "weight" in needs
        dg = products and norm and (asked.activation is not None or not asked.identity)
        of_vectors = not {"scale", "gamma", "beta"}.isdisjoint(needs) or ("bias" in needs and not training)
        sums = norm and ((dg and training) or of_vectors or ranks is not None)
        takes_dy = products and linear and not dg
        reads_rows = takes_dy or (norm and dy.strides[1] != 0)
        if (reads_rows and not vector_rows(dy, size)) or (asked.remat and not on_words(dy, n, size)):
            dy = in_rows(n, size)
        pitch = dy.strides[0] if takes_dy or not norm else round_up(n, 16 // size)

        rows = Matrix((pitch, 1), True)
        of_dx = Matmul(p.m, k, n, dtype, p.device, rows, p.w.T, Matrix((k, 1), True), p.limits)
        of_dw = Matmul(n, k, p.m, dtype, p.device, rows.T, p.x.T, Matrix((k, 1), True), p.limits)
        dx = choose_product("dx", of_dx, precision, gemm) if linear and "x" in needs else None
        dw = None
        if linear and "weight" in needs:
            dw = choose_product("dw", of_dw, precision, gemm, asked.wide, whole_rows=dg)
        # cuBLAS' TF32 takes 1.5 to 1.8 times as long if both operands are MN-major. A transpose costs less, except for
        # small products. On an H200 it lost 2 to 28 % up to this limit; beyond the limit it gained -8 to +32 %.
        small = p.m <= 2048 and p.m * p.m * n * k <= 2**38
        may_transpose = dtype == "float32" and precision == "high" and not small
        ld_transposed = round_up(p.m, 16 // size) if may_transpose and dw is not None and dw.gemm == "cublas" else 0

        skinny = dual = None
        if gemm in ("auto", "tiled") and norm and linear and training and asked.groups == 1:
            skinny = skinny_backward(p._replace(y=dy), asked.activation, asked.renorm)
        x, w, remat = p.x, p.w, None
        if asked.remat:
            x = p.x if on_words(p.x, k, size) else in_rows(k, size)
            w = p.w if p.w.strides[1] == 1 else in_rows(k, size)
            skinny, remat = remat_backward(p, asked.activation)
        passes = cut_passes(
            self.flat._replace(y=dy), training=training, sums=sums, dg=dg, skinny=skinny is not None,
            may_transpose=may_transpose, transposed=dg and ld_transposed > 0, activation=asked.activation, where=where,
            identity=asked.identity, renorm=asked.renorm, ghosts=asked.groups > 1, remat=remat,
        )  # fmt: skip
        of_few = deviations_dtype(dtype, self.flat.m, training=training) != dtype
        if remat is None and ("weight" not in needs or passes.fused or of_few):
            skinny = None
        if not products:
            skinny = None
        if norm and gemm == "auto" and skinny is None and dx is not None and dw is not None:
            dual = dual_gemm_for(of_dx, of_dw, wide=asked.wide)
        if skinny is not None or dual is not None:
            dx = dw = None
        if skinny is not None:
            ld_transposed = 0
        if ld_transposed and dw is not None:
            at, padded = Matrix((ld_transposed, 1), True), dw.padded
            if padded is not None:  # the transpose has no memory after its m rows; only columns of x stay padded
                padded = padded._replace(m=dw.p.m, x=at) if padded.n > dw.p.n else None
            dw = dw._replace(p=dw.p._replace(x=at), padded=padded)
        y = asked.y if asked.y is None or on_words(asked.y, n, size) else in_rows(n, size)
        sums_make_dv = sums and skinny is None and remat is None and self._sums_make_dv(passes)
        if sums_make_dv:
            of_sums, grid = passes.sums
            of_sums = with_activation(making_residual_gradient(of_sums), asked.residual_activation)
            passes = passes._replace(sums=(of_sums, grid))
        self.chosen = Chosen(
            dg, sums, sums_make_dv, passes, dy, x, w, y, pitch, ld_transposed, skinny, remat, dual, of_dx, of_dw, dx, dw
        )

    def _sums_make_dv(self, passes: Passes) -> bool:
        """Return whether there is a variant of backward_sums that makes the gradient of the residual, too."""
        p, asked, size = self.p, self.asked, ITEMSIZE[self.p.dtype]
        if asked.kept is None or passes.fused or not asked.training or asked.groups > 1:
            return False
        whole = p.n * size % 16 == 0 and vector_rows(self.given_dy, size) and vector_rows(asked.kept, size)
        return whole and self.m > 0 and deviations_dtype(p.dtype, p.m, training=True) == p.dtype

    def lay_out(self) -> None:
        """Divide the workspace."""
        p, chosen, asked, size = self.p, self.chosen, self.asked, ITEMSIZE[self.p.dtype]
        sums, posts = column_sums(chosen.passes.sums[0])  # numbers per column
        totals = round_up(chosen.passes.splits * sums * self.flat.n * 8, 256)
        dg = round_up(totals + (sums * p.n * 8 if asked.ranks else 0), 256)
        of_dg = p.m * chosen.pitch * size if chosen.dg and asked.linear and not asked.in_place else 0
        transposed = round_up(dg + (of_dg if chosen.skinny is None else chosen.skinny.partials.nbytes), 256)
        start = round_up(transposed + p.n * chosen.ld_transposed * size, 256)
        limbs, weight_first = split_limbs_of(chosen.dx, chosen.dw, start, own=chosen.dg)
        ghost_gradients = limbs.end + (8 * p.n if self.one_scale else 0)
        workspace = ghost_gradients + (8 * len(VECTOR_PARAMETERS) * self.flat.n if asked.groups > 1 else 0)
        posts = letters(p.n, posts)
        posted, gathered, end = posts_at(workspace, posts, asked.ranks)
        end = workspace if asked.ranks is None else end
        self.at = Layout(
            totals, dg, transposed, limbs, weight_first, limbs.end, ghost_gradients, posted, posts, gathered, end
        )

    def copy_operands(self) -> None:
        """Copy the operands whose layout the kernels cannot take, and name the memory of all operands."""
        p, chosen, build, dtype = self.p, self.chosen, self.build, self.p.dtype
        names = {"dy": self.dy, "x": "x", "weight": "weight", "deviations": "deviations"}
        if self.m:
            if self.asked.kept is not None and not chosen.sums_make_dv:
                add_before(build, p._replace(y=self.given_dy), self.asked.residual_activation, self.asked.kept, self.dy)
            names["dy"] = build.operand(self.dy, (self.m, p.n), p.y, chosen.dy, dtype)
            if chosen.dw is not None:
                names["x"] = build.operand("x", (self.m, p.k), p.x, chosen.dw.p.w.T, dtype)
            if chosen.dx is not None:
                names["weight"] = build.operand("weight", (p.n, p.k), p.w, chosen.dx.p.w.T, dtype)
        if self.m and self.asked.remat:
            names["x"] = build.operand("x", (self.m, p.k), p.x, chosen.x, dtype)
            names["weight"] = build.operand("weight", (p.n, p.k), p.w, chosen.w, dtype)
        if self.asked.y is not None and chosen.y is not None:
            names["deviations"] = build.operand("deviations", (self.m, p.n), self.asked.y, chosen.y, dtype)
        names["dg"] = names["transposed"] = ABSENT if chosen.dg else names["dy"]
        if not chosen.dg and chosen.ld_transposed:
            to = Matrix((chosen.ld_transposed, 1), True, own=True)
            names["transposed"] = build.operand(self.dy, (p.n, self.m), p.y.T, to, dtype, "transpose")
        if chosen.dg:
            if self.asked.in_place:
                names["dg"] = "deviations"
            elif self.asked.linear:
                names["dg"] = place(self.at.dg)
            else:
                names["dg"] = build.make("dg", (self.m, chosen.pitch), dtype)
            if self.asked.linear:
                names["transposed"] = place(self.at.transposed) if chosen.ld_transposed else names["dg"]
        build.copy()
        build.reserve(self.at.end)
        self.names = names | {"dx": self.gradients["x"], "dweight": self.gradients["weight"]}

    def add_norm(self) -> None:
        """Add the steps that compute dg and the gradients of vectors. skinny_backward also computes both products."""
        p, chosen, build, names = self.p, self.chosen, self.build, self.names
        passes, ranks, skinny = chosen.passes, self.asked.ranks, chosen.skinny
        fields = self._fields()
        to_vectors = {f"to_{name}": self.gradients[name] for name in VECTOR_PARAMETERS}
        if self.one_scale:  # the passes write a float64 gradient per feature; sum_features adds them up
            to_vectors["to_scale"] = place(self.at.scales)
        # With ghost batches, the passes write float64 gradients of each ghost batch; sum_ghosts writes the final ones.
        final, final_fields = to_vectors, fields
        if self.asked.groups > 1:
            to_vectors, fields = self._to_each_ghost(fields)
        needs_dot = not {"scale", "gamma"}.isdisjoint(self.asked.needs)
        reads_deviations = (
            ranks is not None or (chosen.dg and self.asked.training) or needs_dot or bool(self.asked.activation)
        )
        reads = {"dy": names["dy"], "d": names["deviations"] if reads_deviations else ABSENT, "saved": "vectors"}
        zeros = place(self.at.limbs.maxima) if self.at.limbs.maxima_bytes else ABSENT
        of_sums, of_dg = place(0), names["dg"] if chosen.dg else ABSENT
        if passes.fused:
            passed = {**reads, "dg": of_dg, **to_vectors, "zeros": zeros}
            build.launch(*passes.sums, fields, passed | {"ranks": ABSENT if ranks is None else "ranks"})
        elif chosen.sums and self.m and chosen.remat is not None:
            maps = self._skinny_maps(chosen.remat.tile, fields["ldd"], "dy", "x")
            passed = {"w": names["weight"], "saved": "vectors", "workspace": of_sums}
            of_remat = fields | {"skinny_features": chosen.remat.features}
            build.launch(*passes.sums, of_remat, passed, chosen.remat.block, maps=maps)
        elif chosen.sums and self.m:
            passed, of_rows = {**reads, "workspace": of_sums, "zeros": zeros}, fields
            if chosen.sums_make_dv and self.asked.kept is not None:
                of_rows = fields | {"dy_row": self.given_dy.strides[0], "kept_row": self.asked.kept.strides[0]}
                passed |= {"dy": "dy", "kept": "kept", "dv": names["dy"]}
            build.launch(*passes.sums, of_rows, passed)
        elif self.gradients["bias"] != ABSENT:  # in training: no other vector needs a gradient, and this one is zero
            build.clear(self.gradients["bias"], p.n * ITEMSIZE[self.vectors.dtypes["bias"]])
        if ranks is not None and not passes.fused:
            self._merge_ranks(ranks, fields, of_sums, to_vectors)
            of_sums = place(self.at.totals)
            fields |= {"splits": 1, **_NO_VECTORS}  # merge_sums has written the gradients of vectors
        if self.m and skinny is not None:
            partials = place(self.at.dg)
            d = "dy" if self.asked.remat else "deviations"
            maps = self._skinny_maps(skinny.tile, fields["ldd"], "dy", d, "x")
            passed = {"w": names["weight"], "saved": "vectors", "workspace": of_sums, "partials": partials}
            passed |= {"dx": self.gradients["x"], **to_vectors}
            build.launch(skinny.kernel, skinny.ctas, fields, passed, skinny.block, maps=maps, made_of=skinny)
            dtype = "float32" if self.asked.wide else p.dtype
            if self.gradients["weight"] != ABSENT:
                reduce_split_k(build, skinny.partials, partials, self.gradients["weight"], (p.n, p.k), dtype)
        elif self.m and (chosen.dg or (chosen.sums and ranks is None)) and not passes.fused:
            passed = {**reads, "d": names["deviations"], "workspace": of_sums}
            passed |= {"dg": of_dg, "transposed": names["transposed"] if chosen.dg else ABSENT, **to_vectors}
            build.launch(*passes.dg, fields, passed)
        if self.asked.groups > 1 and chosen.sums and not {*VECTOR_PARAMETERS}.isdisjoint(self.asked.needs):
            grid = p.device.grid(len(VECTOR_PARAMETERS) * ceil_div(p.n, GHOST_FEATURES))
            codes = {name: final_fields[name] for name in _NO_VECTORS}
            build.launch(sum_ghosts(), grid, fields | codes, {"gradients": place(self.at.ghost_gradients), **final})
        if self.one_scale:
            of_features = {"of_features": final["to_scale"], "to_scale": self.gradients["scale"]}
            code = 8 + kind_code(self.vectors.dtypes["scale"])
            build.launch(*passes.total, {**final_fields, "to_scale": code}, of_features)

    def _fields(self) -> dict[str, Any]:
        """Return the fields of the struct BackwardProblem (kernels/backward/rows.cuh)."""
        p, chosen, asked = self.p, self.chosen, self.asked
        passes, skinny, dtypes = chosen.passes, chosen.skinny, self.vectors.dtypes
        fields: dict[str, Any] = {"m": self.m, "n": p.n, "k": p.k}
        fields |= {"ldx": chosen.x.strides[0], "ldw": chosen.w.strides[0]}
        ldd = chosen.pitch if asked.ld_saved is None else asked.ld_saved
        fields |= {"lddg": chosen.pitch, "ldd": ldd if chosen.y is None else chosen.y.strides[0]}
        fields |= {"ld_transposed": chosen.ld_transposed, **passes.fields, "splits": passes.splits if self.m else 0}
        fields |= {"words": self.at.limbs.maxima_bytes // 4, "dy_ahead": chosen.sums_make_dv}
        fields |= {"skinny_rows": skinny.rows if skinny else 0, "skinny_features": skinny.features if skinny else 0}
        fields |= {"signature": 0 if asked.ranks is None else asked.ranks.signature}
        given = {f"to_{name}": 8 + kind_code(dtype) for name, dtype in dtypes.items() if name in asked.needs}
        fields |= {**_NO_VECTORS, **given}
        return fields | ({"to_scale": 8 + kind_code("float64")} if self.one_scale else {})

    def _skinny_maps(self, tile: int, ldd: int, *matrices: str) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """Return the memory of these matrices, and what their tensor maps encode: a box has the rows of a tile."""
        p, chosen = self.p, self.chosen
        of = {"dy": (p.n, chosen.dy.strides[0]), "deviations": (p.n, ldd), "x": (p.k, chosen.x.strides[0])}
        return tuple((self.names[name], row_boxes(self.m, *of[name], p.dtype, tile)) for name in matrices)

    def _to_each_ghost(self, fields: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        """Return where the passes store the gradients of vectors for each ghost batch, and the passes' fields."""
        m, n = self.flat.m, self.flat.n
        fields = fields | {"m": m, "n": n, "features": self.p.n, "ghost_pitch": n // self.asked.groups}
        wanted = [name for name in VECTOR_PARAMETERS if fields[f"to_{name}"]]
        fields |= {f"to_{name}": 8 + kind_code("float64") for name in wanted}
        rows = {name: place(self.at.ghost_gradients + 8 * n * i) for i, name in enumerate(VECTOR_PARAMETERS)}
        return {f"to_{name}": rows[name] if name in wanted else ABSENT for name in VECTOR_PARAMETERS}, fields

    def _merge_ranks(self, ranks: Ranks, fields: dict[str, Any], of_sums: str, to_vectors: dict[str, str]) -> None:
        """Add the launch that merges the sums of all ranks. Over NCCL, a launch before it posts this rank's sums."""
        build, at, merge = self.build, self.at, self.chosen.passes.merge
        assert merge is not None
        passed = {"d": "deviations", "saved": "vectors", "workspace": of_sums, "posted": ABSENT, "ranks": "ranks"}
        passed |= {"gathered": ABSENT, "totals": place(at.totals), **to_vectors}
        if not ranks.waits:
            build.launch(*merge, fields, {**passed, "posted": place(at.posted), "totals": ABSENT})
            build.gather(at.posts, place(at.posted), place(at.gathered))
            passed["gathered"] = place(at.gathered)
        build.launch(*merge, fields, passed)

    def add_products(self) -> None:
        """Add the steps that compute dx and dweight, if skinny_backward has not computed them."""
        p, chosen, asked, dweight = self.p, self.chosen, self.asked, self.gradients["weight"]
        if self.m and chosen.dual is not None:
            multiply_at_once(self.build, chosen.dual, chosen.of_dx, chosen.of_dw, self.names)
        elif self.m:
            multiply_both(
                self.build, chosen.dx, chosen.dw, self.at.limbs, self.names, asked.precision,
                weight_first=self.at.weight_first, cleared=chosen.sums,
            )  # fmt: skip
        elif dweight != ABSENT:
            self.build.clear(dweight, p.n * p.k * (4 if asked.wide else ITEMSIZE[p.dtype]))

    def program(self) -> Program:
        products = ("x", self.chosen.dx), ("weight", self.chosen.dw)
        why = ", ".join(f"d{name} by {product.gemm}" for name, product in products if product)
        return self.build.program("backward", why if self.chosen.dual is None else "dx and dweight by sm90")


def gradient_of(name: str) -> str:
    return f"gradient of {name}"


def make_gradients(
    build: Builder, p: Matmul, needs: Collection[str], vectors: Vectors, *, wide: bool
) -> dict[str, str]:
    """Add the arrays of the gradients that are needed. Return the name of each gradient's memory."""
    shapes = {"x": (p.m, p.k), "weight": (p.n, p.k), "residual": (p.m, p.n), **dict.fromkeys(VECTOR_PARAMETERS, (p.n,))}
    if vectors.scale_shape is not None:
        shapes["scale"] = vectors.scale_shape
    dtypes = {"weight": "float32" if wide else p.dtype, **vectors.dtypes}
    return {
        name: build.make(gradient_of(name), shape, dtypes.get(name, p.dtype)) if name in needs else ABSENT
        for name, shape in shapes.items()
    }
