"""Matches begins with ends: the spans of each thread's layers and of each stream, as columns.

The rules are those by which the timeline is drawn (`layout/rows.py`), so that a report and a timeline say the
same of a call that does not end, or of an end without a begin.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import cast

from tracepipe.event.outcomes import Outcomes
from tracepipe.layout.rows import LANES_MAX, lane_of_end
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.shapes import NO_DURATION, ShapeTable, SpanRow

KINDS = ("span", "instant", "no_begin", "from_duration", "unclosed")
"""span: begin and end are known. instant: no length. no_begin: an end alone, which is drawn as an instant.
from_duration: an end alone, whose duration says when it began. unclosed: a begin without an end; `end_ns` is
where its caller or the recording ended."""
SPAN, INSTANT, NO_BEGIN, FROM_DURATION, UNCLOSED = range(len(KINDS))
_B, _E, _I = ord("B"), ord("E"), ord("I")
NONE = -1


class Spans:
    """Spans and instants in the order in which they were met. Numbers are places in these columns."""

    def __init__(self, table: ShapeTable) -> None:
        self._table = table
        self.outcomes = Outcomes()
        self.start_ns, self.end_ns = array("q"), array("q")
        self.shape, self.end_shape = array("l"), array("l")
        self.depth, self.parent, self.lane = array("l"), array("l"), array("l")
        self.kind = bytearray()

    def match(self, events: Iterable[tuple[int, int]]) -> None:
        """Match events, given as time and number of their shape in the order of time."""
        table = self._table
        phases, names, rows, durations = table.phases, table.names, table.rows, table.dur_ns
        end_ns, end_shape = self.end_ns, self.end_shape
        for ts_ns, shape in events:
            row, phase = rows[shape], phases[shape]
            if row is None or phase == _I:
                if row is not None and row.ends:
                    _takes_begin(row, ts_ns)  # what has ended by now is not around it
                self._add(row, ts_ns, ts_ns, shape, INSTANT)
            elif phase == _E:
                opened = row.open
                if opened and opened[-1][0] == names[shape] and ts_ns >= row.last_ns:
                    number = opened.pop()[1]
                    row.last_ns = end_ns[number] = ts_ns
                    end_shape[number] = shape
                else:
                    self._end(row, ts_ns, shape)
            elif phase == _B:
                if row.ends or ts_ns < row.last_ns:
                    row = self._lane_of_begin(row, ts_ns)
                number = self._add(row, ts_ns, ts_ns, shape, UNCLOSED)
                if row is not None:
                    row.last_ns = ts_ns
                    row.open.append((names[shape], number, 0))
            else:
                self._complete(row, ts_ns, ts_ns + max(0, durations[shape]), shape, SPAN)

    def _add(self, row: SpanRow | None, start_ns: int, end_ns: int, shape: int, kind: int) -> int:
        number = len(self.start_ns)
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.shape.append(shape)
        self.end_shape.append(NONE)
        self.kind.append(kind)
        if row is None:
            around, lane = None, 0
        else:
            around, lane = row.open[-1][1] if row.open else row.inside[-1] if row.inside else None, row.lane
        self.parent.append(NONE if around is None else around)
        self.depth.append(0 if around is None else self.depth[around] + 1)
        self.lane.append(lane)
        return number

    def _lane_of_begin(self, row: SpanRow, ts_ns: int) -> SpanRow | None:
        if _takes_begin(row, ts_ns):
            return row
        self.outcomes.overlaps += 1
        for lane in cast("list[SpanRow]", row.beside):
            if _takes_begin(lane, ts_ns):
                return lane
        return self._new_lane(row)

    def _new_lane(self, row: SpanRow) -> SpanRow | None:
        if len(row.beside) >= LANES_MAX:
            self.outcomes.undrawn += 1
            return None
        lane = SpanRow(len(row.beside) + 1)
        row.beside.append(lane)
        return lane

    def _complete(self, row: SpanRow, ts_ns: int, end_ns: int, shape: int, kind: int) -> None:
        lane: SpanRow | None = row
        if not _takes_slice(row, ts_ns, end_ns):
            self.outcomes.overlaps += 1
            beside = cast("list[SpanRow]", row.beside)
            lane = next((one for one in beside if _takes_slice(one, ts_ns, end_ns)), None)
            lane = lane or self._new_lane(row)
        number = self._add(lane, ts_ns, end_ns, shape, kind)
        if lane is not None:
            lane.last_ns = ts_ns
            lane.ends.append(end_ns)
            lane.inside.append(number)

    def _end(self, row: SpanRow, ts_ns: int, shape: int) -> None:
        """An end that is not that of the innermost open call."""
        table = self._table
        name, dur_ns = table.names[shape], table.dur_ns[shape]
        opened = any(one[0] == name for lane in (row, *row.beside) for one in lane.open)
        if not opened and dur_ns != NO_DURATION:
            self._complete(row, max(0, ts_ns - dur_ns), max(0, ts_ns), shape, FROM_DURATION)
            return
        lane = lane_of_end(row, ts_ns, name)
        if lane is None:
            self.outcomes.no_begin += 1
            self._add(None, ts_ns, ts_ns, shape, NO_BEGIN)
            return
        lane.last_ns = ts_ns
        while (ended := lane.open.pop())[0] != name:
            self.end_ns[ended[1]] = ts_ns  # the caller has returned, so this call has too
            self.outcomes.unclosed += 1
        self.end_ns[ended[1]], self.end_shape[ended[1]] = ts_ns, shape

    def finish(self, end_ns: int) -> None:
        """End what is still open, and tell what was closed by an end from what was not."""
        for row in self._table.every_row():
            for lane in (row, *row.beside):
                self.outcomes.unclosed += len(lane.open)
                for _, number, _ in lane.open:
                    self.end_ns[number] = max(end_ns, lane.last_ns)
                lane.open.clear()

    def nest_again(self) -> None:
        """Find callers by the times alone where a row has tracks beside it.

        While one is open it is not known what it encloses, so that such spans are drawn beside each other; by
        now all ends are known: those of a trace that has an end and a duration alone nest after all.
        """
        mixed = {id(row) for row in self._table.every_row() if row.beside}
        if not mixed:
            return
        rows, spans_of = self._table.rows, dict[int, list[int]]()
        for number, shape in enumerate(self.shape):
            if id(rows[shape]) in mixed:
                spans_of.setdefault(id(rows[shape]), []).append(number)
        for numbers in spans_of.values():
            numbers.sort(key=lambda at: (self.start_ns[at], -self.end_ns[at]))
            self._nest(numbers)

    def _nest(self, numbers: list[int]) -> None:
        """Nest spans in the order of their starts, each in the shortest of the last ones that encloses it."""
        around: list[int] = []
        for number in numbers:
            start_ns, end_ns = self.start_ns[number], self.end_ns[number]
            while around and self.end_ns[around[-1]] <= start_ns:
                around.pop()
            near = around[: -LANES_MAX - 1 : -1]
            fits = (one for one in near if self.end_ns[one] >= end_ns and self.end_ns[one] > start_ns)
            parent = next(fits, NONE)
            self.parent[number] = parent
            self.depth[number] = 0 if parent == NONE else self.depth[parent] + 1
            if self.kind[number] not in (INSTANT, NO_BEGIN):
                around.append(number)

    def columns(self) -> pl.DataFrame:
        """All of them in the order of their starts, callers before the calls in them.

        start_ns, end_ns, kind, shape, end_shape, depth, parent (a row, or null), lane.
        """
        kind = np.frombuffer(bytes(self.kind), np.uint8).copy()
        end_shape = np.array(self.end_shape, np.int64)
        kind[(kind == UNCLOSED) & (end_shape != NONE)] = SPAN
        start_ns, depth = np.array(self.start_ns, np.int64), np.array(self.depth, np.int32)
        parent = np.array(self.parent, np.int64)
        order = np.lexsort((depth, start_ns))
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        if len(order):
            parent = np.where(parent == NONE, NONE, places[parent])[order]
        return pl.DataFrame(
            {
                "start_ns": start_ns[order],
                "end_ns": np.array(self.end_ns, np.int64)[order],
                "kind": kind[order],
                "shape": np.array(self.shape, np.int64)[order],
                "end_shape": end_shape[order],
                "depth": depth[order],
                "parent": parent,
                "lane": np.array(self.lane, np.int32)[order],
            }
        )


def _takes_begin(row: SpanRow, ts_ns: int) -> bool:
    takes = row.takes_begin(ts_ns)
    del row.inside[len(row.ends) :]
    return takes


def _takes_slice(row: SpanRow, ts_ns: int, end_ns: int) -> bool:
    takes = row.takes_slice(ts_ns, end_ns)
    del row.inside[len(row.ends) :]
    return takes
