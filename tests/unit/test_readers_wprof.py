"""wprof's JSON Lines: spans by their ends, tasks, and damage of which nothing else is lost."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.support.batches import read_all
from tracepipe.event.model import NAME_BYTES_MAX, Problem, Record
from tracepipe.readers import recognise, wprof

HEADER = {"version": "3.1", "timer_freq_hz": 997, "stack_cnt": 1, "pmus": ["cycles"]}
TASK = {"tid": 8, "pid": 7, "comm": "worker", "pcomm": "server"}
CALL = {"ts": 1.5, "t": "cuda_api", "task": TASK, "dur": 5e-9, "name": "cudaLaunchKernel", "corr_id": 3}
KERNEL = {
    "ts": 2.0, "t": "cuda_kernel", "task": TASK, "dur": 0.25, "name": "k", "device_id": 1, "stream_id": 9,
    "grid": [2, 1, 1], "block": [64, 1, 1], "corr_id": 3,
}  # fmt: skip
SWITCH = {
    "ts": 3.0, "t": "switch", "prev": {"pid": 0, "comm": "swapper/2"}, "next": TASK, "cpu": 2,
    "prev_state": "idle",
}  # fmt: skip
TIMER = {"ts": 1.0, "t": "timer", "task": TASK, "cpu": 0, "stack_id": 4}


def text_of(*lines: Any) -> bytes:
    return b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)


def read(*lines: Any) -> tuple[list[Record], list[Problem]]:
    records, problems = read_all(wprof.read(io.BytesIO(text_of(*lines) + b"\n")))
    return [record for record in records if record["type"] != "name"], problems


def test_the_header_makes_it_known() -> None:
    assert recognise(text_of(HEADER, CALL)).name == "wprof"


def test_a_span_ends_at_its_time_and_comes_in_the_order_of_its_start() -> None:
    records, problems = read(HEADER, CALL, {**CALL, "ts": 1.6, "dur": 0.2, "name": "cudaMalloc"})
    assert [(r["name"], r["ts_ns"], r["dur_ns"], r.get("launch")) for r in records] == [
        ("cudaMalloc", 1_400_000_000, 200_000_000, None),
        ("cudaLaunchKernel", 1_499_999_995, 5, 7 << 32 | 3),
    ]
    assert problems == []


def test_a_kernel_has_the_launch_of_its_call() -> None:
    (record,), _ = read(HEADER, KERNEL)
    assert (record["type"], record["gpu"], record["stream"]) == ("gpu_kernel", 1, 9)
    assert (record["launch"], record["grid"], record["block"]) == (7 << 32 | 3, [2, 1, 1], [64, 1, 1])


def test_launches_have_numbers_of_32_bits_and_kernels_without_a_name_that_of_their_type() -> None:
    (record,), _ = read(HEADER, {**KERNEL, "corr_id": (1 << 32) - 1, "name": None})
    assert (record["launch"], record["name"]) == (7 << 32 | (1 << 32) - 1, "cuda_kernel")


def test_a_switch_is_of_both_threads_but_not_of_an_idle_one() -> None:
    leaving = {**SWITCH, "ts": 4.0, "prev": TASK, "next": {"pid": 0}, "prev_state": "killable_sleep"}
    records, problems = read(HEADER, SWITCH, leaving)
    assert [(r["name"], r["phase"], r["tid"], r["cpu"], r.get("args")) for r in records] == [
        ("running", "B", 8, 2, None),
        ("running", "E", 8, 2, {"prev_state": "disk"}),
    ]
    assert problems == []


def test_a_span_that_began_before_the_session_is_drawn_from_its_start() -> None:
    (record,), problems = read(HEADER, {**CALL, "ts": 0.1, "dur": 0.3})
    assert (record["ts_ns"], record["dur_ns"]) == (0, 100_000_000)
    assert record["args"]["began_before_ns"] == 200_000_000
    assert [problem.skipped for problem in problems] == [False]


def test_stacks_and_counters_are_arguments_by_their_names() -> None:
    stack = {"id": 4, "frames": ["main", "work"], "srcs": ["a.c:1", ""]}
    (record,), problems = read(HEADER, stack, {**TIMER, "pmus": [5.5]})
    assert record["args"] == {"stack_id": 4, "stack": ["main a.c:1", "work"], "cycles": 5.5}
    assert problems == []


def test_stacks_beyond_what_is_kept_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wprof, "_STACK_BYTES_MAX", 10)
    (record,), problems = read(HEADER, {"id": 4, "frames": ["main"]}, TIMER)
    assert record["args"] == {"stack_id": 4}
    assert [problem.message[:12] for problem in problems] == ["1 event refe", "1 stack is l"]


def test_begins_and_ends_at_one_time_stay_in_their_order() -> None:
    entry = {"ts": 1.0, "t": "pytrace_entry", "task": TASK, "name": "f"}
    records, _ = read(HEADER, entry, {**entry, "t": "pytrace_exit"}, {**entry, "name": "g"})
    assert [(record["name"], record["phase"]) for record in records] == [("f", "B"), ("f", "E"), ("g", "B")]


def test_names_are_those_of_threads_and_processes() -> None:
    records, _ = read_all(wprof.read(io.BytesIO(text_of(HEADER, CALL))))
    names = {(r["pid"], r.get("tid")): r["name"] for r in records if r["type"] == "name"}
    assert names == {(7, 8): "worker", (7, None): "server"}


def test_long_names_of_threads_are_cut() -> None:
    call = {**CALL, "task": {**TASK, "comm": "x" * 20_000}}
    records, _ = read_all(wprof.read(io.BytesIO(text_of(HEADER, call))))
    assert max(len(record["name"]) for record in records) == NAME_BYTES_MAX


@pytest.mark.parametrize(
    ("broken", "field", "message"),
    [
        (b'{"ts":1,"t":"timer"', "", "is not JSON"),
        (b"[1]", "", "is not a JSON object"),
        ({"ts": 1}, "t", "is missing, or not a string"),
        ({"t": "timer"}, "ts", "is missing"),
        ({"ts": "1", "t": "timer"}, "ts", "is not a time that a trace can have"),
        ({**CALL, "ts": -1}, "ts", "is not a time that a trace can have"),
        ({"ts": 1, "t": "timer"}, "task", "is missing, or not a task"),
        ({"ts": 1, "t": "timer", "task": {"pid": -1}}, "task.pid", "is not a process id"),
        ({**CALL, "dur": -1}, "dur", "is not a duration"),
        ({**KERNEL, "stream_id": None}, "stream_id", "is missing, or not an integer"),
        ({**SWITCH, "cpu": "two"}, "cpu", "is missing, or not a processor number"),
        ({"id": "x", "frames": []}, "id", "is not an integer"),
        ({"id": 1, "frames": [5]}, "frames", "is not a list of strings"),
    ],
)
def test_only_what_is_broken_is_lost(broken: Any, field: str, message: str) -> None:
    records, problems = read(HEADER, CALL, broken, KERNEL)
    assert [record["name"] for record in records] == ["cudaLaunchKernel", "k"]
    assert [(one.line, one.field, one.message[: len(message)]) for one in problems] == [(3, field, message)]


def test_a_line_that_was_cut_off_is_reported_as_such() -> None:
    _, problems = read_all(wprof.read(io.BytesIO(text_of(HEADER, CALL)[:-9])))
    assert problems == [Problem(2, "", "was cut off in the middle of the line")]


def test_a_waker_without_a_thread_is_not_named() -> None:
    waking = {"ts": 1.0, "t": "waking", "waker": {"pid": 7}, "wakee": TASK, "cpu": 1}
    (record,), problems = read(HEADER, waking)
    assert (record["name"], record["args"]) == ("wakeup", {"by_tid": 0})
    assert problems == []
