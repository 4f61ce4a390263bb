"""What ranks that share a batch post to each other: how many numbers, and their place in the workspace."""

from __future__ import annotations

from typing import NamedTuple


class Ranks(NamedTuple):
    """What a program depends on of the ranks of a group."""

    waits: bool = True  # kernels wait for the other ranks' numbers in peer memory; else NCCL gathers between launches
    size: int = 1
    features: int | None = None  # for which a mailbox has room
    signature: int = 0  # of the call; it must be the same on all ranks


def letters(features: int) -> int:
    """How many numbers a rank posts."""
    return 2 + 2 * features


def posts_at(start: int, features: int, ranks: Ranks | None) -> tuple[int, int, int]:
    """Offsets in the workspace, from `start` on: of what this rank posts, of what NCCL gathers, and of the end."""
    nbytes = 8 * letters(features) + -8 * letters(features) % 256
    start += -start % 256
    return start, start + nbytes, start + nbytes * (1 if ranks is None or ranks.waits else 1 + ranks.size)
