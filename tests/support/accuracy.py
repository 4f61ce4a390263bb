"""The contract's accuracy rule: gsbn against PyTorch in the same dtype and run, over five seeds, on hard inputs.

beside_torch.py has another rule, for all families and results, on the GPU.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gsbn import reference
from gsbn._plan import Limits
from tests.support.families import spoil
from tests.support.harness import DTYPES, Kind, assert_same_bits, forward, kind_of, without_out
from tests.support.tolerance import TF32, assert_outcome_within, bounds, norm_error

FAMILIES = ("normal", "mean 1e2", "mean 1e4", "tiny variance", "tiny and zero scale", "constant features")
SEEDS = range(5)


def family(name: str, seed: int, shape: tuple[int, int, int], dtype: str) -> dict[str, np.ndarray]:
    """All arguments of one problem. The scale has x's dtype, as torch needs it; other vectors a wide one."""
    B, I, O = shape
    rng = np.random.default_rng(seed)
    x, weight, scale = rng.standard_normal((B, I)), rng.standard_normal((O, I)) / np.sqrt(I), rng.uniform(0.5, 2, O)
    spoil(name, x, weight, scale, dtype, seed)
    narrow, wide = DTYPES[dtype], DTYPES["float64" if dtype == "float64" else "float32"]
    matrices = {"x": x, "weight": weight, "scale": scale, "bias": rng.standard_normal(O)}
    vectors = {
        "gamma": rng.uniform(0.5, 2, O),
        "beta": rng.standard_normal(O),
        "running_mean": np.zeros(O),
        "running_var": np.ones(O),
    }
    return {
        **{n: reference.round_to(a, narrow) for n, a in matrices.items()},
        **{n: reference.round_to(a, wide) for n, a in vectors.items()},
    }


def torch_eager(kind: Kind, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``batch_norm(linear(x) * scale)`` in training: y and the running statistics."""
    import torch

    t = {name: kind.put(a) for name, a in arrays.items()}
    z = torch.nn.functional.linear(t["x"], t["weight"], t["bias"]) * t["scale"]
    statistics = t["running_mean"], t["running_var"]
    y = torch.nn.functional.batch_norm(z, *statistics, t["gamma"], t["beta"], training=True)
    return kind.get(y), kind.get(statistics[0]), kind.get(statistics[1])


def assert_as_accurate_as_torch(kind: Kind, name: str, shape: tuple[int, int, int], dtype: str, **options: Any) -> None:
    """Norm-wise at most 1.05 times torch's error and a quarter of eps; no element worse than 1.5 times torch's worst.

    Statistics of float64 are judged norm-wise alone. Other results are rounded from a wider type. These are not: both
    sides are a few roundings off the truth, and it is chance which has the worst of 320 elements. tolerance.py bounds
    them elementwise.
    """
    problems = [family(name, seed, shape, dtype) for seed in SEEDS]
    wide = np.longdouble if dtype == "float64" else np.float64
    truths = [reference.forward(**arrays, training=True, dtype=wide) for arrays in problems]
    theirs = [torch_eager(kind, arrays) for arrays in problems]
    ours = [forward(kind, arrays, training=True, **options) for arrays in problems]

    for index, what in enumerate(("y", "running_mean", "running_var")):
        truth = np.stack([getattr(t, what) for t in truths])
        mine, its = np.stack([o[index] for o in ours]), np.stack([t[index] for t in theirs])
        eps = float(ml_dtypes.finfo(mine.dtype).eps)
        error, its_error = norm_error(mine, truth), norm_error(its, truth)
        assert error <= 1.05 * its_error + eps / 4, f"{what}: {error} for torch's {its_error}"
        if (what, dtype) in (("running_mean", "float64"), ("running_var", "float64")):
            continue
        worst, its_worst = (np.abs(np.asarray(a, wide) - truth).max() for a in (mine, its))
        assert worst <= 1.5 * its_worst, f"{what}: {worst} for torch's {its_worst}"


def assert_right_and_repeated(
    arrays: dict[str, Any], dtype: str, precision: str, limits: Limits, activation: str | None = None
) -> None:
    """A training forward by the one launch, without deferred tiles, is within its bounds, and repeats bit by bit."""
    options = {"training": True, "gemm": "sm90", "precision": precision, "activation": activation}
    got, again = (forward(kind_of("cupy"), arrays, limits=limits, **options) for _ in range(2))
    for a, b in zip(got, again, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(np.atleast_1d(a), np.atleast_1d(b))
    truth = reference.forward(**without_out(arrays), training=True)
    limbs = (dtype, precision) == ("float32", "highest")
    limit = bounds(arrays, truth, training=True, operand=TF32 if dtype == "float32" else 0.0, limbs=limbs)
    if activation:
        truth = truth._replace(y=np.maximum(truth.y, 0))
    assert_outcome_within(got, truth, limit)
