"""Exports of Nsight Systems: what the trace processor says of the timeline is what the database says."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from tests.golden.cases import FIXTURES, Case
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.kernel_names import kernel_title
from tracepipe.readers.nsys import function_name


def asked(case: Case, sql: str) -> list[Any]:
    """What the database says; a text by its number is `text(number)`."""
    with closing(sqlite3.connect(f"file:{case.input}?mode=ro", uri=True)) as database:
        texts = dict(database.execute("SELECT id, value FROM StringIds"))
        database.create_function("text", 1, texts.get)
        database.create_function("title", 1, lambda text: kernel_title(text))
        database.create_function("plain", 1, lambda text: function_name(text))
        (base_ns,) = database.execute("SELECT systemClockNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        database.create_function("at", 1, lambda ns: ns + base_ns)
        return database.execute(sql).fetchall()


@pytest.fixture(scope="module", params=["nsys", "nsys-h100"])
def both(request: pytest.FixtureRequest) -> Any:
    case = Case(FIXTURES / request.param)
    with RealTraceProcessor(case.convert("perfetto")[0]) as tp:
        assert tp.problems() == []
        yield case, lambda sql: [tuple(row.values()) for row in tp.rows(sql)]


def test_every_kernel_is_there_at_its_nanosecond(both: Any) -> None:
    case, traced = both
    wanted = asked(
        case,
        "SELECT at(start), max(end - start, 0), title(text(demangledName)) FROM CUPTI_ACTIVITY_KIND_KERNEL",
    )
    found = traced(
        "select ts, dur, name from slice"
        " where category = 'gpu' and extract_arg(arg_set_id, 'debug.registers') is not null"
    )
    assert Counter(found) == Counter(wanted)
    assert wanted


def test_every_call_is_there_with_its_thread_and_result(both: Any) -> None:
    case, traced = both
    wanted = asked(
        case,
        "SELECT at(start), end - start, plain(text(nameId)), globalTid & 0xFFFFFF, returnValue"
        " FROM CUPTI_ACTIVITY_KIND_RUNTIME",
    )
    found = traced(
        "select slice.ts, slice.dur, slice.name, thread.tid, extract_arg(slice.arg_set_id, 'debug.result')"
        " from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)"
        " where slice.category = 'userspace'"
    )
    assert Counter(found) == Counter(wanted)
    assert wanted


def test_every_copy_is_there_with_its_size(both: Any) -> None:
    case, traced = both
    wanted = asked(case, "SELECT at(start), end - start, bytes FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    found = traced(
        "select ts, dur, extract_arg(arg_set_id, 'debug.size') from slice"
        " where category = 'gpu' and name in ('HtoD', 'DtoH', 'DtoD')"
    )
    assert Counter(found) == Counter(wanted)
    assert wanted


def test_every_whole_range_is_there(both: Any) -> None:
    case, traced = both
    has_ids = "textId" in {row[1] for row in asked(case, "PRAGMA table_info(NVTX_EVENTS)")}
    name = "coalesce(text, text(textId))" if has_ids else "text"
    wanted = asked(
        case,
        f"SELECT at(start), end - start, {name} FROM NVTX_EVENTS"
        " WHERE eventType IN (59, 60) AND end IS NOT NULL",
    )
    found = traced(
        "select slice.ts, slice.dur, slice.name from slice join track on slice.track_id = track.id"
        " where slice.category = 'annotation' and track.name not glob 'stream*'"
        " and slice.name not in ('never ends', 'mark', 'said', 'thread name')"
    )
    assert Counter(found) == Counter(wanted)
    assert wanted


def test_every_flow_leads_from_a_call_to_its_work(both: Any) -> None:
    case, traced = both
    work = " UNION ALL ".join(
        f"SELECT start, correlationId, globalPid FROM CUPTI_ACTIVITY_KIND_{kind}"
        for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
        if asked(case, f"SELECT 1 FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_{kind}'")
    )
    wanted = asked(
        case,
        f"SELECT at(call.start), at(work.start) FROM ({work}) work JOIN CUPTI_ACTIVITY_KIND_RUNTIME call"
        " ON call.correlationId = work.correlationId AND call.globalTid >> 24 = work.globalPid >> 24",
    )
    found = traced(
        "select a.ts, b.ts as work_ts from flow"
        " join slice a on a.id = slice_out join slice b on b.id = slice_in"
    )
    assert Counter(found) == Counter(wanted)
    assert wanted
