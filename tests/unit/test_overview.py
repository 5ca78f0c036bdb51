"""Where the time of the GPUs goes, and why they were idle, as the first screen says it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tracepipe.present.writing.rendering import report_lines
from tracepipe.reports.first_screen import screen
from tracepipe.reports.steps import Options
from tracepipe.reports.steps import run as steps
from tracepipe.store.run import load_run

_MS = 1_000_000
Records = list[dict[str, Any]]


def span(type_: str, name: str, start_ms: float, dur_ms: float, **more: Any) -> dict[str, Any]:
    """A slice of the thread of the program, or with a GPU, of the GPU."""
    own = {"gpu": 0, "stream": 7} if type_ in ("gpu_kernel", "transfer") else {"pid": 1, "tid": 1}
    times = {"ts_ns": int(start_ms * _MS), "dur_ns": int(dur_ms * _MS)}
    return {"type": type_, "name": name, "phase": "X", **times, **own, **more}


_LAUNCHES = count(1)


def launched(at_ms: float, start_ms: float, dur_ms: float, *, call_ms: float = 0.01, **more: Any) -> Records:
    """A kernel, or another kind of work, with its launch."""
    launch = next(_LAUNCHES)
    kernel = span("gpu_kernel", "k", start_ms, dur_ms, launch=launch) | more
    return [span("userspace", "cudaLaunchKernel", at_ms, call_ms, launch=launch), kernel]


def shown(records: Records, folder: Path) -> tuple[Any, list[str]]:
    """The report `steps` as data, and the lines of the first screen."""
    header = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"]}
    records = sorted(records, key=lambda one: one["ts_ns"])
    (folder / "run.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [header, *records]))
    run = load_run(str(folder / "run.jsonl"))
    return steps(run, Options()).as_json(), list(report_lines([run.facts], screen(run), width=80))


def step(number: int, start_ms: float, dur_ms: float) -> dict[str, Any]:
    return span("annotation", f"step {number}", start_ms, dur_ms)


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (
            [step(0, 0, 100), *launched(0, 0.1, 10)],
            ["99.9% of it with nothing launched", "its own code or waits (90.0 ms of 100 ms)"],
        ),
        (
            [*launched(0, 0.1, 1), *launched(2, 50.1, 1, call_ms=48)],
            ["the CPU is in cudaLaunchKernel (48.0 ms of 51.0 ms)", "first launch of a kernel loads it"],
        ),
        (
            [*launched(0, 0.1, 1), span("userspace", "cudaFree", 2, 600), *launched(603, 603.1, 1)],
            ["the CPU is in cudaFree (600 ms of 604 ms)", "the first calls initialize the GPU"],
        ),
        (
            [*launched(0, 0.1, 1), span("gpu_kernel", "k", 9, 1, launch=99)],
            ["GPU idle 7.90 ms of 9.90 ms (79.8%)"],
        ),
    ],
    ids=["after the last work", "a long launch", "a long first call", "unknown calls"],
)
def test_the_cause_of_idle_time_is_the_true_one(records: Records, says: list[str], tmp_path: Path) -> None:
    _, lines = shown(records, tmp_path)
    assert [text for text in says if not any(text in line for line in lines)] == []
    assert any("nothing launched" in line for line in lines) == ("99" not in str(records[-1].get("launch")))


@pytest.mark.parametrize("copied_ms", [0.2, None], ids=["which began before", "without them"])
def test_a_wait_inside_the_only_step_is_part_of_it(copied_ms: float | None, tmp_path: Path) -> None:
    """The CPU waits for 50 ms before it launches most of the work, which runs after the step."""
    records = [step(0, 0, 60), *launched(55, 59, 30)]
    records += launched(0.1, copied_ms, 0.1, stream=9) if copied_ms else []
    table, _ = shown(records, tmp_path)
    assert [row["wall_ns"] / _MS for row in table["steps"]] == [88.8 if copied_ms else 30]


def test_copies_for_the_next_step_do_not_begin_it(tmp_path: Path) -> None:
    """Each step launches 10 ms of work, of which a third is waiting, and a copy that runs at once."""
    records = launched(0, 0.05, 19.9)
    for at in range(5):
        at_ms = 1 + 2 * at
        records += [step(at, at_ms, 2), *launched(at_ms + 0.1, at_ms + 0.2, 0.1, type="transfer", stream=9)]
        records += launched(at_ms + 0.5, 20 + 10 * at, 7)
    table, lines = shown(records, tmp_path)
    assert [round(row["wall_ns"] / _MS) for row in table["steps"]] == [10, 10, 10, 10, 7]
    assert any("5 steps (median 10.0 ms)" in line for line in lines)
    assert not any("longer than the median" in line for line in lines)


@pytest.mark.parametrize("lengths_ms", [[10, 90], [10, 10, 90]])
def test_of_two_steps_none_is_slow(lengths_ms: list[int], tmp_path: Path) -> None:
    records, at_ms = [], 0
    for number, length_ms in enumerate(lengths_ms):
        records += [step(number, at_ms, length_ms), *launched(at_ms + 1, at_ms + 1.1, length_ms - 2)]
        at_ms += length_ms
    _, lines = shown(records, tmp_path)
    assert any("longer than the median" in line for line in lines) == (len(lengths_ms) > 2)


def test_few_known_launches_do_not_move_steps(tmp_path: Path) -> None:
    """The call of one kernel is known, which runs after the steps; the work inside them is not known."""
    records = [step(0, 0, 10), step(1, 10, 10), *launched(19, 30, 0.1)]
    records += [span("gpu_kernel", "k", at, 2) for at in (1, 5, 11, 15)]
    table, _ = shown(records, tmp_path)
    assert [row["wall_ns"] for row in table["steps"]] == [10 * _MS, 10 * _MS]
