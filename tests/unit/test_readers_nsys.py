"""The reader of Nsight Systems' databases: clocks, launches, what is missing, and hostile ones."""

from __future__ import annotations

import gzip
import io
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support import nsys_export as made
from tests.support.batches import read_all
from tests.support.nsys_export import BASE_NS, UTC_NS, P, Rows, T, call, kernel, make, nvtx, pid, rows
from tracepipe.converters import CONVERTERS
from tracepipe.errors import FormatError, InputError
from tracepipe.event.checks import first_fault
from tracepipe.event.model import NAME_BYTES_MAX, Header, Problem, Record
from tracepipe.readers import ids, nsys, sqlite_tables
from tracepipe.recording.convert import Conversion, ConversionOptions
from tracepipe.recording.reading import open_recording

LAUNCH = "cudaLaunchKernel_v7000"
TEXTS = [{"id": at, "value": text} for text, at in made.ID.items()]


@pytest.fixture
def export(tmp_path: Path) -> Any:
    """Makes a database of some tables, with StringIds."""

    def with_tables(**tables: Rows) -> Path:
        full = {"StringIds": TEXTS} | {
            f"CUPTI_ACTIVITY_KIND_{name}" if name.isupper() and "_" not in name else name: content
            for name, content in tables.items()
        }
        return make(tmp_path / "run.sqlite", full)

    return with_tables


def read(path: Path) -> tuple[Header, list[Record], list[Problem]]:
    with open_recording(str(path)) as opened:
        every, problems = read_all(opened.recording)
        records = [record for record in every if record["type"] != "name"]
    assert [first_fault(record) for record in records] == [None] * len(records)
    return opened.recording.header, records, problems


def messages_of(problems: list[Problem]) -> list[str]:
    """The messages about rows and tables, without the clock."""
    return [problem.at("") for problem in problems if problem.field]


def changed(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)
    return path


# Events and waits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_long_text", [False, True])
def test_calls_have_the_event_and_the_stream_of_their_records(export: Any, has_long_text: bool) -> None:
    name, none, other = "cudaStreamSynchronize_v3020", 0xFFFFFFFF, pid(400)
    columns = "start end deviceId contextId streamId correlationId globalPid syncType eventId"
    path = export(
        RUNTIME=[call(at * 10, at * 10 + 5, name, at) for at in range(1, 6)],
        SYNCHRONIZATION=rows(
            columns,
            (20, 25, 0, 1, 14, 2, P, 2, 8),
            (20, 25, 0, 9, 9, 2, other, 2, 9),
            *[(30, 35, 0, 1, 14, 3, P, 3, none)] * 2,
            (40, 45, 0, 1, none, 4, P, 1, "?"),
        ),
        CUPTI_ACTIVITY_KIND_CUDA_EVENT=rows(
            "timestamp deviceId contextId streamId correlationId globalPid eventId", (0, 0, 1, 13, 1, P, 8)
        ),
    )
    if has_long_text:
        long = "x" * (sqlite_tables._SORTED_LENGTH_MAX + 1)
        changed(path, f"UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET eventClass = '{long}' WHERE start = 50")
    calls = [record["args"] for record in read(path)[1] if record["type"] == "userspace"]
    known = [{"context": 1, "stream": 13, "event": 8}, {"context": 1, "stream": 14, "event": 8}]
    known += [{"context": 1, "stream": 14}, {"context": 1}, {}]
    assert calls == [{"result": 0} | ({} if has_long_text else one) for one in known]


# Clocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("session", "clock", "base_ns"),
    [
        ({"utcEpochNs": UTC_NS, "systemClockNs": BASE_NS}, "monotonic", BASE_NS),
        ({"utcEpochNs": UTC_NS}, "realtime", UTC_NS),
        ({"utcEpochNs": "yesterday", "systemClockNs": -1}, "nsys", 0),
        (None, "nsys", 0),
    ],
)
def test_times_are_put_on_the_clock_that_is_known(
    export: Any, session: dict[str, Any] | None, clock: str, base_ns: int
) -> None:
    more = {"TARGET_INFO_SESSION_START_TIME": [session]} if session else {}
    header, records, problems = read(export(KERNEL=[kernel(50, 60, 1)], **more))
    assert (header.clock, [record["ts_ns"] for record in records]) == (clock, [base_ns + 50])
    (clock_said,) = [problem for problem in problems if not problem.field]
    assert not clock_said.skipped


def test_times_before_an_unknown_start_count_from_the_first(export: Any) -> None:
    _, records, problems = read(export(RUNTIME=[call(-3000, -1000, LAUNCH, 1)], KERNEL=[kernel(0, 5, 1)]))
    assert [(record["ts_ns"], record["dur_ns"]) for record in records] == [(0, 2000), (3000, 5)]
    assert messages_of(problems) == []


def test_an_impossible_time_is_a_bad_row(export: Any) -> None:
    session = {"TARGET_INFO_SESSION_START_TIME": [{"systemClockNs": 100}]}
    _, records, problems = read(export(KERNEL=[kernel(-101, 5, 1), kernel(1 << 62, 1 << 62, 2)], **session))
    assert records == []
    assert messages_of(problems) == [
        "CUPTI_ACTIVITY_KIND_KERNEL row 1: its time, -101 ns, is before the clock began",
        "CUPTI_ACTIVITY_KIND_KERNEL row 2: its time, 4611686018427387904 ns, is beyond 146 years",
    ]


# Launches --------------------------------------------------------------------------------------------------


def launches(records: list[Record]) -> list[tuple[str, int | None]]:
    return [(record["type"], record.get("launch")) for record in records]


def test_a_correlation_number_counts_in_its_process(export: Any) -> None:
    calls = [call(10, 11, LAUNCH, 7), call(20, 21, LAUNCH, 7, made.Q)]
    _, records, _ = read(export(RUNTIME=calls, KERNEL=[kernel(30, 31, 7), kernel(40, 41, 7, 400)]))
    first, second = 7, 1 << 32 | 7
    assert launches(records) == [
        ("userspace", first), ("userspace", second), ("gpu_kernel", first), ("gpu_kernel", second),
    ]  # fmt: skip


def test_only_calls_that_asked_for_work_have_a_launch(export: Any) -> None:
    calls = [call(10, 11, LAUNCH, at) for at in (0, 1, 65_536, 65_537, 1 << 32)]
    _, records, _ = read(export(RUNTIME=calls, KERNEL=[kernel(30, 31, 65_536)]))
    assert launches(records)[:5] == [("userspace", 65_536 if at == 2 else None) for at in range(5)]


def test_without_processes_the_number_alone_joins(export: Any) -> None:
    bare = kernel(30, 31, 7)
    del bare["globalPid"]
    _, records, _ = read(export(RUNTIME=[call(10, 11, LAUNCH, 7)], KERNEL=[bare]))
    assert launches(records) == [("userspace", 7), ("gpu_kernel", 7)]


# What is in the file ---------------------------------------------------------------------------------------


def test_names_of_functions_lose_what_cupti_adds(export: Any) -> None:
    _, records, _ = read(
        export(
            RUNTIME=[
                call(1, 2, LAUNCH, 1),
                call(3, 4, "cuMemsetD8Async", 2),
                call(5, 6, LAUNCH, 3) | {"nameId": 9},
            ]
        )
    )
    assert [record["name"] for record in records] == [
        "cudaLaunchKernel", "cuMemsetD8Async", "text 9 (not in StringIds)",
    ]  # fmt: skip


def test_ranges_are_begins_and_ends_where_they_nest(export: Any) -> None:
    ranges = [
        nvtx(0, 9, 59, "a"),
        nvtx(0, 4, 59, "b"),
        nvtx(4, 6, 59, "c"),
        nvtx(5, 7, 59, "d"),
        nvtx(9, 9, 59, "e"),
    ]
    _, records, _ = read(export(NVTX_EVENTS=ranges))
    assert [(record["name"], record["phase"], record["ts_ns"]) for record in records] == [
        ("a", "B", 0), ("b", "B", 0), ("b", "E", 4), ("c", "B", 4), ("d", "X", 5), ("c", "E", 6),
        ("a", "E", 9), ("e", "B", 9), ("e", "E", 9),
    ]  # fmt: skip


def test_ranges_of_a_process_have_the_least_free_number(export: Any) -> None:
    ranges = [nvtx(0, 5, 60, "a"), nvtx(1, 9, 60, "b", endGlobalTid=made.T2), nvtx(6, 7, 60, "c")]
    _, records, _ = read(export(NVTX_EVENTS=ranges))
    assert [(record["name"], record["phase"], record["range"], record["tid"]) for record in records] == [
        ("a", "B", 0, 300), ("b", "B", 1, 300), ("a", "E", 0, 300), ("c", "B", 0, 300), ("c", "E", 0, 300),
        ("b", "E", 1, 301),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [59, 60])
def test_a_range_with_an_impossible_end_or_on_the_track_of_another_is_whole(export: Any, kind: int) -> None:
    # Threads of two machines with one number.
    other = made.T + (2 << 48)
    ranges = [nvtx(0, 9, 59, "a"), nvtx(5, 20, 59, "b", other), nvtx(30, 1 << 62, kind, "c")]
    _, records, problems = read(export(NVTX_EVENTS=ranges))
    assert [(one["name"], one["phase"], one.get("dur_ns")) for one in records] == [
        ("a", "B", None),
        ("b", "X", 15),
        ("a", "E", None),
        ("c", "X", (1 << 62) - 30),
    ]
    assert not any(problem.skipped for problem in problems)


def test_ranges_without_room_for_their_ends_stay_whole(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_tables, "ENDS_MAX", 1)
    ranges = [nvtx(0, 9, 59, "a"), nvtx(1, 8, 59, "b"), nvtx(2, 7, 60, "c"), nvtx(10, 11, 59, "d")]
    _, records, _ = read(export(NVTX_EVENTS=ranges))
    assert [(record["name"], record["phase"]) for record in records] == [
        ("a", "B"), ("b", "X"), ("c", "X"), ("a", "E"), ("d", "B"), ("d", "E"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value", "payload"),
    [
        ("uint64Value", -1, (1 << 64) - 1),
        ("int64Value", -5, -5),
        ("doubleValue", 0.25, 0.25),
        ("uint32Value", 7, 7),
        ("int32Value", -7, -7),
        ("floatValue", 0.5, 0.5),
        ("jsonText", '{"rank":[1]}', {"rank": [1]}),
        ("jsonText", "{not", "{not"),
        ("jsonTextId", made.ID['{"rank":3}'], {"rank": 3}),
    ],
)
def test_every_payload_is_kept(export: Any, column: str, value: Any, payload: Any) -> None:
    _, (mark,), _ = read(export(NVTX_EVENTS=[nvtx(1, None, 34, "m", **{column: value})]))
    assert mark["args"] == {"payload": payload}


def test_numbers_of_many_shapes_stay_right_between_batches(
    export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_tables, "BATCH_ROWS", 3)
    monkeypatch.setattr("tracepipe.event.tables.KEPT_MAX", 2)
    names = [f"range {at}" for at in range(40)]
    path = export(NVTX_EVENTS=[nvtx(10 * at, 10 * at + 15, 59, name) for at, name in enumerate(names)])
    out = path.with_suffix(".txt")
    with out.open("wb") as stream:
        Conversion(str(path), CONVERTERS["text"], ConversionOptions()).run(stream)
    assert [name for name in names if f"  {name}\n" not in out.read_text()] == []


def test_rows_with_long_texts_come_in_smaller_batches(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_tables, "_BATCH_BYTES", 1000)
    payload = '{"a":"%s"}' % ("x" * 400)
    path = export(NVTX_EVENTS=[nvtx(10 * at, None, 34, "m", jsonText=payload) for at in range(30)])
    with path.open("rb") as file:
        recording = nsys.read(file)
        counts = [len(batch.events) for batch in recording.batches if len(batch.events)]
    assert sum(counts) == 30
    assert max(counts) <= 3


def test_a_table_without_a_place_is_counted(export: Any) -> None:
    _, _, problems = read(export(NIC_METRICS=rows("timestamp value", (1, 2), (3, 4))))
    assert messages_of(problems) == ["NIC_METRICS: 2 rows are not read"]


def test_columns_that_are_not_there_are_not_needed(export: Any) -> None:
    _, records, problems = read(
        export(
            RUNTIME=rows("start end globalTid", (1, 2, T)),
            KERNEL=rows("start end", (3, 4)),
            MEMCPY=rows("start end bytes", (5, 6, 7)),
            NVTX_EVENTS=rows("start globalTid eventType", (7, T, 34)),
            SCHED_EVENTS=rows("start globalTid isSchedIn", (8, T, 1)),
        )
    )
    assert [record["type"] for record in records] == [
        "userspace", "gpu_kernel", "transfer", "annotation", "scheduler",
    ]  # fmt: skip
    assert messages_of(problems) == []


# Where it lies ---------------------------------------------------------------------------------------------


def test_a_compressed_export_is_read_from_a_copy(export: Any) -> None:
    path = export(KERNEL=[kernel(1, 2, 3)])
    packed = path.with_suffix(".sqlite.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed)[1] == read(path)[1]


def test_the_export_is_not_written_to(export: Any) -> None:
    path = changed(export(KERNEL=[kernel(1, 2, 3)]), "PRAGMA journal_mode = WAL")
    before = path.read_bytes(), path.stat().st_mtime_ns
    read(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [one.name for one in path.parent.iterdir()] == ["run.sqlite"]


def test_a_name_with_signs_of_an_address_is_a_name(tmp_path: Path) -> None:
    path = make(tmp_path / "a?mode=rwc&b#c%20.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": [kernel(1, 2, 3)]})
    assert len(read(path)[1]) == 1


def test_another_database_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "bookmarks.sqlite", {"moz_places": rows("id url", (1, "https://example.org"))})
    with pytest.raises(FormatError, match="without the tables of a known format"):
        read(path)


def test_half_a_database_is_reported(export: Any) -> None:
    path = export(KERNEL=[kernel(at, at + 1, at) for at in range(200)])
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(InputError, match="cannot be read: "):
        read(path)


# Hostile databases -----------------------------------------------------------------------------------------


def test_values_of_the_wrong_types_are_bad_rows(export: Any) -> None:
    bad = [
        kernel(1, 2, 3) | {name: value}
        for name in kernel(1, 2, 3)
        for value in (None, "text", b"blob", 0.5, -(1 << 63), (1 << 63) - 1)
    ]
    wrong = [
        call(1, 2, LAUNCH, 3) | {name: value}
        for name in call(1, 2, LAUNCH, 3)
        for value in (None, "x", b"y", 1.5)
    ]
    _, records, problems = read(export(KERNEL=bad, RUNTIME=wrong))
    skipped = sum(problem.skipped for problem in problems)
    assert len(records) + skipped == len(bad) + len(wrong)
    assert "CUPTI_ACTIVITY_KIND_KERNEL row 1: its time is not an integer" in messages_of(problems)


def test_a_view_is_not_read_as_a_table(export: Any) -> None:
    path = changed(
        export(KERNEL=[kernel(1, 2, 3)]),
        "CREATE VIEW CUPTI_ACTIVITY_KIND_RUNTIME AS"
        " WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start FROM n)"
        " SELECT start, start AS end, 1 AS globalTid, 1 AS nameId FROM n",
    )
    assert [record["type"] for record in read(path)[1]] == ["gpu_kernel"]


def test_a_computed_column_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    changed(
        path,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL"
        " (start, end, deviceId, streamId AS (length(zeroblob(900000000))))",
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0)",
    )
    (record,) = read(path)[1]
    assert "stream" not in record


def test_a_text_of_megabytes_loses_its_table_alone(export: Any) -> None:
    if not hasattr(sqlite3.Connection, "setlimit"):
        pytest.skip("Python 3.10 cannot limit the length of texts")
    path = export(NVTX_EVENTS=[nvtx(1, None, 34, "x" * (2 << 20))], KERNEL=[kernel(1, 2, 3)])
    _, records, problems = read(path)
    assert [record["type"] for record in records] == ["gpu_kernel"]
    assert any("NVTX_EVENTS: cannot be read on" in one for one in messages_of(problems))


def test_a_long_name_is_cut(export: Any) -> None:
    _, (mark,), _ = read(export(NVTX_EVENTS=[nvtx(1, None, 34, "é" * 9000)]))
    assert len(mark["name"].encode()) == NAME_BYTES_MAX


def test_texts_without_a_key_are_read_once(tmp_path: Path) -> None:
    path = make(tmp_path / "run.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": [kernel(1, 2, 3)]})
    changed(
        path,
        "CREATE TABLE StringIds (id, value)",
        f"INSERT INTO StringIds VALUES ({made.ID['vectorAdd']}, 'f')",
    )
    assert [record["name"] for record in read(path)[1]] == ["f"]


def test_damage_in_a_table_ends_that_table(export: Any) -> None:
    path = export(
        KERNEL=[kernel(at, at + 1, at) for at in range(2000)], MEMCPY=rows("start end bytes", (5, 6, 7))
    )
    with closing(sqlite3.connect(path)) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name GLOB '*KERNEL'").fetchone()
    data = bytearray(path.read_bytes())
    data[(root - 1) * 512 : root * 512] = b"\xff" * 512
    path.write_bytes(data)
    _, records, problems = read(path)
    assert [record["type"] for record in records] == ["transfer"]
    assert any("KERNEL: cannot be read on: " in one for one in messages_of(problems))


def test_words_that_are_not_text_are_an_error_too(export: Any) -> None:
    path = export(KERNEL=[kernel(1, 2, 3)])
    data = path.read_bytes()
    path.write_bytes(data.replace(b"CREATE TABLE", b"CREATE \xc9ABLE", 1))
    with pytest.raises(InputError, match="cannot be read: the database is broken"):
        read(path)


@pytest.mark.slow
def test_any_damage_is_an_error_or_reported(tmp_path: Path) -> None:
    rng = Random(7)
    whole = make(tmp_path / "run.sqlite", made.tables()).read_bytes()
    path = tmp_path / "broken.sqlite"
    outcomes = set()
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 10, 100))):
            at = rng.randrange(100, len(data))
            data[at : at + 4] = rng.randbytes(4)
        path.write_bytes(data)
        try:
            read_all_of(path)
            outcomes.add("read")
        except (InputError, FormatError):
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def read_all_of(path: Path) -> None:
    out = io.BytesIO()
    Conversion(str(path), CONVERTERS["text"], ConversionOptions()).run(out)


def test_open_numbers_of_ranges_have_an_end(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "RANGE_LIMIT", 1)
    _, records, _ = read(export(NVTX_EVENTS=[nvtx(at, None, 60, str(at)) for at in range(4)]))
    assert [(record["phase"], record.get("range")) for record in records] == [
        ("B", 0), ("B", 1), ("X", None), ("X", None),
    ]  # fmt: skip


def test_an_event_without_a_process_has_none(export: Any) -> None:
    diagnostics = rows("timestamp text globalPid", (1, "started", pid(0)), (2, "there", P))
    _, records, _ = read(export(DIAGNOSTIC_EVENT=diagnostics))
    assert [record.get("pid") for record in records] == [None, 300]


# GPUs ------------------------------------------------------------------------------------------------------


def test_what_an_sm_holds_is_kept(export: Any) -> None:
    gpu = {
        "id": 0, "name": "NVIDIA H200", "smCount": 132, "computeMajor": 9, "computeMinor": 0,
        "maxWarpsPerSm": 64, "maxBlocksPerSm": 32, "maxRegistersPerSm": 65536, "maxShmemPerSm": 233472,
    }  # fmt: skip
    header, *_ = read(export(KERNEL=[kernel(50, 60, 1)], TARGET_INFO_GPU=[gpu]))
    assert header.gpus == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "sm_count": 132,
            "compute_capability": "9.0",
            "max_warps_per_sm": 64,
            "max_blocks_per_sm": 32,
            "registers_per_sm": 65536,
            "shared_bytes_per_sm": 233472,
        }
    ]
