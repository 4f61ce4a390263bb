"""How far from the truth a right answer may be. All bounds are derived, none is tuned.

Notation: u is the unit roundoff of the arithmetic, K = I the terms of a dot product, n = B the terms of a column's sum,
|x||w|ᵀ the product of the absolute values. A hat marks what the kernels compute.

**The GEMM.** A sum of K products in any order errs by at most γ_K |x||w|ᵀ with γ_K = K u / (1 − K u) (Higham 2002,
section 3.1). Tensor cores truncate where IEEE arithmetic rounds, which doubles u. TF32 rounds each operand first, by at
most 2⁻¹⁰ if it truncates: (1 + 2⁻¹⁰)² − 1 more. Products below the smallest normal number are flushed to zero (CuPy
compiles with -ftz=true): at most K times that number. Together: E.

**Limbs.** float32 at "highest" may use two float16 limbs per operand (docs/design/limbs.md). An element of an operand
is off by 2⁻²³ of itself and by 2⁻³⁹ of the largest in its row. The product of the low limbs, at most 2⁻²² of |x||w|ᵀ,
is left out. Tensor cores, which truncate, add 3 · 32 products at a time, and IEEE arithmetic adds these sums:

    E = ((1 + 2⁻²³)² − 1 + 2⁻²² + 3 min(K, 32) 2⁻²³ + ⌈K/32⌉ 2⁻²⁴) |x||w|ᵀ + 2⁻³⁸ K max|x_i| max|w_j|

**A sum over the rows.** No path adds n rows in one chain. A thread adds at most 16 rows in the arithmetic of u, and a
tree of at most 16 levels adds the threads of a tile. The sums of tiles, of at least 32 rows, are added in float64, or
in the arithmetic of u: by forward_sm90, and if x is float64. The roundings of tiles have either sign: if they are
independent with mean zero, those of N partial sums, each at most Σ|t|, stay within λ √N u Σ|t| except with probability
2 exp(−λ²/2) (Higham and Mary 2019, theorem 2.4), 3e-8 at λ = 6. In a tile all may have the same sign, as its rows may
be equal: there the worst case is taken. Together |ŝ − s| ≤ C_n u Σ|t| with

    C_n = 32 + 6 √(n / 32)           or n, if that is less

This does not grow as n: it is 1.1 √n at a million rows, 6.6e-5 in float32, where n u is 6e-2.

**The deviations.** d = g − m. The column's mean inherits mean(E), its own sum of n terms adds C_n u mean|g|, and
storing and subtracting it add two roundings, so |d̂ − d| ≤ D with

    D = E + mean(E) + (C_n + 2) u · mean(|x||w|ᵀ) + 2 u |d|

This is where cancellation enters: mean|g| may be far larger than |d|.

**The root.** Let σ = sqrt(v) = rms(d) and t = 1/r = sqrt(s² σ² + eps). By the triangle inequality σ̂ is off by at most
rms(D), and dt/dσ ≤ |s|; a sum of n squares, and the arithmetic of t, err by (C_n + 8) u relatively. So |t̂ − t| ≤ τ with

    τ = |s| rms(D) + (C_n + 8) u t,       r̂ ≤ ř = 1 / max(t − τ, (1 − 16 u) sqrt(eps)),       |r̂ − r| ≤ τ r ř

**The output**, with y = γ s r d + β and eight roundings at most after r and d:

    |ŷ − y| ≤ |γ s| (ř D + τ r ř |d|) + 8 u (|γ s| ř (|d| + D) + |β|)

With batch renormalisation y = γ s r ρ d + γ δ + β. σ′ = sqrt(running_var + eps) is exact but for 4 u, and to clip two
numbers brings them no further apart. So ρ = clip(t/σ′) and δ = clip((s (m + b) − running_mean)/σ′) err by

    Δρ = min(τ/σ′ + 8 u t/σ′, r_max − 1/r_max),       M = mean(E) + (C_n + 2) u · mean(|x||w|ᵀ)
    Δδ = min((|s| M + 8 u (|s| (|m| + M + |b|) + |running_mean|))/σ′, 2 d_max)

and the error of y is (ρ + Δρ) times the one above, and |γ s| ř (|d| + D) Δρ + |γ| (Δδ + 8 u (|δ| + Δδ)) more.

In inference y = γ r (s g + (s b − running_mean)) + β, in any association:

    |ŷ − y| ≤ |γ r s| E + 8 u (|γ r| (|s| |x||w|ᵀ + |s b| + |running_mean|) + |β|)

A path with a deferred epilogue stores deviations from a tile's mean in y's dtype, of roundoff ū. This adds
|γ s| ř ū (|d| + max|d|), as a tile's mean is within max|d| of the column's.

**The running statistics** follow from |m̂ − m| ≤ M = mean(E) + (C_n + 2) u mean(|x||w|ᵀ) and from
|v̂ − v| ≤ V = rms(D) (2 σ + rms(D)) + (C_n + 2) u (σ + rms(D))². Finally, a result is rounded once to its own dtype: by
half a unit in its last place, or half the smallest subnormal number.

**Activations.** Relu does not increase the distance of two numbers, and rounds nothing. Another f takes an û within Δ
of u to within L (Δ + 16 u |u|) of f(u), with L the largest |f′|: the exponentials, expm1 and erfc err by a few
roundings, times a factor of u that f damps, and |f(u)| ≤ L |u|.

**A residual** h. Before f, u is rounded to the dtype of y, and then u + h is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gsbn import reference
from gsbn.bench.activations import of_y
from tests.support.ghosts import bounds_of_runs
from tests.support.harness import Outcome
from tests.support.remember import remembered

TF32 = 2.0**-10
FLUSHED = 2.0**-126


class Bounds(NamedTuple):
    """The largest permitted error of each written array; None for arrays that are not written."""

    y: np.ndarray
    running_mean: np.ndarray | None
    running_var: np.ndarray | None


def roundoff(dtype: Any) -> float:
    """Half a unit in the last place of 1."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def arithmetic(dtype: Any) -> float:
    """u: of float64 for float64, else of float32; for 16-bit dtypes with tensor cores, which truncate."""
    dtype = np.dtype(dtype)
    return {8: 2.0**-53, 4: 2.0**-24, 2: 2.0**-23}[dtype.itemsize]


def summed(n: int) -> float:
    """C_n: the error of a sum over n rows, in roundings of the sum of the absolute values."""
    return min(n, 32 + 6 * (n / 32) ** 0.5)


def scale_of(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The scale of every feature in float64, in whichever form it is given."""
    scale = np.asarray(arrays.get("scale", 1.0), np.float64)
    return np.broadcast_to(scale.reshape(-1), (len(arrays["weight"]),)).copy()


@remembered
@np.errstate(all="ignore")
def bounds(
    arrays: Mapping[str, np.ndarray],
    truth: reference.Forward,
    *,
    training: bool,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    u: float | None = None,
    operand: float = 0.0,
    deferred: bool = False,
    limbs: bool = False,
    activation: Any = None,
    renorm: Any = None,
    groups: int = 1,
) -> Bounds:
    """The bounds above, evaluated.

    ``u`` defaults to the kernels' arithmetic for x's dtype; ``operand`` is the rounding of the GEMM's operands;
    ``deferred`` says that deviations may pass through y's dtype, ``limbs`` that g may come from limbs.
    """
    if groups > 1 and training:
        form: dict[str, Any] = {"training": True, "momentum": momentum, "eps": eps, "activation": activation, "u": u}
        form |= {"operand": operand, "deferred": deferred, "limbs": limbs}
        return Bounds(*bounds_of_runs(bounds, arrays, truth, groups, **form))
    u = arithmetic(arrays["x"].dtype) if u is None else u
    flushed = 0.0 if u <= 2.0**-53 else FLUSHED
    x, w = (np.asarray(arrays[name], np.float64) for name in ("x", "weight"))
    s = scale_of(arrays)
    (n, K), zeros = x.shape, np.zeros(len(w))

    def vector(name: str, default: np.ndarray) -> np.ndarray:
        return np.abs(np.asarray(arrays.get(name, default), np.float64))

    b, gamma, beta = vector("bias", zeros), vector("gamma", zeros + 1), vector("beta", zeros)
    old_mean, old_var = vector("running_mean", zeros), vector("running_var", zeros)
    s = np.abs(s)

    xw = np.abs(x) @ np.abs(w).T
    E = (K * u / (1 - K * u) + (1 + operand) ** 2 - 1) * xw + K * flushed
    if limbs:
        relative = (1 + 2.0**-23) ** 2 - 1 + 2.0**-22 + 3 * min(K, 32) * 2.0**-23 + -(-K // 32) * 2.0**-24
        E = relative * xw + 2.0**-38 * K * np.outer(np.abs(x).max(axis=1), np.abs(w).max(axis=1)) + K * flushed

    if not training:
        gamma_r = gamma / np.sqrt(old_var + eps)
        size = gamma_r * (s * xw + s * b + old_mean) + beta
        size, error = _with_residual(arrays, size, gamma_r * s * E + 8 * u * size)
        _, error = of_y(np, size, error, activation, u)
        return Bounds(_rounded(error, truth.y, arrays["x"].dtype), None, None)

    assert truth.mean is not None
    assert truth.var is not None
    d = np.abs(np.asarray(x @ w.T - truth.mean, np.float64))
    sigma = np.sqrt(np.asarray(truth.var, np.float64))
    C = summed(n)
    M = E.mean(0) + (C + 2) * u * xw.mean(0)
    D = E + M + 2 * u * d
    rms_D = np.sqrt(np.mean(D * D, axis=0))
    t = np.sqrt(s * s * sigma * sigma + eps)
    tau = s * rms_D + (C + 8) * u * t
    r, r_max = 1 / t, 1 / np.maximum(t - tau, (1 - 16 * u) * np.sqrt(eps))
    error = gamma * s * (r_max * D + tau * r * r_max * d) + 8 * u * (gamma * s * r_max * (d + D) + beta)
    if deferred:
        error = error + gamma * s * r_max * roundoff(arrays["x"].dtype) * (d + d.max(axis=0))
    size = gamma * s * r * d
    if renorm is None:
        size = size + beta
    else:
        by = correction_bounds(arrays, renorm, truth.mean, t, tau, M, eps=eps, u=u)
        error = by.of_output(error, gamma, gamma * s * r_max * (d + D), u)
        size = by.ratio * size + gamma * np.abs(by.shift) + beta
    size, error = _with_residual(arrays, size, error + flushed)
    _, error = of_y(np, size, error, activation, u)
    y = _rounded(error, truth.y, arrays["x"].dtype)
    if truth.running_mean is None or truth.running_var is None:
        return Bounds(y, None, None)

    mu = abs(1 / truth.num_batches_tracked if momentum is None and truth.num_batches_tracked else momentum or 0.0)
    V = rms_D * (2 * sigma + rms_D) + (C + 2) * u * (sigma + rms_D) ** 2 + flushed
    mean, var = np.abs(np.asarray(truth.mean, np.float64)), sigma * sigma
    unbiased = mu * s * s * n / (n - 1)
    of_mean = mu * s * M + 8 * u * (abs(1 - mu) * old_mean + mu * s * (mean + M + b)) + flushed
    of_var = unbiased * V + 8 * u * (abs(1 - mu) * old_var + unbiased * (var + V)) + flushed
    dtype = arrays["running_mean"].dtype
    return Bounds(y, _rounded(of_mean, truth.running_mean, dtype), _rounded(of_var, truth.running_var, dtype))


class CorrectionBounds(NamedTuple):
    """ρ and δ of batch renormalisation, and by how much each may err."""

    ratio: np.ndarray
    shift: np.ndarray
    of_ratio: np.ndarray
    of_shift: np.ndarray

    def of_output(self, error: np.ndarray, gamma: np.ndarray, size: np.ndarray, u: float) -> np.ndarray:
        """The error of y from the one that it has without them; `gamma`: |γ|, `size`: |γ s| ř (|d| + D)."""
        error = (self.ratio + self.of_ratio) * error + size * self.of_ratio
        return error + gamma * (self.of_shift + 8 * u * (np.abs(self.shift) + self.of_shift))


def correction_bounds(
    arrays: Mapping[str, np.ndarray], renorm: Any, mean: Any, t: np.ndarray, tau: np.ndarray, M: np.ndarray, *,
    eps: float, u: float,
) -> CorrectionBounds:  # fmt: skip
    """From the mean and from t, τ and M, in the notation above."""
    r_max, d_max, warmup = (*np.asarray(renorm, np.float64), 0)[:3]
    if warmup and arrays["num_batches_tracked"].item() < warmup:
        r_max, d_max = 1, 0
    old_mean, old_var = (np.asarray(arrays[name], np.float64) for name in ("running_mean", "running_var"))
    s, b = scale_of(arrays), np.asarray(arrays.get("bias", 0), np.float64)
    mean, running = np.asarray(mean, np.float64), np.sqrt(old_var + eps)
    shift = np.clip((s * (mean + b) - old_mean) / running, -d_max, d_max)
    size = np.abs(s) * (np.abs(mean) + M + np.abs(b)) + np.abs(old_mean)
    return CorrectionBounds(
        np.clip(t / running, 1 / r_max, r_max),
        shift,
        np.minimum((tau + 8 * u * t) / running, r_max - 1 / r_max),
        np.minimum((np.abs(s) * M + 8 * u * size) / running, 2 * d_max),
    )


def _with_residual(arrays: Mapping[str, np.ndarray], size: Any, error: Any) -> tuple[Any, Any]:
    """The size of u + h and its error, from those of u."""
    if "residual" not in arrays:
        return size, error
    dtype = arrays["x"].dtype
    rounded = _rounded(error, size, dtype)
    size = size + np.abs(np.asarray(arrays["residual"], np.float64))
    return size, _rounded(rounded, size, dtype) + FLUSHED


def _rounded(error: np.ndarray, value: np.ndarray, dtype: Any) -> np.ndarray:
    """``error`` after one more rounding of ``value ± error`` to ``dtype``."""
    half_tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2
    result: np.ndarray = error + roundoff(dtype) * (np.abs(np.asarray(value, np.float64)) + error) + half_tiny
    return result


def assert_within(got: np.ndarray, want: np.ndarray, bound: np.ndarray, what: str = "") -> None:
    """``|got − want| ≤ bound``, elementwise; infinity is also right beyond the largest finite number.

    NaN is right where it is the truth: a running variance that overflowed in float16, and that a momentum of 1 then
    multiplies by 0.
    """
    largest = float(ml_dtypes.finfo(got.dtype).max)
    wide = np.asarray(got, want.dtype)
    unknown = np.isnan(want)
    wrong = np.isnan(wide) != unknown
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wide.size} should be NaN, or should not be"
    bound = np.where(unknown, 0, bound)
    fits = np.abs(want) + bound < largest
    error = np.abs(np.where(fits, wide - want, 0))
    at = np.unravel_index(np.argmax(error - bound), error.shape)
    assert error[at] <= bound[at], f"{what}{[int(i) for i in at]}: {wide[at]}, expected {want[at]} ± {bound[at]}"


def assert_outcome_within(outcome: Outcome, truth: reference.Forward, bound: Bounds) -> None:
    """All results of a call are within their bounds."""
    assert_within(outcome.y, truth.y, bound.y, "y")
    for name in ("running_mean", "running_var"):
        want, limit = getattr(truth, name), getattr(bound, name)
        if limit is not None:
            assert_within(getattr(outcome, name), want, limit, name)
    if truth.num_batches_tracked is not None:
        assert outcome.num_batches_tracked == truth.num_batches_tracked


def norm_error(got: np.ndarray, want: np.ndarray) -> float:
    """``‖got − want‖ / ‖want‖``, or the norm of the error if the truth is zero."""
    error = np.linalg.norm((np.asarray(got, want.dtype) - want).ravel())
    return float(error / (np.linalg.norm(want.ravel()) or 1.0))
