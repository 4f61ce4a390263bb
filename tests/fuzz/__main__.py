"""Random calls of gsbn: good calls are checked against the truth and the documentation, bad calls must raise.

    python -m tests.fuzz --seconds 600            # from the root of the repository
    python -m tests.fuzz --kinds cupy --case 123  # run one case again, with its traceback

A case depends only on its seed and its kind of array (a bad one also on the installed libraries), so the line that is
printed with a failure runs it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

import numpy as np

import gsbn
from tests.fuzz.run import again, run, work
from tests.support.harness import CPU_KINDS, GPU_KINDS, available, no_gpu


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, help="how long to run; 60 without --cases")
    parser.add_argument("--cases", type=int, help="how many good calls to draw; every tenth is followed by a bad one")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first case; the others follow")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16), help="processes")
    parser.add_argument("--kinds", help="numpy,torch-cpu,cupy,torch-cuda; default: those of the GPU, if there is one")
    parser.add_argument("--bad", action="store_true", help="bad calls only")
    parser.add_argument("--case", type=int, metavar="SEED", help="run only this case, with its traceback")
    args = parser.parse_args()
    args.kinds = tuple(args.kinds.split(",")) if args.kinds else available(CPU_KINDS if no_gpu() else GPU_KINDS)
    if args.case is not None:
        print("passed" if run(args.case, args.kinds, bad=args.bad) else "refused")
        return 0

    if not set(args.kinds).isdisjoint(GPU_KINDS):
        gsbn.warm_up()  # else each worker would compile all kernels
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # the workers use all cores already
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
