"""Compare the bits of about 80 calls before and after an edit that should change no result.

python tools/bits.py > before.txt            a line for each call: its name, and a digest of all arrays that it wrote
python tools/bits.py --against before.txt    the calls that differ; exit status 1 if any does

On a GPU the calls cover all dtypes, paths, modes and both directions, on CuPy arrays; without one, those of the CPU.
Compare only files from the same machine and version of cuBLAS, which else may give other bits.
"""

import argparse
import hashlib
import sys
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gsbn
from gsbn import reference

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:  # no CuPy, no driver, no GPU
    xp = np
GPU = xp is not np
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
STATE = ("running_mean", "running_var", "num_batches_tracked")
RAGGED, WHOLE, FEW, TALL = (1000, 137, 259), (1000, 136, 264), (7, 136, 264), (9000, 64, 2104)


def calls():
    """Yield the name, the shape, the dtype and the options of each forward; some are followed by a backward."""
    gemms = ("tiled", "cublas") if GPU else ("auto",)
    for dtype, gemm, training in product(DTYPES, gemms, (True, False)):
        yield f"{dtype} {gemm}", RAGGED, dtype, {"gemm": gemm, "training": training}
        yield f"{dtype} {gemm} relu", RAGGED, dtype, {"gemm": gemm, "training": training, "activation": "relu"}
    for dtype in DTYPES:
        yield f"{dtype} few rows", FEW, dtype, {"training": True}
        yield f"{dtype} few rows relu", FEW, dtype, {"training": True, "activation": "relu"}
        for scale in ("one scale", "no scale"):
            yield f"{dtype} {scale}", RAGGED, dtype, {"gemm": gemms[0], "training": True}
    if not GPU:
        return
    for (dtype, precision), shape in product(
        (("float16", "highest"), ("bfloat16", "highest"), ("float32", "high"), ("float32", "highest")), (WHOLE, TALL)
    ):
        options = {"gemm": "sm90", "precision": precision}
        yield f"{dtype} sm90 {precision}", shape, dtype, {**options, "training": True}
        yield f"{dtype} sm90 {precision}", shape, dtype, {**options, "training": False, "return_saved": False}
        options |= {"activation": "relu"}
        yield f"{dtype} sm90 {precision} relu", shape, dtype, {**options, "training": True}
        yield f"{dtype} sm90 {precision} relu", shape, dtype, {**options, "training": False, "return_saved": False}
    yield "bfloat16 of 70 SMs", WHOLE, "bfloat16", {"training": True, "sms": 70}


def operands(shape, dtype, name):
    """All arguments, equal in every run. x is transposed in memory, so that copies are tested, too.

    The name of the call tells whether its scale has one element or is absent.
    """
    B, I, O = shape
    rng, t = np.random.default_rng(0), DTYPES[dtype]
    wide = np.float64 if dtype == "float64" else np.float32
    vectors = {name: rng.uniform(0.5, 2, O).astype(wide) for name in ("scale", "bias", "gamma", "beta", *STATE[:2])}
    x, weight = (reference.round_to(rng.standard_normal(s), t) for s in ((I, B), (O, I)))
    host = {"x": x, "weight": weight, **vectors, "num_batches_tracked": np.array(3)}
    if name.endswith("no scale"):
        del host["scale"]
    elif name.endswith("one scale"):
        host["scale"] = host["scale"][:1]
    native = {name: xp.asarray(a) for name, a in host.items()}
    return {**native, "x": native["x"].T}, xp.asarray(reference.round_to(rng.standard_normal((B, O)), t))


def digest(arrays):
    hasher = hashlib.sha256()
    for a in arrays:
        if a is not None:
            hasher.update(xp.ascontiguousarray(a).tobytes() if not GPU else xp.asnumpy(a).tobytes())
    return hasher.hexdigest()[:16]


def lines():
    for name, shape, dtype, options in calls():
        arrays, dy = operands(shape, dtype, name)
        what = f"{name} {'training' if options['training'] else 'inference'} {'x'.join(map(str, shape))}"
        y = gsbn.forward(**arrays, **{**options, "return_saved": False})
        yield f"{what} forward: {digest([y, *(arrays[name] for name in STATE)])}"
        if options.get("return_saved", True):
            arrays, dy = operands(shape, dtype, name)
            y, saved = gsbn.forward(**arrays, **options, return_saved=True)
            kept = saved.deviations[:, : shape[2]]
            gradients = gsbn.backward(dy, saved, sms=options.get("sms"))
            yield f"{what} step: {digest([y, kept, *gradients[:6]])}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="the output of an earlier run")
    args = parser.parse_args()
    before = set(args.against.read_text().splitlines()) if args.against else set()
    different = [line for line in lines() if args.against is None or line not in before]
    print("\n".join(different) if different else "all the same")
    return int(args.against is not None and bool(different))


if __name__ == "__main__":
    sys.exit(main())
