"""Spans of each thread's layers and of each stream, from what the nesting makes of the events.

`event/nesting.py` has the rules, for the timeline too, so that a report and a timeline say the same of a call
that does not end, or of an end without a begin.
"""

from __future__ import annotations

from typing import Any, Final

from tracepipe.event import nesting
from tracepipe.event.columns import NONE, Int32s, Int64s, TraceColumns
from tracepipe.event.native_nesting import OP_COLUMNS, NativeNesting, OpColumns
from tracepipe.event.nesting import BEGIN, END, NO_MARK, NO_ROW, Nesting, Op, ShapeRow
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


class Spans:
    """Spans and instants of events in order: `match` them all, then `finish`.

    The columns have a row for each, in the order in which they were met, and after `finish` in that of their
    starts, callers before the calls in them. `event` and `end_event` are places among the events, NONE for
    the end that is none.
    """

    def __init__(self, shapes: list[Shape | None], room: int) -> None:
        core = library()
        self._nesting = Nesting(NONE) if core is None else NativeNesting(core, NONE)
        self._row_of_shape = self._rows_of(shapes)
        self._count = self._spans = 0
        self.start_ns: Int64s = np.empty(room, np.int64)
        self.end_ns: Int64s = np.empty(room, np.int64)
        self.kind = np.empty(room, np.uint8)
        self.event: Int32s = np.empty(room, np.int32)
        self.end_event: Int32s = np.empty(room, np.int32)
        self.parent: Int32s = np.empty(room, np.int32)
        self.depth: Int32s = np.empty(0, np.int32)
        self.lane: Int32s = np.empty(room, np.int32)
        """The row of the nesting, until `finish`."""
        # The last place is that of no span.
        self._row_of_span: Int32s = np.empty(room + 1, np.int32)
        self._row_of_span[-1] = NONE

    @property
    def outcomes(self) -> Outcomes:
        """What did not go as it should."""
        return self._nesting.outcomes

    def _rows_of(self, shapes: list[Shape | None]) -> Int32s:
        """The nesting's row of each shape's events."""
        rows: dict[object, int] = {}
        names: dict[str, int] = {}
        out = np.full(len(shapes), NO_ROW, np.int32)
        for number, shape in enumerate(shapes):
            if shape is None or shape.row is None:
                continue
            row = rows.get(shape.row)
            if row is None:
                row = rows[shape.row] = self._nesting.add_row()
            name = names.setdefault(shape.name, len(names))
            out[number] = row
            self._nesting.set_shape(number, ShapeRow(row, name, shape.phase, has_dur=shape.has_dur))
        self._own_rows = list(rows.values())
        return out

    def match(self, events: TraceColumns) -> None:
        """Match all events, which are in order."""
        for start in range(0, len(events), _AT_ONCE):
            self._nesting.events(events, start, min(start + _AT_ONCE, len(events)))
            self._take()

    @property
    def last_ns(self) -> int | None:
        """The latest end so far, None without any."""
        return int(self.end_ns[: self._count].max()) if self._count else None

    def _take(self) -> None:
        """Add what the nesting made since the last call."""
        ops = _columns(self._nesting.take_ops())
        kind, mark, ts_ns, span = ops["kind"], ops["mark"], ops["ts"], ops["span"]
        made = np.flatnonzero(kind != END)
        first, last = self._count, self._count + len(made)
        rows = slice(first, last)
        begins = kind[made] == BEGIN
        self.start_ns[rows] = self.end_ns[rows] = ts_ns[made]
        self.event[rows], self.end_event[rows] = ops["event"][made], NONE
        self.lane[rows] = ops["row"][made]
        self.kind[rows] = np.where(
            begins,
            np.where(mark[made] == nesting.FROM_DURATION, FROM_DURATION, UNCLOSED),
            np.where(mark[made] == nesting.NO_BEGIN, NO_BEGIN, INSTANT),
        )
        begun = np.flatnonzero(begins)
        self._row_of_span[self._spans : self._spans + len(begun)] = begun + first
        self._count, self._spans = last, self._spans + len(begun)
        self.parent[rows] = self._row_of_span[ops["parent"][made]]
        ended = np.flatnonzero(kind == END)
        at = self._row_of_span[span[ended]]
        self.end_ns[at], self.end_event[at] = ts_ns[ended], ops["event"][ended]
        closed = at[mark[ended] == NO_MARK]
        self.kind[closed[self.kind[closed] == UNCLOSED]] = SPAN

    def finish(self, end_ns: int, shape: Int32s) -> None:
        """End what is still open, and find out who is in whom. `shape` are the shapes of the events."""
        for row in self._own_rows:
            self._nesting.close(row, end_ns)
        self._take()
        self._row_of_span = np.empty(0, np.int32)
        for name in ("start_ns", "end_ns", "kind", "event", "end_event", "parent", "lane"):
            getattr(self, name).resize(self._count, refcheck=False)
        lane_of_row, beside = self._lanes()
        self.lane = lane_of_row[self.lane]
        if beside:
            row_of = self._row_of_shape[shape[self.event]]
            by_row = np.argsort(row_of, kind="stable")
            for first, last in np.searchsorted(row_of[by_row], [(row, row + 1) for row in beside]).tolist():
                self._nest_again(by_row[first:last])
        self.depth = depths(self.parent)
        self._sort()

    def _lanes(self) -> tuple[Int32s, list[int]]:
        """The lane of each row, that of no row at the end; and the rows that others stand beside."""
        count = self._nesting.row_count
        lanes = np.zeros(count + 1, np.int32)
        beside: dict[int, int] = {}
        for row in range(count):
            base = self._nesting.base(row)
            if base != NO_ROW:
                lanes[row] = beside[base] = beside.get(base, 0) + 1
        return lanes, list(beside)

    def _nest_again(self, rows: Int64s) -> None:
        """Find callers by the times alone where a row has others beside it.

        While one is open it is not known what it encloses, so that such spans are drawn beside each other; by
        now all ends are known: those of a trace that has an end and a duration alone nest after all.
        """
        start_ns, end_ns, kind = self.start_ns[rows], self.end_ns[rows], self.kind[rows]
        order = np.lexsort((-end_ns, start_ns))
        lasts = (kind != INSTANT) & (kind != NO_BEGIN)
        found = callers_by_time(start_ns[order], end_ns[order], lasts[order])
        self.parent[rows[order]] = np.where(found == NONE, NONE, rows[order][found])

    def _sort(self) -> None:
        """Put the rows in the order of their starts."""
        later, same = np.diff(self.start_ns) > 0, np.diff(self.start_ns) == 0
        if bool((later | (same & (np.diff(self.depth) >= 0))).all()):
            return
        self.take(np.lexsort((self.depth, self.start_ns)))

    def take(self, order: Int64s) -> None:
        """Put the rows in an order, and parents into their new places."""
        places = np.empty(len(order) + 1, np.int32)
        places[order] = np.arange(len(order), dtype=np.int32)
        places[-1] = NONE
        self.parent = places[self.parent]
        for name in ("start_ns", "end_ns", "kind", "event", "end_event", "parent", "depth", "lane"):
            setattr(self, name, getattr(self, name)[order])


def _columns(ops: list[Op] | OpColumns) -> dict[str, Any]:
    """Operations as columns by name."""
    if isinstance(ops, OpColumns):
        return {name: column[: ops.count] for name, column in ops.columns.items()}
    values = np.array(ops, np.int64).reshape(len(ops), len(OP_COLUMNS)).T
    return dict(zip(OP_COLUMNS, values, strict=True))
