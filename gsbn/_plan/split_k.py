"""The reduction of a split-k product: partial products, each summed over some rows of a batch, are added up."""

from __future__ import annotations

from typing import NamedTuple

from .kernel import Kernel
from .problem import Device, ceil_div
from .variants import THREADS, reduce_split_k

SHARE = 8  # the most threads that add up one element


class SplitKReduction(NamedTuple):
    """The launch that adds up `number` float32 matrices; sizes in elements."""

    kernel: Kernel
    grid: int
    number: int
    size: int  # of each
    pitch: int  # of its rows
    share: int  # threads per element

    @property
    def nbytes(self) -> int:
        return 4 * self.number * self.size


def split_k_reduction(number: int, rows: int, pitch: int, device: Device) -> SplitKReduction:
    """The reduction of `number` partial products of `rows` rows each."""
    share = min(SHARE, 1 << (number.bit_length() - 1))
    grid = device.grid(ceil_div(rows * pitch // 4 * share, THREADS))
    return SplitKReduction(reduce_split_k(), grid, number, rows * pitch, pitch, share)
