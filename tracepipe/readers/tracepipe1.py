"""Reads `tracepipe/1`, the event file of `model.py`.

`line_columns`, or the native core where it is loaded, makes columns of lines. Lines that they cannot read,
among them all broken lines, are read here one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, cast

import numpy as np
import orjson

from tracepipe.errors import FormatError, InputError
from tracepipe.event.checks import RecordCheck, first_fault
from tracepipe.event.columns import NONE, SPECIAL, Row, SourceBatch
from tracepipe.event.model import SCHEMA_VERSION, Header, Problem, Record
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Warps
from tracepipe.native import library
from tracepipe.readers.line_columns import FOREIGN, LineColumns, NativeLines, NativeTables
from tracepipe.readers.recording import (
    BOM,
    THREAD_EXIT,
    TOO_DEEP,
    Recording,
    Rejoined,
    chunks_of_text,
    event_of_exit,
    is_too_deep,
    not_json,
    row_of,
    with_problems,
)

# Some thousand lines, so that the cost for each batch is small.
CHUNK_BYTES = 1 << 18
_HEADER_BYTES_MAX = 1 << 20
_NO_HEADER = "Check that the file starts with a tracepipe/1 header."
STACK = "stack"
# This takes the place of a record whose stack is in the tables, as parsed stacks take thirty times their
# text.
_A_STACK: Record = {"type": STACK}
_NEEDED = {"type", "schema", "clock", "clocks"}
"""Fields of a header that are necessary to understand events."""
_NO_ROW: Row = (0, FOREIGN, 0, 0, 0, None, NONE)


class _Parser:
    """Parses text that is whole lines."""

    def __init__(self) -> None:
        core = library()
        self._check = RecordCheck()
        self.tables: Tables
        self._lines: LineColumns | NativeLines
        if core is None:
            self.tables = Tables()
            self._lines = LineColumns(self.tables, self._check)
        else:
            self.tables = tables = NativeTables(core)
            self._lines = NativeLines(core, tables, self._check)

    def parse(self, first: int, text: bytes) -> tuple[SourceBatch, int]:
        """The events of `text`, a problem for each line that has none, and how many lines there are."""
        others: list[Record | Warps] = []
        problems: list[Problem] = []

        def read_one(at: int, line: bytes) -> Row:
            """The row of a line that is read separately."""
            record = self._record(first + at, line, problems)
            if record is None:
                return _NO_ROW
            row = row_of(record, self.tables, others)
            return row if row[1] == SPECIAL else (*row[:-1], record.get("stack", NONE))

        events, places, lines = self._lines.read(text, read_one, others)
        if (ids := events.stack) is not None:  # these are replaced by the numbers of stacks
            places = np.arange(lines) if places is None else places
            events.stack, unknown = self.tables.stacks.numbers(ids, places + first)
            for at in np.flatnonzero(unknown).tolist():
                stated = f"refers to stack {int(ids[at])}, which no line before has"
                problems.append(Problem(first + int(places[at]), "stack", stated, skipped=False))
            problems.sort(key=lambda problem: problem.line)
        return SourceBatch(events, others, problems), lines

    def _record(self, line: int, text: bytes, problems: list[Problem]) -> Record | None:
        """The record of a line; None where it is blank, or bad, with a problem."""
        if not text.strip():
            return None
        try:
            record = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            problems.append(Problem(line, "", not_json(e)))
            return None
        if is_too_deep(text, record):
            problems.append(Problem(line, "", TOO_DEEP))
            return None
        kept = self._check.keep((record,), line, problems)
        if kept and kept[0]["type"] == STACK:
            if self.tables.stacks.add(kept[0], line):
                return _A_STACK
            problems.append(Problem(line, "id", "is that of an earlier stack, which is kept"))
            return None
        if kept and kept[0]["type"] == THREAD_EXIT:
            return event_of_exit(kept[0])
        return kept[0] if kept else None


def _header(stream: BinaryIO, problems: list[Problem]) -> tuple[Header, bytes]:
    """The header, and the bytes that were read after it. Bad fields are left out, with problems."""
    text = stream.read(CHUNK_BYTES)
    while b"\n" not in text and (more := stream.read(CHUNK_BYTES)):
        text += more
        if len(text) > _HEADER_BYTES_MAX:
            break
    line, _, rest = text.removeprefix(BOM).partition(b"\n")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise InputError(f"the header is not JSON: {e.msg}", _NO_HEADER, line=1) from e
    if is_too_deep(line, record):
        raise InputError(TOO_DEEP, _NO_HEADER, line=1)
    if isinstance(record, dict) and record.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise FormatError(
            f"the file is {record['schema']!r}, but this program reads {SCHEMA_VERSION}",
            "Use the version of tracepipe that wrote it, or a newer one.",
        )
    if isinstance(record, dict) and record.get("type") == "header":
        # Bad fields that only describe the capture are left out. Those needed to read events must be valid.
        while fault := first_fault(record):
            field = re.split(r"[.[]", fault[0])[0]
            if field in _NEEDED or field not in record:
                break
            del record[field]
            problems.append(Problem(1, *fault))
    if fault := first_fault(record):
        raise InputError(fault[1], _NO_HEADER, line=1, field=fault[0])
    if record["type"] != "header":
        raise InputError("is not a header", _NO_HEADER, line=1, field="type")
    return Header.from_record(record), rest


def _batches(stream: BinaryIO, parser: _Parser) -> Iterator[SourceBatch]:
    first = 2
    for text, offset_bytes, cut in chunks_of_text(stream, CHUNK_BYTES):
        batch, lines = parser.parse(first, text)
        batch.offset_bytes, batch.text_bytes = offset_bytes, len(text)
        if cut and batch.problems and batch.problems[0].message.startswith("is not JSON"):
            # Half a line at the very end was left by an interrupted writer.
            batch.problems[0] = Problem(first, "", "was cut off in the middle of the line")
        first += lines
        yield batch


def read(stream: BinaryIO) -> Recording:
    """Header and batches of a `tracepipe/1` stream. Raises InputError or FormatError on a bad header."""
    problems: list[Problem] = []
    header, rest = _header(stream, problems)
    parser = _Parser()
    batches = _batches(cast(BinaryIO, Rejoined(rest, stream)), parser)
    return Recording(header, with_problems(problems, batches), parser.tables)


def sniff(head: bytes) -> bool:
    """Whether the first line is a header, whatever its version."""
    line = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    return line.startswith(b"{") and b'"header"' in line and b'"schema"' in line
