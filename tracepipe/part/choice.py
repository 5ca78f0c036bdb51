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

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import numpy as np

from tracepipe.event.bounded import put_bounded
from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    Bools,
    Bytes,
    Int64s,
    Ints,
    TraceBatch,
    TraceColumns,
    grown,
    joined,
    no_events,
)
from tracepipe.event.model import COUNTS, FLOW_PHASES, TIME_LIMIT_NS, Record
from tracepipe.event.nesting import NO_ROW, ShapeRow, new_nesting
from tracepipe.event.ops import BEGIN, END
from tracepipe.event.shape import Shape, ShapeColumn
from tracepipe.event.tables import Args, Tables, in_order
from tracepipe.event.vocabulary import ADDRESS_KEYS, MEMORY_IN_USE, RUNNING
from tracepipe.event.warps import PlacedWarps
from tracepipe.part.stretch import OPEN_NS, Stretch

# The events that are sorted at a time, as for a timeline.
_WINDOW_EVENTS: Final = 2048
# A longer line counts as several events.
_BYTES_AN_EVENT: Final = 1 << 8
# The most rows of a nesting, more than Perfetto has room for. Begins and ends of further rows count as
# instants.
_ROWS_MAX: Final = 1 << 17
# A power of two. Launch ids are successive numbers, so each of the last ones has a separate place.
_IDS_MAX: Final = 1 << 16
THREADS_MAX: Final = 1 << 14
_THREAD_ROWS_MAX: Final = 1 << 15
_STATE_MAX: Final = 1 << 15
_UNDATED_MAX: Final = 1 << 14
_OPEN_WINDOWS_MAX: Final = 1 << 10
_LANES: Final = 32
_ALWAYS: Final = frozenset({"clock", "name"})
_NEVER: Final = frozenset({"header", "footer", "stack"})
_OVER: Final = ("dead", "zombie")

# How the events of a shape are treated: bits. The first two are the call and the work of a launch.
CALL, WORK, MATCHED, WHOLE, COUNTER, FLOW_START, FLOW_END, OF_THREAD, MEMORY, SWITCH, NAMED, NAMING = (
    1 << bit for bit in range(12)
)

Thread = tuple[int | None, int | None]
Spans = dict[str, Ints]
"""Columns of shape `(n,)`: `begin_ns` and `end_ns`; `begin` and `end`, which are rows of the recording, or
NONE; `launch`; and `of_launch`: CALL, WORK, or 0 without a launch.
"""
_SPANS: Final = ("begin_ns", "end_ns", "begin", "end", "launch", "of_launch")


@dataclass(slots=True)
class _Events(TraceColumns):
    """Events and their rows in the recording."""

    row: Int64s = field(default_factory=lambda: np.empty(0, np.int64))


def _none(count: int) -> Int64s:
    return np.full(count, NONE, np.int64)


class Marks:
    """A bit for each row, numbered over the whole recording in the order of its reader."""

    def __init__(self) -> None:
        self._bits: Bytes = np.zeros(0, np.uint8)
        self.last = NONE
        """The last row that is marked."""

    def add(self, some_rows: Ints | list[int]) -> None:
        """Mark rows, shape `(n,)`; NONE among them is ignored."""
        rows = np.asarray(some_rows, np.int64)
        rows = rows[rows != NONE]
        if len(rows):
            self.last = max(self.last, int(rows.max()))
            self._bits = grown(self._bits, (self.last >> 3) + 1, 0)
            np.bitwise_or.at(self._bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))

    def are_marked(self, first: int, count: int) -> Bools:
        """Flags the marked rows among `count` rows from `first` on. Shape `(count,)`."""
        held = self._bits[first >> 3 : (first + count + 7) >> 3]
        bits = np.unpackbits(held, bitorder="little")[first & 7 :][:count]
        return np.concatenate([bits, np.zeros(count - len(bits), np.uint8)]).astype(np.bool_)


@dataclass(slots=True)
class Chosen:
    """The rows of a part, and what else its file contains."""

    marks: Marks = field(default_factory=Marks)
    names: dict[Thread, str] = field(default_factory=dict)
    """The last names of threads."""
    named: set[Thread] = field(default_factory=set)
    """The threads and processes that records name, which the part has too."""
    undated_ns: dict[int, int] = field(default_factory=dict)
    """Rows of losses without a time → the time of their place in the recording."""
    has_windows: bool = False
    last_ns: int = -TIME_LIMIT_NS
    """The latest time of the recording."""

    def names_of(self, threads: set[Thread]) -> Iterator[Record]:
        """Records for the names of these threads and of their processes."""
        processes = sorted({pid for pid, _ in threads if pid is not None})
        pairs = sorted((pid, tid) for pid, tid in threads if pid is not None and tid is not None)
        for pid, tid in [*((pid, None) for pid in processes), *pairs]:
            name = self.names.get((pid, pid if tid is None else tid)) or self.names.get((pid, tid))
            if name is not None and (pid, tid) not in self.named:
                yield {"type": "name", "pid": pid, **({} if tid is None else {"tid": tid}), "name": name}


class Calls:
    """Matches the begins and ends of one recording."""

    def __init__(self) -> None:
        self._nesting = new_nesting()
        self._rows: dict[object, int] = {}
        self.open: Spans = {
            **dict.fromkeys((*_SPANS, "slice"), _none(0)),
            "of_launch": np.zeros(0, np.uint16),
        }
        """The slices without an end so far, in the order of their begins; `slice` is their number."""

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

    def match(self, events: _Events, of_launch: Ints) -> tuple[Spans, Spans]:
        """Match the next events, which are sorted. Return the slices that begin with them, and those that
        have ended, also the ends without a begin, which have no length. `of_launch` is as in `Spans`.
        """
        self._nesting.events(events, 0, len(events))
        ops = self._nesting.take_ops().used()
        made, ended = np.flatnonzero(ops["kind"] != END), np.flatnonzero(ops["kind"] == END)
        ts_ns, event, begins = ops["ts"][made], ops["event"][made], ops["kind"][made] == BEGIN
        begun = {
            "begin_ns": ts_ns,
            # A slice that is not drawn has no known end: it ends where it begins.
            "end_ns": np.where(begins & (ops["row"][made] != NO_ROW), OPEN_NS, ts_ns),
            "begin": events.row[event],
            "end": _none(len(made)),
            "launch": events.launch[event],
            "of_launch": np.where(begins, of_launch[event], 0),
            # In order: an end without a begin has the number of the slice before it.
            "slice": np.maximum.accumulate(
                np.where(begins, ops["slice_id"][made], self.open["slice"].max(initial=NONE))
            ),
        }
        # One column after the other, so that no two copies of all are held.
        spans = self.open
        for name, new in begun.items():
            spans[name] = np.concatenate([spans[name], new])
        at = np.searchsorted(spans["slice"], ops["slice_id"][ended])
        # The event of an end without an event is NONE, which is the last place.
        spans["end_ns"][at] = ops["ts"][ended]
        spans["end"][at] = np.append(events.row, NONE)[ops["event"][ended]]
        is_open = spans["end_ns"] == OPEN_NS
        done = {name: column[~is_open] for name, column in spans.items()}
        for name, column in spans.items():
            spans[name] = column[is_open]
        return begun, done


class EventsById:
    """Begins that later events refer to by an id: calls by their launch ids, flows by their flow ids.

    For the last ids it has the rows of their begins and ends, and whether the part has them. Columns have the
    shape `(n,)`.
    """

    def __init__(self) -> None:
        self._ids, self._begins, self._ends = np.zeros(_IDS_MAX, np.int64), _none(_IDS_MAX), _none(_IDS_MAX)
        self._kept: Bools = np.zeros(_IDS_MAX, np.bool_)

    def begin(self, ids: Ints, rows: Ints) -> None:
        """Add the rows at which some ids begin."""
        at = ids & (_IDS_MAX - 1)
        self._ids[at], self._begins[at], self._ends[at], self._kept[at] = ids, rows, NONE, False

    def _known(self, ids: Ints) -> tuple[Ints, Bools]:
        at = ids & (_IDS_MAX - 1)
        return at, (self._begins[at] != NONE) & (self._ids[at] == ids)

    def end(self, ids: Ints, rows: Ints) -> None:
        """Add the rows at which some ids end."""
        at, known = self._known(ids)
        self._ends[at[known]] = rows[known]

    def are_kept(self, ids: Ints) -> Bools:
        """Flags the ids that the part has."""
        at, known = self._known(ids)
        return known & self._kept[at]

    def keep(self, ids: Ints) -> Int64s:
        """Mark ids as in the part. Return the known rows of their begins and ends."""
        at, known = self._known(ids)
        at = at[known]
        self._kept[at] = True
        return np.concatenate([self._begins[at], self._ends[at]])


class State:
    """Takes the events before the part, sorted by time."""

    def __init__(self) -> None:
        self._last = OrderedDict[Hashable, int]()
        """By counter, the row of its last value."""
        self._live = OrderedDict[Hashable, int]()
        """By process and address, the rows of live allocations; also allocations and frees without an
        address.
        """
        self._threads = OrderedDict[Hashable, list[int]]()
        """The last begin, end and wakeup of each thread that was scheduled."""

    def take(self, shape: Shape, args: Args, row: int) -> None:
        """Take an event that has values of counters, or is of the layer `memory` or of the scheduler."""
        if shape.phase == COUNTS:
            _put(self._last, (shape.type, shape.pid, shape.gpu, shape.name, *args), row)
            return
        if shape.is_switch:
            thread = shape.pid, shape.tid
            if args.get("prev_state") in _OVER:  # it has ended: its rows are dropped
                self._threads.pop(thread, None)
                return
            if thread not in self._threads:
                _put(self._threads, thread, [NONE, NONE, NONE])
            at = "BE".index(shape.phase) if shape.name == RUNNING else 2
            self._threads[thread][at] = row
            if at == 0:
                self._threads[thread][1:] = NONE, NONE
            return
        in_use = shape.name == MEMORY_IN_USE
        if isinstance(args.get("total_bytes" if in_use else "total_allocated"), int):
            _put(self._last, (shape.type, shape.pid, shape.gpu, in_use), row)
        address = next((args[key] for key in ADDRESS_KEYS if isinstance(args.get(key), int | str)), None)
        if shape.name.startswith("alloc") or (address is None and shape.name.startswith("free")):
            _put(self._live, (shape.pid, row if address is None else str(address)), row)
        elif shape.name.startswith("free"):
            self._live.pop((shape.pid, str(address)), None)

    def rows(self) -> list[int]:
        """The rows that describe the state."""
        of_threads = [row for thread in self._threads.values() if thread[1] != NONE for row in thread]
        return [*self._last.values(), *self._live.values(), *of_threads]


def _put(kept: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
    """Store a value as the newest one; where there are too many, the oldest one is dropped."""
    kept.pop(key, None)
    put_bounded(kept, key, value, _STATE_MAX)


@dataclass(slots=True)
class _Warp:
    """The rows of a warp since the entry of its first thread; `inside` of its threads have not exited."""

    begin_ns: int
    inside: int = 0
    rows: list[int] = field(default_factory=list)


class Choice:
    """Chooses the rows of one recording. Call `add_batch` for each batch, and `finish` once."""

    def __init__(self, tables: Tables, stretch: Stretch) -> None:
        self.chosen = Chosen()
        self._marks = self.chosen.marks
        self._tables, self._stretch = tables, stretch
        self._calls, self._state = Calls(), State()
        self._launches, self._flows = EventsById(), EventsById()
        self._window = [no_events().shared(_Events, row=_none(0))]
        self._weight = 0
        self._others: dict[int, Record | PlacedWarps] = {}
        """By row, the records that wait for their turn."""
        self._open_windows: list[tuple[int, int]] = []
        self._warps: dict[Hashable, _Warp] = {}
        """By block and place in it, the warps with threads that have not exited."""
        self._warp_rows = 0
        self._kinds = ShapeColumn(tables, self._kind, np.uint16)

    def add_batch(self, batch: TraceBatch, first: int) -> None:
        """Take the next batch; `first` is the number of the first row of its source batch."""
        places = np.arange(len(batch.events)) if batch.places is None else batch.places
        events = batch.events.shared(_Events, row=first + places)
        if batch.others:
            has_time = np.ones(len(events), np.bool_)
            for at in np.flatnonzero(events.shape == SPECIAL).tolist():
                other, row = batch.others[int(events.args[at])], int(events.row[at])
                if isinstance(other, PlacedWarps) or other["type"] not in _ALWAYS | _NEVER:
                    self._others[row] = other
                    continue
                has_time[at] = False
                if other["type"] in _ALWAYS:
                    self._marks.add([row])
                if other["type"] == "name" and "name" in other:
                    self._add_named((other["pid"], other.get("tid")))
            events = events.take(has_time)
        self._window.append(events)
        self._weight += max(len(events), batch.text_bytes // _BYTES_AN_EVENT)
        if self._weight >= 2 * _WINDOW_EVENTS:
            held = sum(map(len, self._window))
            self._choose_all_but(held * _WINDOW_EVENTS // self._weight)
            self._weight = _WINDOW_EVENTS

    def relieve(self) -> None:
        """Let the tables drop what is not used any more."""
        window = joined(self._window)
        special = window.shape == SPECIAL
        args = np.where(special, NONE, window.args)
        to_shapes, to_args = self._tables.relieve(window.shape, args)
        window.shape, window.args = to_shapes[window.shape], to_args[args]
        self._window = [window]
        self._calls.forget_shapes()

    def finish(self) -> Chosen:
        """Return the chosen rows."""
        self._choose_all_but(0)
        self._take_spans(self._calls.open)
        self._marks.add([row for ts_ns, row in self._open_windows if ts_ns < self._stretch.end_ns])
        left = (one for one in self._warps.values() if self._stretch.touches(one.begin_ns, OPEN_NS))
        self._marks.add([row for one in left for row in one.rows])
        self._marks.add(self._state.rows())
        return self.chosen

    # In the order of time ------------------------------------------------------------------------------

    def _choose_all_but(self, waiting: int) -> None:
        """Take the events in the order of time. The `waiting` newest stay, as earlier ones may follow."""
        whole = in_order(joined(self._window), self._tables)
        ready = len(whole) - waiting
        self._window, events = [whole.take(slice(ready, None))], whole.take(slice(ready))
        ends_ns = events.ts_ns + events.dur_ns
        self.chosen.last_ns = max(self.chosen.last_ns, int(ends_ns.max(initial=-TIME_LIMIT_NS)))
        kinds = self._kinds.values()[events.shape]
        self._marks.add(events.row[(kinds & NAMING) != 0])
        instants = ((kinds & (MATCHED | WHOLE | OF_THREAD)) == 0) & (events.shape != SPECIAL)
        is_inside = self._stretch.touches(events.ts_ns, events.ts_ns)
        self._marks.add(events.row[instants & is_inside])
        self._take_calls(events, kinds)
        # A flow with a point in the window also needs its start.
        starts, later = np.flatnonzero(kinds & FLOW_START), np.flatnonzero(kinds & FLOW_END)
        self._flows.begin(events.launch[starts], events.row[starts])
        for of in (starts, later):
            self._marks.add(self._flows.keep(events.launch[of[is_inside[of]]]))
        self._marks.add(events.row[later[self._flows.are_kept(events.launch[later])]])
        for at in np.flatnonzero(events.shape == SPECIAL).tolist():
            row = int(events.row[at])
            if self._take_other(self._others.pop(row), int(events.ts_ns[at]), row):
                self._marks.add([row])
        for at in np.flatnonzero(kinds & OF_THREAD).tolist():
            self._marks.add(self._take_thread(events, at))
        for at in _last_of_each(events.shape, (kinds & NAMED) != 0):
            shape = self._shape(events, at)
            thread = shape.pid, shape.tid
            if shape.type == "annotation":  # a name that the program gave has priority over the kernel's
                self._add_named(thread)
            elif shape.comm and (thread in self.chosen.names or len(self.chosen.names) < THREADS_MAX):
                self.chosen.names[thread] = shape.comm
        before = events.ts_ns < self._stretch.start_ns
        switches = _last_of_each(events.shape, before & ((kinds & SWITCH) != 0))
        for at in [*switches, *np.flatnonzero(before & ((kinds & (COUNTER | MEMORY)) != 0)).tolist()]:
            args = self._tables.args(int(events.args[at]))
            self._state.take(self._shape(events, at), args, int(events.row[at]))

    def _add_named(self, thread: Thread) -> None:
        if len(self.chosen.named) < THREADS_MAX:
            self.chosen.named.add(thread)

    def _take_calls(self, events: _Events, kinds: Ints) -> None:
        """Take slices."""
        of_launch = kinds & (CALL | WORK)
        at = np.flatnonzero(kinds & MATCHED)
        begun, ended = self._calls.match(events.take(at), of_launch[at])
        at = np.flatnonzero(kinds & WHOLE)
        begin_ns = events.ts_ns[at]
        end_ns, launch = begin_ns + events.dur_ns[at], events.launch[at]
        columns = (begin_ns, end_ns, events.row[at], _none(len(at)), launch, of_launch[at])
        whole = dict(zip(_SPANS, columns, strict=True))
        for spans in (begun, whole):
            calls = spans["of_launch"] == CALL
            self._launches.begin(spans["launch"][calls], spans["begin"][calls])
        self._take_spans({name: np.concatenate([ended[name], column]) for name, column in whole.items()})

    def _take_spans(self, spans: Spans) -> None:
        """Mark the slices that are in the part, now that their ends are known."""
        launch, has_launch = spans["launch"], spans["of_launch"] != 0
        is_call = spans["of_launch"] == CALL
        self._launches.end(launch[is_call], spans["end"][is_call])
        kept = self._stretch.touches(spans["begin_ns"], spans["end_ns"])
        self._marks.add(self._launches.keep(launch[kept & has_launch]))
        kept |= has_launch & self._launches.are_kept(launch)
        for name in ("begin", "end"):
            self._marks.add(spans[name][kept])

    def _take_other(self, other: Record | PlacedWarps, ts_ns: int, row: int) -> bool:
        """Take a record that is not an event. Return whether the part has it."""
        touches = self._stretch.touches
        if isinstance(other, PlacedWarps):
            entry_ns, last_ns = other.ts_ns + other.entry_ns, other.last_of_exits(other.exit_ns)
            ends_ns = entry_ns + np.maximum(last_ns, 0)
            self.chosen.last_ns = max(self.chosen.last_ns, int(ends_ns.max(initial=other.ts_ns)))
            is_in = bool(touches(entry_ns, np.where(last_ns < 0, OPEN_NS, ends_ns)).any())
            if (launch := other.launched.get("launch")) is None:
                return is_in
            ids = np.array([launch], np.uint64).astype(np.int64)
            if is_in:
                self._marks.add(self._launches.keep(ids))
            return is_in or bool(self._launches.are_kept(ids)[0])
        begin_ns, end_ns = ts_ns, ts_ns + other.get("dur_ns", 0)
        if other["type"] == "window":
            self.chosen.has_windows = True
            end_ns = ts_ns
            if other["phase"] == "B" and len(self._open_windows) < _OPEN_WINDOWS_MAX:
                self._open_windows.append((ts_ns, row))
                return False
            if other["phase"] != "B" and self._open_windows:
                begin_ns, begin = self._open_windows.pop()
                if touches(begin_ns, end_ns):
                    self._marks.add([begin])
        is_in = bool(touches(begin_ns, end_ns))
        is_undated = "ts_ns" not in other and ts_ns >= 0
        if is_in and is_undated and len(self.chosen.undated_ns) < _UNDATED_MAX:
            self.chosen.undated_ns[row] = ts_ns
        return is_in

    def _take_thread(self, events: _Events, at: int) -> list[int]:
        """Take the entry or the exit of a thread of a GPU. Return the rows of its warp, if that has exited
        and is in the part. If too many rows wait, each is chosen by its own time.
        """
        shape, ts_ns, row = self._shape(events, at), int(events.ts_ns[at]), int(events.row[at])
        block, thread = events.thread_of(at)
        x, y, z = thread or (0, 0, 0)
        key = (shape.gpu, shape.name, int(events.launch[at]), block, x // _LANES, y, z)
        enters, warp = shape.phase == "B", self._warps.get(key)
        if self._warp_rows >= _THREAD_ROWS_MAX or (warp is None and not enters):
            return [row] if self._stretch.touches(ts_ns, ts_ns) else []
        if warp is None:
            warp = self._warps[key] = _Warp(ts_ns)
        warp.rows.append(row)
        self._warp_rows += 1
        warp.inside += 1 if enters else -1
        if warp.inside > 0:
            return []
        self._warp_rows -= len(self._warps.pop(key).rows)
        # An exit may be drawn as an instant too.
        return warp.rows if self._stretch.touches(warp.begin_ns, ts_ns + 1) else []

    # Shapes --------------------------------------------------------------------------------------------

    def _shape(self, events: _Events, at: int) -> Shape:
        shape = self._tables.shapes[int(events.shape[at])]
        assert shape is not None
        return shape

    def _kind(self, shape: Shape, number: int) -> int:
        """The bits for how the events of a shape are treated."""
        launches = shape.has_launch and shape.type != "gpu_thread"
        is_flow, names = shape.phase in FLOW_PHASES, bool(shape.comm)
        return (
            CALL * (launches and not shape.on_stream)
            | WORK * (launches and shape.on_stream)
            | MATCHED * self._calls.add_shape(number, shape)
            | WHOLE * (shape.phase == "X")
            | COUNTER * (shape.phase == COUNTS)
            | FLOW_START * (is_flow and shape.phase == "s")
            | FLOW_END * (is_flow and shape.phase != "s")
            | OF_THREAD * (shape.type == "gpu_thread" and shape.phase in "BE")
            | MEMORY * (shape.type == "memory" and shape.phase in "IX")
            | SWITCH * shape.is_switch
            | NAMED * names
            | NAMING * (names and shape.type == "annotation" and shape.phase == "I")
        )


def _last_of_each(shapes: Ints, wanted: Bools) -> list[int]:
    """The last of the wanted events of each shape, in their order."""
    at = np.flatnonzero(wanted)
    return sorted(dict(zip(shapes[at].tolist(), at.tolist(), strict=True)).values())
