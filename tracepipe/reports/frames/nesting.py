"""Who is inside whom among the rows of a layer."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.reports.frames.libraries import np

NOBODY = NONE
# Callers that are climbed to one after the other: most calls have few.
_CLIMBED_MAX = 32


def nearest_of(parents: Int32s, wanted: Bools) -> Int32s:
    """For each row the wanted one that it is or is in, the innermost; NOBODY without one.

    `parents` are the rows of the next around each, NOBODY for none; `wanted` has a boolean for each row.
    """
    count = len(parents)
    # The last place stands for nobody. Each round looks twice as far up: a deep recursion needs few.
    to: Int32s = np.empty(count + 1, np.int32)
    to[:-1] = np.where(parents == NOBODY, count, parents)
    to[-1] = count
    rows = np.flatnonzero(wanted)
    to[rows] = rows
    while not np.array_equal(further := to[to], to):
        to = further
    return np.where(to[:-1] == count, np.int32(NOBODY), to[:-1])


def nearest_of_some(parents: Int32s, wanted: Bools, rows: Any) -> Int64s:
    """As `nearest_of`, for some rows alone."""
    found: Int64s = rows.astype(np.int64)
    climbing = np.flatnonzero(~wanted[found])
    for _ in range(_CLIMBED_MAX):
        found[climbing] = parents[found[climbing]]
        climbing = climbing[found[climbing] != NOBODY]
        climbing = climbing[~wanted[found[climbing]]]
        if not len(climbing):
            return found
    found[climbing] = nearest_of(parents, wanted)[found[climbing]]
    return found


def first_flagged(parents: Int32s, flagged: Bools) -> Bools:
    """The flagged rows that are in no other flagged one: a runtime's call, and not the driver's inside it."""
    rows = np.flatnonzero(flagged)
    above = parents[rows]
    rows, above = rows[above != NOBODY], above[above != NOBODY]
    first = flagged.copy()
    first[rows[nearest_of_some(parents, flagged, above) != NOBODY]] = False
    return first
