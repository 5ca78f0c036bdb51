"""What a track cannot take as it comes: late events, warps of batches that overlap, calls too deep for it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, cast

import pytest

import tracepipe.layout.merging
import tracepipe.readers.tracepipe1
from tests.golden.asked import Asked
from tests.golden.cases import FIXTURES, Case
from tests.golden.seen import ReplayFormat, Seen
from tracepipe.converters import CONVERTERS
from tracepipe.recording.account import Account
from tracepipe.recording.convert import Conversion, ConversionOptions

pytestmark = pytest.mark.usefixtures("core")

Records = list[dict[str, Any]]


def converted(records: Records, folder: Path) -> tuple[Seen, Account]:
    """What a recording draws, after the trace processor gave the same for both outputs."""
    head = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"]}
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [head, *records]))
    for to in ("perfetto", "chrome"):
        kept = ReplayFormat(to)
        report = Conversion(str(path), cast(Any, kept), ConversionOptions()).run(io.BytesIO())
        out = io.BytesIO()
        Conversion(str(path), CONVERTERS[to], ConversionOptions()).run(out)
        asked = Asked(out.getvalue())
        assert asked.problems == []
        assert asked.seen().lines() == kept.writer.seen().lines()
    return kept.writer.seen(), report


def slices_of(seen: Seen) -> dict[str, list[tuple[int, int, str, int]]]:
    """Track → its slices: start, length, name, depth."""
    return {
        " / ".join(path[1:]): [(one.ts_ns, one.dur_ns, one.name, one.depth) for one in slices]
        for path, slices in seen.slices
    }


def call(ts_ns: int, name: str, phase: str = "X", dur_ns: int = 5) -> dict[str, Any]:
    event = {"type": "userspace", "name": name, "phase": phase, "ts_ns": ts_ns, "pid": 7, "tid": 7}
    return event | ({"dur_ns": dur_ns} if phase == "X" else {})


def warps(ts_ns: int, name: str, slots: list[int], entry_ns: list[int], exit_ns: list[int]) -> dict[str, Any]:
    batch = {"type": "gpu_warp", "name": name, "ts_ns": ts_ns, "gpu": 0, "sm": [0] * len(slots)}
    return batch | {"warp": [*range(len(slots))], "slot": slots, "entry_ns": entry_ns, "exit_ns": exit_ns}


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracepipe.layout.merging, "WINDOW_EVENTS", 2)


def test_an_event_later_than_the_window_goes_on_an_overlap_track(tmp_path: Path, small_window: None) -> None:
    # Two batches of the reader: what it gives at once is put in order at once.
    padding = {"args": {"text": "x" * 1000}}
    early = [call(ts_ns, f"call {ts_ns}") | padding for ts_ns in range(1000, 5000, 10)]
    late = [call(1002, "late"), call(1001, "late", "B"), call(1009, "late", "E")]
    seen, report = converted(early + late, tmp_path)
    tracks = slices_of(seen)
    assert len(tracks["process 7 / CUDA API"]) == 400
    assert tracks["process 7 / CUDA API (overlap 1)"] == [(1001, 8, "late", 0), (1002, 5, "late", 1)]
    assert (report.outcomes.overlaps, report.outcomes.no_begin) == (2, 0)


def test_an_end_later_than_the_window_is_an_end_without_a_begin(tmp_path: Path, small_window: None) -> None:
    padding = {"args": {"text": "x" * 1000}}
    events = [call(1000, "outer", "B"), call(1010, "inner", "B"), call(2000, "inner", "E")]
    many = [call(ts_ns, "other", phase) | padding for ts_ns in range(3000, 7000, 10) for phase in "BE"]
    seen, report = converted([*events, *many, call(2500, "outer", "E")], tmp_path)
    drawn = slices_of(seen)["process 7 / CUDA API"]
    assert drawn[:2] == [(1000, 5990, "outer", 0), (1010, 990, "inner", 1)]
    assert (2500, 0, "outer", 1) in drawn
    assert (report.outcomes.unclosed, report.outcomes.no_begin) == (1, 1)


def counted(seen: Seen) -> list[tuple[int, int]]:
    ((_, values),) = seen.counters
    return values


def test_warps_of_batches_that_overlap_are_counted_together(tmp_path: Path) -> None:
    long = warps(0, "long", [0, 1, 2, 3], [0, 100, 200, 300], [50, 50, 50, 50])
    second = warps(10, "second", [4, 5, 6], [0, 110, 210], [30, 30, 30])
    seen, _ = converted([long, second], tmp_path)
    assert counted(seen) == [
        (0, 1), (10, 2), (40, 1), (50, 0), (100, 1), (120, 2), (150, 0),
        (200, 1), (220, 2), (250, 0), (300, 1), (350, 0),
    ]  # fmt: skip


def test_a_batch_may_begin_long_before_its_first_warp(tmp_path: Path) -> None:
    batches = [
        warps(0, "a", [0], [500], [50]),
        warps(10, "b", [1], [590], [40]),
        warps(20, "c", [2], [0], [1]),
    ]
    seen, _ = converted(batches, tmp_path)
    assert counted(seen) == [(20, 1), (21, 0), (500, 1), (550, 0), (600, 1), (640, 0)]


def test_two_kernels_in_flight_take_turns_on_a_slot(tmp_path: Path) -> None:
    # The second kernel's block runs between two blocks of the first, whose batch comes before.
    first = warps(0, "first", [0, 0, 0], [0, 100, 400], [50, 100, 10])
    second = warps(60, "second", [0, 0, 0], [0, 150, 260], [30, 50, 79])
    seen, report = converted([first, second], tmp_path)
    assert slices_of(seen) == {
        "capture": [(0, 0, "capture", 0)],
        "SM 0 / slot 0": [
            (0, 50, "first warp 0", 0),
            (60, 30, "second warp 0", 0),
            (100, 100, "first warp 1", 0),
            (210, 50, "second warp 1", 0),
            (320, 79, "second warp 2", 0),
            (400, 10, "first warp 2", 0),
        ],
    }
    assert report.outcomes.overlaps == 0


def test_two_warps_at_one_time_on_a_slot_are_an_overlap(tmp_path: Path) -> None:
    first = warps(0, "first", [0, 0], [0, 100], [50, 100])
    second = warps(10, "second", [0, 0, 0], [0, 80, 190], [30, 30, 100])
    seen, report = converted([first, second], tmp_path)
    tracks = slices_of(seen)
    assert tracks["SM 0 / slot 0"] == [
        (0, 50, "first warp 0", 0),
        (100, 100, "first warp 1", 0),
        (200, 100, "second warp 2", 0),
    ]
    assert tracks["SM 0 / slot 0 (overlap 1)"] == [(10, 30, "second warp 0", 0), (90, 30, "second warp 1", 0)]
    assert report.outcomes.overlaps == 2


DEEP = 1100


@pytest.mark.slow
def test_calls_deeper_than_perfetto_shows_go_on_an_overlap_track_and_keep_their_ends(tmp_path: Path) -> None:
    begins = [call(1_000 + at, "f", "B") | {"args": {"begun": at}} for at in range(DEEP)]
    ends = [call(9_000 - at, "f", "E") | {"args": {"ended": at}} for at in reversed(range(DEEP))]
    seen, report = converted(begins + ends, tmp_path)
    drawn = [one for path, slices in seen.slices if path[0] != "tracepipe" for one in slices]
    assert sorted((one.args["begun"], one.args["ended"], one.dur_ns) for one in drawn) == [
        (at, at, 8_000 - 2 * at) for at in range(DEEP)
    ]
    assert max(one.depth for one in drawn) == 511
    assert report.outcomes.overlaps == DEEP - 512


def test_whole_slices_beyond_the_depth_go_on_an_overlap_track_too(tmp_path: Path) -> None:
    seen, report = converted([call(1_000 + at, "f", dur_ns=8_000 - 2 * at) for at in range(DEEP)], tmp_path)
    tracks = slices_of(seen)
    on = [len(tracks[f"process 7 / CUDA API{beside}"]) for beside in ("", " (overlap 1)", " (overlap 2)")]
    assert on == [512, 512, DEEP - 1024]
    assert report.outcomes.overlaps == DEEP - 512


@pytest.mark.parametrize(
    "name", ["flows", "threads", "warps-slots", "warps-logical", "clocks-drift", "streams"]
)
def test_small_batches_draw_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(FIXTURES / name)
    want = case.replay("perfetto").seen().lines()
    monkeypatch.setattr(tracepipe.readers.tracepipe1, "CHUNK_BYTES", 256)
    monkeypatch.setattr(tracepipe.layout.merging, "WINDOW_EVENTS", 2)
    assert case.replay("perfetto").seen().lines() == want
    asked = Asked(case.convert("perfetto")[0])
    assert asked.problems == []
    assert asked.seen().lines() == want
