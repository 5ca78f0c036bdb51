"""Writes Perfetto's protobuf trace, which opens in ui.perfetto.dev.

A trace is a concatenation of length-prefixed `TracePacket`s, so writing streams. Each thread and each GPU is
a packet sequence with its own tables of names. Static packets are made with the `perfetto` package's
classes; the packets of events, of which there are millions, by hand:

    TracePacket   8 timestamp  11 track_event  12 interned_data  10 sequence  13 flags
    TrackEvent    9 type  11 track  3 category  10 name (or 23 inline)  4 annotations  30 value  47 flows

Timestamps count from the trace's start on a clock of the sequence's own (id 64), which halves their size.
Source: protos/perfetto/trace/trace_packet.proto and track_event/track_event.proto of perfetto v52.
"""

from __future__ import annotations

import zlib
from typing import Any, BinaryIO

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tracepipe.converters.perfetto_intern import Sequence
from tracepipe.converters.wire import SMALL, delimited, fixed64, tag, text, varint
from tracepipe.converters.writer import OutputFormat, TraceInfo
from tracepipe.model import MONOTONIC
from tracepipe.timeline import BEGIN, BEGIN_ONCE, COUNTER, DECLARE, END, INSTANT, Op, Track

_CLOCK_REALTIME, _CLOCK_MONOTONIC, _CLOCK_BOOTTIME = (
    pb.BUILTIN_CLOCK_REALTIME,
    pb.BUILTIN_CLOCK_MONOTONIC,
    pb.BUILTIN_CLOCK_BOOTTIME,
)
# The first of the clock ids that belong to one packet sequence.
_CLOCK_FROM_START = 64
_EXPLICIT_ORDER = pb.TrackDescriptor.EXPLICIT
_NEVER_MERGE = pb.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
_COMPRESS_BYTES = 1 << 19

_TIMESTAMP, _TRACK_EVENT, _PACKET = tag(8, 0), tag(11, 2), tag(1, 2)
_INTERNED = 12
_TYPES = {BEGIN: 1, END: 2, INSTANT: 3, COUNTER: 4, BEGIN_ONCE: 1}


class _TrackState:
    """What a track's packets start with. `heads` is by (kind, name)."""

    __slots__ = ("end", "end_packet", "heads", "sequence", "track", "uuid")

    def __init__(self, track: Track, sequence: Sequence, uuid: int) -> None:
        self.track, self.sequence, self.uuid = track, sequence, uuid
        self.heads: dict[tuple[int, Any], bytes] = {}
        self.end = self.constant(END)
        self.end_packet = _TRACK_EVENT + varint(len(self.end)) + self.end + sequence.suffix

    def constant(self, kind: int) -> bytes:
        """Type and track; the track is left out where it is the sequence's default."""
        own = b"" if self.sequence.default_uuid == self.uuid else tag(11, 0) + varint(self.uuid)
        return tag(9, 0) + varint(_TYPES[kind]) + own

    def head(self, kind: int, name: str) -> bytes:
        """Type, track, category and name."""
        head = self.constant(kind)
        if kind != COUNTER:
            head += self.sequence.category(self.track.category)
        if kind in (BEGIN, INSTANT):
            head += self.sequence.name(name)
        if len(self.heads) < self.sequence.TABLE_MAX:
            self.heads[kind, name] = head
        return head


class PerfettoWriter:
    """Writes operations as they come; holds names and nothing else."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out, self._info = out, info
        self._base_ns = info.start.get("trace_ns", 0)
        self._clock = _CLOCK_MONOTONIC if info.trace_clock == MONOTONIC else _CLOCK_BOOTTIME
        self._sequences: dict[int, Sequence] = {}
        self._states: dict[Track, _TrackState] = {}
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._emit(self._preamble())

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
            clocks |= {ids[key]: ns for key, ns in self._info.start.items() if key in ids}
        for clock_id, ns in clocks.items():
            snapshot.clocks.add(clock_id=clock_id, timestamp=ns)
        return delimited(1, packet.SerializeToString())

    # Tracks --------------------------------------------------------------------------------------------

    def _declare(self, track: Track) -> None:
        packets = [self._descriptor(track)]
        if track.kind == "thread" and track.tid and track.pid:
            # Tracks under a thread's own descriptor become its siblings: a plain group holds them together.
            group = pb.TracePacket()
            d = group.track_descriptor
            d.uuid, d.parent_uuid, d.name = track.id * 2 + 1, track.id * 2, track.name
            d.child_ordering, d.sibling_order_rank = _EXPLICIT_ORDER, track.rank
            d.sibling_merge_behavior = _NEVER_MERGE
            packets.append(group)
        sequence = self._sequence(track)
        for packet in packets:
            packet.trusted_packet_sequence_id = sequence.id
            self._emit(delimited(1, packet.SerializeToString()))

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
            d.process.pid, d.process.process_name = track.pid, track.name
        elif track.kind == "thread" and track.tid and track.pid:
            d.thread.pid, d.thread.tid, d.thread.thread_name = track.pid, track.tid, track.name
        else:
            d.name = track.label()
            d.parent_uuid = self._parent_uuid(track)
            d.sibling_merge_behavior = _NEVER_MERGE
        d.sibling_order_rank = min(track.rank, (1 << 31) - 1)
        if track.kind == "counter":
            d.counter.unit_name = track.unit
        elif track.kind != "slices":
            d.child_ordering = _EXPLICIT_ORDER
        return packet

    def _sequence(self, track: Track) -> Sequence:
        sequence = self._sequences.get(track.lane)
        if sequence is None:
            sequence = self._sequences[track.lane] = Sequence(track.lane)
        return sequence

    def _meet(self, track: Track) -> _TrackState:
        sequence = self._sequence(track)
        if not sequence.default_uuid:
            sequence.default_uuid = track.id * 2
        self._start(sequence)
        state = self._states[track] = _TrackState(track, sequence, track.id * 2)
        sequence.heads.append(state.heads)
        return state

    def _start(self, sequence: Sequence) -> None:
        """The first packet of a sequence: empty tables, its clock, its defaults."""
        if sequence.started:
            return
        sequence.started = True
        packet = pb.TracePacket()
        packet.trusted_packet_sequence_id = sequence.id
        packet.sequence_flags = 3
        packet.timestamp_clock_id, packet.timestamp = self._clock, self._base_ns
        defaults = packet.trace_packet_defaults
        defaults.timestamp_clock_id = _CLOCK_FROM_START
        defaults.track_event_defaults.track_uuid = sequence.default_uuid
        packet.clock_snapshot.clocks.add(clock_id=_CLOCK_FROM_START, timestamp=0)
        packet.clock_snapshot.clocks.add(clock_id=self._clock, timestamp=self._base_ns)
        self._emit(delimited(1, packet.SerializeToString()))

    # Events --------------------------------------------------------------------------------------------

    def write(self, ops: list[Op]) -> None:
        """Write operations in the order given."""
        out: list[bytes] = []
        states, base_ns = self._states, self._base_ns
        for kind, track, ts_ns, name, args, flows in ops:
            state = states.get(track)
            if state is None or kind == DECLARE:
                self._flush(out)
                if kind == DECLARE:
                    self._declare(track)
                    continue
                state = self._meet(track)
            ns = ts_ns - base_ns
            when = _TIMESTAMP + varint(ns) if ns >= 0 else self._before_start(ts_ns)
            sequence = state.sequence
            if kind == END and args is None:
                packet = when + state.end_packet
            else:
                if kind == BEGIN or kind == INSTANT:
                    body = state.heads.get((kind, name)) or state.head(kind, name)
                elif kind == END:
                    body = state.end
                elif kind == COUNTER:
                    body = (state.heads.get((kind, "")) or state.head(kind, "")) + tag(30, 0) + varint(name)
                else:
                    body = (state.heads.get((kind, "")) or state.head(kind, "")) + text(23, name)
                if args:
                    body += sequence.annotations(args)
                if flows:
                    for flow in flows:
                        body += fixed64(47, abs(flow))
                size = len(body)
                packet = (
                    when
                    + _TRACK_EVENT
                    + (SMALL[size] if size < 16384 else varint(size))
                    + body
                    + sequence.suffix
                )
                if sequence.pending:
                    packet += delimited(_INTERNED, b"".join(sequence.pending))
                    sequence.pending.clear()
                    if sequence.full():
                        self._flush(out, packet)
                        sequence.restart()
                        self._start(sequence)
                        continue
            size = len(packet)
            out.append(_PACKET + (SMALL[size] if size < 16384 else varint(size)) + packet)
        self._flush(out)

    def _before_start(self, ts_ns: int) -> bytes:
        """An absolute timestamp, for the few events before the trace's start."""
        return _TIMESTAMP + varint(max(0, ts_ns)) + tag(58, 0) + varint(self._clock)

    def _flush(self, out: list[bytes], last: bytes = b"") -> None:
        if last:
            out.append(delimited(1, last))
        self._emit(b"".join(out))
        out.clear()

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
        """Write what compression still holds."""
        self._emit_compressed()


FORMAT = OutputFormat(
    "perfetto", "Perfetto trace (ui.perfetto.dev)", ".pftrace", PerfettoWriter, can_compress=True
)
