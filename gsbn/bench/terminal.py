"""What a terminal can show: tables that are as wide as it is, and the characters that its encoding has."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .report import NOTHING

SPELLED = {  # what this package prints, for encodings that lack it; in tables one character stands for one
    "×": "x", "–": "-", "−": "-", "·": "*", "±": "+-", "→": "->", "≤": "<=", "√": "sqrt ", "µ": "u", "μ": "u", "Δ": "d",
    "Σ": "sum ", "γ": "gamma", "β": "beta", "…": "...", "’": "'", "•": "*", "│": "|", "─": "-", "━": "-",
}  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


class Row(NamedTuple):
    """The cells of one line of a table, one for each column, and a style of rich for all of them."""

    cells: Sequence[str | Text]
    style: str = ""


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Row], left: Iterable[str] = ()
) -> None:
    """Print a table of which no number is cut: what does not fit beside the others is printed below them.

    The first column names the rows and stands before each part. A column without any value is left out, and a table
    without any is not printed. Columns named in ``left`` are flush left.
    """
    rows = list(rows)
    shown = [i for i in range(1, len(columns)) if any(str(row.cells[i]) not in ("", NOTHING) for row in rows)]

    def part(chosen: Sequence[int], gap: int) -> Table:
        return _table(columns, rows, chosen, left, gap)

    def fits(chosen: Sequence[int], gap: int) -> bool:
        return _width(console, part(chosen, gap)) <= console.width

    if shown and title:
        console.print(Text(title, style="bold"))
    gap = 2 if fits(shown, 2) else 1
    while shown:
        count = 1
        while count < len(shown) and fits(shown[: count + 1], gap):
            count += 1
        console.print(part(shown[:count], gap))
        console.print()
        shown = shown[count:]


def print_facts(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of words, the last column of which wraps where the terminal ends."""
    if title:
        console.print(Text(title, style="bold"))
    console.print(_table(columns, [Row(cells) for cells in rows], range(1, len(columns)), columns, wraps=True))
    console.print()


def spell_out(*streams: Any) -> None:
    """Let text streams write what their encoding lacks in characters that it has, instead of raising."""
    codecs.register_error("gsbn.spell_out", _spelled)
    for stream in streams:
        if hasattr(stream, "reconfigure"):  # what replaces sys.stdout need not be a file
            stream.reconfigure(errors="gsbn.spell_out")


def _spelled(error: UnicodeError) -> tuple[str | bytes, int]:
    """The handler of an encoder: what to write instead, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text, start = error.object, error.start
    if power := re.compile("[⁻⁰¹²³⁴-⁹]+").match(text, start):
        return "^" + power.group().translate(SUPERSCRIPTS), power.end()
    if text[start] in SPELLED:
        return SPELLED[text[start]], start + 1
    return codecs.backslashreplace_errors(UnicodeEncodeError(error.encoding, text, start, start + 1, error.reason))


def _table(
    columns: Sequence[str],
    rows: Sequence[Row],
    shown: Sequence[int],
    left: Iterable[str],
    gap: int = 2,
    wraps: bool = False,
) -> Table:
    chosen = [0, *shown]
    padding = (0, 0, 0, gap - 1)  # beside the one that stands for the line between two columns
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, show_header=any(columns))
    for i in chosen:
        flush: JustifyMethod = "left" if i == 0 or columns[i] in left else "right"
        table.add_column(Text(columns[i]), justify=flush, no_wrap=not (wraps and i == chosen[-1]), overflow="fold")
    for row in rows:
        cells = (row.cells[i] for i in chosen)
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=row.style)
    return table


def _width(console: Console, table: Table) -> int:
    """The columns of a terminal that a table takes if nothing is cut or wrapped."""
    return Measurement.get(console, console.options.update(max_width=100_000), table).maximum
