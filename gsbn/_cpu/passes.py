"""The CPU path: float32 BLAS, and passes over blocks of rows that stay in the cache. `gsbn.reference` has the formulas.

In training, the forward computes g = x wᵀ for each block of rows and subtracts the block's mean, which leaves
deviations d. The sums of d and of d² give the block's mean and M2 (the sum of squared deviations); they are float32
over 32 rows, and float64 beyond that. The blocks are merged in float64, in order. A second pass over the blocks
computes y = a d + (a (block's mean - mean) + β). Between the passes d is stored in the memory of y. For 16-bit dtypes
it has y's dtype; float16 deviations are divided by a power of two near the block's standard deviation, so that none
overflows or underflows. Deviations that a backward needs are stored in float32.

With an activation f the result is y = f(u), and the backward needs f′(u). The backward computes u again: the same
operations in the same dtypes give the same bits, so u agrees with y in every element.

Calls with float64 inputs are computed in float64; with up to 16 rows, so is everything except the products. In small
float32 products OpenBLAS errs more than PyTorch's BLAS. So with up to 8 features all products are float64, and with up
to 64 rows the product of the forward is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .._activations import activation_of, largest_zero
from .._plan import FEW_ROWS, SAVED_ROWS, SAVED_SHIFT
from .._renorm import OFF, Renorm, ratio_and_shift
from .._rounding import round_to
from .._values import next_count

Array = Any  # np.ndarray of any dtype, or a number in place of an absent vector
Gather = Callable[[Array], Array]  # from this rank's numbers (N,) to those of all ranks (ranks, N)

CHAIN = 192  # terms that one call of BLAS adds, as in PyTorch: OpenBLAS's own chains of 384 have 1.4 times the error
ROWS = 32  # rows that are added in float32
BLOCK = 1 << 18  # elements of a block of rows: 1 MiB of float32, which fits in an L2 cache
WIDE_ROWS, WIDE_FEATURES = 64, 8  # with up to this many, products are float64
LEAST = 512  # smallest number of rows of a block: BLAS packs the weight once per block
WIDTH = 512  # smallest number of elements that a pass takes at a time: narrow rows are combined
NEUTRAL = {"scale": 1.0, "bias": 0.0, "gamma": 1.0, "beta": 0.0, "running_mean": 0.0, "running_var": 1.0}


@np.errstate(all="ignore")
def forward(
    arrays: dict[str, Any],
    y: Array,
    *,
    training: bool,
    momentum: float | None,
    eps: float,
    keep: bool,
    activation: Any = None,
    number: float = 1.0,
    renorm: Renorm | None = None,
    gather: Gather | None = None,
) -> tuple[Array, Array] | None:
    """Write y (B, O) and the running statistics; return (deviations, vectors) for `backward` if `keep`, else None.

    `arrays` has x (B, I), weight (O, I) and the vectors (O,) of `gsbn.forward`, None for an absent one; all are
    checked. `number` is the scale if it is not an array. With `renorm`, arrays["renorm"] is None, or holds limits that
    replace those of `renorm`. `gather` exchanges statistics with all ranks of a group; a rank may have no rows. The
    deviations (B, O) are float64 for float64 and for few rows, else float32; in inference they are g minus the mean of
    the first block or, with an activation, g itself. The vectors are float64, in the rows SAVED_ of
    kernels/common/common.cuh.
    """
    s, b, gamma, beta, old_mean, old_var = (
        neutral if arrays[name] is None else arrays[name].astype(np.float64) for name, neutral in NEUTRAL.items()
    )
    if arrays["scale"] is None:
        s = float(number)
    elif arrays["scale"].size == 1:  # one element for all features, in any shape
        s = arrays["scale"].astype(np.float64).item()
    count = arrays["num_batches_tracked"] if training else None
    warms = renorm is not None and count is not None and renorm.warmup > max(count.item(), 0)
    count = None if count is None else next_count(count.item(), momentum)  # raise before anything is written
    x, w = arrays["x"], arrays["weight"].T
    # `gather` may raise an error, so the caller's y is written after it
    given, y = y, y if gather is None else np.empty(y.shape, y.dtype)
    walk = _Walk(len(y), y.shape[1], x.dtype)
    kept = np.empty(y.shape, walk.dtype) if keep else None
    out = _Output(walk, y, activation)
    if not training:
        return _infer(walk, out, x, w, kept, (s, b, gamma, beta, old_mean, old_var), eps)

    parts = _Parts(walk, out, kept)
    parts.compute(x, w)
    rows, mean, m2 = walk.merge(parts.means, parts.squares)
    if gather is not None:
        ranks = gather(np.concatenate([[rows], mean, m2]))
        rows, mean, m2 = _merge(ranks[:, :1], *np.split(ranks[:, 1:], 2, axis=1))
        if rows == 1:
            raise ValueError("Expected more than 1 value per channel when training, got one row on all ranks together")
    var = m2 / max(rows, 1) * (s * s)  # the variance of z = scale (g + bias), as used below
    r = 1 / np.sqrt(var + eps)
    a = gamma * s * r
    ratio, shift = 1.0, 0.0
    if renorm is not None:
        limits = OFF if warms else renorm[:2] if arrays["renorm"] is None else arrays["renorm"].astype(np.float64)
        ratio, shift = ratio_and_shift(limits, s * (mean + b), 1 / r, old_mean, np.sqrt(old_var + eps))
        a, beta = a * ratio, gamma * shift + beta
    parts.finish(a, beta, None if walk.few and gather is None else mean)
    if y is not given:
        given[...] = y

    if rows and count is not None:
        arrays["num_batches_tracked"][...] = count
        momentum = 1 / count if momentum is None else momentum
    if rows and arrays["running_mean"] is not None:
        assert momentum is not None  # checked before; this is for the type checker
        unbiased = var * (rows / (rows - 1))
        for name, old, new in (("running_mean", old_mean, s * (mean + b)), ("running_var", old_var, unbiased)):
            new = (1 - momentum) * old + momentum * new
            arrays[name][...] = new if arrays[name].itemsize > 2 else round_to(new, arrays[name].dtype)
    if kept is None:
        return None
    corrected = () if renorm is None else (ratio, shift)
    return kept, _rows(a, gamma * eps * r**3 * ratio, s * r * ratio, (s * r) ** 2, 1, 0, 0, a, beta, *corrected)


def _infer(
    walk: _Walk, out: _Output, x: Array, w: Array, kept: Array | None, vectors: tuple[Array, ...], eps: float
) -> tuple[Array, Array] | None:
    """Compute y from the running statistics."""
    s, b, gamma, beta, mean, var = vectors
    r = 1 / np.sqrt(var + eps)
    a, shift = gamma * r * s, gamma * r * (s * b - mean) + beta
    centre = None
    for block in walk.blocks:
        g = out.block(block) if kept is None else kept[block]
        walk.product(x[block], w, g)
        out.finish(g, block, a, shift)
        if kept is not None:
            centre = walk.mean(g) if centre is None else centre
            if out.f is None:  # with an activation the backward needs g, and subtracts the centre itself
                walk.each(np.subtract, g, centre, g)
    if kept is None or centre is None:
        return None
    taken = 0.0 if out.f is None else centre
    return kept, _rows(a, gamma * r, r, taken, centre + b, s * (centre + b) - mean, s, a, shift)


class _Output:
    """Writes y block by block, directly in y's memory if y is contiguous and has the dtype of the computation."""

    def __init__(self, walk: _Walk, y: Array, activation: Any) -> None:
        self.y, self.f, self._walk = y, activation_of(activation), walk
        self.own = y.dtype == walk.dtype and y.flags.c_contiguous and y.flags.aligned
        self._scratch = y if self.own else walk.scratch()

    def block(self, block: slice) -> Array:
        """The memory in which a block is computed."""
        return self.y[block] if self.own else self._scratch[: block.stop - block.start]

    def finish(self, d: Array, block: slice, a: Any, shift: Any) -> None:
        """y = f(a d + shift)."""
        made = self.block(block)
        self._walk.each(np.multiply, d, a, made)
        self._walk.each(np.add, made, shift, made)
        if self.f is not None:
            self.f.of(made, made)
        if not self.own:
            self.y[block] = rounded(made, self.y.dtype)


class _Parts:
    """The blocks of a batch in training: the deviations of each, with its mean and M2."""

    def __init__(self, walk: _Walk, out: _Output, kept: Array | None) -> None:
        self._walk, self._out, self._kept = walk, out, kept
        # whether d waits in y, in y's dtype; float16 deviations are divided by `_units`
        self._waits = not out.own and kept is None and len(walk.blocks) > 1
        self._pivots: list[Array] = []
        self._units: list[Array] = []
        self.means: list[Array] = []
        self.squares: list[Array] = []

    def _deviations(self, block: slice) -> Array:
        return self._out.block(block) if self._kept is None else self._kept[block]

    def compute(self, x: Array, w: Array) -> None:
        # Deviations do not depend on the column means of x. If these are subtracted first, the products lose no digits
        # to them.
        walk, y = self._walk, self._out.y
        centre = walk.centre(x)
        middle = np.empty((1, y.shape[1]), walk.of_products)
        walk.product(centre[None], w, middle)
        for block in walk.blocks:
            d, n = self._deviations(block), block.stop - block.start
            walk.product(np.subtract(x[block], centre, dtype=walk.of_products), w, d)
            pivot = walk.mean(d)
            walk.each(np.subtract, d, pivot, d)
            self._pivots.append(pivot + middle[0].astype(np.float64))
            self.means.append(self._pivots[-1])
            self.squares.append(walk.sums(d, d))
            if not walk.few:
                rest = walk.sums(d) / n  # the part of the mean that rounding left
                self.means[-1] = self._pivots[-1] + rest
                self.squares[-1] -= n * rest * rest
            if self._waits:
                if y.dtype == np.float16:
                    unit = np.exp2(np.frexp(np.sqrt(self.squares[-1] / n))[1].astype(np.float64))
                    self._units.append(np.where(unit > 0, unit, 1.0))
                    walk.each(np.divide, d, self._units[-1], d)
                np.copyto(y[block], d, casting="unsafe")

    def finish(self, a: Array, beta: Array, mean: Array | None) -> None:
        """Compute y from the deviations, and turn them into deviations from `mean`; None if they are that already."""
        walk, out, kept = self._walk, self._out, self._kept
        for i, block in enumerate(walk.blocks):
            d = self._deviations(block)
            if self._waits:
                np.copyto(d, out.y[block])
            shift = None if mean is None else self._pivots[i] - mean
            if out.f is not None and kept is not None and shift is not None:  # as the backward computes u
                walk.each(np.add, d, shift, d)
                shift = None
            out.finish(d, block, a * self._units[i] if self._units else a, beta if shift is None else shift * a + beta)
            if kept is not None and shift is not None:
                walk.each(np.add, d, shift, d)


@np.errstate(all="ignore")
def backward(
    dy: Array,
    x: Array,
    weight: Array,
    kept: Array,
    vectors: Array,
    *,
    training: bool,
    needs: Mapping[str, str],
    activation: Any = None,
    scale_shape: tuple[int, ...] | None = None,
    gather: Gather | None = None,
) -> dict[str, Array]:
    """The gradients in `needs` by name, with the dtypes in `needs`, from dy (B, O) and what `forward` returned.

    `scale_shape` is the shape of a scale of one element that serves all features, and of its gradient; else None.
    `gather` exchanges the sums with all ranks of a group: dg then depends on the whole batch, while gradients of
    vectors are sums over this rank's rows.
    """
    # np.dtype("bfloat16") is an error
    dtypes = {name: x.dtype if dtype == x.dtype.name else np.dtype(dtype) for name, dtype in needs.items()}
    if not len(x) and gather is None:
        shapes = dict.fromkeys(dtypes, (len(weight),)) | {"x": x.shape, "weight": weight.shape}
        if scale_shape is not None:
            shapes["scale"] = scale_shape
        return {name: np.zeros(shapes[name], dtype) for name, dtype in dtypes.items()}
    walk = _Walk(len(dy), dy.shape[1], x.dtype, forward=False)
    a, of_scale, of_gamma, rate = vectors[:4]
    total, dots = np.zeros((2, dy.shape[1]))
    f = activation_of(activation)
    zero = 0.0 if f is None else largest_zero(walk.dtype, x.dtype)
    u = None if f is None else walk.scratch()

    def of_u(block: slice) -> Array:
        """The gradient with respect to u, in the dtype of the computation."""
        found = _as(dy[block], walk.dtype)
        if f is None or u is None:
            return found
        made = u[: block.stop - block.start]
        walk.each(np.multiply, kept[block], vectors[7], made)  # as `finish` does in the forward
        walk.each(np.add, made, vectors[8], made)
        return f.gradient(found, made, zero)

    for block in walk.blocks:
        du, d = of_u(block), kept[block]
        total += walk.sums(du)
        if u is not None and not training:
            d = u[: block.stop - block.start]
            walk.each(np.subtract, kept[block], vectors[3], d)
        dots += walk.sums(du, d)
    found = {"bias": np.zeros_like(a), "scale": of_scale * dots, "gamma": of_gamma * dots, "beta": total}
    if not training:
        biased, z, s = vectors[4:7]
        found |= {"bias": a * total, "scale": of_scale * (dots + biased * total)}
        found["gamma"] = of_gamma * (s * dots + z * total)
    elif len(vectors) > SAVED_ROWS:  # saved by batch renormalisation
        found["gamma"] += vectors[SAVED_SHIFT] * total
    if scale_shape is not None:
        found["scale"] = found["scale"].sum(keepdims=True).reshape(scale_shape)
    rows = len(dy)
    if gather is not None:
        ranks = gather(np.concatenate([[rows], total, dots]))
        rows, (total, dots) = ranks[:, 0].sum(), np.split(ranks[:, 1:].sum(axis=0), 2)
    products = {"x", "weight"}.intersection(needs)
    if "x" in needs:
        found["x"] = np.empty(x.shape, x.dtype)
    if "weight" in needs:
        found["weight"] = (np.empty if len(x) else np.zeros)(weight.shape, walk.of_products)
    scratch = walk.scratch()
    for block in walk.blocks if products else ():
        dg = scratch[: block.stop - block.start]
        du = du if len(walk.blocks) == 1 else of_u(block)
        if training:  # a (du - mean(du) - rate D / B d)
            walk.each(np.multiply, kept[block], -rate * dots / rows, dg)
            np.add(dg, du, out=dg)
            walk.each(np.subtract, dg, total / rows, dg)
            du = dg
        walk.each(np.multiply, du, a, dg)
        if "x" in needs:
            walk.product(dg, weight, found["x"][block])
        if "weight" in needs:
            walk.product(dg.T, x[block], found["weight"], add=block.start > 0)
    return {name: rounded(found[name], dtype) for name, dtype in dtypes.items()}


def without_norm(y: Array) -> tuple[Array, Array]:
    """`kept` and `vectors` for the `backward` of a layer without a norm, from the y or u that it keeps: u is that
    array, and a = 1."""
    kept = y.astype(np.float32) if y.itemsize < 4 else y
    return kept, _rows(np.ones(y.shape[1]), 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0)


def _merge(counts: Array, means: Array, squares: Array) -> tuple[int, Array, Array]:
    """Rows, mean and M2 of a batch, from those of its parts: (parts, 1), (parts, O) and (parts, O). The parts are added
    in order, relative to the mean of the first part, so that equal means stay exact. Without rows, everything is 0."""
    given = np.flatnonzero(counts)
    if not len(given):
        return 0, means[0], squares[0]
    counts, means, squares = counts[given], means[given], squares[given]
    rows, pivot = counts.sum(), means[0]
    mean = pivot + (counts * (means - pivot)).sum(axis=0) / rows
    return int(rows), mean, (squares + counts * (means - mean) ** 2).sum(axis=0)


class _Walk:
    """The blocks of rows of a batch, and the arithmetic on them."""

    def __init__(self, rows: int, features: int, dtype: Any, *, forward: bool = True) -> None:
        self.few = rows <= FEW_ROWS
        self.dtype = np.dtype(np.float64 if self.few or dtype == np.float64 else np.float32)
        wide = dtype == np.float64 or features <= WIDE_FEATURES or (forward and rows <= WIDE_ROWS)
        self.of_products = np.dtype(np.float64 if wide else np.float32)
        self.features, self.together = features, max(1, WIDTH // features)
        step = max(BLOCK // max(features, 64), LEAST) // ROWS * ROWS
        self.blocks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def scratch(self) -> Array:
        return np.empty((self.blocks[0].stop if self.blocks else 0, self.features), self.dtype)

    def centre(self, x: Array) -> Array:
        """The column means of x, in the dtype of the products; 0 where subtracting a mean from x might overflow."""
        means = x.mean(axis=0, dtype=np.float64) if len(x) else np.zeros(x.shape[1])
        return np.where(np.abs(means) < 1e30, means, 0.0).astype(self.of_products)

    def product(self, a: Array, b: Array, out: Array, *, add: bool = False) -> None:
        """Compute out = a b, or out += a b, in chains (see CHAIN) of equal length."""
        terms, dtype = a.shape[1], self.of_products
        cuts = -(-terms // CHAIN)
        step = -(-terms // cuts // 16) * 16
        target = out if out.dtype == dtype else np.empty(out.shape, dtype)
        part = np.empty(out.shape, dtype) if cuts > 1 or add else target
        for i in range(cuts):
            chain = slice(i * step, (i + 1) * step)
            first = i == 0 and not add
            np.matmul(_as(a[:, chain], dtype), _as(b[chain], dtype), out=target if first else part)
            if not first:
                np.add(target, part, out=target)
        if target is not out:
            out[...] = rounded(target, out.dtype)

    def each(self, ufunc: Any, block: Array, vector: Array, out: Array) -> None:
        """Compute out = ufunc(block, vector) for every row; `block` and `out` are C-contiguous."""
        if self.few:
            ufunc(block, vector, out=out)
            return
        vector = vector.astype(self.dtype, copy=False) if isinstance(vector, np.ndarray) else vector
        whole = len(block) - len(block) % self.together if self.together > 1 else 0
        if whole:
            shape = whole // self.together, self.together * self.features
            repeated = np.empty((self.together, self.features), self.dtype)
            repeated[...] = vector
            ufunc(block[:whole].reshape(shape), repeated.reshape(-1), out=out[:whole].reshape(shape))
            block, out = block[whole:], out[whole:]
        if len(block):
            ufunc(block, vector, out=out)

    def mean(self, block: Array) -> Array:
        """The column means, by BLAS: accurate enough to be subtracted, but not accurate enough for a result."""
        if self.few:
            return np.add.reduce(block, axis=0) / len(block)
        return np.dot(np.full(len(block), 1 / len(block), self.dtype), block)

    def sums(self, *blocks: Array) -> Array:
        """The column sums, in float64, of one C-contiguous block or of the elementwise product of two blocks."""
        rows = len(blocks[0])
        if self.few:
            return np.einsum("ij->j" if len(blocks) == 1 else "ij,ij->j", *blocks)
        whole = rows - rows % (ROWS * self.together)
        found = np.float64(0)
        if whole:
            shape = -1, ROWS, self.together * self.features
            chains = np.einsum(",".join(["bij"] * len(blocks)) + "->bj", *(a[:whole].reshape(shape) for a in blocks))
            found = np.add.reduce(chains.reshape(-1, self.features), axis=0, dtype=np.float64)
        if whole < rows:
            rest = (a[whole:] for a in blocks)
            found = found + np.einsum(",".join(["ij"] * len(blocks)) + "->j", *rest, dtype=np.float64)
        return found

    def merge(self, means: list[Array], squares: list[Array]) -> tuple[int, Array, Array]:
        """Rows, mean and M2 of the batch, from the mean and M2 of each block."""
        if len(means) == 1:
            return self.blocks[0].stop, means[0], squares[0]
        if not means:
            return 0, np.zeros(self.features), np.zeros(self.features)
        counts = np.array([[block.stop - block.start] for block in self.blocks], np.float64)
        return _merge(counts, np.stack(means), np.stack(squares))


def _as(a: Array, dtype: Any) -> Array:
    """`a` in this dtype and in a layout that BLAS supports: `a` itself if possible, else a copy."""
    size, strides = a.itemsize, a.strides
    if a.dtype == dtype and a.flags.aligned:
        if a.flags.forc:
            return a
        if size in strides and min(strides) > 0 and strides[0] % size == strides[1] % size == 0:
            return a
    return a.astype(dtype, order="K")


def rounded(a: Array, dtype: Any) -> Array:
    return a if a.dtype == dtype else round_to(a, dtype) if a.dtype == np.float64 else a.astype(dtype)


def _rows(*rows: Any) -> Array:
    """The `vectors` of a Saved, from its rows; missing rows are 0."""
    vectors = np.zeros((max(len(rows), SAVED_ROWS), len(rows[0])))
    for vector, row in zip(vectors, rows, strict=False):
        vector[...] = row
    return vectors
