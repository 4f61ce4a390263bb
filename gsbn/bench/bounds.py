"""How far a result may be from the truth, and why: operands, the truth in float64, and a bound derived beside it.

The bound is elementwise and holds for every order of summation, so for every GEMM behind ``gsbn.forward``. The symbols
are those of ``gsbn.reference``; ``u`` is the unit roundoff of the accumulator (2⁻²⁴; 2⁻⁵³ for float64), and ``ū`` that
of the dtype in which a result is stored.

1. A GEMM. ``g`` is a sum of ``I`` products ``p``; each addition rounds a partial sum ``S`` by at most ``u |S|``.
   If the roundings are independent and of mean zero (Higham and Mary 2019), their sum stays within ``λ u sqrt(Σ S²)``
   but for a probability of ``2 exp(−λ²/2)``, 3e-8 at ``λ = 6``. With the products in any order,
   ``Σ S² ≲ I (g² + q²)`` where ``q² = Σ p²``. A tensor core cuts off instead of rounding (by at most ``2u |S|``, once
   in eight products), and always towards zero: this adds ``(I/8) 2u``. Together::

       |Δg| ≤ e = (λ √I + I/4 [16-bit and TF32]) u sqrt(g² + q²)  +  [TF32] 2⁻⁹ |g| + λ 2⁻¹⁰ q

   The last two terms are the rounding of TF32's operands to ten bits, at most 2⁻¹⁰ of each, cut off or rounded.
2. The statistics. A deviation ``d = g − m`` moves by ``δ = e + mean_B(e) + 4u (|m| + |d|)``. The column's standard
   deviation ``t = sqrt(v)`` then moves by at most ``sqrt(mean_B(δ²))`` (triangle inequality), and by ``λ √B u t`` for
   the rounding of a sum of ``B`` squares; both together are ``η``. So ``r`` lies between ``r₋ = r(t + η)`` and
   ``r₊ = r(t − η)``. Nothing is linearised, so this holds at ``v = 0`` as well.
3. The result, with its own rounding ``ū`` and the flush of float32 subnormals::

       training:   |Δy| ≤ |γ s| (r₊ δ + |d| (r₊ − r₋)) + 4u (|a d| + |β|) + ū |y| + tiny
       inference:  |Δy| ≤ |γ r s| e + 4u (|γ r s g| + |γ r (s b − running_mean)| + |β|) + ū |y| + tiny

   A 16-bit y may have held deviations from a tile's mean in between. That mean is within about ``t`` of ``m``, which
   adds ``ū |γ s| r₊ (|d| + t)``. running_mean moves by ``μ |s| (mean_B(e) + 4u |m + b|)``, running_var by
   ``μ s² B/(B−1) ((t + η)² − t²)``, and both by their own rounding.

The gradients go on from ``δ``, ``t``, ``η`` and ``r₋ ≤ r̂ ≤ r₊`` of step 2:

4. The forward keeps a deviation in x's dtype, so ``δ`` grows by ``ū (|d| + δ)``; for float16 also by ``2⁻²⁴ t``, the
   smallest step of a value that is kept in units of at most ``2 t``; and by ``ū (|d| + t)`` where y held it before.
5. ``S = Σ dy`` and ``D = Σ dy d`` are summed over 16 rows in float32 and from there on in float64. They err by
   ``ΔS = 17u Σ|dy|`` and ``ΔD = Σ |dy| (δ + 18u (|d| + δ))``. In inference ``d`` is ``g`` less a centre. The centre's
   distance from the first row is at most four times the spread of every (B // 8)th row, and ``δ`` is the ``e`` of both.
6. The vectors: ``s r D`` errs by ``|s| (r₊ ΔD + (r₊ − r₋) |D|)``, and ``γ eps r³ D`` by
   ``|γ| eps (r₊³ ΔD + (r₊³ − r₋³) |D|)``.
7. ``dg = a (dy − S/B − q d)`` with ``q = s² r² D/B``: the bracket errs by
   ``κ = ΔS/B + Δq (|d| + δ) + |q| δ + 8u (|dy| + |S|/B + |q d|)``, ``dg`` by ``|γ s| (r₊ κ + (r₊ − r₋) |bracket|)`` and
   its own rounding.
8. ``dx`` and ``dw`` are GEMMs, which err as in step 1 and by what ``dg`` brings.

With the activation relu, y is ``max(u, 0)`` of the ``u`` that step 3 calls y:

9. The forward. Rounding to nearest never falls and keeps zero, so that rounding and relu change places: the stored y is
   relu of the stored u. Relu moves two numbers no further apart than they are. So ``|Δy|`` is within u's bound.
10. The backward. Its derivative jumps at zero: where ``|u|`` is below its bound, a right y may be positive or zero, and
    a gradient may have dy's element or not. No bound in between would refuse anything. But the gradients depend on the
    signs of u through ``dy · 1[y > 0]`` alone, and depend on that linearly. So they are held to the truth of the layer
    *without* activation whose dy is that product, with the y *that the judged implementation returned itself*: steps 4
    to 8 hold for it as they stand, as a product with 0 or 1 rounds nothing. NaN counts as above zero, as in PyTorch.
    This y is judged as well, by step 9: it decides every sign where ``|u|`` is above its bound, and a gradient that is
    masked by anything but its own y is out of bound by a whole element of dy. gsbn keeps a 16-bit deviation on its y's
    side of the jump, which may be the second nearest number: step 4's ``ū (|d| + δ)`` and ``2⁻²⁴ t`` count twice.

Other activations, of the true u and with the numbers in ``activations``:

11. ``|Δy| ≤ L (|Δu| + 16u |u|)`` and ū, with ``L`` the largest ``|f′|``: exponentials and ``erfc`` err by a few units,
    times a factor of ``u`` that f damps.
12. The gradient before f is ``f′(u) dy`` of the true ``u``, on the side of a jump that the returned y tells. It errs by
    ``|dy| (C |Δu| + 32u L)``, ``C`` being the largest ``|f″|`` and ``Δu`` that of the saved deviation, which steps 5 to
    7 add to ``Δ`` of dy.

A scale that is left out is one of 1, without rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .._gradients import Gradients
from . import activations
from .case import Case
from .libraries import as_dtype

EPS, MOMENTUM = 1e-5, 0.1
LAMBDA = 6.0
GRADIENTS = Gradients._fields
# gsbn is held to its derived bound; peers are held to their own rounding, norm-wise, on standard normal data
PEER_TOLERANCE = {"float32": 2e-5, "tf32": 1e-2, "bfloat16": 5e-2, "float16": 1e-2, "float64": 1e-12}
# unit roundoff, and half of the smallest step above zero (float32: the smallest normal, as CuPy's kernels flush)
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TINY = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
LARGEST = {"float64": 2.0**1023, "float32": 2.0**127, "float16": 65504.0, "bfloat16": 2.0**127}

FAMILIES = {
    "normal": "standard normal",
    "uniform": "uniform [0, 1), as KernelBench",
    "mean 1e2": "mean 100, deviation 1",
    "mean 1e4": "mean 10000, deviation 1",
    "wide range": "normal times 2^U(-8, 8), each element of x its own",
    "tiny variance": "weights times 1e-4: s² v is far below eps",
    "tiny scale": "scale times 1e-6, every seventh feature 0",
    "constant": "every row of x the same: v = 0",
}


@dataclass(frozen=True)
class Operands:
    """The arrays of one call, of one library and dtype; ``affine`` holds bias, gamma and beta by name."""

    x: Any  # (B, I)
    weight: Any  # (O, I)
    scale: Any  # (O,), or None for 1
    affine: dict[str, Any]
    running_mean: Any
    running_var: Any

    def map(self, convert: Callable[[Any], Any]) -> Operands:
        """The same operands, each array converted."""
        x, weight, mean, var = map(convert, (self.x, self.weight, self.running_mean, self.running_var))
        scale = None if self.scale is None else convert(self.scale)
        return Operands(x, weight, scale, {name: convert(a) for name, a in self.affine.items()}, mean, var)

    def fresh_statistics(self, xp: Any) -> dict[str, Any]:
        """Copies of the running statistics and a count of batches: what one caller may write."""
        return {
            "running_mean": self.running_mean.copy(),
            "running_var": self.running_var.copy(),
            "num_batches_tracked": xp.zeros(1, xp.int64),
        }


@dataclass(frozen=True)
class Expected:
    """The true value of a result and the most that a correct implementation may be away from it, elementwise."""

    value: Any
    bound: Any

    def judge(self, got: Any, xp: Any) -> Judgement:
        fits = xp.abs(self.value) + self.bound < LARGEST[got.dtype.name]  # beyond, infinity is right as well
        error = xp.abs(xp.where(fits, got.astype(xp.float64) - self.value, 0))
        share = xp.where(error == 0, 0.0, error / xp.maximum(self.bound, 1e-300))
        value, bound = (xp.where(fits, a, 0).astype(float) for a in (self.value, self.bound))
        norm, norm_bound = float(xp.linalg.norm(value)), float(xp.linalg.norm(bound))
        relative = norm > norm_bound
        unit = norm if relative else 1.0
        return Judgement(
            norm_error=float(xp.linalg.norm(error.astype(float))) / unit,
            relative=relative,
            norm=norm,
            share=float(xp.nan_to_num(share, nan=xp.inf).max()),
        )


@dataclass(frozen=True)
class Judgement:
    """A result's error, and the largest share of its own bound that any element uses.

    ``norm_error`` is the norm of the error over that of the truth. A truth that is zero within its bound is no measure
    of an error: the norm is then as it is, and ``relative`` is False.
    """

    norm_error: float
    relative: bool
    norm: float  # of the truth
    share: float

    @property
    def passed(self) -> bool:
        return self.share <= 1.0

    @property
    def relative_error(self) -> float:
        """The norm of the error over that of the truth, however small that is; as it is where the truth is zero."""
        return self.norm_error if self.relative else self.norm_error / (self.norm or 1.0)


def make_operands(
    xp: Any,
    batch: int,
    in_features: int,
    out_features: int,
    dtype: str,
    family: str = "normal",
    seed: int = 0,
    with_scale: bool = True,
) -> Operands:
    """Random operands, as PyTorch initialises a linear layer, with every vector in use; the same for the same seed."""
    kind, rng = as_dtype(dtype), xp.random.RandomState(seed)

    def draw(*shape: int) -> Any:
        return _normal(xp, rng, shape).astype(xp.float32)

    def uniform(low: float, high: float, *shape: int) -> Any:
        return rng.uniform(low, high, shape).astype(xp.float32)

    x, weight = draw(batch, in_features), uniform(-1, 1, out_features, in_features) / in_features**0.5
    scale = draw(out_features)
    if family == "uniform":
        x = uniform(0, 1, batch, in_features)
    elif family.startswith("mean"):
        x += float(family.split()[1])
    elif family == "wide range":
        x *= xp.exp2(uniform(-8, 8, batch, in_features))
    elif family == "tiny variance":
        weight *= 1e-4
    elif family == "tiny scale":
        scale *= 1e-6
        scale[::7] = 0
    elif family == "constant":
        x[:] = x[:1]
    o = out_features
    affine = {"bias": uniform(-1, 1, o) / in_features**0.5, "gamma": uniform(0.5, 1.5, o), "beta": draw(o)}
    drawn = Operands(x, weight, scale if with_scale else None, affine, draw(o), uniform(0.5, 1.5, o))
    return drawn.map(lambda a: a.astype(kind))


def draw_dy(xp: Any, operands: Operands, seed: int = 1) -> Any:
    """A standard normal gradient of y."""
    values = _normal(xp, xp.random.RandomState(seed), (len(operands.x), len(operands.weight)))
    return values.astype(operands.x.dtype)


def _normal(xp: Any, rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.standard_normal(shape, **({"dtype": xp.float32} if xp is not np else {}))  # NumPy's takes no dtype


class _Rounding:
    """How a dtype and a precision round; ``u``, ``own`` (ū) and ``tf32`` as in the module's docstring."""

    def __init__(self, xp: Any, dtype: str, precision: str) -> None:
        self.xp, self.tiny = xp, TINY[dtype]
        self.wide = np.longdouble if dtype == "float64" and xp is np else xp.float64
        self.u, self.own = ROUNDOFF["float64" if dtype == "float64" else "float32"], ROUNDOFF[dtype]
        self.has_16_bits = dtype in ("float16", "bfloat16")
        self.tf32 = dtype == "float32" and precision == "high"

    def gemm(self, a: Any, b: Any, product: Any = None) -> tuple[Any, Any]:
        """a b, or the product given in its place, and step 1's bound on its error."""
        xp, terms = self.xp, len(b)
        product = a @ b if product is None else product.astype(self.wide)
        q = xp.sqrt((a * a) @ (b * b))
        cut_off = terms / 4 if self.tf32 or self.has_16_bits else 0.0
        error = (LAMBDA * terms**0.5 + cut_off) * self.u * xp.sqrt(product * product + q * q)
        if self.tf32:
            error += 2.0**-9 * xp.abs(product) + LAMBDA * 2.0**-10 * q
        return product, error

    def stored(self, value: Any, error: Any) -> Expected:
        """A result with this error, once it is rounded to its own dtype."""
        return Expected(value, error + self.own * self.xp.abs(value) + self.tiny)


def _statistics(rounding: _Rounding, g: Any, e: Any, s: Any) -> tuple[Any, ...]:
    """Step 2's ``m, d, t, δ, η, r, r₋, r₊`` of every column."""
    xp, u = rounding.xp, rounding.u
    m = g.mean(0)
    d = g - m
    d -= d.mean(0)
    t = xp.sqrt((d * d).mean(0))
    delta = e + e.mean(0) + 4 * u * (xp.abs(m) + xp.abs(d))
    eta = xp.sqrt((delta * delta).mean(0)) + LAMBDA * len(g) ** 0.5 * u * t
    r, r_low, r_high = (1 / xp.sqrt(s * s * at * at + EPS) for at in (t, t + eta, xp.maximum(t - eta, 0)))
    return m, d, t, delta, eta, r, r_low, r_high


def expected(
    xp: Any, operands: Operands, precision: str, training: bool, g: Any = None, activation: Any = None
) -> dict[str, Expected]:
    """Truth and bound of ``g``, ``y`` and, in training, of ``running_mean`` and ``running_var``: steps 1 to 3, and 9.

    Computed in float64 on the operands' own device, in ``np.longdouble`` for float64 operands on the CPU. A given ``g``
    (B, O) takes the place of ``x wᵀ``: ``y`` is then what this GEMM leads to if nothing else is rounded.
    """
    result = _expected_without(xp, operands, precision, training, g)
    u, rounding = result["y"], _Rounding(xp, operands.x.dtype.name, precision)
    value, error = activations.of_y(xp, u.value, u.bound, activation, rounding.u)
    rounds = activation not in (None, "relu")
    return result | {"y": rounding.stored(value, error) if rounds else Expected(value, error)}


def masked(xp: Any, dy: Any, y: Any, activation: Any, u: Any = None) -> Any:
    """A wide dy as the layer without the activation gets it, by the true u and the y that was returned: step 10."""
    above = True if activation is None else ~(y.astype(xp.float64) <= 0)
    return activations.before(xp, dy, xp.zeros_like(dy) if u is None else u, above, activation)


def _expected_without(xp: Any, operands: Operands, precision: str, training: bool, g: Any) -> dict[str, Expected]:
    """``expected`` without an activation."""
    rounding = _Rounding(xp, operands.x.dtype.name, precision)
    u, o = rounding.u, operands.map(lambda a: a.astype(rounding.wide))
    b, gamma, beta = o.affine["bias"], o.affine["gamma"], o.affine["beta"]
    s = xp.ones_like(gamma) if o.scale is None else o.scale
    g, e = rounding.gemm(o.x, o.weight.T, g)
    result = {"g": rounding.stored(g, e)}

    if not training:
        r = 1 / xp.sqrt(o.running_var + EPS)
        a, shift = gamma * r * s, gamma * r * (s * b - o.running_mean)
        error = xp.abs(a) * e + 4 * u * (xp.abs(a * g) + xp.abs(shift) + xp.abs(beta))
        return result | {"y": rounding.stored(a * g + (shift + beta), error)}

    m, d, t, delta, eta, r, r_low, r_high = _statistics(rounding, g, e, s)
    y = gamma * s * r * d + beta
    error = xp.abs(gamma * s) * (r_high * delta + xp.abs(d) * (r_high - r_low))
    error += 4 * u * (xp.abs(y - beta) + xp.abs(beta))
    if rounding.has_16_bits:
        error += rounding.own * xp.abs(gamma * s) * r_high * (xp.abs(d) + t)

    def running(old: Any, new: Any, of_new: Any) -> Expected:
        value = (1 - MOMENTUM) * old + MOMENTUM * new
        return rounding.stored(value, MOMENTUM * of_new + 4 * u * (xp.abs(old) + xp.abs(new)))

    unbiased = s * s * len(g) / (len(g) - 1)
    of_mean, of_var = xp.abs(s) * (e.mean(0) + 4 * u * xp.abs(m + b)), unbiased * ((t + eta) ** 2 - t * t)
    return result | {
        "y": rounding.stored(y, error),
        "running_mean": running(o.running_mean, s * (m + b), of_mean),
        "running_var": running(o.running_var, unbiased * t * t, of_var),
    }


def expected_gradients(
    xp: Any,
    operands: Operands,
    dy: Any,
    precision: str,
    training: bool,
    activation: Any = None,
    y: Any = None,
) -> dict[str, Expected]:
    """Truth and bound of every gradient, steps 4 to 8, in the arithmetic of ``expected``; ``of_a`` bounds a's error.

    With an activation, ``y`` is what the judged implementation returned: step 10.
    """
    rounding = _Rounding(xp, operands.x.dtype.name, precision)
    u, o = rounding.u, operands.map(lambda a: a.astype(rounding.wide))
    b, gamma, beta = (o.affine[name] for name in ("bias", "gamma", "beta"))
    s = xp.ones_like(gamma) if o.scale is None else o.scale
    rows, kept = len(dy), rounding.own if rounding.has_16_bits else 0.0
    nearest = 2 if activation else 1  # times half a unit in the last place: whether it may be the second nearest number
    g, e = rounding.gemm(o.x, o.weight.T)
    if training:
        _, d, t, delta, eta, r, low, high = _statistics(rounding, g, e, s)
        smallest_step = 2.0**-24 * (t + eta) if operands.x.dtype.name == "float16" else 0.0
        delta = delta + kept * (nearest * (xp.abs(d) + delta) + xp.abs(d) + t) + nearest * smallest_step
        reach = 0
        before, of_u = gamma * s * r * d + beta, xp.abs(gamma * s) * (high * delta + xp.abs(d) * (high - low))
    else:
        some = slice(None, None, max(rows // 8, 1))
        d, reach = g - g[:1], 4 * xp.abs(g[some] - g[:1]).max(0) + 8 * e[some].max(0)
        delta = e + e[:1]
        r = low = high = 1 / xp.sqrt(o.running_var + EPS)
        before, of_u = gamma * r * (s * (g + b) - o.running_mean) + beta, xp.abs(gamma * s) * r * e
    of_u = of_u + 8 * u * (xp.abs(before) + xp.abs(beta) + xp.abs(before - beta))
    dy = dy.astype(rounding.wide)
    of_dy = activations.of_before(xp, dy, of_u, activation, u)
    dy = masked(xp, dy, y, activation, before)
    total, of_total = dy.sum(0), 17 * u * xp.abs(dy).sum(0) + of_dy.sum(0)
    dots = (dy * d).sum(0)
    of_dots = (xp.abs(dy) * (delta + 18 * u * (xp.abs(d) + delta + reach))).sum(0)
    of_dots = of_dots + (of_dy * (xp.abs(d) + delta + reach)).sum(0)
    a, spread = gamma * s * r, high - low
    if training:
        q = s * s * r * r * dots / rows
        of_q = s * s * (high**2 * of_dots + (high**2 - low**2) * xp.abs(dots)) / rows + 8 * u * xp.abs(q)
        bracket = dy - total / rows - q * d
        kappa = of_dy + of_total / rows + of_q * (xp.abs(d) + delta) + xp.abs(q) * delta
        kappa += 8 * u * (xp.abs(dy) + xp.abs(total) / rows + xp.abs(q * d))
        of_scale = xp.abs(gamma) * EPS * (high**3 * of_dots + (high**3 - low**3) * xp.abs(dots))
        vectors = {
            "scale": (gamma * EPS * r**3 * dots, of_scale),
            "gamma": (s * r * dots, xp.abs(s) * (high * of_dots + spread * xp.abs(dots))),
        }
    else:
        bracket, kappa = dy, of_dy + 4 * u * xp.abs(dy)
        first, merge = g[0] + b, 8 * ROUNDOFF["float64"] * xp.abs(dy).sum(0)
        offset = s * first - o.running_mean
        near, far = xp.abs(first) + reach, xp.abs(offset) + xp.abs(s) * reach
        of_gamma = xp.abs(s) * (of_dots + near * merge) + far * of_total + xp.abs(o.running_mean) * merge
        vectors = {
            "bias": (a * total, xp.abs(a) * of_total),
            "scale": (gamma * r * (dots + first * total), xp.abs(gamma) * r * (of_dots + near * (of_total + merge))),
            "gamma": (r * (s * dots + offset * total), r * of_gamma),
        }
    dg = a * bracket
    of_dg = xp.abs(gamma * s) * (high * kappa + (spread + 8 * u * high) * xp.abs(bracket))
    of_dg = of_dg + (kept or u) * (xp.abs(dg) + of_dg) + rounding.tiny
    (dx, of_dx), (dw, of_dw) = rounding.gemm(dg, o.weight), rounding.gemm(dg.T, o.x)
    vectors |= {"x": (dx, of_dx + of_dg @ xp.abs(o.weight)), "weight": (dw, of_dw + of_dg.T @ xp.abs(o.x))}
    vectors["beta"] = (total, of_total)
    found = {name: rounding.stored(value, error * (1 + rounding.own)) for name, (value, error) in vectors.items()}
    if o.scale is None:
        del found["scale"]
    # In training the gradient of the bias is exactly zero.
    return {"bias": Expected(xp.zeros_like(s), xp.zeros_like(s))} | found


@dataclass(eq=False)
class Truth:
    """What the results of one layer are held to. Arrays are of ``xp``; ``dy`` is only needed for gradients."""

    xp: Any
    case: Case
    operands: Operands
    dy: Any = None

    @cached_property
    def forward(self) -> dict[str, Expected]:
        """``expected`` of the case."""
        case = self.case
        return expected(self.xp, self.operands, case.precision, case.training, activation=case.activation)

    @cached_property
    def _linear(self) -> dict[str, Expected]:
        return expected_gradients(self.xp, self.operands, self.dy, self.case.precision, self.case.training)

    def gradients(self, y: Any) -> dict[str, Expected]:
        """``expected_gradients`` of the case, those that belong to the y that a candidate returned."""
        case = self.case
        if case.activation is None:
            return self._linear
        return expected_gradients(self.xp, self.operands, self.dy, case.precision, case.training, case.activation, y)

    def judge(self, results: dict[str, Any]) -> dict[str, Judgement]:
        """Results by name, each beside its truth; gradients beside those of the ``y`` among the results."""
        truth = self.forward | (self.gradients(results["y"]) if "x" in results else {})
        return judge(results, truth, self.xp)


def judge(results: dict[str, Any], truth: dict[str, Expected], xp: Any) -> dict[str, Judgement]:
    """Those results that have a truth, beside it."""
    return {name: truth[name].judge(value, xp) for name, value in results.items() if name in truth}


def demand(judged: dict[str, Judgement], kind: str, held: bool) -> float:
    """The norm-wise error of a candidate's matrices; ValueError where the candidate is wrong.

    One that is ``held`` to the bound must keep it in every element of every result. All must keep the tolerance that
    peers have: in y, or in the gradients of x and the weight, as autograd's gradient of the scale is noise in float32.
    """
    if held and (bad := [name for name, judgement in judged.items() if not judgement.passed]):
        raise ValueError(f"wrong result: {bad[0]} uses {judged[bad[0]].share:.3g} of its bound")
    matrices = ("x", "weight") if "x" in judged else ("y", "g")
    error = max(judged[name].relative_error for name in matrices if name in judged)
    if not error <= (limit := PEER_TOLERANCE[kind]):
        raise ValueError(f"wrong result: norm-wise error {error:.2g} over {limit:.2g}")
    return error
