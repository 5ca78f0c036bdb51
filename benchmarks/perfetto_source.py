"""Compares reading a Perfetto trace with the same events as JSON Lines, and with Perfetto's own classes.

    python benchmarks/perfetto_source.py [EVENTS]        default: 100,000 mixed events

Each runs in a process of its own, and what counts is processor time, start included: the best of three runs.
The classes parse the trace whole and look at the name, the time and the annotations of each event, and write
nothing. A figure is a ratio: times on another machine are others.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.convert import measured  # noqa: E402
from benchmarks.recordings import write_mixed  # noqa: E402


def by_classes(path: Path) -> None:
    """Look at each event by Perfetto's own classes, and print what that took."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

    trace = pb.Trace()
    trace.ParseFromString(path.read_bytes())
    for packet in trace.packet:
        if packet.HasField("track_event"):
            event = packet.track_event
            _ = (
                packet.timestamp,
                event.name_iid,
                [(one.name_iid, one.int_value) for one in event.debug_annotations],
            )
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime)


def main() -> None:
    """Run the classes alone, or the comparison."""
    if sys.argv[1:2] == ["--classes"]:
        by_classes(Path(sys.argv[2]))
        return
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        lines, trace, out = (Path(folder, name) for name in ("run.jsonl", "run.pftrace", "out"))
        write_mixed(lines, events)
        of_lines = measured("perfetto", lines, trace, pure=False, runs=3)
        of_trace = measured("perfetto", trace, out, pure=False, runs=3)
        command = [sys.executable, str(HERE), "--classes", str(trace)]
        of_classes = min(
            float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(3)
        )
    print(f"a trace of {events} events to a trace: {of_trace.seconds:.2f} s, {of_trace.peak_mb:.0f} MB")
    for seconds, what in ((of_lines.seconds, "from JSON Lines"), (of_classes, "Perfetto's classes")):
        print(f"  {of_trace.seconds / seconds:.1f} times as long as {what} ({seconds:.2f} s)")


if __name__ == "__main__":
    main()
