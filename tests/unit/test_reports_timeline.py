"""The timeline on a terminal: what is drawn where, and what is noted of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recordings import Load, event, loader, span
from tracepipe.errors import TracepipeError
from tracepipe.libraries import np
from tracepipe.present.writing.drawing import UNICODE, Spans, Window, axis, level_line, spans_line
from tracepipe.present.writing.rendering import report_lines
from tracepipe.reports.timeline import Options, run
from tracepipe.store.run import Run


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def drawn(recording: Run, width: int = 53, ascii_only: bool = False, **options: Any) -> list[str]:
    """The lines from the axis to the legend: 40 cells are behind labels of 13 letters."""
    result = run(recording, Options(**options))
    text = list(report_lines([recording.facts], result, width=width, ascii_only=ascii_only))
    first = next(at for at, line in enumerate(text) if line.lstrip().startswith("|"))
    last = next(at for at, line in enumerate(text) if "share of the cell" in line)
    return text[first:last]


def test_a_row_for_each_layer_and_depth(load: Load) -> None:
    recording = load(
        event("B", 1_000, "cudaLaunchKernel", comm="app"),
        event("B", 1_100, "cuLaunchKernel"),
        event("E", 1_300, "cuLaunchKernel"),
        event("E", 1_400, "cudaLaunchKernel"),
        span(1_100, 1_200, "take", "hook") | {"layer": "my pool"},
        span(1_000, 1_100, "malloc", "hook") | {"layer": "libc.so.6"},
        span(1_120, 1_200, "ioctl", "syscall"),
        event("I", 1_250, "mark", "syscall"),
        span(1_000, 1_400, "running", "scheduler"),
        span(1_350, 1_400, "k", "gpu_kernel", gpu=1, stream=7),
    )
    assert drawn(recording) == [
        "             |0                  |200 ns",
        "app thread 1",
        "CUDA API     ├cudaLaunchKernel──────────────────────┤",
        "  inside 1             ├cuLaunchKernel────┤",
        "my pool                ├take────┤",
        "libc.so.6    ├malloc──┤",
        "syscalls                 ├ioctl─┤     ·",
        "running      ├running───────────────────────────────┤",
        "GPU 1",
        "stream 7                                        ├k──┤",
    ]


def test_ascii_alone_where_the_terminal_has_no_more(load: Load) -> None:
    recording = load(
        span(1_000, 1_400, "cuInit"), span(1_400, 1_401, "f"), event("I", 1_401, "mark", "kernel")
    )
    text = list(report_lines([recording.facts], run(recording, Options()), width=53, ascii_only=True))
    assert "[cuInit================================]" in "".join(text)
    assert all(line.isascii() for line in text)


def test_spans_too_short_for_a_name_are_shades(load: Load) -> None:
    calls = [span(1_000 + 100 * n, 1_000 + 100 * n + 20 * (n % 5 + 1), "f") for n in range(40)]
    (row,) = [line for line in drawn(load(*calls)) if line.startswith("CUDA API")]
    assert row == "CUDA API     " + "░▒▓██" * 8


def test_a_stretch_of_time_is_chosen_from_the_start_of_the_run(load: Load) -> None:
    recording = load(span(2_000, 3_000, "before"), span(3_500, 4_500, "inside"), span(9_000, 9_500, "after"))
    text = drawn(recording, start="2us", end="4us")
    assert text[0].split() == ["|2.00", "µs", "|3.00", "µs"]
    (row,) = [line for line in text if line.startswith("CUDA API")]
    # From 2.5 to 3.5 of 2 to 4 µs: the half in the middle. What ends as it begins leaves a touch.
    assert row == "CUDA API     ░         ├inside────────────┤"


def test_stretches_that_cannot_be_are_refused(load: Load) -> None:
    with pytest.raises(TracepipeError, match="The stretch from "):
        run(load(span(1_100, 1_200, "f")), Options(start="5us"))
    with pytest.raises(TracepipeError, match="is not a duration"):
        run(load(span(1_100, 1_200, "f")), Options(end="later"))


def test_what_is_not_drawn_is_counted(load: Load) -> None:
    deep = [event("B", 1_100 + n, f"f{n}") for n in range(4)] + [event("E", 1_200, "f0")]
    others = [span(1_100, 1_200, "g", tid=tid) for tid in (2, 3, 4)]
    notes = run(load(*deep, *others), Options(depth=2, threads=2)).notes
    assert notes == [
        "2 threads with fewer events are not drawn: --threads 0 draws all",
        "2 calls are nested too deep to be drawn: --depth draws more rows",
    ]
    assert run(load(*deep, *others), Options(depth=4, threads=0)).notes == []


def test_streams_that_are_many_are_drawn_together(load: Load) -> None:
    work = [(0, 0, 5), (10, 1, 6), (20, 1, 6), (30, 2, 7), (40, 3, 7)]
    events = [
        span(1_000 + at, 1_010 + at, "k", "gpu_kernel", gpu=gpu, stream=stream) for at, stream, gpu in work
    ]
    loaded = load(*events)
    groups = run(loaded, Options(streams=2)).as_json()["timeline"]["groups"]
    assert [(group["title"], [row["row"] for row in group["rows"]]) for group in groups] == [
        ("GPU 5", ["stream 0"]),
        ("GPU 6", ["stream 1"]),
        ("2 other streams, with less work: --streams 0 draws all", ["work"]),
    ]
    assert [one["start_ns"] for one in groups[2]["rows"][0]["spans"]] == [30, 40]
    every = run(loaded, Options(streams=0)).as_json()["timeline"]["groups"]
    assert [group["title"] for group in every] == ["GPU 5", "GPU 6", "GPU 7"]


def test_json_has_the_gpus_before_all_threads_but_the_first(load: Load) -> None:
    calls = [span(1_100, 1_200, "f", tid=tid) for tid in (1, 2, 3)]
    work = span(1_100, 1_200, "k", "gpu_kernel", gpu=0, stream=0)
    groups = run(load(*calls, work), Options()).as_json()["timeline"]["groups"]
    assert [group["title"].partition(" thread")[0].split()[0] for group in groups][1] == "GPU"
    assert len(groups) == 4


def test_losses_have_rows_of_their_own(load: Load) -> None:
    loss = {"type": "loss", "layer": "syscall", "count": 12, "ts_ns": 1_500, "dur_ns": 400}
    text = drawn(load(span(1_000, 2_000, "f"), loss, {"type": "loss", "count": 3, "ts_ns": 1_000}))
    assert text[-3:] == [
        "lost events",
        "syscall                          ├lost 12───────┤",
        "unknown      ░",
    ]


def test_running_warps_are_a_level(load: Load) -> None:
    warps = {
        "ts_ns": 1_000, "type": "gpu_warp", "name": "k", "gpu": 0, "warp": [0, 1], "entry_ns": [0, 200],
        "exit_ns": [400, 100],
    }  # fmt: skip
    (row,) = [line for line in drawn(load(warps)) if line.startswith("warps")]
    assert row == "warps ≤2     " + "▅" * 20 + "█" * 10 + "▅" * 10


def test_the_most_at_one_time_is_not_the_mean_of_a_cell(load: Load) -> None:
    # The third is there for a tenth of a cell, and the fourth begins where it ends.
    warps = {
        "ts_ns": 1_000, "type": "gpu_warp", "name": "k", "gpu": 0, "warp": [0, 1, 2, 3],
        "entry_ns": [0, 200, 205, 206], "exit_ns": [400, 10, 1, 1],
    }  # fmt: skip
    (row,) = [line for line in drawn(load(warps)) if line.startswith("warps")]
    assert row.startswith("warps ≤3 ")


def test_json_has_the_spans_from_the_start_of_the_run(load: Load) -> None:
    data = run(load(span(1_100, 1_200, "f"), event("I", 1_150, "mark", tid=2)), Options()).as_json()[
        "timeline"
    ]
    assert data["groups"][0]["rows"] == [
        {"row": "CUDA API", "spans": [{"name": "f", "start_ns": 100, "dur_ns": 100}], "instants_ns": []}
    ]
    assert data["groups"][1]["rows"][0]["instants_ns"] == [150]


def test_an_empty_recording_is_reported(load: Load) -> None:
    assert run(load(), Options()).notes == ["no events in this window"]


@pytest.mark.parametrize(
    ("start_ns", "end_ns", "expected"),
    [
        (0, 40, "|0                  |20 ns"),
        (1_000, 5_000, "|1.0 µs             |3.0 µs"),
        (10_000_000_000, 10_000_000_400, "|10.00000000 s      |10.00000020 s"),
    ],
)
def test_times_of_the_axis_are_distinct(start_ns: int, end_ns: int, expected: str) -> None:
    assert axis(Window(start_ns, end_ns, 40), 0) == expected


@given(st.lists(st.tuples(st.integers(-10, 60), st.integers(0, 30)), max_size=20), st.integers(1, 30))
def test_rows_are_as_wide_as_their_window(spans: Any, cells: int) -> None:
    window = Window(0, 40, cells)
    starts = np.array([start for start, _ in spans], np.int64)
    ends = starts + np.array([length for _, length in spans], np.int64)
    drawn = Spans(starts, ends, lambda rows: ["name"] * len(rows), np.arange(len(starts)))
    assert len(spans_line(window, [drawn], UNICODE)) == cells
    assert len(level_line(window, [drawn], UNICODE)) == cells


def test_levels_are_the_same_since_1970() -> None:
    starts, ends = np.array([0, 3, 50], np.int64), np.array([40, 93, 93], np.int64)
    drawn = []
    for base_ns in (0, 1_795_246_105_832_499_104):
        spans = Spans(starts + base_ns, ends + base_ns, list, np.arange(3))
        drawn.append(level_line(Window(base_ns, base_ns + 93, 60), [spans], UNICODE))
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == set("▄▅▇█")


def test_any_depth_may_be_asked_for_with_any_number_of_layers(load: Load) -> None:
    layers = [
        span(1_100 + at * 10, 1_105 + at * 10, "f", "hook", tid=at) | {"layer": f"layer {at}"}
        for at in range(1, 4)
    ]
    for depth in (3, (1 << 31) - 1):
        assert run(load(*layers), Options(depth=depth)).notes == []


def test_the_busiest_layers_of_hooks_have_rows(load: Load) -> None:
    once = [span(1_000 + at, 1_001 + at, "f", "hook") | {"layer": f"layer {at}"} for at in range(66)]
    again = [span(2_000 + at, 2_001 + at, "f", "hook") | {"layer": f"layer {at}"} for at in range(2, 66)]
    result = run(load(*once, *again), Options())
    (group,) = result.as_json()["timeline"]["groups"]
    assert [row["row"] for row in group["rows"]] == [f"layer {at}" for at in range(2, 66)]
    assert result.notes == ["2 layers of hooks with fewer events are not drawn"]
