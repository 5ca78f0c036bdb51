"""Compares reading a Perfetto trace with the same events as JSON Lines, and with Perfetto's own classes.

    python benchmarks/perfetto_source.py [EVENTS]        default: 100,000 mixed events

Each runs in a separate process. The figures are ratios of processor time with start, the best of three runs,
as absolute times differ between machines. The classes parse the whole trace, examine the name, the time and
the annotations of each event, and write nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convert import measured
from benchmarks.recordings import write_mixed


def main() -> None:
    """Print the comparison."""
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        lines, trace, out = (Path(folder, name) for name in ("run.jsonl", "run.pftrace", "out"))
        write_mixed(lines, events)
        of_lines = measured("perfetto", lines, trace, pure=False, runs=3)
        of_trace = measured("perfetto", trace, out, pure=False, runs=3)
        of_classes = measured("perfetto_classes", trace, out, pure=False, runs=3)
    print(f"a trace of {events} events to a trace: {of_trace.seconds:.2f} s, {of_trace.peak_mb:.0f} MB")
    for seconds, what in ((of_lines.seconds, "from JSON Lines"), (of_classes.seconds, "Perfetto's classes")):
        print(f"  {of_trace.seconds / seconds:.1f} times as long as {what} ({seconds:.2f} s)")


if __name__ == "__main__":
    main()
