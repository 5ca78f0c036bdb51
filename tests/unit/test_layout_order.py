"""The order at the top: GPUs, processes and threads by what they did, what a recording says of itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

import tracepipe.layout.merging
import tracepipe.readers.tracepipe1
from tests.golden.both import converted
from tests.support.trace_processor import RealTraceProcessor

Records = list[dict[str, Any]]
HEADER = {
    "type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"],
    "start": {"monotonic_ns": 0},
}  # fmt: skip


def call(ts_ns: int, tid: int, pid: int = 7, **more: Any) -> dict[str, Any]:
    """A call of a library."""
    record = {"ts_ns": ts_ns, "type": "userspace", "name": "f", "phase": "X", "dur_ns": 1, "pid": pid}
    return record | {"tid": tid} | more


def runs(tid: int, *times_ns: int, pid: int = 7) -> Records:
    """A thread that gets a processor and leaves it in turns."""
    of = {"type": "scheduler", "name": "running", "pid": pid, "tid": tid, "cpu": 0}
    return [of | {"ts_ns": ts_ns, "phase": "BE"[at % 2]} for at, ts_ns in enumerate(times_ns)]


def kernel(ts_ns: int, gpu: int = 0) -> dict[str, Any]:
    """A kernel."""
    return {"ts_ns": ts_ns, "type": "gpu_kernel", "name": "k", "phase": "X", "dur_ns": 5, "gpu": gpu}


def as_text(records: Records, folder: Path) -> list[str]:
    """The tracks at the top, and those of threads, from top to bottom in the text."""
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEADER, *records]))
    text, _ = converted(path, "text")
    return [
        line.strip() for line in text.decode().splitlines()[1:-1] if re.match(r"(  thread|[A-Za-z])", line)
    ]


def threads(records: Records, folder: Path) -> list[int]:
    """The threads from top to bottom."""
    return [int(line.split()[-1]) for line in as_text(records, folder) if line.startswith("thread")]


def test_gpus_come_first_and_what_the_recording_says_of_itself_last(tmp_path: Path) -> None:
    tops = as_text([call(5, 9), kernel(10, 10), kernel(20, 2)], tmp_path)
    assert tops == ["GPU 2", "GPU 10", "process process 7", "thread process 9", "tracepipe"]


def test_threads_that_launch_come_first_then_those_that_run(tmp_path: Path) -> None:
    records = [call(at, 7) for at in range(50)]
    records += [call(100 + at, 70, launch=at + 1) for at in range(20)]
    records += [call(200, 60, launch=50), call(201, 61, launch=51), call(202, 61, launch=52)]
    records += runs(80, 300, 1_300) + runs(81, 300, 350) + runs(82, 300, 320, 400, 500)
    # 61 launches a tenth as often as 70, and 82 runs more than a tenth as long as 80.
    assert threads(records, tmp_path) == [61, 70, 80, 82, 7, 60, 81]


def test_other_threads_are_ordered_by_id_after_the_main_one(
    tmp_path: Path,
) -> None:
    records = [call(at, tid) for at, tid in enumerate([90, 7, 5, 90, 90])]
    assert threads(records, tmp_path) == [7, 5, 90]


def test_a_thread_runs_until_it_is_seen_to_leave(tmp_path: Path) -> None:
    """What was lost is not counted: a begin or an end without the other."""
    lost = [*runs(80, 100, 200), runs(81, 100)[0], runs(81, 900)[0], runs(81, 0, 905)[1]]
    assert threads([*lost, runs(82, 0, 990)[1]], tmp_path) == [80, 81, 82]


@pytest.mark.parametrize("window_events", [1, 2048])
def test_processes_come_in_the_order_of_what_their_threads_did(
    window_events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracepipe.layout.merging, "WINDOW_EVENTS", window_events)
    monkeypatch.setattr(tracepipe.readers.tracepipe1, "CHUNK_BYTES", 200)
    records = [call(0, 1, 1), *runs(2, 10, 500, pid=2), *runs(2, 600, 900, pid=2)]
    records += [call(1_000 + at, 3, 3, launch=at) for at in range(1, 5)]
    records += [call(2_000 + at, 4, 4, launch=10 + at) for at in range(4)]
    tops = [line for line in as_text(records, tmp_path) if line.startswith("process")]
    assert [int(line.split()[-1]) for line in tops] == [3, 4, 2, 1]


def test_tracks_with_a_stated_place_come_first(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": place}}
        for name, pid, tid, place in [
            ("process_sort_index", 1, 0, 5),
            ("process_sort_index", 2, 0, -1),
            ("thread_sort_index", 2, 9, -3),
        ]
    ]
    events += [
        {"ph": "X", "name": "f", "pid": pid, "tid": tid, "ts": at, "dur": 1}
        for at, (pid, tid) in enumerate([(1, 1), (3, 3), (2, 2), (2, 9)])
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    text, _ = converted(path, "text")
    found = re.findall(r"^ *((?:process|thread) .*) (\d+)$", text.decode(), re.MULTILINE)
    assert [(what.split()[0], int(id)) for what, id in found] == [
        ("process", 2), ("thread", 9), ("thread", 2),
        ("process", 1), ("thread", 1),
        ("process", 3), ("thread", 3),
    ]  # fmt: skip
    written = json.loads(converted(path, "chrome")[0])["traceEvents"]
    # Viewers take the last place that they read.
    places = {e["pid"]: e["args"]["sort_index"] for e in written if e["name"] == "process_sort_index"}
    assert sorted(places, key=lambda pid: places[pid])[:3] == [2, 1, 3]
    places = {e["tid"]: e["args"]["sort_index"] for e in written if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in written if e["name"] == "thread_name" and e["pid"] == 2}
    assert [names[tid] for tid in sorted(names, key=lambda tid: places[tid])] == [
        "process 9 / events", "process 2 / events",
    ]  # fmt: skip


def test_perfetto_is_given_the_places_that_are_known_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    records = [call(1, 1, 1), call(2, 7), *(call(10 + at, 70, launch=at + 1) for at in range(9)), kernel(50)]
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEADER, *records]))
    trace, _ = converted(path, "perfetto")
    read = pb.Trace.FromString(trace)
    tracks = [packet.track_descriptor for packet in read.packet if packet.HasField("track_descriptor")]
    place = {(d.thread.pid, d.thread.tid): d.sibling_order_rank for d in tracks if d.HasField("thread")}
    assert place[7, 70] < place[7, 7]
    of = {d.process.pid: d.sibling_order_rank for d in tracks if d.HasField("process")}
    assert of[7] < of[1]
    with RealTraceProcessor(trace) as tp:
        assert tp.problems() == []
        slices = "slice join thread_track t on t.id = track_id join thread using (utid)"
        assert tp.rows(f"select tid, count(*) as n from {slices} group by tid order by tid") == [
            {"tid": 1, "n": 1}, {"tid": 7, "n": 1}, {"tid": 70, "n": 9},
        ]  # fmt: skip
        assert tp.rows("select tid, pid from thread join process using (upid) where tid in (7, 70)") == [
            {"tid": 7, "pid": 7}, {"tid": 70, "pid": 7},
        ]  # fmt: skip


@pytest.mark.parametrize("events", [1, 2, 3, 4])
def test_a_flow_stays_with_its_slice_where_a_window_ends(
    events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracepipe.layout.merging, "WINDOW_EVENTS", events)
    of = {"cat": "step", "name": "f", "pid": 7, "tid": 7}
    some = [
        one
        for at in range(1, 9)
        for one in (
            of | {"ph": "X", "ts": at, "dur": 1},
            of | {"ph": "s" if at % 2 else "f", "ts": at, "id": (at + 1) // 2},
        )
    ]
    (tmp_path / "input.json").write_text(json.dumps(some))
    text, _ = converted(tmp_path / "input.json", "text")
    assert text.count(b"\xe2\x86\x92") == 4  # flows that start
    assert b", 8 slices, 1 instant, " in text  # the recording itself
