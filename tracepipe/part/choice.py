"""Chooses the rows of a part while a recording is read: the events in a window of its time, and those that
they need.

    slice                its begin and its end, if it overlaps the window
    instant, loss        if it is in the window
    batch of warps       the whole batch, if one of its warps runs in the window
    launch               its call and its work, if one of them is in the part
    clock pair, name     always, also the name that a program gives one of its threads
    before the window    the events that describe the state at its start: `state.py`

Of each event, only its row is kept, and its times while it is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    Bools,
    Int64s,
    Ints,
    TraceBatch,
    TraceColumns,
    joined,
)
from tracepipe.event.model import COUNTS, FLOW_PHASES, TIME_LIMIT_NS, Record
from tracepipe.event.order import order_of
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables
from tracepipe.event.warps import PlacedWarps
from tracepipe.part.calls import COLUMNS, Calls, Spans
from tracepipe.part.gpu_threads import GpuThreads
from tracepipe.part.launches import Joined
from tracepipe.part.marks import Marks
from tracepipe.part.names import Names
from tracepipe.part.state import State
from tracepipe.part.stretch import OPEN_NS, Stretch

# The events that are sorted at a time, as for a timeline.
_WINDOW_EVENTS: Final = 2048
# A longer line counts as several events.
_BYTES_AN_EVENT: Final = 1 << 8
_UNDATED_MAX: Final = 1 << 14
_OPEN_WINDOWS_MAX: Final = 1 << 10
_ALWAYS: Final = frozenset({"clock", "name"})
_NEVER: Final = frozenset({"header", "footer", "stack"})

# How the events of a shape are treated: bits.
MATCHED, WHOLE, COUNTER, FLOW_START, FLOW_END, OF_THREAD, MEMORY, SWITCH, NAMED, NAMING = (
    1 << bit for bit in range(10)
)


@dataclass(slots=True)
class Chosen:
    """The rows of a part, and what else its file contains."""

    marks: Marks = field(default_factory=Marks)
    names: Names = field(default_factory=Names)
    undated_ns: dict[int, int] = field(default_factory=dict)
    """Rows of losses without a time → the time of their place in the recording."""
    has_windows: bool = False
    last_ns: int = -TIME_LIMIT_NS
    """The latest time of the recording."""


class Choice:
    """Chooses the rows of one recording. Call `take` for each batch, and `finish` once."""

    def __init__(self, tables: Tables, stretch: Stretch) -> None:
        self.chosen = Chosen()
        self._marks = self.chosen.marks
        self._tables, self._stretch = tables, stretch
        self._calls, self._state, self._threads = Calls(), State(), GpuThreads(stretch)
        self._launches, self._flows = Joined(), Joined()
        self._window: list[TraceColumns] = []
        self._weight = 0
        self._window_rows: list[Int64s] = []
        self._others: dict[int, Record | PlacedWarps] = {}
        """By row, the records that wait for their turn."""
        self._open_windows: list[tuple[int, int]] = []
        self._kinds: Any = np.zeros(2, np.uint16)
        self._work: Any = np.zeros(2, np.int8)
        """By the number of a shape; the last two places are for SPECIAL and NONE."""

    def take(self, batch: TraceBatch, first: int) -> None:
        """Take the next batch; `first` is the number of the first row of its source batch."""
        events = batch.events
        rows = first + (np.arange(len(events)) if batch.places is None else batch.places)
        if batch.others:
            kept = np.ones(len(events), np.bool_)
            for at in np.flatnonzero(events.shape == SPECIAL).tolist():
                kept[at] = self._take_other(batch.others[int(events.args[at])], int(rows[at]))
            events, rows = events.take(kept), rows[kept]
        self._window.append(events)
        self._window_rows.append(rows)
        self._weight += max(len(events), batch.text_bytes // _BYTES_AN_EVENT)
        if self._weight >= 2 * _WINDOW_EVENTS:
            held = sum(map(len, self._window))
            self._sort(held * _WINDOW_EVENTS // self._weight)
            self._weight = _WINDOW_EVENTS

    def _take_other(self, other: Record | PlacedWarps, row: int) -> bool:
        """Take a record that is not an event. Return whether it has a time, and must wait for its turn."""
        kind = "" if isinstance(other, PlacedWarps) else other["type"]
        if kind in _ALWAYS:
            self._marks.add(np.array([row]))
        if kind == "name":
            self.chosen.names.give(other)  # type: ignore[arg-type]
        if kind in _ALWAYS or kind in _NEVER:
            return False
        self._others[row] = other
        return True

    def relieve(self) -> None:
        """Let the tables drop what is not used any more."""
        nothing = np.empty(0, np.int32)
        if self._window:
            window = joined(self._window)
            special = window.shape == SPECIAL
            to_shapes, to_args = self._tables.keep(window.shape, np.where(special, NONE, window.args))
            window.shape = to_shapes[window.shape]
            window.args = np.where(special, NONE, to_args[np.where(special, NONE, window.args)])
            self._window, self._window_rows = [window], [np.concatenate(self._window_rows)]
        else:
            self._tables.keep(nothing, nothing)
        self._calls.forget_shapes()
        self._kinds, self._work = np.zeros(2, np.uint16), np.zeros(2, np.int8)

    def finish(self) -> Chosen:
        """Return the chosen rows."""
        self._sort(0)
        self._take_spans(self._calls.still_open())
        windows = [row for ts_ns, row in self._open_windows if ts_ns < self._stretch.end_ns]
        rows = [*windows, *self._threads.still_inside(), *self._state.rows()]
        self._marks.add(np.array(rows, np.int64))
        return self.chosen

    # In the order of time ------------------------------------------------------------------------------

    def _sort(self, waiting: int) -> None:
        """Take the events in the order of time. The `waiting` newest stay, as earlier ones may follow."""
        if not self._window:
            return
        whole, rows = joined(self._window), np.concatenate(self._window_rows)
        order = order_of(whole.ts_ns, whole.dur_ns, self._tables.are_whole()[whole.shape])
        if order is not None:
            whole, rows = whole.take(order), rows[order]
        ready = len(whole) - waiting
        self._window, self._window_rows = [whole.take(slice(ready, None))], [rows[ready:]]
        self._choose(whole.take(slice(ready)), rows[:ready])

    def _choose(self, events: TraceColumns, rows: Int64s) -> None:
        self._add_shapes()
        ends_ns = events.ts_ns + events.dur_ns
        self.chosen.last_ns = max(self.chosen.last_ns, int(ends_ns.max(initial=-TIME_LIMIT_NS)))
        kinds = self._kinds[events.shape]
        self._marks.add(rows[(kinds & NAMING) != 0])
        instants = (kinds & (MATCHED | WHOLE | OF_THREAD)) == 0
        self._marks.add(rows[instants & (events.shape != SPECIAL) & self._stretch.holds(events.ts_ns)])
        self._take_calls(events, rows, kinds)
        self._take_flows(events, rows, kinds)
        for at in np.flatnonzero(events.shape == SPECIAL).tolist():
            self._take_special(int(events.ts_ns[at]), int(rows[at]))
        self._take_state(events, rows, kinds)

    def _take_calls(self, events: TraceColumns, rows: Int64s, kinds: Ints) -> None:
        """Take slices."""
        work = self._work[events.shape].astype(np.int64)
        matched = np.flatnonzero(kinds & MATCHED)
        begun, ended = self._calls.match(events.take(matched), rows[matched], work[matched])
        at = np.flatnonzero(kinds & WHOLE)
        begin_ns = events.ts_ns[at]
        whole: Spans = {
            "begin_ns": begin_ns,
            "end_ns": begin_ns + events.dur_ns[at],
            "begin": rows[at],
            "end": np.full(len(at), NONE, np.int64),
            "launch": events.launch[at],
            "work": work[at],
        }
        for spans in (begun, whole):
            calls = spans["work"] == 0
            self._launches.begin(spans["launch"][calls], spans["begin"][calls])
        self._take_spans({name: np.concatenate([ended[name], whole[name]]) for name in COLUMNS})

    def _take_spans(self, spans: Spans) -> None:
        """Mark the slices that are in the part, now that their ends are known."""
        is_call, launch = spans["work"] == 0, spans["launch"]
        self._launches.end(launch[is_call], spans["end"][is_call])
        kept = self._stretch.touches(spans["begin_ns"], spans["end_ns"])
        self._marks.add(self._launches.keep(launch[kept & (spans["work"] != NONE)]))
        kept |= (spans["work"] != NONE) & self._launches.are_kept(launch)
        for name in ("begin", "end"):
            self._marks.add(spans[name][kept])

    def _take_flows(self, events: TraceColumns, rows: Int64s, kinds: Ints) -> None:
        """Take the points of flows. A flow with a point in the window also needs its start."""
        starts, later = np.flatnonzero(kinds & FLOW_START), np.flatnonzero(kinds & FLOW_END)
        self._flows.begin(events.launch[starts], rows[starts])
        for at in (starts, later):
            inside = self._stretch.holds(events.ts_ns[at])
            self._marks.add(self._flows.keep(events.launch[at[inside]]))
        self._marks.add(rows[later[self._flows.are_kept(events.launch[later])]])

    def _take_special(self, ts_ns: int, row: int) -> None:
        """Take a record that is not an event: a batch of warps, a loss, the begin or the end of a window."""
        other = self._others.pop(row)
        if isinstance(other, PlacedWarps):
            kept = self._take_warps(other)
        elif other["type"] == "window":
            kept = self._take_window(other, ts_ns, row)
        else:
            kept = bool(self._stretch.touches(ts_ns, ts_ns + other.get("dur_ns", 0)))
            if kept and "ts_ns" not in other and len(self.chosen.undated_ns) < _UNDATED_MAX:
                self.chosen.undated_ns[row] = ts_ns
        if kept:
            self._marks.add(np.array([row]))

    def _take_warps(self, warps: PlacedWarps) -> bool:
        """Take a batch of warps. Return whether the part has it."""
        entry_ns, last_ns = warps.ts_ns + warps.entry_ns, warps.last_of_exits(warps.exit_ns)
        left_ns = np.where(last_ns < 0, OPEN_NS, entry_ns + last_ns)
        ends_ns = entry_ns + np.maximum(last_ns, 0)
        self.chosen.last_ns = max(self.chosen.last_ns, int(ends_ns.max(initial=warps.ts_ns)))
        kept = bool(self._stretch.touches(entry_ns, left_ns).any())
        if (launch := warps.launched.get("launch")) is None:
            return kept
        ids = np.array([launch], np.uint64).astype(np.int64)
        if kept:
            self._marks.add(self._launches.keep(ids))
        return kept or bool(self._launches.are_kept(ids)[0])

    def _take_window(self, window: Record, ts_ns: int, row: int) -> bool:
        """Take the begin or the end of a recording's window. Return whether the part has it; a begin is
        chosen when its window ends.
        """
        self.chosen.has_windows = True
        if window["phase"] == "B":
            if len(self._open_windows) >= _OPEN_WINDOWS_MAX:
                return bool(self._stretch.holds(ts_ns))
            self._open_windows.append((ts_ns, row))
            return False
        if not self._open_windows:
            return bool(self._stretch.holds(ts_ns))
        begin_ns, begin = self._open_windows.pop()
        if kept := bool(self._stretch.touches(begin_ns, ts_ns)):
            self._marks.add(np.array([begin]))
        return kept

    def _take_state(self, events: TraceColumns, rows: Int64s, kinds: Ints) -> None:
        """Take the events that describe the state at the start of the window."""
        of_threads = np.flatnonzero(kinds & OF_THREAD).tolist()
        ended = [row for at in of_threads for row in self._take_thread(events, at, int(rows[at]))]
        self._marks.add(np.array(ended, np.int64))
        for number in _last_of_each(events.shape, (kinds & NAMED) != 0)[0]:
            self.chosen.names.add_shape(self._shape(number))
        before = events.ts_ns < self._stretch.start_ns
        for number, at in zip(*_last_of_each(events.shape, before & ((kinds & SWITCH) != 0)), strict=True):
            args = self._tables.args(int(events.args[at]))
            self._state.switch(self._shape(number), args, int(rows[at]))
        for at in np.flatnonzero(before & ((kinds & (COUNTER | MEMORY)) != 0)).tolist():
            shape, args = self._shape(int(events.shape[at])), self._tables.args(int(events.args[at]))
            take = self._state.value if kinds[at] & COUNTER else self._state.memory
            take(shape, args, int(rows[at]))

    def _take_thread(self, events: TraceColumns, at: int, row: int) -> list[int]:
        """Take the entry or the exit of a thread of a GPU. Return rows that the part has."""
        shape, ts_ns = self._shape(int(events.shape[at])), int(events.ts_ns[at])
        block, thread = events.thread_of(at)
        of = (shape.gpu, shape.name, int(events.launch[at]), block)
        return self._threads.take(of, thread, enters=shape.phase == "B", ts_ns=ts_ns, row=row)

    # Shapes --------------------------------------------------------------------------------------------

    def _shape(self, number: int) -> Shape:
        shape = self._tables.shapes[number]
        assert shape is not None
        return shape

    def _add_shapes(self) -> None:
        """Classify the new shapes."""
        known = len(self._kinds) - 2
        new = self._tables.shapes[known:]
        if not new:
            return
        kinds = [0 if shape is None else self._kind(known + at, shape) for at, shape in enumerate(new)]
        self._kinds = np.concatenate([self._kinds[:known], np.array([*kinds, 0, 0], np.uint16)])
        work = [
            NONE
            if shape is None or not shape.has_launch or shape.type == "gpu_thread"
            else int(shape.on_stream)
            for shape in new
        ]
        self._work = np.concatenate([self._work[:known], np.array([*work, NONE, NONE], np.int8)])

    def _kind(self, number: int, shape: Shape) -> int:
        """The bits for how the events of a shape are treated."""
        kind = MATCHED if self._calls.add_shape(number, shape) else 0
        kind |= WHOLE * (shape.phase == "X")
        kind |= COUNTER * (shape.phase == COUNTS)
        if shape.phase in FLOW_PHASES:
            kind |= FLOW_START if shape.phase == "s" else FLOW_END
        kind |= OF_THREAD * (shape.type == "gpu_thread" and shape.phase in "BE")
        kind |= MEMORY * (shape.type == "memory" and shape.phase in "IX")
        kind |= SWITCH * shape.is_switch
        kind |= NAMED * bool(shape.comm)
        kind |= NAMING * (bool(shape.comm) and shape.type == "annotation" and shape.phase == "I")
        return kind


def _last_of_each(shapes: Ints, wanted: Bools) -> tuple[list[int], list[int]]:
    """The shapes of the wanted events, and the last event of each, sorted by the latter."""
    at = np.flatnonzero(wanted)[::-1]
    if not len(at):
        return [], []
    numbers, first = np.unique(shapes[at], return_index=True)
    order = np.argsort(at[first], kind="stable")
    return numbers[order].tolist(), at[first][order].tolist()
