"""Writes a report for people: tables as wide as the terminal, every number with its unit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

from tracepipe.printable import printable
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Result, Table
from tracepipe.reports.writing.facts_text import heading, lacks
from tracepipe.units import duration_text, size_text, three_digits

_UNKNOWN = "–"
# From here on there is room for two blanks between columns.
_WIDE = 100
# Names may be folded beyond this, before a spare column is left out for them.
_NAME_COLUMNS = 30
_UNITS: dict[str, Callable[[Any], str]] = {
    "": str,
    "ns": duration_text,
    "at": lambda ns: f"{ns / 1e6:,.3f} ms",
    "bytes": size_text,
    "bytes_per_s": lambda rate: f"{three_digits(rate / 1e9)} GB/s",
    "count": lambda count: f"{count:,}",
    "id": str,
    "percent": lambda share: f"{share:.1f}%",
    "number": three_digits,
    "p": lambda p: f"{p:.1g}",
}
_ASCII = str.maketrans({"µ": "u", "…": "~", "–": "-", "×": "x", "→": ">", "·": "-"})


def shown(text: str, ascii_only: bool = False) -> str:
    """What a terminal can be given: names are those of the recorded program."""
    text = printable(text)
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else text


def cell(value: Any, unit: str) -> str:
    """A value as people read it, with its unit."""
    return _UNKNOWN if value is None else _UNITS[unit](value)


def report_lines(
    runs: Iterable[Run], result: Result, *, width: int, colours: bool = False, ascii_only: bool = False
) -> list[str]:
    """The whole report; names too long for their column go on below."""
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    # Without a colour system nothing but text is written.
    system: Any = "standard" if colours else None
    console = Console(
        file=out, width=width, force_terminal=colours, color_system=system, highlight=False, emoji=False
    )

    def say(text: str, style: str = "", wraps: bool = True) -> None:
        console.print(Text(shown(text, ascii_only), style), soft_wrap=not wraps)

    runs = list(runs)
    for run in runs:
        say(heading(run.facts), "dim")
    if result.title:
        say(result.title, "bold")
    for part in result.parts:
        if isinstance(part, Table) and part.empty and not part.rows:
            say("")
            say(part.empty)
        elif isinstance(part, Table):
            say("")
            say(part.title, "bold")
            console.print(_table(part, width, ascii_only))
            if part.note:
                say(part.note, "dim")
        elif drawn := list(part.draw(width, ascii_only)):
            for line in ("", *drawn):
                say(line, wraps=False)
    said = [("", line) for line in result.notes]
    for run in runs:
        # What one of several recordings lacks is said of that one.
        of = f"{run.facts.path}: " if len(runs) > 1 else ""
        said += [(of, line) for line in lacks(run.facts)]
    if said:
        say("")
    for of, line in said:
        say(of + line, "yellow" if line.startswith(("lost", "left out", "skipped")) else "")
    return [line.rstrip() if not colours else line for line in out.getvalue().splitlines()]


def _kept(table: Table, width: int) -> list[int]:
    """The places of the columns that are shown: spare ones while there is room, the first of them first."""
    spares = [at for at, column in enumerate(table.columns) if column.spare]
    if not spares or width < _WIDE:
        return [at for at, column in enumerate(table.columns) if not column.spare]

    def taken(at: int) -> int:
        column = table.columns[at]
        longest = max((len(cell(row[at], column.unit)) for row in table.rows), default=0)
        return max(len(column.title), longest if column.unit else min(longest, _NAME_COLUMNS)) + 2

    # The first cell of a group has a line of its own.
    free = width - sum(taken(at) for at in range(table.grouped, len(table.columns)) if at not in spares)
    dropped = set()
    for at in spares:
        if taken(at) <= free:
            free -= taken(at)
        else:
            dropped.add(at)
    return [at for at in range(len(table.columns)) if at not in dropped]


def _table(table: Table, width: int, ascii_only: bool) -> Any:
    from rich.table import Table as Grid
    from rich.text import Text

    kept = _kept(table, width)
    columns = [table.columns[at] for at in kept]
    headed = [columns[0], *columns[2:]] if table.grouped else columns
    has_header = any(column.title for column in headed)
    padding = (0, 2 if width >= _WIDE else 1, 0, 0)
    grid = Grid(box=None, pad_edge=False, padding=padding, header_style="dim", show_header=has_header)
    for column in headed:
        if column.unit:
            grid.add_column(Text(shown(column.title, ascii_only)), justify="right", no_wrap=True)
        else:
            grid.add_column(Text(shown(column.title, ascii_only)), overflow="fold")
    group = None
    for row in table.rows:
        cells = [
            Text(shown(cell(row[at], column.unit), ascii_only))
            for at, column in zip(kept, columns, strict=True)
        ]
        if table.grouped:
            if row[0] != group:
                grid.add_row(cells[0])
                group = row[0]
            cells = [Text("  ") + cells[1], *cells[2:]]
        grid.add_row(*cells)
    return grid
