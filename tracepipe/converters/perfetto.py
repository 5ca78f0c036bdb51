"""Writes Perfetto's protobuf trace, which opens in ui.perfetto.dev.

A trace is a concatenation of length-prefixed `TracePacket`s, so it can be written as a stream. The host's
events are one packet sequence, and the warps of each GPU are another, each with its own tables of names. The
packets that declare tracks and clocks are made here, and those of events, of which there are millions, in
`packets`. Perfetto's own classes would take 9 MB. The tests compare this with them.

    TracePacket      6 clock_snapshot  8 timestamp  10 sequence  13 sequence_flags  58 clock  59 defaults
                     60 track_descriptor
    ClockSnapshot    1 clock (1 id  2 timestamp  3 is_incremental)  2 primary_trace_clock
    TrackDescriptor  1 uuid  2 name  3 process (1 pid  6 name)  4 thread (1 pid  2 tid  5 name)  5 parent
                     8 counter (6 unit_name)  11 child_ordering  12 rank  15 sibling_merge_behavior
                     19 process_ordering  20 thread_ordering

Source: protos/perfetto/trace/trace_packet.proto, clock_snapshot.proto, track_event/track_descriptor.proto and
trace_packet_defaults.proto of perfetto v57, whose UI is the first to have an order of processes and threads.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from tracepipe.converters.packets import (
    AFTER,
    BEFORE,
    KEYS,
    LAUNCH_KEY,
    LINES,
    MARK,
    NAMES,
    TRACKS,
    NativePackets,
    NativeStream,
    Packets,
    PacketStream,
    delimited,
    number,
    text,
)
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.columns import NONE, Bytes, Int32s, Int64s, TraceColumns, distinct, grown
from tracepipe.event.counters import COUNTERS
from tracepipe.event.model import ID_LIMIT, MONOTONIC
from tracepipe.event.ops import BEGIN, INSTANT, MARKS
from tracepipe.event.stacks import Stacks
from tracepipe.event.tables import Tables
from tracepipe.event.vocabulary import FIRST_SCREEN, WAKEUP
from tracepipe.layout.timeline import (
    PYTHON,
    Drawn,
    Track,
    WarpChanges,
    shown_after,
    shown_before,
    shows_launch,
)
from tracepipe.native import library
from tracepipe.native.signatures import Switches as SwitchColumns

FTRACE_EVENTS: Final = 1
PERF_SAMPLE: Final = 66
TASK_STATE: Final = 117
TASK_RENAME: Final = 120
UNKNOWN, RUNS, LEAVES, WOKEN = range(4)
"""What the events of a shape are: nothing that is known, a thread runs, leaves its processor, or is woken."""
_RUNNABLE, _RUNNING, _SLEEPS, _WAITS, _STOPPED, _DESTROYED = 2, 3, 4, 5, 6, 8
# A zombie is written as destroyed. DEAD would end the thread in the trace processor's table, and for a main
# thread its process, which may have more events.
_STATES: Final = {
    "runnable": _RUNNABLE,
    "preempted": _RUNNABLE,
    "disk": _WAITS,
    "parked": _WAITS,
    "idle": _WAITS,
    "stopped": _STOPPED,
    "traced": _STOPPED,
    "dead": _DESTROYED,
    "zombie": _DESTROYED,
}


def _id(value: object) -> int | None:
    """A thread's id or a processor's number; None for anything else."""
    return value if type(value) is int and 0 <= value <= ID_LIMIT else None


class Switches:
    """The packets of context switches in one `stream`. CLOCK_BOOTTIME is ahead of its clock."""

    def __init__(self, stream: PacketStream | NativeStream, boottime_ahead_ns: int) -> None:
        self._stream, self._ahead_ns = stream, boottime_ahead_ns
        self._kind: Bytes = np.zeros(0, np.uint8)
        self._cpu: Int32s = np.zeros(0, np.int32)
        self._tid: Int32s = np.zeros(0, np.int32)
        """By the number of a shape: what its events are, its processor and its thread."""

    def forget(self) -> None:
        """Forget all shapes: they have new numbers now."""
        self._kind[:] = UNKNOWN

    def write(self, events: TraceColumns, tables: Tables) -> bytes:
        """The packets of events, which are in the order of time."""
        size = int(events.shape.max()) + 1
        self._kind = grown(self._kind, size, 0)
        self._cpu, self._tid = grown(self._cpu, size, 0), grown(self._tid, size, 0)
        for at in distinct(events.shape[self._kind[events.shape] == UNKNOWN]).tolist():
            shape = tables.shapes[at]
            assert shape is not None
            runs_or_leaves = RUNS if shape.phase == "B" else LEAVES
            self._kind[at] = WOKEN if shape.name == WAKEUP else runs_or_leaves
            self._cpu[at], self._tid[at] = shape.cpu, shape.tid
        stream = self._stream
        if isinstance(stream, PacketStream):
            made = [self.field_and_body(events, tables, at) for at in range(len(events))]
            stream.put_messages(events.ts_ns, [delimited(field, body) for field, body in made])
            return stream.drain()
        columns = (events.ts_ns, events.shape, events.args, self._kind, self._cpu, self._tid)
        view, at = SwitchColumns(*(column.ctypes.data for column in columns)), 0
        while at < len(events):
            at = stream.switches(view, tables.reader, self._ahead_ns, at, len(events))
            if at < len(events):
                stream.packet(int(events.ts_ns[at]), *self.field_and_body(events, tables, at))
                at += 1
        return stream.drain()

    def field_and_body(self, events: TraceColumns, tables: Tables, at: int) -> tuple[int, bytes]:
        """The message of one event, and its field of a packet."""
        shape, number_of_args = int(events.shape[at]), int(events.args[at])
        args = tables.args(number_of_args) if number_of_args != NONE else {}
        kind, cpu, tid = (int(column[shape]) for column in (self._kind, self._cpu, self._tid))
        waker = _id(args.get("by_tid")) if kind == WOKEN else None
        if waker is not None:
            target = _id(args.get("target_cpu"))
            waking = number(2, tid) + (number(5, target) if target is not None else b"")
            when = max(0, int(events.ts_ns[at]) + self._ahead_ns)
            event = number(1, when) + number(2, waker) + delimited(20, waking)
            return FTRACE_EVENTS, number(1, cpu) + delimited(2, event)
        state = _RUNNING if kind == RUNS else _RUNNABLE
        if kind == LEAVES:
            left = args.get("prev_state")
            state = _STATES.get(left, _SLEEPS) if isinstance(left, str) else _SLEEPS
        return TASK_STATE, number(1, cpu) + number(3, tid) + number(4, state)


class Samples:
    """The packets of samples of the host's stacks in one sequence: the viewer draws flame graphs of them.

    PerfSample: 1 cpu  2 pid  3 tid  4 callstack. InternedData: 5 names of functions, 6 frames (1 id
    2 function  3 mapping), 7 callstacks (1 id  2 frames, outermost first), 17 paths, 19 mappings
    (1 id  7 path).
    Source: protos/perfetto/trace/profiling/profile_packet.proto and profile_common.proto.
    """

    def __init__(self, stream: PacketStream) -> None:
        self._stream = stream
        self._callstacks: dict[int, int] = {}
        """Number of a stack → id."""
        self._ids: dict[tuple[int, object], int] = {}

    def write(self, drawn: Drawn) -> bytes:
        """The packets of those events of a batch that are samples."""
        events, tables = drawn.events, drawn.book.tables
        if events is None or events.stack is None:
            return b""
        shapes = distinct(events.shape)
        sampled = [
            at
            for at in shapes[shapes >= 0].tolist()
            if (shape := tables.shapes[at]) is not None and (shape.type, shape.phase) == ("host_sample", "I")
        ]
        rows = np.flatnonzero(np.isin(events.shape, sampled) & (events.stack != NONE))
        messages = []
        for at, stack in zip(events.shape[rows].tolist(), events.stack[rows].tolist(), strict=True):
            shape, interned = tables.shapes[at], bytearray()
            assert shape is not None
            of_callstack = self._callstack(stack, tables.stacks, interned)
            body = number(1, shape.cpu or 0) + number(2, shape.pid or 0) + number(3, shape.tid or 0)
            first = delimited(12, bytes(interned)) if interned else b""
            messages.append(first + number(13, 2) + delimited(PERF_SAMPLE, body + number(4, of_callstack)))
        self._stream.put_messages(events.ts_ns[rows], messages)
        return self._stream.drain()

    def _callstack(self, stack: int, stacks: Stacks, interned: bytearray) -> int:
        """The id of a stack. What is new in it is added to `interned`."""
        known = self._callstacks.get(stack)
        if known is None:
            frames = b""
            for at in reversed(stacks.frames_of(stack)):
                frame = stacks.frames[at]
                place = str(frame).removesuffix(frame.function).rstrip()
                name = frame.function if frame.line is None else f"{frame.function} ({place})"
                function = self._intern(5, name, text(2, name), interned)
                path = frame.file or "unknown"
                mapped = number(7, self._intern(17, path, text(2, path), interned))
                mapping = self._intern(19, path, mapped, interned)
                own = number(2, function) + number(3, mapping)
                frames += number(2, self._intern(6, at, own, interned))
            known = self._callstacks[stack] = self._intern(7, stack, frames, interned)
        return known

    def _intern(self, field: int, key: object, body: bytes, interned: bytearray) -> int:
        known = self._ids.get((field, key))
        if known is None:
            known = self._ids[field, key] = len(self._ids) + 1
            interned += delimited(field, number(1, known) + body)
        return known


# This many tracks fit at the top of a screen, above the others.
_PINS_MAX: Final = 10
# Tracks with longer names are not pinned.
_NAME_MAX: Final = 100
# At most this many of the pins are threads that launch, at least a tenth as often as the one that launches
# most.
_CALLERS_MAX, _CALLERS_APART = 4, 10
# At most this many streams are considered.
_STREAMS_MAX: Final = 1000
_OTHER, _STREAM, _CALLS, _RANGES, _FUNCTIONS, _SYSTEM = range(6)
_NEVER: Final = (1 << 63) - 1
_KINDS: Final = {
    **dict.fromkeys(("scheduler", "host_sample", "memory", "transfer", "summary"), _OTHER),
    **dict.fromkeys(("syscall", "kernel"), _SYSTEM),
    "gpu": _STREAM,
    "userspace": _CALLS,
    "annotation": _RANGES,
}
"""By category; tracks of a thread with others have functions."""
_WITHOUT_GPUS: Final = ((_CALLS,), (_RANGES, _FUNCTIONS), (_SYSTEM,))
"""The work of a run without a GPU: the first of these of which it has any."""
_PINNED: Final = {(kind.name, kind.category): kind for kind in COUNTERS if kind.pin}


class FirstScreen:
    """Counts what is drawn, and decides at the end what to show first."""

    def __init__(self) -> None:
        self._from_ns, self._to_ns = [_NEVER] * (_SYSTEM + 1), [-_NEVER] * (_SYSTEM + 1)
        """By kind of track: the first and the last time."""
        self._kind: Bytes = np.zeros(0, np.uint8)
        self._begins: Int64s = np.zeros(0, np.int64)
        self._launches: Int64s = np.zeros(0, np.int64)
        self._first_ns: Int64s = np.zeros(0, np.int64)
        """By row: what is on its track, how many slices it has, how many of them launch, and when the first
        of those is."""
        self._tracks: list[Track] = []
        self._counters: dict[int, Track] = {}
        """Counters that are pinned, by the id of their track."""
        self._gpus: list[Track] = []
        """GPUs whose kernels are shown on one row."""

    def add_row(self, row: int, track: Track) -> None:
        """Note the track of a row."""
        self._kind, self._begins = grown(self._kind, row + 1, _OTHER), grown(self._begins, row + 1, 0)
        self._launches = grown(self._launches, row + 1, 0)
        self._first_ns = grown(self._first_ns, row + 1, _NEVER)
        is_hosts = track.parent is not None and track.parent.kind in ("process", "thread")
        if track.kind == "slices" and (is_hosts or track.category == "gpu"):
            self._kind[row] = _KINDS.get(track.category, _FUNCTIONS)
        if track.kind == "group" and track.parent is None:
            self._gpus.append(track)
        elif track.kind == "counter" and (track.name, track.category) in _PINNED:
            self._counters[track.id] = track

    def see(self, drawn: Drawn) -> None:
        """Count operations, whose rows were noted."""
        self._tracks = drawn.book.tracks
        columns = drawn.drawn()
        kind, row, ts_ns, event = (columns[key] for key in ("kind", "row", "ts", "event"))
        of = self._kind[row]
        for one in np.flatnonzero(np.bincount(of)).tolist():
            self._work(one, ts_ns[of == one])
        begins = (of != _OTHER) & (kind == BEGIN) & (event >= 0)
        if drawn.events is None or not begins.any():
            return
        begun = np.bincount(row[begins])
        self._begins[: len(begun)] += begun
        begins[begins] = drawn.events.launch[event[begins]] != 0
        begun = np.bincount(row[begins])
        self._launches[: len(begun)] += begun
        np.minimum.at(self._first_ns, row[begins], ts_ns[begins])

    def see_warps(self, warps: WarpChanges) -> None:
        """Note the times of warps."""
        self._work(_STREAM, warps.ts_ns)
        self._counters[warps.counter.id] = warps.counter

    def _work(self, kind: int, ts_ns: Int64s) -> None:
        if len(ts_ns):
            self._from_ns[kind] = min(self._from_ns[kind], int(ts_ns.min()))
            self._to_ns[kind] = max(self._to_ns[kind], int(ts_ns.max()))

    def packet(self, sequence: int) -> bytes:
        """The packet with the result, in one packet sequence; empty where nothing was recorded but context
        switches and memory.
        """
        there = (kinds for kinds in ((_STREAM,), *_WITHOUT_GPUS) if max(self._to_ns[of] for of in kinds) >= 0)
        if (kinds := next(there, None)) is None:
            return b""
        stated: dict[str, Any] = {
            "start_ns": min(self._from_ns[of] for of in kinds),
            "end_ns": max(self._to_ns[of] for of in kinds),
            "pins": self._pins() if kinds == (_STREAM,) else self._pins_without_gpus(kinds),
        }
        attribute = text(1, FIRST_SCREEN) + text(3, orjson.dumps(stated).decode())
        return delimited(1, delimited(126, delimited(1, attribute)) + number(10, sequence))

    def _pins(self) -> list[str]:
        """The UI's names of the tracks to pin: calls of threads that launch, counters, busy streams."""
        # Only calls that launch count: a thread that waits for the GPU may make more calls than the one that
        # launches.
        callers = self._busiest(_CALLS, self._launches)
        callers = callers[self._first_ns[callers] < self._to_ns[_STREAM]]
        least = max(1, int(self._launches[callers[0]]) // _CALLERS_APART) if len(callers) else 1
        callers = callers[self._launches[callers] >= least]
        at_most = min(_CALLERS_MAX, max(1, _PINS_MAX - len(self._gpus)))
        pins = self._named(callers[:at_most])
        if len(self._gpus) > 1:
            # The streams and counters of several GPUs have the same names.
            gpus = sorted((gpu.rank, gpu.name) for gpu in self._gpus if len(gpu.name) <= _NAME_MAX)
            return [*pins, *(name for _, name in gpus)][:_PINS_MAX]
        busiest = self._busiest(_STREAM, self._begins)[:_STREAMS_MAX]
        streams = [self._tracks[row].name for row in busiest.tolist()]
        names = [*self._pinned("before streams"), *streams, *self._pinned("after streams")]
        # The UI pins all tracks with a name.
        count = Counter(names)
        return [*pins, *(name for name in names if count[name] == 1)][:_PINS_MAX]

    def _pins_without_gpus(self, kinds: tuple[int, ...]) -> list[str]:
        """The names of the tracks with the most slices of these kinds, and of the counters."""
        rows = np.concatenate([self._busiest(kind, self._begins)[:_CALLERS_MAX] for kind in kinds])
        counters = self._pinned("after streams")
        return [*self._named(rows), *(counters if len(counters) == 1 else ())]

    def _named(self, rows: Int64s) -> list[str]:
        """The UI's names of the tracks of threads, by their ids."""
        tracks = sorted((self._tracks[row] for row in rows.tolist()), key=lambda one: (one.pid, one.tid))
        return [f"{track.name} ({track.tid})" if track.tid else track.name for track in tracks]

    def _pinned(self, place: str) -> list[str]:
        """The names of the counters that are pinned there, in the order of the registry."""
        of_kinds = [(key, kind) for key, kind in _PINNED.items() if kind.pin == place]
        counters = self._counters.values()
        return [one.name for key, _ in of_kinds for one in counters if (one.name, one.category) == key]

    def _busiest(self, kind: int, count: Int64s) -> Int64s:
        """The rows of a kind, those with the highest counts, which are by row, first."""
        rows = np.flatnonzero(self._kind == kind)
        return rows[np.argsort(-count[rows], kind="stable")]


# builtin_clock.proto
_CLOCK_REALTIME, _CLOCK_MONOTONIC, _CLOCK_BOOTTIME = 1, 3, 6
# The first of the clock ids that belong to one packet sequence.
_CLOCK_STEPS = 64
_COMPRESS_BYTES = 1 << 19
# The packet sequences of the host and of its context switches. Those of GPUs follow. Samples and clocks have
# separate ones.
_HOST, _SWITCHES, _SAMPLES, _CLOCKS = 1, 2, 1 << 29, 1 << 30
# The track above all others.
_TOP: Final = 0
# child_ordering EXPLICIT, process_ordering and thread_ordering, and sibling_merge_behavior NONE.
_ORDERED: Final = number(11, 3)
_ORDERED_AT_THE_TOP: Final = number(19, 1) + number(20, 1)
_NEVER_MERGED: Final = number(15, 2)
# SEQ_INCREMENTAL_STATE_CLEARED and SEQ_NEEDS_INCREMENTAL_STATE
_BEGINS: Final = number(13, 3)


def _packet(*fields: bytes) -> bytes:
    return delimited(1, b"".join(fields))


def _clock(id: int, ns: int, *fields: bytes) -> bytes:
    """A clock of a snapshot."""
    return delimited(1, b"".join((number(1, id), number(2, ns), *fields)))


def _declaration(track: Track, uuid: int, *fields: bytes) -> bytes:
    """The packet that declares a track."""
    rank = number(12, min(track.order, (1 << 31) - 1))
    return _packet(number(10, _HOST), delimited(60, b"".join((number(1, uuid), *fields, rank))))


def _named(name: str, parent_uuid: int) -> bytes:
    """The fields of a track that is not a process or a thread."""
    return text(2, name) + number(5, parent_uuid) + _NEVER_MERGED


def _is_thread(track: Track) -> bool:
    return track.kind == "thread" and bool(track.tid and track.pid)


class PerfettoWriter:
    """Writes batches as they come. It keeps names and nothing else."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out, self._info = out, info
        self._base_ns = info.start.get("trace_ns", 0)
        self._clock = _CLOCK_MONOTONIC if info.trace_clock == MONOTONIC else _CLOCK_BOOTTIME
        self._roots: dict[int, Track] = {}
        """Processes and threads by the id of their track. They are declared at the end."""
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._gpus: dict[int, Packets] = {}
        self._gpu_rows: dict[int, int] = {}
        """By GPU: for how many of its rows the bytes are set."""
        self._switches: Switches | None = None
        self._samples, self._has_samples = Samples(PacketStream(_SAMPLES, self._clock, self._base_ns)), False
        self._first_screen = FirstScreen()
        self._emit(self._preamble())
        self._host = self._sequence(_HOST, ("source_ns",))

    def _preamble(self) -> bytes:
        """The packets before all events: one instant on every known clock."""
        ids = {
            "monotonic_ns": _CLOCK_MONOTONIC,
            "boottime_ns": _CLOCK_BOOTTIME,
            "realtime_ns": _CLOCK_REALTIME,
        }
        clocks = {self._clock: self._base_ns}
        if self._clock == _CLOCK_MONOTONIC:
            # Wakeups are on CLOCK_BOOTTIME. Where a recording does not relate it, it is taken to be the
            # trace's clock.
            clocks[_CLOCK_BOOTTIME] = self._base_ns
            clocks |= {ids[key]: ns for key, ns in self._info.start.items() if key in ids}
        self._boottime_ahead_ns = clocks[_CLOCK_BOOTTIME] - self._base_ns
        snapshot = [_clock(id, ns) for id, ns in clocks.items()]
        return _packet(delimited(6, b"".join((*snapshot, number(2, self._clock)))), number(10, _CLOCKS))

    # Tracks --------------------------------------------------------------------------------------------

    def _declared(self, track: Track) -> bytes:
        """The packets that declare a track."""
        uuid = track.id * 2
        if track.kind == "process" and track.pid:
            self._roots[track.id] = track
            return b""
        if _is_thread(track):
            known = self._roots.get(track.id)
            self._roots[track.id] = track
            if known is not None and known.name == track.name:
                return b""
            # Tracks directly under a thread's descriptor would become its siblings, so they are in a plain
            # group.
            return _declaration(track, uuid + 1, _named(track.name, uuid), _ORDERED)
        parent = track.parent
        parent_uuid = 0 if parent is None else parent.id * 2 + _is_thread(parent)
        fields = _named(track.label(), parent_uuid)
        if track.kind == "thread" and track.tid and track.is_named:
            # A descriptor of a thread needs a pid, which is not known here.
            rename = number(1, track.tid) + text(2, track.name)
            self._emit(_packet(number(10, _HOST), delimited(TASK_RENAME, rename)))
        if track.kind == "counter":
            fields += delimited(8, text(6, track.unit))
        elif track.kind != "slices":
            fields += _ORDERED
        return _declaration(track, uuid, fields)

    # Sequences -----------------------------------------------------------------------------------------

    def _sequence(self, id: int, keys: tuple[str, ...], counter: Track | None = None) -> Packets:
        """A packet sequence, and its first packet: empty tables, its clock, its defaults."""
        self._begin_sequence(id, counter)
        core = library()
        packets: Packets
        if core is None:
            packets = Packets(id, self._clock, self._base_ns)
        else:
            packets = NativePackets(core, id, self._clock, self._base_ns)
        for at, key in enumerate(keys):
            packets.set(KEYS, at, packets.key(key))
        for at, mark in enumerate(MARKS):
            packets.set(MARK, at, packets.annotations({mark: True}) if mark else b"")
        return packets

    def _begin_sequence(self, id: int, counter: Track | None) -> None:
        defaults = number(58, _CLOCK_STEPS)
        if counter is not None:
            defaults += delimited(11, number(31, counter.id * 2))
        steps = _clock(_CLOCK_STEPS, self._base_ns, number(3, True))
        fields = (
            delimited(6, steps + _clock(self._clock, self._base_ns)),
            number(8, self._base_ns),
            number(10, id),
            _BEGINS,
            number(58, self._clock),
            delimited(59, defaults),
        )
        self._emit(_packet(*fields))

    def _gpu(self, warps: WarpChanges) -> Packets:
        packets = self._gpus.get(warps.id)
        if packets is None:
            keys = ("source_after_ns", "exits", "cycles", "lanes")
            id = _SWITCHES + 1 + len(self._gpus)
            packets = self._gpus[warps.id] = self._sequence(id, keys, warps.counter)
            packets.name("exit")
            self._gpu_rows[warps.id] = 0
        return packets

    # Events --------------------------------------------------------------------------------------------

    def write(self, drawn: Drawn) -> None:
        """Write what a batch draws."""
        if drawn.declared:
            self._emit(b"".join([self._declared(track) for track in drawn.declared]))
        if len(drawn.order):
            self._make_ready(drawn)
            self._host.write(drawn)
            self._emit(self._host.drain())
        if drawn.switches is not None:
            if self._switches is None:
                self._begin_sequence(_SWITCHES, None)
                core, first = library(), (_SWITCHES, self._clock, self._base_ns)
                stream = PacketStream(*first) if core is None else NativeStream(core, *first)
                self._switches = Switches(stream, self._boottime_ahead_ns)
            self._emit(self._switches.write(drawn.switches, drawn.book.tables))
        if drawn.events is not None and (packets_of_samples := self._samples.write(drawn)):
            if not self._has_samples:
                self._begin_sequence(_SAMPLES, None)
                self._has_samples = True
            self._emit(packets_of_samples)
        for warps in drawn.warps:
            packets = self._gpu(warps)
            for row in range(self._gpu_rows[warps.id], len(warps.tracks)):
                packets.set_row(row, warps.tracks[row])
            self._gpu_rows[warps.id] = len(warps.tracks)
            packets.warps(warps)
            self._first_screen.see_warps(warps)
            self._emit(packets.drain())

    def _make_ready(self, drawn: Drawn) -> None:
        """Make the bytes that operations share, each before its first use."""
        packets, book = self._host, drawn.book
        lines = drawn.lines()
        if lines is not None:
            frames = book.tables.stacks.frames
            for line in packets.unready(LINES, lines[lines != NONE]):
                packets.set(LINES, line, packets.annotations({PYTHON: str(frames[line])}))
        columns = drawn.drawn()
        named = columns["name"][(columns["kind"] == BEGIN) | (columns["kind"] == INSTANT)]
        shapes = named[:0] if drawn.events is None else drawn.events.shape
        if all(map(packets.is_ready, (TRACKS, NAMES, BEFORE), (columns["row"], named, shapes))):
            self._first_screen.see(drawn)
            return
        columns = drawn.ops.columns
        kind, row, name, event = (columns[key][drawn.order] for key in ("kind", "row", "name", "event"))
        for at in packets.unready(TRACKS, row):
            packets.set_row(at, book.tracks[at])
            self._first_screen.add_row(at, book.tracks[at])
        self._first_screen.see(drawn)
        for at in packets.unready(NAMES, name[(kind == BEGIN) | (kind == INSTANT)]):
            packets.set(NAMES, at, packets.name(book.names[at]))
        shapes = event[:0] if drawn.events is None else drawn.events.shape[event[event >= 0]]
        for at in packets.unready(BEFORE, shapes):
            shape = book.tables.shapes[at]
            assert shape is not None
            packets.set(BEFORE, at, packets.annotations(shown_before(shape)))
            if shows_launch(shape) or not isinstance(packets, NativePackets):
                packets.set(LAUNCH_KEY, at, packets.key("launch") if shows_launch(shape) else b"")
            packets.set(AFTER, at, packets.annotations(shown_after(shape)))

    def forget(self, *, shapes: bool) -> None:
        """Forget all arguments, and all names and `shapes`: they have new numbers now."""
        self._host.forget(shapes=shapes)
        if shapes and self._switches is not None:
            self._switches.forget()

    # Output --------------------------------------------------------------------------------------------

    def _emit(self, packets: bytes) -> None:
        if not self._info.compress:
            self._out.write(packets)
            return
        self._kept.append(packets)
        self._kept_bytes += len(packets)
        if self._kept_bytes >= _COMPRESS_BYTES:
            self._emit_compressed()

    def _emit_compressed(self) -> None:
        packets, self._kept, self._kept_bytes = b"".join(self._kept), [], 0
        if packets:
            self._out.write(delimited(1, delimited(50, zlib.compress(packets))))

    def finish(self) -> None:
        """Write what is known at the end: processes and threads, and what to show first. The trace processor
        keeps the first name and place that it reads, so only the last ones are written.
        """
        if self._roots:
            self._emit(_packet(number(10, _HOST), delimited(60, number(1, _TOP) + _ORDERED_AT_THE_TOP)))
        for track in self._roots.values():
            field, field_of_name = (4, 5) if _is_thread(track) else (3, 6)
            own = number(1, track.pid) + (number(2, track.tid) if _is_thread(track) else b"")
            own += text(field_of_name, track.name) if track.is_named else b""
            self._emit(_declaration(track, track.id * 2, delimited(field, own)))
        self._emit_compressed()
        self._out.write(self._first_screen.packet(_HOST))
