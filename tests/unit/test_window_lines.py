"""The lines of windows: how they are written, what they leave out of the events, and how they are drawn."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.batches import trace_batch
from tests.support.cores import new_tables
from tests.support.recordings import loader
from tests.support.timeline_text import shown
from tests.unit.test_capture_record import HEADER, NUMBER, PROBES, VALUES, raw
from tracepipe.event.model import Header
from tracepipe.layout.draw import Layout
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import window_record, windows_in
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Cause

CAUSES = ("call:step", "call:step#2", "duration", "end of the recording")


def window(ts_ns: int, begins: bool, cause: Cause = Cause.START, tid: int = 12) -> bytes:
    return HEADER + struct.pack("<QIIIBBH4Q", ts_ns, tid, 11, cause, record.WINDOW, 0, 3, begins, 0, 0, 0)


def rendered(*records: bytes) -> list[dict[str, Any]]:
    renderer = RecordRenderer(PROBES, SYSCALLS["x86_64"], VALUES, causes=CAUSES)
    return [json.loads(line) for line in renderer.render(b"".join(records)).texts]


def test_windows_are_found_among_records() -> None:
    chunk = (
        raw(record.SWITCH_IN)
        + window(5, True)
        + raw(record.SWITCH_IN) * 2
        + window_record(9, 2, begins=False)
    )
    assert windows_in(chunk) == [(5, True), (9, False)]


def test_events_outside_of_windows_are_not_written() -> None:
    lines = rendered(
        raw(record.CALL_ENTER, "cuInit", ts_ns=1),
        window(2, True),
        raw(record.CALL_RETURN, "cuInit", ts_ns=3),
        raw(record.CALL_ENTER, "cuInit", ts_ns=4),
        window(6, False, Cause.STOP),
        raw(record.CALL_RETURN, "cuInit", ts_ns=7),
        window(8, True),
    )
    assert [(line["type"], line["phase"], line["ts_ns"]) for line in lines] == [
        ("window", "B", 2), ("userspace", "B", 2), ("userspace", "E", 3), ("userspace", "B", 4),
        ("userspace", "E", 6), ("window", "E", 6), ("window", "B", 8),
    ]  # fmt: skip
    assert lines[0] == {
        "ts_ns": 2, "type": "window", "window": 1, "phase": "B", "pid": 11, "tid": 12, "cause": "call:step"
    }  # fmt: skip
    assert lines[1]["args"] == {"began": "before the window"}
    assert lines[4]["args"] == {"ended": "after the window"}
    assert (lines[5]["cause"], lines[6]["window"]) == ("call:step#2", 2)


def test_what_is_under_way_at_the_end_of_a_window_ends_with_it() -> None:
    lines = rendered(
        window(2, True),
        raw(record.SWITCH_IN, ts_ns=3),
        raw(record.CALL_ENTER, "cuInit", ts_ns=4),
        raw(record.CALL_ENTER, "cuMemAlloc_v2", ts_ns=5),
        raw(record.SYSCALL_ENTER, NUMBER["futex"], ts_ns=6),
        window(9, False),
        window(20, True),
        raw(record.SYSCALL_EXIT, NUMBER["futex"], ts_ns=21),
    )
    assert [(line["name"], line["phase"]) for line in lines[5:9]] == [
        ("futex", "E"), ("cuMemAlloc_v2", "E"), ("cuInit", "E"), ("running", "E")
    ]  # fmt: skip
    assert {line["ts_ns"] for line in lines[5:9]} == {9}
    assert [(line["phase"], line["ts_ns"]) for line in lines[-2:]] == [("B", 20), ("E", 21)]


def test_a_window_that_was_waited_for_states_how_long() -> None:
    begin, end = rendered(
        window_record(9, Cause.START, begins=True, by=11 << 32 | 12, waited_ns=7), window(20, False)
    )
    assert (begin["pid"], begin["tid"], begin["waited_ns"]) == (11, 12, 7)
    assert "waited_ns" not in end


@pytest.mark.parametrize("name", ["step", "a name of 32 bytes, no byte more", "Schritt für Schritt " * 20])
def test_a_window_has_the_name_that_it_was_given(name: str) -> None:
    lines = rendered(window_record(1, Cause.START, begins=True, name=name), window(2, False), window(3, True))
    assert [line.get("name") for line in lines] == [name, name, None]


def test_a_window_that_two_begin_at_once_is_one() -> None:
    lines = rendered(window(2, True), window(3, True, tid=13), window(4, False), window(4, False, tid=13))
    assert [(line["phase"], line["window"], line["tid"]) for line in lines] == [("B", 1, 12), ("E", 1, 12)]


def test_names_that_are_given_outside_of_windows_hold_within() -> None:
    lines = rendered(
        raw(record.TEXT, "cuModuleGetFunction", *struct.unpack("<4Q", b"vectorAdd".ljust(32, b"\0"))),
        raw(record.CALL_ENTER, "cuModuleGetFunction"),
        raw(record.CALL_RETURN, "cuModuleGetFunction", 0, 0x77),
        window(2000, True),
        raw(record.MORE, "cuLaunchKernel"),
        raw(record.CALL_ENTER, "cuLaunchKernel", 0x77, ts_ns=2001),
    )
    assert [line.get("name") for line in lines] == [None, "cuLaunchKernel"]
    assert lines[1]["args"]["kernel"] == "vectorAdd"


TURNS = [
    {
        "ts_ns": 100,
        "type": "window",
        "window": 1,
        "phase": "B",
        "pid": 4,
        "tid": 5,
        "cause": "profiler",
        "waited_ns": 30,
    },
    {"ts_ns": 200, "type": "window", "window": 1, "phase": "E", "cause": "duration"},
    {"ts_ns": 300, "type": "window", "window": 2, "phase": "B", "cause": "profiler"},
]


@pytest.mark.usefixtures("core")
def test_windows_are_slices_on_the_track_of_the_capture() -> None:
    tables = new_tables()
    layout = Layout(Header(), tables)
    event = {"ts_ns": 400, "type": "syscall", "name": "read", "phase": "I", "pid": 4, "tid": 5}
    drawn = [layout.place(trace_batch([*TURNS, event], tables)), *layout.finish()]
    lines = shown(drawn)
    at = lines.index("capture")
    assert lines[at + 1 : at + 3] == [
        "100+100 window 1 pid=4 tid=5 waited_ns=30 began_by=profiler ended_by=duration",
        "300+100 window 2 began_by=profiler unclosed=true",
    ]


def test_a_window_with_a_name_is_called_by_it() -> None:
    tables = new_tables()
    layout = Layout(Header(), tables)
    turns = [turn | {"name": "epoch 3"} for turn in TURNS[:2]]
    lines = shown([layout.place(trace_batch(turns, tables)), *layout.finish()])
    assert lines[lines.index("capture") + 1] == (
        "100+100 epoch 3 window=1 pid=4 tid=5 waited_ns=30 began_by=profiler ended_by=duration"
    )


@pytest.mark.usefixtures("core")
def test_windows_are_read_and_are_no_events(tmp_path: Path) -> None:
    run = loader(tmp_path)(*TURNS, {**TURNS[0], "ts_ns": 500, "phase": "X"})
    assert run.facts.counts == {}
    assert [problem.field for problem in run.facts.problems] == ["phase"]
