"""Every family of data on every path beside PyTorch's error: the table of docs/trust.md.

python tools/trust.py                                   on a GPU, if there is one, and on the CPU; status 1 if any fails
python tools/trust.py --shape 8,64,64 --kind float32    some of it
python tools/trust.py --json errors.json --write        every figure into a file, and the table into docs/trust.md

A result fails if its error is more than 1.1 times PyTorch's and half a unit in the last place: ‖Δ‖ / ‖truth‖ of each of
y, the running statistics and the gradients. The truth is float64's on the same device, and for float64 np.longdouble's
on the CPU. PyTorch has TF32 where gsbn has, and adds no partial sums of a 16-bit product in 16 bits.

Of few features an error is chance: the norm of n independent ones varies by 1 / sqrt(2 n). A family in which something
fails is therefore drawn again, with as many seeds as before, until n is ENOUGH, and judged by all seeds together.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from families import FAMILIES, spoil

import gsbn
from gsbn import reference

ROOT = Path(__file__).resolve().parents[1]
FACTOR, EPS = 1.1, 1e-5
KINDS = {
    "float32": ("float32", "highest"),
    "tf32": ("float32", "high"),
    "float16": ("float16", "highest"),
    "bfloat16": ("bfloat16", "highest"),
    "float64": ("float64", "highest"),
}
FAST = ("float32", "tf32", "float16", "bfloat16")
AUTO, ALL = ("auto",), ("auto", "sm90", "cublas", "tiled")
ON_GPU = (  # shape (B, I, O), kinds, and what `gemm` is
    ((1000000, 32, 32), FAST, AUTO),
    ((131071, 96, 200), FAST, AUTO),
    ((802816, 128, 128), FAST, AUTO),
    ((131072, 64, 48), FAST, ALL),
    ((65536, 256, 512), FAST, ALL),
    ((4096, 1024, 1024), FAST, ALL),
    ((1024, 8192, 8192), FAST, AUTO),
    ((16, 64, 1048576), FAST, AUTO),
    ((64, 2048, 512), FAST, ALL),
    ((8, 64, 64), tuple(KINDS), ALL),
    ((300, 300, 300), tuple(KINDS), ALL),
    ((3, 4096, 1), tuple(KINDS), AUTO),
    ((3, 8192, 1), tuple(KINDS), AUTO),
    ((128, 512, 2), FAST, AUTO),
    ((4096, 256, 3), FAST, AUTO),
    ((5000, 24, 40), tuple(KINDS), ALL),
)
ON_CPU = (  # where there is no `gemm`, and no TF32
    ((300, 300, 300), ("float32", "float16", "bfloat16", "float64"), AUTO),
    ((9000, 32, 32), ("float32", "bfloat16"), AUTO),
    ((8, 64, 64), ("float32", "float16", "bfloat16", "float64"), AUTO),
    ((3, 4096, 1), ("float32", "float64"), AUTO),
    ((4096, 256, 3), ("float32",), AUTO),
)
SEEDS, ENOUGH = 16, 2048  # draws at first, at most; features of all draws that leave a ratio to chance by 2 %
VECTORS = ("scale", "bias", "gamma", "beta")
STATE = ("running_mean", "running_var")
HEADER = f"{'family':22} {'path':13} {'shape':16} {'kind':8} mode  {'quantity':12} gsbn     PyTorch     ratio"
MARKS = "<!-- trust -->", "<!-- /trust -->"


def seeds_for(shape):
    """How many draws there are at first, and at last."""
    B, I, O = shape
    first = 1 if B * I * O > 1 << 30 else max(2, min(SEEDS, 256 // O))
    return first, max(first, min(8 * first, ENOUGH // O))


def base_operands(shape, wide, device, seed):
    """Standard normal operands that families change."""
    B, I, O = shape
    draw = torch.Generator(device).manual_seed(seed)
    o = {"x": (B, I), "weight": (O, I), "dy": (B, O)} | dict.fromkeys(VECTORS, (O,))
    o = {name: torch.randn(s, generator=draw, dtype=wide, device=device) for name, s in o.items()}
    o["weight"] /= I**0.5
    o["dy"] += 0.5
    for name in ("scale", "gamma"):
        o[name] = o[name].abs().clamp_(max=2) * 0.75 + 0.5
    return o


def operands(base, family, dtype, seed):
    """The arguments of one problem. The scale and the bias are in x's dtype, as PyTorch wants them."""
    t, wide = getattr(torch, dtype), torch.float64 if dtype == "float64" else torch.float32
    o = {name: base[name].clone() if name in ("x", "weight", "scale") else base[name] for name in base}
    spoil(family, o["x"], o["weight"], o["scale"], dtype, seed)
    return {name: a.to(wide if name in ("gamma", "beta") else t) for name, a in o.items()}


def statistics(o, truth):
    """Fresh running statistics: of training 0 and 1, and then (of inference) those that training had found."""
    if not truth:
        return {name: torch.full_like(o["beta"], i) for i, name in enumerate(STATE)}
    of = {
        name: as_torch(truth[name].astype("f8") if isinstance(truth[name], np.ndarray) else truth[name])
        for name in STATE
    }
    return {name: a.to(o["beta"]) for name, a in of.items()}


def truth_of(o, state, training):
    """y, the running statistics at a momentum of 1, and the gradients, in float64, or longdouble for float64."""
    if o["x"].dtype == torch.float64:
        host = {name: a.cpu().numpy() for name, a in (o | state).items()}
        dy = host.pop("dy")
        y = reference.forward(**host, training=training, momentum=1.0, eps=EPS, dtype=np.longdouble)
        del host["beta"]
        gradients = reference.backward(dy, **host, training=training, eps=EPS, dtype=np.longdouble)
        found = {"y": y.y} | {f"d{name}": a for name, a in gradients._asdict().items()}
        if training:
            del found["dbias"]  # 0 here, and rounding in PyTorch
            found |= {name: getattr(y, name) for name in STATE}
        return found
    x, w, dy, s, b, gamma, beta = (o[name].double() for name in ("x", "weight", "dy", *VECTORS))
    B, total, g = len(x), dy.sum(0), x @ w.T
    found = {"dbeta": total}
    if training:
        mean = g.mean(0)
        d = g.sub_(mean)
        rest = d.mean(0)  # what rounding has left
        d, mean = d.sub_(rest), mean + rest
        var = d.square().mean(0)
        r = (s * s * var + EPS).rsqrt()
        dots = (dy * d).sum(0)
        dg = (gamma * s * r) * (dy - total / B - d * (s * s * r * r * dots / B))
        found |= {"y": d * (gamma * s * r) + beta, "dgamma": s * r * dots, "dscale": gamma * EPS * r**3 * dots}
        found |= {"running_mean": s * (mean + b), "running_var": s * s * var * (B / (B - 1))}
    else:
        mean, r = state["running_mean"].double(), (state["running_var"].double() + EPS).rsqrt()
        z = (g + b) * s - mean
        dg = dy * (gamma * s * r)
        found |= {"y": z * (gamma * r) + beta, "dgamma": r * (dy * z).sum(0), "dbias": gamma * s * r * total}
        found["dscale"] = gamma * r * (dy * (g + b)).sum(0)
    return found | {"dx": dg @ w, "dweight": dg.T @ x}


def theirs(o, state, training, precision):
    """PyTorch's own operators."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "high"
    names = ("x", "weight", *VECTORS)
    leaves = [o[name].detach().requires_grad_() for name in names]
    x, w, s, b, gamma, beta = leaves
    mean, var = (a.clone() for a in state.values())
    z = torch.nn.functional.linear(x, w, b) * s
    y = torch.nn.functional.batch_norm(z, mean, var, gamma, beta, training, 1.0, EPS)
    gradients = torch.autograd.grad(y, leaves, o["dy"])
    found = {"y": y.detach()} | {f"d{name}": a for name, a in zip(names, gradients, strict=True)}
    return found | ({"running_mean": mean, "running_var": var} if training else {})


def ours(library, o, state, training, precision, gemm):
    """gsbn's, and the path; what a forward writes that keeps deviations for a backward is "kept"."""

    def given():
        a = {name: o[name] for name in ("x", "weight", *VECTORS)} | {name: a.clone() for name, a in state.items()}
        return {name: as_numpy(a[name]) for name in a} if library == "numpy" else a

    options = {"training": training, "momentum": 1.0, "eps": EPS, "precision": precision, "gemm": gemm}
    first, second = given(), given()
    told = gsbn.describe(**first, **options)
    y = gsbn.forward(**first, **options)
    kept, saved = gsbn.forward(**second, **options, return_saved=True)
    gradients = gsbn.backward(as_numpy(o["dy"]) if library == "numpy" else o["dy"], saved)
    found = {"y": y, "y, kept": kept} | {f"d{name}": a for name, a in gradients._asdict().items()}
    if training:
        found |= {name: first[name] for name in STATE} | {f"{name}, kept": second[name] for name in STATE}
    narrow = any(kernel.startswith("narrow") for kernel in told.kernels)
    path = library if library in ("numpy", "torch-cpu") else "narrow" if narrow else told.path
    return found, path


def as_numpy(t):
    if t.dtype == torch.bfloat16:
        import ml_dtypes

        return t.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return t.numpy().copy()


def as_torch(a):
    if isinstance(a, np.ndarray):
        return (
            torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
            if a.dtype.name == "bfloat16"
            else torch.from_numpy(a)
        )
    return a


def squares(got, truth):
    """Σ Δ² and Σ truth², to be added up over seeds."""
    if isinstance(truth, np.ndarray):
        return np.sum((as_torch(got).cpu().numpy() - truth) ** 2), np.sum(truth**2)
    return (as_torch(got).double() - truth).square_().sum(), truth.square().sum()


class Tally:
    """Squared errors of results by (path, gemm, kind, mode, quantity), and of PyTorch by (kind, mode, quantity)."""

    def __init__(self):
        self.sums, self.roundoff = {}, {}

    def add(self, key, results, truth):
        for name, got in results.items():
            of = truth.get(name.partition(",")[0])
            if of is not None:
                self.sums.setdefault((*key, name), []).append(squares(got, of))
                self.roundoff[(*key, name)] = torch.finfo(as_torch(got).dtype).eps / 2

    def error(self, key):
        wrong, size = (float(sum(column)) for column in zip(*self.sums[key], strict=True))
        return (wrong / (size or 1.0)) ** 0.5

    def rows(self, family, shape):
        """Of each quantity the worse, with deviations kept and without."""
        found = {}
        for key in self.sums:
            if key[0] == "torch":
                continue
            path, gemm, kind, mode, quantity = (*key[:4], key[4].partition(",")[0])
            mine, its = self.error(key), self.error(("torch", "", kind, mode, quantity))
            limit = FACTOR * its + self.roundoff[key] if np.isfinite(its) else np.inf
            share = 0.0 if np.isinf(limit) else mine / limit if np.isfinite(mine) else np.inf
            row = {"family": family, "path": path, "gemm": gemm, "shape": shape, "kind": kind, "mode": mode}
            row |= {"quantity": quantity, "ours": mine, "pytorch": its, "share": share}
            at = tuple(map(str, row.values()))[:7]
            found[at] = max(row, found.get(at, row), key=lambda row: row["share"])
        return list(found.values())


def run(shape, kinds, gemms, device, families, libraries):
    """A row for every result of this shape."""
    tallies = {family: Tally() for family in families}
    rows, (seeds, most) = {}, seeds_for(shape)
    done = 0
    while tallies and done < most:
        draw(tallies, shape, kinds, gemms, device, libraries, range(done, seeds))
        rows |= {family: tally.rows(family, list(shape)) for family, tally in tallies.items()}
        tallies = {family: tally for family, tally in tallies.items() if any(map(fails, rows[family]))}
        done, seeds = seeds, min(2 * seeds, most)
    return list(itertools.chain(*rows.values()))


def draw(tallies, shape, kinds, gemms, device, libraries, seeds):
    """Add the errors of these seeds to the families' tallies."""
    wide = torch.float64 if "float64" in kinds else torch.float32
    dtypes = {KINDS[kind][0]: [k for k in kinds if KINDS[k][0] == KINDS[kind][0]] for kind in kinds}
    for seed in seeds:
        base = base_operands(shape, wide, device, seed)
        for (family, tally), dtype in itertools.product(tallies.items(), dtypes):
            o, found = operands(base, family, dtype, seed), {}
            for mode in ("training", "inference"):
                training, state = mode == "training", statistics(o, found)
                found = truth_of(o, state, training)
                for kind in dtypes[dtype]:
                    precision = KINDS[kind][1]
                    tally.add(("torch", "", kind, mode), theirs(o, state, training, precision), found)
                    for library, gemm in itertools.product(libraries, gemms):
                        try:
                            results, path = ours(library, o, state, training, precision, gemm)
                        except ValueError as error:
                            if not str(error).startswith("gemm:"):  # it does not serve this
                                raise
                            continue
                        tally.add((path, gemm, kind, mode), results, found)
                if training:
                    found = {name: found[name] for name in STATE}


def fails(row):
    return row["share"] > 1


def line(row):
    size = "x".join(map(str, row["shape"]))
    asked = "" if row["gemm"] != "auto" or row["path"] in ("numpy", "torch-cpu") else " (auto)"
    ratio = row["ours"] / row["pytorch"] if row["pytorch"] else np.inf
    return (
        f"{row['family']:22} {row['path'] + asked:13} {size:16} {row['kind']:8} {row['mode'][:5]} {row['quantity']:12} "
        f"{row['ours']:.2e} {row['pytorch']:.2e} {ratio:8.2f}"
    )


def table(rows):
    """Of each family, path and dtype the result that is nearest to what it may be: its error, and PyTorch's."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    paths = [
        p for p in ("narrow", "sm90", "cublas", "tiled", "numpy", "torch-cpu") if any(r["path"] == p for r in rows)
    ]
    of = {}
    for row in rows:
        of.setdefault((row["path"], row["family"], row["kind"]), []).append(row)
    lines = ["| path | family | " + " | ".join(kinds) + " |", "| --- | --- |" + " --- |" * len(kinds)]
    for path, family in itertools.product(paths, FAMILIES):
        cells = []
        for kind in kinds:
            there = of.get((path, family, kind))
            worst = max(there, key=lambda row: row["share"]) if there else None
            name = worst["quantity"].partition(",")[0] if worst else ""
            bold = "**" if worst and fails(worst) else ""
            cells.append(f"{bold}{name} {worst['ours']:.1e} ({worst['pytorch']:.1e}){bold}" if worst else "")
        if any(cells):
            lines.append(f"| {path} | {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine():
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    return f"{where}, PyTorch {torch.__version__}, gsbn {gsbn.__version__}"


def write(rows, page):
    text = page.read_text(encoding="utf-8")
    begin, end = MARKS
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    failed = sum(map(fails, rows))
    told = f"Measured on {machine()}: {len(rows)} results, {failed} beyond what they may be."
    page.write_text(f"{before}{begin}\n\n{told}\n\n{table(rows)}\n\n{end}{after}", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", action="append", choices=("cuda", "cpu"), help="both, if there is a GPU")
    parser.add_argument("--shape", action="append", help="B,I,O")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--gemm", action="append", choices=ALL)
    parser.add_argument("--json", type=Path, help="where every result goes")
    parser.add_argument("--write", action="store_true", help="the table, into docs/trust.md")
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True, help="compile ahead, at once")
    args = parser.parse_args()
    devices = args.device or (["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"])
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    start = time.time()
    if "cuda" in devices and args.warm_up:
        print(f"{gsbn.warm_up()} kernels, {time.time() - start:.0f} s", file=sys.stderr)
    rows = []
    for device in devices:
        for shape, kinds, gemms in ON_GPU if device == "cuda" else ON_CPU:
            kinds = [kind for kind in kinds if not args.kind or kind in args.kind]
            gemms = [gemm for gemm in gemms if not args.gemm or gemm in args.gemm]
            if not kinds or not gemms or (args.shape and ",".join(map(str, shape)) not in args.shape):
                continue
            begun = time.time()
            libraries = ("torch-cuda",) if device == "cuda" else ("numpy", "torch-cpu")
            found = run(shape, kinds, gemms, device, args.family or list(FAMILIES), libraries)
            rows += found
            failed = sum(map(fails, found))
            print(
                f"{device} {shape}: {len(found)} results, {failed} failed, {time.time() - begun:.1f} s", file=sys.stderr
            )
    wrong = sorted(filter(fails, rows), key=lambda row: -row["share"])
    if wrong:
        print(HEADER)
    for row in wrong:
        print(line(row))
    print(f"{machine()}: {len(rows)} results, {len(wrong)} failed, {time.time() - start:.0f} s")
    if args.json:
        finite = [
            {k: v if not isinstance(v, float) or np.isfinite(v) else str(v) for k, v in row.items()} for row in rows
        ]
        args.json.write_text(json.dumps({"machine": machine(), "results": finite}, indent=0))
    if args.write:
        write(rows, ROOT / "docs" / "trust.md")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
