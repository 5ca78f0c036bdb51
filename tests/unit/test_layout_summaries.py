"""The rows of a GPU and its SMs, which Perfetto's UI shows while the groups are closed; how busy a GPU is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tracepipe.layout.merging
import tracepipe.readers.tracepipe1
from tests.golden.both import converted
from tests.support.trace_processor import RealTraceProcessor

HEADER = {
    "type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"],
    "start": {"monotonic_ns": 0},
}  # fmt: skip
ROWS = """
select track.name as gpu, slice.name, ts, dur from slice join track on track.id = track_id
where category = 'summary' order by gpu, ts"""
BUSY = """
select parent.name as gpu, ts, value, unit from counter c join counter_track t on t.id = c.track_id
join track own on own.id = t.id join track parent on parent.id = own.parent_id
where t.name = 'GPU busy' order by gpu, ts"""


def kernel(ts_ns: int, dur_ns: int, name: str, stream: int = 1, gpu: int = 0) -> dict[str, Any]:
    """A kernel."""
    record = {"ts_ns": ts_ns, "type": "gpu_kernel", "name": name, "phase": "X", "dur_ns": dur_ns}
    return record | {"gpu": gpu, "stream": stream}


def warps(ts_ns: int, sm: list[int], entry_ns: list[int], exit_ns: list[int], **more: Any) -> dict[str, Any]:
    """Warps of a launch, each on a slot of its own."""
    slots = [*range(len(sm))]
    record = {"ts_ns": ts_ns, "type": "gpu_warp", "name": "k", "gpu": 0, "warp": slots, "sm": sm}
    return record | {"slot": slots, "entry_ns": entry_ns, "exit_ns": exit_ns} | more


def written(records: list[dict[str, Any]], folder: Path, **header: Any) -> bytes:
    """The trace of records after a header."""
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEADER | header, *records]))
    return converted(path, "perfetto")[0]


def asked(trace: bytes, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query about a trace in which nothing is wrong."""
    with RealTraceProcessor(trace) as tp:
        assert tp.problems() == []
        assert tp.rows("select count(*) as n from slice where dur < 0") == [{"n": 0}]
        return [tuple(row.values()) for row in tp.rows(query)]


def shown(records: list[dict[str, Any]], folder: Path) -> list[tuple[Any, ...]]:
    """What the rows of GPUs and SMs show."""
    return asked(written(records, folder), ROWS)


def test_kernels_stand_in_one_row_for_each_gpu(tmp_path: Path) -> None:
    records = [kernel(100, 50, "a"), kernel(150, 20, "b"), kernel(170, 0, "c"), kernel(120, 5, "d", gpu=1)]
    assert shown(records, tmp_path) == [
        ("GPU 0", "a", 100, 50),
        ("GPU 0", "b", 150, 20),
        ("GPU 0", "c", 170, 0),
        ("GPU 1", "d", 120, 5),
    ]


def test_a_kernel_that_begins_during_another_is_on_its_stream_alone(tmp_path: Path) -> None:
    records = [
        kernel(100, 50, "a"),
        kernel(110, 900, "beneath", stream=2),
        kernel(150, 50, "b"),
        kernel(190, 5, "inside", stream=3),
        kernel(400, 1, "c", stream=3),
    ]
    assert [row[1] for row in shown(records, tmp_path)] == ["a", "b", "c"]


def test_copies_and_calls_are_not_summed_up(tmp_path: Path) -> None:
    copy = kernel(100, 50, "HtoD") | {"type": "transfer"}
    call = {"ts_ns": 5, "type": "userspace", "name": "f", "phase": "X", "dur_ns": 1, "pid": 7, "tid": 7}
    assert shown([call, copy], tmp_path) == []


@pytest.mark.parametrize("kept_max", [1 << 15, 0])
def test_few_events_at_a_time_show_the_same(
    kept_max: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With none kept, names and shapes have other numbers in each batch."""
    records = [kernel(100 * at, 90 + at % 3 * 20, f"k{at % 7}", stream=at % 2) for at in range(60)]
    want = shown(records, tmp_path)
    assert 30 < len(want) < 60
    monkeypatch.setattr(tracepipe.readers.tracepipe1, "CHUNK_BYTES", 200)
    monkeypatch.setattr(tracepipe.layout.merging, "WINDOW_EVENTS", 3)
    monkeypatch.setattr("tracepipe.event.tables.KEPT_MAX", kept_max)
    assert shown(records, tmp_path) == want


def test_a_gpu_is_busy_while_anything_is_on_a_stream(tmp_path: Path) -> None:
    """Kernels of two streams at one time make it no busier than one, and a copy as busy as a kernel."""
    copy = kernel(8_192, 1_024, "HtoD", stream=3) | {"type": "transfer"}
    records = [kernel(0, 1_024, "a"), kernel(512, 1_024, "b", stream=2), copy, kernel(0, 10, "c", gpu=1)]
    assert asked(written(records, tmp_path), BUSY) == [
        ("GPU 0", 0, 100.0, "%"),
        ("GPU 0", 1_024, 50.0, "%"),
        ("GPU 0", 2_048, 0.0, "%"),
        ("GPU 0", 8_192, 100.0, "%"),
        ("GPU 0", 9_216, 0.0, "%"),
        ("GPU 1", 0, 100.0, "%"),
        ("GPU 1", 10, 0.0, "%"),
    ]


def test_an_sm_shows_how_many_warps_it_has_at_most_while_it_has_any(tmp_path: Path) -> None:
    first = warps(100, [2, 2, 10, 2], [0, 5, 0, 40], [10, 20, 30, 50], launch=1)
    again = warps(190, [2, 10], [0, 5], [10, 0], launch=2)
    assert shown([first, again], tmp_path) == [
        ("SM 10", "1 warp", 100, 30),
        ("SM 10", "1 warp", 195, 0),
        ("SM 2", "2 warps", 100, 25),
        ("SM 2", "1 warp", 140, 50),
        ("SM 2", "1 warp", 190, 10),
    ]


def test_a_stretch_of_an_sm_goes_on_over_launches_and_to_the_end_without_an_exit(tmp_path: Path) -> None:
    records = [
        warps(100, [0, 1], [0, 0], [500, -1], launch=1, exit_count=[1, 0]) | {"exit_ns": [500]},
        *(warps(110 + at, [0], [0], [20], launch=at + 2, slot=[4]) for at in range(0, 300, 30)),
        kernel(900, 100, "last"),
    ]
    found = [row for row in shown(records, tmp_path) if row[0].startswith("SM")]
    assert found == [("SM 0", "2 warps", 100, 500), ("SM 1", "1 warp", 100, 900)]


@pytest.mark.parametrize(
    ("about", "unit"),
    [
        ({"name": "NVIDIA H200", "sm_count": 132}, "warps of 8448"),
        ({"name": "NVIDIA A100-SXM4-80GB", "sms": 108}, "warps of 6912"),
        ({"name": "Tesla T4", "sm_count": 40}, "warps of 1280"),
        ({"name": "NVIDIA L40S", "sm_count": 142}, "warps of 6816"),
        ({"name": "NVIDIA H2000", "sm_count": 10}, "warps"),
        ({"name": "NVIDIA H200"}, "warps"),
        ({}, "warps"),
    ],
)
def test_active_warps_are_counted_of_as_many_as_the_gpu_can_have(
    about: dict[str, Any], unit: str, tmp_path: Path
) -> None:
    trace = written([warps(100, [0], [0], [10])], tmp_path, gpus=[{"index": 0} | about])
    query = "select unit from counter_track where name = 'active warps'"
    assert asked(trace, query) == [(unit,)]


def test_summaries_are_not_read_again_as_if_they_had_been_recorded(tmp_path: Path) -> None:
    trace = tmp_path / "run.pftrace"
    records = [warps(100, [0, 3], [0, 5], [50, 60], launch=1), kernel(90, 80, "k")]
    trace.write_bytes(written(records, tmp_path))
    text = converted(trace, "text")[0].decode()
    assert "GPU busy" not in text
    assert not re.search(r"\d warps?$", text, re.MULTILINE)
    assert "slot 0" in text
    assert "active warps" in text


@pytest.mark.parametrize(("to", "begin"), [("chrome", b'"ph":"B","name":"lonely"'), ("text", b"lonely")])
def test_formats_without_such_a_row_have_each_kernel_once(to: str, begin: bytes, tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEADER, kernel(100, 50, "lonely")]))
    output, _ = converted(path, to)
    assert output.count(begin) == 1
