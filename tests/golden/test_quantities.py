"""A quantity has one value: reports that state it agree, on every fixture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest

from tests.golden.cases import Case, cases, with_sample
from tests.support.here import read_ranks_here
from tracepipe.analyses.allocations import DEVICE, MANAGED
from tracepipe.api.reports import JobOptions, make_of_job
from tracepipe.dataset.build import build
from tracepipe.dataset.places import Dataset, read_rows
from tracepipe.reports import REPORTS
from tracepipe.store.run import Run, load_run

Rows = list[dict[str, Any]]

_PEAKS_OF_SUMMARY: Final = 8
TIMES: Final = ("compute_ns", "communication_ns", "exposed_ns", "copies_ns", "idle_ns")


class Stated:
    """What the reports state about a recording, with `--top 0`. `dataset` is one of this recording alone."""

    def __init__(self, run: Run, dataset: Dataset) -> None:
        self.run, self.dataset = run, dataset
        self._results: dict[str, dict[str, Any]] = {}

    def rows(self, report: str, table: str) -> Rows:
        """The rows of a table; none where the report leaves it out."""
        if report not in self._results:
            how = REPORTS[report]
            self._results[report] = how.run(self.run, how.options(top=0)).as_json()
        rows: Rows = self._results[report].get(table, [])
        return rows

    @cached_property
    def steps(self) -> Rows:
        """The layer `steps` of the dataset."""
        files = [self.dataset.part("steps", *one) for one in self.dataset.ranks()]
        return [row for file in files if file.is_file() for row in read_rows(file)]

    @cached_property
    def job(self) -> dict[str, Any]:
        """The tables of `ranks`, of a recording with one GPU and without ranges for steps."""
        if [row["name"] for row in self.steps] != [""]:
            return {}
        return make_of_job(
            str(self.dataset.folder), "", JobOptions(top=0), force=False, showing=lambda _: nullcontext()
        ).result.as_json()

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
    """The idle time of the GPU, of `gaps`."""
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


def whole_of_dataset(of: Stated) -> list[tuple[int, ...]]:
    """GPU, busy and idle time of a recording without steps, of the dataset's layer `steps`."""
    return [(row["gpu"], row["busy_ns"], row["idle_ns"]) for row in of.steps if row["name"] == ""]


def whole_of_gaps(of: Stated) -> list[tuple[int, ...]]:
    """The same of `gaps`: idle time also before the first work and after the last."""
    if not whole_of_dataset(of):
        return []
    return [
        (row["gpu"], row["busy_ns"], row["idle_ns"] + row["before_ns"] + row["after_ns"])
        for row in of.rows("gaps", "gpus")
    ]


def shares_of_dataset(of: Stated) -> list[tuple[float | None, ...]]:
    """GPU, and in percent of the time from its first work to its last compute, communication, copies, and the
    part of the communication that is hidden; of the same layer.
    """
    spans_ns = {row["gpu"]: row["span_ns"] for row in of.rows("summary", "gpu_time")}
    return [
        (
            row["gpu"],
            *(
                100 * row[f"{name}_ns"] / spans_ns[row["gpu"]]
                for name in ("compute", "communication", "copies")
            ),
            100 * (row["communication_ns"] - row["exposed_ns"]) / row["communication_ns"]
            if row["communication_ns"]
            else None,
        )
        for row in of.steps
        if row["name"] == ""
    ]


def shares_of_summary(of: Stated) -> list[tuple[float | None, ...]]:
    """The same of `summary`."""
    if not whole_of_dataset(of):
        return []
    names = ("compute", "communication", "copies", "communication_beside")
    return [
        (row["gpu"], *(row[f"{name}_percent"] for name in names)) for row in of.rows("summary", "gpu_time")
    ]


def times_of_ranks(of: Stated) -> list[tuple[int, ...]]:
    """Compute, communication, exposed communication, copies and idle time of the only rank, of `ranks`."""
    return [tuple(row[name] for name in TIMES) for row in of.job.get("ranks", ())]


def times_of_steps(of: Stated) -> list[tuple[int, ...]]:
    """The same of the layer `steps`."""
    return [tuple(row[name] for name in TIMES) for row in of.steps if of.job]


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
    return [tuple(row[key] for key in keys) for row in on_gpu[:_PEAKS_OF_SUMMARY]]


def annotations_of_summary(of: Stated) -> Rows:
    """The rows of `annotations` for the ranges that `summary` lists, in its order."""
    listed = of.rows("summary", "gpu_ranges")
    known = {row["name"]: row for row in of.rows("annotations", "ranges")}
    return [{key: known[row["name"]][key] for key in row} for row in listed]


_COPIES: Final = "from transfers where gpu is not null"

PAIRS: Final[dict[str, tuple[Callable[[Stated], Any], Callable[[Stated], Any]]]] = {
    "busy, summary and gaps": (gpu_shares, gpu_times_of_gaps),
    "busy, dataset and gaps": (whole_of_dataset, whole_of_gaps),
    "shares of a GPU, dataset and summary": (shares_of_dataset, shares_of_summary),
    "times of a rank, ranks and dataset": (times_of_ranks, times_of_steps),
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
        lambda of: of.activity("CUDA API calls", "calls inside those")),
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


def stated(recording: Path, folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> Stated:
    """What is stated about a recording, which becomes a dataset of one rank in a folder."""
    read_ranks_here(patch)
    named = folder / f"rank0{recording.name[recording.name.index('.') :]}"
    shutil.copy(recording, named)
    build([str(named)], str(folder / "ds"), jobs=1, options=options)
    return Stated(load_run(str(recording), **options), Dataset.opened(str(folder / "ds")))


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_reports_that_state_one_quantity_agree(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = case.options()
    of = stated(case.input, tmp_path, monkeypatch, assumed=options.assumed, undated=options.undated)
    both = {name: (one(of), other(of)) for name, (one, other) in PAIRS.items()}
    assert {name: values for name, values in both.items() if values[0] != values[1]} == {}


def test_data_loading_is_the_idle_time_in_which_data_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 ns of loading, a copy hides 10 and a kernel 20; the GPU idles for another 40 ns without it."""
    lines: list[dict[str, Any]] = [
        {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"]},
        {"ts_ns": 1000, "type": "annotation", "name": "data loading", "dur_ns": 60, "pid": 1, "tid": 1},
        {"ts_ns": 1020, "type": "transfer", "name": "HtoD", "dur_ns": 10, "gpu": 0, "stream": 1},
        {"ts_ns": 1040, "type": "gpu_kernel", "name": "a", "dur_ns": 30, "gpu": 0, "stream": 1},
        {"ts_ns": 1110, "type": "gpu_kernel", "name": "b", "dur_ns": 10, "gpu": 0, "stream": 1},
    ]
    text = "".join(json.dumps({"phase": "X", **line} if "ts_ns" in line else line) + "\n" for line in lines)
    (tmp_path / "run.jsonl").write_text(text)
    of = stated(tmp_path / "run.jsonl", tmp_path, monkeypatch)
    (step,) = of.steps
    assert (step["data_loading_ns"], step["idle_loading_ns"], step["idle_ns"]) == (60, 30, 70)
    assert of.job["ranks"][0]["loading_ns"] == 30
    path = {(row["what"], row["name"]): row["ns"] for row in of.job["critical_path"]}
    assert path == {
        ("loads data", "data loading"): 30, ("GPU idle", None): 40, ("copies", "HtoD"): 10,
        ("computes", "a"): 30, ("computes", "b"): 10,
    }  # fmt: skip
