"""KernelBench level 2, problems 33 and 39, timed as KernelBench times: python examples/kernelbench_time.py

Three warm-ups, then 100 trials with CUDA events, each after L2 was cleared; the mean counts. Each problem runs as the
evaluator would run it, float32, training; then with `keep_limbs`, which spares splitting the weight in every call.
Errors are those of y against float64, over the first features.
"""

import argparse
import copy
import importlib.util
import statistics
import sys

try:
    import torch
except ModuleNotFoundError:
    sys.exit("kernelbench_time: needs PyTorch: pip install torch")
import kernelbench_33
import kernelbench_39

FEATURES = 256  # that are compared with float64


def mean_ms(run, trials):
    for _ in range(3):
        run()
    cache = torch.empty(32 << 20, dtype=torch.int64, device="cuda")
    samples = []
    for _ in range(trials):
        cache.fill_(42)
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop))
    return statistics.mean(samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    trials = parser.parse_args().trials
    if not torch.cuda.is_available():
        print("kernelbench_time: nothing to time: it needs a CUDA GPU and a PyTorch that sees it")
        return
    if importlib.util.find_spec("cupy") is None:
        sys.exit("kernelbench_time: needs CuPy: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, mean of {trials} trials")
    for number, problem in ((33, kernelbench_33), (39, kernelbench_39)):
        torch.manual_seed(42)
        model = problem.ModelNew(*problem.get_init_inputs()).cuda()
        original = copy.deepcopy(model)
        x = problem.get_inputs()[0].cuda()

        @torch.no_grad()
        def eager(original=original, x=x):
            return original.bn(original.gemm(x) * original.scale)

        with torch.no_grad():
            g = x.double() @ model.gemm.weight[:FEATURES].double().T
            z = (g + model.gemm.bias[:FEATURES]) * model.scale[:FEATURES]
            truth = (z - z.mean(0)) / torch.sqrt(z.var(0, unbiased=False) + model.bn.eps)
        error, its = ((y[:, :FEATURES] - truth).abs().max().item() for y in (model(x), eager()))
        theirs = mean_ms(eager, trials)
        ours = mean_ms(lambda model=model, x=x: model(x), trials)
        model.keep_limbs = True
        kept = mean_ms(lambda model=model, x=x: model(x), trials)
        print(f"{number}: PyTorch {theirs:.3f} ms, gsbn {ours:.3f} ms ({theirs / ours:.2f}x), ", end="")
        print(f"limbs kept {kept:.3f} ms ({theirs / kept:.2f}x); largest error {error:.1e}, PyTorch's {its:.1e}")


if __name__ == "__main__":
    main()
