"""gsbn's error compared with PyTorch's: the same operands through both, the truth in float64, norm by norm.

A result is right if ‖Δ‖ / ‖truth‖ of y, of a running statistic or of a gradient is at most 1.1 times PyTorch's and
half a unit in the last place. The truth is float64's on the same device, and for float64 np.longdouble's on the CPU.
In 16 bits the gradient of g is rounded to x's dtype once before it is multiplied, where PyTorch rounds it twice: over
many rows the roundings of the few values that a 16-bit dy takes do not cancel, and in a few features one of the two has
much the larger sum. A gradient may therefore also have 1.1 times the error of exact arithmetic on a gradient of g in
x's dtype (`of_rounded_dg`).
PyTorch uses TF32 if gsbn does, and adds no partial sums of a 16-bit product in 16 bits.

With few features an error is chance: the norm of n independent errors varies by 1 / sqrt(2 n). A family that fails is
therefore drawn again, with as many seeds as before, until n is ENOUGH, and judged by all seeds together.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import gsbn
from gsbn import Gradients, reference
from gsbn._backward import backward_within
from gsbn._forward import forward_within
from gsbn._plan import Limits
from tests.support.families import spoil

FACTOR, EPS = 1.1, 1e-5
# What is not promised by limbs of few inputs, with reasons in docs/trust.md: how many times the limit it may be, and
# for which numbers of inputs.
UNPROMISED = {("constant input", "float32", "training", "running_var"): (2.0, range(64, 65))} | {
    (family, "float32", "inference", "y"): (1.15, range(64, 65)) for family in ("mean 1e2", "mean 1e3", "equal rows")
}
TF32_LEAST = 2.0**-15  # errors that are compared: a sixteenth of TF32's roundoff of one operand


def dropped(inputs: int) -> float:
    """The relative error of a variance by the product of the second limbs, which is not computed.

    At a mean of 10⁴ deviations x's second limb has all of its spread. That of the weight is up to 2^-11 of its first,
    with a random sign: their product changes Σ wᵢ xᵢ by up to 2^-11 / sqrt(inputs) of its spread, in the same direction
    in all rows, and its variance by twice that.
    """
    return 2.0**-10 / inputs**0.5


KINDS = {
    "float32": ("float32", "highest"),
    "tf32": ("float32", "high"),
    "float16": ("float16", "highest"),
    "bfloat16": ("bfloat16", "highest"),
    "float64": ("float64", "highest"),
}
SEEDS, ENOUGH = 16, 2048  # most draws at first; features of all draws with which a ratio varies by 2 %
VECTORS = ("scale", "bias", "gamma", "beta")
STATE = ("running_mean", "running_var")
ANY = Limits()


Tensors = dict[str, Any]
Row = dict[str, Any]


def seeds_for(shape: tuple[int, int, int]) -> tuple[int, int]:
    """The least and the most draws."""
    B, I, O = shape
    first = 1 if B * I * O > 1 << 30 else max(2, min(SEEDS, 256 // O))
    return first, max(first, min(8 * first, ENOUGH // O))


def base_operands(shape: tuple[int, int, int], wide: Any, device: str, seed: int) -> Tensors:
    """Standard normal operands, which families change."""
    B, I, O = shape
    draw = torch.Generator(device).manual_seed(seed)
    shapes = {"x": (B, I), "weight": (O, I), "dy": (B, O)} | dict.fromkeys(VECTORS, (O,))
    o = {name: torch.randn(s, generator=draw, dtype=wide, device=device) for name, s in shapes.items()}
    o["weight"] /= I**0.5
    o["dy"] += 0.5
    for name in ("scale", "gamma"):
        o[name] = o[name].abs().clamp_(max=2) * 0.75 + 0.5
    return o


def operands(base: Tensors, family: str, dtype: str, seed: int) -> Tensors:
    """The arguments of one problem. The scale and the bias have x's dtype, as PyTorch needs it."""
    t, wide = getattr(torch, dtype), torch.float64 if dtype == "float64" else torch.float32
    o = {name: a.clone() if name in ("x", "weight", "scale") else a for name, a in base.items()}
    spoil(family, o["x"], o["weight"], o["scale"], dtype, seed)
    return {name: a.to(wide if name in ("gamma", "beta") else t) for name, a in o.items()}


def fresh_state(o: Tensors, found: Tensors) -> Tensors:
    """Running statistics: 0 and 1 for training, and those of training for inference."""
    beta = o["beta"]
    if not found:
        return {"running_mean": torch.zeros_like(beta), "running_var": torch.ones_like(beta)}
    of = {name: found[name] for name in STATE}
    if beta.dtype == torch.float64:
        of = {name: torch.from_numpy(a.astype(np.float64)) for name, a in of.items()}
    return {name: a.to(beta) for name, a in of.items()}


def truth_of(o: Tensors, state: Tensors, training: bool) -> Tensors:
    """y, the running statistics at a momentum of 1 and the gradients, in float64, or in longdouble for float64."""
    if o["x"].dtype == torch.float64:
        host = {name: a.cpu().numpy() for name, a in (o | state).items()}
        dy, wide = host.pop("dy"), {"training": training, "eps": EPS, "dtype": np.longdouble}
        made = reference.forward(**host, **wide, momentum=1.0)
        del host["beta"]
        gradients = reference.backward(dy, **host, **wide)
        found = {"y": made.y} | {f"d{name}": getattr(gradients, name) for name in Gradients._fields}
        if training:
            del found["dbias"]  # 0 here, and rounding errors in PyTorch
            found |= {name: getattr(made, name) for name in STATE}
        return found
    x, w, dy, s, b, gamma, beta = (o[name].double() for name in ("x", "weight", "dy", *VECTORS))
    B, total, g = len(x), dy.sum(0), x @ w.T
    found = {"dbeta": total}
    if training:
        mean = g.mean(0)
        d = g.sub_(mean)
        rest = d.mean(0)  # rounding errors
        d, mean = d.sub_(rest), mean + rest
        var = d.square().mean(0)
        r = (s * s * var + EPS).rsqrt()
        found |= _through_deviations(o, d, r)
        found |= {"y": d * (gamma * s * r) + beta}
        found |= {"running_mean": s * (mean + b), "running_var": s * s * var * (B / (B - 1))}
        return found
    mean, r = state["running_mean"].double(), (state["running_var"].double() + EPS).rsqrt()
    z = (g + b) * s - mean
    dg = dy * (gamma * s * r)
    found |= {"y": z * (gamma * r) + beta, "dgamma": r * (dy * z).sum(0), "dbias": gamma * s * r * total}
    found["dscale"] = gamma * r * (dy * (g + b)).sum(0)
    return found | {"dx": dg @ w, "dweight": dg.T @ x}


def _through_deviations(o: Tensors, d: Any, r: Any, dtype: Any = torch.float64) -> Tensors:
    """The gradients through deviations d and r = 1 / sqrt(s² var + eps). dg is rounded to `dtype`."""
    x, w, dy, s, gamma = (o[name].double() for name in ("x", "weight", "dy", "scale", "gamma"))
    dots = r * (dy * d).sum(0)
    dg = ((gamma * s * r) * (dy - dy.mean(0) - d * (s * s * r * dots / len(x)))).to(dtype).double()
    return {"dgamma": s * dots, "dscale": gamma * EPS * r * r * dots, "dx": dg @ w, "dweight": dg.T @ x}


def of_rounded_dg(o: Tensors) -> Tensors:
    """The gradients of exact arithmetic on dg in x's dtype; {} if x has more digits."""
    x, w, s = (o[name] for name in ("x", "weight", "scale"))
    if x.dtype not in (torch.float16, torch.bfloat16):
        return {}
    d = x.double() @ w.double().T
    d -= d.mean(0)
    d -= d.mean(0)
    r = (s.double() ** 2 * d.square().mean(0) + EPS).rsqrt()
    return _through_deviations(o, d, r, dtype=x.dtype)


def over_ghosts(of_batch: Callable[[Tensors], Tensors], o: Tensors, groups: int) -> Tensors:
    """The results of a loop over ghost batches. At a momentum of 1 the statistics of the last one stay."""
    if groups == 1:
        return of_batch(o)
    pieces = zip(o["x"].chunk(groups), o["dy"].chunk(groups), strict=True)
    found = [of_batch({**o, "x": x, "dy": dy}) for x, dy in pieces]

    def whole(name: str) -> Any:
        parts = [of_one[name] for of_one in found]
        if name in ("y", "dx"):
            return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)
        return parts[-1] if name in STATE else sum(parts)

    return {name: whole(name) for name in found[0]}


def theirs(o: Tensors, state: Tensors, training: bool, precision: str, groups: int = 1) -> Tensors:
    """PyTorch's own operators."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "high"
    names = ("x", "weight", *VECTORS)
    x, w, s, b, gamma, beta = leaves = [o[name].detach().requires_grad_() for name in names]
    mean, var = (a.clone() for a in state.values())
    z = torch.nn.functional.linear(x, w, b) * s
    norm = torch.nn.functional.batch_norm
    y = torch.cat([norm(part, mean, var, gamma, beta, training, 1.0, EPS) for part in z.chunk(groups)])
    gradients = torch.autograd.grad(y, leaves, o["dy"])
    found = {"y": y.detach()} | {f"d{name}": a for name, a in zip(names, gradients, strict=True)}
    return found | ({"running_mean": mean, "running_var": var} if training else {})


def ours(
    library: str, o: Tensors, state: Tensors, training: bool, precision: str, gemm: str, limits: Limits = ANY,
    groups: int = 1,
) -> tuple[Tensors, str]:  # fmt: skip
    """gsbn's results, and the path. "kept": of a forward that saves deviations for a backward."""

    def given() -> Tensors:
        a = {name: o[name] for name in ("x", "weight", *VECTORS)} | {name: a.clone() for name, a in state.items()}
        return {name: as_numpy(a[name]) for name in a} if library == "numpy" else a

    options: dict[str, Any] = {"training": training, "momentum": 1.0, "eps": EPS, "precision": precision, "gemm": gemm}
    options |= {} if groups == 1 else {"groups": groups}
    first, second = given(), given()
    told = gsbn.describe(**first, **options)
    y = forward_within(limits, **first, **options)
    kept, saved = forward_within(limits, **second, **options, return_saved=True)
    gradients = backward_within(limits, as_numpy(o["dy"]) if library == "numpy" else o["dy"], saved)
    found = {"y": y, "y, kept": kept} | {f"d{name}": getattr(gradients, name) for name in Gradients._fields}
    if training:
        found |= {name: first[name] for name in STATE} | {f"{name}, kept": second[name] for name in STATE}
    skinny = any(kernel.startswith("skinny") for kernel in told.kernels)
    path = library if library != "torch-cuda" else "skinny" if skinny else told.path
    return found, path


def as_numpy(t: Any) -> np.ndarray:
    if t.dtype == torch.bfloat16:
        import ml_dtypes

        return t.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    made: np.ndarray = t.numpy().copy()
    return made


def as_torch(a: Any) -> Any:
    if not isinstance(a, np.ndarray):
        return a
    bits = a.dtype.name == "bfloat16"
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if bits else torch.from_numpy(a)


def squares(got: Any, truth: Any) -> tuple[Any, Any]:
    """Σ Δ² and Σ truth², which are added up over seeds. Elements at the end of got's dtype, or beyond, are left out."""
    if isinstance(truth, np.ndarray):
        return np.sum((as_torch(got).cpu().numpy() - truth) ** 2), np.sum(truth**2)
    got = as_torch(got)
    end = torch.finfo(got.dtype)
    within = truth.abs() <= end.max * (1 - 8 * end.eps)  # beyond it a few roundings decide whether it is infinity
    return (got.double() - truth)[within].square_().sum(), truth[within].square().sum()


class Tally:
    """The errors of a family: gsbn's by (path, gemm, kind, mode, quantity), PyTorch's by ("torch", "", kind, …)."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, ...], list[tuple[Any, Any]]] = {}
        self.roundoff: dict[tuple[str, ...], float] = {}

    def add(self, key: tuple[str, ...], results: Tensors, truth: Tensors) -> None:
        for name, got in results.items():
            of = truth.get(name.partition(",")[0])
            if of is not None:
                self.sums.setdefault((*key, name), []).append(squares(got, of))
                self.roundoff[(*key, name)] = torch.finfo(as_torch(got).dtype).eps / 2

    def error(self, key: tuple[str, ...]) -> float:
        wrong, size = (float(sum(column)) for column in zip(*self.sums[key], strict=True))
        return float((wrong / (size or 1.0)) ** 0.5)

    def rows(self, family: str, shape: tuple[int, int, int]) -> list[Row]:
        """The worse error of each quantity, with saved deviations and without; no limit if PyTorch overflows."""
        found: dict[tuple[str, ...], Row] = {}
        for key in self.sums:
            if key[0] in ("torch", "rounded dg"):
                continue
            path, gemm, kind, mode, quantity = *key[:4], key[4].partition(",")[0]
            mine, its = self.error(key), self.error(("torch", "", kind, mode, quantity))
            rounded = ("rounded dg", "", kind, mode, quantity)
            least = self.error(rounded) if rounded in self.sums else 0.0
            limit = FACTOR * max(its, least if np.isfinite(least) else 0.0) + self.roundoff[key]
            times, inputs = UNPROMISED.get((family, kind, mode, quantity), (1.0, range(0)))
            limit *= times if shape[1] in inputs else 1.0
            if kind == "tf32" and path != "tiled":  # has no TF32. Each library chooses cuBLAS kernels by speed
                limit = max(limit, TF32_LEAST)
            if (family, kind, quantity) == ("mean 1e4", "float32", "running_var") and path == "sm90":
                limit = max(limit, dropped(shape[1]))
            share = 0.0 if not np.isfinite(limit) else mine / limit if np.isfinite(mine) else np.inf
            row = {"family": family, "path": path, "gemm": gemm, "shape": list(shape), "kind": kind, "mode": mode}
            row |= {"quantity": quantity, "ours": mine, "pytorch": its, "share": share}
            at = (path, gemm, kind, mode, quantity)
            found[at] = max(row, found.get(at, row), key=lambda row: row["share"])
        return list(found.values())


@contextlib.contextmanager
def most_accurate() -> Iterator[None]:
    """Forbid PyTorch partial sums in 16 bits, and restore its switches at the end."""
    switches = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(switches, name) for name in names]
    try:
        for name in names:
            setattr(switches, name, False)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(switches, name, value)


def measure(
    shape: tuple[int, int, int],
    kinds: Iterable[str],
    families: Iterable[str],
    *,
    device: str,
    libraries: Sequence[str],
    gemms: Sequence[str] = ("auto",),
    limits: Limits = ANY,
    groups: int = 1,
) -> list[Row]:
    """A row for every result of this shape."""
    tallies = {family: Tally() for family in families}
    rows: dict[str, list[Row]] = {}
    done, (seeds, most) = 0, seeds_for(shape)
    with most_accurate():
        while tallies and done < most:
            for seed in range(done, seeds):
                ways = list(itertools.product(libraries, gemms))
                _draw(tallies, shape, tuple(kinds), device, ways, limits, seed, groups)
            rows |= {family: tally.rows(family, shape) for family, tally in tallies.items()}
            tallies = {family: tally for family, tally in tallies.items() if any(map(fails, rows[family]))}
            done, seeds = seeds, min(2 * seeds, most)
    return list(itertools.chain(*rows.values()))


def _draw(
    tallies: dict[str, Tally],
    shape: tuple[int, int, int],
    kinds: tuple[str, ...],
    device: str,
    ways: list[tuple[str, str]],
    limits: Limits,
    seed: int,
    groups: int,
) -> None:
    """Add the errors of one seed to the families' tallies."""
    dtypes = {KINDS[kind][0]: [other for other in kinds if KINDS[other][0] == KINDS[kind][0]] for kind in kinds}
    base = base_operands(shape, torch.float64 if "float64" in dtypes else torch.float32, device, seed)
    for (family, tally), dtype in itertools.product(tallies.items(), dtypes):
        o, found = operands(base, family, dtype, seed), {}
        for mode in ("training", "inference"):
            training, state = mode == "training", fresh_state(o, found)
            ghosts = groups if training else 1
            found = over_ghosts(partial(truth_of, state=state, training=training), o, ghosts)
            for kind in dtypes[dtype]:
                precision = KINDS[kind][1]
                tally.add(("torch", "", kind, mode), theirs(o, state, training, precision, ghosts), found)
                if training and device == "cuda":
                    tally.add(("rounded dg", "", kind, mode), over_ghosts(of_rounded_dg, o, ghosts), found)
                for library, gemm in ways:
                    try:
                        results, path = ours(library, o, state, training, precision, gemm, limits, ghosts)
                    except ValueError as error:
                        if not str(error).startswith("gemm:"):  # else the path cannot serve
                            raise
                        continue
                    tally.add((path, gemm, kind, mode), results, found)
            if training:
                found = {name: found[name] for name in STATE}


def fails(row: Row) -> bool:
    return bool(row["share"] > 1)


HEADER = f"{'family':22} {'path':15} {'shape':16} {'kind':8} mode  {'quantity':12} gsbn     PyTorch     ratio"


def line(row: Row) -> str:
    """A row in the columns of HEADER."""
    size = "x".join(map(str, row["shape"]))
    asked = "" if row["gemm"] != "auto" or row["path"] in ("numpy", "torch-cpu") else " (auto)"
    ratio = row["ours"] / row["pytorch"] if row["pytorch"] else np.inf
    return (
        f"{row['family']:22} {row['path'] + asked:15} {size:16} {row['kind']:8} {row['mode'][:5]} {row['quantity']:12} "
        f"{row['ours']:.2e} {row['pytorch']:.2e} {ratio:8.2f}"
    )
