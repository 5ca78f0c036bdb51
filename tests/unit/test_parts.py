"""Steps and ranges as parts of a recording: what belongs to them, and that parts add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import Load, loader, span
from tracepipe.errors import TracepipeError
from tracepipe.reports import gaps, lines
from tracepipe.reports.annotations import Options as RangeOptions
from tracepipe.reports.annotations import run as ranges_of
from tracepipe.reports.diff import Options as DiffOptions
from tracepipe.reports.diff import run as compare
from tracepipe.store.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two steps of a thread. Another thread of the process, and another process, launch work too. Work of the
    first step lasts into the second; one kernel has no call, and one was launched before all steps.
    """

    def launch(at: int, id: int, **more: Any) -> dict[str, Any]:
        return span(at, at + 1, "cuLaunchKernel", launch=id, **more)

    def kernel(start: int, end: int, name: str, id: int | None = None) -> dict[str, Any]:
        launched = {} if id is None else {"launch": id}
        return span(start, end, name, "gpu_kernel", gpu=0, stream=7, **launched)

    load: Load = loader(tmp_path)
    return load(
        span(100, 200, "step 3", "annotation"),
        span(110, 150, "forward, seq = 1", "annotation"),
        span(200, 300, "step 4", "annotation"),
        launch(50, 1),
        launch(120, 2),
        launch(130, 3, tid=9),
        launch(210, 4),
        launch(220, 5, pid=8, tid=8),
        kernel(60, 105, "before", 1),
        kernel(125, 135, "a", 2),
        kernel(190, 230, "late", 3),
        kernel(240, 250, "b", 4),
        kernel(260, 265, "other", 5),
        kernel(280, 320, "alone"),
    )


def kernels(run: Run, **part: Any) -> set[str]:
    return {row["name"] for row in lines.run(run, lines.Options(**part)).as_json()["work"]}


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ({"step": 3}, {"a", "late"}),
        ({"step": 4}, {"b", "alone"}),
        ({"range": "forward"}, {"a"}),
        ({"range": "step 3"}, {"a", "late"}),
    ],
)
def test_work_belongs_to_the_part_in_which_it_was_launched(
    part: dict[str, Any], shown: set[str], run: Run
) -> None:
    assert kernels(run, **part) == shown
    found = ranges_of(run, RangeOptions(**part)).as_json()["ranges"]
    # What has no call is in no range.
    assert max(row["launches"] for row in found) == len(shown - {"alone"})


def test_idle_time_is_cut_at_the_bounds_of_the_part(run: Run) -> None:
    def figures(**part: Any) -> tuple[int, int]:
        (row,) = gaps.run(run, gaps.Options(**part)).as_json()["gpus"]
        return row["busy_ns"], row["idle_ns"]

    assert (figures(step=3), figures(step=4)) == ((25, 75), (65, 35))
    assert figures(range="forward") == (10, 30)
    result = gaps.run(run, gaps.Options(step=3))
    assert result.title == "WHEN THE GPUS WERE IDLE: step 3, 100 ns"
    found = result.as_json()
    assert sum(row["total_ns"] for row in found["causes"]) == 75
    assert sum(row["dur_ns"] for row in found["gaps"]) == 75


@pytest.mark.parametrize(
    ("part", "message", "hint"),
    [
        ({"step": 5}, "No step 5 was recorded.", "Steps: 3 to 4."),
        ({"range": "forwards"}, "No range of the name forwards was recorded.", "The nearest names: forward."),
        (
            {"range": "x"},
            "No range of the name x was recorded.",
            "It has 3 others: forward, step 3, step 4.",
        ),
        ({"step": 3, "range": "forward"}, "A part is a step or ranges, not both.", "Give --step or --range."),
    ],
)
def test_a_part_that_does_not_exist_is_refused(
    part: dict[str, Any], message: str, hint: str, run: Run
) -> None:
    reports: list[tuple[Callable[..., Any], Any]] = [(lines.run, lines.Options), (gaps.run, gaps.Options)]
    for report, options in reports:
        with pytest.raises(TracepipeError) as error:
            report(run, options(**part))
        assert (error.value.message, error.value.hint) == (message, hint)


def test_a_part_is_compared_with_that_of_another_run(run: Run) -> None:
    found = compare([lambda: run], [lambda: run], DiffOptions(step=3))
    assert found.title.startswith("Step 3 takes 100 ns in A and 100 ns in B")
    data = found.as_json()
    totals = {row["what"]: row["a_ns"] for row in data["totals"]}
    assert (totals["recording"], totals["GPU kernels"]) == (100, 50)
    parts = {row["part"]: row["a_ns"] for row in data["wall"]}
    assert parts == {"wall time": 100, "compute": 25, "idle": 75}
    with pytest.raises(TracepipeError, match="No step 9"):
        compare([lambda: run], [lambda: run], DiffOptions(step=9))
