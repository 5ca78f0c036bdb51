"""A quantity has one value: reports that state it agree, on every fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.golden.cases import Case, cases, with_sample
from tracepipe.analyses.allocations import DEVICE, MANAGED
from tracepipe.dataset.steps import gpu_times, steps_of
from tracepipe.reports import REPORTS
from tracepipe.store.run import Run, load_run

Rows = list[dict[str, Any]]

_PEAKS_OF_SUMMARY: Final = 8


class Stated:
    """What the reports state about a recording, with `--top 0`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._results: dict[str, dict[str, Any]] = {}

    def rows(self, report: str, table: str) -> Rows:
        """The rows of a table; none where the report leaves it out."""
        if report not in self._results:
            how = REPORTS[report]
            self._results[report] = how.run(self.run, how.options(top=0)).as_json()
        rows: Rows = self._results[report].get(table, [])
        return rows

    def activity(self, *names: str, key: str = "count") -> int:
        """The sum of some activities of `summary`."""
        rows = self.rows("summary", "activities")
        return sum(row[key] or 0 for row in rows if row["activity"].strip() in names)

    def total(self, report: str, table: str, key: str) -> int:
        """The sum of a column."""
        return sum(row[key] or 0 for row in self.rows(report, table))

    def asked(self, question: str) -> int:
        """The number that answers a question about the tables of `export`."""
        ((number,),) = self.run.sql(question).fetchall()
        return int(number or 0)


def gpu_shares(of: Stated) -> list[tuple[float, ...]]:
    """GPU, span, and busy and idle in percent, of `summary`."""
    keys = ("gpu", "span_ns", "busy_percent", "idle_percent")
    return [tuple(row[key] for key in keys) for row in of.rows("summary", "gpu_time")]


def gpu_times_of_gaps(of: Stated) -> list[tuple[float, ...]]:
    """The same of `gaps`."""
    found: list[tuple[float, ...]] = []
    for row in of.rows("gaps", "gpus"):
        busy_ns, idle_ns = row["busy_ns"], row["idle_ns"]
        span_ns = busy_ns + idle_ns
        found.append((row["gpu"], span_ns, 100 * busy_ns / span_ns, 100 * idle_ns / span_ns))
    return found


def idle_by_cause(of: Stated) -> dict[str, list[int]]:
    """Idle time of each GPU, and that before its first work and after its last, by the causes of `gaps`."""
    sums: dict[str, list[int]] = {}
    for row in of.rows("gaps", "causes"):
        own = sums.setdefault(row["gpu"], [0, 0, 0])
        own[:] = [ns + row[key] for ns, key in zip(own, ("total_ns", "before_ns", "after_ns"), strict=True)]
    return sums


def idle_by_gpu(of: Stated) -> dict[str, list[int]]:
    """The same by the GPUs of `gaps`, without those that were never idle."""
    sums = {
        f"GPU {row['gpu']}": [row["idle_ns"], row["before_ns"], row["after_ns"]]
        for row in of.rows("gaps", "gpus")
    }
    return {gpu: own for gpu, own in sums.items() if any(own)}


def whole_of_dataset(of: Stated) -> list[tuple[int, int, int]]:
    """GPU, busy and idle time of a recording without steps, of the dataset's layer `steps`."""
    steps = steps_of(of.run, gpu_times(of.run))
    if {*steps["name"]} != {""}:
        return []
    columns = (map(int, steps[name]) for name in ("gpu", "busy_ns", "idle_ns"))
    return [*zip(*columns, strict=True)]


def whole_of_gaps(of: Stated) -> list[tuple[int, int, int]]:
    """The same of `gaps`: idle time also before the first work and after the last."""
    if not whole_of_dataset(of):
        return []
    return [
        (row["gpu"], row["busy_ns"], row["idle_ns"] + row["before_ns"] + row["after_ns"])
        for row in of.rows("gaps", "gpus")
    ]


def peaks_of_summary(of: Stated) -> list[tuple[Any, ...]]:
    """The highest peaks of memory: bytes, when, GPU, allocations, and how many were not freed."""
    keys = ("peak_bytes", "at_ns", "gpu", "allocations", "kept", "kept_bytes")
    return [tuple(row[key] for key in keys) for row in of.rows("summary", "peak_memory")]


def peaks_of_memory(of: Stated) -> list[tuple[Any, ...]]:
    """The same of `memory`, which lists host memory too."""
    keys = ("peak_bytes", "peak_at_ns", "gpu", "count", "never_freed", "never_freed_bytes")
    rows = of.rows("memory", "processes")
    on_gpu = [row for row in rows if row["kind"] in (DEVICE, MANAGED) and row["peak_bytes"]]
    on_gpu.sort(key=lambda row: -row["peak_bytes"])
    return [
        tuple(row[key] or 0 if "freed" in key else row[key] for key in keys)
        for row in on_gpu[:_PEAKS_OF_SUMMARY]
    ]


def annotations_of_summary(of: Stated) -> Rows:
    """The rows of `annotations` for the ranges that `summary` lists, in its order."""
    listed = of.rows("summary", "gpu_ranges")
    known = {row["name"]: row for row in of.rows("annotations", "ranges")}
    return [{key: known[row["name"]][key] for key in row} for row in listed]


# By name, `summary` also lists instants, which are not among the calls in all unless they are inside one.
_ALONE: Final = "select count(*) from calls where kind = 'instant' and parent_row is null"
_COPIES: Final = "from transfers where gpu is not null"

PAIRS: Final[dict[str, tuple[Callable[[Stated], Any], Callable[[Stated], Any]]]] = {
    "busy, summary and gaps": (gpu_shares, gpu_times_of_gaps),
    "busy, dataset and gaps": (whole_of_dataset, whole_of_gaps),
    "idle by cause and GPU, gaps": (idle_by_cause, idle_by_gpu),
    "kernels, summary and export": (
        lambda of: of.activity("GPU kernels"),
        lambda of: of.asked("select count(*) from kernels where kind <> 'no_begin'")),
    "kernels' time, summary and export": (
        lambda of: of.activity("GPU kernels", key="total_ns"),
        lambda of: of.asked("select sum(dur_ns) from kernels")),
    "kernels by name and in all, summary": (
        lambda of: of.total("summary", "kernels", "count"), lambda of: of.activity("GPU kernels")),
    "kernels by process and in all, summary": (
        lambda of: of.total("summary", "processes", "kernels"), lambda of: of.activity("GPU kernels")),
    "calls by name and in all, summary": (
        lambda of: of.total("summary", "calls", "count"),
        lambda of: of.activity("CUDA API calls", "calls inside those") + of.asked(_ALONE)),
    "calls by process and in all, summary": (
        lambda of: of.total("summary", "processes", "calls"), lambda of: of.activity("CUDA API calls")),
    "system calls by name and in all, summary": (
        lambda of: of.total("summary", "syscalls", "count"), lambda of: of.activity("system calls")),
    "warps, summary and export": (
        lambda of: of.activity("GPU warps"), lambda of: of.asked("select count(*) from warps")),
    "memory peaks, summary and memory": (peaks_of_summary, peaks_of_memory),
    "time by line, lines and export": (
        lambda of: of.total("lines", "lines", "gpu_ns"),
        lambda of: of.asked("select sum(dur_ns) from kernels") + of.asked(f"select sum(dur_ns) {_COPIES}")),
    "copies by line, lines and export": (
        lambda of: of.total("lines", "lines", "copies"),
        lambda of: of.asked(f"select count(dur_ns) {_COPIES}")),
    "ranges on the GPU, summary and annotations": (
        lambda of: of.rows("summary", "gpu_ranges"), annotations_of_summary),
}  # fmt: skip
"""Quantity → two ways to state it, which must be equal."""


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_reports_that_state_one_quantity_agree(case: Case) -> None:
    options = case.options()
    of = Stated(load_run(str(case.input), assumed=options.assumed, undated=options.undated))
    stated = {name: (one(of), other(of)) for name, (one, other) in PAIRS.items()}
    assert {name: both for name, both in stated.items() if both[0] != both[1]} == {}
