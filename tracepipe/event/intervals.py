"""Stretches of time as sorted columns: their union, the gaps between them, and how much of a span
they cover.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from tracepipe.event.columns import Int64s, Ints
from tracepipe.event.groups import count_earlier


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
    if not len(start_ns):
        none = np.zeros(0, np.int64)
        return Gaps(none, none, none, none)
    # The latest end so far, and the first stretch that has it.
    until_ns = np.maximum.accumulate(end_ns)
    before_ns = until_ns[:-1]
    reached = np.where(np.concatenate(([True], end_ns[1:] > before_ns)), np.arange(len(end_ns)), 0)
    latest = np.maximum.accumulate(reached)
    following = np.flatnonzero(start_ns[1:] > before_ns) + 1
    return Gaps(until_ns[following - 1], start_ns[following], latest[following - 1], following)


class Stretches:
    """The union of half-open stretches [start, end) in ns. Columns have the shape `(n,)`."""

    def __init__(self, start_ns: Int64s, end_ns: Int64s) -> None:
        lasts = end_ns > start_ns
        start_ns, end_ns = start_ns[lasts], end_ns[lasts]
        if bool((start_ns[1:] < start_ns[:-1]).any()):
            order = np.argsort(start_ns, kind="stable")
            start_ns, end_ns = start_ns[order], end_ns[order]
        gaps = gaps_between(start_ns, end_ns)
        self.start_ns: Int64s = np.concatenate([start_ns[:1], gaps.end_ns])
        self.end_ns: Int64s = np.concatenate([gaps.start_ns, [end_ns.max()] if len(end_ns) else end_ns])

    @cached_property
    def _before_ns(self) -> Int64s:
        """The sum of the lengths before each stretch, and of all of them."""
        return np.concatenate(([0], np.cumsum(self.end_ns - self.start_ns)))

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
        return self.end_ns - self.start_ns

    def joined(self, other: Stretches) -> Stretches:
        """The union of both."""
        return Stretches(
            np.concatenate([self.start_ns, other.start_ns]), np.concatenate([self.end_ns, other.end_ns])
        )

    def covered_ns(self, start_ns: Int64s, end_ns: Int64s) -> Int64s:
        """How much of each span [start, end) is inside the union. Shapes `(n,)`."""
        return self._until(end_ns) - self._until(start_ns)

    def uncovered_ns(self, start_ns: Int64s, end_ns: Int64s) -> Int64s:
        """How much of each span [start, end) is outside the union. Shapes `(n,)`."""
        return end_ns - start_ns - self.covered_ns(start_ns, end_ns)

    def _until(self, ts_ns: Int64s) -> Int64s:
        """The length of the union before each time. Shapes `(n,)`."""
        if not len(self.start_ns):
            return np.zeros(len(ts_ns), np.int64)
        at = np.searchsorted(self.start_ns, ts_ns, "right")
        last = np.maximum(at - 1, 0)
        inside = np.minimum(ts_ns, self.end_ns[last]) - self.start_ns[last]
        return np.where(at == 0, 0, self._before_ns[last] + inside)


def pieces(
    inside_ns: Int64s, until_ns: Int64s, start_ns: Int64s, end_ns: Int64s
) -> tuple[Ints, Int64s, Int64s]:
    """The parts of spans [start, end) that are inside others [inside, until), which are sorted, and do not
    overlap: the index of the span of each, and its start and end. Shapes `(parts,)`.
    """
    first = np.searchsorted(until_ns, start_ns, "right")
    count = np.maximum(np.searchsorted(inside_ns, end_ns) - first, 0)
    rows = np.repeat(np.arange(len(start_ns)), count)
    at = first[rows] + count_earlier(rows)
    from_ns, to_ns = np.maximum(start_ns[rows], inside_ns[at]), np.minimum(end_ns[rows], until_ns[at])
    some = np.flatnonzero(to_ns > from_ns)
    return rows[some], from_ns[some], to_ns[some]


def nothing() -> Stretches:
    """The empty union."""
    return Stretches(np.zeros(0, np.int64), np.zeros(0, np.int64))


def most_at_once(start_ns: Ints, end_ns: Ints) -> int:
    """The most stretches at one time; one that ends when another starts does not overlap it. Shapes
    `(n,)`.
    """
    if not len(start_ns):
        return 0
    starts_ns, ends_ns = np.sort(start_ns), np.sort(end_ns)
    started = np.arange(1, len(starts_ns) + 1)
    return int((started - np.searchsorted(ends_ns, starts_ns, "right")).max())
