"""Makes the packets of one packet sequence from columns of bytes, one column for each part of a packet.

   packet ┌ 1 length ┬ 8 timestamp ┬ 11 length ┬ parts of the track event … ┬ 12 interned data ┬ 10 sequence ┐

Timestamps are differences from the packet before (an incremental clock), which takes one or two bytes and not
eight. A packet that is older than the one before it has its full time. Source:
protos/perfetto/trace/trace_packet.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np

from tracepipe.converters.wire import SMALL, SMALL_END, delimited, number, tag, varint
from tracepipe.event.columns import Int64s

_TIMESTAMP, _TRACK_EVENT, _PACKET = tag(8, 0), tag(11, 2), tag(1, 2)
# Made once: timestamps by their steps, and what precedes a track event or a packet by its length.
_STEPS = tuple(_TIMESTAMP + digits for digits in SMALL)
_EVENT_OF = tuple(_TRACK_EVENT + digits for digits in SMALL)
_PACKET_OF = tuple(_PACKET + digits for digits in SMALL)
# A varint has a byte for each 7 bits. No length in a packet needs more than four bytes.
_LONGER: Final = np.array([1 << 7, 1 << 14, 1 << 21])


class PacketStream:
    """The packets of the sequence `id`. `clock` and `base_ns` are those that its first packet states."""

    def __init__(self, id: int, clock: int, base_ns: int) -> None:
        self._clock, self._last_ns = clock, base_ns
        self._suffix = number(10, id)
        self._out: list[bytes] = []

    def put(self, ts_ns: Int64s, parts: Sequence[list[bytes]], interned: dict[int, list[bytes]]) -> None:
        """Write a packet with a track event for each time. `parts` are the columns of its parts. `interned`
        are entries of tables that some packets have, by their places.
        """
        count = len(ts_ns)
        sizes = sum((_lengths(part) for part in parts), np.zeros(count, np.int64))
        ends, end_sizes = [self._suffix] * count, np.full(count, len(self._suffix))
        for at, entries in interned.items():
            ends[at] = delimited(12, b"".join(entries)) + self._suffix
            end_sizes[at] = len(ends[at])
        events = _heads(_EVENT_OF, _TRACK_EVENT, sizes)
        whole = len(_TRACK_EVENT) + _varint_sizes(sizes) + sizes + end_sizes
        self._put(ts_ns, whole, [events, *parts, ends])

    def put_messages(self, ts_ns: Int64s, messages: list[bytes]) -> None:
        """Write a packet for each time, with a message that is not a track event and has its tag."""
        sizes = _lengths(messages) + len(self._suffix)
        self._put(ts_ns, sizes, [messages, [self._suffix] * len(messages)])

    def _put(self, ts_ns: Int64s, sizes: Int64s, parts: Sequence[list[bytes]]) -> None:
        stamps, stamp_sizes = self._stamps(ts_ns)
        heads = _heads(_PACKET_OF, _PACKET, stamp_sizes + sizes)
        self._out.append(b"".join(chain.from_iterable(zip(heads, stamps, *parts, strict=True))))

    def _stamps(self, ts_ns: Int64s) -> tuple[list[bytes], Int64s]:
        """The timestamps of packets, and their sizes."""
        last_ns = np.maximum.accumulate(np.concatenate([[self._last_ns], ts_ns]))
        self._last_ns = int(last_ns[-1])
        steps = ts_ns - last_ns[:-1]
        far = (steps < 0) | (steps >= SMALL_END)
        steps[far] = 0
        stamps = list(map(_STEPS.__getitem__, steps.tolist()))
        sizes = len(_TIMESTAMP) + _varint_sizes(steps)
        for at in np.flatnonzero(far).tolist():
            stamps[at] = self._far(int(ts_ns[at]), int(last_ns[at]))
            sizes[at] = len(stamps[at])
        return stamps, sizes

    def _far(self, ts_ns: int, last_ns: int) -> bytes:
        """A timestamp that is not in the table: a long step, or the full time where it is earlier than the
        last.
        """
        if ts_ns < last_ns:
            return number(8, max(0, ts_ns)) + number(58, self._clock)
        return number(8, ts_ns - last_ns)

    def take(self) -> bytes:
        """The bytes that were written since the last call."""
        out, self._out = self._out, []
        return b"".join(out)


def _lengths(part: list[bytes]) -> Int64s:
    return np.fromiter(map(len, part), np.int64, len(part))


def _varint_sizes(values: Int64s) -> Int64s:
    return 1 + np.searchsorted(_LONGER, values, side="right")


def _heads(ready: tuple[bytes, ...], tag: bytes, sizes: Int64s) -> list[bytes]:
    """The bytes before messages of these sizes."""
    return [ready[size] if size < SMALL_END else tag + varint(size) for size in sizes.tolist()]
