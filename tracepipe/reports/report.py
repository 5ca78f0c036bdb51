"""The types of a report and its result: tables and drawings, whose rows become text and JSON alike."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol

from tracepipe.options import TIME, Option
from tracepipe.units import counted, known_id

Unit = Literal[
    "", "ns", "change_ns", "at", "bytes", "bytes_per_s", "count", "id", "pid", "percent", "change_percent",
    "number", "p",
]  # fmt: skip


FROM = Option(
    "Show the run from this time after its start on: 1.5ms, 20us, 2s. A number without a unit is in seconds.",
    TIME,
)
UNTIL = Option("Show the run until this time after its start, in the same forms.", TIME)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `key` is its name in JSON and ends with the unit (`total_ns`).

    Its cells are integers in that unit (`at`: ns since the start, shown to the µs; `pid`: the id of a process
    or a thread, which is not shown if a reader made it up). `percent`, `number` and `p` (a probability) are
    floats; a `change_…` is shown with its sign; a column without a unit has text. None means "not known". A
    `spare` column is left out where the terminal has fewer than 100 columns, or no room for it.
    """

    key: str
    title: str
    unit: Unit = ""
    spare: bool = False


KERNEL = Column("kernel", "kernel")
COUNT = Column("count", "count", "count")
SHARE = Column("share_percent", "share", "percent")


class Rows(Sized, Iterable[Sequence[Any]], Protocol):
    """Rows of a table, which can be iterated over several times."""


@dataclass(slots=True)
class Table:
    """Rows and columns. `name` is the table's key in JSON, `note` explains its columns to the reader.

    `grouped`: the first cell of a group of rows is a line of its own above them, and each row begins with its
    second cell. `empty` is the text that is shown instead of the table where it has no rows.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Rows
    note: str = ""
    grouped: bool = False
    empty: str = ""

    def lazily(self) -> Iterator[dict[str, Any]]:
        """Yield a dictionary for each row."""
        keys = [column.key for column in self.columns]
        ids = [column.key for column in self.columns if column.unit == "pid"]
        for row in self.rows:
            cells = dict(zip(keys, row, strict=True))
            yield cells | {key: known_id(cells[key]) for key in ids} if ids else cells


@dataclass(slots=True)
class Drawing:
    """Text that depends on the terminal: `draw` gets its width in columns, and whether it shows only ASCII.

    `data` returns what is drawn, as JSON values, with iterators instead of lists.
    """

    name: str
    draw: Callable[[int, bool], Iterable[str]]
    data: Callable[[], Any]

    def lazily(self) -> object:
        """The values that are drawn, as JSON values with iterators instead of lists."""
        return self.data()


def sentences(
    name: str,
    heading: str,
    data: Sequence[dict[str, Any]],
    text: Callable[[Any], str],
    empty: str = "",
    top: int = 0,
) -> Drawing:
    """A drawing of sentences under a heading; `text` returns the sentence of one of `data`. Where there are
    none, `empty` is shown instead, or nothing. Only the first `top` are drawn, or all for 0.
    """

    def draw(width: int, ascii_only: bool) -> Iterator[str]:
        if data or empty:
            yield heading
        if empty and not data:
            yield empty
        for one in data[: top or None]:
            yield from textwrap.wrap(text(one), max(width, 40), subsequent_indent="  ")
        if 0 < top < len(data):
            yield f"… and {len(data) - top} more: --top 0 shows all"

    return Drawing(name, draw, lambda: data)


def not_listed(count: int, words: str) -> list[str]:
    """A note on rows that `--top` leaves out, `one|many` in words; none where there are none."""
    return [counted(count, f"more {words} is|are not listed: --top 0 lists all")] if count > 0 else []


Write = Callable[[BinaryIO], object]
"""Writes a whole file to a stream."""


@dataclass(frozen=True, slots=True)
class FileOutput:
    """The output of a report that writes one file. `-o` names it, and its ending chooses the format; the
    default is the first of `endings`.

    `Result.files` then has a writer for each ending.
    """

    endings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FolderOutput:
    """The output of a report that writes a folder. `ending` returns the ending of the folder's name where
    `-o` does not name it.

    `Result.files` then has a writer for each file in it, by file name.
    """

    ending: Callable[[Any], str]


@dataclass(slots=True)
class Result:
    """The findings of a report. `notes` are lines that the reader must know, such as what was left out.

    `heading` replaces the line about the recording. At most `notes_max` notes are shown on the terminal, each
    in one line. `files` are written where the report has an `output`. `sides` has a letter for each recording
    where recordings are compared. `exit_code` is that of the command, and `document` a text that it prints in
    place of the tables.
    """

    title: str
    parts: list[Table | Drawing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    heading: str = ""
    notes_max: int | None = None
    files: dict[str, Write] = field(default_factory=dict)
    sides: list[str] = field(default_factory=list)
    exit_code: int = 0
    document: str = ""

    def lazily(self) -> dict[str, Any]:
        """The parts by name, and the notes, with iterators instead of lists."""
        return {part.name: part.lazily() for part in self.parts} | {"notes": self.notes}

    def as_json(self) -> dict[str, Any]:
        """The same as `lazily`, with lists."""
        return {name: _with_lists(part) for name, part in self.lazily().items()}


def _with_lists(value: object) -> object:
    """A JSON value whose iterators are replaced by lists."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, Iterator) else value


@dataclass(frozen=True, slots=True)
class Report:
    """A report, and the command of that name.

    `options` is a frozen dataclass whose fields are `Annotated` with an `Option`; each has a default. `run`
    gets a `Run` for each of `inputs`, then the options, and returns a Result. It raises TracepipeError where
    an option does not fit the recording. `output` describes the files that it writes in addition to its text
    on the terminal. With `takes_several`, each input may be several recordings, and `run` gets for each input
    a list of functions that read one recording. `suits` returns whether the report is shown on the page of a
    recording; it is asked only of the reports of that page. `needs` lists the packages of the extra `reports`
    that the report requires. `companions` has the options that name a second recording to be read, each with
    the packages that it requires: `run` gets the Run of that recording as an argument of that name. A report
    `of_one_clock` does not compare the clock of a GPU with others: where nothing places it, its own times are
    used.
    """

    name: str
    options: type
    run: Callable[..., Result]
    inputs: tuple[str, ...] = ("RUN",)
    output: FileOutput | FolderOutput | None = None
    takes_several: bool = False
    suits: Callable[[Any], bool] = lambda run: True
    needs: tuple[str, ...] = ()
    companions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    of_one_clock: bool = False
