"""The cases of a bench, spread over several GPUs: a process for each GPU, with CPU cores of its own.

All candidates of a case run on one GPU, as without this. What one process compiles does not take the cores on which
another one launches, so the times that the host has a part in stay what they are.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from .report import Rates, Report, Settings
from .turns import Progress

# Cases, candidates, settings and a progress: such as ``layers.run``. A function of a module, or a partial of one.
Bench = Callable[[Sequence[Any], Sequence[str], Settings, Progress], Report]


def run(
    bench: Bench, cases: Sequence[Any], candidates: Sequence[str], settings: Settings, progress: Progress, gpus: int = 1
) -> Report:
    """The report of all cases, in their order, measured on so many GPUs; up to one it is ``bench``'s in this process.

    Rates are the highest that any GPU had. After Ctrl-C it is of what was done, with ``interrupted`` set.
    """
    if gpus <= 1:
        return bench(cases, candidates, settings, progress)
    start = multiprocessing.get_context("spawn")
    done = start.Array("d", gpus, lock=False)  # how many cases each process has done
    futures = []
    with ExitStack() as stack:
        with suppress(KeyboardInterrupt):  # which the terminal sends to the other processes, too: they end early
            for number, part in enumerate(shares(cases, gpus)):
                pool = stack.enter_context(ProcessPoolExecutor(1, start, _begin, (number, gpus, done)))
                futures.append(pool.submit(_measure, bench, part, candidates, settings))
            while not all(future.done() for future in futures):
                time.sleep(0.5)  # Ctrl-C in a lock, such as that of wait(), would be a RuntimeError
                progress(sum(done), len(cases), f"on {len(futures)} GPUs")
        return _together([future.result() for future in futures], cases)


def shares(cases: Sequence[Any], gpus: int) -> list[list[Any]]:
    """The cases of each GPU that gets any. They are dealt out in turn, dtype by dtype, so each gets as many of each."""
    by_dtype = sorted(cases, key=lambda case: str(case.kind))
    return [part for number in range(gpus) if (part := by_dtype[number::gpus])]


def _together(reports: Sequence[Report], cases: Sequence[Any]) -> Report:
    """One report of several."""
    place = {case: number for number, case in enumerate(cases)}
    results = sorted((result for report in reports for result in report.results), key=lambda r: place[r.case])
    rates = [report.rates for report in reports if report.rates]
    kinds = {kind for each in rates for kind in each.matrix}
    matrix = {kind: max(each.matrix.get(kind, 0.0) for each in rates) for kind in sorted(kinds)}
    return replace(
        reports[0],
        results=tuple(results),
        environment=reports[0].environment | {"gpus": [gpu for each in reports for gpu in each.environment["gpus"]]},
        rates=Rates(max(each.copy for each in rates), matrix) if rates else None,
        interrupted=any(report.interrupted for report in reports),
        failure=next((report.failure for report in reports if report.failure), ""),
    )


# ---- in the processes ----------------------------------------------------------------------------------------------


_progress: list[Progress] = []  # of this process


def _begin(number: int, of: int, done: MutableSequence[float]) -> None:
    """Let this process see one GPU and use its share of the cores. Must run before CUDA is initialised."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(each) for each in range(of)] if seen is None else seen.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number] if number < len(gpus) else ""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // of)
        os.sched_setaffinity(0, cores[each * number : each * (number + 1)] or cores)
    _progress.append(lambda cases, total, text: done.__setitem__(number, cases))


def _measure(bench: Bench, cases: Sequence[Any], candidates: Sequence[str], settings: Settings) -> Report:
    return bench(cases, candidates, settings, _progress[0])
