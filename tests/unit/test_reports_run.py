"""Recordings as columns: what is matched and nested, what is known of warps, what is noted of the rest."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import Case, cases, with_sample
from tests.support.recordings import GPU_CLOCK, PAIR, Load, event, loader
from tracepipe.errors import InputError, LibraryMissing
from tracepipe.event.columns import NONE
from tracepipe.kernel_names import without_namespaces
from tracepipe.libraries import Library
from tracepipe.store.run import load_run


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def rows(frame: Any, *columns: str) -> list[tuple[Any, ...]]:
    names = ", ".join(f'"{name}"' for name in columns)
    return list(frame.select(names).fetchall())


def test_begins_and_ends_become_spans_that_nest(load: Load) -> None:
    run = load(
        event("B", 1_100, "cudaMalloc", args={"size_bytes": 64}),
        event("B", 1_200, "cuMemAlloc_v2"),
        event("E", 1_250, "cuMemAlloc_v2", args={"result": 0}),
        event("I", 1_260, "mark"),
        event("E", 1_300, "cudaMalloc", args={"result": 2}),
        event("X", 1_400, "cuCtxSynchronize", dur_ns=50, launch=(1 << 64) - 1),
    )
    assert rows(run.calls, "name", "start_ns", "end_ns", "dur_ns", "kind", "depth", "parent_row") == [
        ("cudaMalloc", 1_100, 1_300, 200, "span", 0, None),
        ("cuMemAlloc_v2", 1_200, 1_250, 50, "span", 1, 0),
        ("mark", 1_260, 1_260, None, "instant", 1, 0),
        ("cuCtxSynchronize", 1_400, 1_450, 50, "span", 0, None),
    ]
    assert rows(run.calls, "size_bytes", "result", "launch") == [
        (64, 2, None), (None, 0, None), (None, None, None), (None, None, (1 << 64) - 1),
    ]  # fmt: skip
    assert (run.facts.start_ns, run.facts.end_ns) == (1_000, 1_450)


def test_irregular_calls_have_no_length(load: Load) -> None:
    run = load(
        event("E", 1_050, "lost its begin"),
        event("E", 1_090, "known by its end", dur_ns=30),
        event("B", 1_100, "outer"),
        event("B", 1_200, "left by longjmp"),
        event("E", 1_300, "outer"),
        event("B", 1_400, "died inside"),
        event("I", 1_500, "last"),
    )
    assert rows(run.calls, "name", "kind", "dur_ns", "end_ns") == [
        ("lost its begin", "no_begin", None, 1_050),
        ("known by its end", "from_duration", 30, 1_090),
        ("outer", "span", 200, 1_300),
        ("left by longjmp", "unclosed", None, 1_300),
        ("died inside", "unclosed", None, 1_500),
        ("last", "instant", None, 1_500),
    ]
    assert (run.facts.outcomes.unclosed, run.facts.outcomes.no_begin) == (2, 1)


def test_events_are_put_in_order_over_the_whole_file(load: Load) -> None:
    late = event("B", 1_100, "outer")
    many = [event("X", 2_000 + at, "filler", dur_ns=1) for at in range(5_000)]
    run = load(*many, event("E", 9_000, "outer"), late)
    assert rows(run.calls, "name", "dur_ns", "depth")[0] == ("outer", 7_900, 0)
    assert len(run.calls) == 5_001


def test_calls_of_a_scheduler_nest_among_those_of_the_driver(load: Load) -> None:
    run = load(
        event("B", 1_100, "nvidia_ioctl", "kernel"),
        event("X", 1_110, "nv_schedule_work", "scheduler", dur_ns=5),
        event("E", 1_200, "nvidia_ioctl", "kernel"),
        event("X", 1_300, "running", "scheduler", dur_ns=7),
    )
    assert rows(run.driver, "layer", "name", "depth", "parent_row") == [
        ("kernel", "nvidia_ioctl", 0, None),
        ("scheduler", "nv_schedule_work", 1, 0),
    ]
    assert run.layer("kernel").lane.tolist() == [0, 1]
    assert rows(run.scheduler, "name", "dur_ns") == [("running", 7)]


def test_calls_that_are_known_by_their_ends_alone_nest(load: Load) -> None:
    run = load(
        event("E", 1_150, "inner", dur_ns=30),
        event("E", 1_160, "innermost", dur_ns=5),
        event("E", 1_165, "around the last", dur_ns=14),
        event("E", 1_200, "outer", dur_ns=100),
        event("X", 1_190, "overlaps the outer", dur_ns=20),
    )
    assert rows(run.calls, "name", "depth", "parent_row") == [
        ("outer", 0, None),
        ("inner", 1, 0),
        ("around the last", 1, 0),
        ("innermost", 2, 2),
        ("overlaps the outer", 0, None),
    ]


def test_copies_on_a_stream_have_no_parent_in_another_frame(load: Load) -> None:
    on_gpu = {"gpu": 0, "stream": 7}
    run = load(
        event("X", 1_100, "k", "gpu_kernel", dur_ns=100, **on_gpu),
        event("X", 1_120, "HtoD", "transfer", dur_ns=10, args={"size": 4096}, **on_gpu),
        event("X", 1_500, "HtoD", "transfer", dur_ns=20, args={"size": 1}),
    )
    assert rows(run.transfers, "gpu", "size_bytes") == [(0, 4096), (None, 1)]
    assert run.layer("transfer").parent.tolist() == [NONE, NONE]
    assert rows(run.kernels, "name", "stream", "dur_ns") == [("k", 7, 100)]


def test_warps_are_rows_on_the_trace_clock(load: Load) -> None:
    batch = {
        "ts_ns": 500_100, "type": "gpu_warp", "name": "k", "clock": GPU_CLOCK, "gpu": 0, "stream": 3,
        "launch": 9, "pid": 1, "grid": [2, 1, 1], "block": [48, 1, 1], "warp": [3, 0, 1], "sm": [4, 5, 6],
        "slot": [0, 1, 2], "entry_ns": [0, 10, 20], "entry_mask": [0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF],
        "exit_count": [1, 2, 0], "exit_ns": [30, 50, 40], "exit_clk": [300, 500, 400],
        "exit_mask": [0xFFFF, 0xFF, 0xFFFFFF00],
    }  # fmt: skip
    run = load(PAIR, batch)
    places = rows(run.warps, "warp", "block_index", "warp_in_block", "sm", "slot", "exit_count", "entry_mask")
    assert places == [
        (3, 1, 1, 4, 0, 1, 0xFFFF),
        (0, 0, 0, 5, 1, 2, 0xFFFFFFFF),
        (1, 0, 1, 6, 2, 0, 0xFFFFFFFF),
    ]
    assert rows(run.warps, "entry_ns", "first_exit_ns", "last_exit_ns", "cycles") == [
        (2_100, 2_130, 2_130, 300),
        (2_110, 2_150, 2_160, 500),
        (2_120, None, None, 0),
    ]
    assert rows(run.warps, "name", "launch", "gpu", "stream", "pid")[0] == ("k", 9, 0, 3, 1)
    assert rows(run.exits, "warp_row", "exit_ns", "exit_mask") == [
        (0, 2_130, 0xFFFF),
        (1, 2_160, 0xFF),
        (1, 2_150, 0xFFFFFF00),
    ]
    assert (run.facts.counts["gpu_warp"], run.facts.end_ns) == (3, 2_160)
    assert [statement["clock"] for statement in run.facts.clocks] == [GPU_CLOCK]


def test_warps_of_several_batches_and_columns_that_one_lacks(load: Load) -> None:
    first = {"ts_ns": 1_100, "type": "gpu_warp", "name": "a", "warp": [0], "entry_ns": [0], "exit_ns": [5]}
    second = {**first, "name": "b", "sm": [3], "exit_mask": [1], "block": [32, 1, 1]}
    run = load(first, second)
    assert rows(run.warps, "name", "sm", "block_index", "last_exit_ns") == [
        ("a", None, None, 1_105),
        ("b", 3, 0, 1_105),
    ]
    assert rows(run.exits, "warp_row", "exit_mask") == [(1, 1)]


def test_losses_and_bad_lines_are_counted(load: Load) -> None:
    loss = {"type": "loss", "layer": "syscall", "count": 3, "ts_ns": 1_200, "dur_ns": 9, "reason": "full"}
    run = load(event("I", 1_100, "f"), loss, "{", {"type": "loss", "count": 4})
    assert dict(run.facts.losses) == {"syscall": 3, "unknown layer": 4}
    assert rows(run.losses, "layer", "count", "start_ns", "dur_ns") == [
        ("syscall", 3, 1_200, 9),
        (None, 4, 1_200, None),
    ]
    assert (run.facts.skipped, run.facts.problems[0].line) == (1, 4)
    assert run.facts.notes == ["the file has no footer: the capture was cut off"]


def test_many_losses_are_where_they_were_and_their_layers_counted(load: Load) -> None:
    losses = [
        {"type": "loss", "layer": f"layer {at}", "count": at, "ts_ns": 2_000 + at, "reason": f"reason {at}"}
        for at in range(3_000)
    ]
    run = load(*losses, {"type": "loss", "count": 0, "ts_ns": 1_500, "cpu": 3}, losses[5] | {"cpu": 1 << 63})
    got = rows(run.losses, "start_ns", "count", "dur_ns", "cpu")
    assert got[:3_000] == [(2_000 + at, at, None, None) for at in range(3_000)]
    assert got[3_000:] == [(1_500, 0, None, 3), (2_005, 5, None, None)]
    names = rows(run.losses, "layer", "reason")
    assert names[:100] == [(f"layer {at}", f"reason {at}") for at in range(100)]
    assert set(names[100:3_000]) == {("other layers", "other reasons")}
    assert names[3_000:] == [(None, None), ("layer 5", "reason 5")]
    assert run.facts.losses["layer 5"] == 10
    assert run.facts.losses["other layers"] == sum(range(100, 3_000))


def test_the_first_bad_line_ends_a_strict_reading(load: Load) -> None:
    with pytest.raises(InputError, match=r"run.jsonl:2: is not JSON"):
        load("{", strict=True)


def test_a_clock_without_pairs_is_left_out_and_counted(load: Load) -> None:
    kernel = event("X", 70, "k", "gpu_kernel", dur_ns=5, clock=GPU_CLOCK, gpu=0)
    assert load(kernel).facts.unplaced == {GPU_CLOCK: 1}
    placed = load(kernel, assumed={GPU_CLOCK: 1_000})
    assert rows(placed.kernels, "start_ns") == [(1_070,)]
    assert placed.facts.clocks[0]["method"] == "assumed"


@pytest.mark.parametrize(
    "record",
    [
        {"ts_ns": 5, "type": "gpu_warp", "name": "k", "warp": [1 << 63], "entry_ns": [0], "exit_ns": [0]},
        {"ts_ns": 5, "type": "gpu_warp", "name": "k", "warp": [0], "entry_ns": [0], "exit_ns": [1 << 62]},
        {
            "ts_ns": 5, "type": "gpu_warp", "name": "k", "warp": [0], "entry_ns": [0], "exit_ns": [1],
            "sm": [1 << 40],
        },
    ],
)  # fmt: skip
def test_numbers_too_large_to_reckon_with_are_a_problem(load: Load, record: dict[str, Any]) -> None:
    run = load(record, event("I", 1_100, "f"))
    assert (run.facts.skipped, len(run.warps), len(run.calls)) == (1, 0, 1)


def test_sizes_beyond_63_bits_are_not_known(load: Load) -> None:
    run = load(event("I", 1_100, "f", args={"size": 1 << 63, "address": (1 << 64) - 1}))
    assert rows(run.calls, "size_bytes", "address") == [(None, str((1 << 64) - 1))]


def test_threads_and_processes_have_the_names_they_had_last(load: Load) -> None:
    run = load(
        event("I", 1_100, "f", comm="bash"),
        event("I", 1_200, "f", comm="python3"),
        event("I", 1_300, "f", pid=2),
    )
    assert [run.process_name(pid) for pid in (1, 2, None)] == [
        "python3",
        "vec_add",
        "process (pid not recorded)",
    ]


def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(LibraryMissing, match="reports need polars") as raised:
        Library("polars").DataFrame  # noqa: B018
    assert (raised.value.exit_code, raised.value.hint) == (3, "pip install polars")


_LAYERS = ("userspace", "syscall", "kernel", "scheduler", "memory", "transfer", "gpu_kernel")
_COLUMNS = ("name", "start_ns", "end_ns", "kind", "depth")
_DRAWN = {"userspace", "syscall", "kernel", "scheduler", "memory", "transfer", "gpu"}


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_the_spans_are_those_that_the_timeline_draws(case: Case) -> None:
    options = case.options()
    run = load_run(str(case.input), assumed=options.assumed, undated=options.undated)
    # Where all ends are known, calls can nest that are drawn beside each other.
    nests = run.facts.outcomes.overlaps == 0
    found = Counter(
        (
            without_namespaces(name) if frame == "gpu_kernel" else name,
            start_ns,
            None if kind in ("instant", "no_begin") else end_ns - start_ns,
            depth * nests,
        )
        for frame in _LAYERS
        for name, start_ns, end_ns, kind, depth in zip(
            *run.values(frame, slice(None), *_COLUMNS).values(), strict=True
        )
    )
    drawn = Counter(
        (one.name, one.ts_ns, None if one.instant else one.dur_ns, one.depth * nests)
        for _, slices in case.replay().seen().slices
        for one in slices
        if one.category in _DRAWN
    )
    assert found == drawn
