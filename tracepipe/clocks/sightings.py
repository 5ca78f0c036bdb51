"""What several recordings have of the same events: their times relate the clocks better than any anchor.

A launch call has the number that CUPTI gave it in the files of all tools. A collective has the number that
its process group gave it in the file of every rank, and ends for all ranks at nearly the same time. Calls
without a number are matched by thread and name, where an anchor tells the approximate time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np

from tracepipe.clocks.call_times import CallTimes, between
from tracepipe.clocks.pairs import ClockPair, Pairs
from tracepipe.event.columns import NONE, Int64s

# This many are kept of a recording, those with the smallest keys, so that all recordings keep the same ones.
KEPT_MAX: Final = 1 << 13
_LEAST: Final = 8
# How much later than another tool a tool may record the begin of a call whose length one of them does not
# have.
NOTED_NS: Final = 1_000
# The number of common events that make one pair, and the fewest pairs that show a drift.
_OF_PART: Final = 8
_PARTS_LEAST: Final = 8
# Nine of ten must agree this well, or they are not the same events.
LAUNCH_SPREAD_NS: Final = 200_000
COLLECTIVE_SPREAD_NS: Final = 5_000_000


class Sightings:
    """Times and lengths by key. A key that comes twice in a recording is not used."""

    def __init__(self) -> None:
        self._keys: Int64s = np.empty(0, np.int64)
        self._ns: Int64s = np.empty(0, np.int64)
        self._lengths_ns: Int64s = np.empty(0, np.int64)

    def add(self, keys: Int64s, ns: Int64s, lengths_ns: Int64s) -> None:
        """Add events by their keys, which are hashes. NONE is a length that is not known."""
        keys, ns = np.concatenate([self._keys, keys]), np.concatenate([self._ns, ns])
        lengths_ns = np.concatenate([self._lengths_ns, lengths_ns])
        order = np.argsort(keys, kind="stable")[:KEPT_MAX]
        self._keys, self._ns, self._lengths_ns = keys[order], ns[order], lengths_ns[order]

    def once(self) -> tuple[Int64s, Int64s, Int64s]:
        """Keys that came once, in order, their times and their lengths."""
        is_new = np.diff(self._keys, prepend=self._keys[:1] - 1) != 0
        is_once = is_new & np.append(is_new[1:], True)
        return self._keys[is_once], self._ns[is_once], self._lengths_ns[is_once]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a recording has that others may have too. `tool` wrote it."""

    tool: str = ""
    launches: Sightings = field(default_factory=Sightings)
    calls: CallTimes = field(default_factory=CallTimes)
    kernels: CallTimes = field(default_factory=CallTimes)
    """Calls that launch kernels, by process and the kernel's name, after which some tools name them."""
    collectives: Sightings = field(default_factory=Sightings)


@dataclass(frozen=True, slots=True)
class Agreement:
    """By how much one recording is ahead of another, from `count` events that both have.

    For launches and collectives, nine of ten residuals are within `bound_ns`. This includes that tools record
    the same call differently: one sees it from the inside, so the true difference is between that of the
    begins and that of the ends. `pairs` are the same for parts of the time, as the clocks may drift apart:
    source is the clock of the one, host that of the other; None where there are too few. `is_even` is whether
    one offset is good enough without them.
    """

    ahead_ns: int
    bound_ns: int
    count: int
    of: str
    pairs: Pairs | None = None
    is_even: bool = True


def agreement(
    one: Seen, other: Seen, *, may_be_one_host: bool, near_ns: int | None = None
) -> Agreement | None:
    """By how much the times of `one` are ahead of those of `other`; None where that cannot be found. Calls
    are compared where `near_ns` is given, the approximate difference.
    """
    if may_be_one_host and one.tool != other.tool:
        found = _agreement(one.launches, other.launches, LAUNCH_SPREAD_NS, "launches")
        if found is not None:
            return found
        by_name = ((one.calls, other.calls, "calls"), (one.kernels, other.kernels, "launches by kernel"))
        for its, others, of in by_name:
            if near_ns is not None and (limits := between(its, others, near_ns)) is not None:
                least_ns, most_ns, count = limits
                return Agreement((least_ns + most_ns) // 2, (most_ns - least_ns + 1) // 2, count, of)
    return _agreement(one.collectives, other.collectives, COLLECTIVE_SPREAD_NS, "collectives")


@dataclass(frozen=True, slots=True)
class _Common:
    """Events that two recordings have: their times in the one, by how much these are ahead of the other, and
    the lengths in both, NONE where they are not known.
    """

    ns: Int64s
    ahead_ns: Int64s
    lengths_ns: Int64s
    other_lengths_ns: Int64s

    @classmethod
    def of(cls, one: Sightings, other: Sightings) -> _Common:
        (keys, ns, lengths_ns), (other_keys, other_ns, other_lengths_ns) = one.once(), other.once()
        _, at, to = np.intersect1d(keys, other_keys, assume_unique=True, return_indices=True)
        at, to = at[order := np.argsort(ns[at], kind="stable")], to[order]
        return cls(ns[at], ns[at] - other_ns[to], lengths_ns[at], other_lengths_ns[to])

    def __len__(self) -> int:
        return len(self.ns)

    def part(self, start: int, stop: int) -> _Common:
        """Some that follow each other in time."""
        part = slice(start, stop)
        return _Common(self.ns[part], self.ahead_ns[part], self.lengths_ns[part], self.other_lengths_ns[part])

    def middle(self) -> tuple[int, int, int]:
        """By how much the one is ahead, the spread of nine of ten begins, and the bound of the result."""
        middle_ns, spread_ns = _middle(self.ahead_ns)
        timed = (self.lengths_ns != NONE) & (self.other_lengths_ns != NONE)
        if 2 * np.count_nonzero(timed) < len(self):
            return middle_ns, spread_ns, spread_ns + NOTED_NS
        ends_ns = (self.ahead_ns + self.lengths_ns - self.other_lengths_ns)[timed]
        end_ns, of_ends_ns = _middle(ends_ns)
        apart_ns = (abs(end_ns - middle_ns) + 1) // 2
        return (middle_ns + end_ns) // 2, spread_ns, max(spread_ns, of_ends_ns) + apart_ns


def _agreement(one: Sightings, other: Sightings, spread_ns: int, of: str) -> Agreement | None:
    common = _Common.of(one, other)
    if len(common) < _LEAST:
        return None
    ahead_ns, apart_ns, bound_ns = common.middle()
    pairs, is_even = _over_time(common, spread_ns), apart_ns <= spread_ns
    return Agreement(ahead_ns, bound_ns, len(common), of, pairs, is_even) if is_even or pairs else None


def _over_time(common: _Common, spread_ns: int) -> Pairs | None:
    """A pair for each part of the events, with the same number in each; None where there are few, or where
    most parts are inconsistent.
    """
    count = len(common) // _OF_PART
    if count < _PARTS_LEAST:
        return None
    limits = [len(common) * at // count for at in range(count + 1)]
    drifted_ns = _drifted_ns(common, limits)
    rest = replace(common, ahead_ns=common.ahead_ns - drifted_ns)
    found = []
    for start, stop in pairwise(limits):
        part = rest.part(start, stop)
        ahead_ns, apart_ns, bound_ns = part.middle()
        at = (start + stop) // 2
        if apart_ns <= spread_ns:
            ns = int(common.ns[at])
            found.append(ClockPair(ns, ns - ahead_ns - int(drifted_ns[at]), bound_ns))
    return Pairs.of(found) if 2 * len(found) > count else None


def _drifted_ns(common: _Common, limits: Sequence[int]) -> Int64s:
    """How much further the one is ahead at each time because of its rate. This is the median rate between the
    halves of the parts, as some parts are wrong.
    """
    ns = (common.ns - common.ns[0]).astype(np.float64)
    # With an even number of events, the median lies between two of them in both columns: one of the two would
    # be the earlier event where the clock gains, and the later one where it loses.
    middles_ns, parts_ns = (
        np.array([np.median(column[start:stop]) for start, stop in pairwise(limits)])
        for column in (common.ahead_ns - common.ahead_ns[0], ns)
    )
    half = len(middles_ns) // 2
    passed_ns = parts_ns[half:] - parts_ns[: len(parts_ns) - half]
    gained_ns = middles_ns[half:] - middles_ns[: len(middles_ns) - half]
    drifted_ns: Int64s = np.rint(ns * np.median(gained_ns / np.maximum(passed_ns, 1))).astype(np.int64)
    return drifted_ns


def _middle(ahead_ns: Int64s) -> tuple[int, int]:
    """The median, and the distance from it within which nine of ten are."""
    count = len(ahead_ns)
    middle_ns = int(np.sort(ahead_ns)[count // 2])
    return middle_ns, int(np.sort(np.abs(ahead_ns - middle_ns))[(9 * count - 1) // 10])
