"""What VizTracer recorded is in the trace made of it, by the real trace processor: every call, log and value
of a counter at its nanosecond of CLOCK_MONOTONIC, which the file's base relates to CLOCK_REALTIME.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest

from tests.golden.both import converted
from tests.golden.cases import FIXTURES
from tests.support.trace_processor import RealTraceProcessor

_SLICES = """
select s.name, s.ts, s.dur, tid from slice s left join thread_track t on t.id = s.track_id
left join thread using (utid) where s.category = 'python'"""
_COUNTERS = """
select t.name, c.ts, c.value from counter c join track t on t.id = c.track_id"""
_AHEAD = """
select r.clock_value - m.clock_value as ns from clock_snapshot r join clock_snapshot m using (snapshot_id)
where r.clock_name = 'REALTIME' and m.clock_name = 'MONOTONIC'"""


def ns(us: Any) -> int:
    return int((Decimal(us) * 1000).to_integral_value(ROUND_HALF_UP))


@pytest.fixture(scope="module", params=["viztracer", "viztracer-overflow"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, Any], RealTraceProcessor]]:
    path = FIXTURES / request.param / "input.json"
    output, account = converted(path, "perfetto")
    assert account.skipped == 0
    with RealTraceProcessor(output) as tp:
        assert tp.problems() == []
        yield json.loads(path.read_text(), parse_float=Decimal), tp


def test_every_call_and_log_is_there(both: tuple[dict[str, Any], RealTraceProcessor]) -> None:
    source, tp = both
    wanted = Counter(
        (event["name"], ns(event["ts"]), ns(event.get("dur", 0)), event["tid"])
        for event in source["traceEvents"]
        if event["ph"] in "XiNOD"
    )
    wanted["sync marker", ns(source["viztracer_metadata"]["sync_marker"]), 0, None] = 1
    found = Counter((row["name"], row["ts"], row["dur"], row["tid"]) for row in tp.rows(_SLICES))
    assert found == wanted


def test_every_value_of_a_counter_is_there(both: tuple[dict[str, Any], RealTraceProcessor]) -> None:
    source, tp = both
    wanted = Counter(
        (f"{event['name']} {series}", ns(event["ts"]), float(value))
        for event in source["traceEvents"]
        if event["ph"] == "C"
        for series, value in event["args"].items()
    )
    found = Counter((row["name"], row["ts"], row["value"]) for row in tp.rows(_COUNTERS))
    assert found == wanted


def test_the_walls_clock_is_known(both: tuple[dict[str, Any], RealTraceProcessor]) -> None:
    source, tp = both
    assert [row["ns"] for row in tp.rows(_AHEAD)] == [source["viztracer_metadata"]["baseTimeNanoseconds"]]
