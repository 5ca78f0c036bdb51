"""Output formats. A new one is a file here and a line in `CONVERTERS`."""

from __future__ import annotations

from tracepipe.converters.writer import OutputFormat

__all__ = ["CONVERTERS", "OutputFormat"]

# Writers are imported when they are used: importing numpy, which they need, takes longer than --help may.
CONVERTERS: dict[str, OutputFormat] = {
    "perfetto": OutputFormat(
        ".pftrace",
        "tracepipe.converters.perfetto:PerfettoWriter",
        can_compress=True,
        has_switches=True,
        has_loads=True,
        has_summaries=True,
    ),
    "chrome": OutputFormat(".json", "tracepipe.converters.chrome:ChromeWriter", has_loads=True),
    "text": OutputFormat(".txt", "tracepipe.converters.text:TextWriter", on_terminal=True),
    "archive": OutputFormat(
        ".zip", "tracepipe.converters.archive:ArchiveWriter", of="archive", can_compress=True
    ),
    "tracepipe": OutputFormat(
        ".jsonl", "tracepipe.converters.event_file:EventFileWriter", of="events", by_suffix=True
    ),
    "threads": OutputFormat(
        ".txt", "tracepipe.converters.threads:ThreadWriter", on_terminal=True, of="events"
    ),
    "layered": OutputFormat(
        ".jsonl", "tracepipe.converters.layered:LayeredWriter", on_terminal=True, of="trace events"
    ),
    "cuda-events": OutputFormat(
        ".txt", "tracepipe.converters.cuda_events:TableWriter", on_terminal=True, of="trace events"
    ),
}
