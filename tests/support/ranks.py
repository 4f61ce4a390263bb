"""Two processes of one torch.distributed world, shared by all tests of a module: starting them takes seconds."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

SIZE = 2
SECONDS = 120.0  # time limit of a test on all ranks


class Ranks:
    """``ranks(function, *arguments)`` returns the results of ``function(rank, device, *arguments)`` on all ranks."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found: dict[Any, Any] = {}
        while len(found) < SIZE:
            ready: Any = wait([pipe for pipe in self._pipes if pipe not in found], SECONDS)
            for pipe in ready:
                good, found[pipe] = pipe.recv()
                if not good:  # the others may wait for this one
                    self._kill()
                    raise AssertionError(found[pipe])
            if not ready:
                self._kill()
                raise AssertionError(f"{SIZE - len(found)} of {SIZE} ranks did not come back in {SECONDS:g} s")
        return [found[pipe] for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)
        codes = [process.exitcode for process in self._processes]
        self._kill()
        assert not any(codes), f"the ranks ended with {codes}"

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.backend, store, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes, self._pipes = [], []


def _serve(rank: int, backend: str, store: Path, pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=SIZE)
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((True, function(rank, device, *arguments)))
        except Exception:
            pipe.send((False, f"on rank {rank}:\n{traceback.format_exc()}"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
