"""Chrome's JSON by the native core: the same bytes as the reference, and what the events say."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.cores import running
from tracepipe.converters import CONVERTERS, chrome
from tracepipe.converters.chrome import NativeChromeEvents, members
from tracepipe.converters.writer import TraceInfo
from tracepipe.event import tables as event_tables
from tracepipe.event.columns import NONE, TraceColumns
from tracepipe.event.ops import BEGIN, COUNTER, END, INSTANT, MORE_FLOWS, Op, OpColumns, op_of
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, NativeTables, Tables
from tracepipe.layout import LayoutOptions
from tracepipe.layout.timeline import (
    FIRST_EXTRA,
    WARP_BEGIN,
    WARP_COUNT,
    WARP_END,
    WARP_EXIT,
    Book,
    Drawn,
    Item,
    Kernel,
    Slices,
    Track,
    WarpChanges,
)
from tracepipe.native import library
from tracepipe.readers import tracepipe1
from tracepipe.recording.convert import Conversion, ConversionOptions

START_NS = 5_000_000_000_000
INFO = TraceInfo("monotonic", {"trace_ns": START_NS})


@pytest.fixture(autouse=True, scope="module")
def native() -> Iterator[None]:
    """Skips all of this where there is nothing to compare."""
    with running("native"):
        yield


def written(*batches: Drawn) -> bytes:
    out = io.BytesIO()
    writer = chrome.ChromeWriter(out, INFO)
    for drawn in batches:
        writer.write(drawn)
    writer.finish()
    return out.getvalue()


def written_by_both(*batches: Drawn) -> bytes:
    """What both write, which must be the same."""
    with running("pure"):
        reference = written(*batches)
    native = written(*batches)
    assert native == reference
    return native


# Batches -------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
odd_texts = st.one_of(texts, st.text('ab"\\\n\x00\x7f\u2028é', max_size=5))
numbers = st.one_of(st.integers(-3, 3), st.integers(-(1 << 63), (1 << 64) - 1))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), odd_texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(odd_texts, inner, max_size=2)),
    max_leaves=5,
)
keys = st.one_of(
    st.sampled_from(["cpu", "source_ns", "launch", "grid", "block", "unclosed", "no_begin", "fd"]), odd_texts
)
arguments = st.dictionaries(keys, json_values, max_size=4)
threes = st.one_of(st.none(), st.tuples(*[st.integers(0, 1 << 62)] * 3))
shapes = st.builds(
    Shape,
    st.sampled_from(["userspace", "gpu_kernel", "transfer"]),
    st.just("f"),
    st.sampled_from("BEIX"),
    cpu=st.one_of(st.none(), st.integers(0, 300)),
    gpu=st.one_of(st.none(), st.just(0)),
    grid=threes,
    block=threes,
    has_launch=st.booleans(),
)
times = st.one_of(
    st.integers(START_NS, START_NS + 3),
    st.integers(START_NS - 4 * 3_600 * 10**9, START_NS + 10**15),
    st.sampled_from([-1, 0, (1 << 62) - 1]),
)
flows = st.one_of(st.just(0), st.integers(-9, 9), st.integers(-(1 << 53), 1 << 53))
MORE = np.array([(-5, 6), (7, MORE_FLOWS), (1 << 53, MORE_FLOWS + 1)])
ROWS = 3


def tracks(names: list[str]) -> list[Track]:
    """A group, its tracks, and its counter."""
    group = Track(1, None, "group", names[0])
    inside = [
        Track(2 + at, group, "slices", name, at, category=name if at else "")
        for at, name in enumerate(names[:ROWS])
    ]
    return [group, *inside, Track(2 + ROWS, group, "counter", names[-1], unit="warps")]


@st.composite
def books(draw: st.DrawFn) -> tuple[Book, list[Track]]:
    all_tracks = tracks(draw(st.lists(odd_texts, min_size=ROWS + 1, max_size=ROWS + 1)))
    core = library()
    assert core is not None
    kept = NativeTables(core) if draw(st.booleans()) else Tables()
    for shape in draw(st.lists(shapes, min_size=1, max_size=4, unique=True)):
        kept.number_of(shape)
    for args in draw(st.lists(arguments, min_size=1, max_size=4)):
        kept.args_number(args)
    kept.text_number(b"{}")
    names = draw(st.lists(odd_texts, min_size=1, max_size=3))
    return Book(kept, all_tracks[1:], names, MORE), all_tracks


@st.composite
def ops_of(draw: st.DrawFn, book: Book, events: int, extras: int) -> Op:
    kind = draw(st.sampled_from([BEGIN, BEGIN, END, END, INSTANT, COUNTER]))
    event = NONE if kind == COUNTER else draw(st.integers(FIRST_EXTRA - extras + 1, events - 1))
    return (
        kind,
        ROWS if kind == COUNTER else draw(st.integers(0, ROWS - 1)),
        draw(times),
        draw(st.integers(0, len(book.names) - 1)),
        event,
        draw(st.integers(0, 3)),
        draw(flows),
        draw(st.one_of(flows, st.integers(MORE_FLOWS, MORE_FLOWS + len(MORE) - 1))),
        draw(st.integers(-(1 << 63), (1 << 63) - 1)),
        NONE,
    )


@st.composite
def batches(draw: st.DrawFn) -> Drawn:
    book, declared = draw(books())
    count = draw(st.integers(1, 6))
    shape_count, args_count = len(book.tables.shapes), book.tables.args_count
    source = st.lists(st.one_of(st.just(NONE), st.integers(0, 1 << 62)), min_size=count, max_size=count)
    events = TraceColumns(
        np.zeros(count, np.int64),
        np.array([draw(st.integers(0, shape_count - 1)) for _ in range(count)], np.int32),
        np.array([draw(st.integers(NONE, args_count - 1)) for _ in range(count)], np.int32),
        np.zeros(count, np.int64),
        np.array([draw(st.integers(-(1 << 63), (1 << 63) - 1)) for _ in range(count)], np.int64),
        np.array(draw(source), np.int64) if draw(st.booleans()) else None,
    )
    extras = draw(st.lists(arguments, min_size=1, max_size=2))
    ops = OpColumns()
    for op in draw(st.lists(ops_of(book, count, len(extras)), max_size=12)):
        ops.add(op)
    order = np.array(draw(st.permutations(range(ops.count))), np.int64)
    return Drawn(book, declared, events, ops, order, extras, [draw(changes_of(declared))])


@st.composite
def changes_of(draw: st.DrawFn, declared: list[Track]) -> WarpChanges:
    sizes = st.integers(0, 1 << 31)
    kernels = [
        Kernel(name, draw(sizes), grid_x, draw(st.integers(1, 1 << 31)) if grid_x else 0)
        for name in draw(st.lists(odd_texts, min_size=1, max_size=2))
        for grid_x in [draw(sizes)]
    ]
    rows = [st.integers(0, ROWS - 1), st.integers(0, len(kernels) - 1), st.integers(0, (1 << 63) - 1)]
    known = st.one_of(st.just(NONE), st.integers(0, (1 << 63) - 1))
    slices = draw(st.lists(st.tuples(*rows, known, known, known, known, flows, st.booleans()), min_size=1))
    kinds = (np.int32, np.int32, *[np.int64] * 6, np.uint8)
    columns = [np.array(column, kind) for column, kind in zip(zip(*slices, strict=True), kinds, strict=True)]
    kind = st.sampled_from([WARP_BEGIN, WARP_END, WARP_EXIT, WARP_COUNT])
    at = st.integers(0, len(slices) - 1)
    change = st.tuples(times, kind, at, st.integers(NONE, 9), st.integers(0, (1 << 32) - 1))
    changes = np.array(draw(st.lists(change, max_size=12)), np.int64).reshape(-1, 5).T
    each = [
        column.astype(kind)
        for column, kind in zip(changes, (np.int64, np.uint8, np.int32, np.int64, np.int64), strict=True)
    ]
    return WarpChanges(0, declared[1:], kernels, ROWS, 0, *each, Slices(*columns))


@pytest.mark.slow
@settings(deadline=None)
@given(batches())
def test_what_is_drawn_has_the_same_bytes(drawn: Drawn) -> None:
    written_by_both(drawn)


@pytest.mark.slow
@settings(deadline=None)
@given(batches(), batches())
def test_what_is_known_of_a_batch_is_right_in_the_next(drawn: Drawn, other: Drawn) -> None:
    # Names, shapes and arguments that come later, with the same tracks; and other changes of the same GPU.
    book = drawn.book
    first = replace(drawn, ops=OpColumns(), order=np.empty(0, np.int64), warps=[])
    warps = other.warps[0]
    warps.kernels = [*drawn.warps[0].kernels, *warps.kernels]
    for shape in other.book.tables.shapes:
        assert shape is not None
        book.tables.number_of(shape)
    book.names.extend(other.book.names)
    written_by_both(first, drawn, replace(drawn, declared=[], warps=[warps]))


def expected(item: Item) -> dict[str, Any]:
    """What a reader of JSON should find of an item."""
    name = item.track.name if item.kind == COUNTER else item.name
    event = {"ph": {BEGIN: "B", END: "E", INSTANT: "i", COUNTER: "C"}[item.kind], "name": name}
    args: Args = {"value": item.name} if item.kind == COUNTER else item.args or {}
    # As `members` has them: integers of 64 bits are text.
    return event | ({"args": orjson.loads(b"{" + members(args)[1:] + b"}")} if args else {})


@pytest.mark.slow
@settings(deadline=None)
@given(batches())
def test_a_reader_finds_what_is_drawn(drawn: Drawn) -> None:
    events = [event for event in json.loads(written_by_both(drawn))["traceEvents"] if event["ph"] != "M"]
    shown = [{key: event[key] for key in ("ph", "name", "args") if key in event} for event in events]
    items = list(drawn.items())
    assert [event for event in shown if event["ph"] in "BEiC"] == [expected(item) for item in items]
    assert [
        ("s" if flow < 0 else "t", abs(flow)) for item in items if item.kind != END for flow in item.flows
    ] == [(event["ph"], event["id"]) for event in events if event["ph"] in "st"]


def test_begins_ends_and_instants_of_one_time_are_apart_by_one_step_each() -> None:
    group = Track(1, None, "group", "GPU 0")
    track = Track(2, group, "slices", "stream 7")
    ops = OpColumns()
    for at in range(1200):
        ops.add(op_of((BEGIN, END, INSTANT)[at % 3], 0, START_NS + at // 1000, 0, NONE))
    drawn = Drawn(Book(Tables(), [track], ["f"]), [group, track], None, ops, np.arange(ops.count), [], [])
    lines = written_by_both(drawn).decode().splitlines()
    decimals = [
        line.split('"ts":')[1].rstrip("},").partition(".")[2] for line in lines if '"name":"f"' in line
    ]
    assert decimals[:7] == ["000", "000002", "000002", "000004", "000006", "000006", "000008"]
    assert {len(one) for one in decimals} == {3, 6}
    assert max(decimals[:1000]) == "000498"
    assert decimals[1000:1004] == ["001", "001", "001002", "001004"]


# Arguments -----------------------------------------------------------------------------------------------

json_parts = st.one_of(
    st.sampled_from(['"a"', '"b"', '""', '"\\u0061"', '"\\\\"', '"é"', '"\x7f"', '"\u2028"', '"cpu"', '"x']),
    st.sampled_from(["1", "-1", "0", "-0", "01", "1.0", "1e3", "9223372036854775807", "9223372036854775808"]),
    st.sampled_from(["-9223372036854775808", "true", "null", "[", "]", "{", "}", ",", ":", " "]),
)
scalars = st.sampled_from(
    ['"a"', '"\\n"', '"é"', "1", "-5", "1.5", "18446744073709551615", "true", "null", "[1,2]", "[]", "{}"]
)
nested = st.sampled_from(
    ['{"a":{"b":[{"c":1},null]},"é":"x"}', '{"a":1,"a":2}', "[[{}],[1.5]]", "[" * 10 + "]" * 10]
)
near = st.lists(
    st.tuples(st.sampled_from(["a", "b", "cpu", "launch", "\\\\"]), scalars | nested), max_size=3
).map(lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}")


@given(st.one_of(near, st.lists(json_parts, max_size=9).map(lambda parts: "{" + "".join(parts) + "}")))
@example('{"a":1}')
@example('{"a":-9223372036854775807,"b":[null,true,"\u2028"]}')
def test_text_of_the_native_grammar_is_what_orjson_writes(text: str) -> None:
    core, encoded = library(), text.encode()
    assert core is not None
    if core.tp_object_size(encoded, len(encoded)) == len(encoded):
        assert orjson.dumps(orjson.loads(encoded)) == encoded


def test_arguments_of_that_grammar_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(NativeChromeEvents, "_odd_text", refuse)
    who = '"type":"userspace","name":"f","phase":"B","pid":1,"tid":1,"cpu":2'
    line = f'{{"ts_ns":{START_NS},{who},"args":{{"grid":[1,2],"x":-7}}}}'
    event = next(one for one in events_of(converted([line], say=False)) if one["name"] == "f")
    assert event["args"] == {"cpu": 2, "grid": [1, 2], "x": -7}


# Recordings ----------------------------------------------------------------------------------------------

HEADER = (
    '{"type":"header","schema":"tracepipe/1","clock":"monotonic","clocks":["monotonic"],'
    f'"start":{{"monotonic_ns":{START_NS}}}}}'
)


def converted(lines: list[str], options: LayoutOptions | None = None, *, say: bool = True) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        path.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
        out = io.BytesIO()
        conversion = Conversion(
            str(path), CONVERTERS["chrome"], ConversionOptions(layout=options or LayoutOptions())
        )
        if say:
            conversion.run(out)
            return out.getvalue()
        # Without what the recording says of itself, whose arguments are Python's.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tracepipe.layout.draw.Layout.say", lambda self, *_: self._drawn(None, []))
            conversion.run(out)
        return out.getvalue()


def converted_by_both(lines: list[str], options: LayoutOptions | None = None) -> bytes:
    with running("pure"):
        reference = converted(lines, options)
    native = converted(lines, options)
    assert native == reference
    return native


def events_of(data: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


lines_of = st.lists(
    st.builds(
        lambda ts_ns, kind, phase, more, args: (
            f'{{"ts_ns":{START_NS + ts_ns},"type":"{kind}","name":"f","phase":"{phase}"{more},"args":{args}}}'
        ),
        st.integers(0, 20),
        st.sampled_from(["userspace", "syscall", "gpu_kernel", "scheduler"]),
        st.sampled_from("BEIX"),
        st.sampled_from(
            [
                ',"pid":1,"tid":1',
                ',"pid":1,"tid":1,"cpu":3,"dur_ns":4',
                ',"gpu":0,"stream":7,"launch":18446744073709551615,"dur_ns":0,"grid":[1,2,3],"block":[32,1,1]',
            ]
        ),
        near,
    ),
    max_size=12,
)


@settings(deadline=None)
@given(lines_of)
def test_a_recording_has_the_same_bytes(lines: list[str]) -> None:
    converted_by_both(lines)


def many_lines(*, has_warps: bool = True) -> list[str]:
    """Threads that come and go, with arguments that no other call has, and warps."""
    lines = []
    for at in range(4000):
        tid, args = at // 100, f'{{"n":{at},"text":"{at * 7919}"}}'
        who = f'"type":"userspace","name":"f{at // 500}","pid":1,"tid":{tid},"cpu":{tid % 8}'
        lines.append(f'{{"ts_ns":{START_NS + at * 10},{who},"phase":"B","args":{args}}}')
        lines.append(f'{{"ts_ns":{START_NS + at * 10 + 5},{who},"phase":"E","args":{{"cpu":{at}}}}}')
        if has_warps and at % 1000 == 0:
            warps = list(range(64))
            batch = {"ts_ns": START_NS + at * 10, "type": "gpu_warp", "name": 'k"\\', "launch": at, "gpu": 0}
            batch |= {"grid": [8, 2, 1], "block": [128, 1, 1], "warp": warps, "sm": [n % 4 for n in warps]}
            batch |= {"slot": [n // 4 for n in warps], "entry_ns": warps, "entry_mask": [(1 << 31) - 1] * 64}
            batch |= {"exit_count": [n % 3 for n in warps], "exit_ns": [n % 5 for n in range(63)]}
            batch |= {"exit_mask": [0xFFFF] * 63}
            lines.append(json.dumps(batch, separators=(",", ":")))
    return lines


@pytest.mark.parametrize("mode", ["slot", "logical", "sm", "off"])
def test_much_more_than_is_held_back_has_the_same_bytes(mode: str) -> None:
    data = converted_by_both(many_lines(), LayoutOptions(mode, thread_exits=True))
    assert len(data) > 1 << 19
    begins = [event for event in events_of(data) if event["ph"] == "B" and event["name"].startswith("f")]
    assert [event["args"] for event in begins] == [
        {"cpu": at // 100 % 8, "n": at, "text": str(at * 7919)} for at in range(4000)
    ]


@pytest.mark.slow
def test_numbers_that_are_given_anew_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def slices() -> list[dict[str, Any]]:
        return [one for one in events_of(converted_by_both(many_lines(has_warps=False))) if one["ph"] in "BE"]

    whole = slices()
    monkeypatch.setattr(tracepipe1, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(event_tables, "KEPT_MAX", 50)
    forgotten: list[bool] = []
    forget = NativeChromeEvents.forget
    monkeypatch.setattr(
        NativeChromeEvents,
        "forget",
        lambda self, *, shapes: (forgotten.append(shapes), forget(self, shapes=shapes)),
    )
    assert slices() == whole
    assert len(forgotten) > 10 and any(forgotten)
