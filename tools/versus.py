"""Compare another checkout of gsbn with this one, in one process: device time and host cost of the same calls.

python tools/versus.py OTHER [--rounds N] [--only WORD]    OTHER: a folder with gsbn/ and kernels/, of another commit

A row is a shape and a dtype: medians in us of the forward, the forward that saves, and the backward, first of the other
checkout, and the difference of this one. Calls alternate, L2 is flushed before each, and the GPU is kept busy while the
host enqueues, so that device times do not include the host's. The host cost is that of 50 calls in a row, the median of
9. Needs PyTorch and a GPU.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parents[1]
SHAPES = {
    "33": (1024, 8192, 8192),
    "39": (16384, 4096, 4096),
    "middle": (4096, 1024, 1024),
    "small": (128, 1024, 512),
    "tall": (65536, 256, 512),
    "few": (64, 2048, 2048),
    "skinny": (1000000, 32, 32),
}
DTYPES = {
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
    "tf32": (torch.float32, "high"),
    "float32": (torch.float32, "highest"),
}


def load(folder, name):
    """Import the package in a folder under another name, which works because its imports are relative."""
    package = Path(folder).resolve() / "gsbn"
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_the_device(calls, rounds, scratch):
    """The median us of each call; the calls alternate, and every other round reverses their order."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = [[] for _ in calls]
    for turn in range(rounds + 3):
        for i in sorted(range(len(calls)), reverse=turn % 2 == 1):
            scratch.zero_()
            torch.cuda._sleep(300_000)
            start.record()
            calls[i]()
            stop.record()
            stop.synchronize()
            times[i].append(1e3 * start.elapsed_time(stop))
    return [statistics.median(t[3:]) for t in times]


def on_the_host(calls):
    times = [[] for _ in calls]
    for _ in range(9):
        for i, call in enumerate(calls):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(50):
                call()
            times[i].append((time.perf_counter() - begun) / 50 * 1e6)
    return [statistics.median(t) for t in times]


def calls_of(package, x, weight, scale, dy, precision):
    features = len(weight)
    state = {
        "running_mean": torch.zeros(features, device="cuda"),
        "running_var": torch.ones(features, device="cuda"),
        "num_batches_tracked": torch.zeros((), dtype=torch.int64, device="cuda"),
    }

    def forward(**options):
        return package.forward(x, weight, scale, **state, training=True, precision=precision, **options)

    _, saved = forward(return_saved=True)
    return forward, lambda: forward(return_saved=True), lambda: package.backward(dy, saved)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="", help="only shapes and dtypes with this in their names")
    args = parser.parse_args()
    this = load(HERE, "gsbn")
    packages = load(args.other, "gsbn_other"), this
    scratch = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    print(f"{'us: other, this':<18}{'forward':>26}{'forward that saves':>26}{'backward':>26}{'host, forward':>24}")
    for (shape_name, (B, I, O)), (dtype_name, (dtype, precision)) in (
        (s, d) for s in SHAPES.items() for d in DTYPES.items()
    ):
        if args.only not in f"{shape_name} {dtype_name}":
            continue
        torch.manual_seed(0)
        x, dy = (torch.randn(B, n, device="cuda").to(dtype) for n in (I, O))
        weight, scale = (torch.randn(O, I, device="cuda") / I**0.5).to(dtype), torch.rand(O, device="cuda") + 0.5
        both = [calls_of(package, x, weight, scale, dy, precision) for package in packages]
        cells = []
        for pair in zip(*both, strict=True):
            other, mine = on_the_device(pair, args.rounds, scratch)
            cells.append(f"{other:9.1f} {mine:9.1f} {100 * (mine / other - 1):+5.1f}%")
        other, mine = on_the_host([calls[0] for calls in both])
        print(f"{shape_name + ' ' + dtype_name:<18}{'  '.join(cells)}  {other:8.2f} {mine:8.2f}", flush=True)


if __name__ == "__main__":
    main()
