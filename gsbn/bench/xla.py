"""The layer in JAX, compiled by XLA: as JAX multiplies by default, and with float32 products made of several others.

XLA's ways to float32 are presets of ``jax.lax.DotAlgorithmPreset``: TF32_TF32_F32_X3, BF16_BF16_F32_X6 and
BF16_BF16_F32_X9. Where a GPU's compiler has no such product, it may take TF32 and say nothing: the error tells.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from .._plan.activations import name_and_number
from . import libraries
from .bounds import EPS, MOMENTUM, Operands
from .candidate import Candidate, Unavailable
from .case import Case

PRESETS = {"jax-tf32x3": "TF32_TF32_F32_X3", "jax-bf16x6": "BF16_BF16_F32_X6", "jax-bf16x9": "BF16_BF16_F32_X9"}


def _activated(nn: Any, y: Any, activation: Any) -> Any:
    """y with the activation applied by JAX."""
    name, number = name_and_number(activation)
    if name.startswith("gelu"):
        return nn.gelu(y, approximate=name == "gelu_tanh")
    return getattr(nn, name)(y, *([] if number is None else [number]))


def make(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    """The candidate ``jax``, or that of a preset; with ``gemm-`` before its name its product alone.

    Raises ``Unavailable``.
    """
    jax = libraries.load([name])["jax"]
    if jax is None:
        raise Unavailable("jax is not installed")
    if case.dtype == "float64":
        raise Unavailable("jax computes float64 only in its global x64 mode")
    on_gpu = xp.__name__ == "cupy"
    with xp.cuda.Device() if on_gpu else nullcontext():  # JAX starts here, and leaves the last GPU current
        backend = jax.default_backend()
    if (backend == "gpu") != on_gpu:
        raise Unavailable(f"jax runs on {backend} here")
    jnp = jax.numpy
    alone = name.startswith("gemm-")
    precision = _algorithm(jax, name.removeprefix("gemm-"), case, xp)

    def to_jax(a: Any) -> Any:
        if a.dtype.name == "bfloat16":
            return jax.lax.bitcast_convert_type(jnp.from_dlpack(a.view("int16")), jnp.bfloat16)
        return jnp.from_dlpack(a)

    def from_jax(a: Any) -> Any:
        if a.dtype == jnp.bfloat16:
            return xp.from_dlpack(jax.lax.bitcast_convert_type(a, jnp.int16)).view(operands.x.dtype)
        return xp.from_dlpack(a)

    def formula(x: Any, w: Any, s: Any, b: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
        z = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision) + b  # x @ w.T + b
        z = z if s is None else z * s
        m, v = (mean, var)
        if case.training:
            m, v = z.mean(0, dtype=jnp.float32), z.var(0, dtype=jnp.float32)
            unbiased = case.batch / (case.batch - 1)
            mean = ((1 - MOMENTUM) * mean + MOMENTUM * m).astype(mean.dtype)
            var = ((1 - MOMENTUM) * var + MOMENTUM * unbiased * v).astype(var.dtype)
        y = (z - m) * (gamma * jax.lax.rsqrt(v.astype(jnp.float32) + EPS)) + beta
        y = y if case.activation is None else _activated(jax.nn, y, case.activation)
        return y.astype(x.dtype), mean, var

    def product(x: Any, w: Any) -> Any:
        return (jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision),)

    forward = jax.jit(product if alone else formula)
    if on_gpu:
        xp.cuda.get_current_stream().synchronize()
    fresh = operands.fresh_statistics(xp)
    vectors = [operands.affine[key] for key in ("bias", "gamma", "beta")]
    arrays = [operands.x, operands.weight]
    if not alone:
        arrays += [operands.scale, *vectors, fresh["running_mean"], fresh["running_var"]]
    arguments = [None if a is None else to_jax(a) for a in arrays]
    jax.block_until_ready(arguments)

    def outputs() -> dict[str, Any]:
        results = jax.block_until_ready(forward(*arguments))
        keys = ("g",) if alone else ("y", "running_mean", "running_var")
        return {key: from_jax(a) for key, a in zip(keys, results, strict=True)}

    return Candidate(name, "jax", lambda: forward(*arguments), outputs, wait=jax.block_until_ready)


def _algorithm(jax: Any, name: str, case: Case, xp: Any) -> Any:
    """How products are computed; None is JAX's default."""
    if name in PRESETS:
        try:
            return jax.lax.DotAlgorithmPreset[PRESETS[name]]
        except (AttributeError, KeyError):
            raise Unavailable(f"this jax has no {PRESETS[name]}") from None
    if case.dtype == "float32" and xp.__name__ == "cupy":  # JAX's default would be TF32
        return {"highest": "F32_F32_F32", "high": "TF32_TF32_F32"}[case.precision]
    return None
