"""Ranks that err in the place of ``gsbn.bench.rank.work``: a process imports them by name."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from gsbn.bench import rank as real


def computes_wrongly(rank: int, task: Any, words: Any) -> None:
    """On rank 1 a group's forward, the running statistics after its step, and PyTorch are wrong."""
    if rank == 1:
        honest, judged_by = real.gsbn.forward, real.Layer.judge

        def forward(*arguments: Any, group: Any = None, **options: Any) -> Any:
            y = honest(*arguments, group=group, **options)
            return y * 1.1 if group is not None and not isinstance(y, tuple) else y

        def judge(self: real.Layer, results: dict[str, Any]) -> Any:
            judged = judged_by(self, results)
            results["running_mean"] = results["running_mean"] + ("x" in judged)
            return judged

        def fails(*arguments: Any) -> Any:
            raise RuntimeError("no such thing\nand more")

        for owner, name, wrong in (
            (real.gsbn, "forward", forward),
            (real.peers, "module", fails),
            (real.Layer, "judge", judge),
        ):
            setattr(owner, name, wrong)
    real.work(rank, task, words)


def dies_in_the_second_case(rank: int, task: Any, words: Any) -> None:
    """Rank 1 ends, and the other waits for it."""

    class Mortal(real.RankRun):
        def forget(self) -> None:
            if rank == 1 and self.plain.batch == 20:
                os._exit(3)
            super().forget()

    real.RankRun = Mortal  # type: ignore[misc]
    real.work(rank, task, words)


def ends(rank: int, task: Any, words: Any) -> None:
    """Rank 1 ends at once."""
    sys.exit(4 if rank else 0)


def raises(rank: int, task: Any, words: Any) -> None:
    """All raise; any may be the first."""
    raise RuntimeError("out of luck")


def sleeps(rank: int, task: Any, words: Any) -> None:
    """All are silent."""
    time.sleep(60)
