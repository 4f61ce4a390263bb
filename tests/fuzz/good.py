"""Good calls: any combination that the API allows, checked against the truth and the documentation."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import gsbn
from gsbn import _plan, reference
from gsbn._cuda import kernels as _kernels
from gsbn._gradients import NEEDS
from tests.support.families import FAMILIES
from tests.support.gradients import (
    NAMES,
    assert_beta_agrees,
    before_relu,
    draw_dy,
    draw_integers,
    gradient_bounds,
    truth_of,
)
from tests.support.harness import (
    CPU_KINDS,
    DTYPES,
    GPU_KINDS,
    LAYOUTS,
    STATISTICS,
    Kind,
    Outcome,
    Placed,
    assert_same_bits,
    kind_of,
    place,
    poisoned_allocations,
    without_out,
)
from tests.support.strategies import ACTIVATIONS, OPTIONAL, RENORMS, SCALES, VECTORS, Case
from tests.support.streams import capture, new_stream
from tests.support.tolerance import TF32, Bounds, assert_outcome_within, assert_within, bounds

Arrays = dict[str, np.ndarray]
COUNT = "num_batches_tracked"
FLOATS = ("x", "weight", "scale", "bias", "gamma", "beta", "running_mean", "running_var", "residual", "out", "dy")
SIDES = sorted({2**i + d for i in range(1, 11) for d in (-1, 0, 1)} | {*range(4, 81, 4)} | {5, 11, 29, 61, 131, 383})
STREAMS = {"cupy": ("default", "new", "ptds", "null"), "torch-cuda": ("default", "new")}


@dataclass(frozen=True)
class Good:
    """A valid call."""

    kind: str
    recipe: Case  # its layouts include that of dy
    number: float | None  # a scale that is not an array
    precision: str
    gemm: str
    sms: int | None
    prepared: bool
    needs: tuple[str, ...] | None  # needs of the backward; None for no backward
    integers: bool  # dy has integers, so that dbeta shows exactly where the activation was flat
    products: str | None  # gemm of the backward, if not that of the forward
    stream: str
    thread: bool  # run in a new thread, whose first CUDA call is gsbn's
    capture: bool
    linear: bool = False  # a call of gsbn.linear; the recipe is one of inference


def draw_good(seed: int, kinds: tuple[str, ...]) -> Good:
    """Any combination that the API allows; also some that a `gemm` does not support."""
    rng = random.Random(seed)
    kind = kinds[int(rng.random() * len(kinds))]  # one draw for any number of kinds
    on_gpu = kind in GPU_KINDS
    gemm = rng.choice(("auto", "auto", "cublas", "tiled", "sm90")) if on_gpu else "auto"
    served = gemm == "sm90" and rng.random() < 0.8  # most cases that "sm90" does not support are not drawn
    dtype = rng.choice([name for name in DTYPES if not (served and name == "float64")])
    training = rng.random() < 0.7
    shape = draw_shape(rng, dtype, training, 8 if served else 1)
    given = {name for name in OPTIONAL if rng.random() < 0.7} | ({"running"} if not training else set())
    counts = {"running", COUNT} <= given
    backward = rng.random() < 0.5 and (training or not served)
    capture = on_gpu and shape[0] > 0 and rng.random() < 0.1
    activation, scale = rng.choice(ACTIVATIONS), rng.choice(("vector", "vector", "number", *SCALES))
    needs = tuple(name for name in NAMES if rng.random() < 0.7) if backward else None
    renorm = rng.choice(RENORMS) if training and "running" in given and rng.random() < 0.3 else None
    residual = ("residual",) * (rng.random() < 0.2)
    needs = needs and (*needs, *residual * (rng.random() < 0.7))
    groups = 1
    if training and renorm is None and shape[0] > 3 and rng.random() < 0.15:
        groups = rng.choice([n for n in range(2, shape[0]) if shape[0] % n == 0] or [2])
        shape = shape[0] // groups * groups, *shape[1:]
    recipe = Case(
        shape=shape,
        dtype=dtype,
        training=training,
        seed=seed,
        offset=rng.choice([0.0, 0.0, 1.0, -10.0, 100.0] + [1e4] * (dtype != "float16")),
        spread=rng.choice([1.0, 1.0, 1e-3, 30.0, 0.0]),
        momentum=rng.choice([0.1, 0.0, 1.0, 0.75, 1] + [None] * (counts or not training)),
        eps=rng.choice([1e-5, 1e-3, 1]),
        given=tuple(name for name in OPTIONAL if name in given and (name != COUNT or counts)) + residual,
        narrow=tuple(name for name in VECTORS if rng.random() < 0.4),
        layouts=draw_layouts(rng, of_out=("C", "padded") if served else LAYOUTS),
        scale="none" if scale == "number" else scale,
        activation=activation,
        renorm=renorm if counts or renorm is None else renorm[:2],
        groups=groups,
    )
    good = Good(
        kind=kind,
        recipe=recipe,
        number=rng.choice([1.0, -0.75, 3, 1e-6, 0.0]) if scale == "number" else None,
        precision=rng.choice(("highest", "high")),
        gemm=gemm,
        sms=rng.randint(1, 200) if rng.random() < 1 / 3 else None,
        prepared=rng.random() < 0.25,
        needs=needs,
        integers=activation is not None and "beta" in (needs or ()) and rng.random() < 0.75,
        products=rng.choice((None, "auto", "cublas", "tiled", "sm90")) if backward and on_gpu else None,
        stream="new" if capture else rng.choice(STREAMS.get(kind, ("default",))),
        thread=rng.random() < 0.06,
        capture=capture,
    )
    if rng.random() < 0.5:  # else with a mean and a spread
        usual = replace(recipe, offset=0.0, spread=1.0, family=rng.choice(list(FAMILIES)))
        good = replace(good, recipe=usual)
    return without_norm(good) if rng.random() < 0.12 else good


def without_norm(good: Good) -> Good:
    """The same of `gsbn.linear`: the layer has no vectors but the bias."""
    given = tuple(name for name in good.recipe.given if name in ("bias", "out"))
    recipe = replace(
        good.recipe, training=False, eps=0.0, momentum=0.1, scale="none", renorm=None, given=given, groups=1
    )
    needs = good.needs and tuple(name for name in good.needs if name in ("x", "weight", "bias"))
    return replace(good, recipe=recipe, needs=needs, number=None, prepared=False, integers=False, linear=True)


def draw_shape(rng: random.Random, dtype: str, training: bool, multiple: int) -> tuple[int, int, int]:
    """B, I and O: mostly small, often at the edges of tiles, and few enough products for a fast truth."""
    if rng.random() < 0.04 and dtype != "float64":  # many short rows
        B, I = rng.randint(2048, 4096), rng.randint(1, 60)
        return (
            B,
            -(-I // multiple) * multiple,
            -(-rng.randint(1, min(130, (1 << 21) // (B * I))) // multiple) * multiple,
        )
    large = rng.random() < 0.1
    limit, most = (400, 1 << 23) if large else (80, 1 << 19)
    most = 1 << 17 if dtype == "float64" else most  # BLAS does not support longdouble
    edges = [side for side in SIDES if side <= limit]
    sides = [rng.choice(edges) if rng.random() < 0.7 else rng.randint(1, limit) for _ in range(3)]
    if rng.random() < 0.25:
        sides[rng.randrange(3)] = rng.choice(SIDES) if rng.random() < 0.5 else rng.randint(1, 2000)
    sides[1:] = [-(-side // multiple) * multiple for side in sides[1:]]
    while np.prod(sides) > most or np.prod(sorted(sides)[1:]) > 1 << 17:
        at = sides.index(max(sides))
        sides[at] = max(sides[at] // 2 // multiple, 1) * multiple
    B, I, O = sides
    B = rng.choice((0, 1)) if rng.random() < 0.06 else B
    return B + (training and B == 1), I, O


def draw_layouts(rng: random.Random, of_out: tuple[str, ...] = LAYOUTS) -> tuple[tuple[str, str], ...]:
    """Layouts for about half of the arrays; the others are C-contiguous."""
    choices = {**dict.fromkeys(FLOATS, LAYOUTS), "out": of_out}
    return tuple((name, rng.choice(layouts)) for name, layouts in choices.items() if rng.random() < 0.5)


def judge_good(case: Good) -> bool:
    """Raise if anything is wrong; return False if the chosen GEMM does not support the call."""
    try:
        steps = perform(case)
    except ValueError as error:
        if {case.gemm, case.products} <= {"auto", None} or not str(error).startswith("gemm:"):
            raise
        return False
    for arrays, got in steps:
        judge_numbers(case, arrays, got)
    for (_, first), (_, second) in zip(steps, perform(case), strict=True):
        for name, a in first.items():
            assert a.tobytes() == second[name].tobytes(), f"{name}: other bits from the same call"
    return True


def perform(case: Good) -> list[tuple[Arrays, Arrays]]:
    """Make the call; return its inputs and outputs, for each replay if captured. Gradients are dx, dweight …"""
    kind, layouts, arrays = kind_of(case.kind), dict(case.recipe.layouts), case.recipe.arrays()
    if case.needs is not None:
        arrays["dy"] = (draw_integers if case.integers else draw_dy)(arrays, case.recipe.seed)
    placed = {name: place(kind, a, layouts.get(name, "C")) for name, a in arrays.items()}
    views = {name: p.view for name, p in placed.items()}
    settle(kind)

    def call() -> dict[str, Any]:
        operands = {name: view for name, view in views.items() if name != "dy"}
        options: dict[str, Any] = {"activation": case.recipe.activation} if case.linear else case.recipe.options
        options |= {"precision": case.precision, "gemm": case.gemm, "sms": case.sms}
        options |= {} if case.number is None else {"scale": case.number}
        layer = gsbn.linear if case.linear else gsbn.forward
        if case.needs is None:
            return {"y": layer(**operands, **options)}
        y, saved = layer(**operands, **options, return_saved=True)
        saved = saved._replace(gemm=case.products or saved.gemm)
        gradients = gsbn.backward(views["dy"], saved, needs=case.needs, sms=case.sms)
        return {"y": y, **{f"d{name}": getattr(gradients, name) for name in NEEDS}}

    def overwrite(name: str, a: np.ndarray) -> None:
        fresh = place(kind, a, layouts.get(name, "C"))
        placed[name].base[...] = fresh.base
        placed[name] = placed[name]._replace(before=fresh.before)

    def run() -> list[tuple[Arrays, Arrays]]:
        with stream_of(kind, case.stream) as stream:
            if case.prepared:
                views["weight"] = gsbn.prepare(views["weight"], case.precision)
            with contextlib.nullcontext() if case.capture else poisoned_allocations(kind):
                made = call()
            if not case.capture:
                settle(kind)
                return [(arrays, results(case, placed, made))]
            replay, made = captured(kind, stream, call)
            steps, before = [], arrays
            another_x = replace(case.recipe, seed=case.recipe.seed + 1).arrays()["x"]
            # The first replay has the inputs of the warm-up; the second another x, and the state after the first.
            for new in ({name: arrays[name] for name in STATISTICS if name in arrays}, {"x": another_x}):
                for name, a in new.items():
                    overwrite(name, a)
                for result in made.values():
                    if result is not None:
                        result[...] = kind.put(np.full_like(kind.get(result), np.nan))
                replay()
                settle(kind)
                before = {**before, **new}
                steps.append((before, results(case, placed, made)))
                before = {**before, **{name: a for name, a in steps[-1][1].items() if name in STATISTICS}}
            return steps

    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(run).result() if case.thread else run()


def results(case: Good, placed: Mapping[str, Placed], made: Mapping[str, Any]) -> Arrays:
    """The results as NumPy arrays; checks everything about them but their values."""
    kind, (B, _, O) = kind_of(case.kind), case.recipe.shape
    likes = {f"d{name}": placed[name].view for name in NEEDS if name in placed}
    likes["y"] = placed["x"].view
    wanted = {"y", *(f"d{name}" for name in case.needs or ())} & set(likes)
    assert {name for name, a in made.items() if a is not None} == wanted
    for name in wanted:
        got, like = made[name], likes[name]
        assert (type(got), got.dtype) == (type(like), like.dtype), name
        assert tuple(got.shape) == ((B, O) if name == "y" else tuple(like.shape)), name
    assert "out" not in placed or made["y"] is placed["out"].view, "y is not out"
    for name, p in placed.items():
        written = name == "out" or (name in STATISTICS and case.recipe.training and (B > 0 or name == COUNT))
        assert p.guards_hold(kind) if written else not p.disturbed(kind), f"{name}: bytes changed that may not"
    state = {name: placed[name].view for name in STATISTICS if name in placed}
    return {name: kind.get(a) for name, a in {**made, **state}.items() if a is not None}


def judge_numbers(case: Good, arrays: Arrays, got: Arrays) -> None:
    """Raise unless every result is within its bound."""
    recipe, operands = case.recipe, without_out({name: a for name, a in arrays.items() if name != "dy"})
    operands |= {} if case.number is None else {"scale": np.array(case.number, np.float64)}
    if case.linear:  # an inference that normalises nothing
        zeros = np.zeros(recipe.shape[2], "f8" if recipe.dtype == "float64" else "f4")
        operands |= {"running_mean": zeros, "running_var": zeros + 1}
    if recipe.shape[0] == 0:
        assert not any(got[name].any() for name in got if name not in STATISTICS), "gradients of no rows are zero"
        assert COUNT not in got or got[COUNT] == arrays[COUNT] + recipe.training * recipe.groups
        return
    wide = np.longdouble if recipe.dtype == "float64" else np.float64
    truth = reference.forward(**operands, **recipe.options, dtype=wide)
    assert_outcome_within(Outcome(*map(got.get, Outcome._fields)), truth, forward_bounds(case, operands, truth))
    if case.needs is not None:
        dy = arrays["dy"] if recipe.activation is None else before_relu(arrays["dy"], got["y"])
        form = {"training": recipe.training, "eps": recipe.eps, "renorm": recipe.renorm, "groups": recipe.groups}
        if "dresidual" in got:  # relu and a copy round nothing
            assert_same_bits(got["dresidual"] + 0, dy + 0)
        gradients = truth_of(operands, dy, **form)
        limits = backward_bounds(case, operands, dy, truth, gradients)
        for name in NAMES:
            if f"d{name}" in got:
                assert_within(got[f"d{name}"], getattr(gradients, name), limits[name], f"d{name}")
        if case.integers and "dbeta" in got:
            assert_beta_agrees(got["dbeta"], arrays["dy"], got["y"])


def may_be_sm90(case: Good, *gemms: str | None) -> bool:
    """Whether one of these `gemm` may use forward_sm90."""
    return case.kind in GPU_KINDS and not {"auto", "sm90"}.isdisjoint(gemms)


def may_take_limbs(case: Good, *gemms: str | None) -> bool:
    """Whether one of these `gemm` may use forward_sm90 with limbs."""
    return may_be_sm90(case, *gemms) and _plan.takes_limbs(case.recipe.dtype, case.precision, _kernels.gpu(0))


def operand_error(case: Good) -> float:
    """The largest rounding of an operand of a GEMM."""
    return TF32 if (case.recipe.dtype, case.precision) == ("float32", "high") else 0.0


def forward_bounds(case: Good, arrays: Arrays, truth: reference.Forward) -> Bounds:
    """The bounds of the path; for "auto" the largest of those of its paths."""
    of = partial(bounds, arrays, truth, **case.recipe.options)
    if case.kind in CPU_KINDS:
        return of(deferred=DTYPES[case.recipe.dtype].itemsize == 2)
    if not may_take_limbs(case, case.gemm):
        deferred = may_be_sm90(case, case.gemm) and DTYPES[case.recipe.dtype].itemsize == 2
        return of(operand=operand_error(case), deferred=deferred)
    choices = [of(limbs=limbs) for limbs in ((True,) if case.gemm == "sm90" else (False, True))]
    return Bounds(*(None if found[0] is None else np.max(found, axis=0) for found in zip(*choices, strict=True)))


def backward_bounds(
    case: Good, arrays: Arrays, dy: np.ndarray, truth: reference.Forward, gradients: gsbn.Gradients
) -> dict[str, np.ndarray]:
    """`gradient_bounds` plus the errors of limbs, by tolerance.py.

    Their term in |a||b| is twice an operand rounding of 2⁻²² + 48 · 2⁻²³. Their term 2⁻³⁸ K max|a| max|b| matters in
    dg, whose features differ in size: |dg| is at most |gamma scale r| times the norm of dy's column, since training
    projects this column.
    """
    recipe, gemms = case.recipe, (case.gemm, case.products)
    activation = None if "residual" in recipe.given else recipe.activation  # with one, dy is rounded before it is used
    options: dict[str, Any] = {"training": recipe.training, "eps": recipe.eps, "activation": activation}
    options |= {"deferred": may_be_sm90(case, *gemms), "renorm": recipe.renorm, "groups": recipe.groups}
    if not may_take_limbs(case, *gemms):
        return gradient_bounds(arrays, dy, gradients, operand=operand_error(case), **options)
    limits = gradient_bounds(arrays, dy, gradients, operand=2.0**-22 + 48 * 2.0**-23, **options)
    x, w, s, gamma = (np.abs(np.asarray(arrays.get(n, 1), np.float64)) for n in ("x", "weight", "scale", "gamma"))
    of_g = truth.var if recipe.groups == 1 or truth.var is None else truth.var.min(axis=0)
    variance = s * s * of_g if recipe.training else np.asarray(arrays["running_var"], np.float64)
    gamma = gamma * (1 if recipe.renorm is None else recipe.renorm[0])  # the ratio is at most r_max
    dg = gamma * s / np.sqrt(variance + recipe.eps) * np.linalg.norm(np.asarray(dy, np.float64), axis=0)
    limits["x"] = limits["x"] + 2.0**-38 * len(w) * dg.max() * w.max(axis=0)
    limits["weight"] = limits["weight"] + 2.0**-38 * len(x) * np.outer(dg, x.max(axis=0))
    return limits


# ---- streams and graphs


def settle(kind: Kind) -> None:
    """Wait until the GPU has done all its work."""
    if not kind.is_cpu:
        import cupy

        cupy.cuda.Device().synchronize()


def stream_of(kind: Kind, name: str) -> Any:
    """A context in which the stream with this name is current."""
    if name == "default":
        return contextlib.nullcontext()
    import cupy

    return new_stream(kind) if name == "new" else getattr(cupy.cuda.Stream, name)


def captured(kind: Kind, stream: Any, call: Callable[[], Any]) -> Any:
    """`capture`, which ends the capture even if the call raises."""
    errors: list[Exception] = []

    def attempt() -> Any:
        try:
            return call()
        except Exception as error:
            errors.append(error)

    replay, made = capture(kind, stream, attempt)
    if errors:
        raise errors[0]
    return replay, made
