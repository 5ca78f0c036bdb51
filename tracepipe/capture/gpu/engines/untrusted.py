"""What a traced process tells is believed as far as it can be true, and kept as far as there is room for it.

A record that cannot be what it says raises Malformed, one beyond the room Crowded. The renderer passes it
over and counts it in `Refused`, which becomes losses of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from tracepipe.capture.gpu.engines.transport import GpuRecord, records
from tracepipe.capture.records.bounds import COUNT_LIMIT, ID_LIMIT, TIME_LIMIT_NS

KEPT_BYTES: Final = 256 << 20
"""Of names, processes, threads and the like, in all that a recording keeps until its end."""
MALFORMED: Final = "records that the traced process wrote with invalid contents"
CROWDED: Final = "the recording had more processes, threads or names than are kept"


class Malformed(Exception):
    """A record that no library of ours writes."""


class Crowded(Exception):
    """A record with something new to keep, where there is no more room."""


REFUSALS: Final = (Malformed, Crowded, struct.error)


class Kept:
    """Room for what a recording keeps of traced processes."""

    def __init__(self, size_bytes: int = KEPT_BYTES) -> None:
        self._left_bytes = size_bytes

    def take(self, size_bytes: int) -> None:
        """Have so much less. Raises Crowded where there is not so much."""
        if size_bytes > self._left_bytes:
            raise Crowded
        self._left_bytes -= size_bytes

    def give(self, size_bytes: int) -> None:
        """Have so much again, of what is not kept any more."""
        self._left_bytes += size_bytes


class Refused:
    """Records that were passed over, until they are losses of the file."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, refusal: Exception) -> None:
        """Count a record by what it raised."""
        reason = CROWDED if isinstance(refusal, Crowded) else MALFORMED
        self._counts[reason] = self._counts.get(reason, 0) + 1

    def take_losses(self, losses: dict[str, int]) -> Iterator[dict[str, Any]]:
        """The losses since the last call, as records of an event file; they are added to `losses`."""
        counts, self._counts = self._counts, {}
        for reason, count in counts.items():
            add_loss(losses, "unknown", count)
            yield {"type": "loss", "count": count, "reason": reason}


def can_be(record: GpuRecord) -> bool:
    """Whether there can be the process, the thread and the time of a record."""
    return record.pid <= ID_LIMIT and record.tid <= ID_LIMIT and record.time_ns <= TIME_LIMIT_NS


def whole_records(chunk: bytes, refused: Refused) -> Iterator[GpuRecord]:
    """The records of a chunk whose process, thread and time can be."""
    for record in records(chunk):
        if can_be(record):
            yield record
        else:
            refused.take(Malformed())


def add_loss(losses: dict[str, int], layer: str, count: int) -> None:
    """Add to what was lost of a layer; not beyond what a file can state."""
    losses[layer] = min(losses.get(layer, 0) + count, COUNT_LIMIT)


def check_span(start_ns: int, end_ns: int) -> None:
    """Raise Malformed for times that are none."""
    if start_ns > TIME_LIMIT_NS or end_ns > TIME_LIMIT_NS:
        raise Malformed
