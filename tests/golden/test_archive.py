"""Several recordings as an archive: each has a trace of its own, at the times of one timeline of all."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import FIXTURES
from tests.golden.merged import converted, written
from tests.support.cores import cores_here, running
from tests.support.recordings import HEADER, event, span
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.converters import archive
from tracepipe.errors import ClockError, OutputError
from tracepipe.recording.account import Account
from tracepipe.recording.outputs import trace_names

PAIR = [str(FIXTURES / "merged-pytorch" / name) for name in ("probes.jsonl.zst", "kineto.json.zst")]
NAMES = ["probes.pftrace", "kineto.pftrace"]
START = {"monotonic_ns": 1_000, "boottime_ns": 3_000, "realtime_ns": 1_700_000_000_000_001_000}
# Slices with their threads and all that they say of times. What a file names its threads is another matter.
SLICES = """
    select slice.name, slice.ts, slice.dur, depth, tid, pid, track.name as track from slice
    join track on track.id = slice.track_id left join thread_track on thread_track.id = track.id
    left join thread using (utid) left join process using (upid)
"""
# Calls of the profiler that lie in the call of that name and thread that the probes saw.
INSIDE = """
    with calls as (
        select slice.*, utid, exists (
            select 1 from args where args.arg_set_id = slice.arg_set_id and key = 'debug.correlation'
        ) as of_profiler
        from slice join thread_track on thread_track.id = track_id where slice.name glob 'cu*'
    )
    select count(distinct inner.id) as calls from calls as inner join calls as outer using (name, utid)
    where inner.of_profiler and not outer.of_profiler
      and inner.ts >= outer.ts and inner.ts + inner.dur <= outer.ts + outer.dur
"""


def traces_of(made: bytes) -> dict[str, bytes]:
    """The files of an archive."""
    with zipfile.ZipFile(io.BytesIO(made)) as opened:
        assert opened.testzip() is None
        return {name: opened.read(name) for name in opened.namelist()}


def manifest_of(made: bytes) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(traces_of(made)["perfetto_manifest.json"])["perfetto_manifest"]
    return manifest


def slices(trace: bytes) -> list[tuple[Any, ...]]:
    with RealTraceProcessor(trace) as asked:
        assert asked.problems() == []
        return sorted((tuple(row.values()) for row in asked.rows(SLICES)), key=repr)


def on_host(path: Path, host: str, start: dict[str, int], *records: dict[str, Any]) -> str:
    """A recording of a host."""
    header = HEADER | {"host": host, "boot": host, "clocks": ["monotonic"], "start": start}
    return written(path, [header, *records])


@pytest.fixture(scope="module")
def pair() -> tuple[bytes, Account]:
    return converted(PAIR, "archive")


def test_each_recording_has_a_trace_that_shows_what_it_shows_alone(pair: tuple[bytes, Account]) -> None:
    made, account = pair
    traces = traces_of(made)
    assert list(traces) == [*NAMES, "perfetto_manifest.json"]
    assert slices(made) == sorted(slices(traces[NAMES[0]]) + slices(traces[NAMES[1]]), key=repr)
    assert [part.anchor and part.anchor.get("bound_ns") for part in account.parts] == [0, 500]


def test_launches_of_two_tools_are_at_the_times_of_one_timeline(pair: tuple[bytes, Account]) -> None:
    with RealTraceProcessor(pair[0]) as asked:
        (row,) = asked.rows(INSIDE)
        processes = asked.rows("select pid from process where pid = 1731")
    # The 54 that one timeline draws once, and the one that began 2.6 ms later for the profiler.
    assert row["calls"] == 54 + 1
    assert len(processes) == 1


def test_the_manifest_states_what_placed_each(pair: tuple[bytes, Account]) -> None:
    manifest = manifest_of(pair[0])
    assert manifest["version"] == 1
    assert manifest["trace_time"] == {"clock": "MONOTONIC", "file": NAMES[0]}
    assert manifest["files"] == [{"path": name} for name in NAMES]
    attributes = manifest["attributes"]
    assert attributes["tracepipe.kineto.pftrace.bound_ns"] == 500
    assert attributes["tracepipe.kineto.pftrace.offset_ns"] == -1795388556252310282
    assert attributes["tracepipe.kineto.pftrace.by"].startswith("41 calls that probes.jsonl.zst recorded too")


def test_hosts_are_machines_whose_clocks_show_the_same(tmp_path: Path) -> None:
    later = START | {"monotonic_ns": START["monotonic_ns"] + 500}
    paths = [
        on_host(tmp_path / "a.jsonl", "node1", START, event("B", 2_000, "f"), event("E", 2_010, "f")),
        on_host(tmp_path / "b.jsonl", "node2", later, span(2_520, 2_530, "f")),
    ]
    made, _ = converted(paths, "archive")
    files = manifest_of(made)["files"]
    assert [one["machine"] for one in files] == [{"name": "node1"}, {"name": "node2"}]
    same = {"clock": "MONOTONIC", "sync_to": {"file": "a.pftrace", "clock": "MONOTONIC"}, "offset_ns": 0}
    assert [one.get("clocks") for one in files] == [None, same]
    with RealTraceProcessor(made) as asked:
        rows = asked.rows("select ts, dur, pid from slice join thread_track on thread_track.id = track_id "
                          "join thread using (utid) join process using (upid) order by ts")  # fmt: skip
        assert asked.problems() == []
    assert rows == [{"ts": 2_000, "dur": 10, "pid": 1}, {"ts": 2_020, "dur": 10, "pid": 10_000_001}]


def test_recordings_on_an_unknown_clock_share_it(tmp_path: Path) -> None:
    header = HEADER | {"clock": "tsc", "clocks": ["tsc"], "start": {}}
    paths = [written(tmp_path / f"{at}.jsonl", [header, span(9_000 - at, 9_100, "f")]) for at in (0, 500)]
    made, _ = converted(paths, "archive", offsets={"500.jsonl": 100})
    assert manifest_of(made)["trace_time"]["clock"] == "BOOTTIME"
    assert [row[1:3] for row in slices(made) if row[0] == "f"] == [(8_600, 600), (9_000, 100)]


def test_both_cores_write_the_same() -> None:
    outputs = set()
    for core in cores_here():
        with running(core):
            outputs.add(converted(PAIR, "archive")[0])
    assert len(outputs) == 1


def test_names_are_those_of_the_recordings_each_once() -> None:
    paths = ["a/trace.json", "b/trace.json.gz", "../.hidden.jsonl", "-", "mit Leerzeichen/Größe 1.sqlite"]
    assert trace_names(paths) == [
        "trace.pftrace", "trace-2.pftrace", "hidden.pftrace", "stdin.pftrace", "Gr__e_1.sqlite.pftrace",
    ]  # fmt: skip


def test_recordings_without_a_time_in_common_are_noted(tmp_path: Path) -> None:
    paths = [
        on_host(tmp_path / f"{at}.jsonl", "node1", {"monotonic_ns": at}, span(at + 9, at + 19, "f"))
        for at in (1_000, 9_000)
    ]
    _, account = converted(paths, "archive")
    assert [part.notes[-1:] for part in account.parts] == [
        ["the file has no footer: the capture was cut off"],
        ["9000.jsonl begins 7.99 µs after 1000.jsonl ends: they have no time in common"],
    ]


def test_a_recording_that_nothing_places_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    alone = written(tmp_path / "alone.jsonl", [HEADER | {"clock": "tsc", "clocks": ["tsc"]}, span(1, 2, "f")])
    with pytest.raises(ClockError, match="cannot be put on the clock of probes"):
        converted([*PAIR, alone], "archive")


def test_what_perfetto_cannot_read_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "SIZE_MAX_BYTES", 57_000)
    out = io.BytesIO()
    with pytest.raises(OutputError, match="larger than 2 GB"):
        converted(PAIR, "archive", out=out)
    # Nothing stands at its end that an archive ends with.
    assert out.getvalue()[:4] == b"PK\3\4" and b"PK\5\6" not in out.getvalue()
