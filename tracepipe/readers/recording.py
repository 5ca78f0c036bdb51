"""The interface between input formats and the rest: what a reader is, and what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final, Protocol

from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    UNDATED_NS,
    Row,
    SourceBatch,
    event_columns,
    no_events,
    signed,
)
from tracepipe.event.model import STALLS, Header, Problem, Record
from tracepipe.event.shape import index_of
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Warps, warps_of
from tracepipe.readers.lines import BOM, OTHERS, chunks_of_lines
from tracepipe.units import agree

# This many problems are kept with their text until the events come.
_PROBLEMS_MAX: Final = 1 << 10


@dataclass(slots=True)
class Recording:
    """An opened input: its header, which is made from what the format has, its batches, and the tables for
    their numbers.
    """

    header: Header
    batches: Iterable[SourceBatch]
    tables: Tables


@dataclass(slots=True)
class Batch:
    """The content of some thousands of lines: good records in file order, and the rest as in
    `SourceBatch`.
    """

    records: list[Record] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    offset_bytes: int = 0
    foreign_lines: list[tuple[int, bytes]] = field(default_factory=list)
    printed: list[tuple[int, bytes]] = field(default_factory=list)

    def in_columns(self, tables: Tables) -> SourceBatch:
        """The batch as columns."""
        others: list[Record | Warps] = []
        rows = [row_of(record, tables, others) for record in self.records]
        events = event_columns(rows)
        return SourceBatch(events, others, self.problems, self.offset_bytes, self.foreign_lines, self.printed)


_DATED = frozenset({"loss", "window", "gpu_warp", *STALLS})


def row_of(record: Record, tables: Tables, others: list[Record | Warps]) -> Row:
    """The row of a good record in the columns of events. A record that is not an event is added to
    `others`.
    """
    kind = record["type"]
    if kind in OTHERS:
        # The `ts_ns` of others is not checked, and may be anything.
        ts_ns = record.get("ts_ns", UNDATED_NS) if kind in _DATED else UNDATED_NS
        others.append(warps_of(record) if kind == "gpu_warp" else record)
        return ts_ns, SPECIAL, len(others) - 1, 0, 0, None, NONE
    return (
        record["ts_ns"],
        tables.shape_number(record),
        tables.args_number(record.get("args")),
        record.get("dur_ns", 0),
        signed(record.get("launch", record.get("flow")) or 0),
        index_of(record),
        NONE,
    )


class FirstProblems:
    """The first problems of an input since the last `take`, and how many more there are."""

    def __init__(self) -> None:
        self._kept: list[Problem] = []
        self._more = 0

    def add(self, *problems: Problem) -> None:
        """Add problems."""
        room = max(0, _PROBLEMS_MAX - len(self._kept))
        self._kept += problems[:room]
        self._more += len(problems[room:])

    def take(self) -> list[Problem]:
        """Take out the problems that are kept."""
        kept, self._kept = self._kept, []
        return kept

    def rest(self, words: str) -> Iterator[Problem]:
        """A problem that counts the others, with these words."""
        if self._more:
            yield Problem(0, "", f"{self._more} more {agree(self._more, words)}")


def with_problems(problems: list[Problem], batches: Iterable[SourceBatch]) -> Iterator[SourceBatch]:
    """The batches, with these problems in the first one."""
    for batch in batches:
        batch.problems[:0], problems = problems, []
        yield batch
    if problems:
        yield SourceBatch(no_events(), problems=problems)


class LineReader(Protocol):
    """Reads a format line by line, with the state that its next lines depend on."""

    def read(self, number: int, text: bytes, cut: bool, batch: Batch) -> None:
        """Add what is on line `number` to `batch`. A `cut` line has no newline, as the input ended."""

    def at_end(self, batch: Batch) -> None:
        """Add the problems of the whole input to `batch`."""


def recording_of(header: Header, stream: BinaryIO, lines: LineReader, chunk_bytes: int) -> Recording:
    """The recording that `lines` reads in a stream."""
    tables = Tables()
    return Recording(header, _batches(stream, lines, chunk_bytes, tables), tables)


def _batches(stream: BinaryIO, lines: LineReader, chunk_bytes: int, tables: Tables) -> Iterator[SourceBatch]:
    """The batches that `lines` reads in a stream: one for each chunk, and one for the end."""
    offset_bytes = 0
    for first, some, offset_bytes, cut in chunks_of_lines(stream, chunk_bytes):
        batch = Batch(offset_bytes=offset_bytes)
        if first == 1:
            some[0] = some[0].removeprefix(BOM)
        for number, text in enumerate(some, first):
            lines.read(number, text, cut, batch)
        yield batch.in_columns(tables)
    last = Batch(offset_bytes=offset_bytes)
    lines.at_end(last)
    if last.records or last.problems or last.foreign_lines or last.printed:
        yield last.in_columns(tables)
