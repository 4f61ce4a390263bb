"""The communication libraries: what they need on this machine, and how a rank starts them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gsbn


def why_not(engine: str, size: int = 2) -> str:
    """Why the engine cannot run here with `size` ranks; empty if it can."""
    if engine == "mpi":
        lacks = [] if find_spec("mpi4py") else ["mpi4py"]
        lacks += [] if shutil.which("mpiexec", path=environment()["PATH"]) else ["mpiexec"]
        return f"needs {' and '.join(lacks)}: pip install mpi4py mpich" if lacks else ""
    if not find_spec("torch"):
        return "needs PyTorch: pip install torch"
    import torch.distributed as dist

    if engine == "nccl":
        torch = sys.modules["torch"]
        enough = torch.cuda.device_count() >= size and dist.is_nccl_available()
        return "" if enough else f"needs {size} GPUs that PyTorch sees"
    return "" if dist.is_available() and dist.is_gloo_available() else "this PyTorch has no gloo"


def environment() -> dict[str, str]:
    """The environment of ranks that share the cores: the gsbn under test, and the mpiexec next to this Python."""
    beside, gsbn_itself = Path(sys.executable).parent, Path(gsbn.__file__).parents[1]
    paths = {"PATH": beside, "PYTHONPATH": gsbn_itself}
    found = {name: os.pathsep.join([str(path), os.environ.get(name, "")]) for name, path in paths.items()}
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    # Open MPI refuses to run as root, or with more ranks than cores, without these; MPICH does not.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowd = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return {**os.environ, **found, **threads, **root, **crowd}


def start_gloo(meet: str) -> tuple[Any, int, Callable[[], None]]:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    at = {"init_method": f"file://{meet}", "rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", **(at if meet else {}))
    return dist.group.WORLD, rank, dist.destroy_process_group


def start_nccl(meet: str) -> tuple[Any, int, Callable[[], None]]:
    import cupy
    import torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    cupy.cuda.Device(rank).use()
    at = {"init_method": f"file://{meet}"} if meet else {}
    torch.distributed.init_process_group("nccl", rank=rank, world_size=size, **at)
    return torch.distributed.group.WORLD, rank, torch.distributed.destroy_process_group


def start_mpi(meet: str) -> tuple[Any, int, Callable[[], None]]:
    from mpi4py import MPI

    return MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.Finalize


ENGINES = {
    "gloo": start_gloo,
    "mpi": start_mpi,
    "nccl": start_nccl,
}  # the communicator, the number of this rank, and the function that ends it
