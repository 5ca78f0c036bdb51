"""Spans of each thread's layers and of each stream, from what the nesting makes of the events.

`event/nesting.py` has the rules, for the timeline too, so that a report and a timeline say the same of a call
that does not end, or of an end without a begin.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any, Final

from tracepipe.event import ops as op
from tracepipe.event.columns import NONE, Int32s, Int64s, TraceColumns
from tracepipe.event.native_nesting import AnyNesting, new_nesting
from tracepipe.event.nesting import ShapeRow
from tracepipe.event.ops import BEGIN, END, NO_MARK
from tracepipe.event.outcomes import Outcomes
from tracepipe.reports.frames.callers import callers_by_time, depths
from tracepipe.reports.frames.grouping import equal, grouped, in_buckets
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.shapes import FRAMES, ShapeTable
from tracepipe.reports.frames.stored import empty, flagged, made, parts, taken, touched

KINDS = ("span", "instant", "no_begin", "from_duration", "unclosed")
"""span: begin and end are known. instant: no length. no_begin: an end alone, which is drawn as an instant.
from_duration: an end alone, whose duration says when it began. unclosed: a begin without an end; `end_ns` is
where its caller or the recording ended."""
SPAN, INSTANT, NO_BEGIN, FROM_DURATION, UNCLOSED = range(len(KINDS))
# Events nested at a time: what is made of them is looked at while the processor still has it at hand.
_AT_ONCE: Final = 1 << 14
# What is looked at and written of each.
_ROW_BYTES: Final = 100
# What a span has as its event has it.
_OF_EVENT: Final = ("shape", "args", "launch", "bound_ns", "source_ns", "stack")
# Rows that are nested together: what ended on each is remembered.
_ROWS_AT_ONCE: Final = 1 << 15
# When what is open ends, until the end of the recording is known.
_OPEN_NS: Final = (1 << 63) - 1
_NAME_MATTERS: Final = (ord("B"), ord("E"))


class Matching:
    """Matches the events of one recording, one group of layers that nest together after the other."""

    def __init__(self) -> None:
        self.nesting = new_nesting()
        self._spans = 0

    @property
    def outcomes(self) -> Outcomes:
        """What did not go as it should, so far."""
        return self.nesting.outcomes

    def match(self, events: TraceColumns, shapes: ShapeTable, group: str) -> Spans:
        """The spans of all events of a group, which are in order. Their columns are not to be used then."""
        spans = Spans(self.nesting, self._spans, _Shapes(shapes, group), events)
        self._spans += spans.count_begun
        return spans


class _Shapes:
    """How the shapes of a group nest: `row` is that of each, `number` that of its kind, in the order of rows.

    Names matter for begins that meet ends alone, so that a million names are few kinds.
    """

    def __init__(self, table: ShapeTable, group: str) -> None:
        groups = table.groups(np.arange(len(table), dtype=np.int32))
        own = flagged(len(table), lambda part: groups[part] == FRAMES.index(group))
        of_row, first = equal(*table.rows(own))
        self.row_count = len(first)
        phases, has_dur = table.column("phase", own), table.has_dur(own)
        names = np.where(np.isin(phases, _NAME_MATTERS), table.column("name", own), NONE)
        number, first = equal(of_row, phases, has_dur, names)
        self._kinds = [taken(column, first) for column in (of_row, names, phases, has_dur)]
        # Memory that is not written to is not taken: the places of other groups' shapes.
        self.number, self.row = (np.zeros(len(table), np.int32) for _ in range(2))
        self.number[own], self.row[own] = number, of_row

    def put(self, nest: AnyNesting, rows: range) -> int:
        """Give a nesting without rows some of them, and their kinds; the number of the first of these."""
        first, last = map(int, np.searchsorted(self._kinds[0], [rows.start, rows.stop]))
        for _ in rows:
            nest.add_row()
        for part in parts(last - first):
            kinds = zip(*(of[first:last][part].tolist() for of in self._kinds), strict=True)
            for at, (row, name, phase, has) in enumerate(kinds, part.start):
                nest.set_shape(at, ShapeRow(row - rows.start, name, chr(phase), has_dur=has))
        return first


class Spans:
    """Spans and instants in the order in which they were met: `finish` them, once all groups are matched.

    `columns` have a row for each, and after `finish` in the order of their starts, callers before the calls
    in them: those of `layers.Layer`. They are written where those of the events were: no event makes two of
    them. `last_ns` is the latest time of any, None without one.
    """

    def __init__(self, nest: AnyNesting, first_span: int, shapes: _Shapes, events: TraceColumns) -> None:
        self._nesting, self._first_span, self._shapes = nest, first_span, shapes
        self._count = self.count_begun = 0
        self.last_ns: int | None = None
        self._overlapping: list[int] = []
        """Rows that others stand beside."""
        events, bounds = _by_rows(events, shapes)
        count = len(events)
        has_lengths = events.dur_ns.flags.writeable
        self.columns: dict[str, Any] = {
            "start_ns": events.ts_ns,
            "end_ns": events.dur_ns if has_lengths else empty(count, np.int64),
            "kind": empty(count, np.uint8),
            "parent": empty(count, np.int32),
            "lane": empty(count, np.uint8),
        }
        given = {name: getattr(events, name) for name in _OF_EVENT}
        # What is one value for all events stays so.
        self._same = {
            name: column
            for name, column in given.items()
            if column is not None and not column.flags.writeable
        }
        self.columns |= {
            name: column for name, column in given.items() if column is not None and name not in self._same
        }
        if events.source_ns is not None:
            self.columns["end_source_ns"] = empty(count, np.int64)
        if "args" in self.columns:
            self.columns["end_args"] = empty(count, np.int32)
        # The last place is that of no span.
        self._row_of_span: Int32s = empty(count + 1, np.int32)
        self._row_of_span[-1] = NONE
        self._row: Int32s = empty(count, np.int32)
        for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
            first = number * _ROWS_AT_ONCE
            rows = range(first, min(first + _ROWS_AT_ONCE, shapes.row_count))
            self._nest(events, range(start, stop), rows)
        self._row = np.empty(0, np.int32)

    def _nest(self, events: TraceColumns, places: range, rows: range) -> None:
        """Nest the events of some places, which are all those of some rows."""
        first, before = self._shapes.put(self._nesting, rows), self._count
        for start in range(places.start, places.stop, _AT_ONCE):
            # The native core reads columns one after the other, and what is read is written over.
            some = events.take(np.arange(start, min(start + _AT_ONCE, places.stop)))
            met, some.shape = some.shape, self._shapes.number[some.shape] - np.int32(first)
            self._nesting.events(some, 0, len(some))
            some.shape = met
            self._take(some)
            touched(len(some) * _ROW_BYTES)
        self._leave(slice(before, self._count), rows)

    def _leave(self, spans: slice, rows: range) -> None:
        """End what is open on some rows at no time yet, and forget these; `spans` are on them."""
        row, kind = self._row[spans], self.columns["kind"][spans]
        # Rows that came meanwhile stand beside others. The last place is that of no row.
        is_open, lanes = (np.zeros(self._nesting.row_count + 1, of) for of in (np.bool_, np.uint8))
        beside: dict[int, int] = {}
        for at in range(len(rows), self._nesting.row_count):
            base = self._nesting.base(at)
            lanes[at] = beside[base] = beside.get(base, 0) + 1
        for part in parts(len(row)):
            is_open[row[part][kind[part] == UNCLOSED]] = True
            self.columns["lane"][spans][part] = lanes[row[part]]
        for at in np.flatnonzero(is_open[:-1]).tolist():
            self._nesting.close(at if at < len(rows) else self._nesting.base(at), _OPEN_NS)
        ops = self._nesting.take_ops().used()
        self._end(ops, np.arange(len(ops["kind"])), None)
        self._overlapping += [rows.start + base for base in beside]
        self._nesting.forget_rows()

    def _take(self, events: TraceColumns) -> None:
        """Add what the nesting made of events since the last call."""
        ops = self._nesting.take_ops().used()
        if len(ops["ts"]):
            last_ns = int(ops["ts"].max())
            self.last_ns = last_ns if self.last_ns is None else max(self.last_ns, last_ns)
        made = np.flatnonzero(ops["kind"] != END)
        begins = ops["kind"][made] == BEGIN
        rows = slice(self._count, self._count + len(made))
        begun = np.flatnonzero(begins) + self._count
        self._row_of_span[self.count_begun : self.count_begun + len(begun)] = begun
        self._count, self.count_begun = rows.stop, self.count_begun + len(begun)
        columns, mark = self.columns, ops["mark"][made]
        columns["start_ns"][rows] = columns["end_ns"][rows] = ops["ts"][made]
        columns["kind"][rows] = np.where(
            begins,
            np.where(mark == op.FROM_DURATION, FROM_DURATION, UNCLOSED),
            np.where(mark == op.NO_BEGIN, NO_BEGIN, INSTANT),
        )
        self._row[rows] = ops["row"][made]
        columns["parent"][rows] = self._rows_of_spans(ops["parent"][made])
        for name in _OF_EVENT:
            if name in columns:
                columns[name][rows] = getattr(events, name)[ops["event"][made]]
        for name in ("end_args", "end_source_ns"):
            if name in columns:
                columns[name][rows] = NONE
        self._end(ops, np.flatnonzero(ops["kind"] == END), events)

    def _rows_of_spans(self, spans: Int64s) -> Int32s:
        return self._row_of_span[np.where(spans == NONE, NONE, spans - self._first_span)]

    def _end(self, ops: dict[str, Any], ended: Int64s, events: TraceColumns | None) -> None:
        """End spans, as operations say."""
        columns, event = self.columns, ops["event"][ended]
        at = self._rows_of_spans(ops["slice_id"][ended])
        columns["end_ns"][at] = ops["ts"][ended]
        closed = at[ops["mark"][ended] == NO_MARK]
        columns["kind"][closed[columns["kind"][closed] == UNCLOSED]] = SPAN
        told = np.flatnonzero(event != NONE)
        for name, of_end in (("args", "end_args"), ("source_ns", "end_source_ns")):
            if events is not None and of_end in columns:
                columns[of_end][at[told]] = getattr(events, name)[event[told]]

    def finish(self, end_ns: int) -> None:
        """End what is still open, and find out who is in whom."""
        self._row_of_span = np.empty(0, np.int32)
        self.columns = {name: column[: self._count] for name, column in self.columns.items()}
        for part in parts(self._count):
            ends_ns = self.columns["end_ns"][part]
            ends_ns[ends_ns == _OPEN_NS] = end_ns
        if self._overlapping:
            row_of = self._shapes.row[self.columns["shape"]]
            again = np.flatnonzero(np.isin(row_of, self._overlapping))
            for _, places in grouped(row_of[again]):
                self._nest_again(again[places])
        for name in ("parent", "end_args"):
            self._settle(name, NONE)
        if "parent" in self.columns:
            self.columns["depth"] = depths(self.columns["parent"])
        for name in ("depth", "lane"):
            self._settle(name, 0)
        self._sort()
        self.columns |= {name: column[: self._count] for name, column in self._same.items()}

    def _settle(self, name: str, value: int) -> None:
        """Keep a column as one value, where all have that, or it has not come."""
        column = self.columns.get(name, np.empty(0, np.int32))
        if not any(bool((column[part] != value).any()) for part in parts(len(column))):
            self._same[name] = np.broadcast_to(column.dtype.type(value), self._count)
            self.columns.pop(name, None)

    def _nest_again(self, rows: Int64s) -> None:
        """Find callers by the times alone where a row has others beside it.

        While one is open it is not known what it encloses, so that such spans are drawn beside each other; by
        now all ends are known: those of a trace that has an end and a duration alone nest after all.
        """
        start_ns, end_ns, kind = (self.columns[name][rows] for name in ("start_ns", "end_ns", "kind"))
        order = np.lexsort((-end_ns, start_ns))
        lasts = (kind != INSTANT) & (kind != NO_BEGIN)
        found = callers_by_time(start_ns[order], end_ns[order], lasts[order])
        self.columns["parent"][rows[order]] = np.where(found == NONE, NONE, rows[order][found])

    def _sort(self) -> None:
        """Put the rows in the order of their starts."""
        start_ns, depth = self.columns["start_ns"], self.columns.get("depth")
        if not self._is_late(start_ns, depth):
            return
        order = np.argsort(start_ns, kind="stable") if depth is None else np.lexsort((depth, start_ns))
        if "parent" in self.columns:
            places = np.empty(len(order) + 1, np.int32)
            places[order] = np.arange(len(order), dtype=np.int32)
            places[-1] = NONE
            parent = self.columns["parent"]
            self.columns["parent"] = made(len(order), np.int32, lambda part: places[parent[part]])
        for name in self.columns:
            self.columns[name] = taken(self.columns[name], order)

    @staticmethod
    def _is_late(start_ns: Int64s, depth: Int32s | None) -> bool:
        """Whether a row stands after one that it is to stand before."""
        for part in parts(len(start_ns) - 1):
            now, then = part, slice(part.start + 1, part.stop + 1)
            is_late = start_ns[then] < start_ns[now]
            if depth is not None:
                is_late |= (start_ns[then] == start_ns[now]) & (depth[then] < depth[now])
            if bool(is_late.any()):
                return True
        return False


def _by_rows(events: TraceColumns, shapes: _Shapes) -> tuple[TraceColumns, Int64s]:
    """The events, and where those of each `_ROWS_AT_ONCE` rows begin, and the last end. Those of some rows
    stay in their order.
    """
    count = -(-shapes.row_count // _ROWS_AT_ONCE)
    if count <= 1:
        return events, np.array([0, len(events)])
    columns: dict[str, Any] = {field.name: getattr(events, field.name) for field in fields(events)}
    batch = made(len(events), np.int32, lambda part: shapes.row[events.shape[part]] // _ROWS_AT_ONCE)
    moved = [name for name, column in columns.items() if column is not None and column.flags.writeable]
    bounds, found = in_buckets(batch, count, *(columns[name] for name in moved))
    columns |= zip(moved, found, strict=True)
    return TraceColumns(**columns), bounds
