"""Measure ``gsbn.forward`` beside every peer that is installed, in one process, checked before it is timed.

>>> from gsbn import bench
>>> report = bench.run(bench.cases([(1024, 8192, 8192)], ["bfloat16", "tf32"]))
>>> report.save_json("today.json")

Without a GPU the NumPy path runs against PyTorch on the CPU.

Three benches share one core. ``layers`` times one layer, ``models`` training steps of whole PyTorch models, and
``ranks`` (with ``rank``, one process of it) several GPUs that share a batch; each says what a case is, how a candidate
is checked and timed, and which columns its tables have. The core:

- ``case``, ``candidate``, ``peers``: what is measured, who is measured, and how each candidate computes a layer
- ``bounds``: the truth in float64, and which error is allowed
- ``clock``, ``turns``: how long a call takes; check, prepare and time the candidates of a case in turns
- ``report``, ``page``, ``terminal``: what was measured; tables, pictures and published files; a terminal's width
- ``front_page``: the README's table, which is of several reports
- ``machine``, ``libraries``, ``rates``: what is installed, how it is called, and how fast the machine is at most

``selfcheck`` is ``gsbn check``, ``cli`` the command line.
"""

from .case import DTYPES, PRESETS, Case, cases
from .clock import median_interval
from .layers import Report, Result, run
from .rates import Rates
from .report import Settings

__all__ = ["DTYPES", "PRESETS", "Case", "Rates", "Report", "Result", "Settings", "cases", "median_interval", "run"]
