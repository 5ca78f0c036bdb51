"""The reader of rocpd databases: both forms of their tables, launches, ranges, and what is missing."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.batches import read_all
from tests.support.rocpd_database import BASE_NS, ENDING, KERNEL, apart, inline, make
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.converters import CONVERTERS
from tracepipe.event.checks import first_fault
from tracepipe.event.model import Header, Problem, Record
from tracepipe.recording.convert import Conversion, ConversionOptions
from tracepipe.recording.reading import open_recording


def read(path: Path) -> tuple[Header, list[Record], list[Problem]]:
    with open_recording(str(path)) as opened:
        records, problems = read_all(opened.recording)
    assert [first_fault(record) for record in records] == [None] * len(records)
    return opened.recording.header, records, problems


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make(tmp_path / "run.db", inline())


def test_both_forms_of_tables_give_the_same(tmp_path: Path, database: Path) -> None:
    other = make(tmp_path / "later.db", apart())
    assert read(other) == read(database)


def test_times_are_of_the_clock_that_goes_on_in_sleep(database: Path) -> None:
    header, records, _ = read(database)
    assert header.clock == "boottime"
    assert min(record["ts_ns"] for record in records if record["type"] != "name") == BASE_NS + 1000


def test_numbers_are_what_their_tables_say(database: Path) -> None:
    header, records, _ = read(database)
    (kernel,) = [record for record in records if record["name"] == "vector_add<float>"]
    assert kernel == {
        "type": "gpu_kernel", "name": "vector_add<float>", "phase": "X", "ts_ns": BASE_NS + 50_000,
        "dur_ns": 10_000, "pid": 500, "gpu": 0, "stream": 3, "grid": [65, 2, 1], "block": [256, 1, 1],
        "launch": 7,
        "args": {
            "function": KERNEL, "dispatch": 1, "shared_bytes": 64, "private_bytes": 0, "tid": 500, "queue": 1,
        },
    }  # fmt: skip
    assert header.gpus == [{"index": at, "name": "AMD Instinct MI350X"} for at in (0, 1)]


def test_a_correlation_number_counts_in_its_process(database: Path) -> None:
    _, records, _ = read(database)
    launches = [(record["type"], record["pid"], record["launch"]) for record in records if "launch" in record]
    assert Counter(launches) == Counter(
        [
            (kind, pid, launch)
            for kind, pid, launch in (
                ("userspace", 500, 7), ("gpu_kernel", 500, 7), ("userspace", 500, 8), ("transfer", 500, 8),
                ("userspace", 501, 1 << 32 | 7), ("gpu_kernel", 501, 1 << 32 | 7),
            )
        ]
    )  # fmt: skip


def test_arguments_stand_in_their_order(database: Path) -> None:
    _, records, _ = read(database)
    (first, *_) = [record for record in records if record["name"] == "hipLaunchKernel"]
    assert list(first["args"].items()) == [("function", "0x7f"), ("numBlocks", "64")]


def test_without_an_index_no_arguments_are_looked_for(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DROP INDEX arg_event")
    _, records, problems = read(database)
    assert not any(
        "function" in record.get("args", {}) for record in records if record["type"] == "userspace"
    )
    assert any("arguments of calls are not read" in problem.message for problem in problems)


def test_markers_have_the_name_that_they_state(database: Path) -> None:
    _, records, _ = read(database)
    assert [(record["name"], record["phase"]) for record in records if record["type"] == "annotation"] == [
        ("step", "B"), ("forward", "B"), ("forward", "E"), ("here", "I"), ("crosses", "X"), ("step", "E"),
    ]  # fmt: skip


def test_tables_that_name_rows_without_a_key_are_left_out(tmp_path: Path) -> None:
    path = make(tmp_path / "run.db", inline())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"ALTER TABLE rocpd_event{ENDING} RENAME TO kept")
        connection.execute(f"CREATE TABLE rocpd_event{ENDING} AS SELECT * FROM kept")
    _, records, problems = read(path)
    assert {record["type"] for record in records} == {"name"}
    assert any("that have no key: it is not read" in problem.message for problem in problems)


def test_several_recordings_of_one_database_are_read(tmp_path: Path) -> None:
    path = make(tmp_path / "run.db", inline())
    other = make(tmp_path / "other.db", inline(), "_0000_8")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ATTACH ? AS other", (str(other),))
        for (sql,) in connection.execute(
            "SELECT sql FROM other.sqlite_master WHERE type = 'table'"
        ).fetchall():
            name = sql.split('"')[1]
            connection.execute(sql)
            connection.execute(f'INSERT INTO "{name}" SELECT * FROM other."{name}"')
    once = len(read(other)[1])
    assert len(read(path)[1]) == 2 * once


def test_every_row_is_in_the_timeline_at_its_nanosecond(database: Path) -> None:
    out = database.with_suffix(".pftrace")
    with out.open("wb") as stream:
        Conversion(str(database), CONVERTERS["perfetto"], ConversionOptions()).run(stream)
    with RealTraceProcessor(out) as tp:
        assert tp.problems() == []
        found = [tuple(row.values()) for row in tp.rows("select ts, dur, category from slice where dur >= 0")]
        arrows = [tuple(row.values()) for row in tp.rows("select a.ts, b.ts as to_ts from flow"
                  " join slice a on a.id = slice_out join slice b on b.id = slice_in")]  # fmt: skip
    with closing(sqlite3.connect(database)) as connection:
        for kind, category in (
            ("kernel_dispatch", "gpu"),
            ("memory_copy", "gpu"),
            ("memory_allocate", "memory"),
        ):
            rows = connection.execute(f'SELECT start, max("end" - start, 0) FROM rocpd_{kind}').fetchall()
            assert [row for row in rows if (*row, category) not in found] == []
        regions = connection.execute('SELECT start, "end" - start FROM rocpd_region').fetchall()
    assert [row for row in regions if row not in [one[:2] for one in found]] == []
    assert Counter(arrows) == Counter(
        [(BASE_NS + a, BASE_NS + b) for a, b in ((10_000, 50_000), (20_000, 66_000), (11_000, 16_000))]
    )
