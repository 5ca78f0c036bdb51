"""How much memory reports take for each event, and for each of what else a recording may have many of.

A process takes 75 to 160 MB before the first event, and what DuckDB has in memory, which is bounded. The
bounds are one and a half times what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.recordings import write_mixed, write_warps
from tests.support.peaks import peak_bytes
from tests.support.recordings import GPU_CLOCK, HEADER, event, span

pytestmark = pytest.mark.slow

# More than the tables of a reading keep at a time, and many more than that.
FEW, MANY = 25_000, 75_000


def write(path: Path, *records: dict[str, Any]) -> Path:
    """Write a recording without spaces, as captures do: the native core takes no other lines."""
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in (HEADER, *records)))
    return path


def call(at: int, name: str = "f", **fields: Any) -> dict[str, Any]:
    return span(at * 10, at * 10 + 5, name, **fields)


def launch(at: int) -> dict[str, Any]:
    """A launch, then its kernel."""
    if at % 2 == 0:
        return span(at * 10, at * 10 + 5, "cuLaunchKernel", launch=at + 1)
    return span(at * 10 + 5, at * 10 + 9, f"k{at % 50}", "gpu_kernel", gpu=0, launch=at)


def kernel(at: int) -> dict[str, Any]:
    columns = {"warp": [0], "sm": [at % 132], "slot": [0], "entry_ns": [0], "exit_ns": [50]}
    return {"type": "gpu_warp", "name": f"kernel {at}", "ts_ns": at * 1_000, "gpu": 0, **columns}


def pair(at: int) -> dict[str, Any]:
    times = {"source_ns": at * 10**8, "host_lo_ns": at * 10**8, "host_hi_ns": at * 10**8 + 900}
    return {"type": "clock", "clock": GPU_CLOCK, **times}


def loss(at: int) -> dict[str, Any]:
    return {"type": "loss", "layer": f"layer {at}", "count": 1, "ts_ns": at * 10, "reason": f"reason {at}"}


def allocation(at: int) -> dict[str, Any]:
    """One that is never freed."""
    return span(at * 10, at * 10 + 5, "alloc", "memory", args={"size": at, "address": hex(at << 9)})


MAKE: dict[str, Callable[[int], dict[str, Any]]] = {
    "calls": call,
    "calls in no order": lambda at: call(at * 7919 % MANY),
    "calls that overlap": lambda at: span(at * 10, at * 10 + 65 + at % 7, "f"),
    "calls without an end": lambda at: event("B", at * 10, f"f{at % 9}", tid=at % 50),
    "names": lambda at: call(at, f"function number {at}"),
    "threads": lambda at: call(at, tid=at),
    "processes": lambda at: call(at, pid=at, tid=at),
    "thread names": lambda at: call(at, comm=f"thread {at}"),
    "arguments": lambda at: call(at, args={"text": f"{at}" + "x" * 300}),
    "launches": launch,
    "streams": lambda at: call(at, type="gpu_kernel", gpu=at % 8, stream=at),
    "kernels with a warp": kernel,
    "clock pairs": pair,
    "losses": loss,
    "allocations": allocation,
    "ranges": lambda at: event("B", at * 10, f"range {at}", "annotation", tid=at % 4),
}
"""What there is a different one of in each event."""

# How many bytes a report takes for each of them at most.
BOUNDS = {
    ("summary", "calls"): 350,
    ("summary", "calls in no order"): 500,
    ("summary", "calls that overlap"): 650,
    ("summary", "calls without an end"): 700,
    ("summary", "names"): 1_500,
    ("summary", "threads"): 1_300,
    ("summary", "processes"): 1_300,
    ("summary", "thread names"): 1_600,
    ("summary", "arguments"): 500,
    ("summary", "launches"): 350,
    ("summary", "streams"): 1_500,
    ("summary", "kernels with a warp"): 1_000,
    ("summary", "clock pairs"): 100,
    ("summary", "losses"): 300,
    ("summary", "allocations"): 1_300,
    ("gaps", "calls in no order"): 600,
    ("gaps", "processes"): 1_300,
    ("gaps", "launches"): 450,
    ("export", "calls"): 800,
    ("export", "names"): 1_500,
    ("export", "arguments"): 3_000,
    ("export", "losses"): 700,
    ("annotations", "ranges"): 1_800,
    ("memory", "allocations"): 1_300,
    ("timeline", "streams"): 1_500,
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Recordings of a number of something, each written once."""
    folder = tmp_path_factory.mktemp("recordings")

    def made(what: str, count: int) -> Path:
        path = folder / f"{what} {count}.jsonl"
        return path if path.exists() else write(path, *map(MAKE[what], range(count)))

    return made


@pytest.mark.parametrize(("report", "what"), BOUNDS)
def test_a_report_takes_some_bytes_for_each(
    report: str, what: str, recording: Callable[[str, int], Path]
) -> None:
    few, many = (peak_bytes(report, str(recording(what, count))) for count in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < BOUNDS[report, what]


# Bytes at most for each event of a program's usual mix.
OF_MIXED = {
    "summary": 300, "gaps": 450, "timeline": 500, "layers": 450, "memory": 450, "export": 1_000
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mixed")
    few, many = folder / "few.jsonl", folder / "many.jsonl"
    write_mixed(few, 100_000, unique=True)
    write_mixed(many, 300_000, unique=True)
    return few, many


@pytest.mark.parametrize("report", OF_MIXED)
def test_a_report_takes_some_bytes_for_each_event_of_the_usual_mix(
    report: str, mixed: tuple[Path, Path]
) -> None:
    few, many = (peak_bytes(report, str(path)) for path in mixed)
    assert (many - few) / 200_000 < OF_MIXED[report]


# Bytes a warp at most.
# `export` lets DuckDB sort in up to 300 MB, of which it takes more or less from run to run.
OF_WARPS = {"summary": 250, "warps": 450, "export": 1_000}


@pytest.fixture(scope="module")
def warps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recordings of 100,000 and of 300,000 warps."""
    folder = tmp_path_factory.mktemp("warps")
    for count in (100_000, 300_000):
        write_warps(folder / f"{count}.jsonl", count)
    return folder / "100000.jsonl", folder / "300000.jsonl"


@pytest.mark.parametrize("report", OF_WARPS)
def test_a_report_takes_some_bytes_for_each_warp(report: str, warps: tuple[Path, Path]) -> None:
    few, many = (peak_bytes(report, str(path)) for path in warps)
    assert (many - few) / 200_000 < OF_WARPS[report]


def test_much_text_of_arguments_is_not_in_memory(tmp_path: Path) -> None:
    lines = [call(at, args={"a": str(at) + "x" * 500_000}) for at in range(100)]
    assert peak_bytes("summary", str(write(tmp_path / "run.jsonl", *lines))) < 150 * 10**6


def test_the_events_that_are_read_are_not_in_memory(tmp_path: Path) -> None:
    """A report that looks at none of a million calls."""
    lines = (call(at, f"f{at % 100}", tid=1 + at % 4) for at in range(10**6))
    path = write(tmp_path / "run.jsonl", *lines)
    assert peak_bytes("stalls", str(path)) < 230 * 10**6
