"""What the GPU did for each range of a thread: how many launches, from when to when, and how long."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.recordings import Load, event, loader, span, write
from tracepipe.reports.annotations import Options, run
from tracepipe.store.run import load_run

SAMPLE = Path(__file__).parents[2] / "fixtures" / "python-stacks" / "input.jsonl"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def ranged(at: int, end: int, name: str, **more: Any) -> list[dict[str, Any]]:
    return [event("B", at, name, "annotation", **more), event("E", end, name, "annotation", **more)]


def launch(at: int, id: int, **more: Any) -> dict[str, Any]:
    return span(at, at + 1, "cuLaunchKernel", launch=id, **more)


def kernel(start: int, end: int, id: int, stream: int = 7) -> dict[str, Any]:
    return span(start, end, "k", "gpu_kernel", launch=id, gpu=0, stream=stream)


def found(result: Any) -> dict[str, tuple[Any, ...]]:
    """Range → count, wall, launches, on GPU, busy."""
    keys = ("count", "wall_ns", "launches", "on_gpu_ns", "busy_ns")
    return {row["name"]: tuple(row[key] for key in keys) for row in result.as_json()["ranges"]}


def test_the_sample_has_the_gpu_s_time_by_range() -> None:
    result = run(load_run(str(SAMPLE)), Options())
    assert found(result) == {
        "AddmmBackward0": (4, 52_000, 8, 196_000, 192_000),
        "forward": (2, 52_000, 4, 90_000, 80_000),
        "aten::linear": (4, 36_000, 4, 80_000, 80_000),
        "step 0": (1, 110_000, 10, 170_000, 146_000),
        "step 1": (1, 110_000, 10, 170_000, 146_000),
        "backward": (2, 78_000, 10, 204_000, 196_000),
    }
    idle = {row["name"]: row["idle_percent"] for row in result.as_json()["ranges"]}
    assert idle["step 0"] == pytest.approx(100 * 24 / 170)


def test_work_on_several_streams_at_one_time_counts_once(load: Load) -> None:
    result = run(
        load(
            *ranged(2_000, 2_100, "step"),
            *ranged(2_000, 2_100, "other", domain="data"),
            *ranged(2_000, 2_100, "elsewhere", tid=2),
            *ranged(2_000, 2_100, "of the process", range=0),
            launch(2_010, 1),
            launch(2_020, 2),
            launch(2_200, 3),
            kernel(3_000, 3_100, 1),
            kernel(3_050, 3_120, 2, stream=8),
            kernel(3_500, 3_600, 3),
        ),
        Options(),
    )
    assert found(result) == {
        "step": (1, 100, 2, 120, 120),
        "other": (1, 100, 2, 120, 120),
        "elsewhere": (1, 100, 0, None, None),
        "of the process": (1, 100, 2, 120, 120),
    }


def test_a_range_of_a_process_has_what_any_thread_launched(load: Load) -> None:
    result = run(
        load(
            *ranged(2_000, 2_100, "first", range=0),
            *ranged(2_050, 2_200, "crossing", range=1),
            *ranged(2_110, 2_150, "again", range=0),
            *ranged(2_000, 2_300, "of many", range=64),
            *ranged(2_000, 2_300, "elsewhere", range=0, pid=5, tid=5),
            launch(2_010, 1),
            launch(2_060, 2, tid=2),
            launch(2_120, 3),
            launch(2_250, 4),
            *(kernel(3_000 + 100 * id, 3_050 + 100 * id, id) for id in (1, 2, 3, 4)),
        ),
        Options(),
    )
    assert found(result) == {
        "first": (1, 100, 2, 150, 100),
        "crossing": (1, 150, 2, 150, 100),
        "again": (1, 40, 1, 50, 50),
        "of many": (1, 300, 0, None, None),
        "elsewhere": (1, 300, 0, None, None),
    }


def test_the_length_of_a_range_without_an_end_is_not_known(load: Load) -> None:
    opened = event("B", 0, "a", "annotation", range=0)
    records = [*ranged(0, 9, "b"), opened, *ranged(10, 14, "b"), launch(1, 5), kernel(20, 30, 5)]
    records.append(event("B", 11, "b", "annotation", range=1))
    assert found(run(load(*records), Options())) == {"a": (1, None, 1, 10, 10), "b": (3, 13, 1, 10, 10)}


def test_names_beyond_the_top_are_counted(load: Load) -> None:
    result = run(load(*ranged(2_000, 2_100, "a"), *ranged(2_200, 2_250, "b")), Options(top=1))
    assert (list(found(result)), result.notes) == (["a"], ["1 more name is not listed: --top 0 lists all"])


STEPPING, AUTOGRAD, LOADING, OTHER = range(1, 5)


@pytest.mark.parametrize("seed", range(4))
def test_other_threads_launch_for_the_ranges_of_the_thread_that_they_serve(seed: int, tmp_path: Path) -> None:
    """Autograd's launches count for the thread of the last forward operator, also those of its operators
    without a number; a step has what its process launched. Found here launch by launch.
    """
    rng, events, ranges = Random(seed), list[dict[str, Any]](), list[tuple[str, int, int, int]]()

    def add(category: str, name: str, tid: int, ts: int, dur: int, **args: int) -> None:
        keys = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
        events.append(dict(zip(keys, ("X", category, name, 1, tid, ts, dur, args), strict=True)))
        if category == "user_annotation":
            ranges.append((name, tid, ts, ts + dur))

    for name, ts, dur in (("all", 0, 900), ("step 1", 10, 350), ("b", 110, 200), ("step 2", 410, 350)):
        add("user_annotation", name, STEPPING, ts, dur)
    add("user_annotation", "elsewhere", OTHER, 30, 800)
    for number, tid in enumerate((STEPPING, OTHER, STEPPING)):
        numbered = {"Sequence number": number}
        # The last operator with the number is the forward one, on whichever thread.
        add("cpu_op", "aten::t", STEPPING + OTHER - tid, 20 * number, 5, **numbered)
        add("cpu_op", "aten::mm", tid, 20 * number + 8, 10, **numbered)
        add("cpu_op", "MmBackward0", AUTOGRAD, 100 + 250 * number, 80, **numbered, **{"Fwd thread id": 1})
    launches: dict[str, int] = {name: 0 for name, *_ in ranges}
    for id in range(1, 80):
        at, tid = rng.randrange(900), rng.choice((STEPPING, AUTOGRAD, LOADING, OTHER))
        add("cuda_runtime", "cudaLaunchKernel", tid, at, 1, correlation=id)
        add("kernel", "k", 7, 1_000 + id, 1, correlation=id, device=0, stream=7)
        served = (OTHER if 350 <= at < 600 else STEPPING) if tid == AUTOGRAD else tid
        in_step = any("step" in name and start <= at < end for name, _, start, end in ranges)
        for name, owner, start, end in ranges:
            # Also what is around a step has all that it has.
            has_all = in_step and (name == "all" or "step" in name)
            launches[name] += start <= at < end and (owner == served or has_all)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    result = run(load_run(str(path)), Options(top=0))
    assert {name: found(result)[name][2] for name in launches} == launches
    (table,) = result.parts
    assert "sequence numbers. A step includes all" in table.note


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from("(()LLL"), st.integers(0, 30), st.integers(1, 20)), max_size=30))
def test_sums_are_those_of_each_range(steps: list[tuple[str, int, int]]) -> None:
    records, work, opened = [], dict[str, list[tuple[int, int]]](), list[str]()
    for at, (what, after, length) in enumerate(steps):
        ns = 2_000 + 10 * at
        if what == "(":
            opened.append(f"r{at}")
            work[opened[-1]] = []
            records.append(event("B", ns, opened[-1], "annotation"))
        elif what == ")" and opened:
            records.append(event("E", ns, opened.pop(), "annotation"))
        elif what == "L":
            start = 5_000 + 5 * at + after
            records += [launch(ns, at), kernel(start, start + length, at, stream=at)]
            for name in opened:
                work[name].append((start, start + length))
    with tempfile.TemporaryDirectory() as folder:
        result = run(load_run(str(write(Path(folder, "run.jsonl"), *records))), Options(top=0))
    expected = {}
    for name, spans in work.items():
        covered = {ns for start, end in spans for ns in range(start, end)}
        whole = max(end for _, end in spans) - min(start for start, _ in spans) if spans else None
        expected[name] = (len(spans), whole, len(covered) if spans else None)
    assert {name: row[2:] for name, row in found(result).items()} == expected
