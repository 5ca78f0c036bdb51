"""What a report is, and what it gives: tables and drawings that become text or JSON from the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol

TIME, REGEX = "TIME", "REGEX"
Unit = Literal["", "ns", "at", "bytes", "bytes_per_s", "count", "id", "percent", "number", "p"]


@dataclass(frozen=True, slots=True)
class Option:
    """How an option of a report is written: `Annotated[int, Option("what it does")]` in its `options`.

    `choices` are all that it may be; `metavar` stands for the value in the help: `TIME` is a duration,
    `REGEX` a regular expression. A number is from `least` to `most`.
    """

    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: float = 0
    most: float = float("inf")


FROM = Option(
    "Show the run from this time after its start on: 1.5ms, 20us, 2s. A number without a unit is in seconds.",
    TIME,
)
UNTIL = Option("Show the run until this time after its start, in the same forms.", TIME)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `key` is its name in JSON and ends with the unit (`total_ns`).

    Its cells are whole numbers of the unit (`at`: ns since the start, shown to the µs), `percent`, `number`
    and `p` (a probability) floats, text without one; None is what is not known. `spare`: it is left out where
    there are fewer than 100 columns, or no room.
    """

    key: str
    title: str
    unit: Unit = ""
    spare: bool = False


class Rows(Protocol):
    """Rows of a table, which can be gone through as often as one likes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence[Any]]: ...


@dataclass(slots=True)
class Table:
    """Rows under columns. `name` is its key in JSON, `note` what a reader of it must know.

    `grouped`: rows with the same first cell stand under it, and their second cell in its place. `empty` is
    said in the place of the columns where there are no rows.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Rows
    note: str = ""
    grouped: bool = False
    empty: str = ""

    def lazily(self) -> Iterator[dict[str, Any]]:
        """A dictionary for each row, one after the other."""
        keys = [column.key for column in self.columns]
        return (dict(zip(keys, row, strict=True)) for row in self.rows)


@dataclass(slots=True)
class Drawing:
    """Text that depends on the terminal: `draw` gets its columns, and whether it shows ASCII alone.

    `data` gives what is drawn, as data, in which iterators stand for lists.
    """

    name: str
    draw: Callable[[int, bool], Iterable[str]]
    data: Callable[[], Any]

    def lazily(self) -> Any:
        """What is drawn, as data."""
        return self.data()


Write = Callable[[BinaryIO], None]
"""Writes the whole of a file to a stream."""


@dataclass(frozen=True, slots=True)
class FileOutput:
    """A report that writes a file: `-o` names it, and its ending says of which kind; by default the first.

    `Result.files` then has one of each kind, by its ending.
    """

    endings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FolderOutput:
    """A report that writes a folder: `ending` is that of its name where `-o` gives none.

    `Result.files` then has all that goes into it, by name.
    """

    ending: Callable[[Any], str]


@dataclass(slots=True)
class Result:
    """What a report found. `notes` are lines that a reader must know, such as what was left out.

    `files` are written where the report has an `output`. `sides` has a letter for each recording, where these
    are compared.
    """

    title: str
    parts: list[Table | Drawing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, Write] = field(default_factory=dict)
    sides: list[str] = field(default_factory=list)

    def lazily(self) -> dict[str, Any]:
        """The parts by their names, and the notes; iterators stand for lists."""
        return {part.name: part.lazily() for part in self.parts} | {"notes": self.notes}

    def as_json(self) -> dict[str, Any]:
        """The same with lists."""
        whole: dict[str, Any] = _with_lists(self.lazily())
        return whole


def _with_lists(value: Any) -> Any:
    """A value, with what its iterators give."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, Iterator) else value


@dataclass(frozen=True, slots=True)
class Report:
    """A report, and the command of that name.

    `options` is a frozen dataclass whose fields are `Annotated` with an `Option`; each has a default. `run`
    gets a `Run` for each of `inputs`, then the options, and returns a Result. It raises TracepipeError where
    an option does not fit the recording. `output` is where it writes files, besides what is on the terminal.
    `takes_several`: each of the inputs may be several recordings; `run` then gets, for each input, a list of
    functions that read one. `suits` says whether it belongs on the page of a recording, where it is one of
    those gathered there. `needs` are the packages of the extra `reports` that it cannot do without.
    """

    name: str
    options: type
    run: Callable[..., Result]
    inputs: tuple[str, ...] = ("RUN",)
    output: FileOutput | FolderOutput | None = None
    takes_several: bool = False
    suits: Callable[[Any], bool] = lambda run: True
    needs: tuple[str, ...] = ()
