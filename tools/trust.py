"""Compare the error with PyTorch's for every family of data on every path: the table of docs/trust.md.

python tools/trust.py                                   on a GPU, if there is one, and on the CPU; status 1 if any fails
python tools/trust.py --shape 8,64,64 --kind float32    some of it
python tools/trust.py --json errors.json --write        every figure into a file, and the table into docs/trust.md
python tools/trust.py --read a.json b.json --write      the same of files that several runs on one machine have written

tests/support/beside_torch.py has the measure of errors, and the limit.
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
import gsbn
from tests.support.beside_torch import HEADER, KINDS, fails, line, measure
from tests.support.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
FAST = ("float32", "tf32", "float16", "bfloat16")
AUTO, ALL = ("auto",), ("auto", "sm90", "cublas", "tiled")
ON_GPU = (  # shape (B, I, O), kinds, and `gemm`
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
ON_CPU = (  # no `gemm` and no TF32; float64 by NumPy's BLAS need not be as accurate as PyTorch's
    ((300, 300, 300), ("float32", "float16", "bfloat16"), AUTO),
    ((9000, 32, 32), ("float32", "bfloat16"), AUTO),
    ((8, 64, 64), ("float32", "float16", "bfloat16"), AUTO),
    ((3, 4096, 1), ("float32",), AUTO),
    ((4096, 256, 3), ("float32",), AUTO),
)
ERRORS = ("ours", "pytorch", "share")
MARKS = "<!-- trust -->", "<!-- /trust -->"


def table(rows):
    """For each family, path and dtype the result that is nearest to its limit: its error, and PyTorch's."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    paths = [
        p for p in ("skinny", "sm90", "cublas", "tiled", "numpy", "torch-cpu") if any(r["path"] == p for r in rows)
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


def keep(rows, file, machine):
    finite = [{k: v if not isinstance(v, float) or np.isfinite(v) else str(v) for k, v in row.items()} for row in rows]
    file.write_text(json.dumps({"machine": machine, "results": finite}, indent=0))


def write(rows, page, machine):
    text = page.read_text(encoding="utf-8")
    begin, end = MARKS
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    failed = sum(map(fails, rows))
    told = f"Measured on {machine}: {len(rows)} results, {failed} beyond what they may be."
    page.write_text(f"{before}{begin}\n\n{told}\n\n{table(rows)}\n\n{end}{after}", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", action="append", choices=("cuda", "cpu"), help="both, if there is a GPU")
    parser.add_argument("--shape", action="append", help="B,I,O")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--gemm", action="append", choices=ALL)
    parser.add_argument("--json", type=Path, help="a file for all results")
    parser.add_argument("--read", type=Path, nargs="+", help="files that --json wrote: nothing is measured")
    parser.add_argument("--write", action="store_true", help="write the table to docs/trust.md")
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True, help="compile first")
    args = parser.parse_args()
    devices = args.device or (["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"])
    start, named = time.time(), machine()
    rows = []
    if args.read:
        devices, read = [], [json.loads(file.read_text()) for file in args.read]
        rows = [{k: float(v) if k in ERRORS else v for k, v in row.items()} for of in read for row in of["results"]]
        (named,) = {of["machine"] for of in read}
    if "cuda" in devices and args.warm_up:
        print(f"{gsbn.warm_up()} kernels, {time.time() - start:.0f} s", file=sys.stderr)
    for device in devices:
        for shape, kinds, gemms in ON_GPU if device == "cuda" else ON_CPU:
            kinds = [kind for kind in kinds if not args.kind or kind in args.kind]
            gemms = [gemm for gemm in gemms if not args.gemm or gemm in args.gemm]
            if not kinds or not gemms or (args.shape and ",".join(map(str, shape)) not in args.shape):
                continue
            begun = time.time()
            libraries = ("torch-cuda",) if device == "cuda" else ("numpy", "torch-cpu")
            families = args.family or list(FAMILIES)
            found = measure(shape, kinds, families, device=device, libraries=libraries, gemms=gemms)
            rows += found
            wrong = sorted(filter(fails, found), key=lambda row: -row["share"])
            print(f"{device} {shape}: {len(found)} results, {len(wrong)} failed, {time.time() - begun:.1f} s")
            print(*([HEADER, *map(line, wrong)] if wrong else []), sep="\n", flush=True)
            if args.json:  # after each shape: a run that is stopped keeps what it has
                keep(rows, args.json, named)
    wrong = list(filter(fails, rows))
    print(f"{named}: {len(rows)} results, {len(wrong)} failed, {time.time() - start:.0f} s")
    if args.write:
        write(rows, ROOT / "docs" / "trust.md", named)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
