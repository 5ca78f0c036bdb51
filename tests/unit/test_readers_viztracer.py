"""VizTracer's form of Chrome's trace JSON: its clock, which stands behind the events, and what it lost."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.support.batches import read_all
from tracepipe.event.model import Header, Problem, Record
from tracepipe.readers import chrome

CALL = {"ph": "X", "cat": "FEE", "name": "f (a.py:1)", "pid": 7, "tid": 8, "ts": 58.5e9, "dur": 2.5}
NAME = {"ph": "M", "name": "process_name", "pid": 7, "tid": 7, "args": {"name": "MainProcess"}}
OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 8, "ts": 58.6e9, "dur": 1}


def read(*events: dict[str, Any], **more: Any) -> tuple[Header, list[Record], list[Problem]]:
    text = json.dumps({"traceEvents": events, "viztracer_metadata": {"version": "1.1.1", **more}})
    recording = chrome.read(io.BytesIO(text.encode()))
    records, problems = read_all(recording)
    return recording.header, [record for record in records if record["type"] != "name"], problems


def test_times_are_those_of_clock_monotonic_which_the_base_relates_to_the_walls() -> None:
    header, (record,), problems = read(CALL, baseTimeNanoseconds=1_700_000_000_000_000_000)
    assert (header.clock, header.engine) == ("monotonic", "VizTracer 1.1.1")
    first_ns = 58_500_000_000_000
    assert header.start == {"monotonic_ns": first_ns, "realtime_ns": first_ns + 1_700_000_000_000_000_000}
    assert (record["ts_ns"], record["dur_ns"]) == (first_ns, 2500)
    assert problems == []


def test_without_a_base_the_walls_clock_is_not_known() -> None:
    header, (record,), _ = read(CALL)
    assert (header.clock, bool(header.start), record["ts_ns"]) == ("monotonic", False, 58_500_000_000_000)


@pytest.mark.parametrize("category", ["FEE", "fee", "INSTANT", "instant"])
def test_calls_and_logs_are_one_layer_whatever_their_category(category: str) -> None:
    _, records, _ = read(CALL, CALL | {"cat": category, "ts": 58.5e9 + 1})
    assert [(record["layer"], record.get("args")) for record in records] == [("python", None)] * 2


def test_other_categories_are_kept_in_the_layer() -> None:
    _, records, _ = read(CALL, CALL | {"cat": "mine", "ts": 58.5e9 + 1})
    assert (records[1]["layer"], records[1]["args"]) == ("python", {"cat": "mine"})


def test_events_of_pytorch_in_front_are_on_the_same_clock() -> None:
    # With --log_torch they stand first, on VizTracer's clock.
    header, records, _ = read(OPERATOR, CALL, baseTimeNanoseconds=1_700_000_000_000_000_000)
    assert header.clock == "monotonic"
    assert [(record["type"], record.get("layer"), record["ts_ns"]) for record in records] == [
        ("hook", "python", 58_500_000_000_000),
        ("annotation", None, 58_600_000_000_000),
    ]


def test_the_marker_is_an_instant_of_the_process() -> None:
    _, records, _ = read(NAME, CALL, sync_marker=58500000000.25)
    assert [(r["name"], r["phase"], r["pid"], r["ts_ns"]) for r in records] == [
        ("f (a.py:1)", "X", 7, 58_500_000_000_000),
        ("sync marker", "I", 7, 58_500_000_000_250),
    ]


@pytest.mark.parametrize(
    ("ts", "message"), [(0, {}), (-4.5, {"sync_marker": 58.5e9}), (3, {"sync_marker": 58.5e9})]
)
def test_times_that_were_aligned_are_on_a_clock_of_their_own(ts: float, message: dict[str, Any]) -> None:
    header, records, problems = read(
        CALL | {"ts": ts}, CALL | {"ts": 9}, baseTimeNanoseconds=10**18, **message
    )
    assert (header.clock, bool(header.start)) == ("trace", False)
    ahead_ns = max(0, int(-ts * 1000))
    assert [record["ts_ns"] for record in records] == [int(ts * 1000) + ahead_ns, 9000 + ahead_ns]
    words = f"times begin {ahead_ns} ns before 0: this is added to all of them"
    assert problems == ([Problem(0, "ts", words, skipped=False)] if ahead_ns else [])


def test_a_full_buffer_is_a_loss_before_the_first_event() -> None:
    _, records, problems = read(CALL | {"ts": 58.6e9}, CALL, overflow=True)
    loss = next(record for record in records if record["type"] == "loss")
    assert (loss["layer"], loss["count"], loss["ts_ns"]) == ("hook", 1, 58_500_000_000_000)
    assert [(problem.field, problem.skipped) for problem in problems] == [
        ("viztracer_metadata.overflow", False)
    ]


def test_a_full_buffer_without_events_is_stated() -> None:
    _, records, problems = read(NAME, overflow=True)
    assert records == []
    assert [problem.field for problem in problems] == ["viztracer_metadata.overflow"]


@pytest.mark.parametrize(
    "message", [17, None, ["overflow"], {"sync_marker": "soon", "baseTimeNanoseconds": -1}]
)
def test_members_that_are_not_viztracers_are_passed_over(message: Any) -> None:
    text = json.dumps({"viztracer_metadata": message, "traceEvents": [CALL]})
    recording = chrome.read(io.BytesIO(text.encode()))
    records, problems = read_all(recording)
    assert (recording.header.clock, len(records), problems) == ("monotonic", 1, [])
