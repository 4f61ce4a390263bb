"""Measure ``gsbn.forward`` beside every peer that is installed, in one process, checked before it is timed.

>>> from gsbn import bench
>>> report = bench.run(bench.cases([(1024, 8192, 8192)], ["bfloat16", "tf32"]))
>>> report.save_json("today.json")

Without a GPU the NumPy path runs against PyTorch on the CPU.

Three benches share one path from case to table. ``layers`` times one layer, ``models`` (with ``trainee``) training
steps of whole PyTorch models, and ``ranks`` (with ``rank``, one process of it) several GPUs that share a batch. Each
says how a candidate is checked and timed, and in a ``View`` which columns its tables have. The path:

- ``case``, ``candidate``: what is measured, and who
- ``peers``, ``xla``, ``triton_gemm``: how each candidate computes a layer
- ``bounds``: the truth in float64, and which error is allowed
- ``clock``, ``turns``: how long a call takes; check, prepare and time the candidates of a case in turns
- ``spread``: the cases over several GPUs
- ``report``: settings, results and their JSON
- ``page``, ``layers_page``, ``picture``, ``terminal``: tables and pictures
- ``machine``, ``libraries``, ``rates``: what is installed, how it is called, and how fast the machine is at most

``selfcheck`` (with ``tables``) is ``gsbn check``, ``cli`` the command line.
"""

from .._timing import median_interval
from .case import DTYPES, PRESETS, Case, cases
from .layers import run
from .report import Rates, Report, Result, Settings

__all__ = ["DTYPES", "PRESETS", "Case", "Rates", "Report", "Result", "Settings", "cases", "median_interval", "run"]
