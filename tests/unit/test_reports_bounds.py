"""How much memory reports take for each event, and for each of what else a recording may have many of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.recordings import KERNELS, write_mixed, write_warps
from tests.support.peaks import compared_bytes, peak_bytes
from tests.support.recordings import GPU_CLOCK, HEADER, event, span
from tracepipe.present.writing.table_formats import FORMATS
from tracepipe.reports import REPORTS

pytestmark = pytest.mark.slow

# More than the tables keep at a time, and many more than that.
FEW, MANY = 25_000, 75_000


def write(path: Path, *records: dict[str, Any]) -> Path:
    """Write a recording without spaces, as captures do: the native core takes no other lines."""
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in (HEADER, *records)))
    return path


def call(at: int, name: str = "f", **fields: Any) -> dict[str, Any]:
    return span(at * 10, at * 10 + 5, name, **fields)


def kernel(at: int) -> dict[str, Any]:
    columns = {"warp": [0], "sm": [at % 132], "slot": [0], "entry_ns": [0], "exit_ns": [50]}
    return {"type": "gpu_warp", "name": f"kernel {at}", "ts_ns": at * 1_000, "gpu": 0, **columns}


def pair(at: int) -> dict[str, Any]:
    times = {"source_ns": at * 10**8, "host_lo_ns": at * 10**8, "host_hi_ns": at * 10**8 + 900}
    return {"type": "clock", "clock": GPU_CLOCK, **times}


def loss(at: int) -> dict[str, Any]:
    return {"type": "loss", "layer": f"layer {at}", "count": 1, "ts_ns": at * 10, "reason": f"reason {at}"}


# What there is a different one of in each event, and how many bytes `summary` takes for it at most.
SUMMARY: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "nothing": (call, 100),
    "names": (lambda at: call(at, f"function number {at}"), 180),
    "threads": (lambda at: call(at, tid=at), 380),
    "processes": (lambda at: call(at, pid=at, tid=at), 440),
    "thread names": (lambda at: call(at, comm=f"thread {at}"), 320),
    "arguments": (lambda at: call(at, args={"text": f"{at}" + "x" * 300}), 130),
    "kernels": (kernel, 400),
    "clock pairs": (pair, 100),
    "losses": (loss, 130),
}


@pytest.mark.parametrize("what", SUMMARY)
def test_summary_takes_a_few_bytes_for_whatever_there_is_much_of(what: str, tmp_path: Path) -> None:
    make, most_bytes = SUMMARY[what]
    few = compared_bytes("summary", str(write(tmp_path / "few.jsonl", *map(make, range(FEW)))))
    many = compared_bytes("summary", str(write(tmp_path / "many.jsonl", *map(make, range(MANY)))))
    assert (many - few) / (MANY - FEW) < most_bytes


# Bytes an event at most, of a program's usual mix.
OF_MIXED = {
    "summary": 70, "gaps": 130, "timeline": 110, "layers": 100, "memory": 75, "warps": 130, "export": 200
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mixed")
    few, many = folder / "few.jsonl", folder / "many.jsonl"
    write_mixed(few, 50_000, unique=True)
    write_mixed(many, 250_000, unique=True)
    return few, many


@pytest.mark.parametrize("report", OF_MIXED)
def test_a_report_takes_a_bounded_number_of_bytes_for_each_event(
    report: str, mixed: tuple[Path, Path]
) -> None:
    few, many = (compared_bytes(report, str(path)) for path in mixed)
    assert (many - few) / 200_000 < OF_MIXED[report]


def test_names_that_are_not_shown_take_little(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        calls = (call(at, f"function number {at}") for at in range(count))
        return compared_bytes("layers", str(write(tmp_path / "run.jsonl", *calls)))

    assert (peak(25_000) - peak(5_000)) / 20_000 < 1_000


def test_long_names_are_not_in_memory(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        calls = (call(at, f"{at}" + "x" * 2_000) for at in range(count))
        return compared_bytes("summary", str(write(tmp_path / "run.jsonl", *calls)))

    assert (peak(12_000) - peak(4_000)) / 8_000 < 1_000


@pytest.mark.parametrize("names", [("function", "function"), ("function", "another")])
def test_names_that_are_compared_take_little(names: tuple[str, str], tmp_path: Path) -> None:
    def peak(count: int) -> int:
        paths = [
            str(write(tmp_path / name, *(call(at, f"{name} number {at}") for at in range(count))))
            for name in names
        ]
        return compared_bytes("diff", *paths)

    assert (peak(MANY) - peak(FEW)) / (MANY - FEW) < 600


# How many MB for 150,000 losses.
OF_LOSSES = {"summary": 70, "diff": 75, "timeline": 115}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("lost") / "run.jsonl", *map(loss, range(150_000)))


@pytest.mark.parametrize("report", OF_LOSSES)
def test_losses_are_not_in_memory(report: str, lost: Path) -> None:
    assert peak_bytes(report, *[str(lost)] * len(REPORTS[report].inputs)) < OF_LOSSES[report] * 10**6


def test_calls_of_many_threads_are_looked_for_where_memory_was_used_alone(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        of_memory = span(3, 5, "alloc", "memory", args={"size": 64, "address": "0x10"})
        calls = (call(at, tid=at) for at in range(count))
        return compared_bytes("memory", str(write(tmp_path / "run.jsonl", of_memory, *calls)))

    assert (peak(MANY) - peak(FEW)) / (MANY - FEW) < 300


# Bytes at most of an allocation that is never freed, from so many on: `summary` follows fewer.
OF_ALLOCATIONS = {"summary": (110_000, 115), "memory": (50_000, 250), "report": (50_000, 250)}


@pytest.mark.parametrize("report", OF_ALLOCATIONS)
def test_an_allocation_that_is_never_freed_takes_some_bytes(report: str, tmp_path: Path) -> None:
    few, most_bytes = OF_ALLOCATIONS[report]

    def peak(count: int) -> int:
        allocated = (
            span(at * 10, at * 10 + 5, "alloc", "memory", args={"size": at, "address": hex(at << 9)})
            for at in range(count)
        )
        return compared_bytes(report, str(write(tmp_path / "run.jsonl", *allocated)))

    assert (peak(few + 100_000) - peak(few)) / 100_000 < most_bytes


# Bytes a call at most, where they are many: their columns are in files then, of which some MB are mapped.
OF_MANY = {"summary": 20, "gaps": 30, "timeline": 35, "layers": 60, "memory": 20}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recordings of 150,000 and of 400,000 calls."""
    folder = tmp_path_factory.mktemp("calls")
    lines = [call(at, f"f{at % 100}", tid=1 + at % 4) for at in range(400_000)]
    few, many = (write(folder / f"{count}.jsonl", *lines[:count]) for count in (150_000, 400_000))
    return few, many


@pytest.mark.parametrize("report", OF_MANY)
def test_millions_of_calls_are_not_in_memory(report: str, calls: tuple[Path, Path]) -> None:
    few, many = (compared_bytes(report, str(path)) for path in calls)
    assert (many - few) / 250_000 < OF_MANY[report]


# Bytes a warp at most; and how many MB for 400,000 of them.
OF_WARPS = {
    "warps": (80, 170), "plot": (30, 180), "report": (100, 200), "diff": (180, 200), "export": (80, 180)
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recordings of 100,000 and of 400,000 warps of one kernel: of several, fewer are looked at together."""
    folder = tmp_path_factory.mktemp("kernels")
    for warps in (100_000, 400_000):
        path = folder / f"{warps}.jsonl"
        write_warps(path, warps)
        path.write_text(re.sub("|".join(KERNELS), "vectorAdd", path.read_text()))
    return folder / "100000.jsonl", folder / "400000.jsonl"


@pytest.mark.parametrize("report", OF_WARPS)
def test_millions_of_warps_are_not_in_memory(report: str, kernels: tuple[Path, Path]) -> None:
    most_bytes, most_mb = OF_WARPS[report]
    inputs = len(REPORTS[report].inputs)
    few, many = (peak_bytes(report, *[str(path)] * inputs) for path in kernels)
    assert (many - few) / 300_000 < most_bytes
    assert many < most_mb * 10**6


# How many MB for so many blocks at most, beyond those of a thousand.
OF_BLOCKS = {"warps": 50, "report": 30, "diff": 60}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Recordings of one launch of 1,000, 100,000 and 300,000 blocks of one warp, which run in waves."""
    folder = tmp_path_factory.mktemp("blocks")

    def launched(count: int) -> Path:
        launch = {"type": "gpu_warp", "name": "k", "ts_ns": 0, "launch": 1, "gpu": 0, "block": [32, 1, 1]}
        lines = []
        for first in range(0, count, 1_000):
            warps = range(first, first + 1_000)
            entry_ns = [at // 8_448 * 3_000 + at % 8_448 // 100 * 7 for at in warps]
            columns = {
                "warp": [*warps],
                "sm": [at % 132 for at in warps],
                "slot": [at // 132 % 64 for at in warps],
                "entry_ns": entry_ns,
                "exit_ns": [2_000 + at * 7_919 % 500 for at in warps],
            }
            lines.append(launch | {"grid": [count, 1, 1]} | columns)
        return write(folder / f"{count}.jsonl", *lines)

    return launched(1_000), launched(100_000), launched(300_000)


@pytest.mark.parametrize("report", OF_BLOCKS)
def test_blocks_of_one_warp_are_not_in_memory(report: str, blocks: tuple[Path, Path, Path]) -> None:
    inputs = len(REPORTS[report].inputs)
    least, few, many = (compared_bytes(report, *[str(path)] * inputs) for path in blocks)
    assert (many - few) / 200_000 < 20
    assert max(few, many) - least < OF_BLOCKS[report] * 10**6


@pytest.mark.parametrize("report", ["warps", "gaps"])
def test_launches_of_one_warp_take_little(report: str, tmp_path: Path) -> None:
    def launch(at: int) -> dict[str, Any]:
        return kernel(at) | {"name": "k", "launch": at, "grid": [1, 1, 1], "block": [32, 1, 1]}

    few, many = (
        compared_bytes(report, str(write(tmp_path / f"{count}.jsonl", *map(launch, range(count)))))
        for count in (5_000, 25_000)
    )
    assert (many - few) / 20_000 < 550


def test_kernels_with_warps_that_are_not_looked_at_take_little(tmp_path: Path) -> None:
    few, many = (
        compared_bytes("warps", str(write(tmp_path / f"{count}.jsonl", *map(kernel, range(count)))))
        for count in (5_000, 15_000)
    )
    assert (many - few) / 10_000 < 2_000


# What there is a different one of in each event, of which `timeline` draws the busiest, and how many bytes it
# takes for each at most.
DRAWN: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "streams": (lambda at: call(at, type="gpu_kernel", gpu=at % 8, stream=at), 1_000),
    "layers of hooks": (lambda at: call(at, type="hook") | {"layer": f"layer {at}"}, 400),
}


@pytest.mark.parametrize("what", DRAWN)
def test_rows_that_are_not_drawn_take_little(what: str, tmp_path: Path) -> None:
    make, most_bytes = DRAWN[what]
    few, many = (
        compared_bytes("timeline", str(write(tmp_path / f"{count}.jsonl", *map(make, range(count)))))
        for count in (20_000, 60_000)
    )
    assert (many - few) / 40_000 < most_bytes


# Bytes at most of a kernel, its launch and the gap before it; and how many MB for 150,000 of them.
OF_GAPS = {"gaps": (350, 175), "report": (350, 195), "summary": (350, 90)}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recordings of 50,000 and of 150,000 kernels."""
    folder = tmp_path_factory.mktemp("launched")

    def lines(count: int) -> Iterator[dict[str, Any]]:
        for at in range(count):
            yield span(at * 30, at * 30 + 8, "cuLaunchKernel", launch=at + 1)
            yield span(at * 30 + 10, at * 30 + 15, f"k{at % 50}", "gpu_kernel", gpu=0, launch=at + 1)

    few, many = (write(folder / f"{count}.jsonl", *lines(count)) for count in (50_000, 150_000))
    return few, many


@pytest.mark.parametrize("report", OF_GAPS)
def test_a_gap_takes_some_hundred_bytes(report: str, launched: tuple[Path, Path]) -> None:
    most_bytes, most_mb = OF_GAPS[report]
    few, many = (peak_bytes(report, str(path)) for path in launched)
    assert (many - few) / 100_000 < most_bytes
    assert many < most_mb * 10**6


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("what", ["names", "arguments"])
def test_an_export_of_long_texts_takes_little(what: str, form: str, tmp_path: Path) -> None:
    def one(at: int) -> dict[str, Any]:
        text = str(at) + "x" * 3_000
        return call(at, text) if what == "names" else call(at, args={"text": text})

    path = write(tmp_path / "run.jsonl", *map(one, range(20_000)))
    assert peak_bytes("export", str(path), "--format", form) < 175 * 10**6


def test_ranges_of_many_names_take_little(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        begins = (event("B", at * 10, f"range {at}", "annotation", tid=at % 4) for at in range(count))
        return compared_bytes("annotations", str(write(tmp_path / "run.jsonl", *begins)))

    assert (peak(60_000) - peak(20_000)) / 40_000 < 400


# Bytes at most of each name or event that is listed.
LISTING = {
    "summary --top 0": 440,
    "layers --top 0": 440,
    "diff --top 0 --json": 600,
    "timeline --json": 600,
}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recordings of 10,000 and of 30,000 calls, no two of one name. Peaks of two runs differ by 1 MB."""
    folder = tmp_path_factory.mktemp("named")
    calls = [call(at, f"function number {at}") for at in range(30_000)]
    few, many = (write(folder / f"{count}.jsonl", *calls[:count]) for count in (10_000, 30_000))
    return few, many


@pytest.mark.parametrize("command", LISTING)
def test_what_lists_all_is_not_in_memory(command: str, named: tuple[Path, Path]) -> None:
    report, *options = command.split()
    inputs = len(REPORTS[report].inputs)
    few, many = (compared_bytes(report, *[str(path)] * inputs, *options) for path in named)
    assert (many - few) / 20_000 < LISTING[command]


# Bytes at most of what is listed of each: a cause of a gap, a place and a site of an allocation, a range.
LISTING_EACH = {
    "gaps --top 0": 850,
    "memory --top 0 --json": 1_100,
    "annotations --top 0 --json": 650,
    "diff --top 0": 850,
}


@pytest.fixture(scope="module")
def of_their_own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recordings of 5,000 and of 45,000 calls that launch in ranges, and of processes that allocate."""
    folder = tmp_path_factory.mktemp("own")

    def lines(count: int) -> Iterator[dict[str, Any]]:
        for at in range(count):
            ns, pid = at * 30, at + 2
            yield span(ns, ns + 29, f"range {at}", "annotation")
            yield span(ns, ns + 8, f"function {at}", launch=at + 1)
            yield span(ns + 10, ns + 15 + at % 7, f"k{at % 50}", "gpu_kernel", gpu=0, launch=at + 1)
            args = {"size": at + 1, "address": hex(at << 9)}
            yield span(ns, ns + 5, "alloc", "memory", pid=pid, tid=pid, args=args)

    few, many = (write(folder / f"{count}.jsonl", *lines(count)) for count in (5_000, 45_000))
    return few, many


@pytest.mark.parametrize("command", LISTING_EACH)
def test_what_lists_all_of_each_kind_is_not_in_memory(
    command: str, of_their_own: tuple[Path, Path], tmp_path: Path
) -> None:
    report, *options = command.split()

    def peak(path: Path) -> int:
        paths = [str(path)]
        if report == "diff":
            # One in which all names differ.
            paths.append(str(tmp_path / path.name))
            Path(paths[1]).write_bytes(path.read_bytes().replace(b'"dur_ns":8,', b'"dur_ns":9,'))
        return compared_bytes(report, *paths, *options)

    few, many = map(peak, of_their_own)
    assert (many - few) / 40_000 < LISTING_EACH[command]


# What there is a different one of in each event, and how many bytes each takes at most, from so many on that
# they are not nested all at once.
OF_THREADS: dict[str, tuple[str, Callable[[int], dict[str, Any]], int]] = {
    "summary of threads": ("summary", lambda at: call(at, tid=at), 160),
    "timeline of threads": ("timeline", lambda at: call(at, tid=at), 160),
    "gaps of processes": ("gaps", lambda at: call(at, "cuLaunchKernel", pid=at, tid=at), 160),
    "memory of processes": (
        "memory",
        lambda at: call(at, "alloc", type="memory", pid=at, tid=at, args={"size": 64, "address": "0x10"}),
        400,
    ),
}


@pytest.mark.parametrize("what", OF_THREADS)
def test_many_threads_and_processes_take_little(what: str, tmp_path: Path) -> None:
    report, make, most_bytes = OF_THREADS[what]
    few, many = (
        compared_bytes(report, str(write(tmp_path / f"{count}.jsonl", *map(make, range(count)))))
        for count in (35_000, 115_000)
    )
    assert (many - few) / 80_000 < most_bytes


def test_much_text_of_arguments_is_not_in_memory(tmp_path: Path) -> None:
    lines = [call(at, args={"a": str(at) + "x" * 500_000}) for at in range(100)]
    assert peak_bytes("summary", str(write(tmp_path / "run.jsonl", *lines))) < 64 << 20
