"""Missing ranks: the others raise after the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gsbn
from tests.groups.contract.rank import SHORT, SLACK, Ranks, apart, call, raises


def assert_given_up(at: Ranks, start: float, act: Callable[[], Any]) -> None:
    """An error, within the timeout plus SLACK."""
    with raises(RuntimeError, f"group: rank {at.rank} of {at.size}, waiting for the others ("):
        act()
    waited = time.monotonic() - start
    assert waited < SHORT + SLACK, f"an error after {waited} s of {SHORT}"


@apart
def comes_late(at: Ranks) -> None:
    """The others have given up, and so must a late rank; they do not free the memory that it writes to."""
    group = gsbn.group(at.comm, timeout=SHORT)
    call(at, group)
    if at.rank == 0:
        time.sleep(1.5 * SHORT)
    assert_given_up(at, time.monotonic(), lambda: call(at, group))
    with raises(RuntimeError, "cannot be used any more"):
        call(at, group)
    group.close()
    if at.rank:
        time.sleep(SHORT)  # its messages arrive meanwhile


@apart
def ends_before_the_call(at: Ranks) -> None:
    group = gsbn.group(at.comm, timeout=SHORT)
    call(at, group)
    if at.rank < at.size - 1:
        assert_given_up(at, time.monotonic(), lambda: call(at, group))


@apart
def makes_no_group(at: Ranks) -> None:
    """gsbn.group itself has the timeout, even one that is shorter than the resolution of an engine."""
    start = time.monotonic()
    if at.rank == 0:
        with raises(RuntimeError, "waiting for the others (0.0001 s)"):
            gsbn.group(at.comm, timeout=1e-4)
        assert time.monotonic() - start < SLACK
        time.sleep(SHORT)
    else:
        time.sleep(SHORT)  # after that there is no other rank
        assert_given_up(at, time.monotonic(), lambda: gsbn.group(at.comm, timeout=SHORT))
