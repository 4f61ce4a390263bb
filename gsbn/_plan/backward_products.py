"""Plans the two products of a backward, dx and dw: which GEMM computes each, which limbs it needs, and the steps."""

from __future__ import annotations

from typing import NamedTuple

from .copies import in_rows, on_words, start_on_words
from .cost import copies_us, ieee_us, product_us, word_of
from .cublas_tiles import cublas_tiles_us
from .declared import flags
from .gemm import (
    LEAST_TERMS,
    OneLaunch,
    cublas_obstacle,
    for_cublas,
    mostly_writes,
    one_launch,
    sm90_obstacle,
    takes_limbs,
    tiled,
)
from .h200_products import PRODUCTS
from .limbs import FOR_DX, SCRATCH, Operand, Splits, lay_out, limb_pitch, split_of
from .problem import INT32_MAX, ITEMSIZE, Matmul, Matrix, ceil_div, round_up
from .products import Limbs, reduce_split_k, sm90_gemm
from .program import ABSENT, Builder, Copy, Program, place
from .skinny import for_skinny, skinny_product_for
from .sm90_tiles import Tile, cheapest_tile, is_mn_major
from .sm90_variants import BLOCKS_M, CLUSTERS, SM90_BLOCK_N, by_limbs, element_for
from .sources import Kernel
from .split_k import Tall, tall
from .variants import SPLIT_WIDTHS, TALL_THREADS

# `plan_product` takes limbs if the model expects them to be so many times as fast as cuBLAS. The model errs by up to
# 0.15.
LEAST_GAIN = 1.1
LEAST_GAIN_16 = 1.05  # the same for a GEMM in 16 bits, where the models of the two err by 0.09 and 0.13
LATE = 2**21  # from so many elements on, limbs of x in a launch of their own are worth the memory that this saves
FILL = 0.94  # forward_sm90 beats cuBLAS if its largest tiles fill this part of several waves (docs/history/backward.md)


class Product(NamedTuple):
    """One GEMM of the backward, c (m, n) = a (m, k) bᵀ (k, n): a is dg or its transpose, bᵀ is the weight or x."""

    p: Matmul  # the product, with a copy of b if the GEMM cannot take b's layout
    gemm: str
    kernel: Kernel | None
    grid: int
    block: int
    one: OneLaunch | None = None
    wide: bool = False  # c is float32 although the operands have 16 bits
    rows: int = 0  # rows of each CTA of skinny_product except the last; 0 for other kernels
    tall: Tall | None = None  # the launches of tall_product, for dw
    padded: Matmul | None = None  # p with m and n in whole words of 16 bytes, if cuBLAS computes that

    @property
    def of_limbs(self) -> bool:
        return self.one is not None and by_limbs(self.one.element)


def multiply_both(
    build: Builder, dx: Product | None, dw: Product | None, splits: Splits, names: dict[str, str], precision: str, *,
    weight_first: bool, cleared: bool,
) -> None:  # fmt: skip
    """Add the steps that compute dx = dg w and dweight = dgᵀ x, or the one that is needed, and the limbs for them.

    `names` maps "dg", "transposed" (dg or its transpose, whichever dweight reads), "x", "weight", "dx" and "dweight" to
    their memory. `weight_first`: dweight is computed first. `cleared`: an earlier step clears the maxima.
    """
    of_limbs = {name: names[name] for name in ("dg", "x", "weight", "dweight")}
    if dx is not None and dx.of_limbs and isinstance(for_dx := splits.operand("dg", dx.p.x).limbs, int):
        of_limbs[FOR_DX] = place(for_dx)
    limbs = Limbs(build, splits, of_limbs, cleared=cleared)

    of_dw = names["transposed"], names["x"], names["dweight"]
    if dw is not None and weight_first:
        _multiply(build, dw, of_dw, limbs, "x", precision)
    limbs.make()
    if dx is not None:
        _multiply(build, dx, (names["dg"], names["weight"], names["dx"]), limbs, "weight", precision)
    limbs.make(late=True)
    if dw is not None and not weight_first:
        # The launch of dx has waited for dg, so the launch of dweight need not wait for that of dx. It must wait if
        # limbs lie in dweight's memory, or if SMs are limited, since two launches at once would take more SMs.
        independent = dx is not None and dx.one is not None and not (dx.of_limbs or build.device.limited)
        _multiply(build, dw, of_dw, limbs, "x", precision, independent=independent)


def plan_product(p: Matmul, precision: str, gemm: str) -> Program:
    """Plan c = a b in the way of dx = dg w. p.x is the layout of a (m, k), and p.w is that of bᵀ (n, k).

    Raises a ValueError that names `gemm` if that GEMM cannot serve the call.
    """
    build, size = Builder(p.device), ITEMSIZE[p.dtype]
    a = p.x if on_words(p.x, p.k, size) else in_rows(p.k, size)
    q = p._replace(x=a)
    product = choose_product("dx", q, precision, gemm)
    doubtful = product.of_limbs and ieee_us(p, PRODUCTS) < LEAST_GAIN * _limbs_us(product.p)
    if doubtful and gemm == "auto" and cublas_obstacle(p) is None:
        product = choose_product("dx", q, precision, "cublas")
    if product.gemm == "cublas" and product.padded is None:  # cuBLAS takes more layouts
        product = product._replace(p=for_cublas(p, element_for(p.dtype, precision)))
    limbs, _ = split_limbs_of(product, None, 0, own=False)
    c = build.make("c", (p.m, p.n), p.dtype)
    names = {"dg": build.operand("a", (p.m, p.k), p.x, product.p.x, p.dtype), "transposed": ABSENT, "x": ABSENT}
    names |= {"weight": build.operand("b", (p.k, p.n), p.w.T, product.p.w.T, p.dtype), "dx": c, "dweight": ABSENT}
    build.copy()
    build.reserve(limbs.end)
    multiply_both(build, product, None, limbs, names, precision, weight_first=False, cleared=False)
    return build.program(product.gemm, "")


def _multiply(
    build: Builder, product: Product, operands: tuple[str, str, str], limbs: Limbs, b: str, precision: str, *,
    independent: bool = False,
) -> None:  # fmt: skip
    """Add the steps of one product. `operands` is the memory of a (dg), b and c; `b` is the name of b in `limbs`."""
    p = product.p
    if product.one is not None and product.of_limbs:
        limbs.multiply(p, product.one, "dg", b, operands[-1])
    elif product.one is not None:
        sm90_gemm(build, p, product.one, operands, independent=independent)
    elif product.tall is not None:
        tall = product.tall
        fields = {"m": p.k, "n": p.m, "k": p.n, "lda": p.x.strides[1], "ldb": p.w.strides[1], "rows": tall.rows}
        fields |= {"flags": flags(vector_x=tall.whole_words)}
        dg_name, x_name, c = operands
        partials = build.lend(tall.partials.nbytes)
        passed = {"a": dg_name, "b": x_name, "partials": partials}
        build.launch(tall.kernel, tall.ctas, fields, passed, TALL_THREADS, made_of=product)
        reduce_split_k(build, tall.partials, partials, c, (p.m, p.n), p.dtype)
    elif product.kernel is None:
        a, b, c = operands
        q = product.padded or p
        dtype = "float32" if product.wide else p.dtype
        to = build.make(f"padded {c}", (q.m, q.n), dtype, scratch=True) if q.y.own else c
        build.gemm(q, precision, a, b, to, wide=product.wide)
        if to != c:
            build.copy(Copy(to, c, (p.m, p.n), dtype, q.y, p.y))
    else:
        axis = 0 if product.rows else 1  # skinny_product takes a K-major b, gemm_tiled an MN-major b
        vector_w = start_on_words(p.w, ITEMSIZE[p.dtype], axis)
        fields = {"m": p.m, "n": p.n, "k": p.k, "ldx": max(p.x.strides), "ldw": p.w.strides[axis], "ldg": p.n}
        fields |= {"stats_rows": product.rows, "flags": flags(vector_x=True, vector_w=vector_w)}
        passed = dict(zip(("x", "w", "g"), operands, strict=True))
        build.launch(product.kernel, product.grid, fields, passed, product.block, made_of=product)


def choose_product(
    name: str, p: Matmul, precision: str, gemm: str, wide: bool = False, *, whole_rows: bool = False
) -> Product:
    """Choose the GEMM that computes the product `name`, "dx" or "dw".

    `wide`: the result is float32 although the operands have 16 bits. `whole_rows`: dg's memory has all elements of its
    rows up to their pitch.
    """
    obstacle, element = cublas_obstacle(p), element_for(p.dtype, precision)
    if gemm == "cublas" and obstacle is not None:
        raise ValueError(f"gemm: expected a choice that can serve this call, got 'cublas' in the forward: {obstacle}")
    size = ITEMSIZE[p.dtype]
    copied = in_rows(p.n, size).T

    def product(path: str, q: Matmul, kernel: tuple[Kernel | None, int, int] = (None, 0, 0)) -> Product:
        one = one_launch(q, "gemm", precision, wide=wide) if path == "sm90" else None
        return Product(q, path, *kernel, one, wide)

    of_limbs = p if 1 in p.w.strides else p._replace(w=copied)
    own, asked = gemm in ("auto", "tiled"), gemm == "tiled"  # whether skinny_product may serve, or is asked for

    def wins(us: float) -> bool:
        others = [_limbs_us(of_limbs)] + [ieee_us(p, PRODUCTS)] * (obstacle is None and gemm != "sm90")
        return us < min(others)

    # "sm90" takes tall_product, too, if it is faster than one sum over all rows, which the tensor core would truncate
    of_rows = tall(p, precision) if name == "dw" and gemm != "cublas" else None
    if of_rows is not None and (asked or p.limits.tall or wins(of_rows.us)):
        return product("tiled", p)._replace(tall=of_rows)
    skinny = skinny_product_for(p, precision) if own and p.limits.skinny is not False else None
    if skinny is not None and (asked or p.limits.skinny or wins(skinny.us)):
        kernel = (skinny.product, skinny.grid, skinny.threads)
        return product("tiled", for_skinny(p), kernel)._replace(rows=skinny.rows)
    if _wants_limbs(p, of_limbs, precision, gemm, obstacle):
        return product("sm90", of_limbs)
    ours = p if is_mn_major(p) else p._replace(w=copied)
    theirs, padded = _cheapest_for_cublas(p, ours, element, whole_rows=whole_rows)
    if _wants_sm90(ours, gemm, obstacle, theirs, padded):
        return product("sm90", ours)
    if gemm != "tiled" and obstacle is None:
        return product("cublas", theirs)._replace(padded=padded)
    return product("tiled", p if p.w.strides[0] == 1 else p._replace(w=copied), tiled(p, name, wide=wide))


def split_limbs_of(dx: Product | None, dw: Product | None, start: int, *, own: bool) -> tuple[Splits, bool]:
    """Return the limbs that the products need, with their places, and whether dw is computed before limbs are made.

    Limbs reuse memory where they can:

    - If both products need limbs, dx comes first. The weight's limbs lie in dw's memory, which has the same size. All
      limbs of dg are made at once. Its limbs for dx overwrite dg; x's limbs overwrite them once dx is computed.
    - If only dx needs limbs and there are more rows than input features, dw comes first. dg's limbs then overwrite dg,
      and only the weight's limbs need room.
    - If dx's launch makes the weight's limbs in registers, it needs only the limbs of dg.
    - If dg is not the call's `own`, it is not overwritten. x's limbs, if they are many, overwrite dg's limbs for dx.
    """
    dx_of_limbs, dw_of_limbs = (q.p if q is not None and q.of_limbs else None for q in (dx, dw))
    of_both = dx is not None and dx.one is not None and dx.one.element == "limbs"
    wanted, weight_first = [], False
    if dx_of_limbs is not None:
        dg = split_of("dg", dx_of_limbs.x, dx_of_limbs.m, dx_of_limbs.k)
        fits = limb_pitch(dx_of_limbs.k) == dx_of_limbs.k  # rows of limbs are no longer than rows of float32
        in_place = fits and own
        if dw_of_limbs is None:  # in place only if split_limbs reads a whole row before it writes the row's limbs
            in_place = (
                in_place
                and dg.pitch == dx_of_limbs.k <= SPLIT_WIDTHS[-1]
                and (dw is None or dx_of_limbs.m > dx_of_limbs.n)
            )
            weight_first = in_place and dw is not None
        else:
            dg = dg._replace(mn_major=split_of("dg", dw_of_limbs.x, dw_of_limbs.m, dw_of_limbs.k).mn_major)
        if in_place:
            dg = dg._replace(k_major=Operand("dg", dg.pitch))
        if of_both:
            place = "dweight" if fits and dw is not None and not weight_first else SCRATCH
            wanted.append(split_of("weight", dx_of_limbs.w, dx_of_limbs.n, dx_of_limbs.k, place))
        wanted.append(dg)
    elif dw_of_limbs is not None:
        wanted.append(split_of("dg", dw_of_limbs.x, dw_of_limbs.m, dw_of_limbs.k))
    if dw_of_limbs is not None:
        of_x = dw_of_limbs.n * limb_pitch(dw_of_limbs.k)
        if own:
            late = of_x <= dw_of_limbs.k * dw_of_limbs.x.strides[1]
        else:
            late = dx_of_limbs is not None and LATE <= of_x <= dx_of_limbs.m * limb_pitch(dx_of_limbs.k)
        at = SCRATCH if not late else "dg" if own else FOR_DX
        wanted.append(split_of("x", dw_of_limbs.w, dw_of_limbs.n, dw_of_limbs.k, at)._replace(late=late))
    return lay_out(wanted, start), weight_first


def _limbs_us(p: Matmul) -> float:
    """Return the time of a product of limbs by forward_sm90, including copies."""
    return cheapest_tile(p, "gemm", "limbs").us + copies_us(p, rates=PRODUCTS)


def _cublas_us(p: Matmul, element: str) -> float:
    """Return the time of a product by cuBLAS, including copies."""
    return product_us(p, element, to_y=True, rates=PRODUCTS) + copies_us(p, rates=PRODUCTS)


def _wants_limbs(p: Matmul, taken: Matmul, precision: str, gemm: str, obstacle: str | None) -> bool:
    """Return whether a GEMM of the backward uses limbs: if asked for, if faster than cuBLAS, or if cuBLAS cannot serve.

    `taken` is the product with the layout of b that limbs take.
    """
    if not takes_limbs(p.dtype, precision, p.device) or max(p.m, p.n, p.k) > INT32_MAX // 2:
        return False
    if gemm != "auto" or obstacle is not None:
        return gemm in ("auto", "sm90")
    return p.k >= LEAST_TERMS and min(p.m, p.n) > 1 and _limbs_us(taken) < ieee_us(p, PRODUCTS)


def _cheapest_for_cublas(p: Matmul, ours: Matmul, element: str, *, whole_rows: bool) -> tuple[Matmul, Matmul | None]:
    """Return the product with copies for cuBLAS, perhaps those of forward_sm90; and `_padded`, if cuBLAS takes that."""
    theirs, padded = for_cublas(p, element), _padded(ours, whole_rows=whole_rows)
    if p.dtype == "float64":
        return theirs, None
    ways = [(theirs, None), (ours, None), (ours, padded)]
    return min(ways[: 2 + (padded is not None)], key=lambda way: _cublas_us(way[1] or way[0], element))


def _padded(p: Matmul, *, whole_rows: bool) -> Matmul | None:
    """Return p with m and n rounded up to 16 bytes, where memory is contiguous along them; None if p stays as it is.

    cuBLAS has its fast kernels only for such sizes, whatever the pitch. The elements between the end of a row of a or b
    and the next row then take part. They make additional rows and columns of c, which are not copied to the result.
    """
    word = 16 // ITEMSIZE[p.dtype]
    m, n = p.m if p.x.strides[1] == 1 else round_up(p.m, word), round_up(p.n, word)
    allocated = (n == p.n or p.w.own) and (m == p.m or whole_rows)
    if (m, n) == (p.m, p.n) or not allocated or p.w.strides[0] != 1:
        return None
    return p._replace(m=m, n=n, y=Matrix((n, 1), aligned=True, own=True))


def _wants_sm90(p: Matmul, gemm: str, obstacle: str | None, theirs: Matmul, padded: Matmul | None) -> bool:
    """Return whether forward_sm90 computes a 16-bit product.

    It does if it is asked for, if it is faster than cuBLAS or than the host's call of cuBLAS, or if cuBLAS cannot
    serve. `theirs` is the product as cuBLAS would take it, perhaps with other copies; `padded` is its padded form.
    """
    if ITEMSIZE[p.dtype] > 2 or sm90_obstacle(p, "highest", training=False) is not None:
        return False
    if gemm != "auto" or obstacle is not None:
        return gemm in ("auto", "sm90")
    tile = cheapest_tile(p, "gemm", p.dtype)
    ours, of_few_rows = tile.us, p.x.strides[1] != 1 and mostly_writes(p)  # dw
    if of_few_rows or _fills_waves(p, tile):
        return True
    if padded is not None or p != theirs or word_of(p, to_y=True) < 16:
        by_cublas = _cublas_us(padded or theirs, p.dtype) + PRODUCTS.call_us["gemm"]
        by_cublas += PRODUCTS.cublas_off_words_us if padded is not None else 0.0
        return ours + copies_us(p, rates=PRODUCTS) < by_cublas
    by_cublas = cublas_tiles_us(p)
    return LEAST_GAIN_16 * ours < by_cublas or ours <= min(PRODUCTS.cublas_host_us, by_cublas)


def _fills_waves(p: Matmul, tile: Tile) -> bool:
    """Return whether the largest tiles fill several waves. There, forward_sm90 was measured faster than cuBLAS."""
    resident = p.device.clusters(tile.cluster)
    block_n = SM90_BLOCK_N * tile.cluster
    waves = ceil_div(ceil_div(p.m, tile.block_m) * ceil_div(p.n, block_n), resident)
    largest = tile.shape == (BLOCKS_M[0], CLUSTERS[0])
    return largest and waves > 1 and p.m * p.n >= FILL * waves * resident * tile.block_m * block_n
