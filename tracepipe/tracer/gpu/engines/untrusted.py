"""Checks and bounds what traced processes send.

A record with impossible contents raises Malformed, and one for which there is no room raises Crowded. The
renderer skips it and counts it in `Refused`, and the counts become losses in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from tracepipe.tracer.gpu.engines.transport import GpuRecord, records
from tracepipe.tracer.records.bounds import COUNT_LIMIT, ID_LIMIT, TIME_LIMIT_NS

KEPT_BYTES: Final = 256 << 20
"""The limit of all names, processes, threads and similar that a recording keeps until its end."""
MALFORMED: Final = "records that the traced process wrote with invalid contents"
CROWDED: Final = "the recording had more processes, threads or names than are kept"


class Malformed(Exception):
    """A record that tracepipe's libraries never write."""


class Crowded(Exception):
    """A record with something new to keep, for which there is no room."""


REFUSALS: Final = (Malformed, Crowded, struct.error)


class Kept:
    """The room for what a recording keeps of traced processes."""

    def __init__(self, size_bytes: int = KEPT_BYTES) -> None:
        self._left_bytes = size_bytes

    def take(self, size_bytes: int) -> None:
        """Use some of the room. Raises Crowded if there is not enough."""
        if size_bytes > self._left_bytes:
            raise Crowded
        self._left_bytes -= size_bytes

    def give(self, size_bytes: int) -> None:
        """Release room of what is no longer kept."""
        self._left_bytes += size_bytes


class Refused:
    """Counts skipped records until they are written as losses."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, refusal: Exception) -> None:
        """Count a record by the exception that it raised."""
        reason = CROWDED if isinstance(refusal, Crowded) else MALFORMED
        self._counts[reason] = self._counts.get(reason, 0) + 1

    def take_losses(self, losses: dict[str, int]) -> Iterator[dict[str, Any]]:
        """The losses since the last call, as records of an event file; they are added to `losses`."""
        counts, self._counts = self._counts, {}
        for reason, count in counts.items():
            add_loss(losses, "unknown", count)
            yield {"type": "loss", "count": count, "reason": reason}


def can_be(record: GpuRecord) -> bool:
    """Whether the process, the thread and the time of a record are within their limits."""
    return record.pid <= ID_LIMIT and record.tid <= ID_LIMIT and record.time_ns <= TIME_LIMIT_NS


def whole_records(chunk: bytes, refused: Refused) -> Iterator[GpuRecord]:
    """The records of a chunk whose process, thread and time are within their limits."""
    for record in records(chunk):
        if can_be(record):
            yield record
        else:
            refused.take(Malformed())


def add_loss(losses: dict[str, int], layer: str, count: int) -> None:
    """Add to the losses of a layer, up to the greatest count of a file."""
    losses[layer] = min(losses.get(layer, 0) + count, COUNT_LIMIT)


def check_span(start_ns: int, end_ns: int) -> None:
    """Raise Malformed for times beyond the limit."""
    if start_ns > TIME_LIMIT_NS or end_ns > TIME_LIMIT_NS:
        raise Malformed
