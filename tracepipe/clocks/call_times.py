"""When calls began and ended, by thread and name, for calls that have no common number in several recordings.

The calls of two recordings are matched by the offset at which most of them are the same. A loop that calls a
function at a regular pace has many such offsets. Then nothing is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tracepipe.event.columns import Bools, Int64s

CELL_BITS: Final = 30
"""The calls of a thread and name are kept for about a second (2³⁰ ns) each: a cell."""
KEPT_MAX: Final = 1 << 12
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
_LEAST: Final = 8


class Times:
    """Times by cell. All recordings keep the same cells, of those that they have."""

    def __init__(self) -> None:
        self._cells: Int64s = np.empty(0, np.int64)
        self._ns: Int64s = np.empty(0, np.int64)
        self._new: list[tuple[Int64s, Int64s]] = []
        self._new_count = 0

    def add(self, cells: Int64s, ns: Int64s) -> None:
        """Add times in cells. The numbers of cells are hashes."""
        if len(self._cells) == KEPT_MAX:
            may_stay = cells <= self._cells[-1]
            cells, ns = cells[may_stay], ns[may_stay]
        if len(cells):
            self._new.append((cells, ns))
            self._new_count += len(cells)
        # Not after each batch, as sorting everything for a few calls would be slow.
        if self._new_count >= KEPT_MAX:
            self._choose()

    def _choose(self) -> None:
        """Choose which of the added times to keep."""
        both = [(self._cells, self._ns), *self._new]
        cells, ns = (np.concatenate(columns) for columns in zip(*both, strict=True))
        order = np.lexsort((ns, cells))
        cells, ns = cells[order], ns[order]
        places = np.arange(len(cells))
        firsts = np.maximum.accumulate(np.where(_differs(cells), places, 0))
        stay = np.flatnonzero(places - firsts < _OF_CELL_MAX)[:KEPT_MAX]
        self._cells, self._ns = cells[stay], ns[stay]
        self._new, self._new_count = [], 0

    def alone(self) -> tuple[Int64s, Int64s]:
        """The cells and times, in order, of calls that no other call of their cell is near to."""
        self._choose()
        is_apart = _differs(self._cells) | (np.diff(self._ns, prepend=self._ns[:1]) > _ALONE_NS)
        is_alone = is_apart & np.append(is_apart[1:], True)
        return self._cells[is_alone], self._ns[is_alone]


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
    """Whether each is of a different cell than the one before."""
    return np.append(np.ones(min(len(cells), 1), np.bool_), cells[1:] != cells[:-1])


def _ahead(one: tuple[Int64s, Int64s], other: tuple[Int64s, Int64s], near_ns: int) -> Int64s:
    """How far each time is ahead of the near times of the same cell, minus `near_ns`; in order."""
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
    """The differences around the most common one; None where they are few or far off, or where another
    difference is nearly as common.
    """
    if len(ahead_ns) < _LEAST:
        return None
    counts = np.searchsorted(ahead_ns, ahead_ns + _WIDTH_NS, "right") - np.arange(len(ahead_ns))
    at = int(counts.argmax())
    count = int(counts[at])
    rivals = counts[np.abs(ahead_ns - ahead_ns[at]) > _WIDTH_NS]
    middle_ns = ahead_ns[at + count // 2]
    if count < max(_LEAST, _CLEAR * int(rivals.max(initial=0))) or abs(middle_ns) > _REACH_NS:
        return None
    around: Int64s = ahead_ns[np.abs(ahead_ns - middle_ns) <= _WIDTH_NS]
    return around
