"""KernelBench level 2, problems 33 and 39: is the result right, and how fast is it, as KernelBench says.

    KERNELBENCH_ROOT=/path/to/KernelBench python examples/kernelbench_time.py

KERNELBENCH_ROOT is a checkout of github.com/ScalingIntelligence/KernelBench with its requirements installed: its
own evaluator then loads the original and the text of kernelbench_33.py or kernelbench_39.py, checks five trials and
times a hundred. Without it this program does the same: the text is executed as the evaluator executes it, five
seeds are compared at KernelBench's tolerance for float32, 1e-4, and each of a hundred trials is timed with CUDA events
after L2 was cleared; the mean counts. On a CPU it compares 64 rows, and times nothing.
"""

import argparse
import os
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("torch") is None:
    sys.exit("kernelbench_time: needs PyTorch: pip install torch")
import torch

HERE = Path(__file__).resolve().parent
TOLERANCE, TRIALS, SEED = 1e-4, 5, 42
ORIGINAL = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)
"""


def mean_ms(model, x, trials):
    """As KernelBench times: a mean over trials, with L2 cleared before each."""
    for _ in range(3):
        model(x)
    cache = torch.empty(32 << 20, dtype=torch.int64, device="cuda")
    samples = []
    for _ in range(trials):
        cache.fill_(42)
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(x)
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop))
    return statistics.mean(samples)


def by_itself(text, device, trials):
    """Trials that passed, and the mean ms of PyTorch and of gsbn, None on a CPU."""
    namespace = {}
    exec(ORIGINAL, namespace)
    exec(text, namespace)
    models = []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(SEED)
        models.append(namespace[name](*namespace["get_init_inputs"]()).to(device))
    original, candidate = models
    passed = 0
    for seed in range(TRIALS):
        torch.manual_seed(seed)
        x = namespace["get_inputs"]()[0].to(device)
        x = x if device == "cuda" else x[:64]
        with torch.no_grad():
            passed += torch.allclose(original(x), candidate(x), atol=TOLERANCE, rtol=TOLERANCE)
    if device == "cpu":
        return passed, None, None
    with torch.no_grad():
        return passed, mean_ms(original, x, trials), mean_ms(candidate, x, trials)


def by_kernelbench(root, number, text, trials):
    """The same by KernelBench's evaluator."""
    sys.path.insert(0, str(root / "src"))
    from kernelbench.eval import eval_kernel_against_ref

    (original,) = (root / "KernelBench" / "level2").glob(f"{number}_*.py")
    options = {"num_correct_trials": TRIALS, "num_perf_trials": trials, "measure_performance": True}
    device = torch.device("cuda", torch.cuda.current_device())
    found = eval_kernel_against_ref(original.read_text(), text, device=device, seed_num=SEED, **options)
    if found is None or not found.compiled:
        sys.exit(f"{number}: KernelBench could not load it: {None if found is None else found.metadata}")
    passed = int(found.metadata.get("correctness_trials", "(0 /").strip("(").split("/")[0])
    return passed, found.ref_runtime, found.runtime


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    trials = parser.parse_args().trials
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and find_spec("cupy") is None:
        sys.exit("kernelbench_time: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    root = os.environ.get("KERNELBENCH_ROOT")
    if root and not (Path(root) / "src" / "kernelbench" / "eval.py").is_file():
        sys.exit(f"kernelbench_time: expected a checkout of KernelBench in KERNELBENCH_ROOT, got {root}")
    judge = "KernelBench's evaluator" if root and device == "cuda" else "this program, as KernelBench does"
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU, 64 rows, nothing to time"
    print(f"{where}, PyTorch {torch.__version__}, judged by {judge}")
    wrong = 0
    for number in (33, 39):
        text = (HERE / f"kernelbench_{number}.py").read_text()
        if root and device == "cuda":
            passed, theirs, ours = by_kernelbench(Path(root), number, text, trials)
        else:
            passed, theirs, ours = by_itself(text, device, trials)
        wrong += passed < TRIALS
        print(f"{number}: correctness {passed == TRIALS} ({passed} / {TRIALS})", end="" if theirs else "\n")
        if theirs:
            print(f", PyTorch {theirs:.3g} ms, gsbn {ours:.3g} ms, speed-up {theirs / ours:.2f}x")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
