"""Writes a report as text: tables that fit the terminal's width, every number with its unit, and what the
recording lacks.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tracepipe.event.model import LAYERS
from tracepipe.kernel_names import applied_function, kernel_title
from tracepipe.printable import printable
from tracepipe.recording.account import fit_text
from tracepipe.reports.report import Column, Result, Table
from tracepipe.store.store import Facts
from tracepipe.units import change_text, counted, duration_text, known_id, size_text, three_digits

_OUTCOMES = {
    "unclosed": "call|calls had no end: it|they is|are counted, but its|their length is not known",
    "no_begin": "end|ends had no begin: it|they is|are not counted as a_call|calls",
    "overlaps": "slice|slices does|do not nest in the order of its|their events: callers are found by times",
}


def heading(facts: Facts) -> str:
    """The heading of a recording: its path, source, length and number of events."""
    counts = ", ".join(f"{facts.counts[layer]:,} {layer}" for layer in LAYERS if facts.counts[layer])
    length = duration_text(facts.end_ns - facts.start_ns)
    return f"{facts.path}: {facts.source}, {length}, {counts or 'no events'}"


def lacks(facts: Facts) -> Iterator[str]:
    """Lines about what the recording lacks, the most important last: problems, clocks, losses."""
    yield from facts.remarks(_OUTCOMES)
    for known in facts.clocks:
        clock, method = known["clock"], known["method"]
        if method == "assumed":
            yield f"clock {clock}: placed by an assumed offset, error unknown"
        elif method == "same":
            yield f"clock {clock}: not related to any other clock"
        else:
            by = f"{fit_text(known)}, " if method == "fit" else ""
            if method == "launches":
                by = f"placed by its {counted(known['launches'], 'launch|launches')}, "
            yield f"clock {clock}: {by}within {known['bound_ns']} ns of {facts.trace_clock}"
    yield from facts.missing_lines("left out")


def facts_json(facts: Facts) -> dict[str, Any]:
    """The facts as JSON values; times are ns on the trace clock."""
    keys = ("path", "source", "trace_clock", "start_ns", "end_ns", "counts", "losses", "skipped", "ambiguous")
    data = {key: getattr(facts, key) for key in (*keys, "unplaced", "clocks", "notes")}
    outcomes = {name: getattr(facts.outcomes, name) for name in _OUTCOMES}
    return data | {
        "dur_ns": facts.end_ns - facts.start_ns,
        "command": facts.header.to_record().get("command"),
        "outcomes": outcomes,
        "problems": [asdict(problem) for problem in facts.problems],
    }


_UNKNOWN = "–"
# From this width on, two blanks separate columns.
_WIDE = 100
# Longer names are shortened before a spare column is left out for them.
_NAME_COLUMNS = 30
# Texts are cut to the first width, or to the second where numbers leave no more room.
_NAME_LEAST, _LEAST = 12, 3
# Characters of a C++ name with parameters.
_CPP = frozenset("<(")
_UNITS: dict[str, Callable[[Any], str]] = {
    "": str,
    "ns": duration_text,
    "change_ns": change_text,
    "at": lambda ns: f"{ns / 1e6:,.3f} ms",
    "bytes": size_text,
    "bytes_per_s": lambda rate: f"{three_digits(rate / 1e9)} GB/s",
    "count": lambda count: f"{count:,}",
    "id": str,
    "pid": lambda id: _UNKNOWN if known_id(id) is None else str(id),
    "percent": lambda share: f"{share:.1f}%",
    "change_percent": lambda share: f"{share:+.1f}%",
    "number": three_digits,
    "p": lambda p: f"{p:.1g}",
}
# The cells of `(+99: --all)` and a blank.
_MORE_NOTES = 13
_ASCII = str.maketrans({"µ": "u", "…": "~", "–": "-", "×": "x", "→": ">", "·": "-"})


def shown(text: str, ascii_only: bool = False) -> str:
    """A text that is safe on a terminal, as names come from the recorded program."""
    text = printable(text)
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else text


def cell(value: object, unit: str) -> str:
    """A value as text, with its unit."""
    return _UNKNOWN if value is None else _UNITS[unit](value)


def report_lines(
    recordings: Sequence[Facts],
    result: Result,
    *,
    width: int,
    colours: bool = False,
    ascii_only: bool = False,
    full_names: bool = False,
) -> Iterator[str]:
    """The lines of the whole report, one for each row of a table; with `full_names` no name is shortened."""
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    # Without a colour system only text is written.
    system: Any = "standard" if colours else None
    console = Console(
        file=out, width=width, force_terminal=colours, color_system=system, highlight=False, emoji=False
    )

    def styled(text: str, style: str = "", wraps: bool = True) -> Iterator[str]:
        text = shown(text, ascii_only)
        if not wraps and not colours:
            yield text.rstrip()
            return
        console.print(Text(text, style), soft_wrap=not wraps)
        yield from (line if colours else line.rstrip() for line in out.getvalue().splitlines())
        out.seek(0)
        out.truncate()

    if result.heading:
        yield from styled(result.heading, "bold")
    for at, facts in enumerate(recordings if not result.heading else ()):
        side = f"{result.sides[at]} " if result.sides else ""
        yield from styled(f"{side}{heading(facts)}", "dim")
    if result.title:
        yield from styled(result.title, "bold")
    for part in result.parts:
        if not isinstance(part, Table):
            drawn = list(part.draw(width, ascii_only))
            for line in ("", *drawn) if drawn else ():
                yield from styled(line, wraps=False)
            continue
        yield ""
        if part.empty and not part.rows:
            yield from styled(part.empty)
            continue
        if part.title:
            yield from styled(part.title, "bold")
        for style, text in _lines_of(part, width, ascii_only, full_names):
            yield from styled(text, style, wraps=_is_prose(part))
        if part.note:
            yield from styled(part.note, "dim")
    notes = [("", line) for line in result.notes]
    for facts in recordings:
        # With several recordings, a note about one of them names it.
        of = f"{facts.path}: " if len(recordings) > 1 else ""
        notes += [(of, line) for line in lacks(facts)]
    if notes:
        yield ""
    if result.notes_max is not None and notes:
        # Losses come last.
        more = len(notes) - result.notes_max
        lines = [elided(printable(of + line), width - (_MORE_NOTES if more > 0 else 0)) for of, line in notes]
        notes = [("", line) for line in lines[-result.notes_max :]]
        if more > 0:
            notes[-1] = "", f"{notes[-1][1]} (+{more}: --all)"
    for of, line in notes:
        is_loss = line.startswith(("lost", "left out", "skipped"))
        yield from styled(of + line, "yellow" if is_loss else "")


def _shown_columns(table: Table, width: int) -> list[int]:
    """The indices of the columns that are shown; spare ones, in their order, as long as there is room."""
    spares = [at for at, column in enumerate(table.columns) if column.spare]
    if not spares or width < _WIDE:
        return [at for at, column in enumerate(table.columns) if not column.spare]
    longest = [0] * len(table.columns)
    for row in table.rows:
        sizes = (len(cell(value, column.unit)) for value, column in zip(row, table.columns, strict=True))
        longest = [*map(max, longest, sizes)]

    def cells_of(at: int) -> int:
        column, size = table.columns[at], longest[at]
        return max(len(column.title), size if column.unit else min(size, _NAME_COLUMNS)) + 2

    # The first cell of a group is on a separate line.
    free = width - sum(cells_of(at) for at in range(table.grouped, len(table.columns)) if at not in spares)
    dropped = set()
    for at in spares:
        if cells_of(at) <= free:
            free -= cells_of(at)
        else:
            dropped.add(at)
    return [at for at in range(len(table.columns)) if at not in dropped]


def _is_prose(table: Table) -> bool:
    """Whether the rows of a table are sentences."""
    return len(table.columns) == 1 and not table.columns[0].title


def _lines_of(table: Table, width: int, ascii_only: bool, full_names: bool) -> Iterator[tuple[str, str]]:
    """Yield the lines of a table, each with its style. Texts without room are elided in the middle; with
    `full_names` they are written in full, and lines may be longer than the terminal is wide.
    """
    shown_at = _shown_columns(table, width)
    columns = [table.columns[at] for at in shown_at]
    of_columns = [
        _texts([row[at] for row in table.rows], column, ascii_only, full_names)
        for at, column in zip(shown_at, columns, strict=True)
    ]
    rows = [list(row) for row in zip(*of_columns, strict=True)]
    if _is_prose(table):
        yield from (("", text) for (text,) in rows)
        return
    headed = [columns[0], *columns[2:]] if table.grouped else columns
    titles = [shown(column.title, ascii_only) for column in headed]
    is_text = [not column.unit for column in headed]
    cells = [0] * len(headed)
    for row in rows:
        cells = [*map(max, cells, map(_cells, _below(row) if table.grouped else row))]
    between = 2 if width >= _WIDE else 1
    free = width - between * (len(titles) - 1)
    sizes = [max(_cells(title), size) for title, size in zip(titles, cells, strict=True)]
    words = [[title] for title in titles]
    if sum(min(size, _NAME_LEAST) if of else size for size, of in zip(sizes, is_text, strict=True)) > free:
        # Titles of number columns then take several lines, one for each word.
        words = [[title] if of else title.split(" ") for title, of in zip(titles, is_text, strict=True)]
        sizes = [max(size, *map(_cells, of)) for of, size in zip(words, cells, strict=True)]
    groups, bodies = [row[0] for row in rows], [_below(row) if table.grouped else row for row in rows]
    if not full_names:
        _narrow(sizes, is_text, free)
        for at, size in enumerate(sizes):
            if is_text[at]:
                for row, text in zip(bodies, _elided_apart([row[at] for row in bodies], size), strict=True):
                    row[at] = text

    def line(cells: list[str]) -> str:
        text = (" " * between).join(map(_placed, cells, sizes, is_text)).rstrip()
        return shown(text, ascii_only) if ascii_only else text  # its cells are printable

    most = max(map(len, words))
    for at in range(most):
        yield "dim", line([("" if at < most - len(of) else of[at - most + len(of)]) for of in words])
    group = None
    for row, own in zip(bodies, groups, strict=True):
        if table.grouped and own != group:
            group = own
            yield "", group if full_names else shown(elided(group, width), ascii_only)
        yield "", line(row)


def _below(row: list[str]) -> list[str]:
    """A row of a group without its first cell, which is on a line above the group."""
    _, second, *rest = row
    return [f"  {second}", *rest]


def _texts(values: list[object], column: Column, ascii_only: bool, full_names: bool) -> list[str]:
    """The texts of the cells of a column."""
    texts = [cell(value, column.unit) for value in values]
    if column.unit:
        return [text.translate(_ASCII) for text in texts] if ascii_only else texts
    titles = {} if full_names else titles_of(texts)
    return [shown(titles.get(text, text), ascii_only) for text in texts]


def titles_of(texts: Iterable[str]) -> dict[str, str]:
    """Texts of a column as they are shown. Those that would have one title have a longer one, or are shown as
    they are.
    """
    longer = {text: titled(text) for text in dict.fromkeys(texts)}
    for shorter in (applied_function, str):
        titles = {text: shorter(title) for text, title in longer.items()}
        many = Counter(titles.values())
        longer |= {text: title for text, title in titles.items() if many[title] == 1}
    many = Counter(longer.values())
    return {text: title if many[title] == 1 else text for text, title in longer.items()}


def names_within(names: Sequence[str], size: int) -> list[str]:
    """Names as a column of this size shows them, in which different ones differ."""
    titles = titles_of(names)
    return _elided_apart([titles[name] for name in names], size)


def titled(text: str) -> str:
    """A text as it is shown: a C++ name loses its namespaces and parameters."""
    return kernel_title(text) if "::" in text and not _CPP.isdisjoint(text) else text


def _narrow(sizes: list[int], is_text: Sequence[bool], free: int) -> None:
    """Narrow columns of text, the widest first, until all columns have room."""
    texts = [at for at, flag in enumerate(is_text) if flag]
    for least in (_NAME_LEAST, _LEAST) if texts else ():
        while (excess := sum(sizes) - free) > 0 and (widest := max(sizes[at] for at in texts)) > least:
            as_wide = [at for at in texts if sizes[at] == widest]
            next_wide = max((sizes[at] for at in texts if sizes[at] < widest), default=least)
            step = min(widest - max(next_wide, least), max(1, excess // len(as_wide)))
            for at in as_wide:
                sizes[at] -= step


def _cells(text: str) -> int:
    """The cells of a terminal that a printable text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _elided_apart(texts: list[str], size: int) -> list[str]:
    """Texts that fit `size` cells. Where several would be the same without their middles, each keeps the
    place where it differs from the others.
    """
    short = {text: elided(text, size) for text in dict.fromkeys(texts)}
    alike: dict[str, list[str]] = {}
    for text, its in short.items():
        alike.setdefault(its, []).append(text)
    taken, number = set(short.values()), 0
    for several in (of for of in alike.values() if len(of) > 1):
        pairs = zip(min(several), max(several), strict=False)
        differs_at = next((at for at, (a, b) in enumerate(pairs) if a != b), 0)
        head = several[0][: min(size // 3, differs_at)]
        for text in several:
            its = f"{head}…{elided(text[differs_at:].lstrip(), size - _cells(head) - 1)}"
            if _cells(its) > size:
                its = short[text]
            while its in taken:
                number += 1
                its = f"{elided(text, size - 1 - len(str(number)))}#{number}"
            taken.add(its)
            short[text] = its
    return [short[text] for text in texts]


def _placed(text: str, size: int, is_text: bool) -> str:
    """A cell padded to its column: text on the left, numbers on the right."""
    cells = _cells(text)
    if cells > size:
        text = elided(text, size)
        cells = _cells(text)
    blanks = " " * (size - cells)
    return text + blanks if is_text else blanks + text


def elided(text: str, size: int) -> str:
    """A text that fits `size` cells; a longer one loses its middle."""
    if _cells(text) <= size:
        return text
    # The end of a C++ name says less than its beginning.
    tail_size = 1 if text.endswith((">", ")")) else (size - 1) // 3
    head, tail = text[: size - 1 - tail_size], text[len(text) - tail_size :]
    while _cells(head) + _cells(tail) > size - 1 and (head or tail):
        head, tail = (head[:-1], tail) if _cells(head) > _cells(tail) else (head, tail[1:])
    return f"{head}…{tail}"
