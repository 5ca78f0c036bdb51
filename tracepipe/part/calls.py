"""Matches begins and ends of a recording to slices, by the rules of the nesting. An open slice is kept as a
few numbers."""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

import numpy as np

from tracepipe.event.columns import NONE, Int64s, TraceColumns
from tracepipe.event.native_nesting import new_nesting
from tracepipe.event.nesting import NO_ROW, ShapeRow
from tracepipe.event.ops import BEGIN, END
from tracepipe.event.shape import Shape
from tracepipe.part.stretch import OPEN_NS

# The most rows, more than Perfetto has room for. Begins and ends of further rows count as instants.
_ROWS_MAX: Final = 1 << 17

Spans = dict[str, Int64s]
"""Columns of shape `(n,)`: `begin_ns` and `end_ns`; `begin` and `end`, which are rows of the recording, or
NONE; `launch`; and `work`: 1 for the work of a launch, 0 for its call, NONE without a launch.
"""
COLUMNS: Final = ("begin_ns", "end_ns", "begin", "end", "launch", "work")
_OF_OPEN: Final = ("span", "begin_ns", "begin", "launch", "work")


class Calls:
    """Matches the begins and ends of one recording."""

    def __init__(self) -> None:
        self._nesting = new_nesting()
        self._rows: dict[object, int] = {}
        self._spans = 0
        self._open: Spans = {name: np.empty(0, np.int64) for name in _OF_OPEN}

    def add_shape(self, number: int, shape: Shape) -> bool:
        """Add a new shape. Return whether its events are matched here."""
        key = shape.row
        if shape.phase not in "BE" or key is None:
            return False
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= _ROWS_MAX:
                return False
            row = self._rows[key] = self._nesting.add_row()
        # The names of open calls of a row are compared by checksum: two different names are equal once in
        # 2³¹.
        name = crc32(shape.name.encode("utf-8", "replace")) >> 1
        self._nesting.set_shape(number, ShapeRow(row, name, shape.phase, has_dur=shape.has_dur))
        return True

    def forget_shapes(self) -> None:
        """Drop all shapes, as they have new numbers now."""
        self._nesting.forget_shapes()

    def match(self, events: TraceColumns, rows: Int64s, work: Int64s) -> tuple[Spans, Spans]:
        """Match the next events, which are sorted. Return the slices that begin with them, and those that
        have ended. `rows` are the rows of the events, `work` is as in `Spans`; shapes `(n,)`.
        """
        if not len(events):
            nothing = {name: np.empty(0, np.int64) for name in COLUMNS}
            return nothing, nothing
        self._nesting.events(events, 0, len(events))
        ops = self._nesting.take_ops().used()
        begun, first = self._begun(ops, events, rows, work), self._spans
        self._spans += len(begun["begin"])
        old = self._end(ops, rows, begun, first)
        is_open = begun["end_ns"] == OPEN_NS
        numbers = np.arange(first, self._spans)
        if is_open.any():
            for name in _OF_OPEN:
                more = numbers if name == "span" else begun[name]
                self._open[name] = np.concatenate([self._open[name], more[is_open]])
        instants = self._instants(ops, rows)
        ended = {
            name: np.concatenate([old[name], column[~is_open], instants[name]])
            for name, column in begun.items()
        }
        return begun, ended

    def _begun(self, ops: dict[str, Any], events: TraceColumns, rows: Int64s, work: Int64s) -> Spans:
        at = np.flatnonzero(ops["kind"] == BEGIN)
        begin_ns, event = ops["ts"][at], ops["event"][at]
        return {
            "begin_ns": begin_ns,
            # A slice that is not drawn has no known end: it ends where it begins.
            "end_ns": np.where(ops["row"][at] == NO_ROW, begin_ns, OPEN_NS),
            "begin": rows[event],
            "end": np.full(len(at), NONE, np.int64),
            "launch": events.launch[event],
            "work": work[event],
        }

    def _end(self, ops: dict[str, Any], rows: Int64s, begun: Spans, first: int) -> Spans:
        """Apply ends: to the slices in `begun`, whose numbers start with `first`, and to earlier ones, which
        are returned.
        """
        at = np.flatnonzero(ops["kind"] == END)
        span, end_ns, event = ops["slice_id"][at], ops["ts"][at], ops["event"][at]
        end = np.where(event == NONE, NONE, rows[event])
        is_new = span >= first
        begun["end_ns"][span[is_new] - first], begun["end"][span[is_new] - first] = (
            end_ns[is_new],
            end[is_new],
        )
        if is_new.all():
            return {name: np.empty(0, np.int64) for name in COLUMNS}
        places = np.searchsorted(self._open["span"], span[~is_new])
        old = {name: column[places] for name, column in self._open.items()}
        old |= {"end_ns": end_ns[~is_new], "end": end[~is_new]}
        stays = np.ones(len(self._open["span"]), np.bool_)
        stays[places] = False
        for name in _OF_OPEN:
            self._open[name] = self._open[name][stays]
        return old

    @staticmethod
    def _instants(ops: dict[str, Any], rows: Int64s) -> Spans:
        """The ends without a begin, as slices without a length."""
        at = np.flatnonzero((ops["kind"] != BEGIN) & (ops["kind"] != END))
        ts_ns, nothing = ops["ts"][at], np.full(len(at), NONE, np.int64)
        spans = dict.fromkeys(COLUMNS, nothing)
        return spans | {"begin_ns": ts_ns, "end_ns": ts_ns, "begin": rows[ops["event"][at]]}

    def still_open(self) -> Spans:
        """The slices without an end."""
        count = len(self._open["span"])
        ends = {"end_ns": np.full(count, OPEN_NS), "end": np.full(count, NONE, np.int64)}
        return {name: ends[name] if name in ends else self._open[name] for name in COLUMNS}
