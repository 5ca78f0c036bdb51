"""Perfetto's packets, decoded with the perfetto package: sequences, clocks, tracks, events, compression."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tests.support.drawing import Drawing, item, renamed
from tests.support.warp_changes import Warp, change, gpu_tracks, warp_changes
from tracepipe.converters.perfetto import PerfettoWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.layout.timeline import (
    BEGIN,
    COUNTER,
    END,
    INSTANT,
    WARP_BEGIN,
    WARP_COUNT,
    WARP_END,
    WARP_EXIT,
    Drawn,
    Item,
    Track,
    WarpChanges,
)

pytestmark = pytest.mark.usefixtures("core")

START_NS = 5_000_000_000_000
REALTIME_NS = 1_800_000_000 * 10**9
START = {"trace_ns": START_NS, "monotonic_ns": START_NS, "boottime_ns": 7, "realtime_ns": REALTIME_NS}
STEPS = 64


def written(*batches: Drawn, start: dict[str, int] = START, clock: str = "monotonic") -> list[Any]:
    """The packets of a trace of these batches."""
    out = io.BytesIO()
    writer = PerfettoWriter(out, TraceInfo(clock, start))
    for drawn in batches:
        writer.write(drawn)
    writer.finish()
    return list(pb.Trace.FromString(out.getvalue()).packet)


def drawn(declared: Sequence[Track], *items: Item, warps: Sequence[WarpChanges] = ()) -> Drawn:
    """One batch."""
    return replace(Drawing().drawn(items, declared), warps=list(warps))


def descriptors(packets: list[Any]) -> list[Any]:
    return [packet.track_descriptor for packet in packets if packet.HasField("track_descriptor")]


def events_of(packets: list[Any]) -> list[Any]:
    return [packet.track_event for packet in packets if packet.HasField("track_event")]


def thread_tracks() -> tuple[Track, Track, Track]:
    """A process, a thread of it, and the CUDA calls of that."""
    process = Track(1, None, "process", "vec_add", rank=1, pid=42)
    thread = Track(2, process, "thread", "vec_add", rank=43, pid=42, tid=43)
    return process, thread, Track(3, thread, "slices", "CUDA API", 5, "userspace", 42, 43)


def lone_track() -> Track:
    return Track(1, None, "slices", "t")


def times_of(packets: list[Any]) -> dict[int, list[int]]:
    """By track the times of its events, with each sequence's steps added up as the importer does."""
    clocks: dict[int, int] = {}
    defaults: dict[int, int] = {}
    out: dict[int, list[int]] = {}
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
            times = out.setdefault(packet.track_event.track_uuid, [])
            if (packet.timestamp_clock_id or defaults[sequence]) == STEPS:
                clocks[sequence] += packet.timestamp
                times.append(clocks[sequence])
            else:
                assert packet.timestamp_clock_id == pb.BUILTIN_CLOCK_MONOTONIC
                times.append(packet.timestamp)
    return out


def test_the_first_packet_relates_the_clocks() -> None:
    snapshot = written()[0].clock_snapshot
    assert snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_MONOTONIC
    assert {clock.clock_id: clock.timestamp for clock in snapshot.clocks} == {
        pb.BUILTIN_CLOCK_MONOTONIC: START_NS,
        pb.BUILTIN_CLOCK_BOOTTIME: 7,
        pb.BUILTIN_CLOCK_REALTIME: REALTIME_NS,
    }


def test_a_clock_that_is_not_of_the_host_is_not_called_monotonic() -> None:
    snapshot = written(clock="globaltimer:0", start={"trace_ns": 9, "realtime_ns": 1})[0].clock_snapshot
    assert snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_BOOTTIME
    assert [(clock.clock_id, clock.timestamp) for clock in snapshot.clocks] == [
        (pb.BUILTIN_CLOCK_BOOTTIME, 9)
    ]


def test_each_sequence_starts_with_its_state_cleared_and_its_defaults() -> None:
    track, gpus = lone_track(), [gpu_tracks(10), gpu_tracks(20)]
    warps = [
        warp_changes(tracks, [Warp()], [change(START_NS + 5, WARP_BEGIN), change(START_NS + 6, WARP_END)])
        for tracks in gpus
    ]
    items = [item(INSTANT, track, START_NS + 5, "i") for _ in range(3)]
    once = drawn([track, *gpus[0], *gpus[1]], *items, warps=warps)
    packets = written(once, replace(once, declared=[]))
    counters: dict[int, list[int]] = {}
    for packet in packets:
        sequence = packet.trusted_packet_sequence_id
        assert sequence != 0
        if packet.HasField("trace_packet_defaults"):
            assert sequence not in counters
            cleared_and_needed = packet.SEQ_INCREMENTAL_STATE_CLEARED | packet.SEQ_NEEDS_INCREMENTAL_STATE
            assert packet.sequence_flags == cleared_and_needed
            defaults = packet.trace_packet_defaults
            assert defaults.timestamp_clock_id == STEPS
            counters[sequence] = list(defaults.track_event_defaults.extra_counter_track_uuids)
        else:
            # The tables are never cleared: nothing else has flags.
            assert packet.sequence_flags == 0
            assert sequence in counters or not packet.HasField("track_event")
    assert counters == {1: [], 3: [gpus[0][-1].id * 2], 4: [gpus[1][-1].id * 2]}
    of = {
        p.trusted_packet_sequence_id: p.track_event.track_uuid for p in packets if p.HasField("track_event")
    }
    assert of == {1: track.id * 2, 3: gpus[0][0].id * 2, 4: gpus[1][0].id * 2}


def test_every_event_names_its_track() -> None:
    tracks = [Track(n, None, "slices", f"t{n}") for n in (1, 2)]
    items = [item(INSTANT, track, START_NS + n, "i") for n, track in enumerate([*tracks, *tracks])]
    events = events_of(written(drawn(tracks, *items)))
    assert [event.track_uuid for event in events] == [2, 4, 2, 4]


def test_how_many_warps_run_is_a_value_of_what_changes_it() -> None:
    slot, counter = tracks = gpu_tracks(10)
    changes = [
        change(START_NS + 1, WARP_BEGIN, value=1),
        change(START_NS + 2, WARP_EXIT, mask=0xFF),
        change(START_NS + 3, WARP_EXIT, value=5, mask=0xFF00),
        change(START_NS + 4, WARP_COUNT, value=3),
        change(START_NS + 5, WARP_COUNT),
        change(START_NS + 6, WARP_END, value=0),
        change(START_NS + 7, WARP_BEGIN, 1),
        change(START_NS + 8, WARP_END, 1),
    ]
    packets = written(drawn(tracks, warps=[warp_changes(tracks, [Warp(), Warp(1)], changes)]))
    begin, end, instant, count = (getattr(pb.TrackEvent, f"TYPE_{kind}") for kind in
                                  ("SLICE_BEGIN", "SLICE_END", "INSTANT", "COUNTER"))  # fmt: skip
    assert [(e.type, e.track_uuid, list(e.extra_counter_values)) for e in events_of(packets)] == [
        (begin, slot.id * 2, [1]),
        (instant, slot.id * 2, []),
        (instant, slot.id * 2, [5]),
        # A warp that has no slice is counted by an event of its own.
        (count, counter.id * 2, []),
        (end, slot.id * 2, [0]),
        (begin, slot.id * 2, []),
        (end, slot.id * 2, []),
    ]
    assert [e.counter_value for e in events_of(packets) if e.type == count] == [3]


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
    """On two tracks of the host and on one of a GPU, in any order: batches may go back in time."""
    tracks = [Track(n, None, "slices", f"t{n}") for n in (1, 2)]
    gpu = gpu_tracks(2)  # whose slot is track 3
    drawing = Drawing()
    batches = [drawing.drawn([], [*tracks, *gpu])]
    want: dict[int, list[int]] = {}
    for at in range(0, len(events), batch_events):
        some = [(at, START_NS + ns) for at, ns in events[at : at + batch_events]]
        items = [item(INSTANT, tracks[at - 1], ts_ns, "i") for at, ts_ns in some if at < 3]
        changes = [change(ts_ns, WARP_BEGIN) for at, ts_ns in some if at == 3]
        warps = [warp_changes(gpu, [Warp()], changes)] if changes else []
        batches.append(replace(drawing.drawn(items), warps=warps))
        for at, ts_ns in some:
            want.setdefault(at * 2, []).append(ts_ns)
    assert times_of(written(*batches)) == want


def test_a_time_before_the_last_is_written_in_full() -> None:
    track, drawing = lone_track(), Drawing()
    first = drawing.drawn([item(INSTANT, track, START_NS + 100, "late")], [track])
    second = drawing.drawn([item(INSTANT, track, START_NS + ns, "i") for ns in (40, 101)])
    events = [p for p in written(first, second) if p.HasField("track_event")]
    assert [(p.timestamp_clock_id, p.timestamp) for p in events] == [
        (0, 100),
        (pb.BUILTIN_CLOCK_MONOTONIC, START_NS + 40),
        (0, 1),
    ]


def test_a_time_before_zero_does_not_wrap_around() -> None:
    # An assumed offset may place an event before the machine's start; timestamps have no sign.
    track = lone_track()
    packets = written(drawn([track], item(INSTANT, track, -5, "i")), start={"trace_ns": 0})
    assert times_of(packets) == {track.id * 2: [0]}


def test_a_thread_hangs_below_its_process_and_its_tracks_below_a_group() -> None:
    process, thread, calls = thread_tracks()
    group, layer, top, *roots = descriptors(written(drawn([process, thread, calls])))
    assert (group.uuid, group.parent_uuid, group.name) == (5, 4, "vec_add")
    assert (layer.parent_uuid, layer.name, layer.sibling_order_rank) == (5, "CUDA API", calls.order)
    assert group.child_ordering == pb.TrackDescriptor.EXPLICIT
    never = pb.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
    assert [each.sibling_merge_behavior for each in (group, layer)] == [never] * 2
    explicit = pb.TrackDescriptor.PROCESS_ORDERING_EXPLICIT, pb.TrackDescriptor.THREAD_ORDERING_EXPLICIT
    assert (top.uuid, top.process_ordering, top.thread_ordering) == (0, *explicit)
    of_process, of_thread = roots
    assert (of_process.uuid, of_thread.uuid) == (2, 4)
    assert (of_process.process.pid, of_process.process.process_name) == (42, "vec_add")
    named = of_thread.thread
    assert (named.pid, named.tid, named.thread_name) == (42, 43, "vec_add")


def test_processes_and_threads_are_declared_once_with_their_last_name_and_place() -> None:
    process, thread, calls = thread_tracks()
    drawing = Drawing()
    last = [replace(process, name="train", rank=7), replace(thread, rank=3)]
    d = descriptors(written(drawing.drawn([], [process, thread, calls]), drawing.drawn([], last)))
    assert [each.uuid for each in d] == [5, 6, 0, 2, 4]
    assert [each.sibling_order_rank for each in d[-2:]] == [one.order for one in last]
    assert d[-2].process.process_name == "train"


def test_threads_without_ids_are_plain_groups() -> None:
    process = Track(1, None, "process", "process (pid not recorded)")
    thread = Track(2, process, "thread", "thread (tid not recorded)")
    first, second = descriptors(written(drawn([process, thread])))
    assert not first.HasField("process")
    assert not second.HasField("thread")
    assert (second.name, second.parent_uuid) == ("thread (tid not recorded)", first.uuid)


def test_a_renamed_track_is_described_again() -> None:
    process, thread, calls = thread_tracks()
    pair = [item(BEGIN, calls, START_NS, "f"), item(END, calls, START_NS)]
    drawing = Drawing()
    packets = written(
        drawing.drawn(pair, [process, thread, calls]), drawing.drawn(pair, [renamed(thread, "worker")])
    )
    named = [d.thread.thread_name for d in descriptors(packets) if d.HasField("thread")]
    assert named == ["worker"]
    groups = [d.name for d in descriptors(packets) if d.uuid == thread.id * 2 + 1]
    assert groups == ["vec_add", "worker"]
    # The events go on as they were: the sequence is not begun twice.
    assert sum(p.HasField("trace_packet_defaults") for p in packets) == 1
    assert [event.track_uuid for event in events_of(packets)] == [calls.id * 2] * 4


def test_ranks_too_large_for_the_field_are_cut() -> None:
    track = Track(1, None, "slices", "t", rank=1 << 40)
    assert written(drawn([track]))[-1].track_descriptor.sibling_order_rank == (1 << 31) - 1


def test_counters_have_a_unit_and_signed_values() -> None:
    track = Track(1, None, "counter", "device memory", unit="bytes")
    values = [0, 1 << 40, -12]
    packets = written(drawn([track], *(item(COUNTER, track, START_NS + n, v) for n, v in enumerate(values))))
    (descriptor,) = descriptors(packets)
    assert descriptor.counter.unit_name == "bytes"
    events = events_of(packets)
    assert [(e.type, e.counter_value) for e in events] == [(pb.TrackEvent.TYPE_COUNTER, v) for v in values]


def test_flows_have_the_same_id_on_every_slice_they_run_through() -> None:
    track, gpu = lone_track(), gpu_tracks(10)
    items = []
    for at, flows in enumerate(((-8, -3), (8,), (), (8,))):
        items += [item(BEGIN, track, START_NS + at, "f", flows=flows), item(END, track, START_NS + at)]
    changes = [change(START_NS + 9, WARP_BEGIN, at) for at in range(2)]
    warps = warp_changes(gpu, [Warp(flow=8), Warp(1)], changes)
    events = events_of(written(drawn([track, *gpu], *items, warps=[warps])))
    begins = [event for event in events if event.type == event.TYPE_SLICE_BEGIN]
    assert [list(event.flow_ids) for event in begins] == [[8, 3], [8], [], [8], [8], []]


@pytest.mark.parametrize("of_events", [True, False])
def test_the_same_arguments_are_written_alike_on_every_track(of_events: bool) -> None:
    process, thread, calls = thread_tracks()
    other = Track(4, thread, "slices", "driver", 6, "kernel", 42, 43)
    items = []
    for at, track in enumerate((calls, calls, other, calls)):
        for kind in (BEGIN, END):
            items.append(item(kind, track, START_NS + 2 * at, "f", {"cpu": 3, "who": "vec"}))
    batch = Drawing().drawn(items, [process, thread, calls, other], of_events=of_events)
    packets = written(batch)
    keys = {e.iid: e.name for p in packets for e in p.interned_data.debug_annotation_names}
    strings = {e.iid: e.str for p in packets for e in p.interned_data.debug_annotation_string_values}
    assert len(events_of(packets)) == 8
    for event in events_of(packets):
        number, text = event.debug_annotations
        assert (keys[number.name_iid], number.int_value) == ("cpu", 3)
        assert (keys[text.name_iid], strings[text.string_value_iid]) == ("who", b"vec")
    begins = [event for event in events_of(packets) if event.type == event.TYPE_SLICE_BEGIN]
    assert [begin.track_uuid for begin in begins] == [6, 6, 8, 6]


@pytest.mark.slow
@pytest.mark.parametrize("events", [0, 3, 40_000])
def test_compressed_packets_are_the_plain_ones(events: int) -> None:
    track, drawing = lone_track(), Drawing()
    items = [item(INSTANT, track, START_NS + 7 * at, f"name {at}", {"n": at}) for at in range(events)]
    batches = [drawing.drawn([], [track])]
    batches += [drawing.drawn(items[at : at + 4_096]) for at in range(0, len(items), 4_096)]
    compressed = io.BytesIO()
    writer = PerfettoWriter(compressed, TraceInfo("monotonic", START, compress=True))
    for batch in batches:
        writer.write(batch)
    writer.finish()
    packets = pb.Trace.FromString(compressed.getvalue()).packet
    assert all(packet.compressed_packets for packet in packets)
    assert (len(packets) > 1) == (events > 1_000)  # it streams
    unpacked = b"".join(zlib.decompress(packet.compressed_packets) for packet in packets)
    assert list(pb.Trace.FromString(unpacked).packet) == written(*batches)
