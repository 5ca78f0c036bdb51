"""Spans of each thread's layers and of each stream, from what the nesting makes of the events.

`event/nesting.py` has the rules, for the timeline too, so that a report and a timeline say the same of a call
that does not end, or of an end without a begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tracepipe.event import ops as op
from tracepipe.event.columns import NONE, Int32s, Int64s, TraceColumns
from tracepipe.event.native_nesting import NativeNesting
from tracepipe.event.nesting import NO_ROW, Nesting, ShapeRow
from tracepipe.event.ops import BEGIN, END, NO_MARK, OpColumns
from tracepipe.event.outcomes import Outcomes
from tracepipe.event.shape import Shape
from tracepipe.native import library
from tracepipe.reports.frames.callers import callers_by_time, depths
from tracepipe.reports.frames.libraries import np

KINDS = ("span", "instant", "no_begin", "from_duration", "unclosed")
"""span: begin and end are known. instant: no length. no_begin: an end alone, which is drawn as an instant.
from_duration: an end alone, whose duration says when it began. unclosed: a begin without an end; `end_ns` is
where its caller or the recording ended."""
SPAN, INSTANT, NO_BEGIN, FROM_DURATION, UNCLOSED = range(len(KINDS))
# Events nested at a time: what is made of them is looked at while the processor still has it at hand.
_AT_ONCE: Final = 1 << 14
_ALWAYS: Final = {
    "start_ns": np.int64, "end_ns": np.int64, "kind": np.uint8, "parent": np.int32, "lane": np.int32,
    "shape": np.int32, "args": np.int32, "end_args": np.int32,
}  # fmt: skip


class Matching:
    """Matches the events of one recording, one group of layers that nest together after the other."""

    def __init__(self) -> None:
        core = library()
        self.nesting = Nesting(NONE) if core is None else NativeNesting(core, NONE)
        self._spans = 0

    @property
    def outcomes(self) -> Outcomes:
        """What did not go as it should, so far."""
        return self.nesting.outcomes

    def match(self, events: TraceColumns, shapes: Iterable[tuple[int, Shape]]) -> Spans:
        """The spans of all events of a group, which are in order; `shapes` are its shapes by number."""
        spans = Spans(self.nesting, self._spans, dict(shapes), events)
        self._spans += spans.count_begun
        return spans


class Spans:
    """Spans and instants in the order in which they were met: `finish` them, once all groups are matched.

    `columns` have a row for each, and after `finish` in the order of their starts, callers before the calls
    in them: those of `layers.Layer`, but that `lane` is the row of the nesting before.
    """

    def __init__(
        self, nest: Nesting | NativeNesting, first_span: int, shapes: dict[int, Shape], events: TraceColumns
    ) -> None:
        self._nesting, self._first_span = nest, first_span
        self._row_of_shape = self._rows_of(shapes)
        self._count = self.count_begun = 0
        kinds: dict[str, Any] = dict(_ALWAYS)
        if bool(events.launch.any()):
            kinds["launch"] = np.int64
        if events.source_ns is not None:
            kinds |= {"bound_ns": np.int64, "source_ns": np.int64, "end_source_ns": np.int64}
        # What is not written to takes no memory.
        self.columns: dict[str, Any] = {name: np.empty(len(events), kind) for name, kind in kinds.items()}
        # The last place is that of no span.
        self._row_of_span: Int32s = np.empty(len(events) + 1, np.int32)
        self._row_of_span[-1] = NONE
        for start in range(0, len(events), _AT_ONCE):
            some = events.take(slice(start, start + _AT_ONCE))
            # The native core reads them one after the other.
            some.dur_ns, some.launch = map(np.ascontiguousarray, (some.dur_ns, some.launch))
            nest.events(some, 0, len(some))
            self._take(some)

    def _rows_of(self, shapes: dict[int, Shape]) -> Int32s:
        """The nesting's row of each shape's events."""
        rows: dict[object, int] = {}
        names: dict[str, int] = {}
        out = np.full(max(shapes, default=-1) + 1, NO_ROW, np.int32)
        for number, shape in shapes.items():
            key = shape.row
            row = rows.get(key)
            if row is None:
                row = rows[key] = self._nesting.add_row()
            name = names.setdefault(shape.name, len(names))
            out[number] = row
            self._nesting.set_shape(number, ShapeRow(row, name, shape.phase, has_dur=shape.has_dur))
        self._own_rows = list(rows.values())
        return out

    @property
    def last_ns(self) -> int | None:
        """The latest end so far, None without any."""
        return int(self.columns["end_ns"][: self._count].max()) if self._count else None

    def _take(self, events: TraceColumns) -> None:
        """Add what the nesting made of events since the last call."""
        ops = _columns(self._nesting.take_ops())
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
        for name in ("shape", "args", "launch", "bound_ns", "source_ns"):
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
        if events is not None and len(told):
            columns["end_args"][at[told]] = events.args[event[told]]
            if events.source_ns is not None:
                columns["end_source_ns"][at[told]] = events.source_ns[event[told]]

    def finish(self, end_ns: int) -> None:
        """End what is still open, and find out who is in whom."""
        for row in self._own_rows:
            self._nesting.close(row, end_ns)
        ops = _columns(self._nesting.take_ops())
        self._end(ops, np.arange(len(ops["kind"])), None)
        self._row_of_span = np.empty(0, np.int32)
        for column in self.columns.values():
            column.resize(self._count, refcheck=False)
        lane_of_row, beside = self._lanes()
        self.columns["lane"] = lane_of_row[self.columns["lane"]]
        if beside:
            row_of = self._row_of_shape[self.columns["shape"]]
            by_row = np.argsort(row_of, kind="stable")
            for first, last in np.searchsorted(row_of[by_row], [(row, row + 1) for row in beside]).tolist():
                self._nest_again(by_row[first:last])
        self.columns["depth"] = depths(self.columns["parent"])
        self._sort()

    def _lanes(self) -> tuple[Any, list[int]]:
        """The lane of each row, that of no row at the end; and the rows that others stand beside."""
        count, own = self._nesting.row_count, set(self._own_rows)
        lanes = np.zeros(count + 1, np.uint8)
        beside: dict[int, int] = {}
        for row in range(count):
            base = self._nesting.base(row)
            if base in own:
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
        start_ns, depth = self.columns["start_ns"], self.columns["depth"]
        passed_ns = np.diff(start_ns)
        if not bool(((passed_ns < 0) | ((passed_ns == 0) & (np.diff(depth) < 0))).any()):
            return
        order = np.lexsort((depth, start_ns))
        places = np.empty(len(order) + 1, np.int32)
        places[order] = np.arange(len(order), dtype=np.int32)
        places[-1] = NONE
        self.columns["parent"] = places[self.columns["parent"]]
        for name in self.columns:  # one by one, so that one alone is in memory twice
            self.columns[name] = self.columns[name][order]


def _columns(ops: OpColumns) -> dict[str, Any]:
    """Operations as columns by name."""
    return {name: column[: ops.count] for name, column in ops.columns.items()}
