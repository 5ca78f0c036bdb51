"""Profiles of XLA: every event of the file is in the trace made of it, by the real trace processor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.golden.both import converted
from tests.golden.cases import FIXTURES
from tests.support.trace_processor import RealTraceProcessor
from tests.support.xplane import Event, events_of, start_of

Both = tuple[list[Event], int, RealTraceProcessor]
_SLICES = "select name, ts, dur from slice where category != 'tracepipe'"
_FLOWS = """
select f.ts as start_ns, t.ts as end_ns from flow
join slice f on f.id = slice_out join slice t on t.id = slice_in"""


@pytest.fixture(scope="module", params=["xplane-cpu", "xplane-mi300"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    path = FIXTURES / request.param / "input.pb"
    output, account = converted(path, "perfetto")
    assert account.skipped == 0
    data = path.read_bytes()
    with RealTraceProcessor(output) as tp:
        assert tp.problems() == []
        yield events_of(data), start_of(data), tp


def test_every_event_is_there_at_its_nanosecond(both: Both) -> None:
    events, start_ns, tp = both
    wanted = Counter((one.name.removeprefix("$"), start_ns + one.start_ns, one.dur_ns) for one in events)
    found = Counter((row["name"], row["ts"], row["dur"]) for row in tp.rows(_SLICES))
    assert wanted - found == Counter()
    assert found.keys() == wanted.keys()


def test_every_flow_leads_from_a_call_to_its_work_or_to_a_consumer(both: Both) -> None:
    events, start_ns, tp = both
    calls = {
        one.stats["correlation_id"]: one
        for one in events
        if one.plane.startswith("/host") and one.stats.get("correlation_id")
    }
    pairs = [
        (calls[id], one)
        for one in events
        if one.plane.startswith("/device:GPU") and (id := one.stats.get("correlation_id")) in calls
    ]
    made = {(one.stats["_pt"], one.stats["_p"]): one for one in events if "_p" in one.stats}
    pairs += [
        (made[context], one)
        for one in events
        if "_c" in one.stats and (context := (one.stats["_ct"], one.stats["_c"])) in made
    ]
    wanted = Counter((start_ns + one.start_ns, start_ns + two.start_ns) for one, two in pairs)
    assert wanted.total() > 2
    assert Counter((row["start_ns"], row["end_ns"]) for row in tp.rows(_FLOWS)) == wanted
