"""Measure ``gsbn.forward`` beside every peer that is installed, in one process, checked before it is timed.

>>> from gsbn import bench
>>> report = bench.run(bench.cases([(1024, 8192, 8192)], ["bfloat16", "tf32"]))
>>> report.save_json("today.json")

Without a GPU the NumPy path runs against PyTorch on the CPU. How the clock works is told in ``gsbn.bench.clock``, what
the peers are in ``gsbn.bench.peers``, and which error is allowed in ``gsbn.bench.bounds``.
"""

from .case import DTYPES, PRESETS, Case, cases
from .clock import median_interval
from .layers import Report, Result, run
from .rates import Rates
from .report import Settings

__all__ = ["DTYPES", "PRESETS", "Case", "Rates", "Report", "Result", "Settings", "cases", "median_interval", "run"]
