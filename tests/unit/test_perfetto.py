"""Perfetto's packets, decoded with the perfetto package: sequences, clocks, tracks, events, compression."""

from __future__ import annotations

import io
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tracepipe.converters.perfetto import PerfettoWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.model import SharedArgs
from tracepipe.layout.timeline import BEGIN, BEGIN_ONCE, COUNTER, DECLARE, END, INSTANT, Op, Track

START_NS = 5_000_000_000_000
REALTIME_NS = 1_800_000_000 * 10**9
START = {"trace_ns": START_NS, "monotonic_ns": START_NS, "boottime_ns": 7, "realtime_ns": REALTIME_NS}
STEPS = 64


def written(*batches: list[Op], start: dict[str, int] = START, clock: str = "monotonic") -> list[Any]:
    """The packets of a trace of these operations."""
    out = io.BytesIO()
    writer = PerfettoWriter(out, TraceInfo(clock, start))
    for ops in batches:
        writer.write(ops)
    writer.finish()
    return list(pb.Trace.FromString(out.getvalue()).packet)


def thread_tracks() -> tuple[Track, Track, Track]:
    """A process, a thread of it, and the CUDA calls of that."""
    process = Track(1, None, "process", "vec_add", rank=1, pid=42, lane=1)
    thread = Track(2, process, "thread", "vec_add", rank=43, pid=42, tid=43, lane=2)
    return process, thread, Track(3, thread, "slices", "CUDA API", 5, "userspace", 42, 43, lane=2)


def declared(*tracks: Track) -> list[Op]:
    return [(DECLARE, track, 0, "", None, None) for track in tracks]


def lone_track() -> Track:
    return Track(1, None, "slices", "t", lane=1)


def times_of(packets: list[Any]) -> list[int]:
    """The times of the track events, with each sequence's steps added up as the importer does."""
    clocks: dict[int, int] = {}
    defaults: dict[int, int] = {}
    out = []
    for packet in packets:
        sequence = packet.trusted_packet_sequence_id
        if packet.HasField("trace_packet_defaults"):
            defaults[sequence] = packet.trace_packet_defaults.timestamp_clock_id
            steps, whole = packet.clock_snapshot.clocks
            assert (steps.clock_id, steps.is_incremental) == (STEPS, True)
            assert steps.timestamp == whole.timestamp
            assert whole.clock_id == pb.BUILTIN_CLOCK_MONOTONIC
            clocks[sequence] = steps.timestamp
        if packet.HasField("track_event"):
            if (packet.timestamp_clock_id or defaults[sequence]) == STEPS:
                clocks[sequence] += packet.timestamp
                out.append(clocks[sequence])
            else:
                assert packet.timestamp_clock_id == pb.BUILTIN_CLOCK_MONOTONIC
                out.append(packet.timestamp)
    return out


def test_the_first_packet_relates_the_clocks() -> None:
    snapshot = written()[0].clock_snapshot
    assert snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_MONOTONIC
    assert {clock.clock_id: clock.timestamp for clock in snapshot.clocks} == {
        pb.BUILTIN_CLOCK_MONOTONIC: START_NS,
        pb.BUILTIN_CLOCK_BOOTTIME: 7,
        pb.BUILTIN_CLOCK_REALTIME: REALTIME_NS,
    }


def test_a_clock_that_is_no_host_clock_is_not_said_to_be_monotonic() -> None:
    snapshot = written(clock="globaltimer:0", start={"trace_ns": 9, "realtime_ns": 1})[0].clock_snapshot
    assert snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_BOOTTIME
    assert [(clock.clock_id, clock.timestamp) for clock in snapshot.clocks] == [
        (pb.BUILTIN_CLOCK_BOOTTIME, 9)
    ]


def test_each_sequence_starts_with_its_state_cleared_and_its_defaults() -> None:
    tracks = [Track(n, None, "slices", f"t{n}", lane=n) for n in (1, 2)]
    ops = declared(*tracks)
    ops += [(INSTANT, track, START_NS + 5, "i", None, None) for track in tracks for _ in range(3)]
    packets = written(ops)
    begun: set[int] = set()
    for packet in packets:
        sequence = packet.trusted_packet_sequence_id
        assert sequence != 0
        if packet.HasField("trace_packet_defaults"):
            cleared_and_needed = packet.SEQ_INCREMENTAL_STATE_CLEARED | packet.SEQ_NEEDS_INCREMENTAL_STATE
            assert packet.sequence_flags == cleared_and_needed
            assert packet.trace_packet_defaults.timestamp_clock_id == STEPS
            assert packet.trace_packet_defaults.track_event_defaults.track_uuid
            begun.add(sequence)
        elif packet.sequence_flags or packet.HasField("track_event"):
            assert packet.sequence_flags == packet.SEQ_NEEDS_INCREMENTAL_STATE
            assert sequence in begun
    assert len(begun) == 2


def test_the_track_of_the_defaults_is_left_out_of_the_events() -> None:
    tracks = [Track(n, None, "slices", f"t{n}", lane=1) for n in (1, 2)]
    ops = declared(*tracks)
    ops += [(INSTANT, track, START_NS + n, "i", None, None) for n, track in enumerate(tracks)]
    events = [packet.track_event for packet in written(ops) if packet.HasField("track_event")]
    assert [event.track_uuid for event in events] == [0, 4]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.one_of(
                st.integers(-20_000, 20_000),
                st.sampled_from([0, 1 << 14, (1 << 14) - 1, 1 << 40, -START_NS, (1 << 62) - START_NS]),
            ),
        ),
        max_size=40,
    ),
    st.integers(1, 7),
)
def test_every_time_is_read_back(events: list[tuple[int, int]], batch_events: int) -> None:
    tracks = [Track(n, None, "slices", f"t{n}", lane=n // 2 + 1) for n in (1, 2, 3)]
    ops: list[Op] = [(INSTANT, tracks[at - 1], START_NS + ns, "i", None, None) for at, ns in events]
    batches = [ops[at : at + batch_events] for at in range(0, len(ops), batch_events)]
    # Within a batch the writer puts the operations in order; batches may go back in time.
    want = [op[2] for batch in batches for op in sorted(batch, key=lambda op: op[2])]
    assert times_of(written(declared(*tracks), *batches)) == want


def test_a_time_before_the_last_is_written_in_full() -> None:
    track = lone_track()
    first: list[Op] = [(INSTANT, track, START_NS + 100, "late", None, None)]
    second: list[Op] = [(INSTANT, track, START_NS + ns, "i", None, None) for ns in (40, 101)]
    events = [p for p in written(declared(track), first, second) if p.HasField("track_event")]
    assert [(p.timestamp_clock_id, p.timestamp) for p in events] == [
        (0, 100),
        (pb.BUILTIN_CLOCK_MONOTONIC, START_NS + 40),
        (0, 1),
    ]


def test_a_time_before_zero_does_not_wrap_around() -> None:
    # An assumed offset may place an event before the machine's start; timestamps have no sign.
    track = lone_track()
    packets = written(declared(track), [(INSTANT, track, -5, "i", None, None)], start={"trace_ns": 0})
    assert times_of(packets) == [0]


def test_a_thread_hangs_below_its_process_and_its_tracks_below_a_group() -> None:
    process, thread, calls = thread_tracks()
    d = [
        p.track_descriptor
        for p in written(declared(process, thread, calls))
        if p.HasField("track_descriptor")
    ]
    # The trace processor keeps the first name of a process: it is given at the end, when it is the last.
    assert [each.uuid for each in d] == [2, 4, 5, 6, 2]
    names = [(each.process.pid, each.process.process_name) for each in (d[0], d[4])]
    assert names == [(42, ""), (42, "vec_add")]
    assert (d[1].thread.pid, d[1].thread.tid, d[1].thread.thread_name) == (42, 43, "vec_add")
    assert (d[2].parent_uuid, d[2].name) == (4, "vec_add")
    assert (d[3].parent_uuid, d[3].name, d[3].sibling_order_rank) == (5, "CUDA API", calls.order)
    assert d[2].child_ordering == pb.TrackDescriptor.EXPLICIT
    never = pb.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
    assert [each.sibling_merge_behavior for each in d[2:4]] == [never] * 2


def test_threads_without_ids_are_plain_groups() -> None:
    process = Track(1, None, "process", "process (pid not recorded)", lane=1)
    thread = Track(2, process, "thread", "thread (tid not recorded)", lane=2)
    first, second = (
        p.track_descriptor for p in written(declared(process, thread)) if p.HasField("track_descriptor")
    )
    assert not first.HasField("process")
    assert not second.HasField("thread")
    assert (second.name, second.parent_uuid) == ("thread (tid not recorded)", first.uuid)


def test_a_renamed_track_is_described_again() -> None:
    process, thread, calls = thread_tracks()
    begin: list[Op] = [(BEGIN, calls, START_NS, "f", None, None), (END, calls, START_NS, "", None, None)]
    out = io.BytesIO()
    writer = PerfettoWriter(out, TraceInfo("monotonic", START))
    writer.write(declared(process, thread, calls) + begin)
    thread.name = "worker"
    writer.write(declared(thread) + begin)
    packets = pb.Trace.FromString(out.getvalue()).packet
    named = [p.track_descriptor.thread.thread_name for p in packets if p.track_descriptor.HasField("thread")]
    assert named == ["vec_add", "worker"]
    # The events go on as they were: the sequence is not begun twice.
    assert sum(p.HasField("trace_packet_defaults") for p in packets) == 1


def test_ranks_too_large_for_the_field_are_cut() -> None:
    track = Track(1, None, "slices", "t", rank=1 << 40, lane=1)
    assert written(declared(track))[-1].track_descriptor.sibling_order_rank == (1 << 31) - 1


def test_counters_have_a_unit_and_signed_values() -> None:
    track = Track(1, None, "counter", "device memory", unit="bytes", lane=1)
    values = [0, 1 << 40, -12]
    packets = written(
        declared(track), [(COUNTER, track, START_NS + n, value, None, None) for n, value in enumerate(values)]
    )
    assert packets[1].track_descriptor.counter.unit_name == "bytes"
    events = [p.track_event for p in packets if p.HasField("track_event")]
    assert [(e.type, e.counter_value) for e in events] == [
        (e.TYPE_COUNTER, v) for e, v in zip(events, values, strict=True)
    ]


def test_flows_have_the_same_id_on_every_slice_they_run_through() -> None:
    track = lone_track()
    ops: list[Op] = declared(track)
    for at, flows in enumerate(((-8, -3), (8,), None)):
        ops += [(BEGIN, track, START_NS + at, "f", None, flows), (END, track, START_NS + at, "", None, None)]
    ops += [(BEGIN_ONCE, track, START_NS + 9, "w", None, (8,)), (END, track, START_NS + 9, "", None, None)]
    events = [p.track_event for p in written(ops) if p.HasField("track_event")]
    begins = [event for event in events if event.type == event.TYPE_SLICE_BEGIN]
    assert [list(event.flow_ids) for event in begins] == [[8, 3], [8], [], [8]]


def test_shared_arguments_are_written_alike_on_every_track() -> None:
    process, thread, calls = thread_tracks()
    other = Track(4, thread, "slices", "driver", 6, "kernel", 42, 43, lane=2)
    shared, result = SharedArgs({"cpu": 3, "who": "vec"}), SharedArgs({"cpu": 3, "who": "vec"})
    ops = declared(process, thread, calls, other)
    for at, track in enumerate((calls, calls, other, calls)):
        ops += [
            (BEGIN, track, START_NS + 2 * at, "f", shared, None),
            (END, track, START_NS + 2 * at, "", result, None),
        ]
    packets = written(ops)
    keys = {e.iid: e.name for p in packets for e in p.interned_data.debug_annotation_names}
    strings = {e.iid: e.str for p in packets for e in p.interned_data.debug_annotation_string_values}
    for event in (p.track_event for p in packets if p.HasField("track_event")):
        number, text = event.debug_annotations
        assert (keys[number.name_iid], number.int_value) == ("cpu", 3)
        assert (keys[text.name_iid], strings[text.string_value_iid]) == ("who", b"vec")
    begins = [p.track_event for p in packets if p.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN]
    assert [begin.track_uuid for begin in begins] == [0, 0, 8, 0]


@pytest.mark.parametrize("events", [0, 3, 60_000])
def test_compressed_packets_are_the_plain_ones(events: int) -> None:
    track = lone_track()
    ops = declared(track)
    ops += [(INSTANT, track, START_NS + 7 * at, f"name {at}", {"n": at}, None) for at in range(events)]
    compressed = io.BytesIO()
    writer = PerfettoWriter(compressed, TraceInfo("monotonic", START, compress=True))
    for at in range(0, len(ops), 4_096):
        writer.write(ops[at : at + 4_096])
    writer.finish()
    packets = pb.Trace.FromString(compressed.getvalue()).packet
    assert all(packet.compressed_packets for packet in packets)
    assert (len(packets) > 1) == (events > 1_000)  # it streams
    unpacked = b"".join(zlib.decompress(packet.compressed_packets) for packet in packets)
    track.written = None
    assert list(pb.Trace.FromString(unpacked).packet) == written(
        *(ops[at : at + 4_096] for at in range(0, len(ops), 4_096))
    )
