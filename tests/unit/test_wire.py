"""What is written by hand reads the same through the perfetto package's own classes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from tracepipe.converters.perfetto_intern import Sequence

from tracepipe.converters import wire
from tracepipe.converters.perfetto import PerfettoWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.layout.timeline import BEGIN, BEGIN_ONCE, DECLARE, END, INSTANT, Op, Track

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
    assert wire.number(8, value) == packet.SerializeToString()


@given(st.integers(-(1 << 63), (1 << 63) - 1))
@example(-1)
@example(-(1 << 63))
def test_signed_numbers_are_protobufs(value: int) -> None:
    assert wire.number(30, value) == pb.TrackEvent(counter_value=value).SerializeToString()


@pytest.mark.parametrize("bits", range(65))
def test_varints_of_every_length(bits: int) -> None:
    for value in {max(0, (1 << bits) - 1), min(U64, 1 << bits)}:
        assert len(wire.varint(value)) == max(1, -(-value.bit_length() // 7))
        assert wire.number(8, value) == pb.TracePacket(timestamp=value).SerializeToString()


@given(st.integers(0, U64), st.floats(allow_nan=False), st.text())
def test_other_fields_are_protobufs(number: int, real: float, text: str) -> None:
    assert wire.fixed64(47, number) == pb.TrackEvent(flow_ids=[number]).SerializeToString()
    assert wire.double(5, real) == pb.DebugAnnotation(double_value=real).SerializeToString()
    assert wire.text(23, text) == pb.TrackEvent(name=text).SerializeToString()


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    # JSON can say "\ud800", UTF-8 cannot, and protobuf refuses to read it.
    assert pb.TrackEvent.FromString(wire.text(23, "a\ud800b")).name == "a?b"


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


def round_trip(args: dict[str, Any], sequence: Sequence) -> dict[str, Any]:
    """`args` written and read again."""
    event = pb.TrackEvent.FromString(sequence.annotations(args))
    interned = pb.InternedData.FromString(b"".join(sequence.pending))
    names = {entry.iid: entry.name for entry in interned.debug_annotation_names}
    strings = {entry.iid: entry.str.decode() for entry in interned.debug_annotation_string_values}
    return {names[a.name_iid]: value_of(a, strings) for a in event.debug_annotations}


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


@given(st.dictionaries(st.text(max_size=9), json_values, max_size=6))
@example({"deep": [[[[[[[[[[1]]]]]]]]]]})
@example({"empty": [], "none": {}, "": "", "nothing": None, "inside": [None]})
@example({"big": 1 << 63, "bigger": 1 << 64, "negative": -1, "least": -(1 << 63), "less": -(1 << 63) - 1})
@example({"text": "日本語 ✓ \x00", "long": "x" * 65, "yes": True, "no": False, "pi": math.pi})
def test_every_json_value_is_read_back(args: dict[str, Any]) -> None:
    sequence = Sequence(0)
    want = {stated(key): stated(value) for key, value in args.items() if value is not None}
    assert round_trip(args, sequence) == want
    # The second time comes from the tables: the same numbers, nothing new to intern.
    again = sequence.annotations(args)
    size = len(sequence.pending)
    assert sequence.annotations(args) == again
    assert len(sequence.pending) == size


@pytest.mark.parametrize("text", ["lone \ud800 surrogate", "\udfff"])
def test_annotations_survive_text_that_utf8_cannot_hold(text: str) -> None:
    got = round_trip({"s": text, "in": [text], text: 1}, Sequence(0))
    shown = text.encode("utf-8", "replace").decode()
    assert got == {"s": shown, "in": [shown], shown: 1}


@pytest.mark.parametrize("real", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_cannot_hold(real: float) -> None:
    (got,) = round_trip({"x": real}, Sequence(0)).values()
    assert got == real or (math.isnan(got) and math.isnan(real))


def test_an_argument_of_another_type_does_not_take_the_place_of_an_int() -> None:
    # True == 1 == 1.0 in Python, and all find each other in a dict.
    sequence = Sequence(0)
    kinds = []
    for value in (1, True, 1.0, 1):
        event = pb.TrackEvent.FromString(sequence.annotations({"x": value}))
        kinds.append(event.debug_annotations[0].WhichOneof("value"))
    assert kinds == ["int_value", "bool_value", "double_value", "int_value"]


# Interning over a whole file ---------------------------------------------------------------------------


def decoded(data: bytes) -> Iterator[tuple[int, Any, str, dict[str, Any]]]:
    """(sequence, track event, name, args) of a trace, its ids resolved by the rules of sequence flags."""
    tables: dict[int, dict[str, dict[int, Any]]] = {}
    for packet in pb.Trace.FromString(data).packet:
        sequence = packet.trusted_packet_sequence_id
        if packet.sequence_flags & packet.SEQ_INCREMENTAL_STATE_CLEARED:
            tables[sequence] = {"names": {}, "keys": {}, "categories": {}, "strings": {}}
        if packet.sequence_flags & packet.SEQ_NEEDS_INCREMENTAL_STATE:
            assert sequence in tables, "needs what was never begun"
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
            tables[sequence]["strings"][entry.iid] = entry.str.decode()
        if packet.HasField("track_event"):
            event, here = packet.track_event, tables[sequence]
            for iid in event.category_iids:
                assert iid in here["categories"]
            name = here["names"][event.name_iid] if event.name_iid else event.name
            args = {here["keys"][a.name_iid]: value_of(a, here["strings"]) for a in event.debug_annotations}
            yield sequence, event, name, args


def trace(batches: list[list[Op]]) -> bytes:
    out = io.BytesIO()
    writer = PerfettoWriter(out, TraceInfo("monotonic", {"trace_ns": 0}))
    for ops in batches:
        writer.write(ops)
    writer.finish()
    return out.getvalue()


names = st.text("abc", min_size=1, max_size=2)
events = st.lists(
    st.tuples(
        st.sampled_from([BEGIN, BEGIN_ONCE, INSTANT]),
        st.integers(0, 2),
        names,
        st.dictionaries(names, st.one_of(st.integers(0, 300), names), max_size=3),
    ),
    max_size=60,
)


@given(events, st.integers(1, 9))
def test_names_and_arguments_survive_full_tables(
    drawn: list[tuple[int, int, str, dict[str, Any]]], batch_events: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "TABLE_MAX", 4)
        patch.setattr(Sequence, "ONCE_MAX", 3)
        # Two tracks share a sequence, as the layers of a thread do; the third has its own.
        tracks = [Track(n + 1, None, "slices", f"t{n}", category="c", lane=n // 2 + 1) for n in range(3)]
        ops: list[Op] = [(DECLARE, track, 0, "", None, None) for track in tracks]
        want = []
        for ts_ns, (kind, at, name, args) in enumerate(drawn):
            ops.append((kind, tracks[at], ts_ns, name, args, None))
            want.append((tracks[at].lane + 1, name, args))
            if kind != INSTANT:
                ops.append((END, tracks[at], ts_ns, "", None, None))
        data = trace([ops[at : at + batch_events] for at in range(0, len(ops), batch_events)])
    seen = [(s, name, args) for s, event, name, args in decoded(data) if event.type != event.TYPE_SLICE_END]
    assert seen == want


def test_tables_do_not_outgrow_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "TABLE_MAX", 50)
    track = Track(1, None, "slices", "t", lane=1)
    ops: list[Op] = [(DECLARE, track, 0, "", None, None)]
    ops += [(INSTANT, track, at, f"name {at}", {f"key {at}": f"text {at}"}, None) for at in range(1_000)]
    data = trace([ops])
    assert [name for _, _, name, _ in decoded(data)] == [f"name {at}" for at in range(1_000)]
    iids = [e.iid for p in pb.Trace.FromString(data).packet for e in p.interned_data.event_names]
    assert max(iids) == 50


def test_names_of_warps_and_other_names_do_not_share_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "TABLE_MAX", 4)
    track = Track(1, None, "slices", "t", lane=1)
    ops: list[Op] = [(DECLARE, track, 0, "", None, None)]
    names = ["w0", "n1", "n2", "w1", "n3", "n4", "w0", "n1", "w1"]
    for at, name in enumerate(names):
        ops += [(BEGIN_ONCE if name[0] == "w" else BEGIN, track, at, name, None, None)]
        ops += [(END, track, at, "", None, None)]
    # `decoded` refuses a number that is given twice before the tables start anew.
    assert [name for _, _, name, _ in decoded(trace([ops])) if name] == names


def test_a_warps_name_is_interned_only_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "ONCE_MAX", 2)
    track = Track(1, None, "slices", "slot 0", lane=1)
    ops: list[Op] = [(DECLARE, track, 0, "", None, None)]
    for at, name in enumerate(["w0", "w1", "w2", "w0", "w2"]):
        ops += [(BEGIN_ONCE, track, at, name, None, None), (END, track, at, "", None, None)]
    begun = [(event.name_iid > 0, name) for _, event, name, _ in decoded(trace([ops])) if name]
    assert begun == [(True, "w0"), (True, "w1"), (False, "w2"), (True, "w0"), (False, "w2")]
