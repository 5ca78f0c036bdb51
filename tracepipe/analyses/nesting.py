"""Which rows of a layer are inside which."""

from __future__ import annotations

from collections.abc import Iterator

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, Ints
from tracepipe.libraries import np
from tracepipe.store.run import Layer

# The most callers that are followed one by one: most calls have few.
_CLIMBED_MAX = 32


def nearest_of(parents: Int32s, wanted: Bools) -> Int32s:
    """For each row, the row itself if it is wanted, else the innermost wanted row around it, else NONE.

    `parents` has the row of the innermost caller of each row, or NONE, and `wanted` a flag for each row.
    Shapes `(rows,)`.
    """
    count = len(parents)
    # The last place is for NONE. Each round doubles the distance, so a deep recursion needs few rounds.
    to: Int32s = np.empty(count + 1, np.int32)
    to[:-1] = np.where(parents == NONE, count, parents)
    to[-1] = count
    rows = np.flatnonzero(wanted)
    to[rows] = rows
    while not np.array_equal(further := to[to], to):
        to = further
    return np.where(to[:-1] == count, np.int32(NONE), to[:-1])


def nearest_of_some(parents: Int32s, wanted: Bools, rows: Ints) -> Int64s:
    """Like `nearest_of`, for some rows. `rows` and the result have the shape `(n,)`."""
    found: Int64s = rows.astype(np.int64)
    climbing = np.flatnonzero(~wanted[found])
    for _ in range(_CLIMBED_MAX):
        found[climbing] = parents[found[climbing]]
        climbing = climbing[found[climbing] != NONE]
        climbing = climbing[~wanted[found[climbing]]]
        if not len(climbing):
            return found
    found[climbing] = nearest_of(parents, wanted)[found[climbing]]
    return found


def first_flagged(parents: Int32s, flagged: Bools) -> Bools:
    """Flags the flagged rows that are inside no other flagged row: a runtime call, but not the driver's call
    inside it. Shapes `(rows,)`.
    """
    rows = np.flatnonzero(flagged)
    above = parents[rows]
    rows, above = rows[above != NONE], above[above != NONE]
    first = flagged.copy()
    first[rows[nearest_of_some(parents, flagged, above) != NONE]] = False
    return first


def open_at(layer: Layer, rows: Int64s, times_ns: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield indices of some times, and a row that is open then: the innermost of each time, then those around
    it. `rows` are those of one thread, sorted by start. Shapes `(n,)`.
    """
    at = np.searchsorted(layer.start_ns[rows], times_ns, "right") - 1
    some = np.flatnonzero(at >= 0)
    inside = rows[at[some]]
    while len(some):
        is_open = layer.end_ns[inside] > times_ns[some]
        yield some[is_open], inside[is_open]
        inside = layer.parent[inside].astype(np.int64)
        some, inside = some[inside != NONE], inside[inside != NONE]
