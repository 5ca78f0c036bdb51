"""What several recordings saw of one thing: its times in each relate their clocks better than any anchor.

A launch call has the number that CUPTI gave it, in whatever tool's file; a collective has the number that its
process group gave it, in the file of every rank, and ends for all of them at nearly one time. Calls without a
number are those of a thread and name, where an anchor says about when.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tracepipe.clocks.call_times import CallTimes, between
from tracepipe.event.columns import NONE, Int64s

# So many are kept of a recording, those with the smallest keys: other recordings keep the same ones.
KEPT_MAX: Final = 1 << 13
_LEAST: Final = 8
# How much later than another one tool may note the begin of a call whose length one of them does not say.
NOTED_NS: Final = 1_000
# Nine of ten must agree so well, or they are not the same things.
LAUNCH_SPREAD_NS: Final = 200_000
COLLECTIVE_SPREAD_NS: Final = 5_000_000


class Sightings:
    """Times and lengths by key. A key that comes twice in a recording says nothing."""

    def __init__(self) -> None:
        self._keys: Int64s = np.empty(0, np.int64)
        self._ns: Int64s = np.empty(0, np.int64)
        self._lengths_ns: Int64s = np.empty(0, np.int64)

    def add(self, keys: Int64s, ns: Int64s, lengths_ns: Int64s) -> None:
        """Add what was seen, by keys that are spread over all numbers; NONE is a length that is not known."""
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
    """What a recording saw that others may have seen too; `tool` wrote it."""

    tool: str = ""
    launches: Sightings = field(default_factory=Sightings)
    calls: CallTimes = field(default_factory=CallTimes)
    collectives: Sightings = field(default_factory=Sightings)


@dataclass(frozen=True, slots=True)
class Agreement:
    """By how much one recording is ahead of another, from `count` things that both saw.

    Of launches and collectives, nine of ten residuals are within `bound_ns`. It includes what the tools note
    of the same call: one sees it from the inside, so that the truth lies between the difference of the begins
    and that of the ends.
    """

    ahead_ns: int
    bound_ns: int
    count: int
    of: str


def agreement(
    one: Seen, other: Seen, *, may_be_one_host: bool, near_ns: int | None = None
) -> Agreement | None:
    """By how much the times of `one` are ahead of those of `other`; None where they do not say it. Calls are
    compared where `near_ns` says by how much about.
    """
    if may_be_one_host and one.tool != other.tool:
        found = _agreement(one.launches, other.launches, LAUNCH_SPREAD_NS, "launches")
        if found is not None:
            return found
        if near_ns is not None and (limits := between(one.calls, other.calls, near_ns)) is not None:
            least_ns, most_ns, count = limits
            return Agreement((least_ns + most_ns) // 2, (most_ns - least_ns + 1) // 2, count, "calls")
    return _agreement(one.collectives, other.collectives, COLLECTIVE_SPREAD_NS, "collectives")


def _agreement(one: Sightings, other: Sightings, spread_ns: int, of: str) -> Agreement | None:
    (keys, ns, lengths_ns), (other_keys, other_ns, other_lengths_ns) = one.once(), other.once()
    if not len(keys) or not len(other_keys):
        return None
    at = np.minimum(np.searchsorted(other_keys, keys), len(other_keys) - 1)
    same = other_keys[at] == keys
    ahead_ns, lengths_ns, other_lengths_ns = (
        ns[same] - other_ns[at[same]],
        lengths_ns[same],
        other_lengths_ns[at[same]],
    )
    if len(ahead_ns) < _LEAST:
        return None
    middle_ns, bound_ns = _middle(ahead_ns)
    if bound_ns > spread_ns:
        return None
    timed = (lengths_ns != NONE) & (other_lengths_ns != NONE)
    if 2 * np.count_nonzero(timed) < len(ahead_ns):
        return Agreement(middle_ns, bound_ns + NOTED_NS, len(ahead_ns), of)
    end_ns, of_ends_ns = _middle((ahead_ns + lengths_ns - other_lengths_ns)[timed])
    apart_ns = (abs(end_ns - middle_ns) + 1) // 2
    return Agreement((middle_ns + end_ns) // 2, max(bound_ns, of_ends_ns) + apart_ns, len(ahead_ns), of)


def _middle(ahead_ns: Int64s) -> tuple[int, int]:
    """The median, and within what of it nine of ten are."""
    count = len(ahead_ns)
    middle_ns = int(np.sort(ahead_ns)[count // 2])
    return middle_ns, int(np.sort(np.abs(ahead_ns - middle_ns))[(9 * count - 1) // 10])
