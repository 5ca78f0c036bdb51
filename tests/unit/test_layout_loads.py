"""How much of processors the threads of a process take, as counters of the process."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import tracepipe.layout.merging
import tracepipe.layout.summaries
import tracepipe.readers.tracepipe1
from tests.golden.both import converted
from tests.golden.cases import FIXTURES
from tests.support.trace_processor import RealTraceProcessor

HEADER = {
    "type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"],
    "start": {"monotonic_ns": 0},
}  # fmt: skip
USE = """
select pid, ts, value, unit from counter c join process_counter_track t on t.id = c.track_id
join process using (upid) where t.name = 'CPU use' order by pid, ts"""


def runs(begin_ns: int, end_ns: int | None, tid: int, pid: int | None = 7) -> list[dict[str, Any]]:
    """A stretch of time in which a thread runs, whose end may not be recorded."""
    thread = {"type": "scheduler", "name": "running", "tid": tid, "cpu": tid % 4}
    thread |= {} if pid is None else {"pid": pid}
    begin = {"ts_ns": begin_ns, "phase": "B"} | thread
    return [begin] if end_ns is None else [begin, {"ts_ns": end_ns, "phase": "E"} | thread]


def written(records: list[dict[str, Any]], folder: Path, to: str = "perfetto") -> bytes:
    """The trace of records after a header, in the order of time."""
    path = folder / "input.jsonl"
    records = [HEADER, *sorted(records, key=lambda record: int(record["ts_ns"]))]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return converted(path, to)[0]


def asked(trace: bytes, query: str = USE) -> list[tuple[Any, ...]]:
    """The rows of a query about a trace in which nothing is wrong."""
    with RealTraceProcessor(trace) as tp:
        assert tp.problems() == []
        return [tuple(row.values()) for row in tp.rows(query)]


def test_two_threads_that_run_at_a_time_take_two_processors(tmp_path: Path) -> None:
    records = runs(0, 2_048, 7) + runs(1_024, 1_536, 8) + runs(2_048, 3_072, 8) + runs(0, 512, 9, pid=9)
    assert asked(written(records, tmp_path)) == [
        (7, 0, 100.0, "% of one CPU"),
        (7, 1_024, 150.0, "% of one CPU"),
        (7, 2_048, 100.0, "% of one CPU"),
        (7, 3_072, 0.0, "% of one CPU"),
        (9, 0, 100.0, "% of one CPU"),
        (9, 512, 0.0, "% of one CPU"),
    ]


def test_a_thread_that_runs_at_the_end_has_its_processor_until_then(tmp_path: Path) -> None:
    """An end whose begin was not recorded changes nothing."""
    records = runs(1_024, None, 7) + runs(2_048, 4_096, 8, pid=8) + runs(0, 512, 9)[1:]
    assert [row[:3] for row in asked(written(records, tmp_path)) if row[0] == 7] == [
        (7, 1_024, 100.0),
        (7, 4_096, 0.0),
    ]


def test_chrome_has_the_same(tmp_path: Path) -> None:
    trace = json.loads(written(runs(0, 2_048, 7) + runs(0, 1_024, 8), tmp_path, "chrome"))
    values = [event for event in trace["traceEvents"] if event["name"] == "CPU use"]
    assert [(event["ph"], event["pid"], event["args"]["value"]) for event in values] == [
        ("C", 7, 200), ("C", 7, 100), ("C", 7, 0),
    ]  # fmt: skip


def test_a_process_without_switches_has_no_such_counter(tmp_path: Path) -> None:
    woken = {"ts_ns": 5, "type": "scheduler", "name": "wakeup", "phase": "I", "pid": 7, "tid": 7, "cpu": 0}
    call = {"ts_ns": 9, "type": "userspace", "name": "f", "phase": "X", "dur_ns": 1, "pid": 7, "tid": 7}
    assert asked(written([woken, call, *runs(10, 20, 5, pid=None)], tmp_path)) == []


def test_the_processes_that_stand_first_have_counters(tmp_path: Path) -> None:
    """More would push the GPUs behind the processes in Perfetto's UI v52."""
    records = [one for pid in range(2, 42) for one in runs(pid, pid + 1_000, pid, pid=pid)]
    records += [one for pid in (50, 51) for one in runs(100, 90_000, pid, pid=pid)]
    of = {"pid": 60, "tid": 60}
    records += [{"ts_ns": 95_000, "type": "userspace", "name": "f", "phase": "I", "launch": 1} | of]
    records += runs(95_000, 95_001, 60, pid=60)
    records.append(
        {"ts_ns": 96_000, "type": "gpu_kernel", "name": "k", "phase": "X", "dur_ns": 9, "launch": 1}
    )
    trace = written(records, tmp_path)
    assert {row[0] for row in asked(trace)} == {60, 50, 51, *range(2, 15)}
    order = """select order_id from _track_event_tracks_ordered_groups where name = 'GPU 0'"""
    with RealTraceProcessor(trace) as tp:
        tp.rows("include perfetto module viz.summary.track_event")
        assert tp.rows(order)[0]["order_id"] < 50


def test_a_bounded_number_of_processes_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracepipe.layout.summaries, "PROCESSES_MAX", 2)
    records = [one for pid in (7, 8, 9) for one in runs(pid, pid + 1_000, pid, pid=pid)]
    assert {row[0] for row in asked(written(records, tmp_path))} == {7, 8}


@pytest.mark.parametrize("kept_max", [1 << 15, 0])
def test_few_events_at_a_time_give_the_same(
    kept_max: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With none kept, shapes have other numbers in each batch."""
    records = [one for at in range(40) for one in runs(1_024 * at, 1_024 * at + 20 * at, at % 7, at % 3 + 1)]
    want = asked(written(records, tmp_path))
    assert {row[0] for row in want} == {1, 2, 3}
    monkeypatch.setattr(tracepipe.readers.tracepipe1, "CHUNK_BYTES", 200)
    monkeypatch.setattr(tracepipe.layout.merging, "WINDOW_EVENTS", 3)
    monkeypatch.setattr(tracepipe.layout.summaries, "_STRETCHES_AT_ONCE", 2)
    monkeypatch.setattr("tracepipe.event.tables.KEPT_MAX", kept_max)
    assert asked(written(records, tmp_path)) == want


def test_running_time_of_a_real_capture_equals_that_in_its_trace() -> None:
    trace, _ = converted(FIXTURES / "capture-h200-training" / "input.jsonl", "perfetto")
    ran = "select pid, sum(dur) from sched join thread using (utid) join process using (upid) group by pid"
    with RealTraceProcessor(trace) as tp:
        [(pid, ran_ns)] = [tuple(row.values()) for row in tp.rows(ran)]
        values = [tuple(row.values()) for row in tp.rows(USE)]
    assert {row[0] for row in values} == {pid}
    counted_ns = sum((after[1] - row[1]) * row[2] / 100 for row, after in pairwise(values))
    assert counted_ns == pytest.approx(ran_ns, rel=0.02)


def test_it_is_not_read_again_as_if_it_had_been_recorded(tmp_path: Path) -> None:
    trace = tmp_path / "run.pftrace"
    trace.write_bytes(written(runs(0, 2_048, 7), tmp_path))
    again = asked(converted(trace, "perfetto")[0])
    assert [row[1:3] for row in again] == [(0, 100.0), (2_048, 0.0)]
    assert "CPU use" not in converted(trace, "text")[0].decode()
