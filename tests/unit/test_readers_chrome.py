"""Chrome's trace JSON and PyTorch's: every form, exact times, and damage of which nothing else is lost."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import read_all
from tests.support.cores import running
from tracepipe.event.model import Problem, Record
from tracepipe.readers import chrome, ids, json_elements, recognise
from tracepipe.readers.json_elements import JsonElements, ns_of_text, objects

EVENT = {"ph": "X", "name": "f", "pid": 7, "tid": 8, "ts": 1, "dur": 2}


def read(data: bytes | list[Any] | dict[str, Any]) -> tuple[list[Record], list[Problem]]:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return read_all(chrome.read(io.BytesIO(text)))


def events(*some: dict[str, Any]) -> list[Record]:
    records, problems = read([EVENT | one for one in some])
    assert [problem for problem in problems if problem.skipped] == []
    return [record for record in records if record["type"] != "name"]


def kineto(*some: dict[str, Any], **members: Any) -> list[Record]:
    records, problems = read({"schemaVersion": 1, **members, "traceEvents": list(some)})
    assert problems == []
    return [record for record in records if record["type"] != "name"]


@pytest.mark.usefixtures("core")
def test_the_event_that_a_stream_waits_for_is_called_as_in_recordings() -> None:
    wait = {"stream": 20, "correlation": 4, "device": 0, "context": 1, "wait_on_stream": 7}
    wait |= {"wait_on_cuda_event_record_corr_id": 3, "wait_on_cuda_event_id": 5}
    row = {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 20, "ts": 1, "dur": 1}
    found = kineto(row | {"args": wait}, row | {"ts": 3, "args": wait})
    event = {key: value for key, value in wait.items() if key != "wait_on_cuda_event_id"} | {"event": 5}
    assert [(one["gpu"], one["stream"], one["args"]) for one in found] == [(0, 20, event)] * 2


# Forms ------------------------------------------------------------------------------------------------------

ONE, TWO = b'{"ph":"X","name":"one","ts":1,"dur":1}', b'{"ph":"X","name":"two","ts":2,"dur":1}'


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        b"[" + ONE + b"," + TWO + b"]",
        b"[" + ONE + b"," + TWO,
        b"[" + ONE + b",\n" + TWO + b",\n",
        b"\xef\xbb\xbf [\n " + ONE + b" , " + TWO + b" ,\n ]\n",
        b'{"traceEvents":[' + ONE + b"," + TWO + b'],"displayTimeUnit":"ns"}',
        b'{"otherData":{"a":[1,"}"]},\n"traceEvents": [\n' + ONE + b",\n" + TWO + b"]}",
        json.dumps({"traceEvents": [json.loads(ONE), json.loads(TWO)]}, indent=4).encode(),
        b'{"long":"' + b'x\\"' * 800_000 + b'","traceEvents":[' + ONE + b"," + TWO + b"]}",
    ],
)
@pytest.mark.usefixtures("core")
def test_every_form_of_a_trace_is_read(text: bytes) -> None:
    if len(text) < 1 << 16:
        assert recognise(text).name == "chrome"
    records, problems = read(text)
    assert [record["name"] for record in records] == ["one", "two"]
    too_long = "1 member around the events is not read: there is more text than can be kept"
    assert [one.message for one in problems] == ([too_long] if len(text) > 1 << 20 else [])


@pytest.mark.parametrize(
    "text",
    [
        b'{"ts":1,"type":"userspace","name":"f"}\n{"ts":2,"type":"userspace","name":"g"}\n',
        b"[1,2]",
        b"{}",
        b"[]",
    ],
)
def test_other_json_is_not_taken_for_a_trace(text: bytes) -> None:
    assert not chrome.sniff(text)


@given(st.lists(st.sampled_from(list(b'{}[]",:\\ \nab')), max_size=60).map(bytes), st.integers(0, 8))
def test_both_cores_find_the_same_objects(text: bytes, at: int) -> None:
    found = []
    for core in ("pure", "native"):
        with running(core):
            starts, ends, stopped, is_open = objects(text, min(at, len(text)))
            found.append((starts.tolist(), ends.tolist(), stopped, is_open))
    assert found[0] == found[1]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_may_end_anywhere(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_elements, "CHUNK_BYTES", chunk)
    text = b'{"a":{"b":[1,"x]"]},"c":"\\"","d":1.5,"traceEvents":[' + ONE + b" ,\n" + TWO + b'],"e":{"f":2}}'
    elements = JsonElements(io.BytesIO(text))
    assert elements.begin()
    assert elements.members == {"a": {"b": [1, "x]"]}, "c": '"', "d": 1.5}
    assert [text for batch in elements.batches() for _, text in batch.texts()] == [ONE, TWO]
    assert elements.members["e"] == {"f": 2}


# Times ------------------------------------------------------------------------------------------------------


@given(
    st.decimals("-4000000000000000", "4000000000000000", places=3), st.sampled_from(["{}", '"{}"', "{:e}"])
)
def test_no_nanosecond_is_lost(us: Decimal, form: str) -> None:
    text = f'[{{"ph":"X","name":"f","ts":{form.format(us)},"dur":0}}]'.encode()
    # What is below 0 is moved there with all that comes after it.
    earlier_ns = max(0, -int((us * 1000).to_integral_value()))
    records, problems = read(text)
    assert [problem.field for problem in problems] == ["ts"] * (earlier_ns > 0)
    assert records[0]["ts_ns"] == int((us * 1000).to_integral_value()) + earlier_ns


@given(st.decimals("0", "9000000000", places=6))
def test_finer_times_are_rounded(us: Decimal) -> None:
    assert ns_of_text(str(us)) == int((us * 1000).to_integral_value(ROUND_HALF_UP))


def test_a_key_of_another_object_is_not_taken_for_the_time() -> None:
    text = b'[{"ph":"X","args":{"ts":1712195495519689.048},"name":"f","ts":1712195495519689.047,"dur":1}]'
    # Both are one double: the digits of the first are those of the argument.
    assert read(text)[0][0]["ts_ns"] in (1712195495519689047, 1712195495519689048)
    text = b'[{"ph":"X","args":{"ts":1712195495519690.048},"name":"f","ts":1712195495519689.047,"dur":1}]'
    assert read(text)[0][0]["ts_ns"] == 1712195495519689047


@pytest.mark.parametrize(
    ("members", "us", "ns"),
    [
        ({}, 1695835542514261, 1695835542514261000),
        ({"baseTimeNanoseconds": 1000000000000000000}, 5.001, 1000000000000005001),
        ({"baseTimeNanoseconds": 1000000000000000000}, 1000000000000005, 1000000000000005000),
    ],
)
def test_the_three_eras_of_pytorchs_times(members: dict[str, Any], us: float, ns: int) -> None:
    (record,) = kineto({**EVENT, "cat": "cpu_op", "ts": us}, **members)
    assert record["ts_ns"] == ns
    recording = chrome.read(
        io.BytesIO(json.dumps({"schemaVersion": 1, **members, "traceEvents": []}).encode())
    )
    assert recording.header.clock == "realtime"


def test_a_kernel_at_zero_does_not_stretch_the_trace() -> None:
    at_zero = {**EVENT, "cat": "kernel", "args": {"device": 0, "stream": 7}, "ts": 0, "dur": 0}
    records, problems = read({"schemaVersion": 1, "traceEvents": [EVENT | {"ts": 1695835542514261}, at_zero]})
    assert [record["ts_ns"] for record in records] == [1695835542514261000] * 2
    assert records[0]["args"] == {"time_not_known": True}
    assert [problem.message[:28] for problem in problems] == ["1 event is at time 0, far be"]


@pytest.mark.parametrize(
    ("dur", "args"),
    [
        (-2.5, {"negative_duration_ns": -2500}),
        (10**15, {"impossible_duration_ns": 10**18}),
        ("soon", {"impossible_duration": "soon"}),
    ],
)
def test_an_impossible_duration_is_kept_marked_and_reported(dur: Any, args: dict[str, Any]) -> None:
    records, problems = read([EVENT | {"dur": dur}])
    assert (records[0]["dur_ns"], records[0]["args"]) == (0, args)
    assert [(problem.skipped, problem.message[:10]) for problem in problems] == [(False, "1 slice ha")]


# Damage -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b'{"ph":"X","name":"bad","ts":1,"args":{"a" "b"}}', "is not JSON (at byte 41)"),
        (b'{"ph":"X","name":"bad', "is not JSON (at byte 41)"),
        (b'{"ph":"X","name":"bad","args":{"a":1}', "is not JSON (at byte 41)"),
        (b'{"ph":"X","name":"bad","dur":1}', "ts: is missing (at byte 41)"),
        (b'{"name":"bad","ts":1}', "ph: is missing, or is not a string (at byte 41)"),
        (b'{"ph":"Q","name":"bad","ts":1}', "ph: 'Q' is not a phase that is read (at byte 41)"),
        (b"17", "is not an event (at byte 41)"),
    ],
)
def test_only_what_is_broken_is_lost(broken: bytes, message: str) -> None:
    for end in (b"]", b""):
        records, problems = read(b"[" + ONE + b",\n" + broken + b",\n" + TWO + b"\n" + end)
        assert [record["name"] for record in records] == ["one", "two"]
        where = [(problem.line, problem.message) for problem in problems]
        # What is open to the end is not known to be so before.
        assert where in ([(2, message)], [(2, message.replace("is not JSON", "does not end"))])


@pytest.mark.parametrize(
    ("form", "skipped"),
    [
        ("[A,[B],C]", 1),
        ("[[A,B],[C]]", 2),
        ("[A]\n[B,C]", 1),
        ('[A,"]","{",B,5,[6],C]', 4),
        ('{"traceEvents":[A,[B],C],"x":1}', 1),
        ('{"traceEvents":[A],"x":1,B,C]}', 0),
        ('{"traceEvents":[A,B,C', 1),
        ('{"traceEvents":[A,B,C]', 1),
        ('{"traceEvents":[A,B,C,{"ph":', 1),
        ('{"traceEvents":[A],"x":tru,B,C]}', 0),
        ('{"traceEvents":[A,B]}{"traceEvents":[C]}', 0),
        ('{"traceEvents":[A,B,C]}D', 1),
        ('{"traceEvents":[A,B,C]} 5', 1),
        ('{"traceEvents":[A,B,C],"x":1}{"traceEvents":[D]}', 1),
    ],
)
def test_a_bracket_in_a_wrong_place_ends_nothing_unheard(form: str, skipped: int) -> None:
    for name in "ABCD":
        text = f'{{"ph":"i","name":"{name.lower()}","pid":1,"tid":1,"ts":1}}'
        form = form.replace(name, text)
    records, problems = read(form.encode())
    assert [record["name"] for record in records if record["type"] == "hook"] == ["a", "b", "c"]
    assert sum(problem.skipped for problem in problems) == skipped


@pytest.mark.parametrize("chunk", [7, 1 << 17])
def test_events_after_the_end_of_a_trace_are_counted(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_elements, "CHUNK_BYTES", chunk)
    # Two writers had the file open: the longer text of one stands behind that of the other.
    longer = b'"ph": "X", "name": "three"},\n {"ph"  :"X","name":"four"}]}\n{"ph":"i"}'
    records, problems = read(b'{"x":1,"traceEvents":[' + ONE + b"," + TWO + b"]}" + longer)
    assert [record["name"] for record in records] == ["one", "two"]
    message = "another trace follows the first one: 3 events are not read"
    assert problems == [Problem(0, "", message)]


def test_a_trace_that_was_cut_off_is_reported() -> None:
    records, problems = read(b"[" + ONE + b",\n" + TWO[:-9])
    assert [record["name"] for record in records] == ["one"]
    assert problems == [Problem(2, "", "was cut off in the middle of the event (at byte 41)")]


def test_bytes_that_are_no_text_are_replaced() -> None:
    records, problems = read(b'[{"ph":"i","name":"a\xff","ts":1,"args":{"x":NaN,"y":"\\ud800"}}]')
    assert (records[0]["name"], records[0]["args"]) == ("a�", {"x": "NaN", "y": "?"})
    assert problems == []


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("written", "value"),
    [
        *[
            (word, word)
            for word in ("inf", "-Infinity", "-nan(ind)", "1.#QNAN", "AllReduce", "1e999", "0x1F")
        ],
        *[("None", None), ("True", True), ("False", False), ("undefined", None), ("null", None)],
        *[("+1.5", 1.5), (".75", 0.75), ("-050", -50), ("246.", 246), ("00", 0), ("01e2", 100.0)],
        *[("[,1,,2 , ]", [1, 2]), ('{,"b":1,"c":{},,}', {"b": 1, "c": {}}), ('"\x01\t\n"', "\x01\t\n")],
        ('"x,]" ,', "x,]"),
        *[(r'"C:\Users\new\\x \"y\\"', r'C:\Users\new\\x "y' + "\\" * 2), (r'"q\u12"', r"q\u12")],
    ],
)
def test_what_only_a_strict_parser_refuses_is_read(written: str, value: Any) -> None:
    text = f'[,{{"ph":"XY","name":"a","ts":1,"dur":.75,"args":{{"of":{written},"next":7,}},}},\n,'.encode()
    assert recognise(text).name == "chrome"
    (record,), problems = read(text)
    assert (record["ts_ns"], record["dur_ns"], record["args"]) == (1000, 750, {"of": value, "next": 7})
    assert problems == []


@pytest.mark.usefixtures("core")
def test_whole_ids_are_the_same_with_a_fraction() -> None:
    records, problems = read([EVENT | {"pid": 7.0, "tid": 8.0}, EVENT | {"pid": 7.5, "tid": 8}])
    assert ((records[0]["pid"], records[0]["tid"]), problems) == ((7, 8), [])
    assert records[1]["pid"] != 7


def test_whole_numbers_of_kernels_are_the_same_with_a_fraction() -> None:
    of = {"correlation": 5.0, "device": 0.0, "stream": 7.0}
    kernel = EVENT | {"cat": "kernel", "pid": 0.0, "tid": 7.0, "args": of}
    call = EVENT | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": 5.0}}
    called, found = kineto(call, kernel)
    assert (found["type"], found["gpu"], found["stream"], found["launch"]) == ("gpu_kernel", 0, 7, 5)
    assert called["launch"] == 5


def test_a_time_of_unusual_form_keeps_its_nanoseconds() -> None:
    records, _ = read(b'[{"ph":"i","name":"f","ts":+01712195495519689.047,"args":{"a":inf}}]')
    assert records[0]["ts_ns"] == 1712195495519689047


@pytest.mark.usefixtures("core")
def test_a_counter_keeps_its_series_beside_one_that_is_no_number() -> None:
    texts = {"b": ".75", "c": "246.", "d": "050", "e": "+10.5", "f": "1e3", "bad": "n/a", "none": None}
    records, problems = read([EVENT | {"ph": "C", "args": {"a": 5, **texts}}])
    assert records[0]["args"] == {"a": 5, "b": 0.75, "c": 246, "d": 50, "e": 10.5, "f": 1000}
    assert [one.message for one in problems] == ["2 values of counters are left out: they are not numbers"]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("is_before", [True, False])
def test_members_mean_the_same_before_and_after_the_events(is_before: bool) -> None:
    launch = {"correlation": 5}
    some = [
        EVENT | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": launch, "sf": 7},
        EVENT | {"cat": "kernel", "args": launch | {"device": 0, "stream": 7}},
        EVENT | {"ph": "B", "cat": "cuda_driver", "name": "cuLaunchKernel", "args": launch},
    ]
    frames = {"1": {"name": "main"}, "7": {"name": "step", "parent": "1"}, "8": {"name": "x", "parent": "8"}}
    members = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "H100"}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "baseTimeNanoseconds": 1_000_000_000_000_000_000,
        "stackFrames": frames,
        "systemTraceEvents": "# tracer: nop\na-7 [000] 0.1: sched_switch: x\n\n",
    }
    whole = {**members, "traceEvents": some} if is_before else {"traceEvents": some, **members}
    recording = chrome.read(io.BytesIO(json.dumps(whole).encode()))
    header = recording.header
    assert (header.rank, header.world_size, header.clock) == (3, 8, "realtime")
    assert [gpu["name"] for gpu in header.gpus] == ["H100"]
    records, problems = read_all(recording)
    launches = [record["launch"] for record in records]
    assert launches == [5 | 3 << 40] * 3
    assert {record["ts_ns"] for record in records} == {1_000_000_000_000_001_000}
    (call,) = [record for record in records if record["name"] == "cudaLaunchKernel"]
    assert call["args"]["stack"] == ["step", "main"]
    assert "1 line of systemTraceEvents is not read" in [problem.message for problem in problems]


@pytest.mark.usefixtures("core")
def test_ftrace_beside_the_events_is_read() -> None:
    switch = "prev_comm=f g prev_pid=8 prev_prio=120 prev_state={} ==> next_comm=io next_pid=9 next_prio=-1"
    lines = [
        "f g-8 (7) [001] d..3 0.000001: sched_waking: comm=io pid=9 prio=120 success=1 target_cpu=002",
        f"f g-8     [001] d..3 0.000002: sched_switch: {switch.format('D|K')}",
        "io-9 [002] 0.0000025: sched_wakeup_new: comm=x-1 y pid=10 prio=120 target_cpu=000",
        f"f g-8     [002] d..3 0.000003: sched_switch: {switch.format('R+')}",
        *("f-8 [001] 0.000004: print: 0xffff: S|7|load|5", "f-8 [001] 0.000005: print: F|7|load|5"),
        *("io-9 [002] 0.1: sched_switch: x", "io-9 [002] 0.1: irq: y", "io-9 [002] 0.1: print: C|7|n|x"),
    ]
    records, problems = read({"traceEvents": [EVENT], "systemTraceEvents": "\n".join(["# ", *lines])})
    kept = ("phase", "ts_ns", "dur_ns", "pid", "tid", "cpu", "args")
    found = [[record.get(key) for key in kept] for record in records if record["type"] != "name"]
    thread, off = [7, 8, 1], {"prev_state": "disk"}
    assert found == [
        ["X", 1000, 2000, 7, 8, None, None],
        ["I", 1000, None, None, 9, 1, {"by_tid": 8, "target_cpu": 2}],
        ["E", 2000, None, *thread, off],
        ["B", 2000, None, None, 9, 1, {"prio": -1}],
        ["I", 2500, None, None, 10, 2, {"by_tid": 9, "target_cpu": 0}],
        ["E", 3000, None, 7, 8, 2, {"prev_state": "preempted"}],
        ["B", 3000, None, None, 9, 2, {"prio": -1}],
        ["X", 4000, 1000, 7, None, None, None],
    ]
    assert {record["comm"] for record in records if record.get("tid") == 9 and record["phase"] == "B"} == {
        "io"
    }
    assert [record["name"] for record in records if record["type"] == "name"] == ["f g"]
    assert [problem.message for problem in problems] == ["3 lines of systemTraceEvents are not read"]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("last", "members"),
    [([], {"distributedInfo": {"rank": 0}}), ([EVENT | {"cat": "xpu_runtime"}], {}), ([], {})],
)
def test_a_file_of_pytorch_is_recognised_wherever_that_shows(
    last: list[dict[str, Any]], members: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_elements, "CHUNK_BYTES", 64)
    kernel = EVENT | {"cat": "kernel", "pid": 0, "args": {"device": 0, "stream": 7}}
    records, problems = read({"traceEvents": [EVENT | {"cat": "Trace"}, kernel, *last], **members})
    is_of_pytorch = bool(last or members)
    assert problems == []
    assert [(record["type"], record.get("layer")) for record in records[:2]] == (
        [("hook", "Trace"), ("gpu_kernel", None)] if is_of_pytorch else [("hook", "events")] * 2
    )


def test_a_stack_that_never_ends_is_cut() -> None:
    frames = {"8": {"name": "x" * 1000, "parent": 8}}
    records, _ = read({"traceEvents": [EVENT | {"sf": "8"}], "stackFrames": frames})
    assert records[0]["args"]["stack"] == ["x" * 1000] * 5


def test_problems_beyond_the_first_are_counted() -> None:
    _, problems = read([{"ph": "?"}] * 1030)
    assert [problem.message for problem in problems[1024:]] == ["6 more objects cannot be read"]


# Phases -----------------------------------------------------------------------------------------------------


def test_begins_and_ends_become_slices_whatever_their_order() -> None:
    records = events(
        {"ph": "E", "ts": 9, "args": {"b": 2}},
        {"ph": "B", "ts": 1, "args": {"a": 1, "b": 1}},
        {"ph": "B", "ts": 2, "name": "g"},
        {"ph": "E", "ts": 3, "name": "g"},
        {"ph": "X", "ts": 4, "name": "h", "dur": 1},
    )
    assert [(r["name"], r["ts_ns"], r["dur_ns"], r.get("args")) for r in records] == [
        ("f", 1000, 8000, {"a": 1, "b": 2}),
        ("g", 2000, 1000, None),
        ("h", 4000, 1000, None),
    ]


@pytest.mark.parametrize(
    ("begun", "slices"),
    [
        # A small letter begins a slice, a capital one ends it. Slices: begin, end, whether it is unclosed.
        ("abAB", [("a", 0, 2, False), ("b", 1, 3, False)]),
        ("abcACB", [("a", 0, 3, False), ("b", 1, 5, False), ("c", 2, 4, False)]),
        ("abA", [("a", 0, 2, False), ("b", 1, 2, True)]),
        ("abAcbBC", [("a", 0, 2, False), ("b", 1, 2, True), ("c", 3, 6, False), ("b", 4, 5, False)]),
        ("ababABBA", [("a", 0, 7, False), ("b", 1, 5, False), ("a", 2, 4, False), ("b", 3, 6, False)]),
    ],
)
@pytest.mark.parametrize("phases", ["BE", "be"])
@pytest.mark.parametrize("open_max", [1 << 15, 4])
def test_an_end_ends_the_begin_of_its_name(
    begun: str, slices: list[Any], phases: str, open_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome, "_OPEN_MAX", open_max)
    records = events(
        *[
            {"ph": phases[letter.isupper()], "name": letter.lower(), "ts": at, "id": 1}
            for at, letter in enumerate(begun)
        ]
    )
    ends = [
        (one["ts_ns"], one["ts_ns"] + one["dur_ns"], "unclosed" in one.get("args", {})) for one in records
    ]
    assert [
        (one["name"], start // 1000, end // 1000, unclosed)
        for one, (start, end, unclosed) in zip(records, ends, strict=True)
    ] == slices


def test_begins_that_wait_for_ends_of_their_own_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "_OPEN_MAX", 3)
    names = [name for at in range(5) for name in ("a", f"b{at}", "A")]
    some = [
        {"ph": "E" if name == "A" else "B", "name": name.lower(), "ts": at} for at, name in enumerate(names)
    ]
    records = events(*some, {"ph": "E", "name": "b0", "ts": 20}, {"ph": "E", "name": "b4", "ts": 21})
    lengths = [(one["name"], one.get("dur_ns")) for one in records if one["name"] != "a"]
    assert lengths == [*[(f"b{at}", 1000) for at in range(4)], ("b4", 8000), ("b0", None)]


def test_arguments_of_begin_and_end_are_merged_in_depth() -> None:
    begin = {"p": {"p1": "hello", "p2": 1, "q": {"a": 1}}, "l": [1, 2], "s": 1, "d": {"x": 1}}
    end = {"p": {"p3": "hi", "p2": 5, "q": {"b": 2}}, "l": [3], "s": 2, "d": 7}
    (record,) = events({"ph": "B", "args": begin}, {"ph": "E", "ts": 9, "args": end})
    args = {"p": {"p1": "hello", "p2": 5, "q": {"a": 1, "b": 2}, "p3": "hi"}, "l": [1, 2, 3], "s": 2, "d": 7}
    assert {key: record["args"][key] for key in args} == args


def test_asynchronous_slices_that_overlap_have_rows_of_their_own() -> None:
    records = events(
        {"ph": "b", "cat": "net", "id": 1, "ts": 1},
        {"ph": "b", "cat": "net", "id": 2, "ts": 2},
        {"ph": "n", "cat": "net", "id": 2, "ts": 3, "name": "mark"},
        {"ph": "e", "cat": "net", "id": 1, "ts": 4},
        {"ph": "b", "cat": "net", "id": 3, "ts": 5},
        {"ph": "e", "cat": "net", "id": 2, "ts": 6},
        {"ph": "e", "cat": "net", "id": 3, "ts": 7},
    )
    assert [(r["name"], r["phase"], r["ts_ns"], r["range"], r["domain"]) for r in records] == [
        ("f", "X", 1000, 0, "net"),
        ("f", "X", 2000, 1, "net"),
        ("mark", "I", 3000, 1, "net"),
        ("f", "X", 5000, 0, "net"),
    ]


def test_lifecycle_events_of_an_object_are_instants() -> None:
    records = events(
        {"ph": "N", "id": "0x1", "ts": 1},
        {"ph": "O", "id": "0x1", "ts": 2, "args": {"snapshot": {"x": 1}}},
        {"ph": "D", "id": "0x1", "ts": 3},
    )
    assert [(record["phase"], record["args"]) for record in records] == [
        ("I", {"object": "created", "id": "0x1"}),
        ("I", {"object": "snapshot", "id": "0x1", "snapshot": {"x": 1}}),
        ("I", {"object": "destroyed", "id": "0x1"}),
    ]


def flows_of(records: list[Record]) -> list[tuple[int, int]]:
    """The times of both ends of each flow."""
    ends: dict[int, list[int]] = {}
    for one in sorted(records, key=lambda record: record.get("phase") != "s"):
        if "flow" in one:
            ends.setdefault(one["flow"], []).append(one["ts_ns"])
    return sorted((first, last) for first, last in ends.values())


def test_a_flow_joins_each_end_with_where_its_id_was_last() -> None:
    ends = [(1, "f"), (2, "s"), (3, "t"), (4, "s"), (5, "f"), (6, "f"), (7, "t"), (8, "f")]
    flows = [{"ph": phase, "cat": "c", "id": 5, "ts": ts} for ts, phase in ends]
    records = events(*flows, {"ph": "f", "cat": "d", "id": 5, "ts": 9})
    alone = [one["ts_ns"] for one in records if [other["flow"] for other in records].count(one["flow"]) == 1]
    assert alone == [1_000, 4_000, 9_000]
    joined = [one for one in records if one["ts_ns"] not in alone]
    assert flows_of(joined) == [
        (2_000, 3_000),
        (3_000, 5_000),
        (3_000, 6_000),
        (3_000, 7_000),
        (7_000, 8_000),
    ]


def test_an_id_of_a_flow_that_is_text_is_hexadecimal() -> None:
    ids = [(7, "0x7"), ("10", 16), ("0XaB", 171), (-1, "-1"), ("way", "way")]
    ends = [
        {"ph": phase, "cat": "c", "id": id, "ts": at + later}
        for at, pair in enumerate(ids, 1)
        for phase, id, later in (("s", pair[0], 0), ("f", pair[1], 0.5))
    ]
    found = flows_of(events(*ends))
    assert found == [(at * 1000, at * 1000 + 500) for at in range(1, len(ids) + 1)]


SLICES = [
    {"name": "outer", "ts": 10, "dur": 50},
    {"name": "inner", "ts": 12, "dur": 5, "tid": 8},
    {"name": "gap", "ts": 20, "dur": 3},
    {"name": "next", "ts": 45, "dur": 5, "tid": 9},
]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("end", "ts_ns"),
    [
        ({"ph": "s", "ts": 14}, 12_000),  # the innermost slice
        ({"ph": "s", "ts": 21.5}, 20_000),
        ({"ph": "t", "ts": 30}, 10_000),  # the one around the others, which ended
        ({"ph": "f", "ts": 60, "bp": "e"}, 10_000),  # to the last nanosecond
        ({"ph": "s", "ts": 61}, 61_000),  # none is open
        ({"ph": "s", "ts": 44, "tid": 9}, 44_000),
        ({"ph": "f", "ts": 44, "tid": 9}, 45_000),  # the next one
        ({"ph": "f", "ts": 45, "tid": 9}, 45_000),  # that begins then
        ({"ph": "f", "ts": 46, "tid": 9}, 46_000),  # no other begins
        ({"ph": "f", "ts": 46, "tid": 9, "bp": "e"}, 45_000),
    ],
)
def test_an_end_of_a_flow_belongs_to_the_slice_around_it(end: dict[str, Any], ts_ns: int) -> None:
    some = [{"cat": "c", "id": id, "name": "i", "dur": 0} for id in (7, 8, 9)]
    # The other ends are on a thread without slices.
    other = {"ts": 90, "ph": "f", "tid": 10} if end["ph"] == "s" else {"ts": 1, "ph": "s", "tid": 10}
    records = events(*SLICES, *(flow | one for flow in some for one in (end, other)))
    at = sorted([ts_ns, other["ts"] * 1000])
    assert flows_of(records) == [(at[0], at[1])] * 3
    assert {one["layer"] for one in records} == {"events"}


@pytest.mark.usefixtures("core")
def test_a_slice_takes_all_of_its_flows() -> None:
    slices = [{"name": f"{at}", "ts": at * 10, "dur": 5, "tid": at} for at in range(1, 7)]
    ends = [
        {"ph": phase, "cat": "c", "id": id, "ts": at * 10 + 1, "tid": at, "bp": "e"}
        for id in range(2, 7)
        for phase, at in (("s", 1), ("f", id))
    ]
    assert flows_of(events(*slices, *ends)) == [(10_000, at * 10_000) for at in range(2, 7)]


@pytest.mark.usefixtures("core")
def test_ends_in_slices_without_another_end_are_counted() -> None:
    around, of = {"ph": "X", "name": "around", "ts": 10, "dur": 50}, ((1, "s"), (2, "s"), (2, "s"), (3, "t"))
    starts = [{"ph": phase, "cat": "c", "id": id, "ts": 14} for id, phase in of]
    records, problems = read([{"pid": 1, "tid": 8, **one} for one in (around, *starts)])
    assert not any("flow" in one for one in records)
    assert [problem.message for problem in problems] == [
        "4 ends of flows in slices have no other end: they are not drawn"
    ]


@pytest.mark.parametrize("limit", [0, 1 << 21])
def test_slices_around_flows_are_kept_in_limited_memory(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "_AROUND_BYTES_MAX", limit)
    flow = {"cat": "c", "id": 7}
    records = events(*SLICES, flow | {"ph": "s", "ts": 30}, flow | {"ph": "f", "ts": 70})
    assert flows_of(records) == [(10_000 if limit else 30_000, 70_000)]


def test_few_flows_are_followed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "_STARTS_MAX", 2)
    starts = [{"ph": "s", "cat": "c", "id": id, "ts": id} for id in (1, 2, 3)]
    records = events(*starts, *({"ph": "f", "cat": "c", "id": id, "ts": 10 + id} for id in (1, 2, 3)))
    assert [(one["phase"], one["ts_ns"]) for one in records if one["ts_ns"] % 10_000 == 1_000] == [
        ("s", 1_000), ("f", 11_000),
    ]  # fmt: skip
    alone = [one["flow"] for one in records if one["ts_ns"] % 10_000 == 1_000]
    assert alone[0] != alone[1]


@pytest.mark.usefixtures("core")
def test_a_flow_that_a_slice_states_is_its_own() -> None:
    bound = {"bind_id": "0x7"}
    records = events(
        {"ts": 10, "flow_out": True, **bound},
        {"ts": 20, "flow_in": True, "flow_out": True, **bound},
        {"ph": "B", "ts": 30, "flow_in": True, **bound},
        {"ph": "E", "ts": 35},
        {"ts": 40, **bound},
        {"ts": 45, "flow_in": True, "bind_id": 7},
        {"ph": "i", "ts": 50, "flow_in": True, **bound},
    )
    assert flows_of(records) == [(10_000, 20_000), (20_000, 30_000), (20_000, 45_000)]


def test_ids_that_are_not_numbers_are_names() -> None:
    records, _ = read([EVENT | {"pid": "Spans", "tid": -1}, EVENT | {"pid": "7", "tid": 8}])
    names = {(one["pid"], one.get("tid")): one["name"] for one in records if one["type"] == "name"}
    slices = [(one["pid"], one["tid"]) for one in records if one["type"] == "hook"]
    assert (7, 8) in slices
    (odd,) = [one for one in slices if one != (7, 8)]
    assert (names[odd[0], None], names[odd]) == ("Spans", "-1")


def test_tracks_of_a_file_of_tracepipe_are_those_of_the_recording() -> None:
    def name(pid: int, tid: int, text: str, kind: str = "thread_name") -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}

    gpu, slice = (1 << 23) + 9, {"ph": "X", "ts": 1, "dur": 2, "name": "f", "cat": "userspace"}
    events = [
        name(7, 0, "program", "process_name"), name(7, 3, "io 8 / CUDA API"), name(7, 4, "ranges: x (2)"),
        name(gpu, 0, "GPU 1 H100", "process_name"), name(gpu, 5, "stream 7"), name(gpu, 6, "GPU 1 H100"),
        slice | {"pid": 7, "tid": 3}, slice | {"pid": 7, "tid": 4}, slice | {"pid": gpu, "tid": 5},
        slice | {"pid": gpu, "tid": 6},
        {"ph": "C", "ts": 1, "name": "CPU use", "pid": 7, "args": {"value": 1}},
    ]  # fmt: skip
    other = {"trace_clock": "monotonic", "base_ns": 5_000_000}
    records, _ = read({"otherData": other, "traceEvents": events})
    times = {"ts_ns": 5_001_000, "dur_ns": 2000, "phase": "X", "name": "f"}
    assert [one for one in records if one["type"] != "name"] == [
        {**times, "type": "hook", "pid": 7, "tid": 8, "layer": "CUDA API", "args": {"cat": "userspace"}},
        {**times, "type": "annotation", "pid": 7, "domain": "x", "range": 1, "args": {"cat": "userspace"}},
        {**times, "type": "gpu_kernel", "gpu": 1, "stream": 7},
    ]
    assert {(one["pid"], one.get("tid")): one["name"] for one in records if one["type"] == "name"}[
        7, 8
    ] == "io"


# PyTorch ----------------------------------------------------------------------------------------------------


def test_a_launch_and_its_kernel_have_one_id_of_the_rank() -> None:
    call = {**EVENT, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": 35}}
    kernel_args = {"device": 1, "stream": 7, "correlation": 35, "grid": [2, 1, 1], "block": [64, 1, 1]}
    more = {"registers per thread": 16, "shared memory": 1024, "blocks per SM": 0.5}
    kernel = {**EVENT, "cat": "kernel", "pid": 1, "tid": 7, "name": "k", "ts": 5, "args": kernel_args | more}
    other = {**EVENT, "cat": "cuda_runtime", "name": "cudaMalloc", "ts": 9, "args": {"correlation": 36}}
    records = kineto(call, kernel, other, distributedInfo={"rank": 3})
    assert [record.get("launch") for record in records] == [3 << 40 | 35, 3 << 40 | 35, None]
    assert records[1] == {
        "type": "gpu_kernel",
        "name": "k",
        "phase": "X",
        "ts_ns": 5000,
        "dur_ns": 2000,
        "gpu": 1,
        "stream": 7,
        "grid": [2, 1, 1],
        "block": [64, 1, 1],
        "launch": 3 << 40 | 35,
        "args": {"registers": 16, "shared_bytes": 1024, "blocks per SM": 0.5},
    }


MERGED_ROWS = {
    "rows of their own": [(0, 0, 1000), (1000, 0, 2000)],
    "texts": [("rank 0 GPU", 0, 1000), ("rank 1 GPU", 0, 2000)],
    "devices of their own": [(0, 0, 1000), (1, 1, 2000)],
    "arrows with the same ids": [(0, 0, 1000), (1000, 0, 1000)],
    "one row": [(0, 0, 1000), (0, 0, 2000)],
}
"""The process and `device` of the row of each rank, and the first id of its arrows."""
ORDERS: dict[str, Callable[[int, dict[str, Any]], int]] = {
    "one rank after the other": lambda rank, one: rank,
    "the last rank first": lambda rank, one: -rank,
    "by time": lambda rank, one: one["ts"],
    "ends of arrows first": lambda rank, one: "fXsi".index(one["ph"]),
}
"""How events of ranks are sorted."""


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("rows", "order"),
    # Ids that are open twice at a time say nothing.
    [(rows, order) for rows in MERGED_ROWS for order in ORDERS if "ids" not in rows or "rank" in order],
)
def test_gpus_and_launches_of_merged_ranks_are_told_apart(rows: str, order: str) -> None:
    """Each rank counts launches from 1. The kernels of one run between the calls of the other."""
    some: list[tuple[int, dict[str, Any]]] = []
    for rank, (row, device, first) in enumerate(MERGED_ROWS[rows]):
        call = EVENT | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 100 + rank}
        kernel = EVENT | {"cat": "kernel", "name": f"of {rank}", "pid": row, "tid": 7}
        for number in range(1, 4):
            args = {"correlation": number, "device": device}
            begun, ran = 100 * number + rank, 100 * number + (50, 20)[rank]
            arrow = {"cat": "ac2g", "name": "ac2g", "id": first + number}
            some += [(rank, call | {"ts": begun, "args": args}), (rank, kernel | {"ts": ran, "args": args})]
            some.append((rank, call | arrow | {"ph": "s", "ts": begun}))
            some.append((rank, kernel | arrow | {"ph": "f", "ts": ran}))
        memory = {"Bytes": 8, "Device Type": 1, "Device Id": device}
        instant = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "args": memory}
        some.append((rank, call | instant))
    members = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H100"}]}
    in_order = [one for _, one in sorted(some, key=lambda both: ORDERS[order](*both))]
    recording = chrome.read(io.BytesIO(json.dumps({**members, "traceEvents": in_order}).encode()))
    records, problems = read_all(recording)
    calls = {record["launch"]: record["pid"] for record in records if record["type"] == "userspace"}
    kernels = [record for record in records if record["type"] == "gpu_kernel"]
    assert len(calls) == 6
    assert [(one["name"], calls[one["launch"]]) for one in kernels] == [("of 1", 101), ("of 0", 100)] * 3
    gpus = {one["name"]: one["gpu"] for one in kernels}
    assert sorted(gpus.values()) == ([0, 0] if rows == "one row" else [0, 1])
    memory_of = {one["pid"]: one["gpu"] for one in records if one["type"] == "memory"}
    assert memory_of == {100: gpus["of 0"], 101: gpus["of 1"]}
    is_renumbered = rows not in ("one row", "devices of their own")
    assert [gpu["name"] for gpu in recording.header.gpus] == ["H100"] * (1 + is_renumbered)
    stated = [one.message for one in problems if one.field == "device"]
    assert ["GPU 1 is device 0 of process" in one for one in stated] == [True] * is_renumbered


@pytest.mark.usefixtures("core")
def test_a_process_that_pytorch_does_not_know_is_no_other_rank() -> None:
    calls = [
        EVENT
        | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": pid, "args": {"correlation": number}}
        for number, pid in ((1, 7), (2, -1))
    ]
    kernels = [call | {"cat": "kernel", "pid": 0, "tid": 7, "ts": 9} for call in calls]
    assert [record["launch"] for record in kineto(*calls, *kernels)] == [1, 2, 1, 2]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("names_are_first", [True, False])
def test_gpus_of_xla_are_known_by_the_names_of_their_rows(names_are_first: bool) -> None:
    """JAX and TensorFlow write the numbers of launches as texts."""
    of_rows = {(1, None): "/device:GPU:2", (7, None): "/host:CPU", (9, None): "/device:TPU:0"}
    of_rows |= {(1, 14): "Stream #14(Compute)", (1, 15): "XLA Modules", (9, 15): "XLA Modules"}
    names = []
    for (pid, tid), name in of_rows.items():
        row = {"name": "process_name", "pid": pid} if tid is None else {"name": "thread_name", "tid": tid}
        names.append({"ph": "M", "pid": pid, "args": {"name": name}} | row)
    copy = {"memcpy_details": "kind_src:device kind_dst:pageable size:64", "correlation_id": "6"}
    kernel = {"kernel_details": "regs:32 grid:2,1,1 block:64,1,1", "correlation_id": "5", "hlo_op": "add.1"}
    work = [
        {"pid": 7, "tid": 3, "name": "cuLaunchKernel", "args": {"correlation_id": "5"}},
        {"pid": 7, "tid": 3, "name": "cuLaunchKernel"},
        {"pid": 7, "tid": 3, "name": "cuEventRecord", "args": {"correlation_id": "8"}},
        {"pid": 7, "tid": 3, "name": "$train.py:3 step"},
        {"pid": 1, "tid": 14, "name": "loop_fusion", "args": kernel},
        {"pid": 1, "tid": 14, "name": "MemcpyD2H", "args": copy},
        {"pid": 1, "tid": 15, "name": "jit_step"},
        {"pid": 9, "tid": 15, "name": "jit_step"},
    ]
    events = [EVENT | one for one in work] * 2
    some = [*names, *events] if names_are_first else [*events, *names]
    recording = chrome.read(io.BytesIO(json.dumps(some).encode()))
    assert recording.header.engine == "XLA's profiler"
    records, problems = read_all(recording)
    assert [one for one in problems if one.skipped] == []
    found = [record for record in records if record["type"] != "name"][: len(work)]
    fields = ("type", "name", "layer", "domain", "gpu", "stream", "launch")
    assert [tuple(record.get(key) for key in fields) for record in found] == [
        ("userspace", "cuLaunchKernel", None, None, None, None, 5),
        ("annotation", "cuLaunchKernel", None, "xla", None, None, None),
        ("userspace", "cuEventRecord", None, None, None, None, None),
        ("hook", "train.py:3 step", "python", None, None, None, None),
        ("gpu_kernel", "loop_fusion", None, None, 2, 14, 5),
        ("transfer", "DtoH", None, None, 2, 14, 6),
        ("hook", "jit_step", "XLA Modules", None, None, None, None),
        ("hook", "jit_step", "events", None, None, None, None),
    ]
    assert found[4]["grid"] == [2, 1, 1]
    assert found[4]["args"] == {"registers": 32, "correlation_id": 5, "hlo_op": "add.1"}
    assert found[5]["args"]["size"] == 64


C4, LAUNCH_4 = {"args": {"correlation": 4}}, {"launch": 4}


@pytest.mark.parametrize(
    ("event", "type_", "name", "more"),
    [
        ({"cat": "user_annotation"}, "annotation", "f", {}),
        ({"cat": "cpu_op"}, "annotation", "f", {"domain": "cpu_op"}),
        ({"cat": "python_function"}, "hook", "f", {"layer": "python_function"}),
        ({"cat": "cuda_driver", "name": "cuLaunchKernel"}, "userspace", "cuLaunchKernel", {}),
        (
            {"cat": "xpu_runtime", "name": "urEnqueueFill", **C4},
            "userspace",
            "urEnqueueFill",
            LAUNCH_4,
        ),
        (
            {"cat": "xpu_runtime", "name": "urEnqueueEventsWait", **C4},
            "userspace",
            "urEnqueueEventsWait",
            {},
        ),
        ({"cat": "mtia_runtime", "name": "runtimeLaunch", **C4}, "userspace", "runtimeLaunch", LAUNCH_4),
        ({"cat": "privateuse1_driver", "name": "fMemcpy", **C4}, "userspace", "fMemcpy", LAUNCH_4),
        ({"cat": "Kernel", "tid": "stream 7", "pid": 0}, "gpu_kernel", "f", {"gpu": 0, "stream": 7}),
        ({"cat": "kernel", "name": "_Z3addIfEvPT_.kd", "tid": 1, "pid": 0}, "gpu_kernel", "add<float>", {}),
        (
            {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 3},
            "transfer",
            "HtoD",
            {"gpu": 0, "stream": 3},
        ),
        ({"cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 3}, "transfer", "memset", {}),
    ],
)
def test_categories_are_layers(event: dict[str, Any], type_: str, name: str, more: dict[str, Any]) -> None:
    (record,) = kineto(EVENT | event)
    assert (record["type"], record["name"]) == (type_, name)
    assert {key: record.get(key) for key in more} == more


@pytest.mark.parametrize("gpu_is_last", [True, False])
def test_the_names_of_a_gpu_are_not_those_of_the_process_with_its_number(gpu_is_last: bool) -> None:
    """The process of a container may be process 1, as is the row of GPU 1."""

    def names(label: str, order: int, thread: str) -> list[dict[str, Any]]:
        of = {"process_name": {"name": "python"}, "process_labels": {"labels": label}}
        of |= {"process_sort_index": {"sort_index": order}, "thread_name": {"name": thread}}
        return [{"ph": "M", "name": name, "pid": 1, "tid": 7, "args": args} for name, args in of.items()]

    stated = [names("CPU", 1, "thread 7 (pt_autograd_0)"), names("GPU 1", 5_000_001, "stream 7 ")]
    stated = stated if gpu_is_last else stated[::-1]
    other = {"ph": "M", "name": "process_sort_index", "pid": 2, "args": {"sort_index": 1}}
    events = [*stated[0], *stated[1], other]
    records, _ = read({"schemaVersion": 1, "traceEvents": [*events, {**EVENT, "cat": "cpu_op", "pid": 1}]})
    named = [record for record in records if record["type"] == "name"]
    found = {(one["pid"], one.get("tid")): (one.get("name"), one.get("order")) for one in named}
    thread = ("thread 7 (pt_autograd_0)", None)
    assert found == {(1, None): ("python", 0), (1, 7): thread, (2, None): (None, 0)}


def test_a_thread_that_pytorch_does_not_know_is_not_on_gpu_0() -> None:
    frame = {**EVENT, "cat": "python_function", "pid": 0, "tid": 0}
    kernel = {**EVENT, "cat": "kernel", "pid": 0, "tid": 7, "ts": 5}
    records = kineto(frame, kernel)
    assert [(r["type"], r.get("pid"), r.get("tid"), r.get("gpu")) for r in records] == [
        ("hook", None, None, None),
        ("gpu_kernel", None, None, 0),
    ]


@pytest.mark.parametrize(("name", "is_nvidia"), [("NVIDIA H100", True), ("AMD Instinct MI210", False)])
def test_what_an_sm_holds_is_kept_of_nvidias_gpus(name: str, is_nvidia: bool) -> None:
    """AMD's gfx90a has the same numbers, which are not a compute capability."""
    gpu = {"id": 0, "name": name, "numSms": 104, "computeMajor": 9, "computeMinor": 0}
    gpu |= {"regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 233472, "warpSize": 32}
    data = {"schemaVersion": 1, "deviceProperties": [gpu], "traceEvents": [EVENT]}
    (stated,) = chrome.read(io.BytesIO(json.dumps(data).encode())).header.gpus
    about_sm = {"compute_capability": "9.0", "registers_per_sm": 65536, "shared_bytes_per_sm": 233472}
    assert stated == {"index": 0, "name": name, "sm_count": 104} | (about_sm if is_nvidia else {})


@pytest.mark.usefixtures("core")
def test_allocations_are_those_of_their_gpu() -> None:
    of = {"Bytes": 10, "Addr": 1, "Device Type": 1, "Total Allocated": 10}
    event = EVENT | {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]"}
    devices = [0, 1, 0, 1, "x", -1]
    records = kineto(*[event | {"args": {**of, "Device Id": device}} for device in devices])
    records += kineto(event | {"args": {**of, "Device Type": 0, "Device Id": 0}})
    assert [record.get("gpu") for record in records] == [0, 1, 0, 1, None, None, None]
    assert {record["args"]["size"] for record in records} == {10}


def test_a_collective_keeps_its_details() -> None:
    details = {
        "Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 5,
        "In msg nelems": 64, "Out msg nelems": 64, "dtype": "BFloat16", "Group size": 2,
    }  # fmt: skip
    (record,) = kineto(
        {**EVENT, "cat": "kernel", "args": {"device": 0, "stream": 7, "bytes": 128, **details}}
    )
    assert record["args"] == {**details, "size": 128}


@pytest.mark.parametrize("stream", [-1, 2**64 - 1, "stream 18446744073709551615"])
def test_streams_with_numbers_below_0_are_streams(stream: object) -> None:
    (record,) = kineto({**EVENT, "cat": "kernel", "args": {"device": 0, "stream": stream}})
    assert (record["type"], record["stream"]) == ("gpu_kernel", 999_999_999)
    assert record.get("args", {}) == ({} if isinstance(stream, str) else {"stream": stream})


@pytest.mark.parametrize("device", ["²", "9" * 5000])
def test_a_device_that_is_not_an_index_is_not_a_gpu(device: str) -> None:
    (record,) = kineto({**EVENT, "cat": "kernel", "args": {"device": device, "stream": 7}})
    assert (record["type"], record["args"]["device"]) == ("hook", device)


# What is kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "value"), [("_IDS_MAX", 3), ("_TEXT_MAX", 20)])
def test_processes_beyond_those_that_can_be_distinguished_are_reported(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids, limit, value)
    for count in (3, 6):
        records, problems = read([EVENT | {"ts": at, "pid": f"rank {at}", "tid": 1} for at in range(count)])
        assert len({record["pid"] for record in records if record["type"] == "hook"}) == min(count, 4)
        assert [problem.skipped for problem in problems] == [False] * (count > 3)


def test_names_beyond_those_that_are_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "_NAMES_MAX", 3)
    named = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": at, "args": {"name": f"thread {at}"}}
        for at in range(5)
    ]
    _, problems = read([EVENT, *named])
    assert [problem.message for problem in problems] == [
        "2 names of processes and threads are left out: there are more than can be kept"
    ]
