"""Ghost batches on the CPU: `passes` is called for each ghost batch, and the results are combined here.

Between the ghost batches the running statistics are float64. The gradients are rounded once, after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._rounding import round_to
from .._values import raised_count
from . import passes

Array = Any
_STATISTICS = ("running_mean", "running_var")


@np.errstate(all="ignore")
def forward(arrays: dict[str, Any], y: Array, *, groups: int, **options: Any) -> tuple[Array, Array] | None:
    """`passes.forward` for each of `groups` ghost batches."""
    if groups == 1:
        return passes.forward(arrays, y, **options)
    count = arrays["num_batches_tracked"]
    if count is not None:  # raise before anything is written
        raised_count(count.item(), options["momentum"], groups)
    wide = {n: None if arrays[n] is None else arrays[n].astype(np.float64) for n in _STATISTICS}
    kept = []
    for x_of_run, y_of_run in zip(np.split(arrays["x"], groups), np.split(y, groups), strict=True):
        kept.append(passes.forward({**arrays, **wide, "x": x_of_run}, y_of_run, **options))
    for name, found in wide.items():
        if found is not None:
            to = arrays[name]
            to[...] = found if to.itemsize > 2 else round_to(found, to.dtype)
    if not options["keep"]:
        return None
    deviations, vectors = zip(*kept, strict=True)
    return np.concatenate(deviations), np.stack(vectors)


@np.errstate(all="ignore")
def backward(
    dy: Array, x: Array, weight: Array, kept: Array, vectors: Array, *, groups: int, needs: Mapping[str, str],
    **options: Any,
) -> dict[str, Array]:  # fmt: skip
    """`passes.backward` for each ghost batch, from what `forward` returned."""
    if groups == 1 or not len(x):
        return passes.backward(dy, x, weight, kept, vectors, needs=needs, **options)
    wide = {name: dtype if name == "x" else "float64" for name, dtype in needs.items()}
    runs = zip(*(np.split(a, groups) for a in (dy, x, kept)), vectors, strict=True)
    found = [
        passes.backward(of_dy, of_x, weight, of_kept, of_vectors, needs=wide, **options)
        for of_dy, of_x, of_kept, of_vectors in runs
    ]
    sums = {name: np.sum([of_run[name] for of_run in found], axis=0) for name in needs if name != "x"}
    made = {}
    for name, total in sums.items():
        dtype = x.dtype if needs[name] == x.dtype.name else np.dtype(needs[name])  # np.dtype("bfloat16") is an error
        made[name] = passes.rounded(np.asarray(total), dtype)
    return made | ({"x": np.concatenate([of_run["x"] for of_run in found])} if "x" in needs else {})
