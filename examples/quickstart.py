"""The main job: a training forward at both KernelBench problems, how right it is and how long it takes.

On a GPU the problems have full size and the arrays are CuPy's; without one they are smaller and the arrays NumPy's.
The peers are what this environment holds: the bare GEMM and the operators one by one in the same array library, and
PyTorch eager if it is installed. All compute from the same random values. The truth is float64, for a sample of the
features: a feature's output depends on the whole of x, but only on its own row of the weight.
"""

import argparse
import contextlib
import statistics
import sys
import time

import numpy as np

import gsbn
from gsbn import reference

try:
    import cupy
except ImportError:
    cupy = None
try:
    import torch
except ImportError:
    torch = None

PROBLEMS = {33: (1024, 8192, 8192), 39: (16384, 4096, 4096)}  # KernelBench level 2, (B, I, O)
REDUCED = {33: (128, 1024, 1024), 39: (2048, 512, 512)}
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}  # KernelBench's, absolute and relative
TRAINING = {"training": True, "momentum": 0.1, "eps": 1e-5}
FEATURES = 64  # of O are compared with float64
GEMM = "the GEMM alone"


def draw(B, I, O):
    """A problem's arrays in float32: x as KernelBench draws it, the parameters as PyTorch initialises them."""
    rng, bound = np.random.default_rng(0), I**-0.5
    return {
        "x": rng.random((B, I), dtype="f4"),
        "weight": rng.random((O, I), dtype="f4") * np.float32(2 * bound) - np.float32(bound),
        "scale": rng.standard_normal(O, dtype="f4"),
        "bias": rng.uniform(-bound, bound, O).astype("f4"),
        "gamma": np.ones(O, "f4"),
        "beta": np.zeros(O, "f4"),
        "running_mean": np.zeros(O, "f4"),
        "running_var": np.ones(O, "f4"),
    }


def one_by_one(x, weight, scale, bias, gamma, beta, running_mean, running_var, training, momentum, eps):
    """The definition, one operator after another, as one writes it with NumPy or CuPy."""
    z = (x @ weight.T + bias) * scale
    mean, var = z.mean(0), z.var(0)
    running_mean += momentum * (mean - running_mean)
    running_var += momentum * (var * len(x) / (len(x) - 1) - running_var)
    return gamma * (z - mean) / (var + eps) ** 0.5 + beta


def torch_eager(x, weight, scale, bias, gamma, beta, running_mean, running_var, **training):
    z = torch.nn.functional.linear(x, weight, bias) * scale
    return torch.nn.functional.batch_norm(z, running_mean, running_var, gamma, beta, **training)


def candidates(xp, host, dtype):
    """name -> a call that returns y. Each candidate owns its running statistics."""
    ours, theirs = ({name: xp.asarray(array).astype(dtype) for name, array in host.items()} for _ in range(2))
    calls = {
        "gsbn": lambda: gsbn.forward(**ours, **TRAINING),
        GEMM: lambda: theirs["x"] @ theirs["weight"].T,
    }
    if dtype == "float32":
        calls["NumPy, one by one" if xp is np else "CuPy, one by one"] = lambda: one_by_one(**theirs, **TRAINING)
    if torch is not None and (xp is np or torch.cuda.is_available()):
        place = {"device": "cpu" if xp is np else "cuda", "dtype": getattr(torch, dtype)}
        tensors = {name: torch.tensor(array, **place) for name, array in host.items()}
        calls[f"PyTorch {torch.__version__}"] = lambda: torch_eager(**tensors, **TRAINING)
    return calls


def cpu_clock(call):
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def gpu_clock():
    """A clock for one call on a cold L2 cache: CUDA events on the default stream, which CuPy and PyTorch share."""
    l2 = cupy.cuda.Device().attributes["L2CacheSize"]
    scratch = cupy.empty(max(4 * l2, 1 << 28), cupy.uint8)

    def clock(call):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        # Evicts the operands, and keeps the GPU busy while the host enqueues the call.
        scratch.data.memset_async(1, scratch.nbytes)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop)

    return clock


def medians(calls, clock, rounds):
    """name -> median ms. The candidates take turns, so that a drifting clock rate is the same for all."""
    times = {name: [] for name in calls}
    for turn in range(-3, rounds):
        for name, call in calls.items():
            ms = clock(call)
            if turn >= 0:  # the others warm up
                times[name].append(ms)
    return {name: statistics.median(samples) for name, samples in times.items()}


def on_host(y):
    """Any candidate's output as a float64 NumPy array."""
    if torch is not None and isinstance(y, torch.Tensor):
        return y.double().cpu().numpy()
    return (y.get() if hasattr(y, "get") else y).astype("f8")


def run(xp, number, shape, dtype, clock, rounds):
    """Print one problem in one dtype; True if gsbn stays within KernelBench's tolerance of float64."""
    B, I, O = shape
    print(f"\nKernelBench {number}: x ({B}, {I}), weight ({O}, {I}), {dtype}")
    host = {name: reference.round_to(array, dtype).astype("f4") for name, array in draw(*shape).items()}
    pick = slice(None, None, O // FEATURES)
    truth = reference.forward(**{k: a if k == "x" else a[pick] for k, a in host.items()}, **TRAINING).y

    with contextlib.nullcontext() if torch is None else torch.no_grad():
        print(f"  path: {gsbn.describe(**{name: xp.asarray(a).astype(dtype) for name, a in host.items()}, **TRAINING)}")
        calls = candidates(xp, host, dtype)
        outputs = {name: on_host(call()[:, pick]) for name, call in calls.items() if name != GEMM}
        times = medians(calls, clock, rounds)

    lines = [("", f"{'median ms':>12}{'to gsbn':>10}", "error against float64")]
    for name, ms in times.items():
        error = f"{np.linalg.norm(outputs[name] - truth) / np.linalg.norm(truth):.1e}" if name in outputs else ""
        lines.append((name, f"{ms:>12.3f}{ms / times['gsbn']:>9.2f}x", error))
    for name, time_of, error in lines:  # what counts on a CPU is that it is right
        print(f"  {name:<28}{error:>25}{time_of}" if xp is np else f"  {name:<28}{time_of}{error:>25}")
    close = np.allclose(outputs["gsbn"], truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    print(f"  gsbn is {'within' if close else 'OUT OF'} KernelBench's tolerance of {TOLERANCE[dtype]:g} everywhere")
    return close


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, help="timed calls of each candidate; 50 on a GPU, 5 without")
    rounds = parser.parse_args().rounds
    gpu = cupy is not None and cupy.is_available()

    if not gpu:
        reason = "CuPy is not installed" if cupy is None else "CuPy finds no CUDA device"
        print(f"No GPU ({reason}). A CPU is for tests and examples: the problems shrink, and accuracy comes first.")
    print(f"gsbn {gsbn.__version__}, Python {sys.version.split()[0]}, NumPy {np.__version__}")
    if gpu:
        try:
            import ml_dtypes  # noqa: F401  # teaches NumPy and CuPy "bfloat16"
        except ModuleNotFoundError:
            sys.exit("quickstart: needs ml_dtypes for bfloat16: pip install ml_dtypes")

        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
        print(f"{name}, CuPy {cupy.__version__}, CUDA driver {cupy.cuda.runtime.driverGetVersion()}")
        xp, problems, dtypes, clock = cupy, PROBLEMS, ("float32", "bfloat16", "float16"), gpu_clock()
    else:
        xp, problems, dtypes, clock = np, REDUCED, ("float32",), cpu_clock
    if torch is None or (xp is not np and not torch.cuda.is_available()):
        print(f"PyTorch {'is not installed' if torch is None else 'sees no GPU'}, and so is not among the peers.")

    rounds = rounds or (5 if xp is np else 50)
    good = [run(xp, *problem, dtype, clock, rounds) for problem in problems.items() for dtype in dtypes]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
