"""Random calls of gsbn: good ones against the truth and every promise beside it, bad ones against their errors.

    python -m tests.fuzz --seconds 600            # from the root of the repository
    python -m tests.fuzz --kinds cupy --case 123  # one again, with its traceback

A case follows from its seed and its kind of array alone (a bad one also from the libraries that are there), so that the
line that is printed with a failure runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import gsbn
from gsbn import _kernels, _plan, reference
from tests.api.test_errors import stretch
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
    WRITTEN,
    Kind,
    Outcome,
    Placed,
    Producer,
    available,
    kind_of,
    no_gpu,
    place,
    poisoned_allocations,
    without_out,
)
from tests.support.strategies import ACTIVATIONS, OPTIONAL, SCALES, VECTORS, Case
from tests.support.tolerance import TF32, Bounds, assert_outcome_within, assert_within, bounds

Arrays = dict[str, np.ndarray]
COUNT = "num_batches_tracked"
FLOATS = ("x", "weight", "scale", "bias", "gamma", "beta", "running_mean", "running_var", "out", "dy")
SIDES = sorted({2**i + d for i in range(1, 11) for d in (-1, 0, 1)} | {*range(4, 81, 4)} | {5, 11, 29, 61, 131, 383})
STREAMS = {"cupy": ("default", "new", "ptds", "null"), "torch-cuda": ("default", "new")}
LIMIT_S = 300  # for one case: more than any compilation takes


# ---- good calls


@dataclass(frozen=True)
class Good:
    """A call that is right."""

    kind: str
    recipe: Case  # layouts has dy's too
    number: float | None  # a scale that is no array
    precision: str
    gemm: str
    sms: int | None
    prepared: bool
    needs: tuple[str, ...] | None  # of the backward after it; None for no backward
    integers: bool  # dy is of integers, so that dbeta tells exactly where the activation was flat
    products: str | None  # the backward's gemm, if it is not the forward's
    stream: str
    thread: bool  # from a fresh one, whose first CUDA call is gsbn's
    capture: bool


def draw_good(seed: int, kinds: tuple[str, ...]) -> Good:
    """Any combination that the API allows; some that a `gemm` refuses."""
    rng = random.Random(seed)
    kind = kinds[int(rng.random() * len(kinds))]  # one number, however many kinds: what follows does not depend on it
    on_gpu = kind in GPU_KINDS
    gemm = rng.choice(("auto", "auto", "cublas", "tiled", "sm90")) if on_gpu else "auto"
    served = gemm == "sm90" and rng.random() < 0.8  # most of what "sm90" refuses is not drawn
    dtype = rng.choice([name for name in DTYPES if not (served and name == "float64")])
    training = rng.random() < 0.7
    shape = draw_shape(rng, dtype, training, 8 if served else 1)
    given = {name for name in OPTIONAL if rng.random() < 0.7} | ({"running"} if not training else set())
    counts = {"running", COUNT} <= given
    backward = rng.random() < 0.5 and (training or not served)
    capture = on_gpu and shape[0] > 0 and rng.random() < 0.1
    activation, scale = rng.choice(ACTIVATIONS), rng.choice(("vector", "vector", "number", *SCALES))
    needs = tuple(name for name in NAMES if rng.random() < 0.7) if backward else None
    recipe = Case(
        shape=shape,
        dtype=dtype,
        training=training,
        seed=seed,
        offset=rng.choice([0.0, 0.0, 1.0, -10.0, 100.0] + [1e4] * (dtype != "float16")),
        spread=rng.choice([1.0, 1.0, 1e-3, 30.0, 0.0]),
        momentum=rng.choice([0.1, 0.0, 1.0, 0.75, 1] + [None] * (counts or not training)),
        eps=rng.choice([1e-5, 1e-3, 1]),
        given=tuple(name for name in OPTIONAL if name in given and (name != COUNT or counts)),
        narrow=tuple(name for name in VECTORS if rng.random() < 0.4),
        layouts=draw_layouts(rng, of_out=("C", "padded") if served else LAYOUTS),
        scale="none" if scale == "number" else scale,
        activation=activation,
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
    if rng.random() < 0.5:  # else a mean and a spread
        usual = replace(recipe, offset=0.0, spread=1.0, family=rng.choice(list(FAMILIES)))
        good = replace(good, recipe=usual)
    return good


def draw_shape(rng: random.Random, dtype: str, training: bool, multiple: int) -> tuple[int, int, int]:
    """B, I and O, mostly small and often at the edges of tiles; few enough products for the truth to be quick."""
    if rng.random() < 0.04 and dtype != "float64":  # many rows that are short
        B, I = rng.randint(2048, 4096), rng.randint(1, 60)
        return (
            B,
            -(-I // multiple) * multiple,
            -(-rng.randint(1, min(130, (1 << 21) // (B * I))) // multiple) * multiple,
        )
    large = rng.random() < 0.1
    limit, most = (400, 1 << 23) if large else (80, 1 << 19)
    most = 1 << 17 if dtype == "float64" else most  # longdouble knows no BLAS
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
    """For about half of the arrays; the others are C-contiguous."""
    choices = {**dict.fromkeys(FLOATS, LAYOUTS), "out": of_out}
    return tuple((name, rng.choice(layouts)) for name, layouts in choices.items() if rng.random() < 0.5)


def judge_good(case: Good) -> bool:
    """Raise if anything is not as it should be; False where a GEMM that was asked for cannot serve."""
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
    """Make the call: what went in and what came out, of every replay if it is captured; gradients as dx, dweight …"""
    kind, layouts, arrays = kind_of(case.kind), dict(case.recipe.layouts), case.recipe.arrays()
    if case.needs is not None:
        arrays["dy"] = (draw_integers if case.integers else draw_dy)(arrays, case.recipe.seed)
    placed = {name: place(kind, a, layouts.get(name, "C")) for name, a in arrays.items()}
    views = {name: p.view for name, p in placed.items()}
    settle(kind)

    def call() -> dict[str, Any]:
        operands = {name: view for name, view in views.items() if name != "dy"}
        options = {**case.recipe.options, "precision": case.precision, "gemm": case.gemm, "sms": case.sms}
        options |= {} if case.number is None else {"scale": case.number}
        if case.needs is None:
            return {"y": gsbn.forward(**operands, **options)}
        y, saved = gsbn.forward(**operands, **options, return_saved=True)
        saved = saved._replace(gemm=case.products or saved.gemm)
        gradients = gsbn.backward(views["dy"], saved, needs=case.needs, sms=case.sms)
        return {"y": y, **{f"d{name}": gradient for name, gradient in gradients._asdict().items()}}

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
            # The first replay finds what the warm-up found; the second another x, and the state that the first left.
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
    """What came out, as NumPy arrays; checks all that must hold of it but its numbers."""
    kind, (B, _, O) = kind_of(case.kind), case.recipe.shape
    likes = {"y": placed["x"].view, **{f"d{name}": placed[name].view for name in NAMES if name in placed}}
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
    """Every result within its bound."""
    recipe, operands = case.recipe, without_out({name: a for name, a in arrays.items() if name != "dy"})
    operands |= {} if case.number is None else {"scale": np.array(case.number, np.float64)}
    if recipe.shape[0] == 0:
        assert not any(got[name].any() for name in got if name not in STATISTICS), "gradients of no rows are zero"
        assert COUNT not in got or got[COUNT] == arrays[COUNT] + recipe.training
        return
    wide = np.longdouble if recipe.dtype == "float64" else np.float64
    truth = reference.forward(**operands, **recipe.options, dtype=wide)
    assert_outcome_within(Outcome(*map(got.get, Outcome._fields)), truth, forward_bounds(case, operands, truth))
    if case.needs is not None:
        dy = arrays["dy"] if recipe.activation is None else before_relu(arrays["dy"], got["y"])
        gradients = truth_of(operands, dy, training=recipe.training, eps=recipe.eps)
        limits = backward_bounds(case, operands, dy, truth, gradients)
        for name in NAMES:
            if f"d{name}" in got:
                assert_within(got[f"d{name}"], getattr(gradients, name), limits[name], f"d{name}")
        if case.integers and "dbeta" in got:
            assert_beta_agrees(got["dbeta"], arrays["dy"], got["y"])


def may_be_sm90(case: Good, *gemms: str | None) -> bool:
    """Whether a GEMM of one of these names may be forward_sm90's."""
    return case.kind in GPU_KINDS and not {"auto", "sm90"}.isdisjoint(gemms)


def may_take_limbs(case: Good, *gemms: str | None) -> bool:
    """Whether it may be and then takes its operands as limbs."""
    return may_be_sm90(case, *gemms) and _plan.takes_limbs(case.recipe.dtype, case.precision, _kernels.gpu(0))


def operand_error(case: Good) -> float:
    """The rounding of a GEMM's operands, at most."""
    return TF32 if (case.recipe.dtype, case.precision) == ("float32", "high") else 0.0


def forward_bounds(case: Good, arrays: Arrays, truth: reference.Forward) -> Bounds:
    """Those of the path, or the larger of those of the paths among which "auto" chooses."""
    of = partial(bounds, arrays, truth, **case.recipe.options)
    if case.kind in CPU_KINDS:
        return of(parked=DTYPES[case.recipe.dtype].itemsize == 2)
    if not may_take_limbs(case, case.gemm):
        parked = may_be_sm90(case, case.gemm) and DTYPES[case.recipe.dtype].itemsize == 2
        return of(operand=operand_error(case), parked=parked)
    choices = [of(limbs=limbs) for limbs in ((True,) if case.gemm == "sm90" else (False, True))]
    return Bounds(*(None if found[0] is None else np.max(found, axis=0) for found in zip(*choices, strict=True)))


def backward_bounds(
    case: Good, arrays: Arrays, dy: np.ndarray, truth: reference.Forward, gradients: gsbn.Gradients
) -> dict[str, np.ndarray]:
    """`gradient_bounds`, which knows no limbs, with what tolerance.py says of them.

    Their share of |a||b| is twice the rounding of an operand of 2⁻²² + 48 · 2⁻²³. Their 2⁻³⁸ K max|a| max|b| counts in
    dg, whose features differ in size: |dg| is at most |gamma scale r| times the norm of dy's column, of which training
    takes a projection.
    """
    recipe, gemms = case.recipe, (case.gemm, case.products)
    options: dict[str, Any] = {"training": recipe.training, "eps": recipe.eps, "activation": recipe.activation}
    options["parked"] = may_be_sm90(case, *gemms)
    if not may_take_limbs(case, *gemms):
        return gradient_bounds(arrays, dy, gradients, operand=operand_error(case), **options)
    limits = gradient_bounds(arrays, dy, gradients, operand=2.0**-22 + 48 * 2.0**-23, **options)
    x, w, s, gamma = (np.abs(np.asarray(arrays.get(n, 1), np.float64)) for n in ("x", "weight", "scale", "gamma"))
    variance = s * s * truth.var if recipe.training else np.asarray(arrays["running_var"], np.float64)
    dg = gamma * s / np.sqrt(variance + recipe.eps) * np.linalg.norm(np.asarray(dy, np.float64), axis=0)
    limits["x"] = limits["x"] + 2.0**-38 * len(w) * dg.max() * w.max(axis=0)
    limits["weight"] = limits["weight"] + 2.0**-38 * len(x) * np.outer(dg, x.max(axis=0))
    return limits


# ---- streams and graphs


def settle(kind: Kind) -> None:
    """Wait for all that the GPU has to do."""
    if not kind.is_cpu:
        import cupy

        cupy.cuda.Device().synchronize()


def stream_of(kind: Kind, name: str) -> Any:
    """A context in which the stream of this name is current."""
    if name == "default":
        return contextlib.nullcontext()
    import cupy

    from tests.kernels.test_forward import new_stream  # skips without CuPy

    return new_stream(kind) if name == "new" else getattr(cupy.cuda.Stream, name)


def captured(kind: Kind, stream: Any, call: Callable[[], Any]) -> Any:
    """`capture`, which comes to its end even if the call does not."""
    from tests.kernels.test_forward import capture

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


# ---- bad calls


@dataclass(frozen=True)
class Bad:
    """A call that is right but for one thing."""

    kind: str
    recipe: Case
    gemm: str
    way: str  # the argument, and what is wrong with it
    primed: bool  # the right call came before: what is remembered of it must not let the wrong one pass


class Call(NamedTuple):
    """A right call, to be spoilt."""

    kind: Kind
    arrays: Arrays
    views: dict[str, Any]
    saved: Any
    rng: random.Random
    made: list[Any]  # by `put`

    def put(self, a: Any) -> Any:
        """A NumPy array as one of this kind; anything else as it is."""
        if type(a) is not np.ndarray:
            return a
        self.made.append(self.kind.put(a))
        return self.made[-1]


# What may not take an argument's place: made of the right array, or a value.
OF_FLOATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a dimension more": lambda a: a[..., None],
    "a dimension less": lambda a: a.reshape(-1) if a.ndim > 1 else a[0].reshape(()),
    "a column more": lambda a: np.concatenate([a, a[..., :1]], axis=-1),
    "a column less": lambda a: a[..., 1:],
    "one column": lambda a: a[..., :1],
    "no column": lambda a: a[..., :0],
    **{dtype: lambda a, t=dtype: a.astype(t) for dtype in ("bool", "int32", "int64", "complex64")},
}
OF_COUNT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **{f"{n} elements": lambda a, n=n: np.repeat(a, n) for n in (0, 2)},
    **{dtype: lambda a, t=dtype: a.astype(t) for dtype in ("bool", "int32", "float32")},
}
OF_NUMPY: dict[str, Callable[[np.ndarray], Any]] = {
    "masked": np.ma.masked_array,
    "objects": lambda a: a.astype(object),
    "strings": lambda a: a.astype(float).astype(str),
    "longdouble": lambda a: a.astype(np.longdouble),
    "another byte order": lambda a: a.astype(">i8" if a.dtype.kind == "i" else ">f4"),
}
OF_TORCH: dict[str, Callable[[Any], Any]] = {
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "lazily negated": lambda t: t._neg_view(),
    "requires grad": lambda t: t.detach().requires_grad_(),
}
NO_ARRAYS = ("x", 1.0, 1, [1.0], [[1.0, 2.0]], (), ..., np.float32(1), np.ndarray)
NO_SCALES = (
    *(no for no in NO_ARRAYS if not isinstance(no, (int, float, np.floating))), True, np.nan, np.inf, 10**400, 1j
)  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    "momentum": (True, np.nan, np.inf, -np.inf, 10**400, "0.1", 1j, [0.1], np.ones(1)),
    "eps": (True, np.nan, np.inf, -np.inf, 10**400, -1e-5, -1, "1e-5", 1j, [1e-5], None),
    "activation": ("Relu", "RELU", "gelu", "none", "", b"relu", ["relu"], 1, 0.0, True, np.nan),
    "precision": ("medium", "HIGHEST", "", b"high", ["high"], 1, None),
    "gemm": ("fastest", "AUTO", "", b"auto", ["auto"], 0, None),
    "training": (1, 0, 1.0, "yes", [True], None),
    "return_saved": (1, 0, 1.0, "yes", [True], None),
    "sms": (0, -1, True, 1.5, "8", [8], np.nan),
    "needs": (("y",), ("x", "w"), "x", b"x", (1,), [None], 3, None),
    "saved": ((), "saved", 1, None, np.ones(3)),
}
RELATIONS: dict[str, Callable[[Call], Any]] = {
    "running_var: absent": lambda c: None,
    "running_mean: absent": lambda c: None,
    "num_batches_tracked: of nothing": lambda c: {"running_mean": None, "running_var": None},
    "running_mean: absent in inference": lambda c: {**dict.fromkeys(STATISTICS), "training": False},
    "momentum: over no count": lambda c: {"momentum": None, COUNT: None, "training": True},
    "eps: 0 in training": lambda c: {"eps": 0, "training": True},
    "x: one row in training": lambda c: {"x": c.views["x"][:1], "out": None, "training": True},
    "running_mean: running_var": lambda c: {"running_mean": c.views["running_var"], "training": True},
    "weight: prepared for TF32": lambda c: gsbn.prepare(c.views["weight"], "high"),
    "scale: prepared": lambda c: gsbn.prepare(c.views["weight"]),
    "saved: a tuple": lambda c: tuple(c.saved),
}
RUNTIME_ERRORS = ("requires grad", "changed since")  # all other ways: TypeError or ValueError


@cache
def ways(kind: str) -> dict[str, Callable[[Call], Any]]:
    """Every way to spoil a call of this kind: what to pass for the argument that its name begins with, or for more."""
    others = [other for other in available((*CPU_KINDS, *(() if no_gpu() else GPU_KINDS))) if other != kind]
    values = dict.fromkeys((*FLOATS, COUNT), NO_ARRAYS) | VALUES
    values |= dict.fromkeys(("x", "weight", "dy"), (*NO_ARRAYS, None))
    values["scale"] = NO_SCALES
    if kind in CPU_KINDS:
        values["gemm"] = (*values["gemm"], "cublas", "tiled", "sm90")
    found: dict[str, Callable[[Call], Any]] = dict(RELATIONS)
    found |= {f"{name}: {v!r:.20}": lambda c, v=v: v for name, wrong in values.items() for v in wrong}
    found |= {f"needs: sms={v!r}": lambda c, v=v: {"needs": NAMES, "sms": v} for v in VALUES["sms"]}  # the backward's
    for name in (*FLOATS, COUNT):
        of_host = {**(OF_COUNT if name == COUNT else OF_FLOATS), **(OF_NUMPY if kind == "numpy" else {})}
        if name == "scale":  # of which one element is enough
            of_host = {way: f for way, f in of_host.items() if way not in ("a dimension less", "one column")}
        found |= {f"{name}: {way}": lambda c, n=name, f=f: c.put(f(c.arrays[n])) for way, f in of_host.items()}
        found |= {f"{name}: {other}": lambda c, n=name, o=other: kind_of(o).put(c.arrays[n]) for other in others}
        if kind.startswith("torch"):
            found |= {f"{name}: {way}": lambda c, n=name, f=f: f(c.views[n]) for way, f in OF_TORCH.items()}
        if name != COUNT:
            found[f"{name}: another float"] = partial(another_float, name=name)
        if name != "dy":  # for which any producer will do
            found[f"{name}: a producer"] = lambda c, n=name: Producer(c.views[n])
        if name in WRITTEN and kind == "numpy":
            found[f"{name}: read-only"] = partial(read_only, name=name)
        if name in WRITTEN and name != COUNT:
            found[f"{name}: a stride of 0"] = partial(stride_of_zero, name=name)
            pairs = [other for other in FLOATS if other not in (name, "dy")]
            found |= {f"{name}: over {other}": partial(overlap, name=name, other=other) for other in pairs}
    if kind.startswith("torch"):
        del found[f"{COUNT}: requires grad"]  # an integer cannot
        found |= {f"saved: {name} changed since": partial(changed_since, name=name) for name in ("x", "weight")}
    return found


def another_float(call: Call, name: str) -> Any:
    """In a dtype that is not allowed here: a vector may be in x's or float32, of a pair both in the same."""
    x, own = call.arrays["x"].dtype, call.arrays[name].dtype
    alone = name in ("scale", "bias", "gamma", "beta") and x != np.float64
    wrong = set(DTYPES.values()) - ({x, DTYPES["float32"]} if alone else {own})
    return call.put(call.arrays[name].astype(call.rng.choice(sorted(wrong, key=str))))


def overlap(call: Call, name: str, other: str) -> dict[str, Any]:
    """Two arrays in one buffer, the second to start at any element of the first."""
    shapes = [call.arrays[n].shape for n in (name, other)]
    first, second = map(int, map(np.prod, shapes))
    start = call.rng.randrange(first)
    buffer = call.put(np.ones(max(first, start + second), call.arrays[name].dtype))
    ours, theirs = buffer[:first].reshape(shapes[0]), buffer[start : start + second].reshape(shapes[1])
    return {name: ours, other: theirs, "training": True}


def stride_of_zero(call: Call, name: str) -> dict[str, Any]:
    """One column, repeated."""
    a = call.arrays[name]
    return {name: stretch(call.kind, call.put(a[..., :1]), a.shape), "training": True}


def changed_since(call: Call, name: str) -> Any:
    """A backward for what the forward never saw; no byte changes, but torch counts a change in place."""
    import torch

    torch.autograd.graph.increment_version(call.views[name])
    return call.saved


def read_only(call: Call, name: str) -> dict[str, Any]:
    view = call.views[name].view()
    view.setflags(write=False)
    return {name: view, "training": True}


def draw_bad(seed: int, kinds: tuple[str, ...]) -> Bad:
    rng = random.Random(seed)
    kind = kinds[int(rng.random() * len(kinds))]
    recipe = Case(
        shape=tuple(rng.sample(range(3, 10), 3)),  # all different: nothing fits in another's place; less one, not one
        dtype=rng.choice(list(DTYPES)),
        training=rng.random() < 0.7,
        seed=seed,
        narrow=tuple(name for name in VECTORS if rng.random() < 0.4),
        layouts=draw_layouts(rng),
    )
    gemm = rng.choice(("auto", "cublas", "tiled")) if kind in GPU_KINDS else "auto"
    return Bad(kind, recipe, gemm, rng.choice(list(ways(kind))), rng.random() < 0.5)


def judge_bad(case: Bad) -> bool:
    """Raise unless the call, made twice, raises an error that names an argument at fault, and changes no byte."""
    kind, layouts, arrays = kind_of(case.kind), dict(case.recipe.layouts), case.recipe.arrays()
    arrays["dy"] = draw_dy(arrays)
    placed = {name: place(kind, a, layouts.get(name, "C")) for name, a in arrays.items()}
    views = {name: p.view for name, p in placed.items()}
    keywords = {name: view for name, view in views.items() if name != "dy"} | case.recipe.options | {"gemm": case.gemm}
    backward = case.way.startswith(("dy:", "saved:", "needs:"))
    saved: Any = ()
    if backward or case.primed:
        _, saved = gsbn.forward(**keywords, return_saved=True)
    call = Call(kind, arrays, views, saved, random.Random(case.recipe.seed), [])
    with np.errstate(all="ignore"):  # NaN as an integer
        changes = ways(case.kind)[case.way](call)
    changes = changes if isinstance(changes, dict) else {case.way.partition(":")[0]: changes}
    keywords = {**({"dy": views["dy"], "saved": saved} if backward else keywords), **changes}
    at_fault = {*changes, *case.way.split()}  # the way names what its changes do not
    if not at_fault.isdisjoint(("x", "weight")):  # by which the others are measured
        at_fault |= {*FLOATS, COUNT}
    if not at_fault.isdisjoint(STATISTICS):
        at_fault |= set(STATISTICS)
    types = (RuntimeError,) if case.way.endswith(RUNTIME_ERRORS) else (TypeError, ValueError)

    watched = [*(p.base for p in placed.values()), *call.made, *saved[:4]]
    settle(kind)
    before = [kind.get(a).tobytes() for a in watched]
    for _ in range(2):  # nothing wrong is remembered as right
        try:
            (gsbn.backward if backward else gsbn.forward)(**keywords)
        except Exception as error:
            named = re.match(r"(\w+): |Expected more than 1 value per channel when training", str(error))
            if type(error) not in types or named is None or named[1] not in {*at_fault, None}:
                raise
        else:
            raise AssertionError("no error")
    settle(kind)
    assert before == [kind.get(a).tobytes() for a in watched], "bytes changed"
    return True


# ---- many of them


class Failure(Exception):
    """What went wrong, and the line that runs it again."""


def run(seed: int, kinds: tuple[str, ...], *, bad: bool = False) -> bool:
    """One case; False if it was refused."""
    case = draw_bad(seed, kinds) if bad else draw_good(seed, kinds)
    try:
        return judge_bad(case) if isinstance(case, Bad) else judge_good(case)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = next(iter(str(error).strip().splitlines()), f"in {where.name}: {where.line}")
        raise Failure(f"{again(seed, case.kind, bad)}\n    {case}\n    {type(error).__name__}: {told}") from error


def again(seed: int, kinds: str, bad: bool) -> str:
    return f"python -m tests.fuzz --kinds {kinds} --case {seed}{' --bad' * bad}"


def work(worker: int, args: argparse.Namespace, at: Any, tally: Any) -> None:
    """Every ``args.workers``-th case; ``at`` tells the parent which it is at, ``tally`` what became of them."""
    for seed in itertools.count(args.seed + worker, args.workers):
        if time.time() > args.until or seed - args.seed >= args.cases:
            break
        for bad in (True,) if args.bad else (False, True)[: 1 + (seed % 10 == 0)]:
            at[worker] = 2 * seed + bad
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a kernel may wait for ever
            served = failed = False
            try:
                served = run(seed, args.kinds, bad=bad)
            except Failure as failure:
                failed = True
                print(failure, flush=True)
                for kind in args.kinds:
                    settle(kind_of(kind))  # ends this process if the GPU's context is lost
            events = not bad, not (served or failed), bad, failed
            with tally.get_lock():
                tally[:] = [n + event for n, event in zip(tally, events, strict=True)]
    faulthandler.cancel_dump_traceback_later()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, help="how long to draw; 60 if --cases is not given either")
    parser.add_argument("--cases", type=int, help="how many good calls to draw; a bad one comes with every tenth")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others count on")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16), help="processes")
    parser.add_argument("--kinds", help="numpy,torch-cpu,cupy,torch-cuda; by default the GPU's, if there is one")
    parser.add_argument("--bad", action="store_true", help="bad calls only")
    parser.add_argument("--case", type=int, metavar="SEED", help="this one alone, with its traceback")
    args = parser.parse_args()
    args.kinds = tuple(args.kinds.split(",")) if args.kinds else available(CPU_KINDS if no_gpu() else GPU_KINDS)
    if args.case is not None:
        print("passed" if run(args.case, args.kinds, bad=args.bad) else "refused")
        return 0

    if not set(args.kinds).isdisjoint(GPU_KINDS):
        gsbn.warm_up()  # else each worker would compile all kernels
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # the workers fill the cores by themselves
    start = time.time()
    args.until = start + (args.seconds or (60 if args.cases is None else np.inf))
    args.cases = np.inf if args.cases is None else args.cases
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    at, tally = context.Array("q", args.workers), context.Array("q", 4)
    workers = [context.Process(target=work, args=(i, args, at, tally)) for i in range(args.workers)]
    for process in workers:
        process.start()
    lost = 0
    for i, process in enumerate(workers):
        process.join()
        if process.exitcode:
            lost += 1
            print(f"{again(at[i] // 2, ','.join(args.kinds), at[i] % 2 == 1)}\n    its process died", flush=True)
    good, refused, bad, failed = tally
    print(f"{good} cases, {refused} refused, {bad} bad calls, {failed + lost} failed", end=", ")
    print(f"seed {args.seed}, {time.time() - start:.0f} s")
    return int(failed + lost > 0)


if __name__ == "__main__":
    sys.exit(main())
