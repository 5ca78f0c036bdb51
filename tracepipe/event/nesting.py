"""Matches begins with ends. Nothing else does, neither for the timeline nor for the reports.

Events in the order of time go in, operations on rows come out. A row is a layer of a thread, or a stream of a
GPU. It has open slices (B, whose end is not known yet), and inside the innermost of them, unfinished ones (X,
whose end is known). No B nests in an X, as it may end later. A slice that overlaps those of its row without
nesting goes to an overlap row, which becomes an overlap track. `nest.c` of the native core does the same.

An X nests in an open B if it ends before a horizon. All events up to that are given before operations are
taken: if that B ends earlier, the operations of X are still there, and get an overlap row.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from tracepipe.event.bounded import put_bounded
from tracepipe.event.columns import NONE, Bools, Bytes, Int32s, Int64s, TraceColumns, grown
from tracepipe.event.model import FLOW_LIMIT, FLOW_PHASES, Record
from tracepipe.event.ops import (
    BEGIN,
    END,
    FROM_DURATION,
    INSTANT,
    MORE_FLOWS,
    NO_BEGIN,
    NO_MARK,
    UNCLOSED,
    Op,
    OpColumns,
    op_of,
)
from tracepipe.native import checked, library, owned
from tracepipe.native.signatures import Events, Shapes, Starts

# This many launches are remembered, then the oldest is forgotten: a capture that lost kernels must not fill
# the memory.
LAUNCHES_MAX: Final = 1 << 16


class Early(NamedTuple):
    """A kernel that started before its call, by more than the clocks' bound."""

    launch: int
    start_ns: int
    bound_ns: int
    call_ns: int


NO_LAUNCH, COUNTED, DRAWN, STARTS = range(4)
"""What is done with a batch of warps. Its launch is unknown, it is only counted, it is drawn, or it is drawn
and a flow may start at it."""


@dataclass(slots=True, eq=False)
class WarpStarts:
    """Batches of warps among events: the place of each there, its launch, the time at which its first warp
    enters, by how much that may be wrong, and what is done with it. `flow` is set to its flow, 0 for none.

    A flow may start only at a warp that is drawn now, with the events around it.
    """

    place: Int64s
    launch: Int64s
    ts_ns: Int64s
    bound_ns: Int64s
    done: Bytes
    flow: Int64s

    def columns(self) -> list[Any]:
        """The columns in the order of the fields."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def rows(self) -> Iterator[tuple[int, ...]]:
        """The columns of each batch but `flow`, as rows."""
        return zip(*(column.tolist() for column in self.columns()[:-1]), strict=True)


@dataclass(slots=True)
class _Launch:
    start_ns: int | None = None
    bound_ns: int = 0
    flow: int = 0
    called: bool = False
    drawn: bool = False


class Launches:
    """The last launches by id. Calls and kernels come in the order of their times."""

    def __init__(self) -> None:
        self.early: list[Early] = []
        self._launches = OrderedDict[int, _Launch]()
        self._last_flow = 0

    def _of(self, launch: int) -> _Launch:
        one = self._launches.get(launch)
        if one is None:
            put_bounded(self._launches, launch, one := _Launch(), LAUNCHES_MAX)
        return one

    def _flow_of(self, one: _Launch) -> int:
        """The flow of a launch: negative at its first use, where it starts, and positive from then on."""
        if one.flow:
            return one.flow
        # Even: the flows of calls through the layers are odd. It is not made from the launch id, which may
        # have 64 bits and may be used again.
        self._last_flow += 2
        one.flow = self._last_flow
        return -one.flow

    def call(self, launch: int, ts_ns: int) -> int:
        """Note a launch call and return its flow. An id that had a call before is a new launch now."""
        one = self._of(launch)
        if one.called:
            one.start_ns, one.drawn, one.flow = None, False, 0
        if one.start_ns is not None and one.start_ns + one.bound_ns < ts_ns:
            self.early.append(Early(launch, one.start_ns, one.bound_ns, ts_ns))
        one.start_ns, one.called = None, True
        return self._flow_of(one)

    def start(self, launch: int, ts_ns: int, bound_ns: int) -> None:
        """Note when a launch's work starts, within `bound_ns`, to compare that with the time of its call."""
        one = self._of(launch)
        if not one.called and one.start_ns is None:
            one.start_ns, one.bound_ns = ts_ns, bound_ns

    def kernel(self, launch: int, ts_ns: int, bound_ns: int) -> int:
        """Note a kernel's start, within `bound_ns`, and return the flow that ends at it."""
        self.start(launch, ts_ns, bound_ns)
        one = self._of(launch)
        one.drawn = True
        return self._flow_of(one)

    def warps(self, launch: int, ts_ns: int, bound_ns: int, done: int) -> int:
        """Note the first warp of a batch and return its flow, 0 if no flow ends at it."""
        if done == NO_LAUNCH:
            return 0
        one = self._of(launch)
        if done != COUNTED and one.drawn:
            return 0
        if done == STARTS or (done == DRAWN and one.flow):
            return self.kernel(launch, ts_ns, bound_ns)
        self.start(launch, ts_ns, bound_ns)
        return 0


# This many layers have separate sums of losses. There are ten, but a file may name any text.
_LAYERS_MAX: Final = 100


@dataclass(slots=True)
class Outcomes:
    """Counts of what did not go as it should. Each case is also marked on its slice."""

    unclosed: int = 0
    """B without E: drawn to the end of the recording, or to the end of its caller."""
    no_begin: int = 0
    """E without B and without a duration: drawn as an instant."""
    overlaps: int = 0
    """Slices that overlap those of their row, or are nested too deep: on an overlap row."""
    undrawn: int = 0
    """Slices for which there are too many overlap rows: not drawn."""
    causality: int = 0
    """Kernels and warps that start before their launch call, by more than the clocks' bound."""
    beyond: int = 0
    """Events of threads, streams, GPUs or warps for which there are too many tracks: not drawn."""


def count_loss(losses: Counter[str], loss: Record) -> None:
    """Add a loss to those of its layer."""
    layer = loss.get("layer", "unknown layer")
    has_room = layer in losses or len(losses) < _LAYERS_MAX
    losses[layer if has_room else "other layers"] += loss["count"]


# An input with more overlaps than this does not describe a call stack.
OVERLAP_ROWS_MAX: Final = 64
ALL_OVERLAP_ROWS_MAX: Final = 512
"""The most overlap rows of a recording: each takes memory for what is open on it."""
_MORE_FLOWS_MAX: Final = 1 << 18
"""The most flows of operations beyond the second ones, of a recording."""
# Perfetto v52 ignores the ends of slices that are nested deeper than this.
DEPTH_MAX: Final = 512
NO_ROW: Final = -1
_LAST_NS: Final = (1 << 63) - 1
_OF_EVENTS: Final = FLOW_LIMIT + 1
"""A bit that is set in flow numbers that events have, and not in those that are made here."""
FLOWS_OF_ALL: Final = 1
FLOWS_OF_IOCTLS: Final = 2
"""The open slices of a row at which a flow may start: all, or those of ioctl alone."""


class ShapeRow(NamedTuple):
    """The nesting of a shape's events: `row` is NO_ROW if they do not nest. An outer call may be the cause of
    those with `takes_flow`.
    """

    row: int
    name: int
    phase: str
    takes_flow: bool = False
    has_dur: bool = False
    has_launch: bool = False


_Open = tuple[int, int, int, int]
"""An open slice: its name, id, the place of its begin among the operations not yet taken, its flow or 0."""


@dataclass(slots=True, eq=False)
class Row:
    """The state of one row. `last_ns` is when its last slice began or ended. `ends` are the ends of the X
    slices that enclose that begin, outermost first, with their ids and the places of their begins among the
    operations. `above` are the rows of calls that may
    have caused what begins here, the nearer first. `starts_flows` is where a flow may start: at all open
    slices, those of ioctl, or none (0). `begun` is the place of the last begin among the operations not yet
    taken, if it is there, and `met` that of the last instant.
    """

    base: int = NO_ROW
    on_stream: bool = False
    last_ns: int = -(1 << 63)
    open: list[_Open] = field(default_factory=list)
    names: dict[int, int] = field(default_factory=dict)
    """How many open slices have each name, here and on its overlap rows, which share this."""
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    overlap_rows: list[int] = field(default_factory=list)
    above: tuple[int, int] = (NO_ROW, NO_ROW)
    starts_flows: int = 0
    begun: int = NONE
    met: int = NONE

    def unfinished(self, ts_ns: int) -> int:
        """The number of X slices that end after that time. All are kept until another slice begins here: a
        slice whose start is computed from its end's duration begins before the times that were asked for.
        """
        return bisect_left(self.ends, -ts_ns, key=lambda end: -end[0])

    def push(self, name: int, slice_id: int, at: int, flow: int) -> None:
        """Open a slice, whose begin is at a place among the operations."""
        self.open.append((name, slice_id, at, flow))
        self.names[name] = self.names.get(name, 0) + 1

    def pop(self) -> _Open:
        """Close the innermost open slice."""
        one = self.open.pop()
        if left := self.names[one[0]] - 1:
            self.names[one[0]] = left
        else:
            del self.names[one[0]]
        return one

    def take(self, ts_ns: int) -> int:
        """Begin a slice that nests here and return the slice around it."""
        around = self.around(ts_ns)
        del self.ends[self.unfinished(ts_ns) :]
        self.last_ns = ts_ns
        return around

    def changes_at(self, ts_ns: int) -> bool:
        """Whether a slice began or ended here last at that time, or an X slice ends then."""
        depth = self.unfinished(ts_ns)
        return self.last_ns == ts_ns or (depth < len(self.ends) and self.ends[depth][0] == ts_ns)

    def around(self, ts_ns: int) -> int:
        """The innermost slice at that time, NONE if there is none."""
        if depth := self.unfinished(ts_ns):
            return self.ends[depth - 1][1]
        return self.open[-1][1] if self.open else NONE


class Nesting:
    """Nests one recording. Row numbers count from 0; `ioctl` is the number of the name "ioctl"."""

    def __init__(self, ioctl: int) -> None:
        self._ioctl = ioctl
        self._rows: list[Row] = []
        self._shapes: dict[int, ShapeRow] = {}
        self._flow, self._slices, self._all_overlap_rows = 1, 0, 0
        self._launches = Launches()
        self._ops: list[Op] = []
        self._horizon_ns = -(1 << 63)
        self._more: list[tuple[int, int]] = []
        self.more_flows: Int64s = np.empty((0, 2), np.int64)
        """The pairs of further flows of the operations that were taken, of the shape `(pairs, 2)`."""
        self.outcomes = Outcomes()
        """The counts so far of what did not nest as it should."""

    @property
    def row_count(self) -> int:
        """The number of rows, with the overlap rows."""
        return len(self._rows)

    def base(self, row: int) -> int:
        """The row whose overlaps a row takes, or NO_ROW."""
        return self._rows[row].base

    def add_row(self, on_stream: bool = False) -> int:
        """Add a row and return its number."""
        self._rows.append(Row(on_stream=on_stream))
        return len(self._rows) - 1

    def forget_rows(self) -> None:
        """Forget all rows, on which nothing may be open. The counts stay."""
        self._rows.clear()

    def set_above(self, row: int, near: int, far: int, starts_flows: int) -> None:
        """Set which rows may have caused what begins on a row, and whether it may be a cause itself."""
        self._rows[row].above, self._rows[row].starts_flows = (near, far), starts_flows

    def set_horizon(self, ts_ns: int) -> None:
        """Set the time up to which all events are given before operations are taken."""
        self._horizon_ns = ts_ns

    def take_ops(self) -> OpColumns:
        """The operations since the last call, in the order in which they were made."""
        ops = OpColumns()
        ops.add(*self._ops)
        self._ops.clear()
        if len(self._more) != len(self.more_flows):
            self.more_flows = np.array(self._more, np.int64)
        return ops

    def add(self, *ops: Op) -> None:
        """Add operations that do not come from an event."""
        self._ops.extend(ops)

    def set_shape(self, number: int, shape: ShapeRow) -> None:
        """Set how the events of a shape nest."""
        self._shapes[number] = shape

    def set_shapes(self, row: Int32s, name: Int32s, phase: Bytes, has_dur: Bools) -> None:
        """Set how the events of all shapes nest, by the number of a shape; none may be a cause of others."""
        columns = zip(row.tolist(), name.tolist(), phase.tolist(), has_dur.tolist(), strict=True)
        self._shapes = {
            number: ShapeRow(on, of, chr(code), has_dur=has)
            for number, (on, of, code, has) in enumerate(columns)
        }

    def forget_shapes(self) -> None:
        """Forget all shapes: they have new numbers now."""
        self._shapes.clear()

    def open_names(self, count: int) -> Bools:
        """By the number of a name, whether an open slice has it; of the shape `(count,)`."""
        used = np.zeros(count, np.bool_)
        used[[name for row in self._rows for name, *_ in row.open]] = True
        return used

    def rename(self, to: Int32s) -> None:
        """Give the names of open slices their new numbers; `to` has these by the old numbers."""
        for row in self._rows:
            row.open[:] = [(int(to[name]), slice_id, at, flow) for name, slice_id, at, flow in row.open]
            if row.base == NO_ROW and row.names:
                counts = [(int(to[name]), count) for name, count in row.names.items()]
                row.names.clear()
                row.names.update(counts)

    def early(self) -> list[Early]:
        """Kernels that started before their calls, since the last call."""
        found, self._launches.early = self._launches.early, []
        self.outcomes.causality += len(found)
        return found

    def events(self, events: TraceColumns, start: int, stop: int, warps: WarpStarts | None = None) -> None:
        """Nest events in the order of time, from place `start` to before `stop`. Every shape has a row. Rows
        that are not events are ignored, but batches of warps get their flows.
        """
        if warps is not None:
            for at, (place, *of) in enumerate(warps.rows()):
                self._nest(events, start, place)
                warps.flow[at] = self._launches.warps(*of)
                start = place + 1
        self._nest(events, start, stop)

    def _nest(self, events: TraceColumns, start: int, stop: int) -> None:
        part = slice(start, stop)
        bounds_ns = [0] * (stop - start) if events.bound_ns is None else events.bound_ns[part].tolist()
        columns = zip(
            events.ts_ns[part].tolist(),
            events.shape[part].tolist(),
            events.dur_ns[part].tolist(),
            events.launch[part].tolist(),
            bounds_ns,
            strict=True,
        )
        rows, shapes, ops = self._rows, self._shapes, self._ops
        for event, (ts_ns, number, dur_ns, launch, bound_ns) in enumerate(columns, start):
            if number < 0:
                continue
            on, name, phase, takes_flow, has_dur, has_launch = shapes[number]
            row = rows[on]
            if phase == "E":
                opened = row.open
                is_next = opened and opened[-1][0] == name and ts_ns >= row.last_ns
                if is_next and len(opened) < DEPTH_MAX and not row.unfinished(ts_ns):
                    row.last_ns = ts_ns
                    ops.append((END, on, ts_ns, name, event, NO_MARK, 0, 0, row.pop()[1], NONE))
                else:
                    self._end(on, ts_ns, dur_ns if has_dur else None, name, event)
                continue
            if phase in FLOW_PHASES:
                number = launch & FLOW_LIMIT | _OF_EVENTS
                flow = -number if phase == "s" else number
                self._flow_end(on, ts_ns, name, event, flow, has_args=int(events.args[event]) != NONE)
                continue
            asked = self._caller(row) if takes_flow else 0
            launched = 0
            if has_launch and phase != "I":
                if row.on_stream:
                    launched = self._launches.kernel(launch, ts_ns, bound_ns)
                else:
                    launched = self._launches.call(launch, ts_ns)
            flow, flow2 = (asked, launched) if asked else (launched, 0)
            if phase == "B":
                if row.ends or ts_ns < row.last_ns or len(row.open) >= DEPTH_MAX:
                    self._begin(on, ts_ns, name, event, asked, flow, flow2)
                    continue
                opened, slice_id = row.open, self._slices
                parent = opened[-1][1] if opened else NONE
                row.last_ns, self._slices = ts_ns, slice_id + 1
                row.push(name, slice_id, len(ops), asked)
                row.begun = len(ops)
                ops.append((BEGIN, on, ts_ns, name, event, NO_MARK, flow, flow2, slice_id, parent))
            elif phase == "I":
                around = row.around(ts_ns)
                row.met = len(ops)
                ops.append((INSTANT, on, ts_ns, name, event, NO_MARK, flow, flow2, NONE, around))
            else:
                self._complete(on, ts_ns, dur_ns if has_dur else 0, name, event, NO_MARK, (flow, flow2))

    def one(self, row: int, phase: str, ts_ns: int, dur_ns: int | None, name: int, event: int) -> None:
        """Nest one event on a row that is given, not its shape's."""
        if phase == "I":
            self._ops.append(op_of(INSTANT, row, ts_ns, name, event))
        elif phase == "B":
            self._begin(row, ts_ns, name, event)
        elif phase == "E":
            self._end(row, ts_ns, dur_ns, name, event)
        else:
            self._complete(row, ts_ns, dur_ns or 0, name, event, NO_MARK)

    def _place(
        self,
        row: int,
        first: Sequence[int],
        ts_ns: int,
        end_ns: int | None,
        moved_to: Container[int] | None = None,
    ) -> int:
        """The first of `first` and `row`'s overlap rows that takes a B or an X; else a new overlap row.

        An X that is moved, to one of the rows `moved_to` or another, keeps its place among the operations.
        What happened on another row at the time of its begin may have a later place, and would be drawn
        inside it.
        """
        for at in (*first, *self._rows[row].overlap_rows):
            one = self._rows[at]
            if ts_ns < one.last_ns or (end_ns is not None and one.open and end_ns > self._horizon_ns):
                continue
            if moved_to is not None and at not in moved_to and one.changes_at(ts_ns):
                continue
            depth = one.unfinished(ts_ns)
            takes = len(one.open) + depth < DEPTH_MAX
            takes &= not depth or (end_ns is not None and end_ns <= one.ends[depth - 1][0])
            if takes:
                self.outcomes.overlaps += at != row
                return at
        self.outcomes.overlaps += 1
        overlaps = self._rows[row].overlap_rows
        if len(overlaps) >= OVERLAP_ROWS_MAX or self._all_overlap_rows >= ALL_OVERLAP_ROWS_MAX:
            self.outcomes.undrawn += 1
            return NO_ROW
        self._all_overlap_rows += 1
        self._rows.append(Row(base=row, names=self._rows[row].names))
        overlaps.append(len(self._rows) - 1)
        return len(self._rows) - 1

    def _begin(
        self, on: int, ts_ns: int, name: int, event: int, given: int = 0, flow: int = 0, flow2: int = 0
    ) -> None:
        at = self._place(on, (on,), ts_ns, None)
        slice_id, self._slices = self._slices, self._slices + 1
        parent = NONE
        if at != NO_ROW:
            row = self._rows[at]
            parent = row.take(ts_ns)
            row.push(name, slice_id, len(self._ops), given)
            row.begun = len(self._ops)
        self._ops.append((BEGIN, at, ts_ns, name, event, NO_MARK, flow, flow2, slice_id, parent))

    def _complete(
        self,
        on: int,
        ts_ns: int,
        dur_ns: int,
        name: int,
        event: int,
        mark: int,
        flows: tuple[int, int] = (0, 0),
    ) -> None:
        end_ns = min(ts_ns + dur_ns, _LAST_NS)
        at = self._place(on, (on,), ts_ns, end_ns)
        slice_id, self._slices = self._slices, self._slices + 1
        parent = NONE
        if at != NO_ROW:
            row = self._rows[at]
            parent = row.take(ts_ns)
            row.ends.append((end_ns, slice_id, len(self._ops)))
            row.begun = len(self._ops)
        # Both are added now: a stable sort by time puts them right among the slices that nest here later.
        self._ops.append((BEGIN, at, ts_ns, name, event, mark, *flows, slice_id, parent))
        self._ops.append((END, at, end_ns, name, NONE, NO_MARK, 0, 0, slice_id, NONE))

    def overlap_row(self, row: int, ts_ns: int, end_ns: int) -> int:
        """Put a slice on an overlap row of `row` and return that; NO_ROW if none takes it."""
        at = self._place(row, (), ts_ns, end_ns)
        if at != NO_ROW:
            self._rows[at].take(ts_ns)
            self._rows[at].ends.append((end_ns, NONE, NONE))
        return at

    def _flow_end(self, on: int, ts_ns: int, name: int, event: int, number: int, *, has_args: bool) -> None:
        """Give an end of a flow to the slice that begins at that time, or else make an instant of it. If it
        has no arguments, the instant before takes it, if that has the same time and name.
        """
        for at in (on, *self._rows[on].overlap_rows):
            place = self._rows[at].begun
            if not 0 <= place < len(self._ops):
                continue
            if self._ops[place][:3] == (BEGIN, at, ts_ns) and self._add_flow(place, number):
                return
        row = self._rows[on]
        met = self._ops[row.met] if not has_args and 0 <= row.met < len(self._ops) else ()
        if met[:4] == (INSTANT, on, ts_ns, name) and self._add_flow(row.met, number):
            return
        row.met, around = len(self._ops), row.around(ts_ns)
        self._ops.append((INSTANT, on, ts_ns, name, event, NO_MARK, number, 0, NONE, around))

    def _end(self, on: int, ts_ns: int, dur_ns: int | None, name: int, event: int) -> None:
        opened = name in self._rows[on].names
        if not opened and dur_ns is not None:
            # Its begin was lost, or its writer records exits only: the duration gives the begin.
            start_ns = max(min(0, ts_ns), ts_ns - dur_ns)
            self._complete(on, start_ns, ts_ns - start_ns, name, event, FROM_DURATION)
            return
        at = self._row_of_end(on, ts_ns, name) if opened else NO_ROW
        if at == NO_ROW:
            self.outcomes.no_begin += 1
            self._ops.append((INSTANT, on, ts_ns, name, event, NO_BEGIN, 0, 0, NONE, NONE))
            return
        row = self._rows[at]
        self._set_aside(row, on, ts_ns)
        while (ended := row.pop())[0] != name:
            # longjmp, an exception or a lost record: the caller has returned, so this call has too.
            self._ops.append((END, at, ts_ns, ended[0], NONE, UNCLOSED, 0, 0, ended[1], NONE))
            self.outcomes.unclosed += 1
        self._ops.append((END, at, ts_ns, name, event, NO_MARK, 0, 0, ended[1], NONE))

    def _set_aside(self, row: Row, on: int, ts_ns: int) -> None:
        """Put the X slices that end after that time, when an open slice around them ends, on overlap rows of
        `on`.
        """
        moved = row.ends[: row.unfinished(ts_ns)]
        row.ends.clear()
        row.last_ns = _LAST_NS  # so that it takes none of them
        moved_to: set[int] = set()
        for end_ns, slice_id, place in moved:
            if not 0 <= place < len(self._ops) - 1 or self._ops[place][8] != slice_id:
                continue
            start_ns = self._ops[place][2]
            at, parent = self._place(on, (), start_ns, end_ns, moved_to), NONE
            if at != NO_ROW:
                moved_to.add(at)
                parent = self._rows[at].take(start_ns)
                self._rows[at].ends.append((end_ns, slice_id, place))
                self._rows[at].begun = place
            for one, above in ((place, parent), (place + 1, NONE)):
                kind, _, at_ns, name, event, mark, flow, flow2, value, _ = self._ops[one]
                self._ops[one] = kind, at, at_ns, name, event, mark, flow, flow2, value, above
        row.last_ns = ts_ns

    def _row_of_end(self, on: int, ts_ns: int, name: int) -> int:
        """The row of an E: a row or overlap row where a B of that name is open, preferably innermost."""
        row = self._rows[on]
        # The innermost calls of a full row are on its overlap rows.
        near = (*reversed(row.overlap_rows), on) if len(row.open) >= DEPTH_MAX else (on, *row.overlap_rows)
        rows = [at for at in near if self._rows[at].open and ts_ns >= self._rows[at].last_ns]
        inner = (at for at in rows if self._rows[at].open[-1][0] == name)
        outer = (at for at in rows if any(one[0] == name for one in self._rows[at].open))
        return next(inner, next(outer, NO_ROW))

    def _caller(self, row: Row) -> int:
        """The flow from the call that caused what begins on a row now, 0 if there is none."""
        if row.open:
            return 0  # another driver function called it, as the nesting shows
        for at in row.above:
            above = self._rows[at] if at != NO_ROW else row
            # No system call but ioctl runs the driver.
            if above.open and (above.starts_flows != FLOWS_OF_IOCTLS or above.open[-1][0] == self._ioctl):
                return above.open[-1][3] or self._give_flow(above, -1)
        return 0

    def _give_flow(self, row: Row, depth: int) -> int:
        """Start a flow at an open slice, if its begin is still among the operations not yet taken."""
        # Odd: the flows of launches are even.
        flow, self._flow = self._flow, self._flow + 2
        name, slice_id, at, _ = row.open[depth]
        row.open[depth] = name, slice_id, at, flow
        if at < len(self._ops):
            self._add_flow(at, -flow)
        return flow

    def _add_flow(self, at: int, number: int) -> bool:
        """Add a flow to an operation. Return whether there is room for it."""
        *op, flow, flow2, value, parent = self._ops[at]
        kind, on, ts_ns, name, event, mark = op
        if flow and flow2:
            if len(self._more) >= _MORE_FLOWS_MAX:
                return False
            self._more.append((number, flow2))
            number = MORE_FLOWS + len(self._more) - 1
        flows = (flow, number) if flow else (number, flow2)
        self._ops[at] = kind, on, ts_ns, name, event, mark, *flows, value, parent
        return True

    def settle(self) -> None:
        """Give each open call its flow at the end of a batch, while its begin can still be changed."""
        for row in self._rows:
            for depth, one in enumerate(row.open if row.starts_flows else ()):
                if not one[3] and (row.starts_flows != FLOWS_OF_IOCTLS or one[0] == self._ioctl):
                    self._give_flow(row, depth)

    def close(self, row: int, ts_ns: int) -> None:
        """End and mark what is still open on a row and its overlap rows, at the end of the recording."""
        for at in (row, *self._rows[row].overlap_rows):
            one = self._rows[at]
            self.outcomes.unclosed += len(one.open)
            at_ns = max(ts_ns, one.last_ns)
            for name, slice_id, _, _ in reversed(one.open):
                self._ops.append((END, at, at_ns, name, NONE, UNCLOSED, 0, 0, slice_id, NONE))
            one.open.clear()
            one.names.clear()


_ROWS, _UNCLOSED, _NO_BEGIN, _OVERLAPS, _UNDRAWN, _OPS, _EARLY, _MORE = range(8)
_SHAPE_KINDS: Final = {
    "row": np.int32, "name": np.int32, "has_dur": np.int64, "phase": np.uint8, "takes_flow": np.uint8,
    "has_launch": np.uint8,
}  # fmt: skip


class NativeNesting:
    """Nests one recording by `nest.c`. Its methods are those of `Nesting`, with the same results."""

    def __init__(self, core: ctypes.CDLL, ioctl: int) -> None:
        self._core = core
        self._nest = owned(self, core.tp_nest_new(ioctl), core.tp_nest_free)
        self._ops = OpColumns()
        self._shapes: dict[str, Any] = {name: np.empty(0, kind) for name, kind in _SHAPE_KINDS.items()}
        self._causality = 0
        self.more_flows: Int64s = np.empty((0, 2), np.int64)

    def _count(self, what: int) -> int:
        return int(self._core.tp_nest_count(self._nest, what))

    @property
    def outcomes(self) -> Outcomes:
        counted = (*map(self._count, (_UNCLOSED, _NO_BEGIN, _OVERLAPS, _UNDRAWN)), self._causality)
        return Outcomes(*counted)

    @property
    def row_count(self) -> int:
        return self._count(_ROWS)

    def base(self, row: int) -> int:
        return int(self._core.tp_nest_base(self._nest, row))

    def add_row(self, on_stream: bool = False) -> int:
        return checked(self._core.tp_nest_row(self._nest, NO_ROW, on_stream))

    def forget_rows(self) -> None:
        self._core.tp_nest_forget_rows(self._nest)

    def set_above(self, row: int, near: int, far: int, starts_flows: int) -> None:
        self._core.tp_nest_above(self._nest, row, near, far, starts_flows)

    def set_horizon(self, ts_ns: int) -> None:
        self._core.tp_nest_horizon(self._nest, ts_ns)

    def take_ops(self) -> OpColumns:
        ops, self._ops = self._ops, OpColumns()
        if (count := self._count(_MORE)) != len(self.more_flows):
            self.more_flows = np.empty((count, 2), np.int64)
            self._core.tp_nest_more(self._nest, self.more_flows.ctypes.data)
        return ops

    def add(self, *ops: Op) -> None:
        self._ops.add(*ops)

    def early(self) -> list[Early]:
        count = self._count(_EARLY)
        if not count:
            return []
        out = np.empty((count, 4), np.int64)
        self._core.tp_nest_early(self._nest, out.ctypes.data, count)
        self._causality += count
        return [Early(*row) for row in out.tolist()]

    def set_shape(self, number: int, shape: ShapeRow) -> None:
        row, name, phase, takes_flow, has_dur, has_launch = shape
        if number >= len(self._shapes["row"]):
            self._shapes = {key: grown(column, number + 1, 0) for key, column in self._shapes.items()}
        values = (row, name, 0 if has_dur else -1, ord(phase), takes_flow, has_launch)
        for column, value in zip(self._shapes.values(), values, strict=True):
            column[number] = value

    def set_shapes(self, row: Int32s, name: Int32s, phase: Bytes, has_dur: Bools) -> None:
        values: tuple[Any, ...] = (row, name, np.where(has_dur, 0, -1), phase, 0, 0)
        self._shapes = {
            key: np.ascontiguousarray(np.broadcast_to(value, len(row)), kind)
            for (key, kind), value in zip(_SHAPE_KINDS.items(), values, strict=True)
        }

    def forget_shapes(self) -> None:
        """Do nothing: a new shape replaces the one that had its number."""

    def open_names(self, count: int) -> Bools:
        used = np.zeros(count, np.bool_)
        self._core.tp_nest_names(self._nest, used.ctypes.data)
        return used

    def rename(self, to: Int32s) -> None:
        self._core.tp_nest_rename(self._nest, to.ctypes.data)

    def events(self, events: TraceColumns, start: int, stop: int, warps: WarpStarts | None = None) -> None:
        shapes = Shapes(*(column.ctypes.data for column in self._shapes.values()))
        ops = self._ops.reserve(self._core.tp_nest_most(self._nest, stop - start))
        bound = None if events.bound_ns is None else events.bound_ns.ctypes.data
        columns = (events.ts_ns, events.dur_ns, events.launch)
        more = (column.ctypes.data for column in (events.shape, events.args))
        given = Events(*(column.ctypes.data for column in columns), bound, *more)
        starts = Starts(*(() if warps is None else (one.ctypes.data for one in warps.columns())))
        batches = 0 if warps is None else len(warps.place)
        refs = ctypes.byref(given), ctypes.byref(shapes), ctypes.byref(starts)
        count = self._core.tp_nest_events(
            self._nest, *refs, batches, start, stop, ctypes.byref(ops), self._ops.count
        )
        self._ops.count = checked(count)

    def one(self, row: int, phase: str, ts_ns: int, dur_ns: int | None, name: int, event: int) -> None:
        ops = self._ops.reserve(self._core.tp_nest_most(self._nest, 1))
        dur_ns = -1 if dur_ns is None else dur_ns
        count = self._core.tp_nest_one(
            self._nest, row, ord(phase), ts_ns, dur_ns, name, event, ctypes.byref(ops), self._ops.count
        )
        self._ops.count = checked(count)

    def overlap_row(self, row: int, ts_ns: int, end_ns: int) -> int:
        at = int(self._core.tp_nest_overlap_row(self._nest, row, ts_ns, end_ns))
        if at < NO_ROW:
            raise MemoryError
        return at

    def settle(self) -> None:
        # The view of the columns is taken again: operations that were added since may have moved them.
        self._core.tp_nest_settle(self._nest, ctypes.byref(self._ops.reserve(0)), self._ops.count)

    def close(self, row: int, ts_ns: int) -> None:
        ops = self._ops.reserve(self._core.tp_nest_most(self._nest, 0))
        count = self._core.tp_nest_close(self._nest, row, ts_ns, ctypes.byref(ops), self._ops.count)
        self._ops.count = checked(count)


AnyNesting = Nesting | NativeNesting


def new_nesting(ioctl: int = NONE) -> AnyNesting:
    """Return a nesting of the native core where it is loaded, else one in Python."""
    core = library()
    return Nesting(ioctl) if core is None else NativeNesting(core, ioctl)
