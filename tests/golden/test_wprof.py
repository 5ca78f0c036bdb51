"""What a session of wprof says is in the trace made of it, by the real trace processor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.both import converted
from tests.golden.cases import FIXTURES
from tests.support.trace_processor import RealTraceProcessor

Both = tuple[list[dict[str, Any]], RealTraceProcessor]
_SLICES = "select name, ts, dur from slice where category != 'tracepipe'"
_FLOWS = """
select f.ts as start_ns, t.ts as end_ns from flow
join slice f on f.id = slice_out join slice t on t.id = slice_in"""
_RAN = "select ts, dur, tid, ucpu from sched join thread using (utid) where tid > 0 order by ts"
_WOKEN = """
select t.tid, w.tid as by_tid from thread_state s
join thread t using (utid) join thread w on w.utid = s.waker_utid"""
_SWITCHING = {"switch", "waking", "wakeup_new"}
_ENDS = ("pytrace", "pytorch", "utrace")


def ns(seconds: float) -> int:
    return round(seconds * 10**9)


def span(event: dict[str, Any]) -> tuple[int, int]:
    start_ns = max(0, ns(event["ts"]) - ns(event["dur"]))
    return start_ns, ns(event["ts"]) - start_ns


def is_end(event: dict[str, Any]) -> bool:
    what, _, end = event["t"].partition("_")
    return what in _ENDS and end in ("entry", "exit")


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    path = FIXTURES / "wprof" / "input.jsonl"
    output, account = converted(path, "perfetto")
    assert account.skipped == 0
    with RealTraceProcessor(output) as tp:
        assert tp.problems() == []
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        yield [line for line in lines if "t" in line], tp


def test_every_span_is_there_with_its_start(both: Both) -> None:
    events, tp = both
    found = Counter((row["ts"], row["dur"]) for row in tp.rows(_SLICES))
    assert Counter(span(event) for event in events if "dur" in event) - found == Counter()


def test_every_entry_and_exit_is_a_slice(both: Both) -> None:
    events, tp = both
    ends: dict[str, list[int]] = {}
    for event in filter(is_end, events):
        ends.setdefault(event["name"], []).append(ns(event["ts"]))
    wanted = Counter((name, start, end - start) for name, (start, end) in ends.items())
    assert wanted.total() == 3
    found = Counter((row["name"], row["ts"], row["dur"]) for row in tp.rows(_SLICES))
    assert wanted - found == Counter()


def test_every_instant_is_there(both: Both) -> None:
    events, tp = both
    wanted = Counter(
        ns(event["ts"])
        for event in events
        if "dur" not in event and event["t"] not in _SWITCHING and not is_end(event)
    )
    assert Counter(row["ts"] for row in tp.rows(_SLICES) if row["dur"] == 0) == wanted


def test_threads_run_when_they_were_switched_in_and_know_who_woke_them(both: Both) -> None:
    _, tp = both
    ran = [(row["ts"], row["dur"], row["tid"], row["ucpu"]) for row in tp.rows(_RAN)]
    assert ran == [(20007, 109993, 4100, 3), (64900, 66100, 4107, 5)]
    assert {(row["tid"], row["by_tid"]) for row in tp.rows(_WOKEN)} == {(4107, 4100), (4200, 4100)}


def test_flows_lead_from_calls_to_their_work(both: Both) -> None:
    events, tp = both
    calls = {event["corr_id"]: event for event in events if event["t"] == "cuda_api"}
    work = [event for event in events if "device_id" in event and event["corr_id"] in calls]
    wanted = Counter((span(calls[event["corr_id"]])[0], span(event)[0]) for event in work)
    assert wanted.total() == 2
    assert Counter((row["start_ns"], row["end_ns"]) for row in tp.rows(_FLOWS)) == wanted
