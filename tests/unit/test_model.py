"""The types that all stages share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.batches import records_of, source_batch
from tracepipe.event.checks import first_fault
from tracepipe.event.columns import SPECIAL, UNDATED_NS, signed, unsigned
from tracepipe.event.model import (
    HOST_LAYERS,
    LAYERS,
    RECORDS,
    SCHEMA_VERSION,
    STALLS,
    Footer,
    Header,
    Layers,
    Problem,
)
from tracepipe.event.shape import Shape, shape_of
from tracepipe.event.tables import Tables
from tracepipe.layout.timeline import Track


def test_a_new_header_is_a_good_one() -> None:
    record = Header(clock="monotonic", tool="tracepipe 1", rank=0).to_record()
    assert first_fault(record) is None
    assert record == {
        "type": "header", "schema": SCHEMA_VERSION, "clock": "monotonic", "tool": "tracepipe 1", "rank": 0,
    }  # fmt: skip
    assert first_fault(Footer().to_record()) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"schema":"tracepipe/1","rank":0,"type":"header","command":[],"as_read":{"type":1}}',
        '{"type":"header","schema":"tracepipe/1","host":"","newer":[1,{"a":null}],"layers":{"on":1,"got":[]},'
        '"start":{"realtime_ns":5,"other_ns":"x"},"WRITTEN_EMPTY":7,"gpus":[{"index":0}]}',
    ],
)
def test_a_header_is_written_as_it_was_read(text: str) -> None:
    header = Header.from_record(json.loads(text))
    assert json.dumps(header.to_record(), separators=(",", ":")) == text
    changed = replace(header, world_size=2, layers=Layers(asked=["hook"])).to_record()
    assert changed == json.loads(text) | {"world_size": 2, "layers": {"asked": ["hook"]}}


def test_the_footer_of_a_newer_version_keeps_its_fields() -> None:
    record = {"type": "footer", "counts": {"hook": 1}, "losses": {}, "newer": 1, "end": {"monotonic_ns": 5}}
    footer = Footer.from_record(record)
    assert footer.to_record() == record
    assert (footer.end_ns("monotonic"), footer.end_ns("realtime"), footer.ended_by) == (5, None, "")


def test_every_layer_has_its_record() -> None:
    assert set(LAYERS) <= set(RECORDS)
    assert set(LAYERS) > HOST_LAYERS
    others = {"header", "clock", "loss", "window", "stack", "name", "footer", "gpu_thread_exit"}
    assert set(RECORDS) - set(LAYERS) == others | set(STALLS)


def test_a_record_gives_its_time_and_its_shape_apart() -> None:
    record = {
        "type": "kernel",
        "name": "f",
        "phase": "X",
        "ts_ns": 7,
        "tid": 3,
        "dur_ns": 5,
        "args": {"a": 1},
    }
    tables = Tables()
    batch = source_batch([record, record | {"ts_ns": 9, "dur_ns": 8, "args": {"a": 2}}], tables)
    assert batch.events.ts_ns.tolist() == [7, 9]
    assert batch.events.dur_ns.tolist() == [5, 8]
    assert tables.shapes == [Shape("kernel", "f", "X", tid=3, has_dur=True)]
    assert batch.events.shape.tolist() == [0, 0]
    assert [tables.args(number) for number in batch.events.args.tolist()] == [{"a": 1}, {"a": 2}]
    assert records_of(batch, tables)[0] == record


def test_records_that_are_not_events_have_no_shape() -> None:
    tables = Tables()
    loss, footer = {"type": "loss", "count": 1}, {"type": "footer", "counts": {}, "losses": {}}
    batch = source_batch([loss, loss | {"ts_ns": 4}, footer], tables)
    assert batch.events.ts_ns.tolist() == [UNDATED_NS, 4, UNDATED_NS]
    assert batch.events.shape.tolist() == [SPECIAL] * 3
    assert batch.events.args.tolist() == [0, 1, 2]
    assert [*batch.others] == [loss, loss | {"ts_ns": 4}, footer]
    assert tables.shapes == []


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"type": "kernel"}, ("kernel", None, 1, 2)),
        ({"type": "userspace", "dur_ns": 4, "launch": 2}, ("userspace", None, 1, 2)),
        ({"type": "scheduler", "phase": "B"}, ("kernel", None, 1, 2)),
        ({"type": "scheduler", "phase": "I"}, ("scheduler", None, 1, 2)),
        ({"type": "scheduler", "phase": "X", "name": "running"}, ("scheduler", None, 1, 2)),
        ({"type": "transfer"}, ("transfer", None, 1, 2)),
        ({"type": "transfer", "gpu": 3, "stream": 4}, ("gpu", 3, 4)),
        ({"type": "gpu_kernel"}, ("gpu", 0, 0)),
        ({"type": "hook", "layer": "pool"}, ("hook", "pool", 1, 2)),
        ({"type": "gpu_thread"}, None),
    ],
)
def test_a_shape_decides_what_its_events_nest_with(fields: dict[str, Any], row: Any) -> None:
    assert shape_of({"name": "f", "phase": "E", "pid": 1, "tid": 2} | fields).row == row


def test_the_place_of_a_thread_is_not_part_of_its_shape() -> None:
    thread = {"type": "gpu_thread", "name": "k", "phase": "I", "ts_ns": 1}
    records = [
        thread | {"block": [1, 2, 3], "thread": [4, 5, 6]},
        thread | {"block": [7, 0, 0]},
        thread | {"thread": [8, 0, 0]},
        thread,
    ]
    tables = Tables()
    batch = source_batch(records, tables)
    assert len(tables.shapes) == 1
    assert records_of(batch, tables) == records
    # Of a kernel `block` is a size, and the same for all of its launches.
    kernel = {
        "type": "gpu_kernel",
        "name": "k",
        "phase": "B",
        "ts_ns": 1,
        "block": [64, 1, 1],
        "grid": [2, 1, 1],
    }
    assert shape_of(kernel).block == (64, 1, 1)
    assert shape_of(kernel).grid == (2, 1, 1)


@pytest.mark.parametrize("launch", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_launch_of_64_bits_fits_its_column(launch: int) -> None:
    assert -(1 << 63) <= signed(launch) < 1 << 63
    assert unsigned(signed(launch)) == launch


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem(17, "ts_ns", "is missing"), "run.jsonl:17: ts_ns: is missing"),
        (Problem(17, "", "is not JSON"), "run.jsonl:17: is not JSON"),
        (Problem(0, "", "is damaged"), "run.jsonl: is damaged"),
    ],
)
def test_a_problem_names_its_place(problem: Problem, text: str) -> None:
    assert problem.at("run.jsonl") == text


def test_a_track_is_called_by_its_name_and_its_number() -> None:
    process = Track(1, None, "process", "app", pid=7)
    thread = Track(2, process, "thread", "app", pid=7, tid=8)
    calls = Track(3, thread, "slices", "CUDA API", pid=7, tid=8)
    assert [track.label() for track in (process, thread, calls)] == ["app 7", "app 8", "CUDA API"]
    assert Track(1, None, "process", "process (pid not recorded)").label() == "process (pid not recorded)"


def test_an_extra_track_stands_between_its_own_and_the_next() -> None:
    first, second = Track(1, None, "slices", "a", rank=1), Track(2, None, "slices", "b", rank=2)
    overlaps = [Track(9 + at, None, "slices", "a", rank=1, overlap=at) for at in (1, 64)]
    assert first.order < overlaps[0].order < overlaps[1].order < second.order
