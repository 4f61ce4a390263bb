"""The backward and the whole training step for ``gsbn bench`` and ``gsbn check``: candidates, truth and bound.

The bound goes on where ``gsbn.bench.bounds`` ends, in its notation: ``e``, ``δ``, ``t``, ``η``, ``r₋ ≤ r̂ ≤ r₊``.

1. What the forward keeps of a deviation is rounded to x's dtype: ``δ`` grows by ``ū (|d| + δ)``, for float16 by
   ``2⁻²⁴ t`` more, the smallest step of what is kept in units of at most ``2 t``; and by ``ū (|d| + t)`` where 16 bits
   were parked before.
2. ``S = Σ dy`` and ``D = Σ dy d``, 16 rows in float32 and the rest in float64, err by ``ΔS = 17u Σ|dy|`` and
   ``ΔD = Σ |dy| (δ + 18u (|d| + δ))``. In inference ``d`` is ``g`` less a centre, at most four times the spread of the
   first eight rows from the first of them, and ``δ = e`` of both.
3. The vectors: ``s r D`` errs by ``|s| (r₊ ΔD + (r₊ − r₋) |D|)``, and ``γ eps r³ D`` by
   ``|γ| eps (r₊³ ΔD + (r₊³ − r₋³) |D|)``.
4. ``dg = a (dy − S/B − q d)``, ``q = s² r² D/B``: the bracket errs by
   ``κ = ΔS/B + Δq (|d| + δ) + |q| δ + 8u (|dy| + |S|/B + |q d|)``, ``dg`` by ``|γ s| (r₊ κ + (r₊ − r₋) |bracket|)`` and
   its own rounding.
5. A product, a sum of ``n`` terms ``p``, errs by ``(λ √n + n/4 [tensor cores]) u sqrt((Σp)² + Σp²)`` and by what ``dg``
   brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import gsbn

from .bounds import EPS, LAMBDA, ROUNDOFF, TINY, Expected, Operands

if TYPE_CHECKING:
    from .measure import Case
    from .peers import Candidate

FIELDS = gsbn.Gradients._fields
DIRECTIONS = ("forward", "backward", "step")  # a step is both


def draw_dy(xp: Any, operands: Operands, seed: int = 1) -> Any:
    """A standard normal gradient of y."""
    shape = len(operands.x), len(operands.weight)
    values = xp.random.RandomState(seed).standard_normal(shape, **({"dtype": xp.float32} if xp is not np else {}))
    return values.astype(operands.x.dtype)


def expected(xp: Any, operands: Operands, dy: Any, precision: str, training: bool) -> dict[str, Expected]:
    """Truth and bound of every gradient, in float64 on the operands' own device."""
    dtype = operands.x.dtype.name
    u, u_y = ROUNDOFF["float64" if dtype == "float64" else "float32"], ROUNDOFF[dtype]
    short = u_y if dtype in ("float16", "bfloat16") else 0.0
    tf32 = dtype == "float32" and precision == "high"
    cuts = tf32 or short > 0
    wide = np.longdouble if dtype == "float64" and xp is np else xp.float64
    x, weight, dy = (a.astype(wide) for a in (operands.x, operands.weight, dy))
    s, mean, var = (a.astype(wide) for a in (operands.scale, operands.running_mean, operands.running_var))
    b, gamma = (operands.affine[name].astype(wide) for name in ("bias", "gamma"))
    rows = len(x)

    def product(a: Any, c: Any) -> tuple[Any, Any]:
        """a c and its rounding."""
        value, n = a @ c, len(c)
        q = xp.sqrt((a * a) @ (c * c))
        error = (LAMBDA * n**0.5 + (n / 4 if cuts else 0.0)) * u * xp.sqrt(value * value + q * q)
        return value, error + (2.0**-9 * xp.abs(value) + LAMBDA * 2.0**-10 * q if tf32 else 0.0)

    g, e = product(x, weight.T)
    total, of_total = dy.sum(0), 17 * u * xp.abs(dy).sum(0)
    if training:
        m = g.mean(0)
        d = g - m
        t = xp.sqrt((d * d).mean(0))
        delta = e + e.mean(0) + 4 * u * (xp.abs(m) + xp.abs(d))
        eta = xp.sqrt((delta * delta).mean(0)) + LAMBDA * rows**0.5 * u * t
        delta = delta + short * (2 * xp.abs(d) + t + delta) + (2.0**-24 * (t + eta) if dtype == "float16" else 0.0)
        r, low = 1 / xp.sqrt(s * s * t * t + EPS), 1 / xp.sqrt(s * s * (t + eta) ** 2 + EPS)
        high = 1 / xp.sqrt(s * s * xp.maximum(t - eta, 0) ** 2 + EPS)
    else:
        d, reach = g - g[:1], 4 * xp.abs(g[:8] - g[:1]).max(0) + 8 * e[:8].max(0)
        delta = e + e[:1]
        r = low = high = 1 / xp.sqrt(var + EPS)
    dots = (dy * d).sum(0)
    far_d = xp.abs(d) + delta + (0 if training else reach)
    of_dots = (xp.abs(dy) * (delta + 18 * u * far_d)).sum(0)
    a, spread = gamma * s * r, high - low
    if training:
        q = s * s * r * r * dots / rows
        of_q = s * s * (high**2 * of_dots + (high**2 - low**2) * xp.abs(dots)) / rows + 8 * u * xp.abs(q)
        bracket = dy - total / rows - q * d
        kappa = of_total / rows + of_q * (xp.abs(d) + delta) + xp.abs(q) * delta
        kappa += 8 * u * (xp.abs(dy) + xp.abs(total) / rows + xp.abs(q * d))
        vectors = {
            "bias": (xp.zeros_like(s), xp.zeros_like(s)),
            "scale": (gamma * EPS * r**3 * dots, EPS * (high**3 * of_dots + (high**3 - low**3) * xp.abs(dots))),
            "gamma": (s * r * dots, xp.abs(s) * (high * of_dots + spread * xp.abs(dots))),
        }
        vectors["scale"] = (vectors["scale"][0], xp.abs(gamma) * vectors["scale"][1])
    else:
        bracket, kappa = dy, 4 * u * xp.abs(dy)
        first, merge = g[0] + b, 8 * ROUNDOFF["float64"] * xp.abs(dy).sum(0)
        near, far = xp.abs(first) + reach, xp.abs(s * first - mean) + xp.abs(s) * reach
        vectors = {
            "bias": (a * total, xp.abs(a) * of_total),
            "scale": (gamma * r * (dots + first * total), xp.abs(gamma) * r * (of_dots + near * (of_total + merge))),
            "gamma": (
                r * (s * dots + (s * first - mean) * total),
                r * (xp.abs(s) * (of_dots + near * merge) + far * of_total + xp.abs(mean) * merge),
            ),
        }
    vectors["beta"] = (total, of_total)
    dg = a * bracket
    of_dg = xp.abs(gamma * s) * (high * kappa + (spread + 8 * u * high) * xp.abs(bracket))
    of_dg = of_dg + (short or u) * (xp.abs(dg) + of_dg) + TINY[dtype]
    (dx, of_dx), (dw, of_dw) = product(dg, weight), product(dg.T, x)
    found = {"x": (dx, of_dx + of_dg @ xp.abs(weight)), "weight": (dw, of_dw + of_dg.T @ xp.abs(x)), **vectors}
    return {
        name: Expected(
            value, error + (u_y * (xp.abs(value) + error) + TINY[dtype] if name != "bias" or not training else 0)
        )
        for name, (value, error) in found.items()
    }


def make(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    """The candidate called ``name`` for the backward or the step; its outputs are the gradients."""
    from .peers import Unavailable

    if name.startswith("gsbn"):
        return _gsbn(name, case, operands, xp)
    if name in ("pytorch", "compile", "autotune"):
        return _autograd(name, case, operands, xp)
    raise Unavailable("it has no backward here")


def _gsbn(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    from .peers import Candidate, Unavailable, _Native, _Torch

    gemm = {"gsbn-cublas": "cublas", "gsbn-tiled": "tiled"}.get(name, "auto")
    if name not in ("gsbn", "gsbn-torch", "gsbn-cublas", "gsbn-tiled"):
        raise Unavailable("it has no backward")
    library = _Torch(xp) if name == "gsbn-torch" else _Native(xp)
    x, weight, scale, dy = map(library.take, (operands.x, operands.weight, operands.scale, draw_dy(xp, operands)))
    affine = {key: library.take(a) for key, a in operands.affine.items()}
    state = {key: library.take(a) for key, a in operands.fresh_statistics(xp).items()}
    options: dict[str, Any] = {"training": case.training, "precision": case.precision, "gemm": gemm}

    def forward() -> Any:
        return gsbn.forward(x, weight, scale, **affine, **state, **options, return_saved=True)[1]

    saved = forward() if case.direction == "backward" else None

    def call() -> Any:
        return gsbn.backward(dy, saved if saved is not None else forward())

    def outputs() -> tuple[Any, ...]:
        return tuple(map(library.give, call()))

    path = "numpy" if xp is np else gemm
    return Candidate(name, library.name, call, outputs, path == "tiled", path)


def _autograd(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    from .peers import Candidate, Unavailable, _scale_batch_norm, _Torch

    if name != "pytorch" and case.direction == "backward":
        raise Unavailable("a compiled backward is timed in its step")
    library = _Torch(xp)
    torch = library.torch
    module = _scale_batch_norm(library, case, operands)
    run = module
    if name != "pytorch":
        mode = {"autotune": "max-autotune-no-cudagraphs"}.get(name, "default")
        run = torch.compile(module, dynamic=False, mode=mode)
    for key, a in operands.fresh_statistics(xp).items():
        buffer = getattr(module.bn, key)
        buffer.copy_(library.take(a).reshape(buffer.shape))
    x, dy = library.take(operands.x).requires_grad_(), library.take(draw_dy(xp, operands))
    leaves = [x, module.gemm.weight, module.gemm.bias, module.scale, module.bn.weight, module.bn.bias]
    for parameter in module.parameters():
        parameter.requires_grad_()
    kept: list[Any] = []
    if case.direction == "backward":
        with torch.enable_grad():
            kept.append(run(x))

    def call() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(kept[0] if kept else run(x), leaves, dy, retain_graph=bool(kept))

    return Candidate(name, "torch", call, lambda: tuple(library.give(a) for a in call()))
