"""Stretches of time as sorted columns: their union, the gaps between them, and how much of a span
they cover.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from tracepipe.event.columns import Int64s
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, flagged, joined, made, parts, taken


class Gaps(NamedTuple):
    """The gaps between stretches, as columns of shape `(gaps,)`: when, and between which stretches."""

    start_ns: Int64s
    end_ns: Int64s
    previous: Ints
    """The first stretch that ends where the gap starts."""
    following: Ints
    """The first stretch that starts where the gap ends."""


def gaps_between(start_ns: Int64s, end_ns: Int64s) -> Gaps:
    """The gaps between stretches, which are sorted by start, and each longer than 0. Shapes `(n,)`."""
    begins_ns, untils_ns = Growing(np.int64), Growing(np.int64)
    before, after = Growing(np.int32), Growing(np.int32)
    # The latest end so far, and the first row that has it.
    until_ns, latest = TIME_LIMIT_NS + 1, -1
    for part in parts(len(start_ns)):
        starts_ns, ends_ns = start_ns[part], end_ns[part]
        if latest < 0:
            until_ns, latest = int(ends_ns[0]), 0
        reach_ns = np.maximum.accumulate(np.maximum(ends_ns, until_ns))
        before_ns = np.concatenate(([until_ns], reach_ns[:-1]))
        reached = np.where(ends_ns > before_ns, np.arange(part.start, part.stop, dtype=np.int32), -1)
        rows = np.maximum(np.maximum.accumulate(reached), latest)
        following = np.flatnonzero(starts_ns > before_ns)
        previous = np.concatenate(([latest], rows[:-1]))[following]
        begins_ns.extend(before_ns[following], len(following))
        untils_ns.extend(starts_ns[following], len(following))
        before.extend(previous, len(following))
        after.extend(following + part.start, len(following))
        until_ns, latest = int(reach_ns[-1]), int(rows[-1])
    return Gaps(begins_ns.whole(), untils_ns.whole(), before.whole(), after.whole())


class Stretches:
    """The union of half-open stretches [start, end) in ns. Columns have the shape `(n,)`."""

    def __init__(self, start_ns: Int64s, end_ns: Int64s) -> None:
        if len(start_ns) <= 1:
            # A fast path, as a million threads may have one stretch each.
            lasts = end_ns > start_ns
            self.start_ns, self.end_ns = start_ns[lasts], end_ns[lasts]
            return
        rows = flagged(len(start_ns), lambda part: end_ns[part] > start_ns[part])
        if len(rows) < len(start_ns):
            start_ns, end_ns = taken(start_ns, rows), taken(end_ns, rows)
        if any(
            bool((np.diff(start_ns[part.start : part.stop + 1]) < 0).any()) for part in parts(len(start_ns))
        ):
            order = np.argsort(start_ns, kind="stable")
            start_ns, end_ns = taken(start_ns, order), taken(end_ns, order)
        gaps = gaps_between(start_ns, end_ns)
        last_ns = [max(int(end_ns[part].max()) for part in parts(len(end_ns)))] if len(end_ns) else []
        self.start_ns = joined([start_ns[:1], gaps.end_ns], np.int64)
        self.end_ns = joined([gaps.start_ns, np.array(last_ns, np.int64)], np.int64)

    @cached_property
    def _before_ns(self) -> Int64s:
        """The sum of the lengths before each stretch, and of all of them."""
        before_ns = Growing(np.int64)
        before_ns.extend(0, 1)
        total_ns = 0
        for part in parts(len(self.start_ns)):
            sums_ns = total_ns + np.cumsum(self.end_ns[part] - self.start_ns[part])
            before_ns.extend(sums_ns, len(sums_ns))
            total_ns = int(sums_ns[-1])
        return before_ns.whole()

    @property
    def total_ns(self) -> int:
        """The sum of the lengths."""
        return int(self._before_ns[-1])

    def overlap_ns(self, other: Stretches) -> int:
        """The length of the intersection with another union."""
        return self.total_ns + other.total_ns - self.joined(other).total_ns

    def gaps(self) -> Stretches:
        """The stretches between those of this union."""
        return Stretches(self.end_ns[:-1], self.start_ns[1:])

    def lengths_ns(self) -> Int64s:
        """The length of each stretch."""
        return made(len(self.start_ns), np.int64, lambda part: self.end_ns[part] - self.start_ns[part])

    def joined(self, other: Stretches) -> Stretches:
        """The union of both."""
        return Stretches(
            joined([self.start_ns, other.start_ns], np.int64), joined([self.end_ns, other.end_ns], np.int64)
        )

    def covered_ns(self, start_ns: Int64s, end_ns: Int64s) -> Int64s:
        """How much of each span [start, end) is inside the union. Shapes `(n,)`."""
        return self._until(end_ns) - self._until(start_ns)

    def _until(self, ts_ns: Int64s) -> Int64s:
        """The length of the union before each time. Shapes `(n,)`."""
        if not len(self.start_ns):
            return np.zeros(len(ts_ns), np.int64)
        at = np.searchsorted(self.start_ns, ts_ns, "right")
        last = np.maximum(at - 1, 0)
        inside = np.minimum(ts_ns, self.end_ns[last]) - self.start_ns[last]
        return np.where(at == 0, 0, self._before_ns[last] + inside)


def nothing() -> Stretches:
    """The empty union."""
    return Stretches(np.zeros(0, np.int64), np.zeros(0, np.int64))


def most_at_once(start_ns: Ints, end_ns: Ints) -> int:
    """The most stretches at one time; one that ends when another starts does not overlap it. Both columns,
    shapes `(n,)`, are sorted in place.
    """
    start_ns.sort()
    end_ns.sort()
    most = 0
    for part in parts(len(start_ns)):
        started = np.arange(part.start + 1, part.stop + 1)
        most = max(most, int((started - np.searchsorted(end_ns, start_ns[part], "right")).max()))
    return most
