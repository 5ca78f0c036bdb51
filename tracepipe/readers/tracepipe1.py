"""Reads `tracepipe/1`, the event file of `model.py`.

    {"ts_ns":1795,"type":"userspace","name":"cuInit","phase":"B","pid":7,"tid":7,"args":{"flags":0}}
             time └────────────── the same on many lines, but for duration and launch ───────────┘

Columns are made of lines: in Python, which is the reference, and by the native core (`lines.c`,
`warp_lines.c`). What follows the time on a line is parsed once. When the same text comes again, it is looked
up. All other lines, among them all broken ones, are read one by one.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final, cast

import numpy as np
import orjson

from tracepipe.errors import FormatError, InputError
from tracepipe.event.checks import OF_RANGES, first_fault, long_texts, ranges_fault
from tracepipe.event.columns import (
    NO_INDEX,
    NONE,
    SPECIAL,
    Bools,
    EventColumns,
    Index,
    Int64s,
    Row,
    SourceBatch,
    event_columns,
    no_indices,
    signed,
)
from tracepipe.event.model import (
    COLUMN_LIMIT,
    NAME_BYTES_MAX,
    OTHERS,
    SCHEMA_VERSION,
    Header,
    Problem,
    Record,
    WarpBatch,
    cut_text,
)
from tracepipe.event.schema import fields_of
from tracepipe.event.shape import index_of
from tracepipe.event.tables import NativeTables, Tables
from tracepipe.event.warps import (
    EACH_EXIT,
    EACH_WARP,
    HAS,
    MISSING,
    WARP_COLUMNS,
    Others,
    WarpGroup,
    Warps,
    are_small,
    joined_optional,
    places_of,
)
from tracepipe.native import checked, library, owned, text_of
from tracepipe.native.signatures import Columns, WarpLines
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

FOREIGN: Final = NONE
"""The shape of a line that is read separately, or that has no event."""
Rest = tuple[int, int, int, int, Index | None, int]
"""A row without its time."""
ReadOne = Callable[[int, bytes], Row]
"""Reads one line separately, given its number in the text, from 0 on, and the line."""
# The time of each line, where it comes first as in our own captures, and the rest. A number with this many
# digits is within the limit of times, and 01 is not a number in JSON.
_LINES = re.compile(rb'^(?:\{"ts_ns":(0|[1-9][0-9]{0,17}),)?(.*)$', re.MULTILINE)
_LINES_MAX = 1 << 12
_LINE_BYTES_MAX = 512


class LineColumns:
    """Reads text that is whole lines: those that start with their time and repeat others."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._rounds = 0
        self._rests: list[Rest] = []
        self._known: dict[bytes, int] = {}
        """The text that follows the time on a line → its place in `_rests`."""

    def read(
        self, text: bytes, read_one: ReadOne, others: Others[Warps]
    ) -> tuple[EventColumns, Int64s | None, int]:
        """Read the lines of `text`. Lines that are not of its grammar are read by `read_one`. Return the rows
        in order, with ids of stacks; the numbers of their lines, from 0, None for all lines; and how many
        lines there are. Records that are not events are added to `others`, also by `read_one`.
        """
        if self._rounds != self._tables.rounds or len(self._rests) > _LINES_MAX:
            self._known.clear()
            self._rests.clear()
            self._rounds = self._tables.rounds
        found = _LINES.findall(text)
        times = [int(time) if time else NONE for time, _ in found]
        places: list[Any] = [self._known.get(rest) if time else None for time, rest in found]
        for at in [at for at, place in enumerate(places) if place is None]:
            time, rest = found[at]
            # The shape of a line without a time must not get a number.
            place = self._place(rest) if time else None
            if place is None:
                times[at], *odd = read_one(at, b'{"ts_ns":%b,%b' % (time, rest) if time else rest)
                place = len(self._rests)
                self._rests.append(cast("Rest", tuple(odd)))
            places[at] = place
        used, of = np.unique(np.array(places, np.int64), return_inverse=True)
        events = event_columns([(0, *self._rests[place]) for place in used.tolist()]).take(of)
        events.ts_ns = np.array(times, np.int64)
        kept = np.flatnonzero(events.shape != FOREIGN)
        if len(kept) == len(places):
            return events, None, len(places)
        return events.take(kept), kept, len(places)

    def _place(self, rest: bytes) -> int | None:
        """The place of the text that follows the time on a line, None where it is not of this grammar."""
        if (known := self._known.get(rest)) is not None:
            return known
        text = b"{" + rest
        try:
            record = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        # A second ts_ns in the line would replace the first.
        if is_too_deep(text, record) or "ts_ns" in record or "phase" not in record:
            return None
        record["ts_ns"] = 0
        if first_fault(record) or record["type"] in OTHERS or long_texts(record):
            return None
        shape, args = self._tables.shape_number(record), self._tables.args_number(record.get("args"))
        launch = signed(record.get("launch", record.get("flow", 0)))
        stack = record.get("stack", NONE)
        place = len(self._rests)
        self._rests.append((shape, args, record.get("dur_ns", 0), launch, index_of(record), stack))
        if len(rest) <= _LINE_BYTES_MAX:
            self._known[rest] = place
        return place


# How many lines are read at a time, and the types of the columns of `EventColumns`.
_ROOM = 1 << 14
_KINDS = (np.int64, np.int32, np.int32, np.int64, np.int64, np.int64)
_WARPS = -3


class NativeLines:
    """Reads lines of the native grammar."""

    def __init__(self, core: ctypes.CDLL, tables: NativeTables) -> None:
        self._core, self._tables = core, tables
        self._warps = NativeWarpLines(core)
        self._columns = [np.empty(_ROOM, kind) for kind in _KINDS]
        self._index = no_indices(_ROOM)
        self._view = Columns(*(column.ctypes.data for column in (*self._columns, self._index)))
        self._rounds = 0
        self._bad: set[int] = set()
        """Numbers of shapes that are not of an event."""

    def read(
        self, text: bytes, read_one: ReadOne, others: Others[Warps]
    ) -> tuple[EventColumns, Int64s | None, int]:
        """Read the lines of `text`, as `LineColumns` does."""
        before, done, indices = len(self._tables.shapes), ctypes.c_int64(0), ctypes.c_int64(0)
        parts, index = [], []
        while done.value <= len(text):
            out = ctypes.byref(self._view), ctypes.byref(indices)
            refs = self._tables.reader, text, len(text), ctypes.byref(done), *out, _ROOM
            count = checked(self._core.tp_read_lines(*refs))
            parts.append([column[:count].copy() for column in self._columns])
            index.append((self._index[:count].copy() if indices.value else None, count))
            if indices.value:
                self._index[:count] = NONE
        columns: list[Any] = parts[0]
        if len(parts) > 1:
            columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        *columns, stack = columns
        events = EventColumns(*columns, index=joined_optional(index, NONE), stack=stack)
        self._put_warps(text, events, others)
        self._put_others(text, events, before, read_one)
        if not (stack != NONE).any():
            events.stack = None
        kept = np.flatnonzero(events.shape != FOREIGN)
        if len(kept) == len(events):
            return events, None, len(events)
        return events.take(kept), kept, len(events)

    def _put_warps(self, text: bytes, events: EventColumns, others: Others[Warps]) -> None:
        """Set the rows of batches of warps."""
        places = np.flatnonzero(events.shape == _WARPS)
        if not len(places):
            return
        for lines in self._warps.parts(events.dur_ns[places]):
            some = places[lines]
            for lines_read, group in self._warps.read(text, events.ts_ns[some], events.dur_ns[some]):
                rows = some[lines_read]
                events.ts_ns[rows], events.shape[rows], events.dur_ns[rows] = group.base_ns, SPECIAL, 0
                events.args[rows] = others.add(group)

    def _put_others(self, text: bytes, events: EventColumns, before: int, read_one: ReadOne) -> None:
        """Set the rows of lines that the core could not read."""
        shape = events.shape
        if self._rounds != self._tables.shape_rounds:
            self._rounds = self._tables.shape_rounds
            self._bad = {at for at, one in enumerate(self._tables.shapes) if one is None}
        if self._tables.parse_shapes():
            self._bad.update(
                at for at in range(before, len(self._tables.shapes)) if self._tables.shapes[at] is None
            )
        foreign = (shape < 0) & (shape != SPECIAL)
        lines: list[bytes] | None = None
        if self._bad:
            bad = np.isin(shape, list(self._bad))
            if bad.any():
                lines = text.split(b"\n")
                foreign |= bad
        for at in np.flatnonzero(foreign).tolist():
            if lines is None:
                start = int(events.ts_ns[at])
                line = text[start : start + int(events.dur_ns[at])]
            else:
                line = lines[at]
            *row, index, stack = read_one(at, line)
            events.ts_ns[at], shape[at], events.args[at], events.dur_ns[at], events.launch[at] = row
            if events.stack is not None:
                events.stack[at] = stack
            if index is not None and events.index is None:
                events.index = no_indices(len(events))
            if events.index is not None:
                events.index[at] = index or NO_INDEX


_PLACES: Final = {name: at for at, name in enumerate(WARP_COLUMNS)}
_LIMITS: Final = {
    name: doc.maximum if doc.maximum is not None else COLUMN_LIMIT
    for name, (_, doc) in fields_of(WarpBatch).items()
    if name in WARP_COLUMNS
}
_NOT_OF_LAUNCH: Final = {"ts_ns", *WARP_COLUMNS}
_RANGES: Final = sum(HAS[name] for name in OF_RANGES & HAS.keys())
# Columns are made of lines with this much text together. A longer line is read alone.
_TEXT_BYTES: Final = 1 << 18
# How many texts of launches are remembered, and the most bytes of one.
_KNOWN_MAX, _KNOWN_BYTES_MAX = 1 << 10, 1 << 11


class NativeWarpLines:
    """Reads such lines of the native grammar."""

    def __init__(self, core: ctypes.CDLL) -> None:
        self._core = core
        self._batch = owned(self, core.tp_batch_new(), core.tp_batch_free)
        self._known: dict[bytes, tuple[Record, list[str]] | None] = {}
        """By the text of a launch: its record and the names of its ranges; None where the line is bad."""

    @staticmethod
    def parts(size: Int64s) -> list[Any]:
        """Split lines of these sizes into parts that are read together."""
        end = np.cumsum(size)
        part = end // _TEXT_BYTES + (end - size) // _TEXT_BYTES
        return np.split(np.arange(len(size)), np.flatnonzero(np.diff(part)) + 1)

    def read(self, text: bytes, at: Int64s, size: Int64s) -> Iterator[tuple[Int64s, WarpGroup[Warps]]]:
        """The batches of lines of `text`, by their places and sizes, each group with the places of its lines.
        Lines that are bad, or not of the native grammar, are in none.
        """
        lines = len(at)
        is_read, counts = np.empty(lines, np.bool_), np.empty((lines, len(WARP_COLUMNS)), np.int64)
        ts_ns, launch, end = (np.empty(lines, np.int64) for _ in range(3))
        out = WarpLines(*(column.ctypes.data for column in (is_read, ts_ns, launch, end, counts)))
        columns = at.ctypes.data, size.ctypes.data, ctypes.byref(out)
        self._core.tp_batch_read(self._batch, text, lines, *columns)
        there = text_of(self._core.tp_batch_rest, self._batch)
        values = []
        for place in range(len(WARP_COLUMNS)):
            column = ctypes.c_void_p()
            count = self._core.tp_batch_column(self._batch, place, ctypes.byref(column))
            memory = (ctypes.c_int64 * count).from_address(column.value or 0) if count else ()
            values.append(np.array(memory, np.int64))
        counts[~is_read] = -1
        last = np.cumsum(np.maximum(counts, 0), axis=0)
        good, exits = _are_good(values, counts, last)
        good &= is_read
        known: list[tuple[Record, list[str]]] = []
        numbers: dict[bytes, int] = {}
        kind, start = np.full(lines, NONE, np.int64), 0
        for line, (is_good, stop) in enumerate(zip(good.tolist(), end.tolist(), strict=True)):
            of, start = there[start:stop], stop
            if is_good and (number := numbers.get(of)) is not None:
                kind[line] = number
            elif is_good and (launched := self._launched(of)) is not None:
                kind[line] = numbers[of] = len(known)
                known.append(launched)
        records, sizes = [record for record, _ in known], counts[:, _PLACES["warp"]]
        has = (counts >= 0) @ np.array([HAS[name] for name in WARP_COLUMNS])
        has_ranges = has & _RANGES != 0
        has_ranges |= np.isin(kind, [number for number, (_, ranges) in enumerate(known) if ranges])
        kept = np.flatnonzero(kind >= 0)
        alone = (has_ranges | ~are_small(sizes))[kept]
        for some in np.split(kept, np.flatnonzero(alone[1:] | alone[:-1]) + 1):
            if not len(some):
                continue
            given: dict[str, Any] = {}
            for name, place in _PLACES.items():
                of_lines = counts[some, place]
                count, there_is = np.maximum(of_lines, 0), of_lines >= 0
                if not there_is.any():
                    continue
                given[name] = values[place][places_of(last[some, place] - count, count)]
                if not there_is.all():
                    expected = (exits if name in EACH_EXIT else sizes)[some]
                    whole = np.full(int(expected.sum()), MISSING[name], np.int64)
                    whole[np.repeat(there_is, expected)] = given[name]
                    given[name] = whole
            warps = Warps(launched={}, ts_ns=int(ts_ns[some[0]]), **given)
            if has_ranges[some[0]]:
                warps.ranges = list(known[int(kind[some[0]])][1])
                if ranges_fault(warps):
                    continue
            ids = [of if of >= 0 else None for of in launch[some].tolist()]
            more = ts_ns[some], sizes[some], exits[some], has[some], np.zeros(len(some), np.int64)
            yield some, WarpGroup(warps, records, kind[some], ids, *more)

    def _launched(self, text: bytes) -> tuple[Record, list[str]] | None:
        """The record of a launch, without its time and with 0 for its id, and the names of its ranges; None
        where the line is bad.
        """
        if text in self._known:
            return self._known[text]
        record: Record = orjson.loads(text)
        known = None
        if record.get("type") == "gpu_warp" and not first_fault(record) and not long_texts(record):
            ranges = record.pop("ranges", [])
            known = {name: value for name, value in record.items() if name not in _NOT_OF_LAUNCH}, ranges
        if len(text) <= _KNOWN_BYTES_MAX:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[text] = known
        return known


def _are_good(values: list[Int64s], counts: Int64s, last: Int64s) -> tuple[Bools, Int64s]:
    """Whether all numbers of each line are within their limits, and all its columns, except those of ranges,
    have the same number of values; and how many exits it has. `last` is where the values of each line end.
    """
    good = np.ones(len(last), np.bool_)
    for name, at in _PLACES.items():
        if len(values[at]) and int(values[at].max()) > _LIMITS[name]:
            beyond = np.flatnonzero(values[at] > _LIMITS[name])
            good[np.searchsorted(last[:, at], beyond, "right")] = False
    size, exits, at = counts[:, _PLACES["warp"]], counts[:, _PLACES["warp"]], _PLACES["exit_count"]
    if len(values[at]):
        total = np.append(0, np.cumsum(values[at]))
        of_warps = total[last[:, at]] - total[last[:, at] - np.maximum(counts[:, at], 0)]
        exits = np.where(counts[:, at] < 0, size, of_warps)
    for names, want in ((EACH_WARP, size), (EACH_EXIT, exits)):
        for name in names:
            count = counts[:, _PLACES[name]]
            good &= (count < 0) | (count == want)
    return good, exits


# Some thousand lines, so that the cost for each batch is small.
CHUNK_BYTES = 1 << 18
_HEADER_BYTES_MAX = 1 << 20
_NO_HEADER = "Check that the file starts with a tracepipe/1 header."
_SECOND_HEADER = "is a second header: what follows is read with the first header"
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
        self.tables: Tables
        self._lines: LineColumns | NativeLines
        if core is None:
            self.tables = Tables()
            self._lines = LineColumns(self.tables)
        else:
            self.tables = tables = NativeTables(core)
            self._lines = NativeLines(core, tables)

    def parse(self, first: int, text: bytes) -> tuple[SourceBatch, int]:
        """The events of `text`, a problem for each line that has none, and how many lines there are."""
        others = Others[Warps]()
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
        if fault := first_fault(record):
            problems.append(Problem(line, *fault))
            return None
        if record["type"] == "header":
            problems.append(Problem(line, "type", _SECOND_HEADER, skipped=False))
            return None
        for field in long_texts(record):
            record[field] = cut_text(record[field])
            words = f"is longer than {NAME_BYTES_MAX} bytes and was cut"
            problems.append(Problem(line, field, words, skipped=False))
        if record["type"] == STACK:
            if self.tables.stacks.add(record, line):
                return _A_STACK
            problems.append(Problem(line, "id", "is that of an earlier stack, which is kept"))
            return None
        return event_of_exit(record) if record["type"] == THREAD_EXIT else cast("Record", record)


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


def read(stream: BinaryIO) -> Recording:
    """Header and batches of a `tracepipe/1` stream. Raises InputError or FormatError on a bad header."""
    problems: list[Problem] = []
    header, rest = _header(stream, problems)
    parser = _Parser()

    def batches() -> Iterator[SourceBatch]:
        first = 2
        for text, cut in chunks_of_text(cast(BinaryIO, Rejoined(rest, stream)), CHUNK_BYTES):
            batch, lines = parser.parse(first, text)
            batch.text_bytes = len(text)
            if cut and batch.problems and batch.problems[0].message.startswith("is not JSON"):
                # Half a line at the very end was left by an interrupted writer.
                batch.problems[0] = Problem(first, "", "was cut off in the middle of the line")
            first += lines
            yield batch

    return Recording(header, with_problems(problems, batches()), parser.tables)


def sniff(head: bytes) -> bool:
    """Whether the first line is a header, whatever its version."""
    line = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    return line.startswith(b"{") and b'"header"' in line and b'"schema"' in line
