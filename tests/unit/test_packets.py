"""What is written by hand reads the same through the perfetto package's own classes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tests.support.drawing import Drawing, item
from tests.support.warp_changes import KERNEL, Warp, change, gpu_tracks, warp_changes
from tracepipe.converters import packets
from tracepipe.converters.packets import (
    ARG_NAMES,
    CATEGORIES,
    EVENT_NAMES,
    STRINGS,
    STRINGS_MAX,
    TABLE_MAX,
    NativePackets,
    Packets,
)
from tracepipe.converters.perfetto import PerfettoWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.layout.timeline import (
    BEGIN,
    END,
    INSTANT,
    WARP_BEGIN,
    WARP_END,
    WARP_EXIT,
    Drawn,
    Kernel,
    Track,
)
from tracepipe.native import library

by_both_cores = pytest.mark.usefixtures("core")

U64 = (1 << 64) - 1


@given(st.integers(0, U64))
@example(0x7F)
@example(0x80)
@example(0x3FFF)
@example(0x4000)
@example((1 << 28) - 1)
@example(1 << 28)
@example((1 << 42) - 1)
@example(1 << 42)
@example(U64)
def test_varints_are_protobufs(value: int) -> None:
    packet = pb.TracePacket(timestamp=value)
    assert packets.number(8, value) == packet.SerializeToString()


@given(st.integers(-(1 << 63), (1 << 63) - 1))
@example(-1)
@example(-(1 << 63))
def test_signed_numbers_are_protobufs(value: int) -> None:
    assert packets.number(30, value) == pb.TrackEvent(counter_value=value).SerializeToString()


@pytest.mark.parametrize("bits", range(65))
def test_varints_of_every_length(bits: int) -> None:
    for value in {max(0, (1 << bits) - 1), min(U64, 1 << bits)}:
        assert len(packets.varint(value)) == max(1, -(-value.bit_length() // 7))
        assert packets.number(8, value) == pb.TracePacket(timestamp=value).SerializeToString()


@given(st.integers(1, U64), st.floats(allow_nan=False), st.text())
def test_other_fields_are_protobufs(number: int, real: float, text: str) -> None:
    assert packets._flow(number) == pb.TrackEvent(flow_ids=[number]).SerializeToString()
    assert packets.double(5, real) == pb.DebugAnnotation(double_value=real).SerializeToString()
    assert packets.text(23, text) == pb.TrackEvent(name=text).SerializeToString()


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    # JSON can say "\ud800", UTF-8 cannot, and protobuf refuses to read it.
    assert pb.TrackEvent.FromString(packets.text(23, "a\ud800b")).name == "a?b"


# Annotations -------------------------------------------------------------------------------------------


def value_of(annotation: Any, strings: dict[int, str]) -> Any:
    """A debug annotation's value as Python has it."""
    if annotation.dict_entries:
        return {entry.name: value_of(entry, strings) for entry in annotation.dict_entries}
    if annotation.array_values:
        return [value_of(item, strings) for item in annotation.array_values]
    kind = annotation.WhichOneof("value")
    assert kind is not None
    value = getattr(annotation, kind)
    return strings[value] if kind == "string_value_iid" else value


def new_packets() -> Packets:
    """A packet sequence of the core that runs."""
    core = library()
    made = (1, pb.BUILTIN_CLOCK_MONOTONIC, 0)
    return Packets(*made) if core is None else NativePackets(core, *made)


def written_once(args: dict[str, Any], sequence: Packets) -> Any:
    """The packet of an event that shows `args`."""
    track = Track(1, None, "slices", "row")
    drawn = Drawing().drawn([item(INSTANT, track, 0, "shown", args)], of_events=False)
    sequence.set_row(0, track)
    sequence.set(packets.NAMES, 0, sequence.name("shown"))
    sequence.set(packets.MARK, 0, b"")
    sequence.write(drawn)
    (packet,) = pb.Trace.FromString(sequence.drain()).packet
    return packet


def read_back(packet: Any) -> dict[str, Any]:
    """The arguments of a packet that brings all names that it uses."""
    names = {entry.iid: entry.name for entry in packet.interned_data.debug_annotation_names}
    texts = packet.interned_data.debug_annotation_string_values
    strings = {entry.iid: entry.str.decode() for entry in texts}
    return {names[a.name_iid]: value_of(a, strings) for a in packet.track_event.debug_annotations}


def round_trip(args: dict[str, Any]) -> dict[str, Any]:
    """`args` written and read again."""
    return read_back(written_once(args, new_packets()))


def stated(value: Any, depth: int = 0) -> Any:
    """What the trace is to say of a JSON value."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(1 << 63) <= value <= U64 else str(value)
    if isinstance(value, (list, dict)) and value and depth < 8:
        if isinstance(value, list):
            return [stated(item, depth + 1) for item in value]
        return {stated(key): stated(item, depth + 1) for key, item in value.items()}
    return orjson.dumps(value).decode() if value is None or isinstance(value, (list, dict)) else value


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=80),
)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=8,
)


@by_both_cores
@given(st.dictionaries(st.text(max_size=9), json_values, max_size=6))
@example({"deep": [[[[[[[[[[1]]]]]]]]]]})
@example({"empty": [], "none": {}, "": "", "nothing": None, "inside": [None]})
@example({"big": 1 << 63, "bigger": 1 << 64, "negative": -1, "least": -(1 << 63), "less": -(1 << 63) - 1})
@example({"text": "日本語 ✓ \x00", "long": "x" * 65, "yes": True, "no": False, "pi": math.pi})
def test_every_json_value_is_read_back(args: dict[str, Any]) -> None:
    sequence = new_packets()
    want = {stated(key): stated(value) for key, value in args.items() if value is not None}
    first = written_once(args, sequence)
    assert read_back(first) == want
    # The second time comes from the tables: the same numbers, nothing new to intern.
    again = written_once(args, sequence)
    assert again.track_event == first.track_event
    assert not again.HasField("interned_data")


@by_both_cores
@given(st.dictionaries(st.text(max_size=9), json_values, max_size=6), st.booleans())
@example({"deep": [[[[[[[[[[1]]]]]]]]]]}, True)
@example({"empty": [], "none": {}, "": "", "nothing": None, "inside": [None]}, True)
@example({"big": 1 << 63, "bigger": 1 << 64, "negative": -1, "least": -(1 << 63)}, True)
@example({"big": 1 << 63, "negative": -1, "least": -(1 << 63), "yes": True, "pi": math.pi}, True)
@example({"text": "日本語 ✓ \x00", "long": "x" * 65, "limit": "é" * 64, "beyond": "é" * 65}, True)
@example({"plain": 1, "lone \ud800": "\udfff"}, True)
def test_every_json_value_of_an_event_is_read_back(args: dict[str, Any], of_events: bool) -> None:
    # Those of events have numbers, and the native core makes annotations of their texts.
    track, drawing = Track(1, None, "slices", "t"), Drawing()
    items = [item(INSTANT, track, at, "f", args) for at in range(3)]
    batches = [drawing.drawn(items, [track], of_events=of_events), drawing.drawn(items, of_events=of_events)]
    want = {stated(key): stated(value) for key, value in args.items() if value is not None}
    assert [shown for *_, shown in decoded(trace(*batches))] == [want] * 6


@by_both_cores
@pytest.mark.parametrize("text", ["lone \ud800 surrogate", "\udfff"])
def test_annotations_survive_text_that_utf8_cannot_hold(text: str) -> None:
    got = round_trip({"s": text, "in": [text], text: 1})
    shown = text.encode("utf-8", "replace").decode()
    assert got == {"s": shown, "in": [shown], shown: 1}


@by_both_cores
@pytest.mark.parametrize("real", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_cannot_hold(real: float) -> None:
    (got,) = round_trip({"x": real}).values()
    assert got == real or (math.isnan(got) and math.isnan(real))


@by_both_cores
def test_an_argument_of_another_type_does_not_take_the_place_of_an_int() -> None:
    # True == 1 == 1.0 in Python, and all find each other in a dict.
    values, want = (1, True, 1.0, 1), ["int_value", "bool_value", "double_value", "int_value"]
    sequence = new_packets()
    events = [written_once({"x": value}, sequence).track_event for value in values]
    assert [event.debug_annotations[0].WhichOneof("value") for event in events] == want
    track = Track(1, None, "slices", "t")
    for of_events in (True, False):
        items = [item(INSTANT, track, at, "f", {"x": value}) for at, value in enumerate(values)]
        data = trace(Drawing().drawn(items, [track], of_events=of_events))
        events = [event for _, event, _, _ in decoded(data)]
        assert [event.debug_annotations[0].WhichOneof("value") for event in events] == want


# Interning over a whole file ---------------------------------------------------------------------------


def decoded(data: bytes) -> Iterator[tuple[int, Any, str, dict[str, Any]]]:
    """(sequence, track event, name, args) of a trace, its ids resolved by the rules of sequence flags."""
    tables: dict[int, dict[str, dict[int, Any]]] = {}
    for packet in pb.Trace.FromString(data).packet:
        sequence = packet.trusted_packet_sequence_id
        if packet.sequence_flags & packet.SEQ_INCREMENTAL_STATE_CLEARED:
            assert sequence not in tables, "tables are never cleared"
            tables[sequence] = {"names": {}, "keys": {}, "categories": {}, "strings": {}}
        interned = packet.interned_data
        for table, entries in (
            ("names", interned.event_names),
            ("keys", interned.debug_annotation_names),
            ("categories", interned.event_categories),
        ):
            for entry in entries:
                assert entry.iid not in tables[sequence][table], "an id has two meanings"
                tables[sequence][table][entry.iid] = entry.name
        for entry in interned.debug_annotation_string_values:
            assert entry.iid not in tables[sequence]["strings"], "an id has two meanings"
            tables[sequence]["strings"][entry.iid] = entry.str.decode()
        if packet.HasField("track_event"):
            event, here = packet.track_event, tables[sequence]
            for iid in event.category_iids:
                assert iid in here["categories"]
            name = here["names"][event.name_iid] if event.name_iid else event.name
            args = {
                here["keys"][a.name_iid] if a.name_iid else a.name: value_of(a, here["strings"])
                for a in event.debug_annotations
            }
            yield sequence, event, name, args


def trace(*batches: Drawn, room: int | None = None) -> bytes:
    """A trace, where `room` is how many names the tables of the host still take."""
    out = io.BytesIO()
    writer = PerfettoWriter(out, TraceInfo("monotonic", {"trace_ns": 0}))
    if room is not None:
        leave_room(writer._host, room)
    for drawn in batches:
        writer.write(drawn)
    writer.finish()
    return out.getvalue()


def leave_room(sequence: Packets, room: int) -> None:
    """Fill the tables up to their bounds, but for so many."""
    for table in (CATEGORIES, EVENT_NAMES, ARG_NAMES, STRINGS):
        at, most = 0, STRINGS_MAX if table == STRINGS else TABLE_MAX
        while sequence.intern(table, b"taken %d" % at) < most - room:
            at += 1


def interned(data: bytes, table: str) -> list[int]:
    """The numbers that a trace gives."""
    return [e.iid for p in pb.Trace.FromString(data).packet for e in getattr(p.interned_data, table)]


names = st.text("abc", min_size=1, max_size=2)
events = st.lists(
    st.tuples(
        st.sampled_from([BEGIN, INSTANT]),
        st.integers(0, 2),
        names,
        st.dictionaries(names, st.one_of(st.integers(0, 300), names), max_size=3),
        st.booleans(),
    ),
    max_size=60,
)


@pytest.mark.slow
@by_both_cores
@settings(max_examples=20)  # each fills the tables anew
@given(events, st.integers(1, 9), st.integers(0, 4))
def test_names_and_arguments_survive_full_tables(
    drawn: list[tuple[int, int, str, dict[str, Any], bool]], batch_events: int, room: int
) -> None:
    tracks = [Track(n + 1, None, "slices", f"t{n}", category=f"c{n}") for n in range(3)]
    drawing = Drawing()
    batches, want = [drawing.drawn(declared=tracks)], []
    for first in range(0, len(drawn), batch_events):
        # Batches with arguments that have numbers, and such without.
        of_events = drawn[first][4]
        items = []
        for ts_ns, (kind, at, name, args, _) in enumerate(drawn[first : first + batch_events], first):
            items.append(item(kind, tracks[at], ts_ns, name, args))
            want.append((tracks[at].id * 2, tracks[at].category, name, args))
            if kind == BEGIN:
                items.append(item(END, tracks[at], ts_ns))
        batches.append(drawing.drawn(items, of_events=of_events))
    data = trace(*batches, room=room)
    categories = {
        e.iid: e.name for p in pb.Trace.FromString(data).packet for e in p.interned_data.event_categories
    }
    seen = [
        (event.track_uuid, *event.categories, *(categories[iid] for iid in event.category_iids), name, args)
        for _, event, name, args in decoded(data)
        if event.type != event.TYPE_SLICE_END
    ]
    assert seen == want


@by_both_cores
@pytest.mark.parametrize("of_events", [True, False])
def test_tables_do_not_outgrow_their_bound(of_events: bool) -> None:
    track = Track(1, None, "slices", "t", category="c")
    items = [item(INSTANT, track, at, f"name {at}", {f"key {at}": f"text {at}"}) for at in range(1_000)]
    data = trace(Drawing().drawn(items, [track], of_events=of_events), room=50)
    seen = list(decoded(data))
    assert [(name, args) for _, _, name, args in seen] == [
        (f"name {at}", {f"key {at}": f"text {at}"}) for at in range(1_000)
    ]
    # What came while there was room has a number, what came later stands in its place.
    assert [event.name_iid > 0 for _, event, _, _ in seen] == [True] * 50 + [False] * 950
    shown = [event.debug_annotations[0] for _, event, _, _ in seen]
    assert [one.name_iid > 0 for one in shown] == [True] * 50 + [False] * 950
    assert [one.HasField("string_value_iid") for one in shown] == [True] * 50 + [False] * 950
    for table, most in (
        ("event_names", TABLE_MAX),
        ("debug_annotation_names", TABLE_MAX),
        ("debug_annotation_string_values", STRINGS_MAX),
    ):
        assert sorted(interned(data, table)) == list(range(1, most + 1))


# Names of warps ----------------------------------------------------------------------------------------


@by_both_cores
def test_a_warps_name_gets_a_number_when_it_comes_again() -> None:
    tracks = gpu_tracks(10)
    warps = [Warp(number) for number in (0, 1, 0, 0, 1, 2)]
    changes = [change(at, kind, at) for at in range(len(warps)) for kind in (WARP_BEGIN, WARP_END)]
    once = replace(Drawing().drawn(declared=tracks), warps=[warp_changes(tracks, warps, changes)])
    begun = [(event.name_iid > 0, name) for _, event, name, _ in decoded(trace(once)) if name]
    assert begun == [
        (False, "k warp 0"),
        (False, "k warp 1"),
        (True, "k warp 0"),
        (True, "k warp 0"),
        (True, "k warp 1"),
        (False, "k warp 2"),
    ]
    again = replace(once, declared=[])
    both = [(event.name_iid > 0, name) for _, event, name, _ in decoded(trace(once, again)) if name]
    assert both == begun + [(True, name) for _, name in begun]


@by_both_cores
def test_names_of_warps_and_other_names_do_not_share_numbers() -> None:
    host, gpus = Track(1, None, "slices", "t"), [gpu_tracks(10), gpu_tracks(20)]
    kernels = [KERNEL, Kernel("j", 2, 0, 0)]
    slices = [(0, 0), (1, 0), (0, 0), (0, 1), (1, 1), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    warps = [Warp(number, kernel=kernel) for number, kernel in slices]
    of = {(0, 0): "k warp 0", (1, 0): "k warp 1", (0, 1): "j block 0 warp 0", (1, 1): "j block 0 warp 1"}
    changes = [
        change(at, kind, at, mask=at)
        for at in range(len(warps))
        for kind in (WARP_BEGIN, WARP_EXIT, WARP_END)
    ]
    names = ["n1", "k warp 0", "n2", "exit", "n1", "j block 0 warp 1"]
    batch = replace(
        Drawing().drawn(
            [item(INSTANT, host, at, name) for at, name in enumerate(names)], [host, *gpus[0], *gpus[1]]
        ),
        warps=[warp_changes(tracks, warps, changes, kernels) for tracks in gpus],
    )
    # `decoded` refuses a number that is given twice.
    seen = [
        (sequence, name)
        for sequence, _, name, _ in decoded(trace(batch, replace(batch, declared=[])))
        if name
    ]
    gpu = [name for one in slices for name in (of[one], "exit")]
    want = [(1, name) for name in names] + [(at, name) for at in (3, 4) for name in gpu]
    assert seen == want * 2


@by_both_cores
@pytest.mark.parametrize("warp", [Warp(packets._MET_MAX), Warp(kernel=packets._KERNELS_MAX)])
def test_a_warps_name_that_is_beyond_what_is_remembered_stands_in_place(warp: Warp) -> None:
    tracks = gpu_tracks(10)
    kernels = [Kernel(f"k{at}", 0, 0, 0) for at in range(packets._KERNELS_MAX + 1)]
    # Those before them are remembered.
    last = Warp(packets._MET_MAX - 1, kernel=packets._KERNELS_MAX - 1)
    changes = [change(at, WARP_BEGIN, at % 2) for at in range(8)]
    warps = warp_changes(tracks, [warp, last], changes, kernels)
    data = trace(replace(Drawing().drawn(declared=tracks), warps=[warps]))
    name, last_name = (f"k{one.kernel} warp {one.number}" for one in (warp, last))
    seen = [(event.name_iid > 0, shown) for _, event, shown, _ in decoded(data)]
    assert seen == [(False, name), (False, last_name)] + [(False, name), (True, last_name)] * 3


@pytest.mark.slow
@by_both_cores
def test_a_warps_name_is_interned_only_while_there_is_room() -> None:
    tracks, most = gpu_tracks(10), packets._NAMED_MAX
    rounds = [range(most + 2)] * 3
    numbers = [number for one in rounds for number in one]
    warps = [Warp(number) for number in rounds[0]]
    changes = [change(at, WARP_BEGIN, number) for at, number in enumerate(numbers)]
    data = trace(replace(Drawing().drawn(declared=tracks), warps=[warp_changes(tracks, warps, changes)]))
    seen = [(event.name_iid > 0, name) for _, event, name, _ in decoded(data)]
    assert seen == [
        (again > 0 and number < most, f"k warp {number}")
        for again, one in enumerate(rounds)
        for number in one
    ]
    # The first number is that of an exit.
    assert interned(data, "event_names")[-most:] == list(range(2, most + 2))
