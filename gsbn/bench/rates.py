"""How fast this machine copies and multiplies: no candidate can be faster. Measured in the same run."""

from __future__ import annotations

from .._timing import median_interval
from . import peers
from .bounds import make_operands
from .candidate import Candidate, Unavailable
from .case import DTYPES, Case
from .clock import Clock, GpuClock
from .libraries import float32_precision
from .report import Rates


def measure_rates(clock: Clock, kinds: set[str]) -> Rates:
    """The copy rate and each kind's matrix rate (a key of ``DTYPES``), on random data, by the clock's own trials."""
    gpu, xp = isinstance(clock, GpuClock), clock.xp
    source = xp.random.RandomState(0).uniform(size=(2**27 if gpu else 2**24))  # 1 GiB, or 128 MiB
    target = xp.empty_like(source)

    def duplicate() -> None:
        if gpu:  # the driver's copy: CuPy's elementwise one reaches two thirds of it
            target.data.copy_from_device_async(source.data, source.nbytes)
        else:
            xp.copyto(target, source)

    # A graph would give the copy to a copy engine, which reaches two thirds of the rate.
    copy = Candidate("copy", xp.__name__, duplicate, lambda: {"g": target}, capturable=False)
    copy_rate = 2 * source.nbytes / _seconds_per_call(clock, copy)
    matrix: dict[str, float] = {}
    for kind in sorted(kinds | ({"float16"} if gpu and "float32" in kinds else set())):
        for n in (4096, 8192) if gpu else (1024,):
            case = Case(n, n, n, *DTYPES[kind])
            for name in ("gemm-torch", "gemm-cupy" if gpu else "gemm-numpy"):
                try:
                    with float32_precision(case.precision):
                        candidate = peers.make(name, case, make_operands(xp, n, n, n, case.dtype), xp)
                        rate = case.flops / _seconds_per_call(clock, candidate)
                except (Unavailable, ImportError, RuntimeError, TypeError, ValueError):
                    continue
                matrix[kind] = max(rate, matrix.get(kind, 0.0))
    if gpu and "float32" in kinds:
        matrix["float32"] = max(matrix.get("float32", 0.0), matrix.get("float16", 0.0) / 3)
    return Rates(copy_rate, matrix)


def _seconds_per_call(clock: Clock, candidate: Candidate) -> float:
    """The median of five trials that last about 10 ms each."""
    candidate.call()
    once, _ = clock.trial(candidate, 1)
    trial, _ = clock.trial(candidate, max(1, min(100, int(0.01 / once()))))
    return median_interval([trial() for _ in range(5)]).median
