"""Spans (slices and instants) of each thread's layers and of each stream, made by nesting the events.

The rules are in `event/nesting.py`, which the timeline uses too: a report and a timeline agree on calls
without an end, and on ends without a begin.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any, Final

from tracepipe.event import ops as op
from tracepipe.event.columns import NONE, Int32s, Int64s, TraceColumns
from tracepipe.event.native_nesting import AnyNesting, new_nesting
from tracepipe.event.nesting import Outcomes, ShapeRow
from tracepipe.event.ops import BEGIN, END, NO_MARK
from tracepipe.reports.frames.callers import callers_by_time, depths
from tracepipe.reports.frames.grouping import equal, grouped, in_buckets
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.shapes import FRAMES, ShapeTable
from tracepipe.reports.frames.stored import empty, flagged, made, parts, taken, touched

KINDS = ("span", "instant", "no_begin", "from_duration", "unclosed")
"""span: begin and end are known. instant: no length. no_begin: an end without a begin, drawn as an instant.
from_duration: an end without a begin, whose duration gives the begin. unclosed: a begin without an end;
`end_ns` is the end of its caller or of the recording."""
SPAN, INSTANT, NO_BEGIN, FROM_DURATION, UNCLOSED = range(len(KINDS))
# The events that are nested at a time: few enough that the results stay in the processor's cache.
_AT_ONCE: Final = 1 << 14
# The bytes that are read and written for each event.
_ROW_BYTES: Final = 100
# The columns that a span takes from its event.
_OF_EVENT: Final = ("shape", "args", "launch", "bound_ns", "source_ns", "stack")
# The rows that are nested together, as the nesting keeps what ended on each.
_ROWS_AT_ONCE: Final = 1 << 15
# The end of open spans, until the end of the recording is known.
_OPEN_NS: Final = (1 << 63) - 1
_NAME_MATTERS: Final = (ord("B"), ord("E"))


class Matching:
    """Matches begins and ends of one recording, one group of layers after the other."""

    def __init__(self) -> None:
        self.nesting = new_nesting()
        self._spans = 0

    @property
    def outcomes(self) -> Outcomes:
        """The numbers of begins and ends that had no match so far."""
        return self.nesting.outcomes

    def match(self, events: TraceColumns, shapes: ShapeTable, group: str) -> Spans:
        """Return the spans of all events of a group, which are sorted. The columns of `events` are
        overwritten.
        """
        spans = Spans(self.nesting, self._spans, _Shapes(shapes, group), events)
        self._spans += spans.count_begun
        return spans


class _Shapes:
    """How the shapes of a group nest. `row` has the row of each shape and `number` its kind, shapes
    `(shapes,)`; kinds are sorted by row.

    Names distinguish kinds only for begins and ends, which must match, so a million names are few kinds.
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
        # np.zeros takes memory only where it is written: not for the shapes of other groups.
        self.number, self.row = (np.zeros(len(table), np.int32) for _ in range(2))
        self.number[own], self.row[own] = number, of_row

    def put(self, nest: AnyNesting, rows: range) -> int:
        """Add some rows and their kinds to a nesting that has none; return the number of the first kind."""
        first, last = map(int, np.searchsorted(self._kinds[0], [rows.start, rows.stop]))
        for _ in rows:
            nest.add_row()
        for part in parts(last - first):
            kinds = zip(*(of[first:last][part].tolist() for of in self._kinds), strict=True)
            for at, (row, name, phase, has) in enumerate(kinds, part.start):
                nest.set_shape(at, ShapeRow(row - rows.start, name, chr(phase), has_dur=has))
        return first


class Spans:
    """Slices and instants in the order of their events. Call `finish` once all groups are matched.

    `columns` are those of `layers.Layer`; after `finish` they are sorted by start, callers before the calls
    inside them. They overwrite the columns of the events, as no event makes more than one row. `last_ns` is
    the latest time, None without events.
    """

    def __init__(self, nest: AnyNesting, first_span: int, shapes: _Shapes, events: TraceColumns) -> None:
        self._nesting, self._first_span, self._shapes = nest, first_span, shapes
        self._count = self.count_begun = 0
        self.last_ns: int | None = None
        self._overlapping: list[int] = []
        """The rows that have overlap tracks."""
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
        # A broadcast column (one value for all events) stays one.
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
        # The last place is for "no span".
        self._row_of_span: Int32s = empty(count + 1, np.int32)
        self._row_of_span[-1] = NONE
        self._row: Int32s = empty(count, np.int32)
        for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
            first = number * _ROWS_AT_ONCE
            rows = range(first, min(first + _ROWS_AT_ONCE, shapes.row_count))
            self._nest(events, range(start, stop), rows)
        self._row = np.empty(0, np.int32)

    def _nest(self, events: TraceColumns, places: range, rows: range) -> None:
        """Nest the events at some places, which are all events of some rows."""
        first, before = self._shapes.put(self._nesting, rows), self._count
        for start in range(places.start, places.stop, _AT_ONCE):
            # A copy, as the native core reads contiguous columns, and these are overwritten.
            some = events.take(np.arange(start, min(start + _AT_ONCE, places.stop)))
            shapes, some.shape = some.shape, self._shapes.number[some.shape] - np.int32(first)
            self._nesting.events(some, 0, len(some))
            some.shape = shapes
            self._take(some)
            touched(len(some) * _ROW_BYTES)
        self._leave(slice(before, self._count), rows)

    def _leave(self, spans: slice, rows: range) -> None:
        """Close the open spans of some rows with a provisional end, and drop these rows; `spans`
        are on them.
        """
        row, kind = self._row[spans], self.columns["kind"][spans]
        # Rows that the nesting has added are overlap tracks. The last place is for "no row".
        is_open, lanes = (np.zeros(self._nesting.row_count + 1, of) for of in (np.bool_, np.uint8))
        overlaps: dict[int, int] = {}
        for at in range(len(rows), self._nesting.row_count):
            base = self._nesting.base(at)
            lanes[at] = overlaps[base] = overlaps.get(base, 0) + 1
        for part in parts(len(row)):
            is_open[row[part][kind[part] == UNCLOSED]] = True
            self.columns["lane"][spans][part] = lanes[row[part]]
        for at in np.flatnonzero(is_open[:-1]).tolist():
            self._nesting.close(at if at < len(rows) else self._nesting.base(at), _OPEN_NS)
        ops = self._nesting.take_ops().used()
        self._end(ops, np.arange(len(ops["kind"])), None)
        self._overlapping += [rows.start + base for base in overlaps]
        self._nesting.forget_rows()

    def _take(self, events: TraceColumns) -> None:
        """Add the operations that the nesting made of the last events."""
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
        """Apply operations that end spans."""
        columns, event = self.columns, ops["event"][ended]
        at = self._rows_of_spans(ops["slice_id"][ended])
        columns["end_ns"][at] = ops["ts"][ended]
        closed = at[ops["mark"][ended] == NO_MARK]
        columns["kind"][closed[columns["kind"][closed] == UNCLOSED]] = SPAN
        by_event = np.flatnonzero(event != NONE)
        for name, of_end in (("args", "end_args"), ("source_ns", "end_source_ns")):
            if events is not None and of_end in columns:
                columns[of_end][at[by_event]] = getattr(events, name)[event[by_event]]

    def finish(self, end_ns: int) -> None:
        """Close the spans that are still open, and find the callers and depths of all."""
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
        """Replace a column by a broadcast value, where all rows have that value, or there is no column."""
        column = self.columns.get(name, np.empty(0, np.int32))
        if not any(bool((column[part] != value).any()) for part in parts(len(column))):
            self._same[name] = np.broadcast_to(column.dtype.type(value), self._count)
            self.columns.pop(name, None)

    def _nest_again(self, rows: Int64s) -> None:
        """Find callers by times alone, for rows with overlap tracks.

        While a span is open, it is not known what it encloses, so such spans get overlap tracks. Now all ends
        are known: for example, spans that were recorded as an end and a duration nest after all.
        """
        start_ns, end_ns, kind = (self.columns[name][rows] for name in ("start_ns", "end_ns", "kind"))
        order = np.lexsort((-end_ns, start_ns))
        lasts = (kind != INSTANT) & (kind != NO_BEGIN)
        found = callers_by_time(start_ns[order], end_ns[order], lasts[order])
        self.columns["parent"][rows[order]] = np.where(found == NONE, NONE, rows[order][found])

    def _sort(self) -> None:
        """Sort the rows by start."""
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
        """Whether the rows are not sorted."""
        for part in parts(len(start_ns) - 1):
            now, then = part, slice(part.start + 1, part.stop + 1)
            is_late = start_ns[then] < start_ns[now]
            if depth is not None:
                is_late |= (start_ns[then] == start_ns[now]) & (depth[then] < depth[now])
            if bool(is_late.any()):
                return True
        return False


def _by_rows(events: TraceColumns, shapes: _Shapes) -> tuple[TraceColumns, Int64s]:
    """The events in batches of `_ROWS_AT_ONCE` rows, and the first event of each batch, with the end of the
    last. Within a batch they keep their order.
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
