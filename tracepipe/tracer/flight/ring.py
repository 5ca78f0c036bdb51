"""The last collected records in memory, bounded by time and by size."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from tracepipe.event.model import HostInstant
from tracepipe.tracer.frame import instant
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES, Loss
from tracepipe.tracer.request import Last

_SEGMENTS: Final = 100  # how many parts the kept time and size have; each is evicted as a whole
_ITEM_BYTES: Final = 128  # the memory of each item in addition to its content


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole records, as they were collected."""

    content: bytes
    of_device: bool


@dataclass(slots=True)
class Segment:
    """The items between the begin of this segment and that of the next one, in order."""

    begin: HostInstant
    items: list[Chunk | Loss] = field(default_factory=list)
    size_bytes: int = 0


class Ring:
    """Segments, oldest first; the last one is being filled."""

    def __init__(self, last: Last, *, is_unordered: bool = False) -> None:
        """`is_unordered`: later records may have earlier times than the first one."""
        self._last, self._is_unordered = last, is_unordered
        self._turned = instant()
        self._segments = deque([Segment(self._turned)])
        self._size_bytes = 0
        self._piece_bytes = max(last.size_bytes // _SEGMENTS // RECORD_BYTES, 1) * RECORD_BYTES

    def put(self, item: Chunk | Loss) -> None:
        """Add a collected item. A large chunk is divided into several segments, which can be evicted one by
        one.
        """
        if not isinstance(item, Chunk) or item.of_device:
            self._put(item)
            return
        for at in range(0, len(item.content), self._piece_bytes):
            piece, newest = item.content[at : at + self._piece_bytes], self._segments[-1]
            later_ns = RECORD.unpack_from(piece)[0] - newest.begin["monotonic_ns"]
            if at:
                self._segments.append(Segment(later(newest.begin, max(later_ns, 0))))
            elif not newest.items and not self._is_unordered:
                newest.begin = later(newest.begin, later_ns)
            self._put(Chunk(piece, of_device=False))

    def _put(self, item: Chunk | Loss) -> None:
        size_bytes = _ITEM_BYTES + (len(item.content) if isinstance(item, Chunk) else 0)
        newest = self._segments[-1]
        newest.items.append(item)
        newest.size_bytes += size_bytes
        self._size_bytes += size_bytes

    def turn(self) -> HostInstant:
        """Begin a new segment if the last one is long enough; returns the present instant."""
        now, newest = instant(), self._segments[-1]
        passed_ns = now["monotonic_ns"] - newest.begin["monotonic_ns"]
        is_full = newest.size_bytes * _SEGMENTS >= self._last.size_bytes
        if passed_ns * _SEGMENTS >= self._last.duration_ns or is_full:
            newest.items = _joined(newest.items)
            # The next records may have been made just after the last turn, while the present ones were
            # collected.
            self._segments.append(Segment(self._turned))
        self._turned = now
        return now

    def drop(self, now_ns: int) -> tuple[Segment, int, bool] | None:
        """Evict the oldest segment if it is too old or does not fit; returns it with its end, and whether it
        did not fit.
        """
        if len(self._segments) < 2:
            return None
        end_ns = self._segments[1].begin["monotonic_ns"]
        is_old = end_ns <= now_ns - self._last.duration_ns
        has_room = self._size_bytes <= max(self._last.size_bytes, self._segments[0].size_bytes)
        if not is_old and has_room:  # a device's chunk is not divided, and may exceed the size alone
            return None
        oldest = self._segments.popleft()
        self._size_bytes -= oldest.size_bytes
        return oldest, end_ns, not is_old

    @property
    def begin(self) -> HostInstant:
        """The begin of the oldest segment."""
        return self._segments[0].begin

    def items(self) -> list[Chunk | Loss]:
        """All kept items, in order."""
        return [item for segment in self._segments for item in segment.items]


def _joined(items: list[Chunk | Loss]) -> list[Chunk | Loss]:
    """Join adjacent chunks; those of a device stay separate, as each is decoded as a whole."""
    joined: list[Chunk | Loss] = []
    parts: list[bytes] = []
    for item in [*items, None]:
        if isinstance(item, Chunk) and not item.of_device:
            parts.append(item.content)
            continue
        if parts:
            joined.append(Chunk(b"".join(parts), of_device=False))
            parts = []
        if item is not None:
            joined.append(item)
    return joined


def later(at: HostInstant, passed_ns: int) -> HostInstant:
    """The instant that is `passed_ns` later."""
    return {
        "monotonic_ns": at["monotonic_ns"] + passed_ns,
        "boottime_ns": at["boottime_ns"] + passed_ns,
        "realtime_ns": at["realtime_ns"] + passed_ns,
    }
