"""The interface between input formats and the rest: what a reader is and returns, and numbered lines of byte
streams for those that read text. Hostile lines may have any length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, cast

from tracepipe.event.checks import shown
from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    UNDATED_NS,
    EventColumns,
    Row,
    SourceBatch,
    event_columns,
    joined,
    no_events,
    signed,
)
from tracepipe.event.model import (
    OTHERS,
    STALLS,
    Header,
    HostInstant,
    Problem,
    Record,
    ThreadExit,
)
from tracepipe.event.shape import index_of
from tracepipe.event.tables import Tables, new_tables
from tracepipe.event.warps import Others, Warps, warps_of
from tracepipe.units import agree, counted

CHUNK_BYTES = 1 << 20
# An event has some hundred bytes. A much longer line is not an event, and parsing it would take memory.
LINE_LIMIT_BYTES = 1 << 20
# A launch of a million warps may be one line, which has its type near its start.
WARPS_LIMIT_BYTES = 64 << 20
_WARPS, _HEAD_BYTES = b'"gpu_warp"', 256
# Editors on other systems put it before the first line.
BOM = b"\xef\xbb\xbf"
# orjson reads 1024 levels and writes 254, with the record's own level. What is read must be writable.
DEPTH_LIMIT = 200
TOO_DEEP = f"nests deeper than {DEPTH_LIMIT} levels"
# Each level needs an opening and a closing bracket: shorter lines need not be checked.
SHALLOW_BYTES = 2 * DEPTH_LIMIT


class Rejoined:
    """A stream of which `head` was read already, with these bytes before the rest."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int) -> bytes:
        if self._head:
            out, self._head = self._head[:size], self._head[size:]
            return out
        return self._stream.read(size)


def not_json(error: json.JSONDecodeError) -> str:
    """The message for a line that orjson rejected. Raises MemoryError where that was the reason."""
    if error.msg.startswith("Not enough memory"):
        raise MemoryError
    return f"is not JSON: {error.msg} at column {error.colno}"


def is_too_deep(text: bytes, value: object) -> bool:
    """Whether `value`, parsed from `text`, nests deeper than DEPTH_LIMIT."""
    if len(text) <= SHALLOW_BYTES or text.count(b"[") + text.count(b"{") <= DEPTH_LIMIT:
        return False
    level: list[Any] = [value]
    for _ in range(DEPTH_LIMIT):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def chunks_of_text(stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[bytes, bool]]:
    """Yield (whole lines, cut); the last newline is left out.

    `cut` is whether the last line ended with the input, without a newline. A line over the limit is given as
    its first bytes, so that it fails to parse and counts as one line.
    """
    pieces: list[bytes] = []  # of the line that has not ended yet, which are joined once
    held_bytes, skipping = 0, False
    while chunk := stream.read(chunk_bytes):
        end = chunk.rfind(b"\n")
        if end >= 0:
            start = 0
            if skipping:
                start = chunk.find(b"\n")
                pieces = [pieces[0]]
            view = memoryview(chunk)
            yield b"".join([*pieces, view[start:end]]), False
            pieces, held_bytes, skipping = [chunk[end + 1 :]], len(chunk) - end - 1, False
        elif not skipping:
            pieces.append(chunk)
            held_bytes += len(chunk)
        if held_bytes > LINE_LIMIT_BYTES and not skipping:
            head = b"".join(piece[:_HEAD_BYTES] for piece in pieces[:2])[:_HEAD_BYTES]
            if held_bytes > WARPS_LIMIT_BYTES or _WARPS not in head:
                pieces, skipping = [head], True
    if rest := b"".join(pieces):
        yield rest, True


THREAD_EXIT: Final = "gpu_thread_exit"
"""The type of a line that is the exit of a thread. It is read as a `gpu_thread`."""
UNNAMED_KERNEL: Final = "kernel"
"""The name of a kernel whose name is not in the input."""

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
    is_undeclared: bool = False
    """Whether there may be times on a clock that the header does not name."""
    states_itself: bool = False
    """Whether its events state where it comes from, as in a trace that tracepipe wrote."""


# Fewer lines are read one by one.
_FEW_LINES: Final = 32
_DATED = frozenset({"loss", "window", "gpu_warp", *STALLS})


def row_of(record: Record, tables: Tables, others: Others[Warps]) -> Row:
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


def event_of_exit(record: Record) -> Record:
    """The `gpu_thread` for a good record of a thread's exit."""
    known = {name: value for name, value in record.items() if name in ThreadExit.__annotations__}
    args = {**record.get("args", {}), "event": "exit"}
    return {"name": UNNAMED_KERNEL, **known, "type": "gpu_thread", "phase": "I", "args": args}


class FirstProblems:
    """The first problems of an input since the last `pop`, and how many more there are."""

    def __init__(self) -> None:
        self._first: list[Problem] = []
        self._more = 0

    def add(self, *problems: Problem) -> None:
        """Add problems."""
        free = max(0, _PROBLEMS_MAX - len(self._first))
        self._first += problems[:free]
        self._more += len(problems[free:])

    def pop(self) -> list[Problem]:
        """Remove the first problems and return them."""
        first, self._first = self._first, []
        return first

    def rest(self, words: str) -> Iterator[Problem]:
        """A problem that counts the others, with these words."""
        if self._more:
            yield Problem(0, "", f"{self._more} more {agree(self._more, words)}")


def counted_problems(counts: Mapping[str, int]) -> Iterator[Problem]:
    """The problems of a whole input that are only counted, by their words. What they are about is read."""
    for words, count in counts.items():
        if count:
            yield Problem(0, "", counted(count, words), skipped=False)


def with_problems(problems: list[Problem], batches: Iterable[SourceBatch]) -> Iterator[SourceBatch]:
    """The batches, with these problems in the first one."""
    for batch in batches:
        batch.problems[:0], problems = problems, []
        yield batch
    if problems:
        yield SourceBatch(no_events(), problems=problems)


class Unusable(Exception):
    """A line or an event cannot be used, because of a field and what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


class LineReader:
    """Reads a format line by line, with the state that its next lines depend on."""

    chunk_bytes = CHUNK_BYTES
    no_line = ""
    """The problem of an input that has no line of the format."""
    has_usual = False
    """Whether `usual` reads lines."""

    def __init__(self) -> None:
        self.number = 0
        """The line that is read."""
        self.records: list[Record] = []
        """The good records of the batch, in the order of the file."""
        self.batch = SourceBatch(no_events())
        """The batch, which gets its events at its end."""
        self.tables = new_tables()
        self.has_lines = False
        """Whether a line of the format was read."""
        self._said: set[str] = set()
        self._parts: list[EventColumns] = []
        """The events of the batch before `records`."""

    def usual(self, first: int, lines: list[bytes]) -> EventColumns | None:
        """The events of lines, the first of which has this number; None where not all have a usual form."""
        raise NotImplementedError

    def read_line(self, text: bytes, is_cut: bool) -> None:
        """Read a line. One that `is_cut` has no newline, as the input ended. Raises Unusable."""
        raise NotImplementedError

    def read_text(self, first: int, text: bytes, is_cut: bool) -> int:
        """Read whole lines of the input, the first of which has this number. Return how many they are."""
        lines = text.split(b"\n")
        at_once = len(lines) - is_cut if self.has_usual else 0
        self._read_at_once(first, lines[:at_once])
        self.read_numbered(enumerate(lines[at_once:], first + at_once), is_cut=is_cut)
        return len(lines)

    def _read_at_once(self, first: int, lines: list[bytes]) -> None:
        """Read lines: as columns where all are usual, else in halves, and few one by one."""
        half = len(lines) // 2
        if lines and (events := self.usual(first, lines)) is not None:
            self.has_lines = True
            self._parts += [self._columns_of_records(), events]
            self.records = []
        elif half > _FEW_LINES:
            self._read_at_once(first, lines[:half])
            self._read_at_once(first + half, lines[half:])
        else:
            self.read_numbered(enumerate(lines, first), is_cut=False)

    def read_numbered(self, lines: Iterable[tuple[int, bytes]], *, is_cut: bool) -> None:
        """Read lines with their numbers. Those that cannot be used become problems."""
        for self.number, text in lines:
            try:
                self.read_line(text, is_cut)
            except Unusable as e:
                self.say(e.field, e.message)

    def read_end(self) -> None:
        """Add the records and the problems of the whole input."""

    def say(self, field: str, message: str, *, skipped: bool = True) -> None:
        """Add a problem of the line."""
        self.batch.problems.append(Problem(self.number, field, message, skipped))

    def say_once(self, field: str, message: str) -> None:
        """Add a problem where it comes first. The line is read nevertheless."""
        if message not in self._said:
            self._said.add(message)
            self.say(field, message, skipped=False)

    def recording(
        self,
        clock: str,
        stream: BinaryIO,
        head: bytes = b"",
        *,
        engine: str = "",
        start: HostInstant | None = None,
    ) -> Recording:
        """The recording in a stream, of which `head` was read already."""
        header = Header(clock=clock, clocks=[clock], engine=engine, start=start or {})
        return Recording(header, self.batches(cast(BinaryIO, Rejoined(head, stream))), self.tables)

    def batches(self, stream: BinaryIO) -> Iterator[SourceBatch]:
        """A batch for each chunk of lines, and one for the end."""
        first = 1
        for text, is_cut in chunks_of_text(stream, self.chunk_bytes):
            self.records, self.batch = [], SourceBatch(no_events())
            first += self.read_text(first, text.removeprefix(BOM) if first == 1 else text, is_cut)
            self.batch.events = self.columns()
            yield self.batch
        self.records, self.batch = [], SourceBatch(no_events())
        self.read_end()
        if not self.has_lines:
            self.batch.problems.append(Problem(0, "", self.no_line, skipped=False))
        if self.records or self.batch.problems or self.batch.foreign_lines or self.batch.printed:
            self.batch.events = self.columns()
            yield self.batch

    def columns(self) -> EventColumns:
        """The events of the batch."""
        last = self._columns_of_records()
        if not self._parts:
            return last
        parts, self._parts = [*self._parts, last], []
        return joined([part for part in parts if len(part)])

    def _columns_of_records(self) -> EventColumns:
        return event_columns([row_of(record, self.tables, self.batch.others) for record in self.records])


_TEXTS_SHOWN: Final = 3


class Printed:
    """Counts text between events that a script or the traced program printed, and reports it once."""

    def __init__(self) -> None:
        self._first = self._count = 0
        self._texts: dict[bytes, int] = {}

    def add(self, number: int, text: bytes) -> None:
        """Count line `number`."""
        self._first = self._first or number
        self._count += 1
        if text in self._texts or len(self._texts) < _TEXTS_SHOWN:
            self._texts[text] = self._texts.get(text, 0) + 1

    def batches(self) -> Iterator[SourceBatch]:
        """A batch with the problem that counts the text; none where there is none."""
        if self._count:
            times = {text: f" ({count} times)" if count > 1 else "" for text, count in self._texts.items()}
            named = ", ".join(shown(text) + several for text, several in times.items())
            more = ", …" if sum(self._texts.values()) < self._count else ""
            lines = counted(self._count, "line|lines is|are")
            message = f"{lines} text that the script or the traced program printed, not events: {named}{more}"
            yield SourceBatch(no_events(), problems=[Problem(self._first, "", message, skipped=False)])
