r"""Reads the usual lines of layered tracers in the native core, `layered.c`.

    {"event_id":7,"ts":1.5,"type":"userspace","name":"f","phase":"E","retval":0,"duration_us":2.5}
    {"event_id":□, "ts":0, "type":"userspace","name":"f","phase":"E","retval":□,"duration_us":0}    its stem

`layered.py` reads the stem once, with a text that no line can have for each □, which is a value that becomes
an argument and decides nothing else. The result is the shape and the recipe of the arguments for all lines
of that stem. Every other line is read there, in the order of the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import orjson

from tracepipe.event.columns import (
    NONE,
    EventColumns,
    Int32s,
    Int64s,
    SourceBatch,
    distinct,
    joined,
    no_indices,
)
from tracepipe.event.model import HOST_LAYERS, Record
from tracepipe.event.tables import LONG_NAME, LongNames, NativeTables
from tracepipe.native import checked
from tracepipe.native.signatures import LayeredRows
from tracepipe.readers.recording import Unusable

START: Final = "start_ts"
"""The start of an event, as `tracepipe convert` writes it in a single line at the event's end."""
LENGTHS: Final = {"duration_us": 1_000, "duration_ms": 1_000_000}
"""Keys of an event's length → their unit, ns."""
DISORDER_NS: Final = 1_000_000_000
"""Lines of several processors come out of order, within the interval at which the buffers are read."""
KEYS_MAX: Final = 1 << 12
"""The most names and threads whose calls are remembered."""
Key = tuple[str, str, int | None, int | None]

# Roles of a row, as layered.c has them; the last is of rows that are no part of a call.
INSTANT, BEGIN, END, END_WITH_LENGTH, WHOLE, ALONE = range(6)
PHASES: Final = "IBEEX"
_PLACE: Final = "pid", "tid", "cpu"
_HOLE: Final = b"\x01"
_HOLE_TEXT = re.compile(rb'"\\u0001(\d+)"')
_STEMS_MAX: Final = 1 << 12
_ALL_KNOWN: Final = 1 << 62
_HELD_ROOM: Final = 1 << 12


def key_of(record: Record, names: LongNames) -> Key:
    """The key of all lines of calls of one function on one thread."""
    return record["type"], names.shortened(record["name"]), record.get("pid"), record.get("tid")


class Lines(Protocol):
    """The reader of the same lines in Python."""

    number: int
    records: list[Record]
    batch: SourceBatch
    last_line_ns: int

    @property
    def knows_no_start(self) -> bool:
        """Whether the problem of transfers without a start was reported."""

    def see_line(self) -> None:
        """Note that a line of JSON was read."""

    def say_far_entry(self) -> None:
        """Report a call whose begin was read as an instant."""

    def event_of_stem(self, line: Record) -> Record | None:
        """The event of a line whose other values have the same effect as these, None where lines like it have
        none. Raises Unusable where each line must be read.
        """


@dataclass(frozen=True, slots=True)
class _Event:
    """The event of all lines that differ in their place and in values of arguments: its record, which has no
    arguments, and its recipe. Lines with an empty record repeat another line.
    """

    role: int
    record: Record
    recipe: bytes = b""
    has_no_start: bool = False


class NativeLines:
    """Reads the lines of one input, and joins the lines of calls."""

    def __init__(self, core: ctypes.CDLL, lines: Lines, tables: NativeTables) -> None:
        self._core, self._lines, self._tables = core, lines, tables
        self._state = core.tp_layered_new(int.from_bytes(os.urandom(8), "little"))
        if not self._state:
            raise MemoryError
        weakref.finalize(self, core.tp_layered_free, self._state)
        self._events: dict[bytes, _Event | None] = {}
        self._stems: list[Record | None] = []
        # By stem; the last is of rows without one.
        self._role = np.full(_STEMS_MAX + 1, ALONE, np.uint8)
        self._key, self._function = (np.full(_STEMS_MAX + 1, NONE, np.int32) for _ in range(2))
        self._number = np.full(2 * (_STEMS_MAX + 1), NONE, np.int32)
        self._has_event, self._is_whole, self._has_no_start = np.zeros((3, _STEMS_MAX + 1), np.bool_)
        self._rounds = tables.shape_rounds
        self._keys: dict[Key, tuple[int, int]] = {}
        self._functions: dict[tuple[str, str], int] = {}
        self._batches = 0
        self._begin(0, 0)

    def unwrapped(self, text: bytes, *, is_held: bool) -> bytes:
        """The text, with the line in place of each record of bpftrace that has a whole one. `is_held`: text
        without a newline waits for its end.
        """
        lines, held = ctypes.create_string_buffer(len(text)), ctypes.c_int32(is_held)
        size = self._core.tp_layered_unwrap(text, len(text), lines, ctypes.byref(held))
        return ctypes.string_at(lines, size)

    def _begin(self, count: int, size: int) -> None:
        """Begin a batch of so many lines and bytes."""
        self._batch, self._batches, self.count = self._lines.batch, self._batches + 1, count
        self._ts, self._dur = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._stem, self._args = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._index = no_indices(count)
        # A record has more than eight bytes of text, and the text of a line before may be its begin.
        self._phases = np.zeros(count + size // 8 + _HELD_ROOM, np.uint8)
        self._noted: list[tuple[Record, int]] = []
        self._places: list[int] = []
        self._is_native = np.zeros(count, np.bool_)

    def read(self, first: int, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Read lines, and yield the number and the text of each that the core cannot read, in its turn."""
        if len(self._stems) >= _STEMS_MAX:
            self._core.tp_layered_forget(self._state)
            self._stems.clear()
            self._events.clear()
            self._number[:], self._key[:] = NONE, NONE
        # Counting them in bytes would take three times as long.
        newlines = np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        self._begin(int(newlines) + 1, len(text))
        self._read(text)
        ts, stem, dur, foreign = self._ts, self._stem, self._dur, self._stem == NONE
        self._line_ts = ts
        if not self._has_event[: len(self._stems)].all() or foreign.any():
            self._line_ts = np.where(self._has_event[stem], ts, 0)
        if self._is_whole.any():
            whole = self._is_whole[stem]
            foreign |= whole & (dur > ts)
            self._ts = ts - np.where(whole, dur, 0)
        if self._has_no_start.any() and not self._lines.knows_no_start:
            foreign |= self._has_no_start[stem]
        self._phases[: self.count] = self._role[stem]
        lines = text.split(b"\n") if foreign.any() else []
        start = 0
        for stop in (*np.flatnonzero(foreign).tolist(), self.count):
            while start < stop:
                start, begin = self._in_order(start, stop), start
                self._join(first, begin, start)
                if start < stop:
                    foreign[start] = True
                    lines = lines or text.split(b"\n")
                    yield first + start, lines[start]
                    self._place_records(start)
                    start += 1
            if stop < self.count:
                yield first + stop, lines[stop]
                self._place_records(stop)
            start = stop + 1
        self._is_native = self._has_event[stem] & ~foreign

    def _place_records(self, at: int) -> None:
        """Note that the new records are of the line at a place."""
        self._places += [at] * (len(self._lines.records) - len(self._places))

    def _read(self, text: bytes) -> None:
        columns = self._ts, self._stem, self._args, self._dur, self._index
        view, done, at = LayeredRows(*(column.ctypes.data for column in columns)), ctypes.c_int64(0), 0
        refs = self._state, self._tables.reader, text, len(text), ctypes.byref(done)
        while at < self.count:
            known = len(self._stems) if len(self._stems) < _STEMS_MAX else _ALL_KNOWN
            at = checked(self._core.tp_layered_read(*refs, known, ctypes.byref(view), at, self.count))
            if at < self.count:
                self._learn(len(self._stems))

    def _learn(self, number: int) -> None:
        """Read the next stem."""
        pointer, place = ctypes.c_void_p(), (ctypes.c_int32 * 3)()
        size = self._core.tp_layered_stem(self._state, number, ctypes.byref(pointer), place)
        text = ctypes.string_at(pointer, size)
        if text not in self._events:
            self._events[text] = self._event_of(text)
        event = self._events[text]
        at = {key: number for key, number in zip(_PLACE, place, strict=True) if number != NONE}
        self._stems.append(None if event is None else event.record | at)
        if event is not None:
            self._role[number], self._has_no_start[number] = event.role, event.has_no_start
            self._has_event[number] = bool(event.record)
            self._is_whole[number] = event.record.get("phase") == "X"
            refs = self._state, self._tables.reader
            checked(self._core.tp_layered_set(*refs, number, event.recipe, len(event.recipe)))

    def _event_of(self, text: bytes) -> _Event | None:
        """The event of the lines with the text of a stem, None where Python must read them."""
        parts = text.split(_HOLE)
        holes = [b'"\\u0001%d"' % at for at in range(len(parts) - 1)]
        try:
            line = _PARSED(b"".join(map(bytes.__add__, parts, [*holes, b""])).decode())
            record = self._lines.event_of_stem(line)
        except (Unusable, _TwiceError):
            return None
        if record is None:
            return _Event(ALONE, {})
        args = record.pop("args", {})
        values = (*record.values(), *args)
        if any(type(one) is str and (len(one) > LONG_NAME or "\x01" in one) for one in values):
            return None
        if not args.keys().isdisjoint(LENGTHS):
            return None
        recipe = _HOLE_TEXT.sub(_hole, orjson.dumps(args)) if args else b""
        phase = record["phase"]
        is_call = record["type"] in HOST_LAYERS and START not in line
        role = {"I": INSTANT, "B": BEGIN, "X": WHOLE}.get(
            phase, END_WITH_LENGTH if "dur_ns" in record else END
        )
        has_no_start = is_call and line["type"] == "transfer" and phase == "X"
        return _Event(role if is_call else ALONE, record, recipe, has_no_start)

    def _in_order(self, start: int, stop: int) -> int:
        """The place of the first row that goes back in time, `stop` where there is none."""
        lines = self._lines
        ts = self._line_ts[start:stop]
        last = np.maximum.accumulate(np.append(lines.last_line_ns, ts))
        has_event = self._has_event[self._stem[start:stop]]
        end = int(np.append(np.flatnonzero((last[:-1] - ts > DISORDER_NS) & has_event), stop - start)[0])
        lines.last_line_ns = int(last[end])
        if end:
            lines.see_line()
        return start + end

    # Calls ---------------------------------------------------------------------------------------------

    def _join(self, first: int, start: int, end: int) -> None:
        """Join the lines of calls, from `start` to `end`."""
        stem = self._stem[start:end]
        new = distinct(stem[(self._role[stem] != ALONE) & (self._key[stem] == NONE)]).tolist()
        names = self._tables.long_names
        keys = {at: key_of(record, names) for at in new if (record := self._stems[at]) is not None}
        if end - start > 1 and len(self._keys.keys() | keys.values()) > KEYS_MAX:
            for at in range(start, end):
                self._join(first, at, at + 1)
            return
        for at, key in keys.items():
            self._key[at], self._function[at] = self._numbers(key)
        columns = self._key[stem], self._function[stem], self._ts[start:end], self._dur[start:end]
        for at in self._note(columns, start):
            self._lines.number = first + start + at
            self._lines.say_far_entry()

    def note(self, record: Record) -> None:
        """Note the next record of the lines, as _CallEnds does."""
        if record["type"] not in HOST_LAYERS:
            return
        if self._lines.batch is not self._batch:
            self._begin(0, 0)
        key, function = (
            np.array([number], np.int32) for number in self._numbers(key_of(record, self._tables.long_names))
        )
        place, phase = self.count + len(self._lines.records), record["phase"]
        has_dur = END_WITH_LENGTH if "dur_ns" in record else END
        self._phases[place] = {"I": INSTANT, "B": BEGIN, "X": WHOLE}.get(phase, has_dur)
        ts, dur = np.array([[record["ts_ns"]], [record.get("dur_ns", 0)]], np.int64)
        for _ in self._note((key, function, ts, dur), place):
            self._lines.say_far_entry()
        if phase == "X" and self._phases[place] == END_WITH_LENGTH:
            record.update(phase="E", ts_ns=int(ts[0]))
        self._noted.append((record, place))

    def _note(self, columns: tuple[Int32s, Int32s, Int64s, Int64s], first: int) -> Iterator[int]:
        """Note rows, and yield those whose entries are too far before them."""
        refs = *(column.ctypes.data for column in columns), self._phases.ctypes.data, first, self._batches
        at, count = 0, len(columns[0])
        while (at := self._core.tp_layered_note(self._state, *refs, at, count)) < count:
            yield at
            at += 1

    def _numbers(self, key: Key) -> tuple[int, int]:
        if key not in self._keys:
            if len(self._keys) >= KEYS_MAX:
                self._core.tp_layered_forget_calls(self._state)
                self._keys.clear()
                self._functions.clear()
                self._key[:] = NONE
            function = self._functions.setdefault(key[:2], len(self._functions))
            self._keys[key] = len(self._keys), function
        return self._keys[key]

    # Columns -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give the records of the batch the phases that they have in the end."""
        for record, place in self._noted:
            if record["phase"] in "IB":
                record["phase"] = PHASES[self._phases[place]]

    def merged(self, of_records: EventColumns) -> EventColumns:
        """The events of the batch in the order of its lines, with those of its records."""
        if self._lines.batch is not self._batch or not self.count:
            return of_records
        at: Int64s | slice = np.flatnonzero(self._is_native)
        if self._is_native.all():
            at = slice(self.count)  # which copies nothing
        stem = self._stem[at]
        changed = (self._phases[at] != self._role[stem]) & (self._role[stem] != ALONE)
        if self._rounds != self._tables.shape_rounds:
            self._rounds, self._number[:] = self._tables.shape_rounds, NONE
        which = 2 * stem + changed
        for one in distinct(which[self._number[which] == NONE]).tolist():
            record = self._stems[one >> 1]
            assert record is not None
            if one & 1:
                record = record | {"phase": "B" if record["phase"] == "I" else "E"}
            self._number[one] = self._tables.shape_number(record)
        index = self._index[at]
        events = EventColumns(
            self._ts[at],
            self._number[which],
            self._args[at],
            self._dur[at],
            np.zeros(len(stem), np.int64),
            index=index if (index[:, ::3] != NONE).any() else None,
        )
        if not len(of_records):
            return events
        places = np.append(np.flatnonzero(self._is_native), np.array(self._places, np.int64))
        order = np.argsort(places, kind="stable")
        return joined([events, of_records]).take(order)


def _hole(found: re.Match[bytes]) -> bytes:
    return _HOLE + bytes([int(found[1])])


class _TwiceError(Exception):
    """An object has two values of one key."""


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise _TwiceError
    return members


# json.loads would make a decoder for each stem.
_PARSED: Final = json.JSONDecoder(object_pairs_hook=_members).decode
