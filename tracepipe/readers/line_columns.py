"""Makes columns of lines of `tracepipe/1`: in Python, which is the reference, and by the native core
(`lines.c`, `warp_lines.c`).

    {"ts_ns":1795,"type":"userspace","name":"cuInit","phase":"B","pid":7,"tid":7,"args":{"flags":0}}
             time └────────────── the same on many lines, but for duration and launch ───────────┘

What follows the time on a line is parsed once. When the same text comes again, it is looked up.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import numpy as np
import orjson

from tracepipe.event.checks import RecordCheck, first_fault, long_texts
from tracepipe.event.columns import (
    NO_INDEX,
    NONE,
    SPECIAL,
    Bools,
    EventColumns,
    Index,
    Int32s,
    Int64s,
    Row,
    Texts,
    event_columns,
    joined_optional,
    no_indices,
    signed,
)
from tracepipe.event.model import COLUMN_LIMIT, TIME_LIMIT_NS, Record, WarpBatch
from tracepipe.event.schema import fields_of
from tracepipe.event.shape import Shape, index_of, shape_of
from tracepipe.event.tables import Tables
from tracepipe.event.warps import EACH_EXIT, EACH_RANGE, EACH_WARP, WARP_COLUMNS, Warps, ranges_agree
from tracepipe.native import library
from tracepipe.native.signatures import Columns, WarpLines
from tracepipe.readers.recording import OTHERS, is_too_deep

FOREIGN: Final = NONE
"""The shape of a line that is read separately, or that has no event."""
Rest = tuple[int, int, int, int, Index | None, int]
"""A row without its time."""
ReadOne = Callable[[int, bytes], Row]
"""Reads one line separately, given its number in the text, from 0 on, and the line."""
# Our own captures put the time first.
_TIME_FIRST = b'{"ts_ns":'
_ZERO, _NEWLINE = ord("0"), ord("\n")
# A number with this many digits is within the limit of times.
_DIGITS_MAX = len(str(TIME_LIMIT_NS)) - 1
_LINES_MAX = 1 << 12
_LINE_BYTES_MAX = 512


class LineColumns:
    """Reads text that is whole lines: those that start with their time and repeat others."""

    def __init__(self, tables: Tables, check: RecordCheck) -> None:
        self._tables, self._check = tables, check
        self._rounds = 0
        self._rests: list[Rest] = []
        self._known: dict[bytes, int] = {}
        """The text that follows the time on a line → its place in `_rests`."""

    def read(
        self, text: bytes, read_one: ReadOne, others: list[Record | Warps]
    ) -> tuple[EventColumns, Int64s | None, int]:
        """Read the lines of `text`. Lines that are not of its grammar are read by `read_one`. Return the rows
        in order, with ids of stacks; the numbers of their lines, from 0, None for all lines; and how many
        lines there are. Records that are not events are added to `others`, also by `read_one`.
        """
        if self._rounds != self._tables.rounds or len(self._rests) > _LINES_MAX:
            self._known.clear()
            self._rests.clear()
            self._rounds = self._tables.rounds
        starts, ends, times, cut = _times_of(text)
        rests = [text[start:end] for start, end in zip((starts + cut).tolist(), ends.tolist(), strict=True)]
        places = list(map(self._known.get, rests))
        odd = np.flatnonzero(times == NONE).tolist()
        for line in odd:
            places[line] = None
        for line in [line for line, place in enumerate(places) if place is None]:
            whole = text[starts[line] : ends[line]]
            if times[line] == NONE:
                head, _, rests[line] = whole.partition(b",")
                times[line] = _time_of(head)
            # The shape of a line without a time must not get a number.
            place = None if times[line] == NONE else self._place(rests[line])
            if place is None:
                times[line], *rest = read_one(line, whole)
                place = len(self._rests)
                self._rests.append(cast("Rest", tuple(rest)))
            places[line] = place
        used, at = np.unique(np.array(places, np.int64), return_inverse=True)
        events = event_columns([(0, *self._rests[place]) for place in used.tolist()]).take(at)
        events.ts_ns = times
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
        if self._check.fault(record) or record["type"] in OTHERS or long_texts(record):
            return None
        shape, args = self._tables.shape_number(record), self._tables.args_number(record.get("args"))
        launch = signed(record.get("launch", record.get("flow", 0)))
        stack = record.get("stack", NONE)
        place = len(self._rests)
        self._rests.append((shape, args, record.get("dur_ns", 0), launch, index_of(record), stack))
        if len(rest) <= _LINE_BYTES_MAX:
            self._known[rest] = place
        return place


def _times_of(text: bytes) -> tuple[Int64s, Int64s, Int64s, int]:
    """The starts and ends of lines, their times, and the size of what precedes the rest of a line, bytes.

    Times have the same number of digits for a long time, so all are read in one pass. A line where that is
    not so gets the time NONE.
    """
    ends = np.append(np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE), len(text))
    starts = np.append(0, ends[:-1] + 1)
    first = text.find(_TIME_FIRST)
    cut = text.find(b",", first) + 1 - first
    if first < 0 or not len(_TIME_FIRST) + 1 < cut <= len(_TIME_FIRST) + 1 + _DIGITS_MAX:
        return starts, ends, np.full(len(starts), NONE, np.int64), 0
    padded = np.frombuffer(text + bytes(cut), np.uint8)
    heads = np.lib.stride_tricks.sliding_window_view(padded, cut)[starts]
    digits = heads[:, len(_TIME_FIRST) : -1] - _ZERO
    are_times = (heads[:, : len(_TIME_FIRST)] == np.frombuffer(_TIME_FIRST, np.uint8)).all(axis=1)
    are_times &= (digits <= 9).all(axis=1) & (heads[:, -1] == ord(","))
    if digits.shape[1] > 1:
        are_times &= digits[:, 0] > 0  # 01 is not a number in JSON
    times = digits @ 10 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    return starts, ends, np.where(are_times, times, NONE), cut


def _time_of(head: bytes) -> int:
    """The time of a line that starts with this, up to its first comma."""
    digits = head.removeprefix(_TIME_FIRST)
    # Some numbers of Python are invalid in JSON: `1_0`, `+1`, `01`.
    if digits == head or not digits.isdigit() or (digits[0] == _ZERO and digits != b"0"):
        return NONE
    return ts_ns if len(digits) <= 19 and (ts_ns := int(digits)) <= TIME_LIMIT_NS else NONE


_SHAPES, _ARGS = 0, 1
# How many lines are read at a time, and the types of the columns of `EventColumns`.
_ROOM = 1 << 14
_KINDS = (np.int64, np.int32, np.int32, np.int64, np.int64, np.int64)
_WARPS = -3


class NativeTables(Tables):
    """Tables whose texts the core keeps. A shape is parsed when a line has it for the first time."""

    def __init__(self, core: ctypes.CDLL) -> None:
        super().__init__()
        self._core = core
        self.reader = core.tp_reader_new(int.from_bytes(os.urandom(8), "little"))
        if not self.reader:
            raise MemoryError
        weakref.finalize(self, core.tp_reader_free, self.reader)

    def _number(self, table: int, text: bytes) -> int:
        number: int = self._core.tp_reader_number(self.reader, table, text, len(text))
        if number < 0:
            raise MemoryError
        return number

    def _text(self, table: int, number: int) -> bytes:
        text = ctypes.c_void_p()
        size = self._core.tp_reader_text(self.reader, table, number, ctypes.byref(text))
        if size < 0:
            raise IndexError(number)
        return ctypes.string_at(text, size)

    def _new_shape(self, shape: Shape) -> int:
        # No line has such a text.
        number = self._number(_SHAPES, repr(shape).encode("utf-8", "surrogatepass"))
        self._set_shape(number, shape)
        return number

    def _set_shape(self, number: int, shape: Shape | None) -> None:
        assert number == len(self.shapes)
        self.shapes.append(shape)

    def text_number(self, text: bytes) -> int:
        return self._number(_ARGS, text)

    def text_numbers(self, texts: Texts) -> Int32s:
        numbers = np.empty(len(texts), np.int32)
        if self._core.tp_reader_numbers(
            self.reader, _ARGS, texts.data, texts.ends.ctypes.data, len(texts), numbers.ctypes.data
        ):
            raise MemoryError
        return numbers

    def text(self, number: int) -> bytes:
        return self._text(_ARGS, number)

    @property
    def args_count(self) -> int:
        return int(self._core.tp_reader_count(self.reader, _ARGS))

    def text_bytes(self) -> int:
        return sum(int(self._core.tp_reader_bytes(self.reader, table)) for table in (_SHAPES, _ARGS))

    def _keep_texts(self, shapes: Iterable[int], args: Iterable[int]) -> None:
        for table, kept in ((_SHAPES, shapes), (_ARGS, args)):
            numbers = np.array(list(kept), np.int64)
            if self._core.tp_reader_keep(self.reader, table, numbers.ctypes.data, len(numbers)) < 0:
                raise MemoryError

    def parse_shapes(self, check: RecordCheck) -> bool:
        """Parse the new shapes. Return whether any of them is not of an event."""
        bad = False
        for number in range(len(self.shapes), self._core.tp_reader_count(self.reader, _SHAPES)):
            record = orjson.loads(self._text(_SHAPES, number))
            good = type(record) is dict and record.get("ts_ns") == 0 and "phase" in record
            good = good and not check.fault(record) and record["type"] not in OTHERS
            good = good and not long_texts(record)  # these are cut, with a problem
            self._set_shape(number, shape_of(record) if good else None)
            bad = bad or not good
        return bad


def new_tables() -> Tables:
    """Return tables whose texts the native core keeps, where it is loaded."""
    core = library()
    return Tables() if core is None else NativeTables(core)


class NativeLines:
    """Reads lines of the native grammar."""

    def __init__(self, core: ctypes.CDLL, tables: NativeTables, check: RecordCheck) -> None:
        self._core, self._tables, self._check = core, tables, check
        self._warps = NativeWarpLines(core)
        self._columns = [np.empty(_ROOM, kind) for kind in _KINDS]
        self._index = no_indices(_ROOM)
        self._view = Columns(*(column.ctypes.data for column in (*self._columns, self._index)))
        self._rounds = 0
        self._bad: set[int] = set()
        """Numbers of shapes that are not of an event."""

    def read(
        self, text: bytes, read_one: ReadOne, others: list[Record | Warps]
    ) -> tuple[EventColumns, Int64s | None, int]:
        """Read the lines of `text`, as `LineColumns` does."""
        before, done, indices = len(self._tables.shapes), ctypes.c_int64(0), ctypes.c_int64(0)
        parts, index = [], []
        while done.value <= len(text):
            out = ctypes.byref(self._view), ctypes.byref(indices)
            count = self._core.tp_read_lines(
                self._tables.reader, text, len(text), ctypes.byref(done), *out, _ROOM
            )
            if count < 0:
                raise MemoryError
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

    def _put_warps(self, text: bytes, events: EventColumns, others: list[Record | Warps]) -> None:
        """Set the rows of batches of warps."""
        places = np.flatnonzero(events.shape == _WARPS)
        if not len(places):
            return
        for lines in self._warps.parts(events.dur_ns[places]):
            some = places[lines]
            found = self._warps.read(text, events.ts_ns[some], events.dur_ns[some])
            good = [(at, warps) for at, warps in zip(some.tolist(), found, strict=True) if warps is not None]
            rows = np.array([at for at, _ in good], np.int64)
            events.ts_ns[rows] = [warps.ts_ns for _, warps in good]
            events.shape[rows], events.dur_ns[rows] = SPECIAL, 0
            events.args[rows] = np.arange(len(others), len(others) + len(good))
            others += [warps for _, warps in good]

    def _put_others(self, text: bytes, events: EventColumns, before: int, read_one: ReadOne) -> None:
        """Set the rows of lines that the core could not read."""
        shape = events.shape
        if self._rounds != self._tables.rounds:
            self._rounds = self._tables.rounds
            self._bad = {at for at, one in enumerate(self._tables.shapes) if one is None}
        if self._tables.parse_shapes(self._check):
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
_OF_RANGES: Final = {"range_count", *EACH_RANGE}
_NOT_OF_LAUNCH: Final = {"ts_ns", *WARP_COLUMNS}
# Columns are made of lines with this much text together. A longer line is read alone.
_TEXT_BYTES: Final = 1 << 18
# How many texts of launches are remembered, and the most bytes of one.
_KNOWN_MAX, _KNOWN_BYTES_MAX = 1 << 10, 1 << 11


class NativeWarpLines:
    """Reads such lines of the native grammar."""

    def __init__(self, core: ctypes.CDLL) -> None:
        self._core = core
        self._batch = core.tp_batch_new()
        if not self._batch:
            raise MemoryError
        weakref.finalize(self, core.tp_batch_free, self._batch)
        self._known: dict[bytes, tuple[Record, list[str]] | None] = {}
        """By the text of a launch: its record and the names of its ranges; None where the line is bad."""

    @staticmethod
    def parts(size: Int64s) -> list[Any]:
        """Split lines of these sizes into parts that are read together."""
        end = np.cumsum(size)
        part = end // _TEXT_BYTES + (end - size) // _TEXT_BYTES
        return np.split(np.arange(len(size)), np.flatnonzero(np.diff(part)) + 1)

    def read(self, text: bytes, at: Int64s, size: Int64s) -> list[Warps | None]:
        """The batches of lines of `text`, by their places and sizes; None for one that is bad, or not of the
        native grammar.
        """
        lines = len(at)
        is_read, counts = np.empty(lines, np.bool_), np.empty((lines, len(WARP_COLUMNS)), np.int64)
        ts_ns, launch, end = (np.empty(lines, np.int64) for _ in range(3))
        out = WarpLines(*(column.ctypes.data for column in (is_read, ts_ns, launch, end, counts)))
        columns = at.ctypes.data, size.ctypes.data, ctypes.byref(out)
        self._core.tp_batch_read(self._batch, text, lines, *columns)
        texts = ctypes.c_void_p()
        there = ctypes.string_at(texts, self._core.tp_batch_rest(self._batch, ctypes.byref(texts)))
        values = []
        for place in range(len(WARP_COLUMNS)):
            column = ctypes.c_void_p()
            count = self._core.tp_batch_column(self._batch, place, ctypes.byref(column))
            memory = (ctypes.c_int64 * count).from_address(column.value or 0) if count else ()
            values.append(np.array(memory, np.int64))
        counts[~is_read] = -1
        last = np.cumsum(np.maximum(counts, 0), axis=0)
        good = is_read & _are_good(values, counts, last)
        found: list[Warps | None] = []
        start = 0
        some = np.flatnonzero((counts >= 0).any(axis=0))
        named = [(WARP_COLUMNS[place], values[place]) for place in some.tolist()]
        places = counts[:, some].tolist(), last[:, some].tolist()
        rows = zip(good.tolist(), ts_ns.tolist(), launch.tolist(), end.tolist(), *places, strict=True)
        for is_good, base_ns, of, end_of_text, sizes, stops in rows:
            launched = self._launched(there[start:end_of_text]) if is_good else None
            start = end_of_text
            if launched is None:
                found.append(None)
                continue
            record, ranges = dict(launched[0]), launched[1]
            if of >= 0:
                record["launch"] = of
            each = zip(named, sizes, stops, strict=True)
            given = {name: column[stop - size : stop] for (name, column), size, stop in each if size >= 0}
            warps = Warps(launched=record, ts_ns=base_ns, ranges=ranges, **given)
            found.append(warps if given.keys().isdisjoint(_OF_RANGES) or ranges_agree(warps) else None)
        return found

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


def _are_good(values: list[Int64s], counts: Int64s, last: Int64s) -> Bools:
    """Whether all numbers of each line are within their limits, and all its columns, except those of ranges,
    have the same number of values; `last` is where the values of each line end.
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
    return good
