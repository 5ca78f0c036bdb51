"""Spans of each thread's layers and of each stream, from what the nesting makes of the events.

`event/nesting.py` has the rules, for the timeline too, so that a report and a timeline say the same of a call
that does not end, or of an end without a begin.
"""

from __future__ import annotations

from typing import Any, Final

from tracepipe.event import ops as op
from tracepipe.event.columns import NONE, Int32s, Int64s, TraceColumns
from tracepipe.event.native_nesting import AnyNesting, new_nesting
from tracepipe.event.nesting import ShapeRow
from tracepipe.event.ops import BEGIN, END, NO_MARK
from tracepipe.event.outcomes import Outcomes
from tracepipe.reports.frames.callers import callers_by_time, depths
from tracepipe.reports.frames.grouping import equal
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.shapes import FRAMES, ShapeTable
from tracepipe.reports.frames.stored import empty, made, parts, taken, touched

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
        spans = Spans(self.nesting, self._spans, _Shapes(self.nesting, shapes, group), events)
        self._spans += spans.count_begun
        return spans


class _Shapes:
    """How the shapes of a group nest: `number` is that of the nesting for each, and `row` its row by that.

    Names matter for begins that meet ends alone, so that the nesting has few shapes of a million names.
    """

    def __init__(self, nest: AnyNesting, table: ShapeTable, group: str) -> None:
        every = np.arange(len(table), dtype=np.int32)
        own = every[table.groups(every) == FRAMES.index(group)]
        of_row, first = equal(*table.rows(own))
        self.rows = range(nest.row_count, nest.row_count + len(first))
        for _ in self.rows:
            nest.add_row()
        phases, has_dur = table.column("phase", own), table.has_dur(own)
        names = np.where(np.isin(phases, _NAME_MATTERS), table.column("name", own), NONE)
        number, first = equal(of_row, phases, has_dur, names)
        # Memory that is not written to is not taken: the places of other groups' shapes.
        self.number: Int32s = np.zeros(len(table), np.int32)
        self.number[own] = number
        self.row: Int32s = of_row[first] + self.rows.start
        columns = of_row, names, phases, has_dur
        for part in parts(len(first)):
            met = zip(*(column[first[part]].tolist() for column in columns), strict=True)
            for at, (row, name, phase, has) in enumerate(met, part.start):
                nest.set_shape(at, ShapeRow(row + self.rows.start, name, chr(phase), has_dur=has))


class Spans:
    """Spans and instants in the order in which they were met: `finish` them, once all groups are matched.

    `columns` have a row for each, and after `finish` in the order of their starts, callers before the calls
    in them: those of `layers.Layer`, but that `lane` is the row of the nesting before. They are written where
    those of the events were: no event makes two of them.
    """

    def __init__(self, nest: AnyNesting, first_span: int, shapes: _Shapes, events: TraceColumns) -> None:
        self._nesting, self._first_span, self._shapes = nest, first_span, shapes
        self._count = self.count_begun = 0
        count = len(events)
        has_lengths = events.dur_ns.flags.writeable
        self.columns: dict[str, Any] = {
            "start_ns": events.ts_ns,
            "end_ns": events.dur_ns if has_lengths else empty(count, np.int64),
            "kind": empty(count, np.uint8),
            "parent": empty(count, np.int32),
            "lane": empty(count, np.int32),
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
        for start in range(0, count, _AT_ONCE):
            # The native core reads columns one after the other, and what is read is written over.
            some = events.take(np.arange(start, min(start + _AT_ONCE, count)))
            met, some.shape = some.shape, shapes.number[some.shape]
            nest.events(some, 0, len(some))
            some.shape = met
            self._take(some)
            touched(len(some) * _ROW_BYTES)
        # Rows that came meanwhile stand beside others.
        self._beside = range(shapes.rows.stop, nest.row_count)

    @property
    def last_ns(self) -> int | None:
        """The latest end so far, None without any."""
        ends_ns = self.columns["end_ns"]
        return max((int(ends_ns[part].max()) for part in parts(self._count)), default=None)

    def _take(self, events: TraceColumns) -> None:
        """Add what the nesting made of events since the last call."""
        ops = self._nesting.take_ops().used()
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
        columns["lane"][rows] = ops["row"][made]
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
        at = self._rows_of_spans(ops["span"][ended])
        columns["end_ns"][at] = ops["ts"][ended]
        closed = at[ops["mark"][ended] == NO_MARK]
        columns["kind"][closed[columns["kind"][closed] == UNCLOSED]] = SPAN
        told = np.flatnonzero(event != NONE)
        for name, of_end in (("args", "end_args"), ("source_ns", "end_source_ns")):
            if events is not None and of_end in columns:
                columns[of_end][at[told]] = getattr(events, name)[event[told]]

    def finish(self, end_ns: int) -> None:
        """End what is still open, and find out who is in whom."""
        for row in self._open_rows():
            self._nesting.close(row, end_ns)
        ops = self._nesting.take_ops().used()
        self._end(ops, np.arange(len(ops["kind"])), None)
        self._row_of_span = np.empty(0, np.int32)
        self.columns = {name: column[: self._count] for name, column in self.columns.items()}
        lane_of_row, beside = self._lanes()
        row_of = self.columns["lane"]
        self.columns["lane"] = made(self._count, np.uint8, lambda part: lane_of_row[row_of[part]])
        if beside:
            row_of = self._shapes.row[self._shapes.number[self.columns["shape"]]]
            by_row = np.argsort(row_of, kind="stable")
            for first, last in np.searchsorted(row_of[by_row], [(row, row + 1) for row in beside]).tolist():
                self._nest_again(by_row[first:last])
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

    def _open_rows(self) -> set[int]:
        """The rows on which, or beside which, something is open."""
        is_open = np.zeros(self._beside.stop + 1, np.bool_)
        for part in parts(self._count):
            is_open[self.columns["lane"][part][self.columns["kind"][part] == UNCLOSED]] = True
        rows = np.flatnonzero(is_open[:-1]).tolist()
        return {self._nesting.base(row) if row in self._beside else row for row in rows}

    def _lanes(self) -> tuple[Any, list[int]]:
        """The lane of each row, that of no row at the end; and the rows that others stand beside."""
        lanes = np.zeros(self._beside.stop + 1, np.uint8)
        beside: dict[int, int] = {}
        for row in self._beside:
            base = self._nesting.base(row)
            lanes[row] = beside[base] = beside.get(base, 0) + 1
        return lanes, list(beside)

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
