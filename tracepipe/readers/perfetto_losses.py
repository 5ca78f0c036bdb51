"""Reads the losses that a Perfetto trace states.

    TraceStats    1 buffer_stats… {3 chunks_overwritten  18 chunks_discarded  19 trace_writer_packet_loss}
    FtraceStats   1 phase (1 start, 2 end of the trace)  2 cpu_stats… {1 cpu  3 overrun  8 dropped_events}

Both are counts of a whole trace, of which the last one is used. Source:
protos/perfetto/common/trace_stats.proto, protos/perfetto/trace/ftrace/ftrace_stats.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tracepipe.event.model import COUNT_LIMIT, TIME_LIMIT_NS, Record
from tracepipe.event.tables import packed
from tracepipe.readers.sorted_rows import SortedRow, SortedRows
from tracepipe.readers.wire_fields import BYTES, tagged

_INNER: Final = 2 << 3 | BYTES
_BUFFER: Final = 1 << 3 | BYTES
_OF_BUFFERS: Final = {
    3 << 3: "chunks of a full buffer were overwritten before they were read",
    18 << 3: "chunks were discarded, as a buffer was full",
    19 << 3: "times a program that was traced had no room for packets",
}
_PHASE, _CPU, _OVERRUN, _DROPPED = 1 << 3, 1 << 3, 3 << 3, 8 << 3
_AT_START: Final = 1
_LISTED_MAX: Final = 1 << 12


class Losses:
    """Takes losses: those with a time become rows, and those of the whole trace records without a time."""

    def __init__(self, rows: SortedRows) -> None:
        self._rows = rows
        self._buffers: list[dict[int, int]] = []
        self._ftrace: dict[int, dict[int, tuple[int, int]]] = {}
        """By phase and processor: the counts of FtraceStats."""

    def add(self, from_ns: int, to_ns: int, reason: str, cpu: int | None = None) -> None:
        """Add a loss between two times."""
        if not 0 <= from_ns <= to_ns <= TIME_LIMIT_NS:
            return
        record: Record = {"type": "loss", "count": 1, "dur_ns": to_ns - from_ns, "reason": reason}
        if cpu is not None:
            record |= {"layer": "scheduler", "cpu": cpu}
        self._rows.add(SortedRow(from_ns, 0, 0, 0, packed(record), b""))

    def take_stats(self, data: bytes) -> None:
        """Take a TraceStats. Raises WireError."""
        buffers = [dict(tagged(value)) for tag, value in tagged(data) if tag == _BUFFER]
        self._buffers = [
            {tag: count for tag in _OF_BUFFERS if (count := of.get(tag, 0))} for of in buffers[:_LISTED_MAX]
        ]

    def take_ftrace(self, data: bytes) -> None:
        """Take an FtraceStats. Raises WireError."""
        fields = tagged(data)
        phase = next((value for tag, value in fields if tag == _PHASE), 0)
        cpus: dict[int, tuple[int, int]] = {}
        for tag, value in fields:
            if tag == _INNER and len(cpus) < _LISTED_MAX:
                of: dict[int, Any] = dict(tagged(value))
                cpus[of.get(_CPU, 0)] = of.get(_OVERRUN, 0), of.get(_DROPPED, 0)
        self._ftrace[phase == _AT_START] = cpus

    def of_the_whole(self) -> Iterator[Record]:
        """The losses that have no time."""
        for at, of in enumerate(self._buffers):
            for tag, count in of.items():
                reason = f"{_OF_BUFFERS[tag]} (buffer {at})"
                yield {"type": "loss", "count": min(count, COUNT_LIMIT), "reason": reason}
        before = self._ftrace.get(True, {})
        for cpu, counts in self._ftrace.get(False, {}).items():
            lost = sum(counts) - sum(before.get(cpu, (0, 0)))
            if lost > 0 and cpu <= _LISTED_MAX:
                reason = "ftrace's buffer was full"
                yield {
                    "type": "loss", "layer": "scheduler", "count": min(lost, COUNT_LIMIT), "cpu": cpu,
                    "reason": reason,
                }  # fmt: skip
