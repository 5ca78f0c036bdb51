"""Writes Perfetto's protobuf trace, which opens in ui.perfetto.dev.

A trace is a concatenation of length-prefixed `TracePacket`s, so writing streams. What happens on the host is
one packet sequence, and the warps of each GPU are another, each with its own tables of names. Static packets
are made with the `perfetto` package's classes; those of events, of which there are millions, in `packets`.
Source: protos/perfetto/trace/trace_packet.proto and track_event/track_event.proto of perfetto v52.
"""

from __future__ import annotations

import zlib
from typing import Any, BinaryIO

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tracepipe.converters.first_screen import FirstScreen
from tracepipe.converters.native_packets import NativePackets
from tracepipe.converters.packets import (
    AFTER,
    BEFORE,
    KEYS,
    LAUNCH_KEY,
    LINES,
    MARK,
    NAMES,
    TRACKS,
    Packets,
)
from tracepipe.converters.switches import NativeSwitches, SwitchClock, Switches
from tracepipe.converters.wire import delimited, number, text
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.columns import NONE, Int32s
from tracepipe.event.model import MONOTONIC
from tracepipe.event.ops import BEGIN, INSTANT, MARKS
from tracepipe.layout.changes import WarpChanges
from tracepipe.layout.timeline import PYTHON, Drawn, Track, shown_after, shown_before, shows_launch
from tracepipe.native import library

_CLOCK_REALTIME, _CLOCK_MONOTONIC, _CLOCK_BOOTTIME = (
    pb.BUILTIN_CLOCK_REALTIME,
    pb.BUILTIN_CLOCK_MONOTONIC,
    pb.BUILTIN_CLOCK_BOOTTIME,
)
# The first of the clock ids that belong to one packet sequence.
_CLOCK_STEPS = 64
_EXPLICIT_ORDER = pb.TrackDescriptor.EXPLICIT
_NEVER_MERGE = pb.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
_COMPRESS_BYTES = 1 << 19
# The packet sequences of the host, and of its threads' switches; those of GPUs follow.
_HOST, _SWITCHES = 1, 2


def _order(track: Track) -> int:
    return min(track.order, (1 << 31) - 1)


class PerfettoWriter:
    """Writes batches as they come; holds names and nothing else."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out, self._info = out, info
        self._base_ns = info.start.get("trace_ns", 0)
        self._clock = _CLOCK_MONOTONIC if info.trace_clock == MONOTONIC else _CLOCK_BOOTTIME
        self._processes: dict[int, Track] = {}
        """By the track's id; they get names at the end."""
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._gpus: dict[int, Packets] = {}
        self._gpu_rows: dict[int, int] = {}
        """By GPU how many of its rows are ready."""
        self._switches: Switches | None = None
        self._first_screen = FirstScreen()
        self._emit(self._preamble())
        self._host = self._sequence(_HOST, ("source_ns",))

    def _preamble(self) -> bytes:
        """One clock snapshot for the whole trace: the same instant on every clock that is known."""
        packet = pb.TracePacket()
        packet.trusted_packet_sequence_id = 1 << 30
        snapshot = packet.clock_snapshot
        snapshot.primary_trace_clock = self._clock
        ids = {
            "monotonic_ns": _CLOCK_MONOTONIC,
            "boottime_ns": _CLOCK_BOOTTIME,
            "realtime_ns": _CLOCK_REALTIME,
        }
        clocks = {self._clock: self._base_ns}
        if self._clock == _CLOCK_MONOTONIC:
            # Wakeups are on CLOCK_BOOTTIME: where a recording does not relate it, the two are taken as one.
            clocks[_CLOCK_BOOTTIME] = self._base_ns
            clocks |= {ids[key]: ns for key, ns in self._info.start.items() if key in ids}
        self._boottime_ahead_ns = clocks[_CLOCK_BOOTTIME] - self._base_ns
        for clock_id, ns in clocks.items():
            snapshot.clocks.add(clock_id=clock_id, timestamp=ns)
        return delimited(1, packet.SerializeToString())

    # Tracks --------------------------------------------------------------------------------------------

    def _declared(self, track: Track) -> bytes:
        """The packets that declare a track."""
        if track.kind == "slices":
            return self._plain(track)
        packets = [self._descriptor(track)]
        if track.kind == "thread" and track.tid and track.pid:
            # Tracks under a thread's own descriptor become its siblings: a plain group holds them together.
            group = pb.TracePacket()
            d = group.track_descriptor
            d.uuid, d.parent_uuid, d.name = track.id * 2 + 1, track.id * 2, track.name
            d.child_ordering, d.sibling_order_rank = _EXPLICIT_ORDER, _order(track)
            d.sibling_merge_behavior = _NEVER_MERGE
            packets.append(group)
        for packet in packets:
            packet.trusted_packet_sequence_id = _HOST
        return b"".join(delimited(1, packet.SerializeToString()) for packet in packets)

    def _plain(self, track: Track) -> bytes:
        """The packet of a track that has nothing of its own: a GPU has thousands of slots."""
        fields = (
            number(1, track.id * 2),
            text(2, track.label()),
            number(5, self._parent_uuid(track)),
            number(12, _order(track)),
            number(15, _NEVER_MERGE),
        )
        return delimited(1, number(10, _HOST) + delimited(60, b"".join(fields)))

    @staticmethod
    def _parent_uuid(track: Track) -> int:
        parent = track.parent
        if parent is None:
            return 0
        grouped = parent.kind == "thread" and parent.tid and parent.pid
        return parent.id * 2 + (1 if grouped else 0)

    def _descriptor(self, track: Track) -> Any:
        packet = pb.TracePacket()
        d = packet.track_descriptor
        d.uuid = track.id * 2
        if track.kind == "process" and track.pid:
            # The trace processor keeps the first name of a process, and the last is wanted: see `finish`.
            d.process.pid = track.pid
            self._processes[track.id] = track
        elif track.kind == "thread" and track.tid and track.pid:
            d.thread.pid, d.thread.tid, d.thread.thread_name = track.pid, track.tid, track.name
        else:
            d.name = track.label()
            d.parent_uuid = self._parent_uuid(track)
            d.sibling_merge_behavior = _NEVER_MERGE
        d.sibling_order_rank = _order(track)
        if track.kind == "counter":
            d.counter.unit_name = track.unit
        elif track.kind != "slices":
            d.child_ordering = _EXPLICIT_ORDER
        return packet

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
        packet = pb.TracePacket()
        packet.trusted_packet_sequence_id = id
        packet.sequence_flags = 3
        packet.timestamp_clock_id, packet.timestamp = self._clock, self._base_ns
        defaults = packet.trace_packet_defaults
        defaults.timestamp_clock_id = _CLOCK_STEPS
        if counter is not None:
            defaults.track_event_defaults.extra_counter_track_uuids.append(counter.id * 2)
        packet.clock_snapshot.clocks.add(clock_id=_CLOCK_STEPS, timestamp=self._base_ns, is_incremental=True)
        packet.clock_snapshot.clocks.add(clock_id=self._clock, timestamp=self._base_ns)
        self._emit(delimited(1, packet.SerializeToString()))

    def _switching(self) -> Switches:
        """The sequence of threads that get and leave processors, which begins with the first of them."""
        if self._switches is None:
            self._begin_sequence(_SWITCHES, None)
            clock = SwitchClock(self._clock, self._base_ns, self._boottime_ahead_ns)
            core = library()
            self._switches = (
                Switches(_SWITCHES, clock) if core is None else NativeSwitches(core, _SWITCHES, clock)
            )
        return self._switches

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
            self._emit(self._host.take())
        if drawn.switches is not None:
            self._emit(self._switching().write(drawn.switches, drawn.book.tables))
        for warps in drawn.warps:
            packets = self._gpu(warps)
            for row in range(self._gpu_rows[warps.id], len(warps.tracks)):
                packets.set_row(row, warps.tracks[row])
            self._gpu_rows[warps.id] = len(warps.tracks)
            packets.warps(warps)
            self._first_screen.see_warps(warps)
            self._emit(packets.take())

    def _make_ready(self, drawn: Drawn) -> None:
        """Make the bytes that operations share, each when it is needed first."""
        packets, book = self._host, drawn.book
        rows, names, shapes = self._new(drawn)
        lines = drawn.lines()
        if lines is not None:
            frames = book.tables.stacks.frames
            for line in packets.unready(LINES, lines[lines != NONE]):
                packets.set(LINES, line, packets.annotations({PYTHON: str(frames[line])}))
        for row in rows:
            packets.set_row(row, book.tracks[row])
            self._first_screen.meet(row, book.tracks[row])
        self._first_screen.see(drawn)
        for name in names:
            packets.set(NAMES, name, packets.name(book.names[name]))
        for at in shapes:
            shape = book.tables.shapes[at]
            assert shape is not None
            packets.set(BEFORE, at, packets.annotations(shown_before(shape)))
            if shows_launch(shape) or not isinstance(packets, NativePackets):
                packets.set(LAUNCH_KEY, at, packets.key("launch") if shows_launch(shape) else b"")
            packets.set(AFTER, at, packets.annotations(shown_after(shape)))

    def _new(self, drawn: Drawn) -> tuple[list[int], list[int], list[int]]:
        """The rows, names and shapes of a batch that are not ready, in the order of their use."""
        columns = drawn.ops.columns
        kind, row, name, event = (columns[key][drawn.order] for key in ("kind", "row", "name", "event"))
        shapes: Int32s = event[:0]
        if drawn.events is not None:
            shapes = drawn.events.shape[event[event >= 0]]
        named = name[(kind == BEGIN) | (kind == INSTANT)]
        return (
            self._host.unready(TRACKS, row),
            self._host.unready(NAMES, named),
            self._host.unready(BEFORE, shapes),
        )

    def forget(self) -> None:
        """Names, shapes and arguments have other numbers from here on."""
        self._host.forget()
        if self._switches is not None:
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
        """Write what is known at the end: the names of processes, and what to see first."""
        for track in self._processes.values():
            packet = self._descriptor(track)
            packet.trusted_packet_sequence_id = _HOST
            packet.track_descriptor.process.process_name = track.name
            self._emit(delimited(1, packet.SerializeToString()))
        self._emit_compressed()
        self._out.write(self._first_screen.packet(_HOST))
