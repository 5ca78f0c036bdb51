"""Makes columns of lines of `tracepipe/1` by the native core (`lines.c`)."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from tracepipe.event.checks import RecordCheck, long_texts
from tracepipe.event.columns import (
    NO_INDEX,
    NONE,
    SPECIAL,
    EventColumns,
    Int32s,
    Int64s,
    Texts,
    joined_optional,
    no_indices,
)
from tracepipe.event.model import Record
from tracepipe.event.shape import Shape, shape_of
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Warps
from tracepipe.native import library
from tracepipe.native.signatures import Columns
from tracepipe.readers.line_columns import FOREIGN, ReadOne
from tracepipe.readers.lines import OTHERS
from tracepipe.readers.native_warp_lines import NativeWarpLines

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
        """As `Tables` has it."""
        return self._number(_ARGS, text)

    def text_numbers(self, texts: Texts) -> Int32s:
        """As `Tables` has it."""
        numbers = np.empty(len(texts), np.int32)
        if self._core.tp_reader_numbers(
            self.reader, _ARGS, texts.data, texts.ends.ctypes.data, len(texts), numbers.ctypes.data
        ):
            raise MemoryError
        return numbers

    def text(self, number: int) -> bytes:
        """As `Tables` has it."""
        return self._text(_ARGS, number)

    @property
    def args_count(self) -> int:
        """As `Tables` has it."""
        return int(self._core.tp_reader_count(self.reader, _ARGS))

    def text_bytes(self) -> int:
        """As `Tables` has it."""
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
        """As `Lines` has it."""
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
