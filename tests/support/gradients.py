"""A checked call of ``gsbn.backward``, and how far from the truth a gradient may be.

**The bounds**, in the notation of tolerance.py and from its E, D, M, t, τ, r̂ ≤ ř. With r̬ = 1 / (t + τ), r̂ lies between
r̬ and ř. The forward saves d rounded to x's dtype, of roundoff ū (float16: in units of at most twice the spread, whose
smallest step counts), so that the backward reads a deviation within δ = D + ū (|d| + D) of d. A path with a deferred
epilogue also rounds deviations from a tile's mean to that dtype, which adds ū (|d| + max|d|).

- S = Σ dy adds 16 rows in float32 and the rest in float64: |Ŝ − S| ≤ 17 u Σ|dy| =: ΔS.
- D̂ = Σ dy d: |ΔD| ≤ Σ|dy| δ + 18 u Σ|dy| (|d| + δ).
- dβ = S; dγ = s r D errs by |s| (ř ΔD + (ř − r̬) |D|), ds = γ eps r³ D by |γ| eps (ř³ ΔD + (ř³ − r̬³) |D|).
- dg = a (dy − S/B − q d) with q = s² r² D/B: Δq ≤ s² (ř² ΔD + (ř² − r̬²) |D|) / B; the bracket errs by
  κ = ΔS/B + Δq (|d| + δ) + |q| δ + 8 u (|dy| + |S|/B + |q d|), and dg by |γ s| (ř κ + (ř − r̬) |dy − S/B − q d|),
  then by its own rounding.
- In inference d is g less a centre c that cancels out again, at most 4 w from the first row g₀, where w = max |gᵢ − g₀|
  over every (B // 8)th: |d| ≤ |g − g₀| + 4 w, δ = 2 E + 2 u |d|, and r is exact:
  |Δdγ| ≤ r (|s| ΔD + (|s (g₀ + b) − running_mean| + 4 |s| w) ΔS), |Δds| ≤ |γ r| (ΔD + (|g₀ + b| + 4 w) ΔS),
  |Δdb| ≤ |a| ΔS, |Δdg| ≤ (4 u + ū) |dg|. Both terms are added in float64: 8 · 2⁻⁵³ of their sizes.
- With batch renormalisation, in the notation of tolerance.py: dg, dγ and ds are ρ times those above and dγ has δ S in
  addition. An error ε of a value v so becomes (ρ + Δρ) ε + Δρ |v|, and that of dγ is |δ| ΔS + Δδ (|S| + ΔS) larger.
- dx = dg w errs by Δdg |w| + γ_O (|dg| + Δdg) |w|, dw likewise over the batch.
- If the scale has one element, its gradient is the sum of the features' in float64, and its error the sum of theirs.

**Activations.** The gradient before relu is dy where y > 0 or y is NaN, else 0, with the y that the forward wrote.
`before_relu` computes it, and the truth and the bounds are those for this gradient without an activation. That is
right: the gradients depend on the sign of u through this product alone, which rounds nothing, and if u is within its
bound of zero only the returned y tells which sign holds. One bound grows: a deviation that is saved in 16 bits is on
y's side of zero, and so may be the second nearest number. Its ū (|d| + D), and float16's smallest step, count twice.

The gradient before another activation f is f′(u) dy, beside a jump on the side that the forward took: `above` says
which, by the y of the same call without the activation. The û of the backward errs by
Δu = |γ s| (ř δ + (ř − r̬) |d|) + 8 u (|γ s| ř (|d| + δ) + |β|), in inference by that of tolerance.py; so f′(û) dy errs
by |dy| (C Δu + 32 u L) =: Δ, with C the largest |f″| and L the largest |f′|. Δ is added to the errors of S, D and dg.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

import gsbn
from gsbn import Gradients, reference
from gsbn._arrays.kinds import kind_of as library_of
from gsbn._backward import How, backward_within, run
from gsbn._forward import forward_within
from gsbn._gradients import NEEDS
from gsbn._plan import Limits
from gsbn.bench.activations import of_before
from tests.support.accuracy import SEEDS, family
from tests.support.ghosts import gradient_bounds_of_runs
from tests.support.harness import ANY, DTYPES, Kind, kind_of, place, poisoned_allocations, without_out
from tests.support.remember import remembered
from tests.support.tolerance import FLUSHED, arithmetic, correction_bounds, norm_error, roundoff, scale_of, summed

FAMILIES = ("normal", "mean 1e2", "tiny variance", "tiny and zero scale")  # for the rule for gradients
NAMES = Gradients._fields
VECTORS = NAMES[2:]


def draw_dy(arrays: Mapping[str, np.ndarray], seed: int = 1) -> np.ndarray:
    """A gradient of y: normal, with mean 1/2 and variance 1."""
    shape = len(arrays["x"]), len(arrays["weight"])
    return reference.round_to(np.random.default_rng(seed).standard_normal(shape) + 0.5, arrays["x"].dtype)


def before_relu(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    """As torch's threshold_backward."""
    return np.where(np.asarray(y, np.float64) <= 0, np.zeros((), dy.dtype), dy)


def draw_integers(arrays: Mapping[str, np.ndarray], seed: int = 1) -> np.ndarray:
    """A gradient of y of small integers: their sums are exact."""
    shape = len(arrays["x"]), len(arrays["weight"])
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(arrays["x"].dtype)


def assert_beta_agrees(of_beta: np.ndarray, dy: np.ndarray, y: np.ndarray) -> None:
    """dbeta is exactly Σ dy · 1[y > 0], for a dy of integers, which float32 and float64 add exactly."""
    sums = before_relu(dy, y).astype(np.float64).sum(0)
    np.testing.assert_array_equal(of_beta, reference.round_to(sums, of_beta.dtype), "dbeta: other elements than y's")


def backward(*arguments: Any, **options: Any) -> dict[str, np.ndarray | None]:
    """The gradients of `step`."""
    return step(*arguments, **options)[1]


def step(
    kind: Kind,
    arrays: Mapping[str, np.ndarray],
    dy: np.ndarray,
    layouts: Mapping[str, str] | None = None,
    needs: tuple[str, ...] | None = None,
    products: str | None = None,
    limits: Limits = ANY,
    forward_limits: Limits = ANY,
    **options: Any,
) -> tuple[np.ndarray, dict[str, np.ndarray | None]]:
    """y and the gradients by ``gsbn.forward`` and ``gsbn.backward`` on placed copies; checks what must always be true.

    A gradient has its argument's shape and dtype and x's kind; it is None if it is not needed or its argument is
    absent. The backward changes no array. `products` replaces the forward's `gemm`. All are needed if `needs` is None.
    """
    fields = NEEDS if "residual" in arrays else NAMES
    needs = fields if needs is None else needs
    layouts = layouts or {}
    placed = {name: place(kind, a, layouts.get(name, "C")) for name, a in arrays.items()}
    views = {name: p.view for name, p in placed.items()}
    with poisoned_allocations(kind):
        y, saved = forward_within(forward_limits, **views, **options, return_saved=True)
    assert isinstance(saved, gsbn.Saved)
    saved = saved if products is None else saved._replace(gemm=products)
    assert saved.x is views["x"]
    assert saved.weight is views["weight"]
    if "out" in views:
        assert y is views["out"]
    dy_placed = place(kind, dy, layouts.get("dy", "C"))
    before = [kind.get(a).tobytes() for a in (y, *views.values(), *saved[:4])]
    with poisoned_allocations(kind):
        got = backward_within(limits, dy_placed.view, saved, needs=needs, sms=options.get("sms"))
    assert isinstance(got, Gradients)
    assert not dy_placed.disturbed(kind)
    assert before == [kind.get(a).tobytes() for a in (y, *views.values(), *saved[:4])]

    found: dict[str, np.ndarray | None] = {}
    assert "residual" in fields or got.residual is None
    for name in fields:
        gradient = getattr(got, name)
        assert (gradient is None) == (name not in needs or name not in views), name
        if gradient is not None:
            assert type(gradient) is type(views["x"])
            assert gradient.dtype == views[name].dtype
            assert tuple(gradient.shape) == arrays[name].shape
        found[name] = None if gradient is None else kind.get(gradient)
    return kind.get(y), found


@remembered
def truth_of(
    arrays: Mapping[str, np.ndarray], dy: np.ndarray, *, training: bool, eps: float = 1e-5, renorm: Any = None,
    groups: int = 1,
) -> Gradients:  # fmt: skip
    wide = np.longdouble if arrays["x"].dtype == np.float64 else np.float64
    names = ("x", "weight", "scale", "bias", "gamma", "running_mean", "running_var")
    names += () if renorm is None else ("num_batches_tracked",)
    given = {name: arrays[name] for name in names if name in arrays}
    return reference.backward(dy, **given, training=training, eps=eps, renorm=renorm, groups=groups, dtype=wide)


@remembered
@np.errstate(all="ignore")
def gradient_bounds(
    arrays: Mapping[str, np.ndarray],
    dy: np.ndarray,
    truth: Gradients,
    *,
    training: bool,
    eps: float = 1e-5,
    operand: float = 0.0,
    deferred: bool = False,
    activation: Any = None,
    renorm: Any = None,
    after: np.ndarray | None = None,
    groups: int = 1,
    rows: int | None = None,
) -> dict[str, np.ndarray]:
    """The bounds above, evaluated; ``operand`` is the rounding of the GEMMs' operands, ``deferred`` as in `bounds`.

    With an ``activation``, dy and the truth are those before it, and ``after`` is the gradient of y. ``rows``: those
    that dweight adds, if not all of x.
    """
    if groups > 1 and training:
        form: dict[str, Any] = {"training": True, "eps": eps, "operand": operand, "deferred": deferred}
        return gradient_bounds_of_runs(gradient_bounds, arrays, dy, groups, after, activation=activation, **form)
    nearest = 1 if activation is None else 2
    dtype = arrays["x"].dtype
    u, short = arithmetic(dtype), roundoff(dtype)
    flushed = 0.0 if dtype == np.float64 else FLUSHED
    tiny = 2.0**-25 if dtype == np.float16 else flushed
    x, w = (np.asarray(arrays[name], np.float64) for name in ("x", "weight"))
    s = scale_of(arrays)
    (n, K), O = x.shape, len(w)

    def vector(name: str, default: float) -> np.ndarray:
        return np.asarray(arrays.get(name, np.full(O, default)), np.float64)

    b, gamma, beta = vector("bias", 0), vector("gamma", 1), vector("beta", 0)
    dy, abs_s, abs_gamma = np.asarray(dy, np.float64), np.abs(s), np.abs(gamma)
    g, xw = x @ w.T, np.abs(x) @ np.abs(w).T
    E = (K * u / (1 - K * u) + (1 + operand) ** 2 - 1) * xw + K * flushed
    sums, dS = dy.sum(0), 17 * u * np.abs(dy).sum(0) + n * flushed

    if training:
        d = g - g.mean(0)
        sigma = np.sqrt((d * d).mean(0))
        D = E + E.mean(0) + (summed(n) + 2) * u * xw.mean(0) + 2 * u * np.abs(d)
        rms_D = np.sqrt((D * D).mean(0))
        t = np.sqrt(s * s * sigma**2 + eps)
        tau = abs_s * rms_D + (summed(n) + 8) * u * t
        r, r_low, r_max = 1 / t, 1 / (t + tau), 1 / np.maximum(t - tau, (1 - 16 * u) * np.sqrt(eps))
        delta = D + (nearest * short * (np.abs(d) + D) if dtype.itemsize == 2 else 0) + flushed
        if deferred and dtype.itemsize == 2:
            delta = delta + short * (np.abs(d) + np.abs(d).max(0))
        if dtype == np.float16:
            delta = delta + nearest * 2.0**-25 * 2 * (sigma + rms_D)
        size = abs_gamma * abs_s * r_max * (np.abs(d) + delta)
        of_u = abs_gamma * abs_s * (r_max * delta + (r_max - r_low) * np.abs(d)) + 8 * u * (size + np.abs(beta))
        if renorm is not None:
            M = E.mean(0) + (summed(n) + 2) * u * xw.mean(0)
            by = correction_bounds(arrays, renorm, g.mean(0), t, tau, M, eps=eps, u=u)
            of_u = by.of_output(of_u, abs_gamma, size, u)
        of_dy = of_before(np, np.zeros_like(g) if after is None else after, of_u, activation, u)
        dS = dS + of_dy.sum(0)
        dots = (dy * d).sum(0)
        dD = (
            (of_dy * (np.abs(d) + delta)).sum(0)
            + (np.abs(dy) * delta).sum(0)
            + 18 * u * (np.abs(dy) * (np.abs(d) + delta)).sum(0)
        )
        q = s * s * r * r * dots / n
        dq = s * s * (r_max**2 * dD + (r_max**2 - r_low**2) * np.abs(dots)) / n + 8 * u * np.abs(q)
        bracket = dy - sums / n - q * d
        kappa = of_dy + dS / n + dq * (np.abs(d) + delta) + np.abs(q) * delta
        kappa += 8 * u * (np.abs(dy) + np.abs(sums) / n + np.abs(q * d))
        of_dg = abs_gamma * abs_s * (r_max * kappa + (r_max - r_low + 8 * u * r_max) * np.abs(bracket))
        dg = gamma * s * r * bracket
        errors = {
            "bias": np.zeros(O),
            "scale": abs_gamma * eps * (r_max**3 * dD + (r_max**3 - r_low**3) * np.abs(dots)),
            "gamma": abs_s * (r_max * dD + (r_max - r_low) * np.abs(dots)),
        }
        of_scale = abs_gamma * eps * r**3 * np.abs(dots)
        if renorm is not None:
            most = by.ratio + by.of_ratio
            of_dg, dg = most * of_dg + by.of_ratio * np.abs(dg), by.ratio * dg
            errors["scale"] = most * errors["scale"] + by.of_ratio * of_scale
            errors["gamma"] = most * errors["gamma"] + by.of_ratio * np.abs(s * r * dots)
            errors["gamma"] += np.abs(by.shift) * dS + by.of_shift * (np.abs(sums) + dS)
            of_scale = most * of_scale
    else:
        mean, r = vector("running_mean", 0), 1 / np.sqrt(vector("running_var", 1) + eps)
        some = slice(None, None, max(len(g) // 8, 1))
        reach = 4 * np.abs(g[some] - g[0]).max(0) + 8 * E[some].max(0)
        d = np.abs(g - g[0]) + reach
        delta = 2 * E.max(0) + 2 * u * d
        size = np.abs(gamma * r) * (abs_s * (xw + np.abs(b)) + np.abs(mean)) + np.abs(beta)
        of_u = np.abs(gamma * s * r) * E + 8 * u * size
        of_dy = of_before(np, np.zeros_like(g) if after is None else after, of_u, activation, u)
        dS = dS + of_dy.sum(0)
        dD = (of_dy * (np.abs(d) + delta)).sum(0) + (np.abs(dy) * delta).sum(0)
        dD = dD + 18 * u * (np.abs(dy) * (np.abs(d) + delta)).sum(0)
        a, first = np.abs(gamma * s * r), np.abs(g[0] + b) + E[0] + reach
        merge = 8 * 2.0**-53 * np.abs(dy).sum(0)
        dg, of_dg = gamma * s * r * dy, np.abs(gamma * s * r) * (of_dy + 4 * u * np.abs(dy))
        errors = {
            "bias": a * dS,
            "scale": abs_gamma * r * (dD + first * dS + first * merge),
            "gamma": r * (abs_s * dD + (np.abs(s * (g[0] + b) - mean) + abs_s * (E[0] + reach)) * dS),
        }
        errors["gamma"] += r * (abs_s * first + np.abs(mean)) * merge
        of_scale = abs_gamma * r * np.abs((dy * (g + b)).sum(0))
    of_dg = of_dg + (short if dtype.itemsize == 2 else u) * (np.abs(dg) + of_dg) + tiny
    for name, a, c, length in (("x", np.abs(dg), np.abs(w), O), ("weight", np.abs(dg).T, np.abs(x), rows or n)):
        of_a = of_dg if name == "x" else of_dg.T
        gamma_n = length * u / (1 - length * u) + (1 + operand) ** 2 - 1
        errors[name] = of_a @ c + gamma_n * ((a + of_a) @ c) + length * flushed
    errors["beta"] = dS
    if "scale" in arrays and arrays["scale"].shape != (O,):
        total = errors["scale"].sum() + O * 2.0**-53 * (of_scale + errors["scale"]).sum()
        errors["scale"] = np.full(arrays["scale"].shape, total)
    limits = {}
    for name, error in errors.items():
        target = arrays[name].dtype if name in arrays else np.dtype(np.float64)
        value = np.abs(np.asarray(getattr(truth, name), np.float64))
        step = 2.0**-25 if target == np.float16 else flushed
        exact = 0.0 if name == "bias" and training else step + 4 * 2.0**-53 * value
        limits[name] = error + roundoff(target) * (value + error) + exact
    return limits


# ---- a product alone, by limbs


def dx_of(cupy: Any, dg: Any, weight: Any, limits: Limits, gemm: str = "sm90") -> Any:
    """dx = dg weight."""
    return _product_of(cupy, "x", dg, None, weight, limits, gemm)


def dw_of(cupy: Any, dg: Any, x: Any, limits: Limits, gemm: str = "auto") -> Any:
    """dw = dgᵀ x."""
    return _product_of(cupy, "weight", dg, x, None, limits, gemm)


def _product_of(cupy: Any, name: str, dg: Any, x: Any, weight: Any, limits: Limits, gemm: str) -> Any:
    """The gradient of this name, by the linear stage of a backward; rows of dg start on 16 bytes."""
    rows, features = dg.shape
    given = cupy.full((rows, -(-features // 4) * 4), cupy.nan, "f4")[:, :features]
    given[...] = dg
    how = How(True, "highest", gemm, (None,) * 4, None, None, None, (name,), norm=False)
    with poisoned_allocations(kind_of("cupy")):
        found, _ = run(library_of(dg), (given, x, weight, None, None, None), how, limits=limits)
    return found[NAMES.index(name)]


def assert_made_of_limbs(cupy: Any, got: Any, left: Any, right: Any) -> None:
    """The product is within the bound of docs/design/limbs.md in each element; in practice the error is far smaller."""
    terms = len(right)
    a, b = cupy.abs(left.astype("f8")), cupy.abs(right.astype("f8"))
    cut, added = 3 * min(terms, 32) * 2.0**-23, -(-terms // 32) * 2.0**-24
    of_row = terms * 2.0**-38 * a.max(axis=1)[:, None] * b.max(axis=0)
    error = cupy.abs(got - left.astype("f8") @ right.astype("f8"))
    assert bool((error <= (2.0**-21 + cut + added) * (a @ b) + of_row).all())
    assert float((error / (a @ b)).max()) <= 16 * 2.0**-24


# ---- PyTorch's gradients, and the contract's rule


def activate(y: Any, activation: Any) -> Any:
    """The activation of a tensor, by PyTorch's function."""
    import torch

    if activation is None:
        return y
    name, *number = (activation,) if isinstance(activation, str) else activation
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(y, approximate="tanh")
    return getattr(torch.nn.functional, name)(y, *number)


def torch_gradients(
    kind: Kind,
    arrays: Mapping[str, np.ndarray],
    dy: np.ndarray,
    *,
    training: bool = True,
    eps: float = 1e-5,
    activation: Any = None,
) -> dict[str, np.ndarray]:
    """Autograd through ``activation(batch_norm(linear(x) * scale))``, in the arrays' own dtypes."""
    import torch

    t = {name: kind.put(a) for name, a in without_out(arrays).items()}
    leaves = {name: t[name].requires_grad_() for name in NAMES if name in t}
    z = torch.nn.functional.linear(t["x"], t["weight"], t.get("bias")) * t.get("scale", 1.0)
    statistics = t.get("running_mean"), t.get("running_var")
    y = torch.nn.functional.batch_norm(z, *statistics, t.get("gamma"), t.get("beta"), training, 0.1, eps)
    y = activate(y, activation)
    found = torch.autograd.grad(y, list(leaves.values()), kind.put(dy))
    return {name: kind.get(a) for name, a in zip(leaves, found, strict=True)}


def wide_of(dtype: str) -> np.dtype:
    return DTYPES["float64" if dtype == "float64" else "float32"]


def assert_as_accurate_as_autograd(
    name: str, shape: tuple[int, int, int], dtype: str, *, training: bool, **options: Any
) -> None:
    """The contract's rule for every gradient: 1.05 times torch's error and a quarter of eps, over five seeds."""
    kind = kind_of("torch-cuda")
    truths, theirs, ours = [], [], []
    for seed in SEEDS:
        arrays = family(name, seed, shape, dtype)
        if not training:  # statistics as after training
            z = (arrays["x"].astype(float) @ arrays["weight"].astype(float).T + arrays["bias"]) * arrays["scale"]
            arrays["running_mean"] = reference.round_to(z.mean(0), arrays["running_mean"].dtype)
            arrays["running_var"] = reference.round_to(z.var(0), arrays["running_var"].dtype)
        dy = draw_dy(arrays, seed)
        truths.append(truth_of(arrays, dy, training=training))
        theirs.append(torch_gradients(kind, arrays, dy, training=training))
        ours.append(backward(kind, arrays, dy, training=training, **options))
    for field in NAMES:
        if field == "bias" and training:
            assert not any(o["bias"].any() for o in ours)
            continue
        truth = np.stack([getattr(t, field) for t in truths])
        mine, its = np.stack([o[field] for o in ours]), np.stack([t[field] for t in theirs])
        eps = float(ml_dtypes.finfo(mine.dtype).eps)
        error, its_error = norm_error(mine, truth), norm_error(its, truth)
        assert error <= 1.05 * its_error + eps / 4, f"{field}: {error} for torch's {its_error}"


SPECIAL = {
    "plain": {},
    "s = 0": {"scale": 0.0},
    "gamma = 0": {"gamma": 0.0},
    "large s": {"scale": 1e3},
}
