"""The tracepipe/1 reader, the numbering of lines under it, and the choice of a reader from content."""

from __future__ import annotations

import io

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import read_all, record_of_warps, records_of
from tracepipe.errors import FormatError, InputError
from tracepipe.event.columns import NONE, SPECIAL
from tracepipe.event.model import Header, Problem, Record
from tracepipe.event.warps import Warps
from tracepipe.readers import READERS, recognise, recording, tracepipe1
from tracepipe.readers.recording import Rejoined, chunks_of_text
from tracepipe.readers.tracepipe1 import NativeWarpLines

HEADER = orjson.dumps(Header(clock="monotonic").to_record())
GOOD = b'{"type":"syscall","name":"ioctl","phase":"I","ts_ns":1,"pid":1,"tid":1}'
GOOD_AFTER = b'{"type":"syscall","name":"ioctl","phase":"I","ts_ns":2,"pid":1,"tid":1}'
FOOTER = b'{"type":"footer","counts":{"syscall":1},"losses":{}}'


pytestmark = pytest.mark.usefixtures("core")


def read(*parts: bytes, header: bytes = HEADER + b"\n") -> tuple[list[Record], list[Problem]]:
    return read_all(tracepipe1.read(io.BytesIO(header + b"\n".join(parts))))


def warps(**columns: object) -> bytes:
    good = {
        "type": "gpu_warp",
        "name": "k",
        "ts_ns": 5,
        "warp": [0, 1],
        "entry_ns": [0, 9],
        "exit_ns": [7, 8],
    }
    return orjson.dumps({**good, **columns})


def ranges(**columns: object) -> bytes:
    good = {
        "exit_clk": [50, 60],
        "ranges": ["load", "mma"],
        "range_count": [1, 2],
        "range_name": [0, 0, 1],
        "range_clk": [0, 8, 9],
        "range_dur_clk": [5, 2, 3],
    }
    return warps(**{**good, **columns})


def event(**fields: object) -> bytes:
    good = {"type": "syscall", "name": "ioctl", "phase": "I", "ts_ns": 1, "pid": 1, "tid": 1}
    return orjson.dumps({**good, **fields})


BROKEN = [
    (
        event(args={"x": orjson.Fragment(b'{"a":' * 300 + b"1" + b"}" * 300)}),
        "",
        "nests deeper than 200 levels",
    ),
    (GOOD[:30], "", "is not JSON: unexpected end of data at column"),
    (b"\x00\x00\x00", "", "is not JSON: unexpected character"),
    (b'{"type":"syscall","name":"\xff\xfe"}', "", "is not JSON: "),
    (b'{"type":"syscall","name":"f","phase":"I","ts_ns":NaN}', "", "is not JSON: unexpected character"),
    (b'{"a":' * 2000, "", "is not JSON: depth limit exceeded"),
    (b"[1,2]", "", "must be an object, not [1, 2]"),
    (b"null", "", "must be an object, not None"),
    (b"{}", "type", "is missing"),
    (b'{"type":"gpu"}', "type", "must be one of header, clock, loss, "),
    (b'{"type":{"a":1}}', "type", "must be one of header, clock, loss, "),
    (b'{"type":' + b"[" * 150 + b"]" * 150 + b"}", "type", "must be one of header"),
    (event(ts_ns=-1), "ts_ns", "must be at least 0, not -1"),
    (event(ts_ns=1 << 63), "ts_ns", "must be at most 4611686018427387903"),
    (
        b'{"type":"syscall","name":"f","phase":"I","ts_ns":99999999999999999999999}',
        "ts_ns",
        "must be an integer, not 1e+23",
    ),
    (event(ts_ns="1"), "ts_ns", "must be an integer, not '1'"),
    (event(ts_ns=True), "ts_ns", "must be an integer, not True"),
    (event(pid=1.5), "pid", "must be an integer, not 1.5"),
    (event(pid=1 << 31), "pid", "must be at most 2147483647"),
    (event(tid=1 << 31), "tid", "must be at most 2147483647"),
    (event(phase="Q"), "phase", "must be one of B, E, I, X, C, s, t, f, not 'Q'"),
    (event(phase="X"), "dur_ns", "is missing: an X has no length without it"),
    (event(name=None), "name", "must be a string, not None"),
    (event(args=[]), "args", "must be an object, not []"),
    (event(grid=[1, 1]), "grid", "must have 3 elements, not 2"),
    (event(grid=[1, 1, -1]), "grid[2]", "must be at least 0, not -1"),
    (b'{"type":"gpu_warp","name":"k","ts_ns":5,"warp":[0],"entry_ns":[0]}', "exit_ns", "is missing"),
    (warps(entry_ns=[0]), "entry_ns", "has 1 value for 2 warps"),
    (warps(sm=[0, 1, 2]), "sm", "has 3 values for 2 warps"),
    (warps(exit_count=[1, 2]), "exit_ns", "has 2 values for 3 exits"),
    (warps(exit_clk=[4]), "exit_clk", "has 1 value for 2 exits"),
    (warps(warp=[0, "1"]), "warp[1]", "must be an integer, not '1'"),
    (warps(entry_ns=[0, 1 << 61]), "entry_ns[1]", "must be at most 1152921504606846976"),
    (warps(exit_ns=[(1 << 64) - 1, 0]), "exit_ns[0]", "must be at most 1152921504606846976"),
    (warps(sm=[0, 1 << 16], slot=[0, 0]), "sm[1]", "must be at most 65535"),
    (warps(sm=[0, 0], slot=[0, 1 << 12]), "slot[1]", "must be at most 4095"),
    (warps(exit_mask=[1, 1 << 32]), "exit_mask[1]", "must be at most 4294967295"),
    (warps(range_count=[1]), "range_count", "has 1 value for 2 warps"),
    (ranges(range_name=[0, 1]), "range_name", "has 2 values for 3 ranges"),
    (ranges(range_open=[0, 0, 2]), "range_open[2]", "must be at most 1"),
    (ranges(ranges=["load"]), "range_name", "has 1, but there is 1 name in ranges"),
    (ranges(ranges=["load", "x" * 16_385]), "ranges[1]", "is longer than 16384 bytes"),
    (ranges(ranges=["load", 3]), "ranges[1]", "must be a string, not 3"),
    (ranges(exit_clk=[4, 9]), "range_dur_clk", "has a range that ends after its warp's last exit (warp 0)"),
    (
        ranges(exit_count=[2, 0], range_count=[2, 1]),
        "range_dur_clk",
        "has a range that ends after its warp's last exit (warp 1)",
    ),
    (ranges(range_dur_clk=[5, 2, (1 << 63) - 1]), "range_dur_clk", "has a range that ends after"),
    (
        ranges(range_clk=[0, 9, 8], range_count=[0, 3]),
        "range_clk",
        "is not in the order of begins (warp 1)",
    ),
    (warps(range_count=[1, 0]), "range_name", "is missing, but there are ranges"),
    (
        warps(range_count=[1, 0], range_name=[0], range_clk=[0], range_dur_clk=[0], ranges=["a"]),
        "exit_clk",
        "is missing, but there are ranges",
    ),
    (b'{"type":"loss","count":281474976710656}', "count", "must be at most 281474976710655"),
    (
        b'{"type":"footer","counts":{"syscall":18446744073709551615},"losses":{}}',
        "counts[syscall]",
        "must be at most 281474976710655",
    ),
    (b'{"type":"loss","layer":"syscall"}', "count", "is missing"),
    (
        b'{"type":"clock","clock":"gpu","source_ns":1,"host_lo_ns":9,"host_hi_ns":8}',
        "host_hi_ns",
        "is before host_lo_ns",
    ),
    (b'{"type":"footer","counts":{"syscall":"1"},"losses":{}}', "counts[syscall]", "must be an integer"),
]


@pytest.mark.parametrize(("line", "field", "message"), BROKEN)
def test_only_the_broken_line_is_lost(line: bytes, field: str, message: str) -> None:
    records, problems = read(GOOD, line, GOOD_AFTER, b"")
    assert [record["ts_ns"] for record in records] == [1, 2]
    assert [(p.line, p.field, p.skipped) for p in problems] == [(3, field, True)]
    assert message in problems[0].message
    assert len(problems[0].message) < 300


def test_a_threads_exit_is_an_event_of_that_thread() -> None:
    line = {"ts_ns": 4, "type": "gpu_thread_exit", "thread": [1, 0, 0]}
    more = {"name": "k", "phase": "E", "tid": 3, "launch": 7, "block": [2, 0, 0], "args": {"a": 1}}
    records, problems = read(
        GOOD,
        orjson.dumps(line),
        orjson.dumps(line | more | {"stream": "none of its fields"}),
        orjson.dumps(line | {"thread": [1, 0]}),
        orjson.dumps(line | {"tid": "x"}),
        GOOD_AFTER,
    )
    thread = {"type": "gpu_thread", "name": "kernel", "phase": "I", "ts_ns": 4, "thread": [1, 0, 0]}
    assert records[1:-1] == [
        thread | {"args": {"event": "exit"}},
        thread | more | {"phase": "I", "args": {"a": 1, "event": "exit"}},
    ]
    assert [(p.line, p.field) for p in problems] == [(5, "thread"), (6, "tid")]


def test_two_values_on_one_line_shift_no_line_number() -> None:
    records, problems = read(GOOD, GOOD + b"," + GOOD, b"", b"{}", GOOD_AFTER)
    assert [record["ts_ns"] for record in records] == [1, 2]
    assert [(p.line, p.field) for p in problems] == [(3, ""), (5, "type")]


def test_events_behind_a_footer_are_read() -> None:
    records, problems = read(GOOD, FOOTER, GOOD_AFTER)
    assert [record["type"] for record in records] == ["syscall", "footer", "syscall"]
    assert problems == []


def test_a_second_header_is_reported_and_what_follows_is_read() -> None:
    records, problems = read(GOOD, FOOTER, HEADER, GOOD_AFTER)
    assert [record["type"] for record in records] == ["syscall", "footer", "syscall"]
    assert problems == [
        Problem(4, "type", "is a second header: what follows is read with the first header", skipped=False)
    ]


def test_what_nests_to_the_limit_is_kept_and_can_be_written() -> None:
    line = event(args={"x": orjson.Fragment(b"[[],[]," * 150 + b"1" + b"]" * 150)})
    records, problems = read(line)
    assert (len(records), problems) == (1, [])
    assert orjson.dumps(records[0])


def test_a_last_line_without_its_end_was_cut_off() -> None:
    records, problems = read(GOOD, GOOD_AFTER[:40])
    assert len(records) == 1
    assert problems == [Problem(3, "", "was cut off in the middle of the line")]


def test_a_whole_last_line_with_a_fault_is_not_reported_as_cut_off() -> None:
    _, problems = read(GOOD, event(ts_ns=-1))
    assert problems == [Problem(3, "ts_ns", "must be at least 0, not -1")]


def test_a_mark_and_line_ends_of_other_systems_are_read() -> None:
    header = b"\xef\xbb\xbf" + HEADER + b"\r\n"
    assert recognise(header).name == "tracepipe"
    records, problems = read(GOOD + b"\r", GOOD_AFTER + b"\r", b"\r", b"", header=header)
    assert (len(records), problems) == (2, [])


def test_blank_lines_count_as_lines_and_give_no_events() -> None:
    records, problems = read(b"", b"  ", GOOD, b"", b"[]", b"")
    assert len(records) == 1
    assert [p.line for p in problems] == [6]


def test_a_header_alone_is_an_empty_recording() -> None:
    assert read() == ([], [])


def test_a_line_over_the_limit_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LINE_LIMIT_BYTES", 1000)
    monkeypatch.setattr(tracepipe1, "CHUNK_BYTES", 100)
    records, problems = read(GOOD, event(name="x" * 50_000), GOOD_AFTER)
    assert [record["ts_ns"] for record in records] == [1, 2]
    assert [(p.line, p.field) for p in problems] == [(3, "")]


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        (b"", "", "the header is not JSON"),
        (b"\n" + HEADER, "", "the header is not JSON"),
        (HEADER[:20], "", "the header is not JSON"),
        (GOOD, "type", "is not a header"),
        (b"[" * 900 + b"]" * 900, "", "nests deeper than 200 levels"),
        (b"[]", "", "must be an object"),
        (b'{"type":"header"}', "schema", "is missing"),
        (b'{"type":"header","schema":"tracepipe/1","clocks":"gpu"}', "clocks", "must be an array"),
        (b'{"type":"header","schema":"tracepipe/1","clock":null,"host":null}', "clock", "must be a string"),
        (b'{"type":"header","schema":"tracepipe/1","clocks":["gpu",7]}', "clocks[1]", "must be a string"),
    ],
)
def test_a_bad_header_is_an_error_with_its_place(data: bytes, field: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        tracepipe1.read(io.BytesIO(data))
    assert caught.value.line == 1
    assert caught.value.field.startswith(field)
    assert message in str(caught.value)
    assert caught.value.hint


def test_a_bad_record_about_the_capture_loses_itself_alone() -> None:
    header = {
        "host": None,
        "start": {"monotonic_ns": -1},
        "command": ["./a", 7],
        "kernel": "6.18",
        "clock": "x",
    }
    lines = orjson.dumps(Header().to_record() | header) + b"\n" + GOOD + b"\nbad\n"
    recording = tracepipe1.read(io.BytesIO(lines))
    assert recording.header.to_record() == Header().to_record() | {"kernel": "6.18", "clock": "x"}
    (batch,) = recording.batches
    assert [(p.line, p.field, p.skipped) for p in batch.problems] == [
        (1, "host", True),
        (1, "command[1]", True),
        (1, "start.monotonic_ns", True),
        (3, "", True),
    ]
    assert [record["ts_ns"] for record in records_of(batch, recording.tables)] == [1]


def test_a_bad_header_alone_is_reported_too() -> None:
    (batch,) = tracepipe1.read(io.BytesIO(orjson.dumps(Header().to_record() | {"tool": []}))).batches
    assert [p.at("run.jsonl") for p in batch.problems] == ["run.jsonl:1: tool: must be a string, not []"]


def test_another_version_is_named() -> None:
    data = b'{"type":"header","schema":"tracepipe/9"}\n'
    assert recognise(data).name == "tracepipe"
    with pytest.raises(FormatError, match="'tracepipe/9', but this program reads tracepipe/1"):
        tracepipe1.read(io.BytesIO(data))


def test_unknown_content_and_unknown_names_are_errors() -> None:
    with pytest.raises(FormatError) as caught:
        recognise(b"nothing that anyone knows\n")
    assert all(name in caught.value.hint for name in READERS)
    with pytest.raises(FormatError, match="the text is UTF-16") as caught:
        recognise((HEADER + b"\n").decode().encode("utf-16"))
    assert "iconv" in caught.value.hint
    with pytest.raises(FormatError, match="no input format is called 'nsight'"):
        recognise(b"", "nsight")
    assert recognise(b"", "layered").name == "layered"


@given(st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b)), st.integers(1, 50), st.booleans())
def test_lines_are_numbered_whatever_the_chunks(parts: list[bytes], chunk: int, ended: bool) -> None:
    data = b"\n".join(parts) + (b"\n" if ended else b"")
    want = data.split(b"\n")
    if want[-1] == b"":
        want.pop()
    got: dict[int, bytes] = {}
    cuts = []
    for some, cut in chunks_of_text(io.BytesIO(data), chunk):
        got |= dict(enumerate(some.split(b"\n"), len(got) + 1))
        cuts.append(cut)
    assert got == dict(enumerate(want, 1))
    assert any(cuts) == bool(data and not data.endswith(b"\n"))


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(1, 9))
def test_a_stream_read_ahead_is_whole_again(head: bytes, rest: bytes, size: int) -> None:
    stream = Rejoined(head, io.BytesIO(rest))
    assert b"".join(iter(lambda: stream.read(size), b"")) == head + rest


# Lines as a capture writes them: the time first, so that the rest of a line is parsed once.
TIME_FIRST = b'{"ts_ns":%d,"type":"syscall","name":"ioctl","phase":"I","pid":1,"tid":1}'


def test_lines_that_come_again_share_one_shape_and_their_arguments() -> None:
    times = [5, 9, 1799999999999999999, 4_000_000_000_000_000_000, 9]
    with_args = b'{"ts_ns":%d,"type":"kernel","name":"f","phase":"E","args":{"result":0}}'
    text = b"".join(line % ns + b"\n" for ns in times for line in (TIME_FIRST, with_args))
    recording = tracepipe1.read(io.BytesIO(HEADER + b"\n" + text))
    (batch,) = recording.batches
    assert batch.events.ts_ns.tolist() == [ns for ns in times for _ in range(2)]
    assert batch.events.shape.tolist() == [0, 1] * 5
    assert batch.events.args.tolist() == [NONE, 0] * 5
    assert [shape and shape.name for shape in recording.tables.shapes] == ["ioctl", "f"]
    assert recording.tables.args(0) == {"result": 0}


@pytest.mark.parametrize("key", [b"tid", b"t\\u0069d"])
def test_a_launch_of_zero_has_no_flow(key: bytes) -> None:
    line = b'{"ts_ns":1,"type":"userspace","name":"f","phase":"B","launch":0,"flow":7,"pid":1,"%s":1}' % key
    (batch,) = tracepipe1.read(io.BytesIO(HEADER + b"\n" + line)).batches
    assert batch.events.launch.tolist() == [0]


def test_time_duration_launch_and_arguments_are_not_part_of_a_shape() -> None:
    line = b'{"ts_ns":%d,"type":"gpu_kernel","name":"k","phase":"X","dur_ns":%d,"gpu":0,"launch":%d'
    line += b',"args":{"n":%d}}'
    numbers = [
        (1, 2, 3, 4),
        (5, 0, (1 << 63) - 1, 4),
        (6, (1 << 62) - 1, 1 << 63, 5),
        (7, 8, (1 << 64) - 1, 5),
    ]
    recording = tracepipe1.read(
        io.BytesIO(HEADER + b"\n" + b"\n".join(line % some for some in numbers) + b"\n")
    )
    (batch,) = recording.batches
    assert len({recording.tables.shapes[number] for number in batch.events.shape}) == 1
    assert batch.events.args.tolist() == [0, 0, 1, 1]
    records = records_of(batch, recording.tables)
    assert [(r["ts_ns"], r["dur_ns"], r["launch"], r["args"]["n"]) for r in records] == numbers


JSON = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.lists(st.text())
ARGUMENTS_LAST = b'{"ts_ns":%d,"type":"syscall","name":"ioctl","phase":"I","pid":1,"tid":1,"args":%b}'


@given(st.lists(st.dictionaries(st.text(max_size=9), JSON, max_size=3), max_size=6))
def test_arguments_at_the_end_of_a_line_are_its_arguments(args: list[dict[str, object]]) -> None:
    records, problems = read(*[ARGUMENTS_LAST % (n, orjson.dumps(a)) for n, a in enumerate(args)])
    event = {"type": "syscall", "name": "ioctl", "phase": "I", "pid": 1, "tid": 1}
    assert records == [event | {"ts_ns": n} | ({"args": a} if a else {}) for n, a in enumerate(args)]
    assert problems == []


@pytest.mark.parametrize(
    ("args", "field", "message"),
    [
        (b'{"a":1}},"pid":2}', "", "is not JSON"),
        (b'{"a":1', "", "is not JSON"),
        (b'{"a":1}}', "", "is not JSON"),
        (b'{"a":}', "", "is not JSON"),
        (b"[1]", "args", "must be an object"),
        (b'{"a":1},"args":3', "args", "must be an object"),
        (b'{"a":1},"pid":-2', "pid", "must be at least 0"),
        (b'{},"type":"scheduler","name":7', "name", "must be a string"),
        (b'{"a":' + b"[" * 210 + b"]" * 210 + b"}", "", "nests deeper"),
    ],
)
def test_text_that_only_looks_like_arguments_loses_its_line_only(
    args: bytes, field: str, message: str
) -> None:
    good = ARGUMENTS_LAST % (1, b'{"size":1}'), ARGUMENTS_LAST % (2, b'{"size":2}')
    records, problems = read(*good, ARGUMENTS_LAST % (3, args), ARGUMENTS_LAST % (4, b"{}"))
    assert [record["ts_ns"] for record in records] == [1, 2, 4]
    assert [(p.line, p.field) for p in problems] == [(4, field)]
    assert problems[0].message.startswith(message)


def test_fields_after_the_arguments_count_as_anywhere() -> None:
    nested = b'{"ts_ns":3,"type":"syscall","name":"ioctl","phase":"I","args":{"x":{"b":1,"args":{"c":2}}}}'
    records, problems = read(
        ARGUMENTS_LAST % (1, b'{"a":1}'), ARGUMENTS_LAST % (2, b'{"a":1},"pid":7'), nested
    )
    assert problems == []
    assert [(record.get("pid"), record["args"]) for record in records] == [
        (1, {"a": 1}),
        (7, {"a": 1}),
        (None, {"x": {"b": 1, "args": {"c": 2}}}),
    ]


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        (TIME_FIRST % 7 + b"}", "", "is not JSON"),
        (b"x" + TIME_FIRST % 7, "", "is not JSON"),
        (b'{"ts_ns":007,' + (TIME_FIRST % 7)[11:], "", "is not JSON"),
        (b'{"ts_ns":-7,' + (TIME_FIRST % 7)[11:], "ts_ns", "must be at least 0"),
        (b'{"ts_ns":7.0,' + (TIME_FIRST % 7)[11:], "ts_ns", "must be an integer"),
        (b'{"ts_ns":9999999999999999999,' + (TIME_FIRST % 7)[11:], "ts_ns", "must be at most"),
        ((TIME_FIRST % 7).replace(b'"tid":1', b'"tid":"1"'), "tid", "must be an integer"),
        ((TIME_FIRST % 7).replace(b'"tid":1', b'"tid":1,"ts_ns":"x"'), "ts_ns", "must be an integer"),
    ],
)
def test_only_the_bad_line_is_lost_where_its_time_comes_first(line: bytes, field: str, message: str) -> None:
    records, problems = read(TIME_FIRST % 1, TIME_FIRST % 2, line, TIME_FIRST % 3, b"")
    assert [record["ts_ns"] for record in records] == [1, 2, 3]
    assert [(p.line, p.field) for p in problems] == [(4, field)]
    assert problems[0].message.startswith(message)


def test_a_second_time_in_a_line_is_the_one_that_counts() -> None:
    twice, back = ((TIME_FIRST % 5)[:-1] + b',"ts_ns":%d}' % ns for ns in (8, 0))
    records, problems = read(twice, twice, TIME_FIRST % 6, back, b"")
    assert ([record["ts_ns"] for record in records], problems) == ([8, 8, 6, 0], [])


@pytest.mark.parametrize("name", ["dur_ns", "launch", "args", "pid", "name"])
def test_the_second_of_two_equal_fields_counts(name: str) -> None:
    values = {"dur_ns": b"%d", "launch": b"%d", "pid": b"%d", "args": b'{"n":%d}', "name": b'"n%d"'}
    field = b',"%b":%b' % (name.encode(), values[name])
    head = b'{"ts_ns":4,"type":"kernel","phase":"X","name":"f","dur_ns":1'
    records, problems = read(*(head + field % 7 + field % last + b"}" for last in (0, 9, 0)), b"")
    want = {"args": lambda n: {"n": n}, "name": lambda n: f"n{n}"}.get(name, lambda n: n)
    assert ([record[name] for record in records], problems) == ([want(0), want(9), want(0)], [])


@pytest.mark.parametrize(
    "rest",
    [
        b',"type":"kernel", "name":"f","phase":"I"}',
        b',"type":"kernel","name":"\\u0066","phase":"I"}',
        b',"type":"kernel","n\\u0061me":"f","phase":"I"}',
        b',"type":"kernel","name":"f","phase":"I","extra":{"a":[1,{"b":2}]}}',
        b',"type":"kernel","name":"f","phase":"I","extra":1.5}',
        b',"type":"kernel","name":"f","phase":"I","args":{}}',
        b',"phase":"I","name":"f","type":"kernel"}\r',
    ],
)
def test_a_line_means_the_same_however_it_is_written(rest: bytes) -> None:
    plain = b'{"ts_ns":%d,"type":"kernel","name":"f","phase":"I"}'
    lines = [plain % 1, b'{"ts_ns":2' + rest, plain % 3, b'{"ts_ns":4' + rest, b' {"ts_ns" :5' + rest]
    recording = tracepipe1.read(io.BytesIO(HEADER + b"\n" + b"\n".join(lines) + b"\n"))
    (batch,) = recording.batches
    event = {"type": "kernel", "name": "f", "phase": "I"}
    assert records_of(batch, recording.tables) == [event | {"ts_ns": ns} for ns in range(1, 6)]
    assert batch.problems == []


def test_warps_come_as_columns() -> None:
    line = warps(
        gpu=1, sm=[3, 4], exit_count=[2, 0], exit_ns=[7, 8], exit_mask=[1, (1 << 32) - 1], args={"n": 1}
    )
    recording = tracepipe1.read(io.BytesIO(HEADER + b"\n" + GOOD + b"\n" + line + b"\n" + GOOD_AFTER + b"\n"))
    (batch,) = recording.batches
    assert batch.events.ts_ns.tolist() == [1, 5, 2]
    assert batch.events.shape.tolist() == [0, SPECIAL, 0]
    (one,) = batch.others
    assert isinstance(one, Warps)
    assert one.launched == {"type": "gpu_warp", "name": "k", "gpu": 1, "args": {"n": 1}}
    assert (one.ts_ns, one.warp.tolist(), one.slot, one.entry_mask) == (5, [0, 1], None, None)
    assert record_of_warps(one) == orjson.loads(line)


@pytest.mark.parametrize("first", ["ts_ns", "type"])
def test_each_of_many_batches_of_warps_can_be_read_alone(first: str) -> None:
    good: Record = {"ts_ns": 7, "type": "gpu_warp", "name": "k", "launch": 3, "grid": [1, 1, 1]}
    good |= {"warp": [0], "entry_ns": [0], "exit_ns": [7]}
    records = [
        good,
        good | {"launch": 4, "warp": [0, 1, 2], "entry_ns": [0, 1, 2], "exit_ns": [7, 8, 9]},
        good | {"ts_ns": 8, "launch": (1 << 64) - 1},
        {name: value for name, value in good.items() if name != "launch"} | {"args": {"launch": 5}},
        good | {"sm": [1 << 20]},
        good | {"entry_ns": [0, 1]},
        good | {"exit_count": [2], "exit_ns": [7, 9], "exit_clk": [7, 8], "launch": 0},
        good | {"exit_count": [2], "exit_clk": [7, 8]},
        good | {"grid": [1, 1]},
        good | {"name": "j", "warp": [], "entry_ns": [], "exit_ns": []},
        good,
    ]
    text = b"\n".join(orjson.dumps({first: one[first]} | one) for one in records)
    twice = text.replace(b'"launch":4', b'"launch":9,"launch":4', 1)
    recording = tracepipe1.read(io.BytesIO(HEADER + b"\n" + twice + b"\n"))
    (batch,) = recording.batches
    assert [problem.line for problem in batch.problems] == [6, 7, 9, 10]
    assert records_of(batch, recording.tables) == [records[at] for at in (0, 1, 2, 3, 6, 9, 10)]
    assert len(recording.tables.shapes) == 0  # none of them is taken for the shape of an event


@pytest.mark.parametrize("sizes", [[5], [9, 9], [1 << 19, 9, 9], [9, 1 << 19, 9], [1 << 17] * 3])
def test_a_long_line_of_warps_is_read_alone(sizes: list[int]) -> None:
    parts = [part.tolist() for part in NativeWarpLines.parts(np.array(sizes, np.int64))]
    assert [at for part in parts for at in part] == list(range(len(sizes)))
    assert all(len(part) == 1 for part in parts if max(sizes[at] for at in part) > 1 << 18)
    assert all(sum(sizes[at] for at in part) <= 1 << 18 for part in parts if len(part) > 1)


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"range_open": [0, 0, 1]},
        {"exit_count": [2, 0], "exit_clk": [3, 50], "range_count": [3, 0]},
        {"range_count": [0, 0], "range_name": [], "range_clk": [], "range_dur_clk": []},
        {"range_name": [1, 1, 1], "exit_clk": [5, 12]},
    ],
)
def test_ranges_come_with_their_warps(columns: dict[str, object]) -> None:
    recording = tracepipe1.read(io.BytesIO(HEADER + b"\n" + ranges(**columns) + b"\n"))
    (batch,) = recording.batches
    (one,) = batch.others
    assert isinstance(one, Warps)
    assert record_of_warps(one) == orjson.loads(ranges(**columns))
    assert batch.problems == []


@pytest.mark.parametrize("limit", [(1 << 63) - 1, 1 << 63])
def test_a_column_holds_up_to_63_bits(limit: int) -> None:
    records, problems = read(warps(warp=[0, limit], entry_clk=[limit, 0]), b"")
    if limit >> 63:
        assert (records, [(p.line, p.field) for p in problems]) == ([], [(2, "warp[1]")])
    else:
        assert [(r["warp"], r["entry_clk"]) for r in records] == [([0, limit], [limit, 0])]


@pytest.mark.parametrize("name", ["H2D", "HtoD", "host_to_device", "cudaMemcpyHostToDevice"])
def test_a_direction_has_one_name(name: str) -> None:
    copy = {"ts_ns": 1, "type": "transfer", "name": name, "phase": "X", "dur_ns": 2}
    records, problems = read(orjson.dumps(copy), orjson.dumps({**copy, "type": "kernel"}))
    assert ([record["name"] for record in records], problems) == (["HtoD", name], [])
