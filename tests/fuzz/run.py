"""Run cases by their seeds, in this process or in several."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import time
import traceback
from typing import Any

from tests.fuzz.bad import Bad, draw_bad, judge_bad
from tests.fuzz.good import draw_good, judge_good, settle
from tests.support.harness import kind_of

LIMIT_S = 300  # for one case; more than any compilation takes


class Failure(Exception):
    """The error, and the line that runs the case again."""


def run(seed: int, kinds: tuple[str, ...], *, bad: bool = False) -> bool:
    """Run one case; False if the GEMM does not support it."""
    case = draw_bad(seed, kinds) if bad else draw_good(seed, kinds)
    try:
        return judge_bad(case) if isinstance(case, Bad) else judge_good(case)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = next(iter(str(error).strip().splitlines()), f"in {where.name}: {where.line}")
        raise Failure(f"{again(seed, case.kind, bad)}\n    {case}\n    {type(error).__name__}: {told}") from error


def again(seed: int, kinds: str, bad: bool) -> str:
    return f"python -m tests.fuzz --kinds {kinds} --case {seed}{' --bad' * bad}"


def work(worker: int, args: argparse.Namespace, at: Any, tally: Any) -> None:
    """Run every ``args.workers``-th case; ``at`` has the current case for the parent, ``tally`` the results."""
    for seed in itertools.count(args.seed + worker, args.workers):
        if time.time() > args.until or seed - args.seed >= args.cases:
            break
        for bad in (True,) if args.bad else (False, True)[: 1 + (seed % 10 == 0)]:
            at[worker] = 2 * seed + bad
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a kernel may wait for ever
            served = failed = False
            try:
                served = run(seed, args.kinds, bad=bad)
            except Failure as failure:
                failed = True
                print(failure, flush=True)
                for kind in args.kinds:
                    settle(kind_of(kind))  # ends this process if the GPU's context is lost
            events = not bad, not (served or failed), bad, failed
            with tally.get_lock():
                tally[:] = [n + event for n, event in zip(tally, events, strict=True)]
    faulthandler.cancel_dump_traceback_later()
