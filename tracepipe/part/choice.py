"""Chooses the rows of a part while a recording is read: the events in a window of its time, and those that
they need.

    slice                its begin and its end, if it overlaps the window
    instant, loss        if it is in the window
    batch of warps       the whole batch, if one of its warps runs in the window
    launch               its call and its work, if one of them is in the part
    clock pair, name     always, also the name that a program gives one of its threads
    before the window    the events that describe the state at its start: `State`

Of each event, only its row is kept, and its times while it is open.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import numpy as np

from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    Bools,
    Bytes,
    Int64s,
    Ints,
    Three,
    TraceBatch,
    TraceColumns,
    grown,
    joined,
)
from tracepipe.event.model import COUNTS, FLOW_PHASES, TIME_LIMIT_NS, Record
from tracepipe.event.nesting import NO_ROW, ShapeRow, new_nesting
from tracepipe.event.ops import BEGIN, END
from tracepipe.event.shape import Shape, ShapeColumn
from tracepipe.event.tables import Args, Tables, order_of
from tracepipe.event.vocabulary import ADDRESS_KEYS, MEMORY_IN_USE, RUNNING
from tracepipe.event.warps import PlacedWarps
from tracepipe.part.stretch import OPEN_NS, Stretch

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
        """Apply ends: to slices in `begun`, numbered from `first`, and to earlier ones, which it returns."""
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


_THREAD_ROWS_MAX: Final = 1 << 15
_LANES: Final = 32


@dataclass(slots=True)
class _Warp:
    """The rows of a warp since the entry of its first thread; `inside` of its threads have not exited."""

    begin_ns: int
    inside: int = 0
    rows: list[int] = field(default_factory=list)


class GpuThreads:
    """Takes entries and exits by time. If too many rows wait, each is chosen by its own time."""

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._warps: dict[Hashable, _Warp] = {}
        self._held = 0

    def enter_or_exit(
        self, of: Hashable, thread: Three | None, *, enters: bool, ts_ns: int, row: int
    ) -> list[int]:
        """Take a row of a thread of the block `of`. Return rows of a warp that has exited, if in the part."""
        x, y, z = thread or (0, 0, 0)
        key = (of, x // _LANES, y, z)
        warp = self._warps.get(key)
        if self._held >= _THREAD_ROWS_MAX or (warp is None and not enters):
            return [row] if self._stretch.holds(ts_ns) else []
        if warp is None:
            warp = self._warps[key] = _Warp(ts_ns)
        warp.rows.append(row)
        self._held += 1
        warp.inside += 1 if enters else -1
        if warp.inside > 0:
            return []
        self._held -= len(self._warps.pop(key).rows)
        return self._rows(warp, ts_ns + 1)  # an exit may be drawn as an instant too

    def still_inside(self) -> list[int]:
        """The rows of warps with threads that have not exited, if the part has them."""
        return [row for warp in self._warps.values() for row in self._rows(warp, OPEN_NS)]

    def _rows(self, warp: _Warp, end_ns: int) -> list[int]:
        is_in = self._stretch.touches(warp.begin_ns, end_ns)
        return warp.rows if is_in else []


# A power of two. Launch ids are successive numbers, so each of the last ones has a separate place.
IDS_MAX: Final = 1 << 16


class EventsById:
    """Begins that later events refer to by an id: calls by their launch ids, flows by their flow ids.

    For the last ids it has the rows of their begins and ends, and whether the part has them. Columns have the
    shape `(n,)`.
    """

    def __init__(self) -> None:
        self._ids: Int64s = np.zeros(IDS_MAX, np.int64)
        self._begins: Int64s = np.full(IDS_MAX, NONE, np.int64)
        self._ends: Int64s = np.full(IDS_MAX, NONE, np.int64)
        self._kept: Bools = np.zeros(IDS_MAX, np.bool_)

    def begin(self, ids: Int64s, rows: Int64s) -> None:
        """Add the rows at which some ids begin."""
        at = ids & (IDS_MAX - 1)
        self._ids[at], self._begins[at], self._ends[at], self._kept[at] = ids, rows, NONE, False

    def end(self, ids: Int64s, rows: Int64s) -> None:
        """Add the rows at which some ids end."""
        at, known = self._known(ids)
        self._ends[at[known]] = rows[known]

    def are_kept(self, ids: Int64s) -> Bools:
        """Flags the ids that the part has."""
        at, known = self._known(ids)
        return known & self._kept[at]

    def keep(self, ids: Int64s) -> Int64s:
        """Mark ids as in the part. Return the known rows of their begins and ends."""
        at, known = self._known(ids)
        at = at[known]
        self._kept[at] = True
        return np.concatenate([self._begins[at], self._ends[at]])

    def _known(self, ids: Int64s) -> tuple[Int64s, Bools]:
        at = ids & (IDS_MAX - 1)
        return at, (self._begins[at] != NONE) & (self._ids[at] == ids)


class Marks:
    """A bit for each row, numbered over the whole recording in the order of its reader."""

    def __init__(self) -> None:
        self._bits: Bytes = np.zeros(0, np.uint8)
        self.last = NONE
        """The last row that is marked."""

    def add(self, rows: Ints) -> None:
        """Mark rows, shape `(n,)`; NONE among them is ignored."""
        rows = rows[rows != NONE]
        if not len(rows):
            return
        self.last = max(self.last, int(rows.max()))
        self._bits = grown(self._bits, (self.last >> 3) + 1, 0)
        np.bitwise_or.at(self._bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))

    def are_marked(self, first: int, count: int) -> Bools:
        """Flags the marked rows among `count` rows from `first` on. Shape `(count,)`."""
        held = self._bits[first >> 3 : (first + count + 7) >> 3]
        bits = np.unpackbits(held, bitorder="little")[first & 7 :][:count]
        return np.concatenate([bits, np.zeros(count - len(bits), np.uint8)]).astype(np.bool_)


THREADS_MAX: Final = 1 << 14
Thread = tuple[int | None, int | None]


class Names:
    """Takes all shapes of a recording in their order."""

    def __init__(self) -> None:
        self._names: dict[Thread, str] = {}
        self._others: set[Thread] = set()
        """The threads that other records name, which the part has too."""

    def give(self, record: Record) -> None:
        """Take a `name` record."""
        if "name" in record:
            self._has_other((record["pid"], record.get("tid")))

    def add_shape(self, shape: Shape) -> None:
        """Take a shape that has a thread's name."""
        thread = shape.pid, shape.tid
        if shape.type == "annotation":  # a name that the program gave has priority over the kernel's
            self._has_other(thread)
        elif shape.comm and (thread in self._names or len(self._names) < THREADS_MAX):
            self._names[thread] = shape.comm

    def _has_other(self, thread: Thread) -> None:
        if len(self._others) < THREADS_MAX:
            self._others.add(thread)

    def records(self, threads: set[Thread]) -> Iterator[Record]:
        """Records for the names of these threads and of their processes."""
        for pid in sorted({pid for pid, _ in threads if pid is not None}):
            name = self._names.get((pid, pid)) or self._names.get((pid, None))
            if name is not None and (pid, None) not in self._others:
                yield {"type": "name", "pid": pid, "name": name}
        for pid, tid in sorted((pid, tid) for pid, tid in threads if pid is not None and tid is not None):
            name = self._names.get((pid, tid))
            if name is not None and (pid, tid) not in self._others:
                yield {"type": "name", "pid": pid, "tid": tid, "name": name}


_KEPT_MAX: Final = 1 << 15
_OVER: Final = ("dead", "zombie")
_TOTALS: Final = {MEMORY_IN_USE: "total_bytes"}


class State:
    """Takes the events before the part, sorted by time."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        """By counter, the row of its last value."""
        self._live: dict[Hashable, int] = {}
        """By process and address, the rows of live allocations; also allocations and frees without an
        address.
        """
        self._threads: dict[Hashable, list[int]] = {}
        """The last begin, end and wakeup of each thread that was scheduled."""

    def value(self, shape: Shape, args: Args, row: int) -> None:
        """Take an event that has values of counters."""
        self._put(self._last, (shape.type, shape.pid, shape.gpu, shape.name, *args), row)

    def memory(self, shape: Shape, args: Args, row: int) -> None:
        """Take an event of the layer `memory`."""
        if isinstance(args.get(_TOTALS.get(shape.name, "total_allocated")), int):
            in_use = shape.name == MEMORY_IN_USE
            self._put(self._last, (shape.type, shape.pid, shape.gpu if in_use else None, in_use), row)
        address = next((args[key] for key in ADDRESS_KEYS if isinstance(args.get(key), int | str)), None)
        if shape.name.startswith("alloc") or (address is None and shape.name.startswith("free")):
            self._put(self._live, (shape.pid, row if address is None else str(address)), row)
        elif shape.name.startswith("free"):
            self._live.pop((shape.pid, str(address)), None)

    def switch(self, shape: Shape, args: Args, row: int) -> None:
        """Take a scheduling event of a thread. The rows of a thread that has ended are dropped."""
        if args.get("prev_state") in _OVER:
            self._threads.pop((shape.pid, shape.tid), None)
            return
        thread = self._threads.get((shape.pid, shape.tid))
        if thread is None:
            thread = [NONE, NONE, NONE]
            self._put(self._threads, (shape.pid, shape.tid), thread)
        at = "BE".index(shape.phase) if shape.name == RUNNING else 2
        thread[at] = row
        if at == 0:
            thread[1] = thread[2] = NONE

    def rows(self) -> list[int]:
        """The rows that describe the state."""
        of_threads = [row for thread in self._threads.values() if thread[1] != NONE for row in thread]
        return [*self._last.values(), *self._live.values(), *of_threads]

    @staticmethod
    def _put(kept: dict[Any, Any], key: Hashable, value: object) -> None:
        """Store a value as the newest one; where there are too many, the oldest one is dropped."""
        kept.pop(key, None)
        if len(kept) >= _KEPT_MAX:
            del kept[next(iter(kept))]
        kept[key] = value


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
    """Chooses the rows of one recording. Call `add_batch` for each batch, and `finish` once."""

    def __init__(self, tables: Tables, stretch: Stretch) -> None:
        self.chosen = Chosen()
        self._marks = self.chosen.marks
        self._tables, self._stretch = tables, stretch
        self._calls, self._state, self._threads = Calls(), State(), GpuThreads(stretch)
        self._launches, self._flows = EventsById(), EventsById()
        self._window: list[TraceColumns] = []
        self._weight = 0
        self._window_rows: list[Int64s] = []
        self._others: dict[int, Record | PlacedWarps] = {}
        """By row, the records that wait for their turn."""
        self._open_windows: list[tuple[int, int]] = []
        self._kinds = ShapeColumn(tables, self._kind, np.uint16)
        self._work = ShapeColumn(tables, _work, np.int8, NONE)

    def add_batch(self, batch: TraceBatch, first: int) -> None:
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
        ends_ns = events.ts_ns + events.dur_ns
        self.chosen.last_ns = max(self.chosen.last_ns, int(ends_ns.max(initial=-TIME_LIMIT_NS)))
        kinds = self._kinds.values()[events.shape]
        self._marks.add(rows[(kinds & NAMING) != 0])
        instants = (kinds & (MATCHED | WHOLE | OF_THREAD)) == 0
        self._marks.add(rows[instants & (events.shape != SPECIAL) & self._stretch.holds(events.ts_ns)])
        self._take_calls(events, rows, kinds)
        self._take_flows(events, rows, kinds)
        for at in np.flatnonzero(events.shape == SPECIAL).tolist():
            ts_ns = int(events.ts_ns[at])
            row = int(rows[at])
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
        # The events that describe the state at the start of the window.
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

    def _take_calls(self, events: TraceColumns, rows: Int64s, kinds: Ints) -> None:
        """Take slices."""
        work = self._work.values()[events.shape].astype(np.int64)
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
        """Take the begin or the end of a recording's window. Return whether the part has it."""
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

    def _take_thread(self, events: TraceColumns, at: int, row: int) -> list[int]:
        """Take the entry or the exit of a thread of a GPU. Return rows that the part has."""
        shape, ts_ns = self._shape(int(events.shape[at])), int(events.ts_ns[at])
        block, thread = events.thread_of(at)
        of = (shape.gpu, shape.name, int(events.launch[at]), block)
        return self._threads.enter_or_exit(of, thread, enters=shape.phase == "B", ts_ns=ts_ns, row=row)

    # Shapes --------------------------------------------------------------------------------------------

    def _shape(self, number: int) -> Shape:
        shape = self._tables.shapes[number]
        assert shape is not None
        return shape

    def _kind(self, shape: Shape, number: int) -> int:
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


def _work(shape: Shape, _: int) -> int:
    """1 for the work of launches, 0 for their calls, else NONE."""
    return int(shape.on_stream) if shape.has_launch and shape.type != "gpu_thread" else NONE


def _last_of_each(shapes: Ints, wanted: Bools) -> tuple[list[int], list[int]]:
    """The shapes of the wanted events, and the last event of each, sorted by the latter."""
    at = np.flatnonzero(wanted)[::-1]
    if not len(at):
        return [], []
    numbers, first = np.unique(shapes[at], return_index=True)
    order = np.argsort(at[first], kind="stable")
    return numbers[order].tolist(), at[first][order].tolist()
