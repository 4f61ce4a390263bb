"""Tables that are as wide as the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .report import NOTHING

Cell = str | Text


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], left: Collection[str] = ()
) -> None:
    """Print a table without cutting numbers: columns that do not fit are printed below, as another part.

    The first column names the rows and stands before each part. A column without any value is left out, and a table
    without any is not printed. Columns named in ``left`` are flush left.
    """
    shown = [i for i in range(1, len(columns)) if any(str(row[i]) not in ("", NOTHING) for row in rows)]

    def part(chosen: Sequence[int]) -> Table:
        table = _grid()
        for i in (0, *chosen):
            flush: JustifyMethod = "left" if i == 0 or columns[i] in left else "right"
            table.add_column(Text(columns[i]), justify=flush, no_wrap=i > 0, overflow="fold")
        for row in rows:
            table.add_row(*(_text(row[i]) for i in (0, *chosen)))
        return table

    def fits(chosen: Sequence[int]) -> bool:
        wide = console.options.update(max_width=100_000)
        return Measurement.get(console, wide, part(chosen)).maximum <= console.width

    if shown and title:
        console.print(Text(title, style="bold"))
    while shown:
        count = max((n for n in range(1, len(shown) + 1) if fits(shown[:n])), default=1)
        console.print(part(shown[:count]))
        console.print()
        shown = shown[count:]


def print_facts(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of words, the last column of which wraps where the terminal ends."""
    if title:
        console.print(Text(title, style="bold"))
    table = _grid(show_header=any(columns))
    for column in columns:
        table.add_column(Text(column), no_wrap=column != columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)
    console.print()


def _grid(show_header: bool = True) -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0), show_header=show_header)


def _text(cell: Cell) -> Text:
    """Letters as they are: rich would read brackets as markup."""
    return Text(cell) if isinstance(cell, str) else cell
