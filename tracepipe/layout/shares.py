"""When something was busy, and for which share of the time, in bins."""

from __future__ import annotations

from typing import Final

import numpy as np

from tracepipe.event.columns import Int32s, Int64s, grown

# This many bins are enough for any length of time, as they grow wider.
BINS_MAX: Final = 1 << 10
_PERCENT: Final = 100
_FIRST_BITS: Final = 10


class Stretches:
    """Finds the stretches of time in which something runs, by the number of the track that it runs on."""

    def __init__(self) -> None:
        self._count: Int64s = np.zeros(0, np.int64)
        self._begin_ns: Int64s = np.zeros(0, np.int64)
        self._most: Int64s = np.zeros(0, np.int64)
        """The stretch that has not ended, by track: how many run, since when, and how many ran at most."""

    def take(self, ts_ns: Int64s, on: Int32s, delta: Int64s) -> tuple[Int32s, Int64s, Int64s, Int64s]:
        """Take changes in the order of time. Return the stretches that have ended: track, how many ran at
        most, begin and end, of the shape `(stretches,)` each.
        """
        order = np.argsort(on, kind="stable")
        ts_ns, on, delta = ts_ns[order], on[order], delta[order].astype(np.int64)
        size = int(on[-1]) + 1
        self._count, self._begin_ns = grown(self._count, size, 0), grown(self._begin_ns, size, 0)
        self._most = grown(self._most, size, 0)
        is_first = np.append(True, on[1:] != on[:-1])
        after = np.cumsum(delta)
        first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        count = after - (after - delta)[first] + self._count[on]
        starts = np.flatnonzero(is_first | np.append(False, count[:-1] == 0))
        ends = np.append(starts[1:], len(on)) - 1
        goes_on = is_first[starts] & (self._count[on[starts]] > 0)
        begin_ns = np.where(goes_on, self._begin_ns[on[starts]], ts_ns[starts])
        most = np.maximum.reduceat(count, starts)
        most = np.where(goes_on, np.maximum(most, self._most[on[starts]]), most)
        self._count[on[ends]] = count[ends]
        self._begin_ns[on[ends]], self._most[on[ends]] = begin_ns, most
        over = count[ends] == 0
        return on[starts[over]], most[over], begin_ns[over], ts_ns[ends[over]]

    def rest(self, end_ns: int) -> tuple[Int32s, Int64s, Int64s, Int64s]:
        """The stretches that have not ended, as if they ended then."""
        on = np.flatnonzero(self._count > 0).astype(np.int32)
        return on, self._most[on], self._begin_ns[on], np.maximum(self._begin_ns[on], end_ns)


class Share:
    """The share of busy time in bins. Their width is a power of two in nanoseconds: the smallest with which
    BINS_MAX bins reach from the first stretch to the end of the last, at least 1 µs.
    """

    def __init__(self) -> None:
        self._busy_ns: Int64s = np.zeros(0, np.int64)
        self._bits, self._first = _FIRST_BITS, 0
        self._begin_ns, self._end_ns = (1 << 63) - 1, -(1 << 63)

    def add(self, begin_ns: Int64s, end_ns: Int64s) -> None:
        """Add stretches in which it was busy. Stretches that overlap all count."""
        longer = end_ns > begin_ns
        begin_ns, end_ns = begin_ns[longer], end_ns[longer]
        if not len(begin_ns):
            return
        self._begin_ns = min(self._begin_ns, int(begin_ns.min()))
        self._end_ns = max(self._end_ns, int(end_ns.max()))
        self._make_room()
        first, last = (begin_ns >> self._bits) - self._first, (end_ns - 1 >> self._bits) - self._first
        width_ns = 1 << self._bits
        over = last > first
        until_ns = np.where(over, (first + self._first + 1) << self._bits, end_ns)
        np.add.at(self._busy_ns, first, until_ns - begin_ns)
        if over.any():
            first, last = first[over], last[over]
            np.add.at(self._busy_ns, last, end_ns[over] - ((last + self._first) << self._bits))
            whole = np.zeros(len(self._busy_ns) + 1, np.int64)
            np.add.at(whole, first + 1, width_ns)
            np.add.at(whole, last, -width_ns)
            self._busy_ns += np.cumsum(whole[:-1])

    def _make_room(self) -> None:
        """Make bins for all of the time, wider ones if there are too many."""
        had, at = self._busy_ns, self._first
        while (self._end_ns - 1 >> self._bits) - (self._begin_ns >> self._bits) >= BINS_MAX:
            pairs = np.zeros(2 * (len(had) // 2 + 1), np.int64)
            pairs[at & 1 : (at & 1) + len(had)] = had
            had, at = pairs.reshape(-1, 2).sum(axis=1), at >> 1
            self._bits += 1
        self._first = self._begin_ns >> self._bits
        size = (self._end_ns - 1 >> self._bits) - self._first + 1
        self._busy_ns = np.zeros(size, np.int64)
        kept = had[: max(0, self._first + size - at)]
        self._busy_ns[at - self._first : at - self._first + len(kept)] = kept

    def percent(self) -> list[tuple[int, int]]:
        """The times at which the share changes, with the share in percent: from the first stretch on, 0 at
        the end. A bin in which it is busy at all has at least 1%.
        """
        if not len(self._busy_ns):
            return []
        starts_ns = (np.arange(len(self._busy_ns) + 1) + self._first) << self._bits
        starts_ns[0], starts_ns[-1] = self._begin_ns, self._end_ns
        # As floats: a long time in ns, added up many times, exceeds 64 bits.
        share = np.floor(self._busy_ns * float(_PERCENT) / np.diff(starts_ns) + 0.5).astype(np.int64)
        values = np.append(np.where(self._busy_ns > 0, np.maximum(share, 1), 0), 0)
        changes = np.append(True, values[1:] != values[:-1])
        return list(zip(starts_ns[changes].tolist(), values[changes].tolist(), strict=True))
