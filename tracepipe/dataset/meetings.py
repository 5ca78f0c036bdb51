"""What the ranks of several clocks saw of collectives, and the line that puts a clock on another one."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Final

import numpy as np

from tracepipe.event.columns import Bools, Int64s

LEAST_SHARED: Final = 8
"""Collectives that two clocks must share: fewer cannot show which of them are wrong."""
BILLION: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Meetings:
    """What the ranks of each clock saw of collectives: columns of one length, a row for each clock and
    collective.

    `clock` and `collective` are numbers from 0; `arrived_ns` is the last start of a rank of this clock,
    `left_ns` the first end, and `end_ns` the mean of the ends, all on this clock. `transfer_ns` is how long
    the collective took the rank that took the least, of all clocks: the one that came last.
    """

    clock: Int64s
    collective: Int64s
    arrived_ns: Int64s
    left_ns: Int64s
    end_ns: Int64s
    transfer_ns: Int64s

    def __len__(self) -> int:
        return len(self.clock)

    @classmethod
    def of(cls, clock: Int64s, collective: Int64s, start_ns: Int64s, end_ns: Int64s) -> Meetings:
        """The meetings of some ranks' collectives: columns of one length, a row for each rank and
        collective, of those that all ranks leave together.
        """
        transfer_ns = np.full(int(collective.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(transfer_ns, collective, end_ns - start_ns)
        order = np.lexsort((collective, clock))
        clock, collective = clock[order], collective[order]
        start_ns, end_ns = start_ns[order], end_ns[order]
        is_first = np.ones(len(clock), np.bool_)
        is_first[1:] = (clock[1:] != clock[:-1]) | (collective[1:] != collective[:-1])
        first = np.flatnonzero(is_first)
        if not len(first):
            return cls(clock, collective, start_ns, end_ns, end_ns, end_ns)
        left_ns = np.minimum.reduceat(end_ns, first)
        # Ends of one host lie near to each other: their mean is the first one's and a mean of small numbers.
        after_ns = end_ns - np.repeat(left_ns, np.diff(np.append(first, len(clock))))
        count = np.diff(np.append(first, len(clock)))
        mean_ns = left_ns + np.add.reduceat(after_ns, first) // count
        arrived_ns, collective = np.maximum.reduceat(start_ns, first), collective[first]
        return cls(clock[first], collective, arrived_ns, left_ns, mean_ns, transfer_ns[collective])

    def take(self, rows: Bools) -> Meetings:
        """Some of the rows."""
        return Meetings(*(getattr(self, field.name)[rows] for field in fields(self)))

    def of_short_transfers(self) -> Meetings:
        """The half of the rows whose transfers are the shorter ones; all of them where they are few."""
        if len(self.transfer_ns) < 2 * LEAST_SHARED:
            return self
        return self.take(self.transfer_ns <= np.median(self.transfer_ns))


@dataclass(frozen=True, slots=True)
class Line:
    """Puts a clock on the reference: `ns + offset_ns + (ns - at_ns) * drift_ppb / 10⁹`."""

    at_ns: int = 0
    offset_ns: int = 0
    drift_ppb: int = 0

    def place(self, ns: int) -> int:
        """A time on the reference clock, to the ns below."""
        return ns + self.offset_ns + (ns - self.at_ns) * self.drift_ppb // BILLION

    def first_at(self, reference_ns: int) -> int:
        """The first time that is not before a time of the reference clock."""
        after_ns = reference_ns - self.offset_ns - self.at_ns
        ns = self.at_ns + after_ns * BILLION // (BILLION + self.drift_ppb)
        while self.place(ns) >= reference_ns:
            ns -= 1
        while self.place(ns) < reference_ns:
            ns += 1
        return ns

    def place_all(self, ns: Int64s) -> Int64s:
        """Times on the reference clock, to the ns below."""
        return place_each(ns, *map(np.asarray, astuple(self)))


def place_each(ns: Int64s, at_ns: Int64s, offset_ns: Int64s, drift_ppb: Int64s) -> Int64s:
    """Times on the reference clock by the values of a `Line` for each, or for all."""
    # In steps, as the product of a day and 500 ppm has more than 64 bits.
    away_ns: Int64s = ns - at_ns
    whole, rest = np.divmod(away_ns, 1_000_000)
    drift: Int64s = whole * drift_ppb + rest * drift_ppb // 1_000_000
    placed: Int64s = ns + offset_ns + drift // 1_000
    return placed
