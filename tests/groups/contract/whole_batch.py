"""Correct results: each rank compares its results with the truth of the whole batch.

**A rank's part of a gradient.** Its D and S equal those of a dy that is zero in all other rows, and so do dgamma,
dscale, dbeta and their bounds. dx has this rank's rows of the whole batch's. dweight is dgᵀ x with the dg of the whole
batch and an x that is zero in all other rows: the gradient of a second half of x with zero weights. The bound of the
whole batch has sums over rows, so it also holds for a part; rounding a part to the weight's dtype adds ū |part|.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np

import gsbn
from gsbn import reference
from gsbn.bench.activations import before
from tests.groups.contract.rank import CASE, LARGE, SPLITS, Ranks, raises, together
from tests.support.families import FAMILIES
from tests.support.gradients import NAMES, draw_dy, gradient_bounds, step, truth_of
from tests.support.harness import DTYPES, GPU_KINDS, STATISTICS, assert_same_bits, forward, without_out
from tests.support.strategies import ACTIVATIONS, RENORMS, SCALES, Case
from tests.support.tolerance import assert_within, bounds, roundoff


def assert_whole_batch(at: Ranks, case: Case, parts: list[slice]) -> None:
    """A forward and a step on the rows of every rank, against the truth of all rows.

    The same calls give the same bits, and the same running statistics on all ranks.
    """
    arrays, (B, _, O) = case.arrays(), case.shape
    rows, dy = parts[at.rank], draw_dy(arrays)
    mine = arrays | {name: arrays[name][rows] for name in ("x", "residual", "out") if name in arrays}
    options, layouts = {**case.options, "group": at.group}, dict(case.layouts)
    got, again = (forward(at.kind, mine, layouts, **options) for _ in range(2))
    for one, other in zip(got, again, strict=True):
        if one is not None:
            assert_same_bits(one, other)
    (y, gradients), (y_again, gradients_again) = (step(at.kind, mine, dy[rows], layouts, **options) for _ in range(2))
    assert_same_bits(y, y_again)
    for name, gradient in gradients.items():
        if gradient is not None:
            assert_same_bits(gradient, gradients_again[name])

    whole = without_out(arrays)
    wide = np.longdouble if case.dtype == "float64" else np.float64
    truth = reference.forward(**whole, **case.options, dtype=wide)
    bound = bounds(whole, truth, **case.options, deferred=DTYPES[case.dtype].itemsize == 2)
    for found in (got.y, y) if len(y) else ():
        assert_within(found, truth.y[rows], bound.y[rows], "y")
    if got.running_mean is not None:
        assert_within(got.running_mean, truth.running_mean, bound.running_mean, "running_mean")
        assert_within(got.running_var, truth.running_var, bound.running_var, "running_var")
    assert got.num_batches_tracked is None or got.num_batches_tracked == truth.num_batches_tracked
    for name in STATISTICS:
        found = getattr(got, name)
        for other in () if found is None else at.gathered(found):
            assert_same_bits(found, other)

    after = dy
    if case.activation is not None:  # where y of all ranks is above zero
        whole_y = np.zeros((B, O), y.dtype)
        whole_y[rows] = y
        whole_y = np.concatenate([a[of] for a, of in zip(at.gathered(whole_y), parts, strict=True)])
        u = reference.forward(**whole, **{**case.options, "activation": None}, dtype=wide).y
        dy = before(np, dy.astype(wide), u, ~(np.asarray(whole_y, float) <= 0), case.activation)
    if "residual" in whole:  # relu and a copy round nothing
        np.testing.assert_array_equal(gradients["residual"], dy[rows])
    assert_gradients(at, case, whole, dy, gradients, rows, after)


def assert_gradients(
    at: Ranks, case: Case, arrays: dict[str, np.ndarray], dy: np.ndarray, got: dict[str, Any], rows: slice,
    after: np.ndarray,
) -> None:  # fmt: skip
    """Raise unless the gradients are within the bounds at the head of this module; `after`: the gradient of y."""

    def truth_and_bounds(dy: np.ndarray, after: np.ndarray) -> tuple[gsbn.Gradients, dict[str, np.ndarray]]:
        truth = truth_of(arrays, dy, training=True, eps=case.eps, renorm=case.renorm)
        form = {"activation": case.activation, "deferred": at.kind.name in GPU_KINDS}  # as forward_sm90 defers tiles
        form |= {"eps": case.eps, "renorm": case.renorm, "after": np.float64(after)}
        return truth, gradient_bounds(arrays, dy, truth, training=True, **form)

    def of_rows(dy: np.ndarray) -> np.ndarray:
        made = np.zeros_like(dy)
        made[rows] = dy[rows]
        return made

    part, part_bounds = truth_and_bounds(of_rows(dy), of_rows(after))
    for name in NAMES[2:]:
        if got[name] is not None:
            assert_within(got[name], np.asarray(getattr(part, name)), part_bounds[name], f"d{name}")
    whole, whole_bounds = truth_and_bounds(dy, after)
    if len(got["x"]):
        assert_within(got["x"], whole.x[rows], whole_bounds["x"][rows], "dx")
    x_of_rows = np.zeros_like(arrays["x"])
    x_of_rows[rows] = arrays["x"][rows]
    more = {"x": [arrays["x"], x_of_rows], "weight": [arrays["weight"], np.zeros_like(arrays["weight"])]}
    wider = arrays | {name: np.hstack(halves) for name, halves in more.items()}
    dw = truth_of(wider, dy, training=True, eps=case.eps, renorm=case.renorm).weight[:, case.shape[1] :]
    assert_within(got["weight"], dw, whole_bounds["weight"] + roundoff(got["weight"].dtype) * np.abs(dw), "dweight")


@together
def every_dtype(at: Ranks) -> None:
    for dtype in DTYPES:
        for split in SPLITS:
            assert_whole_batch(at, replace(CASE, shape=(70, 37, 20), dtype=dtype), at.deal(70, split))


@together
def several_blocks(at: Ranks) -> None:
    for dtype in ("float32", "float16"):
        assert_whole_batch(at, replace(LARGE, dtype=dtype), at.deal(LARGE.shape[0], "uneven"))


@together
def many_short_rows(at: Ranks) -> None:
    """A GPU with many rows computes g twice; other ranks may have too few rows for it."""
    for dtype in ("float32", "bfloat16"):
        for split in ("uneven", "none on the last"):
            assert_whole_batch(at, replace(LARGE, shape=(20000, 24, 40), dtype=dtype), at.deal(20000, split))


@together
def a_residual(at: Ranks) -> None:
    """Of a rank's own rows; a rank without rows adds nothing."""
    case = replace(CASE, shape=(70, 37, 20), given=(*CASE.given, "residual"))
    for activation, split in itertools.product(ACTIVATIONS, SPLITS):
        assert_whole_batch(at, replace(case, activation=activation), at.deal(70, split))


@together
def every_argument(at: Ranks) -> None:
    parts = at.deal(9, "uneven")
    for given in ((), ("running",), ("bias", "beta"), CASE.given):
        for scale in SCALES:
            for activation in ACTIVATIONS:
                assert_whole_batch(at, replace(CASE, given=given, scale=scale, activation=activation), parts)
    for split in SPLITS:
        average = replace(CASE, momentum=None, eps=1e-3, activation="relu")
        assert_whole_batch(at, average, at.deal(9, split))
    strided = tuple((name, "strided") for name in ("x", "weight", "out", "running_mean"))
    assert_whole_batch(at, replace(CASE, dtype="bfloat16", narrow=("gamma", "running"), layouts=strided), parts)


@together
def batch_renormalisation(at: Ranks) -> None:
    """Each limit, and each side of a warm-up; the ratio and the shift are those of all ranks' rows."""
    for renorm in RENORMS[1:]:
        for dtype, shape in itertools.product(("float32", "bfloat16"), ((9, 5, 4), (300, 160, 264))):
            case = replace(CASE, shape=shape, dtype=dtype, renorm=renorm, activation="relu")
            assert_whole_batch(at, case, at.deal(shape[0], "uneven"))
    few = replace(CASE, shape=(2, 5, 4), renorm=(1.5, 0.5), layouts=())
    assert_whole_batch(at, few, at.deal(2, "none on the last"))


@together
def other_activations(at: Ranks) -> None:
    for activation in ("leaky_relu", "silu", "gelu", "gelu_tanh", ("elu", 1.5)):
        for dtype in ("float32", "bfloat16"):
            case = replace(CASE, shape=(70, 37, 20), dtype=dtype, activation=activation)
            assert_whole_batch(at, case, at.deal(70, "uneven"))


@together
def a_mean_far_from_zero(at: Ranks) -> None:
    """E[g²] - E[g]² would be noise; and each rank has another mean."""
    for offset in (1e4, -1e4):
        assert_whole_batch(at, replace(CASE, shape=(70, 37, 20), offset=offset), at.deal(70, "uneven"))


@together
def every_family(at: Ranks) -> None:
    """A different first row is on one rank; differences between tiles are on all ranks."""
    for family in FAMILIES:
        for dtype in ("float32", "bfloat16"):
            assert_whole_batch(
                at, replace(CASE, shape=(300, 40, 24), dtype=dtype, family=family), at.deal(300, "uneven")
            )


@together
def an_outlying_row_in_16_bits(at: Ranks) -> None:
    """Gradients are as accurate as one rank's with all rows. Deviations in 16 bits have another mean and variance than
    g, and so the ranks exchange both. Each part of dweight is rounded once more; the factor 1.5 is for other roundings
    of dg, which is rounded to x's dtype in both. A rank with few rows keeps deviations in float64."""
    few = [slice(10 * rank, 10 * rank + 10) for rank in range(at.size - 1)]
    for parts in at.deal(300, "uneven"), [*few, slice(10 * len(few), 300)]:
        for dtype, family in itertools.product(("float16", "bfloat16"), ("row 0 x 2e3", "last row x 1e5")):
            case = replace(CASE, shape=(300, 40, 24), dtype=dtype, family=family, layouts=())
            arrays, rows = without_out(case.arrays()), parts[at.rank]
            dy = draw_dy(arrays)
            truth = truth_of(arrays, dy, training=True, eps=case.eps)
            _, alone = step(at.kind, arrays, dy, {}, **case.options)
            mine = arrays | {"x": arrays["x"][rows]}
            _, gradients = step(at.kind, mine, dy[rows], {}, **case.options, group=at.group)
            for name in ("weight", "gamma", "scale"):
                found = [part.astype(np.float64) for part in at.gathered(gradients[name])]
                allowed = 1.5 * _norm(alone[name] - getattr(truth, name))
                allowed += sum(roundoff(gradients[name].dtype) * _norm(part) for part in found)
                error = _norm(sum(found) - getattr(truth, name))
                assert error <= allowed, f"{dtype}, {family}: d{name} is off by {error:g}, {allowed:g} is allowed"


def _norm(a: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64)))


@together
def one_row_a_rank(at: Ranks) -> None:
    for dtype in DTYPES:
        case = replace(CASE, shape=(at.size, 5, 4), dtype=dtype)
        assert_whole_batch(at, case, at.deal(at.size, "even"))


@together
def one_row_in_all(at: Ranks) -> None:
    """All ranks raise and write no statistics; the group can still be used."""
    arrays = replace(CASE, shape=(1, 5, 4)).arrays()
    rows = at.deal(1, "none on the first")[at.rank]
    native = at.natives(without_out(arrays) | {"x": arrays["x"][rows]})
    with raises(ValueError, "Expected more than 1 value per channel"):
        gsbn.forward(**native, training=True, group=at.group)
    for name in STATISTICS:
        assert_same_bits(at.kind.get(native[name]), arrays[name])
    assert_whole_batch(at, CASE, at.deal(9, "even"))


@together
def no_row_at_all(at: Ranks) -> None:
    """Nothing is computed or written; gradients of parameters are zero."""
    arrays = without_out(replace(CASE, shape=(0, 5, 4)).arrays())
    native = at.natives(arrays)
    y, saved = gsbn.forward(**native, training=True, group=at.group, return_saved=True)
    assert tuple(y.shape) == (0, 4) and y.dtype == native["x"].dtype
    for name in STATISTICS:
        assert_same_bits(at.kind.get(native[name]), arrays[name])
    found = gsbn.backward(y, saved)
    assert tuple(found.x.shape) == (0, 5)
    for name in NAMES[1:]:
        np.testing.assert_array_equal(at.kind.get(getattr(found, name)), np.zeros_like(arrays[name]))


@together
def backward_of_some(at: Ranks) -> None:
    """Two backwards from one Saved, with other gradients needed on each rank, give the same bits."""
    arrays, rows = CASE.arrays(), at.deal(9, "uneven")[at.rank]
    native = at.natives(without_out(arrays) | {"x": arrays["x"][rows]})
    _, saved = gsbn.forward(**native, training=True, group=at.group, return_saved=True)
    assert saved.group is at.group
    dy = at.kind.put(draw_dy(arrays)[rows])
    all_of_them = gsbn.backward(dy, saved)
    needs = (("x", "scale"), ("weight",), ())[at.rank % 3]
    some = gsbn.backward(dy, saved, needs=needs)
    for name in NAMES:
        assert (getattr(some, name) is None) == (name not in needs)
        if name in needs:
            assert_same_bits(at.kind.get(getattr(some, name)), at.kind.get(getattr(all_of_them, name)))


@together
def many_calls(at: Ranks) -> None:
    """Calls of random sizes, splits, dtypes and options; all ranks draw the same ones."""
    draw = random.Random(0)
    for _ in range(100):
        B = draw.choice([2, 3, draw.randint(4, 40), draw.randint(4, 90)])
        ends = sorted([0, B, *(draw.randint(0, B) for _ in range(at.size - 1))])
        case = Case(
            (B, draw.randint(1, 20), draw.randint(1, 40)),
            draw.choice(list(DTYPES)),
            training=True,
            seed=draw.randint(0, 99),
            offset=draw.choice([0.0, 1.0, -10.0]),
            momentum=draw.choice([0.1, 0.0, 1.0, None]),
            eps=draw.choice([1e-5, 1e-3]),
            scale=draw.choice(list(SCALES)),
            activation=draw.choice(ACTIVATIONS),
        )
        assert_whole_batch(at, case, list(itertools.starmap(slice, itertools.pairwise(ends))))
