"""Traces of Perfetto that a test states, by Perfetto's own classes."""

from __future__ import annotations

from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
END = pb.TrackEvent.TYPE_SLICE_END
INSTANT = pb.TrackEvent.TYPE_INSTANT
COUNTER = pb.TrackEvent.TYPE_COUNTER
CLEARED, NEEDS = 1, 2
REALTIME, MONOTONIC, BOOTTIME = 1, 3, 6


class TraceMade:
    """A trace, packet by packet. `bytes` is what stands in its file."""

    def __init__(self) -> None:
        self.trace = pb.Trace()

    @property
    def bytes(self) -> bytes:
        made: bytes = self.trace.SerializeToString()
        return made

    def packet(self, sequence: int = 1, **fields: Any) -> Any:
        """A packet of a sequence; fields that are messages are filled by who asks."""
        return self.trace.packet.add(trusted_packet_sequence_id=sequence, **fields)

    def event(
        self,
        ts_ns: int,
        kind: int,
        name: str = "",
        sequence: int = 1,
        *,
        machine: int = 0,
        clock: int = 0,
        **fields: Any,
    ) -> Any:
        """A TrackEvent, which stands on track 1 unless it says otherwise, of a machine and on a clock."""
        of = {"machine_id": machine} if machine else {}
        packet = self.packet(sequence, timestamp=ts_ns, **of)
        if clock:
            packet.timestamp_clock_id = clock
        packet.track_event.MergeFrom(pb.TrackEvent(type=kind, **{"track_uuid": 1, **fields}))
        if name:
            packet.track_event.name = name
        return packet

    def thread(self, uuid: int = 1, pid: int = 7, tid: int = 7, name: str = "worker") -> None:
        """The track of a thread."""
        descriptor = self.packet().track_descriptor
        descriptor.uuid, descriptor.thread.pid, descriptor.thread.tid = uuid, pid, tid
        descriptor.thread.thread_name = name

    def track(self, uuid: int, name: str, parent: int = 0, **fields: Any) -> Any:
        """A track without a process or thread."""
        descriptor = self.packet().track_descriptor
        descriptor.MergeFrom(pb.TrackDescriptor(uuid=uuid, name=name, parent_uuid=parent, **fields))
        return descriptor

    def counter(self, uuid: int, name: str, parent: int = 0, **fields: Any) -> None:
        """The track of a counter."""
        self.track(uuid, name, parent).counter.MergeFrom(pb.CounterDescriptor(**fields))

    def on_machine(self, id: int) -> None:
        """Make the last packet one of a machine."""
        self.trace.packet[-1].machine_id = id

    def sync(self, machine: int, *rounds: tuple[int, int], clocks: tuple[int, ...] = (6,)) -> None:
        """Rounds in which a machine and the host read these clocks: the machine's time, and the host's. Both
        have the same in each clock but the first, 100 ns and 77 ns less.
        """
        sync = self.packet(machine_id=machine).remote_clock_sync
        for own_ns, host_ns in rounds:
            of = sync.synced_clocks.add()
            for clock in clocks:
                less = clock != clocks[0]
                of.client_clocks.clocks.add(clock_id=clock, timestamp=own_ns - 100 * less)
                of.host_clocks.clocks.add(clock_id=clock, timestamp=host_ns - 77 * less)

    def snapshot(self, sequence: int = 1, primary: int = 0, **more: Any) -> Any:
        """Clocks that were read at one time: `clock_6=5` of those of all, or a list of `clocks`."""
        snapshot = self.packet(sequence, **more.pop("packet", {})).clock_snapshot
        for key, ns in more.items():
            snapshot.clocks.add(clock_id=int(key.removeprefix("clock_")), timestamp=ns)
        if primary:
            snapshot.primary_trace_clock = primary
        return snapshot
