"""How far a result may be from the truth, and why: operands, the truth in float64, and a bound derived beside it.

The bound is elementwise and holds for every order of summation, so for every GEMM behind ``gsbn.forward``. With the
symbols of ``gsbn.reference``, ``u`` the unit roundoff of the accumulator (2⁻²⁴; 2⁻⁵³ for float64):

1. The GEMM. ``g`` is a sum of ``I`` products ``p``; each addition rounds a partial sum ``S`` by at most ``u |S|``.
   Taking the roundings as independent and of mean zero (Higham and Mary 2019), the sum of them stays within
   ``λ u sqrt(Σ S²)`` but for a probability of ``2 exp(−λ²/2)``, 3e-8 at ``λ = 6``. With the products in any order,
   ``Σ S² ≲ I (g² + q²)`` where ``q² = Σ p²``. A tensor core cuts off instead of rounding (by at most ``2u |S|``, once
   in eight products), and always towards zero: ``(I/8) 2u`` more, in full::

       |Δg| ≤ e = (λ √I + I/4 [16-bit and TF32]) u sqrt(g² + q²)  +  [TF32] 2⁻⁹ |g| + λ 2⁻¹⁰ q

   The last two are the operands' own rounding to ten bits, at most 2⁻¹⁰ of each, whether cut off or rounded.
2. The statistics. A deviation ``d = g − m`` moves by ``δ = e + mean_B(e) + 4u (|m| + |d|)``; the column's standard
   deviation ``t = sqrt(v)`` then by at most ``η = sqrt(mean_B(δ²))`` (triangle inequality), and by rounding in a sum of
   ``B`` squares, ``λ √B u t``. So ``r`` lies between ``r₋ = r(t + η)`` and ``r₊ = r(t − η)``: nothing is linearised,
   and it is right at ``v = 0``.
3. The result, with its own rounding ``ū`` in y's dtype and the flush of float32 subnormals::

       training:   |Δy| ≤ |γ s| (r₊ δ + |d| (r₊ − r₋)) + 4u (|a d| + |β|) + ū |y| + tiny
       inference:  |Δy| ≤ |γ r s| e + 4u (|γ r s g| + |γ r (s b − running_mean)| + |β|) + ū |y| + tiny
       A 16-bit y may have parked deviations from a tile's mean, itself within about t of m: ū |γ s| r₊ (|d| + t) more.
       running_mean moves by μ |s| (mean_B(e) + 4u |m + b|), running_var by μ s² B/(B−1) ((t + η)² − t²), both by
       their own rounding

"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

EPS, MOMENTUM = 1e-5, 0.1
LAMBDA = 6.0
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
    scale: Any  # (O,)
    affine: dict[str, Any]
    running_mean: Any
    running_var: Any

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
        norm = float(xp.linalg.norm(self.value.astype(float)))
        return Judgement(
            max_error=float(error.max()),
            norm_error=float(xp.linalg.norm(error.astype(float))) / (norm or 1.0),
            share=float(xp.nan_to_num(share, nan=xp.inf).max()),
        )


@dataclass(frozen=True)
class Judgement:
    """Largest absolute error, norm-wise relative error, and the largest share of its bound that any element uses."""

    max_error: float
    norm_error: float
    share: float

    @property
    def passed(self) -> bool:
        return self.share <= 1.0


def as_dtype(name: str) -> np.dtype[Any]:
    """A dtype by name, bfloat16 included; ImportError without ``ml_dtypes``."""
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def make_operands(
    xp: Any, batch: int, in_features: int, out_features: int, dtype: str, family: str = "normal", seed: int = 0
) -> Operands:
    """Random operands, as PyTorch initialises a linear layer, with every vector in use; the same for the same seed."""
    kind, rng = as_dtype(dtype), xp.random.RandomState(seed)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape, **({"dtype": xp.float32} if xp is not np else {})).astype(xp.float32)

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
    return Operands(
        x.astype(kind), weight.astype(kind), scale.astype(kind), {k: a.astype(kind) for k, a in affine.items()},
        draw(o).astype(kind), uniform(0.5, 1.5, o).astype(kind),
    )  # fmt: skip


def expected(xp: Any, operands: Operands, precision: str, training: bool, g: Any = None) -> dict[str, Expected]:
    """Truth and bound of ``g``, ``y`` and, in training, of ``running_mean`` and ``running_var``, as derived above.

    Computed in float64 on the operands' own device, in ``np.longdouble`` for float64 operands on the CPU. A given ``g``
    (B, O) takes the place of ``x wᵀ``: ``y`` is then what this GEMM leads to if nothing else is rounded.
    """
    dtype = operands.x.dtype.name
    wide = np.longdouble if dtype == "float64" and xp is np else xp.float64
    u, u_y = ROUNDOFF["float64" if dtype == "float64" else "float32"], ROUNDOFF[dtype]
    x, weight = operands.x.astype(wide), operands.weight.astype(wide)
    s, old_mean, old_var = (a.astype(wide) for a in (operands.scale, operands.running_mean, operands.running_var))
    b, gamma, beta = (operands.affine[name].astype(wide) for name in ("bias", "gamma", "beta"))
    rows, terms = x.shape

    g = x @ weight.T if g is None else g.astype(wide)
    q = xp.sqrt((x * x) @ (weight * weight).T)
    tf32 = dtype == "float32" and precision == "high"
    cut_off = terms / 4 if tf32 or dtype in ("float16", "bfloat16") else 0.0
    e = (LAMBDA * terms**0.5 + cut_off) * u * xp.sqrt(g * g + q * q)
    if tf32:
        e += 2.0**-9 * xp.abs(g) + LAMBDA * 2.0**-10 * q
    result = {"g": Expected(g, e + u_y * xp.abs(g) + TINY[dtype])}

    if not training:
        r = 1 / xp.sqrt(old_var + EPS)
        a, shift = gamma * r * s, gamma * r * (s * b - old_mean)
        y = a * g + (shift + beta)
        bound = xp.abs(a) * e + 4 * u * (xp.abs(a * g) + xp.abs(shift) + xp.abs(beta)) + u_y * xp.abs(y) + TINY[dtype]
        return result | {"y": Expected(y, bound)}

    m = g.mean(0)
    d = g - m
    d -= d.mean(0)
    t = xp.sqrt((d * d).mean(0))
    delta = e + e.mean(0) + 4 * u * (xp.abs(m) + xp.abs(d))
    eta = xp.sqrt((delta * delta).mean(0)) + LAMBDA * rows**0.5 * u * t
    r, r_low = 1 / xp.sqrt(s * s * t * t + EPS), 1 / xp.sqrt(s * s * (t + eta) ** 2 + EPS)
    r_high = 1 / xp.sqrt(s * s * xp.maximum(t - eta, 0) ** 2 + EPS)
    y = gamma * s * r * d + beta
    bound = xp.abs(gamma * s) * (r_high * delta + xp.abs(d) * (r_high - r_low))
    bound += 4 * u * (xp.abs(y - beta) + xp.abs(beta)) + u_y * xp.abs(y) + TINY[dtype]
    if dtype in ("float16", "bfloat16"):
        bound += u_y * xp.abs(gamma * s) * r_high * (xp.abs(d) + t)

    def running(old: Any, new: Any, new_bound: Any) -> Expected:
        value = (1 - MOMENTUM) * old + MOMENTUM * new
        rounding = 4 * u * (xp.abs(old) + xp.abs(new)) + u_y * xp.abs(value) + TINY[dtype]
        return Expected(value, MOMENTUM * new_bound + rounding)

    unbiased = s * s * rows / (rows - 1)
    return result | {
        "y": Expected(y, bound),
        "running_mean": running(old_mean, s * (m + b), xp.abs(s) * (e.mean(0) + 4 * u * xp.abs(m + b))),
        "running_var": running(old_var, unbiased * t * t, unbiased * ((t + eta) ** 2 - t * t)),
    }
