"""What ranks that share a batch post to each other: how many numbers, and where they lie in a call's workspace."""

from __future__ import annotations

from typing import NamedTuple


class Ranks(NamedTuple):
    """Ranks of a group, as far as a program depends on them."""

    waits: bool = True  # kernels wait for the other ranks' numbers in peer memory; else NCCL gathers them between two
    size: int = 1
    features: int | None = None  # that a mailbox has room for
    signature: int = 0  # of the call, which all ranks must have in common


def letters(features: int) -> int:
    """How many numbers a rank posts."""
    return 2 + 2 * features


def posts_at(start: int, features: int, ranks: Ranks | None) -> tuple[int, int, int]:
    """In a call's workspace, from an offset on: what this rank posts, what NCCL gathers, and the end."""
    nbytes = 8 * letters(features) + -8 * letters(features) % 256
    start += -start % 256
    return start, start + nbytes, start + nbytes * (1 if ranks is None or ranks.waits else 1 + ranks.size)
