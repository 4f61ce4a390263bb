"""How a report of layers is shown: its columns on a terminal, its tables on a page, the bars of its picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._timing import Measurement
from . import page
from .candidate import COMPILED, NAMES, is_emulated, is_gemm
from .case import Case
from .page import (
    SHORT,
    Column,
    Groups,
    View,
    error_of,
    fastest,
    markdown_table,
    milliseconds,
    of,
    shown,
    speedup,
    time_of,
)
from .report import NOTHING, Report, Result

BARE_GEMMS = tuple(name for name in NAMES if name.startswith("gemm-") and not is_emulated(name))
EMULATED_GEMMS = tuple(name for name in NAMES if is_emulated(name) and is_gemm(name))
EMULATED = tuple(name for name in NAMES if is_emulated(name) and not is_gemm(name))
SERIES = {
    "gemm": ("bare GEMM", "#c9ced6"),
    "pytorch": ("PyTorch eager", "#8d99ae"),
    "compile": ("torch.compile", "#5b7db1"),
    "jax": ("JAX (XLA)", "#8bb174"),
    "addmm": ("addmm, folded", "#c9a227"),
    "gsbn": ("gsbn", "#d1495b"),
    "gsbn-matmul": ("gsbn.matmul", "#d1495b"),
}
Results = Mapping[str, Result]


def interval(m: Measurement) -> str:
    """Half of an interval in percent of the median, or both ends in microseconds where that is more than a tenth."""
    if m.confidence < 0.95:  # of so few trials there is none
        return NOTHING
    half = (m.high - m.low) / 2 / m.median
    return f"± {half:.1%}" if half <= 0.1 else f"{shown(m.low * 1e6)}–{shown(m.high * 1e6)}"


def _megabytes(result: Result) -> str:
    size = result.facts.get("extra_bytes")
    return NOTHING if size is None else f"{size / 1e6:.1f}"


def _of_floor(report: Report, result: Result | None) -> str:
    if report.rates is None or result is None or not result.times:
        return NOTHING
    return f"{report.rates.floor(result.case) / result.seconds:.0%}"


def _columns(report: Report) -> list[Column]:
    return [
        Column("µs", time_of("time", 1e-6)),
        Column("95%", lambda result: interval(result.times["time"])),
        Column("error", error_of),
        Column("floor", lambda result: _of_floor(report, result)),
        Column("host µs", time_of("host", 1e-6)),
        Column("MB", _megabytes),
    ]


def _legend(report: Report) -> str:
    rates = report.rates
    matrix = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in rates.matrix.items()) if rates else ""
    return (
        f"µs: {'time on the GPU' if report.on_gpu else 'wall-clock time'}, a median of trials; of a peer that of its "
        "best turn. 95%: half of the interval that holds the true median with 95 % confidence, or the interval itself "
        "where that is more than a tenth (the machine was busy: try more --seconds). error: against float64, norm of "
        "the error over norm of the truth. gsbn ×: how many times as long as gsbn. floor: share of the larger of FLOPs "
        f"over the matrix rate (TFLOP/s: {matrix or 'not measured'}{_third(report)}) and least bytes over the copy "
        f"rate ({rates.copy / 1e9 if rates else 0:.4g} GB/s), measured in this run."
        + (" host µs: until the call returns. MB: peak beyond operands and result." if report.on_gpu else "")
    )


def _third(report: Report) -> str:
    return "; float32 at least a third of float16" if report.on_gpu else ""


# ---- on a page -----------------------------------------------------------------------------------------------------


def compiled(results: Results) -> Result | None:
    """The fastest that torch.compile makes."""
    return fastest(results, COMPILED)


def layer_columns() -> list[Column]:
    """Those that tell a layer: its sizes and its dtype."""
    return [
        Column("B, I, O", lambda case, results: ", ".join(map(str, case.shape)), left=True),
        Column("dtype", lambda case, results: _kind(case), left=True),
    ]


def _kind(case: Case) -> str:
    return SHORT[case.kind] + ("" if case.training else ", inference") + case.variant


def _markdown(report: Report) -> str:
    """The table, another of the other ways to float32 if they were timed, and where all was measured."""

    def host(result: Result) -> str:
        return shown(None if (seconds := result.median("host")) is None else seconds * 1e6, ".0f")

    columns = [
        *layer_columns(),
        Column("bare GEMM", lambda case, results: milliseconds(fastest(results, BARE_GEMMS))),
        Column("PyTorch eager", of("pytorch", milliseconds)),
        Column("torch.compile", lambda case, results: milliseconds(compiled(results))),
        Column("torch.compile, max-autotune", of("autotune", milliseconds)),
        Column("JAX", of("jax", milliseconds)),
        Column("addmm, folded", of("addmm", milliseconds)),
        Column("**gsbn**", of("gsbn", milliseconds), strong=True),
        Column("× eager", lambda case, results: speedup(results.get("pytorch"), results.get("gsbn"))),
        Column("× torch.compile", lambda case, results: speedup(compiled(results), results.get("gsbn"))),
        Column("× addmm", lambda case, results: speedup(results.get("addmm"), results.get("gsbn"))),
        Column("of the floor", of("gsbn", lambda result: _of_floor(report, result))),
        Column("host µs, PyTorch", of("pytorch", host)),
        Column("host µs, gsbn", of("gsbn", host)),
    ]
    products = _product_table(report.by_case())
    parts = [products or markdown_table(columns, report.by_case().items())]
    others = {
        case: results
        for case, results in report.by_case().items()
        if any(results[n].times for n in EMULATED if n in results)
    }
    if others:
        parts += ["Other ways to float32, ms and error against float64:", _float32_table(others)]
    if halves := _half_table(report.by_case()):
        parts += [_HALF, halves]
    return "\n\n".join([*parts, _caption(report)])


def _both(result: Result | None) -> str:
    """The time and the error of a result."""
    return f"{milliseconds(result)}, {error_of(result)}" if result is not None and result.times else NOTHING


def _product_table(table: Mapping[Case, Results]) -> str:
    """Time and error of products alone, where gsbn.matmul was timed; "" if it was not."""
    found = {case: results for case, results in table.items() if "gsbn-matmul" in results}
    if not found:
        return ""
    columns = [
        Column("M, K, N", lambda case, results: ", ".join(map(str, case.shape)), left=True),
        layer_columns()[1],
        Column("cuBLAS", lambda case, results: _both(fastest(results, BARE_GEMMS))),
        *(Column(NAMES[name].removeprefix("GEMM, "), of(name, _both)) for name in EMULATED_GEMMS),
        Column("**gsbn.matmul**", of("gsbn-matmul", _both), strong=True),
        Column("× cuBLAS", lambda case, results: speedup(fastest(results, BARE_GEMMS), results["gsbn-matmul"])),
        Column("× XLA", lambda case, results: speedup(fastest(results, EMULATED_GEMMS), results["gsbn-matmul"])),
    ]
    return markdown_table(columns, found.items())


def _float32_table(table: Mapping[Case, Results]) -> str:
    """Time and error of all that compute a float32 layer, also from products of 16 bits or TF32."""
    names = ["gsbn", "pytorch", *EMULATED]
    columns = [Column("**gsbn**" if n == "gsbn" else NAMES[n], of(n, _both), strong=n == "gsbn") for n in names]
    return markdown_table([layer_columns()[0], *columns], table.items())


_HALF = (
    "16-bit operands beside PyTorch's float32, ms and error. Such a ratio compares two different results: the operands "
    "have lost 13 of 24 bits before the call, which the error does not count. Float32 with float32 is the honest one:"
)


def _half_table(table: Mapping[Case, Results]) -> str:
    """gsbn's float16 beside float32 of PyTorch and gsbn, for forwards that were timed in both; "" if none was."""
    rows = []
    for case, results in table.items():
        half = table.get(dataclasses.replace(case, dtype="float16"), {})
        found = {**results, "half": half["gsbn"]} if "gsbn" in half else {}
        timed = all(name in found and found[name].times for name in ("pytorch", "gsbn", "half"))
        if timed and case.training and (case.kind, case.direction) == ("float32", "forward"):
            rows.append((case, found))
    columns = [
        layer_columns()[0],
        Column("PyTorch eager, float32", of("pytorch", _both)),
        Column("gsbn, float32", of("gsbn", _both)),
        Column("× eager", lambda case, results: speedup(results["pytorch"], results["gsbn"])),
        Column("gsbn, float16", of("half", _both)),
        Column("× eager, float32", lambda case, results: speedup(results["pytorch"], results["half"])),
    ]
    return markdown_table(columns, rows) if rows else ""


def _caption(report: Report) -> str:
    rates = report.rates
    matrix = ", ".join(f"{SHORT[kind]} {rate / 1e12:.3g}" for kind, rate in rates.matrix.items()) if rates else ""
    third = " (float32: at least a third of float16)" if report.on_gpu else ""
    what = "device time in ms, one run, back to back in a CUDA graph where possible"
    turns = f", of a peer the best of {report.settings.turns} turns" if report.settings.turns > 1 else ""
    return (
        f"Medians of {what if report.on_gpu else 'wall-clock time in ms, one run'}{turns}; {page.measured_on(report)} "
        f"Floor: copy rate {rates.copy / 1e12 if rates else 0:.3g} TB/s, matrix rates in TFLOP/s {matrix}{third}. "
        f"{page.sources_of(report)}"
    )


# ---- in a picture --------------------------------------------------------------------------------------------------


def _panels(report: Report) -> dict[str, Groups]:
    """A panel for each dtype, with bars for each shape."""
    panels: dict[str, Any] = {}
    for case, results in report.by_case().items():
        found = {name: results.get(name) for name in SERIES}
        found |= {"gemm": fastest(results, BARE_GEMMS), "compile": compiled(results)}
        found["jax"] = found["jax"] or fastest(results, EMULATED_GEMMS)
        times = {name: result.seconds for name, result in found.items() if result and result.times}
        label = ", ".join(map(str, case.shape)) + ("" if case.training else "\ninference")
        panels.setdefault(SHORT[case.kind], []).append((label, times))
    return panels


def _subject(report: Report) -> str:
    """What was timed, for the title of the picture."""
    if any(result.candidate == "gsbn-matmul" for result in report.results):
        return "products alone"
    return " and ".join(dict.fromkeys(case.direction + case.variant for case in report.by_case()))


VIEW = View(
    names=NAMES,
    columns=_columns,
    legend=_legend,
    markdown=_markdown,
    panels=_panels,
    series=SERIES,
    units=("pytorch", "gemm"),
    subject=_subject,
    picture="Speed beside the peers, and the roofline",
)
