"""Compares what samplers of a GPU say with what is known of a kernel.

    python benchmarks/gpu_known.py

Needs an NVIDIA GPU and nvcc; ends with 3 without a GPU. Prints of the kernels of gpu_known.cu:

    copies      the bytes that DRAM read and wrote by the counters, times those that were copied
    pulses      by how much edges of `SM active %`, sampled every 200 us, differ from the kernels' own records
    loads, barriers     the share of warps' lives that they wait, and the share of the samples that show it
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import built, tools_here  # noqa: E402

COPIED = 4 << 30
_ROUNDED_NS = 1_000  # by which a sample may be shorter than its interval
Records = list[dict[str, Any]]
# Of which group of reasons the samples say the same.
REASONS = {"chase": ("long_scoreboard", "short_scoreboard", "lg_throttle"), "barrier": ("barrier",)}


def recorded(program: Path, work: Sequence[str], *options: str) -> tuple[Records, str]:
    """The recording of a work with its kernels, and what the program printed."""
    file = program.with_name("run.jsonl")
    capture = [
        sys.executable,
        "-m",
        "tracepipe",
        "capture",
        "--force",
        "--gpu",
        "kernels",
        "--calls",
        "launches",
    ]
    command = [*capture, "--layers", "gpu_kernel", *options, "-o", str(file), "--", str(program), *work]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in file.read_text().splitlines()], done.stdout


def kernels(records: Records) -> Iterator[tuple[int, int]]:
    """When each kernel began and ended."""
    for record in records:
        if record["type"] == "gpu_kernel":
            yield record["ts_ns"], record["ts_ns"] + record["dur_ns"]


def samples(records: Records) -> Records:
    """The samples of counters, without the lost ones."""
    return [record for record in records if record.get("layer") == "gpu_counters" and "args" in record]


def show_copies(program: Path, count: int = 40) -> None:
    """Compare bytes."""
    records, _ = recorded(program, ("copy", str(count)), "--gpu-counters", "1ms")
    begin_ns, end_ns = min(kernels(records))[0], max(kernels(records))[1]
    inside = [
        one for one in samples(records) if begin_ns < one["ts_ns"] + one["dur_ns"] and one["ts_ns"] < end_ns
    ]
    for name in ("DRAM read GB/s", "DRAM write GB/s"):
        seen = sum(one["args"][name] * one["dur_ns"] for one in inside)
        print(f"copies: {name.split()[1]} {seen / (count * COPIED):.5f} times the bytes")


def show_pulses(program: Path) -> None:
    """Compare edges: a sample at an edge was active for its share of the interval. Kernels near which a
    sample was lost are left out.
    """
    records, _ = recorded(program, ("pulses", "150"), "--gpu-counters", "200us")
    of_time, begins, ends = samples(records), [], []
    for begin_ns, end_ns in kernels(records):
        near = [
            one
            for one in of_time
            if begin_ns - 150_000 < one["ts_ns"] + one["dur_ns"] and one["ts_ns"] < end_ns + 150_000
        ]
        active = [one for one in near if one["args"]["SM active %"] > 0.1]
        covered_ns = sum(one["dur_ns"] for one in near)
        if covered_ns < end_ns - begin_ns + 300_000 - _ROUNDED_NS * len(near):
            continue
        first, last = active[0], active[-1]
        if len(active) > 1 and max(first["args"]["SM active %"], last["args"]["SM active %"]) < 99:
            begins.append(first["ts_ns"] + first["dur_ns"] - _active_ns(first) - begin_ns)
            ends.append(last["ts_ns"] + _active_ns(last) - end_ns)
    for name, some in (("begin", begins), ("end", ends)):
        print(
            f"pulses: {name} {statistics.median(some):+.0f} ns ({min(some):+.0f} to {max(some):+.0f}), "
            f"{len(some)} edges"
        )


def _active_ns(sample: dict[str, Any]) -> float:
    return float(sample["args"]["SM active %"] * sample["dur_ns"] / 100)


def show_waits(program: Path, work: str) -> None:
    """Compare shares."""
    records, printed = recorded(program, (work,), "--gpu-stalls")
    by_kernel: dict[str, Counter[str]] = {}
    for record in records:
        if record["type"] == "gpu_stall":
            for function, reason, count in cells(record):
                by_kernel.setdefault(function, Counter())[reason] += count
    for line in printed.splitlines():
        kernel, _, known = line.rpartition(" ")
        (own,) = (
            found for function, found in by_kernel.items() if kernel in function.replace("(bool)1", "true")
        )
        share = 100 * sum(own[reason] for reason in REASONS[work]) / own.total()
        print(f"{kernel}: waits {known}% of its life, {share:.2f}% of {own.total():,} samples")


def cells(record: dict[str, Any]) -> Iterable[tuple[str, str, int]]:
    """Function, reason and samples of a record."""
    names, reasons = record["functions"], record["reasons"]
    for function, reason, count in zip(record["function"], record["reason"], record["samples"], strict=True):
        yield names[function], reasons[reason], count


def main() -> None:
    """Print what was compared, or why nothing was."""
    tools = tools_here()
    with tempfile.TemporaryDirectory() as folder:
        program = built(tools, Path(__file__).with_suffix(".cu"), Path(folder) / "gpu_known")
        show_copies(program)
        show_pulses(program)
        for work in REASONS:
            show_waits(program, work)


if __name__ == "__main__":
    main()
