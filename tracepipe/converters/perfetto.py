"""Writes Perfetto's protobuf trace, which opens in ui.perfetto.dev.

A trace is a concatenation of length-prefixed `TracePacket`s, so writing streams. Each thread and each GPU is
a packet sequence with its own tables of names. Static packets are made with the `perfetto` package's
classes; the packets of events, of which there are millions, by hand:

    TracePacket   8 timestamp  11 track_event  12 interned_data  10 sequence  13 flags
    TrackEvent    9 type  11 track  3 category  10 name (or 23 inline)  4 annotations  30 value  47 flows

Timestamps are steps from the sequence's packet before (an incremental clock, id 64), which makes one or two
bytes of eight; a packet that is older than the one before it has its time in full.
Source: protos/perfetto/trace/trace_packet.proto and track_event/track_event.proto of perfetto v52.
"""

from __future__ import annotations

import zlib
from operator import itemgetter
from typing import Any, BinaryIO

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tracepipe.converters.perfetto_intern import Sequence
from tracepipe.converters.wire import SMALL, delimited, fixed64, tag, varint
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.model import MONOTONIC, SharedArgs
from tracepipe.layout.timeline import BEGIN, BEGIN_ONCE, COUNTER, DECLARE, END, INSTANT, Flows, Op, Track

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

_TIMESTAMP, _TRACK_EVENT, _PACKET, _FLOW = tag(8, 0), tag(11, 2), tag(1, 2), tag(47, 1)
# Ready-made: a timestamp field by its step, and what precedes a track event or a packet by its length.
_STEPS = tuple(_TIMESTAMP + digits for digits in SMALL)
_EVENT_OF = tuple(_TRACK_EVENT + digits for digits in SMALL[:1024])
_PACKET_OF = tuple(_PACKET + digits for digits in SMALL[:1024])
_STEPS_MAX = len(_STEPS)
_TIME = itemgetter(2)
_VALUE = tag(30, 0)
_COUNTS_MAX = 1 << 12
_TYPES = {BEGIN: 1, END: 2, INSTANT: 3, COUNTER: 4, BEGIN_ONCE: 1}


class _TrackState:
    """What a track's packets start with. `heads` is by (kind, name)."""

    __slots__ = (
        "_counter", "begins", "counts", "end", "end_packet", "instants", "once", "sequence", "track", "uuid",
    )  # fmt: skip

    def __init__(self, track: Track, sequence: Sequence, uuid: int) -> None:
        self.track, self.sequence, self.uuid = track, sequence, uuid
        self.begins: dict[str, bytes] = {}
        self.instants: dict[str, bytes] = {}
        self.counts: dict[int, bytes] = {}
        self._counter = self._constant(COUNTER) + _VALUE
        self.once = self._constant(BEGIN_ONCE) + sequence.category(track.category)
        self.end = self._constant(END)
        self.end_packet = _TRACK_EVENT + varint(len(self.end)) + self.end + sequence.suffix
        sequence.tracks.append(track)

    def _constant(self, kind: int) -> bytes:
        """Type and track; the track is left out where it is the sequence's default."""
        own = b"" if self.sequence.default_uuid == self.uuid else tag(11, 0) + varint(self.uuid)
        return tag(9, 0) + varint(_TYPES[kind]) + own

    def counted(self, value: int) -> bytes:
        """A counter's packet after its timestamp; kept, as values come again."""
        event = _event(self._counter + varint(value), self.sequence)
        if len(self.counts) < _COUNTS_MAX:
            self.counts[value] = event
        return event

    def named(self, kind: int, name: str) -> bytes:
        """Type, track, category and name of a begin or an instant."""
        head = self._constant(kind) + self.sequence.category(self.track.category) + self.sequence.name(name)
        heads = self.begins if kind == BEGIN else self.instants
        if len(heads) < self.sequence.TABLE_MAX:
            heads[name] = head
        return head


def _event(body: bytes, sequence: Sequence) -> bytes:
    """The fields of a packet after its timestamp."""
    size = len(body)
    return (_EVENT_OF[size] if size < 1024 else _TRACK_EVENT + varint(size)) + body + sequence.suffix


def _order(track: Track) -> int:
    return min(track.order, (1 << 31) - 1)


def _flow_fields(flows: Flows) -> bytes:
    return b"".join([fixed64(47, abs(flow)) for flow in flows])


class PerfettoWriter:
    """Writes operations as they come; holds names and nothing else."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out, self._info = out, info
        self._base_ns = info.start.get("trace_ns", 0)
        self._clock = _CLOCK_MONOTONIC if info.trace_clock == MONOTONIC else _CLOCK_BOOTTIME
        self._sequences: dict[int, Sequence] = {}
        self._processes: dict[Track, Any] = {}
        """Their descriptors, which get names at the end."""
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
            d.child_ordering, d.sibling_order_rank = _EXPLICIT_ORDER, _order(track)
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
            # The trace processor keeps the first name that a process is given, and the last is wanted: `finish`.
            d.process.pid = track.pid
            self._processes[track] = packet
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
        state = track.written = _TrackState(track, sequence, track.id * 2)
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
        defaults.timestamp_clock_id = _CLOCK_STEPS
        defaults.track_event_defaults.track_uuid = sequence.default_uuid
        packet.clock_snapshot.clocks.add(clock_id=_CLOCK_STEPS, timestamp=self._base_ns, is_incremental=True)
        packet.clock_snapshot.clocks.add(clock_id=self._clock, timestamp=self._base_ns)
        sequence.last_ns = self._base_ns
        self._emit(delimited(1, packet.SerializeToString()))

    # Events --------------------------------------------------------------------------------------------

    def write(self, ops: list[Op]) -> None:
        """Write operations; in order of time, which keeps the steps small, and stable, which keeps nesting."""
        out: list[bytes] = []
        ops.sort(key=_TIME)
        for kind, track, ts_ns, name, args, flows in ops:
            state = track.written
            if state is None or kind == DECLARE:
                self._flush(out)
                if kind == DECLARE:
                    self._declare(track)
                    continue
                state = self._meet(track)
            sequence = state.sequence
            step = ts_ns - sequence.last_ns
            if 0 <= step < _STEPS_MAX:
                when = _STEPS[step]
                sequence.last_ns = ts_ns
            else:
                when = self._far(sequence, ts_ns)
            # The commonest first: what is ready-made but for the time.
            if type(args) is SharedArgs and (made := args.written) and made[0] is state:
                if not flows:
                    packet = when + made[2]
                elif len(flows) == 1:
                    packet = when + made[3] + abs(flows[0]).to_bytes(8, "little") + sequence.suffix
                else:
                    packet = when + _event(made[1] + _flow_fields(flows), sequence)
            elif kind == END and args is None:
                packet = when + state.end_packet
            elif kind == COUNTER:
                packet = when + (state.counts.get(name) or state.counted(name))
            else:
                if kind == BEGIN_ONCE and not flows:
                    body = state.once + (sequence.once.get(name) or sequence.name_once(name))
                    if args:
                        body += sequence.annotations(args)
                    packet = when + _event(body, sequence)
                else:
                    packet = when + self._named_event(state, kind, name, args, flows)
                if sequence.pending:
                    packet += sequence.take_pending()
                    if sequence.full():
                        self._flush(out, packet)
                        self._restart(sequence)
                        continue
            size = len(packet)
            out.append((_PACKET_OF[size] if size < 1024 else _PACKET + varint(size)) + packet)
        self._flush(out)

    @staticmethod
    def _named_event(state: _TrackState, kind: int, name: Any, args: Any, flows: Flows | None) -> bytes:
        """The fields of a packet after its timestamp; what shared arguments make of it is kept with them."""
        if kind == BEGIN:
            body = state.begins.get(name) or state.named(BEGIN, name)
        elif kind == INSTANT:
            body = state.instants.get(name) or state.named(INSTANT, name)
        elif kind == END:
            body = state.end
        else:
            body = state.once + state.sequence.name_once(name)
        if args:
            body += state.sequence.annotations(args)
        if type(args) is SharedArgs:
            # The body, the event without an arrow, and all of the event with one but the arrow's id.
            with_one = _TRACK_EVENT + varint(len(body) + len(_FLOW) + 8) + body + _FLOW
            args.written = state, body, _event(body, state.sequence), with_one
        return _event(body + _flow_fields(flows) if flows else body, state.sequence)

    def _restart(self, sequence: Sequence) -> None:
        """Begin a sequence's tables anew, and forget the packets that were made with the old ones."""
        sequence.restart()
        for track in sequence.tracks:
            track.written = None
        sequence.tracks.clear()
        self._start(sequence)

    def _far(self, sequence: Sequence, ts_ns: int) -> bytes:
        """A timestamp that no table holds: a long step, or the time in full where it goes back."""
        step = ts_ns - sequence.last_ns
        if step < 0:
            return _TIMESTAMP + varint(max(0, ts_ns)) + tag(58, 0) + varint(self._clock)
        sequence.last_ns = ts_ns
        return _TIMESTAMP + varint(step)

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
        """Write the names that processes have at the end, and what compression still holds."""
        for track, packet in self._processes.items():
            packet.track_descriptor.process.process_name = track.name
            self._emit(delimited(1, packet.SerializeToString()))
        self._emit_compressed()
