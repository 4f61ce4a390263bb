"""Forwards with a known truth: within bounds, or exact."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gsbn import _plan, reference
from gsbn._cuda import kernels as _kernels
from gsbn._plan import Limits
from gsbn._plan.sm90_variants import largest_block
from tests.support.harness import DTYPES, without_out
from tests.support.strategies import Case
from tests.support.tolerance import bounds

GEMMS = ["auto", "cublas", "tiled"]
CASE = Case((200, 72, 136), "float32", training=True)


def truth_and_bounds(
    arrays: dict[str, np.ndarray], operand: float = 0.0, **options: Any
) -> tuple[reference.Forward, Any]:
    wide = np.longdouble if arrays["x"].dtype == np.float64 else np.float64
    truth = reference.forward(**without_out(arrays), **options, dtype=wide)
    return truth, bounds(arrays, truth, operand=operand, **options)


@contextlib.contextmanager
def refused_by_sm90(gemm: str) -> Iterator[None]:
    """Skip calls that forward_sm90 refuses."""
    try:
        yield
    except ValueError as error:
        if gemm != "sm90" or not str(error).startswith("gemm:"):
            raise
        pytest.skip(str(error))


def exact_training(shape: tuple[int, int, int], dtype: str) -> dict[str, np.ndarray]:
    """A training problem whose every intermediate result is exact in any order, for eps = 12.

    g_ij = c_j ± q_j with as many pluses as minuses: m = c and v = q². With s q = ±2, s² v + eps = 4 + 12 and r = 1/4.
    The signs alternate, so that every tile of an even number of rows has these statistics too. The other columns of x
    are random, in pairs that the weight cancels.
    """
    B, I, O = shape
    rng, t = np.random.default_rng(0), DTYPES[dtype]
    x, weight = np.zeros((B, I)), np.zeros((O, I))
    x[:, 0], x[:, 1] = 1, np.resize([1, -1], B)
    scale = rng.choice([-2, -1, -0.5, 0.5, 1, 2], O)
    weight[:, 0], weight[:, 1] = rng.integers(-4, 5, O), 2 / scale
    pairs = (I - 2) // 2
    x[:, 2 : 2 + pairs] = x[:, I - pairs :] = rng.integers(-4, 5, (B, pairs))
    weight[:, 2 : 2 + pairs] = rng.integers(-4, 5, (O, pairs))
    weight[:, I - pairs :] = -weight[:, 2 : 2 + pairs]
    order = rng.permutation(I)
    arrays = {
        "x": x[:, order],
        "weight": weight[:, order],
        "scale": scale,
        "bias": rng.integers(-4, 5, O),
        "gamma": rng.choice([-4, -2, 2, 4], O),
        "beta": rng.integers(-8, 9, O),
        "running_mean": rng.integers(-4, 5, O),
        "running_var": rng.integers(1, 9, O),
        "out": np.full((B, O), np.nan),
    }
    return {name: a.astype(t) for name, a in arrays.items()}


def recompute_on_few_sms(dtype: str, precision: str, cluster: int) -> Limits:
    """Limits with which CTAs have several tiles of a small problem, in mode "recompute": a GPU of ten SMs."""
    import cupy

    gpu = _kernels.gpu(cupy.cuda.Device().id)._replace(sms=10, pairs=5)
    return Limits(sm90=(largest_block(_plan.element_for(dtype, precision)), cluster), recompute=True, gpu=gpu)
