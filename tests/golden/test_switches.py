"""When threads run, in Perfetto's tables of scheduling: the trace processor's rows are what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.both import converted
from tests.golden.cases import FIXTURES
from tests.support.trace_processor import RealTraceProcessor

Records = list[dict[str, Any]]

_LETTERS = {"sleeping": "S", "disk": "D", "runnable": "R", "preempted": "R", "dead": "X", "zombie": "X"}
_SCHED = "select ts, dur, tid, ucpu as cpu, end_state from sched join thread using (utid) order by ts, tid"
_STATES = """
select s.ts, s.dur, t.tid, s.state, s.cpu, w.tid as waker
from thread_state s join thread t using (utid) left join thread w on w.utid = s.waker_utid
order by s.ts, t.tid"""
_WAKEUPS = """
select ts, tid, waker from (
  select s.ts, t.tid, w.tid as waker from thread_state s join thread t using (utid)
  join thread w on w.utid = s.waker_utid
  union all select s.ts, t.tid, w.tid from spurious_sched_wakeup s join thread t using (utid)
  join thread w on w.utid = s.waker_utid)
order by ts, tid"""
_START_NS = 5_000
_AHEAD_NS = 777_000
HEADER = {
    "type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"],
    "start": {"monotonic_ns": _START_NS, "boottime_ns": _START_NS + _AHEAD_NS},
}  # fmt: skip


def event(ts_ns: int, name: str, phase: str, tid: int, cpu: int | None = 3, **args: Any) -> dict[str, Any]:
    """A record of the scheduler's layer."""
    record = {"ts_ns": _START_NS + ts_ns, "type": "scheduler", "name": name, "phase": phase, "pid": 7}
    record |= {"tid": tid} if cpu is None else {"tid": tid, "cpu": cpu}
    return record | ({"args": args} if args else {})


def asked(path: Path, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The rows of queries about a recording's timeline, in which nothing is wrong."""
    trace, _ = converted(path, "perfetto")
    with RealTraceProcessor(trace) as tp:
        assert tp.problems() == []
        return [[tuple(row.values()) for row in tp.rows(query)] for query in queries]


def asked_of(records: Records, folder: Path, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The same about records after a header; times count from its start."""
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEADER, *records]))
    return [[(row[0] - _START_NS, *row[1:]) for row in rows] for rows in asked(path, *queries)]


def recorded(path: Path) -> Records:
    """What the scheduler did, in the order of time."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((one for one in records if one["type"] == "scheduler"), key=lambda one: int(one["ts_ns"]))


@pytest.mark.parametrize("case", ["capture-h200", "capture-h200-pytorch", "capture-standin"])
def test_rows_are_what_a_capture_recorded(case: str) -> None:
    path = FIXTURES / case / "input.jsonl"
    records = recorded(path)
    want, since = [], {}
    for one in records:
        if (one["name"], one["phase"]) == ("running", "B"):
            since[one["tid"]] = one
        elif one["name"] == "running" and (begun := since.pop(one["tid"], None)):
            began_ns, state = begun["ts_ns"], _LETTERS[one["args"]["prev_state"]]
            want.append((began_ns, one["ts_ns"] - began_ns, one["tid"], begun["cpu"], state))
    want += [(one["ts_ns"], -1, one["tid"], one["cpu"], None) for one in since.values()]
    woken = [(one["ts_ns"], one["tid"], one["args"]["by_tid"]) for one in records if one["name"] == "wakeup"]
    sched, wakeups = asked(path, _SCHED, _WAKEUPS)
    assert want
    assert sched == sorted(want)
    assert wakeups == sorted(woken)


def test_a_thread_runs_sleeps_is_woken_and_runs_elsewhere(tmp_path: Path) -> None:
    records = [
        event(0, "running", "B", 7),
        event(10, "running", "E", 7, prev_state="disk"),
        event(25, "wakeup", "I", 7, 2, by_tid=99, target_cpu=4),
        event(30, "running", "B", 7, 4),
        event(32, "wakeup", "I", 7, 2, by_tid=99, target_cpu=4),
        event(45, "running", "E", 7, 4, prev_state="preempted"),
        event(50, "running", "B", 7, 4),
        event(60, "running", "E", 7, 4, prev_state="dead"),
    ]
    states, sched, wakeups = asked_of(records, tmp_path, _STATES, _SCHED, _WAKEUPS)
    assert states == [
        (0, 10, 7, "Running", 3, None),
        (10, 15, 7, "D", None, None),
        (25, 5, 7, "R", None, 99),
        (30, 15, 7, "Running", 4, None),
        (45, 5, 7, "R", None, None),
        (50, 10, 7, "Running", 4, None),
        (60, -1, 7, "X", None, None),
    ]
    assert [row[2:] for row in sched] == [(7, 3, "D"), (7, 4, "R"), (7, 4, "X")]
    assert wakeups == [(25, 7, 99), (32, 7, 99)]


def test_threads_that_were_not_recorded_are_not_mentioned(tmp_path: Path) -> None:
    """Another thread had the processor in between, and woke this one."""
    records = [
        event(0, "running", "B", 7, 0),
        event(10, "running", "E", 7, 0, prev_state="sleeping"),
        event(20, "wakeup", "I", 7, 0, by_tid=41, target_cpu=0),
        event(30, "running", "B", 7, 0),
        event(40, "running", "E", 7, 0, prev_state="sleeping"),
    ]
    states, sched = asked_of(records, tmp_path, _STATES, _SCHED)
    assert {row[2] for row in states} == {row[2] for row in sched} == {7}
    assert [row[:2] for row in sched] == [(0, 10), (30, 10)]


def test_facts_that_a_recording_does_not_state(tmp_path: Path) -> None:
    """An end without its begin, an unknown state, a wakeup without its waker, a run without an end."""
    records = [
        event(0, "running", "E", 7, prev_state="runnable"),
        event(5, "running", "B", 7),
        event(10, "running", "E", 7, prev_state=1024),
        event(15, "wakeup", "I", 7, 1, target_cpu=3),
        event(20, "running", "B", 7),
        event(30, "running", "E", 7, prev_state="idle"),
        event(40, "running", "B", 7),
    ]
    (states,) = asked_of(records, tmp_path, _STATES)
    assert [row[:5] for row in states] == [
        (0, 5, 7, "R", None),
        (5, 5, 7, "Running", 3),
        (10, 5, 7, "S", None),
        (15, 5, 7, "R", None),
        (20, 10, 7, "Running", 3),
        (30, 10, 7, "D", None),
        (40, -1, 7, "Running", 3),
    ]
    assert {row[5] for row in states} == {None}


def test_what_has_no_row_there_keeps_its_track(tmp_path: Path) -> None:
    """A migration, and runs whose processor is not known or that are whole."""
    whole = event(60, "running", "X", 7) | {"dur_ns": 5}
    records = [
        event(0, "migrate", "I", 7, from_cpu=3, to_cpu=5),
        event(20, "running", "B", 7, None),
        event(30, "running", "E", 7, None, prev_state="disk"),
        event(40, "running", "B", 7, 1 << 20),
        event(50, "running", "E", 7, 1 << 20, prev_state="disk"),
        whole,
    ]
    slices = "select slice.ts, dur, slice.name from slice join track on track.id = track_id"
    own, sched = asked_of(records, tmp_path, f"{slices} where track.name = 'scheduler' order by ts", _SCHED)
    assert own == [(0, 0, "migrate"), (20, 10, "running"), (40, 10, "running"), (60, 5, "running")]
    assert sched == []


def test_names_and_processes_are_those_of_the_recording(tmp_path: Path) -> None:
    first = event(0, "running", "B", 8) | {"comm": "worker"}
    last = event(20, "running", "E", 8, prev_state="dead") | {"comm": "renamed"}
    threads = "select 0 as ts, tid, t.name, pid from thread t join process using (upid) where tid = 8"
    ((row,),) = asked_of([first, last], tmp_path, threads)
    assert row[1:] == (8, "renamed", 7)


def test_without_boottime_wakeups_stand_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    header = HEADER | {"start": {"monotonic_ns": _START_NS}}
    wakeup = event(20, "wakeup", "I", 7, by_tid=9)
    path.write_text("".join(json.dumps(record) + "\n" for record in [header, wakeup]))
    (states,) = asked(path, _STATES)
    assert states == [(_START_NS + 20, -1, 7, "R", None, 9)]
