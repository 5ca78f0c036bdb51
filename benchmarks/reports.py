"""Compares each report with reading alone, on one recording in one run: as the first question about it, and
as a further one, when its tables are in the cache.

    python benchmarks/reports.py [--unique] [RECORDING ...] [EVENTS ...]        default: 1000000 generated
    events

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


def run_one(command: str, source: str) -> None:
    """Run one command, and print the processor seconds and MB that it took to standard error."""
    from tracepipe.cli import app

    writes = command in REPORTS and REPORTS[command].output is not None
    with tempfile.TemporaryDirectory() as folder:
        # All that a report writes can be HTML, or a folder.
        output = ["-o", str(Path(folder, "out.html"))] if writes else []
        app([command, source, *output], standalone_mode=False)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, file=sys.stderr)


def measured(command: str, source: Path, cache: str) -> tuple[float, float]:
    """Processor seconds and peak MB of a command in a separate process; `cache` is its TRACEPIPE_CACHE."""
    argv = [sys.executable, str(HERE), "--one", command, str(source)]
    environment = os.environ | {"TRACEPIPE_CACHE": cache}
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env=environment)
    seconds, peak_mb = done.stderr.split()[-2:]
    return float(seconds), float(peak_mb)


def compare(source: Path) -> None:
    """Print every report of one recording, and the ratios."""
    single = [report.name for report in REPORTS.values() if len(report.inputs) == 1]
    best: dict[tuple[str, str], tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as kept:
        for _ in range(3):
            for command in (READING, *single):
                for question, cache in (("first", ""), ("next", kept)):
                    found = measured(command, source, cache)
                    best[command, question] = min(best.get((command, question), found), found)
    base_seconds, base_mb = best[READING, "first"]
    for (command, question), (seconds, peak_mb) in best.items():
        ratios = f"{seconds / base_seconds:>5.2f}x the time, {peak_mb / base_mb:>5.2f}x the memory of reading"
        print(f"  {command:<10} {question:<5} {seconds:>6.2f} s  {peak_mb:>6.1f} MB peak  {ratios}")


def main() -> None:
    """Run one command (for `measured`) or the whole comparison."""
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2], sys.argv[3])
        return
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} processors")
    unique = "--unique" in sys.argv
    given = [one for one in sys.argv[1:] if one != "--unique"] or ["1000000"]
    for one in given:
        of_mixed = f"{one} events" + (", every call with arguments of its own" if unique else "")
        print(of_mixed if one.isdigit() else one)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "run.jsonl") if one.isdigit() else Path(one)
            if one.isdigit():
                write_mixed(source, int(one), unique=unique)
            compare(source)


if __name__ == "__main__":
    main()
