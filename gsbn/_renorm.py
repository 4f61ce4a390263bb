"""Batch renormalisation: its limits, and the two numbers by which it corrects a feature."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np

from ._values import real_number, shown

OFF = (1.0, 0.0)  # the limits of batch normalisation


class Renorm(NamedTuple):
    """Batch renormalisation (Ioffe 2017) in training: the running statistics take part in y.

    ::

        y = gamma (r (z - mean) / sigma + d) + beta,    z = scale (g + bias)
        sigma = sqrt(var + eps),  sigma' = sqrt(running_var + eps)
        r = clip(sigma / sigma', 1 / r_max, r_max),  d = clip((mean - running_mean) / sigma', -d_max, d_max)

    mean and the biased var are those of z over the batch. The running statistics are those before this batch, which
    then updates them as without renormalisation. The backward takes r and d as constants. The limits 1 and 0 are batch
    normalisation.

    Attributes
    ----------
    r_max : float
        At least 1.
    d_max : float
        At least 0.
    warmup : int
        While ``num_batches_tracked``, before this batch, is below it, r is 1 and d is 0. The count is read on the
        device: a replayed CUDA graph warms up, too.

    Notes
    -----
    This is what CrossQ's ``BatchRenorm`` and torchrl's ``BatchRenorm1d`` compute, with their defaults, but that they
    warm up for 100,000 and 10,000 batches. (Beyond twice its ``warmup_steps`` torchrl's r and d leave their limits.)
    CrossQ divides sigma by r before it adds eps, and tracks the biased variance; torchrl and this one track the
    unbiased one, as ``BatchNorm1d``. The paper widens the limits step by step: pass an array of limits for that.

    Examples
    --------
    >>> import gsbn
    >>> gsbn.Renorm(d_max=2.0)
    Renorm(r_max=3.0, d_max=2.0, warmup=0)
    """

    r_max: float = 3.0
    d_max: float = 5.0
    warmup: int = 0


def renorm_of(value: Any) -> Renorm:
    """The limits that a Renorm or a tuple has; raise an error that names `renorm` if it is something else."""
    if not isinstance(value, tuple) or not 0 < len(value) <= len(Renorm._fields):
        raise TypeError(f"renorm: expected a gsbn.Renorm, (r_max, d_max), an array of both or None, got {shown(value)}")
    given = Renorm(*value)
    r_max, d_max = (real_number("renorm", getattr(given, name), f"a finite {name}") for name in ("r_max", "d_max"))
    if r_max < 1:
        raise ValueError(f"renorm: expected r_max of at least 1, got {shown(given.r_max)}")
    if d_max < 0:
        raise ValueError(f"renorm: expected d_max of at least 0, got {shown(given.d_max)}")
    warmup = given.warmup
    if not isinstance(warmup, numbers.Integral) or isinstance(warmup, (bool, np.bool_)):
        raise TypeError(f"renorm: expected a whole number for warmup, got {shown(warmup)}")
    if not 0 <= warmup < 2**63:
        raise ValueError(f"renorm: expected a warmup of at least 0, got {shown(warmup)}")
    return Renorm(r_max, d_max, int(warmup))


def ratio_and_shift(limits: Any, mean: Any, sigma: Any, running_mean: Any, running_sigma: Any) -> tuple[Any, Any]:
    """r and d of `Renorm`, (O,) each, from (r_max, d_max) and the statistics of z, (O,) each."""
    r_max, d_max = limits
    r = np.clip(sigma / running_sigma, 1 / r_max, r_max)
    return r, np.clip((mean - running_mean) / running_sigma, -d_max, d_max)


def correction_of(
    renorm: Any,
    batches: int | None,
    mean: Any,
    sigma: Any,
    old_mean: Any,
    old_var: Any,
    eps: float,
) -> tuple[Any, Any]:
    """ρ and δ of `gsbn.reference`, which are r and d of `Renorm`, (O,) each; 1 and 0 without `renorm`.

    `batches` is the count before this batch. Raises a ValueError that names what is missing.
    """
    if renorm is None:
        return 1, 0
    if old_mean is None or old_var is None:
        raise ValueError("running_mean: expected the running statistics with renorm, got None")
    given = renorm if isinstance(renorm, tuple) else (*np.asarray(renorm, np.float64), 0)
    *limits, warmup = renorm_of(given)
    if warmup and batches is None:
        raise ValueError("num_batches_tracked: expected a count with renorm's warmup, got None")
    if batches is not None and warmup > max(batches, 0):
        limits = list(OFF)
    return ratio_and_shift(limits, mean, sigma, old_mean, np.sqrt(old_var + eps))
