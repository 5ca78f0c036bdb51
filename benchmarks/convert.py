"""Compares tracepipe with a simple implementation of the same, on the same files in one run.

    python benchmarks/convert.py [--quick] [NAME ...]        default: every row, 10⁷ events too

Each runs in a separate process. The figures are ratios of processor time with start, the best of three runs,
or one run of the simple implementation at 10⁷, as absolute times differ between machines. The simple
implementation of a trace is perfetto.trace_builder fed by json.loads, that of Chrome's JSON is orjson.dumps
of each event. Both draw the same slices, instants, counters, names and arguments for the same recording.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks import plain  # noqa: E402
from benchmarks.recordings import (  # noqa: E402
    write_exits,
    write_kineto,
    write_layered,
    write_lone_warps,
    write_mixed,
    write_probes,
    write_warps,
)

_KINETO_EVENTS = 540


@dataclass(frozen=True)
class Row:
    """A comparison: the file of the recording, the output format, and whether the core is used."""

    name: str
    title: str
    recording: str
    make: Callable[[Path], None]
    events: int
    output: str = "perfetto"
    pure: bool = False

    @property
    def baseline(self) -> str:
        """The simple implementation."""
        return "trace_builder" if self.output == "perfetto" else "orjson_events"


def _mixed(events: int, *, unique: bool = False) -> Callable[[Path], None]:
    return lambda path: write_mixed(path, events, unique=unique)


def _layered(lines: int, **form: bool) -> Callable[[Path], None]:
    return lambda path: write_layered(path, lines, **form)


def _probes(lines: int) -> Callable[[Path], None]:
    return lambda path: write_probes(path, lines)


def _exits(lines: int) -> Callable[[Path], None]:
    return lambda path: write_exits(path, lines)


def _kineto(events: int) -> Callable[[Path], None]:
    return lambda path: write_kineto(path, events // _KINETO_EVENTS)


def _warps(warps: int) -> Callable[[Path], None]:
    return lambda path: write_warps(path, warps)


def _lone(launches: int) -> Callable[[Path], None]:
    return lambda path: write_lone_warps(path, launches)


ROWS = [
    Row("mixed-100k", "10⁵ mixed events", "mixed-100k", _mixed(10**5), 10**5),
    Row("mixed-1m", "10⁶ mixed events", "mixed-1m", _mixed(10**6), 10**6),
    Row("unique-1m", "10⁶, no two calls alike", "unique-1m", _mixed(10**6, unique=True), 10**6),
    Row("warps-1m", "10⁶ warps", "warps-1m", _warps(10**6), 10**6),
    Row("lone-100k", "10⁵ launches of one warp", "lone-100k", _lone(10**5), 4 * 10**5),
    Row("layered-100k", "10⁵ lines of a layered tracer", "layered-100k", _layered(10**5), 10**5),
    Row("layered-1m", "10⁶ lines of a layered tracer", "layered-1m", _layered(10**6), 10**6),
    Row("nested-1m", "10⁶ with nested arguments", "nested-1m", _layered(10**6, nested=True), 10**6),
    Row("zst-1m", "10⁶, compressed: .zst", "layered-1m.jsonl.zst", _layered(10**6, compressed=True), 10**6),
    Row("printed-100k", "10⁵ from bpftrace -f json", "printed-100k", _layered(10**5, printed=True), 10**5),
    Row("probes-100k", "10⁵ lines of bpftrace's one-liners", "probes-100k.txt", _probes(10**5), 10**5),
    Row("exits-100k", "10⁵ lines of kernelretsnoop", "exits-100k.txt", _exits(10**5), 10**5),
    Row("kineto-100k", "10⁵ of PyTorch's profiler", "kineto-100k.json", _kineto(10**5), 10**5),
    Row("chrome-1m", "10⁶ mixed events → Chrome JSON", "mixed-1m", _mixed(10**6), 10**6, "chrome"),
    Row("pure-mixed-1m", "10⁶ mixed events, Python alone", "mixed-1m", _mixed(10**6), 10**6, pure=True),
    Row("pure-warps-1m", "10⁶ warps, Python alone", "warps-1m", _warps(10**6), 10**6, pure=True),
    Row("mixed-10m", "10⁷ mixed events", "mixed-10m", _mixed(10**7), 10**7),
    Row("warps-10m", "10⁷ warps", "warps-10m", _warps(10**7), 10**7),
]


def tracepipe(source: str, target: str, output: str) -> None:
    """Convert with tracepipe."""
    from tracepipe.cli import main as run

    sys.argv = ["tracepipe", "convert", source, "-o", target, "--format", output, "--force"]
    try:
        run()
    except SystemExit as done:
        assert not done.code


@dataclass(frozen=True)
class Cost:
    """The cost of one side."""

    seconds: float
    peak_mb: float
    size_bytes: int


def measured(side: str, source: Path, target: Path, *, pure: bool, runs: int) -> Cost:
    """The least cost of one side over several processes."""
    environment = {**os.environ, "TRACEPIPE_PURE": str(int(pure)), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, str(HERE), "--side", side, str(source), str(target)]
    costs = []
    for _ in range(runs):
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        seconds, peak_mb = done.stdout.split()[-2:]
        costs.append(Cost(float(seconds), float(peak_mb), target.stat().st_size))
    return min(costs, key=lambda cost: cost.seconds)


def compare(row: Row, folder: Path, baselines: dict[tuple[str, str], Cost]) -> None:
    """Print one row."""
    name = row.recording if "." in row.recording else f"{row.recording}.jsonl"
    source, target = folder / name, folder / "out"
    if not source.exists():
        row.make(source)
    theirs = baselines.get((row.recording, row.baseline))
    if theirs is None:
        runs = 1 if row.events > 10**6 else 3
        theirs = baselines[row.recording, row.baseline] = measured(
            row.baseline, source, target, pure=False, runs=runs
        )
    ours = measured(row.output, source, target, pure=row.pure, runs=3)
    times, size = theirs.seconds / ours.seconds, ours.size_bytes / theirs.size_bytes
    print(
        f"| {row.title:<34} | {times:>5.1f} | {size:>4.2f} "
        f"| {ours.size_bytes / row.events:>5.1f} | {ours.peak_mb:>3.0f} MB |",
        f"  {ours.seconds:.2f} s against {theirs.seconds:.2f} s",
        flush=True,
    )


def run_side(side: str, source: str, target: str) -> None:
    """Run one side, and print its cost."""
    if side in plain.WAYS:
        plain.WAYS[side](source, target)
    else:
        tracepipe(source, target, side)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def main() -> None:
    """Run one side (for `measured`) or the whole comparison."""
    if sys.argv[1:2] == ["--side"]:
        run_side(*sys.argv[2:5])
        return
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    rows = [row for row in ROWS if not names or row.name in names]
    if "--quick" in sys.argv:
        rows = [row for row in rows if row.events <= 10**6]
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} processors\n")
    print(f"| {'work':<34} | times as fast | of its bytes | bytes an event | peak memory |")
    print("|---|---|---|---|---|")
    baselines: dict[tuple[str, str], Cost] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            compare(row, Path(folder), baselines)


if __name__ == "__main__":
    main()
