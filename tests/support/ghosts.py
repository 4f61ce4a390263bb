"""How far from the truth a call with `groups` may be: each run of rows within the bounds of a batch of its own.

The errors of the running statistics, and of gradients that are sums over the runs, are at most the sums of the runs'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from gsbn import reference

STATE = ("running_mean", "running_var", "num_batches_tracked")


def runs(arrays: Mapping[str, np.ndarray], groups: int) -> Iterator[dict[str, np.ndarray]]:
    """The arguments of the call for each run of rows, without state."""
    split = {name: np.split(arrays[name], groups) for name in ("x", "residual") if name in arrays}
    for i in range(groups):
        yield {**{n: a for n, a in arrays.items() if n not in STATE}, **{n: of[i] for n, of in split.items()}}


def bounds_of_runs(
    of_run: Callable[..., Any], arrays: Mapping[str, np.ndarray], truth: reference.Forward, groups: int, **options: Any
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The bounds of y and of the running statistics, from `of_run(arrays, truth, **options)` for each run."""
    state = {name: arrays[name] for name in STATE if name in arrays}
    form = {name: options[name] for name in ("training", "momentum", "eps", "activation") if name in options}
    found = []
    for run in runs(arrays, groups):
        of_state = {**run, **state}
        after = reference.forward(**of_state, **form, dtype=truth.y.dtype)
        found.append(of_run(of_state, after, **options))
        for name in state:
            dtype, value = arrays[name].dtype, np.asarray(getattr(after, name))
            if name != "num_batches_tracked":  # passes round after all runs; float16 may overflow before
                largest = float(ml_dtypes.finfo(dtype).max)
                value = np.clip(value, -largest, largest)
            state[name] = value.astype(dtype)
    y, mean, var = zip(*found, strict=True)
    sums = (None if of[0] is None else np.sum(of, axis=0) for of in (mean, var))
    return np.concatenate(y), *sums


def gradient_bounds_of_runs(
    of_run: Callable[..., Any], arrays: Mapping[str, np.ndarray], dy: np.ndarray, groups: int, after: Any,
    **options: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The bounds of the gradients, from `of_run(arrays, dy, truth, **options)` for each run. dweight adds all rows."""
    wide = np.longdouble if arrays["x"].dtype == np.float64 else np.float64
    names = ("x", "weight", "scale", "bias", "gamma")
    every, afters, found = len(arrays["x"]), [None] * groups if after is None else np.split(after, groups), []
    for run, of_dy, of_after in zip(runs(arrays, groups), np.split(dy, groups), afters, strict=True):
        given = {name: run[name] for name in names if name in run}
        truth = reference.backward(of_dy, **given, training=True, eps=options["eps"], dtype=wide)
        found.append(of_run(run, of_dy, truth, rows=every, after=of_after, **options))
    made = {name: np.sum([of[name] for of in found], axis=0) for name in found[0]}
    return {**made, "x": np.concatenate([of["x"] for of in found])}
