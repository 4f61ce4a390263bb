"""The program of a rank, which runs functions of the contract of groups.

    torchrun --nproc-per-node 2 -m tests.groups.contract gloo --kind torch-cpu    # from the root of the repository
    mpiexec -n 3 python -m tests.groups.contract mpi --names every_dtype
    torchrun --nproc-per-node 2 -m tests.groups.contract nccl --kind cupy --no-peer-memory    # a GPU each

Every rank draws the whole batch from the same seed and computes its own rows. It compares the results with the truth of
the whole batch, within the bounds of tolerance.py and gradients.py, which do not depend on the order of sums. A rank
that finds an error ends at once, which ends all others.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import traceback
from pathlib import Path

import gsbn
from tests.groups.contract.engines import ENGINES
from tests.groups.contract.rank import APART, LIMIT, ON_GPUS, SECONDS, TOGETHER, Ranks
from tests.support.harness import CPU_KINDS, GPU_KINDS, kind_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--kind", default="numpy", choices=[*CPU_KINDS, *GPU_KINDS], help="of arrays")
    parser.add_argument("--names", nargs="+", default=list(TOGETHER), choices=[*TOGETHER, *APART, *ON_GPUS])
    parser.add_argument("--peer-memory", default=True, action=argparse.BooleanOptionalAction)
    parser.add_argument("--meet", default="", help="a file for the rendezvous of gloo, without torchrun")
    parser.add_argument("--out", help="a folder for one file per rank: a line of JSON for each name, with its error")
    given = parser.parse_args()

    faulthandler.dump_traceback_later(LIMIT, exit=True)
    comm, rank, end = ENGINES[given.engine](given.meet)
    for name in given.names:
        fault = ""
        try:
            with gsbn.group(comm, timeout=SECONDS, peer_memory=given.peer_memory) as group:
                (TOGETHER | APART | ON_GPUS)[name](Ranks(given.engine, comm, kind_of(given.kind), group))
        except BaseException:
            fault = traceback.format_exc()
        line = json.dumps({"name": name, "fault": fault})
        if given.out:
            with open(Path(given.out, f"{rank}.jsonl"), "a") as file:
                file.write(line + "\n")
        print(f"rank {rank}: {name}: {fault or 'right'}", flush=True)
        if fault:
            os._exit(1)  # the others must not wait
    end()


if __name__ == "__main__":
    main()
