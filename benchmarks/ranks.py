"""A simulated job of many ranks, from its recordings to what `ranks` finds: time, memory, and its truth.

    python benchmarks/ranks.py                  # 10, 100 and 1,000 ranks
    python benchmarks/ranks.py 1000 --steps 500
    python benchmarks/ranks.py 100 --engine spark

The clock of each host is off by milliseconds and drifts by up to 10 ppm. Three ranks are slow: one at
computing, one at loading data, one at the network. Two recordings are missing, and one is broken. Each line
has: ranks, rows, the time to build for each row as a ratio to that of the first line, the peak memory of a
process that builds, the time that `ranks` takes, and its peak memory; the largest error of a clock as a share
of what its bound allows; and the slow ranks that were found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tests.support.simulated_job import Fault, SimulatedJob

_HOSTS = {10: 5}
_RANKS_OF_HOST = 8
_SLOW: dict[Fault, str] = {"gpu": "GPU", "loader": "data loading", "link": "link"}
_LAYERS = ("kernels", "annotations", "collectives")
_COMMAND = """
import resource, sys
from tracepipe.cli import app
try:
    app(sys.argv[1:], standalone_mode=False)
finally:
    print(max(resource.getrusage(who).ru_maxrss for who in (0, -1)), file=sys.stderr)
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ran. Memory is that of its process, or the one of its children, that took most."""

    seconds: float
    peak_mb: float
    output: str


def ran(*arguments: object) -> Ran:
    """Run a command of tracepipe."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", _COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, words = time.perf_counter() - begun, done.stderr.split()
    if not words or not words[-1].isdecimal():
        sys.exit(done.stderr)
    return Ran(seconds, int(words[-1]) / 1000, done.stdout)


def job_of(ranks: int, steps: int) -> SimulatedJob:
    """A job with three slow ranks, each on its own host and with its own number there."""
    hosts = _HOSTS.get(ranks) or ranks // _RANKS_OF_HOST
    of_host = ranks // hosts
    places = [hosts * (number + 1) // 4 * of_host + number % of_host for number in range(len(_SLOW))]
    return SimulatedJob(hosts, of_host, steps=steps, faults=dict(zip(places, _SLOW, strict=True)))


def spoil(job: SimulatedJob, runs: Path) -> None:
    """Remove two recordings, and break one."""
    middle = job.ranks // 2 + 1
    some = [rank for rank in (1, middle, job.ranks - 1) if rank not in job.faults]
    files = [runs / job.host_of(rank) / f"{rank}.jsonl" for rank in some]
    files[-1].write_text("{broken")
    for file in files[:-1]:
        file.unlink()


def rows_of(dataset: Path) -> int:
    """The rows of all ranks in the large layers."""
    parts = (dataset / f"layer={layer}" / "**/*.parquet" for layer in _LAYERS)
    return sum(int(pl.scan_parquet(part).select(pl.len()).collect().item()) for part in parts)


def error_of_bound(job: SimulatedJob, dataset: Path) -> float:
    """The largest error of a clock, where its bound begins and ends to hold.

    As a share of the sum of the bounds of both clocks.
    """
    placed = pl.read_parquet(dataset / "layer=alignment" / "part-0.parquet")
    clocks = {row["clock"].partition(":")[0]: row for row in placed.iter_rows(named=True)}
    numbers = {job.host_of(host * job.ranks_of_host): host for host in range(job.hosts)}
    reference = placed["reference"][0].partition(":")[0]
    true = job.clocks[numbers[reference]]
    shares = []
    for host, row in clocks.items():
        if host == reference:
            continue
        for at_ns in (row["first_ns"], row["last_ns"]):
            job_ns = at_ns - true.of(0)
            own_ns = job.clocks[numbers[host]].of(job_ns)
            placed_ns = own_ns + row["offset_ns"] + (own_ns - row["at_ns"]) * row["drift_ppb"] // 10**9
            allowed_ns = row["bound_ns"] + clocks[reference]["bound_ns"]
            shares.append(abs(placed_ns - true.of(job_ns)) / allowed_ns)
    return max(shares)


def verdict(job: SimulatedJob, slow: list[dict[str, Any]]) -> str:
    """The slow ranks that were found, and whether they are the planted ones."""
    found = {(one["ranks"], one["slow"]) for one in slow}
    planted = {(str(rank), _SLOW[fault]) for rank, fault in job.faults.items()}
    names = ", ".join(f"{rank} {kind}" for rank, kind in sorted(found))
    return f"{names} ({'all, and no other' if found == planted else f'planted: {sorted(planted)}'})"


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="*", type=int, default=[10, 100, 1_000])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--engine", default="duckdb")
    given = parser.parse_args()
    print(" ranks        rows  build     MB  ranks, s     MB  error  found")
    first_s = None
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            job, runs, dataset = job_of(ranks, given.steps), Path(folder, "runs"), Path(folder, "ds")
            job.write(runs)
            spoil(job, runs)
            built, rows = ran("dataset", "build", runs, "-o", dataset), rows_of(dataset)
            first_s = first_s or built.seconds / rows
            asked = ran("ranks", dataset, "--json", "--top", "0", "--engine", given.engine)
            found = verdict(job, json.loads(asked.output)["slow"])
            print(
                f"{ranks:>6} {rows:>11,} {built.seconds / rows / first_s:>5.2f}x {built.peak_mb:>6.0f}",
                f"{asked.seconds:>9.1f} {asked.peak_mb:>6.0f} {error_of_bound(job, dataset):>6.2f}  {found}",
                flush=True,
            )


if __name__ == "__main__":
    main()
