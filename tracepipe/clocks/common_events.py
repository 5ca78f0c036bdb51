"""Events that several recordings have: their times relate the clocks better than any anchor.

A launch call has the number that CUPTI gave it in the files of all tools. A collective has the number that
its process group gave it in the file of every rank, and ends for all ranks at nearly the same time. Calls
without a number are matched by thread and name, where an anchor tells the approximate time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from tracepipe.clocks.maps import ClockPair, Pairs
from tracepipe.event.columns import NONE, Bools, Int64s

CELL_BITS: Final = 30
"""The calls of a thread and name are kept for about a second (2³⁰ ns) each: a cell."""
CALLS_KEPT_MAX: Final = 1 << 12
# At most this many calls of a cell are kept, its first ones: these take 13 ms or more, as calls that are
# compared are 50 µs apart.
_OF_CELL_MAX: Final = 1 << 8
# How far an anchor may be off.
_REACH_NS: Final = 50_000
# A call this near to another one of its cell could be mistaken for it, and is not compared.
_ALONE_NS: Final = 50_000
# Offsets are searched within this distance. No anchor within one host was off by that much.
_SURE_NS: Final = 1_050_000
# Around the most common offset, the times of two tools for the same calls differ by at most this.
_WIDTH_NS: Final = 8_000
# The most common offset must be found at least this many times as often as any other.
_CLEAR: Final = 4
_CALLS_LEAST: Final = 8


class Times:
    """Times by cell. All recordings keep the same cells, of those that they have."""

    def __init__(self) -> None:
        self._times: Int64s = np.empty((2, 0), np.int64)
        """The cells and the times."""
        self._new: list[Int64s] = []
        self._new_count = 0

    def add(self, cells: Int64s, ns: Int64s) -> None:
        """Add times in cells. The numbers of cells are hashes."""
        if self._times.shape[1] == CALLS_KEPT_MAX:
            may_stay = cells <= self._times[0, -1]
            cells, ns = cells[may_stay], ns[may_stay]
        if len(cells):
            self._new.append(np.stack([cells, ns]))
            self._new_count += len(cells)
        # Not after each batch, as sorting everything for a few calls would be slow.
        if self._new_count >= CALLS_KEPT_MAX:
            self._choose()

    def _choose(self) -> None:
        """Choose which of the added times to keep."""
        times = np.hstack([self._times, *self._new])
        times = times[:, np.lexsort(times[::-1])]
        places = np.arange(times.shape[1])
        firsts = np.maximum.accumulate(np.where(_differs(times[0]), places, 0))
        self._times = times[:, np.flatnonzero(places - firsts < _OF_CELL_MAX)[:CALLS_KEPT_MAX]]
        self._new, self._new_count = [], 0

    def alone(self) -> tuple[Int64s, Int64s]:
        """The cells and times, in order, of calls that no other call of their cell is near to."""
        self._choose()
        cells, ns = self._times
        is_apart = _differs(cells) | (np.diff(ns, prepend=ns[:1]) > _ALONE_NS)
        is_alone = is_apart & np.append(is_apart[1:], True)
        return cells[is_alone], ns[is_alone]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The begins and the ends of a recording's calls."""

    begins: Times = field(default_factory=Times)
    ends: Times = field(default_factory=Times)


def between(one: CallTimes, other: CallTimes, near_ns: int) -> tuple[int, int, int] | None:
    """By how much the times of `one` are ahead of those of `other`, near `near_ns`: the least, the most, and
    the number of calls. None where the calls do not show it.

    One tool records calls from the inside: there each begins later and ends earlier, so the true difference
    is between that of the begins and that of the ends. One in ten calls may disagree.
    """
    begins, ends = (
        _commonest(_ahead(its.alone(), others.alone(), near_ns))
        for its, others in ((one.begins, other.begins), (one.ends, other.ends))
    )
    if begins is None or ends is None:
        return None
    is_inside = begins[len(begins) // 2] >= ends[len(ends) // 2]
    most, least = (begins, ends) if is_inside else (ends, begins)
    limits = int(least[(9 * len(least) - 1) // 10]), int(most[len(most) // 10])
    return near_ns + min(limits), near_ns + max(limits), min(len(begins), len(ends))


def _differs(cells: Int64s) -> Bools:
    """Flags each that is of a different cell than the one before."""
    return np.append(np.ones(min(len(cells), 1), np.bool_), cells[1:] != cells[:-1])


def _ahead(one: tuple[Int64s, Int64s], other: tuple[Int64s, Int64s], near_ns: int) -> Int64s:
    """The lead of each time over the near times of the same cell, minus `near_ns`; in order."""
    (cells, ns), (other_cells, other_ns) = one, other
    found = [np.empty(0, np.int64)]
    for cell in np.intersect1d(cells, other_cells).tolist():
        its, others = (
            of[np.searchsorted(by, cell, "left") : np.searchsorted(by, cell, "right")]
            for by, of in ((cells, ns), (other_cells, other_ns))
        )
        ahead_ns = (its[:, None] - others[None, :]).ravel() - near_ns
        found.append(ahead_ns[np.abs(ahead_ns) <= _SURE_NS])
    return np.sort(np.concatenate(found))


def _commonest(ahead_ns: Int64s) -> Int64s | None:
    """The differences around the most common one; None where they are few or far off, or not clear."""
    if len(ahead_ns) < _CALLS_LEAST:
        return None
    counts = np.searchsorted(ahead_ns, ahead_ns + _WIDTH_NS, "right") - np.arange(len(ahead_ns))
    at = int(counts.argmax())
    count = int(counts[at])
    rivals = counts[np.abs(ahead_ns - ahead_ns[at]) > _WIDTH_NS]
    middle_ns = ahead_ns[at + count // 2]
    if count < max(_CALLS_LEAST, _CLEAR * int(rivals.max(initial=0))) or abs(middle_ns) > _REACH_NS:
        return None
    around: Int64s = ahead_ns[np.abs(ahead_ns - middle_ns) <= _WIDTH_NS]
    return around


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


class EventsByKey:
    """Times and lengths by key. A key that comes twice in a recording is not used."""

    def __init__(self) -> None:
        self._events = np.empty((3, 0), np.int64)

    def add(self, keys: Int64s, ns: Int64s, lengths_ns: Int64s) -> None:
        """Add events by their keys, which are hashes. NONE is a length that is not known."""
        events = np.hstack([self._events, np.stack([keys, ns, lengths_ns])])
        self._events = events[:, np.argsort(events[0], kind="stable")[:KEPT_MAX]]

    def once(self) -> tuple[Int64s, Int64s, Int64s]:
        """Keys that came once, in order, their times and their lengths."""
        keys = self._events[0]
        is_new = np.diff(keys, prepend=keys[:1] - 1) != 0
        keys, ns, lengths_ns = self._events[:, is_new & np.append(is_new[1:], True)]
        return keys, ns, lengths_ns


@dataclass(frozen=True, slots=True)
class CommonEvents:
    """The events of a recording that others may have too. `tool` wrote it."""

    tool: str = ""
    launches: EventsByKey = field(default_factory=EventsByKey)
    calls: CallTimes = field(default_factory=CallTimes)
    kernels: CallTimes = field(default_factory=CallTimes)
    """Calls that launch kernels, by process and the kernel's name, after which some tools name them."""
    collectives: EventsByKey = field(default_factory=EventsByKey)


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
    one: CommonEvents, other: CommonEvents, *, may_be_one_host: bool, near_ns: int | None = None
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


def _agreement(one: EventsByKey, other: EventsByKey, spread_ns: int, of: str) -> Agreement | None:
    (keys, ns, lengths_ns), (other_keys, other_ns, other_lengths_ns) = one.once(), other.once()
    _, at, to = np.intersect1d(keys, other_keys, assume_unique=True, return_indices=True)
    if len(at) < _LEAST:
        return None
    at, to = at[order := np.argsort(ns[at], kind="stable")], to[order]
    matched = np.stack([ns[at], ns[at] - other_ns[to], lengths_ns[at], other_lengths_ns[to]])
    ahead_ns, apart_ns, bound_ns = _lead(matched)
    pairs, is_even = _over_time(matched, spread_ns), apart_ns <= spread_ns
    return Agreement(ahead_ns, bound_ns, len(at), of, pairs, is_even) if is_even or pairs else None


def _lead(matched: Int64s) -> tuple[int, int, int]:
    """By how much one recording is ahead of another, the spread of nine of ten begins, and the bound of the
    result.

    The columns of events that both have: their times in the one, by how much these are ahead of the other,
    and the lengths in both, NONE where they are not known. Shape `(4, events)`.
    """
    _, ahead_ns, lengths_ns, other_lengths_ns = matched
    middle_ns, spread_ns = _middle(ahead_ns)
    timed = (lengths_ns != NONE) & (other_lengths_ns != NONE)
    if 2 * np.count_nonzero(timed) < len(timed):
        return middle_ns, spread_ns, spread_ns + NOTED_NS
    end_ns, of_ends_ns = _middle((ahead_ns + lengths_ns - other_lengths_ns)[timed])
    apart_ns = (abs(end_ns - middle_ns) + 1) // 2
    return (middle_ns + end_ns) // 2, spread_ns, max(spread_ns, of_ends_ns) + apart_ns


def _over_time(matched: Int64s, spread_ns: int) -> Pairs | None:
    """A pair for each part of the events, whose columns are as in `_lead`; None where there are few, or where
    most parts are inconsistent.
    """
    of_all = matched.shape[1]
    count = of_all // _OF_PART
    if count < _PARTS_LEAST:
        return None
    limits = [of_all * at // count for at in range(count + 1)]
    drifted_ns = _drifted_ns(matched[0], matched[1], limits)
    rest = matched.copy()
    rest[1] -= drifted_ns
    found = []
    for start, stop in pairwise(limits):
        ahead_ns, apart_ns, bound_ns = _lead(rest[:, start:stop])
        at = (start + stop) // 2
        if apart_ns <= spread_ns:
            ns = int(matched[0, at])
            found.append(ClockPair(ns, ns - ahead_ns - int(drifted_ns[at]), bound_ns))
    return Pairs.of(found) if 2 * len(found) > count else None


def _drifted_ns(at_ns: Int64s, ahead_ns: Int64s, limits: Sequence[int]) -> Int64s:
    """The lead that the one gains by each time, at the median rate between the halves of the parts."""
    ns = (at_ns - at_ns[0]).astype(np.float64)
    # With an even number of events, the median lies between two of them in both columns: one of the two would
    # be the earlier event where the clock gains, and the later one where it loses.
    middles_ns, parts_ns = (
        np.array([np.median(column[start:stop]) for start, stop in pairwise(limits)])
        for column in (ahead_ns - ahead_ns[0], ns)
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
