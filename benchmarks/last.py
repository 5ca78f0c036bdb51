"""Compares the cost of a flight recorder with that of a capture that writes everything, and with none.

    sudo python benchmarks/last.py [--seconds 5] [--rounds 3] [--last 2s]

The program of soak.py calls a function from two threads, as fast as it goes and 50 000 times a second, by
turns without a capture, with one, and with one that keeps what came last. For each: the program's calls a
second, the processor time of the capture's own process for a record in the middle of the run, without its
start and what it writes in the end, and the most memory that it had. Medians of the rounds; ratios within a
round. A machine that others use gives other figures each time: compare the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
RATES = {"as fast as it goes": 0, "50 000 calls a second": 50_000}


class Seen(NamedTuple):
    """The figures of a run: calls per second, the capture's processor time for a record, and its memory."""

    calls_a_second: float
    record_us: float
    memory_mb: float


def run(program: Path, folder: Path, seconds: float, rate: int, options: list[str] | None) -> Seen:
    """Run the program, captured with `options` if they are given."""
    command = [str(program), str(seconds), "2", str(rate)]
    if options is not None:
        hook = ["--layers", "none", "--gpu", "off", "--hook", f"uprobe:{program}:turn"]
        output = ["-o", str(folder / "run.jsonl"), "--force", "--method", "prebuilt"]
        capture = [sys.executable, "-m", "tracepipe", "capture", *hook, *output, *options]
        command = [*capture, "--", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True, bufsize=0
        )
        samples, high_kb = list[tuple[float, int]](), 0
        proc = Path(f"/proc/{process.pid}")
        while process.poll() is None:
            with suppress(OSError, StopIteration, ValueError):
                after_name = (proc / "stat").read_text().rpartition(")")[2].split()
                status = (proc / "status").read_text().splitlines()
                high_kb = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
                if options is None or (proc / f"task/{process.pid}/children").read_text():
                    samples.append((time.monotonic(), int(after_name[11]) + int(after_name[12])))
            time.sleep(0.02)
        assert process.stdout is not None
        made = json.loads(process.stdout.read())
        if process.returncode:
            errors.seek(0)
            raise SystemExit(errors.read().decode())
    (begin_s, begin), (end_s, end) = samples[len(samples) // 2], samples[len(samples) * 9 // 10]
    records = 2 * made["calls_a_second"] * (end_s - begin_s)
    return Seen(made["calls_a_second"], (end - begin) * TICK_S / records * 1e6, high_kb / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--last", default="2s")
    given = parser.parse_args()
    ways: dict[str, list[str] | None] = {"no capture": None, "all": [], "last": ["--last", given.last]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "soak"
        source = ROOT / "benchmarks/soak.c"
        subprocess.run(["gcc", "-O2", "-pthread", "-o", str(program), str(source)], check=True)
        for title, rate in RATES.items():
            seen = defaultdict[str, list[Seen]](list)
            for _ in range(given.rounds):
                for way, options in ways.items():
                    seen[way].append(run(program, folder, given.seconds, rate, options))
            print(f"{title}, {given.seconds:g} s, {given.rounds} rounds, --last {given.last}")
            for way, runs in seen.items():
                of_all = [
                    one.calls_a_second / whole.calls_a_second
                    for one, whole in zip(runs, seen["all"], strict=True)
                ]
                calls, record_us, memory_mb = (
                    statistics.median(column) for column in zip(*runs, strict=True)
                )
                print(
                    f"  {way:10} {calls:12,.0f} calls/s ({statistics.median(of_all):.2f}× all)"
                    f" {record_us:6.2f} µs a record {memory_mb:6.0f} MB"
                )


if __name__ == "__main__":
    main()
