"""Bad calls: valid except for one argument, with an error that names it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import gsbn
from tests.fuzz.good import COUNT, FLOATS, Arrays, draw_layouts, settle
from tests.support.gradients import NAMES, draw_dy
from tests.support.harness import (
    CPU_KINDS,
    DTYPES,
    GPU_KINDS,
    STATISTICS,
    WRITTEN,
    Kind,
    Producer,
    available,
    kind_of,
    no_gpu,
    place,
)
from tests.support.refusals import stretch
from tests.support.strategies import OPTIONAL, VECTORS, Case


@dataclass(frozen=True)
class Bad:
    """A call that is valid except for one argument."""

    kind: str
    recipe: Case
    gemm: str
    way: str  # the argument, and its error
    primed: bool  # the valid call ran before: its cached plan must not serve the bad one


class Call(NamedTuple):
    """A valid call, to be changed."""

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


# Wrong arguments: made from the right array, or values.
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
    "activation": (
        "Relu",
        "RELU",
        "tanh",
        "none",
        ("relu", 1),
        ("elu",),
        ("elu", "1"),
        ("elu", np.inf),
        "",
        b"relu",
        ["relu"],
        1,
        0.0,
        True,
        np.nan,
    ),
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
RUNTIME_ERRORS = ("requires grad", "changed since")  # the others raise TypeError or ValueError


@cache
def ways(kind: str) -> dict[str, Callable[[Call], Any]]:
    """All ways to make a call of this kind wrong: new values for the argument at the start of the name, or for more."""
    others = [other for other in available((*CPU_KINDS, *(() if no_gpu() else GPU_KINDS))) if other != kind]
    values = dict.fromkeys((*FLOATS, COUNT), NO_ARRAYS) | VALUES
    values |= dict.fromkeys(("x", "weight", "dy"), (*NO_ARRAYS, None))
    values["scale"] = NO_SCALES
    if kind in CPU_KINDS:
        values["gemm"] = (*values["gemm"], "cublas", "tiled", "sm90")
    found: dict[str, Callable[[Call], Any]] = dict(RELATIONS)
    found |= {f"{name}: {v!r:.20}": lambda c, v=v: v for name, wrong in values.items() for v in wrong}
    found |= {f"needs: sms={v!r}": lambda c, v=v: {"needs": NAMES, "sms": v} for v in VALUES["sms"]}  # of the backward
    for name in (*FLOATS, COUNT):
        of_host = {**(OF_COUNT if name == COUNT else OF_FLOATS), **(OF_NUMPY if kind == "numpy" else {})}
        if name == "scale":  # the scale may have one element
            of_host = {way: f for way, f in of_host.items() if way not in ("a dimension less", "one column")}
        found |= {f"{name}: {way}": lambda c, n=name, f=f: c.put(f(c.arrays[n])) for way, f in of_host.items()}
        found |= {f"{name}: {other}": lambda c, n=name, o=other: kind_of(o).put(c.arrays[n]) for other in others}
        if kind.startswith("torch"):
            found |= {f"{name}: {way}": lambda c, n=name, f=f: f(c.views[n]) for way, f in OF_TORCH.items()}
        if name != COUNT:
            found[f"{name}: another float"] = partial(another_float, name=name)
        if name != "dy":  # dy may be any producer
            found[f"{name}: a producer"] = lambda c, n=name: Producer(c.views[n])
        if name in WRITTEN and kind == "numpy":
            found[f"{name}: read-only"] = partial(read_only, name=name)
        if name in WRITTEN and name != COUNT:
            found[f"{name}: a stride of 0"] = partial(stride_of_zero, name=name)
            pairs = [other for other in FLOATS if other not in (name, "dy")]
            found |= {f"{name}: over {other}": partial(overlap, name=name, other=other) for other in pairs}
    if kind.startswith("torch"):
        del found[f"{COUNT}: requires grad"]  # an integer cannot require grad
        found |= {f"saved: {name} changed since": partial(changed_since, name=name) for name in ("x", "weight")}
    return found


def another_float(call: Call, name: str) -> Any:
    """The array in a dtype that is not allowed: vectors have x's dtype or float32, and a pair has the same."""
    x, own = call.arrays["x"].dtype, call.arrays[name].dtype
    alone = name in ("scale", "bias", "gamma", "beta") and x != np.float64
    wrong = set(DTYPES.values()) - ({x, DTYPES["float32"]} if alone else {own})
    return call.put(call.arrays[name].astype(call.rng.choice(sorted(wrong, key=str))))


def overlap(call: Call, name: str, other: str) -> dict[str, Any]:
    """Two arrays in one buffer; the second starts at any element of the first."""
    shapes = [call.arrays[n].shape for n in (name, other)]
    first, second = map(int, map(np.prod, shapes))
    start = call.rng.randrange(first)
    buffer = call.put(np.ones(max(first, start + second), call.arrays[name].dtype))
    ours, theirs = buffer[:first].reshape(shapes[0]), buffer[start : start + second].reshape(shapes[1])
    return {name: ours, other: theirs, "training": True}


def stride_of_zero(call: Call, name: str) -> dict[str, Any]:
    """One column, repeated by a stride of 0."""
    a = call.arrays[name]
    return {name: stretch(call.kind, call.put(a[..., :1]), a.shape), "training": True}


def changed_since(call: Call, name: str) -> Any:
    """A backward after x or weight changed in place: no byte changes, but torch counts the change."""
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
        shape=tuple(rng.sample(range(3, 10), 3)),  # unequal, and more than 2
        dtype=rng.choice(list(DTYPES)),
        training=rng.random() < 0.7,
        seed=seed,
        given=(*OPTIONAL, "residual"),
        narrow=tuple(name for name in VECTORS if rng.random() < 0.4),
        layouts=draw_layouts(rng),
    )
    gemm = rng.choice(("auto", "cublas", "tiled")) if kind in GPU_KINDS else "auto"
    return Bad(kind, recipe, gemm, rng.choice(list(ways(kind))), rng.random() < 0.5)


def judge_bad(case: Bad) -> bool:
    """Raise unless the call, made twice, raises an error that names a wrong argument, and changes no byte."""
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
    at_fault = {*changes, *case.way.split()}  # the name of the way may have more arguments
    if not at_fault.isdisjoint(("x", "weight")):  # the other arguments are compared with these
        at_fault |= {*FLOATS, COUNT}
    if not at_fault.isdisjoint(STATISTICS):
        at_fault |= set(STATISTICS)
    types = (RuntimeError,) if case.way.endswith(RUNTIME_ERRORS) else (TypeError, ValueError)

    watched = [*(p.base for p in placed.values()), *call.made, *saved[:4]]
    settle(kind)
    before = [kind.get(a).tobytes() for a in watched]
    for _ in range(2):  # a wrong call must not be cached as valid
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
