"""A GPU's own row: its kernels in one row, as Perfetto's UI shows it while the group is closed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tracepipe.layout.windows
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


def kernel(ts_ns: int, dur_ns: int, name: str, stream: int = 1, gpu: int = 0) -> dict[str, Any]:
    """A kernel."""
    record = {"ts_ns": ts_ns, "type": "gpu_kernel", "name": name, "phase": "X", "dur_ns": dur_ns}
    return record | {"gpu": gpu, "stream": stream}


def shown(records: list[dict[str, Any]], folder: Path) -> list[tuple[Any, ...]]:
    """What the rows of GPUs show."""
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEADER, *records]))
    trace, _ = converted(path, "perfetto")
    with RealTraceProcessor(trace) as tp:
        assert tp.problems() == []
        assert tp.rows("select count(*) as n from slice where dur < 0") == [{"n": 0}]
        return [tuple(row.values()) for row in tp.rows(ROWS)]


def test_kernels_stand_in_one_row_for_each_gpu(tmp_path: Path) -> None:
    records = [kernel(100, 50, "a"), kernel(150, 20, "b"), kernel(170, 0, "c"), kernel(120, 5, "d", gpu=1)]
    assert shown(records, tmp_path) == [
        ("GPU 0", "a", 100, 50),
        ("GPU 0", "b", 150, 20),
        ("GPU 0", "c", 170, 0),
        ("GPU 1", "d", 120, 5),
    ]


def test_what_begins_while_another_is_shown_is_on_its_stream_alone(tmp_path: Path) -> None:
    records = [
        kernel(100, 50, "a"),
        kernel(110, 900, "beneath", stream=2),
        kernel(150, 50, "b"),
        kernel(190, 5, "inside", stream=3),
        kernel(400, 1, "c", stream=3),
    ]
    assert [row[1] for row in shown(records, tmp_path)] == ["a", "b", "c"]


def test_copies_and_calls_are_none_of_it(tmp_path: Path) -> None:
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
    monkeypatch.setattr(tracepipe.layout.windows, "WINDOW_EVENTS", 3)
    monkeypatch.setattr("tracepipe.event.tables.KEPT_MAX", kept_max)
    assert shown(records, tmp_path) == want


@pytest.mark.parametrize(("to", "begin"), [("chrome", b'"ph":"B","name":"lonely"'), ("text", b"lonely")])
def test_formats_without_such_a_row_have_each_kernel_once(to: str, begin: bytes, tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEADER, kernel(100, 50, "lonely")]))
    output, _ = converted(path, to)
    assert output.count(begin) == 1
