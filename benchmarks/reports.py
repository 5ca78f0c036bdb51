"""Compares each report with reading alone, on one recording in one run.

    python benchmarks/reports.py [--unique] [EVENTS ...]        default: 1000000

Reading alone is `tracepipe validate`, which parses and checks every line. Each runs three times in turn, in a
separate process with its start. The figures are of the best run: processor seconds, peak memory, and the
ratios of both to those of the reading.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.recordings import write_mixed  # noqa: E402
from tracepipe.reports import REPORTS  # noqa: E402

READING = "validate"


def one(command: str, source: str) -> None:
    """Run one command, and print the processor seconds and MB that it took to standard error."""
    from tracepipe.cli import app

    writes = command in REPORTS and REPORTS[command].output is not None
    with tempfile.TemporaryDirectory() as folder:
        # All that a report writes can be HTML, or a folder.
        output = ["-o", str(Path(folder, "out.html"))] if writes else []
        app([command, source, *output], standalone_mode=False)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, file=sys.stderr)


def measured(command: str, source: Path) -> tuple[float, float]:
    """Processor seconds and peak MB of a command in a separate process."""
    argv = [sys.executable, str(HERE), "--one", command, str(source)]
    # With the tables in the cache, only the first would read the recording.
    environment = os.environ | {"TRACEPIPE_CACHE": ""}
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env=environment)
    seconds, peak_mb = done.stderr.split()[-2:]
    return float(seconds), float(peak_mb)


def compare(events: int, unique: bool) -> None:
    """Print every report of one input at one size, and the ratios."""
    print(f"{events} events" + (", every call with arguments of its own" if unique else ""))
    single = [report.name for report in REPORTS.values() if len(report.inputs) == 1]
    best: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "run.jsonl")
        write_mixed(source, events, unique=unique)
        for _ in range(3):
            for command in (READING, *single):
                seen = measured(command, source)
                best[command] = min(best.get(command, seen), seen)
    base_seconds, base_mb = best[READING]
    for command, (seconds, peak_mb) in best.items():
        ratios = f"{seconds / base_seconds:>5.2f}x the time, {peak_mb / base_mb:>5.2f}x the memory of reading"
        print(f"  {command:<10} {seconds:>6.2f} s  {peak_mb:>6.1f} MB peak  {ratios}")


def main() -> None:
    """Run one command (for `measured`) or the whole comparison."""
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], sys.argv[3])
        return
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} processors")
    for events in [int(n) for n in sys.argv[1:] if n.isdigit()] or [1_000_000]:
        compare(events, "--unique" in sys.argv)


if __name__ == "__main__":
    main()
